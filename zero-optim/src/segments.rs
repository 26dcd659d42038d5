//! Where units lie in the state storage, and which of them one launch can take together.

use std::ops::Range;

use zero_alloc::device::AnySlice;

use crate::OptimError;

/// One unit's place in the state, and what of it this rank votes for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The unit's name, for reports.
    pub name: String,
    /// Its elements of the state storage.
    pub state: Range<usize>,
    /// The elements, counted from the segment's start, whose gradients this rank votes for: its own shard.
    pub vote: Range<usize>,
}

impl Segment {
    /// A segment that holds this rank's shard, and votes for all of it: stages 1 to 3.
    pub fn shard(name: impl Into<String>, state: Range<usize>) -> Self {
        let vote = 0..state.end.saturating_sub(state.start);
        Self { name: name.into(), state, vote }
    }

    /// A segment that holds a whole unit, and votes for this rank's shard of it: stage 0. So the votes, and
    /// the norm, have the same bits as at the other stages.
    pub fn whole(name: impl Into<String>, state: Range<usize>, own_shard: Range<usize>) -> Self {
        Self { name: name.into(), state, vote: own_shard }
    }

    pub(crate) fn len(&self) -> usize {
        self.state.end - self.state.start
    }
}

/// The slices of one unit in a step.
#[derive(Clone, Copy, Debug)]
pub struct UnitSlices {
    /// The gradient, reduced over ranks: fp32, bf16 or fp16, as many elements as the segment.
    pub grad: AnySlice,
    /// The parameter in its own dtype, as many elements. It is written.
    pub param: AnySlice,
}

/// Elements of the state, if the segments tile it and vote within themselves.
pub(crate) fn check_segments(segments: &[Segment]) -> Result<usize, OptimError> {
    let mut end = 0;
    for s in segments {
        if s.state.start != end || s.state.end < s.state.start {
            return Err(OptimError::Segments { unit: s.name.clone(), expected: end, got: s.state.start });
        }
        if s.vote.start > s.vote.end || s.vote.end > s.len() {
            let (start, end) = (s.vote.start, s.vote.end);
            return Err(OptimError::VoteRange { unit: s.name.clone(), start, end, len: s.len() });
        }
        end = s.state.end;
    }
    Ok(end)
}

/// Units that one launch updates: a range of the state, and the slices that go with it.
#[derive(Clone, Debug)]
pub(crate) struct SubGroup {
    pub(crate) state: Range<usize>,
    pub(crate) slices: UnitSlices,
}

/// The units as launches. With `join`, units whose gradients and parameters both lie end to end become one; without,
/// each is one. Empty units are none.
///
/// Only for addresses that are numbers to this process, a GPU's: on the host a slice ends where its maker said.
pub(crate) fn sub_groups(segments: &[Segment], units: &[UnitSlices], join: bool) -> Vec<SubGroup> {
    let mut groups: Vec<SubGroup> = Vec::new();
    for (segment, unit) in segments.iter().zip(units).filter(|(s, _)| !s.state.is_empty()) {
        if let Some(last) = groups.last_mut().filter(|_| join)
            && let (Some(grad), Some(param)) =
                (joined(last.slices.grad, unit.grad), joined(last.slices.param, unit.param))
        {
            // Segments tile the state, so theirs lie end to end too.
            last.state.end = segment.state.end;
            last.slices = UnitSlices { grad, param };
        } else {
            groups.push(SubGroup { state: segment.state.clone(), slices: *unit });
        }
    }
    groups
}

/// Both as one, if `b` begins where `a` ends.
fn joined(a: AnySlice, b: AnySlice) -> Option<AnySlice> {
    let adjacent = a.as_ptr().wrapping_add(a.len_bytes()) == b.as_ptr() && a.dtype() == b.dtype();
    // SAFETY: each half is valid, and ordered, by the promise of its own maker.
    adjacent.then(|| unsafe { AnySlice::from_raw_parts(a.as_ptr(), a.len() + b.len(), a.dtype()) })
}

#[cfg(test)]
mod tests {
    use zero_alloc::device::DType;

    use super::*;

    fn slice(at: usize, len: usize, dtype: DType) -> AnySlice {
        // SAFETY: never accessed.
        unsafe { AnySlice::from_raw_parts(std::ptr::without_provenance_mut(at), len, dtype) }
    }

    #[test]
    fn units_that_lie_end_to_end_are_one_launch() {
        // Gradients in bf16 end to end but for the last; parameters too; the second unit is empty.
        let lens = [10usize, 0, 6, 4, 3];
        let (mut segments, mut units, mut end) = (Vec::new(), Vec::new(), 0);
        for (i, &len) in lens.iter().enumerate() {
            let gap = if i == 4 { 64 } else { 0 };
            units.push(UnitSlices {
                grad: slice(4096 + 2 * end + gap, len, DType::Bf16),
                param: slice(8192 + 4 * end, len, DType::F32),
            });
            segments.push(Segment::shard(format!("unit{i}"), end..end + len));
            end += len;
        }
        let found = |join| {
            let groups = sub_groups(&segments, &units, join);
            groups
                .into_iter()
                .map(|g| (g.state, g.slices.grad.len(), g.slices.param.as_ptr().addr()))
                .collect::<Vec<_>>()
        };
        assert_eq!(found(true), [(0..20, 20, 8192), (20..23, 3, 8192 + 80)]);
        assert_eq!(found(false).len(), 4);
        // Another dtype behind the first is another launch, wherever it lies.
        units[2].grad = slice(4096 + 20, 6, DType::F16);
        assert_eq!(sub_groups(&segments, &units, true).len(), 4);
    }
}
