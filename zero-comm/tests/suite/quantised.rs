//! Quantised reductions: the sums of an oracle to the bit, the bytes of each hop, the bound of the
//! error, and what error feedback keeps.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use proptest::prelude::*;
use zero_alloc::Pool;
use zero_alloc::device::{DType, DeviceId, DeviceSlice};
use zero_alloc::host::HostDevice;
use zero_comm::{
    BucketOptions, Buckets, CommError, CommOptions, Reduce, SumInto, TwoLevel, UnitFeedback,
};
use zero_kernels::EncodeSums;
use zero_kernels::host::HostKernels;
use zero_shard::BlockFormat;

use crate::common::{Comm, Streams, on_ranks, view};

/// Ranks of a machine, machines, and the format of each hop; one hop if there is one machine.
#[derive(Clone, Copy, Debug)]
struct Hops {
    within: usize,
    machines: usize,
    formats: [BlockFormat; 2],
}

impl Hops {
    fn ranks(self) -> usize {
        self.within * self.machines
    }

    /// The reduction of a rank of the world, and its rank in it.
    fn reduce(self, comm: &Comm, pool: &Pool<HostDevice>) -> Reduce<HostDevice> {
        let kernels = Arc::new(HostKernels::new(1).unwrap());
        let pool = pool.clone();
        let [first, second] = self.formats;
        if self.machines == 1 {
            let hops = vec![(comm.clone() as _, first)];
            return Reduce::scatter(comm.clone())
                .quantised(hops, kernels, pool)
                .unwrap();
        }
        let two_level = Arc::new(TwoLevel::new(&**comm, self.within).unwrap());
        let [within, between] = two_level.levels().map(Arc::clone);
        Reduce::scatter(two_level)
            .quantised(vec![(within, first), (between, second)], kernels, pool)
            .unwrap()
    }

    /// The sums of all ranks' shards, and for each element the bound of its error.
    fn oracle(self, grads: &[Vec<f32>]) -> (Vec<f32>, Vec<f64>) {
        let ranks = self.ranks();
        let len = grads[0].len() / ranks;
        let mut sums = Vec::new();
        let mut bounds = Vec::new();
        for position in 0..self.within {
            let part = position * self.machines * len..(position + 1) * self.machines * len;
            // Of each machine.
            let of_machine = |machine: usize| {
                let of = |k: usize| grads[k * self.machines + machine][part.clone()].to_vec();
                if self.within == 1 {
                    return (of(0), vec![0.0; part.len()]);
                }
                sum(self.formats[0], (0..self.within).map(of), part.len())
            };
            let machines: Vec<_> = (0..self.machines).map(of_machine).collect();
            if self.machines == 1 {
                sums.extend_from_slice(&machines[0].0);
                bounds.extend_from_slice(&machines[0].1);
                continue;
            }
            for shard in 0..self.machines {
                let range = shard * len..(shard + 1) * len;
                let of = |machine: &(Vec<f32>, Vec<f64>)| machine.0[range.clone()].to_vec();
                let (sum, bound) = sum(self.formats[1], machines.iter().map(of), len);
                sums.extend(sum);
                let of_first = |i: usize| machines.iter().map(|m| m.1[i]).sum::<f64>();
                let first = range.clone().map(of_first);
                bounds.extend(bound.into_iter().zip(first).map(|(a, b)| a + b));
            }
        }
        (sums, bounds)
    }
}

/// The sum of what arrives of the parts, and the bound of each element's error.
fn sum(
    format: BlockFormat,
    parts: impl Iterator<Item = Vec<f32>>,
    elems: usize,
) -> (Vec<f32>, Vec<f64>) {
    let mut sum: Vec<f32> = Vec::new();
    let mut bound = vec![0.0; elems];
    for part in parts {
        let mut blocks = vec![0; format.bytes(elems)];
        format.encode(&part, &mut blocks);
        let mut decoded = vec![0.0; elems];
        format.decode(&blocks, &mut decoded);
        for (i, bound) in bound.iter_mut().enumerate() {
            let start = i / format.elems() * format.elems();
            let block = &part[start..elems.min(start + format.elems())];
            *bound += f64::from(format.error_bound()) * f64::from(format.scale(block).abs());
            // The rounding of the sum.
            *bound += 4.0 * f64::from(f32::EPSILON) * f64::from(decoded[i].abs());
        }
        match sum.is_empty() {
            true => sum = decoded,
            false => sum.iter_mut().zip(decoded).for_each(|(a, b)| *a += b),
        }
    }
    (sum, bound)
}

/// Values of a gradient in the dtype, as fp32.
fn gradient(seed: u64, rank: usize, elems: usize, kind: Kind, dtype: DType) -> Vec<f32> {
    let random = |i: usize| {
        let mut x = seed ^ ((rank as u64) << 40) ^ i as u64;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    let value = |i: usize| {
        let bits = random(i);
        let unit = (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
        match kind {
            Kind::Even => unit,
            // From subnormal to nearly the greatest numbers, in one block.
            Kind::AnyScale => unit * 2f32.powi((bits % 252) as i32 - 126) / 64.0,
            Kind::Sparse => match bits % 97 {
                0 => unit * 1e4,
                _ => 0.0,
            },
            Kind::Halves => ((bits % 15) as f32 - 7.0) / 2.0,
        }
    };
    let of = |x: f32| match dtype {
        DType::F16 => f16::from_f32(x.clamp(-1e3, 1e3)).to_f32(),
        DType::Bf16 => bf16::from_f32(x).to_f32(),
        _ => x,
    };
    (0..elems).map(|i| of(value(i))).collect()
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Even,
    AnyScale,
    Sparse,
    /// Ties between two codes.
    Halves,
}

fn bytes(values: &[f32], dtype: DType) -> Vec<f32> {
    // Memory of the size of the values, aligned for any dtype.
    let mut memory = vec![0f32; values.len()];
    let out: &mut [u8] = bytemuck::cast_slice_mut(&mut memory);
    match dtype {
        DType::F32 => out.copy_from_slice(bytemuck::cast_slice(values)),
        _ => {
            for (out, value) in out.chunks_exact_mut(2).zip(values) {
                let bits = match dtype {
                    DType::F16 => f16::from_f32(*value).to_bits(),
                    _ => bf16::from_f32(*value).to_bits(),
                };
                out.copy_from_slice(&bits.to_ne_bytes());
            }
        }
    }
    memory
}

/// The result of a reduction on a rank.
struct Reduced {
    rank: usize,
    sum: Vec<f32>,
    sums: EncodeSums,
    sent: [u64; 2],
}

/// Sums `len` elements a rank.
fn reduce(
    hops: Hops,
    len: usize,
    dtype: DType,
    grad: impl Fn(usize) -> Vec<f32> + Sync,
) -> Vec<Reduced> {
    let mut reduced = on_ranks(hops.ranks(), CommOptions::default(), |comm, streams| {
        let pool = Pool::new(HostDevice::new(), usize::MAX);
        let mut sums = vec![EncodeSums::default(); 1];
        // SAFETY: the streams are synchronised before the sums are read or dropped.
        let slice =
            unsafe { DeviceSlice::from_raw_parts(sums.as_mut_ptr(), sums.len(), DeviceId::HOST) };
        let reduce = hops.reduce(&comm, &pool).with_sums(slice);
        let rank = reduce.comm().rank();

        let mut values = bytes(&grad(rank), dtype);
        // SAFETY: as above; the memory is longer than the elements of the dtype.
        let send = unsafe {
            zero_alloc::device::AnySlice::from_raw_parts(
                view(&mut values).as_ptr(),
                len * hops.ranks(),
                dtype,
                DeviceId::HOST,
            )
        };
        let mut sum = vec![f32::NAN; len];
        reduce.sum_to(&streams.comm, send, view(&mut sum)).unwrap();
        streams.synchronize();
        assert_eq!(
            pool.report().of(zero_alloc::Purpose::Buckets).live_bytes,
            0,
            "all memory is freed"
        );
        let traffic = reduce.comm().traffic();
        Reduced {
            rank,
            sum,
            sums: EncodeSums::total(&sums),
            sent: [traffic.all_to_all_bytes, traffic.total_bytes()],
        }
    });
    reduced.sort_by_key(|of| of.rank);
    reduced
}

fn formats() -> impl Strategy<Value = BlockFormat> {
    prop::sample::select(vec![
        BlockFormat::Int8,
        BlockFormat::Int4,
        BlockFormat::Nf4,
        BlockFormat::Dynamic8,
    ])
}

fn any_hops() -> impl Strategy<Value = Hops> {
    (1usize..4, 1usize..4, formats(), formats()).prop_map(|(within, machines, first, second)| {
        Hops {
            within,
            machines,
            formats: [first, second],
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Any shape, also shards that end within a block.
    #[test]
    fn sums_are_those_of_the_oracle(
        hops in any_hops(),
        len in prop_oneof![0usize..700, Just(256), Just(512)],
        dtype in prop::sample::select(vec![DType::F32, DType::Bf16, DType::F16]),
        kind in prop::sample::select(vec![Kind::Even, Kind::AnyScale, Kind::Sparse, Kind::Halves]),
        seed in any::<u64>(),
    ) {
        let ranks = hops.ranks();
        // One rank neither sends nor casts.
        let dtype = if ranks == 1 { DType::F32 } else { dtype };
        let grad = |rank| gradient(seed, rank, len * ranks, kind, dtype);
        let grads: Vec<_> = (0..ranks).map(grad).collect();
        let reduced = reduce(hops, len, dtype, grad);
        if ranks == 1 {
            prop_assert_eq!(&reduced[0].sum, &grads[0]);
            return Ok(());
        }

        let (expected, bounds) = hops.oracle(&grads);
        let got: Vec<f32> = reduced.iter().flat_map(|of| of.sum.clone()).collect();
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(bits(&got), bits(&expected));
        for (i, (got, bound)) in got.iter().zip(bounds).enumerate() {
            let exact: f64 = grads.iter().map(|grad| f64::from(grad[i])).sum();
            let error = (f64::from(*got) - exact).abs();
            prop_assert!(error <= bound * (1.0 + 1e-6) + 1e-44, "{i}: {error} > {bound}");
        }
        for of in &reduced {
            prop_assert!(of.sums.error_sq <= of.sums.bound_sq * (1.0 + 1e-9), "{:?}", of.sums);
        }
    }
}

#[test]
fn bytes_of_each_hop() {
    let hops = Hops {
        within: 4,
        machines: 2,
        formats: [BlockFormat::Int8, BlockFormat::Int4],
    };
    let len = 512;
    for reduced in reduce(hops, len, DType::F32, |_| vec![1.0; 8 * 512]) {
        let within = 3 * BlockFormat::Int8.bytes(2 * len) as u64;
        let between = BlockFormat::Int4.bytes(len) as u64;
        assert_eq!(reduced.sent, [within + between; 2]);
        assert_eq!(reduced.sum, [8.0; 512]);
    }
}

/// An infinity on one rank is seen by the owner of its block, and by no other.
#[test]
fn infinities_arrive_as_nan() {
    let hops = Hops {
        within: 2,
        machines: 2,
        formats: [BlockFormat::Int8, BlockFormat::Int4],
    };
    for hostile in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let reduced = reduce(hops, 256, DType::F32, |rank| {
            let mut grad = vec![1.0; 4 * 256];
            if rank == 3 {
                grad[256 + 5] = hostile;
            }
            grad
        });
        for of in reduced {
            let is_nan = of.sum.iter().any(|x| x.is_nan());
            assert_eq!(is_nan, of.rank == 1, "rank {} of {hostile}", of.rank);
            assert!(of.sums.error_sq.is_finite());
        }
    }
}

/// The sums of three steps of a unit, and the errors after them, through buckets of this capacity.
fn with_feedback(capacity_elems: usize, keep: f32) -> Vec<(Vec<f32>, [Vec<f32>; 2])> {
    let hops = Hops {
        within: 2,
        machines: 2,
        formats: [BlockFormat::Int8, BlockFormat::Int4],
    };
    let len = 768;
    on_ranks(hops.ranks(), CommOptions::default(), |comm, streams| {
        let pool = Pool::new(HostDevice::new(), usize::MAX);
        let reduce = hops.reduce(&comm, &pool);
        let rank = reduce.comm().rank();
        assert_eq!(reduce.hop_shards(), [4, 2]);
        let mut errors = [4, 2].map(|shards| vec![0f32; shards * len]);
        let buckets = buckets(&pool, reduce, streams, capacity_elems);
        let kernels = HostKernels::new(1).unwrap();

        let mut sums = Vec::new();
        for step in 0..3 {
            let mut grad = gradient(step, rank, 4 * len, Kind::Even, DType::F32);
            let mut sum = vec![0f32; len];
            let slices = errors
                .each_mut()
                .map(|errors| view(errors).typed::<f32>().unwrap());
            let feedback = Some(UnitFeedback::new(&slices, keep));
            let parts = [(view(&mut grad), 0)];
            let into = SumInto::Write(view(&mut sum));
            let reduced = buckets.reduce_unit_with(&kernels, &parts, into, feedback);
            drop(reduced.unwrap());
            streams.synchronize();
            sums.extend(sum);
        }
        (sums, errors)
    })
}

fn buckets(
    pool: &Pool<HostDevice>,
    reduce: Reduce<HostDevice>,
    streams: &Streams,
    capacity_elems: usize,
) -> Buckets<HostDevice> {
    let options = BucketOptions::new(capacity_elems, DType::F32);
    let compute = streams.compute.clone();
    let comm = streams.comm.clone();
    Buckets::new(pool, reduce, compute, comm, options).unwrap()
}

#[test]
fn feedback_does_not_depend_on_buckets() {
    for keep in [0.0, 0.8] {
        // A block, two and all of each shard.
        let whole = with_feedback(4 * 768, keep);
        for capacity in [4 * 256, 4 * 512 + 77] {
            assert_eq!(with_feedback(capacity, keep), whole);
        }
    }
}

/// The sums that arrived and the errors add up to the exact sums.
#[test]
fn feedback_keeps_what_was_left_out() {
    let len = 768;
    let ranks = with_feedback(4 * len, 0.0);
    // In the order of the world: machine, position. A rank's shard is position * 2 + machine.
    for (world, (sums, _)) in ranks.iter().enumerate() {
        let [machine, position] = [world / 2, world % 2];
        let shard = position * 2 + machine;
        for i in 0..len {
            let at = shard * len + i;
            let of_step = |step: u64| -> f64 {
                let of =
                    |rank| f64::from(gradient(step, rank, 4 * len, Kind::Even, DType::F32)[at]);
                (0..4).map(of).sum()
            };
            if i % 97 != 0 {
                continue;
            }
            let exact: f64 = (0..3).map(of_step).sum();
            let sent: f64 = (0..3).map(|step| f64::from(sums[step * len + i])).sum();
            let first: f64 = ranks
                .iter()
                .map(|(_, errors)| f64::from(errors[0][at]))
                .sum();
            // Both ranks of this position pass on this shard.
            let in_second = machine * len + i;
            let peers = [position, 2 + position];
            let second = peers.map(|peer| f64::from(ranks[peer].1[1][in_second]));
            let left = first + second.iter().sum::<f64>();
            assert!(
                (sent + left - exact).abs() < 1e-5,
                "{sent} + {left}, {exact}"
            );
            // The bounds of one step: two machines' sums of 2 in int4, four gradients of 1 in int8.
            assert!((sent - exact).abs() < 2.0 * 2.2 / 14.0 + 4.0 * 1.1 / 254.0);
        }
    }
}

#[test]
fn wrong_hops_and_errors_are_named() {
    let texts = on_ranks(2, CommOptions::default(), |comm, streams| {
        let pool = Pool::new(HostDevice::new(), usize::MAX);
        let kernels = || Arc::new(HostKernels::new(1).unwrap());
        let of = |reduce: Reduce<HostDevice>, hops| {
            let made = reduce.quantised(hops, kernels(), pool.clone());
            made.unwrap_err().to_string()
        };
        let hop = || (comm.clone() as _, BlockFormat::Int8);
        let whole = of(Reduce::all(comm.clone()), vec![hop()]);
        let twice = of(Reduce::scatter(comm.clone()), vec![hop(), hop()]);

        let hops = Hops {
            within: 2,
            machines: 1,
            formats: [BlockFormat::Int8; 2],
        };
        let reduce = hops.reduce(&comm, &pool);
        let buckets = buckets(&pool, reduce.clone(), streams, 512);
        let unit = |range: Range<usize>, errors: usize| {
            let mut grad = vec![0f32; 2 * range.len()];
            let mut sum = vec![0f32; range.len()];
            let mut errors = vec![0f32; errors];
            let slices = [view(&mut errors).typed::<f32>().unwrap()];
            let feedback = Some(UnitFeedback::new(&slices, 0.0));
            let parts = [(view(&mut grad), 0)];
            let into = SumInto::Write(view(&mut sum));
            let refused =
                buckets.reduce_unit_with(&HostKernels::new(1).unwrap(), &parts, into, feedback);
            streams.synchronize();
            refused.map(drop).unwrap_err().to_string()
        };
        [whole, twice, unit(0..256, 5), unit(0..100, 200)]
    });
    for [whole, twice, length, partial] in texts {
        assert_eq!(whole, CommError::QuantisedAllReduce.to_string());
        assert!(twice.starts_with("hops of [2, 2] ranks"), "{twice}");
        assert!(length.contains("expected 512 elements, got 5"), "{length}");
        assert!(partial.contains("of 100 elements of a shard"), "{partial}");
    }
}
