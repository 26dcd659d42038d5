//! Dropout: an element becomes 0 with probability p, and the others are divided by 1 - p
//! (Srivastava et al., JMLR 15, 2014).
//!
//! What is dropped is a pure function of the run's seed, the step, the sequence's place in the step,
//! the operation and the element. So backward draws the mask of forward again in place of keeping
//! it, and recomputation, stages, another number of ranks and a resumed run have the same masks.

use multiversion::multiversion;
use rayon::prelude::*;
use zero_trainer::BatchRows;

use super::{rows_per_thread, with_scratch};
use crate::random::{BLOCK, Counter};

/// The streams of random numbers of a batch, one a sequence; empty if nothing is dropped.
#[derive(Clone, Debug, Default)]
pub struct Draws(Vec<Counter>);

impl Draws {
    /// The streams of `count` sequences from the first of `rows`.
    pub fn new(rows: BatchRows, count: usize) -> Self {
        let all = Counter::new(rows.seed, "dropout");
        let numbers = rows.first..rows.first + count as u64;
        Self(numbers.map(|row| all.stream(rows.step, row)).collect())
    }

    /// The dropout of the operation `site` with this probability; `None` if it drops nothing.
    pub fn dropout(&self, probability: f32, site: u32) -> Option<Dropout<'_>> {
        if self.0.is_empty() {
            return None;
        }
        Some(Dropout {
            streams: &self.0,
            limits: Limits::new(probability)?,
            site,
            first: 0,
            row: 0,
            column: 0,
        })
    }

    /// The keys of the streams, for devices that draw the numbers themselves.
    pub fn keys(&self) -> impl Iterator<Item = [u32; 2]> {
        self.0.iter().map(Counter::key)
    }
}

/// What a number does to its element.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// An element whose number is below this is dropped.
    pub(crate) below: u32,
    /// The factor of the others.
    pub(crate) factor: f32,
}

impl Limits {
    /// The limits of a dropout with this probability; `None` if it drops nothing.
    pub(crate) fn new(probability: f32) -> Option<Self> {
        (probability != 0.0).then(|| Self {
            // Exact in fp64; below 2^32, because the probability is below 1.
            below: (f64::from(probability) * 4_294_967_296.0) as u32,
            factor: 1.0 / (1.0 - probability),
        })
    }
}

/// The dropout of one operation.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    streams: &'a [Counter],
    limits: Limits,
    site: u32,
    /// The first line.
    first: usize,
    /// The first row of all sequences' rows.
    row: usize,
    /// The first element of each line.
    column: usize,
}

impl Dropout<'_> {
    /// The same dropout of lines of which the first is line `first` of the sequence.
    #[must_use]
    pub fn from_line(self, first: usize) -> Self {
        Self { first, ..self }
    }

    /// The same dropout of rows of all sequences from row `row` on.
    #[must_use]
    pub(crate) fn of_rows_from(self, row: usize) -> Self {
        Self { row, ..self }
    }

    /// The same dropout of lines of which the first element is element `column`.
    #[must_use]
    pub(crate) fn of_columns_from(self, column: usize) -> Self {
        Self { column, ..self }
    }

    /// Writes the factors of elements `first..` of a line of a sequence.
    pub fn factors(self, out: &mut [f32], sequence: usize, line: usize, first: usize) {
        let high = (self.first + line) as u64;
        let first = self.column + first;
        let low = u64::from(self.site) << 32 | (first / 4) as u64;
        let stream = &self.streams[sequence];
        factors_from(out, stream, [high, low], first % 4, self.limits);
    }

    /// `x *= factors`: x `[batch, seq, c]`, or some of its rows.
    pub fn apply(self, x: &mut [f32], seq: usize, c: usize) {
        let rows = rows_per_thread(x.len() / c);
        x.par_chunks_mut(rows * c).enumerate().for_each(|(i, x)| {
            with_scratch(c, |factors| {
                for (row, x) in (self.row + i * rows..).zip(x.chunks_exact_mut(c)) {
                    self.factors(factors, row / seq, row % seq, 0);
                    multiply(x, factors);
                }
            });
        });
    }

    /// `y = x factors`: y and x `[batch, seq, c]`.
    pub fn of(self, y: &mut [f32], x: &[f32], seq: usize, c: usize) {
        y.copy_from_slice(x);
        self.apply(y, seq, c);
    }

    /// `y = residual + y factors`: all `[batch, seq, c]`.
    pub fn apply_and_add(self, y: &mut [f32], residual: &[f32], seq: usize, c: usize) {
        let rows = rows_per_thread(y.len() / c);
        (y.par_chunks_mut(rows * c), residual.par_chunks(rows * c))
            .into_par_iter()
            .enumerate()
            .for_each(|(i, (y, residual))| {
                let parts = y.chunks_exact_mut(c).zip(residual.chunks_exact(c));
                with_scratch(c, |factors| {
                    for (row, (y, residual)) in (self.row + i * rows..).zip(parts) {
                        self.factors(factors, row / seq, row % seq, 0);
                        multiply_and_add(y, factors, residual);
                    }
                });
            });
    }
}

/// The factors of the numbers of the counters from `[high, low]` on, without the first `skipped`.
#[multiversion(targets = "simd")]
fn factors_from(
    out: &mut [f32],
    stream: &Counter,
    [high, low]: [u64; 2],
    skipped: usize,
    limits: Limits,
) {
    let mut numbers = [0; BLOCK];
    let mut low = low;
    let mut skipped = skipped;
    let mut rest = out;

    while !rest.is_empty() {
        stream.block(&mut numbers, high, low);
        let len = rest.len().min(BLOCK - skipped);
        let (part, after) = rest.split_at_mut(len);
        for (x, number) in part.iter_mut().zip(&numbers[skipped..]) {
            *x = if *number < limits.below {
                0.0
            } else {
                limits.factor
            };
        }

        low += BLOCK as u64 / 4;
        skipped = 0;
        rest = after;
    }
}

#[multiversion(targets = "simd")]
pub(super) fn multiply(x: &mut [f32], factors: &[f32]) {
    for (x, factor) in x.iter_mut().zip(factors) {
        *x *= factor;
    }
}

#[multiversion(targets = "simd")]
fn multiply_and_add(y: &mut [f32], factors: &[f32], residual: &[f32]) {
    for ((y, factor), residual) in y.iter_mut().zip(factors).zip(residual) {
        *y = *y * factor + residual;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rows(seed: u64, step: u64, first: u64) -> BatchRows {
        BatchRows { seed, step, first }
    }

    fn mask(draws: &Draws, p: f32, site: u32, sequence: usize, n: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; n];
        let dropout = draws.dropout(p, site).unwrap();
        dropout.factors(&mut out, sequence, 5, 0);
        out
    }

    /// Four standard errors of the share: 4 sqrt(p (1 - p) / n).
    #[test]
    fn share_of_dropped_elements_is_the_probability() {
        for p in [0.1f32, 0.5, 0.9] {
            let n = 40_000;
            let out = mask(&Draws::new(rows(3, 1, 0), 1), p, 0, 0, n);
            let dropped = out.iter().filter(|x| **x == 0.0).count() as f64 / n as f64;
            let p = f64::from(p);
            let error = 4.0 * (p * (1.0 - p) / n as f64).sqrt();
            assert!((dropped - p).abs() < error, "{dropped} for {p}");
            let mean = out.iter().map(|x| f64::from(*x)).sum::<f64>() / n as f64;
            assert!((mean - 1.0).abs() < error / (1.0 - p) * 1.01, "{mean}");
        }
    }

    #[test]
    fn masks_differ_by_every_coordinate() {
        let base = mask(&Draws::new(rows(1, 2, 3), 2), 0.5, 4, 0, 256);
        let draws = Draws::new(rows(1, 2, 3), 2);
        for other in [
            mask(&Draws::new(rows(9, 2, 3), 2), 0.5, 4, 0, 256),
            mask(&Draws::new(rows(1, 9, 3), 2), 0.5, 4, 0, 256),
            mask(&Draws::new(rows(1, 2, 9), 2), 0.5, 4, 0, 256),
            mask(&draws, 0.5, 9, 0, 256),
            mask(&draws, 0.5, 4, 1, 256),
        ] {
            // Masks that are independent agree in half of their elements, with deviation 8.
            let same = base.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!((128 - 48..128 + 48).contains(&same), "{same}");
        }
        // Row 4 of the step is the second of a batch from row 3, and the first of one from row 4.
        let of_other_rank = mask(&Draws::new(rows(1, 2, 4), 1), 0.5, 4, 0, 256);
        assert_eq!(mask(&draws, 0.5, 4, 1, 256), of_other_rank);
    }

    /// The factor of one element by the definition: its number is one of the four of its counter.
    fn plain(
        draws: &Draws,
        p: f32,
        site: u32,
        sequence: usize,
        line: usize,
        element: usize,
    ) -> f32 {
        let low = u64::from(site) << 32 | (element / 4) as u64;
        let number = draws.0[sequence].four(line as u64, low)[element % 4];
        if f64::from(number) < (f64::from(p) * 2f64.powi(32)).floor() {
            0.0
        } else {
            1.0 / (1.0 - p)
        }
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|x| x.to_bits()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn factors_are_those_of_the_definition(
            of in (any::<u64>(), any::<u64>(), any::<u32>()),
            site: u32,
            p in 1e-6f32..0.999,
            sequence in 0usize..3,
            first_line in 0usize..1 << 40,
            line in 0usize..1 << 20,
            first in prop_oneof![0usize..300, 0usize..1 << 30],
            n in 0usize..400,
        ) {
            let (seed, step, row) = of;
            let draws = Draws::new(rows(seed, step, u64::from(row)), 3);
            let dropout = draws.dropout(p, site).unwrap().from_line(first_line);
            let mut out = vec![f32::NAN; n];
            dropout.factors(&mut out, sequence, line, first);
            let expected = (first..first + n)
                .map(|element| plain(&draws, p, site, sequence, first_line + line, element));
            prop_assert_eq!(out, expected.collect::<Vec<_>>());
        }

        #[test]
        fn rows_are_multiplied_by_the_factors_of_their_elements(
            seed: u64,
            p in 0.01f32..0.9,
            [batch, seq, c, before] in [1usize..4, 1..6, 1..150, 0..5],
        ) {
            let draws = Draws::new(rows(seed, 1, 2), batch);
            let before = before.min(batch * seq - 1);
            let dropout = draws.dropout(p, 3).unwrap().from_line(9).of_rows_from(before);
            let count = (batch * seq - before) * c;
            let value = |i: usize| (i % 17) as f32 - 8.0;
            let x: Vec<f32> = (0..count).map(value).collect();
            let residual: Vec<f32> = (0..count).map(|i| value(5 * i + 1)).collect();

            let mut y = vec![f32::NAN; count];
            dropout.of(&mut y, &x, seq, c);
            let mut sum = x.clone();
            dropout.apply_and_add(&mut sum, &residual, seq, c);

            let factor = |i: usize| {
                let row = before + i / c;
                plain(&draws, p, 3, row / seq, 9 + row % seq, i % c)
            };
            let product: Vec<f32> = (0..count).map(|i| x[i] * factor(i)).collect();
            prop_assert_eq!(bits(&y), bits(&product));
            let expected: Vec<f32> = product.iter().zip(&residual).map(|(y, r)| y + r).collect();
            prop_assert_eq!(bits(&sum), bits(&expected));
        }
    }

    #[test]
    fn nothing_is_dropped_without_draws_or_probability() {
        assert!(Draws::default().dropout(0.5, 0).is_none());
        assert!(Draws::new(rows(1, 0, 0), 1).dropout(0.0, 0).is_none());
    }
}
