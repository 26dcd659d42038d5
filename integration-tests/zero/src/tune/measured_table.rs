//! Measured configurations as text.

use indicatif::HumanCount;

use super::measured_tune::{MeasuredChoice, MeasuredTune, shell_line};
use crate::output::{bytes, counted};

/// The table, and the command line of the best.
pub(super) fn text(tune: &MeasuredTune) -> String {
    let best = tune.trials.first();
    let best = best.map(|best| format!("best: {}\n", shell_line(&best.command)));
    table(tune) + &best.unwrap_or_default()
}

/// The trials, and how far the simulation was off.
pub(super) fn table(tune: &MeasuredTune) -> String {
    let search = &tune.search;
    let trials = &tune.trials;
    let earlier = trials.iter().filter(|trial| trial.earlier).count();
    let mut text = format!(
        "{} on {}, {}: {} configurations simulated, {} tried: the median of {} after the first {}",
        search.model,
        tune.machine,
        counted(tune.ranks as u64, "rank"),
        HumanCount(search.simulated as u64),
        trials.len(),
        counted(tune.counted_steps, "step"),
        tune.steps - tune.counted_steps,
    );
    if earlier > 0 {
        text += &format!("; {earlier} by an earlier tune");
    }

    text += "\n\nrank  simulated ms  measured ms    error    tokens/s  peak memory  flags\n";
    trials.iter().for_each(|trial| text += &row(trial));
    text += "\n";
    for trial in trials {
        if let Some(failure) = &trial.failure {
            let log = tune.out.join(format!("{}.log", trial.trial));
            let flags = trial.flags.join(" ");
            text += &format!("{flags}: {failure} ({})\n", log.display());
        }
    }
    text += &format!(
        "the simulation was off by {:.1}% on average, {:+.1}% at worst\n",
        tune.mean_error_percent, tune.worst_error_percent
    );
    text
}

fn row(trial: &MeasuredChoice) -> String {
    let dash = || "-".to_owned();
    let number = |value: Option<f64>| value.map_or_else(dash, |value| format!("{value:.1}"));
    format!(
        "{:>4}  {:>12.1}  {:>11}  {:>7}  {:>10}  {:>11}  {}\n",
        trial.rank.map_or_else(dash, |rank| rank.to_string()),
        trial.simulated_ms,
        number(trial.measured_ms),
        trial
            .error_percent
            .map_or_else(dash, |error| format!("{error:+.1}%")),
        trial
            .tokens_per_s
            .map_or_else(dash, |speed| HumanCount(speed as u64).to_string()),
        trial.peak_bytes.map_or_else(dash, bytes),
        trial.flags.join(" ")
    )
}
