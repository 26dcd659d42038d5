//! The block `autotuning`.

use super::ConfigFileError;
use super::block::{Block, Key, keys};

/// `autotuning`, if it is enabled. Missing keys have DeepSpeed's defaults, but for the number of
/// trials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Autotuning {
    /// Whether the shortest step is the best, and not the most tokens per second.
    pub latency: bool,
    /// The first step that counts, from 1.
    pub start_profile_step: u64,
    /// The last step.
    pub end_profile_step: u64,
    /// `tuner_num_trials`; DeepSpeed's default is 50.
    pub trials: Option<u64>,
    /// The folder of the results.
    pub results_dir: String,
}

const SIMULATED: &str =
    "stages, micro-batches, offload and recomputation are all simulated, and the best are measured";
const KEPT: &str = "train_batch_size is kept, and the memory decides the micro-batch";

/// Unsupported keys.
const IGNORED: &[Key] = keys! {
    "fast" = Nothing => SIMULATED,
    "tuner_type" = Nothing => SIMULATED,
    "tuner_early_stopping" = Nothing => SIMULATED,
    "num_tuning_micro_batch_sizes" = Nothing => SIMULATED,
    "max_train_batch_size" = Nothing => KEPT,
    "min_train_batch_size" = Nothing => KEPT,
    "min_train_micro_batch_size_per_gpu" = Nothing => KEPT,
    "max_train_micro_batch_size_per_gpu" = Nothing => KEPT,
    "exps_dir" = Nothing => "trials are in results_dir",
    "overwrite" = Nothing =>
        "results of the same trials are taken up; remove results_dir to measure again",
    "metric_path" = Nothing => "the times are those of --metrics",
    "arg_mappings" = Nothing =>
        "trials have a configuration file and no flags of the user's program",
    "model_info" = Nothing => "the model is known",
    "model_info_path" = Nothing => "the model is known",
    "mp_size" = Nothing => "tensor parallelism is tuned, too",
};

/// Reads the block; `None` unless it is enabled.
pub(super) fn read(
    root: &mut Block,
    warnings: &mut Vec<String>,
) -> Result<Option<Autotuning>, ConfigFileError> {
    let Some(mut block) = root.block("autotuning")? else {
        return Ok(None);
    };
    if block.flag("enabled")? != Some(true) {
        return Ok(None);
    }
    let name = block.name("metric");
    let latency = match block.text("metric")?.as_deref() {
        // FLOPs per second of one model are in the order of its tokens per second.
        None | Some("throughput" | "flops") => false,
        Some("latency") => true,
        Some(other) => {
            return Err(ConfigFileError::WrongType {
                key: name,
                expected: "\"throughput\", \"latency\" or \"flops\"",
                got: format!("{other:?}"),
            });
        }
    };
    let start_profile_step = block.positive("start_profile_step")?.unwrap_or(3);
    let last = block.count_in(
        "end_profile_step",
        "a whole number, at least start_profile_step",
        |step| step >= start_profile_step,
    )?;
    let autotuning = Autotuning {
        latency,
        start_profile_step,
        end_profile_step: last.unwrap_or(start_profile_step.max(5)),
        trials: block.positive("tuner_num_trials")?,
        results_dir: block
            .text("results_dir")?
            .unwrap_or_else(|| "autotuning_results".to_owned()),
    };
    block.ignore(IGNORED, warnings)?;
    block.end_lenient(warnings);
    Ok(Some(autotuning))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DsConfig;

    fn parse(block: &str) -> (Option<Autotuning>, Vec<String>) {
        let file = DsConfig::parse(&format!("{{\"autotuning\": {block}}}")).unwrap();
        (file.autotuning, file.warnings)
    }

    #[test]
    fn block_is_read() {
        for off in ["{}", "{\"enabled\": false, \"fast\": true}", "null"] {
            assert_eq!(parse(off), (None, Vec::new()), "{off}");
        }
        let (defaults, warnings) = parse("{\"enabled\": true}");
        let expected = Autotuning {
            latency: false,
            start_profile_step: 3,
            end_profile_step: 5,
            trials: None,
            results_dir: "autotuning_results".to_owned(),
        };
        assert_eq!((defaults, warnings), (Some(expected), Vec::new()));

        let (given, warnings) = parse(
            r#"{"enabled": true, "metric": "latency", "start_profile_step": 2, "end_profile_step": 2,
                "tuner_num_trials": 7, "results_dir": "r", "fast": true, "other": 1}"#,
        );
        let expected = Autotuning {
            latency: true,
            start_profile_step: 2,
            end_profile_step: 2,
            trials: Some(7),
            results_dir: "r".to_owned(),
        };
        assert_eq!(given, Some(expected));
        assert!(
            warnings[0].starts_with("autotuning.fast is ignored: "),
            "{warnings:?}"
        );
        assert_eq!(warnings[1], "unknown key autotuning.other is ignored");
    }

    #[test]
    fn wrong_values_are_refused() {
        for (keys, expected) in [
            (r#""metric": "speed""#, "autotuning.metric is \"speed\""),
            (
                r#""start_profile_step": 0"#,
                "autotuning.start_profile_step is 0",
            ),
            (
                r#""start_profile_step": 4, "end_profile_step": 3"#,
                "autotuning.end_profile_step is 3; expected a whole number, at least start_profile_step",
            ),
        ] {
            let text = format!("{{\"autotuning\": {{\"enabled\": true, {keys}}}}}");
            let error = DsConfig::parse(&text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
