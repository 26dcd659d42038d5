//! Gathers with a codec: what arrives, what is sent, and what is refused.

use std::sync::Arc;

use half::bf16;
use zero_alloc::Pool;
use zero_alloc::host::HostDevice;
use zero_comm::{CommError, CommOptions, Gather};
use zero_kernels::host::HostKernels;
use zero_kernels::{Codec, KernelError};
use zero_shard::{BlockFormat, WireFormat};

use crate::common::{on_ranks, view};

const RANKS: usize = 3;

fn element(rank: usize, i: usize) -> f32 {
    (1 + rank * 100 + i) as f32 / 3.0
}

fn shard(rank: usize, elems: usize) -> Vec<f32> {
    (0..elems).map(|i| element(rank, i)).collect()
}

/// A shard as it arrives.
fn decoded(codec: Codec, mut shard: Vec<f32>) -> Vec<f32> {
    match codec {
        Codec::Blocks(format) => {
            let mut blocks = vec![0; format.bytes(shard.len())];
            format.encode(&shard, &mut blocks);
            format.decode(&blocks, &mut shard);
        }
        Codec::Bf16 => shard
            .iter_mut()
            .for_each(|value| *value = bf16::from_f32(*value).to_f32()),
        _ => {}
    }
    shard
}

/// The place of a rank's shard during a gather.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Apart,
    /// In the unit, which has decoded values afterwards.
    InUnit,
    /// In the unit, and keeps its values.
    Kept,
}

/// Gathers shards of `elems` elements: the unit and the bytes sent by each rank.
fn gather(codec: Codec, elems: usize, place: Place) -> Vec<Result<(Vec<f32>, u64), CommError>> {
    on_ranks(RANKS, CommOptions::default(), |comm, streams| {
        let pool = Pool::new(HostDevice::new(), 1 << 20);
        let kernels = Arc::new(HostKernels::new(1).unwrap());
        let rank = comm.rank();
        let mut own = shard(rank, elems);
        let mut whole = vec![f32::NAN; RANKS * elems];
        let gather = Gather::new(comm.clone()).with_codec(codec, kernels, pool)?;
        let stream = &streams.comm;
        if place == Place::Apart {
            gather.enqueue(stream, view(&mut own), view(&mut whole))?;
        } else {
            whole[rank * elems..(rank + 1) * elems].copy_from_slice(&own);
            let unit = view(&mut whole);
            match place {
                Place::Kept => gather.enqueue_others(stream, unit)?,
                _ => gather.enqueue(stream, unit.slice(rank * elems..(rank + 1) * elems), unit)?,
            }
        }
        streams.synchronize();
        assert_eq!(own, shard(rank, elems), "the shard keeps its values");
        Ok((whole, comm.traffic().all_gather_bytes))
    })
}

#[test]
fn all_ranks_have_the_decoded_values() {
    let blocks = BlockFormat::ALL.map(Codec::Blocks);
    for codec in [Codec::Fp32, Codec::Bf16].into_iter().chain(blocks) {
        // Within a block, one, several and a part of one.
        for elems in [0, 1, 7, 256, 300, 512] {
            for place in [Place::Apart, Place::InUnit, Place::Kept] {
                let gathered = gather(codec, elems, place);
                for (rank, gathered) in gathered.into_iter().enumerate() {
                    let (whole, sent) = gathered.unwrap();
                    let part = |q: usize| match q == rank && place == Place::Kept {
                        true => shard(q, elems),
                        false => decoded(codec, shard(q, elems)),
                    };
                    let expected: Vec<f32> = (0..RANKS).flat_map(part).collect();
                    assert_eq!(whole, expected, "{codec:?} of {elems}, {place:?}");
                    assert_eq!(sent, 2 * codec.bytes(elems) as u64);
                }
            }
        }
    }
}

#[test]
fn remainders_are_no_values() {
    for refused in gather(Codec::Remainders, 4, Place::Apart) {
        let error = refused.unwrap_err();
        let is_kernel = matches!(error, CommError::Kernel(KernelError::Unsupported { .. }));
        assert!(is_kernel, "{error}");
    }
}

#[test]
fn the_last_block_may_be_shorter() {
    let blocks = BlockFormat::Int8.wire();
    let bytes = [0, 1, 256, 257].map(|elems| blocks.bytes(elems));
    assert_eq!(bytes, [Some(0), Some(260), Some(260), Some(520)]);
    let none = WireFormat {
        block_elems: 0,
        block_bytes: 2,
    };
    assert_eq!(none.bytes(1), None);
}
