//! `zero ckpt`: what is in a checkpoint, whether it is whole, and the way to Hugging Face and back.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use zero_ckpt::{ExportOptions, Reader, StateDtype, Store, StoreOptions};

use crate::cli::CliError;
use crate::cli::output::{note, say};
use crate::hf::HfFolder;

/// Look into checkpoints, check them, and convert them to and from Hugging Face's layout.
#[derive(Args, Debug)]
pub struct CkptArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Print what a checkpoint is and holds
    Inspect {
        /// A directory of checkpoints (the one that `latest` names is taken) or one checkpoint in it
        checkpoint: PathBuf,
        /// Print the manifest as JSON
        #[arg(long)]
        json: bool,
    },
    /// Read every byte and compare it with the checksums; what is damaged, or had to be passed over, is a failure
    Verify {
        /// A directory of checkpoints (the one that `latest` names is taken) or one checkpoint in it
        checkpoint: PathBuf,
    },
    /// Write the weights as safetensors, in the layout of Hugging Face
    Export {
        /// A directory of checkpoints (the one that `latest` names is taken) or one checkpoint in it
        checkpoint: PathBuf,
        /// The folder to write; it must not exist or be empty
        out: PathBuf,
        /// Element type of the files
        #[arg(long, value_enum, default_value = "fp32")]
        dtype: ExportDtype,
        /// Begin a new file where this would be exceeded: 5GB, 500MiB, a number of bytes
        #[arg(long, default_value = "5GB", value_parser = parse_size, value_name = "SIZE")]
        max_shard_size: u64,
        /// Another state than the weights, such as first_moment
        #[arg(long, default_value = "master")]
        state: String,
    },
    /// Make a checkpoint, weights only, of a Hugging Face GPT-2 folder
    Import {
        /// The folder with config.json and model.safetensors (or its index)
        model: PathBuf,
        /// The directory to save the checkpoint into
        checkpoint: PathBuf,
    },
}

#[derive(ValueEnum, Clone, Copy, Debug)]
enum ExportDtype {
    Fp32,
    Bf16,
    Fp16,
}

impl From<ExportDtype> for StateDtype {
    fn from(dtype: ExportDtype) -> Self {
        match dtype {
            ExportDtype::Fp32 => StateDtype::F32,
            ExportDtype::Bf16 => StateDtype::BF16,
            ExportDtype::Fp16 => StateDtype::F16,
        }
    }
}

/// Runs `zero ckpt`.
///
/// # Errors
/// What is wrong with the checkpoint or folder, as a failure; it names the file and the place.
pub fn run(args: CkptArgs) -> Result<(), CliError> {
    match args.command {
        Command::Inspect { checkpoint, json } => {
            let reader = open(&checkpoint)?;
            if json {
                say(serde_json::to_string_pretty(reader.manifest()).map_err(failure)? + "\n")
            } else {
                say(reader.describe())
            }
        }
        Command::Verify { checkpoint } => {
            let reader = Reader::open(&checkpoint).map_err(failure)?;
            verify(&reader)?;
            match reader.notices() {
                [] => Ok(()),
                // An older one is whole, and that is not what was asked.
                notices => Err(CliError::Failure(format!(
                    "{}: not all of it is whole; passed over: {}",
                    checkpoint.display(),
                    notices.join("; ")
                ))),
            }
        }
        Command::Export { checkpoint, out, dtype, max_shard_size, state } => {
            let reader = open(&checkpoint)?;
            let options = ExportOptions { state, dtype: dtype.into(), max_file_bytes: max_shard_size };
            let done = reader.export(&out, &options).map_err(failure)?;
            say(format!(
                "{} tensors of step {}, {} bytes, in {} file(s) in {}\n",
                done.tensors,
                reader.manifest().step,
                done.tensor_bytes,
                done.files.len(),
                out.display()
            ))
        }
        Command::Import { model, checkpoint } => import(&model, &checkpoint),
    }
}

fn open(path: &std::path::Path) -> Result<Reader, CliError> {
    let reader = Reader::open(path).map_err(failure)?;
    for notice in reader.notices() {
        note(format_args!("passed over: {notice}"));
    }
    Ok(reader)
}

fn verify(reader: &Reader) -> Result<(), CliError> {
    let found = reader.verify();
    let files = reader.manifest().files.len();
    if found.problems.is_empty() {
        let (path, bytes) = (reader.path().display(), found.good_bytes);
        return say(format!("{path}: whole; {files} files, {bytes} bytes, every byte as saved\n"));
    }
    let problems: Vec<String> = found.problems.iter().map(|p| format!("  {p}")).collect();
    let path = reader.path().display();
    Err(CliError::Failure(format!("{path}: {} of {files} files are bad:\n{}", problems.len(), problems.join("\n"))))
}

/// The folder is checked against its configuration before anything is saved; units are those of the trainer.
fn import(model: &std::path::Path, checkpoint: &std::path::Path) -> Result<(), CliError> {
    let folder = HfFolder::open(model).map_err(failure)?;
    for warning in folder.warnings() {
        note(warning);
    }
    let units = folder.config().units();
    let store = Store::create(checkpoint, 0, StoreOptions::default()).map_err(failure)?;
    let place = |tensor: &str| {
        let names = [tensor.to_string(), format!("transformer.{tensor}")];
        let unit = units.iter().find(|u| u.params.iter().any(|p| names.contains(&p.name)))?;
        let param = unit.params.iter().find(|p| names.contains(&p.name))?;
        Some((unit.name.clone(), param.name.clone()))
    };
    let published = zero_ckpt::import(model, &store, place).map_err(failure)?;
    let path = checkpoint.join(&published.name);
    say(format!("{}: weights only, {} bytes\n", path.display(), published.bytes))
}

fn failure(error: impl std::fmt::Display) -> CliError {
    CliError::Failure(error.to_string())
}

/// "5GB" is 5e9 bytes, "5GiB" 5 x 2^30.
fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic()).trim_end();
    let unit = text[digits.len()..].trim().to_ascii_lowercase();
    let factor: u64 = match unit.as_str() {
        "" | "b" => 1,
        "k" | "kb" => 1_000,
        "m" | "mb" => 1_000_000,
        "g" | "gb" => 1_000_000_000,
        "t" | "tb" => 1_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => return Err(format!("unknown unit {unit:?}; give bytes, or MB, GB, MiB, GiB")),
    };
    let number: u64 = digits.parse().map_err(|e| format!("{digits:?} is no whole number: {e}"))?;
    let bytes = number.checked_mul(factor).ok_or("the size does not fit 64 bits")?;
    if bytes == 0 { Err("a file of 0 bytes holds nothing".into()) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use zero_alloc::device::DType;

    use super::*;
    use crate::hf::FolderWriter;
    use crate::model::config::GptConfig;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: CkptArgs,
    }

    fn zero_ckpt_line(words: &[&std::path::Path]) -> Result<(), CliError> {
        let line = std::iter::once("ckpt".as_ref()).chain(words.iter().map(|w| w.as_os_str()));
        run(<Line as clap::Parser>::try_parse_from(line).expect("the words parse").args)
    }

    #[test]
    fn a_model_goes_in_and_comes_out_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let preset = GptConfig::preset("nano").unwrap();
        let config =
            GptConfig { vocab_size: 16, n_positions: 8, n_embd: 4, n_layer: 2, n_head: 1, n_inner: 16, ..preset };
        let (from, store, to) = (dir.path().join("from"), dir.path().join("store"), dir.path().join("to"));
        let mut writer = FolderWriter::create(&from, &config, DType::F32).unwrap();
        for (i, param) in config.units().iter().flat_map(|u| &u.params).enumerate() {
            let numel = param.shape.iter().product::<u64>() as usize;
            let values: Vec<f32> = (0..numel).map(|e| (i * 1000 + e) as f32).collect();
            writer.write(&param.name, &values).unwrap();
        }
        writer.finish().unwrap();

        zero_ckpt_line(&["import".as_ref(), &from, &store]).unwrap();
        zero_ckpt_line(&["inspect".as_ref(), &store]).unwrap();
        zero_ckpt_line(&["inspect".as_ref(), "--json".as_ref(), &store]).unwrap();
        zero_ckpt_line(&["verify".as_ref(), &store]).unwrap();
        zero_ckpt_line(&["export".as_ref(), &store, &to, "--max-shard-size".as_ref(), "2KB".as_ref()]).unwrap();
        assert!(to.join("model.safetensors.index.json").exists());
        let (before, after) = (HfFolder::open(&from).unwrap(), HfFolder::open(&to).unwrap());
        assert_eq!(before.config(), after.config());
        for param in config.units().iter().flat_map(|u| &u.params) {
            let numel = param.shape.iter().product::<u64>();
            let (mut a, mut b) = (vec![0.0; numel as usize], vec![1.0; numel as usize]);
            before.read(&param.name, 0..numel, &mut a).unwrap();
            after.read(&param.name, 0..numel, &mut b).unwrap();
            assert_eq!(a, b, "{}", param.name);
        }

        let shard = store.join("step-00000000/shard-00000-of-00001.safetensors");
        let mut bytes = std::fs::read(&shard).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&shard, bytes).unwrap();
        let error = zero_ckpt_line(&["verify".as_ref(), &store]).unwrap_err().to_string();
        assert!(error.contains("shard-00000-of-00001.safetensors: damaged: bytes"), "{error}");
        assert!(zero_ckpt_line(&["inspect".as_ref(), dir.path()]).is_err());
    }

    #[test]
    fn sizes_are_read() {
        assert_eq!(parse_size("5GB"), Ok(5_000_000_000));
        assert_eq!(parse_size(" 2 MiB"), Ok(2 << 20));
        assert_eq!(parse_size("700"), Ok(700));
        for bad in ["", "GB", "0", "5 parsecs", "1.5GB", "99999999999TiB", "-1"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
