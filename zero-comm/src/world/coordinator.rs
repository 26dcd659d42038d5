//! The coordinator's state machine: compares the calls of all ranks and determines the failure of
//! the world.
//!
//! It runs in rank 0's process, performs no I/O, reads no clock and never accesses the data of
//! collectives. The first failure is final, and every rank receives it. It names
//!
//! - both ranks, if the calls at which they are differ, or calls before;
//! - the rank whose connection ended without a goodbye, or was silent for too long;
//! - the rank that dropped a communicator on which others still call collectives;
//! - if a collective exceeds its limit: the first rank that has not called it; else the first whose
//!   stream has not reached it; else the rank that reported it.
//!
//! A rank reports its [`Progress`]: the call at which it is and a few before, each with a hash of
//! all calls up to it. Where its report and that of the communicator's first rank have a call of one
//! number, the hashes must be equal. Ranks that hang or pause are at the same calls, so they are
//! compared at once; ranks that go on are compared when two reports meet. Only each rank's latest
//! report is kept.
//!
//! Pairs of counts of an all-to-all, which differ by rank and are not hashed, are compared between
//! all ranks of a communicator that is so small that reports contain them.
//!
//! Otherwise only a report of a communicator's first rank costs more the more ranks there are.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::handshake::Hello;
use super::message::{Context, Message, Progress, SplitRank, bounded};
use crate::call::{Call, Counts};
use crate::split_request::SplitRequest;
use crate::{CommError, RendezvousError};

/// Ticks after which rank 0's goodbye is answered although other ranks have not said theirs.
const GOODBYE_TICKS: u32 = 2;
/// Ticks without a message to a rank, or from it, after which a keepalive is due.
pub(crate) const KEEPALIVE_TICKS: u32 = 4;

/// The time between two reports of a rank's progress.
pub(crate) fn report_every(world_size: usize) -> Duration {
    let every = Duration::from_millis(1).saturating_mul(world_size.try_into().unwrap_or(u32::MAX));
    every.clamp(Duration::from_millis(10), Duration::from_secs(1))
}

/// A rank of a communicator.
#[derive(Clone, Debug, Default)]
struct Member {
    /// Its latest report; `None` before its first call.
    progress: Option<Progress>,
    /// The number of first calls that were compared with the first rank's, and are equal.
    agreed: u64,
    has_left: bool,
}

impl Member {
    /// A number of calls of its progress.
    fn count(&self, of: fn(&Progress) -> u64) -> u64 {
        self.progress.as_ref().map_or(0, of)
    }
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
    /// The number of the latest call at which a member is, and its index.
    latest: Option<(u64, usize)>,
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
            latest: None,
            left: 0,
            first_left: None,
            splits: 0,
            split: None,
        }
    }

    /// Records a report of `index`. Returns the failure that it shows.
    fn report(&mut self, index: usize, progress: Progress) -> Option<CommError> {
        let at = (progress.number(), index);
        self.latest = Some(self.latest.map_or(at, |latest| latest.max(at)));
        self.members[index].progress = Some(progress);
        let fault = self.compare(index).or_else(|| self.unmatched(index));
        fault.or_else(|| self.left_early())
    }

    /// Compares the pairs of counts of `index` with those of the others, at the call at which the
    /// one that is behind is.
    fn unmatched(&self, index: usize) -> Option<CommError> {
        let own = self.members[index].progress.as_ref()?;
        let has_pairs = |(call, _): &(Call, u64)| matches!(call.segments, Counts::Pairs(_));
        if !own.recent.iter().any(has_pairs) {
            return None;
        }
        (0..self.members.len()).find_map(|other| {
            let theirs = self.members[other].progress.as_ref()?;
            let sequence = own.number().min(theirs.number());
            let (call, hash) = own.recent(sequence)?;
            let (their_call, their_hash) = theirs.recent(sequence)?;
            let calls = [call, their_call];
            let ranks = [index, other];
            let named = ranks.map(|index| self.ranks[index]);
            let is_same = hash == their_hash;
            is_same.then(|| Call::unmatched(sequence, calls, ranks, named))?
        })
    }

    /// Compares the call at which `index` is with the first rank's; if it is the first rank, with
    /// those of all others.
    fn compare(&mut self, index: usize) -> Option<CommError> {
        let first = self.members[0].progress.clone()?;
        let others = if index == 0 {
            1..self.members.len()
        } else {
            index..index + 1
        };

        for index in others {
            let member = &mut self.members[index];
            let Some(other) = &member.progress else {
                continue;
            };
            let last = first.number().min(other.number());
            for sequence in last.saturating_sub(Progress::BEFORE)..=last {
                let both = other.recent(sequence).zip(first.recent(sequence));
                let Some(((call, hash), (first_call, first_hash))) = both else {
                    continue;
                };
                if hash != first_hash {
                    let calls = [call, first_call].map(|call| Box::new(call.clone()));
                    return Some(self.difference(index, sequence, calls));
                }
                member.agreed = member.agreed.max(sequence + 1);
            }
        }

        None
    }

    /// The error of the member `index`, whose hash of the calls up to `sequence` differs from the
    /// first rank's; the two called `calls` there.
    fn difference(&self, index: usize, sequence: u64, calls: [Box<Call>; 2]) -> CommError {
        let rank = self.ranks[index];
        let other_rank = self.ranks[0];
        let agreed = self.members[index].agreed;
        let [call, other_call] = calls;

        // A call before, which was not compared, may be the first that differs.
        if agreed < sequence || call == other_call {
            return CommError::Diverged {
                sequence,
                rank,
                call,
                other_rank,
                other_call,
                agreed,
            };
        }

        CommError::Mismatch {
            sequence,
            rank,
            call,
            other_rank,
            other_call,
        }
    }

    /// The failure if a member is at a call that one that has left did not make.
    fn left_early(&self) -> Option<CommError> {
        let (done, gone) = self.first_left?;
        let (sequence, call) = self.waiting_at(done)?;
        Some(CommError::Left {
            sequence,
            call: Box::new(call),
            rank: self.ranks[gone],
            done,
        })
    }

    /// The latest call at which a member is, if it is number `sequence` or a later one.
    fn waiting_at(&self, sequence: u64) -> Option<(u64, Call)> {
        let (number, index) = self.latest.filter(|&(number, _)| number >= sequence)?;
        let (call, _) = self.members[index].progress.as_ref()?.recent(number)?;
        Some((number, call.clone()))
    }

    /// The oldest call in which others may wait for `index`, which was lost.
    fn waits_for(&self, index: usize) -> Option<(u64, Call)> {
        let member = &self.members[index];
        if member.has_left {
            return None;
        }
        let own = member.progress.as_ref();
        let own = own.and_then(|own| Some((own.ended, own.recent(own.ended)?.0.clone())));
        own.or_else(|| self.waiting_at(member.count(|progress| progress.ended)))
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
    /// Ticks since rank 0's goodbye, which has not been answered: the coordinator ends with its
    /// process.
    leaving: Option<u32>,
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
            leaving: None,
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
        self.present == 0 && self.leaving.is_none()
    }

    /// Ends the world with `error`, unless it has failed.
    fn fail(&mut self, error: CommError) -> Vec<Outgoing> {
        if self.failure.is_some() {
            return Vec::new();
        }
        let error = bounded(error);
        self.failure = Some(error.clone());
        self.leaving = None;
        vec![Outgoing::All(Message::Failed { error })]
    }

    fn fail_peer(&mut self, rank: usize, message: String) -> Vec<Outgoing> {
        self.fail(CommError::Peer { rank, message })
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
            Message::Progress { context, progress } => self.progress(rank, context, progress),
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
                self.fail_peer(absent, message)
            }
            Message::Left { context, done } => self.left(rank, context, done),
            Message::Welcome { .. } | Message::Refused { .. } | Message::Placed { .. } => {
                let message = "sent a message that only the coordinator sends".to_owned();
                self.fail_peer(rank, message)
            }
        }
    }

    /// To be called once a second. Returns the goodbyes that are due.
    pub(crate) fn tick(&mut self) -> Vec<Outgoing> {
        let Some(ticks) = &mut self.leaving else {
            return Vec::new();
        };
        *ticks += 1;
        if *ticks < GOODBYE_TICKS {
            return Vec::new();
        }
        self.leaving = None;
        vec![Outgoing::All(Message::Goodbye)]
    }

    fn progress(&mut self, rank: usize, context: Context, progress: Progress) -> Vec<Outgoing> {
        let Some((group, index)) = self.member(rank, context) else {
            return Vec::new();
        };
        let member = &group.members[index];
        let called = member.count(|progress| progress.called);
        let ended = member.count(|progress| progress.ended);
        if progress.called < called || progress.ended < ended {
            return Vec::new();
        }
        match group.report(index, progress) {
            Some(error) => self.fail(error),
            None => Vec::new(),
        }
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

        let stalled = |of: fn(&Progress) -> u64| {
            let index = group
                .members
                .iter()
                .position(|member| member.count(of) <= sequence)?;
            Some(CommError::Stalled {
                sequence,
                call: Box::new(call.clone()),
                rank: group.ranks[index],
                limit,
                done: group.members[index].count(of),
            })
        };

        let named = stalled(|progress| progress.called);
        let named = named.or_else(|| stalled(|progress| progress.reached));
        named.unwrap_or_else(|| {
            let message =
                format!("collective {sequence}, {call}: all ranks reached it, but it did not end within {limit:?}");
            CommError::Peer { rank, message }
        })
    }

    fn left(&mut self, rank: usize, context: Context, done: u64) -> Vec<Outgoing> {
        let Some((group, index)) = self.member(rank, context) else {
            return Vec::new();
        };
        if !std::mem::replace(&mut group.members[index].has_left, true) {
            group.left += 1;
        }
        let left = (done, index);
        group.first_left = Some(group.first_left.map_or(left, |first| first.min(left)));

        if let Some(error) = group.left_early() {
            return self.fail(error);
        }
        if group.split.is_some() {
            let error = left_before(rank, context, group.splits);
            return self.fail(error);
        }
        if group.left == group.ranks.len() {
            self.groups.remove(&context);
        }

        Vec::new()
    }

    /// Answers at once, but rank 0 only when all ranks have said goodbye: the coordinator ends with
    /// rank 0's process.
    fn goodbye(&mut self, rank: usize) -> Vec<Outgoing> {
        if !self.set_gone(rank) || self.failure.is_some() {
            return Vec::new();
        }
        if self.present == 0 {
            self.leaving = None;
            return vec![Outgoing::All(Message::Goodbye)];
        }
        if rank == 0 {
            self.leaving = Some(0);
            return Vec::new();
        }
        vec![Outgoing::To(rank, Message::Goodbye)]
    }

    /// Returns whether the rank was present.
    fn set_gone(&mut self, rank: usize) -> bool {
        let was_present = !std::mem::replace(&mut self.gone[rank], true);
        self.present -= usize::from(was_present);
        was_present
    }

    /// Handles the loss of the connection to `rank`; `message` describes it.
    pub(crate) fn lost(&mut self, rank: usize, message: String) -> Vec<Outgoing> {
        if rank == 0 {
            self.leaving = None;
        }
        if !self.set_gone(rank) {
            return Vec::new();
        }

        let waits = self.groups.values().find_map(|group| {
            let index = *group.indices.get(&rank)?;
            group.waits_for(index)
        });
        match waits {
            Some((sequence, call)) => self.fail(CommError::Lost {
                sequence,
                call: Box::new(call),
                rank,
                message,
            }),
            None => self.fail_peer(rank, message),
        }
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
            return self.fail_peer(rank, message);
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
    fn make_groups(
        &mut self,
        ranks: &[usize],
        requests: &[SplitRequest],
    ) -> Vec<Option<SplitRank>> {
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
                places[index] = Some(SplitRank {
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
