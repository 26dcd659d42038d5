//! Shared by the tests: ranks on threads, views of vectors, delays.

#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

pub mod launched;
pub mod model;

use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::{AnySlice, Device, DeviceId, DeviceSlice, Element, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_comm::threads::World;
use zero_comm::{Collective, CommError, CommOptions, Communicator, ReduceOp};

/// Longer than any test runs.
pub const LIMIT: Duration = Duration::from_secs(60);

/// A communicator of host ranks.
pub type Comm = Arc<dyn Communicator<HostDevice>>;

/// A slice of `values`, which the test keeps until its streams are synchronized.
pub fn view<T: Element>(values: &mut [T]) -> AnySlice {
    // SAFETY: every test synchronizes its streams before it touches or drops the values.
    unsafe { DeviceSlice::from_raw_parts(values.as_mut_ptr(), values.len(), DeviceId::HOST) }
        .erase()
}

/// Calls `which` with `len` elements per rank, or in total; `send` and `recv` have `len` elements
/// for every rank.
pub fn call(
    comm: &Comm,
    s: &Streams,
    which: Collective,
    send: AnySlice,
    recv: AnySlice,
    len: usize,
) -> Result<(), CommError> {
    let n = comm.world_size();
    let stream = &s.comm;
    match which {
        Collective::ReduceScatter => comm.reduce_scatter(
            stream,
            send.slice(0..len * n),
            recv.slice(0..len),
            ReduceOp::Sum,
        ),
        Collective::AllGather => {
            comm.all_gather(stream, send.slice(0..len), recv.slice(0..len * n))
        }
        Collective::AllReduce => comm.all_reduce(
            stream,
            send.slice(0..len),
            recv.slice(0..len),
            ReduceOp::Sum,
        ),
        Collective::Broadcast => comm.broadcast(stream, send.slice(0..len), 0),
        Collective::AllToAll => {
            comm.all_to_all(stream, send.slice(0..len * n), recv.slice(0..len * n))
        }
        Collective::Barrier => comm.barrier(stream),
        other => panic!("add {other:?} to this test"),
    }
}

/// An all-to-all of `len` elements for each rank, except that rank 2 receives one more from rank 1
/// than that sends.
pub fn unmatched(
    comm: &Comm,
    s: &Streams,
    send: AnySlice,
    recv: AnySlice,
    len: usize,
) -> Result<(), CommError> {
    let n = comm.world_size();
    let more = usize::from(comm.rank() == 2);
    let sent = vec![len; n];
    let mut received = sent.clone();
    received[1] += more;
    let send = send.slice(0..len * n);
    let recv = recv.slice(0..len * n + more);
    comm.all_to_all_uneven(&s.comm, send, recv, &sent, &received)
}

/// Part of the error of [`unmatched`].
pub fn unmatched_text(len: usize) -> String {
    format!(
        "rank 1 sends {len} elements to rank 2, which receives {} from it",
        len + 1
    )
}

/// Returns another collective than `which`.
pub fn another(which: Collective) -> Collective {
    if which == Collective::Barrier {
        Collective::AllGather
    } else {
        Collective::Barrier
    }
}

/// The streams of a rank.
pub struct Streams {
    pub compute: HostStream,
    pub comm: HostStream,
}

impl Streams {
    pub fn new(rank: usize) -> Self {
        let device = HostDevice::new();
        let stream = |what: &str| {
            device
                .create_stream(&format!("rank {rank} {what}"))
                .unwrap()
        };
        Self {
            compute: stream("compute"),
            comm: stream("comm"),
        }
    }

    pub fn synchronize(&self) {
        self.compute.synchronize(LIMIT).unwrap();
        self.comm.synchronize(LIMIT).unwrap();
    }
}

/// Runs `body` on a thread for each rank; returns the results by rank.
pub fn on_ranks<R: Send>(
    n: usize,
    options: CommOptions,
    body: impl Fn(Comm, &Streams) -> R + Sync,
) -> Vec<R> {
    let comms = World::new(n, options).unwrap();
    std::thread::scope(|scope| {
        let handles: Vec<_> = comms
            .into_iter()
            .map(|comm| {
                let body = &body;
                scope.spawn(move || {
                    let streams = Streams::new(comm.rank());
                    let result = body(Arc::new(comm), &streams);
                    // Operations may use the body's memory until the streams are drained.
                    let _ = (
                        streams.compute.synchronize(LIMIT),
                        streams.comm.synchronize(LIMIT),
                    );
                    result
                })
            })
            .collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

/// A pseudo-random generator: xorshift64*.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
    }
}

/// Makes `stream` sleep for a random time, in half of the calls.
pub fn delay(stream: &HostStream, random: &mut Random) {
    let micros = random.below(600).saturating_sub(300);
    if micros > 0 {
        stream
            .enqueue("delay", move || {
                std::thread::sleep(Duration::from_micros(micros));
                Ok(())
            })
            .unwrap();
    }
}

/// Enqueues `dst += src` in fp32.
pub fn accumulate(stream: &HostStream, src: AnySlice, dst: AnySlice) {
    let src = src.typed::<f32>().unwrap();
    let dst = dst.typed::<f32>().unwrap();
    stream
        .enqueue("accumulate", move || {
            // SAFETY: host memory; the test orders accesses by events, which is what it tests.
            let src = unsafe { src.as_host() };
            // SAFETY: as above.
            let dst = unsafe { dst.as_host_mut() };
            dst.iter_mut().zip(src).for_each(|(d, s)| *d += s);
            Ok(())
        })
        .unwrap();
}

/// Enqueues a copy within the host.
pub fn copy(stream: &HostStream, src: AnySlice, dst: AnySlice) {
    HostDevice::new().copy(stream, src, dst).unwrap();
}
