//! State saved at one world size, stage and alignment loads bit for bit at any other.

use crate::common::{assert_holds, layout, meta, read, save, storage, units};
use zero_ckpt::{CkptError, Reader, StoreOptions};
use zero_shard::{Layout, LayoutOptions, ParamSpec, UnitSpec, ZeroStage};

#[test]
fn every_world_size_loads_at_every_other() {
    for from in [1, 2, 3, 4, 7] {
        let dir = tempfile::tempdir().unwrap();
        for outcome in save(
            dir.path(),
            &layout(from, 4),
            30,
            from,
            &StoreOptions::default(),
        ) {
            assert_eq!(outcome.unwrap().name, "step-00000030");
        }
        let reader = Reader::open(dir.path()).unwrap();
        assert!(reader.notices().is_empty());
        assert_eq!(reader.manifest().step, 30);
        assert_eq!(reader.manifest().trainer, meta(30).trainer);
        for to in [1, 2, 3, 5, 64] {
            for align in [1, 16] {
                assert_holds(&reader, &layout(to, align), from);
            }
        }
    }
}

#[test]
fn repeated_resharding_keeps_every_bit() {
    // (ranks, stage, alignment) of runs that each load the state of the previous one and save it.
    let chain = [(4, 3, 8), (2, 1, 1), (3, 2, 64), (1, 0, 32)];
    let dir = tempfile::tempdir().unwrap();
    for (i, (ranks, stage, align)) in chain.into_iter().enumerate() {
        let layout = layout(ranks, align);
        let states: Vec<Vec<Vec<f32>>> = (0..ranks)
            .map(|rank| {
                let state_of = |state: &&str| match i {
                    0 => storage(&layout, rank, state, 99),
                    _ => {
                        let reader = Reader::open(dir.path()).unwrap();
                        read(&reader, &layout, state, rank).unwrap()
                    }
                };
                crate::common::STATES.iter().map(state_of).collect()
            })
            .collect();
        let stores: Vec<_> = (0..ranks)
            .map(|r| zero_ckpt::Store::create(dir.path(), r, StoreOptions::default().keep_last(1)))
            .map(Result::unwrap)
            .collect();
        let staged = stores.iter().map(|store| {
            let rank = store.rank();
            let mut shard = zero_ckpt::ShardData::new(&layout, rank)?;
            for (state, values) in crate::common::STATES.iter().zip(&states[rank as usize]) {
                shard.storage_f32(state, values)?;
            }
            store.stage(i as u64, &shard)
        });
        let meta = meta(i as u64).stage(ZeroStage::from_number(stage.into()).unwrap());
        let published = stores[0].publish(&meta, &layout, staged.collect()).unwrap();
        assert_eq!(published.sequence, i as u64 + 1);
        assert_eq!(Reader::open(dir.path()).unwrap().manifest().stage, stage);
    }

    assert_holds(&Reader::open(dir.path()).unwrap(), &layout(5, 2), 99);
    let left: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();

    assert_eq!(
        left.iter()
            .filter(|n| n.to_string_lossy().starts_with("step-"))
            .count(),
        1,
        "{left:?}"
    );

    assert_eq!(
        std::fs::read_dir(dir.path().join(".staging"))
            .unwrap()
            .count(),
        0
    );
}

#[test]
fn gaps_between_aligned_parameters_are_not_stored() {
    let gapped = |ranks| {
        let options = LayoutOptions::default()
            .shard_align_elems(8)
            .param_align_elems(16);
        Layout::with_options(&units(), ranks, options).unwrap()
    };
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), &gapped(3), 1, 5, &StoreOptions::default());
    let reader = Reader::open(dir.path()).unwrap();
    let stored: u64 = reader
        .manifest()
        .files
        .iter()
        .flat_map(|f| &f.pieces)
        .map(|p| p.2 - p.1)
        .sum();
    assert_eq!(stored, layout(1, 1).numel_elems());
    for to in [gapped(2), gapped(5), layout(4, 4)] {
        assert_holds(&reader, &to, 5);
    }
}

#[test]
fn other_units_of_the_same_parameters_load() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), &layout(3, 4), 1, 5, &StoreOptions::default());
    let mut params: Vec<ParamSpec> = units().into_iter().flat_map(|u| u.params).collect();
    params.reverse();
    let (a, b) = params.split_at(3);
    let other = Layout::new(&[UnitSpec::new("a", a), UnitSpec::new("b", b)], 2, 8).unwrap();
    assert_holds(&Reader::open(dir.path()).unwrap(), &other, 5);
}

#[test]
fn every_range_reads_as_saved() {
    let dir = tempfile::tempdir().unwrap();
    let from = layout(4, 4);
    save(dir.path(), &from, 1, 5, &StoreOptions::default());
    let reader = Reader::open(dir.path()).unwrap();
    let view = reader.view(&from).unwrap();
    let numel = from.units()[4].numel_elems;
    for (start, end) in (0..=numel).flat_map(|s| (s..=numel).map(move |e| (s, e))) {
        let mut out = vec![0.0; (end - start) as usize];
        view.read_range("master", 4, start..end, &mut out).unwrap();
        let params = from.units()[4].params.iter();
        let all: Vec<f32> = params
            .flat_map(|p| (0..p.numel_elems).map(|e| crate::common::value(5, "master", &p.name, e)))
            .collect();
        assert_eq!(
            crate::common::bits(&out),
            crate::common::bits(&all[start as usize..end as usize])
        );
    }
}

#[test]
fn missing_state_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let from = layout(2, 1);
    save(dir.path(), &from, 1, 5, &StoreOptions::default());
    let reader = Reader::open(dir.path()).unwrap();
    let view = reader.view(&from).unwrap();
    let mut out = [0.0; 4];
    let text = |r: Result<(), CkptError>| r.unwrap_err().to_string();
    assert!(
        text(view.read_range("momentum", 0, 0..4, &mut out))
            .contains("it has master, first_moment")
    );
    assert!(text(view.read_range("master", 9, 0..4, &mut out)).contains("below 5"));
    assert!(text(view.read_range("master", 4, 0..4, &mut out)).contains("within 0..3"));
    assert!(
        text(view.read_range("master", 4, std::ops::Range { start: 2, end: 1 }, &mut out))
            .contains("within 0..3")
    );
    assert!(text(view.read_range("master", 0, 0..5, &mut out)).contains("expected 5, got 4"));
    assert!(text(view.read_shard("master", 0, 2, &mut out)).contains("rank"));
    assert!(text(view.read_storage("master", 0, &mut out)).contains("shard storage"));
    assert!(text(reader.read_param("master", "wqe", 0..4, &mut out)).contains("wqe"));

    let bigger = Layout::new(
        &[UnitSpec::new("u", [ParamSpec::new("wte", [32u64, 7])])],
        1,
        1,
    )
    .unwrap();
    let error = reader.view(&bigger).err().unwrap();
    assert!(matches!(error, CkptError::AnotherModel { .. }), "{error}");
    assert!(
        error
            .to_string()
            .contains("\"wte\" has shape [31, 7] in the checkpoint and [32, 7] in the model"),
        "{error}"
    );
}
