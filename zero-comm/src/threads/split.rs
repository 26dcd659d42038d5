//! Splits of a world: the ranks' host threads exchange colors and keys.

use std::sync::Arc;

use zero_alloc::host::Monitor;

use super::shared::{Shared, Turn, left};
use crate::CommError;
use crate::split_request::{SplitRequest, members};

/// Waits until all ranks have called split `number`. Returns `rank`'s new rank and world; `None` if
/// it passed no color.
pub(super) fn split(
    shared: &Shared,
    rank: usize,
    number: u64,
    request: SplitRequest,
) -> Result<Option<(usize, Arc<Shared>)>, CommError> {
    let n = shared.world_size;
    let limit = shared.options.limit;
    let monitor = {
        let mut splits = shared.splits.0.lock();
        Arc::clone(splits.entry(number).or_insert_with(|| {
            Arc::new(Monitor::new(Turn {
                requests: vec![None; n],
                ..Turn::default()
            }))
        }))
    };

    monitor.update(|turn| turn.requests[rank] = Some(request));
    // Ranks that failed or left before this split was opened have not failed it, so check here.
    if let Some(error) = shared.failure() {
        return Err(error);
    }
    let missing = || monitor.update(|turn| turn.requests.iter().position(Option::is_none));
    if let Some(gone) = missing().filter(|&rank| shared.has_left(rank)) {
        return Err(shared.fail(left(gone)));
    }

    let met = monitor.wait_until(limit, String::new, |turn| {
        let requests: Vec<SplitRequest> = turn.requests.iter().flatten().copied().collect();
        if requests.len() == n {
            Some(Ok(requests))
        } else {
            turn.failure.clone().map(Err)
        }
    });

    let requests = match met {
        Ok(result) => result.map_err(|error| shared.fail(error))?,
        Err(_) => {
            let message = format!("did not call split {number} within {limit:?}");
            return Err(shared.fail(CommError::Peer {
                rank: missing().unwrap_or(rank),
                message,
            }));
        }
    };

    let answer = request.color.map(|color| {
        let members = members(&requests, color);
        let new_rank = members
            .iter()
            .position(|&member| member == rank)
            .unwrap_or(0);
        let child = monitor.update(|turn| {
            let child = turn.children.entry(color);
            Arc::clone(
                child.or_insert_with(|| Arc::new(Shared::new(members.len(), shared.options))),
            )
        });
        shared.adopt(&child);
        (new_rank, child)
    });

    let last = monitor.update(|turn| {
        turn.answered += 1;
        turn.answered == n
    });

    if last {
        shared.splits.0.lock().remove(&number);
    }
    Ok(answer)
}
