use zero_alloc::device::DType;

use super::super::calls::Log;
use super::*;
use crate::Collective;
use crate::call::Segments;
use crate::split_request::SplitRequest;

mod random;

const LIMIT: Duration = Duration::from_secs(3);

fn broadcast(len: usize) -> Call {
    let collective = Collective::Broadcast;
    let segments = Segments::Balanced(len);
    Call {
        collective,
        op: None,
        dtype: DType::F32,
        segments,
        root: Some(0),
        control: false,
    }
}

/// A coordinator with simulated ranks on communicator 0, which answer its requests at once.
struct World {
    coordinator: Coordinator,
    logs: Vec<Log>,
    /// Ranks that do not answer requests.
    silent: Vec<usize>,
}

impl World {
    fn new(world_size: usize) -> Self {
        let logs = (0..world_size).map(|rank| Log::new(rank == 0)).collect();
        Self {
            coordinator: Coordinator::new(world_size, 23_007),
            logs,
            silent: Vec::new(),
        }
    }

    /// Makes a call, without a report.
    fn make(&mut self, rank: usize, call: Call) {
        self.logs[rank].calls.push(call);
    }

    fn report(&mut self, rank: usize) -> Vec<Outgoing> {
        let messages = self.logs[rank].report(0);
        messages
            .into_iter()
            .flat_map(|message| self.receive(rank, message))
            .collect()
    }

    fn call(&mut self, rank: usize, call: Call) -> Vec<Outgoing> {
        self.make(rank, call);
        self.report(rank)
    }

    /// Reports the numbers of calls reached and ended.
    fn advance(&mut self, rank: usize, reached: u64, ended: u64) -> Vec<Outgoing> {
        (self.logs[rank].reached, self.logs[rank].ended) = (reached, ended);
        self.report(rank)
    }

    fn receive(&mut self, rank: usize, message: Message) -> Vec<Outgoing> {
        let outgoing = self.coordinator.receive(rank, message);
        self.deliver(outgoing)
    }

    fn tick(&mut self) -> Vec<Outgoing> {
        let outgoing = self.coordinator.tick();
        self.deliver(outgoing)
    }

    /// Answers requests; returns the other messages.
    fn deliver(&mut self, outgoing: Vec<Outgoing>) -> Vec<Outgoing> {
        let mut rest = Vec::new();
        for outgoing in outgoing {
            match outgoing {
                Outgoing::To(
                    rank,
                    Message::ShowCalls {
                        context: 0,
                        from,
                        to,
                    },
                ) => {
                    if !self.silent.contains(&rank) {
                        let messages = self.logs[rank].calls.messages(0, from..to);
                        rest.extend(
                            messages
                                .into_iter()
                                .flat_map(|message| self.receive(rank, message)),
                        );
                    }
                }
                other => rest.push(other),
            }
        }

        rest
    }
}

fn late(sequence: u64) -> Message {
    Message::Late {
        context: 0,
        sequence,
        call: broadcast(8),
        limit: LIMIT,
    }
}

fn split(number: u64, color: Option<u64>, key: u64) -> Message {
    Message::Split {
        context: 0,
        number,
        request: SplitRequest { color, key },
    }
}

fn failed(error: CommError) -> Vec<Outgoing> {
    vec![Outgoing::All(Message::Failed { error })]
}

#[test]
fn differing_calls_name_both_ranks() {
    let other_call = Box::new(broadcast(8));
    let others = [
        broadcast(7),
        Call {
            collective: Collective::AllReduce,
            ..broadcast(8)
        },
        Call {
            dtype: DType::U8,
            ..broadcast(8)
        },
        Call {
            segments: Segments::Even(8),
            ..broadcast(8)
        },
        Call {
            root: Some(1),
            ..broadcast(8)
        },
    ];

    for call in others {
        for first_is_ahead in [true, false] {
            let mut world = World::new(3);
            for rank in [0, 1] {
                world.make(rank, broadcast(1));
            }
            world.make(0, broadcast(8));
            world.make(1, call.clone());
            let order = if first_is_ahead { [0, 1] } else { [1, 0] };
            assert_eq!(world.report(order[0]), []);
            let call = Box::new(call.clone());
            let other_call = other_call.clone();
            let error = CommError::Mismatch {
                sequence: 1,
                rank: 1,
                call,
                other_rank: 0,
                other_call,
            };
            assert_eq!(world.report(order[1]), failed(error));
        }
    }
}

#[test]
fn late_collective_names_the_late_rank() {
    let call = Box::new(broadcast(8));
    let stalled = |rank, done| {
        failed(CommError::Stalled {
            sequence: 1,
            call: call.clone(),
            rank,
            limit: LIMIT,
            done,
        })
    };

    let with = |steps: &[(usize, &str)]| {
        let mut world = World::new(3);
        for rank in 0..3 {
            assert_eq!(world.call(rank, broadcast(1)), []);
            assert_eq!(world.advance(rank, 1, 1), []);
        }
        for &(rank, step) in steps {
            let sent = if step == "call" {
                world.call(rank, broadcast(8))
            } else {
                world.advance(rank, 2, 1)
            };
            assert_eq!(sent, []);
        }
        world.receive(0, late(1))
    };

    // Rank 2 has not called it.
    let mut steps = vec![(0, "call"), (0, "reach"), (1, "call")];
    assert_eq!(with(&steps), stalled(2, 1));
    // Rank 2's stream has not reached it.
    steps.extend([(1, "reach"), (2, "call")]);
    assert_eq!(with(&steps), stalled(2, 1));
    // All have, so the rank that reports it is named.
    steps.push((2, "reach"));
    let message =
        format!("collective 1, {call}: all ranks reached it, but it did not end within 3s");
    assert_eq!(with(&steps), failed(CommError::Peer { rank: 0, message }));
}

#[test]
fn lost_rank_is_named_with_its_collective() {
    let lost = failed(CommError::Lost {
        sequence: 0,
        call: Box::new(broadcast(8)),
        rank: 1,
        message: "gone".to_owned(),
    });
    for ranks in [vec![0], vec![0, 1], vec![2], vec![2, 1]] {
        let mut world = World::new(3);
        for rank in ranks {
            assert_eq!(world.call(rank, broadcast(8)), []);
        }
        let outgoing = world.coordinator.lost(1, "gone".to_owned());
        assert_eq!(world.deliver(outgoing), lost);
        assert!(world.coordinator.lost(0, "gone".to_owned()).is_empty());
    }
    let message = "gone".to_owned();
    let outgoing = World::new(3).coordinator.lost(1, message.clone());
    assert_eq!(outgoing, failed(CommError::Peer { rank: 1, message }));
}

#[test]
fn rank_that_left_is_named() {
    let left = Message::Left {
        context: 0,
        done: 1,
    };

    for caller in [0, 2] {
        let error = failed(CommError::Left {
            sequence: 1,
            call: Box::new(broadcast(8)),
            rank: 1,
            done: 1,
        });
        for left_first in [true, false] {
            let mut world = World::new(3);
            for rank in [caller, 1] {
                assert_eq!(world.call(rank, broadcast(1)), []);
            }
            if left_first {
                assert_eq!(world.receive(1, left.clone()), []);
                assert_eq!(world.call(caller, broadcast(8)), error);
            } else {
                assert_eq!(world.call(caller, broadcast(8)), []);
                assert_eq!(world.receive(1, left.clone()), error);
            }
        }
    }

    let message = "left communicator 0 before its split 0".to_owned();
    let error = failed(CommError::Peer { rank: 1, message });
    let split = split(0, None, 0);
    for more in [
        [(1, left.clone()), (0, split.clone())],
        [(0, split), (1, left)],
    ] {
        let mut world = World::new(3);
        let sent: Vec<_> = more
            .into_iter()
            .map(|(rank, message)| world.receive(rank, message))
            .collect();
        assert_eq!(sent, [vec![], error.clone()]);
    }
}

#[test]
fn splits_number_their_communicators_by_color() {
    let splits = [
        split(0, Some(7), 1),
        split(0, None, 0),
        split(0, Some(5), 0),
    ];
    let mut world = World::new(3);
    let sent = (0..3)
        .map(|rank| world.receive(rank, splits[rank].clone()))
        .last();

    let place = |context| {
        Some(Place {
            context,
            rank: 0,
            size: 1,
        })
    };

    let placed = |number, places: [Option<Place>; 3]| {
        let placed = |(rank, place)| {
            Outgoing::To(
                rank,
                Message::Placed {
                    context: 0,
                    number,
                    place,
                },
            )
        };
        Some(
            places
                .into_iter()
                .enumerate()
                .map(placed)
                .collect::<Vec<_>>(),
        )
    };

    assert_eq!(sent, placed(0, [place(2), None, place(1)]));
    let groups = &world.coordinator.groups;
    assert_eq!(
        (&groups[&1].ranks[..], &groups[&2].ranks[..]),
        (&[2][..], &[0][..])
    );
    // Ordered by key.
    let sent = (0..3)
        .map(|rank| world.receive(rank, split(1, Some(9), 2 - rank as u64)))
        .last();

    let place = |rank| {
        Some(Place {
            context: 3,
            rank,
            size: 3,
        })
    };

    assert_eq!(sent, placed(1, [2, 1, 0].map(place)));
    assert_eq!(world.coordinator.groups[&3].ranks, [2, 1, 0]);
}

/// A rank joins the next split only, once: others would each cost a request per rank.
#[test]
fn unexpected_splits_name_the_rank() {
    for numbers in [vec![1], vec![u64::MAX], vec![0, 0], vec![0, 1]] {
        let mut world = World::new(3);
        let sent: Vec<_> = numbers
            .iter()
            .map(|&number| world.receive(1, split(number, None, 0)))
            .collect();
        let Some(
            [
                Outgoing::All(Message::Failed {
                    error: CommError::Peer { rank: 1, message },
                }),
            ],
        ) = sent.last().map(Vec::as_slice)
        else {
            panic!("{sent:?}")
        };
        let next = format!("where its next one is {}", numbers.len() - 1);
        assert!(message.contains(&next), "{message}");
    }

    // All ranks have joined the first one.
    let mut world = World::new(2);
    for number in [0, 1] {
        assert_eq!(world.receive(0, split(number, None, 0)), []);
        assert_eq!(world.receive(1, split(number, None, 0)).len(), 2);
    }

    assert_eq!(world.receive(0, split(0, None, 0)).len(), 1);
    assert!(matches!(
        world.coordinator.failure,
        Some(CommError::Peer { rank: 0, .. })
    ));
}

#[test]
fn long_reason_is_cut() {
    let mut world = World::new(2);
    let reason = "r".repeat(1 << 19);
    let sent = world.receive(
        1,
        Message::Failed {
            error: CommError::Aborted { rank: 1, reason },
        },
    );
    let [
        Outgoing::All(Message::Failed {
            error: CommError::Aborted { rank: 1, reason },
        }),
    ] = &sent[..]
    else {
        panic!("{sent:?}")
    };
    assert_eq!(reason.len(), 4 << 10);
}

#[test]
fn late_split_names_the_absent_rank() {
    let late = Message::LateSplit {
        context: 0,
        number: 0,
        limit: LIMIT,
    };
    let split = split(0, None, 0);
    let mut world = World::new(3);
    let sent = [(0, split.clone()), (2, split), (2, late)]
        .map(|(rank, message)| world.receive(rank, message));
    let message = "did not join split 0 of communicator 0 within 3s".to_owned();
    assert_eq!(
        sent,
        [vec![], vec![], failed(CommError::Peer { rank: 1, message })]
    );
}

#[test]
fn rank_ahead_of_the_first_is_compared_later() {
    let mut world = World::new(3);
    // Reports at 2, 4 and 6 calls; the first rank gets to 1, 3, 5 and 6.
    for _ in 0..3 {
        for _ in 0..2 {
            world.make(2, broadcast(1));
        }
        assert_eq!(world.report(2), []);
    }
    for (count, agreed) in [(1, 0), (2, 2), (2, 2), (1, 6)] {
        for _ in 0..count {
            world.make(0, broadcast(1));
        }
        assert_eq!(world.report(0), []);
        assert_eq!(world.coordinator.groups[&0].members[2].agreed, agreed);
    }
}

/// A rank that called two collectives waits, and so does the first rank, in the first of them.
#[test]
fn difference_before_the_latest_call_is_found() {
    let mut world = World::new(2);
    for (rank, lens) in [(0, vec![1, 2]), (1, vec![1, 7, 2, 3])] {
        lens.into_iter()
            .for_each(|len| world.make(rank, broadcast(len)));
        assert_eq!(world.report(rank), []);
    }

    let agreed = [Outgoing::All(Message::Agreed {
        context: 0,
        count: 0,
        first: 2,
    })];

    assert_eq!(world.tick(), agreed);
    assert_eq!(world.logs[0].agreed(0, 0, 2), None);
    let hash = world.logs[1].agreed(0, 0, 2).unwrap();
    let call = Box::new(broadcast(7));
    let other_call = Box::new(broadcast(2));

    let mismatch = CommError::Mismatch {
        sequence: 1,
        rank: 1,
        call,
        other_rank: 0,
        other_call,
    };

    assert_eq!(world.receive(1, hash), failed(mismatch));
    // A rank that still calls reports later.
    let mut log = Log::new(false);
    (0..3).for_each(|len| log.calls.push(broadcast(len)));
    assert_eq!(log.agreed(0, 0, 2), None);
}

#[test]
fn difference_is_reported_although_the_rank_ends() {
    let differing = || {
        let mut world = World::new(3);
        world.silent = vec![1];
        assert_eq!(world.call(0, broadcast(8)), []);
        assert_eq!(world.call(1, broadcast(7)), []);
        world
    };

    // Neither a later failure nor leaving replaces the mismatch, whose call the rank still reports.
    let mut world = differing();
    let failure = CommError::Aborted {
        rank: 2,
        reason: "hung".to_owned(),
    };

    for message in [
        Message::Left {
            context: 0,
            done: 1,
        },
        Message::Goodbye,
    ] {
        assert_eq!(world.receive(1, message), []);
    }

    assert_eq!(world.receive(2, Message::Failed { error: failure }), []);
    let outgoing = world.coordinator.lost(2, "gone".to_owned());
    assert_eq!(world.deliver(outgoing), []);
    let calls = world.logs[1].calls.messages(0, 0..1).remove(0);
    let call = Box::new(broadcast(7));
    let other_call = Box::new(broadcast(8));

    let mismatch = CommError::Mismatch {
        sequence: 0,
        rank: 1,
        call,
        other_rank: 0,
        other_call,
    };

    assert_eq!(world.receive(1, calls), failed(mismatch));
    // If the rank is lost or silent, the error names what is known.
    let unknown = |reason: &str| {
        let message = format!(
            "one of its collectives 0 to 0 of communicator 0 differs from rank 0's, and it did not report which: {reason}"
        );
        failed(CommError::Peer { rank: 1, message })
    };

    let mut world = differing();
    let outgoing = world.coordinator.lost(1, "gone".to_owned());
    assert_eq!(world.deliver(outgoing), unknown("gone"));
    let mut world = differing();
    for _ in 0..ANSWER_TICKS {
        assert_eq!(world.tick(), []);
    }
    assert_eq!(world.tick(), unknown("it did not answer within 6 s"));
}

#[test]
fn wrong_hash_is_no_mismatch() {
    let mut world = World::new(2);
    for rank in [0, 1] {
        world.make(rank, broadcast(1));
    }
    assert_eq!(world.report(0), []);
    let wrong = Message::Progress {
        context: 0,
        called: 1,
        hash: 7,
        reached: 0,
        ended: 0,
    };
    let message = "sent a hash of its calls of communicator 0 that does not match them".to_owned();
    assert_eq!(
        world.receive(1, wrong),
        failed(CommError::Peer { rank: 1, message })
    );
}

/// Calls wait for every rank's report; too many end the world, and the rank without which they were
/// dropped is named.
#[test]
fn calls_in_memory_are_bounded() {
    for silent in [0, 2] {
        let mut world = World::new(3);
        let mut outgoing = Vec::new();
        for _ in 0..100_000 {
            for rank in (0..3).filter(|&rank| rank != silent || rank == 0) {
                world.make(rank, broadcast(1));
                // Rank 0 reports its calls in the first case, but not that they end.
                let ended = if rank == silent {
                    0
                } else {
                    world.logs[rank].calls.count()
                };
                outgoing.extend(world.advance(rank, ended, ended));
            }
            if !outgoing.is_empty() {
                break;
            }
            world.tick();
            assert!(world.coordinator.groups[&0].calls.kept_bytes() <= 2 * MAX_CALL_BYTES);
        }
        let Some(Outgoing::All(Message::Failed {
            error: CommError::Peer { rank, message },
        })) = outgoing.first()
        else {
            panic!("{outgoing:?}")
        };
        assert!(
            *rank == silent && message.contains("is at collective 0 of communicator 0"),
            "{rank} {message}"
        );
    }
}

#[test]
fn counts_of_another_number_of_ranks_name_the_rank() {
    let mut world = World::new(3);
    let call = Call {
        segments: Segments::Uneven([1, 2].into()),
        ..broadcast(1)
    };
    let outgoing = world.call(0, call);
    let [
        Outgoing::All(Message::Failed {
            error: CommError::Peer { rank: 0, message },
        }),
    ] = &outgoing[..]
    else {
        panic!("{outgoing:?}")
    };
    assert!(message.contains("of 3 ranks"), "{message}");
}

/// While the first rank calls, agreements are sent as often as keepalives; when it waits, at once.
#[test]
fn agreements_are_rare_in_a_large_world() {
    let mut world = World::new(600);
    for tick in 1..=2 * KEEPALIVE_TICKS {
        for rank in 0..600 {
            assert_eq!(world.call(rank, broadcast(8)), []);
        }
        let due = tick.is_multiple_of(KEEPALIVE_TICKS);
        let count = u64::from(tick);
        let agreed = due.then_some(Outgoing::All(Message::Agreed {
            context: 0,
            count,
            first: count,
        }));
        assert_eq!(world.tick(), Vec::from_iter(agreed));
    }

    for rank in 0..600 {
        world.make(rank, broadcast(8));
        // One is ahead.
        (rank == 9).then(|| world.make(rank, broadcast(8)));
        assert_eq!(world.report(rank), []);
    }

    assert_eq!(world.tick(), []);
    let count = u64::from(2 * KEEPALIVE_TICKS);
    assert_eq!(
        world.tick(),
        [Outgoing::All(Message::Agreed {
            context: 0,
            count,
            first: count + 1
        })]
    );
}

/// Calls are kept until all ranks agree on them and they have ended on all ranks: an error may name
/// them.
#[test]
fn call_that_is_agreed_but_not_ended_is_named() {
    let mut world = World::new(2);
    for rank in [0, 1] {
        for _ in 0..3 {
            world.make(rank, broadcast(8));
        }
        assert_eq!(world.advance(rank, 2, 1 + rank as u64), []);
    }

    assert_eq!(
        world.tick(),
        [Outgoing::All(Message::Agreed {
            context: 0,
            count: 3,
            first: 3
        })]
    );

    assert_eq!(world.coordinator.groups[&0].calls.kept(), 2);
    let outgoing = world.coordinator.lost(1, "gone".to_owned());
    let call = Box::new(broadcast(8));
    assert_eq!(
        world.deliver(outgoing),
        failed(CommError::Lost {
            sequence: 2,
            call,
            rank: 1,
            message: "gone".to_owned()
        })
    );
}

#[test]
fn first_rank_that_left_is_named() {
    let mut world = World::new(3);
    assert_eq!(
        world.receive(
            0,
            Message::Left {
                context: 0,
                done: 0
            }
        ),
        []
    );
    let error = failed(CommError::Left {
        sequence: 0,
        call: Box::new(broadcast(8)),
        rank: 0,
        done: 0,
    });
    assert_eq!(world.call(2, broadcast(8)), error);
}

/// No rank waits for it in a collective, and its calls may have been dropped.
#[test]
fn lost_rank_that_had_left_is_named() {
    let mut world = World::new(2);
    for rank in [0, 1] {
        assert_eq!(world.call(rank, broadcast(8)), []);
    }
    assert_eq!(
        world.receive(
            1,
            Message::Left {
                context: 0,
                done: 1
            }
        ),
        []
    );
    assert_eq!(world.advance(0, 1, 1), []);
    world.tick();
    let message = "gone".to_owned();
    let outgoing = world.coordinator.lost(1, message.clone());
    assert_eq!(outgoing, failed(CommError::Peer { rank: 1, message }));
}

#[test]
fn goodbye_waits_for_comparisons() {
    let to = |rank| vec![Outgoing::To(rank, Message::Goodbye)];
    let all = vec![Outgoing::All(Message::Goodbye)];
    let mut world = World::new(3);
    assert_eq!(world.call(0, broadcast(8)), []);
    assert_eq!(world.call(1, broadcast(8)), []);
    // Rank 0 waits for all; rank 1's calls are compared; the last rank ends the world.
    for (rank, expected) in [(0, vec![]), (1, to(1)), (2, all.clone())] {
        assert!(!world.coordinator.is_over());
        assert_eq!(world.receive(rank, Message::Goodbye), expected);
    }
    assert!(world.coordinator.is_over());
    // Rank 1 is ahead of the first rank: it is answered after two ticks. The world ends with rank
    // 0.
    for (rank, expected) in [(1, to(1)), (0, all)] {
        let mut world = World::new(3);
        assert_eq!(world.call(rank, broadcast(8)), []);
        assert_eq!(world.receive(rank, Message::Goodbye), []);
        assert_eq!(world.tick(), []);
        assert_eq!(world.tick(), expected);
    }
}

/// A rank's part of the traffic of a training step on communicator 0, of `calls` calls in a second:
/// messages and bytes to the coordinator and back.
#[test]
fn traffic_of_a_step_is_small() {
    let bytes = |messages: &[Message]| {
        messages
            .iter()
            .map(|message| super::super::frames::encode(message).unwrap().len())
            .sum::<usize>()
    };

    let mut log = [Log::new(true), Log::new(false)];
    for _ in 0..10 {
        for i in 0..3_000 {
            let segments = Segments::Even(1_000_000 + i);
            let collective = Collective::ReduceScatter;
            let op = Some(crate::ReduceOp::Sum);
            let call = Call {
                collective,
                op,
                dtype: DType::Bf16,
                segments,
                root: None,
                control: false,
            };
            log.iter_mut().for_each(|log| log.calls.push(call.clone()));
        }
        let [first, other] = log.each_mut().map(|log| {
            (log.reached, log.ended) = (log.calls.count(), log.calls.count());
            log.report(0)
        });
        let count = log[0].calls.count();
        let agreed = [Message::Agreed {
            context: 0,
            count,
            first: count,
        }];
        let figures =
            [(&first[..]), &other, &agreed].map(|messages| (messages.len(), bytes(messages)));
        println!("first rank, other rank, agreed: {figures:?}");
        assert_eq!(figures[1].0, 1);
        assert!(
            figures[0].0 <= 3 && figures[0].1 < 32_000 && figures[1].1 <= 32 && figures[2].1 <= 12,
            "{figures:?}"
        );
    }
}

/// Frames stay small, also with one count per rank of a large world.
#[test]
fn frames_of_calls_are_small() {
    let mut calls = Calls::default();
    for i in 0..100 {
        let segments = Segments::Uneven((0..4_096).map(|q| (1 << 40) + q + i).collect());
        calls.push(Call {
            segments,
            ..broadcast(0)
        });
        calls.push(broadcast(i));
    }

    let messages = calls.messages(0, 10..200);
    let mut next = 10;
    for message in &messages {
        assert!(super::super::frames::encode(message).unwrap().len() < 1 << 20);
        let Message::Calls {
            from, calls: sent, ..
        } = message
        else {
            panic!("{message:?}")
        };
        assert_eq!(*from, next);
        sent.iter()
            .zip(next..)
            .for_each(|(call, sequence)| assert_eq!(Some(call), calls.get(sequence)));
        next += sent.len() as u64;
    }

    assert_eq!(next, 200);
}
