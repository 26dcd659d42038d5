use zero_alloc::device::DType;

use super::super::calls::Log;
use super::*;
use crate::Collective;
use crate::call::Segments;
use crate::split_request::SplitRequest;

const LIMIT: Duration = Duration::from_secs(3);

fn broadcast(len: usize) -> Call {
    let (collective, segments) = (Collective::Broadcast, Segments::Balanced(len));
    Call { collective, op: None, dtype: DType::F32, segments, root: Some(0), control: false }
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
        Self { coordinator: Coordinator::new(world_size, 23_007), logs, silent: Vec::new() }
    }

    /// Makes a call, without a report.
    fn make(&mut self, rank: usize, call: Call) {
        self.logs[rank].calls.push(call);
    }

    fn report(&mut self, rank: usize) -> Vec<Outgoing> {
        let messages = self.logs[rank].report(0);
        messages.into_iter().flat_map(|message| self.receive(rank, message)).collect()
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
                Outgoing::To(rank, Message::ShowCalls { context: 0, from, to }) => {
                    if !self.silent.contains(&rank) {
                        let messages = self.logs[rank].calls.messages(0, from..to);
                        rest.extend(messages.into_iter().flat_map(|message| self.receive(rank, message)));
                    }
                }
                other => rest.push(other),
            }
        }
        rest
    }
}

fn late(sequence: u64) -> Message {
    Message::Late { context: 0, sequence, call: broadcast(8), limit: LIMIT }
}

fn split(color: Option<u64>, key: u64) -> MeetingEntry {
    MeetingEntry::Split(SplitRequest { color, key })
}

fn meet(number: u64, entry: MeetingEntry) -> Message {
    Message::Meet { context: 0, number, entry }
}

fn failed(error: CommError) -> Vec<Outgoing> {
    vec![Outgoing::All(Message::Failed { error })]
}

#[test]
fn differing_calls_name_both_ranks() {
    let other_call = Box::new(broadcast(8));
    let others = [
        broadcast(7),
        Call { collective: Collective::AllReduce, ..broadcast(8) },
        Call { dtype: DType::U8, ..broadcast(8) },
        Call { segments: Segments::Even(8), ..broadcast(8) },
        Call { root: Some(1), ..broadcast(8) },
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
            let (call, other_call) = (Box::new(call.clone()), other_call.clone());
            let error = CommError::Mismatch { sequence: 1, rank: 1, call, other_rank: 0, other_call };
            assert_eq!(world.report(order[1]), failed(error));
        }
    }
}

#[test]
fn late_collective_names_the_late_rank() {
    let call = Box::new(broadcast(8));
    let stalled =
        |rank, done| failed(CommError::Stalled { sequence: 1, call: call.clone(), rank, limit: LIMIT, done });
    let with = |steps: &[(usize, &str)]| {
        let mut world = World::new(3);
        for rank in 0..3 {
            assert_eq!(world.call(rank, broadcast(1)), []);
            assert_eq!(world.advance(rank, 1, 1), []);
        }
        for &(rank, step) in steps {
            let sent = if step == "call" { world.call(rank, broadcast(8)) } else { world.advance(rank, 2, 1) };
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
    let message = format!("collective 1, {call}: all ranks reached it, but it did not end within 3s");
    assert_eq!(with(&steps), failed(CommError::Peer { rank: 0, message }));
}

#[test]
fn lost_rank_is_named_with_its_collective() {
    let left = |done| failed(CommError::Left { sequence: 0, call: Box::new(broadcast(8)), rank: 1, done });
    for (ranks, done) in [(vec![0], 0), (vec![0, 1], 1), (vec![2], 0), (vec![2, 1], 1)] {
        let mut world = World::new(3);
        for rank in ranks {
            assert_eq!(world.call(rank, broadcast(8)), []);
        }
        let outgoing = world.coordinator.lost(1, "gone".to_owned());
        assert_eq!(world.deliver(outgoing), left(done));
        assert!(world.coordinator.lost(0, "gone".to_owned()).is_empty());
    }
    let message = "gone".to_owned();
    let outgoing = World::new(3).coordinator.lost(1, message.clone());
    assert_eq!(outgoing, failed(CommError::Peer { rank: 1, message }));
}

#[test]
fn rank_that_left_is_named() {
    let left = Message::Left { context: 0, done: 1 };
    for caller in [0, 2] {
        let error = failed(CommError::Left { sequence: 1, call: Box::new(broadcast(8)), rank: 1, done: 1 });
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
    let meet = meet(0, split(None, 0));
    for more in [[(1, left.clone()), (0, meet.clone())], [(0, meet), (1, left)]] {
        let mut world = World::new(3);
        let sent: Vec<_> = more.into_iter().map(|(rank, message)| world.receive(rank, message)).collect();
        assert_eq!(sent, [vec![], error.clone()]);
    }
}

#[test]
fn splits_number_their_communicators_by_color() {
    let entries = [split(Some(7), 1), split(None, 0), split(Some(5), 0)];
    let mut world = World::new(3);
    let sent = (0..3).map(|rank| world.receive(rank, meet(0, entries[rank]))).last();
    let place = |context| Some(Place { context, rank: 0, size: 1 });
    let met = |number, outcomes: [Outcome; 3]| {
        let met = |(rank, outcome)| Outgoing::To(rank, Message::Met { context: 0, number, outcome });
        Some(outcomes.into_iter().enumerate().map(met).collect::<Vec<_>>())
    };
    assert_eq!(sent, met(0, [place(2), None, place(1)].map(Outcome::Split)));
    let groups = &world.coordinator.groups;
    assert_eq!((&groups[&1].ranks[..], &groups[&2].ranks[..]), (&[2][..], &[0][..]));
    // Ordered by key.
    let sent = (0..3).map(|rank| world.receive(rank, meet(1, split(Some(9), 2 - rank as u64)))).last();
    let place = |rank| Outcome::Split(Some(Place { context: 3, rank, size: 3 }));
    assert_eq!(sent, met(1, [2, 1, 0].map(place)));
    assert_eq!(world.coordinator.groups[&3].ranks, [2, 1, 0]);
}

#[test]
fn registrations_name_the_first_rank_that_differs() {
    let cases = [
        ([Some(7), Some(7), Some(7)], Registered::Equal),
        ([Some(7), None, Some(9)], Registered::Failed { rank: 1 }),
        ([Some(7), Some(7), Some(9)], Registered::Differs { rank: 2, bytes: 9, expected: 7 }),
    ];
    let mut world = World::new(3);
    for (number, (bytes, expected)) in (0..).zip(cases) {
        let entry = |rank: usize| meet(number, MeetingEntry::Registration(bytes[rank]));
        let sent = (0..3).map(|rank| world.receive(rank, entry(rank))).last().unwrap();
        let outcome = Outcome::Registration(expected);
        let met = |rank| Outgoing::To(rank, Message::Met { context: 0, number, outcome });
        assert_eq!(sent, (0..3).map(met).collect::<Vec<_>>());
    }
}

#[test]
fn differing_meetings_name_both_ranks() {
    let mut world = World::new(3);
    assert_eq!(world.receive(2, meet(0, split(None, 0))), []);
    let sent = world.receive(1, meet(0, MeetingEntry::Registration(Some(1))));
    let [Outgoing::All(Message::Failed { error: CommError::Peer { rank: 1, message } })] = &sent[..] else {
        panic!("{sent:?}")
    };
    assert!(message.starts_with("called registration 0 of communicator 0 where rank 2 called a split"), "{message}");
}

/// A rank joins the next meeting only, once: others would each cost an entry per rank.
#[test]
fn unexpected_meetings_name_the_rank() {
    let entry = split(None, 0);
    for numbers in [vec![1], vec![u64::MAX], vec![0, 0], vec![0, 1]] {
        let mut world = World::new(3);
        let sent: Vec<_> = numbers.iter().map(|&number| world.receive(1, meet(number, entry))).collect();
        let Some([Outgoing::All(Message::Failed { error: CommError::Peer { rank: 1, message } })]) =
            sent.last().map(Vec::as_slice)
        else {
            panic!("{sent:?}")
        };
        let next = format!("where its next one is {}", numbers.len() - 1);
        assert!(message.contains(&next), "{message}");
    }
    // All ranks have joined the first one.
    let mut world = World::new(2);
    for number in [0, 1] {
        assert_eq!(world.receive(0, meet(number, entry)), []);
        assert_eq!(world.receive(1, meet(number, entry)).len(), 2);
    }
    assert_eq!(world.receive(0, meet(0, entry)).len(), 1);
    assert!(matches!(world.coordinator.failure, Some(CommError::Peer { rank: 0, .. })));
}

#[test]
fn long_reason_is_cut() {
    let mut world = World::new(2);
    let reason = "r".repeat(1 << 19);
    let sent = world.receive(1, Message::Failed { error: CommError::Aborted { rank: 1, reason } });
    let [Outgoing::All(Message::Failed { error: CommError::Aborted { rank: 1, reason } })] = &sent[..] else {
        panic!("{sent:?}")
    };
    assert_eq!(reason.len(), 4 << 10);
}

#[test]
fn late_meeting_names_the_absent_rank() {
    let late = Message::LateMeeting { context: 0, number: 0, limit: LIMIT };
    let entry = meet(0, MeetingEntry::Registration(None));
    let mut world = World::new(3);
    let sent = [(0, entry.clone()), (2, entry), (2, late)].map(|(rank, message)| world.receive(rank, message));
    let message = "did not join registration 0 of communicator 0 within 3s".to_owned();
    assert_eq!(sent, [vec![], vec![], failed(CommError::Peer { rank: 1, message })]);
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
        lens.into_iter().for_each(|len| world.make(rank, broadcast(len)));
        assert_eq!(world.report(rank), []);
    }
    let agreed = [Outgoing::All(Message::Agreed { context: 0, count: 0, first: 2 })];
    assert_eq!(world.tick(), agreed);
    assert_eq!(world.logs[0].agreed(0, 0, 2), None);
    let hash = world.logs[1].agreed(0, 0, 2).unwrap();
    let (call, other_call) = (Box::new(broadcast(7)), Box::new(broadcast(2)));
    let mismatch = CommError::Mismatch { sequence: 1, rank: 1, call, other_rank: 0, other_call };
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
    let failure = CommError::Aborted { rank: 2, reason: "hung".to_owned() };
    for message in [Message::Left { context: 0, done: 1 }, Message::Goodbye] {
        assert_eq!(world.receive(1, message), []);
    }
    assert_eq!(world.receive(2, Message::Failed { error: failure }), []);
    let outgoing = world.coordinator.lost(2, "gone".to_owned());
    assert_eq!(world.deliver(outgoing), []);
    let calls = world.logs[1].calls.messages(0, 0..1).remove(0);
    let (call, other_call) = (Box::new(broadcast(7)), Box::new(broadcast(8)));
    let mismatch = CommError::Mismatch { sequence: 0, rank: 1, call, other_rank: 0, other_call };
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
    let wrong = Message::Progress { context: 0, called: 1, hash: 7, reached: 0, ended: 0 };
    let message = "sent a hash of its calls of communicator 0 that does not match them".to_owned();
    assert_eq!(world.receive(1, wrong), failed(CommError::Peer { rank: 1, message }));
}

/// Calls wait for every rank's report; too many end the world, and the rank without which they were dropped is named.
#[test]
fn calls_in_memory_are_bounded() {
    for silent in [0, 2] {
        let mut world = World::new(3);
        let mut outgoing = Vec::new();
        for _ in 0..100_000 {
            for rank in (0..3).filter(|&rank| rank != silent || rank == 0) {
                world.make(rank, broadcast(1));
                // Rank 0 reports its calls in the first case, but not that they end.
                let ended = if rank == silent { 0 } else { world.logs[rank].calls.count() };
                outgoing.extend(world.advance(rank, ended, ended));
            }
            if !outgoing.is_empty() {
                break;
            }
            world.tick();
            assert!(world.coordinator.groups[&0].calls.kept_bytes() <= 2 * MAX_CALL_BYTES);
        }
        let Some(Outgoing::All(Message::Failed { error: CommError::Peer { rank, message } })) = outgoing.first()
        else {
            panic!("{outgoing:?}")
        };
        assert!(*rank == silent && message.contains("is at collective 0 of communicator 0"), "{rank} {message}");
    }
}

#[test]
fn counts_of_another_number_of_ranks_name_the_rank() {
    let mut world = World::new(3);
    let call = Call { segments: Segments::Uneven([1, 2].into()), ..broadcast(1) };
    let outgoing = world.call(0, call);
    let [Outgoing::All(Message::Failed { error: CommError::Peer { rank: 0, message } })] = &outgoing[..] else {
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
        let (due, count) = (tick.is_multiple_of(KEEPALIVE_TICKS), u64::from(tick));
        let agreed = due.then_some(Outgoing::All(Message::Agreed { context: 0, count, first: count }));
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
    assert_eq!(world.tick(), [Outgoing::All(Message::Agreed { context: 0, count, first: count + 1 })]);
}

/// Calls are kept until all ranks agree on them and they have ended on all ranks: an error may name them.
#[test]
fn call_that_is_agreed_but_not_ended_is_named() {
    let mut world = World::new(2);
    for rank in [0, 1] {
        for _ in 0..3 {
            world.make(rank, broadcast(8));
        }
        assert_eq!(world.advance(rank, 2, 1 + rank as u64), []);
    }
    assert_eq!(world.tick(), [Outgoing::All(Message::Agreed { context: 0, count: 3, first: 3 })]);
    assert_eq!(world.coordinator.groups[&0].calls.kept(), 2);
    let outgoing = world.coordinator.lost(1, "gone".to_owned());
    let call = Box::new(broadcast(8));
    assert_eq!(world.deliver(outgoing), failed(CommError::Left { sequence: 2, call, rank: 1, done: 3 }));
}

#[test]
fn first_rank_that_left_is_named() {
    let mut world = World::new(3);
    assert_eq!(world.receive(0, Message::Left { context: 0, done: 0 }), []);
    let error = failed(CommError::Left { sequence: 0, call: Box::new(broadcast(8)), rank: 0, done: 0 });
    assert_eq!(world.call(2, broadcast(8)), error);
}

/// No rank waits for it in a collective, and its calls may have been dropped.
#[test]
fn lost_rank_that_had_left_is_named() {
    let mut world = World::new(2);
    for rank in [0, 1] {
        assert_eq!(world.call(rank, broadcast(8)), []);
    }
    assert_eq!(world.receive(1, Message::Left { context: 0, done: 1 }), []);
    assert_eq!(world.advance(0, 1, 1), []);
    world.tick();
    let message = "gone".to_owned();
    let outgoing = world.coordinator.lost(1, message.clone());
    assert_eq!(outgoing, failed(CommError::Peer { rank: 1, message }));
}

#[test]
fn goodbye_waits_for_comparisons() {
    let (to, all) = (|rank| vec![Outgoing::To(rank, Message::Goodbye)], vec![Outgoing::All(Message::Goodbye)]);
    let mut world = World::new(3);
    assert_eq!(world.call(0, broadcast(8)), []);
    assert_eq!(world.call(1, broadcast(8)), []);
    // Rank 0 waits for all; rank 1's calls are compared; the last rank ends the world.
    for (rank, expected) in [(0, vec![]), (1, to(1)), (2, all.clone())] {
        assert!(!world.coordinator.is_over());
        assert_eq!(world.receive(rank, Message::Goodbye), expected);
    }
    assert!(world.coordinator.is_over());
    // Rank 1 is ahead of the first rank: it is answered after two ticks. The world ends with rank 0.
    for (rank, expected) in [(1, to(1)), (0, all)] {
        let mut world = World::new(3);
        assert_eq!(world.call(rank, broadcast(8)), []);
        assert_eq!(world.receive(rank, Message::Goodbye), []);
        assert_eq!(world.tick(), []);
        assert_eq!(world.tick(), expected);
    }
}

/// A rank's part of the traffic of a training step on communicator 0, of `calls` calls in a second: messages and bytes
/// to the coordinator and back.
#[test]
fn traffic_of_a_step_is_small() {
    let bytes = |messages: &[Message]| {
        messages.iter().map(|message| super::super::wire::encode(message).unwrap().len()).sum::<usize>()
    };
    let mut log = [Log::new(true), Log::new(false)];
    for _ in 0..10 {
        for i in 0..3_000 {
            let segments = Segments::Even(1_000_000 + i);
            let (collective, op) = (Collective::ReduceScatter, Some(crate::ReduceOp::Sum));
            let call = Call { collective, op, dtype: DType::Bf16, segments, root: None, control: false };
            log.iter_mut().for_each(|log| log.calls.push(call.clone()));
        }
        let [first, other] = log.each_mut().map(|log| {
            (log.reached, log.ended) = (log.calls.count(), log.calls.count());
            log.report(0)
        });
        let count = log[0].calls.count();
        let agreed = [Message::Agreed { context: 0, count, first: count }];
        let figures = [(&first[..]), &other, &agreed].map(|messages| (messages.len(), bytes(messages)));
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
        calls.push(Call { segments, ..broadcast(0) });
        calls.push(broadcast(i));
    }
    let messages = calls.messages(0, 10..200);
    let mut next = 10;
    for message in &messages {
        assert!(super::super::wire::encode(message).unwrap().len() < 1 << 20);
        let Message::Calls { from, calls: sent, .. } = message else { panic!("{message:?}") };
        assert_eq!(*from, next);
        sent.iter().zip(next..).for_each(|(call, sequence)| assert_eq!(Some(call), calls.get(sequence)));
        next += sent.len() as u64;
    }
    assert_eq!(next, 200);
}

/// The oracle of the property test sees all calls of all ranks. Ranks make calls, report, answer requests, split,
/// leave and end in any order; messages between a rank and the coordinator stay in order, and arrive at any time.
mod random {
    use std::collections::{BTreeSet, VecDeque};

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        /// Makes this many calls.
        Call(u64),
        /// The stream reaches and ends all calls of all ranks.
        End,
        Report,
        /// A message of the rank arrives at the coordinator.
        Arrive,
        /// The rank receives a message.
        Receive,
        Tick,
        /// The connection ends.
        Lose,
        /// Drops the communicator.
        Leave,
    }

    #[derive(Debug)]
    struct Simulation {
        coordinator: Coordinator,
        /// World ranks of each communicator.
        members: Vec<Vec<usize>>,
        /// By rank and communicator.
        logs: BTreeMap<(usize, Context), Log>,
        /// All calls ever made: the oracle's.
        made: BTreeMap<(usize, Context), Vec<Call>>,
        /// Calls that differ, by rank, communicator and number.
        differing: BTreeSet<(usize, Context, u64)>,
        to_coordinator: Vec<VecDeque<Message>>,
        to_rank: Vec<VecDeque<Message>>,
        lost: BTreeSet<usize>,
        left: BTreeSet<(usize, Context)>,
        failure: Option<CommError>,
        ticks: u32,
    }

    impl Simulation {
        /// A world that is split into two communicators in reverse order of ranks, and an equal copy of the world.
        fn new(n: usize, differing: BTreeSet<(usize, Context, u64)>) -> Self {
            let mut simulation = Self {
                coordinator: Coordinator::new(n, 23_007),
                members: vec![(0..n).collect()],
                logs: BTreeMap::new(),
                made: BTreeMap::new(),
                differing,
                to_coordinator: vec![VecDeque::new(); n],
                to_rank: vec![VecDeque::new(); n],
                lost: BTreeSet::new(),
                left: BTreeSet::new(),
                failure: None,
                ticks: 0,
            };
            for (number, colors) in (0..).zip([2, 1]) {
                for rank in 0..n {
                    let entry = split(Some(rank as u64 % colors), (n - rank) as u64);
                    let outgoing = simulation.coordinator.receive(rank, meet(number, entry));
                    simulation.send(outgoing);
                }
                for color in 0..colors.min(n as u64) as usize {
                    let members = (0..n).rev().filter(|rank| rank % colors as usize == color).collect();
                    simulation.members.push(members);
                }
            }
            for (context, members) in (0..).zip(&simulation.members) {
                for &rank in members {
                    simulation.logs.insert((rank, context), Log::new(rank == members[0]));
                    simulation.made.insert((rank, context), Vec::new());
                }
            }
            simulation.to_rank.iter_mut().for_each(VecDeque::clear);
            simulation
        }

        fn send(&mut self, outgoing: Vec<Outgoing>) {
            for outgoing in outgoing {
                match outgoing {
                    Outgoing::To(rank, message) => self.to_rank[rank].push_back(message),
                    Outgoing::All(message) => {
                        if let Message::Failed { error } = &message {
                            assert_eq!(self.failure, None, "a second failure");
                            self.check(error);
                            self.failure = Some(error.clone());
                        }
                        self.to_rank.iter_mut().for_each(|queue| queue.push_back(message.clone()));
                    }
                }
            }
        }

        fn step(&mut self, step: Step, rank: usize, context: Context) {
            let log = self.logs.get_mut(&(rank, context));
            let gone = self.lost.contains(&rank);
            match step {
                Step::Tick => {
                    let outgoing = self.coordinator.tick();
                    self.send(outgoing);
                }
                _ if gone => {}
                Step::Call(count) if !self.left.contains(&(rank, context)) => {
                    let Some(log) = log else { return };
                    let made = self.made.get_mut(&(rank, context)).unwrap();
                    for _ in 0..count {
                        let number = made.len() as u64;
                        let differs = self.differing.contains(&(rank, context, number));
                        let call = broadcast(number as usize % 3 + if differs { 10 + rank } else { 0 });
                        made.push(call.clone());
                        log.calls.push(call);
                    }
                }
                Step::Call(_) => {}
                Step::End => {
                    let Some(members) = self.members.get(context as usize) else { return };
                    let all = members.iter().map(|&rank| self.made[&(rank, context)].len()).min().unwrap();
                    if let Some(log) = log {
                        (log.reached, log.ended) = (all as u64, all as u64);
                    }
                }
                Step::Report => self.report(rank),
                Step::Arrive => {
                    if let Some(message) = self.to_coordinator[rank].pop_front() {
                        let outgoing = self.coordinator.receive(rank, message);
                        self.send(outgoing);
                    }
                }
                Step::Receive => self.receive(rank),
                Step::Lose => {
                    self.lost.insert(rank);
                    // What it has sent arrives first.
                    while let Some(message) = self.to_coordinator[rank].pop_front() {
                        let outgoing = self.coordinator.receive(rank, message);
                        self.send(outgoing);
                    }
                    let outgoing = self.coordinator.lost(rank, "gone".to_owned());
                    self.send(outgoing);
                }
                Step::Leave => {
                    if self.made.contains_key(&(rank, context)) && self.left.insert((rank, context)) {
                        self.report(rank);
                        let done = self.made[&(rank, context)].len() as u64;
                        self.to_coordinator[rank].push_back(Message::Left { context, done });
                    }
                }
            }
        }

        fn report(&mut self, rank: usize) {
            for (&(_, context), log) in self.logs.iter_mut().filter(|((of, _), _)| *of == rank) {
                self.to_coordinator[rank].extend(log.report(context));
            }
        }

        fn receive(&mut self, rank: usize) {
            match self.to_rank[rank].pop_front() {
                Some(Message::ShowCalls { context, from, to }) => {
                    let calls = self.logs[&(rank, context)].calls.messages(context, from..to);
                    assert!(!calls.is_empty(), "rank {rank} has dropped calls {from}..{to} of {context}");
                    self.to_coordinator[rank].extend(calls);
                }
                Some(Message::Agreed { context, count, first }) => {
                    for rank in &self.members[context as usize] {
                        let made = &self.made[&(*rank, context)][..count as usize];
                        assert_eq!(made, &self.made[&(self.members[context as usize][0], context)][..count as usize]);
                    }
                    let answer = self.logs.get_mut(&(rank, context)).unwrap().agreed(context, count, first);
                    self.to_coordinator[rank].extend(answer);
                }
                _ => {}
            }
        }

        /// Delivers everything.
        fn finish(&mut self) {
            let n = self.to_rank.len();
            (0..n).for_each(|rank| self.step(Step::Report, rank, 0));
            self.deliver_all();
            // The first rank calls nothing between two ticks; then ranks ahead of it report their hashes.
            for _ in 0..3 {
                self.step(Step::Tick, 0, 0);
                self.deliver_all();
            }
        }

        fn deliver_all(&mut self) {
            let n = self.to_rank.len();
            while (0..n).any(|rank| !self.to_coordinator[rank].is_empty() || !self.to_rank[rank].is_empty()) {
                for rank in 0..n {
                    self.step(Step::Arrive, rank, 0);
                    self.receive_if_alive(rank);
                }
            }
        }

        fn receive_if_alive(&mut self, rank: usize) {
            if self.lost.contains(&rank) {
                self.to_rank[rank].clear();
            }
            self.receive(rank);
        }

        /// The number of the first call in which two ranks differ.
        fn first_difference(&self, a: usize, b: usize, context: Context) -> Option<u64> {
            let (a, b) = (&self.made[&(a, context)], &self.made[&(b, context)]);
            a.iter().zip(b).position(|(a, b)| a != b).map(|sequence| sequence as u64)
        }

        /// Checks a failure against all calls.
        fn check(&self, error: &CommError) {
            let call_of = |rank: usize, context: Context, sequence: u64| {
                self.made.get(&(rank, context)).and_then(|made| made.get(sequence as usize))
            };
            let contexts = || 0..self.members.len() as Context;
            let n = self.to_rank.len();
            let holds = match error {
                CommError::Mismatch { sequence, rank, call, other_rank, other_call } => contexts().any(|context| {
                    self.members[context as usize].contains(rank)
                        && self.members[context as usize].contains(other_rank)
                        && self.first_difference(*rank, *other_rank, context) == Some(*sequence)
                        && call_of(*rank, context, *sequence) == Some(call)
                        && call_of(*other_rank, context, *sequence) == Some(other_call)
                }),
                CommError::Left { sequence, call, rank, done } => contexts().any(|context| {
                    let caller = (0..n).any(|rank| call_of(rank, context, *sequence) == Some(call));
                    let made = self.made.get(&(*rank, context)).map_or(0, Vec::len) as u64;
                    let left = self.left.contains(&(*rank, context)) && made == *done && done == sequence;
                    caller && (left || self.lost.contains(rank) && *done <= made)
                }),
                CommError::Peer { rank, message } if message.contains("differs from") => {
                    // A rank that cannot show its calls any more.
                    self.lost.contains(rank)
                        && contexts().any(|context| {
                            let first = self.members[context as usize][0];
                            self.made.contains_key(&(*rank, context))
                                && self.first_difference(*rank, first, context).is_some()
                        })
                }
                CommError::Peer { rank, .. } => {
                    self.lost.contains(rank) || self.left.iter().any(|(left, _)| left == rank)
                }
                _ => false,
            };
            assert!(holds, "{error}: {self:#?}");
        }

        /// Checks the state after all messages were delivered.
        fn check_end(&self) {
            if self.failure.is_some() {
                return;
            }
            assert!(self.lost.is_empty(), "a lost rank is a failure");
            for (context, members) in (0..).zip(&self.members) {
                for &rank in members {
                    assert_eq!(self.first_difference(rank, members[0], context), None);
                }
                let left = members.iter().filter(|&&rank| self.left.contains(&(rank, context))).count();
                assert_eq!(self.coordinator.groups.contains_key(&context), left < members.len());
                if left > 0 {
                    continue;
                }
                let called = |rank: usize| self.made[&(rank, context)].len() as u64;
                let agreed = members.iter().map(|&rank| called(rank)).min().unwrap();
                let ended = members.iter().map(|&rank| self.logs[&(rank, context)].ended).min().unwrap();
                let kept = self.coordinator.groups[&context].calls.kept() as u64;
                assert_eq!(kept, called(members[0]) - agreed.min(ended), "the coordinator keeps calls");
                for &rank in members {
                    let kept = self.logs[&(rank, context)].calls.kept() as u64;
                    assert_eq!(kept, called(rank) - agreed, "rank {rank} keeps calls");
                }
            }
        }
    }

    fn steps() -> impl Strategy<Value = Vec<(Step, usize, Context)>> {
        let step = prop_oneof![
            8 => (1u64..4).prop_map(Step::Call),
            3 => Just(Step::End),
            6 => Just(Step::Report),
            12 => Just(Step::Arrive),
            6 => Just(Step::Receive),
            2 => Just(Step::Tick),
        ];
        prop::collection::vec((step, 0usize..5, 0u32..4), 0..300)
    }

    /// Configuration of a property with `n` cases, times `ZERO_PROPTEST_FACTOR` if that is set.
    fn cases(n: u32) -> ProptestConfig {
        let factor = std::env::var("ZERO_PROPTEST_FACTOR").ok().and_then(|f| f.parse().ok()).unwrap_or(1);
        ProptestConfig::with_cases(n.saturating_mul(factor))
    }

    fn run(
        n: usize,
        agreement_ticks: u32,
        differing: BTreeSet<(usize, Context, u64)>,
        steps: Vec<(Step, usize, Context)>,
    ) -> Simulation {
        let mut simulation = Simulation::new(n, differing);
        simulation.coordinator.agreement_ticks = agreement_ticks;
        for (step, rank, context) in steps {
            // All ranks answer in time.
            simulation.ticks += u32::from(matches!(step, Step::Tick));
            if !matches!(step, Step::Tick) || simulation.ticks < ANSWER_TICKS {
                simulation.step(step, rank % n, context);
            }
        }
        simulation.finish();
        simulation.check_end();
        simulation
    }

    proptest! {
        #![proptest_config(cases(100))]

        #[test]
        fn equal_calls_never_fail(n in 1usize..6, agreement_ticks in 1u32..5, steps in steps()) {
            prop_assert_eq!(run(n, agreement_ticks, BTreeSet::new(), steps).failure, None);
        }

        #[test]
        fn every_difference_names_its_ranks_and_calls(
            n in 1usize..6,
            agreement_ticks in 1u32..5,
            differing in prop::collection::btree_set((0usize..5, 0u32..4, 0u64..40), 1..4),
            steps in steps(),
        ) {
            let failure = run(n, agreement_ticks, differing, steps).failure;
            prop_assert!(matches!(failure, None | Some(CommError::Mismatch { .. })), "{:?}", failure);
        }

        #[test]
        fn errors_are_true_when_ranks_leave_or_end(
            n in 1usize..6,
            agreement_ticks in 1u32..5,
            differing in prop::collection::btree_set((0usize..5, 0u32..4, 0u64..40), 0..4),
            mut steps in steps(),
            ends in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>(), 0usize..5, 0u32..4), 0..6),
        ) {
            for (at, lost, rank, context) in ends {
                let step = if lost { Step::Lose } else { Step::Leave };
                steps.insert(at.index(steps.len() + 1), (step, rank, context));
            }
            run(n, agreement_ticks, differing, steps);
        }
    }
}
