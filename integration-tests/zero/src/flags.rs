//! Flags that several commands have, and their checks.

use std::path::Path;
use std::str::FromStr;

use clap::ValueEnum;
use indicatif::HumanBytes;
use parse_size::parse_size;
use serde::{Deserialize, Serialize};
use zero_alloc::device::DType;

use crate::error::CliError;
use zero_models::hf::HfFolder;
use zero_models::{ModelConfig, PRESETS};

/// Element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DTypeFlag {
    /// IEEE single precision.
    Fp32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    Fp16,
}

impl DTypeFlag {
    /// The flag of a type of parameters.
    pub(crate) fn of(dtype: DType) -> Option<Self> {
        Self::from_name(dtype.name())
    }

    /// The flag of `name`: `fp32`, `bf16` or `fp16`.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::from_str(name, false).ok()
    }
}

impl From<DTypeFlag> for DType {
    fn from(flag: DTypeFlag) -> Self {
        match flag {
            DTypeFlag::Fp32 => DType::F32,
            DTypeFlag::Bf16 => DType::Bf16,
            DTypeFlag::Fp16 => DType::F16,
        }
    }
}

/// The help of `--model`: all presets, and what else it takes.
pub(crate) fn model_help(others: &str) -> String {
    format!("A preset ({}), {others}", PRESETS.join(", "))
}

/// The least memory of a GPU, and the fewest parameters of a model, that can be meant: less has
/// lost its unit.
const MIN_GPU_BYTES: u64 = 1 << 20;
/// The most memory of a GPU that can be meant.
const MAX_GPU_BYTES: u64 = 1 << 50;
const MIN_PARAMS: u64 = 1000;

/// Parses a whole number.
pub(crate) fn parse_whole<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| "expected a whole number, such as 1000".to_owned())
}

/// Parses the memory of a GPU: `24GiB` or `80GB`.
pub(crate) fn parse_gpu_memory(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        0 => Err("a GPU has memory; expected a size such as 24GiB".to_owned()),
        bytes if bytes > MAX_GPU_BYTES => Err(format!(
            "{bytes} bytes are too many for a GPU; expected at most {}",
            HumanBytes(MAX_GPU_BYTES)
        )),
        bytes if bytes < MIN_GPU_BYTES => {
            let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
            Err(format!(
                "{bytes} bytes are too few for a GPU; did you mean {digits}GiB?"
            ))
        }
        bytes => Ok(bytes),
    }
}

/// Parses `24GiB`, `80GB` or a number of bytes.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(|e| {
        format!("{text:?} is not a size ({e}); expected 24GiB, 80GB or a number of bytes")
    })
}

/// Parses a number above 0.
pub(crate) fn parse_positive(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|value: &f64| value.is_finite() && *value > 0.0)
        .ok_or_else(|| "expected a number above 0, such as 25".to_owned())
}

/// Parses a number of parameters: `7.5e9`, `7.5B`, `350M` or `124439808`.
pub(crate) fn parse_params(text: &str) -> Result<u64, String> {
    let expected =
        |e| format!("{text:?} is not a number of parameters ({e}); expected 7.5e9, 7.5B or 350M");
    // `parse_size` reads B as bytes; in a number of parameters it means 10^9.
    let count = parse_size(text.replace(['B', 'b'], "G")).map_err(|e| expected(e.to_string()))?;
    match count {
        0..MIN_PARAMS => Err(format!(
            "{text} parameters are too few for a model; did you mean {text}B?"
        )),
        // More are more than 2^64 bytes.
        1_000_000_000_000_000_001.. => Err(expected("at most 1e18".to_owned())),
        _ => Ok(count),
    }
}

/// Parses a number of tokens: `4M`, `1.4T` or `131072`.
pub(crate) fn parse_tokens(text: &str) -> Result<u64, String> {
    let count = parse_size(text).ok().filter(|tokens| *tokens > 0);
    count.ok_or_else(|| "expected a number of tokens, such as 131072 or 4M".to_owned())
}

/// The configuration of a preset or of a Hugging Face folder, and the folder.
pub(crate) fn find_model(
    name: &str,
    notices: &mut Vec<String>,
) -> Result<(ModelConfig, Option<HfFolder>), CliError> {
    if Path::new(name).is_dir() {
        let folder = HfFolder::open(Path::new(name)).map_err(CliError::usage)?;
        notices.extend(folder.warnings().iter().cloned());
        return Ok((folder.config().clone(), Some(folder)));
    }
    Ok((find_preset(name)?, None))
}

/// The configuration of a preset or of a folder that may have no weights.
pub(crate) fn find_config(name: &str, notices: &mut Vec<String>) -> Result<ModelConfig, CliError> {
    if Path::new(name).is_dir() {
        let found = HfFolder::config_in(Path::new(name));
        let (config, warnings) = found.map_err(CliError::usage)?;
        notices.extend(warnings);
        return Ok(config);
    }
    find_preset(name)
}

fn find_preset(name: &str) -> Result<ModelConfig, CliError> {
    ModelConfig::preset(name).map_err(|e| {
        let hint = if name.contains('/') {
            "; the folder does not exist"
        } else {
            ""
        };
        usage!("--model {name}: {e}{hint}")
    })
}

/// Checks that none of these flags is 0.
pub(crate) fn check_positive(flags: &[(&str, Option<u64>)]) -> Result<(), CliError> {
    match flags.iter().find(|(_, value)| *value == Some(0)) {
        Some((flag, _)) => Err(usage!("{flag} 0: expected at least 1")),
        None => Ok(()),
    }
}

/// Checks `--seq-len` against the positions of the model; `None` if the model has no limit.
pub(crate) fn check_seq_len(seq_len: u64, config: Option<&ModelConfig>) -> Result<(), CliError> {
    let positions = config.map(|config| config.max_positions() as u64);
    if (1..=positions.unwrap_or(u64::MAX)).contains(&seq_len) {
        return Ok(());
    }
    let range = positions.map_or("at least 1".to_owned(), |n| {
        format!("1 to {n}, the positions of the model")
    });
    let limit = config.map(limit_of_positions).unwrap_or_default();
    Err(usage!("--seq-len {seq_len}: expected {range}{limit}"))
}

/// Why the model has no more positions, to be appended to a message; empty for most models.
pub(crate) fn limit_of_positions(config: &ModelConfig) -> String {
    let limit = config.positions_limit();
    limit.map(|why| format!(" ({why})")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_counts_are_parsed() {
        let counts = [
            ("7.5e9", 7_500_000_000),
            ("7.5B", 7_500_000_000),
            ("13b", 13_000_000_000),
            ("350M", 350_000_000),
            ("1234", 1234),
            ("2K", 2000),
        ];

        counts
            .into_iter()
            .for_each(|(text, n)| assert_eq!(parse_params(text), Ok(n), "{text}"));
        for text in [
            "", "B", "-1", "0", "0.2", "7.5", "999", "NaN", "inf", "1e19", "7.5X",
        ] {
            assert!(parse_params(text).is_err(), "{text}");
        }

        assert_eq!(parse_tokens("4M"), Ok(4_000_000));
        assert_eq!(parse_tokens("64"), Ok(64));
        for text in ["", "0", "-1", "many"] {
            assert!(parse_tokens(text).is_err(), "{text}");
        }

        let sizes = [
            ("24GiB", 24 << 30),
            ("80GB", 80_000_000_000),
            (" 2 MiB", 2 << 20),
            ("1.5KiB", 1536),
            ("5g", 5_000_000_000),
            ("7", 7),
            ("18446744073709551615", u64::MAX),
        ];

        sizes
            .into_iter()
            .for_each(|(text, n)| assert_eq!(parse_bytes(text), Ok(n), "{text}"));
        for text in [
            "",
            "GiB",
            "5 parsecs",
            "-1GB",
            "NaNGB",
            "infGB",
            "18446744073709551615KB",
            "1e30",
        ] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }

        assert_eq!(parse_gpu_memory("24GiB"), Ok(24 << 30));
        for text in ["80", "81920", "80KiB", "2PiB"] {
            assert!(
                parse_gpu_memory(text).is_err_and(|e| e.contains("for a GPU")),
                "{text}"
            );
        }

        assert!(parse_gpu_memory("0").is_err_and(|e| !e.contains("did you mean")));
    }
}
