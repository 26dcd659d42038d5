//! The parameters, buffers, threads and batch of a model on the host, and the operations over them.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use zero_alloc::device::{AnySlice, DType, DeviceError, DeviceId, DeviceSlice, Stream};
use zero_alloc::host::HostStream;
use zero_trainer::{Batch, ModelError, Pass};

use super::buffers::Buffers;
use super::operations::Operations;
use super::params::{self, Flat, FlatUnit, ParamRanges, PassKind};
use crate::ops::Threads;
use crate::ops::bf16::Bf16Products;
use crate::ops::dropout::Draws;
use crate::options::ModelOptions;

/// The engine of a model.
pub(super) struct Engine {
    pub(super) ops: Arc<Operations>,
    pub(super) options: ModelOptions,
    pub(super) passes: Vec<Pass>,
    pub(super) ranges: Arc<ParamRanges>,
    pub(super) buffers: Buffers,
    /// The stream that orders the passes.
    pub(super) stream_id: u64,
    pub(super) threads: Threads,
    /// This rank's tokens.
    pub(super) batch: Arc<Batch>,
    /// Those of all ranks that share its sequences.
    pub(super) whole: Arc<Batch>,
    pub(super) draws: Arc<Draws>,
}

impl Engine {
    /// Enqueues writing the table of angles.
    pub(super) fn fill_table(&self, stream: &HostStream) -> Result<(), ModelError> {
        let table = self.buffers.table;
        let ops = Arc::clone(&self.ops);
        stream.enqueue("constants", move || {
            // SAFETY: the buffer is this model's, and the stream orders its passes.
            ops.config.fill_table(unsafe { table.as_host_mut() });
            Ok(())
        })?;
        Ok(())
    }

    /// Enqueues `work` on the threads of this rank. It receives the flat parameters of the pass, in
    /// fp32 or for products in bf16, and the gradients, both as host slices.
    pub(super) fn enqueue(
        &self,
        stream: &HostStream,
        label: &'static str,
        pass: usize,
        params: &[AnySlice],
        grads: &[DeviceSlice<f32>],
        work: impl FnOnce(Flat<'_>, Vec<&mut [f32]>) + Send + 'static,
    ) -> Result<(), ModelError> {
        self.check(stream, label, params, grads)?;
        let ranges = Arc::clone(&self.ranges);
        let threads = self.threads.clone();
        let upcast = self.buffers.upcast;
        let products = self.ops.products;
        let kind = match pass {
            0 => PassKind::Embedding,
            _ if pass + 1 == self.passes.len() => PassKind::Head,
            _ => PassKind::Block,
        };
        let table = self.buffers.table;
        let params = params.to_vec();
        let grads = grads.to_vec();
        let batch = Arc::clone(&self.batch);
        let whole = Arc::clone(&self.whole);
        let draws = Arc::clone(&self.draws);

        stream.enqueue(label, move || {
            threads.run(|| {
                let mut flats = Vec::with_capacity(params.len());
                let mut used = 0;
                for slice in params {
                    let vectors = match flats.is_empty() {
                        true => ranges.vectors(kind),
                        false => Vec::new(),
                    };
                    flats.push(match products {
                        Some(products) => in_bf16(slice, upcast, &mut used, &vectors, products)?,
                        None => FlatUnit::F32(in_fp32(slice, upcast, &mut used)?),
                    });
                }
                let on_host = |grad: DeviceSlice<f32>| {
                    // SAFETY: `check` found host memory, and that the gradients overlap neither one
                    // another nor a parameter; their makers promised accesses ordered by the
                    // stream.
                    unsafe { grad.as_host_mut() }
                };
                let grads = grads.into_iter().map(on_host).collect();
                work(
                    Flat {
                        ranges: &ranges,
                        flats,
                        layer: pass.saturating_sub(1),
                        // SAFETY: the buffer is this model's, and nothing writes it after `new`.
                        table: unsafe { table.as_host() },
                        batch: &batch,
                        whole: &whole,
                        draws: &draws,
                    },
                    grads,
                );
                Ok(())
            })
        })?;

        Ok(())
    }

    /// Checks the slices of a pass, of which it makes Rust slices: host memory, and what is written
    /// overlaps nothing. The model's own buffers are ordered by one stream.
    pub(super) fn check(
        &self,
        stream: &HostStream,
        label: &'static str,
        read: &[AnySlice],
        written: &[DeviceSlice<f32>],
    ) -> Result<(), ModelError> {
        if stream.id() != self.stream_id {
            let name = stream.name();
            return Err(ModelError::from(format!(
                "{label}: stream {name} is not the one that the model was made for"
            )));
        }

        let extent =
            |slice: AnySlice| slice.as_ptr().addr()..slice.as_ptr().addr() + slice.len_bytes();
        let written: Vec<AnySlice> = written.iter().map(|slice| slice.erase()).collect();
        for (i, &slice) in written.iter().chain(read).enumerate() {
            slice.check_device(label, DeviceId::HOST)?;
            let a = extent(slice);
            for b in written.iter().take(i).map(|&slice| extent(slice)) {
                if a.start < b.end && b.start < a.end {
                    return Err(ModelError::from(format!(
                        "{label}: a gradient overlaps another argument"
                    )));
                }
            }
        }

        Ok(())
    }
}

/// Returns the flat parameter in fp32: the slice itself, or a copy in `upcast` behind its first
/// `used` elements.
fn in_fp32<'a>(
    slice: AnySlice,
    upcast: DeviceSlice<f32>,
    used: &mut usize,
) -> Result<&'a [f32], DeviceError> {
    if slice.dtype() == DType::F32 {
        // SAFETY: `check` found host memory, apart from what the pass writes; its maker promised
        // ordered accesses.
        return Ok(unsafe { slice.typed::<f32>()?.as_host() });
    }
    let copy = upcast.slice(*used..*used + slice.len());
    *used += slice.len();
    // SAFETY: the workspace is this model's, one part a parameter, and its one stream orders the
    // passes.
    let out = unsafe { copy.as_host_mut() };
    params::upcast(slice, out)?;
    // SAFETY: as above; the writable view has ended.
    Ok(unsafe { copy.as_host() })
}

/// Returns the flat parameter as it is, with a copy of its `vectors` in `upcast`, behind its first
/// `used` elements.
fn in_bf16<'a>(
    slice: AnySlice,
    upcast: DeviceSlice<f32>,
    used: &mut usize,
    vectors: &[Range<usize>],
    products: Bf16Products,
) -> Result<FlatUnit<'a>, DeviceError> {
    // SAFETY: `check` found host memory, apart from what the pass writes; its maker promised
    // ordered accesses.
    let elems = unsafe { slice.typed::<bf16>()?.as_host() };
    let copy = upcast.slice(*used..*used + slice.len());
    *used += slice.len();
    // SAFETY: as in `in_fp32`.
    let out = unsafe { copy.as_host_mut() };
    for range in vectors {
        let pairs = out[range.clone()].iter_mut().zip(&elems[range.clone()]);
        pairs.for_each(|(out, elem)| *out = elem.to_f32());
    }
    Ok(FlatUnit::Bf16 {
        elems,
        // SAFETY: as above; the writable view has ended.
        vectors: unsafe { copy.as_host() },
        products,
    })
}
