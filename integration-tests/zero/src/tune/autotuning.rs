//! `zero train` with `autotuning` in its DeepSpeed configuration: tunes in place of training.

use std::path::{Path, PathBuf};

use serde_json::Value;
use zero_ckpt::files::{self, SMALL_FILE_BYTES};

use super::measured::{Measurement, Metric, StepRows, TRIALS, document_text, measure};
use super::measured_tune::shell_line;
use super::merge::merged;
use super::outcome::TrialSteps;
use super::{TuneArgs, measured, measured_table};
use crate::error::CliError;
use crate::flags::{DTypeFlag, check_seq_len, find_model};
use crate::output::{print_note, print_text};
use crate::settings::args::TrainArgs;
use crate::settings::batch::default_seq_len;
use crate::train::launched::launched_ranks;
use zero_config::{Autotuning, BatchKeys, DsConfig};

/// The configuration of the best, as DeepSpeed names it.
const OPTIMAL: &str = "ds_config_optimal";
const MODEL: &str = "nano";

/// Flags whose settings are tuned.
const TUNED: &str = "\
    --stage --micro-batch --grad-accum --activation-checkpointing --bucket-elems \
    --offload --offload-params --offload-activations --shard-group --shard-optimizer \
    --hpz --ulysses --tensor-parallel --resume";

/// Flags that a trial has itself, or that belong to a whole run.
const OF_RUN: &str = "\
    --config --model --data --device --ranks --seq-len --dtype --steps --epochs \
    --schedule --min-lr --warmup-steps --decay-steps --checkpoint --checkpoint-every \
    --no-checkpoint --keep-last --check-replicas --resume-exact --metrics --tensorboard \
    --csv --report --breakdown --val-data --val-split --eval-every --eval-tokens \
    --sample-every --sample-prompt --sample-tokens";

/// Tunes if the configuration file enables it. Returns whether it does.
///
/// # Errors
/// As [`measured::measure`], or flags that a tune cannot follow.
pub(crate) fn tuned(args: &TrainArgs) -> Result<bool, CliError> {
    let Some(path) = &args.config else {
        return Ok(false);
    };
    let file = DsConfig::open(path).map_err(CliError::usage)?;
    let Some(autotuning) = &file.autotuning else {
        return Ok(false);
    };
    for warning in &file.warnings {
        print_note(format_args!("warning: {warning}"));
    }
    let given = std::env::args_os().skip(2).map(|argument| {
        let error = |argument: std::ffi::OsString| {
            refused(&format!(
                "its trials cannot have the argument {}, which is no UTF-8",
                argument.display()
            ))
        };
        argument.into_string().map_err(error)
    });
    let given: Vec<String> = given.collect::<Result<_, _>>()?;
    let user = DsConfig::document(path).map_err(CliError::usage)?;
    run(args, &file, autotuning, &user, &given).map(|()| true)
}

fn run(
    args: &TrainArgs,
    file: &DsConfig,
    autotuning: &Autotuning,
    user: &Value,
    given: &[String],
) -> Result<(), CliError> {
    if launched_ranks(args)? > 1 {
        return Err(refused(
            "it starts the ranks of its trials itself: start one process",
        ));
    }
    if file.sequence_ranks.is_some_and(|ranks| ranks > 1) {
        return Err(refused(
            "it does not tune with sequence_parallel_size: remove the key",
        ));
    }
    let flags = flags_of_trials(given)?;
    let measurement = measurement(args, file, autotuning, user, flags)?;
    let tune = measure(&measurement)?;
    let mut text = measured_table::table(&tune);
    let Some(best) = tune.trials.first() else {
        return Err(failure!("autotuning: no trial"));
    };
    let config = merged(user, &best.choice);
    let path = write_optimal(&measurement.out, &config)?;
    let line = with_config(given, &path, tune.ranks);
    text += &format!(
        "best: {}\ntrain with it: {}\n",
        path.display(),
        shell_line(&line)
    );
    print_text(text)
}

fn refused(why: &str) -> CliError {
    usage!("autotuning: {why}, or set autotuning.enabled to false to train")
}

fn measurement(
    args: &TrainArgs,
    file: &DsConfig,
    autotuning: &Autotuning,
    user: &Value,
    flags: Vec<String>,
) -> Result<Measurement, CliError> {
    let Some(data) = args.data.clone() else {
        return Err(refused("pass --data, which its trials train on"));
    };
    let model = args.model.clone().unwrap_or_else(|| MODEL.to_owned());
    let (config, _) = find_model(&model, &mut Vec::new())?;
    let positions = config.max_positions();
    let seq_len = args.seq_len.unwrap_or(default_seq_len(positions)) as u64;
    check_seq_len(seq_len, Some(&config))?;
    let of_file = file.dtype.and_then(DTypeFlag::of);
    let first = autotuning.start_profile_step;
    Ok(Measurement {
        search: TuneArgs {
            model,
            seq_len: Some(seq_len),
            dtype: Some(args.dtype.or(of_file).unwrap_or(DTypeFlag::Fp32)),
            ..TuneArgs::default()
        },
        rows: rows(&file.batch),
        data,
        device: args.device,
        ranks: args.ranks,
        trials: autotuning.trials.map_or(TRIALS, |trials| trials as usize),
        steps: TrialSteps {
            warm_up: first - 1,
            total: autotuning.end_profile_step,
        },
        minutes: measured::MINUTES,
        out: PathBuf::from(&autotuning.results_dir),
        metric: match autotuning.latency {
            true => Metric::Latency,
            false => Metric::Throughput,
        },
        flags,
        config: Some(user.clone()),
    })
}

/// The rows of a step, which tuning keeps; `None`: the file has no sizes.
fn rows(batch: &BatchKeys) -> Option<StepRows> {
    match (batch.train_batch_size, batch.micro_batch, batch.grad_accum) {
        (Some(rows), _, _) => Some(StepRows::OfAll(rows)),
        (None, Some(micro), accum) => {
            Some(StepRows::OfRank(micro.saturating_mul(accum.unwrap_or(1))))
        }
        (None, None, _) => None,
    }
}

/// The flags of `zero train`, each with its values.
fn groups(given: &[String]) -> impl Iterator<Item = (&str, &[String])> {
    let groups = given.chunk_by(|_, next| !next.starts_with("--"));
    groups.map(|group| {
        let name = group[0].split('=').next().unwrap_or_default();
        (name, group)
    })
}

fn is_among(flags: &str, name: &str) -> bool {
    flags.split_whitespace().any(|flag| flag == name)
}

/// The user's flags that trials have, too.
fn flags_of_trials(given: &[String]) -> Result<Vec<String>, CliError> {
    let mut flags = Vec::new();
    for (name, group) in groups(given) {
        if is_among(TUNED, name) {
            return Err(refused(&format!("it decides {name}: remove the flag")));
        }
        if name == "--share-gpus" {
            return Err(refused(
                "times of ranks that share GPUs mean nothing: remove --share-gpus",
            ));
        }
        if !is_among(OF_RUN, name) {
            flags.extend_from_slice(group);
        }
    }
    Ok(flags)
}

/// The user's arguments with another configuration, and the ranks of the trials.
fn with_config(given: &[String], config: &Path, ranks: usize) -> Vec<String> {
    let mut line = vec![
        "train".to_owned(),
        "--config".to_owned(),
        config.display().to_string(),
    ];
    let mut has_ranks = false;
    for (name, group) in groups(given) {
        has_ranks |= name == "--ranks";
        if name != "--config" {
            line.extend_from_slice(group);
        }
    }
    if !has_ranks {
        line.extend(["--ranks".to_owned(), ranks.to_string()]);
    }
    line
}

/// Writes the configuration into the first of `ds_config_optimal.json`, `ds_config_optimal-2.json`,
/// ... that does not exist or has it already: no other file is replaced.
fn write_optimal(folder: &Path, config: &Value) -> Result<PathBuf, CliError> {
    let text = document_text(config)?;
    let numbered = (2u64..).map(|number| format!("{OPTIMAL}-{number}.json"));
    for name in std::iter::once(format!("{OPTIMAL}.json")).chain(numbered) {
        let path = folder.join(name);
        let failed =
            |error: std::io::Error| failure!("failed to write {}: {error}", path.display());
        match files::read_if_present(&path, SMALL_FILE_BYTES).map_err(failed)? {
            Some(found) if found == text.as_bytes() => return Ok(path),
            Some(_) => {}
            None => {
                std::fs::write(&path, text).map_err(failed)?;
                return Ok(path);
            }
        }
    }
    Err(failure!(
        "{}: no free name for {OPTIMAL}.json",
        folder.display()
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn trials_have_the_users_flags() {
        let given = words(
            "--config a.json --data d --threads 2 --pack=true --steps=7 --cuda-graph --lr 1e-3",
        );
        let flags = flags_of_trials(&given).unwrap();
        assert_eq!(
            flags,
            words("--threads 2 --pack=true --cuda-graph --lr 1e-3")
        );
        for flag in [
            "--stage 2",
            "--stage=2",
            "--resume x",
            "--offload-params cpu",
        ] {
            let error = flags_of_trials(&words(flag)).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            let name = flag.split([' ', '=']).next().unwrap();
            assert!(error.to_string().contains(name), "{error}");
        }

        let line = with_config(&given, Path::new("b.json"), 2);
        let expected = words(
            "train --config b.json --data d --threads 2 --pack=true --steps=7 --cuda-graph --lr 1e-3 --ranks 2",
        );
        assert_eq!(line, expected);
        let line = with_config(&words("--ranks 4 --config=a.json"), Path::new("b.json"), 4);
        assert_eq!(line, words("train --config b.json --ranks 4"));
    }

    #[test]
    fn rows_of_a_step_are_kept() {
        let of = |train_batch_size, micro_batch, grad_accum| {
            rows(&BatchKeys {
                train_batch_size,
                micro_batch,
                grad_accum,
            })
        };
        assert_eq!(of(Some(32), Some(4), None), Some(StepRows::OfAll(32)));
        assert_eq!(of(None, Some(4), Some(2)), Some(StepRows::OfRank(8)));
        assert_eq!(of(None, None, None), None);
    }

    #[test]
    fn no_other_file_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let write = |value: Value| {
            let path = write_optimal(dir.path(), &value).unwrap();
            path.file_name().unwrap().display().to_string()
        };
        std::fs::write(dir.path().join("ds_config_optimal.json"), "mine").unwrap();
        assert_eq!(write(json!({"a": 1})), "ds_config_optimal-2.json");
        assert_eq!(write(json!({"a": 1})), "ds_config_optimal-2.json");
        assert_eq!(write(json!({"a": 2})), "ds_config_optimal-3.json");
        let first = std::fs::read_to_string(dir.path().join("ds_config_optimal.json"));
        assert_eq!(first.unwrap(), "mine");
    }
}
