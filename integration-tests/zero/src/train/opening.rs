//! The text before a run: all settings that decide its numbers. `run.json` has the same content.

use std::fmt::Write;

use indicatif::HumanCount;
use zero_optim::Masters;

use super::setup::RunSetup;
use crate::output::counted;
use crate::settings::outputs::Output;
use crate::settings::{muon, optimizer, validation};

/// The settings of the run.
pub(crate) fn text(setup: &RunSetup) -> String {
    let mut lines = Lines::default();
    for notice in &setup.notices {
        lines.add("note", notice);
    }
    run(&mut lines, setup);
    data(&mut lines, setup);
    step(&mut lines, setup);
    optimizer(&mut lines, setup);
    memory(&mut lines, setup);
    outputs(&mut lines, setup);
    autos(&mut lines, setup);
    lines.text
}

/// The lines of the text.
#[derive(Default)]
struct Lines {
    text: String,
}

impl Lines {
    fn add(&mut self, name: &str, text: &str) {
        let _ = writeln!(self.text, "{}: {}", printable(name), printable(text));
    }
}

/// The model, the ranks and the origin of the weights.
fn run(lines: &mut Lines, setup: &RunSetup) {
    let record = &setup.record;
    let model = &record.model;
    let each = match &setup.device {
        Some(gpu) => gpu.name.clone(),
        None => counted(setup.workload.threads as u64, "thread"),
    };

    let shape = format!(
        "{} parameters in {}, ZeRO stage {}, {} x {each}",
        HumanCount(model.parameters),
        setup.settings.dtype,
        record.stage,
        ranks(setup),
    );

    lines.add(&model.name, &shape);

    let from = match &setup.options.resume {
        Some(path) => format!(", resumes {}", path.display()),
        None => String::new(),
    };

    let origin = format!(
        "{}, seed {}, weights from {}{from}",
        record.run, record.seed, model.weights
    );
    lines.add("run", &origin);
}

fn ranks(setup: &RunSetup) -> String {
    counted(setup.record.batch.ranks as u64, "rank")
}

fn data(lines: &mut Lines, setup: &RunSetup) {
    let tokenizer = match &setup.record.data.tokenizer {
        Some(path) => format!(" by {path}"),
        None => String::new(),
    };
    let data = &setup.workload.data;
    let first = match data.first_trained() {
        Some(text) => format!("; first: {text}"),
        None => String::new(),
    };
    lines.add("data", &format!("{}{tokenizer}{first}", data.describe()));
    if let Some(options) = &setup.options.validation {
        let text = validation::describe(options, setup.options.seq_len);
        lines.add("validation", &text);
    }
}

/// The batch of a step, and the steps.
fn step(lines: &mut Lines, setup: &RunSetup) {
    let record = &setup.record;
    let batch = record.batch;
    let micro_batches = match batch.grad_accum {
        1 => "1 micro-batch".to_owned(),
        n => format!("{} micro-batches", HumanCount(n)),
    };

    let batches = match setup.settings.mesh.ranks_of_batch() {
        1 => ranks(setup),
        share => format!("{} / {share}", ranks(setup)),
    };
    let product = format!(
        "{batches} x {micro_batches} x {} x {} = {}",
        counted(batch.micro_batch, "row"),
        counted(batch.seq_len as u64, "token"),
        counted(batch.step_tokens, "token"),
    );

    lines.add("step", &product);
    if let Some(groups) = setup.record.mesh.describe(batch.ranks) {
        lines.add("groups", &groups);
    }
    if let Some(route) = &setup.route.text {
        lines.add("collectives", route);
    }
    if let Some(cut) = setup.record.mesh.describe_parts() {
        lines.add("parameters", &cut);
    }
    if let Some(shared) = setup.record.mesh.describe_sequences() {
        lines.add("sequences", &shared);
    }
    if setup.settings.sums_locally() {
        lines.add(
            "gradients",
            "micro-batches are summed on each rank and reduced once a step",
        );
    }

    let first = setup.first_step + 1;
    if first <= record.steps {
        let steps = (record.steps - setup.first_step) as f64;
        let epochs = match setup
            .workload
            .data
            .pace(batch.rows_of_step())
            .steps_of_epoch()
        {
            Some(of_epoch) => steps / of_epoch as f64,
            None => steps * batch.step_tokens as f64 / record.data.tokens.max(1) as f64,
        };
        let last = record.steps;
        lines.add(
            "steps",
            &format!("{first} to {last}: {epochs:.3} epochs of the data"),
        );
    }
}

fn optimizer(lines: &mut Lines, setup: &RunSetup) {
    let record = &setup.record;
    let rules = &record.optimizer;
    lines.add("optimizer", &optimizer::describe(rules));
    if let Ok(groups) = setup.settings.resolve_groups(&setup.layout)
        && groups.has_matrices()
    {
        let [adamw, muon] = groups.tensors_by_rule(&setup.layout);
        lines.add("by Muon", &muon::describe(&setup.settings.muon));
        lines.add("its tensors", &muon.join(", "));
        lines.add("by AdamW", &adamw.join(", "));
    }
    if !record.param_groups.is_default() {
        lines.add("parameter groups", &record.param_groups.to_string());
    }
    lines.add(
        "learning rate",
        &format!("{}, {}", rules.lr, rules.schedule),
    );
    let clip = match rules.max_grad_norm {
        0.0 => "off".to_owned(),
        norm => format!("gradient norm {norm}"),
    };
    lines.add("clip", &clip);
    let scaling = optimizer::describe_loss_scaling(&rules.loss_scaling);
    lines.add("loss scale", &scaling);
}

/// The settings that save memory.
fn memory(lines: &mut Lines, setup: &RunSetup) {
    let record = &setup.record;
    if record.activations.activation_checkpointing {
        lines.add("activations", "recomputed in backward");
    } else if record.activations.recompute_gelu {
        lines.add(
            "activations",
            "the output of GELU is recomputed in backward",
        );
    }
    if record.offload.format.masters == Masters::Remainder && !record.offload.updates_on_host() {
        lines.add("masters", "bf16 parameters and 16-bit remainders");
    }
    if record.offload.is_any() {
        lines.add("offload", &record.offload.to_string());
    }
}

/// The folders and files that the run writes.
fn outputs(lines: &mut Lines, setup: &RunSetup) {
    let options = &setup.options;
    if let Some((dir, every)) = &options.checkpoint {
        let every = match every {
            0 => String::new(),
            every => format!("every {every} steps and "),
        };
        let keep = match options.keep_last {
            Some(n) => format!(", the newest {n} kept"),
            None => String::new(),
        };
        let text = format!("{}, {every}at the end{keep}", dir.display());
        lines.add("checkpoints", &text);
    }
    for output in Output::ALL {
        if let Some(path) = setup.outputs.path(output) {
            lines.add(output.name().0, &path.display().to_string());
        }
    }
}

/// The values of `"auto"`, one line for each block of the configuration.
fn autos(lines: &mut Lines, setup: &RunSetup) {
    let mut autos: Vec<_> = setup.record.auto.iter().collect();
    autos.sort_by_key(|&(key, _)| block_of(key));
    for block in autos.chunk_by(|one, next| block_of(one.0) == block_of(next.0)) {
        let values = block.iter().map(|(key, value)| format!("{key} = {value}"));
        lines.add("auto", &values.collect::<Vec<_>>().join(", "));
    }
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
