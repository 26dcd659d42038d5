//! Blocks that are replaced by slightly larger ones, over and over: caches that grow by copies.
//!
//! At the peak, each of them misses the hole that the one before it left by a little. Making room for every single one
//! moves about as much as the program itself copies. [Spreading](super::spread) moves everything once, and then nothing
//! until what was left free behind each block is used up. Which is cheaper is not known beforehand, so one rents until
//! the rent would have bought (the ski rental of online algorithms):
//!
//! ```text
//! Unseen     a request nearly fits: make room for it alone, and rent
//! Renting    each near miss is paid for; when all have cost patience * (what spreading costs): spread
//! Spread     requests leave a pad below them. What they would have cost without is saved, what misses all the same is rent:
//!              rent + saved = patience * price, and saved >= rent   spread again, with less patience
//!              rent + saved = patience * price, and saved <  rent   pads do not hold: Unseen, with twice the patience
//! ```
//!
//! Other misses take their cost off the rent; where none is left, nothing is seen any more.

use super::compaction::{Cause, Compaction};
use super::cost::CostModel;
use super::offsets::Offsets;
use super::range_snapshot::RangeSnapshot;
use super::request::Request;
use super::spread;

/// A request is a near miss if the largest hole is smaller than it by at most this part.
const NEAR: u64 = 8;

/// Planning costs time even where little moves: a near miss counts as this part of its bytes at least.
const LEAST: f64 = 0.5;

/// How near misses were met so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Regrowth {
    phase: Phase,
    /// Requests of so many bytes and more are watched: those that may be replaced by larger ones soon.
    watched_from: u64,
    /// Bytes of watched requests in this phase.
    watched_bytes: u64,
    /// What near misses have cost in this phase, in bytes moved.
    rent: f64,
    /// What spreading moves, when it was looked at last.
    price: f64,
    /// Spread for so many times the price.
    patience: f64,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Unseen,
    Renting,
    /// Of a watched request, the pad as a part of its size, times 2^32; and what near misses cost before, as a part
    /// of it.
    Spread {
        pad_q32: u64,
        rate: f64,
    },
}

/// What to do for a request that does not fit.
pub(super) enum Answer {
    /// Spread ranges.
    Spread(Compaction),
    /// Make room for it alone; why.
    Alone(Cause),
}

impl Regrowth {
    /// Nothing seen yet.
    pub(super) const NONE: Self =
        Self { phase: Phase::Unseen, watched_from: u64::MAX, watched_bytes: 0, rent: 0.0, price: 0.0, patience: 1.0 };

    /// For a request that does not fit, of which `peak_bytes` were live at most.
    pub(super) fn answer(
        &self,
        space: &Offsets,
        survey: &RangeSnapshot,
        request: Request,
        peak_bytes: u64,
        cost: &CostModel,
    ) -> Answer {
        let Some(bytes) = request.bytes.checked_next_multiple_of(space.granule) else {
            return Answer::Alone(Cause::Miss);
        };
        if request.align > space.granule || space.largest_free_bytes() < bytes - bytes / NEAR {
            return Answer::Alone(Cause::Miss);
        }
        let again = !matches!(self.phase, Phase::Unseen);
        if !self.buys(self.price) {
            return Answer::Alone(Cause::NearMiss { bytes, price: self.price, again });
        }
        let live_bytes = space.bytes() - space.free_bytes();
        // What the program had at its peak and has not now.
        let rest_bytes = peak_bytes.saturating_sub(live_bytes + bytes);
        let spread = spread::plan(survey, bytes, rest_bytes, cost);
        let price = spread.as_ref().map_or(live_bytes, Compaction::moved_bytes) as f64;
        match spread {
            Some(spread) if self.buys(price) => Answer::Spread(spread),
            _ => Answer::Alone(Cause::NearMiss { bytes, price, again }),
        }
    }

    /// Whether a request of `bytes` is watched.
    #[inline]
    pub(super) fn watches(&self, bytes: u64) -> bool {
        bytes >= self.watched_from
    }

    /// A watched request of `bytes` leaves so many free below it, where ranges were spread.
    #[inline]
    pub(super) fn pad(&self, bytes: u64) -> Option<u64> {
        match self.phase {
            Phase::Spread { pad_q32, .. } => Some(((u128::from(bytes) * u128::from(pad_q32)) >> 32) as u64),
            Phase::Unseen | Phase::Renting => None,
        }
    }

    /// A watched request of `bytes` found its place.
    #[inline]
    pub(super) fn placed(&mut self, bytes: u64) {
        self.watched_bytes = self.watched_bytes.saturating_add(bytes);
    }

    /// What near misses would have cost since ranges were spread, if they were not.
    fn saved(&self) -> f64 {
        match self.phase {
            Phase::Spread { rate, .. } => self.watched_bytes as f64 * rate,
            Phase::Unseen | Phase::Renting => 0.0,
        }
    }

    /// Whether the rent, paid and saved, comes to `price`.
    fn paid(&self, price: f64) -> bool {
        self.rent + self.saved() >= self.patience * price
    }

    /// Whether pads have saved more than they let through.
    fn pads_hold(&self) -> bool {
        self.saved() >= self.rent || !matches!(self.phase, Phase::Spread { .. })
    }

    fn buys(&self, price: f64) -> bool {
        self.paid(price) && self.pads_hold()
    }

    /// `plan` is about to be made.
    pub(super) fn note(&mut self, plan: &Compaction, space: &mut Offsets) {
        let moved = plan.moved_bytes() as f64;
        match plan.cause {
            Cause::Asked => {}
            Cause::Miss => {
                // Another kind of program, by and by.
                self.rent -= moved;
                if self.rent + self.saved() <= 0.0 {
                    *self = Self { patience: self.patience, ..Self::NONE };
                }
            }
            Cause::NearMiss { bytes, price, .. } => {
                if matches!(self.phase, Phase::Unseen) {
                    // What is not replaced from now on does not grow.
                    space.age();
                    (self.phase, self.watched_from, self.watched_bytes) = (Phase::Renting, bytes / 2, bytes);
                }
                self.rent += moved.max(LEAST * bytes as f64);
                self.price = price;
                if self.paid(price) && !self.pads_hold() {
                    *self = Self { patience: 2.0 * self.patience, ..Self::NONE };
                }
            }
            Cause::Spread { bytes, pad } => {
                let rate = match self.phase {
                    Phase::Spread { rate, .. } => {
                        self.patience = (0.5 * self.patience).max(1.0);
                        rate
                    }
                    Phase::Unseen | Phase::Renting => self.rent / self.watched_bytes as f64,
                };
                let pad_q32 = (pad as f64 / bytes as f64 * 2f64.powi(32)) as u64;
                self.phase = Phase::Spread { pad_q32, rate };
                (self.watched_from, self.watched_bytes, self.rent, self.price) = (bytes / 2, 0, 0.0, moved);
            }
        }
    }
}
