//! Every collective under the seeded scheduler, between a producer and a consumer on another
//! stream. With both waits the checker finds no error; without one of them it reports one, in every
//! order.

use std::time::Duration;

use zero_alloc::device::{AnySlice, DType, Device, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::{Block, Pool, Purpose};
use zero_comm::threads::{ThreadsComm, World};
use zero_comm::{Collective, CommOptions, Communicator, ReduceOp};

const LIMIT: Duration = Duration::from_secs(60);
const RANKS: usize = 2;
/// Elements of a rank's segment.
const LEN: usize = 3;

/// The wait that rank 1 omits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Forgotten {
    Nothing,
    /// The communication stream does not wait for the writes to `send`.
    Producer,
    /// The stream that reads `recv` does not wait for the collective.
    Consumer,
}

struct Rank {
    comm: ThreadsComm,
    compute: HostStream,
    comm_stream: HostStream,
    send: Block<HostDevice>,
    recv: Block<HostDevice>,
}

impl Rank {
    fn new(device: &HostDevice, pool: &Pool<HostDevice>, comm: ThreadsComm) -> Self {
        let stream = |what: &str| {
            device
                .create_stream(&format!("rank {} {what}", comm.rank()))
                .unwrap()
        };
        let compute = stream("compute");
        let comm_stream = stream("comm");
        let block = || {
            pool.allocate(LEN * RANKS, DType::F32, Purpose::Workspace, &compute)
                .unwrap()
        };
        let send = block();
        let recv = block();
        Self {
            comm,
            compute,
            comm_stream,
            send,
            recv,
        }
    }

    /// The buffers that `which` reads and writes; a broadcast has only one.
    fn buffers(&self, which: Collective) -> (AnySlice, AnySlice) {
        // SAFETY: the blocks are dropped after their streams are synchronized.
        let [send, recv] = [&self.send, &self.recv].map(|block| unsafe { block.slice() });
        match which {
            Collective::ReduceScatter => (send, recv.slice(0..LEN)),
            Collective::AllGather => (send.slice(0..LEN), recv),
            Collective::Broadcast => (send, send),
            Collective::AllReduce | Collective::AllToAll | Collective::Barrier => (send, recv),
            other => panic!("add {other:?} to this test"),
        }
    }

    fn run(&self, which: Collective, forgotten: Forgotten) {
        let forgotten = if self.comm.rank() == 1 {
            forgotten
        } else {
            Forgotten::Nothing
        };

        let (send, recv) = self.buffers(which);
        let touch = |slice: AnySlice, write: bool| {
            let slice = slice.typed::<f32>().unwrap();
            let op = move || {
                if write {
                    // SAFETY: streams and events order the accesses, otherwise the checker fails
                    // the operation.
                    unsafe { slice.as_host_mut() }.fill(1.0);
                } else {
                    // SAFETY: as above.
                    let _seen = unsafe { slice.as_host() };
                }
                Ok(())
            };
            self.compute.enqueue("touch", op).unwrap();
        };

        touch(send, true);
        touch(recv, true);
        if forgotten != Forgotten::Producer {
            self.comm_stream
                .wait(&self.compute.record().unwrap())
                .unwrap();
        }

        let stream = &self.comm_stream;
        match which {
            Collective::ReduceScatter => {
                self.comm.reduce_scatter(stream, send, recv, ReduceOp::Sum)
            }
            Collective::AllGather => self.comm.all_gather(stream, send, recv),
            Collective::AllReduce => self.comm.all_reduce(stream, send, recv, ReduceOp::Sum),
            Collective::Broadcast => self.comm.broadcast(stream, send, 0),
            Collective::AllToAll => self.comm.all_to_all(stream, send, recv),
            Collective::Barrier => self.comm.barrier(stream),
            other => panic!("add {other:?} to this test"),
        }
        .unwrap();

        if forgotten != Forgotten::Consumer {
            self.compute
                .wait(&self.comm_stream.record().unwrap())
                .unwrap();
        }

        touch(recv, false);
    }
}

/// Returns whether the checker found no error.
fn sound(seed: u64, which: Collective, forgotten: Forgotten) -> bool {
    let device = HostDevice::seeded(seed);
    let pool = Pool::new(device.clone(), 1 << 20);
    let comms = World::new(RANKS, CommOptions::default()).unwrap();
    let ranks: Vec<Rank> = comms
        .into_iter()
        .map(|comm| Rank::new(&device, &pool, comm))
        .collect();
    ranks.iter().for_each(|rank| rank.run(which, forgotten));
    for rank in &ranks {
        for stream in [&rank.compute, &rank.comm_stream] {
            let ended = stream.synchronize(LIMIT);
            assert!(
                ended.is_ok() || forgotten != Forgotten::Nothing,
                "{which:?}, seed {seed}: {ended:?}"
            );
        }
    }
    device.violations().is_empty()
}

#[test]
fn missing_wait_is_found_in_every_order() {
    for which in Collective::ALL
        .into_iter()
        .filter(|&which| which != Collective::Barrier)
    {
        for seed in 0..if cfg!(miri) { 1 } else { 10 } {
            assert!(
                sound(seed, which, Forgotten::Nothing),
                "{which:?}, seed {seed}"
            );
            for forgotten in [Forgotten::Producer, Forgotten::Consumer] {
                assert!(
                    !sound(seed, which, forgotten),
                    "{which:?}, {forgotten:?}, seed {seed}"
                );
            }
        }
    }
}
