use zero_alloc::device::DType;

use super::super::fnv::Fnv;
use super::super::testing::broadcast;
use super::*;
use crate::Collective;
use crate::call::Counts;

mod random;

const LIMIT: Duration = Duration::from_secs(3);

/// A rank's calls on a communicator.
#[derive(Clone, Debug, Default)]
struct Calls {
    made: Vec<Call>,
    reached: u64,
    ended: u64,
}

impl Calls {
    fn progress(&self) -> Option<Progress> {
        let called = self.made.len() as u64;
        let number = self.ended.min(called.checked_sub(1)?) as usize;
        let mut hash = Fnv::default();
        let hashed = self.made[..=number].iter().map(|call| {
            hash.add(call);
            (call.clone(), hash.0)
        });
        let first = number.saturating_sub(Progress::BEFORE as usize);
        Some(Progress {
            called,
            reached: self.reached,
            ended: self.ended,
            recent: hashed.skip(first).collect(),
        })
    }
}

/// An event at the coordinator.
#[derive(Clone, Debug)]
enum Event {
    /// The rank makes a call on communicator 0 and reports it.
    Make(usize, Call),
    /// The rank makes broadcasts of these lengths, and reports once.
    Broadcasts(usize, &'static [usize]),
    /// The rank reports these numbers of calls reached and ended.
    Advance(usize, u64, u64),
    Send(usize, Message),
    Lost(usize),
    Tick,
}

use Event::{Advance, Broadcasts, Lost, Make, Send, Tick};

/// A coordinator with simulated ranks on communicator 0.
struct World {
    coordinator: Coordinator,
    ranks: Vec<Calls>,
}

impl World {
    fn new(world_size: usize) -> Self {
        Self {
            coordinator: Coordinator::new(world_size, 23_007),
            ranks: vec![Calls::default(); world_size],
        }
    }

    fn on(&mut self, event: Event) -> Vec<Outgoing> {
        match event {
            Make(rank, call) => {
                self.ranks[rank].made.push(call);
                self.report(rank)
            }
            Broadcasts(rank, lens) => {
                let calls = lens.iter().copied().map(broadcast);
                self.ranks[rank].made.extend(calls);
                self.report(rank)
            }
            Advance(rank, reached, ended) => {
                self.ranks[rank].reached = reached;
                self.ranks[rank].ended = ended;
                self.report(rank)
            }
            Send(rank, message) => self.coordinator.receive(rank, message),
            Lost(rank) => self.coordinator.lost(rank, "gone".to_owned()),
            Tick => self.coordinator.tick(),
        }
    }

    fn report(&mut self, rank: usize) -> Vec<Outgoing> {
        let progress = self.ranks[rank].progress().unwrap();
        let message = Message::Progress {
            context: 0,
            progress,
        };
        self.coordinator.receive(rank, message)
    }
}

/// Checks that the last of `events` ends a world of three ranks with `error`, and no other does.
fn check(events: &[Event], error: CommError) {
    let mut world = World::new(3);
    let (last, before) = events.split_last().unwrap();
    for event in before {
        assert_eq!(world.on(event.clone()), [], "{event:?} of {events:?}");
    }
    assert_eq!(
        world.on(last.clone()),
        [Outgoing::All(Message::Failed { error })],
        "{events:?}"
    );
    // The first failure is final.
    assert_eq!(world.on(Lost(2)), []);
}

fn peer(rank: usize, message: &str) -> CommError {
    CommError::Peer {
        rank,
        message: message.to_owned(),
    }
}

fn split(number: u64, color: Option<u64>, key: u64) -> Message {
    Message::Split {
        context: 0,
        number,
        request: SplitRequest { color, key },
    }
}

fn left(done: u64) -> Message {
    Message::Left { context: 0, done }
}

#[test]
fn differing_calls_name_both_ranks() {
    let other = broadcast(8);
    let differing = [
        broadcast(7),
        Call {
            collective: Collective::AllReduce,
            ..other.clone()
        },
        Call {
            dtype: DType::U8,
            ..other.clone()
        },
        Call {
            segments: Counts::Even(8),
            ..other.clone()
        },
        Call {
            root: Some(1),
            ..other.clone()
        },
    ];

    for call in differing {
        let mut calls = [Make(0, other.clone()), Make(1, call.clone())];
        for _ in 0..2 {
            calls.reverse();
            let error = CommError::Mismatch {
                sequence: 1,
                rank: 1,
                call: Box::new(call.clone()),
                other_rank: 0,
                other_call: Box::new(other.clone()),
            };
            let mut events = vec![Broadcasts(0, &[1]), Broadcasts(1, &[1])];
            events.extend([Advance(0, 1, 1), Advance(1, 1, 1)]);
            events.extend(calls.clone());
            check(&events, error);
        }
    }
}

/// Ranks that are not the first, in all orders of reports; one may be in the next call.
#[test]
fn unmatched_pairs_name_both_ranks() {
    let error = CommError::Unmatched {
        sequence: 0,
        rank: 1,
        sent: 5,
        other_rank: 2,
        received: 4,
    };
    let pairs = [
        [[1, 1], [2, 3], [0, 0]],
        [[3, 2], [0, 0], [5, 7]],
        [[0, 0], [7, 4], [2, 2]],
    ];
    let make = |rank: usize| {
        let call = Call {
            collective: Collective::AllToAll,
            segments: Counts::Pairs(pairs[rank].into()),
            ..broadcast(0)
        };
        Make(rank, call)
    };
    for order in [[0, 1, 2], [0, 2, 1]] {
        check(&order.map(make), error.clone());
    }
    check(&[make(2), make(1)], error.clone());
    check(&[make(2), Advance(2, 1, 1), make(1)], error.clone());
    check(
        &[
            make(0),
            make(2),
            Broadcasts(2, &[8]),
            Advance(2, 1, 1),
            make(1),
        ],
        error,
    );
}

/// A difference within the latest calls of two reports is found exactly, an earlier one by its hash.
#[test]
fn earlier_differences_are_found() {
    const EQUAL: [usize; 6] = [1, 2, 3, 4, 5, 6];
    let all = |rank| Advance(rank, 6, 6);
    let diverged = |sequence, lens: [usize; 2], agreed| CommError::Diverged {
        sequence,
        rank: 1,
        call: Box::new(broadcast(lens[0])),
        other_rank: 0,
        other_call: Box::new(broadcast(lens[1])),
        agreed,
    };
    let mismatch = |sequence, lens: [usize; 2]| CommError::Mismatch {
        sequence,
        rank: 1,
        call: Box::new(broadcast(lens[0])),
        other_rank: 0,
        other_call: Box::new(broadcast(lens[1])),
    };
    let cases: [(&'static [usize], CommError); 4] = [
        // The first one was compared when it was the latest of both.
        (&[1, 9, 3, 4, 5, 6], diverged(2, [3, 3], 1)),
        (&[1, 9, 7, 4, 5, 6], diverged(2, [7, 3], 1)),
        (&[1, 2, 3, 9, 5, 6], mismatch(3, [9, 4])),
        // Rank 1 is ahead of rank 0, and is in the next call.
        (&[1, 2, 3, 4, 5, 7, 6], mismatch(5, [7, 6])),
    ];

    for (lens, error) in cases {
        let more = Broadcasts(1, &lens[1..]);
        check(
            &[
                Broadcasts(0, &EQUAL[..1]),
                Broadcasts(1, &EQUAL[..1]),
                Broadcasts(0, &EQUAL[1..]),
                all(0),
                more,
                all(1),
            ],
            error,
        );
    }

    let text = diverged(3, [8, 4], 1).to_string();
    assert_eq!(
        text,
        "collective 3: rank 1 called broadcast of 8 x fp32, rank 0 broadcast of 4 x fp32; both agreed until collective 1, \
         and one since then differs: look for a call that depends on the rank"
    );
}

#[test]
fn late_collective_names_the_late_rank() {
    let call = broadcast(8);
    let late = Send(
        0,
        Message::Late {
            context: 0,
            sequence: 1,
            call: call.clone(),
            limit: LIMIT,
        },
    );
    let stalled = CommError::Stalled {
        sequence: 1,
        call: Box::new(call.clone()),
        rank: 2,
        limit: LIMIT,
        done: 1,
    };

    let mut events: Vec<_> = (0..3)
        .flat_map(|rank| [Broadcasts(rank, &[1]), Advance(rank, 1, 1)])
        .collect();
    let with = |events: &[Event]| [events, std::slice::from_ref(&late)].concat();
    // Rank 2 has not called it.
    events.extend([0, 1].map(|rank| Make(rank, call.clone())));
    events.push(Advance(0, 2, 1));
    check(&with(&events), stalled.clone());
    // Rank 2's stream has not reached it.
    events.extend([Advance(1, 2, 1), Make(2, call.clone())]);
    check(&with(&events), stalled);
    // All have, so the rank that reports it is named.
    events.push(Advance(2, 2, 1));
    let message =
        format!("collective 1, {call}: all ranks reached it, but it did not end within 3s");
    check(&with(&events), peer(0, &message));
}

#[test]
fn rank_that_is_gone_is_named() {
    let lost = |sequence| CommError::Lost {
        sequence,
        call: Box::new(broadcast(8)),
        rank: 1,
        message: "gone".to_owned(),
    };
    let has_left = |rank, done| CommError::Left {
        sequence: done,
        call: Box::new(broadcast(8)),
        rank,
        done,
    };
    let waits = |rank| Broadcasts(rank, &[8]);
    let ended = |rank| Advance(rank, 1, 1);
    let both_ended = [waits(1), waits(2), ended(1), ended(2)];
    let and = |more: &[Event]| [&both_ended[..], more].concat();

    // Others wait, it waits itself, or nobody does.
    check(&[waits(0), Lost(1)], lost(0));
    check(&[waits(2), waits(1), Lost(1)], lost(0));
    check(&[Lost(1)], peer(1, "gone"));
    check(&and(&[Lost(1)]), peer(1, "gone"));
    check(&and(&[waits(2), Lost(1)]), lost(1));
    check(&and(&[Send(1, left(1)), Lost(1)]), peer(1, "gone"));
    // It leaves first, or others call first.
    check(&[Send(0, left(0)), waits(2)], has_left(0, 0));
    check(&and(&[Send(1, left(1)), waits(2)]), has_left(1, 1));
    check(&and(&[waits(2), Send(1, left(1))]), has_left(1, 1));
    let early = "left communicator 0 before its split 0";
    let joins = |rank| Send(rank, split(0, None, 0));
    check(&[Send(1, left(0)), joins(0)], peer(1, early));
    check(&[joins(0), Send(1, left(0))], peer(1, early));
}

#[test]
fn misuse_of_the_protocol_names_the_rank() {
    let next = |number, next| {
        format!(
            "called split {number} of communicator 0 where its next one is {next}, after all ranks have joined those before"
        )
    };
    let splits = |numbers: &[u64]| {
        let joins = numbers
            .iter()
            .map(|&number| Send(1, split(number, None, 0)));
        joins.collect::<Vec<_>>()
    };
    // A rank joins the next split only, once: others would each cost a request per rank.
    check(&splits(&[1]), peer(1, &next(1, 0)));
    check(&splits(&[u64::MAX]), peer(1, &next(u64::MAX, 0)));
    check(&splits(&[0, 0]), peer(1, &next(0, 1)));
    check(&splits(&[0, 1]), peer(1, &next(1, 1)));

    let own = "sent a message that only the coordinator sends";
    let placed = Message::Placed {
        context: 0,
        number: 0,
        place: None,
    };
    check(&[Send(2, placed)], peer(2, own));

    let late = |context| Message::Late {
        context,
        sequence: 0,
        call: broadcast(8),
        limit: LIMIT,
    };
    let unknown = "waits in communicator 9, which does not exist";
    check(&[Send(2, late(9))], peer(2, unknown));

    let absent = "did not join split 0 of communicator 0 within 3s";
    let late = Message::LateSplit {
        context: 0,
        number: 0,
        limit: LIMIT,
    };
    let join = |rank| Send(rank, split(0, None, 0));
    check(&[join(0), join(2), Send(2, late)], peer(1, absent));

    // A report that takes calls back changes nothing.
    let mut world = World::new(3);
    assert_eq!(world.on(Broadcasts(1, &[1, 2])), []);
    let called =
        |world: &World| world.coordinator.groups[&0].members[1].count(|progress| progress.called);
    world.ranks[1].made.pop();
    assert_eq!(world.report(1), []);
    assert_eq!(called(&world), 2);
}

#[test]
fn splits_number_their_communicators_by_color() {
    let mut world = World::new(3);
    let mut placed = |number, requests: [(Option<u64>, u64); 3]| {
        let sent = requests
            .into_iter()
            .enumerate()
            .map(|(rank, (color, key))| {
                let split = split(number, color, key);
                world.on(Send(rank, split))
            });
        let mut sent: Vec<_> = sent.collect();
        let last = sent.pop().unwrap();
        assert_eq!(sent, [[], []]);
        last
    };
    let places = |number, places: [Option<[usize; 3]>; 3]| {
        let placed = places.into_iter().enumerate().map(|(rank, place)| {
            let place = place.map(|[context, rank, size]| SplitRank {
                context: context as Context,
                rank,
                size,
            });
            let message = Message::Placed {
                context: 0,
                number,
                place,
            };
            Outgoing::To(rank, message)
        });
        placed.collect::<Vec<_>>()
    };

    assert_eq!(
        placed(0, [(Some(7), 1), (None, 0), (Some(5), 0)]),
        places(0, [Some([2, 0, 1]), None, Some([1, 0, 1])])
    );
    // Ordered by key.
    assert_eq!(
        placed(1, [(Some(9), 2), (Some(9), 1), (Some(9), 0)]),
        places(1, [Some([3, 2, 3]), Some([3, 1, 3]), Some([3, 0, 3])])
    );
    let groups = &world.coordinator.groups;
    let ranks = [1, 2, 3].map(|context: Context| groups[&context].ranks.clone());
    assert_eq!(ranks, [vec![2], vec![0], vec![2, 1, 0]]);
}

#[test]
fn rank_0_is_answered_last() {
    let to = |rank| vec![Outgoing::To(rank, Message::Goodbye)];
    let all = vec![Outgoing::All(Message::Goodbye)];
    let goodbye = |rank| Send(rank, Message::Goodbye);
    let mut world = World::new(3);
    for (rank, expected) in [(0, vec![]), (1, to(1)), (2, all.clone())] {
        assert!(!world.coordinator.is_over());
        assert_eq!(world.on(goodbye(rank)), expected);
        assert_eq!(world.on(goodbye(rank)), []);
    }
    assert!(world.coordinator.is_over());

    // After two ticks it does not wait any more.
    let mut world = World::new(3);
    assert_eq!(world.on(goodbye(0)), []);
    assert_eq!(world.on(Tick), []);
    assert_eq!(world.on(Tick), all);
    assert_eq!(world.on(Tick), []);
    assert!(!world.coordinator.is_over());
}
