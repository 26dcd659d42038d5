//! Every fault of a rank at every collective: all ranks fail with the same error, in time.
//! `tests/mpi.rs` does the same with processes.

use std::time::Duration;

use crate::common::{
    Comm, LIMIT, Random, Streams, another, call, delay, on_ranks, unmatched, unmatched_text, view,
};
use zero_alloc::device::{AnySlice, DeviceError, Stream};
use zero_comm::{Collective, CommError, CommOptions, ReduceOp};

const RANKS: usize = 3;

/// A fault of rank 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Its thread ends: the communicator is dropped.
    Dies,
    /// Its thread ends while the others wait within the collective.
    DiesMeanwhile,
    /// It makes no call until the limit has passed.
    Stalls,
    /// An earlier operation of its stream fails.
    Poisoned,
    /// An earlier operation of its stream panics.
    Panics,
    /// Its stream is closed.
    Closed,
    /// It aborts.
    Aborts,
    /// It calls another collective.
    Kind,
    /// It passes different counts.
    Count,
    /// It passes elements of another type.
    DType,
    /// It calls two collectives in the wrong order.
    Order,
}

const FAULTS: [Fault; 11] = [
    Fault::Dies,
    Fault::DiesMeanwhile,
    Fault::Stalls,
    Fault::Poisoned,
    Fault::Panics,
    Fault::Closed,
    Fault::Aborts,
    Fault::Kind,
    Fault::Count,
    Fault::DType,
    Fault::Order,
];

/// Makes rank 1 fail; returns whether it then waits for the failure of the world.
fn misbehave(
    fault: Fault,
    comm: &Comm,
    s: &Streams,
    which: Collective,
    buffers: [AnySlice; 4],
) -> bool {
    let [send, recv, send_bytes, recv_bytes] = buffers;
    let other = another(which);
    let error = || {
        Err(DeviceError::Closed {
            stream: "on purpose".to_owned(),
        })
    };

    match fault {
        Fault::Dies => return false,
        Fault::DiesMeanwhile => {
            std::thread::sleep(Duration::from_millis(5));
            return false;
        }
        Fault::Stalls => {
            while comm.failure().is_none() {
                std::thread::sleep(Duration::from_millis(5));
            }
            return true;
        }
        Fault::Poisoned => s.comm.enqueue("bad", error).unwrap(),
        Fault::Panics => s.comm.enqueue("bad", || panic!("on purpose")).unwrap(),
        Fault::Closed => {
            s.comm.close();
            assert!(call(comm, s, which, send, recv, 8).is_err());
            return true;
        }
        Fault::Aborts => comm.abort("on purpose"),
        Fault::Kind | Fault::Order => call(comm, s, other, send, recv, 8).unwrap(),
        Fault::Count => return call(comm, s, which, send, recv, 7).is_ok(),
        Fault::DType => return call(comm, s, which, send_bytes, recv_bytes, 8).is_ok(),
    }

    call(comm, s, which, send, recv, 8).unwrap();
    true
}

fn outcomes(fault: Fault, which: Collective) -> Vec<Option<CommError>> {
    let limit = if fault == Fault::Stalls {
        Duration::from_secs(1)
    } else {
        LIMIT
    };

    on_ranks(RANKS, CommOptions::default().limit(limit), |comm, s| {
        let mut send = vec![1f32; 32];
        let mut recv = vec![1f32; 32];
        let mut send_bytes = vec![1u8; 32];
        let mut recv_bytes = vec![1u8; 32];
        let buffers = [
            view(&mut send),
            view(&mut recv),
            view(&mut send_bytes),
            view(&mut recv_bytes),
        ];
        // Collective 0 succeeds.
        comm.barrier(&s.comm).unwrap();
        s.comm.synchronize(LIMIT).unwrap();
        if comm.rank() == 1 {
            if !misbehave(fault, &comm, s, which, buffers) {
                return None;
            }
        } else {
            call(&comm, s, which, buffers[0], buffers[1], 8).unwrap();
            if fault == Fault::Order {
                call(&comm, s, another(which), buffers[0], buffers[1], 8).unwrap();
            }
        }
        if fault != Fault::Stalls || comm.rank() != 1 {
            let ended = s.comm.synchronize(LIMIT);
            assert!(
                ended.is_err() || fault == Fault::Closed && comm.rank() == 1,
                "{fault:?} at {which:?}"
            );
        }
        comm.failure()
    })
}

#[test]
fn every_fault_ends_all_ranks() {
    for which in Collective::ALL {
        for fault in FAULTS {
            if which == Collective::Barrier && matches!(fault, Fault::Count | Fault::DType) {
                // A barrier has neither count nor type.
                continue;
            }
            let seen = outcomes(fault, which);
            let first = seen[0]
                .clone()
                .unwrap_or_else(|| panic!("{fault:?} at {which:?}: rank 0 saw nothing"));
            for (rank, seen) in seen.iter().enumerate() {
                let gone = rank == 1 && matches!(fault, Fault::Dies | Fault::DiesMeanwhile);
                assert!(
                    gone || seen.as_ref() == Some(&first),
                    "{fault:?} at {which:?}: rank {rank}: {seen:?}"
                );
            }
            let right = match (&first, fault) {
                (
                    CommError::Left {
                        sequence: 1,
                        rank: 1,
                        done: 1,
                        ..
                    },
                    Fault::Dies | Fault::DiesMeanwhile,
                )
                | (
                    CommError::Stalled {
                        sequence: 1,
                        rank: 1,
                        done: 1,
                        ..
                    },
                    Fault::Stalls,
                )
                | (
                    CommError::Skipped {
                        sequence: 1,
                        rank: 1,
                        ..
                    },
                    Fault::Poisoned | Fault::Panics | Fault::Closed,
                )
                | (CommError::Aborted { rank: 1, .. }, Fault::Aborts) => true,
                (
                    CommError::Mismatch {
                        sequence: 1,
                        rank,
                        other_rank,
                        call,
                        other_call,
                    },
                    Fault::Kind | Fault::Count | Fault::DType | Fault::Order,
                ) => (*rank == 1) != (*other_rank == 1) && call != other_call,
                _ => false,
            };
            assert!(right, "{fault:?} at {which:?}: {first:?}");
            let message = first.to_string();
            if let CommError::Mismatch {
                call, other_call, ..
            } = &first
            {
                assert!(message.contains(&call.to_string()), "{message}");
                assert!(message.contains(&other_call.to_string()), "{message}");
            }
            assert!(
                message.contains("rank 1") && !message.contains('\n'),
                "{message}"
            );
            assert!(
                fault == Fault::Aborts || message.contains("collective 1"),
                "{message}"
            );
        }
    }
}

/// Counts that match in sum, and with all ranks but one.
#[test]
fn unmatched_pair_of_counts_ends_all_ranks() {
    let seen = on_ranks(4, CommOptions::default(), |comm, s| {
        let mut send = vec![1f32; 16];
        let mut recv = vec![2f32; 17];
        comm.barrier(&s.comm).unwrap();
        unmatched(&comm, s, view(&mut send), view(&mut recv), 4).unwrap();
        assert!(s.comm.synchronize(LIMIT).is_err());
        assert_eq!(recv, [2.0; 17], "nothing is written");
        comm.failure().unwrap()
    });
    assert!(seen.iter().all(|error| *error == seen[0]), "{seen:?}");
    let message = seen[0].to_string();
    let text = format!("collective 1, all_to_all: {}", unmatched_text(4));
    assert!(message.starts_with(&text), "{message}");
}

/// A rank frees its buffers as soon as it sees the error, so no peer may still access them then. A
/// sanitizer would detect such an access.
#[test]
fn ranks_leave_only_unused_buffers() {
    for seed in 0..if cfg!(miri) { 3 } else { 60 } {
        on_ranks(RANKS, CommOptions::default(), |comm, s| {
            let mut random = Random::new(seed * 10 + comm.rank() as u64);
            for _ in 0..20 {
                let mut values = vec![1f32; if cfg!(miri) { 300 } else { 100_000 }];
                let buffer = view(&mut values);
                comm.all_reduce(&s.comm, buffer, buffer, ReduceOp::Max)
                    .unwrap();
                if comm.rank() == 1 && random.below(8) == 0 {
                    std::thread::sleep(Duration::from_micros(random.below(100)));
                    comm.abort("on purpose");
                }
                if s.comm.synchronize(LIMIT).is_err() {
                    values.fill(2.0);
                    drop(values);
                    return;
                }
                assert!(values.iter().all(|&v| v == 1.0));
            }
        });
    }
}

/// Limits that pass and aborts at any point of a collective: when a rank has seen its end, no peer
/// writes to its buffer. Half of the ranks' streams are late by up to 300 us.
/// `ZERO_PROPTEST_FACTOR` multiplies the seeds.
#[test]
fn limits_of_microseconds_leave_only_unused_buffers() {
    let factor = std::env::var("ZERO_PROPTEST_FACTOR")
        .ok()
        .and_then(|f| f.parse().ok())
        .unwrap_or(1u64);
    let mut failed = 0;
    let seeds = if cfg!(miri) { 3 } else { 100 * factor };

    for seed in 0..seeds {
        let mut random = Random::new(seed);
        let limit = Duration::from_micros(random.below(500));
        let len = 1 + random.below(if cfg!(miri) { 100 } else { 300_000 }) as usize;
        let all_have_ended = std::sync::Barrier::new(RANKS);
        let results = on_ranks(RANKS, CommOptions::default().limit(limit), |comm, s| {
            let mut random = Random::new(seed * 10 + comm.rank() as u64);
            let mut values = vec![1f32; len];
            let mut result = Ok(());
            for _ in 0..3 {
                let buffer = view(&mut values);
                delay(&s.comm, &mut random);
                let called = comm.all_reduce(&s.comm, buffer, buffer, ReduceOp::Max);
                if random.below(9) == 0 {
                    std::thread::sleep(Duration::from_micros(random.below(300)));
                    comm.abort("on purpose");
                }
                let ended = s.comm.synchronize(LIMIT);
                assert!(called.is_ok() || comm.failure().is_some());
                result = called.map_err(|_| ()).and(ended.map_err(|_| ()));
                if result.is_err() {
                    break;
                }
            }
            values.fill(2.0);
            all_have_ended.wait();
            assert!(
                values.iter().all(|&v| v == 2.0),
                "seed {seed}: a peer wrote after the end"
            );
            result
        });
        failed += u64::from(results.iter().any(Result::is_err));
    }

    println!("{failed} of {seeds} worlds failed");
}

#[test]
fn missed_split_ends_all_ranks() {
    for how in ["leaves", "aborts", "stalls"] {
        let limit = if how == "stalls" {
            Duration::from_secs(1)
        } else {
            LIMIT
        };
        let seen = on_ranks(RANKS, CommOptions::default().limit(limit), |comm, _| {
            match (comm.rank(), how) {
                (1, "leaves") => return None,
                (1, "aborts") => comm.abort("on purpose"),
                (1, _) => {
                    while comm.failure().is_none() {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                }
                _ => assert!(comm.split(Some(0), 0).is_err()),
            }
            comm.failure()
        });
        for (rank, seen) in seen.iter().enumerate() {
            match seen {
                Some(CommError::Aborted { rank: 1, .. }) if how == "aborts" => {}
                Some(CommError::Peer { rank: 1, .. }) if how != "aborts" => {}
                None if rank == 1 && how == "leaves" => {}
                _ => panic!("{how}: rank {rank}: {seen:?}"),
            }
        }
    }
}

#[test]
fn failure_reaches_split_communicators() {
    // The failure must occur after all ranks have split and called.
    let all_have_called = std::sync::Barrier::new(RANKS);
    on_ranks(RANKS, CommOptions::default(), |comm, s| {
        let child = comm
            .split(Some((comm.rank() / 2) as u64), 0)
            .unwrap()
            .unwrap();
        if comm.rank() == 0 {
            // Its peer does not call it.
            child.barrier(&s.comm).unwrap();
        }
        all_have_called.wait();
        if comm.rank() == 2 {
            comm.abort("on purpose");
            return;
        }
        if comm.rank() == 0 {
            s.comm.synchronize(LIMIT).unwrap_err();
        }
        while child.failure().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(matches!(
            child.failure(),
            Some(CommError::Aborted { rank: 2, .. })
        ));
    });
}
