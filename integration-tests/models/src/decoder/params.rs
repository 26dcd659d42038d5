//! The range of each parameter in the flat parameter of its unit.

use std::ops::Range;

use half::{bf16, f16};
use rayon::prelude::*;
use zero_alloc::device::{AnySlice, Cause, DType, DeviceError, Element};
use zero_kernels::{Float, host};
use zero_shard::UnitSpec;
use zero_trainer::Batch;

use crate::ops::dropout::Draws;
use crate::ops::rows_per_thread;

/// The name and range of each parameter of a unit. A part of the name (`attn.c_attn.weight`) finds
/// a parameter.
pub(crate) struct UnitParams(Vec<(String, Range<usize>)>);

impl UnitParams {
    pub(crate) fn new(unit: &UnitSpec) -> Self {
        let mut end = 0;
        let place = |p: &zero_shard::ParamSpec| {
            let start = end;
            end += p.shape.iter().product::<u64>() as usize;
            (p.name.clone(), start..end)
        };
        Self(unit.params.iter().map(place).collect())
    }

    /// The range of the parameter whose name contains `part`.
    pub(crate) fn range(&self, part: &str) -> Range<usize> {
        let found = self
            .0
            .iter()
            .find(|(name, _)| name.contains(part))
            .map(|(_, range)| range.clone());
        debug_assert!(found.is_some(), "no parameter {part}");
        found.unwrap_or_default()
    }

    /// Splits a flat gradient of the unit into those of its first N parameters.
    pub(crate) fn split_mut<'a, const N: usize>(&self, flat: &'a mut [f32]) -> [&'a mut [f32]; N] {
        let mut rest = flat;
        std::array::from_fn(|i| {
            let (param, tail) = std::mem::take(&mut rest).split_at_mut(self.0[i].1.len());
            rest = tail;
            param
        })
    }
}

/// The flat parameters of a pass in fp32, by the units that it reads.
pub(crate) struct Flat<'a> {
    pub(crate) units: &'a [UnitParams],
    pub(crate) reads: &'a [usize],
    pub(crate) flats: Vec<&'a [f32]>,
    /// The block of the pass, from 0.
    pub(crate) layer: usize,
    /// The architecture's constants.
    pub(crate) table: &'a [f32],
    /// The rank's tokens.
    pub(crate) batch: &'a Batch,
    /// The tokens of all ranks that share the sequences.
    pub(crate) whole: &'a Batch,
    /// Empty if nothing is dropped.
    pub(crate) draws: &'a Draws,
}

impl<'a> Flat<'a> {
    /// The parameter of the `read`-th unit whose name contains `part`.
    pub(crate) fn get(&self, read: usize, part: &str) -> &'a [f32] {
        &self.flats[read][self.units[self.reads[read]].range(part)]
    }

    /// Layout of the `read`-th unit.
    pub(crate) fn unit(&self, read: usize) -> &'a UnitParams {
        &self.units[self.reads[read]]
    }

    /// The head's matrix `[vocab, c]`; if tied, the embedding's. Each is the `elems` elements that
    /// the architectures put where it is found: last in the head, first in the embedding.
    pub(crate) fn head_weight(&self, elems: usize) -> &'a [f32] {
        match self.flats[..] {
            [_, embedding, ..] => &embedding[..elems],
            [head] => &head[head.len() - elems..],
            [] => &[],
        }
    }
}

/// Writes `slice` to `out` in fp32, on all threads.
pub(crate) fn upcast(slice: AnySlice, out: &mut [f32]) -> Result<(), DeviceError> {
    fn from<T: Element + Float>(slice: AnySlice, out: &mut [f32]) -> Result<(), DeviceError> {
        // SAFETY: the model has checked that it is host memory apart from `out` and the gradients;
        // its maker promised ordered accesses.
        let src = unsafe { slice.typed::<T>()?.as_host() };
        let n = rows_per_thread(out.len());
        let parts = (out.par_chunks_mut(n), src.par_chunks(n)).into_par_iter();
        parts
            .try_for_each(|(out, src)| host::cast(src, out, 1.0))
            .map_err(|e| DeviceError::Operation {
                stream: String::new(),
                op: "upcast".to_owned(),
                cause: Cause::new(e),
            })
    }
    match slice.dtype() {
        DType::Bf16 => from::<bf16>(slice, out),
        _ => from::<f16>(slice, out),
    }
}
