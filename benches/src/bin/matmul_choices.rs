//! The algorithms of cuBLASLt for a model's matrix products, with their times.
//!
//! `matmul_choices MODEL BATCH SEQ` trains a preset for a few steps with `cuda_train`, beside this
//! program, which measures every candidate for every product (bf16, one rank, stage 2), and prints
//! for each product the candidates in cuBLASLt's order: time, tile, stages, split of the sums,
//! workspace. `*` marks the chosen one. Nothing that is kept on the machine is read or changed.
//! Without arguments it prints the choices that are kept in the user's folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use zero_kernels::cuda::user_folder;
use zero_models::cuda::matmul::{FOLDER_VARIABLE, TIMING_VARIABLE};

type AnyError = Box<dyn std::error::Error>;

fn main() -> Result<(), AnyError> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.as_slice() {
        [] => {
            let folder = user_folder(FOLDER_VARIABLE, "zero-matmul")
                .ok_or("set HOME or ZERO_MATMUL_CACHE")?;
            print(&folder)
        }
        [model, batch, seq] => {
            let folder = tempfile::tempdir()?;
            train(model, batch, seq, folder.path())?;
            print(folder.path())
        }
        _ => Err("usage: matmul_choices [MODEL BATCH SEQ]".into()),
    }
}

/// Trains with choices in `folder`.
fn train(model: &str, batch: &str, seq: &str, folder: &Path) -> Result<(), AnyError> {
    let program = std::env::current_exe()?.with_file_name("cuda_train");
    let status = Command::new(&program)
        .args([model, batch, seq, "2", "6"])
        .env(FOLDER_VARIABLE, folder)
        .env(TIMING_VARIABLE, "1")
        .stdout(Stdio::null())
        .status()
        .map_err(|e| {
            format!(
                "{}: {e}; build it: cargo build --release --bin cuda_train",
                program.display()
            )
        })?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("cuda_train failed: {status}").into())
    }
}

/// Prints the files of a folder, by card and product.
fn print(folder: &Path) -> Result<(), AnyError> {
    let mut tables: BTreeMap<(String, String, PathBuf), Vec<String>> = BTreeMap::new();
    let entries = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        let text = std::fs::read_to_string(&path)?;
        let mut lines = text.lines().skip(1).map(str::to_owned);
        let (Some(machine), Some(product)) = (lines.next(), lines.next()) else {
            continue;
        };
        let product = product.split(';').next().unwrap_or_default().to_owned();
        tables.insert(
            (machine, product, path),
            lines
                .take_while(|line| !line.starts_with("choice "))
                .collect(),
        );
    }

    let mut last = "";
    for ((machine, product, _), rows) in &tables {
        if machine != last {
            println!("{machine}");
            last = machine;
        }
        println!("\n{product}");
        rows.iter().for_each(|row| println!("{row}"));
    }

    Ok(())
}
