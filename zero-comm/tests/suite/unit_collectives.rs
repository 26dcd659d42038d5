//! Gathers with a codec: what arrives, what is sent, and what is refused.

use std::sync::Arc;

use half::bf16;
use zero_alloc::Pool;
use zero_alloc::device::{AnySlice, DType};
use zero_alloc::host::HostDevice;
use zero_comm::{CommError, CommOptions, Gather, WireCast, WireCodec};
use zero_kernels::KernelError;
use zero_kernels::host::HostKernels;
use zero_shard::WireFormat;

use crate::common::{on_ranks, view};

/// Casts to a dtype.
#[derive(Clone, Copy, Debug)]
struct Cast {
    dtype: DType,
    format: WireFormat,
}

// SAFETY: each method casts once, from the slice that it may read to the one that it may write, and
// keeps neither.
unsafe impl WireCodec for Cast {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn format(&self) -> WireFormat {
        self.format
    }

    fn encode(
        &self,
        cast: WireCast<'_>,
        shard: AnySlice,
        wire: AnySlice,
    ) -> Result<(), KernelError> {
        cast(shard, wire)
    }

    fn decode(
        &self,
        cast: WireCast<'_>,
        wire: AnySlice,
        whole: AnySlice,
        ranks: usize,
    ) -> Result<(), KernelError> {
        assert_eq!(wire.len(), whole.len());
        assert_eq!(whole.len() % ranks, 0);
        cast(wire, whole)
    }
}

fn element(rank: usize, i: usize) -> f32 {
    (1 + rank * 100 + i) as f32 / 3.0
}

/// Gathers shards of `elems` elements on three ranks: the unit and the bytes sent by each.
fn gather(codec: Cast, elems: usize) -> Vec<Result<(Vec<f32>, u64), CommError>> {
    on_ranks(3, CommOptions::default(), |comm, streams| {
        let pool = Pool::new(HostDevice::new(), 1 << 20);
        let kernels = Arc::new(HostKernels::new(1).unwrap());
        let mut shard: Vec<f32> = (0..elems).map(|i| element(comm.rank(), i)).collect();
        let mut whole = vec![f32::NAN; 3 * elems];
        let gather = Gather::new(comm.clone()).with_codec(Arc::new(codec), kernels, pool);
        let enqueued = gather.enqueue(&streams.comm, view(&mut shard), view(&mut whole));
        if enqueued.is_ok() {
            streams.synchronize();
            let own = (0..elems).map(|i| element(comm.rank(), i));
            assert!(own.eq(shard), "the shard keeps its values");
        }
        enqueued.map(|()| (whole, comm.traffic().all_gather_bytes))
    })
}

#[test]
fn all_ranks_have_the_decoded_values() {
    let codec = Cast {
        dtype: DType::Bf16,
        format: WireFormat::plain(2),
    };
    for elems in [0, 1, 7] {
        let rounded = |i: usize| bf16::from_f32(element(i / elems, i % elems)).to_f32();
        let expected: Vec<f32> = (0..3 * elems).map(rounded).collect();
        for gathered in gather(codec, elems) {
            let (whole, sent) = gathered.unwrap();
            assert_eq!(whole, expected);
            assert_eq!(sent, 2 * 2 * elems as u64);
        }
    }
}

#[test]
fn bad_formats_are_errors() {
    let bytes = Cast {
        dtype: DType::U8,
        format: WireFormat::plain(1),
    };
    for refused in gather(bytes, 4) {
        let kernel = KernelError::Unsupported {
            what: "cast: dst",
            dtype: DType::U8,
        };
        assert_eq!(refused.unwrap_err(), CommError::Kernel(kernel));
    }

    for (block_elems, block_bytes) in [(0, 2), (1, u64::MAX)] {
        let format = WireFormat {
            block_elems,
            block_bytes,
        };
        let codec = Cast {
            dtype: DType::Bf16,
            format,
        };
        for refused in gather(codec, 4) {
            let error = refused.unwrap_err();
            assert!(matches!(error, CommError::CountsTooLarge { .. }), "{error}");
        }
    }
}

#[test]
fn a_shard_ends_with_a_whole_element() {
    let format = WireFormat {
        block_elems: 4,
        block_bytes: 7,
    };
    let codec = Cast {
        dtype: DType::Bf16,
        format,
    };
    for refused in gather(codec, 4) {
        assert_eq!(
            refused.unwrap_err().to_string(),
            "the wire codec encodes a shard in 7 bytes, which the 2 bytes of bf16 do not divide; \
             return another format or dtype"
        );
    }
}

#[test]
fn the_last_block_may_be_shorter() {
    let blocks = WireFormat {
        block_elems: 256,
        block_bytes: 260,
    };
    let bytes = [0, 1, 256, 257].map(|elems| blocks.bytes(elems));
    assert_eq!(bytes, [Some(0), Some(260), Some(260), Some(520)]);
}
