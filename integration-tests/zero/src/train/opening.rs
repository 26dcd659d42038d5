//! The text before a run: all settings that decide its numbers. `run.json` has the same content.

use std::fmt::Write;

use indicatif::HumanCount;

use super::setup::RunSetup;
use crate::output::counted;
use crate::settings::optimizer;

/// The settings of the run.
pub(crate) fn text(setup: &RunSetup) -> String {
    let (record, options) = (&setup.record, &setup.options);
    let (model, data, batch) = (&record.model, &record.data, record.batch);
    let mut out = String::new();
    let mut line = |name: &str, text: String| {
        let _ = writeln!(out, "{}: {}", printable(name), printable(&text));
    };
    for notice in &setup.notices {
        line("note", notice.clone());
    }
    let each = setup
        .device
        .as_ref()
        .map(|gpu| gpu.name.clone())
        .unwrap_or_else(|| counted(setup.workload.threads as u64, "thread"));
    let ranks = counted(batch.ranks as u64, "rank");
    line(
        &model.name,
        format!(
            "{} parameters in {}, ZeRO stage {}, {ranks} x {each}",
            HumanCount(model.parameters),
            setup.settings.dtype,
            record.stage,
        ),
    );
    let from = options
        .resume
        .as_ref()
        .map(|path| format!(", resumes {}", path.display()))
        .unwrap_or_default();
    line(
        "run",
        format!(
            "{}, seed {}, weights from {}{from}",
            record.run, record.seed, model.weights
        ),
    );
    let tokenizer = data
        .tokenizer
        .as_ref()
        .map(|path| format!(" by {path}"))
        .unwrap_or_default();
    line(
        "data",
        format!("{}{tokenizer}", setup.workload.data.describe()),
    );
    if let Some(validation) = &options.validation {
        line(
            "validation",
            crate::settings::validation::describe(validation, options.seq_len),
        );
    }
    line(
        "step",
        format!(
            "{ranks} x {} x {} x {} = {}",
            match batch.grad_accum {
                1 => "1 micro-batch".to_owned(),
                n => format!("{} micro-batches", HumanCount(n)),
            },
            counted(batch.micro_batch, "row"),
            counted(batch.seq_len as u64, "token"),
            counted(batch.step_tokens, "token"),
        ),
    );
    if setup.settings.sums_locally() {
        line(
            "gradients",
            "micro-batches are summed on each rank and reduced once a step".to_owned(),
        );
    }
    let first = setup.first_step + 1;
    if first <= record.steps {
        let tokens = (record.steps - setup.first_step) as f64 * batch.step_tokens as f64;
        let epochs = tokens / data.tokens.max(1) as f64;
        line(
            "steps",
            format!(
                "{first} to {}: {epochs:.3} epochs of the data",
                record.steps
            ),
        );
    }
    let rules = &record.optimizer;
    line("optimizer", optimizer::describe(rules));
    if !record.param_groups.is_default() {
        line("parameter groups", record.param_groups.to_string());
    }
    line("learning rate", format!("{}, {}", rules.lr, rules.schedule));
    let clip = match rules.max_grad_norm {
        0.0 => "off".to_owned(),
        norm => format!("gradient norm {norm}"),
    };
    line("clip", clip);
    line(
        "loss scale",
        optimizer::describe_loss_scaling(&rules.loss_scaling),
    );
    if record.activations.activation_checkpointing {
        line("activations", "recomputed in backward".to_owned());
    } else if record.activations.recompute_gelu {
        line(
            "activations",
            "the output of GELU is recomputed in backward".to_owned(),
        );
    }
    if record.offload.format.remainder && !record.offload.updates_on_host() {
        line(
            "masters",
            "bf16 parameters and 16-bit remainders".to_owned(),
        );
    }
    if record.offload.is_any() {
        line("offload", record.offload.to_string());
    }
    if let Some((dir, every)) = &options.checkpoint {
        let every = if *every == 0 {
            String::new()
        } else {
            format!("every {every} steps and ")
        };
        let keep = options
            .keep_last
            .map(|n| format!(", the newest {n} kept"))
            .unwrap_or_default();
        line(
            "checkpoints",
            format!("{}, {every}at the end{keep}", dir.display()),
        );
    }
    for (name, path) in [("metrics", &setup.metrics), ("report", &setup.report)] {
        if let Some(path) = path {
            line(name, path.display().to_string());
        }
    }
    // One line for each block of the configuration.
    let mut autos: Vec<_> = record.auto.iter().collect();
    autos.sort_by_key(|&(key, _)| block_of(key));
    for block in autos.chunk_by(|one, next| block_of(one.0) == block_of(next.0)) {
        let values = block.iter().map(|(key, value)| format!("{key} = {value}"));
        line("auto", values.collect::<Vec<_>>().join(", "));
    }
    out
}

/// The text in one line, without the control characters that a `run.json` from elsewhere may have.
fn printable(text: &str) -> String {
    let escaped = |c: char| {
        if c.is_control() {
            c.escape_default().to_string()
        } else {
            c.to_string()
        }
    };
    text.chars().map(escaped).collect()
}

/// The block of a configuration key: `zero_optimization` of `zero_optimization.stage`; empty for a
/// key of the file.
fn block_of(key: &str) -> &str {
    key.split_once('.').map_or("", |(block, _)| block)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(printable("a b/µ\n\u{1b}[2J"), "a b/µ\\n\\u{1b}[2J");
    }
}
