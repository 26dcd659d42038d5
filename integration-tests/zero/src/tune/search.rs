//! The search over configurations.
//!
//! A step takes no less than its passes, whatever is sent: so candidates are tried in the order of
//! that bound, and the search ends at the first whose bound is slower than the last of the best. What it
//! leaves out is slower, and no heuristic decides.

use super::candidate::{Candidate, Groups, Offload};
use super::{Choice, Tried, Tuned};
use crate::error::CliError;
use crate::plan::Machines;

/// The largest micro-batch.
const MAX_MICRO_BATCH: u64 = 256;
/// Speeds closer than this part are equal: the one that needs less memory is better.
const TIE: f64 = 0.002;

/// A candidate with the tokens per second that it cannot exceed.
struct Bounded {
    candidate: Candidate,
    tokens_per_s: f64,
}

/// The `most` best configurations.
pub(super) fn run(
    machines: &Machines,
    batch_tokens: Option<u64>,
    most: usize,
) -> Result<Tuned, CliError> {
    let mut bounded: Vec<_> = candidates(machines, batch_tokens)?
        .into_iter()
        .map(|candidate| Bounded {
            tokens_per_s: machines.most_tokens_per_s(&candidate),
            candidate,
        })
        .collect();
    // Stable: of equal bounds, the simpler candidate is tried first.
    bounded.sort_by(|a, b| b.tokens_per_s.total_cmp(&a.tokens_per_s));

    let mut best: Vec<Choice> = Vec::new();
    let mut simulated = 0;
    let mut did_not_fit = 0;
    let mut refused = 0;
    for Bounded {
        candidate,
        tokens_per_s,
    } in &bounded
    {
        let speeds = best.iter().map(|choice| choice.tokens_per_s);
        let slowest = match best.len() < most {
            true => 0.0,
            false => speeds.fold(f64::INFINITY, f64::min) * (1.0 - TIE),
        };
        if *tokens_per_s < slowest {
            break;
        }
        match machines.choice(candidate, slowest) {
            Ok(Tried::Fits(choice)) => {
                simulated += 1;
                insert(&mut best, *choice, most);
            }
            Ok(Tried::Slower) => simulated += 1,
            Ok(Tried::DoesNotFit) => did_not_fit += 1,
            // A combination that the trainer refuses.
            Err(_) => refused += 1,
        }
    }
    Ok(machines.tuned(bounded.len(), [simulated, did_not_fit, refused], best))
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

/// Adds a choice, of which only the best bucket counts.
fn insert(best: &mut Vec<Choice>, choice: Choice, most: usize) {
    let same =
        |other: &Choice| other.candidate.without_bucket() == choice.candidate.without_bucket();
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
fn candidates(machines: &Machines, batch_tokens: Option<u64>) -> Result<Vec<Candidate>, CliError> {
    let (gpus, node, seq_len) = machines.sizes();
    let several_nodes = gpus > node;
    let mut all = Vec::new();
    for tensor_parallel in machines.tensor_ranks() {
        let batches = gpus / tensor_parallel as u64;
        let sequences = match batch_tokens {
            None => None,
            Some(tokens) if tokens % (batches * seq_len) == 0 => Some(tokens / (batches * seq_len)),
            Some(_) => continue,
        };
        let micro_batches = (0..)
            .map(|power| 1u64 << power)
            .take_while(|&micro| micro <= sequences.unwrap_or(u64::MAX).min(MAX_MICRO_BATCH))
            .filter(|micro| sequences.is_none_or(|sequences| sequences.is_multiple_of(*micro)));
        for micro_batch in micro_batches {
            for (stage, groups) in meshes(several_nodes) {
                for (checkpointing, offload) in memory(stage) {
                    for bucket_part in [1, 4] {
                        all.push(Candidate {
                            stage,
                            groups,
                            tensor_parallel,
                            micro_batch,
                            grad_accum: sequences.map_or(1, |all| all / micro_batch),
                            checkpointing,
                            offload,
                            bucket_part,
                        });
                    }
                }
            }
        }
    }
    match (all.is_empty(), batch_tokens) {
        (true, Some(tokens)) => Err(CliError::Usage(format!(
            "--batch-tokens {tokens}: expected a multiple of {gpus} GPUs x {seq_len} tokens, or of fewer GPUs with tensor parallelism"
        ))),
        _ => Ok(all),
    }
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
