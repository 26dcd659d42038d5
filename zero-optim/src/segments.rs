//! The segments of units in the state storage, and the grouping of units into launches.

use std::ops::Range;

use zero_alloc::device::{AnySlice, Device, Reduced};

use crate::OptimError;

/// One unit's range of the state, and this rank's shard of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The unit's name, for errors and outcomes.
    pub name: String,
    /// The unit's range of the elements of all segments. Without frozen elements it is its range of
    /// the state storage, too.
    pub state: Range<usize>,
    /// This rank's shard, relative to the segment's start.
    pub own_shard: Range<usize>,
    /// The elements of the shard that gradient statistics cover, relative to the segment's start:
    /// all of it, unless other ranks hold the same elements and count them.
    pub counted: Range<usize>,
    /// Elements that the slices of its parameter may leave out. Why a number: a forgotten parameter
    /// is an error, not padding.
    pub padding: usize,
}

impl Segment {
    /// A segment that stores only this rank's shard (stages 1 to 3).
    pub fn shard(name: impl Into<String>, state: Range<usize>) -> Self {
        let own_shard = 0..state.end.saturating_sub(state.start);
        Self {
            name: name.into(),
            state,
            counted: own_shard.clone(),
            own_shard,
            padding: 0,
        }
    }

    /// A segment that stores a whole unit (stage 0). Statistics still cover only `own_shard`, so
    /// that the norm has the same bits as at the other stages.
    pub fn whole(name: impl Into<String>, state: Range<usize>, own_shard: Range<usize>) -> Self {
        Self {
            name: name.into(),
            state,
            counted: own_shard.clone(),
            own_shard,
            padding: 0,
        }
    }

    /// The segments of a rank's shards of all units (stages 1 to 3).
    #[cfg(feature = "ckpt")]
    pub fn shards(layout: &zero_shard::Layout) -> Vec<Self> {
        let units = layout.units().iter();
        units
            .map(|unit| {
                let shard = unit.shard_range();
                Self::shard(&unit.name, shard.start as usize..shard.end as usize)
            })
            .collect()
    }

    /// The segments of all units, whole, of rank `rank` (stage 0).
    #[cfg(feature = "ckpt")]
    pub fn wholes(layout: &zero_shard::Layout, rank: u64) -> Vec<Self> {
        let units = layout.units().iter();
        units
            .map(|unit| {
                let [whole, shard] = [unit.whole_range(), unit.shard(rank)]
                    .map(|range| range.start as usize..range.end as usize);
                Self::whole(&unit.name, whole, shard)
            })
            .collect()
    }

    /// Gradient statistics cover only these elements of the shard, relative to the segment's start.
    #[must_use]
    pub fn with_counted(self, counted: Range<usize>) -> Self {
        Self { counted, ..self }
    }

    /// The slices of its parameter may leave out `elems` elements, because they belong to no
    /// parameter.
    #[must_use]
    pub fn with_padding(self, elems: usize) -> Self {
        Self {
            padding: elems,
            ..self
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.state.end - self.state.start
    }

    /// Checks the slices of its parameter: ascending, without overlap, within the segment, and
    /// complete but for padding.
    pub(crate) fn check_slices(
        &self,
        what: &'static str,
        slices: &[(AnySlice, usize)],
    ) -> Result<(), OptimError> {
        let mut free = 0;
        let mut got = 0;
        let len = self.len();
        let name = || self.name.clone();

        for &(slice, at) in slices {
            let end = at.saturating_add(slice.len());
            if at < free || end > len {
                return Err(OptimError::Piece {
                    unit: name(),
                    what,
                    start: at,
                    end,
                    free,
                    len,
                });
            }
            (free, got) = (end, got + slice.len());
        }

        if got + self.padding < len {
            return Err(OptimError::SliceLen {
                unit: name(),
                what,
                expected: len - self.padding,
                got,
            });
        }

        Ok(())
    }
}

/// One unit's gradient and parameter in a step.
#[derive(Debug)]
pub struct UnitSlices<'a, D: Device> {
    /// The gradient: fp32, bf16 or fp16, with the segment's length. It may be empty if all elements
    /// of the unit are frozen.
    pub grad: &'a Reduced<D>,
    /// The parameter, in the optimizer's parameter dtype, written: slices with their offsets in the
    /// segment, ascending and without overlap, such as one a parameter
    /// (`zero_shard::Layout::rank_pieces`). They may leave out the segment's
    /// [padding](Segment::with_padding).
    pub param: &'a [(AnySlice, usize)],
}

/// Returns the number of state elements. The segments must tile them, each own shard must be
/// within its segment, and what is counted within the shard.
pub(crate) fn check_segments(segments: &[Segment]) -> Result<usize, OptimError> {
    let mut end = 0;
    for s in segments {
        if s.state.start != end || s.state.end < s.state.start {
            return Err(OptimError::Segments {
                unit: s.name.clone(),
                expected: end,
                got: s.state.start,
            });
        }
        let Range {
            start,
            end: shard_end,
        } = s.own_shard;
        if start > shard_end || shard_end > s.len() {
            return Err(OptimError::OwnShard {
                unit: s.name.clone(),
                start,
                end: shard_end,
                len: s.len(),
            });
        }
        let counted = &s.counted;
        if counted.start < start || counted.start > counted.end || counted.end > shard_end {
            return Err(OptimError::Counted {
                unit: s.name.clone(),
                start: counted.start,
                end: counted.end,
                shard: start..shard_end,
            });
        }
        end = s.state.end;
    }

    Ok(end)
}

/// One launch of an update rule: a range of the state, and its slices.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    pub(crate) state: Range<usize>,
    pub(crate) grad: AnySlice,
    pub(crate) param: AnySlice,
    /// The position of its rules in `Resolved::launch_rules`.
    pub(crate) rules: usize,
    pub(crate) phase: Phase,
}

/// The part of an update that a launch is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Phase {
    /// All of it.
    Update,
    /// Slots are updated, and the direction in which a matrix moves is written here, in fp32.
    Direction(AnySlice),
    /// Weights are updated by this part of an orthogonalised matrix, in fp32.
    Apply(AnySlice),
}

impl Launch {
    /// A part of the launch.
    pub(crate) fn slice(&self, range: Range<usize>) -> Self {
        Self {
            state: self.state.start + range.start..self.state.start + range.end,
            grad: self.grad.slice(range.clone()),
            param: self.param.slice(range.clone()),
            rules: self.rules,
            phase: match self.phase {
                Phase::Update => Phase::Update,
                Phase::Direction(slice) => Phase::Direction(slice.slice(range)),
                Phase::Apply(slice) => Phase::Apply(slice.slice(range)),
            },
        }
    }
}

/// Cuts the update into launches of at most `max_elems` elements. If `join`, adjacent slices with
/// equal rules share a launch; only GPU slices may be joined, because a host slice must not cross
/// the end of its allocation.
pub(crate) fn launches(
    slices: impl Iterator<Item = Launch>,
    join: bool,
    max_elems: usize,
) -> Vec<Launch> {
    let mut launches: Vec<Launch> = Vec::new();
    for next in slices.filter(|s| !s.state.is_empty()) {
        if let Some(last) = launches
            .last_mut()
            .filter(|last| join && last.rules == next.rules && last.state.end == next.state.start)
            && matches!((last.phase, next.phase), (Phase::Update, Phase::Update))
            && let (Some(grad), Some(param)) =
                (joined(last.grad, next.grad), joined(last.param, next.param))
        {
            *last = Launch {
                state: last.state.start..next.state.end,
                grad,
                param,
                ..next
            };
        } else {
            launches.push(next);
        }
    }

    if launches.iter().all(|l| l.state.len() <= max_elems) {
        return launches;
    }
    launches
        .iter()
        .flat_map(|launch| pieces(launch, max_elems))
        .collect()
}

/// The launch in pieces of `max_elems` elements; the last may be smaller.
fn pieces(launch: &Launch, max_elems: usize) -> impl Iterator<Item = Launch> {
    let len = launch.state.len();
    (0..len)
        .step_by(max_elems)
        .map(move |at| launch.slice(at..len.min(at.saturating_add(max_elems))))
}

/// `a` and `b` as one slice, if `b` starts at the end of `a` and has its dtype.
fn joined(a: AnySlice, b: AnySlice) -> Option<AnySlice> {
    let adjacent = a.as_ptr().wrapping_add(a.len_bytes()) == b.as_ptr()
        && a.dtype() == b.dtype()
        && a.device() == b.device();
    // SAFETY: `b` follows `a`, so both makers' promises hold for the whole. Only slices of GPUs get
    // here: no Rust reference to it is made, which would have to stay within one allocation.
    adjacent.then(|| unsafe {
        AnySlice::from_raw_parts(a.as_ptr(), a.len() + b.len(), a.dtype(), a.device())
    })
}

#[cfg(test)]
mod tests {
    use zero_alloc::device::{DType, DeviceId};

    use super::*;

    fn slice(at: usize, len: usize, dtype: DType) -> AnySlice {
        // SAFETY: never accessed.
        unsafe {
            AnySlice::from_raw_parts(
                std::ptr::without_provenance_mut(at),
                len,
                dtype,
                DeviceId::HOST,
            )
        }
    }

    #[test]
    fn adjacent_units_become_one_launch() {
        // bf16 gradients, adjacent except for the last; adjacent parameters; the second unit is
        // empty.
        let lens = [10usize, 0, 6, 4, 3];
        let mut slices = Vec::new();
        let mut end = 0;
        for (i, &len) in lens.iter().enumerate() {
            let gap = if i == 4 { 64 } else { 0 };
            slices.push(Launch {
                state: end..end + len,
                grad: slice(4096 + 2 * end + gap, len, DType::Bf16),
                param: slice(8192 + 4 * end, len, DType::F32),
                rules: 0,
                phase: Phase::Update,
            });
            end += len;
        }

        let found = |join, max_elems| {
            let launches = launches(slices.iter().cloned(), join, max_elems);
            launches
                .into_iter()
                .map(|l| (l.state, l.grad.len(), l.param.as_ptr().addr()))
                .collect::<Vec<_>>()
        };

        assert_eq!(found(true, 20), [(0..20, 20, 8192), (20..23, 3, 8192 + 80)]);
        assert_eq!(found(false, usize::MAX).len(), 4);
        // Each launch is cut into pieces of at most 8 elements.
        let cut = [
            (0..8, 8, 8192),
            (8..16, 8, 8224),
            (16..20, 4, 8256),
            (20..23, 3, 8272),
        ];
        assert_eq!(found(true, 8), cut);
        assert_eq!(found(false, 1).len(), 23);
        // A slice with other rules is a separate launch.
        slices[2].rules = 1;
        assert_eq!(launches(slices.iter().cloned(), true, usize::MAX).len(), 4);
        slices[2].rules = 0;
        // So is one of another dtype.
        slices[2].grad = slice(4096 + 20, 6, DType::F16);
        assert_eq!(launches(slices.into_iter(), true, usize::MAX).len(), 4);
    }
}
