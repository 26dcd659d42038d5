//! The recommended stage, and the changes that make one fit.

use indicatif::{HumanBytes, HumanCount};
use zero_shard::{ShardError, Sharding, ZeroStage, largest};

use super::request::Request;
use super::stage::{self, Stage, evaluate};
use crate::trainer::Home;

/// The highest number of GPUs that is recommended.
const MAX_GPUS: u64 = 65_536;

/// Of the stages that fit, the one with the least traffic; ties go to the one with the least memory.
pub(super) fn recommended(stages: &[Stage]) -> Option<u8> {
    let fitting = stages.iter().filter(|s| s.fits == Some(true));
    fitting.min_by_key(|s| (s.sent.total_bytes, s.gpu.total_bytes)).map(|s| s.stage)
}

/// A change of the request, and its description.
struct Change {
    text: String,
    request: Request,
}

/// Sentences for the user; empty if the memory of the GPU is unknown.
pub(super) fn advice(request: &Request, stages: &[Stage], chosen: Option<u8>) -> Result<Vec<String>, ShardError> {
    let Some(memory) = request.gpu_memory_bytes else { return Ok(Vec::new()) };
    if let Some(stage) = stages.iter().find(|s| Some(s.stage) == chosen) {
        let spare = HumanBytes(memory - stage.gpu.total_bytes);
        let number = stage.stage;
        let mut lines =
            vec![format!("Use stage {number}: it leaves {spare} free and sends the least of the stages that fit.")];
        if let Some(configured) = stages.iter().find(|s| s.configured && s.fits == Some(false)) {
            let over = HumanBytes(configured.gpu.total_bytes - memory);
            lines.push(format!("The configuration's stage {} does not fit: {over} too much.", configured.stage));
        }
        return Ok(lines);
    }
    let over = stages.iter().map(|s| s.gpu.total_bytes - memory).min().unwrap_or(0);
    let mut lines = vec![format!("No stage fits: the smallest needs {} more.", HumanBytes(over))];
    let mut fitting = Vec::new();
    for change in changes(request) {
        if fits(&change.request)? {
            fitting.push(with_host_memory(&change, request)?);
        }
    }
    if fitting.is_empty() {
        fitting.extend(combined(request)?);
    }
    lines.extend(fitting.into_iter().map(|text| format!("Stage 3 fits with {text}.")));
    if let Some(gpus) = gpus_needed(request)? {
        lines.push(format!("Stage 3 fits on {gpus} GPUs of this kind."));
    }
    let most = stages.iter().filter_map(|s| s.largest_model_params).max().unwrap_or(0);
    lines.push(match most {
        0 => "Activations alone exceed the memory of a GPU.".to_owned(),
        most => format!(
            "The largest model that fits without changes has {} parameters (a transformer of typical shape).",
            HumanCount(most)
        ),
    });
    Ok(lines)
}

/// Single changes that keep the result of training, in order of rising cost.
fn changes(request: &Request) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut add = |text: String, change: &dyn Fn(&mut Request)| {
        let mut request = request.clone();
        change(&mut request);
        changes.push(Change { text, request });
    };
    if !request.checkpointing {
        add("--activation-checkpointing".to_owned(), &|r| r.checkpointing = true);
    }
    if request.micro_batch > 1 {
        let accum = request.grad_accum.saturating_mul(request.micro_batch);
        add(format!("--micro-batch 1 --grad-accum {accum}"), &|r| (r.micro_batch, r.grad_accum) = (1, accum));
    }
    if let Some(elems) = smaller_bucket(request) {
        add(format!("--bucket-elems {elems}"), &|r| *r = with_bucket(r, elems));
    }
    if request.offload.optimizer == Home::Device {
        add("--offload cpu".to_owned(), &|r| r.offload.optimizer = Home::Host);
    }
    if request.offload.params == Home::Device {
        let optimizer = if request.offload.optimizer == Home::Device { "--offload cpu " } else { "" };
        add(format!("{optimizer}--offload-params cpu"), &|r| {
            if r.offload.optimizer == Home::Device {
                r.offload.optimizer = Home::Host;
            }
            r.offload.params = Home::Host;
        });
    }
    changes
}

/// The smallest bucket that is recommended, in elements. Smaller ones save little.
const MIN_BUCKET_ELEMS: u64 = 1 << 20;

/// The largest bucket, a power of two, that is smaller than that of the request and fits, or else the smallest one.
fn smaller_bucket(request: &Request) -> Option<u64> {
    let layout = stage::layout(request, Sharding::Flat).ok()?;
    let largest_unit = layout.primary().units().iter().map(|unit| unit.padded_elems).max()?;
    let now = request.settings(ZeroStage::Three, largest_unit).bucket_capacity_elems as u64;
    let smaller = (MIN_BUCKET_ELEMS.ilog2()..u64::BITS).map(|power| 1u64 << power).take_while(|elems| *elems < now);
    let all: Vec<u64> = smaller.collect();
    let fitting = all.iter().rev().find(|elems| fits(&with_bucket(request, **elems)).unwrap_or(false));
    fitting.or(all.first()).copied()
}

fn with_bucket(request: &Request, elems: u64) -> Request {
    Request { bucket_elems: Some(elems), trims_bucket: false, ..request.clone() }
}

/// The shortest sequence of changes that fits, if no single change does.
fn combined(request: &Request) -> Result<Option<String>, ShardError> {
    let mut so_far = Change { text: String::new(), request: request.clone() };
    while let Some(next) = changes(&so_far.request).into_iter().next() {
        let text = if so_far.text.is_empty() { next.text } else { format!("{}, {}", so_far.text, next.text) };
        so_far = Change { text, request: next.request };
        if fits(&so_far.request)? {
            return with_host_memory(&so_far, request).map(Some);
        }
    }
    Ok(None)
}

fn fits(request: &Request) -> Result<bool, ShardError> {
    stage::fits(request, ZeroStage::Three)
}

/// The text of a change, with the host memory that it needs.
fn with_host_memory(change: &Change, before: &Request) -> Result<String, ShardError> {
    let text = &change.text;
    let now = evaluate(&change.request, ZeroStage::Three)?.host_bytes;
    if now == evaluate(before, ZeroStage::Three)?.host_bytes {
        return Ok(text.clone());
    }
    let node = HumanBytes(now.saturating_mul(before.gpus / before.nodes));
    Ok(format!("{text} ({node} of host memory in each node)"))
}

/// The fewest GPUs on which stage 3 fits, with as many per node as now.
fn gpus_needed(request: &Request) -> Result<Option<u64>, ShardError> {
    let each = request.gpus / request.nodes;
    let with = |nodes: u64| Request { nodes, gpus: nodes * each, ..request.clone() };
    let most = MAX_GPUS / each;
    if most <= request.nodes || !fits(&with(most))? {
        return Ok(None);
    }
    // Memory per rank falls with the number of ranks, except for alignment.
    let too_few = largest(|nodes| nodes < most && !fits(&with(nodes.max(1))).unwrap_or(false));
    Ok(Some((too_few + 1) * each))
}
