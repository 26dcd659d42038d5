//! Habits of placing: which of the free ranges is taken, and which end of it.
//!
//! Programs repeat themselves: if bytes had to be moved in one step, the next step leads to the same move,
//! unless something is done otherwise. So after every compaction the planner takes the next habit
//! of a list; one that suits the program leads to no further compaction, and stays. The first believes what it is
//! told of lifetimes, the others do not: what was told may be wrong. Nothing here depends on sizes or shapes of a
//! particular program.

use super::offsets::{Pick, Side};
use super::planner::{Lifetime, Request};

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
pub(super) struct Habit {
    /// 0: lifetimes are believed, and the unknown go by the first way. After that, all go by way 1, 2, ...
    place: u8,
    turn: u8,
    /// A lifetime was told.
    told: bool,
}

impl Habit {
    /// The next of the list.
    pub(super) fn next(self) -> Self {
        // Where no lifetime is told, the first two are the same.
        let step = if self.place == 0 && !self.told { 2 } else { 1 };
        Self { place: (self.place + step) % (WAYS.len() as u8 + 1), ..self }
    }

    /// The end and the free range for a request in a space of `reserved_bytes`.
    #[inline]
    pub(super) fn choose(&mut self, request: &Request, reserved_bytes: u64) -> (Side, Pick) {
        self.told |= request.lifetime != Lifetime::Unknown;
        match request.lifetime {
            Lifetime::Long if self.place == 0 => (Side::Low, Pick::Best),
            Lifetime::Short if self.place == 0 => (Side::High, Pick::Best),
            _ => {
                let way = &WAYS[self.place.saturating_sub(1) as usize];
                if request.bytes <= reserved_bytes >> way.large_log2 {
                    return (Side::Low, Pick::Best);
                }
                self.turn ^= 1;
                way.large[self.turn as usize]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESERVED: u64 = 1 << 30;

    fn sides(mut habit: Habit, lifetime: Lifetime) -> [Side; 2] {
        let large = Request { lifetime, ..Request::new(RESERVED / 2) };
        [0; 2].map(|_| habit.choose(&large, RESERVED).0)
    }

    #[test]
    fn lifetimes_are_believed_until_that_led_to_moves_and_again_after_all_else_did() {
        let mut habit = Habit::default();
        assert_eq!(sides(habit, Lifetime::Short), [Side::High; 2]);
        assert_eq!(sides(habit, Lifetime::Long), [Side::Low; 2]);
        habit.choose(&Request { lifetime: Lifetime::Short, ..Request::new(1) }, RESERVED);
        for _ in WAYS {
            habit = habit.next();
            let unknown = sides(habit, Lifetime::Unknown);
            assert_eq!([sides(habit, Lifetime::Short), sides(habit, Lifetime::Long)], [unknown; 2]);
        }
        habit = habit.next();
        assert_eq!(sides(habit, Lifetime::Short), [Side::High; 2]);
    }

    #[test]
    fn where_no_lifetime_is_told_every_habit_is_another_way() {
        let mut habit = Habit::default();
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
