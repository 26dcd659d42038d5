//! Parts of a rank's shard storage for the optimizer: sub-groups and parameter groups.
//!
//! The optimizer updates, or an offload tier loads, one sub-group at a time. Sub-groups are cut by elements, not by
//! parameters (the optimizer is element-wise), so the size of a buffer does not depend on the largest parameter.

use std::ops::Range;

use crate::{Layout, ParamId, ParamPlacement, ShardError};

/// A contiguous range of a rank's shard storage whose parameters are all in one group.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct GroupRun {
    /// The group.
    pub group: usize,
    /// Its range in the rank's shard storage.
    pub in_storage: Range<u64>,
}

/// Groups of parameters with the same optimizer settings, such as weight decay. They do not change the layout, so
/// each group is distributed over all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ParamGroups {
    /// The group of each parameter, by unit.
    groups: Vec<Vec<usize>>,
}

impl ParamGroups {
    /// Assigns every parameter to the group that `group_of` returns.
    pub fn new(layout: &Layout, mut group_of: impl FnMut(ParamId, &ParamPlacement) -> usize) -> Self {
        let units = layout.units.iter().enumerate().map(|(unit, placed)| {
            let params = placed.params.iter().enumerate();
            params.map(|(param, p)| group_of(ParamId { unit, param }, p)).collect()
        });
        Self { groups: units.collect() }
    }

    /// The group of a parameter; `None` if there is no such parameter.
    pub fn group(&self, id: ParamId) -> Option<usize> {
        self.groups.get(id.unit)?.get(id.param).copied()
    }

    /// Number of groups: one more than the greatest index.
    pub fn count(&self) -> usize {
        self.groups.iter().flatten().max().map_or(0, |&group| group.saturating_add(1))
    }

    /// The runs of `rank`'s shard storage, ascending; consecutive parameters of one group are one run. Padding
    /// between two parameters of a run belongs to it; other padding belongs to no run.
    ///
    /// # Errors
    /// There is no such rank, or the groups belong to another layout.
    pub fn runs(&self, layout: &Layout, rank: u64) -> Result<Vec<GroupRun>, ShardError> {
        let mut runs: Vec<GroupRun> = Vec::new();
        for piece in layout.rank_pieces(rank)? {
            let unknown = || ShardError::UnknownParam {
                name: layout.param(piece.id).map_or_else(String::new, |p| p.name.clone()),
            };
            let group = self.group(piece.id).ok_or_else(unknown)?;
            match runs.last_mut().filter(|run| run.group == group) {
                Some(run) => run.in_storage.end = piece.in_storage.end,
                None => runs.push(GroupRun { group, in_storage: piece.in_storage }),
            }
        }
        Ok(runs)
    }
}

impl Layout {
    /// Cuts a rank's shard storage into as few sub-groups of at most `capacity_elems` elements as possible; the cut
    /// is the same on every rank. Each sub-group is a multiple of the alignment, and their lengths differ by at most
    /// one alignment. A capacity below the alignment counts as the alignment.
    pub fn sub_groups(&self, capacity_elems: u64) -> impl ExactSizeIterator<Item = Range<u64>> + use<> {
        let align = self.align_elems();
        // All shards are multiples of the alignment.
        let (total, capacity) = (self.shard_elems() / align, (capacity_elems / align).max(1));
        let count = total.div_ceil(capacity);
        let (each, longer) = (total / count.max(1), total % count.max(1));
        let start = move |i: usize| (i as u64 * each + longer.min(i as u64)) * align;
        (0..usize::try_from(count).unwrap_or(usize::MAX)).map(move |i| start(i)..start(i + 1))
    }
}
