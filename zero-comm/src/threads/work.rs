//! One rank's share of a collective, between its two waits: plain loops over its peers' buffers.
//!
//! The share of rank `r` is segment `r` of the whole buffer:
//!
//! | collective | rank `r` reads | rank `r` writes |
//! |---|---|---|
//! | reduce_scatter | segment `r` of every `send` | its `recv` |
//! | all_reduce | segment `r` of every `send` | segment `r` of every `recv` |
//! | all_gather | its `send` | segment `r` of every `recv` |
//! | broadcast | segment `r` of the root's buffer | segment `r` of every other buffer |
//! | all_to_all | segment `r` of every `send` | its `recv` |
//!
//! No two ranks write the same byte, and no rank reads a byte that another writes: in place, only
//! rank `r` reads segment `r` of `send`, before it writes there. Every SAFETY comment here relies
//! on this, and on `Checked::check`: each buffer is host memory with the length that its
//! call determines, and a rank's two buffers overlap only in place. Buffers of different ranks are
//! different memory, because the makers of their slices promised that accesses are ordered by
//! streams, and no event orders the ranks' streams within a collective. The two waits order these
//! accesses against everything before and after.

use std::ops::Range;

use half::{bf16, f16};
use zero_alloc::device::{AnySlice, DeviceSlice};

use crate::call::{Call, Checked, Group};
use crate::comm_dtype::CommDType;
use crate::reduce::{CHUNK_ELEMS, Reducible, Store};
use crate::{Collective, ReduceOp, nontemporal};

/// Bytes copied at a time to all peers, so that the source is read from memory once.
const COPY_CHUNK_BYTES: usize = 64 * 1024;

/// Does the share of `group.rank`; `posted` contains the calls of all ranks, by rank.
pub(super) fn run(group: Group, call: &Call, posted: &[Checked]) {
    let Group { rank, world_size } = group;
    let own = call.segments.range(rank, world_size);
    let whole_bytes = call.segments.total(world_size) * call.dtype.size_bytes();
    let everywhere =
        || -> Vec<AnySlice> { posted.iter().map(|p| p.recv.slice(own.clone())).collect() };

    // `buffers`: the number of whole buffers that all ranks together read and write.
    let store = |buffers: usize| {
        if whole_bytes.saturating_mul(buffers) >= nontemporal::THRESHOLD_BYTES {
            Store::PastCache
        } else {
            Store::Cached
        }
    };

    match (call.collective, call.op) {
        (Collective::ReduceScatter | Collective::AllReduce, Some(op)) => {
            let inputs: Vec<AnySlice> = posted.iter().map(|p| p.send.slice(own.clone())).collect();
            let (outputs, store) = match call.collective {
                Collective::ReduceScatter => (vec![posted[rank].recv], store(world_size + 1)),
                _ => (everywhere(), store(2 * world_size)),
            };
            match call.comm_dtype() {
                CommDType::F32 => reduce_all::<f32>(op, &inputs, &outputs, store),
                CommDType::F64 => reduce_all::<f64>(op, &inputs, &outputs, store),
                CommDType::Bf16 => reduce_all::<bf16>(op, &inputs, &outputs, store),
                CommDType::F16 => reduce_all::<f16>(op, &inputs, &outputs, store),
                CommDType::U8 => reduce_all::<u8>(op, &inputs, &outputs, store),
            }
        }
        (Collective::AllGather, _) => {
            copy_to_all(posted[rank].send, &everywhere(), store(world_size + 1))
        }
        (Collective::Broadcast, _) => {
            let root = call.root.unwrap_or(0);
            copy_to_all(
                posted[root].send.slice(own.clone()),
                &everywhere(),
                store(world_size + 1),
            );
        }
        (Collective::AllToAll, _) => {
            // `Slot::post` has compared the lengths of the two parts.
            let received = call.segments.received();
            for (peer, segment) in posted.iter().zip(received.ranges(world_size)) {
                let into = posted[rank].recv.slice(segment);
                let from = peer.call.segments.range(rank, world_size);
                copy_to_all(peer.send.slice(from), &[into], store(2 * world_size));
            }
        }
        (Collective::Barrier | Collective::ReduceScatter | Collective::AllReduce, _) => {}
    }
}

/// Combines the inputs in order and writes the result to every output.
fn reduce_all<T: Reducible>(op: ReduceOp, inputs: &[AnySlice], outputs: &[AnySlice], store: Store) {
    let typed = |slices: &[AnySlice]| -> Vec<DeviceSlice<T>> {
        slices
            .iter()
            .filter_map(|slice| slice.typed().ok())
            .collect()
    };

    let inputs = typed(inputs);
    let outputs = typed(outputs);
    let len = inputs[0].len();
    let views = |range: Range<usize>| -> Vec<&[T]> {
        let view = |input: &DeviceSlice<T>| {
            // SAFETY: host memory that its owner keeps valid; only this rank accesses the segment
            // now, and the view ends before this rank writes to it.
            unsafe { input.slice(range.clone()).as_host() }
        };
        inputs.iter().map(view).collect()
    };

    let in_place = outputs
        .iter()
        .any(|output| inputs.iter().any(|input| input.as_ptr() == output.as_ptr()));
    if let ([output], false) = (&outputs[..], in_place) {
        // SAFETY: host memory that its owner keeps valid, apart from the inputs: this rank's passed
        // the check, and different ranks' buffers are different memory; only this rank accesses it
        // now.
        return T::reduce(op, &views(0..len), unsafe { output.as_host_mut() }, store);
    }

    let mut result = vec![T::default(); CHUNK_ELEMS.min(len)];
    for start in (0..len).step_by(CHUNK_ELEMS) {
        let chunk = start..(start + CHUNK_ELEMS).min(len);
        let result = &mut result[..chunk.len()];
        T::reduce(op, &views(chunk.clone()), result, Store::Cached);
        for output in &outputs {
            // SAFETY: host memory that its owner keeps valid; only this rank accesses it now.
            let target = unsafe { output.slice(chunk.clone()).as_host_mut() };
            // In place, the target is in the cache, because it was just read.
            if store == Store::PastCache && !in_place {
                nontemporal::copy(
                    bytemuck::cast_slice(result),
                    bytemuck::cast_slice_mut(target),
                );
            } else {
                target.copy_from_slice(result);
            }
        }
    }
}

/// Copies `from` to each slice of `to` except itself.
fn copy_to_all(from: AnySlice, to: &[AnySlice], store: Store) {
    let bytes = |slice: AnySlice| slice.bytes().typed::<u8>();
    let (Ok(from), len) = (bytes(from), from.len_bytes()) else {
        return;
    };

    for start in (0..len).step_by(COPY_CHUNK_BYTES) {
        let chunk = start..(start + COPY_CHUNK_BYTES).min(len);
        let source = from.slice(chunk.clone());
        for to in to
            .iter()
            .filter_map(|&to| bytes(to).ok())
            .filter(|to| to.as_ptr() != from.as_ptr())
        {
            // SAFETY: host memory that its owner keeps valid; no rank writes to it now.
            let source = unsafe { source.as_host() };
            // SAFETY: host memory that its owner keeps valid, apart from the source: a rank's own
            // buffers passed the check, and different ranks' buffers are different memory; only
            // this rank accesses it now.
            let target = unsafe { to.slice(chunk.clone()).as_host_mut() };
            if store == Store::PastCache {
                nontemporal::copy(source, target);
            } else {
                target.copy_from_slice(source);
            }
        }
    }
}
