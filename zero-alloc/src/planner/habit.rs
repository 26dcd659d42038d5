//! Habits of placing: which of the free ranges is taken, and which end of it.
//!
//! Programs repeat themselves: if bytes had to be moved in one step, the next step leads to the same move,
//! unless something is done otherwise. So after every compaction the planner takes the next habit
//! of a list; one that suits the program leads to no further compaction, and stays. Nothing here depends on sizes
//! or shapes of a particular program.

use super::offsets::{Pick, Side};
use super::planner::{Lifetime, Request};

/// One way of placing.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// A request is large if it is above this part of what is reserved: 2 to this power.
    large_log2: u32,
    /// Where large requests of unknown lifetime go, the first and the second of two, by turns.
    large: [(Side, Pick); 2],
}

const WAYS: [Way; 4] = [
    Way { large_log2: 7, large: [(Side::Low, Pick::Lowest), (Side::High, Pick::Highest)] },
    Way { large_log2: 8, large: [(Side::Low, Pick::Lowest), (Side::High, Pick::Highest)] },
    Way { large_log2: 6, large: [(Side::Low, Pick::Lowest), (Side::High, Pick::Highest)] },
    Way { large_log2: 7, large: [(Side::Low, Pick::Highest), (Side::Low, Pick::Highest)] },
];
/// The way in use.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Habit {
    way: u8,
    turn: u8,
}

impl Habit {
    /// The next of the list.
    pub(super) fn next(self) -> Self {
        Self { way: (self.way + 1) % WAYS.len() as u8, turn: self.turn }
    }

    /// The end and the free range for a request in a space of `reserved_bytes`.
    #[inline]
    pub(super) fn choose(&mut self, request: &Request, reserved_bytes: u64) -> (Side, Pick) {
        match request.lifetime {
            Lifetime::Long => (Side::Low, Pick::Best),
            Lifetime::Short => (Side::High, Pick::Best),
            Lifetime::Unknown => {
                let way = &WAYS[self.way as usize];
                if request.bytes <= reserved_bytes >> way.large_log2 {
                    return (Side::Low, Pick::Best);
                }
                self.turn ^= 1;
                way.large[self.turn as usize]
            }
        }
    }
}
