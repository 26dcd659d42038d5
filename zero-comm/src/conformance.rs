//! The conformance suite of [`Communicator`]: random calls, compared with a naive reference.
//!
//! Every rank calls [`check`] with the same seed. Shapes and values are drawn from the seed alone,
//! so each rank knows what every other rank sends, computes its own expected result element by
//! element, and reports the first difference. It runs on any back end.
//!
//! Each buffer is enclosed in canary bytes, which detect writes out of bounds. A write into `send`
//! is detected too.

use std::fmt::Debug;
use std::time::Duration;

use half::{bf16, f16};
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, DeviceId, DeviceKind, Element};
use zero_alloc::{Block, Pool, Purpose};

use crate::call::{Counts, Group, balanced_range};
use crate::{Collective, CommError, Communicator, ReduceOp, Traffic};

/// The order of sums that a back end guarantees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sums {
    /// In rank order, fp32 for 16-bit types, rounded once: compared bit for bit on any values.
    RankOrder,
    /// In any order: the values are small integers, whose sums are exact. An average may be the sum
    /// of the products with 1/N, as NCCL computes it: with N ranks, and N no power of two, within
    /// 8 (N + 1) roundings of a 1.
    AnyOrder,
}

/// The parameters of a run.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Plan {
    /// Seed of shapes and values; the same on every rank.
    pub seed: u64,
    /// Number of random calls.
    pub cases: usize,
    /// Maximum number of elements in a rank's segment.
    pub max_segment_elems: usize,
    /// The order of sums.
    pub sums: Sums,
    /// Time limit of a wait for a stream.
    pub limit: Duration,
    /// Whether to split the communicator, which not every back end can.
    pub splits: bool,
}

impl Default for Plan {
    fn default() -> Self {
        let limit = Duration::from_secs(60);
        Self {
            seed: 1,
            cases: 60,
            max_segment_elems: 6000,
            sums: Sums::RankOrder,
            limit,
            splits: true,
        }
    }
}

zero_alloc::setters!(Plan {
    seed: u64,
    cases: usize,
    max_segment_elems: usize,
    sums: Sums,
    limit: Duration,
    splits: bool
});

/// An element type of the suite, with plain functions to draw and combine values.
trait Case: Element + PartialEq + Debug {
    fn draw(bits: u64, sums: Sums) -> Self;
    /// All ranks' values combined in rank order.
    fn combine(op: ReduceOp, values: &[Self]) -> Self;
    fn is_nan(self) -> bool;
    /// Whether it is within `roundings` roundings of a 1 of `other`.
    fn is_near(self, other: Self, roundings: f64) -> bool;
}

/// The greatest integer that [`draw_f32`] draws for sums in any order.
const MAX_SMALL: f64 = 8.0;

/// A float of varied size and sign, or a small integer.
fn draw_f32(bits: u64, sums: Sums) -> f32 {
    let small = (bits % 17) as f32 - 8.0;
    let any =
        (bits as u32 as f32 / u32::MAX as f32 - 0.5) * 2f32.powi((bits >> 32) as i32 % 14 - 4);
    if sums == Sums::RankOrder { any } else { small }
}

fn combine_f32(op: ReduceOp, values: impl Iterator<Item = f32>) -> f32 {
    let values: Vec<f32> = values.collect();
    match op {
        ReduceOp::Sum => values.iter().skip(1).fold(values[0], |sum, v| sum + v),
        ReduceOp::Avg => combine_f32(ReduceOp::Sum, values.iter().copied()) / values.len() as f32,
        ReduceOp::Max if values.iter().any(|v| v.is_nan()) => f32::NAN,
        ReduceOp::Max => values
            .iter()
            .skip(1)
            .fold(values[0], |a, &b| if a >= b { a } else { b }),
    }
}

macro_rules! case_16_bit {
    ($($t:ty),*) => {$(
        impl Case for $t {
            fn draw(bits: u64, sums: Sums) -> Self {
                // Some values have arbitrary bits: infinities, NaN, subnormal numbers.
                let odd = sums == Sums::RankOrder && bits.is_multiple_of(50);
                if odd { Self::from_bits((bits >> 40) as u16) } else { Self::from_f32(draw_f32(bits, sums)) }
            }
            fn combine(op: ReduceOp, values: &[Self]) -> Self {
                Self::from_f32(combine_f32(op, values.iter().map(|v| v.to_f32())))
            }
            fn is_nan(self) -> bool {
                Self::is_nan(self)
            }
            fn is_near(self, other: Self, roundings: f64) -> bool {
                let off = self.to_f64() - other.to_f64();
                off.abs() <= roundings * Self::EPSILON.to_f64() / 2.0
            }
        }
    )*};
}
case_16_bit!(f16, bf16);

impl Case for f32 {
    fn draw(bits: u64, sums: Sums) -> Self {
        let odd = sums == Sums::RankOrder && bits.is_multiple_of(50);
        if odd {
            Self::from_bits((bits >> 24) as u32)
        } else {
            draw_f32(bits, sums)
        }
    }
    fn combine(op: ReduceOp, values: &[Self]) -> Self {
        combine_f32(op, values.iter().copied())
    }
    fn is_nan(self) -> bool {
        Self::is_nan(self)
    }
    fn is_near(self, other: Self, roundings: f64) -> bool {
        f64::from((self - other).abs()) <= roundings * f64::from(Self::EPSILON) / 2.0
    }
}

impl Case for f64 {
    fn draw(bits: u64, sums: Sums) -> Self {
        f64::from(draw_f32(bits, sums))
            * if sums == Sums::RankOrder {
                1.000_000_001
            } else {
                1.0
            }
    }
    fn combine(op: ReduceOp, values: &[Self]) -> Self {
        match op {
            ReduceOp::Sum => values.iter().skip(1).fold(values[0], |sum, v| sum + v),
            ReduceOp::Avg => Self::combine(ReduceOp::Sum, values) / values.len() as Self,
            ReduceOp::Max => values.iter().copied().fold(Self::NEG_INFINITY, Self::max),
        }
    }
    fn is_nan(self) -> bool {
        Self::is_nan(self)
    }
    fn is_near(self, other: Self, roundings: f64) -> bool {
        (self - other).abs() <= roundings * Self::EPSILON / 2.0
    }
}

impl Case for u8 {
    fn draw(bits: u64, _: Sums) -> Self {
        (bits >> 13) as Self
    }
    fn combine(op: ReduceOp, values: &[Self]) -> Self {
        match op {
            ReduceOp::Max => values.iter().copied().max().unwrap_or(0),
            _ => values.iter().fold(0, |sum: Self, &v| sum.wrapping_add(v)),
        }
    }
    fn is_nan(self) -> bool {
        false
    }
    fn is_near(self, other: Self, _roundings: f64) -> bool {
        self == other
    }
}

/// splitmix64: number `index` of stream `seed`.
fn random(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A random call.
#[derive(Clone, Debug)]
struct Shape {
    collective: Collective,
    op: ReduceOp,
    dtype: DType,
    segments: Counts,
    /// Elements from each rank to each, in an all-to-all with counts per pair.
    pairs: Option<Vec<Vec<usize>>>,
    root: usize,
    in_place: bool,
    control: bool,
    seed: u64,
}

impl Shape {
    fn draw(plan: Plan, world_size: usize, case: usize) -> Self {
        let seed = random(plan.seed, case as u64);
        let pick = |what: u64, n: usize| (random(seed, what) % n.max(1) as u64) as usize;
        let most = [0, 1, 7, 300, plan.max_segment_elems][pick(0, 5)].min(plan.max_segment_elems);
        let length = |what: u64| pick(what, most + 1);
        let dtype = [DType::U8, DType::F16, DType::Bf16, DType::F32, DType::F64][pick(1, 5)];
        let op = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max][pick(2, 3)];
        let op = if dtype == DType::U8 && op == ReduceOp::Avg {
            ReduceOp::Sum
        } else {
            op
        };

        use Collective::{AllGather, AllReduce, AllToAll, Barrier, Broadcast, ReduceScatter};
        let collective = [
            ReduceScatter,
            AllGather,
            AllReduce,
            Broadcast,
            AllToAll,
            Barrier,
        ][pick(3, 6)];

        let uneven = pick(4, 2) == 0;
        let segments = match collective {
            ReduceScatter | AllGather if uneven => {
                // About a third of the segments are empty.
                (0..world_size as u64)
                    .map(|q| {
                        if pick(100 + q, 3) == 0 {
                            0
                        } else {
                            length(200 + q)
                        }
                    })
                    .collect()
            }
            _ => Vec::new(),
        };

        let segments = match collective {
            ReduceScatter | AllGather if uneven => Counts::Uneven(segments.into()),
            ReduceScatter | AllGather | AllToAll => Counts::Even(length(5)),
            AllReduce | Broadcast => Counts::Balanced(length(5)),
            Barrier => Counts::Even(0),
        };

        // A third of the ranks send nothing; a third of the counts of others are 0.
        let pair = |p: u64, q: u64| match (pick(9, 4), pick(300 + p, 3), pick(400 * p + q, 3)) {
            (0, ..) => length(5),
            (_, 0, _) | (_, _, 0) => 0,
            _ => length(500 * p + q),
        };
        let ranks = 0..world_size as u64;
        let pairs_of = |p: u64| ranks.clone().map(|q| pair(p, q)).collect();
        let pairs =
            (collective == AllToAll && uneven).then(|| ranks.clone().map(pairs_of).collect());

        let in_place = collective != AllToAll && pick(6, 2) == 0;
        let control = collective == AllGather && !uneven && pick(7, 3) == 0;
        Self {
            collective,
            op,
            dtype,
            segments,
            pairs,
            root: pick(8, world_size),
            in_place,
            control,
            seed,
        }
    }
}

/// A buffer between canaries.
struct Buffer<D: Device> {
    slice: AnySlice,
    whole: AnySlice,
    margin: usize,
    _block: Block<D>,
}

const CANARY: u8 = 0xa5;

/// A rank under test.
struct Rank<'a, D: Device> {
    comm: &'a dyn Communicator<D>,
    pool: Pool<D>,
    stream: &'a D::Stream,
    plan: Plan,
}

type Outcome = Result<(), String>;

fn text<T, E: ToString>(result: Result<T, E>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}

impl<D: Device> Rank<'_, D> {
    fn buffer<T: Element>(&self, values: &[T], margin: usize) -> Result<Buffer<D>, String> {
        let len = values.len() + 2 * margin;
        let block = text(
            self.pool
                .allocate(len, T::DTYPE, Purpose::Workspace, self.stream),
        )?;
        // SAFETY: `Buffer` keeps the block, and every call is waited for before it is dropped.
        let whole = unsafe { block.slice() };
        let mut bytes = vec![CANARY; len * size_of::<T>()];
        bytes[margin * size_of::<T>()..][..size_of_val(values)].copy_from_slice(bytes_of(values));
        text(
            self.pool
                .device()
                .upload(self.stream, &bytes, whole, self.plan.limit),
        )?;
        Ok(Buffer {
            slice: whole.slice(margin..margin + values.len()),
            whole,
            margin,
            _block: block,
        })
    }

    /// Compares the buffer with `expected`; if `canaries`, also checks the bytes around it.
    fn expect<T: Case>(
        &self,
        what: &str,
        buffer: &Buffer<D>,
        expected: &[T],
        roundings: f64,
        canaries: bool,
    ) -> Outcome {
        let mut bytes = vec![0u8; buffer.whole.len_bytes()];
        text(
            self.pool
                .device()
                .download(self.stream, buffer.whole, &mut bytes, self.plan.limit),
        )?;
        let edge = buffer.margin * size_of::<T>();
        let (before, rest) = bytes.split_at(edge);
        let (values, after) = rest.split_at(size_of_val(expected));
        if canaries && before.iter().chain(after).any(|&byte| byte != CANARY) {
            return Err(format!("{what}: a write beside the buffer"));
        }

        for (i, (bytes, want)) in values
            .chunks_exact(size_of::<T>())
            .zip(expected)
            .enumerate()
        {
            let same = bytes == bytes_of(std::slice::from_ref(want));
            let got = || bytemuck_read::<T>(bytes);
            if !(same
                || want.is_nan() && got().is_nan()
                || self.plan.sums == Sums::AnyOrder && got().is_near(*want, roundings))
            {
                return Err(format!("{what}[{i}]: got {:?}, expected {want:?}", got()));
            }
        }

        Ok(())
    }

    fn run<T: Case>(&self, shape: &Shape) -> Outcome {
        use Collective::{AllGather, AllReduce, AllToAll, Barrier, Broadcast, ReduceScatter};
        let rank = self.comm.rank();
        let n = self.comm.world_size();
        let whole = shape.segments.total(n);
        let own = shape.segments.range(rank, n);
        let margin = (random(shape.seed, 9) % 5) as usize;

        let sent = |q: usize| -> Vec<T> {
            let len = match &shape.pairs {
                Some(pairs) => pairs[q].iter().sum(),
                None if shape.collective == AllGather => shape.segments.range(q, n).len(),
                None => whole,
            };
            (0..len as u64)
                .map(|i| {
                    T::draw(
                        random(shape.seed ^ ((q as u64 + 1) << 48), i),
                        self.plan.sums,
                    )
                })
                .collect()
        };

        let all: Vec<Vec<T>> = (0..n).map(sent).collect();
        let reduced = |range: std::ops::Range<usize>| -> Vec<T> {
            range
                .map(|i| T::combine(shape.op, &all.iter().map(|s| s[i]).collect::<Vec<T>>()))
                .collect()
        };

        let expected: Vec<T> = match shape.collective {
            ReduceScatter => reduced(own.clone()),
            AllReduce => reduced(0..whole),
            AllGather => all.concat(),
            Broadcast => all[shape.root].clone(),
            AllToAll => {
                let from = |q: usize| match &shape.pairs {
                    Some(pairs) => {
                        let start: usize = pairs[q][..rank].iter().sum();
                        &all[q][start..start + pairs[q][rank]]
                    }
                    None => &all[q][own.clone()],
                };
                (0..n).flat_map(|q| from(q).to_vec()).collect()
            }
            Barrier => Vec::new(),
        };

        let zero = T::draw(0, Sums::AnyOrder);
        let mut placed = expected.clone();
        placed.fill(zero);
        if shape.in_place && shape.collective == AllGather {
            placed[own.clone()].copy_from_slice(&all[rank]);
        }
        let send = self.buffer(&all[rank], margin)?;
        let recv = self.buffer(&placed, margin)?;
        let before = self.comm.traffic();
        let comm = self.comm;
        let stream = self.stream;
        let (from, to) = match shape.collective {
            ReduceScatter if shape.in_place => (send.slice, send.slice.slice(own.clone())),
            AllGather if shape.in_place => (recv.slice.slice(own.clone()), recv.slice),
            AllReduce if shape.in_place => (send.slice, send.slice),
            _ => (send.slice, recv.slice),
        };

        text(match (shape.collective, &shape.segments) {
            (AllToAll, _) if let Some(pairs) = &shape.pairs => {
                let received: Vec<usize> = pairs.iter().map(|sent| sent[rank]).collect();
                comm.all_to_all_uneven(stream, from, to, &pairs[rank], &received)
            }
            (ReduceScatter, Counts::Uneven(counts)) => {
                comm.reduce_scatter_uneven(stream, from, to, counts, shape.op)
            }
            (ReduceScatter, _) => comm.reduce_scatter(stream, from, to, shape.op),
            (AllGather, Counts::Uneven(counts)) => comm.all_gather_uneven(stream, from, to, counts),
            (AllGather, _) if shape.control => comm.control_all_gather(stream, from, to),
            (AllGather, _) => comm.all_gather(stream, from, to),
            (AllReduce, _) => comm.all_reduce(stream, from, to, shape.op),
            (Broadcast, _) => comm.broadcast(stream, from, shape.root),
            (AllToAll, _) => comm.all_to_all(stream, from, to),
            (Barrier, _) => comm.barrier(stream),
        })?;

        self.expect_traffic::<T>(shape, before)?;
        let averages = matches!(shape.collective, ReduceScatter | AllReduce)
            && shape.op == ReduceOp::Avg
            && !n.is_power_of_two();
        let roundings = if averages {
            MAX_SMALL * (n + 1) as f64
        } else {
            0.0
        };
        let written = |mut values: Vec<T>, range: std::ops::Range<usize>| {
            values[range].copy_from_slice(&expected);
            values
        };

        match shape.collective {
            Broadcast => self.expect("buffer", &send, &expected, 0.0, true),
            ReduceScatter if shape.in_place => {
                // The back end may overwrite the other segments of `send`.
                let own_part = Buffer {
                    margin: send.margin + own.start,
                    ..send
                };
                self.expect("recv", &own_part, &expected, roundings, false)
            }
            AllReduce if shape.in_place => self.expect(
                "buffer",
                &send,
                &written(all[rank].clone(), 0..whole),
                roundings,
                true,
            ),
            AllGather if shape.in_place => self.expect("recv", &recv, &expected, roundings, true),
            _ => {
                self.expect("send", &send, &all[rank], 0.0, true)?;
                self.expect("recv", &recv, &expected, roundings, true)
            }
        }
    }

    /// Compares the counted bytes with an independent computation.
    fn expect_traffic<T: Element>(&self, shape: &Shape, before: Traffic) -> Outcome {
        let Group {
            rank,
            world_size: n,
        } = Group {
            rank: self.comm.rank(),
            world_size: self.comm.world_size(),
        };

        let own = match &shape.segments {
            Counts::Even(len) => *len,
            Counts::Uneven(counts) => counts[rank],
            Counts::Balanced(len) => balanced_range(*len, n, rank).len(),
            Counts::Pairs(counts) => counts[rank][0],
        };

        let others = match &shape.pairs {
            Some(pairs) => (0..n).filter(|&q| q != rank).map(|q| pairs[rank][q]).sum(),
            None => shape.segments.total(n) - own,
        };
        let bytes = |elems: usize| (elems * size_of::<T>()) as u64;
        let mut expected = before;
        match shape.collective {
            Collective::ReduceScatter => expected.reduce_scatter_bytes += bytes(others),
            Collective::AllToAll => expected.all_to_all_bytes += bytes(others),
            Collective::AllGather if shape.control => {
                expected.control_bytes += bytes(own * (n - 1))
            }
            Collective::AllGather => expected.all_gather_bytes += bytes(own * (n - 1)),
            Collective::Broadcast => expected.broadcast_bytes += bytes(own * (n - 1)),
            Collective::AllReduce => {
                expected.all_reduce_bytes += bytes(others) + bytes(own * (n - 1))
            }
            Collective::Barrier => {}
        }

        let got = self.comm.traffic();
        if got == expected {
            Ok(())
        } else {
            Err(format!("traffic: got {got:?}, expected {expected:?}"))
        }
    }
}

fn bytes_of<T: Element>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

fn bytemuck_read<T: Element>(bytes: &[u8]) -> T {
    bytemuck::pod_read_unaligned(bytes)
}

fn check_all<D: Device>(rank: &Rank<'_, D>) -> Outcome {
    for case in 0..rank.plan.cases {
        let shape = Shape::draw(rank.plan, rank.comm.world_size(), case);
        let result = match shape.dtype {
            DType::U8 => rank.run::<u8>(&shape),
            DType::F16 => rank.run::<f16>(&shape),
            DType::Bf16 => rank.run::<bf16>(&shape),
            DType::F32 => rank.run::<f32>(&shape),
            DType::F64 => rank.run::<f64>(&shape),
            other => Err(format!("the suite has no values of {other}")),
        };
        result.map_err(|error| {
            let message = format!(
                "case {case} on rank {} of {}: {shape:?}: {error}",
                rank.comm.rank(),
                rank.comm.world_size()
            );
            rank.comm.abort(&message);
            message
        })?;
    }

    Ok(())
}

/// Messages of all lengths around those that one all-gather carries, empty ones included.
fn exchanges_messages<D: Device>(rank: &Rank<'_, D>) -> Outcome {
    for len in [0usize, 1, 119, 121, 300] {
        let of =
            |q: usize| vec![q as u8 ^ len as u8; if q.is_multiple_of(2) { len } else { len / 2 }];
        let Rank {
            comm,
            pool,
            stream,
            plan,
        } = rank;
        let got = text(comm.exchange(pool, stream, &of(comm.rank()), plan.limit))?;
        let expected: Vec<_> = (0..comm.world_size()).map(of).collect();
        if got != expected {
            return Err(format!(
                "exchange of {len} bytes: expected {expected:?}, got {got:?}"
            ));
        }
    }
    Ok(())
}

/// A call that was checked for another group has buffers of other lengths.
fn refuses_calls_of_other_groups<D: Device>(
    comm: &dyn Communicator<D>,
    stream: &D::Stream,
) -> Outcome {
    let Group { rank, world_size } = comm.group();
    for other in [
        Group {
            rank,
            world_size: world_size + 1,
        },
        Group {
            rank: rank + 1,
            world_size: world_size + 1,
        },
    ] {
        match comm.enqueue(stream, other.barrier()) {
            Err(CommError::AnotherGroup { .. }) => {}
            other => {
                return Err(format!(
                    "a call of another group: expected an error, got {other:?}"
                ));
            }
        }
    }

    Ok(())
}

/// Memory that the communicator's device cannot access.
fn refuses_memory_of_other_devices<D: Device>(
    comm: &dyn Communicator<D>,
    stream: &D::Stream,
) -> Outcome {
    let device = DeviceId::new(DeviceKind::Simulated).map_err(|e| e.to_string())?;
    let n = comm.world_size();
    let slice = |address, len| {
        // SAFETY: the calls are refused, so nothing accesses it.
        unsafe {
            AnySlice::from_raw_parts(
                std::ptr::without_provenance_mut(address),
                len,
                DType::U8,
                device,
            )
        }
    };

    let whole = slice(1 << 30, n);
    let part = slice(1 << 20, 1);
    for refused in [
        comm.reduce_scatter(stream, whole, part, ReduceOp::Sum),
        comm.all_gather(stream, part, whole),
        comm.all_reduce(stream, whole, whole, ReduceOp::Sum),
        comm.broadcast(stream, whole, 0),
        comm.all_to_all(stream, whole, slice(1 << 20, n)),
        comm.all_to_all_uneven(stream, whole, slice(1 << 20, n), &vec![1; n], &vec![1; n]),
    ] {
        match refused {
            Err(CommError::Device(DeviceError::AnotherDevice { got, .. })) if got == device => {}
            other => {
                return Err(format!(
                    "memory of another device: expected an error, got {other:?}"
                ));
            }
        }
    }

    Ok(())
}

/// Runs `plan.cases` random calls on `comm`, then a quarter as many on each of three splits of it.
/// All ranks call it with the same plan.
///
/// # Errors
/// The first difference from the reference, or the first error of a call, with case, rank and
/// shape.
pub fn check<D: Device>(
    device: &D,
    comm: &dyn Communicator<D>,
    stream: &D::Stream,
    plan: Plan,
) -> Outcome {
    refuses_calls_of_other_groups(comm, stream)?;
    refuses_memory_of_other_devices(comm, stream)?;
    let pool = Pool::new(device.clone(), usize::MAX);
    let all = Rank {
        comm,
        pool: pool.clone(),
        stream,
        plan,
    };

    check_all(&all)?;
    exchanges_messages(&all)?;
    if !plan.splits {
        return Ok(());
    }
    let rank = comm.rank();
    let n = comm.world_size();

    for (turn, colors) in [1, 2, 3].into_iter().enumerate() {
        // The last rank of a larger world passes no color; keys reverse the order of ranks.
        let color = (n < 3 || rank + 1 < n).then_some((rank % colors) as u64);
        let Some(child) = text(comm.split(color, (n - rank) as u64))? else {
            continue;
        };
        let expected_rank = (rank + 1..if n < 3 { n } else { n - 1 })
            .filter(|q| q % colors == rank % colors)
            .count();
        if child.rank() != expected_rank {
            return Err(format!(
                "split in {colors}: rank {rank} became {}, not {expected_rank}",
                child.rank()
            ));
        }
        let plan = Plan {
            seed: random(plan.seed, 1000 + turn as u64),
            cases: plan.cases / 4,
            ..plan
        };
        check_all(&Rank {
            comm: &*child,
            pool: pool.clone(),
            stream,
            plan,
        })?;
    }

    Ok(())
}
