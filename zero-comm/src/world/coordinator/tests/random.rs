//! The oracle of the property tests sees all calls of all ranks. Ranks make calls, report, leave and
//! end in any order; messages of a rank stay in order, and arrive at any time. A call ends when all
//! ranks have made it and are equal in it.

use std::collections::{BTreeSet, VecDeque};

use proptest::prelude::*;

use super::*;

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Makes this many calls.
    Call(u64),
    /// The stream ends all calls that can end.
    End,
    Report,
    /// A message of the rank arrives at the coordinator.
    Arrive,
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
    calls: BTreeMap<(usize, Context), Calls>,
    /// Calls that differ, by rank, communicator and number.
    differing: BTreeSet<(usize, Context, u64)>,
    to_coordinator: Vec<VecDeque<Message>>,
    lost: BTreeSet<usize>,
    left: BTreeSet<(usize, Context)>,
    failure: Option<CommError>,
}

impl Simulation {
    /// A world that is split into two communicators in reverse order of ranks, and an equal copy of
    /// the world.
    fn new(n: usize, differing: BTreeSet<(usize, Context, u64)>) -> Self {
        let mut coordinator = Coordinator::new(n, 23_007);
        let mut members: Vec<Vec<usize>> = vec![(0..n).collect()];
        for (number, colors) in (0..).zip([2, 1]) {
            for rank in 0..n {
                let split = split(number, Some(rank as u64 % colors), (n - rank) as u64);
                coordinator.receive(rank, split);
            }
            for color in 0..colors.min(n as u64) {
                let has_color = |rank: &usize| *rank as u64 % colors == color;
                members.push((0..n).rev().filter(has_color).collect());
            }
        }

        let places = (0..).zip(&members).flat_map(|(context, members)| {
            members
                .iter()
                .map(move |&rank| ((rank, context), Calls::default()))
        });
        Self {
            coordinator,
            calls: places.collect(),
            members,
            differing,
            to_coordinator: vec![VecDeque::new(); n],
            lost: BTreeSet::new(),
            left: BTreeSet::new(),
            failure: None,
        }
    }

    fn handle(&mut self, outgoing: Vec<Outgoing>) {
        for outgoing in outgoing {
            if let Outgoing::All(Message::Failed { error }) = outgoing {
                assert_eq!(self.failure, None, "a second failure");
                self.check(&error);
                self.failure = Some(error);
            }
        }
    }

    fn step(&mut self, step: Step, rank: usize, context: Context) {
        let place = (rank, context);
        match step {
            Step::Tick => {
                let outgoing = self.coordinator.tick();
                self.handle(outgoing);
            }
            Step::Arrive => {
                if let Some(message) = self.to_coordinator[rank].pop_front() {
                    let outgoing = self.coordinator.receive(rank, message);
                    self.handle(outgoing);
                }
            }
            _ if self.lost.contains(&rank) => {}
            Step::Lose => {
                // Its earlier messages arrive first.
                while !self.to_coordinator[rank].is_empty() {
                    self.step(Step::Arrive, rank, context);
                }
                self.lost.insert(rank);
                let outgoing = self.coordinator.lost(rank, "gone".to_owned());
                self.handle(outgoing);
            }
            Step::Report => self.report(rank),
            _ if self.left.contains(&place) || !self.calls.contains_key(&place) => {}
            Step::Call(count) => {
                let made = &mut self.calls.get_mut(&place).unwrap().made;
                for _ in 0..count {
                    let number = made.len();
                    let differs = self.differing.contains(&(rank, context, number as u64));
                    made.push(broadcast(number % 3 + if differs { 10 + rank } else { 0 }));
                }
            }
            Step::End => {
                let ended = self.common(context);
                let calls = self.calls.get_mut(&place).unwrap();
                calls.reached = ended;
                calls.ended = ended;
            }
            Step::Leave => {
                self.report(rank);
                self.left.insert(place);
                let done = self.calls[&place].made.len() as u64;
                self.to_coordinator[rank].push_back(Message::Left { context, done });
            }
        }
    }

    fn report(&mut self, rank: usize) {
        for (&(_, context), calls) in self.calls.iter().filter(|((of, _), _)| *of == rank) {
            let is_open = !self.left.contains(&(rank, context));
            let progress = calls.progress().filter(|_| is_open);
            let message = progress.map(|progress| Message::Progress { context, progress });
            self.to_coordinator[rank].extend(message);
        }
    }

    /// All calls end that can, and all messages arrive.
    fn finish(&mut self) {
        for rank in 0..self.to_coordinator.len() {
            for context in 0..self.members.len() as Context {
                self.step(Step::End, rank, context);
            }
            self.step(Step::Report, rank, 0);
            while !self.to_coordinator[rank].is_empty() {
                self.step(Step::Arrive, rank, 0);
            }
        }
    }

    fn made(&self, rank: usize, context: Context) -> &[Call] {
        self.calls
            .get(&(rank, context))
            .map_or(&[], |calls| &calls.made)
    }

    /// The number of first calls in which all members are equal.
    fn common(&self, context: Context) -> u64 {
        let members = &self.members[context as usize];
        let first = self.made(members[0], context);
        let is_common = |&number: &usize| {
            let call = first.get(number);
            let equal = |&rank: &usize| self.made(rank, context).get(number) == call;
            call.is_some() && members.iter().all(equal)
        };
        (0..).take_while(is_common).count() as u64
    }

    /// Checks a failure against all calls.
    fn check(&self, error: &CommError) {
        let holds = (0..self.members.len() as Context).any(|context| self.is_true(error, context));
        assert!(holds, "{error}: {self:#?}");
    }

    /// Whether an error is true of a communicator.
    fn is_true(&self, error: &CommError, context: Context) -> bool {
        let made = |rank: usize, sequence: u64, call: &Call| {
            self.made(rank, context).get(sequence as usize) == Some(call)
        };
        let is_made = |sequence, call| {
            let mut members = self.members[context as usize].iter();
            members.any(|&rank| made(rank, sequence, call))
        };
        let differ = |[a, b]: [usize; 2], agreed: u64, sequence: u64| {
            let [a, b] = [a, b].map(|rank| self.made(rank, context));
            let last = sequence as usize;
            let agreed = agreed as usize;
            a.get(..=last) != b.get(..=last) && a.get(..agreed) == b.get(..agreed)
        };

        match error {
            CommError::Mismatch {
                sequence,
                rank,
                call,
                other_rank,
                other_call,
            } => {
                differ([*rank, *other_rank], *sequence, *sequence)
                    && made(*rank, *sequence, call)
                    && made(*other_rank, *sequence, other_call)
            }
            CommError::Diverged {
                sequence,
                rank,
                call,
                other_rank,
                other_call,
                agreed,
            } => {
                differ([*rank, *other_rank], *agreed, *sequence)
                    && made(*rank, *sequence, call)
                    && made(*other_rank, *sequence, other_call)
            }
            CommError::Left {
                sequence,
                call,
                rank,
                done,
            } => {
                let has_left = self.left.contains(&(*rank, context));
                let count = self.made(*rank, context).len() as u64;
                has_left && count == *done && done <= sequence && is_made(*sequence, call)
            }
            CommError::Lost {
                sequence,
                call,
                rank,
                ..
            } => self.lost.contains(rank) && is_made(*sequence, call),
            CommError::Peer { rank, .. } => self.lost.contains(rank),
            _ => false,
        }
    }

    /// Checks the state after all messages were delivered: no communicator hangs in a difference, or
    /// waits for a rank that is gone.
    fn check_end(&self) {
        if self.failure.is_some() {
            return;
        }
        assert!(self.lost.is_empty(), "a lost rank is a failure");

        for (context, members) in (0..).zip(&self.members) {
            let left: Vec<_> = members
                .iter()
                .filter(|&&rank| self.left.contains(&(rank, context)))
                .collect();
            let is_open = self.coordinator.groups.contains_key(&context);
            assert_eq!(is_open, left.len() < members.len());

            let common = self.common(context) as usize;
            let at = |rank: usize| self.made(rank, context).get(common);
            let is_at = |rank: &&usize| !self.left.contains(&(**rank, context));
            let first = at(members[0]).filter(|_| is_at(&&members[0]));
            for &rank in members.iter().filter(is_at) {
                let is_equal = first.is_none() || at(rank).is_none() || at(rank) == first;
                assert!(is_equal, "rank {rank} differs: {self:#?}");
                let is_waiting = at(rank).is_some();
                let gone = left
                    .iter()
                    .any(|&&gone| self.made(gone, context).len() <= common);
                assert!(!(is_waiting && gone), "rank {rank} waits: {self:#?}");
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
    differing: BTreeSet<(usize, Context, u64)>,
    steps: Vec<(Step, usize, Context)>,
) -> Option<CommError> {
    let mut simulation = Simulation::new(n, differing);
    for (step, rank, context) in steps {
        let context = context % simulation.members.len() as Context;
        simulation.step(step, rank % n, context);
    }
    simulation.finish();
    simulation.check_end();
    simulation.failure
}

proptest! {
    #![proptest_config(cases(100))]

    #[test]
    fn equal_calls_never_fail(n in 1usize..6, steps in steps()) {
        prop_assert_eq!(run(n, BTreeSet::new(), steps), None);
    }

    #[test]
    fn differences_that_hang_are_named(
        n in 1usize..6,
        differing in prop::collection::btree_set((0usize..5, 0u32..4, 0u64..40), 1..4),
        steps in steps(),
    ) {
        let failure = run(n, differing, steps);
        let is_difference = matches!(
            failure,
            None | Some(CommError::Mismatch { .. } | CommError::Diverged { .. })
        );
        prop_assert!(is_difference, "{:?}", failure);
    }

    #[test]
    fn errors_are_true_when_ranks_leave_or_end(
        n in 1usize..6,
        differing in prop::collection::btree_set((0usize..5, 0u32..4, 0u64..40), 0..4),
        mut steps in steps(),
        ends in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>(), 0usize..5, 0u32..4), 0..6),
    ) {
        for (at, lost, rank, context) in ends {
            let step = if lost { Step::Lose } else { Step::Leave };
            steps.insert(at.index(steps.len() + 1), (step, rank, context));
        }
        run(n, differing, steps);
    }
}
