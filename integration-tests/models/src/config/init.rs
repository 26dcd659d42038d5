//! Initial parameters: a pure function of (seed, parameter, element).

use std::ops::Range;

use rayon::prelude::*;
use zero_shard::ParamSpec;

use super::ConfigError;
use crate::random::Counter;

/// Elements per task; a multiple of 4, because one counter generates four numbers.
pub(crate) const CHUNK: usize = 1 << 16;

/// Writes the initial values of elements `range` of a parameter to `out`.
pub(crate) fn fill(
    seed: u64,
    param: &ParamSpec,
    rule: Rule,
    range: Range<u64>,
    out: &mut [f32],
) -> Result<(), ConfigError> {
    let numel: u64 = param.shape.iter().product();
    if range.start > range.end || range.end > numel || range.end - range.start != out.len() as u64 {
        return Err(ConfigError::BadRange {
            name: param.name.clone(),
            start: range.start,
            end: range.end,
            numel,
            len: out.len(),
        });
    }

    match rule {
        Rule::Constant(value) => out.fill(value),
        Rule::Normal(std) => {
            let counter = Counter::new(seed, &param.name);
            out.par_chunks_mut(CHUNK)
                .enumerate()
                .for_each(|(i, chunk)| {
                    fill_normal(&counter, range.start + (i * CHUNK) as u64, std, chunk);
                });
        }
    }

    Ok(())
}

/// How the elements of a parameter are chosen.
pub(crate) enum Rule {
    Constant(f32),
    /// Normal with this standard deviation.
    Normal(f32),
}

/// Fills `out` with the elements of the normal sequence of `counter` from `start` on, times `std`.
fn fill_normal(counter: &Counter, start: u64, std: f32, out: &mut [f32]) {
    let mut group = start / 4;
    let mut skip = (start % 4) as usize;
    let mut rest = out;
    while !rest.is_empty() {
        let four = &counter.four_normals(group)[skip..];
        let (now, later) = rest.split_at_mut(four.len().min(rest.len()));
        for (o, n) in now.iter_mut().zip(four) {
            *o = n * std;
        }
        (rest, group, skip) = (later, group + 1, 0);
    }
}
