//! The oracle of the property test sees all calls of all ranks. Ranks make calls, report, answer
//! requests, split, leave and end in any order; messages between a rank and the coordinator stay in
//! order, and arrive at any time.

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
    /// A world that is split into two communicators in reverse order of ranks, and an equal copy of
    /// the world.
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
                let split = split(number, Some(rank as u64 % colors), (n - rank) as u64);
                let outgoing = simulation.coordinator.receive(rank, split);
                simulation.send(outgoing);
            }
            for color in 0..colors.min(n as u64) as usize {
                let members = (0..n)
                    .rev()
                    .filter(|rank| rank % colors as usize == color)
                    .collect();
                simulation.members.push(members);
            }
        }

        for (context, members) in (0..).zip(&simulation.members) {
            for &rank in members {
                simulation
                    .logs
                    .insert((rank, context), Log::new(rank == members[0]));
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
                    self.to_rank
                        .iter_mut()
                        .for_each(|queue| queue.push_back(message.clone()));
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
                let Some(members) = self.members.get(context as usize) else {
                    return;
                };
                let all = members
                    .iter()
                    .map(|&rank| self.made[&(rank, context)].len())
                    .min()
                    .unwrap();
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
                // Its earlier messages arrive first.
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
                let calls = self.logs[&(rank, context)]
                    .calls
                    .messages(context, from..to);
                assert!(
                    !calls.is_empty(),
                    "rank {rank} has dropped calls {from}..{to} of {context}"
                );
                self.to_coordinator[rank].extend(calls);
            }
            Some(Message::Agreed {
                context,
                count,
                first,
            }) => {
                for rank in &self.members[context as usize] {
                    let made = &self.made[&(*rank, context)][..count as usize];
                    assert_eq!(
                        made,
                        &self.made[&(self.members[context as usize][0], context)][..count as usize]
                    );
                }
                let answer = self
                    .logs
                    .get_mut(&(rank, context))
                    .unwrap()
                    .agreed(context, count, first);
                self.to_coordinator[rank].extend(answer);
            }
            _ => {}
        }
    }

    fn finish(&mut self) {
        let n = self.to_rank.len();
        (0..n).for_each(|rank| self.step(Step::Report, rank, 0));
        self.deliver_all();
        // The first rank calls nothing between two ticks; then ranks ahead of it report their
        // hashes.
        for _ in 0..3 {
            self.step(Step::Tick, 0, 0);
            self.deliver_all();
        }
    }

    fn deliver_all(&mut self) {
        let n = self.to_rank.len();
        while (0..n)
            .any(|rank| !self.to_coordinator[rank].is_empty() || !self.to_rank[rank].is_empty())
        {
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
        let a = &self.made[&(a, context)];
        let b = &self.made[&(b, context)];
        a.iter()
            .zip(b)
            .position(|(a, b)| a != b)
            .map(|sequence| sequence as u64)
    }

    /// Checks a failure against all calls.
    fn check(&self, error: &CommError) {
        let call_of = |rank: usize, context: Context, sequence: u64| {
            self.made
                .get(&(rank, context))
                .and_then(|made| made.get(sequence as usize))
        };

        let contexts = || 0..self.members.len() as Context;
        let n = self.to_rank.len();
        let holds = match error {
            CommError::Mismatch {
                sequence,
                rank,
                call,
                other_rank,
                other_call,
            } => contexts().any(|context| {
                self.members[context as usize].contains(rank)
                    && self.members[context as usize].contains(other_rank)
                    && self.first_difference(*rank, *other_rank, context) == Some(*sequence)
                    && call_of(*rank, context, *sequence) == Some(call)
                    && call_of(*other_rank, context, *sequence) == Some(other_call)
            }),
            CommError::Left {
                sequence,
                call,
                rank,
                done,
            } => contexts().any(|context| {
                let caller = (0..n).any(|rank| call_of(rank, context, *sequence) == Some(call));
                let made = self.made.get(&(*rank, context)).map_or(0, Vec::len) as u64;
                let left =
                    self.left.contains(&(*rank, context)) && made == *done && done == sequence;
                caller && left
            }),
            CommError::Lost {
                sequence,
                call,
                rank,
                ..
            } => contexts().any(|context| {
                let caller = (0..n).any(|rank| call_of(rank, context, *sequence) == Some(call));
                caller && self.lost.contains(rank)
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
            let left = members
                .iter()
                .filter(|&&rank| self.left.contains(&(rank, context)))
                .count();
            assert_eq!(
                self.coordinator.groups.contains_key(&context),
                left < members.len()
            );
            if left > 0 {
                continue;
            }
            let called = |rank: usize| self.made[&(rank, context)].len() as u64;
            let agreed = members.iter().map(|&rank| called(rank)).min().unwrap();
            let ended = members
                .iter()
                .map(|&rank| self.logs[&(rank, context)].ended)
                .min()
                .unwrap();
            let kept = self.coordinator.groups[&context].calls.kept() as u64;
            assert_eq!(
                kept,
                called(members[0]) - agreed.min(ended),
                "the coordinator keeps calls"
            );
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
    let factor = std::env::var("ZERO_PROPTEST_FACTOR")
        .ok()
        .and_then(|f| f.parse().ok())
        .unwrap_or(1);
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
