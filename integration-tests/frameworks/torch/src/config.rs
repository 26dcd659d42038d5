//! A configuration of DeepSpeed by the rules of `zero train --config`, and what of it this engine
//! does not have.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde::Serialize;
use zero_alloc::device::DType;
use zero_config::DsConfig;
use zero_kernels::{AdamHyper, Muon};
use zero_optim::LossScaling;
use zero_shard::Home;

/// DeepSpeed's limit of the gradients' norm.
const CLIP: f64 = 1.0;

/// The settings of a run, as a dict.
#[derive(IntoPyObject)]
pub(crate) struct Settings {
    stage: u8,
    /// Rows of a step, rows of a micro-batch, micro-batches of a step.
    batch_size: u64,
    micro_batch_size: u64,
    micro_batches: u64,
    clip: f64,
    dtype: &'static str,
    reduce_dtype: Option<&'static str>,
    lr: f64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    decoupled: bool,
    bias_correction: bool,
    /// The format of the moments, of a type such as `AdamW8bit`.
    moments: String,
    /// The rule of matrices, in JSON, and its learning rate; none for AdamW or Adam alone.
    muon: Option<String>,
    muon_lr: Option<f64>,
    /// JSON; none for a constant rate.
    scheduler: Option<String>,
    /// JSON.
    scaling: String,
    warnings: Vec<String>,
}

/// Reads a configuration for a number of ranks.
#[pyfunction]
pub(crate) fn read_config(text: &str, ranks: u64) -> PyResult<Settings> {
    let file = DsConfig::parse(text).map_err(|error| PyValueError::new_err(error.to_string()))?;
    settings_of(file, ranks).map_err(PyValueError::new_err)
}

/// Refuses what would change a run that this engine cannot do.
fn refuse_missing(file: &DsConfig) -> Result<(), String> {
    if let Some(key) = file.autos.first() {
        return Err(format!(
            "{key} is \"auto\", which a trainer around the engine replaces: set a value"
        ));
    }

    let (zero, monitors) = (&file.zero, &file.monitors);
    let write_loss = "set enabled to false, and write engine.loss in the program";
    let shard_all = "remove it: states are sharded over all ranks";
    let one = "remove it: each rank has whole rows and whole layers";
    let exact = "remove it: gradients and parameters travel as they are";
    let on_device = "remove it: shards stay in the memory of their rank";
    let more_than_one = |ranks: Option<u64>| ranks.is_some_and(|ranks| ranks > 1);
    let keys = [
        (
            zero.offload_optimizer != Home::Device,
            "zero_optimization.offload_optimizer",
            on_device,
        ),
        (
            zero.offload_param != Home::Device,
            "zero_optimization.offload_param",
            on_device,
        ),
        (
            zero.hpz_ranks.is_some(),
            "zero_optimization.zero_hpz_partition_size",
            shard_all,
        ),
        (
            zero.mics_shard_ranks.is_some(),
            "zero_optimization.mics_shard_size",
            shard_all,
        ),
        (
            zero.quantized_weights,
            "zero_optimization.zero_quantized_weights",
            exact,
        ),
        (
            zero.quantized_gradients,
            "zero_optimization.zero_quantized_gradients",
            exact,
        ),
        (
            zero.quantized_frozen,
            "zero_optimization.zero_quantized_nontrainable_weights",
            exact,
        ),
        (
            more_than_one(file.sequence_ranks),
            "sequence_parallel_size",
            one,
        ),
        (
            more_than_one(file.tensor_ranks),
            "tensor_parallel.autotp_size",
            one,
        ),
        (
            file.param_groups.is_some(),
            "param_groups",
            "pass groups as model_parameters of initialize",
        ),
        (
            file.autotuning.is_some(),
            "autotuning",
            "set enabled to false",
        ),
        (monitors.tensorboard.is_some(), "tensorboard", write_loss),
        (monitors.csv.is_some(), "csv_monitor", write_loss),
        (
            monitors.service.is_some(),
            monitors.service.unwrap_or_default(),
            write_loss,
        ),
    ];
    match keys.iter().find(|(is_set, ..)| *is_set) {
        Some((_, key, remedy)) => Err(format!("zero_torch does not have {key}: {remedy}")),
        None => Ok(()),
    }
}

/// A warning, without the reason of an ignored key: that names the flags of the program `zero`.
fn without_reason(line: &str) -> String {
    match line.split_once(" is ignored: ") {
        Some((key, _)) => format!("{key} is ignored"),
        None => line.to_owned(),
    }
}

fn json(value: &impl Serialize) -> Result<String, String> {
    serde_json::to_string(value).map_err(|error| error.to_string())
}

fn settings_of(file: DsConfig, ranks: u64) -> Result<Settings, String> {
    refuse_missing(&file)?;
    if file.batch.train_batch_size.is_none() && file.batch.micro_batch.is_none() {
        return Err(
            "train_batch_size is missing: set it, or train_micro_batch_size_per_gpu".into(),
        );
    }
    // The micro-batch of 1 is not used: one of two sizes is there.
    let batch = file.batch.resolve(ranks, None, None, 1);
    let batch = batch.map_err(|error| error.to_string())?;

    let dtype = file.dtype.unwrap_or(DType::F32);
    let scaling = match dtype {
        DType::F16 => file.loss_scaling.unwrap_or(LossScaling::NONE),
        _ => LossScaling::NONE,
    };
    let mut warnings: Vec<String> = file
        .warnings
        .iter()
        .map(|line| without_reason(line))
        .collect();
    let mut reduce_dtype = None;
    for (key, requested) in file.requested_types {
        if key == "communication_data_type" {
            reduce_dtype = Some(requested.name());
        } else if requested != dtype {
            warnings.push(format!("{key} {requested} is ignored: it is {dtype}"));
        }
    }
    if file.activation_checkpointing.is_some() {
        warnings.push("activation_checkpointing is ignored: enable it in the model".to_owned());
    }
    if file.wall_clock_breakdown {
        warnings.push("wall_clock_breakdown is ignored".to_owned());
    }

    let optimizer = file.optimizer;
    let hyper = optimizer.map_or_else(AdamHyper::default, |optimizer| optimizer.hyper);
    let muon = optimizer.and_then(|optimizer| optimizer.muon);
    let rule = muon.map(|muon| {
        let own = Muon::default();
        json(&Muon {
            momentum: muon.momentum.unwrap_or(own.momentum),
            ns_steps: muon.ns_steps.unwrap_or(own.ns_steps),
            weight_decay: hyper.weight_decay,
            ..own
        })
    });
    let scheduler = file.schedule.as_ref().map(json).transpose()?;
    Ok(Settings {
        stage: file.zero.stage,
        batch_size: batch.train_batch_size,
        micro_batch_size: batch.micro_batch,
        micro_batches: batch.grad_accum,
        clip: file.gradient_clipping.unwrap_or(CLIP),
        dtype: dtype.name(),
        reduce_dtype,
        lr: optimizer.map_or(1e-3, |optimizer| optimizer.lr),
        betas: (hyper.beta1, hyper.beta2),
        eps: hyper.eps,
        weight_decay: hyper.weight_decay,
        decoupled: hyper.decoupled,
        bias_correction: hyper.bias_correction,
        moments: optimizer
            .and_then(|optimizer| optimizer.moments)
            .unwrap_or_default()
            .to_string(),
        muon: rule.transpose()?,
        muon_lr: muon.and_then(|muon| muon.lr),
        scheduler,
        scaling: json(&scaling)?,
        warnings,
    })
}
