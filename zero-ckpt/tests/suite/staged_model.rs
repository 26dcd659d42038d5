//! The life of staged saves, against a model: which of them stay, which one is assembled, and what
//! an opening and a search say of them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use proptest::prelude::*;
use zero_ckpt::testing::SavePoint;
use zero_ckpt::{Reader, StoreOptions, assemble, assemble_step, resolve, staged_saves};

use crate::common::{
    NONE, assert_holds, cases, layout_in_blocks, meta, on_ranks, open, run, save_until, says,
    staged,
};

/// The runs: the second one resumed the first, the third is of somebody else.
const RUNS: [&str; 3] = ["a", "b", "other"];

/// Their names do not have the order of their numbers.
const STEPS: [u64; 4] = [5, 70, 99_999_999, 100_000_000];

/// Files that no save has written, the first with the name of a save's directory.
const STRANGERS: [&str; 3] = [
    "step-00000009.ready.00000000.770df694368854c8.0",
    "step-00000001.notes",
    "latest.txt",
];

#[derive(Clone, Copy, Debug)]
enum Act {
    /// A save of a run, of a step; rank 0 is killed there.
    Save(usize, u64, Option<SavePoint>),
    /// A run opens the directory.
    Open(usize),
    /// A file of the staged save of this index is lost.
    Lose(usize, Lost),
}

#[derive(Clone, Copy, Debug)]
enum Lost {
    Description,
    File(u64),
}

fn act() -> impl Strategy<Value = Act> {
    let stop = prop::sample::select(vec![
        None,
        Some(SavePoint::DirCreated),
        Some(SavePoint::FilesMoved),
        Some(SavePoint::ManifestSynced),
    ]);
    let lost = prop_oneof![Just(Lost::Description), (0..2u64).prop_map(Lost::File)];
    prop_oneof![
        5 => (0..3usize, prop::sample::select(&STEPS[..]), stop)
            .prop_map(|(run, step, stop)| Act::Save(run, step, stop)),
        1 => (0..3usize).prop_map(Act::Open),
        2 => (0..4usize, lost).prop_map(|(index, lost)| Act::Lose(index, lost)),
    ]
}

/// A staged save.
#[derive(Clone, Debug)]
struct Staged {
    /// The end of its files' names.
    suffix: String,
    run: usize,
    step: u64,
    seed: u64,
    is_whole: bool,
    /// Whether a checkpoint was published since.
    is_passed: bool,
}

/// The model: what is staged, in the order of staging, and the checkpoints, oldest save first.
#[derive(Default)]
struct Model {
    staged: Vec<Staged>,
    /// Run, step and seed.
    published: Vec<(usize, u64, u64)>,
}

fn owns(run: usize, other: usize) -> bool {
    run == other || (run, other) == (1, 0)
}

impl Model {
    fn open(&mut self, run: usize) {
        self.staged
            .retain(|save| save.is_whole || !owns(run, save.run));
    }

    /// The saves of which a checkpoint can be made.
    fn whole(&self) -> impl Iterator<Item = &Staged> {
        self.staged.iter().filter(|save| save.is_whole)
    }

    /// Returns whether the save is published.
    fn save(&mut self, (run, step, seed): (usize, u64, u64), stops: bool) -> bool {
        self.open(run);
        let replaced = self.published.iter().position(|other| other.1 == step);
        let is_refused = replaced.is_some_and(|index| !owns(run, self.published[index].0));
        if stops || is_refused {
            self.staged.push(Staged {
                suffix: String::new(),
                run,
                step,
                seed,
                is_whole: true,
                is_passed: false,
            });
            return false;
        }

        if let Some(index) = replaced {
            self.published.remove(index);
        }
        self.published.push((run, step, seed));
        self.staged
            .iter_mut()
            .for_each(|save| save.is_passed = true);
        self.staged
            .retain(|save| save.step > step || !owns(run, save.run));
        true
    }
}

fn options(run_index: usize) -> StoreOptions {
    let resumed = if run_index == 1 {
        vec!["a".into()]
    } else {
        Vec::new()
    };
    run(RUNS[run_index]).resumed_runs(resumed)
}

/// The ends of the names in the staging directory that are those of saves.
fn suffixes(dir: &Path) -> BTreeSet<String> {
    let names = staged(dir).into_iter();
    let saves = names.filter(|name| !STRANGERS.contains(&name.as_str()));
    let suffix = |name: String| name.splitn(3, '.').nth(2).map(str::to_owned);
    saves.filter_map(suffix).collect()
}

/// Removes a file of a save, which may be in its directory.
fn lose(dir: &Path, save: &Staged, lost: Lost) {
    let path = |kind: String| {
        let name = format!("step-{:08}.{kind}.{}", save.step, save.suffix);
        dir.join(".staging").join(name)
    };
    match lost {
        Lost::Description => fs::remove_file(path("save".into())).unwrap(),
        Lost::File(rank) => {
            let moved = format!("shard-{rank:05}-of-00002.safetensors");
            let moved = path("ready".into()).join(moved);
            fs::remove_file(path(format!("rank-{rank:05}")))
                .or_else(|_| fs::remove_file(moved))
                .unwrap();
        }
    }
}

/// Checks what the opening by `run` says of the staged saves that are left.
fn check_notices(text: &str, run: usize, model: &Model) {
    let (own, others): (Vec<_>, Vec<_>) = model.staged.iter().partition(|save| owns(run, save.run));
    let counted = |count: usize, which: &str| {
        let plural = if count == 1 { "" } else { "s" };
        format!("{count} staged save{plural} {which}, ")
    };
    let of_run = counted(own.len(), "of this run that failed");
    assert_eq!(text.contains(&of_run), !own.is_empty(), "{text}");
    if let Some(last) = own.iter().map(|save| save.step).max() {
        let last = format!("the last of step-{last:08}; `zero_ckpt::assemble`");
        assert!(text.contains(&last), "{text}");
    }
    // The entry of a stranger that has the name of a save counts.
    let of_others = counted(others.len() + 1, "of other runs");
    assert!(text.contains(&of_others), "{text}");
}

/// Checks what a search of the directory says.
fn check(dir: &Path, model: &Model) {
    let found = staged_saves(dir).unwrap();
    let strangers = 1;
    assert_eq!(found.saves, model.staged.len() + strangers, "{found}");
    let text = found.to_string();
    assert!(text.contains(" that no checkpoint holds, "), "{text}");

    match (resolve(dir), model.published.last()) {
        (Ok(found), Some((_, step, _))) => {
            assert_eq!(found.reader.manifest().step, *step);
            assert!(found.passed_over.is_empty());
            let newer = model.whole().filter(|save| !save.is_passed);
            let hint = newer
                .map(|save| save.step)
                .max()
                .map(|step| format!("a newer save of step {step} are staged"));
            assert_eq!(found.staged.is_some(), hint.is_some(), "{:?}", found.staged);
            assert!(hint.is_none_or(|hint| found.staged.is_some_and(|text| text.contains(&hint))));
        }
        (Err(error), None) => assert!(error.to_string().contains("`zero_ckpt::assemble`")),
        (_, published) => panic!("{published:?}"),
    }
}

/// Checks which save is assembled.
fn check_assembled(root: &Path, dir: &Path, model: &Model) {
    let layout = layout_in_blocks(2);
    let assembled = assemble(root.join("new"), &[dir]).map_err(|error| error.to_string());
    match (model.whole().last(), assembled) {
        (None, Err(error)) => assert!(error.contains("no staged save"), "{error}"),
        (Some(last), Err(error)) => {
            assert!(last.is_passed, "{error}");
            says(&error, &["was published after it was staged"]);
        }
        (Some(last), Ok(assembled)) => {
            assert!(!last.is_passed);
            assert_eq!(assembled.checkpoint.step, last.step);
            assert_eq!(assembled.passed_over.len(), model.staged.len());
            assert_holds(&Reader::open(root.join("new")).unwrap(), &layout, last.seed);
        }
        (None, Ok(assembled)) => panic!("{assembled:?}"),
    }

    // Of a named step, also where a checkpoint was published since.
    for step in STEPS {
        let path = root.join(step.to_string());
        let last = model.whole().filter(|save| save.step == step).last();
        match (last, assemble_step(&path, &[dir], step)) {
            (Some(last), Ok(_)) => assert_holds(&Reader::open(path).unwrap(), &layout, last.seed),
            (None, Err(_)) => {}
            (last, assembled) => panic!("{last:?}: {assembled:?}"),
        }
    }

    // Beside the checkpoints, if it is the next of their run.
    let newest = model.published.iter().map(|(_, step, _)| *step).max();
    let is_next = |last: &Staged| {
        let mut runs = model.published.iter().map(|(run, ..)| *run);
        !last.is_passed && newest < Some(last.step) && runs.all(|run| owns(last.run, run))
    };
    let assembled = assemble(dir, &NONE);
    let expected = model.whole().last().filter(|last| is_next(last));
    assert_eq!(assembled.is_ok(), expected.is_some(), "{assembled:?}");
    if let Some(last) = expected {
        assert_holds(&Reader::open(dir).unwrap(), &layout, last.seed);
    }
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn staged_saves_follow_the_model(acts in prop::collection::vec(act(), 1..8)) {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("ckpt");
        let staging = dir.join(".staging");
        fs::create_dir_all(&staging).unwrap();
        for stranger in STRANGERS {
            fs::write(staging.join(stranger), "mine").unwrap();
        }

        let layout = layout_in_blocks(2);
        let mut model = Model::default();
        for (seed, act) in (1..).zip(acts) {
            match act {
                Act::Save(run, step, stop) => {
                    let errors = save_until(stop, &dir, &layout, (&meta(step), seed), &options(run));
                    let is_published = model.save((run, step, seed), stop.is_some());
                    prop_assert_eq!(errors.is_empty(), is_published, "{:?}", errors);
                    prop_assert!(errors.iter().all(|error| error.contains("is kept: ")));
                }
                Act::Open(run) => {
                    let notices = on_ranks(2, |rank, world| {
                        open(&dir, rank, &options(run), world).finish_removals()
                    });
                    model.open(run);
                    check_notices(&notices[0].join("\n"), run, &model);
                }
                Act::Lose(index, lost) => {
                    let save = model.staged.get_mut(index).filter(|save| save.is_whole);
                    if let Some(save) = save {
                        lose(&dir, save, lost);
                        save.is_whole = false;
                    }
                }
            }

            let mut found = suffixes(&dir);
            found.retain(|suffix| model.staged.iter().all(|save| save.suffix != *suffix));
            let new = model.staged.iter_mut().filter(|save| save.suffix.is_empty());
            new.zip(found).for_each(|(save, suffix)| save.suffix = suffix);
            let expected: BTreeSet<_> = model.staged.iter().map(|save| save.suffix.clone()).collect();
            prop_assert_eq!(suffixes(&dir), expected);
            check(&dir, &model);
        }

        check_assembled(root.path(), &dir, &model);
        prop_assert!(STRANGERS.iter().all(|name| staging.join(name).exists()));
    }
}
