//! Runs of a parameter's part at equal distances, which one operation copies: of a matrix that is
//! cut by columns they are its rows.

use std::ops::Range;

use zero_shard::TensorRun;

/// Ranges of one length at equal distances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Strided {
    start: u64,
    pub(crate) len: u64,
    pub(crate) stride: u64,
    pub(crate) count: u64,
}

impl Strided {
    fn one(range: &Range<u64>) -> Self {
        let len = range.end - range.start;
        Self {
            start: range.start,
            len,
            stride: len,
            count: 1,
        }
    }

    /// From the first element to the last.
    pub(crate) fn elems(&self) -> Range<u64> {
        let last = self.start + (self.count - 1) * self.stride;
        self.start..last + self.len
    }

    /// With `next` behind them, if that has their length and distance.
    fn with(&self, next: &Range<u64>) -> Option<Self> {
        let last = self.start + (self.count - 1) * self.stride;
        let stride = next.start.checked_sub(last)?;
        let fits = match self.count {
            1 => stride >= self.len,
            _ => stride == self.stride,
        };
        (fits && next.end - next.start == self.len).then_some(Self {
            stride,
            count: self.count + 1,
            ..self.clone()
        })
    }
}

/// Runs that are joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RunRows {
    pub(crate) in_part: Strided,
    /// `None` if it is padding.
    pub(crate) in_whole: Option<Strided>,
}

impl RunRows {
    fn with(&self, next: &TensorRun) -> Option<Self> {
        let whole = self.in_whole.as_ref()?;
        Some(Self {
            in_part: self.in_part.with(&next.in_part)?,
            in_whole: Some(whole.with(next.in_whole.as_ref()?)?),
        })
    }
}

/// The runs, in their order, those at equal distances joined.
pub(crate) fn run_rows(runs: impl IntoIterator<Item = TensorRun>) -> Vec<RunRows> {
    let mut all: Vec<RunRows> = Vec::new();
    for run in runs {
        let joined = all.last().and_then(|last| last.with(&run));
        match (joined, all.last_mut()) {
            (Some(joined), Some(last)) => *last = joined,
            _ => all.push(RunRows {
                in_part: Strided::one(&run.in_part),
                in_whole: run.in_whole.as_ref().map(Strided::one),
            }),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zero_shard::{ParamSpec, TensorCut, TensorPart};

    use super::*;

    fn cut_of(dim: usize) -> TensorCut {
        TensorCut::Dim { dim, blocks: 1 }
    }

    fn ranges(of: &Strided) -> impl Iterator<Item = Range<u64>> {
        let Strided {
            start, len, stride, ..
        } = *of;
        (0..of.count).map(move |nth| start + nth * stride..start + nth * stride + len)
    }

    #[test]
    fn columns_of_a_matrix_take_few_copies() {
        let whole = ParamSpec::new("w", [100, 12]);
        let cut = cut_of(1);
        let part = TensorPart::new(1, 3).unwrap();
        let rows = |range| run_rows(part.runs(&whole, cut, range).unwrap());
        assert_eq!(rows(0..400).len(), 1);
        // The end of a row, whole rows, and the start of one.
        assert_eq!(rows(3..398).len(), 3);
    }

    proptest! {
        #[test]
        fn joined_runs_are_the_same_runs(
            shape in prop::collection::vec(1_u64..7, 1..4),
            dim in 0_usize..3,
            (ranks, rank) in (1_u64..5).prop_flat_map(|ranks| (Just(ranks), 0..ranks)),
            ends in [0.0..1.0, 0.0..1.0],
        ) {
            let dim = dim % shape.len();
            let whole = ParamSpec::new("w", shape);
            let part = TensorPart::new(rank, ranks).unwrap();
            let cut = cut_of(dim);
            let shape = part.shape(&whole, cut);
            prop_assume!(shape.is_ok(), "a rank would have nothing");
            let elems: u64 = shape.unwrap().iter().product();
            let [a, b] = ends.map(|end: f64| (end * elems as f64) as u64);
            let runs: Vec<_> = part.runs(&whole, cut, a.min(b)..a.max(b)).unwrap().collect();
            let mut again = Vec::new();
            for rows in run_rows(runs.clone()) {
                let in_whole: Vec<_> = match &rows.in_whole {
                    Some(whole) => ranges(whole).map(Some).collect(),
                    None => vec![None],
                };
                let pairs = ranges(&rows.in_part).zip(in_whole);
                again.extend(pairs.map(|(in_part, in_whole)| TensorRun { in_part, in_whole }));
            }
            prop_assert_eq!(again, runs);
        }
    }
}
