//! Blocks that are replaced by slightly larger ones, over and over: caches that grow by copies.
//!
//! At the peak, each of them misses the hole that the one before it left by a little. Making room for every single one
//! moves about as much as the program itself copies. [Spreading](super::spread) moves everything once, and then nothing
//! until what was left free behind each block is used up. Which is cheaper is not known beforehand, so one rents until
//! the rent would have bought: ranges are spread when near misses have cost as much as that, and pads that
//! do not hold are paid for only half as often.

use super::compaction::{Cause, Compaction};
use super::cost::CostModel;
use super::offsets::Offsets;
use super::spread;
use super::survey::Survey;

/// A request is a near miss if the largest hole is smaller than it by at most this part.
const NEAR: u64 = 8;

/// Planning costs time even where little moves: a near miss counts as this part of its bytes at least.
const LEAST: f64 = 0.5;

/// How near misses were met so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Regrowth {
    /// Requests of so many bytes and more are watched.
    pub(super) from: u64,
    /// Of a watched request, the part of its size that it leaves free below, times 2^32; 0 before ranges were spread.
    share: u64,
    /// Bytes of watched requests, before ranges were spread or since.
    watched: u64,
    /// What near misses cost before, as a part of those bytes.
    rate: f64,
    /// What near misses have cost, before ranges were spread or since; in bytes moved.
    cost: f64,
    /// What spreading moves, when it was looked at last.
    price: f64,
    /// Spread for so many times the price.
    patience: f64,
}

impl Regrowth {
    pub(super) const NONE: Self =
        Self { from: u64::MAX, share: 0, watched: 0, rate: 0.0, cost: 0.0, price: 0.0, patience: 1.0 };

    /// For a request that does not fit: the plan to spread ranges where it is time for that, else why it does not fit.
    pub(super) fn answer(
        &self,
        space: &Offsets,
        survey: &Survey,
        bytes: u64,
        align: u64,
        peak_bytes: u64,
        cost: &CostModel,
    ) -> Result<Compaction, Cause> {
        let bytes = bytes.checked_next_multiple_of(space.granule).ok_or(Cause::Miss)?;
        if align > space.granule || space.largest_free_bytes() < bytes - bytes / NEAR {
            return Err(Cause::Miss);
        }
        let again = self.from != u64::MAX;
        if !self.affords(self.price) {
            return Err(Cause::NearMiss { bytes, price: self.price, again });
        }
        let live_bytes = space.bytes() - space.free_bytes();
        // What the program had at its peak and has not now.
        let rest_bytes = peak_bytes.saturating_sub(live_bytes + bytes);
        let spread = spread::plan(survey, bytes, rest_bytes, cost);
        let price = spread.as_ref().map_or(live_bytes, Compaction::moved_bytes) as f64;
        spread.filter(|_| self.affords(price)).ok_or(Cause::NearMiss { bytes, price, again })
    }

    /// A watched request of `bytes` leaves so many free below it, where ranges were spread.
    #[inline]
    pub(super) fn pad(&self, bytes: u64) -> Option<u64> {
        (self.share > 0).then(|| ((u128::from(bytes) * u128::from(self.share)) >> 32) as u64)
    }

    /// A watched request of `bytes` found its place.
    #[inline]
    pub(super) fn placed(&mut self, bytes: u64) {
        self.watched = self.watched.saturating_add(bytes);
    }

    /// What near misses would have cost since ranges were spread, if they were not.
    fn saved(&self) -> f64 {
        self.watched as f64 * self.rate
    }

    /// Whether `price` is paid by what near misses cost, and pads have saved more than they let through.
    fn affords(&self, price: f64) -> bool {
        self.cost + self.saved() >= self.patience * price && (self.share == 0 || self.holds())
    }

    fn holds(&self) -> bool {
        self.saved() >= self.cost
    }

    /// `plan` is about to be made.
    pub(super) fn note(&mut self, plan: &Compaction, space: &mut Offsets) {
        let moved = plan.moved_bytes() as f64;
        match plan.cause {
            Cause::Asked => {}
            Cause::Miss => {
                // Another kind of program, by and by.
                self.cost -= moved;
                if self.cost + self.saved() <= 0.0 {
                    *self = Self { patience: self.patience, ..Self::NONE };
                }
            }
            Cause::NearMiss { bytes, price, .. } => {
                if self.from == u64::MAX {
                    // What is not replaced from now on does not grow.
                    space.age();
                    (self.from, self.watched) = (bytes / 2, bytes);
                }
                self.cost += moved.max(LEAST * bytes as f64);
                self.price = price;
                if self.share > 0 && !self.holds() && self.cost + self.saved() >= self.patience * price {
                    *self = Self { patience: 2.0 * self.patience, ..Self::NONE };
                }
            }
            Cause::Spread { bytes, pad } => {
                if self.share == 0 {
                    self.rate = self.cost / self.watched as f64;
                } else {
                    self.patience = (0.5 * self.patience).max(1.0);
                }
                (self.watched, self.cost, self.price) = (0, 0.0, moved);
                (self.from, self.share) = (bytes / 2, (pad as f64 / bytes as f64 * 2f64.powi(32)) as u64);
            }
        }
    }
}
