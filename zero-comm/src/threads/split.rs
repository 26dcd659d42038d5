//! Splits of a world: the ranks' host threads exchange colors and keys.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use zero_alloc::host::Monitor;

use super::shared::Shared;
use crate::CommError;
use crate::split_request::{SplitRequest, members};

#[derive(Default)]
struct Turn {
    requests: Vec<Option<SplitRequest>>,
    children: HashMap<u64, Arc<Shared>>,
    answered: usize,
    failure: Option<CommError>,
}

/// The running splits, by number.
#[derive(Default)]
pub(super) struct Splits(Mutex<HashMap<u64, Arc<Monitor<Turn>>>>);

impl Splits {
    fn open(&self) -> Vec<Arc<Monitor<Turn>>> {
        self.0.lock().values().cloned().collect()
    }

    /// Fails all running splits.
    pub(super) fn fail(&self, error: &CommError) {
        for turn in self.open() {
            turn.update(|turn| {
                turn.failure.get_or_insert_with(|| error.clone());
            });
        }
    }

    /// Fails the splits that wait for `rank`, which has left.
    pub(super) fn leave(&self, rank: usize) {
        for turn in self.open() {
            turn.update(|turn| {
                if turn.requests[rank].is_none() {
                    turn.failure.get_or_insert_with(|| left(rank));
                }
            });
        }
    }
}

fn left(rank: usize) -> CommError {
    CommError::Peer {
        rank,
        message: "left before a split".to_owned(),
    }
}

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
