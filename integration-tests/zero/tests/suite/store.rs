//! The files that a run writes, and those that it does not touch: checkpoints and metrics files of
//! other runs, damage.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use zero_ckpt::Reader;

use crate::support::{
    Files, Folder, Printed, Runs, checkpoints, count_lines, data, fails, lines, losses, on_disk,
    succeeds, temp, wait_for,
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

fn numbers(path: &Path) -> Vec<u64> {
    lines(path)
        .iter()
        .map(|line| line["step"].as_u64().unwrap())
        .collect()
}

/// A folder with a run of four steps: checkpoints 1 to 4 in `d`, metrics in `m`. It is on a disk, so
/// that the command line is tested with direct I/O and syncs, too.
fn four_steps() -> Folder {
    let dir = on_disk();
    dir.tiny("--steps 4 --checkpoint d --checkpoint-every 1 --metrics m");
    assert_eq!(checkpoints(&dir.join("d")), [1, 2, 3, 4]);
    dir
}

#[test]
fn another_runs_checkpoints_are_refused() {
    let dir = &four_steps();
    let before = files(dir);
    let ways = [
        "--checkpoint d",
        "another run",
        "step-00000004",
        "--resume d",
        "another folder",
    ];
    for more in ["--keep-last 1", "--seed 5", "--steps 0", "--model nano"] {
        dir.refuses(&format!("--checkpoint d --metrics m2 {more}"), &ways);
    }

    dir.refuses(
        "--checkpoint d/step-00000004",
        &["--checkpoint d/step-00000004", "got a checkpoint"],
    );
    let import = format!("ckpt import {} d", data("model"));
    dir.fails(&import, 2, &["d: this folder holds checkpoints"]);
    assert!(files(dir) == before, "a refused run changed files");

    // Another run that resumes a third one is refused as well.
    dir.tiny("--checkpoint e");
    dir.refuses("--resume e --steps 5 --checkpoint d", &ways);

    // The run itself prunes its own.
    dir.tiny("--resume d --steps 5 --keep-last 1");
    assert_eq!(checkpoints(&dir.join("d")), [5]);
}

#[test]
fn named_checkpoint_resumes_into_its_folder() {
    let dir = &four_steps();
    dir.tiny("--resume d/step-00000002 --steps 6 --metrics m");

    assert_eq!(checkpoints(&dir.join("d")), [1, 2, 3, 4, 5, 6]);
    assert!(checkpoints(&dir.join("d/step-00000002")).is_empty());
    assert_eq!(numbers(&dir.join("m")), [1, 2, 3, 4, 5, 6]);
    // The order of checkpoints is that of saves.
    dir.tiny("--resume d/step-00000001 --steps 2");
    dir.tiny("--resume d --steps 2")
        .shows(&["nothing to do: the checkpoint is at step 2"]);
}

#[test]
fn resumed_metrics_are_appended() {
    let dir = &four_steps();
    let path = dir.join("m");
    let first = fs::read_to_string(&path).unwrap();
    let resume = |steps: u64| dir.tiny(&format!("--resume d --metrics m --steps {steps}"));

    // A run with nothing to do changes nothing.
    let modified = || path.metadata().unwrap().modified().unwrap();
    let before = modified();
    resume(4);
    assert_eq!(modified(), before);
    assert_eq!(fs::read_to_string(&path).unwrap(), first);
    dir.tiny("--resume d --steps 4 --metrics new");
    assert!(!dir.join("new").exists());

    // A crash left a line of a step after the newest checkpoint, and a part of the next line.
    let last = first.lines().last().unwrap();
    let fifth = last.replacen("\"step\":4", "\"step\":5", 1);
    fs::write(&path, format!("{first}{fifth}\n{}", &fifth[..40])).unwrap();
    resume(6).shows(&["m: 1 line after step 4 to be moved to m.after-step-4\n"]);
    let moved = dir.text("m.after-step-4");
    assert_eq!(moved, format!("{fifth}\n"));
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.starts_with(&first) && !text.contains(&fifth), "{text}");
    assert_eq!(numbers(&path), [1, 2, 3, 4, 5, 6]);
    let steps = lines(&path);
    let run = &steps[0]["run"];
    assert!(run.as_str().is_some_and(|id| id.len() >= 8), "{run}");
    assert!(steps.iter().all(|step| step["run"] == *run), "{text}");

    // Into another folder: a new run, which continues the file.
    dir.tiny("--resume d --steps 7 --checkpoint e --metrics m");

    assert_eq!(numbers(&path), [1, 2, 3, 4, 5, 6, 7]);
    assert_ne!(lines(&path)[6]["run"], *run);
}

#[test]
fn files_of_others_are_no_metrics_files() {
    let dir = &four_steps();
    dir.write("notes", "my notes\n");
    dir.write("empty", "");
    let before = files(dir);

    let cases: [(&str, &[&str]); 3] = [
        (
            "--metrics m",
            &[
                "--metrics m",
                "4 steps of another run",
                "--resume",
                "another file",
            ],
        ),
        (
            "--metrics notes",
            &["--metrics notes", "not a metrics file", "another file"],
        ),
        (
            "--resume d --steps 5 --metrics notes",
            &["--metrics notes", "not a metrics file"],
        ),
    ];
    dir.refuses_all(&cases);
    assert!(files(dir) == before, "a refused run changed files");
    dir.tiny("--metrics empty");
    assert_eq!(numbers(&dir.join("empty")), [1, 2, 3]);
    dir.refuses(
        "--resume d --steps 5 --metrics empty",
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
            let shard = fs::File::options().write(true).open(c.join(SHARD));
            shard.unwrap().set_len(5000).unwrap();
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
    let original = &four_steps();
    for (damage, reason) in DAMAGES {
        let dir = &temp();
        for (path, content) in files(&original.join("d")) {
            let path = dir.join(path.strip_prefix(original).unwrap());
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let checkpoint = |step: u64| dir.join(format!("d/step-0000000{step}"));
        let nothing_to_do = "--resume d --steps 1";
        let exact = "--resume d --steps 1 --resume-exact";
        // An older one does not matter while the newest is whole.
        damage(&checkpoint(3));
        dir.tiny(exact);
        dir.zero("ckpt verify d");

        damage(&checkpoint(4));
        dir.tiny(nothing_to_do).shows(&[
            "step-00000004 is passed over",
            "step-00000003 is passed over",
            reason,
            "is at step 2",
        ]);
        dir.refuses(exact, &["--resume-exact", "step-0000000", reason]);
        let whole = [
            "2 checkpoints are damaged",
            reason,
            "newest whole checkpoint is d/step-00000002",
            "--resume d",
        ];
        dir.fails("ckpt verify d", 1, &whole);
        let named = dir.tiny_output("--resume d/step-00000004 --steps 5");
        let text = String::from_utf8_lossy(&named.stderr);
        assert!(!named.status.success(), "{text}");
        text.shows(&["--resume d takes the newest whole checkpoint"]);
        dir.fails("ckpt verify d/step-00000004", 1, &[reason]);
        dir.zero("ckpt verify d/step-00000002");

        // The damaged ones are replaced.
        dir.tiny("--resume d --steps 4 --checkpoint-every 1");
        dir.zero("ckpt verify d/step-00000003");
        (1..5).for_each(|step| damage(&checkpoint(step)));
        dir.refuses(nothing_to_do, &["d: no complete checkpoint", reason]);
        dir.fails("ckpt verify d", 1, &["no complete checkpoint", reason]);
    }
}

/// The first command of the README, again in the same folder.
#[test]
fn demonstration_runs_again() {
    let dir = &temp();
    dir.write(
        "text.txt",
        "To be, or not to be, that is the question.\n".repeat(2000),
    );

    let run = || dir.zero("train --steps 1 --ranks 1 --seq-len 16 --micro-batch 1");

    run().shows(&["checkpoint: checkpoints/step-00000001"]);
    let first = files(&dir.join("checkpoints"));
    run().shows(&[
        "checkpoint: checkpoints-2/step-00000001",
        "checkpoints holds an earlier run, so this one saves to checkpoints-2",
    ]);
    assert!(files(&dir.join("checkpoints")) == first);
    run().shows(&["checkpoint: checkpoints-3/step-00000001"]);
}

#[test]
fn concurrent_runs_save_to_their_own_folders() {
    let dir = &temp();
    let start = |_| {
        let mut run = dir.tiny_command("");
        run.stdout(Stdio::null()).stderr(Stdio::piped());
        run.spawn().unwrap()
    };
    let runs: Vec<_> = (0..3).map(start).collect();
    for run in runs {
        succeeds(&run.wait_with_output().unwrap());
    }
    for folder in ["checkpoints", "checkpoints-2", "checkpoints-3"] {
        assert_eq!(checkpoints(&dir.join(folder)), [3], "{folder}");
    }
}

/// After each kill the run continues from its newest checkpoint; in the end nothing shows that it
/// was killed.
#[test]
fn killed_run_continues() {
    let dir = &temp();
    let path = dir.join("m");
    let more = "--steps 1000000 --checkpoint-every 1 --keep-last 2 --metrics m";
    for at in ["--checkpoint d", "--resume d", "--resume d"] {
        let before = count_lines(&path);
        let mut run = dir.start(&format!("{more} {at}"));
        wait_for(&mut run, || {
            count_lines(&path) >= before + 4 && dir.join("d/latest").exists()
        });
        run.kill().unwrap(); // SIGKILL
        run.wait().unwrap();
    }

    let end = count_lines(&path) as u64 + 2;
    dir.tiny(&format!("--resume d --steps {end} --metrics m"));

    dir.tiny(&format!(
        "--steps {end} --checkpoint whole --metrics whole.m"
    ));

    assert_eq!(numbers(&path), (1..=end).collect::<Vec<_>>());
    assert_eq!(losses(&path), losses(&dir.join("whole.m")));
    assert_eq!(checkpoints(&dir.join("d")).len(), 2);
}

#[test]
fn imported_weights_start_a_run() {
    let dir = &temp();
    let out = dir.zero(&format!("ckpt import {} imported", data("model")));
    out.shows(&["zero train --model imported"]);

    for (model, metrics) in [
        (data("model"), "a"),
        ("imported".into(), "b"),
        ("imported/step-00000000".into(), "c"),
    ] {
        dir.tiny(&format!("--model {model} --metrics {metrics}"));
    }

    let losses = |file: &str| losses(&dir.join(file));
    assert_eq!(losses("a"), losses("b"));
    assert_eq!(losses("a"), losses("c"));
    // The weights of a run start another one.
    dir.tiny("--checkpoint run");
    dir.tiny("--model run --metrics d");
    assert!(losses("d")[0].as_f64() < losses("a")[0].as_f64());
    flip(&dir.join("imported/step-00000000/shard-00000-of-00001.safetensors"));
    dir.refuses(
        "--model imported",
        &["imported/step-00000000", "damaged: bytes"],
    );
}

/// The launcher verifies the checkpoint once and passes it to its ranks, which check what they
/// read.
#[test]
fn ranks_open_the_checkpoint_of_their_launcher() {
    let dir = &four_steps();
    let selected = |step: u64| {
        let selection = Reader::open(dir.join(format!("d/step-{step:08}")))
            .unwrap()
            .selection();
        serde_json::json!({"selection": selection, "notices": ["a note of the launcher"]})
            .to_string()
    };

    let resume = |selected: &str, metrics: &str| {
        let line = format!("train --resume d --steps 5 --no-checkpoint --metrics {metrics}");
        let mut rank = dir.command(&line);
        rank.env("ZERO_SELECTED_CHECKPOINT", selected);
        rank.output().unwrap()
    };

    // Not the newest one.
    succeeds(&resume(&selected(3), "m2")).shows(&["a note of the launcher"]);
    assert_eq!(numbers(&dir.join("m2")), [4, 5]);
    // Damage that came later is found by the rank that reads it.
    let third = selected(3);
    flip(&dir.join("d/step-00000003").join(SHARD));

    fails(
        &resume(&third, "m3"),
        1,
        &[
            "step-00000003",
            "damaged: bytes",
            "--resume DIR starts from it",
        ],
    );

    fs::remove_dir_all(dir.join("d/step-00000003")).unwrap();
    fails(&resume(&third, "m4"), 2, &["step-00000003: No such file"]);
    // Another checkpoint of the same name.
    fs::rename(dir.join("d/step-00000004"), dir.join("d/step-00000003")).unwrap();
    fails(
        &resume(&third, "m5"),
        2,
        &["another checkpoint than rank 0 opened"],
    );
}

/// The library knows no command line: the program sets what its messages name.
#[test]
fn hints_name_the_commands_of_the_program() {
    let dir = &temp();
    let staging = dir.join("c/.staging");
    fs::create_dir_all(&staging).unwrap();
    let staged = "step-00000030.rank-00000.00000000.0123456789abcdef.7";
    staging.write(staged, "x");

    let hint =
        "a failed save has left files in its .staging: `zero ckpt assemble` makes a checkpoint";
    dir.fails("ckpt verify c", 1, &[hint]);
}
