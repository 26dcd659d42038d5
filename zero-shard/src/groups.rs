//! Parameter groups: the parts of a storage with the same optimizer settings.
//!
//! Parameters with the same optimizer settings, such as weight decay, are a group. Groups do not
//! change the layout, so each is distributed over all ranks.

use std::ops::Range;

use crate::{Layout, ParamId, ShardError, UnitLayout};

impl Layout {
    /// The groups in `rank`'s shard storage, where `group_of` returns the group of a parameter:
    /// ranges of the storage, ascending and without gaps, each with its group; neighbours have
    /// different groups. Padding is in the group of the parameter before it in its unit, so that a
    /// unit with one group has it on all ranks.
    ///
    /// # Errors
    /// There is no such rank.
    pub fn group_runs(
        &self,
        rank: u64,
        group_of: impl FnMut(ParamId) -> usize,
    ) -> Result<Vec<(Range<usize>, usize)>, ShardError> {
        self.check_rank(rank)?;
        Ok(self.runs(|unit| unit.shard(rank), group_of))
    }

    /// As [`Layout::group_runs`], in the whole storage.
    pub fn whole_group_runs(
        &self,
        group_of: impl FnMut(ParamId) -> usize,
    ) -> Vec<(Range<usize>, usize)> {
        self.runs(|unit| 0..unit.padded_elems, group_of)
    }

    /// The groups in a storage of the range `held` of each unit's flat parameter.
    fn runs(
        &self,
        held: impl Fn(&UnitLayout) -> Range<u64>,
        mut group_of: impl FnMut(ParamId) -> usize,
    ) -> Vec<(Range<usize>, usize)> {
        let mut runs: Vec<(Range<usize>, usize)> = Vec::new();
        for (unit, placed) in self.units.iter().enumerate() {
            let held = held(placed);
            let mut params = placed
                .params
                .iter()
                .enumerate()
                .filter(|(_, p)| p.numel_elems > 0)
                .peekable();
            while let Some((param, p)) = params.next() {
                let end = params
                    .peek()
                    .map_or(placed.padded_elems, |(_, next)| next.offset_elems);
                let len = end
                    .min(held.end)
                    .saturating_sub(p.offset_elems.max(held.start))
                    as usize;
                if len == 0 {
                    continue;
                }
                let start = runs.last().map_or(0, |(run, _)| run.end);
                let group = group_of(ParamId { unit, param });
                match runs.last_mut().filter(|(_, last)| *last == group) {
                    Some((run, _)) => run.end += len,
                    None => runs.push((start..start + len, group)),
                }
            }
        }

        runs
    }
}
