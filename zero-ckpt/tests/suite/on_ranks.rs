//! One checkpoint on all ranks: rank 0 chooses it, the others open what they read and check that.

use std::fs;
use std::path::Path;
use std::sync::mpsc::channel;

use zero_ckpt::{
    CkptError, Exchange, MANIFEST_NAME, Reader, Selection, StateDtype, StoreOptions, resolve,
};

use crate::common::{
    STATES, assert_holds, bits, fails, flip, layout, loaded, on_ranks, read, saved, two_checkpoints,
};

const RANKS: u64 = 3;

/// All ranks open the newest whole checkpoint.
fn open(dir: &Path) -> Vec<Result<Reader, CkptError>> {
    on_ranks(RANKS, |rank, world| {
        let find = || Ok::<_, CkptError>(resolve(dir)?.reader);
        Reader::open_on_ranks(dir, rank, &mut world.rank(rank), find)
    })
}

fn shard(dir: &Path, step: u64, rank: u64) -> std::path::PathBuf {
    dir.join(format!(
        "step-{step:08}/shard-{rank:05}-of-{RANKS:05}.safetensors"
    ))
}

#[test]
fn all_ranks_open_the_one_that_rank_0_chose() {
    let dir = two_checkpoints(&layout(RANKS, 4));
    open(dir.path())
        .into_iter()
        .for_each(|reader| assert_holds(&reader.unwrap(), &layout(RANKS, 4), 2));
    flip(&shard(dir.path(), 2, 1), -1);
    let readers = open(dir.path());
    readers
        .into_iter()
        .for_each(|reader| assert_holds(&reader.unwrap(), &layout(2, 1), 1));
}

#[test]
fn failure_of_rank_0_reaches_all() {
    let dir = two_checkpoints(&layout(RANKS, 4));
    for step in [1, 2] {
        flip(&shard(dir.path(), step, 2), -1);
    }
    let errors: Vec<_> = open(dir.path())
        .into_iter()
        .map(|reader| reader.err().unwrap())
        .collect();
    assert!(
        matches!(errors[0], CkptError::NoCheckpoint { .. }),
        "{}",
        errors[0]
    );
    for error in &errors[1..] {
        assert!(matches!(error, CkptError::Rank { rank: 0, .. }), "{error}");
        assert_eq!(error.to_string(), format!("rank 0: {}", errors[0]));
    }
}

#[test]
fn panic_of_rank_0_reaches_all() {
    let dir = two_checkpoints(&layout(RANKS, 4));
    let errors = on_ranks(RANKS, |rank, world| {
        let find = || -> Result<Reader, CkptError> { std::panic::resume_unwind(Box::new("boom")) };
        let opened = Reader::open_on_ranks(dir.path(), rank, &mut world.rank(rank), find);
        opened.err().unwrap().to_string()
    });

    assert_eq!(errors[0], CkptError::Panicked.to_string());
    for error in &errors[1..] {
        assert_eq!(*error, format!("rank 0: {}", errors[0]));
    }
}

#[test]
fn damage_is_found_by_the_rank_that_reads_it() {
    type Damage = (fn(&Path), &'static str);
    let damages: [Damage; 4] = [
        (
            |path| fs::remove_file(path).unwrap(),
            "shard-00001-of-00003.safetensors: No such file",
        ),
        (
            |path| fs::write(path, "short").unwrap(),
            "shard-00001-of-00003.safetensors: 5 bytes long",
        ),
        (
            |path| flip(path, -1),
            "shard-00001-of-00003.safetensors: damaged: bytes",
        ),
        (
            |path| fs::write(path, vec![0; fs::read(path).unwrap().len()]).unwrap(),
            "damaged: bytes 0 to",
        ),
    ];

    for (damage, reason) in damages {
        let dir = two_checkpoints(&layout(RANKS, 4));
        let layout = layout(RANKS, 4);
        let selection = Reader::open(dir.path()).unwrap().selection();
        damage(&shard(dir.path(), 2, 1));
        for rank in 0..RANKS {
            let reader = Reader::open_selected(dir.path(), &selection).unwrap();
            let got = read(&reader, &layout, STATES[2], rank);
            match rank {
                1 => assert!(
                    got.as_ref().is_err_and(|e| e.to_string().contains(reason)),
                    "{reason}: {got:?}"
                ),
                rank => assert_eq!(
                    bits(&got.unwrap()),
                    loaded(StateDtype::F32.into(), &layout, rank, STATES[2], 2),
                    "{reason}"
                ),
            }
        }
    }
}

#[test]
fn replaced_checkpoint_is_not_opened() {
    let dir = two_checkpoints(&layout(RANKS, 4));
    let selection = Reader::open(dir.path()).unwrap().selection();
    let named = dir.path().join("step-00000002");
    // By the directory or by the checkpoint's own path, and as JSON.
    let text = serde_json::to_string(&selection).unwrap();
    let read: Selection = serde_json::from_str(&text).unwrap();

    for path in [dir.path(), &named] {
        assert_eq!(
            Reader::open_selected(path, &read).unwrap().selection(),
            selection
        );
    }

    saved(
        dir.path(),
        &layout(RANKS, 4),
        2,
        9,
        &StoreOptions::default(),
    );

    for path in [dir.path(), &named] {
        let error = Reader::open_selected(path, &selection).err().unwrap();
        assert!(matches!(error, CkptError::NotSelected { .. }), "{error}");
    }

    fs::remove_file(named.join(MANIFEST_NAME)).unwrap();
    fails(
        Reader::open_selected(dir.path(), &selection),
        &["manifest.json: No such file"],
    );
}

/// The others' waits end long before the check does.
#[test]
fn slow_check_is_announced() {
    struct Sent<F: FnMut()>(F, u64);
    impl<F: FnMut()> Exchange for Sent<F> {
        type Error = String;
        fn gather(&mut self, _: &[u8]) -> Result<Vec<u8>, String> {
            Err("an open gathers nothing".into())
        }
        fn broadcast(&mut self, _: &mut [u8], _: u64) -> Result<(), String> {
            self.1 += 1;
            (self.0)();
            Ok(())
        }
    }

    let dir = two_checkpoints(&layout(RANKS, 4));
    let (announce, announced) = channel();
    let mut exchange = Sent(|| announce.send(()).unwrap_or_default(), 0);
    let path = dir.path();
    let check = move || {
        // Ends only after two messages of rank 0.
        let _ = [announced.recv(), announced.recv()]
            .map(|received| received.map_err(|e| e.to_string()).unwrap());
        Ok::<_, CkptError>(resolve(path)?.reader)
    };

    Reader::open_on_ranks(path, 0, &mut exchange, check).unwrap();
    assert!(exchange.1 >= 3);
}
