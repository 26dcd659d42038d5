//! The files that a run writes, and those that it does not touch: checkpoints and metrics files of
//! other runs, damage.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use zero_ckpt::Reader;

use crate::place;
use crate::support::{
    data, fails, lines, losses, on_disk, run_flags, run_tiny, succeeds, temp, tiny, words, zero,
};

/// The files below `dir` with their contents, without the lock file.
fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()) {
        if entry.is_dir() {
            all.extend(files(&entry));
        } else if !entry.ends_with(".lock") {
            all.insert(entry.clone(), fs::read(entry).unwrap());
        }
    }
    all
}

/// The steps of the checkpoints in `dir`.
fn steps(dir: &Path) -> Vec<u64> {
    let names = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut steps: Vec<u64> = names
        .filter_map(|name| name.strip_prefix("step-")?.parse().ok())
        .collect();
    steps.sort_unstable();
    steps
}

fn numbers(path: &Path) -> Vec<u64> {
    lines(path)
        .iter()
        .map(|line| line["step"].as_u64().unwrap())
        .collect()
}

/// A folder with a run of four steps: checkpoints 1 to 4 in `d`, metrics in `m`. It is on a disk, so
/// that the command line is tested with direct I/O and syncs, too.
fn four_steps() -> TempDir {
    let dir = on_disk();
    succeeds(&run_flags(
        dir.path(),
        "--steps 4 --checkpoint d --checkpoint-every 1 --metrics m",
    ));
    assert_eq!(steps(&dir.path().join("d")), [1, 2, 3, 4]);
    dir
}

#[test]
fn another_runs_checkpoints_are_refused() {
    let dir = four_steps();
    let before = files(dir.path());
    let into = |more: &[&str]| {
        run_tiny(
            dir.path(),
            &[&["--checkpoint", "d", "--metrics", "m2"], more].concat(),
        )
    };

    let ways = [
        "--checkpoint d",
        "another run",
        "step-00000004",
        "--resume d",
        "another folder",
    ];

    for more in [
        &["--keep-last", "1"][..],
        &["--seed", "5"],
        &["--steps", "0"],
        &["--model", "nano"],
    ] {
        fails(&into(more), 2, &ways);
    }

    fails(
        &run_tiny(dir.path(), &["--checkpoint", "d/step-00000004"]),
        2,
        &["--checkpoint d/step-00000004", "got a checkpoint"],
    );
    fails(
        &zero(dir.path(), &["ckpt", "import", &data("model"), "d"]),
        2,
        &["d: this folder holds checkpoints"],
    );
    assert!(files(dir.path()) == before, "a refused run changed files");

    // Another run that resumes a third one is refused as well.
    succeeds(&run_tiny(dir.path(), &["--checkpoint", "e"]));
    fails(
        &run_flags(dir.path(), "--resume e --steps 5 --checkpoint d"),
        2,
        &ways,
    );

    // The run itself prunes its own.
    succeeds(&run_flags(dir.path(), "--resume d --steps 5 --keep-last 1"));
    assert_eq!(steps(&dir.path().join("d")), [5]);
}

#[test]
fn named_checkpoint_resumes_into_its_folder() {
    let dir = four_steps();
    succeeds(&run_flags(
        dir.path(),
        "--resume d/step-00000002 --steps 6 --metrics m",
    ));

    assert_eq!(steps(&dir.path().join("d")), [1, 2, 3, 4, 5, 6]);
    assert!(steps(&dir.path().join("d/step-00000002")).is_empty());
    assert_eq!(numbers(&dir.path().join("m")), [1, 2, 3, 4, 5, 6]);
    // The order of checkpoints is that of saves.
    succeeds(&run_flags(dir.path(), "--resume d/step-00000001 --steps 2"));
    let out = succeeds(&run_tiny(dir.path(), &["--resume", "d", "--steps", "2"]));
    assert!(
        out.contains("nothing to do: the checkpoint is at step 2"),
        "{out}"
    );
}

#[test]
fn resumed_metrics_are_appended() {
    let dir = four_steps();
    let path = dir.path().join("m");
    let first = fs::read_to_string(&path).unwrap();
    let resume = |more: &[&str]| {
        run_tiny(
            dir.path(),
            &[&["--resume", "d", "--metrics", "m"], more].concat(),
        )
    };

    // A run with nothing to do changes nothing.
    let modified = || path.metadata().unwrap().modified().unwrap();
    let before = modified();
    succeeds(&resume(&["--steps", "4"]));
    assert_eq!(
        (fs::read_to_string(&path).unwrap(), modified()),
        (first.clone(), before)
    );
    succeeds(&run_flags(dir.path(), "--resume d --steps 4 --metrics new"));
    assert!(!dir.path().join("new").exists());

    // A crash left a line of a step after the newest checkpoint, and a part of the next line.
    let fifth = first
        .lines()
        .last()
        .unwrap()
        .replacen("\"step\":4", "\"step\":5", 1);
    fs::write(&path, format!("{first}{fifth}\n{}", &fifth[..40])).unwrap();
    let out = succeeds(&resume(&["--steps", "6"]));
    assert!(
        out.contains("m: 1 line after step 4 to be moved to m.after-step-4\n"),
        "{out}"
    );
    let moved = fs::read_to_string(dir.path().join("m.after-step-4")).unwrap();
    assert_eq!(moved, format!("{fifth}\n"));
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.starts_with(&first) && !text.contains(&fifth), "{text}");
    assert_eq!(numbers(&path), [1, 2, 3, 4, 5, 6]);
    let runs: Vec<Value> = lines(&path)
        .into_iter()
        .map(|mut line| line["run"].take())
        .collect();
    assert!(
        runs.iter()
            .all(|run| *run == runs[0] && run.as_str().is_some_and(|id| id.len() >= 8)),
        "{runs:?}"
    );

    // Into another folder: a new run, which continues the file.
    succeeds(&run_flags(
        dir.path(),
        "--resume d --steps 7 --checkpoint e --metrics m",
    ));

    assert_eq!(numbers(&path), [1, 2, 3, 4, 5, 6, 7]);
    assert_ne!(lines(&path)[6]["run"], runs[0]);
}

#[test]
fn files_of_others_are_no_metrics_files() {
    let dir = four_steps();
    let fresh = |file: &str| run_tiny(dir.path(), &["--metrics", file]);
    fs::write(dir.path().join("notes"), "my notes\n").unwrap();
    fs::write(dir.path().join("empty"), "").unwrap();
    let before = files(dir.path());

    fails(
        &fresh("m"),
        2,
        &[
            "--metrics m",
            "4 steps of another run",
            "--resume",
            "another file",
        ],
    );

    fails(
        &fresh("notes"),
        2,
        &["--metrics notes", "not a metrics file", "another file"],
    );
    let resumed = run_flags(dir.path(), "--resume d --steps 5 --metrics notes");
    fails(&resumed, 2, &["--metrics notes", "not a metrics file"]);
    assert!(files(dir.path()) == before, "a refused run changed files");
    succeeds(&fresh("empty"));
    assert_eq!(numbers(&dir.path().join("empty")), [1, 2, 3]);
    let another = run_flags(dir.path(), "--resume d --steps 5 --metrics empty");
    fails(
        &another,
        2,
        &["--metrics empty", "another run than the resumed one"],
    );
}

/// Damage to a checkpoint, and a part of its description.
type Damage = (fn(&Path), &'static str);

const SHARD: &str = "shard-00001-of-00002.safetensors";
const DAMAGES: [Damage; 6] = [
    (|c| flip(&c.join(SHARD)), "damaged: bytes"),
    (|c| flip(&c.join("manifest.json")), "invalid manifest"),
    (|c| flip(&c.join("run.json")), "run.json: damaged: bytes"),
    (
        |c| {
            fs::File::options()
                .write(true)
                .open(c.join(SHARD))
                .unwrap()
                .set_len(5000)
                .unwrap()
        },
        "5000 bytes long",
    ),
    (|c| fs::remove_file(c.join(SHARD)).unwrap(), "No such file"),
    (
        |c| fs::remove_file(c.join("manifest.json")).unwrap(),
        "No such file",
    ),
];

/// Inverts a bit of the middle byte.
fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn damaged_checkpoints_are_passed_over() {
    let original = four_steps();
    let nothing_to_do = |dir: &TempDir, more: &[&str]| -> Output {
        run_tiny(
            dir.path(),
            &[&["--resume", "d", "--steps", "1"], more].concat(),
        )
    };

    let verify = |dir: &TempDir, path: &str| zero(dir.path(), &["ckpt", "verify", path]);
    for (damage, reason) in DAMAGES {
        let dir = temp();
        for (path, content) in files(&original.path().join("d")) {
            let path = dir.path().join(path.strip_prefix(original.path()).unwrap());
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let checkpoint = |step: u64| dir.path().join(format!("d/step-0000000{step}"));
        // An older one does not matter while the newest is whole.
        damage(&checkpoint(3));
        succeeds(&nothing_to_do(&dir, &["--resume-exact"]));
        succeeds(&verify(&dir, "d"));

        damage(&checkpoint(4));
        let out = succeeds(&nothing_to_do(&dir, &[]));
        for part in [
            "step-00000004 is passed over",
            "step-00000003 is passed over",
            reason,
            "is at step 2",
        ] {
            assert!(out.contains(part), "{part:?} is not in: {out}");
        }
        fails(
            &nothing_to_do(&dir, &["--resume-exact"]),
            2,
            &["--resume-exact", "step-0000000", reason],
        );
        let whole = [
            "2 checkpoints are damaged",
            reason,
            "newest whole checkpoint is d/step-00000002",
            "--resume d",
        ];
        fails(&verify(&dir, "d"), 1, &whole);
        let named = run_tiny(dir.path(), &["--resume", "d/step-00000004", "--steps", "5"]);
        let text = String::from_utf8_lossy(&named.stderr);
        assert!(
            !named.status.success()
                && text.contains("--resume d takes the newest whole checkpoint"),
            "{text}"
        );
        fails(&verify(&dir, "d/step-00000004"), 1, &[reason]);
        succeeds(&verify(&dir, "d/step-00000002"));

        // The damaged ones are replaced.
        succeeds(&run_flags(
            dir.path(),
            "--resume d --steps 4 --checkpoint-every 1",
        ));
        succeeds(&verify(&dir, "d/step-00000003"));
        (1..5).for_each(|step| damage(&checkpoint(step)));
        fails(
            &nothing_to_do(&dir, &[]),
            2,
            &["d: no complete checkpoint", reason],
        );
        fails(&verify(&dir, "d"), 1, &["no complete checkpoint", reason]);
    }
}

/// The first command of the README, again in the same folder.
#[test]
fn demonstration_runs_again() {
    let dir = temp();
    fs::write(
        dir.path().join("text.txt"),
        "To be, or not to be, that is the question.\n".repeat(2000),
    )
    .unwrap();

    let run = || {
        let size = words("--steps 1 --ranks 1 --seq-len 16 --micro-batch 1");
        succeeds(&zero(dir.path(), &[&["train"], &size[..]].concat()))
    };

    let out = run();
    assert!(
        out.contains("checkpoint: checkpoints/step-00000001"),
        "{out}"
    );
    let first = files(&dir.path().join("checkpoints"));
    let out = run();
    assert!(
        out.contains("checkpoint: checkpoints-2/step-00000001"),
        "{out}"
    );
    assert!(
        out.contains("checkpoints holds an earlier run, so this one saves to checkpoints-2"),
        "{out}"
    );
    assert!(files(&dir.path().join("checkpoints")) == first);
    assert!(run().contains("checkpoint: checkpoints-3/step-00000001"));
}

#[test]
fn concurrent_runs_save_to_their_own_folders() {
    let dir = temp();
    let (model, tokens) = (data("model"), data("tokens.u16.bin"));
    let start = |_| {
        let mut run = place::zero();
        let run = run.args(tiny(&model, &tokens, &[])).current_dir(dir.path());
        run.stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let runs: Vec<_> = (0..3).map(start).collect();
    for run in runs {
        succeeds(&run.wait_with_output().unwrap());
    }
    for folder in ["checkpoints", "checkpoints-2", "checkpoints-3"] {
        assert_eq!(steps(&dir.path().join(folder)), [3], "{folder}");
    }
}

/// After each kill the run continues from its newest checkpoint; in the end nothing shows that it
/// was killed.
#[test]
fn killed_run_continues() {
    let dir = temp();
    let (model, tokens) = (data("model"), data("tokens.u16.bin"));
    let path = dir.path().join("m");
    let written = || fs::read_to_string(&path).map_or(0, |text| text.lines().count());
    let more = words("--steps 1000000 --checkpoint-every 1 --keep-last 2 --metrics m");

    for at in [["--checkpoint", "d"], ["--resume", "d"], ["--resume", "d"]] {
        let mut run = place::zero();
        let args = [&more[..], &at].concat();
        let run = run
            .args(tiny(&model, &tokens, &args))
            .current_dir(dir.path())
            .stdout(Stdio::null())
            .spawn();
        let (mut run, before) = (run.unwrap(), written());
        while written() < before + 4 || !dir.path().join("d/latest").exists() {
            assert!(run.try_wait().unwrap().is_none(), "the run ended");
            std::thread::sleep(Duration::from_millis(5));
        }
        run.kill().unwrap(); // SIGKILL
        run.wait().unwrap();
    }

    let last = lines(&path).len() as u64 + 2;
    let end = last.to_string();
    succeeds(&run_tiny(
        dir.path(),
        &["--resume", "d", "--steps", &end, "--metrics", "m"],
    ));

    succeeds(&run_tiny(
        dir.path(),
        &words(&format!(
            "--steps {end} --checkpoint whole --metrics whole.m"
        )),
    ));

    assert_eq!(numbers(&path), (1..=last).collect::<Vec<_>>());
    assert_eq!(losses(&path), losses(&dir.path().join("whole.m")));
    assert_eq!(steps(&dir.path().join("d")).len(), 2);
}

#[test]
fn imported_weights_start_a_run() {
    let dir = temp();
    let out = succeeds(&zero(
        dir.path(),
        &["ckpt", "import", &data("model"), "imported"],
    ));
    assert!(out.contains("zero train --model imported"), "{out}");

    for (model, metrics) in [
        (data("model"), "a"),
        ("imported".into(), "b"),
        ("imported/step-00000000".into(), "c"),
    ] {
        succeeds(&run_tiny(
            dir.path(),
            &["--model", &model, "--metrics", metrics],
        ));
    }

    let losses = |file: &str| losses(&dir.path().join(file));
    assert_eq!(losses("a"), losses("b"));
    assert_eq!(losses("a"), losses("c"));
    // The weights of a run start another one.
    succeeds(&run_tiny(dir.path(), &["--checkpoint", "run"]));
    succeeds(&run_tiny(dir.path(), &["--model", "run", "--metrics", "d"]));
    assert!(losses("d")[0].as_f64() < losses("a")[0].as_f64());
    flip(
        &dir.path()
            .join("imported/step-00000000/shard-00000-of-00001.safetensors"),
    );
    fails(
        &run_tiny(dir.path(), &["--model", "imported"]),
        2,
        &["imported/step-00000000", "damaged: bytes"],
    );
}

/// The launcher verifies the checkpoint once and passes it to its ranks, which check what they
/// read.
#[test]
fn ranks_open_the_checkpoint_of_their_launcher() {
    let dir = four_steps();
    let selected = |step: u64| {
        let selection = Reader::open(dir.path().join(format!("d/step-{step:08}")))
            .unwrap()
            .selection();
        serde_json::json!({"selection": selection, "notices": ["a note of the launcher"]})
            .to_string()
    };

    let resume = |selected: &str, metrics: &str| {
        let args = [
            "train",
            "--resume",
            "d",
            "--steps",
            "5",
            "--no-checkpoint",
            "--metrics",
            metrics,
        ];
        let mut rank = place::zero();
        rank.args(args)
            .env("ZERO_SELECTED_CHECKPOINT", selected)
            .current_dir(dir.path());
        rank.output().unwrap()
    };

    // Not the newest one.
    let out = succeeds(&resume(&selected(3), "m2"));
    assert!(out.contains("a note of the launcher"), "{out}");
    assert_eq!(numbers(&dir.path().join("m2")), [4, 5]);
    // Damage that came later is found by the rank that reads it.
    let third = selected(3);
    flip(&dir.path().join("d/step-00000003").join(SHARD));

    fails(
        &resume(&third, "m3"),
        1,
        &[
            "step-00000003",
            "damaged: bytes",
            "--resume DIR starts from it",
        ],
    );

    fs::remove_dir_all(dir.path().join("d/step-00000003")).unwrap();
    fails(&resume(&third, "m4"), 2, &["step-00000003: No such file"]);
    // Another checkpoint of the same name.
    fs::rename(
        dir.path().join("d/step-00000004"),
        dir.path().join("d/step-00000003"),
    )
    .unwrap();
    fails(
        &resume(&third, "m5"),
        2,
        &["another checkpoint than rank 0 opened"],
    );
}

/// The library knows no command line: the program sets what its messages name.
#[test]
fn hints_name_the_commands_of_the_program() {
    let dir = temp();
    let staging = dir.path().join("c/.staging");
    fs::create_dir_all(&staging).unwrap();
    let staged = "step-00000030.rank-00000.00000000.0123456789abcdef.7";
    fs::write(staging.join(staged), "x").unwrap();

    let verified = zero(dir.path(), &words("ckpt verify c"));

    let hint =
        "a failed save has left files in its .staging: `zero ckpt assemble` makes a checkpoint";
    fails(&verified, 1, &[hint]);
}
