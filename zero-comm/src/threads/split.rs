//! Splitting a world: the host threads meet, each with its color and key.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use zero_alloc::host::Gate;

use super::shared::Shared;
use crate::CommError;

/// A color, if the rank has one, and its key.
type Wish = (Option<u64>, u64);

#[derive(Default)]
struct Turn {
    wishes: Vec<Option<Wish>>,
    children: HashMap<u64, Arc<Shared>>,
    answered: usize,
    failure: Option<CommError>,
}

/// The splits under way, by their number.
#[derive(Default)]
pub(super) struct Splits(Mutex<HashMap<u64, Arc<Gate<Turn>>>>);

impl Splits {
    fn open(&self) -> Vec<Arc<Gate<Turn>>> {
        self.0.lock().values().cloned().collect()
    }

    /// Ends all splits under way.
    pub(super) fn fail(&self, error: &CommError) {
        for turn in self.open() {
            turn.update(|turn| {
                turn.failure.get_or_insert_with(|| error.clone());
            });
        }
    }

    /// `rank` has left; who waits for it in a split gets an error.
    pub(super) fn leave(&self, rank: usize) {
        for turn in self.open() {
            turn.update(|turn| {
                if turn.wishes[rank].is_none() {
                    turn.failure.get_or_insert_with(|| left(rank));
                }
            });
        }
    }
}

fn left(rank: usize) -> CommError {
    CommError::Peer { rank, message: "left before a split".to_owned() }
}

/// The new rank of `rank` and its new world, when all ranks have said what they wish in split number `number`.
pub(super) fn split(
    shared: &Shared,
    rank: usize,
    number: u64,
    wish: Wish,
) -> Result<Option<(usize, Arc<Shared>)>, CommError> {
    let (n, limit) = (shared.world_size, shared.options.limit);
    let gate = {
        let mut splits = shared.splits.0.lock();
        Arc::clone(
            splits
                .entry(number)
                .or_insert_with(|| Arc::new(Gate::new(Turn { wishes: vec![None; n], ..Turn::default() }))),
        )
    };
    gate.update(|turn| turn.wishes[rank] = Some(wish));
    // Who left or failed before this split was open did not see it.
    if let Some(error) = shared.failure() {
        return Err(error);
    }
    let missing = || gate.update(|turn| turn.wishes.iter().position(Option::is_none));
    if let Some(gone) = missing().filter(|&rank| shared.has_left(rank)) {
        return Err(shared.fail(left(gone)));
    }
    let met = gate.wait_until(limit, String::new, |turn| {
        let wishes: Vec<Wish> = turn.wishes.iter().flatten().copied().collect();
        if wishes.len() == n { Some(Ok(wishes)) } else { turn.failure.clone().map(Err) }
    });
    let wishes = match met {
        Ok(result) => result.map_err(|error| shared.fail(error))?,
        Err(_) => {
            let message = format!("did not come to split {number} within {limit:?}");
            return Err(shared.fail(CommError::Peer { rank: missing().unwrap_or(rank), message }));
        }
    };
    let answer = wish.0.map(|color| {
        let mut members: Vec<(u64, usize)> =
            wishes.iter().enumerate().filter(|(_, w)| w.0 == Some(color)).map(|(r, w)| (w.1, r)).collect();
        members.sort_unstable();
        let new_rank = members.iter().position(|&(_, r)| r == rank).unwrap_or(0);
        let child = gate.update(|turn| {
            let child = turn.children.entry(color);
            Arc::clone(child.or_insert_with(|| Arc::new(Shared::new(members.len(), shared.options))))
        });
        shared.adopt(&child);
        (new_rank, child)
    });
    let last = gate.update(|turn| {
        turn.answered += 1;
        turn.answered == n
    });
    if last {
        shared.splits.0.lock().remove(&number);
    }
    Ok(answer)
}
