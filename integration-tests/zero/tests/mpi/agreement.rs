//! Ranks in separate processes agree before the first step: one that differs is named with its
//! setting, and equal settings in other places are accepted.
//!
//! `ZERO_AGREEMENT_RUNS=200` runs more of the random runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::{data, has_mpirun, place};

/// The folders of one made-up machine.
struct Machine {
    root: PathBuf,
}

impl Machine {
    /// Copies model, tokens, text and configuration to a new folder, in the order of `seed`.
    fn new(parent: &Path, rank: usize, seed: u64) -> Self {
        let root = parent.join(format!("machine-{rank}"));
        fs::create_dir_all(root.join("text")).unwrap();
        copy_folder(Path::new(&data("model")), &root.join("model"));
        fs::copy(data("tokens.u16.bin"), root.join("tokens.bin")).unwrap();
        fs::write(
            root.join("ds.json"),
            r#"{"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}"#,
        )
        .unwrap();
        fs::write(root.join("tokenizer.json"), tokenizer()).unwrap();

        let mut names = ["B.txt", "a.txt", "E.txt", "z/c.txt"];
        names.rotate_left((seed % 4) as usize);
        for name in names {
            let file = root.join("text").join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(
                file,
                format!("The text of {name} is long enough for a row of tokens.\n").repeat(40),
            )
            .unwrap();
        }

        Self { root }
    }

    fn path(&self, name: &str) -> String {
        self.root.join(name).display().to_string()
    }

    /// Inverts the lowest bit of a byte of the file `name`: that where `text` stands last or, if it
    /// is empty, the first.
    fn flip(&self, name: &str, text: &str) {
        let mut bytes = fs::read(self.path(name)).unwrap();
        let found = bytes
            .windows(text.len().max(1))
            .rposition(|window| window == text.as_bytes());
        let at = if text.is_empty() { 0 } else { found.unwrap() };
        bytes[at] ^= 1;
        fs::write(self.path(name), bytes).unwrap();
    }

    /// Exchanges the weights of the first two blocks, by their names in the header.
    fn swap_blocks(&self) {
        let file = self.path("model/model.safetensors");
        let mut bytes = fs::read(&file).unwrap();
        let header = 8..8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        for at in header {
            match &bytes[at..at + 4] {
                b".h.0" => bytes[at + 3] = b'1',
                b".h.1" => bytes[at + 3] = b'0',
                _ => {}
            }
        }
        fs::write(file, bytes).unwrap();
    }
}

/// A byte-level BPE of the characters and one merge.
fn tokenizer() -> String {
    let mut vocab: Vec<String> = (33..127_u8)
        .map(|byte| char::from(byte).to_string())
        .collect();
    vocab.extend(["\u{120}", "\u{10a}", "th"].map(String::from));
    let vocab: serde_json::Map<_, _> = vocab
        .into_iter()
        .zip(0..)
        .map(|(token, id)| (token, id.into()))
        .collect();
    let model = serde_json::json!({"type": "BPE", "vocab": vocab, "merges": ["t h"]});
    let pre = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    serde_json::json!({"version": "1.0", "pre_tokenizer": pre, "model": model}).to_string()
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// The data of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Data {
    Tokens,
    Text,
}

/// A run with a machine for each rank.
struct Run {
    folder: tempfile::TempDir,
    machines: Vec<Machine>,
    flags: Vec<Vec<String>>,
}

impl Run {
    fn new(ranks: usize, seed: u64, data: Data, common: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let machines: Vec<_> = (0..ranks)
            .map(|rank| Machine::new(folder.path(), rank, seed + rank as u64))
            .collect();
        let flags = machines.iter().map(|machine| {
            let mut flags: Vec<String> = common.iter().map(|flag| (*flag).to_owned()).collect();
            let source = if data == Data::Tokens {
                "tokens.bin"
            } else {
                "text"
            };
            for (flag, name) in [
                ("--model", "model"),
                ("--data", source),
                ("--metrics", "metrics"),
            ] {
                flags.extend([flag.to_owned(), machine.path(name)]);
            }
            for (flag, value) in [
                ("--steps", "2"),
                ("--seq-len", "32"),
                ("--micro-batch", "1"),
            ] {
                flags.extend([flag.to_owned(), value.to_owned()]);
            }
            flags
        });

        Self {
            flags: flags.collect(),
            folder,
            machines,
        }
    }

    /// Starts all ranks, with different locales, time zones and folders.
    fn start(&self) -> Output {
        let mut command = Command::new("mpirun");
        command.env("OMPI_MCA_orte_tmpdir_base", self.folder.path());
        command.args(["--allow-run-as-root", "--oversubscribe"]);
        for (rank, (machine, flags)) in self.machines.iter().zip(&self.flags).enumerate() {
            if rank > 0 {
                command.arg(":");
            }
            command.args([
                "-n",
                "1",
                "-wdir",
                &machine.root.display().to_string(),
                "env",
            ]);
            command.args([
                ["LC_ALL=C", "LC_ALL=de_DE.UTF-8"][rank % 2],
                ["TZ=UTC", "TZ=Asia/Tokyo"][rank % 2],
            ]);
            command
                .arg(place::zero().get_program())
                .arg("train")
                .args(flags);
        }

        command.output().unwrap()
    }
}

const COMMON: [&str; 2] = ["--no-checkpoint", "--threads=1"];

/// A change on one rank.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// Flags that are added.
    Flags(&'static [&'static str]),
    /// A byte of a file, in the last place of a text or, if that is empty, the first.
    Byte(&'static str, &'static str),
    /// Two tensors of equal shape change places.
    Swapped,
    /// A folder that is missing.
    Missing(&'static str),
}

use Change::{Byte, Flags, Missing, Swapped};

/// Changes, with the data that they need and what the error names.
const CHANGES: &[(Change, Data, &str)] = &[
    (
        Flags(&["--lr", "0.01"]),
        Data::Tokens,
        ": --lr (optimizer.lr) is ",
    ),
    (Flags(&["--seed", "1"]), Data::Text, ": --seed (seed) is "),
    (
        Flags(&["--weight-decay", "0.5"]),
        Data::Tokens,
        ": --weight-decay (optimizer.hyper.weight_decay) is ",
    ),
    (
        Flags(&["--clip", "0.5"]),
        Data::Text,
        ": --clip (optimizer.max_grad_norm) is ",
    ),
    (
        Flags(&["--betas", "0.8,0.999"]),
        Data::Tokens,
        ": --betas (optimizer.hyper.beta1) is ",
    ),
    (
        Flags(&["--betas", "0.9,0.99"]),
        Data::Tokens,
        ": --betas (optimizer.hyper.beta2) is ",
    ),
    (
        Flags(&["--eps", "1e-6"]),
        Data::Tokens,
        ": --eps (optimizer.hyper.eps) is ",
    ),
    (
        Flags(&["--stage", "0"]),
        Data::Tokens,
        ": --stage (stage) is ",
    ),
    (
        Flags(&["--stage", "1"]),
        Data::Text,
        ": --stage (stage) is ",
    ),
    (
        Flags(&["--dtype", "bf16"]),
        Data::Tokens,
        ": --dtype (dtype) is ",
    ),
    (
        Flags(&["--dtype", "fp16"]),
        Data::Text,
        ": --dtype (dtype) is ",
    ),
    (
        Flags(&["--steps", "3"]),
        Data::Tokens,
        ": --steps (steps) is ",
    ),
    (
        Flags(&["--micro-batch", "2"]),
        Data::Tokens,
        ": --micro-batch (batch.micro_batch) is ",
    ),
    (
        Flags(&["--grad-accum", "3"]),
        Data::Text,
        ": --grad-accum (batch.grad_accum) is ",
    ),
    (
        Flags(&["--seq-len", "16"]),
        Data::Tokens,
        ": --seq-len (batch.seq_len) is ",
    ),
    (
        Flags(&["--activation-checkpointing"]),
        Data::Tokens,
        ": --activation-checkpointing (activation_checkpointing) is ",
    ),
    (
        Flags(&["--bucket-elems", "4096"]),
        Data::Tokens,
        ": --bucket-elems (communication.bucket_elems) is ",
    ),
    (
        Flags(&["--no-overlap"]),
        Data::Text,
        ": --no-overlap (communication.overlap) is ",
    ),
    (
        Flags(&["--reduce-every-micro-batch"]),
        Data::Tokens,
        ": --reduce-every-micro-batch (communication.sums_locally) is ",
    ),
    (
        Flags(&["--no-decay-1d"]),
        Data::Tokens,
        "--no-decay-1d (param_groups.no_decay_1d) is ",
    ),
    (
        Flags(&["--warmup-steps", "1"]),
        Data::Text,
        "--warmup-steps, --min-lr or --decay-steps (optimizer.schedule.",
    ),
    (
        Flags(&["--schedule", "cosine"]),
        Data::Tokens,
        ": --schedule, --warmup-steps,",
    ),
    (
        Flags(&["--offload", "cpu"]),
        Data::Tokens,
        ": --offload (offload.optimizer) is ",
    ),
    (
        Flags(&["--masters", "remainder"]),
        Data::Text,
        ": --masters (offload.format.remainder) is ",
    ),
    (
        Flags(&["--moments", "bf16"]),
        Data::Tokens,
        ": --moments (offload.format.bf16_moments) is ",
    ),
    (
        Flags(&["--check-replicas", "1"]),
        Data::Tokens,
        ": --check-replicas (check_replicas) is ",
    ),
    (
        Flags(&["--val-data", "tokens.bin"]),
        Data::Tokens,
        ": --val-data (validation.fingerprint) is ",
    ),
    (
        Swapped,
        Data::Text,
        ": --model (checksum of the weights) is ",
    ),
    (
        Flags(&["--val-split", "0.2"]),
        Data::Text,
        ": --val-split (validation.split) is ",
    ),
    (
        Flags(&["--model", "nano"]),
        Data::Text,
        ": --model (model.config.",
    ),
    (
        Flags(&["--ranks", "9"]),
        Data::Text,
        "--ranks 9: mpirun started ",
    ),
    (Flags(&["--resume", "model"]), Data::Text, ": --resume is "),
    (
        Flags(&["--memory-limit", "1KiB"]),
        Data::Text,
        "the limit of --memory-limit has 1.00 KiB free",
    ),
    (
        Byte("tokens.bin", ""),
        Data::Tokens,
        ": --data (data.fingerprint) is ",
    ),
    (
        Byte("text/a.txt", "long"),
        Data::Text,
        ": --data (data.fingerprint) is ",
    ),
    (
        Byte("model/model.safetensors", "\u{3d}"),
        Data::Tokens,
        ": --model (checksum of the weights) is ",
    ),
    (
        Byte("model/config.json", "5,"),
        Data::Text,
        ": --model (model.config.layer_norm_epsilon) is ",
    ),
    (
        Byte("tokenizer.json", "~"),
        Data::Text,
        ": --tokenizer (data.tokenizer) is ",
    ),
    (
        Byte("ds.json", "1}"),
        Data::Tokens,
        ": --lr (optimizer.lr) is ",
    ),
    (Missing("model"), Data::Text, "the folder does not exist"),
];

/// One of `n` numbers, by the seed of a run and the place of the choice.
fn choose(seed: u64, place: u64, n: usize) -> usize {
    let mixed = (seed + 1)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(place.wrapping_mul(0xbf58_476d_1ce4_e5b9));
    (((mixed ^ (mixed >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 33) % n as u64) as usize
}

/// The flags of all ranks under which a change acts.
fn common(change: Change) -> Vec<&'static str> {
    let more: &[&str] = match change {
        Byte("ds.json", _) => &["--config", "ds.json"],
        Byte("tokenizer.json", _) => &["--tokenizer", "tokenizer.json"],
        Flags(["--masters", ..]) => &["--dtype", "bf16"],
        Flags(["--moments", ..]) => &["--offload", "cpu"],
        Flags(["--check-replicas", ..]) => &["--stage", "2"],
        Flags(["--reduce-every-micro-batch"]) => &["--stage", "1", "--grad-accum", "2"],
        _ => &[],
    };
    [&COMMON, more].concat()
}

/// Starts a run with `change` on one of `ranks` ranks.
fn is_refused(seed: u64, ranks: usize, rank: usize, (change, data, error): (Change, Data, &str)) {
    let mut run = Run::new(ranks, seed, data, &common(change));
    let machine = &run.machines[rank];
    match change {
        Flags(flags) => set(&mut run.flags[rank], flags),
        Byte(name, text) => machine.flip(name, text),
        Swapped => machine.swap_blocks(),
        Missing(name) => fs::remove_dir_all(machine.path(name)).unwrap(),
    }

    // Of two ranks, rank 0 is right, unless rank 1 is the one that cannot start.
    let fails = matches!(change, Missing(_))
        || error.starts_with("--ranks")
        || error.starts_with("the limit");
    let named = if ranks == 2 && !fails { 1 } else { rank };

    let output = run.start();
    let text = String::from_utf8_lossy(&output.stderr);
    let context = format!("{change:?} on rank {rank} of {ranks}:\n{text}");
    assert_eq!(output.status.code(), Some(2), "{context}");
    let names = if fails {
        format!("rank {named}: ")
    } else {
        format!("rank {named} has other settings than rank ")
    };

    assert!(text.contains(&names) && text.contains(error), "{context}");
    assert!(!text.contains("panicked"), "{context}");
    assert!(
        !run.machines[0].root.join("metrics").exists(),
        "a step ran: {context}"
    );
}

/// Replaces the values of `more` among `flags`, or adds them.
fn set(flags: &mut Vec<String>, more: &[&str]) {
    match flags.iter().position(|flag| flag == more[0]) {
        Some(place) => flags[place + 1] = more[1].to_owned(),
        None => flags.extend(more.iter().map(|flag| (*flag).to_owned())),
    }
}

/// Some kinds of changes; with as many runs as kinds all of them, then kinds, ranks and places by
/// chance.
#[test]
fn ranks_that_differ_are_refused_before_the_first_step() {
    if !has_mpirun() {
        return;
    }
    let runs: u64 = std::env::var("ZERO_AGREEMENT_RUNS").map_or(8, |runs| runs.parse().unwrap());
    for seed in 0..runs {
        let ranks = 2 + choose(seed, 0, 3);
        let rank = choose(seed, 1, ranks);
        let kind = match (seed as usize) < CHANGES.len() {
            // 7 has no factor in common with their number.
            true => seed as usize * 7 % CHANGES.len(),
            false => choose(seed, 2, CHANGES.len()),
        };
        is_refused(seed, ranks, rank, CHANGES[kind]);
    }
}

/// Other paths, locales, time zones and orders of files in a folder, and files that were copied.
#[test]
fn equal_settings_in_other_places_are_accepted() {
    if !has_mpirun() {
        return;
    }
    for (ranks, data, more) in [
        (2, Data::Tokens, &["--config", "ds.json"][..]),
        (
            3,
            Data::Text,
            &[
                "--val-split",
                "0.2",
                "--stage",
                "2",
                "--check-replicas",
                "1",
            ][..],
        ),
        (
            4,
            Data::Text,
            &[
                "--tokenizer",
                "tokenizer.json",
                "--stage",
                "0",
                "--dtype",
                "bf16",
            ][..],
        ),
    ] {
        let run = Run::new(ranks, 5, data, &[&COMMON, more].concat());
        let output = run.start();
        assert!(
            output.status.success(),
            "{ranks} ranks: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let metrics = fs::read_to_string(run.machines[0].path("metrics")).unwrap();
        assert_eq!(metrics.lines().count(), 2);
    }
}
