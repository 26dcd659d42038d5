//! From a parameter's gradient to the sum of its unit's shard over ranks, while candle's backward
//! runs.
//!
//! | buffer | elements | lifetime |
//! |---|---|---|
//! | gradient of a parameter | candle's tensor | from the hook until its unit is packed |
//! | bucket | constant | from packing until the reduced piece is stored |
//! | sums | stage 1: all units; stage 2: this rank's shards | the optimizer's lifetime |

use std::error::Error;
use std::sync::Arc;
use std::thread::{self, ThreadId};

use candle_core::{CpuStorage, Result, Tensor, bail};
use zero_alloc::device::{AnySlice, DType, DeviceId, Reduced};
use zero_alloc::host::{HostDevice, HostStream};
use zero_comm::{Buckets, SumInto};
use zero_kernels::host::HostKernels;
use zero_shard::{Layout, ParamId};

/// A failure of the crates below, which becomes a candle error.
pub(crate) type Failure = Box<dyn Error + Send + Sync>;

pub(crate) fn candle_error(error: impl Into<Failure>) -> candle_core::Error {
    candle_core::Error::wrap(error.into())
}

/// The reduction of one unit in a backward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitLaunch {
    /// The unit's name.
    pub unit: String,
    /// Parameters whose gradients had arrived: position of the launch in backward.
    pub after_params: usize,
    /// Elements of the unit, with padding.
    pub elems: u64,
}

/// The record of the last backward.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackwardReport {
    /// The names of the parameters in the order of their gradients.
    pub arrivals: Vec<String>,
    /// The reductions, in order.
    pub launches: Vec<UnitLaunch>,
    /// Gradient elements copied: into buckets, and before that if candle passed a gradient that is
    /// not contiguous.
    pub copied_elems: u64,
    /// Trained parameters whose gradient candle's `GradStore` has after backward: none, because the
    /// hook takes it.
    pub kept_by_candle: usize,
}

/// Collects the gradients of a unit, and reduces the unit when its last gradient has arrived.
pub(crate) struct Reducer {
    pub(crate) layout: Arc<Layout>,
    /// The place of each parameter, in the order of `ShardedVars`.
    pub(crate) places: Vec<ParamId>,
    pub(crate) buckets: Buckets<HostDevice>,
    pub(crate) kernels: Arc<HostKernels>,
    pub(crate) compute: HostStream,
    /// The storage of this rank's shard of each unit's sum.
    pub(crate) sums: Vec<AnySlice>,
    /// The sums of the micro-batches so far.
    pub(crate) reduced: Vec<Option<Reduced<HostDevice>>>,
    /// The gradients of this backward that wait for others of their unit.
    pub(crate) waiting: Vec<Vec<Option<Tensor>>>,
    /// Micro-batches of this step before this one.
    pub(crate) micro_batches: usize,
    /// The thread of the backward that runs; candle calls the hooks on it.
    pub(crate) backward: Option<ThreadId>,
    pub(crate) report: BackwardReport,
}

impl Reducer {
    /// Starts a backward on this thread.
    pub(crate) fn begin(&mut self) {
        self.backward = Some(thread::current().id());
        self.report = BackwardReport::default();
        self.waiting = self
            .layout
            .units()
            .iter()
            .map(|unit| vec![None; unit.params.len()])
            .collect();
    }

    /// Receives the gradient of a parameter.
    pub(crate) fn gradient(&mut self, param: usize, grad: &Tensor) -> Result<()> {
        let ParamId { unit, param } = self.places[param];
        let (elems, layout) = (grad.elem_count() as u64, &self.layout.units()[unit]);
        if self.backward != Some(thread::current().id()) {
            bail!(
                "a gradient of {} from a backward that its ZeroAdamW did not start: the loss of another ZeroAdamW, of \
                 another thread or of a plain Tensor::backward depends on it; call ZeroAdamW::backward of the optimizer \
                 that has this parameter, with a loss of no other",
                layout.params[param].name
            );
        }

        if !grad.is_contiguous() {
            self.report.copied_elems += elems;
        }
        self.report.copied_elems += elems;
        self.report.arrivals.push(layout.params[param].name.clone());
        let Some(waiting) = self.waiting[unit].get_mut(param) else {
            bail!(
                "a second gradient of {} in one backward",
                layout.params[param].name
            );
        };

        *waiting = Some(grad.contiguous()?);
        let complete: Option<Vec<Tensor>> = self.waiting[unit].iter().cloned().collect();
        let Some(grads) = complete else { return Ok(()) };
        self.waiting[unit].clear();
        let (name, after_params) = (layout.name.clone(), self.report.arrivals.len());
        self.report.launches.push(UnitLaunch {
            unit: name,
            after_params,
            elems: layout.padded_elems,
        });

        self.reduce(unit, grads)
    }

    fn reduce(&mut self, unit: usize, grads: Vec<Tensor>) -> Result<()> {
        let mut parts = Vec::with_capacity(grads.len());
        for (grad, placed) in grads.iter().zip(&self.layout.units()[unit].params) {
            // SAFETY: only the compute stream reads the slice, in `reduce_unit`; the tensor lives
            // until that stream has passed the operation enqueued below. Nobody else has the
            // tensor: candle has computed it, and drops its handle.
            parts.push((unsafe { readable(grad)? }, placed.offset_elems as usize));
        }
        let into = match self.reduced[unit].take() {
            Some(earlier) if self.micro_batches > 0 => SumInto::Add(earlier),
            _ => SumInto::Write(self.sums[unit]),
        };
        let reduced = self.buckets.reduce_unit(&*self.kernels, &parts, into);
        // Whatever was enqueued: the tensors are freed behind it. The stream is this crate's and
        // never closed, so an error does not drop them early.
        let freed = self.compute.enqueue("free gradients", move || {
            drop(grads);
            Ok(())
        });
        self.reduced[unit] = Some(reduced.map_err(candle_error)?);
        freed.map_err(candle_error)
    }

    /// Ends a backward: every parameter must have a gradient.
    pub(crate) fn end(&mut self) -> Result<()> {
        let mut missing = Vec::new();
        for (unit, waiting) in self.layout.units().iter().zip(&self.waiting) {
            missing.extend(
                unit.params
                    .iter()
                    .zip(waiting)
                    .filter(|(_, grad)| grad.is_none())
                    .map(|(p, _)| p.name.as_str()),
            );
        }

        self.waiting.iter_mut().for_each(Vec::clear);
        if !missing.is_empty() {
            bail!(
                "{} of {} parameters got no gradient: {}; candle's backward ends at operations without one, such as \
                 candle_nn's fused rms_norm, layer_norm, softmax_last_dim and rope; exclude these parameters by the \
                 filter of ShardedVars::new, or use a model without these operations",
                missing.len(),
                self.places.len(),
                missing.join(", ")
            );
        }

        self.micro_batches += 1;
        Ok(())
    }
}

/// The elements of a contiguous F32 tensor, to be read.
///
/// # Safety
/// The tensor outlives every use of the slice, nothing writes to the tensor until then, and the
/// uses only read.
unsafe fn readable(tensor: &Tensor) -> Result<AnySlice> {
    let (storage, layout) = tensor.storage_and_layout();
    let (candle_core::Storage::Cpu(CpuStorage::F32(values)), Some((start, end))) =
        (&*storage, layout.contiguous_offsets())
    else {
        bail!(
            "expected a contiguous F32 tensor on the CPU, got {:?} on {:?}",
            tensor.dtype(),
            tensor.device()
        );
    };
    let values = &values[start..end];
    // SAFETY: the caller's promise; the pointer is only read through.
    Ok(unsafe {
        AnySlice::from_raw_parts(
            values.as_ptr().cast_mut().cast(),
            values.len(),
            DType::F32,
            DeviceId::HOST,
        )
    })
}
