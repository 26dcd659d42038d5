//! The text before a run: all settings that decide its numbers. `run.json` has the same content.

use std::fmt::Write;

use indicatif::HumanCount;
use zero_optim::{LossScaling, OptimizerConfig};

use super::run_setup::RunSetup;

/// The settings of the run.
pub(super) fn text(setup: &RunSetup) -> String {
    let (record, options) = (&setup.record, &setup.options);
    let (model, data, batch) = (&record.model, &record.data, record.batch);
    let mut out = String::new();
    let mut line = |name: &str, text: String| {
        let _ = writeln!(out, "{name}: {text}");
    };
    for notice in &setup.notices {
        line("note", notice.clone());
    }
    let each = setup.device.clone().unwrap_or_else(|| match setup.workload.threads {
        1 => "1 thread".to_owned(),
        threads => format!("{threads} threads"),
    });
    line(
        &model.name,
        format!(
            "{} parameters in {}, ZeRO stage {}, {} ranks x {each}",
            HumanCount(model.parameters),
            setup.settings.dtype,
            record.stage,
            batch.ranks
        ),
    );
    let from = options.resume.as_ref().map(|path| format!(", resumes {}", path.display())).unwrap_or_default();
    line("run", format!("{}, seed {}, weights from {}{from}", record.run, record.seed, model.weights));
    let tokenizer = data.tokenizer.as_ref().map(|path| format!(" by {path}")).unwrap_or_default();
    line("data", format!("{}{tokenizer}", setup.workload.data.describe()));
    if let Some(validation) = &options.validation {
        line("validation", super::validation::describe(validation, options.seq_len));
    }
    line(
        "step",
        format!(
            "{} ranks x {} micro-batches x {} rows x {} tokens = {} tokens",
            batch.ranks,
            batch.grad_accum,
            batch.micro_batch,
            batch.seq_len,
            HumanCount(batch.step_tokens)
        ),
    );
    let first = setup.first_step + 1;
    if first <= record.steps {
        let tokens = (record.steps - setup.first_step) as f64 * batch.step_tokens as f64;
        let epochs = tokens / data.tokens.max(1) as f64;
        line("steps", format!("{first} to {}: {epochs:.3} epochs of the data", record.steps));
    }
    let optimizer = &record.optimizer;
    line("optimizer", adam(optimizer));
    line("learning rate", format!("{}, {}", optimizer.lr, optimizer.schedule));
    let clip = match optimizer.max_grad_norm {
        0.0 => "off".to_owned(),
        norm => format!("gradient norm {norm}"),
    };
    line("clip", clip);
    line("loss scale", loss_scale(&optimizer.loss_scaling));
    if record.activation_checkpointing {
        line("activations", "recomputed in backward".to_owned());
    }
    if let Some((dir, every)) = &options.checkpoint {
        let every = if *every == 0 { String::new() } else { format!("every {every} steps and ") };
        let keep = options.keep_last.map(|n| format!(", the newest {n} kept")).unwrap_or_default();
        line("checkpoints", format!("{}, {every}at the end{keep}", dir.display()));
    }
    if !record.auto.is_empty() {
        let values = record.auto.iter().map(|(key, value)| format!("{key} = {value}"));
        line("auto", values.collect::<Vec<_>>().join(", "));
    }
    out
}

fn adam(optimizer: &OptimizerConfig) -> String {
    let hyper = &optimizer.hyper;
    let name = if hyper.decoupled { "AdamW" } else { "Adam" };
    let uncorrected = if hyper.bias_correction { "" } else { ", no bias correction" };
    format!(
        "{name}, betas {} and {}, eps {}, weight decay {}{uncorrected}",
        hyper.beta1,
        hyper.beta2,
        // As in a configuration: 1e-8, not 0.00000001.
        serde_json::json!(hyper.eps),
        hyper.weight_decay
    )
}

fn loss_scale(scaling: &LossScaling) -> String {
    match scaling {
        LossScaling::Static { scale } => format!("{scale}"),
        LossScaling::Dynamic(d) => format!(
            "dynamic from 2^{}, at least {}, doubled after {} good steps, {}",
            d.initial_scale_power,
            d.min_scale,
            d.window,
            match d.hysteresis {
                0 => "never halved".to_owned(),
                n => format!("halved after {n} overflows"),
            }
        ),
    }
}
