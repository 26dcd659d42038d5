//! Which stage to take, and what to change where none fits.

use zero_shard::{ShardError, Tier, ZeroStage, largest};

use super::report::{Stage, evaluate};
use super::request::Request;
use super::size::{show_bytes, show_count};

/// The most GPUs that are proposed.
const MOST_GPUS: u64 = 65_536;

/// Of the stages that fit, the one that sends least, and of those the one that keeps least.
pub(super) fn recommended(stages: &[Stage]) -> Option<u8> {
    let fitting = stages.iter().filter(|s| s.fits == Some(true));
    fitting.min_by_key(|s| (s.sent.total_bytes, s.gpu.total_bytes)).map(|s| s.stage)
}

/// A change to a request, in words and deeds.
struct Change {
    words: String,
    request: Request,
}

/// Sentences for the user; none where no memory is named.
pub(super) fn advice(request: &Request, stages: &[Stage], chosen: Option<u8>) -> Result<Vec<String>, ShardError> {
    let Some(memory) = request.gpu_memory_bytes else { return Ok(Vec::new()) };
    if let Some(stage) = stages.iter().find(|s| Some(s.stage) == chosen) {
        let spare = show_bytes(memory - stage.gpu.total_bytes);
        let mut lines = vec![format!(
            "Take stage {}: it fits with {spare} to spare, and of the stages that fit none sends less.",
            stage.stage
        )];
        if let Some(asked) = stages.iter().find(|s| s.configured && s.fits == Some(false)) {
            let over = show_bytes(asked.gpu.total_bytes - memory);
            lines.push(format!("The configuration's stage {} does not fit: {over} too much.", asked.stage));
        }
        return Ok(lines);
    }
    let over = stages.iter().map(|s| s.gpu.total_bytes - memory).min().unwrap_or(0);
    let mut lines = vec![format!("No stage fits: the least is {} too much.", show_bytes(over))];
    let mut fitting = Vec::new();
    for change in changes(request) {
        if fits(&change.request)? {
            fitting.push(with_host(&change, request)?);
        }
    }
    if fitting.is_empty() {
        fitting.extend(together(request)?);
    }
    lines.extend(fitting.into_iter().map(|words| format!("Stage 3 fits with {words}.")));
    if let Some(gpus) = gpus_needed(request)? {
        lines.push(format!("Stage 3 fits on {gpus} GPUs of this kind."));
    }
    let most = stages.iter().filter_map(|s| s.largest_model_params).max().unwrap_or(0);
    lines.push(match most {
        0 => "Activations, buckets and gathered units alone are more than a GPU has.".to_owned(),
        most => format!("As it is, the largest model that fits has {} parameters.", show_count(most)),
    });
    Ok(lines)
}

/// Changes that keep the result of training, each alone, mildest first.
fn changes(request: &Request) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut add = |words: String, change: &dyn Fn(&mut Request)| {
        let mut request = request.clone();
        change(&mut request);
        changes.push(Change { words, request });
    };
    if !request.checkpointing {
        add("--activation-checkpointing".to_owned(), &|r| r.checkpointing = true);
    }
    if request.micro_batch > 1 {
        let accum = request.grad_accum.saturating_mul(request.micro_batch);
        add(format!("--micro-batch 1 --grad-accum {accum}"), &|r| (r.micro_batch, r.grad_accum) = (1, accum));
    }
    if request.offload_optimizer == Tier::Device {
        add("--offload cpu".to_owned(), &|r| r.offload_optimizer = Tier::Host);
    }
    if request.offload_params == Tier::Device {
        let words = "the optimizer and the parameters in host memory (offload_optimizer and offload_param: cpu)";
        add(words.to_owned(), &|r| {
            if r.offload_optimizer == Tier::Device {
                r.offload_optimizer = Tier::Host;
            }
            r.offload_params = Tier::Host;
        });
    }
    changes
}

/// The first of the changes together that fit, where none does alone.
fn together(request: &Request) -> Result<Option<String>, ShardError> {
    let mut so_far = Change { words: String::new(), request: request.clone() };
    while let Some(next) = changes(&so_far.request).into_iter().next() {
        let words = if so_far.words.is_empty() { next.words } else { format!("{}, {}", so_far.words, next.words) };
        so_far = Change { words, request: next.request };
        if fits(&so_far.request)? {
            return with_host(&so_far, request).map(Some);
        }
    }
    Ok(None)
}

fn fits(request: &Request) -> Result<bool, ShardError> {
    Ok(evaluate(request, ZeroStage::Three)?.fits == Some(true))
}

/// The words of a change, and the host memory that it takes.
fn with_host(change: &Change, before: &Request) -> Result<String, ShardError> {
    let now = evaluate(&change.request, ZeroStage::Three)?.host_bytes;
    if now == evaluate(before, ZeroStage::Three)?.host_bytes {
        return Ok(change.words.clone());
    }
    let node = now.saturating_mul(before.gpus / before.nodes);
    let words = &change.words;
    Ok(format!("{words} ({} of host memory in each node; `zero train` cannot do that on GPUs yet)", show_bytes(node)))
}

/// The fewest GPUs, in nodes of as many as now, on which stage 3 fits.
fn gpus_needed(request: &Request) -> Result<Option<u64>, ShardError> {
    let each = request.gpus / request.nodes;
    let with = |nodes: u64| Request { nodes, gpus: nodes * each, ..request.clone() };
    let most = MOST_GPUS / each;
    if most <= request.nodes || !fits(&with(most))? {
        return Ok(None);
    }
    // More ranks keep less each, up to an alignment of padding.
    let too_few = largest(|nodes| nodes < most && !fits(&with(nodes.max(1))).unwrap_or(false));
    Ok(Some((too_few + 1) * each))
}
