//! Placement policies: which of the free ranges holds a request, and at which end of it.
//!
//! Programs repeat themselves: if bytes had to be moved in one step, the next step leads to the
//! same move unless placement changes. So after every compaction at an unchanged peak the planner
//! switches to the next policy of a list; a policy under which the program needs no compaction
//! stays in use. The first packs `Lifetime::Long` requests at the low end; the others ignore
//! lifetimes, since hints may be wrong. `Lifetime::Short` has no effect: placing those requests at
//! the high end moved 1.5 to 1.8 times the bytes (`benches/traces/README.md`). No policy depends on
//! sizes or shapes of a particular program.

use super::offsets::{Pick, Side};
use super::request::{Lifetime, Request};

/// One way of placing requests without regard to lifetimes.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// A request is large if it exceeds the reserved bytes shifted right by this.
    large_log2: u32,
    /// Where large requests are placed, alternating between the two.
    large: [(Side, Pick); 2],
}

const WAYS: [Way; 4] = [
    Way {
        large_log2: 7,
        large: [(Side::Low, Pick::Lowest), (Side::High, Pick::Highest)],
    },
    Way {
        large_log2: 8,
        large: [(Side::Low, Pick::Lowest), (Side::High, Pick::Highest)],
    },
    Way {
        large_log2: 6,
        large: [(Side::Low, Pick::Lowest), (Side::High, Pick::Highest)],
    },
    Way {
        large_log2: 7,
        large: [(Side::Low, Pick::Highest), (Side::Low, Pick::Highest)],
    },
];

/// The policy in use.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PlacementPolicy {
    /// 0: long-lived requests at the low end, all others by way 0. n > 0: all requests by way n -
    /// 1.
    index: u8,
    turn: u8,
    /// Whether any request so far was long-lived.
    any_long: bool,
}

impl PlacementPolicy {
    /// The next of the list.
    pub(super) fn next(self) -> Self {
        // Without long-lived requests the first two are the same.
        let step = if self.index == 0 && !self.any_long {
            2
        } else {
            1
        };
        Self {
            index: (self.index + step) % (WAYS.len() as u8 + 1),
            ..self
        }
    }

    /// The side and pick for a request in a space of `reserved_bytes`.
    #[inline]
    pub(super) fn choose(&mut self, request: &Request, reserved_bytes: u64) -> (Side, Pick) {
        self.any_long |= request.lifetime == Lifetime::Long;
        let way = &WAYS[self.index.saturating_sub(1) as usize];
        let packed = request.lifetime == Lifetime::Long && self.index == 0;
        if packed || request.bytes <= reserved_bytes >> way.large_log2 {
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

    fn sides(policy: &mut PlacementPolicy, lifetime: Lifetime) -> [Side; 2] {
        let large = Request {
            lifetime,
            ..Request::new(RESERVED / 2)
        };
        [0; 2].map(|_| policy.choose(&large, RESERVED).0)
    }

    #[test]
    fn only_the_first_policy_packs_long_lived_requests() {
        let mut policy = PlacementPolicy::default();
        let alternating = [Side::High, Side::Low];
        assert_eq!(sides(&mut policy, Lifetime::Long), [Side::Low; 2]);
        assert_eq!(sides(&mut policy, Lifetime::Short), alternating);
        for _ in WAYS {
            policy = policy.next();
            let unknown = sides(&mut policy, Lifetime::Unknown);
            assert_eq!(
                [
                    sides(&mut policy, Lifetime::Short),
                    sides(&mut policy, Lifetime::Long)
                ],
                [unknown; 2]
            );
        }
        policy = policy.next();
        assert_eq!(sides(&mut policy, Lifetime::Long), [Side::Low; 2]);
        assert_eq!(sides(&mut policy, Lifetime::Short), alternating);
    }

    #[test]
    fn without_lifetimes_every_policy_is_a_different_way() {
        let mut policy = PlacementPolicy::default();
        policy.choose(&Request::new(1), RESERVED);
        let mut large = vec![WAYS[0].large_log2];
        for _ in 1..WAYS.len() {
            policy = policy.next();
            large.push(WAYS[policy.index as usize - 1].large_log2);
        }
        assert_eq!(large, WAYS.map(|way| way.large_log2));
        assert_eq!(policy.next().index, 0);
    }
}
