//! Tests of rendezvous and failures without NCCL or a device: ranks are threads, each connected to
//! the coordinator; collectives are simulated by the results of their probes.

use std::io::{ErrorKind, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use zero_alloc::device::DeviceError;

use super::Ranks;
use super::abort::AbortCompletion;
use super::frames::{MAX_FRAME_BYTES, frame};
use super::handshake::{Hello, Key, MAX_HELLO_BYTES};
use super::message::{Message, Place};
use super::testing::{Fake, LIBRARY, LONG, Rank, broadcast, free_port, join_as, ranks};
use super::wire::{Incoming, send};
use super::world::{Connection, Operation, Transport};
use crate::CommError;
use crate::call::{Call, Segments};
use crate::split_request::SplitRequest;

/// A limit that expires.
const SHORT: Duration = Duration::from_millis(300);

/// The body of a process of [`environment_is_set_unless_the_user_did`].
#[test]
#[ignore = "run by another test, as a process"]
fn process_sets_its_environment() {
    // SAFETY: this process runs only this test, and its main thread waits for it.
    unsafe { crate::nccl::set_environment() };
    println!("value {}", std::env::var("NCCL_GRAPH_REGISTER").unwrap());
}

#[test]
fn environment_is_set_unless_the_user_did() {
    for (users, expected) in [(None, "value 0"), (Some("1"), "value 1")] {
        let mut process = std::process::Command::new(std::env::current_exe().unwrap());
        process.args([
            "--ignored",
            "--exact",
            "--nocapture",
            "nccl::control::tests::process_sets_its_environment",
        ]);
        process
            .env_remove("NCCL_GRAPH_REGISTER")
            .envs(users.map(|value| ("NCCL_GRAPH_REGISTER", value)));
        let output = process.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains(expected), "{text}");
    }
}

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

/// Sends a first frame without waiting for the answer; returns it.
pub(crate) fn send_hello(mut stream: &TcpStream, key: &Key, hello: &Hello) -> Vec<u8> {
    let hello = key.hello(hello).unwrap();
    stream.write_all(&frame(&hello).unwrap()).unwrap();
    hello
}

/// Passes the handshake as `hello`.
pub(crate) fn greet(mut stream: &TcpStream, key: &Key, hello: &Hello) -> Incoming {
    let mut incoming = Incoming::new(stream.try_clone().unwrap());
    let hello = send_hello(stream, key, hello);
    let challenge = incoming.next_frame(LONG, MAX_HELLO_BYTES).unwrap().unwrap();
    stream
        .write_all(&frame(&key.answer(&hello, challenge).unwrap()).unwrap())
        .unwrap();
    incoming
}

/// Connections that wait when the world completes cannot end it, whatever they send.
#[test]
fn late_strangers_do_not_end_the_world() {
    let ended = Barrier::new(2);
    let failures = on_ranks(2, |ranks| {
        let strangers: Vec<_> = if ranks.rank == 1 {
            (0..5).map(|_| connect(ranks.port)).collect()
        } else {
            Vec::new()
        };
        let rank = Rank::start(&ranks, LONG);
        let bad = [
            Hello::new(1, 2, LIBRARY),
            Hello::new(7, 9, LIBRARY),
            Hello::new(0, 2, LIBRARY + 1),
        ];
        for (stranger, hello) in strangers.iter().zip(bad) {
            send_hello(stranger, &Key::new(None), &hello);
        }
        for stranger in strangers.iter().skip(bad.len()) {
            let mut stranger = stranger;
            let _ = stranger.write_all(&(1u32 << 20).to_le_bytes());
        }
        // The coordinator closes them.
        for stranger in strangers {
            let mut incoming = Incoming::new(stranger);
            while incoming
                .next_frame(LONG, MAX_FRAME_BYTES)
                .is_ok_and(|frame| frame.is_some())
            {}
            assert!(incoming.next_frame(LONG, MAX_FRAME_BYTES).is_err());
        }
        rank.call(8, Ok(true), Ok(true));
        while rank.world.under_way(0) > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        ended.wait();
        let failure = rank.world.failure();
        rank.world.close(0, 1);
        failure
    });

    assert_eq!(failures, [None, None]);
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
        world.open(0, true, Arc::new(Behind(Arc::clone(&last))));
        world.open(1, true, last);
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
        rank.world
            .open(1, true, Arc::clone(&late) as Arc<dyn Transport>);
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
        world.open(context, false, Arc::clone(fake) as Arc<dyn Transport>);
        for ended in [true, false] {
            let fake = Arc::clone(fake);
            let poisoned = Arc::clone(&poisoned);
            world.called(context, broadcast(8));
            world.watch(
                context,
                Operation {
                    call: broadcast(8),
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
fn differing_calls_poison_all_streams() {
    let equal_calls = Barrier::new(3);
    let errors = on_ranks(3, |ranks| {
        let rank = Rank::start(&ranks, LONG);
        rank.call(1, Ok(true), Ok(true));
        equal_calls.wait();
        rank.call(if ranks.rank == 1 { 7 } else { 8 }, Ok(true), Ok(false));
        let error = rank.wait_for_failure();
        assert_eq!(rank.poisoned.lock()[..], [error.to_string()]);
        error
    });

    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    let CommError::Mismatch {
        sequence: 1,
        rank,
        other_rank,
        ..
    } = errors[0]
    else {
        panic!("{}", errors[0])
    };

    assert!((rank == 1) != (other_rank == 1));
}

#[test]
fn late_collective_ends_all_ranks() {
    let errors = on_ranks(2, |ranks| {
        let rank = Rank::start(&ranks, SHORT);
        rank.call(8, Ok(true), Ok(false));
        rank.wait_for_failure()
    });
    assert_eq!(errors[0], errors[1]);
    let text = errors[0].to_string();
    assert!(
        text.contains("collective 0, broadcast") && text.contains("within 300ms"),
        "{text}"
    );
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
        world.open(0, true, Arc::new(Fake::default()));
        // More bytes than the buffers of the connection have.
        let call = Call {
            segments: Segments::Uneven(vec![usize::MAX; 100_000].into()),
            ..broadcast(8)
        };
        (0..32).for_each(|_| world.called(0, call.clone()));
        world.close(1, 0);
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

#[test]
fn each_local_failure_reaches_all_ranks() {
    for cause in ["abort", "library", "stream"] {
        let errors = on_ranks(3, |ranks| {
            let rank = Rank::start(&ranks, LONG);
            let at_fault = ranks.rank == 1;
            match cause {
                "abort" if at_fault => {
                    let error = CommError::Aborted {
                        rank: 1,
                        reason: "on purpose".to_owned(),
                    };
                    assert_eq!(rank.world.fail(error.clone()), error);
                    // The first failure is final.
                    let second = CommError::Aborted {
                        rank: 1,
                        reason: "again".to_owned(),
                    };
                    assert_eq!(rank.world.fail(second), error);
                }
                "library" if at_fault => {
                    *rank.fake.error.lock() = Some("unhandled system error".to_owned())
                }
                "stream" if at_fault => {
                    let failed = DeviceError::Closed {
                        stream: "comm".to_owned(),
                    };
                    rank.call(8, Err(failed.clone()), Err(failed));
                }
                _ => rank.call(8, Ok(true), Ok(false)),
            }
            rank.wait_for_failure()
        });
        let expected = match cause {
            "abort" => CommError::Aborted {
                rank: 1,
                reason: "on purpose".to_owned(),
            },
            "library" => CommError::Peer {
                rank: 1,
                message: "unhandled system error".to_owned(),
            },
            _ => {
                let call = Box::new(broadcast(8));
                let stream = "comm".to_owned();
                CommError::Skipped {
                    sequence: 0,
                    call,
                    rank: 1,
                    stream,
                }
            }
        };
        assert_eq!(errors, vec![expected; 3], "{cause}");
    }
}

#[test]
fn errors_of_one_process_become_peer_errors() {
    let errors = on_ranks(2, |ranks| {
        let rank = Rank::start(&ranks, LONG);
        if ranks.rank == 1 {
            rank.world.fail(CommError::NoRanks);
        }
        rank.wait_for_failure()
    });
    let expected = CommError::Peer {
        rank: 1,
        message: CommError::NoRanks.to_string(),
    };
    assert_eq!(errors, [expected.clone(), expected]);
}

#[test]
fn splits_return_a_rank_its_own_place() {
    let request = |rank: usize| SplitRequest {
        color: (rank != 2).then_some(rank as u64 % 2 + 5),
        key: 10 - rank as u64,
    };

    let outcomes = on_ranks(4, |ranks| {
        let rank = Rank::start(&ranks, LONG);
        let first = rank.world.split(0, 0, request(ranks.rank)).unwrap();
        let second = rank
            .world
            .split(
                0,
                1,
                SplitRequest {
                    color: Some(1),
                    key: 0,
                },
            )
            .unwrap();
        rank.world.close(0, 0);
        (first, second)
    });

    let place = |context, rank, size| {
        Some(Place {
            context,
            rank,
            size,
        })
    };

    let first = [place(1, 0, 1), place(2, 1, 2), None, place(2, 0, 2)];
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        assert_eq!(outcome, (first[rank], place(3, rank, 4)));
    }
}

#[test]
fn rank_whose_stream_is_late_is_named() {
    let errors = on_ranks(2, |ranks| {
        let rank = Rank::start(&ranks, SHORT);
        rank.call(8, Ok(ranks.rank == 0), Ok(false));
        rank.wait_for_failure()
    });
    assert_eq!(errors[0], errors[1]);
    assert!(
        matches!(
            errors[0],
            CommError::Stalled {
                sequence: 0,
                rank: 1,
                ..
            }
        ),
        "{}",
        errors[0]
    );
}

#[test]
fn split_ends_when_a_rank_leaves() {
    let errors = on_ranks(2, |ranks| {
        let rank = Rank::start(&ranks, LONG);
        if ranks.rank == 1 {
            rank.world.close(0, 0);
            return None;
        }
        Some(
            rank.world
                .split(
                    0,
                    0,
                    SplitRequest {
                        color: None,
                        key: 0,
                    },
                )
                .unwrap_err(),
        )
    });

    assert!(
        matches!(errors[0], Some(CommError::Peer { rank: 1, .. })),
        "{errors:?}"
    );
}

#[test]
fn late_split_ends_all_ranks() {
    let errors = on_ranks(2, |ranks| {
        let rank = Rank::start(&ranks, SHORT);
        if ranks.rank == 0 {
            let request = SplitRequest {
                color: None,
                key: 0,
            };
            rank.world.split(0, 0, request).unwrap_err()
        } else {
            rank.wait_for_failure()
        }
    });

    for error in errors {
        let CommError::Peer { rank: 1, message } = &error else {
            panic!("{error}")
        };
        assert!(
            message.contains("did not join split 0 of communicator 0"),
            "{message}"
        );
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

/// Urgent messages do not wait for the report interval, the progress comes before them, and the
/// watcher answers requests while the host thread does something else.
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
                Place {
                    context: 5,
                    rank: 0,
                    size: 1
                }
            );
            rank.world.open(5, true, Arc::new(Fake::default()));
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
        let Message::Progress {
            context: 0,
            called: 3,
            hash,
            reached: 3,
            ended: 3,
        } = next(&mut incoming)
        else {
            panic!("no progress before the split")
        };
        let request = SplitRequest {
            color: Some(1),
            key: 0,
        };
        assert_eq!(
            next(&mut incoming),
            Message::Split {
                context: 0,
                number: 0,
                request
            }
        );
        // Requests are answered until the calls are agreed.
        let show = |from| Message::ShowCalls {
            context: 0,
            from,
            to: 3,
        };
        send(
            &stream,
            &[
                show(1),
                Message::Agreed {
                    context: 0,
                    count: 2,
                    first: 2,
                },
                show(0),
            ],
        )
        .unwrap();
        for from in [1, 2] {
            let calls = (from..3).map(broadcast).collect();
            assert_eq!(
                next(&mut incoming),
                Message::Calls {
                    context: 0,
                    from: from as u64,
                    calls
                }
            );
        }
        let place = Some(Place {
            context: 5,
            rank: 0,
            size: 1,
        });
        send(
            &stream,
            &[Message::Placed {
                context: 0,
                number: 0,
                place,
            }],
        )
        .unwrap();
        // The first rank of a communicator sends its calls; they come before the message that it
        // left.
        let first = next(&mut incoming);
        let progress = next(&mut incoming);
        assert_eq!(
            first,
            Message::Calls {
                context: 5,
                from: 0,
                calls: vec![broadcast(9)]
            }
        );
        assert!(
            matches!(progress, Message::Progress { context: 5, called: 1, hash: other, .. } if other != hash)
        );
        assert_eq!(
            next(&mut incoming),
            Message::Left {
                context: 5,
                done: 1
            }
        );
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
                Place {
                    context: 1,
                    rank: 2 - ranks.rank,
                    size: 2
                }
            );
            rank.world
                .open(1, place.rank == 0, Arc::new(Fake::default()));
            for len in 0..100 {
                rank.world
                    .called(1, broadcast(if len < 90 { 1 } else { len * ranks.rank }));
            }
        }
        rank.wait_for_failure()
    });

    let call = Box::new(broadcast(90));
    let other_call = Box::new(broadcast(180));
    let expected = CommError::Mismatch {
        sequence: 90,
        rank: 1,
        call,
        other_rank: 2,
        other_call,
    };

    assert_eq!(errors, vec![expected; 3]);
}
