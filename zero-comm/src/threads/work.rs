//! What one rank does of a collective, between the two meetings: plain loops over its peers' buffers.
//!
//! The share of rank `r` is segment `r` of the whole buffer, wherever it lies:
//!
//! | collective | rank `r` reads | rank `r` writes |
//! |---|---|---|
//! | reduce_scatter | segment `r` of every `send` | its `recv` |
//! | all_reduce | segment `r` of every `send` | segment `r` of every `recv` |
//! | all_gather | its `send` | segment `r` of every `recv` |
//! | broadcast | segment `r` of the root's buffer | segment `r` of every other buffer |
//! | all_to_all | segment `r` of every `send` | its `recv` |
//!
//! So no byte is written by two ranks, and no byte that a rank writes is read by another: in place, segment
//! `r` of `send` is read by rank `r` alone, before it writes there. That is the argument of every SAFETY
//! comment here; the two meetings order these accesses against everything before and after.

use half::{bf16, f16};
use zero_alloc::device::{AnySlice, DType, DeviceSlice};

use super::slot::Posted;
use crate::call::{Call, Group};
use crate::reduce::{CHUNK_ELEMS, Reducible, Scratch, reduce};
use crate::{Collective, ReduceOp};

/// Bytes copied at a time to all peers, so that the source is read from memory once.
const COPY_CHUNK_BYTES: usize = 64 * 1024;

/// Does the share of `group.rank`; `posted` are the buffers of all ranks.
pub(super) fn run(group: Group, call: &Call, posted: &[Posted]) {
    let Group { rank, world_size } = group;
    let own = call.segments.range(rank, world_size);
    match (call.collective, call.op) {
        (Collective::ReduceScatter | Collective::AllReduce, Some(op)) => {
            let inputs: Vec<AnySlice> = posted.iter().map(|p| p.send.slice(own.clone())).collect();
            let outputs: Vec<AnySlice> = match call.collective {
                Collective::ReduceScatter => vec![posted[rank].recv],
                _ => posted.iter().map(|p| p.recv.slice(own.clone())).collect(),
            };
            match call.dtype {
                DType::F32 => reduce_all::<f32>(op, &inputs, &outputs),
                DType::F64 => reduce_all::<f64>(op, &inputs, &outputs),
                DType::Bf16 => reduce_all::<bf16>(op, &inputs, &outputs),
                DType::F16 => reduce_all::<f16>(op, &inputs, &outputs),
                DType::U8 => reduce_all::<u8>(op, &inputs, &outputs),
            }
        }
        (Collective::AllGather, _) => {
            let outputs: Vec<AnySlice> = posted.iter().map(|p| p.recv.slice(own.clone())).collect();
            copy_to_all(posted[rank].send, &outputs);
        }
        (Collective::Broadcast, _) => {
            let root = call.root.unwrap_or(0);
            let outputs: Vec<AnySlice> = posted.iter().map(|p| p.recv.slice(own.clone())).collect();
            copy_to_all(posted[root].send.slice(own), &outputs);
        }
        (Collective::AllToAll, _) => {
            for (q, peer) in posted.iter().enumerate() {
                let into = posted[rank].recv.slice(call.segments.range(q, world_size));
                copy_to_all(peer.send.slice(own.clone()), &[into]);
            }
        }
        (Collective::Barrier | Collective::ReduceScatter | Collective::AllReduce, _) => {}
    }
}

/// The inputs combined in order, written to every output.
fn reduce_all<T: Reducible>(op: ReduceOp, inputs: &[AnySlice], outputs: &[AnySlice]) {
    let typed = |slices: &[AnySlice]| -> Vec<DeviceSlice<T>> {
        slices.iter().filter_map(|slice| slice.typed().ok()).collect()
    };
    let (inputs, outputs) = (typed(inputs), typed(outputs));
    let len = inputs[0].len();
    let mut scratch = Scratch::<T>::new(len);
    for start in (0..len).step_by(CHUNK_ELEMS) {
        let chunk = start..(start + CHUNK_ELEMS).min(len);
        let input = |rank: usize| {
            // SAFETY: host memory that its maker keeps valid; only this rank accesses the segment now, and
            // writes to it below, when this view is gone.
            unsafe { inputs[rank].slice(chunk.clone()).as_host() }
        };
        reduce(op, inputs.len(), chunk.len(), &mut scratch, input, |round| {
            for output in &outputs {
                // SAFETY: host memory that its maker keeps valid; only this rank accesses it now.
                round(unsafe { output.slice(chunk.clone()).as_host_mut() });
            }
        });
    }
}

/// `from` to every one of `to` that is not `from` itself.
fn copy_to_all(from: AnySlice, to: &[AnySlice]) {
    let (from, len) = (from.bytes(), from.len_bytes());
    for start in (0..len).step_by(COPY_CHUNK_BYTES) {
        let chunk = start..(start + COPY_CHUNK_BYTES).min(len);
        let source = from.slice(chunk.clone()).as_ptr();
        for to in to.iter().map(|to| to.bytes().slice(chunk.clone()).as_ptr()).filter(|&to| to != source) {
            // SAFETY: both are host memory that its maker keeps valid, of the chunk's length; they do not overlap,
            // for a rank's own buffers passed the check and different ranks' buffers are different memory;
            // only this rank accesses `to` now.
            unsafe { std::ptr::copy_nonoverlapping(source, to, chunk.len()) };
        }
    }
}
