//! Ranks in separate processes agree before the first step: one that differs is named with its
//! setting, and equal settings in other places are accepted.
//!
//! `ZERO_AGREEMENT_RUNS=200` runs more of the random runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use integration_tests::{Files, Folder};

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
        root.write(
            "ds.json",
            r#"{"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}"#,
        );
        root.write("tokenizer.json", tokenizer());

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
    folder: Folder,
    machines: Vec<Machine>,
    flags: Vec<Vec<String>>,
}

impl Run {
    fn new(ranks: usize, seed: u64, data: Data, common: &[&str]) -> Self {
        let folder = Folder::on_disk();
        let machines: Vec<_> = (0..ranks)
            .map(|rank| Machine::new(&folder, rank, seed + rank as u64))
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
        command.env("OMPI_MCA_orte_tmpdir_base", self.folder.as_os_str());
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

/// Changes on one rank: the data that they need, flags that are added or what happens to a file, and
/// what the error names. `flip` inverts a bit where a text stands last or, without one, of the first
/// byte; `swap` exchanges two tensors of equal shape.
const CHANGES: &str = "\
tokens | --lr 0.01                      | : --lr (optimizer.lr) is
text   | --seed 1                       | : --seed (seed) is
tokens | --weight-decay 0.5             | : --weight-decay (optimizer.hyper.weight_decay) is
text   | --clip 0.5                     | : --clip (optimizer.max_grad_norm) is
tokens | --betas 0.8,0.999              | : --betas (optimizer.hyper.beta1) is
tokens | --betas 0.9,0.99               | : --betas (optimizer.hyper.beta2) is
tokens | --eps 1e-6                     | : --eps (optimizer.hyper.eps) is
tokens | --stage 0                      | : --stage (stage) is
text   | --stage 1                      | : --stage (stage) is
tokens | --dtype bf16                   | : --dtype (dtype) is
text   | --dtype fp16                   | : --dtype (dtype) is
tokens | --steps 3                      | : --steps (steps) is
tokens | --micro-batch 2                | : --micro-batch (batch.micro_batch) is
text   | --grad-accum 3                 | : --grad-accum (batch.grad_accum) is
tokens | --seq-len 16                   | : --seq-len (batch.seq_len) is
tokens | --activation-checkpointing     | : --activation-checkpointing (activation_checkpointing) is
tokens | --bucket-elems 4096            | : --bucket-elems (communication.bucket_elems) is
text   | --no-overlap                   | : --no-overlap (communication.overlap) is
tokens | --reduce-every-micro-batch     | : --reduce-every-micro-batch (communication.sums_locally) is
tokens | --no-decay-1d                  | --no-decay-1d (param_groups.no_decay_1d) is
text   | --warmup-steps 1               | --warmup-steps, --min-lr or --decay-steps (optimizer.schedule.
tokens | --schedule cosine              | : --schedule, --warmup-steps,
tokens | --offload cpu                  | : --offload (offload.optimizer) is
text   | --masters remainder            | : --masters (offload.format.remainder) is
tokens | --moments bf16                 | : --moments (offload.format.bf16_moments) is
tokens | --check-replicas 1             | : --check-replicas (check_replicas) is
tokens | --val-data tokens.bin          | : --val-data (validation.fingerprint) is
text   | swap                           | : --model (checksum of the weights) is
text   | --val-split 0.2                | : --val-split (validation.split) is
text   | --model nano                   | : --model (model.config.
text   | --ranks 9                      | --ranks 9: mpirun started
text   | --resume model                 | : --resume is
text   | --memory-limit 1KiB            | the limit of --memory-limit has 1.00 KiB free
tokens | flip tokens.bin                | : --data (data.fingerprint) is
text   | flip text/a.txt long           | : --data (data.fingerprint) is
tokens | flip model/model.safetensors = | : --model (checksum of the weights) is
text   | flip model/config.json 5,      | : --model (model.config.layer_norm_epsilon) is
text   | flip tokenizer.json ~          | : --tokenizer (data.tokenizer) is
tokens | flip ds.json 1}                | : --lr (optimizer.lr) is
text   | remove model                   | the folder does not exist
";

/// A row of [`CHANGES`].
#[derive(Clone, Copy, Debug)]
struct Change {
    data: Data,
    how: &'static str,
    error: &'static str,
}

impl Change {
    fn all() -> Vec<Self> {
        let rows = CHANGES.lines().map(|row| {
            let [data, how, error] = row
                .splitn(3, '|')
                .map(str::trim)
                .collect::<Vec<_>>()
                .try_into()
                .unwrap();
            let data = match data {
                "text" => Data::Text,
                _ => Data::Tokens,
            };
            Self { data, how, error }
        });
        rows.collect()
    }

    /// The flags of all ranks under which the change acts.
    fn common(self) -> Vec<&'static str> {
        let words: Vec<_> = self.how.split(' ').collect();
        let more: &[&str] = match words[..] {
            ["flip", "ds.json", ..] => &["--config", "ds.json"],
            ["flip", "tokenizer.json", ..] => &["--tokenizer", "tokenizer.json"],
            ["--masters", ..] => &["--dtype", "bf16"],
            ["--moments", ..] => &["--offload", "cpu"],
            ["--check-replicas", ..] => &["--stage", "2"],
            ["--reduce-every-micro-batch"] => &["--stage", "1", "--grad-accum", "2"],
            _ => &[],
        };
        [&COMMON, more].concat()
    }

    /// Makes the change on a rank.
    fn make(self, machine: &Machine, flags: &mut Vec<String>) {
        let words: Vec<_> = self.how.split(' ').collect();
        match words[..] {
            ["flip", name] => machine.flip(name, ""),
            ["flip", name, text] => machine.flip(name, text),
            ["swap"] => machine.swap_blocks(),
            ["remove", name] => fs::remove_dir_all(machine.path(name)).unwrap(),
            _ => set(flags, &words),
        }
    }
}

/// One of `n` numbers, by the seed of a run and the place of the choice.
fn choose(seed: u64, place: u64, n: usize) -> usize {
    let mixed = (seed + 1)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(place.wrapping_mul(0xbf58_476d_1ce4_e5b9));
    (((mixed ^ (mixed >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 33) % n as u64) as usize
}

/// Starts a run with `change` on one of `ranks` ranks.
fn is_refused(seed: u64, ranks: usize, rank: usize, change: Change) {
    let error = change.error;
    let mut run = Run::new(ranks, seed, change.data, &change.common());
    change.make(&run.machines[rank], &mut run.flags[rank]);

    // Of two ranks, rank 0 is right, unless rank 1 is the one that cannot start.
    let fails = change.how.starts_with("remove")
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
    let changes = Change::all();
    for seed in 0..runs {
        let ranks = 2 + choose(seed, 0, 3);
        let rank = choose(seed, 1, ranks);
        let kind = match (seed as usize) < changes.len() {
            // 7 has no factor in common with their number.
            true => seed as usize * 7 % changes.len(),
            false => choose(seed, 2, changes.len()),
        };
        is_refused(seed, ranks, rank, changes[kind]);
    }
}

/// Other paths, locales, time zones and orders of files in a folder, and files that were copied.
#[test]
fn equal_settings_in_other_places_are_accepted() {
    if !has_mpirun() {
        return;
    }
    let replicas = "--val-split 0.2 --stage 2 --check-replicas 1";
    let tokenizer = "--tokenizer tokenizer.json --stage 0 --dtype bf16";
    for (ranks, data, more) in [
        (2, Data::Tokens, "--config ds.json"),
        (3, Data::Text, replicas),
        (4, Data::Text, tokenizer),
    ] {
        let more: Vec<_> = more.split(' ').collect();
        let run = Run::new(ranks, 5, data, &[&COMMON, &more[..]].concat());
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
