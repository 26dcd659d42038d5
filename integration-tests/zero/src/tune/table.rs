//! The best configurations as text.

use indicatif::HumanCount;

use super::candidate::CONFIG_FILE;
use super::{Choice, Tuned};
use crate::output::{bytes, counted};
use crate::plan::calibrated;

pub(super) fn text(tuned: &Tuned, model: &str) -> String {
    let calibrated = calibrated(tuned.calibrated_on.as_deref(), tuned.on_host);
    let mut text = format!(
        "{} on {}, {}: {} configurations, {} simulated, {} did not fit {}, {} are refused; {calibrated}\n",
        tuned.model,
        counted(tuned.gpus, "GPU"),
        counted(tuned.nodes, "node"),
        HumanCount(tuned.candidates as u64),
        HumanCount(tuned.simulated as u64),
        HumanCount(tuned.did_not_fit as u64),
        bytes(tuned.gpu_memory_bytes),
        HumanCount(tuned.refused as u64),
    );
    if let Some(tokens) = tuned.batch_tokens {
        text += &format!("A step has {} tokens.\n", HumanCount(tokens));
    }
    if tuned.extrapolated {
        text += "Extrapolated: the formulas were compared with runs of up to 128 GPUs.\n";
    }
    for (number, choice) in tuned.best.iter().enumerate() {
        text += &of_choice(number + 1, choice, tuned, model);
    }
    text
}

fn of_choice(number: usize, choice: &Choice, tuned: &Tuned, model: &str) -> String {
    let [low, high] = choice.step_ms_range;
    let mut text = format!(
        "\n{number}. {:.1} ms a step ({low:.1} to {high:.1}), {} tokens/s, MFU {:.1}%, {} of a GPU",
        choice.step_ms,
        HumanCount(choice.tokens_per_s as u64),
        100.0 * choice.mfu,
        bytes(choice.gpu_bytes)
    );
    if choice.host_bytes > 0 {
        text += &format!(", {} of the host a GPU", bytes(choice.host_bytes));
    }
    text += &format!(
        "\n   bound by {}; communication and the host expose {:.1} ms\n",
        choice.bound, choice.exposed_ms
    );
    // On several nodes a launcher starts the ranks.
    let ranks = match tuned.nodes {
        1 => format!(" --ranks {}", tuned.gpus),
        _ => String::new(),
    };
    let flags = choice.flags.join(" ");
    text += &format!("   zero train --model {model} --device cuda{ranks} {flags}\n");
    let file = match choice.candidate.prefetch_elems {
        Some(_) => format!(", the {CONFIG_FILE} of these flags"),
        None => String::new(),
    };
    text += &format!("   DeepSpeed{file}: {}\n", choice.deepspeed);
    text
}
