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

    let counter = Counter::new(seed, &param.name);
    match rule {
        Rule::Constant(value) => out.fill(value),
        Rule::Normal(std) => fill_by(out, range.start, |group| {
            counter.four_normals(group).map(|n| n * std)
        }),
        Rule::Uniform(bound) => fill_by(out, range.start, |group| {
            counter.four_uniforms(group).map(|n| n * bound)
        }),
    }

    Ok(())
}

/// How the elements of a parameter are chosen.
pub(crate) enum Rule {
    Constant(f32),
    /// Normal with this standard deviation.
    Normal(f32),
    /// Uniform between this and its negative.
    Uniform(f32),
}

/// Fills `out` with elements of a sequence from `start` on, of which `four` returns those of a group.
fn fill_by(out: &mut [f32], start: u64, four: impl Fn(u64) -> [f32; 4] + Sync) {
    let chunks = out.par_chunks_mut(CHUNK).enumerate();
    chunks.for_each(|(i, chunk)| fill_chunk(chunk, start + (i * CHUNK) as u64, &four));
}

fn fill_chunk(out: &mut [f32], start: u64, of_group: impl Fn(u64) -> [f32; 4]) {
    let mut group = start / 4;
    let mut skip = (start % 4) as usize;
    let mut rest = out;
    while !rest.is_empty() {
        let four = &of_group(group)[skip..];
        let (now, later) = rest.split_at_mut(four.len().min(rest.len()));
        now.copy_from_slice(&four[..now.len()]);
        (rest, group, skip) = (later, group + 1, 0);
    }
}
