//! The coordinator's state machine: compares the calls of all ranks and determines the failure of
//! the world.
//!
//! It runs in rank 0's process, performs no I/O, reads no clock and never accesses the data of
//! collectives. The first failure is final, and every rank receives it. It names
//!
//! - both ranks, if their calls of one sequence number differ;
//! - the rank whose connection ended without a goodbye, or was silent for too long;
//! - the rank that dropped a communicator on which others still call collectives;
//! - if a collective exceeds its limit: the first rank that has not called it; else the first whose
//!   stream has not reached it; else the rank that reported it.
//!
//! Calls are compared by hash. The first rank of a communicator sends its calls; every other rank
//! sends only how many it has made and their rolling hash, which is compared with the first rank's
//! hash at that count. A rank that is ahead of the first is compared when the first gets there, or
//! as far as the first has come if both wait. Where an error names a call that the coordinator
//! lacks, it requests the call from a rank; until the answer, no later failure replaces this one.
//!
//! The cost of a message does not depend on the number of ranks, except of those that end the
//! world. Minima over ranks are computed at each [`tick`](Coordinator::tick).
//!
//! Why hashes: steps of one second with 3,000 calls are 1,030 messages in and 260 out a second at
//! 1,024 ranks, and 4,080 and 1,050 at 4,096 (`benches/README.md`). With a message a call, 4,096
//! ranks sent 12.3 million messages of 0.2 GB. A split answers each rank with its own
//! place, some 10 bytes, instead of the requests of all ranks.
//!
//! Why a certain failure waits for its text: a rank may end, or report a hung collective, between
//! the difference of its hash and the answer with its calls. Later failures are held back until it
//! has answered, is lost, or six ticks have passed; the error has what is known then.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::ops::Range;
use std::time::Duration;

use super::calls::Calls;
use super::handshake::Hello;
use super::message::{Context, Message, Place, bounded};
use crate::call::{Call, Segments};
use crate::split_request::SplitRequest;
use crate::{CommError, RendezvousError};

/// Ticks after which the coordinator no longer waits for a call that it requested.
const ANSWER_TICKS: u32 = 6;
/// Ticks after which a goodbye is answered although calls of the rank, or of others for rank 0,
/// were not compared.
const GOODBYE_TICKS: u32 = 2;
/// Maximum memory of the calls of one communicator that are not agreed or have not ended on all
/// ranks.
const MAX_CALL_BYTES: usize = if cfg!(test) { 1 << 20 } else { 1 << 30 };
/// Ticks without a message to a rank, or from it, after which a keepalive is due.
pub(crate) const KEEPALIVE_TICKS: u32 = 4;

/// Ticks between two agreements: in a large world, only as often as each rank needs a keepalive.
/// Sending them is most of the coordinator's work.
fn agreement_ticks(world_size: usize) -> u32 {
    if world_size < 512 { 1 } else { KEEPALIVE_TICKS }
}

/// The time between two reports of a rank's progress.
pub(crate) fn report_every(world_size: usize) -> Duration {
    let every = Duration::from_millis(1).saturating_mul(world_size.try_into().unwrap_or(u32::MAX));
    every.clamp(Duration::from_millis(10), Duration::from_secs(1))
}

/// A rank's progress on a communicator, in numbers of calls.
#[derive(Clone, Debug, Default)]
struct Member {
    called: u64,
    /// The hash of those calls.
    hash: u64,
    /// Calls that are equal to the first rank's.
    agreed: u64,
    /// The earliest report that the first rank has not reached: calls and hash.
    ahead: Option<(u64, u64)>,
    /// Calls that its stream has reached.
    reached: u64,
    /// Calls that have ended on its stream.
    ended: u64,
    /// The number of calls that it had made when it dropped the communicator.
    left: Option<u64>,
}

/// A split that some ranks have not joined.
#[derive(Debug)]
struct Split {
    /// By rank of the communicator.
    requests: Vec<Option<SplitRequest>>,
    absent: usize,
}

/// A communicator. Members are named by their rank in it, the index.
#[derive(Debug)]
struct Group {
    /// World ranks, by index.
    ranks: Vec<usize>,
    /// Indices, by world rank.
    indices: HashMap<usize, usize>,
    members: Vec<Member>,
    /// The first rank's calls that have not ended or are not agreed on all ranks.
    calls: Calls,
    /// Members with a report that the first rank has not reached: its calls, and the index.
    ahead: BinaryHeap<Reverse<(u64, usize)>>,
    /// The most calls of a member.
    most_called: u64,
    /// The number of calls of the last agreement that was sent.
    agreed: u64,
    /// The number of the first rank's calls at the last tick.
    first: u64,
    /// Members that have dropped the communicator.
    left: usize,
    /// The least number of calls of such a member, and its index.
    first_left: Option<(u64, usize)>,
    /// The number of splits that all members have joined, which is the number of the next one.
    splits: u64,
    /// The next split, if a member has joined it.
    split: Option<Split>,
}

impl Group {
    fn new(ranks: Vec<usize>) -> Self {
        Self {
            indices: ranks
                .iter()
                .enumerate()
                .map(|(index, &rank)| (rank, index))
                .collect(),
            members: vec![Member::default(); ranks.len()],
            ranks,
            calls: Calls::default(),
            ahead: BinaryHeap::new(),
            most_called: 0,
            agreed: 0,
            first: 0,
            left: 0,
            first_left: None,
            splits: 0,
            split: None,
        }
    }

    /// Compares the latest report of `index` with the first rank's calls, or notes that it is ahead
    /// of them. Returns the calls that contain the first difference.
    fn compare(&mut self, index: usize) -> Option<Range<u64>> {
        let member = &mut self.members[index];
        if index == 0 || member.ahead.is_some() || member.called <= member.agreed {
            return None;
        }
        if member.called > self.calls.count() {
            member.ahead = Some((member.called, member.hash));
            self.ahead.push(Reverse((member.called, index)));
            return None;
        }
        if self.calls.hash_of_first(member.called) != Some(member.hash) {
            return Some(member.agreed..member.called);
        }
        member.agreed = member.called;
        None
    }

    /// Compares the next member that the first rank has caught up with. Returns its index and the
    /// calls that contain the first difference; `None` if there is no such member.
    fn compare_next(&mut self) -> Option<(usize, Option<Range<u64>>)> {
        let &Reverse((count, index)) = self.ahead.peek()?;
        if count > self.calls.count() {
            return None;
        }
        self.ahead.pop();
        let member = &mut self.members[index];
        let (count, hash) = member.ahead.take()?;
        if self.calls.hash_of_first(count) != Some(hash) {
            return Some((index, Some(member.agreed..count)));
        }
        member.agreed = count;
        // Its later reports.
        Some((index, self.compare(index)))
    }

    /// Drops the calls that no error can name any more. If an agreement `is_due` or the first rank
    /// has called nothing since the last tick, returns the number of calls that all ranks agree on,
    /// if it has grown or if a rank is ahead of the first with calls that were not compared.
    fn settle(&mut self, context: Context, is_due: bool) -> Option<Message> {
        let agreed = self.members.iter().map(|member| member.agreed).min()?;
        let running = self.members.iter().filter(|member| member.left.is_none());
        let ended = running.map(|member| member.ended).min().unwrap_or(agreed);
        self.calls.drop_before(agreed.min(ended));
        let first = self.calls.count();
        let waits = first == std::mem::replace(&mut self.first, first);
        if !is_due && !waits {
            return None;
        }
        let ahead = self
            .members
            .iter()
            .any(|member| member.ahead.is_some() && member.agreed < first);
        let grown = agreed > std::mem::replace(&mut self.agreed, agreed);
        (grown || ahead).then_some(Message::Agreed {
            context,
            count: agreed,
            first,
        })
    }

    /// The error for too many calls in memory: it names the rank without which they could be
    /// dropped.
    fn farthest_behind(&self, context: Context) -> CommError {
        let count = |member: &Member| member.agreed.min(member.ended);
        let index = (0..self.members.len())
            .min_by_key(|&index| count(&self.members[index]))
            .unwrap_or(0);
        let message = format!(
            "is at collective {} of communicator {context}, and rank {} is so many ahead that the coordinator cannot keep \
             them: {}",
            count(&self.members[index]),
            self.ranks[0],
            self.calls.count()
        );
        CommError::Peer {
            rank: self.ranks[index],
            message,
        }
    }

    /// Sends `message` to all members of a world of `world_size` ranks.
    fn send(&self, message: Message, world_size: usize) -> Vec<Outgoing> {
        if self.ranks.len() == world_size {
            return vec![Outgoing::All(message)];
        }
        self.ranks
            .iter()
            .map(|&rank| Outgoing::To(rank, message.clone()))
            .collect()
    }
}

/// A failure that is certain, whose error names a call that the coordinator has requested.
#[derive(Debug)]
struct Pending {
    /// The rank that was asked.
    asked: usize,
    context: Context,
    /// The requested calls that have not arrived.
    calls: Range<u64>,
    cause: Cause,
    ticks: u32,
}

#[derive(Debug)]
enum Cause {
    /// One of the calls differs from the first rank's.
    Difference,
    /// `rank` ended its part of the communicator or was lost, before the requested call.
    Gone { rank: usize, how: Gone },
}

/// How a rank went that others wait for.
#[derive(Debug)]
enum Gone {
    /// It dropped the communicator after this many calls.
    Left { done: u64 },
    /// Its process or its connection ended, as this describes.
    Lost(String),
}

impl Gone {
    /// The error of a collective that `rank` did not call.
    fn error(&self, rank: usize, sequence: u64, call: Call) -> CommError {
        let call = Box::new(call);
        match self {
            Self::Left { done } => CommError::Left {
                sequence,
                call,
                rank,
                done: *done,
            },
            Self::Lost(message) => CommError::Lost {
                sequence,
                call,
                rank,
                message: message.clone(),
            },
        }
    }
}

/// The state of a world.
#[derive(Debug)]
pub(crate) struct Coordinator {
    world_size: usize,
    library: u64,
    joined: Vec<bool>,
    gone: Vec<bool>,
    /// The number of ranks that are not gone.
    present: usize,
    groups: BTreeMap<Context, Group>,
    next_context: Context,
    /// Ranks whose goodbye has not been answered, with the ticks since.
    leaving: Vec<(usize, u32)>,
    /// Ticks between two agreements.
    agreement_ticks: u32,
    /// Ticks since an agreement was due.
    ticks: u32,
    pending: Option<Pending>,
    /// The final failure.
    failure: Option<CommError>,
}

/// A message to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outgoing {
    To(usize, Message),
    All(Message),
}

impl Coordinator {
    pub(crate) fn new(world_size: usize, library: u64) -> Self {
        Self {
            world_size,
            library,
            joined: vec![false; world_size],
            gone: vec![false; world_size],
            present: world_size,
            groups: BTreeMap::from([(0, Group::new((0..world_size).collect()))]),
            next_context: 1,
            leaving: Vec::new(),
            agreement_ticks: agreement_ticks(world_size),
            ticks: 0,
            pending: None,
            failure: None,
        }
    }

    /// Adds a rank to the world.
    ///
    /// # Errors
    /// The rank does not belong to this world, so the rendezvous fails on all ranks.
    pub(crate) fn join(&mut self, hello: &Hello) -> Result<usize, RendezvousError> {
        let rank = hello.rank;
        let got = hello.world_size;
        let expected = self.world_size;
        if got != expected || rank >= got {
            return Err(RendezvousError::WorldSize {
                rank,
                got,
                expected,
            });
        }

        if hello.library != self.library {
            return Err(RendezvousError::Library {
                rank,
                got: hello.library,
                expected: self.library,
            });
        }

        if std::mem::replace(&mut self.joined[rank], true) {
            return Err(RendezvousError::Twice { rank });
        }
        Ok(rank)
    }

    /// The ranks that have not joined.
    pub(crate) fn missing(&self) -> Vec<usize> {
        (0..self.world_size)
            .filter(|&rank| !self.joined[rank])
            .collect()
    }

    /// Whether all ranks have ended, with or without an error, and no message for them is
    /// outstanding.
    pub(crate) fn is_over(&self) -> bool {
        self.present == 0 && self.leaving.is_empty()
    }

    /// Ends the world with `error`, unless it has failed.
    fn fail(&mut self, error: CommError) -> Vec<Outgoing> {
        if self.failure.is_some() || self.pending.is_some() {
            return Vec::new();
        }
        let error = bounded(error);
        self.failure = Some(error.clone());
        self.leaving.clear();
        vec![Outgoing::All(Message::Failed { error })]
    }

    /// Requests calls for the error of a failure, unless the world has failed.
    fn ask(
        &mut self,
        asked: usize,
        context: Context,
        calls: Range<u64>,
        cause: Cause,
    ) -> Vec<Outgoing> {
        if self.failure.is_some() || self.pending.is_some() {
            return Vec::new();
        }
        let request = Message::ShowCalls {
            context,
            from: calls.start,
            to: calls.end,
        };
        self.pending = Some(Pending {
            asked,
            context,
            calls,
            cause,
            ticks: 0,
        });
        vec![Outgoing::To(asked, request)]
    }

    /// Ends the world without the call that was requested, for `reason`.
    fn give_up(&mut self, reason: &str) -> Vec<Outgoing> {
        let Some(Pending {
            asked,
            context,
            calls,
            cause,
            ..
        }) = self.pending.take()
        else {
            return Vec::new();
        };

        let first = self.groups.get(&context).map_or(0, |group| group.ranks[0]);
        let error = match cause {
            Cause::Difference => {
                let message = format!(
                    "one of its collectives {} to {} of communicator {context} differs from rank {first}'s, and it did \
                     not report which: {reason}",
                    calls.start,
                    calls.end - 1
                );
                CommError::Peer {
                    rank: asked,
                    message,
                }
            }
            Cause::Gone { rank, how } => {
                let message = match how {
                    Gone::Lost(message) => message,
                    Gone::Left { done } => format!(
                        "left communicator {context} after {done} collectives, before those of other ranks"
                    ),
                };
                CommError::Peer { rank, message }
            }
        };

        self.fail(error)
    }

    /// A communicator with `rank` as a member, and its index.
    fn member(&mut self, rank: usize, context: Context) -> Option<(&mut Group, usize)> {
        let group = self.groups.get_mut(&context)?;
        let index = *group.indices.get(&rank)?;
        Some((group, index))
    }

    /// Handles a message from `rank`.
    pub(crate) fn receive(&mut self, rank: usize, message: Message) -> Vec<Outgoing> {
        match message {
            Message::Goodbye => self.goodbye(rank),
            Message::Alive => Vec::new(),
            _ if self.failure.is_some() => Vec::new(),
            Message::Calls {
                context,
                from,
                calls,
            } => self.calls(rank, context, from, calls),
            Message::Progress {
                context,
                called,
                hash,
                reached,
                ended,
            } => self.progress(rank, context, (called, hash), reached, ended),
            Message::Hash {
                context,
                count,
                hash,
            } => self.hash(rank, context, count, hash),
            Message::Late {
                context,
                sequence,
                call,
                limit,
            } => {
                let error = self.late(rank, context, sequence, call, limit);
                self.fail(error)
            }
            Message::Failed { error } => self.fail(error),
            Message::Split {
                context,
                number,
                request,
            } => self.split(rank, context, number, request),
            Message::LateSplit {
                context,
                number,
                limit,
            } => {
                let absent = self.absent_from(context, number).unwrap_or(rank);
                let message = format!(
                    "did not join split {number} of communicator {context} within {limit:?}"
                );
                self.fail(CommError::Peer {
                    rank: absent,
                    message,
                })
            }
            Message::Left { context, done } => self.left(rank, context, done),
            Message::Welcome { .. }
            | Message::Refused { .. }
            | Message::ShowCalls { .. }
            | Message::Agreed { .. }
            | Message::Placed { .. } => {
                let message = "sent a message that only the coordinator sends".to_owned();
                self.fail(CommError::Peer { rank, message })
            }
        }
    }

    /// To be called once a second. Returns the agreements, failures and answers that are due.
    pub(crate) fn tick(&mut self) -> Vec<Outgoing> {
        let mut outgoing = Vec::new();
        self.ticks += 1;
        let is_due = self.ticks >= self.agreement_ticks;
        if is_due {
            self.ticks = 0;
        }

        for (&context, group) in &mut self.groups {
            if let Some(agreed) = group.settle(context, is_due) {
                outgoing.extend(group.send(agreed, self.world_size));
            }
        }

        if let Some(pending) = &mut self.pending {
            pending.ticks += 1;
            if pending.ticks > ANSWER_TICKS {
                outgoing
                    .extend(self.give_up(&format!("it did not answer within {ANSWER_TICKS} s")));
            }
        }

        self.leaving.iter_mut().for_each(|(_, ticks)| *ticks += 1);
        outgoing.extend(self.answer_goodbyes());
        outgoing
    }

    /// Handles calls of the communicator's first rank, or calls that the coordinator requested.
    fn calls(
        &mut self,
        rank: usize,
        context: Context,
        from: u64,
        calls: Vec<Call>,
    ) -> Vec<Outgoing> {
        let Some((group, index)) = self.member(rank, context) else {
            return Vec::new();
        };
        if index > 0 {
            return self.answered(rank, context, from, calls);
        }
        let expected = group.calls.count();

        if from != expected {
            let message = format!(
                "sent its calls from {from} of communicator {context} instead of {expected}"
            );
            return self.fail(CommError::Peer { rank, message });
        }

        for call in calls {
            if matches!(&call.segments, Segments::Uneven(counts) if counts.len() != group.ranks.len())
            {
                let message = format!(
                    "called {call} on communicator {context} of {} ranks",
                    group.ranks.len()
                );
                return self.fail(CommError::Peer { rank, message });
            }
            group.calls.push(call);
        }

        if group.calls.kept_bytes() > MAX_CALL_BYTES {
            let error = group.farthest_behind(context);
            return self.fail(error);
        }

        group.members[0].agreed = group.calls.count();
        let mut difference = None;
        while let Some((index, differing)) = group.compare_next() {
            difference = difference.or(differing.map(|calls| (group.ranks[index], calls)));
        }

        match difference {
            Some((rank, calls)) => self.ask(rank, context, calls, Cause::Difference),
            None => Vec::new(),
        }
    }

    /// Handles calls of a rank that is not the first.
    fn answered(
        &mut self,
        rank: usize,
        context: Context,
        from: u64,
        calls: Vec<Call>,
    ) -> Vec<Outgoing> {
        let Some(pending) = &mut self.pending else {
            return Vec::new();
        };
        let Some(group) = self.groups.get(&context) else {
            return Vec::new();
        };
        if (pending.asked, pending.context, pending.calls.start) != (rank, context, from) {
            return Vec::new();
        }

        for call in calls {
            let sequence = pending.calls.start;
            let error = match &pending.cause {
                Cause::Gone { rank, how } => how.error(*rank, sequence, call),
                Cause::Difference => {
                    pending.calls.start += 1;
                    match group.calls.get(sequence) {
                        Some(other) if *other != call => {
                            let (other_rank, other_call) =
                                (group.ranks[0], Box::new(other.clone()));
                            CommError::Mismatch {
                                sequence,
                                rank,
                                call: Box::new(call),
                                other_rank,
                                other_call,
                            }
                        }
                        _ if pending.calls.is_empty() => {
                            let message = format!(
                                "sent a hash of its calls of communicator {context} that does not match them"
                            );
                            CommError::Peer { rank, message }
                        }
                        _ => continue,
                    }
                }
            };
            self.pending = None;
            return self.fail(error);
        }

        Vec::new()
    }

    fn progress(
        &mut self,
        rank: usize,
        context: Context,
        (called, hash): (u64, u64),
        reached: u64,
        ended: u64,
    ) -> Vec<Outgoing> {
        let Some((group, index)) = self.member(rank, context) else {
            return Vec::new();
        };
        let member = &mut group.members[index];
        (member.reached, member.ended) = (member.reached.max(reached), member.ended.max(ended));
        if called <= member.called {
            return Vec::new();
        }
        (member.called, member.hash) = (called, hash);
        group.most_called = group.most_called.max(called);
        if let Some(calls) = group.compare(index) {
            return self.ask(rank, context, calls, Cause::Difference);
        }
        match group.first_left {
            Some((done, index)) if done < called => self.left_early(context, index, done),
            _ => Vec::new(),
        }
    }

    /// Compares the calls of a rank that is ahead of the first, as far as the first has come: it
    /// may never come further, if differing calls made it wait for ever.
    fn hash(&mut self, rank: usize, context: Context, count: u64, hash: u64) -> Vec<Outgoing> {
        let Some((group, index)) = self.member(rank, context) else {
            return Vec::new();
        };
        let member = &mut group.members[index];
        if count <= member.agreed || count > member.called || count > group.calls.count() {
            return Vec::new();
        }
        let calls = member.agreed..count;
        if group.calls.hash_of_first(count) != Some(hash) {
            return self.ask(rank, context, calls, Cause::Difference);
        }
        member.agreed = count;
        Vec::new()
    }

    /// Ends the world because a member dropped the communicator before collective `done`, which
    /// others called.
    fn left_early(&mut self, context: Context, index: usize, done: u64) -> Vec<Outgoing> {
        let left = Gone::Left { done };
        self.fail_gone(context, index, done, left)
            .unwrap_or_default()
    }

    /// Ends the world because of the member `index` of a communicator. `None` if no rank can report
    /// the call.
    fn fail_gone(
        &mut self,
        context: Context,
        index: usize,
        sequence: u64,
        how: Gone,
    ) -> Option<Vec<Outgoing>> {
        let group = self.groups.get(&context)?;
        let rank = group.ranks[index];
        if let Some(call) = group.calls.get(sequence) {
            let error = how.error(rank, sequence, call.clone());
            return Some(self.fail(error));
        }
        let can_answer = |&i: &usize| {
            i != index && group.members[i].called > sequence && !self.gone[group.ranks[i]]
        };
        let asked = group.ranks[(0..group.members.len()).find(can_answer)?];
        let cause = Cause::Gone { rank, how };
        Some(self.ask(asked, context, sequence..sequence + 1, cause))
    }

    fn late(
        &self,
        rank: usize,
        context: Context,
        sequence: u64,
        call: Call,
        limit: Duration,
    ) -> CommError {
        let Some(group) = self.groups.get(&context) else {
            let message = format!("waits in communicator {context}, which does not exist");
            return CommError::Peer { rank, message };
        };

        let stalled = |count: &dyn Fn(&Member) -> u64| {
            let index = group
                .members
                .iter()
                .position(|member| count(member) <= sequence)?;
            let rank = group.ranks[index];
            let done = count(&group.members[index]);
            Some(CommError::Stalled {
                sequence,
                call: Box::new(call.clone()),
                rank,
                limit,
                done,
            })
        };

        stalled(&|member| member.called).or_else(|| stalled(&|member| member.reached)).unwrap_or_else(|| {
            let message =
                format!("collective {sequence}, {call}: all ranks reached it, but it did not end within {limit:?}");
            CommError::Peer { rank, message }
        })
    }

    fn left(&mut self, rank: usize, context: Context, done: u64) -> Vec<Outgoing> {
        let pending = self
            .pending
            .as_ref()
            .is_some_and(|pending| pending.context == context);
        let world_size = self.world_size;
        let Some((group, index)) = self.member(rank, context) else {
            return Vec::new();
        };
        if group.members[index].left.replace(done).is_none() {
            group.left += 1;
        }
        let left = (done, index);
        group.first_left = Some(group.first_left.map_or(left, |first| first.min(left)));
        if group.most_called > done {
            return self.left_early(context, index, done);
        }

        if group.split.is_some() {
            let error = left_before(rank, context, group.splits);
            return self.fail(error);
        }

        if group.left < group.ranks.len() || pending {
            return Vec::new();
        }
        let agreed = group.settle(context, true);
        let outgoing = agreed
            .map(|agreed| group.send(agreed, world_size))
            .unwrap_or_default();
        self.groups.remove(&context);

        outgoing
    }

    /// Answers at once if all calls of the rank were compared, so that it is not needed any more.
    /// The coordinator ends with rank 0's process, which waits for the other ranks.
    fn goodbye(&mut self, rank: usize) -> Vec<Outgoing> {
        if !self.set_gone(rank) || self.failure.is_some() {
            return Vec::new();
        }
        let is_agreed = |group: &Group| {
            let member = group.indices.get(&rank).map(|&index| &group.members[index]);
            member.is_none_or(|member| member.agreed == member.called)
        };
        if rank > 0 && self.present > 0 && self.groups.values().all(is_agreed) {
            return vec![Outgoing::To(rank, Message::Goodbye)];
        }
        self.leaving.push((rank, 0));
        self.answer_goodbyes()
    }

    /// Returns whether the rank was present.
    fn set_gone(&mut self, rank: usize) -> bool {
        let was_present = !std::mem::replace(&mut self.gone[rank], true);
        self.present -= usize::from(was_present);
        was_present
    }

    /// Answers all goodbyes when all ranks have said theirs; else those that have waited for long
    /// enough.
    fn answer_goodbyes(&mut self) -> Vec<Outgoing> {
        if self.pending.is_some() {
            // The failure that is certain must reach the ranks before they end.
            return Vec::new();
        }
        let all = self.present == 0;
        let is_due = |ticks: u32| all || ticks >= GOODBYE_TICKS;
        if self
            .leaving
            .iter()
            .any(|&(rank, ticks)| is_due(ticks) && (rank == 0 || all))
        {
            self.leaving.clear();
            return vec![Outgoing::All(Message::Goodbye)];
        }
        let due = self.leaving.extract_if(.., |&mut (_, ticks)| is_due(ticks));
        due.map(|(rank, _)| Outgoing::To(rank, Message::Goodbye))
            .collect()
    }

    /// Handles the loss of the connection to `rank`; `cause` describes it.
    pub(crate) fn lost(&mut self, rank: usize, cause: String) -> Vec<Outgoing> {
        self.leaving.retain(|&(leaving, _)| leaving != rank);
        let was_present = self.set_gone(rank);
        if self
            .pending
            .as_ref()
            .is_some_and(|pending| pending.asked == rank)
        {
            return self.give_up(&cause);
        }
        if !was_present || self.failure.is_some() || self.pending.is_some() {
            return Vec::new();
        }
        // The oldest collective in which other ranks may wait for it.
        let contexts: Vec<Context> = self.groups.keys().copied().collect();

        for context in contexts {
            let Some((group, index)) = self.member(rank, context) else {
                continue;
            };
            let sequence = group.members[index].ended;
            if group.members[index].left.is_none() && group.most_called > sequence {
                let lost = Gone::Lost(cause.clone());
                if let Some(outgoing) = self.fail_gone(context, index, sequence, lost) {
                    return outgoing;
                }
            }
        }

        self.fail(CommError::Peer {
            rank,
            message: cause,
        })
    }

    /// Records a rank's part of split `number` of a communicator; the last rank's part makes the
    /// new communicators.
    fn split(
        &mut self,
        rank: usize,
        context: Context,
        number: u64,
        request: SplitRequest,
    ) -> Vec<Outgoing> {
        let Some((group, index)) = self.member(rank, context) else {
            return Vec::new();
        };
        if let Some((_, gone)) = group.first_left {
            let error = left_before(group.ranks[gone], context, number);
            return self.fail(error);
        }

        let joined = group
            .split
            .as_ref()
            .is_some_and(|split| split.requests[index].is_some());

        if number != group.splits || joined {
            let next = group.splits + u64::from(joined);
            let message = format!(
                "called split {number} of communicator {context} where its next one is {next}, after all ranks have \
                 joined those before"
            );
            return self.fail(CommError::Peer { rank, message });
        }

        let n = group.ranks.len();
        let split = group.split.get_or_insert_with(|| Split {
            requests: vec![None; n],
            absent: n,
        });

        split.requests[index] = Some(request);
        split.absent -= 1;
        if split.absent > 0 {
            return Vec::new();
        }

        group.splits += 1;
        let requests = group.split.take().map(|split| split.requests);
        let requests: Vec<_> = requests.unwrap_or_default().into_iter().flatten().collect();
        let ranks = group.ranks.clone();
        let places = self.make_groups(&ranks, &requests);

        let send = |(rank, place)| {
            Outgoing::To(
                rank,
                Message::Placed {
                    context,
                    number,
                    place,
                },
            )
        };

        ranks.into_iter().zip(places).map(send).collect()
    }

    /// Makes the communicators of a split, in ascending order of color. Returns the places of its
    /// ranks.
    fn make_groups(&mut self, ranks: &[usize], requests: &[SplitRequest]) -> Vec<Option<Place>> {
        let mut places = vec![None; ranks.len()];
        let of_color = requests
            .iter()
            .enumerate()
            .filter_map(|(index, request)| Some((request.color?, request.key, index)));
        let mut order: Vec<(u64, u64, usize)> = of_color.collect();
        order.sort_unstable();

        for members in order.chunk_by(|(a, ..), (b, ..)| a == b) {
            let context = self.next_context;
            for (rank, &(.., index)) in members.iter().enumerate() {
                places[index] = Some(Place {
                    context,
                    rank,
                    size: members.len(),
                });
            }
            self.groups.insert(
                context,
                Group::new(members.iter().map(|&(.., index)| ranks[index]).collect()),
            );
            self.next_context += 1;
        }

        places
    }

    /// The first rank that has not joined a split.
    fn absent_from(&self, context: Context, number: u64) -> Option<usize> {
        let group = self.groups.get(&context)?;
        let split = group.split.as_ref().filter(|_| group.splits == number)?;
        let absent = split.requests.iter().position(Option::is_none)?;
        Some(group.ranks[absent])
    }
}

fn left_before(rank: usize, context: Context, number: u64) -> CommError {
    CommError::Peer {
        rank,
        message: format!("left communicator {context} before its split {number}"),
    }
}

#[cfg(test)]
mod tests;
