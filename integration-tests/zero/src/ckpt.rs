//! `zero ckpt`: inspects and verifies checkpoints, assembles them of staged files, and converts
//! them to and from Hugging Face folders.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use indicatif::HumanCount;
use zero_ckpt::{
    Assembled, CkptError, ExportOptions, Reader, Resolved, StateDtype, Store, StoreOptions,
    assemble, assemble_step, has_checkpoints, resolve, staged_saves,
};

use crate::error::CliError;
use crate::flags::{DTypeFlag, parse_bytes};
use crate::model_files::{self, Exported, base_of};
use crate::output::{print_note, print_text};
use crate::settings::record::RunRecord;
use zero_models::ModelConfig;
use zero_models::hf::HfFolder;
use zero_models::hf::adapters::{Adapters, adapted_model, peft_config};

/// Makes the messages of `zero-ckpt` name the commands of this program.
pub fn name_commands() {
    let commands = zero_ckpt::Commands::default()
        .assemble("zero ckpt assemble")
        .assemble_step("zero ckpt assemble --step")
        .resume("zero train --resume")
        .keep_last("--keep-last");
    zero_ckpt::name_commands(commands);
}

/// Inspect, verify, assemble, export or import checkpoints
#[derive(Args, Debug)]
pub struct CkptArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Print the contents of a checkpoint
    Inspect {
        /// A directory of checkpoints (selects the one that `latest` names) or one checkpoint in it
        checkpoint: PathBuf,
        /// Select the checkpoint of the lowest validation loss, which `best` names
        #[arg(long)]
        best: bool,
        /// Print the manifest as JSON
        #[arg(long)]
        json: bool,
    },
    /// Check every byte against the checksums; fail if a file is damaged, and name the newest whole
    /// checkpoint
    Verify {
        /// A directory of checkpoints (checks the newest, and older ones until one is whole) or one
        /// checkpoint in it
        checkpoint: PathBuf,
    },
    /// Make a checkpoint of the files that the ranks of a failed save staged, such as on machines
    /// without a shared folder
    ///
    /// Takes the save that was staged last of those of which the files of all ranks are there and
    /// whole, and names what the others lack. Nothing is removed: files are linked into the
    /// checkpoint, or copied from another file system.
    Assemble {
        /// Take a save of this step, also if a checkpoint was published after it was staged
        #[arg(long)]
        step: Option<u64>,
        /// The --checkpoint folders of all ranks, or copies of them (their .staging is enough); the
        /// checkpoint is made in the first one, which may be new
        #[arg(required = true, value_name = "DIR")]
        folders: Vec<PathBuf>,
    },
    /// Write a Hugging Face folder: safetensors files, the tokenizer and the other files of the
    /// model; of a run with --lora a folder of PEFT, or with --merge the whole model
    Export {
        /// A directory of checkpoints (selects the one that `latest` names) or one checkpoint in it
        checkpoint: PathBuf,
        /// The folder to write; it must be empty or not exist
        out: PathBuf,
        /// Select the checkpoint of the lowest validation loss, which `best` names
        #[arg(long)]
        best: bool,
        /// Element type of the files
        #[arg(long, value_enum, default_value = "fp32")]
        dtype: DTypeFlag,
        /// Maximum size of a file: 5GB, 500MiB, a number of bytes
        #[arg(long, default_value = "5GB", value_parser = parse_file_size, value_name = "SIZE")]
        max_shard_size: u64,
        /// The state to export: master (the weights), first_moment or second_moment
        #[arg(long, default_value = "master")]
        state: String,
        /// Add the adapters of --lora to the weights of their base, and write the whole model
        #[arg(long)]
        merge: bool,
        /// The folder of the base of --merge [default: that of the run]
        #[arg(long, value_name = "HF_DIR", requires = "merge")]
        base: Option<PathBuf>,
    },
    /// Save the weights of a Hugging Face folder as a checkpoint, and keep its other files beside
    /// it; `zero train --model DIR` starts from it
    Import {
        /// The folder with config.json and model.safetensors (or its index)
        model: PathBuf,
        /// The directory to save the checkpoint into; it must not hold checkpoints
        checkpoint: PathBuf,
    },
}

/// Runs `zero ckpt`.
///
/// # Errors
/// The checkpoint or folder is missing, damaged or cannot be written; the message names the file.
pub fn run(args: CkptArgs) -> Result<(), CliError> {
    match args.command {
        Command::Inspect {
            checkpoint,
            best,
            json,
        } => {
            let reader = open(&checkpoint, best)?;
            note_staged_saves(&reader.store_dir().map_err(CliError::failure)?);
            if json {
                print_text(
                    serde_json::to_string_pretty(reader.manifest()).map_err(CliError::failure)?
                        + "\n",
                )
            } else {
                print_text(reader.describe())
            }
        }
        Command::Verify { checkpoint } => verify(&checkpoint),
        Command::Assemble { step, folders } => match &folders[..] {
            [into, from @ ..] => assemble_into(into, from, step),
            [] => Err(usage!("name the folders of the ranks")),
        },
        Command::Export {
            checkpoint,
            out,
            best,
            dtype,
            max_shard_size,
            state,
            merge,
            base,
        } => {
            let reader = open(&checkpoint, best)?;
            let dtype = match dtype {
                DTypeFlag::Fp32 => StateDtype::F32,
                DTypeFlag::Bf16 => StateDtype::BF16,
                DTypeFlag::Fp16 => StateDtype::F16,
            };
            let options = ExportOptions::default()
                .state(state)
                .dtype(dtype)
                .max_file_bytes(max_shard_size);
            let model = adapted_model(&reader).map_err(CliError::failure)?;
            match (model, merge) {
                (None, false) => export(&reader, &out, options),
                (None, true) => Err(usage!(
                    "--merge: {} has no adapters",
                    reader.path().display()
                )),
                (Some(model), false) => export_adapters(&reader, &model, &out, options),
                (Some(model), true) => {
                    let base = base_of(&reader, base.as_deref(), "--base")?;
                    export_merged(reader, model, base, &out, options)
                }
            }
        }
        Command::Import { model, checkpoint } => import(&model, &checkpoint),
    }
}

/// Exports a checkpoint with the files of its model; says which, and what the export lacks.
fn export(reader: &Reader, out: &Path, options: ExportOptions) -> Result<(), CliError> {
    let run = RunRecord::of(reader)?;
    let Exported {
        files,
        config,
        lacks,
    } = Exported::of(reader, run.as_ref(), options.dtype)?;

    let names: Vec<&str> = files.files().map(|(name, _)| name).collect();
    let with = match names.is_empty() {
        true => String::new(),
        false => format!(", with {}", names.join(", ")),
    };
    let options = options.model_files(files.clone()).model_config(config);
    let done = reader.export(out, &options).map_err(CliError::failure)?;

    let mut text = format!(
        "{} tensors of step {}, {} bytes, in {} file(s) in {}{with}\n",
        done.tensors,
        reader.manifest().step,
        HumanCount(done.tensor_bytes),
        done.files.len(),
        out.display()
    );
    for lack in lacks {
        text += &format!("  it lacks: {lack}\n");
    }
    print_text(text)
}

/// Exports the adapters of a checkpoint as a folder of PEFT.
fn export_adapters(
    reader: &Reader,
    model: &ModelConfig,
    out: &Path,
    options: ExportOptions,
) -> Result<(), CliError> {
    let run = RunRecord::of(reader)?;
    let base = run.map_or(String::new(), |run| run.model.name);
    let config = peft_config(model, &base);
    let options = options.model_config(config).are_adapters(true);
    let done = reader.export(out, &options).map_err(CliError::failure)?;
    print_text(format!(
        "{} adapters of step {}, {} bytes, in {}\n",
        done.tensors / 2,
        reader.manifest().step,
        HumanCount(done.tensor_bytes),
        out.display()
    ))
}

/// Exports the base of a checkpoint's adapters with the adapters merged into it.
fn export_merged(
    reader: Reader,
    model: ModelConfig,
    base: HfFolder,
    out: &Path,
    options: ExportOptions,
) -> Result<(), CliError> {
    if options.state != ExportOptions::default().state {
        let state = options.state;
        return Err(usage!("--merge --state {state}: only weights are merged"));
    }
    let step = reader.manifest().step;
    let run = RunRecord::of(&reader)?;
    let exported = Exported::of(&reader, run.as_ref(), options.dtype)?;
    let base = base.with_merged(Adapters::of_checkpoint(model, reader));
    let params = base
        .config()
        .units()
        .into_iter()
        .flat_map(|unit| unit.params);
    let options = options
        .model_files(exported.files)
        .model_config(exported.config);
    let read = |name: &str, range, values: &mut [f32]| {
        base.read(name, range, values)
            .map_err(|error| CkptError::BadFile {
                path: base.path().to_owned(),
                why: error.to_string(),
            })
    };
    let done = zero_ckpt::export(out, &params.collect::<Vec<_>>(), &read, &options);
    let done = done.map_err(CliError::failure)?;
    print_text(format!(
        "{} tensors of {} with the adapters of step {step}, {} bytes, in {} file(s) in {}\n",
        done.tensors,
        base.path().display(),
        HumanCount(done.tensor_bytes),
        done.files.len(),
        out.display()
    ))
}

/// Opens the newest checkpoint in `path` or the best one, or the checkpoint `path`.
fn open(path: &Path, best: bool) -> Result<Reader, CliError> {
    if best {
        let hint =
            "--best needs a directory of checkpoints of a run with --val-data or --val-split";
        return Reader::open_best(path).map_err(|e| failure!("{e}; {hint}"));
    }
    let reader = Reader::open(path).map_err(CliError::failure)?;
    for notice in reader.notices() {
        print_note(format_args!("skipped: {notice}"));
    }
    Ok(reader)
}

/// Prints what failed saves have left in the directory of checkpoints `dir`.
fn note_staged_saves(dir: &Path) {
    match staged_saves(dir) {
        Ok(found) if found.saves > 0 => print_note(found),
        Ok(_) => {}
        Err(error) => print_note(error),
    }
}

fn verify(path: &Path) -> Result<(), CliError> {
    let Resolved {
        store_dir,
        reader,
        passed_over,
        staged,
        ..
    } = resolve(path).map_err(CliError::failure)?;

    if let Some(staged) = staged {
        print_note(staged);
    }
    note_staged_saves(&store_dir);
    let kept = match reader.model_files() {
        Err(missing @ CkptError::NoModelFiles { .. }) => {
            print_note(missing);
            None
        }
        found => found.map_err(CliError::failure)?,
    };
    let kept_files = kept.as_ref().map_or(0, |kept| kept.files().count());
    let kept_bytes = kept.map_or(0, |kept| kept.bytes());
    let manifest = reader.manifest();
    let bytes: u64 = manifest
        .files
        .iter()
        .map(|f| f.bytes)
        .chain(manifest.documents.iter().map(|d| d.bytes))
        .chain([kept_bytes])
        .sum();
    let (whole, files) = (
        reader.path().display(),
        manifest.files.len() + manifest.documents.len() + kept_files,
    );

    if passed_over.is_empty() {
        return print_text(format!(
            "{whole}: complete; {files} files, {} bytes, all checksums match\n",
            HumanCount(bytes)
        ));
    }

    let defects: Vec<String> = passed_over
        .iter()
        .map(|(name, why)| format!("{name}: {why}"))
        .collect();
    Err(failure!(
        "{} damaged ({}); the newest whole checkpoint is {whole}, and `zero train --resume {}` starts from it",
        if defects.len() == 1 {
            "1 checkpoint is".to_owned()
        } else {
            format!("{} checkpoints are", defects.len())
        },
        defects.join("; "),
        store_dir.display()
    ))
}

/// Makes a checkpoint in `into` of the staged files there and in `from`: of the last save, or of
/// one of `step`.
fn assemble_into(into: &Path, from: &[PathBuf], step: Option<u64>) -> Result<(), CliError> {
    let assembled = match step {
        Some(step) => assemble_step(into, from, step),
        None => assemble(into, from),
    };
    let Assembled {
        checkpoint,
        passed_over,
        ..
    } = assembled.map_err(CliError::failure)?;
    for defect in passed_over {
        print_note(format_args!("passed over: {defect}"));
    }
    let path = into.join(&checkpoint.name);
    let dir = into.display();
    print_text(format!(
        "{}: assembled of the files of all ranks, {} bytes, all checksums match; `zero train --resume {dir}` continues from \
         it\n",
        path.display(),
        HumanCount(checkpoint.bytes)
    ))
}

/// Imports a Hugging Face folder, after checking it against its configuration. Units are those of
/// the trainer.
fn import(model: &Path, checkpoint: &Path) -> Result<(), CliError> {
    let folder = HfFolder::open(model).map_err(CliError::failure)?;
    for warning in folder.warnings() {
        print_note(warning);
    }

    if has_checkpoints(checkpoint).map_err(CliError::failure)? {
        let path = checkpoint.display();
        return Err(usage!(
            "{path}: this folder holds checkpoints already; import into a new folder"
        ));
    }

    let tokenizer = folder.tokenizer().map_err(CliError::failure)?;
    let files = model_files::to_keep(folder.companions(), tokenizer.as_deref())?;
    let options = StoreOptions::default().model_files(files);
    let store = Store::create(checkpoint, 0, options).map_err(CliError::failure)?;
    let published = zero_ckpt::import(model, &store, |tensor: &str| folder.unit_and_param(tensor))
        .map_err(CliError::failure)?;
    let (path, dir) = (checkpoint.join(&published.name), checkpoint.display());
    print_text(format!(
        "{}: imported the weights, {} bytes; start from them with `zero train --model {dir}`\n",
        path.display(),
        HumanCount(published.bytes)
    ))
}

fn parse_file_size(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        0 => Err("a file of 0 bytes cannot hold a tensor".to_owned()),
        bytes => Ok(bytes),
    }
}
