//! The recommended stage, and the changes that make one fit.

use indicatif::{HumanBytes, HumanCount};
use zero_shard::{GridLayout, ShardError, ZeroStage, largest};

use super::request::{MachineSize, PlanRequest};
use super::stage::{self, Stage, evaluate_on};
use zero_trainer::Home;

/// The highest number of GPUs that is recommended.
const MAX_GPUS: u64 = 65_536;

/// Of the stages that fit, the one with the least traffic; ties go to the one with the least
/// memory.
pub(crate) fn recommended(stages: &[Stage]) -> Option<u8> {
    let fitting = stages.iter().filter(|s| s.fits == Some(true));
    fitting
        .min_by_key(|s| (s.sent.total_bytes, s.gpu.total_bytes))
        .map(|s| s.stage)
}

/// Sentences for the user; empty if the memory of the GPU is unknown.
pub(crate) fn advice(
    request: &PlanRequest,
    layout: &GridLayout,
    stages: &[Stage],
    chosen: Option<u8>,
) -> Result<Vec<String>, ShardError> {
    let Some(memory) = request.machine.gpu_memory_bytes else {
        return Ok(Vec::new());
    };
    if let Some(stage) = stages.iter().find(|s| Some(s.stage) == chosen) {
        let spare = HumanBytes(memory - stage.gpu.total_bytes);
        let number = stage.stage;
        let mut lines = vec![format!(
            "Use stage {number}: it leaves {spare} free and sends the least of the stages that fit."
        )];
        if let Some(configured) = stages
            .iter()
            .find(|s| s.configured && s.fits == Some(false))
        {
            let over = HumanBytes(configured.gpu.total_bytes - memory);
            lines.push(format!(
                "The configuration's stage {} does not fit: {over} too much.",
                configured.stage
            ));
        }
        lines.extend(longest_sequence(
            request,
            stage.longest_seq_len,
            &format!("At stage {number}"),
        ));
        return Ok(lines);
    }

    let over = stages
        .iter()
        .map(|s| s.gpu.total_bytes - memory)
        .min()
        .unwrap_or(0);
    let mut lines = vec![format!(
        "No stage fits: the smallest needs {} more.",
        HumanBytes(over)
    )];
    lines.extend(sharded_states(request, layout, stages, memory));
    let search = Search { request, layout };
    let mut fitting = search.single()?;
    if fitting.is_empty() {
        fitting.extend(search.combined()?);
    }
    for changes in &fitting {
        lines.push(format!("Stage 3 fits with {}.", search.describe(changes)?));
    }
    lines.extend(search.on_drives(&fitting)?);
    lines.extend(search.more_gpus()?);
    let most = stages
        .iter()
        .filter_map(|s| s.largest_model_params)
        .max()
        .unwrap_or(0);

    lines.push(match most {
        0 => "Activations alone exceed the memory of a GPU.".to_owned(),
        most => format!(
            "The largest model that fits without changes has {} parameters (a transformer of typical shape).",
            HumanCount(most)
        ),
    });

    let longest = stages.iter().filter_map(|s| s.longest_seq_len).max();
    lines.extend(longest_sequence(request, longest, "Without changes"));
    Ok(lines)
}

/// The longest sequence of the model that fits.
fn longest_sequence(request: &PlanRequest, longest: Option<u64>, at: &str) -> Option<String> {
    let tokens = longest.filter(|tokens| *tokens > 0)?;
    let positions = request.model.config.as_ref()?.max_positions() as u64;
    let limit = match tokens == positions {
        true => ", all positions of the model",
        false => "",
    };
    Some(format!(
        "{at} sequences of up to {} tokens fit{limit}.",
        HumanCount(tokens)
    ))
}

/// What stage 3 shards, if that alone exceeds the memory of a GPU.
fn sharded_states(
    request: &PlanRequest,
    layout: &GridLayout,
    stages: &[Stage],
    memory: u64,
) -> Option<String> {
    let states = stages.last()?.states_bytes;
    let params = layout.parts().numel_elems();
    if states <= memory || params == 0 || request.run.offload.optimizer != Home::Device {
        return None;
    }
    // Without padding it is a whole number.
    let whole = u128::from(states) * u128::from(request.machine.gpus);
    let of_param = (whole + u128::from(params / 2)) / u128::from(params);
    Some(format!(
        "Stage 3 shards parameters, gradients and optimizer state, {of_param} bytes a parameter: they alone are {} on each GPU, which has {}.",
        HumanBytes(states),
        HumanBytes(memory)
    ))
}

/// A change that keeps the result of training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Checkpointing,
    MicroBatch,
    /// Of the optimizer.
    Offload,
    /// Of the parameters, which are updated on the host, too.
    OffloadParams,
    /// The elements of a bucket.
    Bucket(u64),
}

impl Change {
    /// All but the bucket, in order of rising cost.
    const ALL: [Self; 4] = [
        Self::Checkpointing,
        Self::MicroBatch,
        Self::Offload,
        Self::OffloadParams,
    ];

    /// Whether the request is without the change.
    fn is_new(self, request: &PlanRequest) -> bool {
        match self {
            Self::Checkpointing => !request.options.activation_checkpointing,
            Self::MicroBatch => request.micro_batch() > 1,
            Self::Offload => request.run.offload.optimizer == Home::Device,
            Self::OffloadParams => request.run.offload.params == Home::Device,
            Self::Bucket(_) => true,
        }
    }

    fn apply(self, request: &mut PlanRequest) {
        match self {
            Self::Checkpointing => request.options.activation_checkpointing = true,
            Self::MicroBatch => {
                request.run.grad_accum_steps = grad_accum_of_rows(request) as usize;
                request.options.micro_batch = 1;
            }
            Self::Offload => request.run.offload.optimizer = Home::Host,
            Self::OffloadParams => request.run.offload.params = Home::Host,
            Self::Bucket(elems) => {
                request.run.bucket_capacity_elems = elems as usize;
                request.trims_bucket = false;
            }
        }
    }

    /// The flags.
    fn text(self, request: &PlanRequest) -> String {
        match self {
            Self::Checkpointing => "--activation-checkpointing".to_owned(),
            Self::MicroBatch => format!(
                "--micro-batch 1 --grad-accum {}",
                grad_accum_of_rows(request)
            ),
            Self::Offload => "--offload cpu".to_owned(),
            Self::OffloadParams => "--offload-params cpu".to_owned(),
            Self::Bucket(elems) => format!("--bucket-elems {elems}"),
        }
    }
}

/// The micro-batches of a step in which each has one row.
fn grad_accum_of_rows(request: &PlanRequest) -> u64 {
    request.grad_accum().saturating_mul(request.micro_batch())
}

/// The smallest bucket that is recommended, in elements. Smaller ones save little.
const MIN_BUCKET_ELEMS: u64 = 1 << 20;

/// The search for changes with which stage 3 fits. All have the layout of the request.
struct Search<'a> {
    request: &'a PlanRequest,
    layout: &'a GridLayout,
}

impl Search<'_> {
    fn with(&self, changes: &[Change]) -> PlanRequest {
        let mut request = self.request.clone();
        changes.iter().for_each(|change| change.apply(&mut request));
        request
    }

    fn fits(&self, changes: &[Change]) -> Result<bool, ShardError> {
        stage::fits_on(&self.with(changes), self.layout, ZeroStage::Three)
    }

    /// The changes other than a bucket, in order of rising cost.
    fn changes(&self) -> Vec<Change> {
        Change::ALL
            .into_iter()
            .filter(|change| change.is_new(self.request))
            .collect()
    }

    /// The changes each of which fits alone.
    fn single(&self) -> Result<Vec<Vec<Change>>, ShardError> {
        let mut fitting = Vec::new();
        for change in self.changes() {
            if self.fits(&[change])? {
                fitting.push(vec![change]);
            }
        }
        fitting.extend(self.bucket(&[])?.map(|bucket| vec![bucket]));
        Ok(fitting)
    }

    /// Several changes that fit together, none of which can be left out, if no change fits alone. A
    /// smaller bucket, which slows every step, is the last resort.
    fn combined(&self) -> Result<Option<Vec<Change>>, ShardError> {
        let all = self.changes();
        for count in 2..=all.len() {
            if self.fits(&all[..count])? {
                return self.without_needless(all[..count].to_vec()).map(Some);
            }
        }
        let Some(bucket) = self.bucket(&all)? else {
            return Ok(None);
        };
        // Fewer changes leave no room for a larger bucket.
        self.without_needless([&all[..], &[bucket]].concat())
            .map(Some)
    }

    /// Leaves out changes, the costliest first, until none can be left out.
    fn without_needless(&self, mut changes: Vec<Change>) -> Result<Vec<Change>, ShardError> {
        let mut at = changes.len();
        while at > 0 {
            at -= 1;
            let mut fewer = changes.clone();
            fewer.remove(at);
            if self.fits(&fewer)? {
                changes = fewer;
                // A change that was needed may no longer be.
                at = changes.len();
            }
        }
        Ok(changes)
    }

    /// The largest bucket, a power of two, that is smaller than that of the request and fits with
    /// `changes`.
    fn bucket(&self, changes: &[Change]) -> Result<Option<Change>, ShardError> {
        let largest_unit = self.request.largest_trained(self.layout.parts());
        let now = self
            .request
            .settings(ZeroStage::Three, largest_unit)
            .bucket_capacity_elems as u64;
        let smallest = MIN_BUCKET_ELEMS.ilog2();
        let smaller = (smallest..u64::BITS)
            .map(|power| 1u64 << power)
            .take_while(|elems| *elems < now);
        let mut smaller: Vec<u64> = smaller.collect();

        // Memory rises with the bucket: the first that does not fit ends those that do.
        let mut with = changes.to_vec();
        let mut fits = |elems: u64| {
            with.truncate(changes.len());
            with.push(Change::Bucket(elems));
            self.fits(&with)
        };

        let mut fitting = 0;
        let mut candidates = smaller.len();
        while fitting < candidates {
            let middle = fitting + (candidates - fitting) / 2;
            match fits(smaller[middle])? {
                true => fitting = middle + 1,
                false => candidates = middle,
            }
        }

        smaller.truncate(fitting);
        Ok(smaller.pop().map(Change::Bucket))
    }

    /// The same with state on drives, if `fitting` has changes that move all of it to host memory.
    fn on_drives(&self, fitting: &[Vec<Change>]) -> Result<Option<String>, ShardError> {
        let moves_all = |changes: &&Vec<Change>| changes.contains(&Change::OffloadParams);
        if self.request.run.offload.optimizer != Home::Device {
            return Ok(None);
        }
        let Some(changes) = fitting.iter().find(moves_all) else {
            return Ok(None);
        };

        let mut request = self.with(changes);
        request.run.offload.optimizer = Home::Nvme("DIR".into());
        request.run.offload.params = Home::Nvme("DIR".into());
        let stage = evaluate_on(&request, self.layout, ZeroStage::Three)?;
        if stage.fits != Some(true) {
            return Ok(None);
        }

        let kept = changes.iter().filter(|c| **c != Change::OffloadParams);
        let mut flags: Vec<String> = kept.map(|change| change.text(self.request)).collect();
        flags.push("--offload nvme:DIR".to_owned());
        flags.push("--offload-params nvme:DIR".to_owned());
        let of_node = |bytes: u64| {
            HumanBytes(bytes.saturating_mul(self.request.machine.gpus / self.request.machine.nodes))
                .to_string()
        };
        Ok(Some(format!(
            "On drives: {} ({} of host memory and {} of a drive in each node).",
            flags.join(", "),
            of_node(stage.host_bytes),
            of_node(stage.nvme_bytes)
        )))
    }

    /// The number of GPUs on which stage 3 fits, with activation checkpointing if none is enough
    /// without.
    fn more_gpus(&self) -> Result<Option<String>, ShardError> {
        if let Some(gpus) = gpus_needed(self.request)? {
            return Ok(Some(format!("Stage 3 fits on {gpus} GPUs of this kind.")));
        }
        if self.request.options.activation_checkpointing {
            return Ok(None);
        }
        let gpus = gpus_needed(&self.with(&[Change::Checkpointing]))?;
        let flag = Change::Checkpointing.text(self.request);
        Ok(gpus.map(|gpus| format!("With {flag} it fits on {gpus} GPUs of this kind.")))
    }

    /// The flags of changes, with the host memory that they need.
    fn describe(&self, changes: &[Change]) -> Result<String, ShardError> {
        let texts: Vec<String> = changes
            .iter()
            .map(|change| change.text(self.request))
            .collect();
        let text = texts.join(", ");
        let host_bytes = |request: &PlanRequest| {
            evaluate_on(request, self.layout, ZeroStage::Three).map(|stage| stage.host_bytes)
        };
        let now = host_bytes(&self.with(changes))?;
        if now == host_bytes(self.request)? {
            return Ok(text);
        }
        let node =
            HumanBytes(now.saturating_mul(self.request.machine.gpus / self.request.machine.nodes));
        Ok(format!("{text} ({node} of host memory in each node)"))
    }
}

/// The fewest GPUs on which stage 3 fits, with as many per node as now.
fn gpus_needed(request: &PlanRequest) -> Result<Option<u64>, ShardError> {
    let each = request.machine.gpus / request.machine.nodes;
    let with = |nodes: u64| PlanRequest {
        machine: MachineSize {
            nodes,
            gpus: nodes * each,
            ..request.machine
        },
        ..request.clone()
    };
    let most = MAX_GPUS / each;
    let fits = |request: &PlanRequest| stage::fits(request, ZeroStage::Three);
    if most <= request.machine.nodes || !fits(&with(most))? {
        return Ok(None);
    }
    // Memory per rank falls with the number of ranks, except for alignment.
    let too_few = largest(|nodes| nodes < most && !fits(&with(nodes.max(1))).unwrap_or(false));
    Ok(Some((too_few + 1) * each))
}
