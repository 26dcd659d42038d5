//! What the ranks' words add up to: pure state, kept by rank 0's process for all.
//!
//! The hub never touches data. It learns of every call after it was enqueued, compares it with the other ranks' calls
//! of the same number, and pronounces the one failure that ends the world on every rank. How it blames:
//!
//! - two ranks made different calls of one number: both;
//! - a connection ended without a goodbye, or was silent for too long: its rank;
//! - a rank gave up a communicator that others still call: that rank;
//! - one rank splits where another registers memory: both;
//! - a collective takes longer than its limit: the first rank that has not called it; if all have, the first whose
//!   stream has not reached it; if all are in it, the rank that complained.

use std::collections::BTreeMap;
use std::time::Duration;

use super::message::{Context, Message, VERSION};
use crate::call::Call;
use crate::split_request::{SplitRequest, colors, members};
use crate::{CommError, RendezvousError};

/// What a rank has done on a communicator.
#[derive(Clone, Debug, Default)]
struct Member {
    /// Calls.
    called: u64,
    /// Calls that its stream has reached.
    reached: u64,
    /// Calls that have ended.
    ended: u64,
    /// It left after so many.
    left: Option<u64>,
}

/// What a rank brings to a meeting: a point where all ranks of a communicator wait for each other.
#[derive(Clone, Copy, Debug)]
enum MeetingEntry {
    Split(SplitRequest),
    /// The bytes it has registered, if it could.
    Registration(Option<u64>),
}

impl MeetingEntry {
    fn kind(self) -> &'static str {
        match self {
            Self::Split(_) => "split",
            Self::Registration(_) => "registration",
        }
    }
}

/// A communicator.
#[derive(Debug, Default)]
struct Group {
    /// World ranks, by rank here.
    ranks: Vec<usize>,
    members: Vec<Member>,
    /// Calls that have not ended everywhere: who was first to make it, and what it is.
    open: BTreeMap<u64, (usize, Call)>,
    /// Those that not all ranks have come to, by their number: what each has brought.
    meetings: BTreeMap<u64, Vec<Option<MeetingEntry>>>,
}

impl Group {
    fn new(ranks: Vec<usize>) -> Self {
        Self { members: vec![Member::default(); ranks.len()], ranks, ..Self::default() }
    }

    fn place(&self, rank: usize) -> Option<usize> {
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
    /// The one failure.
    verdict: Option<CommError>,
}

/// What is to be sent.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Out {
    /// To one rank.
    To(usize, Message),
    /// To all.
    All(Message),
}

impl Coordinator {
    pub(super) fn new(world_size: usize, library: u64) -> Self {
        let groups = BTreeMap::from([(0, Group::new((0..world_size).collect()))]);
        let none = vec![false; world_size];
        Self { world_size, library, joined: none.clone(), gone: none, groups, next_context: 1, verdict: None }
    }

    /// A rank says hello; which one it is.
    ///
    /// # Errors
    /// It does not belong here: the rendezvous has failed, for all. (No error at all for a stranger.)
    pub(super) fn join(&mut self, hello: &Message) -> Result<Option<usize>, RendezvousError> {
        let Message::Hello { version, rank, world_size, library } = *hello else { return Ok(None) };
        let rank = usize::try_from(rank).unwrap_or(usize::MAX);
        if version != VERSION {
            return Err(RendezvousError::Version { rank, says: version, expected: VERSION });
        }
        let says = usize::try_from(world_size).unwrap_or(usize::MAX);
        if says != self.world_size || rank >= says {
            return Err(RendezvousError::WorldSize { rank, says, expected: self.world_size });
        }
        if library != self.library {
            return Err(RendezvousError::Library { rank, says: library, expected: self.library });
        }
        if std::mem::replace(&mut self.joined[rank], true) {
            return Err(RendezvousError::Twice { rank });
        }
        Ok(Some(rank))
    }

    /// Who has not come yet.
    pub(super) fn missing(&self) -> Vec<usize> {
        (0..self.world_size).filter(|&rank| !self.joined[rank]).collect()
    }

    /// Whether all have gone, well or not: nothing is left to do.
    pub(super) fn is_over(&self) -> bool {
        self.gone.iter().all(|&gone| gone)
    }

    fn fail(&mut self, error: CommError) -> Vec<Out> {
        if self.verdict.is_some() {
            return Vec::new();
        }
        self.verdict = Some(error.clone());
        vec![Out::All(Message::Failed { error })]
    }

    /// `rank` says `message`.
    pub(super) fn hear(&mut self, rank: usize, message: Message) -> Vec<Out> {
        match message {
            Message::Called { context, call } => self.called(rank, context, call),
            Message::Progress { context, reached, ended } => {
                self.progress(rank, context, reached, ended);
                Vec::new()
            }
            Message::Late { context, sequence, call, limit_ms } => {
                let error = self.blame_for_late(rank, context, sequence, call, Duration::from_millis(limit_ms));
                self.fail(error)
            }
            Message::Failed { error } => self.fail(error),
            Message::Split { context, number, request } => {
                self.meet(rank, context, number, MeetingEntry::Split(request))
            }
            Message::Register { context, number, bytes } => {
                self.meet(rank, context, number, MeetingEntry::Registration(bytes))
            }
            Message::LateMeeting { context, number, limit_ms } => {
                let limit = Duration::from_millis(limit_ms);
                let (absent, kind) = self.absent_from(context, number).unwrap_or((rank, "meeting"));
                let message = format!("did not come to {kind} {number} of communicator {context} within {limit:?}");
                self.fail(CommError::Peer { rank: absent, message })
            }
            Message::Left { context, done } => self.left(rank, context, done),
            Message::Goodbye => {
                self.gone[rank] = true;
                // With rank 0's process this hub goes.
                if rank == 0 { vec![Out::All(Message::Goodbye)] } else { Vec::new() }
            }
            Message::Alive => Vec::new(),
            other => self.fail(CommError::Peer { rank, message: format!("it said what no rank says: {other:?}") }),
        }
    }

    fn called(&mut self, rank: usize, context: Context, call: Call) -> Vec<Out> {
        let Some(group) = self.groups.get_mut(&context) else { return Vec::new() };
        let Some(place) = group.place(rank) else { return Vec::new() };
        let sequence = group.members[place].called;
        group.members[place].called += 1;
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
        let Some(place) = group.place(rank) else { return };
        let member = &mut group.members[place];
        (member.reached, member.ended) = (member.reached.max(reached), member.ended.max(ended));
        let everywhere = group.members.iter().map(|m| m.ended).min().unwrap_or(0);
        group.open = group.open.split_off(&everywhere);
    }

    fn blame_for_late(&self, rank: usize, context: Context, sequence: u64, call: Call, limit: Duration) -> CommError {
        let Some(group) = self.groups.get(&context) else {
            return CommError::Peer { rank, message: format!("it waits in communicator {context}, which is none") };
        };
        let stalled = |count: &dyn Fn(&Member) -> u64| {
            let place = group.members.iter().position(|member| count(member) <= sequence)?;
            let (rank, done) = (group.ranks[place], count(&group.members[place]));
            Some(CommError::Stalled { sequence, call: Box::new(call.clone()), rank, limit, done })
        };
        stalled(&|member| member.called).or_else(|| stalled(&|member| member.reached)).unwrap_or_else(|| {
            let message =
                format!("collective {sequence}, {call}: all ranks are in it, and it did not end within {limit:?}");
            CommError::Peer { rank, message }
        })
    }

    fn left(&mut self, rank: usize, context: Context, done: u64) -> Vec<Out> {
        let Some(group) = self.groups.get_mut(&context) else { return Vec::new() };
        let Some(place) = group.place(rank) else { return Vec::new() };
        group.members[place].left = Some(done);
        let waited_for = group.open.range(done..).next().map(|(&sequence, (_, call))| (sequence, call.clone()));
        let met = group.meetings.iter().next();
        let met = met.and_then(|(&number, all)| Some((number, all.iter().flatten().next()?.kind())));
        let error = match (waited_for, met) {
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

    /// The connection of `rank` ended, or says nothing any more: `how`.
    pub(super) fn lost(&mut self, rank: usize, how: &str) -> Vec<Out> {
        if std::mem::replace(&mut self.gone[rank], true) {
            return Vec::new();
        }
        // The first collective that the others may wait in for it.
        let waited_for = self.groups.values().find_map(|group| {
            let member = &group.members[group.place(rank)?];
            let (&sequence, (_, call)) = group.open.range(member.ended..).next()?;
            Some((sequence, Box::new(call.clone()), member.called))
        });
        let error = match waited_for {
            Some((sequence, call, done)) => CommError::Left { sequence, call, rank, done },
            None => CommError::Peer { rank, message: how.to_owned() },
        };
        self.fail(error)
    }

    fn meet(&mut self, rank: usize, context: Context, number: u64, brought: MeetingEntry) -> Vec<Out> {
        let Some(group) = self.groups.get_mut(&context) else { return Vec::new() };
        let Some(place) = group.place(rank) else { return Vec::new() };
        let (n, kind) = (group.ranks.len(), brought.kind());
        if let Some(gone) = group.members.iter().position(|member| member.left.is_some()) {
            let rank = group.ranks[gone];
            return self.fail(left_before(rank, context, number, kind));
        }
        let all = group.meetings.entry(number).or_insert_with(|| vec![None; n]);
        all[place] = Some(brought);
        let another = all.iter().position(|other| other.is_some_and(|other| other.kind() != kind));
        if let Some((other, other_kind)) = another.and_then(|place| Some((group.ranks[place], all[place]?.kind()))) {
            let message = format!(
                "came to {kind} {number} of communicator {context} where rank {other} came to a {other_kind}; all ranks \
                 must make the same calls in the same order"
            );
            return self.fail(CommError::Peer { rank, message });
        }
        let Some(all) = all.iter().copied().collect::<Option<Vec<MeetingEntry>>>() else { return Vec::new() };
        group.meetings.remove(&number);
        let ranks = group.ranks.clone();
        let (mut requests, mut bytes) = (Vec::new(), Vec::new());
        for brought in all {
            match brought {
                MeetingEntry::Split(request) => requests.push(request),
                MeetingEntry::Registration(of_rank) => bytes.push(of_rank),
            }
        }
        let done = match brought {
            MeetingEntry::Split(_) => {
                let first = self.found(&ranks, &requests);
                Message::SplitDone { context, number, first, requests }
            }
            MeetingEntry::Registration(_) => Message::RegisterDone { context, number, bytes },
        };
        ranks.into_iter().map(|rank| Out::To(rank, done.clone())).collect()
    }

    /// Makes the communicators of a split of `parents`; the first one's number.
    fn found(&mut self, parents: &[usize], requests: &[SplitRequest]) -> Context {
        let first = self.next_context;
        for color in colors(requests) {
            let ranks = members(requests, color).into_iter().map(|place| parents[place]).collect();
            self.groups.insert(self.next_context, Group::new(ranks));
            self.next_context += 1;
        }
        first
    }

    /// The first rank that a meeting waits for, and what it is.
    fn absent_from(&self, context: Context, number: u64) -> Option<(usize, &'static str)> {
        let group = self.groups.get(&context)?;
        let all = group.meetings.get(&number)?;
        let absent = all.iter().position(Option::is_none)?;
        Some((group.ranks[absent], all.iter().flatten().next()?.kind()))
    }
}

fn left_before(rank: usize, context: Context, number: u64, kind: &str) -> CommError {
    CommError::Peer { rank, message: format!("left communicator {context} before its {kind} {number}") }
}
