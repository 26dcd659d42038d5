//! A rank's process.

use std::process::Command;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, Stream};
use zero_alloc::{Block, Pool, Purpose};
use zero_comm::conformance::{Plan, Sums, check};
use zero_comm::nccl::NcclCommunicator;
use zero_comm::world::Ranks;
use zero_comm::{CommError, CommOptions, Communicator, ReduceOp};

/// The variable that selects the case.
pub(crate) const CASE: &str = "ZERO_TEST_RANK";
/// The limit of collectives in the cases of stalled ranks.
pub(crate) const FAULT_LIMIT: Duration = Duration::from_secs(4);
const LIMIT: Duration = Duration::from_secs(120);

pub(crate) fn is_stand_in() -> bool {
    static IS_STAND_IN: LazyLock<bool> =
        LazyLock::new(|| CudaDevice::open(0).unwrap().name().contains("stand-in"));
    *IS_STAND_IN
}

/// A rank's stream and memory.
struct Rank {
    stream: CudaStream,
    pool: Pool<CudaDevice>,
}

impl Rank {
    /// A buffer of `len` ones if `dtype` is f32, otherwise of zeros.
    fn buffer(&self, len: usize, dtype: DType) -> (AnySlice, Block<CudaDevice>) {
        let block = self
            .pool
            .allocate(len, dtype, Purpose::Workspace, &self.stream)
            .unwrap();
        // SAFETY: the callers keep the block until the stream has run the collectives on it.
        let slice = unsafe { block.slice() };
        let ones: Vec<u8> = match dtype {
            DType::F32 => 1f32.to_le_bytes().repeat(len),
            _ => vec![0; slice.len_bytes()],
        };
        self.pool
            .device()
            .upload(&self.stream, &ones, slice, LIMIT)
            .unwrap();
        (slice, block)
    }
}

fn kill_this_process() -> ! {
    let _never = Command::new("kill")
        .args(["-9", &std::process::id().to_string()])
        .status();
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

pub(crate) fn main(case: &str) {
    let ranks = Ranks::from_env().unwrap().unwrap();
    let device = CudaDevice::open(ranks.local_rank % CudaDevice::count().unwrap()).unwrap();
    let limit = if case.ends_with("stalled") {
        FAULT_LIMIT
    } else {
        LIMIT
    };

    let comm =
        NcclCommunicator::join(&device, &ranks, CommOptions::default().limit(limit)).unwrap();
    let stream = device.create_stream("comm").unwrap();
    let rank = Rank {
        stream,
        pool: Pool::new(device.clone(), usize::MAX),
    };

    match case {
        "conformance" => {
            let cases = if is_stand_in() { 40 } else { 120 };
            let plan = Plan::default()
                .seed(ranks.world_size as u64)
                .cases(cases)
                .sums(Sums::AnyOrder)
                .limit(limit);
            check(&device, &comm, &rank.stream, plan).unwrap();
            two_streams(&device, &comm, &rank);
            println!("rank {} conforms", ranks.rank);
        }
        "sums" => sums(&comm, &rank),
        "communicators" => {
            // The ranks of the other group may end before they hear of it.
            if let Err(error) = other_order(&comm, &rank) {
                println!("rank {} saw: {error}", ranks.rank);
            }
        }
        kind if kind.starts_with("group-") => {
            let error = fault_in_a_group(kind, &comm, &rank).expect_err("the world fails");
            println!("rank {} saw: {error}", ranks.rank);
        }
        kind => {
            let error = fault(kind, comm, &rank).expect_err("the world fails");
            println!("rank {} saw: {error}", ranks.rank);
        }
    }
}

/// Rank 3 calls all ranks before its group, on another stream, and the others their group first.
fn other_order(comm: &NcclCommunicator, rank: &Rank) -> Result<(), CommError> {
    let streams = [&rank.stream, &rank.pool.device().create_stream("other")?];
    let (a, _a) = rank.buffer(4096, DType::F32);
    let (b, _b) = rank.buffer(4096, DType::F32);
    let group = comm.split(Some(comm.rank() as u64 / 2), comm.rank() as u64)?;
    let group = group.unwrap();
    let before = streams[0].record()?;
    streams[1].wait(&before)?;

    let of_all = || comm.all_reduce(streams[0], a, a, ReduceOp::Sum);
    let of_group = || group.all_reduce(streams[1], b, b, ReduceOp::Sum);
    // The first calls connect the ranks.
    of_all()?;
    of_group()?;
    if comm.rank() == 3 {
        of_all()?;
        of_group()?;
    } else {
        of_group()?;
        of_all()?;
    }
    let ended = streams.map(|stream| stream.synchronize(LIMIT));
    comm.failure().map_or(Ok(()), Err)?;
    for end in ended {
        end?;
    }
    Ok(())
}

/// Calls on two streams.
fn two_streams(device: &CudaDevice, comm: &NcclCommunicator, rank: &Rank) {
    let other = device.create_stream("other").unwrap();
    let (slice, _block) = rank.buffer(1000, DType::F32);
    let before = rank.stream.record().unwrap();
    other.wait(&before).unwrap();
    for i in 0..20 {
        let (stream, next) = if i % 2 == 0 {
            (&rank.stream, &other)
        } else {
            (&other, &rank.stream)
        };
        comm.all_reduce(stream, slice, slice, ReduceOp::Avg)
            .unwrap();
        next.wait(&stream.record().unwrap()).unwrap();
    }
    let mut bytes = vec![0; slice.len_bytes()];
    device
        .download(&rank.stream, slice, &mut bytes, LIMIT)
        .unwrap();
    assert!(bytes.chunks(4).all(|b| b == 1f32.to_le_bytes()));
}

/// Sums of positive 16-bit values: N - 1 roundings at most, and the same bits each time.
fn sums(comm: &NcclCommunicator, rank: &Rank) {
    const LEN: usize = 5000;
    let n = comm.world_size();
    let value =
        |q: usize, i: usize| 0.1 + ((i * 2_654_435_761 + q * 40_503) % 10_007) as f32 * 1e-3;
    let device = rank.pool.device();

    for (dtype, ulp) in [
        (DType::F16, f16::EPSILON.to_f32()),
        (DType::Bf16, bf16::EPSILON.to_f32()),
    ] {
        let round = |v: f32| {
            if dtype == DType::F16 {
                f16::from_f32(v).to_bits()
            } else {
                bf16::from_f32(v).to_bits()
            }
        };
        let wide = |b: u16| {
            if dtype == DType::F16 {
                f16::from_bits(b).to_f32()
            } else {
                bf16::from_bits(b).to_f32()
            }
        };
        let (slice, _block) = rank.buffer(LEN, dtype);
        let mut seen: Vec<Vec<u8>> = Vec::new();
        for _ in 0..2 {
            let own: Vec<u8> = (0..LEN)
                .flat_map(|i| round(value(comm.rank(), i)).to_le_bytes())
                .collect();
            device.upload(&rank.stream, &own, slice, LIMIT).unwrap();
            comm.all_reduce(&rank.stream, slice, slice, ReduceOp::Sum)
                .unwrap();
            let mut bytes = vec![0; slice.len_bytes()];
            device
                .download(&rank.stream, slice, &mut bytes, LIMIT)
                .unwrap();
            seen.push(bytes);
        }
        assert_eq!(seen[0], seen[1], "the same bits each time");
        for (i, bytes) in seen[0].chunks(2).enumerate() {
            let got = wide(u16::from_le_bytes([bytes[0], bytes[1]]));
            let sum: f64 = (0..n).map(|q| f64::from(wide(round(value(q, i))))).sum();
            // A unit in the last place is at most the epsilon times the value.
            let off = (f64::from(got) - sum).abs() / (sum * f64::from(ulp));
            assert!(
                off <= (n - 1) as f64,
                "{dtype} {i}: {got} for {sum}: {off} units"
            );
        }
    }

    println!("within (N - 1) units in the last place");
}

/// Makes rank 1 (or 0) fail; every other rank returns its error.
fn fault(kind: &str, comm: NcclCommunicator, rank: &Rank) -> Result<(), CommError> {
    let stream = &rank.stream;
    let at_fault = comm.rank() == 1;
    let ((a, _a), (b, _b)) = (rank.buffer(4096, DType::F32), rank.buffer(8192, DType::F32));
    let (bytes, _c) = rank.buffer(4096, DType::U8);
    let mut parts = Vec::new();
    comm.barrier(stream)?;
    stream.synchronize(LIMIT)?;
    // Time for the coordinator to receive the call.
    std::thread::sleep(Duration::from_millis(100));

    match kind {
        "killed-before" if at_fault => kill_this_process(),
        "killed-0" if comm.rank() == 0 => kill_this_process(),
        "killed-during" if at_fault => {
            // It waits in the collective for the others, which are delayed.
            std::thread::spawn(|| {
                std::thread::sleep(Duration::from_millis(200));
                kill_this_process();
            });
        }
        "killed-during" => std::thread::sleep(Duration::from_millis(400)),
        "killed-after" => {
            comm.all_reduce(stream, a, a, ReduceOp::Sum)?;
            stream.synchronize(LIMIT)?;
            if at_fault {
                kill_this_process();
            }
        }
        // On the stream, the world's collective follows one of another communicator that cannot
        // end.
        "killed-behind" => {
            let part = comm.split(Some(0), comm.rank() as u64)?.unwrap();
            part.all_reduce(stream, a, a, ReduceOp::Sum)?;
            stream.synchronize(LIMIT)?;
            if at_fault {
                kill_this_process();
            }
            part.all_reduce(stream, a, a, ReduceOp::Sum)?;
            parts.push(part);
        }
        // NCCL releases a communicator only after all graphs with its collectives. This graph is
        // never dropped.
        "killed-with-graph" => {
            let failed = |e: CommError| DeviceError::Driver {
                call: "all_reduce",
                message: e.to_string(),
            };
            let graph =
                stream.capture(|| comm.all_reduce(stream, a, a, ReduceOp::Sum).map_err(failed))?;
            // SAFETY: `a` lives until the process ends.
            unsafe { graph.launch(stream) }?;
            stream.synchronize(LIMIT)?;
            if at_fault {
                kill_this_process();
            }
            std::mem::forget(graph);
        }
        "stalled" if at_fault => std::thread::sleep(FAULT_LIMIT * 2),
        "count" if at_fault => comm.all_reduce(stream, b, b, ReduceOp::Sum)?,
        // Rank 2 receives more from rank 1 than that sends.
        "pair" => {
            let more = usize::from(comm.rank() == 2);
            let [send, recv] = [a.slice(0..30), b.slice(0..30 + more)];
            comm.all_to_all_uneven(stream, send, recv, &[10; 3], &[10, 10 + more, 10])?;
        }
        "kind" if at_fault => comm.broadcast(stream, a, 0)?,
        "dtype" if at_fault => comm.all_reduce(stream, bytes, bytes, ReduceOp::Sum)?,
        "order" if at_fault => {
            comm.barrier(stream)?;
            comm.all_reduce(stream, a, a, ReduceOp::Sum)?;
        }
        "abort" if at_fault => comm.abort("on purpose"),
        "leaves" if at_fault => {
            drop(comm);
            std::process::exit(0);
        }
        "poison" if at_fault => stream.poison(DeviceError::Closed {
            stream: "on purpose".to_owned(),
        }),
        "split" if at_fault => std::process::exit(0),
        "split" => return comm.split(Some(0), 0).map(|_| ()),
        _ => {}
    }

    let called = comm.all_reduce(stream, a, a, ReduceOp::Sum);
    let ended = called.and_then(|()| Ok(stream.synchronize(LIMIT)?));
    // A call that differs from its peers' may succeed before the coordinator has compared it.
    let begun = Instant::now();
    while comm.failure().is_none() && begun.elapsed() < FAULT_LIMIT {
        std::thread::sleep(Duration::from_millis(5));
    }
    comm.failure().map_or(Ok(()), Err)?;

    ended
}

/// Makes rank 3 fail in the second of two groups, as in a run that shards over groups; every other
/// rank returns its error.
fn fault_in_a_group(kind: &str, comm: &NcclCommunicator, rank: &Rank) -> Result<(), CommError> {
    let stream = &rank.stream;
    let at_fault = comm.rank() == 3;
    let (a, _a) = rank.buffer(4096, DType::F32);
    let (b, _b) = rank.buffer(8192, DType::F32);
    let group = comm.rank() / 2;
    let group = comm.split(Some(group as u64), comm.rank() as u64)?.unwrap();
    group.all_reduce(stream, a, a, ReduceOp::Sum)?;
    comm.barrier(stream)?;
    stream.synchronize(LIMIT)?;

    match kind {
        "group-killed" if at_fault => kill_this_process(),
        "group-stalled" if at_fault => std::thread::sleep(FAULT_LIMIT * 2),
        "group-count" if at_fault => group.all_reduce(stream, b, b, ReduceOp::Sum)?,
        "group-abort" if at_fault => group.abort("on purpose"),
        _ => {}
    }

    // The first group ends its own call, and waits for all ranks.
    let called = group
        .all_reduce(stream, a, a, ReduceOp::Sum)
        .and_then(|()| comm.all_reduce(stream, a, a, ReduceOp::Sum));
    let ended = called.and_then(|()| Ok(stream.synchronize(LIMIT)?));
    // A call that differs from its peers' may succeed before the coordinator has compared it.
    let begun = Instant::now();
    while comm.failure().is_none() && begun.elapsed() < FAULT_LIMIT {
        std::thread::sleep(Duration::from_millis(5));
    }
    comm.failure().map_or(Ok(()), Err)?;

    ended
}
