//! Cutting a rank's shard storage for the optimizer: sub-groups, units and parameter groups.
//!
//! A sub-group is what the optimizer steps, or an offload tier brings in, at a time. The cut is by elements,
//! not by parameters (an element-wise optimizer does not mind), so a buffer of the capacity always suffices,
//! however large one parameter is.

use std::ops::Range;

use crate::{Layout, ParamId, ParamPlacement, ShardError};

/// A part of a rank's shard storage that belongs to one unit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct UnitPiece {
    /// Position of the unit in [`Layout::units`].
    pub unit: usize,
    /// Where the piece lies in the unit's shard.
    pub in_shard: Range<u64>,
    /// Where it lies in the rank's shard storage.
    pub in_storage: Range<u64>,
}

/// A run of a rank's shard storage whose parameters are all of one group.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct GroupRun {
    /// The group.
    pub group: usize,
    /// Where it lies in the rank's shard storage.
    pub in_storage: Range<u64>,
}

/// Which parameters are stepped alike: weight decay or not, a learning rate of their own. Groups overlay the
/// layout and do not change it, so every group is spread over the ranks as the units are.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ParamGroups {
    /// The group of each parameter, by unit.
    groups: Vec<Vec<usize>>,
}

impl ParamGroups {
    /// Asks `group_of` for the group of every parameter.
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

    /// How many groups there are: one more than the greatest.
    pub fn count(&self) -> usize {
        self.groups.iter().flatten().max().map_or(0, |&group| group.saturating_add(1))
    }

    /// The runs of `rank`'s shard storage, ascending, neighbours of one group as one. Padding between two
    /// parameters of a group belongs to their run; other padding to none.
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
    /// the others. A capacity below the alignment is taken as that.
    pub fn sub_groups(&self, capacity_elems: u64) -> impl ExactSizeIterator<Item = Range<u64>> + use<> {
        let align = self.align_elems();
        // All shards are multiples of the alignment.
        let (total, capacity) = (self.shard_elems() / align, (capacity_elems / align).max(1));
        let count = total.div_ceil(capacity);
        let (each, longer) = (total / count.max(1), total % count.max(1));
        let start = move |i: u64| (i * each + i.min(longer)) * align;
        SubGroups { next: 0, count, start }
    }

    /// The parts of `in_storage`, a range of a rank's shard storage, by unit, ascending.
    ///
    /// # Errors
    /// The range is reversed or leaves the storage.
    pub fn units_in(&self, in_storage: Range<u64>) -> Result<impl Iterator<Item = UnitPiece> + '_, ShardError> {
        if in_storage.start > in_storage.end || in_storage.end > self.shard_elems() {
            let len_elems = self.shard_elems();
            return Err(ShardError::RangeOutside { what: "a shard storage", range: in_storage, len_elems });
        }
        let first = self.units.partition_point(|u| u.shard_range().end <= in_storage.start);
        let touched = self.units[first..].iter().enumerate();
        let touched = touched.take_while(move |(_, u)| u.shard_offset_elems < in_storage.end);
        let (start, end) = (in_storage.start, in_storage.end);
        Ok(touched.filter_map(move |(i, u)| {
            let part = u.shard_offset_elems.max(start)..u.shard_range().end.min(end);
            let in_shard = part.start - u.shard_offset_elems..part.end - u.shard_offset_elems;
            (!part.is_empty()).then_some(UnitPiece { unit: first + i, in_shard, in_storage: part })
        }))
    }
}

/// Ranges `start(i)..start(i + 1)`.
struct SubGroups<F> {
    next: u64,
    count: u64,
    start: F,
}

impl<F: Fn(u64) -> u64> Iterator for SubGroups<F> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let i = self.next;
        (i < self.count).then(|| {
            self.next += 1;
            (self.start)(i)..(self.start)(i + 1)
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = usize::try_from(self.count - self.next).unwrap_or(usize::MAX);
        (left, Some(left))
    }
}

impl<F: Fn(u64) -> u64> ExactSizeIterator for SubGroups<F> {}
