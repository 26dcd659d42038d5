//! The settings that all ranks of a run must have in common.
//!
//! Ranks in separate processes read their settings from their own command lines and files. They
//! compare `run.json` and what follows, except what may differ: paths, the id of the run, its
//! outputs, threads and limits.

use crc_fast::CrcAlgorithm;
use serde_json::Value;
use zero_optim::RankSettings;
use zero_shard::Layout;
use zero_trainer::{Home, Settings};

use super::changes::leaves;
use super::record::RunRecord;
use super::table;

/// The settings of a run besides its record.
pub(crate) struct Unrecorded<'a> {
    pub(crate) settings: &'a Settings,
    pub(crate) layout: &'a Layout,
    /// Whether rows are consecutive tokens, as those of a file of tokens.
    pub(crate) in_order: bool,
    /// The checksum of the tokenizer's files, if a tokenizer made the tokens.
    pub(crate) tokenizer: Option<u64>,
    /// Whether a folder has the initial weights.
    pub(crate) loads_weights: bool,
    /// The setting for GPUs, if it is one; by default the memory of each decides.
    pub(crate) recompute_gelu: Option<bool>,
    /// Whether the run saves checkpoints.
    pub(crate) saves: bool,
}

/// The settings that must be equal on all ranks.
pub(crate) fn settings(record: &RunRecord, unrecorded: &Unrecorded<'_>) -> RankSettings {
    let Unrecorded {
        settings, layout, ..
    } = unrecorded;
    let mut document = record.document();
    let checksum = |sum: u64| Value::String(format!("{sum:016x}"));
    document["data"]["order"] = Value::from(if unrecorded.in_order {
        "consecutive"
    } else {
        "random"
    });
    document["data"]["tokenizer"] = unrecorded.tokenizer.map_or(Value::Null, checksum);
    document["model"]["source"] = Value::from(if unrecorded.loads_weights {
        "a folder"
    } else {
        "initial weights"
    });
    let units = format!("{:?}", layout.units());
    document["layout"] = checksum(crc_fast::checksum(
        CrcAlgorithm::Crc64Nvme,
        units.as_bytes(),
    ));
    document["checkpoint"] = Value::Bool(unrecorded.saves);

    // The settings that act, in place of those that were requested.
    document["recompute_gelu"] = unrecorded.recompute_gelu.map_or(Value::Null, Value::Bool);
    document["communication"]["reduce_every_micro_batch"] = Value::Null;
    document["communication"]["sums_locally"] = Value::Bool(settings.sums_locally());
    if settings.stage.shards_params() {
        document["check_replicas"] = Value::Null;
    }
    // The record leaves out the default. Folders are those of one machine.
    document["offload"] = serde_json::to_value(&record.offload).unwrap_or_default();
    document["offload"]["optimizer"] = Value::from(tier(&record.offload.optimizer));
    document["offload"]["params"] = Value::from(tier(&record.offload.params));

    let skips = |path: &str| table::named(path).is_some_and(|row| !row.is_compared);
    let mut leaves: Vec<_> = leaves(&document, &skips).into_iter().collect();
    leaves.sort_by_key(|(name, _)| place(name));
    leaves
        .into_iter()
        .map(|(name, value)| (label(&name), value))
        .collect()
}

/// A place of offloaded state, without its folder.
fn tier(home: &Home) -> &'static str {
    match home {
        Home::Device => "none",
        Home::Host => "cpu",
        Home::Nvme(_) => "nvme",
    }
}

/// The position in the table; the end if no row covers `name`.
fn place(name: &str) -> usize {
    table::covering(name).map_or(usize::MAX, |(place, _)| place)
}

/// The flag of a setting and its name in `run.json`.
fn label(name: &str) -> String {
    match table::covering(name) {
        Some((_, row)) if !row.flag.is_empty() => format!("{} ({name})", row.flag),
        _ => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_name_decides_the_place() {
        assert_eq!(label("optimizer.lr"), "--lr (optimizer.lr)");
        assert_eq!(
            label("optimizer.hyper.decoupled"),
            "optimizer of --config (optimizer.hyper.decoupled)"
        );
        assert_eq!(label("data.fingerprint"), "--data (data.fingerprint)");
        assert_eq!(
            label("checkpoint"),
            "--checkpoint or --no-checkpoint (checkpoint)"
        );
        assert_eq!(
            label("a setting of a later version"),
            "a setting of a later version"
        );
        // A setting precedes those that are derived from it.
        assert!(place("model.config.n_embd") < place("layout"));
        assert!(place("batch.micro_batch") < place("batch.step_tokens"));
        assert!(
            place("validation.split") < place("data.tokens")
                && place("data.tokens") < place("data.fingerprint")
        );
        assert!(place("checkpoint_every") > place("checkpoint"));
    }
}
