//! Habits of placing: which of the free ranges is taken, and which end of it.
//!
//! Programs repeat themselves: if bytes had to be moved in one step, the next step leads to the same move, unless
//! something is done otherwise. So after every compaction the planner takes the next habit of a list; one that suits
//! the program leads to no further compaction, and stays. The first believes that what is told to live long does, and
//! gathers it at the low end; the others do not, since what was told may be wrong. What is told to live briefly is
//! placed as if nothing were told: keeping it at the high end moved more bytes (benches/traces/README.md). Nothing here
//! depends on sizes or shapes of a particular program.

use super::offsets::{Pick, Side};
use super::request::{Lifetime, Request};

/// One way of placing.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// A request is large if it is above this part of what is reserved: 2 to this power.
    large_log2: u32,
    /// Where large requests go, the first and the second of two, by turns.
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
pub(super) struct PlacementPolicy {
    /// 0: what lives long goes to the low end, all else by the first way. After that, all go by way 1, 2, ...
    place: u8,
    turn: u8,
    /// Something was told to live long.
    told_long: bool,
}

impl PlacementPolicy {
    /// The next of the list.
    pub(super) fn next(self) -> Self {
        // Where nothing was, the first two are the same.
        let step = if self.place == 0 && !self.told_long { 2 } else { 1 };
        Self { place: (self.place + step) % (WAYS.len() as u8 + 1), ..self }
    }

    /// The end and the free range for a request in a space of `reserved_bytes`.
    #[inline]
    pub(super) fn choose(&mut self, request: &Request, reserved_bytes: u64) -> (Side, Pick) {
        self.told_long |= request.lifetime == Lifetime::Long;
        let way = &WAYS[self.place.saturating_sub(1) as usize];
        let gathered = request.lifetime == Lifetime::Long && self.place == 0;
        if gathered || request.bytes <= reserved_bytes >> way.large_log2 {
            return (Side::Low, Pick::Best);
        }
        self.turn ^= 1;
        way.large[self.turn as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESERVED: u64 = 1 << 30;

    fn sides(habit: &mut PlacementPolicy, lifetime: Lifetime) -> [Side; 2] {
        let large = Request { lifetime, ..Request::new(RESERVED / 2) };
        [0; 2].map(|_| habit.choose(&large, RESERVED).0)
    }

    #[test]
    fn what_is_told_to_live_long_is_gathered_until_that_led_to_moves_and_again_after_all_else_did() {
        let mut habit = PlacementPolicy::default();
        let by_turns = [Side::High, Side::Low];
        assert_eq!(sides(&mut habit, Lifetime::Long), [Side::Low; 2]);
        assert_eq!(sides(&mut habit, Lifetime::Short), by_turns);
        for _ in WAYS {
            habit = habit.next();
            let unknown = sides(&mut habit, Lifetime::Unknown);
            assert_eq!([sides(&mut habit, Lifetime::Short), sides(&mut habit, Lifetime::Long)], [unknown; 2]);
        }
        habit = habit.next();
        assert_eq!(sides(&mut habit, Lifetime::Long), [Side::Low; 2]);
        assert_eq!(sides(&mut habit, Lifetime::Short), by_turns);
    }

    #[test]
    fn where_no_lifetime_is_told_every_habit_is_another_way() {
        let mut habit = PlacementPolicy::default();
        habit.choose(&Request::new(1), RESERVED);
        let mut large = vec![WAYS[0].large_log2];
        for _ in 1..WAYS.len() {
            habit = habit.next();
            large.push(WAYS[habit.place as usize - 1].large_log2);
        }
        assert_eq!(large, WAYS.map(|way| way.large_log2));
        assert_eq!(habit.next().place, 0);
    }
}
