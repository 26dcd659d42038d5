//! The coordinator's state machine: compares the calls of all ranks and determines the failure of the world.
//!
//! It runs in rank 0's process, performs no I/O and never accesses the data of collectives. Ranks report each call to
//! it. The first failure is final, and every rank receives it. It names
//!
//! - both ranks, if their calls of one sequence number differ, or one splits while the other registers memory;
//! - the rank whose connection ended without a goodbye, or was silent for too long;
//! - the rank that dropped a communicator on which others still call collectives;
//! - if a collective exceeds its limit: the first rank that has not called it; else the first whose stream has not
//!   reached it; else the rank that reported it.

use std::collections::BTreeMap;
use std::time::Duration;

use super::handshake::Hello;
use super::message::{Context, MeetingEntry, Message};
use crate::call::Call;
use crate::split_request::{SplitRequest, colors, members};
use crate::{CommError, RendezvousError};

/// A rank's progress on a communicator, in numbers of calls.
#[derive(Clone, Debug, Default)]
struct Member {
    called: u64,
    /// Calls that its stream has reached.
    reached: u64,
    /// Calls that have ended on its stream.
    ended: u64,
    /// The number of calls that it had made when it dropped the communicator.
    left: Option<u64>,
}

/// A communicator.
#[derive(Debug, Default)]
struct Group {
    /// World ranks, by rank of the communicator.
    ranks: Vec<usize>,
    members: Vec<Member>,
    /// Calls that have not ended on all ranks, by sequence number, each with the rank that reported it first.
    open: BTreeMap<u64, (usize, Call)>,
    /// Meetings that some ranks have not joined, by number: one entry per rank of the communicator.
    meetings: BTreeMap<u64, Vec<Option<MeetingEntry>>>,
}

impl Group {
    fn new(ranks: Vec<usize>) -> Self {
        Self { members: vec![Member::default(); ranks.len()], ranks, ..Self::default() }
    }

    fn index(&self, rank: usize) -> Option<usize> {
        self.ranks.iter().position(|&r| r == rank)
    }
}

/// The state of a world.
#[derive(Debug)]
pub(super) struct Coordinator {
    world_size: usize,
    library: u64,
    joined: Vec<bool>,
    gone: Vec<bool>,
    groups: BTreeMap<Context, Group>,
    next_context: Context,
    /// The final failure.
    failure: Option<CommError>,
}

/// A message to send.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outgoing {
    To(usize, Message),
    All(Message),
}

impl Coordinator {
    pub(super) fn new(world_size: usize, library: u64) -> Self {
        let groups = BTreeMap::from([(0, Group::new((0..world_size).collect()))]);
        let (joined, gone) = (vec![false; world_size], vec![false; world_size]);
        Self { world_size, library, joined, gone, groups, next_context: 1, failure: None }
    }

    /// Adds a rank to the world.
    ///
    /// # Errors
    /// The rank does not belong to this world, so the rendezvous fails on all ranks.
    pub(super) fn join(&mut self, hello: &Hello) -> Result<usize, RendezvousError> {
        let (rank, got, expected) = (hello.rank, hello.world_size, self.world_size);
        if got != expected || rank >= got {
            return Err(RendezvousError::WorldSize { rank, got, expected });
        }
        if hello.library != self.library {
            return Err(RendezvousError::Library { rank, got: hello.library, expected: self.library });
        }
        if std::mem::replace(&mut self.joined[rank], true) {
            return Err(RendezvousError::Twice { rank });
        }
        Ok(rank)
    }

    /// What is due once a second.
    pub(super) fn tick(&mut self) -> Vec<Outgoing> {
        Vec::new()
    }

    /// The ranks that have not joined.
    pub(super) fn missing(&self) -> Vec<usize> {
        (0..self.world_size).filter(|&rank| !self.joined[rank]).collect()
    }

    /// Whether all ranks have ended, with or without an error.
    pub(super) fn is_over(&self) -> bool {
        self.gone.iter().all(|&gone| gone)
    }

    fn fail(&mut self, error: CommError) -> Vec<Outgoing> {
        if self.failure.is_some() {
            return Vec::new();
        }
        self.failure = Some(error.clone());
        vec![Outgoing::All(Message::Failed { error })]
    }

    /// Handles a message from `rank`.
    pub(super) fn receive(&mut self, rank: usize, message: Message) -> Vec<Outgoing> {
        match message {
            Message::Called { context, call } => self.called(rank, context, call),
            Message::Progress { context, reached, ended } => {
                self.progress(rank, context, reached, ended);
                Vec::new()
            }
            Message::Late { context, sequence, call, limit } => {
                let error = self.late(rank, context, sequence, call, limit);
                self.fail(error)
            }
            Message::Failed { error } => self.fail(error),
            Message::Meet { context, number, entry } => self.meet(rank, context, number, entry),
            Message::LateMeeting { context, number, limit } => {
                let (absent, kind) = self.absent_from(context, number).unwrap_or((rank, "meeting"));
                let message = format!("did not join {kind} {number} of communicator {context} within {limit:?}");
                self.fail(CommError::Peer { rank: absent, message })
            }
            Message::Left { context, done } => self.left(rank, context, done),
            Message::Goodbye => {
                self.gone[rank] = true;
                // The coordinator ends with rank 0's process.
                if rank == 0 { vec![Outgoing::All(Message::Goodbye)] } else { Vec::new() }
            }
            Message::Alive => Vec::new(),
            Message::Welcome { .. } | Message::Refused { .. } | Message::Met { .. } => {
                let message = "sent a message that only the coordinator sends".to_owned();
                self.fail(CommError::Peer { rank, message })
            }
        }
    }

    fn called(&mut self, rank: usize, context: Context, call: Call) -> Vec<Outgoing> {
        let Some(group) = self.groups.get_mut(&context) else { return Vec::new() };
        let Some(index) = group.index(rank) else { return Vec::new() };
        let sequence = group.members[index].called;
        group.members[index].called += 1;
        let (first, other) = group.open.entry(sequence).or_insert_with(|| (rank, call.clone()));
        if *other != call {
            let (other_rank, other_call) = (*first, Box::new(other.clone()));
            return self.fail(CommError::Mismatch { sequence, rank, call: Box::new(call), other_rank, other_call });
        }
        let left = group.members.iter().zip(&group.ranks).find_map(|(member, &rank)| {
            let done = member.left.filter(|&done| done <= sequence)?;
            Some((rank, done))
        });
        match left {
            Some((rank, done)) => self.fail(CommError::Left { sequence, call: Box::new(call), rank, done }),
            None => Vec::new(),
        }
    }

    fn progress(&mut self, rank: usize, context: Context, reached: u64, ended: u64) {
        let Some(group) = self.groups.get_mut(&context) else { return };
        let Some(index) = group.index(rank) else { return };
        let member = &mut group.members[index];
        (member.reached, member.ended) = (member.reached.max(reached), member.ended.max(ended));
        let ended_on_all = group.members.iter().map(|m| m.ended).min().unwrap_or(0);
        group.open = group.open.split_off(&ended_on_all);
    }

    fn late(&self, rank: usize, context: Context, sequence: u64, call: Call, limit: Duration) -> CommError {
        let Some(group) = self.groups.get(&context) else {
            let message = format!("waits in communicator {context}, which does not exist");
            return CommError::Peer { rank, message };
        };
        let stalled = |count: &dyn Fn(&Member) -> u64| {
            let index = group.members.iter().position(|member| count(member) <= sequence)?;
            let (rank, done) = (group.ranks[index], count(&group.members[index]));
            Some(CommError::Stalled { sequence, call: Box::new(call.clone()), rank, limit, done })
        };
        stalled(&|member| member.called).or_else(|| stalled(&|member| member.reached)).unwrap_or_else(|| {
            let message =
                format!("collective {sequence}, {call}: all ranks reached it, but it did not end within {limit:?}");
            CommError::Peer { rank, message }
        })
    }

    fn left(&mut self, rank: usize, context: Context, done: u64) -> Vec<Outgoing> {
        let Some(group) = self.groups.get_mut(&context) else { return Vec::new() };
        let Some(index) = group.index(rank) else { return Vec::new() };
        group.members[index].left = Some(done);
        let call = group.open.range(done..).next().map(|(&sequence, (_, call))| (sequence, call.clone()));
        let meeting = group.meetings.iter().next();
        let meeting = meeting.and_then(|(&number, entries)| Some((number, entries.iter().flatten().next()?.kind())));
        let error = match (call, meeting) {
            (Some((sequence, call)), _) => CommError::Left { sequence, call: Box::new(call), rank, done },
            (None, Some((number, kind))) => left_before(rank, context, number, kind),
            (None, None) => {
                if group.members.iter().all(|member| member.left.is_some()) {
                    self.groups.remove(&context);
                }
                return Vec::new();
            }
        };
        self.fail(error)
    }

    /// Handles the loss of the connection to `rank`; `cause` describes it.
    pub(super) fn lost(&mut self, rank: usize, cause: String) -> Vec<Outgoing> {
        if std::mem::replace(&mut self.gone[rank], true) {
            return Vec::new();
        }
        // The oldest collective in which other ranks may wait for it.
        let open = self.groups.values().find_map(|group| {
            let member = &group.members[group.index(rank)?];
            let (&sequence, (_, call)) = group.open.range(member.ended..).next()?;
            Some((sequence, Box::new(call.clone()), member.called))
        });
        let error = match open {
            Some((sequence, call, done)) => CommError::Left { sequence, call, rank, done },
            None => CommError::Peer { rank, message: cause },
        };
        self.fail(error)
    }

    fn meet(&mut self, rank: usize, context: Context, number: u64, entry: MeetingEntry) -> Vec<Outgoing> {
        let Some(group) = self.groups.get_mut(&context) else { return Vec::new() };
        let Some(index) = group.index(rank) else { return Vec::new() };
        let (n, kind) = (group.ranks.len(), entry.kind());
        if let Some(gone) = group.members.iter().position(|member| member.left.is_some()) {
            let rank = group.ranks[gone];
            return self.fail(left_before(rank, context, number, kind));
        }
        let entries = group.meetings.entry(number).or_insert_with(|| vec![None; n]);
        entries[index] = Some(entry);
        let other = group.ranks.iter().zip(&*entries).find_map(|(&rank, entry)| {
            let other_kind = entry.as_ref()?.kind();
            (other_kind != kind).then_some((rank, other_kind))
        });
        if let Some((other, other_kind)) = other {
            let message = format!(
                "called {kind} {number} of communicator {context} where rank {other} called a {other_kind}; all ranks \
                 must make the same calls in the same order"
            );
            return self.fail(CommError::Peer { rank, message });
        }
        let Some(entries) = entries.iter().copied().collect::<Option<Vec<MeetingEntry>>>() else { return Vec::new() };
        group.meetings.remove(&number);
        let ranks = group.ranks.clone();
        let first = self.next_context;
        let split =
            |entry: &MeetingEntry| if let MeetingEntry::Split(request) = entry { Some(*request) } else { None };
        let requests: Vec<SplitRequest> = entries.iter().filter_map(split).collect();
        for color in colors(&requests) {
            let members = members(&requests, color).into_iter().map(|index| ranks[index]).collect();
            self.groups.insert(self.next_context, Group::new(members));
            self.next_context += 1;
        }
        let met = Message::Met { context, number, first, entries };
        ranks.into_iter().map(|rank| Outgoing::To(rank, met.clone())).collect()
    }

    /// The first rank that has not joined a meeting, and the meeting's kind.
    fn absent_from(&self, context: Context, number: u64) -> Option<(usize, &'static str)> {
        let group = self.groups.get(&context)?;
        let entries = group.meetings.get(&number)?;
        let absent = entries.iter().position(Option::is_none)?;
        Some((group.ranks[absent], entries.iter().flatten().next()?.kind()))
    }
}

fn left_before(rank: usize, context: Context, number: u64, kind: &str) -> CommError {
    CommError::Peer { rank, message: format!("left communicator {context} before its {kind} {number}") }
}

#[cfg(test)]
mod tests {
    use zero_alloc::device::DType;

    use super::*;
    use crate::Collective;
    use crate::call::Segments;

    const LIMIT: Duration = Duration::from_secs(3);

    fn broadcast(len: usize) -> Call {
        let (collective, segments) = (Collective::Broadcast, Segments::Balanced(len));
        Call { collective, op: None, dtype: DType::F32, segments, root: Some(0), control: false }
    }

    fn called(len: usize) -> Message {
        Message::Called { context: 0, call: broadcast(len) }
    }

    fn progress(reached: u64, ended: u64) -> Message {
        Message::Progress { context: 0, reached, ended }
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

    /// Delivers the messages to a coordinator of three ranks; returns it and its last answer.
    fn deliver(messages: impl IntoIterator<Item = (usize, Message)>) -> (Coordinator, Vec<Outgoing>) {
        let mut coordinator = Coordinator::new(3, 23_007);
        let mut last = Vec::new();
        for (rank, message) in messages {
            assert!(last.is_empty(), "an answer before the last message: {last:?}");
            last = coordinator.receive(rank, message);
        }
        (coordinator, last)
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
            let differing = Message::Called { context: 0, call: call.clone() };
            let (_, sent) = deliver([(0, called(1)), (1, called(1)), (0, called(8)), (1, differing)]);
            let (call, other_call) = (Box::new(call), other_call.clone());
            assert_eq!(sent, failed(CommError::Mismatch { sequence: 1, rank: 1, call, other_rank: 0, other_call }));
        }
    }

    #[test]
    fn late_collective_names_the_late_rank() {
        let call = Box::new(broadcast(8));
        let stalled =
            |rank, done| failed(CommError::Stalled { sequence: 1, call: call.clone(), rank, limit: LIMIT, done });
        let first: Vec<_> = (0..3).flat_map(|rank| [(rank, called(1)), (rank, progress(1, 1))]).collect();
        let with = |more: &[(usize, Message)]| deliver(first.iter().chain(more).cloned()).1;
        // Rank 2 has not called it.
        let mut more = vec![(0, called(8)), (0, progress(2, 1)), (1, called(8)), (0, late(1))];
        assert_eq!(with(&more), stalled(2, 1));
        // Rank 2's stream has not reached it.
        more.splice(3.., [(1, progress(2, 1)), (2, called(8)), (0, late(1))]);
        assert_eq!(with(&more), stalled(2, 1));
        // All have, so the rank that reports it is named.
        more.splice(5.., [(2, progress(2, 1)), (0, late(1))]);
        let message = format!("collective 1, {call}: all ranks reached it, but it did not end within 3s");
        assert_eq!(with(&more), failed(CommError::Peer { rank: 0, message }));
    }

    #[test]
    fn lost_rank_is_named_with_its_collective() {
        let left = |done| failed(CommError::Left { sequence: 0, call: Box::new(broadcast(8)), rank: 1, done });
        for (calls, done) in [(vec![(0, called(8))], 0), (vec![(0, called(8)), (1, called(8))], 1)] {
            let (mut coordinator, _) = deliver(calls);
            assert_eq!(coordinator.lost(1, "gone".to_owned()), left(done));
            assert!(coordinator.lost(0, "gone".to_owned()).is_empty());
        }
        let (mut coordinator, _) = deliver([]);
        let message = "gone".to_owned();
        assert_eq!(coordinator.lost(1, message.clone()), failed(CommError::Peer { rank: 1, message }));
    }

    #[test]
    fn rank_that_left_is_named() {
        let left = Message::Left { context: 0, done: 1 };
        let first = [(0, called(1)), (1, called(1))];
        let error = failed(CommError::Left { sequence: 1, call: Box::new(broadcast(8)), rank: 1, done: 1 });
        for more in [[(1, left.clone()), (0, called(8))], [(0, called(8)), (1, left.clone())]] {
            assert_eq!(deliver(first.iter().chain(&more).cloned()).1, error);
        }
        let message = "left communicator 0 before its split 0".to_owned();
        let error = failed(CommError::Peer { rank: 1, message });
        let meet = meet(0, split(None, 0));
        for more in [[(1, left.clone()), (0, meet.clone())], [(0, meet), (1, left)]] {
            assert_eq!(deliver(more).1, error);
        }
    }

    #[test]
    fn splits_number_their_communicators_by_color() {
        let entries = vec![split(Some(7), 1), split(None, 0), split(Some(5), 0)];
        let round = |number| (0..3).map(|rank| (rank, meet(number, entries[rank]))).collect::<Vec<_>>();
        let (mut coordinator, sent) = deliver(round(0));
        let met = |number, first, entries: &[MeetingEntry]| -> Vec<Outgoing> {
            let met = Message::Met { context: 0, number, first, entries: entries.to_vec() };
            (0..3).map(|rank| Outgoing::To(rank, met.clone())).collect()
        };
        assert_eq!(sent, met(0, 1, &entries));
        assert_eq!((&coordinator.groups[&1].ranks[..], &coordinator.groups[&2].ranks[..]), (&[2][..], &[0][..]));
        let bytes: Vec<_> = [Some(7), None, Some(9)].map(MeetingEntry::Registration).into();
        let sent = (0..3).map(|rank| coordinator.receive(rank, meet(1, bytes[rank]))).last();
        assert_eq!(sent, Some(met(1, 3, &bytes)));
    }

    #[test]
    fn differing_meetings_name_both_ranks() {
        let (_, sent) = deliver([(2, meet(0, split(None, 0))), (1, meet(0, MeetingEntry::Registration(Some(1))))]);
        let [Outgoing::All(Message::Failed { error: CommError::Peer { rank: 1, message } })] = &sent[..] else {
            panic!("{sent:?}")
        };
        assert!(
            message.starts_with("called registration 0 of communicator 0 where rank 2 called a split"),
            "{message}"
        );
    }

    #[test]
    fn late_meeting_names_the_absent_rank() {
        let late = Message::LateMeeting { context: 0, number: 0, limit: LIMIT };
        let entry = meet(0, MeetingEntry::Registration(None));
        let (_, sent) = deliver([(0, entry.clone()), (2, entry), (2, late)]);
        let message = "did not join registration 0 of communicator 0 within 3s".to_owned();
        assert_eq!(sent, failed(CommError::Peer { rank: 1, message }));
    }
}
