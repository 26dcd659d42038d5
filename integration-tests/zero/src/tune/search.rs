//! The search over configurations.
//!
//! A step takes no less than its passes, whatever else is sent: so candidates are tried in the order
//! of that bound, and the search ends at the first whose bound is slower than the last of the best. What it
//! leaves out is slower, and no heuristic decides.
//!
//! Candidates that differ in their micro-batches only are tried together: they share a recorded
//! schedule, which takes most of the time, and the memory without activations.

use super::candidate::{Candidate, Groups, Offload, UnitSizes};
use super::{BatchTokens, Choice, Tried, Tuned};
use crate::error::CliError;
use crate::plan::Machines;
use crate::settings::args::Collectives;

/// The largest micro-batch.
const MAX_MICRO_BATCH: u64 = 256;
/// Speeds closer than this part are equal: the one that needs less memory is better.
const TIE: f64 = 0.002;

/// Gradient buckets, as parts of the largest unit: numerator and denominator. First the default.
const BUCKETS: [(u64, u64); 5] = [(1, 1), (1, 4), (1, 2), (1, 8), (2, 1)];
/// Blocks that stage 3 gathers ahead, besides the default of one unit.
const PREFETCH_BLOCKS: [u64; 3] = [2, 4, 0];

/// Candidates that differ in their micro-batches only, each with the tokens per second that it
/// cannot exceed; the fastest bound is first.
pub(crate) struct Batches {
    pub(crate) candidates: Vec<(f64, Candidate)>,
}

impl Batches {
    fn new(machines: &Machines, candidates: Vec<Candidate>) -> Self {
        let bounded = |candidate| (machines.most_tokens_per_s(&candidate), candidate);
        let mut candidates: Vec<_> = candidates.into_iter().map(bounded).collect();
        candidates.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        Self { candidates }
    }

    /// The tokens per second that none of them exceeds.
    fn bound(&self) -> f64 {
        self.candidates.first().map_or(0.0, |(bound, _)| *bound)
    }
}

/// The fastest choices so far, and the numbers of candidates by their results.
#[derive(Default)]
struct Search {
    /// How many choices are kept.
    most: usize,
    best: Vec<Choice>,
    simulated: usize,
    did_not_fit: usize,
    refused: usize,
    /// Why the first one was refused.
    refusal: Option<CliError>,
}

/// The `most` best configurations.
pub(super) fn run(
    machines: &Machines,
    batch_tokens: Option<BatchTokens>,
    most: usize,
) -> Result<Tuned, CliError> {
    let mut groups = candidates(machines, batch_tokens)?;
    // Stable: of equal bounds, the simpler candidates are tried first.
    groups.sort_by(|a, b| b.bound().total_cmp(&a.bound()));

    let mut search = Search {
        most,
        ..Search::default()
    };
    for group in &groups {
        if group.bound() < search.slowest() {
            break;
        }
        search.group(machines, group);
    }
    if let (true, 0, Some(refusal)) = (search.best.is_empty(), search.did_not_fit, search.refusal) {
        return Err(refusal);
    }
    let candidates = groups.iter().map(|group| group.candidates.len()).sum();
    let mut all = groups.iter().flat_map(|group| &group.candidates);
    let tokens = batch_tokens.and_then(|_| all.next());
    let tokens = tokens.map(|(_, candidate)| machines.batch_tokens(candidate));
    let counts = [search.simulated, search.did_not_fit, search.refused];
    Ok(machines.tuned(candidates, tokens, counts, search.best))
}

impl Search {
    /// The tokens per second that a candidate needs to be among the best.
    fn slowest(&self) -> f64 {
        let speeds = self.best.iter().map(|choice| choice.tokens_per_s);
        match self.best.len() < self.most {
            true => 0.0,
            false => speeds.fold(f64::INFINITY, f64::min) * (1.0 - TIE),
        }
    }

    /// Tries the candidates of a group that may be among the best.
    fn group(&mut self, machines: &Machines, group: &Batches) {
        let Some((_, first)) = group.candidates.first() else {
            return;
        };
        let mut run = match machines.run(first) {
            Ok(run) => run,
            Err(error) => {
                self.refused += group.candidates.len();
                self.refusal.get_or_insert(error);
                return;
            }
        };
        for (bound, candidate) in &group.candidates {
            let slowest = self.slowest();
            if *bound < slowest {
                return;
            }
            match run.choice(candidate, slowest) {
                Ok(Tried::Fits(choice)) => {
                    self.simulated += 1;
                    insert(&mut self.best, *choice, self.most);
                }
                Ok(Tried::Slower) => self.simulated += 1,
                Ok(Tried::DoesNotFit) => self.did_not_fit += 1,
                // A combination that the trainer refuses.
                Err(error) => {
                    self.refused += 1;
                    self.refusal.get_or_insert(error);
                }
            }
        }
    }
}

/// Whether `a` is the better choice.
fn is_better(a: &Choice, b: &Choice) -> bool {
    let ratio = a.tokens_per_s / b.tokens_per_s;
    match () {
        () if ratio > 1.0 + TIE => true,
        () if ratio < 1.0 - TIE => false,
        () => (a.host_bytes, a.gpu_bytes) < (b.host_bytes, b.gpu_bytes),
    }
}

/// Adds a choice, of which only the best communication counts.
fn insert(best: &mut Vec<Choice>, choice: Choice, most: usize) {
    let of = |choice: &Choice| choice.candidate.without_communication();
    let same = |other: &Choice| of(other) == of(&choice);
    if let Some(other) = best.iter().position(same) {
        if !is_better(&choice, &best[other]) {
            return;
        }
        best.remove(other);
    }
    let at = best
        .iter()
        .take_while(|other| !is_better(&choice, other))
        .count();
    best.insert(at, choice);
    best.truncate(most);
}

/// All combinations, of which the trainer refuses some.
///
/// # Errors
/// The batch is that of no combination.
pub(crate) fn candidates(
    machines: &Machines,
    batch_tokens: Option<BatchTokens>,
) -> Result<Vec<Batches>, CliError> {
    let (gpus, _, seq_len) = machines.sizes();
    let readings: &[Option<u64>] = match batch_tokens {
        None => &[None],
        Some(tokens) => &tokens.readings().map(Some),
    };
    let of_reading = |tokens: &Option<u64>| {
        let groups: Vec<_> = machines
            .tensor_ranks()
            .flat_map(|tensor_ranks| of_tensor_ranks(machines, tensor_ranks, *tokens))
            .collect();
        (!groups.is_empty()).then_some(groups)
    };
    readings.iter().find_map(of_reading).ok_or_else(|| {
        let tokens = readings.iter().flatten().next().unwrap_or(&0);
        usage!("--batch-tokens {tokens}: expected a multiple of {gpus} GPUs x {seq_len} tokens, or of fewer GPUs with tensor parallelism")
    })
}

/// The candidates with `tensor_ranks`; none if they do not divide the batch.
fn of_tensor_ranks(machines: &Machines, tensor_ranks: usize, tokens: Option<u64>) -> Vec<Batches> {
    let (gpus, node, seq_len) = machines.sizes();
    let several_nodes = gpus > node;
    let of_sequence = gpus / tensor_ranks as u64 * seq_len;
    if tokens.is_some_and(|tokens| !tokens.is_multiple_of(of_sequence)) {
        return Vec::new();
    }
    let sequences = tokens.map(|tokens| tokens / of_sequence);
    let units = machines.unit_sizes(tensor_ranks);
    let has_levels = several_nodes && node > tensor_ranks as u64;

    let mut groups = Vec::new();
    for (stage, ranks) in meshes(several_nodes) {
        for (checkpointing, offload) in memory(stage) {
            for (collectives, bucket_elems, prefetch_elems) in
                communication(stage, has_levels && ranks == Groups::All, &units, gpus)
            {
                let of = |micro_batch| Candidate {
                    stage,
                    groups: ranks,
                    tensor_parallel: tensor_ranks,
                    micro_batch,
                    grad_accum: sequences.map_or(1, |all| all / micro_batch),
                    checkpointing,
                    offload,
                    collectives,
                    bucket_elems,
                    prefetch_elems,
                };
                let candidates = micro_batches(sequences).map(of).collect();
                groups.push(Batches::new(machines, candidates));
            }
        }
    }
    groups
}

/// Micro-batches that divide the `sequences` of a rank; without a batch, powers of two and three
/// times those.
fn micro_batches(sequences: Option<u64>) -> impl Iterator<Item = u64> {
    let is_usual = |micro: u64| {
        let odd = micro >> micro.trailing_zeros();
        odd == 1 || odd == 3
    };
    (1..=MAX_MICRO_BATCH).filter(move |&micro| match sequences {
        Some(sequences) => sequences.is_multiple_of(micro),
        None => is_usual(micro),
    })
}

/// Routes of collectives, elements of buckets, and elements that are gathered ahead.
fn communication(
    stage: u8,
    has_levels: bool,
    units: &UnitSizes,
    gpus: u64,
) -> Vec<(Collectives, Option<u64>, Option<u64>)> {
    let routes: &[Collectives] = match has_levels {
        true => &[Collectives::TwoLevel, Collectives::Flat],
        false => &[Collectives::Auto],
    };
    let mut prefetches = vec![None];
    if stage == 3 {
        prefetches.extend(PREFETCH_BLOCKS.map(|blocks| Some(blocks * units.block)));
    }
    let mut all = Vec::new();
    for &route in routes {
        for (numerator, denominator) in BUCKETS {
            let elems = units.largest * numerator / denominator;
            let bucket = (numerator != denominator).then_some(elems);
            // A bucket has an element for each rank.
            if bucket.is_none() || elems >= gpus {
                all.extend(prefetches.iter().map(|prefetch| (route, bucket, *prefetch)));
            }
        }
    }
    all
}

fn meshes(several_nodes: bool) -> Vec<(u8, Groups)> {
    let mut meshes: Vec<_> = [2, 1, 3, 0].map(|stage| (stage, Groups::All)).into();
    if several_nodes {
        for stage in [2, 3] {
            meshes.extend([(stage, Groups::Node), (stage, Groups::NodeAndWorld)]);
        }
        meshes.push((3, Groups::Hpz));
    }
    meshes
}

fn memory(stage: u8) -> Vec<(bool, Offload)> {
    let mut memory = Vec::new();
    for checkpointing in [false, true] {
        memory.extend([Offload::None, Offload::Optimizer].map(|to| (checkpointing, to)));
        if stage == 3 {
            memory.push((checkpointing, Offload::Params));
        }
    }
    memory
}
