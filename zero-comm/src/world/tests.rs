//! Tests of failures without a library or a device: ranks are threads, each connected to
//! the coordinator; collectives are simulated by the results of their probes.

use std::io::{ErrorKind, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use zero_alloc::device::DeviceError;

use super::Ranks;
use super::abort::AbortCompletion;
use super::fnv::Fnv;
use super::frames::frame;
use super::handshake::{Hello, Key, MAX_HELLO_BYTES};
use super::message::{Message, Progress, SplitRank};
use super::process::{Operation, Transport};
use super::testing::{Fake, LONG, Rank, broadcast, free_port, join_as, ranks};
use super::watcher::Connection;
use super::wire::{Incoming, send};
use crate::CommError;
use crate::split_request::SplitRequest;

/// A limit that expires.
const SHORT: Duration = Duration::from_millis(300);

/// Runs `body` as each of `n` ranks.
pub(crate) fn on_ranks<R: Send>(n: usize, body: impl Fn(Ranks) -> R + Sync) -> Vec<R> {
    let port = free_port();
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = (0..n)
            .map(|rank| scope.spawn(move || body(ranks(rank, n, port))))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

/// Connects to `port` as soon as something listens there.
pub(crate) fn connect(port: u16) -> TcpStream {
    let begun = Instant::now();
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(error) => assert!(begun.elapsed() < LONG, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Passes the handshake as `hello`.
pub(crate) fn greet(mut stream: &TcpStream, key: &Key, hello: &Hello) -> Incoming {
    let mut incoming = Incoming::new(stream.try_clone().unwrap());
    let hello = key.hello(hello).unwrap();
    stream.write_all(&frame(&hello).unwrap()).unwrap();
    let challenge = incoming.next_frame(LONG, MAX_HELLO_BYTES).unwrap().unwrap();
    let proof = key.answer(&hello, challenge).unwrap();
    stream.write_all(&frame(&proof).unwrap()).unwrap();
    incoming
}

/// A transport whose abort completes only after another's abort, as if its collective waited behind
/// the other's.
struct Behind(Arc<Fake>);

impl Transport for Behind {
    fn error(&self) -> Option<String> {
        None
    }

    fn abort(&self) -> AbortCompletion {
        let (sender, completion) = AbortCompletion::new();
        let other = Arc::clone(&self.0);
        std::thread::spawn(move || {
            while other.aborts.load(Ordering::Relaxed) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(sender);
        });
        completion
    }
}

#[test]
fn all_aborts_start_before_any_is_awaited() {
    for elapsed in on_ranks(1, |ranks| {
        let connection = Connection::start(join_as(&ranks, LONG).unwrap(), 0, LONG).unwrap();
        let world = &connection.world;
        let last = Arc::new(Fake::default());
        world.open(0, Arc::new(Behind(Arc::clone(&last))));
        world.open(1, last);
        let begun = Instant::now();
        world.fail(CommError::Aborted {
            rank: 0,
            reason: "on purpose".to_owned(),
        });
        // Waits for both aborts.
        drop(connection);
        begun.elapsed()
    }) {
        // Otherwise the limit of an abort passes, 5 s.
        assert!(elapsed < Duration::from_secs(4), "{elapsed:?}");
    }
}

#[test]
fn communicator_of_failed_world_is_aborted() {
    on_ranks(1, |ranks| {
        let rank = Rank::start(&ranks, LONG);
        rank.world.fail(CommError::Aborted {
            rank: 0,
            reason: "on purpose".to_owned(),
        });
        rank.wait_for_failure();
        // The watcher has aborted the communicators that it found.
        let late = Arc::new(Fake::default());
        rank.world.open(1, Arc::clone(&late) as Arc<dyn Transport>);
        assert_eq!(late.aborts.load(Ordering::Relaxed), 1);
        rank.call(8, Ok(true), Ok(false));
        assert_eq!(rank.poisoned.lock().len(), 1);
    });
}

/// Rank 0 has said goodbye, so the rank fails by itself and aborts before its watcher, which waits,
/// sees the failure.
#[test]
fn own_abort_poisons_streams_first() {
    let port = free_port();
    let (joined, _first) = std::thread::scope(|scope| {
        let first = scope.spawn(|| welcome_one(port));
        let joined = join_as(&ranks(1, 2, port), LONG).unwrap();
        let (stream, incoming) = first.join().unwrap();
        send(&stream, &[Message::Goodbye]).unwrap();
        (joined, (stream, incoming))
    });

    let connection = Connection::start(joined, 1, LONG).unwrap();
    let world = &connection.world;
    let [own, other] = [(); 2].map(|()| Arc::new(Fake::default()));
    let poisoned = Arc::new(Mutex::new(Vec::new()));

    for (context, fake) in [(0, &own), (1, &other)] {
        world.open(context, Arc::clone(fake) as Arc<dyn Transport>);
        for ended in [true, false] {
            let fake = Arc::clone(fake);
            let poisoned = Arc::clone(&poisoned);
            world.called(context, broadcast(8));
            world.watch(
                context,
                Operation {
                    stream: "comm".to_owned(),
                    reached: Box::new(|| Ok(true)),
                    // An abort ends it.
                    ended: Box::new(move || Ok(ended || fake.aborts.load(Ordering::Relaxed) > 0)),
                    poison: Box::new(move |_| poisoned.lock().push((context, ended))),
                },
            );
        }
    }

    // Until the watcher has received the goodbye, a failure waits for the coordinator's answer.
    std::thread::sleep(SHORT);
    world.fail(CommError::Aborted {
        rank: 1,
        reason: "on purpose".to_owned(),
    });
    world.drain(0).unwrap_err();
    let _completion = world.abort(&*own);
    world.close(0, 2);
    drop(connection);
    let mut poisoned = poisoned.lock().clone();
    poisoned.sort_unstable();
    assert_eq!(poisoned, [(0, false), (1, false)]);
}

/// Rank 0 drains while rank 1 makes no call: the error names rank 1.
#[test]
fn drain_names_the_late_rank() {
    let failures = on_ranks(2, |ranks| {
        let rank = Rank::start(&ranks, Duration::from_millis(300));
        if ranks.rank == 1 {
            return rank.wait_for_failure();
        }
        rank.call(8, Ok(true), Ok(true));
        rank.call(8, Ok(false), Ok(false));
        rank.world.drain(0).unwrap_err()
    });

    for failure in failures {
        assert!(
            matches!(
                failure,
                CommError::Stalled {
                    sequence: 0 | 1,
                    rank: 1,
                    ..
                }
            ),
            "{failure}"
        );
    }
}

#[test]
fn equal_calls_end_without_failure() {
    let failures = on_ranks(3, |ranks| {
        let rank = Rank::start(&ranks, LONG);
        for i in 0..200 {
            rank.call(i, Ok(true), Ok(true));
        }
        while rank.world.under_way(0) > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Rank 0 and the coordinator end first.
        std::thread::sleep(Duration::from_millis(60 * ranks.rank as u64));
        rank.world.close(0, 200);
        rank.world.failure()
    });
    assert_eq!(failures, [None, None, None]);
}

#[test]
fn compute_before_a_collective_does_not_count() {
    let failures = on_ranks(2, |ranks| {
        let rank = Rank::start(&ranks, SHORT);
        rank.call(8, Ok(false), Ok(false));
        std::thread::sleep(SHORT * 2);
        rank.world.failure()
    });
    assert_eq!(failures, [None, None]);
}

#[test]
fn lost_connection_ends_the_other_ranks() {
    let errors = on_ranks(3, |ranks| {
        if ranks.rank == 1 {
            let joined = join_as(&ranks, LONG).unwrap();
            joined.outgoing.shutdown(Shutdown::Both).unwrap();
            return None;
        }
        let rank = Rank::start(&ranks, LONG);
        rank.call(8, Ok(true), Ok(false));
        Some(rank.wait_for_failure())
    });
    // The collective is named if it was reported before the loss.
    let message = match &errors[0] {
        Some(
            CommError::Lost {
                rank: 1, message, ..
            }
            | CommError::Peer { rank: 1, message },
        ) => message,
        other => panic!("{other:?}"),
    };
    assert!(message.contains("connection ended"), "{message}");
    assert_eq!(errors[0], errors[2]);
}

/// Acts as the coordinator: lets one rank join, which reports its progress once in a long time.
fn welcome_one(port: u16) -> (TcpStream, Incoming) {
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let (stream, _) = listener.accept().unwrap();
    let key = Key::new(None);
    let mut incoming = Incoming::new(stream.try_clone().unwrap());
    let hello = incoming.next_frame(LONG, MAX_HELLO_BYTES).unwrap().unwrap();
    (&stream)
        .write_all(&frame(&key.challenge(hello).unwrap().0).unwrap())
        .unwrap();
    incoming.next_frame(LONG, MAX_HELLO_BYTES).unwrap().unwrap();
    send(
        &stream,
        &[Message::Welcome {
            id: vec![1],
            report_every: 60 * LONG,
        }],
    )
    .unwrap();
    (stream, incoming)
}

#[test]
fn end_of_rank_0_ends_the_other_ranks() {
    let errors = on_ranks(2, |ranks| {
        if ranks.rank == 0 {
            // It ends after the welcome.
            welcome_one(ranks.port);
            return None;
        }
        Some(Rank::start(&ranks, LONG).wait_for_failure())
    });
    assert!(
        matches!(errors[1], Some(CommError::Peer { rank: 0, .. })),
        "{errors:?}"
    );
}

/// A part of a frame may have been sent: the coordinator sees the end of the connection, not
/// another message in its place. What it had sent before is the cause.
#[test]
fn failed_write_ends_the_connection() {
    let sent_cause = CommError::Aborted {
        rank: 0,
        reason: "on purpose".to_owned(),
    };

    for cause in [None, Some(sent_cause)] {
        let port = free_port();
        let (joined, stream, mut incoming) = std::thread::scope(|scope| {
            let first = scope.spawn(|| welcome_one(port));
            let joined = join_as(&ranks(1, 2, port), LONG).unwrap();
            let (stream, incoming) = first.join().unwrap();
            (joined, stream, incoming)
        });
        joined.outgoing.set_write_timeout(Some(SHORT)).unwrap();
        let connection = Connection::start(joined, 1, LONG).unwrap();
        let world = &connection.world;
        world.open(0, Arc::new(Fake::default()));
        // More bytes than the buffers of the connection have.
        (0..1_000_000).for_each(|_| world.close(1, u64::MAX));
        if let Some(error) = &cause {
            send(
                &stream,
                &[Message::Failed {
                    error: error.clone(),
                }],
            )
            .unwrap();
        }
        let begun = Instant::now();
        while world.failure().is_none() {
            assert!(begun.elapsed() < LONG);
            std::thread::sleep(Duration::from_millis(1));
        }
        let failure = world.failure().unwrap();
        let message =
            "a message of rank 1 to rank 0 was not sent: it received nothing for 10s".to_owned();
        assert_eq!(
            failure,
            cause.unwrap_or(CommError::Peer { rank: 0, message })
        );
        drop(connection);
        let end = std::iter::repeat_with(|| incoming.next(LONG))
            .find_map(Result::err)
            .unwrap();
        assert_eq!(end.kind(), ErrorKind::UnexpectedEof, "{end}");
    }
}

/// The actions of rank 1 and of the other ranks, and the error that all of them see.
struct Fault {
    limit: Duration,
    rank_1: fn(&Rank),
    others: fn(&Rank),
    seen: &'static str,
}

impl Default for Fault {
    fn default() -> Self {
        Self {
            limit: LONG,
            rank_1: waits,
            others: waits,
            seen: "",
        }
    }
}

/// Its stream is in a collective that does not end.
fn waits(rank: &Rank) {
    rank.call(8, Ok(true), Ok(false));
}

fn splits(rank: &Rank) {
    // The failure, which all ranks see.
    let _ = rank.split();
}

fn aborts(rank: &Rank) {
    let aborted = |reason: &str| CommError::Aborted {
        rank: 1,
        reason: reason.to_owned(),
    };
    let first = aborted("on purpose");
    assert_eq!(rank.world.fail(first.clone()), first);
    // The first failure is final.
    assert_eq!(rank.world.fail(aborted("again")), first);
}

fn stream_fails(rank: &Rank) {
    let failed = DeviceError::Closed {
        stream: "comm".to_owned(),
    };
    rank.call(8, Err(failed.clone()), Err(failed));
}

#[test]
fn each_failure_reaches_all_ranks_and_poisons_their_streams() {
    let faults = [
        Fault {
            rank_1: aborts,
            seen: "rank 1 aborted: on purpose",
            ..Fault::default()
        },
        Fault {
            rank_1: |rank| *rank.fake.error.lock() = Some("unhandled system error".to_owned()),
            seen: "rank 1: unhandled system error",
            ..Fault::default()
        },
        Fault {
            rank_1: stream_fails,
            seen: "collective 0, broadcast of 8 x fp32: stream comm of rank 1 failed before running it",
            ..Fault::default()
        },
        // An error that only this process understands.
        Fault {
            rank_1: |rank| drop(rank.world.fail(CommError::NoRanks)),
            seen: "rank 1: a world needs at least one rank",
            ..Fault::default()
        },
        Fault {
            rank_1: |rank| rank.call(7, Ok(true), Ok(false)),
            seen: "collective 0: rank 1 called broadcast of 7 x fp32, but rank 0 called broadcast of 8 x fp32",
            ..Fault::default()
        },
        Fault {
            limit: SHORT,
            seen: "collective 0, broadcast of 8 x fp32: ",
            ..Fault::default()
        },
        Fault {
            limit: SHORT,
            rank_1: |rank| rank.call(8, Ok(false), Ok(false)),
            seen: "rank 1 did not reach it within 300ms; it had reached 0 collectives",
            ..Fault::default()
        },
        Fault {
            limit: SHORT,
            rank_1: |_| (),
            others: splits,
            seen: "rank 1: did not join split 0 of communicator 0 within 300ms",
        },
    ];

    for fault in faults {
        // Of two ranks only the other can be late.
        let n = if fault.limit == SHORT { 2 } else { 3 };
        let errors = on_ranks(n, |ranks| {
            let rank = Rank::start(&ranks, fault.limit);
            let act = if ranks.rank == 1 {
                fault.rank_1
            } else {
                fault.others
            };
            act(&rank);
            let error = rank.wait_for_failure().to_string();
            let poisoned = rank.poisoned.lock();
            assert!(poisoned.iter().all(|seen| *seen == error), "{poisoned:?}");
            let is_waiting = ranks.rank != 1 && !fault.seen.contains("split");
            assert!(!is_waiting || poisoned.len() == 1, "{error}");
            error
        });
        assert!(errors[0].contains(fault.seen), "{}", errors[0]);
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    }
}

/// The next message of a rank that is not a keepalive.
fn next(incoming: &mut Incoming) -> Message {
    loop {
        match incoming.next(LONG).unwrap() {
            Some(Message::Alive) => {}
            message => return message.expect("the rank sends nothing"),
        }
    }
}

/// Urgent messages do not wait for the report interval, and the progress comes before them.
#[test]
fn urgent_messages_follow_the_progress() {
    on_ranks(2, |ranks| {
        if ranks.rank == 1 {
            let rank = Rank::start(&ranks, 60 * LONG);
            rank.broadcast(0..3).unwrap();
            let place = rank
                .world
                .split(
                    0,
                    0,
                    SplitRequest {
                        color: Some(1),
                        key: 0,
                    },
                )
                .unwrap()
                .unwrap();
            assert_eq!(
                place,
                SplitRank {
                    context: 5,
                    rank: 0,
                    size: 1
                }
            );
            rank.world.open(5, Arc::new(Fake::default()));
            rank.world.called(5, broadcast(9));
            rank.world.close(5, 1);
            let failure = CommError::Aborted {
                rank: 1,
                reason: "on purpose".to_owned(),
            };
            assert_eq!(rank.world.fail(failure.clone()), failure);
            return;
        }
        let (stream, mut incoming) = welcome_one(ranks.port);
        let progress = |context, lens: &[usize]| {
            let mut hash = Fnv::default();
            let recent = lens.iter().map(|&len| {
                hash.add(&broadcast(len));
                (broadcast(len), hash.0)
            });
            let recent = recent.collect();
            let called = lens.len() as u64;
            let ended = if context == 0 { called } else { 0 };
            let progress = Progress {
                called,
                reached: ended,
                ended,
                recent,
            };
            Message::Progress { context, progress }
        };

        assert_eq!(next(&mut incoming), progress(0, &[0, 1, 2]));
        let request = SplitRequest {
            color: Some(1),
            key: 0,
        };
        let split = Message::Split {
            context: 0,
            number: 0,
            request,
        };
        assert_eq!(next(&mut incoming), split);
        let place = Some(SplitRank {
            context: 5,
            rank: 0,
            size: 1,
        });
        let placed = Message::Placed {
            context: 0,
            number: 0,
            place,
        };
        send(&stream, &[placed]).unwrap();
        // The progress comes before the message that the rank left.
        assert_eq!(next(&mut incoming), progress(5, &[9]));
        let left = Message::Left {
            context: 5,
            done: 1,
        };
        assert_eq!(next(&mut incoming), left);
        let Message::Failed { error } = next(&mut incoming) else {
            panic!("no failure")
        };
        send(&stream, &[Message::Failed { error }]).unwrap();
        // Until the rank has received it.
        while incoming.next(LONG).is_ok() {}
    });
}

/// The first rank of a communicator need not be the first of the world.
#[test]
fn differing_calls_after_a_split_name_world_ranks() {
    let errors = on_ranks(3, |ranks| {
        let rank = Rank::start(&ranks, LONG);
        let request = SplitRequest {
            color: (ranks.rank > 0).then_some(0),
            key: 2 - ranks.rank as u64,
        };
        if let Some(place) = rank.world.split(0, 0, request).unwrap() {
            assert_eq!(
                place,
                SplitRank {
                    context: 1,
                    rank: 2 - ranks.rank,
                    size: 2
                }
            );
            rank.world.open(1, Arc::new(Fake::default()));
            rank.world.called(1, broadcast(ranks.rank));
        }
        rank.wait_for_failure()
    });

    let call = Box::new(broadcast(1));
    let other_call = Box::new(broadcast(2));
    let expected = CommError::Mismatch {
        sequence: 0,
        rank: 1,
        call,
        other_rank: 2,
        other_call,
    };

    assert_eq!(errors, vec![expected; 3]);
}
