//! The work of one training step on a GPU, counted without a GPU: launches, copies, matrix products
//! and collectives, with the bytes that each moves. benches/notes/2026-11-23.md has the tables.
//!
//! `with-stand-ins cuda_counts MODEL BATCH SEQ RANKS STAGES [FLAGS OF zero train]`, for example
//! `integration-tests/stand-ins/with-stand-ins target/release/cuda_counts gpt2-1.5b 8 1024 8 1,2,3`.
//!
//! It runs `zero train` (`$ZERO`, or `zero` beside this program or in `PATH`) on the stand-ins' dry
//! mode for two steps and for three, and prints the difference, on rank 0, as Markdown: a column a
//! stage. Bytes of kernels are the distinct sectors of 32 bytes that each block loads and stores;
//! those of products count each matrix once.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

type AnyError = Box<dyn std::error::Error>;

const USAGE: &str = "usage: cuda_counts MODEL BATCH SEQ RANKS STAGES [FLAGS OF zero train], such as gpt2-124m 32 1024 1 0,1,2,3";

/// Calls, loaded bytes, stored bytes, and operations.
type Row = [i64; 4];
/// Rows by kind and name.
type Counts = BTreeMap<(String, String), Row>;

fn main() -> Result<(), AnyError> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, batch, seq, ranks, stages, flags @ ..] = args.as_slice() else {
        return Err(USAGE.into());
    };
    let folder = tempfile::tempdir()?;
    let batch_rows = batch.parse::<usize>()?;
    let seq_len = seq.parse::<usize>()?;
    let tokens = 8 * ranks.parse::<usize>()? * batch_rows * (seq_len + 1);
    let bytes: Vec<u8> = (0..tokens)
        .flat_map(|i| ((i * 7919 % 50_257) as u16).to_le_bytes())
        .collect();
    std::fs::write(folder.path().join("tokens.bin"), bytes)?;
    let mut columns = Vec::new();

    for stage in stages.split(',') {
        let base = [
            "train",
            "--device",
            "cuda",
            "--dtype",
            "bf16",
            "--no-checkpoint",
            "--data",
            "tokens.bin",
        ];
        let sizes = [
            "--model",
            model,
            "--micro-batch",
            batch,
            "--seq-len",
            seq,
            "--ranks",
            ranks,
            "--stage",
            stage,
        ];
        let flags: Vec<&str> = base
            .into_iter()
            .chain(sizes)
            .chain(flags.iter().map(String::as_str))
            .collect();
        let (two, _) = run(folder.path(), ranks, &flags, "2")?;
        let (three, peak_bytes) = run(folder.path(), ranks, &flags, "3")?;
        columns.push(Column {
            name: format!("stage {stage}"),
            step: difference(&three, &two),
            peak_bytes,
        });
    }

    print(&columns);
    Ok(())
}

struct Column {
    name: String,
    step: Counts,
    peak_bytes: u64,
}

/// The program `zero`.
fn zero() -> PathBuf {
    let beside = std::env::current_exe()
        .ok()
        .map(|path| path.with_file_name("zero"))
        .filter(|path| path.exists());
    std::env::var_os("ZERO")
        .map(PathBuf::from)
        .or(beside)
        .unwrap_or_else(|| "zero".into())
}

/// Trains for `steps` steps. Returns rank 0's counts and the peak bytes of its pool.
fn run(folder: &Path, ranks: &str, flags: &[&str], steps: &str) -> Result<(Counts, u64), AnyError> {
    let file = format!("counts-{steps}.csv");
    let metrics = format!("metrics-{steps}.jsonl");
    let mut command = Command::new(zero());
    command
        .args(flags)
        .args(["--steps", steps, "--metrics", &metrics])
        .current_dir(folder)
        .stdin(Stdio::null());
    command
        .env("ZERO_STANDIN_DRY", "1")
        .env("ZERO_STANDIN_DEVICES", ranks)
        .env("ZERO_STANDIN_COUNTS", &file);
    // The first step of a machine's first run would also count the products that are measured.
    command.env("ZERO_MATMUL_TIMING", "0");
    for old in [&file, &metrics] {
        let _absent = std::fs::remove_file(folder.join(old));
    }
    let output = command
        .output()
        .map_err(|e| format!("failed to start {}: {e}", zero().display()))?;

    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(format!("zero {}: {}\n{text}", flags.join(" "), output.status).into());
    }

    let text = std::fs::read_to_string(folder.join(&file)).map_err(|e| {
        format!(
            "no counts in {file} ({e}): run this under integration-tests/stand-ins/with-stand-ins"
        )
    })?;

    let metrics = std::fs::read_to_string(folder.join(&metrics))?;
    let last: serde_json::Value = serde_json::from_str(metrics.lines().last().unwrap_or_default())?;
    Ok((
        parse(&text)?,
        last["memory"]["peak_bytes"]
            .as_u64()
            .ok_or("the metrics have no memory.peak_bytes")?,
    ))
}

/// Parses the stand-in's CSV: kind, name, calls, loaded bytes, stored bytes, operations.
fn parse(text: &str) -> Result<Counts, AnyError> {
    let mut counts = Counts::new();
    for line in text.lines().skip(1) {
        let fields: Vec<&str> = line.split(',').collect();
        let [kind, name, numbers @ ..] = fields.as_slice() else {
            return Err(format!("bad line: {line}").into());
        };
        let numbers: Vec<i64> = numbers
            .iter()
            .map(|n| n.parse())
            .collect::<Result<_, _>>()?;
        let row = numbers
            .try_into()
            .map_err(|_| format!("bad line: {line}"))?;
        counts.insert(((*kind).to_owned(), (*name).to_owned()), row);
    }
    Ok(counts)
}

/// The counts of `more` beyond those of `less`, without rows of zeros.
fn difference(more: &Counts, less: &Counts) -> Counts {
    let rest = |(key, row): (&(String, String), &Row)| {
        let old = less.get(key).copied().unwrap_or_default();
        (key.clone(), std::array::from_fn(|i| row[i] - old[i]))
    };
    more.iter()
        .map(rest)
        .filter(|(_, row)| *row != [0; 4])
        .collect()
}

/// The sum of all rows of `kind`.
fn total(counts: &Counts, kind: &str) -> Row {
    let rows = counts.iter().filter(|((of, _), _)| of == kind);
    rows.fold([0; 4], |sum, (_, row)| {
        std::array::from_fn(|i| sum[i] + row[i])
    })
}

fn print(columns: &[Column]) {
    let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
    println!(
        "| per step | {} |\n|---|{}",
        names.join(" | "),
        "---|".repeat(columns.len())
    );
    let line = |name: &str, cell: &dyn Fn(&Counts) -> String| {
        let cells: Vec<String> = columns.iter().map(|column| cell(&column.step)).collect();
        println!("| {name} | {} |", cells.join(" | "));
    };

    let gb = |bytes: i64| format!("{:.2} GB", bytes as f64 / 1e9);
    let calls = |kind: &'static str| move |step: &Counts| total(step, kind)[0].to_string();
    let moved =
        |kind: &'static str| move |step: &Counts| gb(total(step, kind)[1] + total(step, kind)[2]);
    line("kernel launches", &calls("kernel"));
    line("matrix products", &calls("product"));
    line("copies", &calls("copy"));
    line("fills", &calls("fill"));
    line("NCCL calls", &calls("collective"));
    line("event records and waits", &calls("event"));
    line("host functions", &calls("host function"));
    line("bytes of kernels", &moved("kernel"));
    line("bytes of products", &moved("product"));
    line("operations of products", &|step| {
        format!("{:.2} TFLOP", total(step, "product")[3] as f64 / 1e12)
    });
    line("bytes of copies and fills", &|step| {
        let ([_, read, written, _], fills) = (total(step, "copy"), total(step, "fill"));
        gb(read + written + fills[2])
    });
    line("bytes sent by NCCL", &|step| {
        gb(total(step, "collective")[1])
    });
    let peaks: Vec<String> = columns
        .iter()
        .map(|column| gb(column.peak_bytes as i64))
        .collect();
    println!("| peak memory | {} |\n", peaks.join(" | "));

    println!(
        "| calls, GB loaded + stored | {} |\n|---|{}",
        names.join(" | "),
        "---|".repeat(columns.len())
    );
    let listed = |kind: &str| !["event", "host function"].contains(&kind);
    let keys: BTreeSet<&(String, String)> = columns
        .iter()
        .flat_map(|column| column.step.keys())
        .filter(|(kind, _)| listed(kind))
        .collect();

    for key in keys {
        let cell = |step: &Counts| match step.get(key) {
            Some([calls, read, written, _]) => {
                format!(
                    "{calls}, {:.2} + {:.2}",
                    *read as f64 / 1e9,
                    *written as f64 / 1e9
                )
            }
            None => "-".to_owned(),
        };
        line(&format!("{} {}", key.0, key.1), &cell);
    }
}
