//! Parameters that one rank sees whole in an update, while their shards stay flat and equal: the
//! exchange of optimizers like Muon, whose update of a matrix depends on all of its elements.
//!
//! Each such parameter has an **updater**. What ranks hold of it goes there, and the update comes
//! back, by an all-to-all each. Consecutive units form a **wave**, in which every rank should have
//! something to compute; the buffers are those of a wave.
//!
//! With tensor parallelism ([`TensorPart`]) an updater joins the parts. As all parts have the same
//! layout, with P of them rank `r` of the exchange has shard `r / P` of part `r % P`. Why one
//! exchange, and not one among the ranks of a part and another between parts: each element of a
//! matrix that is cut travels once. Of others each part sends its copy, with equal bits.

use std::ops::Range;

use crate::{Layout, ParamId, TensorPart};

/// A parameter and the rank that sees it whole.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParamUpdater {
    /// The parameter.
    pub id: ParamId,
    /// Its range in the unit's flat parameter: that of each part.
    pub flat: Range<u64>,
    /// The rank.
    pub updater: u64,
    /// Elements of the unit's shards; 0 if every rank holds all of the unit.
    shard_elems: u64,
    /// Parts of the model.
    parts: u64,
    /// Whether parts have other elements of it than other parts, and not all the same.
    is_cut: bool,
}

impl ParamUpdater {
    /// The elements of the parameter that `rank` holds, counted from its first in the rank's part.
    pub fn held(&self, rank: u64) -> Range<u64> {
        let of_param = |at: u64| at.clamp(self.flat.start, self.flat.end) - self.flat.start;
        if self.shard_elems == 0 {
            return 0..of_param(self.flat.end);
        }
        let start = self.shard_of(rank).saturating_mul(self.shard_elems);
        of_param(start)..of_param(start.saturating_add(self.shard_elems))
    }

    /// The elements of [`Self::held`] that `rank` gives to the updater: none if that has them,
    /// because every rank holds all of its part. A parameter that is not cut comes from each part.
    pub fn given(&self, rank: u64) -> Range<u64> {
        match self.shard_elems == 0 && self.shard_of(rank) != self.shard_of(self.updater) {
            true => 0..0,
            false => self.held(rank),
        }
    }

    /// The part that `rank` has.
    pub fn part_of(&self, rank: u64) -> TensorPart {
        TensorPart::of_consecutive(rank, self.parts)
    }

    fn shard_of(&self, rank: u64) -> u64 {
        rank / self.parts
    }

    /// The number of its elements in a part.
    pub fn numel_elems(&self) -> u64 {
        self.flat.end - self.flat.start
    }

    /// The number of its elements in all parts, with their padding.
    pub fn joined_elems(&self) -> u64 {
        self.numel_elems() * if self.is_cut { self.parts } else { 1 }
    }
}

/// The updaters of a model's whole parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Updaters {
    world_size: u64,
    /// In the order of the layout.
    params: Vec<ParamUpdater>,
    /// The ranges of `params` that are waves.
    waves: Vec<Range<usize>>,
}

/// Parameters of a wave for each rank: with fewer, some would have nothing to compute.
const PARAMS_A_RANK: u64 = 4;

impl Updaters {
    /// Chooses the updaters of those parameters of `layout` that have a `cost`, in any unit: of the
    /// costs of a wave each rank gets about the same. Every rank holds its shard of a unit, or, if
    /// `replicated` (stage 0), all of it. `unit_waves` makes each unit a wave, for updates that go
    /// unit by unit.
    pub fn new(
        layout: &Layout,
        replicated: bool,
        unit_waves: bool,
        cost: impl Fn(ParamId) -> Option<u64>,
    ) -> Self {
        Self::of_parts(layout, (1, |_| false), replicated, unit_waves, cost)
    }

    /// As [`Self::new`] with `parts` parts of the model, each with `layout`; `is_cut` says of a
    /// parameter whether a part has a slice of it, and not all.
    ///
    /// # Panics
    /// There are 0 parts.
    pub fn of_parts(
        layout: &Layout,
        (parts, is_cut): (u64, impl Fn(ParamId) -> bool),
        replicated: bool,
        unit_waves: bool,
        cost: impl Fn(ParamId) -> Option<u64>,
    ) -> Self {
        let world_size = layout.world_size() * parts;
        let most = match unit_waves {
            true => 1,
            false => PARAMS_A_RANK.saturating_mul(world_size),
        };
        let mut params = Vec::new();
        let mut costs = Vec::new();
        let mut waves = Vec::new();
        let mut begin = 0;
        for (nth, unit) in layout.units().iter().enumerate() {
            for (param, placed) in unit.params.iter().enumerate() {
                let id = ParamId { unit: nth, param };
                let Some(cost) = cost(id) else { continue };
                costs.push(cost);
                params.push(ParamUpdater {
                    id,
                    flat: placed.range(),
                    updater: 0,
                    shard_elems: if replicated { 0 } else { unit.shard_elems },
                    parts,
                    is_cut: is_cut(id),
                });
            }
            let is_last = nth + 1 == layout.units().len();
            let count = params.len() - begin;
            if count as u64 >= most || is_last && count > 0 {
                waves.push(begin..params.len());
                begin = params.len();
            }
        }
        for wave in &waves {
            assign(&mut params[wave.clone()], &costs[wave.clone()], world_size);
        }
        Self {
            world_size,
            params,
            waves,
        }
    }

    /// The number of ranks.
    pub fn world_size(&self) -> u64 {
        self.world_size
    }

    /// The parameters of each wave, in the order of the layout.
    pub fn waves(&self) -> impl ExactSizeIterator<Item = &[ParamUpdater]> {
        self.waves.iter().map(|wave| &self.params[wave.clone()])
    }

    /// The elements that `rank` sends to other ranks in an update: to the updaters, and as updater
    /// back.
    pub fn sent_elems(&self, rank: u64) -> u64 {
        let len = |range: Range<u64>| range.end - range.start;
        let of = |param: &ParamUpdater| match param.updater == rank {
            true => {
                let others = (0..self.world_size).filter(|other| *other != rank);
                others.map(|other| len(param.held(other))).sum()
            }
            false => len(param.given(rank)),
        };
        self.params.iter().map(of).sum()
    }
}

/// Gives each parameter, the most costly first, to the rank with the least to do so far; of equal
/// ones to that which holds the most of it.
fn assign(params: &mut [ParamUpdater], costs: &[u64], world_size: u64) {
    let mut order: Vec<usize> = (0..params.len()).collect();
    order.sort_by_key(|&nth| std::cmp::Reverse(costs[nth]));
    let mut loads = vec![0_u64; world_size as usize];
    for nth in order {
        let held = |rank: u64| {
            let Range { start, end } = params[nth].held(rank);
            end - start
        };
        let place = |rank: &u64| (loads[*rank as usize], std::cmp::Reverse(held(*rank)));
        let updater = (0..world_size).min_by_key(place).unwrap_or(0);
        params[nth].updater = updater;
        loads[updater as usize] = loads[updater as usize].saturating_add(costs[nth]);
    }
}
