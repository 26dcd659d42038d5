//! `zero ckpt` as a user runs it.

use std::path::Path;

use serde_json::json;
use zero_ckpt::{Reader, SaveMeta, ShardData, SingleRank, Store, StoreOptions};
use zero_models::hf::HfFolder;
use zero_shard::{Layout, ParamSpec, UnitSpec};

use crate::support::{Runs, data, temp};

/// Saves three numbers into the folder `to`, in the name of `run`.
fn save(to: &Path, run: &str, meta: &SaveMeta) -> Result<(), String> {
    let layout = Layout::new(&[UnitSpec::new("head", [ParamSpec::new("w", [3])])], 1, 1).unwrap();
    let store = Store::create(to, 0, StoreOptions::default().run(run)).unwrap();
    let mut shard = ShardData::new(&layout, 0).unwrap();
    shard.storage_f32("master", &[1.0, 2.0, 3.0]).unwrap();
    let saved = store.save(meta, &shard, &mut SingleRank);
    saved.map(|_| ()).map_err(|error| error.to_string())
}

#[test]
fn import_then_export_keeps_the_model() {
    let dir = &temp();
    let from = data("model");
    dir.zero(&format!("ckpt import {from} store"));
    dir.zero("ckpt inspect store");
    dir.json("ckpt inspect --json store");
    dir.zero("ckpt verify store");
    dir.zero("ckpt export store to --max-shard-size 2KB");

    assert!(dir.join("to/model.safetensors.index.json").exists());
    let before = HfFolder::open(Path::new(&from)).unwrap();
    let after = HfFolder::open(&dir.join("to")).unwrap();
    assert_eq!(before.config(), after.config());
    for param in before.config().units().iter().flat_map(|u| &u.params) {
        let numel = param.shape.iter().product::<u64>();
        let mut a = vec![0.0; numel as usize];
        let mut b = vec![1.0; numel as usize];
        before.read(&param.name, 0..numel, &mut a).unwrap();
        after.read(&param.name, 0..numel, &mut b).unwrap();
        assert_eq!(a, b, "{}", param.name);
    }
    dir.fails("ckpt inspect .", 1, &[]);
}

/// Without its settings the export would have no tokenizer, and nobody would know.
#[test]
fn export_with_other_settings_is_an_error() {
    let dir = &temp();
    let document = ("run.json".to_owned(), json!({"format": 2}));
    let meta = SaveMeta::default().documents([document].into());
    save(&dir.join("c"), "a", &meta).unwrap();

    let error = "invalid run.json: format 2 is not supported";
    dir.fails("ckpt export c out", 2, &[error]);
    assert!(!dir.join("out").exists());
}

#[test]
fn assemble_makes_a_whole_checkpoint() {
    let dir = &temp();
    let taken = &dir.join("taken");
    let meta = SaveMeta::default().step(4);
    save(taken, "a", &meta).unwrap();
    // Refused, because the checkpoint of step 4 is of another run.
    let error = save(taken, "b", &meta).unwrap_err();
    assert!(error.contains("another run (a)"), "{error}");
    dir.fails("ckpt assemble taken", 1, &["another run (a)"]);
    dir.fails(
        "ckpt assemble --step 5 new taken",
        1,
        &["there are no staged files of step 5"],
    );

    dir.zero("ckpt assemble --step 4 new taken");

    dir.zero("ckpt verify new");
    let manifest = Reader::open(dir.join("new")).unwrap().manifest().clone();
    assert_eq!(manifest.run.as_deref(), Some("b"));
    dir.zero("ckpt verify taken");
}
