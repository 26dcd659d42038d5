//! Cutting a rank's shard storage for the optimizer: sub-groups and parameter groups.
//!
//! A sub-group is the part that the optimizer updates, or an offload tier loads, at a time. The cut is by elements,
//! not by parameters (the optimizer is element-wise), so the buffer's size does not depend on the largest parameter.

use std::ops::Range;

use crate::{Layout, ParamId, ParamPlacement, ShardError};

/// A run of a rank's shard storage whose parameters are all of one group.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct GroupRun {
    /// The group.
    pub group: usize,
    /// Its range in the rank's shard storage.
    pub in_storage: Range<u64>,
}

/// Parameter groups with the same optimizer settings, such as weight decay. They do not change the layout, so each
/// group is spread over all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ParamGroups {
    /// The group of each parameter, by unit.
    groups: Vec<Vec<usize>>,
}

impl ParamGroups {
    /// Groups every parameter by `group_of`.
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

    /// The runs of `rank`'s shard storage, ascending, adjacent runs of one group merged. Padding between two
    /// parameters of a group belongs to their run; other padding to no run.
    ///
    /// # Errors
    /// There is no such rank, or the groups are of another layout.
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
    /// Cuts a rank's shard storage (of every rank alike) into the fewest sub-groups of at most
    /// `capacity_elems` elements, end to end, each a multiple of the alignment and within one alignment of
    /// the others. A capacity below the alignment counts as the alignment.
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
