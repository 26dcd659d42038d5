//! Optimizers in checkpoints: other world sizes, stages and dtypes, parameter groups, frozen units,
//! and errors.
#![cfg(feature = "ckpt")]

#[allow(dead_code)]
#[path = "suite/common.rs"]
mod common;

use std::convert::Infallible;
use std::path::Path;
use std::sync::{Barrier, Mutex};

use common::{Holding, KINDS, LIMIT, Random, Rank, World};
use serde_json::{Value, json};
use zero_alloc::device::{DType, Stream};
use zero_ckpt::{
    CkptError, ExchangeFn, PublishedCheckpoint, Reader, SaveMeta, ShardData, SingleRank, Store,
    StoreOptions,
};
use zero_optim::{
    CheckpointError, DynamicScaling, GroupRules, LossScaling, OptimError, OptimizerConfig,
    RankParams, StateRange,
};
use zero_shard::{Layout, LayoutOptions, LayoutSpec, ParamSpec, TensorCut, TensorPart, UnitSpec};

/// Three units with gaps between their parameters; the last is frozen, and a parameter of the
/// second.
fn layout(world: usize) -> Layout {
    let unit = |name: &str, lens: &[u64]| {
        let params = lens
            .iter()
            .enumerate()
            .map(|(i, len)| ParamSpec::new(format!("{name}.{i}"), [*len]));
        UnitSpec::new(name, params.collect::<Vec<_>>())
    };
    let units = [
        unit("a", &[5, 3, 6]),
        unit("b", &[7, 0, 2]),
        unit("c", &[9]),
    ];
    let options = LayoutOptions::default()
        .shard_align_elems(2)
        .param_align_elems(4);
    Layout::with_options(&units, world as u64, options).unwrap()
}

/// Values by global number, in padded flat parameters.
fn flat(layout: &Layout, values: &[f32]) -> Vec<Vec<f32>> {
    let unit = |unit: &zero_shard::UnitLayout| {
        let mut flat = vec![0.0; unit.padded_elems as usize];
        for param in &unit.params {
            let at = param.offset_elems as usize;
            let from = param.global_offset_elems as usize;
            flat[at..at + param.numel_elems as usize]
                .copy_from_slice(&values[from..from + param.numel_elems as usize]);
        }
        flat
    };
    layout.units().iter().map(unit).collect()
}

fn world(
    config: &OptimizerConfig,
    dtype: DType,
    ranks: usize,
    how: Holding,
    values: &[f32],
) -> (World, Layout) {
    let layout = layout(ranks);
    let rules = [
        GroupRules::default(),
        GroupRules::default().weight_decay(0.5),
        GroupRules::frozen(),
    ];
    // By flat element: the second parameter of `a` has a decay, the last of `b` is frozen.
    let group = |unit, elem| match unit {
        0 => usize::from((8..12).contains(&elem)),
        1 => 2 * usize::from(elem >= 8),
        _ => 2,
    };

    (
        World::with_groups(
            config,
            dtype,
            &flat(&layout, values),
            ranks,
            how,
            &rules,
            &group,
        ),
        layout,
    )
}

/// A world of shards with the default settings.
fn default_world(dtype: DType, ranks: usize) -> (World, Layout) {
    let config = OptimizerConfig::default();
    world(&config, dtype, ranks, Holding::Shard, &random(1))
}

fn with_params<R>(
    rank: &mut Rank,
    layout: &Layout,
    index: usize,
    use_them: impl FnOnce(&mut Rank, &RankParams<'_, [(zero_alloc::device::AnySlice, usize); 1]>) -> R,
) -> R {
    let params = rank.slices();
    use_them(
        rank,
        &RankParams {
            layout,
            rank: index as u64,
            params: &params,
        },
    )
}

/// Saves on all ranks.
fn save(
    world: &mut World,
    layout: &Layout,
    dir: &Path,
    meta: &SaveMeta,
) -> Vec<Result<PublishedCheckpoint, CheckpointError>> {
    let ranks = world.ranks.len();
    let barrier = Barrier::new(ranks);
    let messages = Mutex::new(vec![Vec::new(); ranks]);
    let exchange = |index: usize, own: &[u8]| {
        messages.lock().unwrap()[index] = own.to_vec();
        barrier.wait();
        let all = messages.lock().unwrap().clone();
        barrier.wait();
        Ok::<_, Infallible>(all)
    };

    let save = |(index, rank): (usize, &mut Rank)| {
        let store = Store::create(dir, index as u64, StoreOptions::default()).unwrap();
        let mut exchange = ExchangeFn::new(index as u64, |own: &[u8]| exchange(index, own));
        with_params(rank, layout, index, |rank, own| {
            rank.optim.save(
                &rank.stream,
                &store,
                meta.clone(),
                own,
                &mut exchange,
                LIMIT,
            )
        })
    };

    std::thread::scope(|scope| {
        let ranks = world.ranks.iter_mut().enumerate();
        let threads: Vec<_> = ranks.map(|rank| scope.spawn(|| save(rank))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

/// [`save`], which succeeds.
fn saved(world: &mut World, layout: &Layout, dir: &Path, meta: &SaveMeta) {
    let outcomes = save(world, layout, dir, meta);
    outcomes.into_iter().for_each(|saved| drop(saved.unwrap()));
}

fn load_rank(
    rank: &mut Rank,
    layout: &Layout,
    index: usize,
    dir: &Path,
) -> Result<(), CheckpointError> {
    let reader = Reader::open(dir).unwrap();
    with_params(rank, layout, index, |rank, own| {
        rank.optim.load(&rank.stream, &reader, own, LIMIT)
    })
}

fn load(world: &mut World, layout: &Layout, dir: &Path) {
    for (index, rank) in world.ranks.iter_mut().enumerate() {
        load_rank(rank, layout, index, dir).unwrap();
        rank.stream.synchronize(LIMIT).unwrap();
    }
}

/// The state of all kinds and the parameters, by global number.
fn contents(world: &mut World, layout: &Layout) -> Vec<Vec<f32>> {
    let numel = layout.numel_elems() as usize;
    let mut all = vec![vec![f32::NAN; numel]; 4];
    for (index, rank) in world.ranks.iter_mut().enumerate() {
        with_params(rank, layout, index, |rank, own| {
            for (kind, out) in KINDS.into_iter().zip(&mut all) {
                for (unit, placed) in layout.units().iter().enumerate() {
                    let elems = rank.optim.segments()[unit].own_shard.clone();
                    let mut read = vec![0.0; elems.len()];
                    let range = StateRange { kind, unit, elems };
                    rank.optim
                        .read_state(&rank.stream, &range, &own.params[unit], &mut read, LIMIT)
                        .unwrap();
                    for (i, value) in read.into_iter().enumerate() {
                        if let Some(at) =
                            layout.global_at(index as u64, placed.shard_offset_elems + i as u64)
                        {
                            out[at as usize] = value;
                        }
                    }
                }
            }
        });
    }

    for (unit, values) in layout.units().iter().zip(world.params()) {
        for param in &unit.params {
            let at = param.offset_elems;
            let to = param.global_offset_elems as usize;
            let len = param.numel_elems as usize;
            all[3][to..to + len].copy_from_slice(&values[at as usize..at as usize + len]);
        }
    }

    assert!(all.iter().flatten().all(|x| !x.is_nan()));
    all
}

fn random(seed: u64) -> Vec<f32> {
    Random(seed).values(layout(1).numel_elems() as usize)
}

fn step(world: &mut World, layout: &Layout, dtype: DType, seed: u64) {
    world.step(&flat(layout, &random(seed)), dtype, 1);
}

#[test]
fn any_world_size_and_stage_loads() {
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let dir = tempfile::tempdir().unwrap();
        let config = OptimizerConfig::default();
        let (mut four, layout_of_four) = default_world(dtype, 4);
        (2..5).for_each(|seed| step(&mut four, &layout_of_four, dtype, seed));
        let meta = SaveMeta::default().step(3).trainer(json!({ "mine": 7 }));
        saved(&mut four, &layout_of_four, dir.path(), &meta);
        let reader = Reader::open(dir.path()).unwrap();
        assert_eq!(reader.manifest().trainer["mine"], 7);
        assert_eq!(reader.manifest().dtype, dtype.name());

        let (mut two, layout_of_two) = world(&config, dtype, 2, Holding::Shard, &random(99));
        load(&mut two, &layout_of_two, dir.path());
        assert_eq!(
            contents(&mut two, &layout_of_two),
            contents(&mut four, &layout_of_four),
            "{dtype}"
        );
        assert_eq!(
            two.ranks[1].optim.progress(),
            four.ranks[0].optim.progress()
        );

        step(&mut two, &layout_of_two, dtype, 5);
        let meta = SaveMeta::default().step(4);
        saved(&mut two, &layout_of_two, dir.path(), &meta);
        let (mut whole, layout_of_three) = world(&config, dtype, 3, Holding::Whole, &random(98));
        load(&mut whole, &layout_of_three, dir.path());
        assert_eq!(
            contents(&mut whole, &layout_of_three),
            contents(&mut two, &layout_of_two),
            "{dtype}"
        );

        step(&mut whole, &layout_of_three, dtype, 6);
        let meta = SaveMeta::default().step(5);
        saved(&mut whole, &layout_of_three, dir.path(), &meta);
        load(&mut four, &layout_of_four, dir.path());
        assert_eq!(
            contents(&mut four, &layout_of_four),
            contents(&mut whole, &layout_of_three),
            "{dtype}"
        );
    }
}

/// Each of two tensor-parallel ranks, on two data-parallel ranks, loads its part of the state of
/// three ranks without tensor parallelism.
#[test]
fn part_of_a_tensor_parallel_rank_loads() {
    let config = OptimizerConfig::default();
    let rules = [GroupRules::default()];
    let world_of = |layout: &Layout, values: &[f32], ranks| {
        let init = flat(layout, values);
        let how = Holding::Shard;
        World::with_groups(&config, DType::Bf16, &init, ranks, how, &rules, &|_, _| 0)
    };
    let dir = tempfile::tempdir().unwrap();
    let whole = layout(3);
    let mut three = world_of(&whole, &random(1), 3);
    step(&mut three, &whole, DType::Bf16, 2);
    saved(&mut three, &whole, dir.path(), &SaveMeta::default());
    let expected = contents(&mut three, &whole);

    // The parts of 5, 7 and 9 elements are padded.
    let cut_of = |param: &ParamSpec| match param.shape[0] {
        5..=9 => TensorCut::Dim { dim: 0, blocks: 1 },
        _ => TensorCut::Replicated,
    };
    let LayoutSpec { units, options, .. } = whole.clone().into();
    for m in 0..2 {
        let part = TensorPart::new(m, 2).unwrap();
        let local: Vec<_> = units
            .iter()
            .map(|unit| part.unit(unit, cut_of).unwrap())
            .collect();
        let local = Layout::with_options(&local, 2, options.clone()).unwrap();
        let mut two = world_of(&local, &vec![7.0; local.numel_elems() as usize], 2);
        for (index, rank) in two.ranks.iter_mut().enumerate() {
            let reader = Reader::open(dir.path()).unwrap();
            let reader = reader.of_part(part, cut_of).unwrap();
            with_params(rank, &local, index, |rank, own| {
                rank.optim.load(&rank.stream, &reader, own, LIMIT).unwrap();
                rank.stream.synchronize(LIMIT).unwrap();
            });
        }

        let got = contents(&mut two, &local);
        for (_, placed) in local.params() {
            let id = whole.find_param(&placed.name).unwrap();
            let from = whole.param(id).unwrap();
            let param = ParamSpec::new(from.name.as_str(), from.shape.as_slice());
            let cut = cut_of(&param);
            for run in part.runs(&param, cut, 0..placed.numel_elems).unwrap() {
                for i in 0..run.in_part.end - run.in_part.start {
                    let at = placed.global_offset_elems + run.in_part.start + i;
                    for (got, expected) in got.iter().zip(&expected) {
                        let whole_at = |start| from.global_offset_elems + start + i;
                        let value = run.in_whole.as_ref();
                        let value = value.map(|whole| expected[whole_at(whole.start) as usize]);
                        assert_eq!(got[at as usize], value.unwrap_or(0.0), "{}", param.name);
                    }
                }
            }
        }
        let saved = three.ranks[0].optim.progress();
        assert_eq!(two.ranks[1].optim.progress(), saved);

        // Without its part, the reader is of another model.
        let error = load_rank(&mut two.ranks[0], &local, 0, dir.path()).unwrap_err();
        assert!(
            matches!(error, CheckpointError::Ckpt(CkptError::AnotherModel { .. })),
            "{error}"
        );
    }
}

#[test]
fn another_dtype_keeps_the_loss_scale() {
    let dir = tempfile::tempdir().unwrap();
    let (mut bf16, layout) = default_world(DType::Bf16, 1);

    step(&mut bf16, &layout, DType::Bf16, 2);
    saved(&mut bf16, &layout, dir.path(), &SaveMeta::default());
    let loss_scaling = LossScaling::Dynamic(DynamicScaling::default());
    let config = OptimizerConfig::default().loss_scaling(loss_scaling);
    let (mut f16, _) = world(&config, DType::F16, 1, Holding::Shard, &random(3));
    load(&mut f16, &layout, dir.path());
    let progress = f16.ranks[0].optim.progress();
    assert_eq!(
        (progress.adam_steps, progress.loss_scaler.scale),
        (1, 65536.0)
    );
    assert_eq!(
        contents(&mut f16, &layout)[1],
        contents(&mut bf16, &layout)[1]
    );
}

#[test]
fn wrong_layouts_and_params_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let (mut two, layout_of_two) = default_world(DType::F32, 2);

    // Another model on two ranks: all return an error, and none waits.
    let other = Layout::new(
        &["a", "b", "c"].map(|n| UnitSpec::new(n, [ParamSpec::new(n, [3])])),
        2,
        1,
    )
    .unwrap();
    let errors = save(&mut two, &other, dir.path(), &SaveMeta::default());
    assert!(
        errors
            .iter()
            .all(|e| matches!(e, Err(CheckpointError::Segment { .. }))),
        "{errors:?}"
    );
    saved(&mut two, &layout_of_two, dir.path(), &SaveMeta::default());
    let rank = &mut two.ranks[0];
    let error = load_rank(rank, &layout(1), 0, dir.path()).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Segment { unit, .. } if unit == "a"),
        "{error}"
    );
    let error = load_rank(rank, &layout_of_two, 2, dir.path()).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Segment { rank: 2, .. }),
        "{error}"
    );
    let error = load_rank(rank, &Layout::new(&[], 2, 1).unwrap(), 0, dir.path()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the layout has 0 units, the optimizer 3; pass the layout that its segments were made of"
    );

    let mut params = rank.slices();
    params[1][0].0 = params[1][0].0.slice(0..3);
    let reader = Reader::open(dir.path()).unwrap();
    for params in [&params[..], &params[..2]] {
        let own = RankParams {
            layout: &layout_of_two,
            rank: 0,
            params,
        };
        let error = rank
            .optim
            .load(&rank.stream, &reader, &own, LIMIT)
            .unwrap_err();
        let lengths = matches!(
            error,
            CheckpointError::Optim(
                OptimError::SliceLen { .. }
                    | OptimError::SliceCount {
                        expected: 3,
                        got: 2,
                        ..
                    }
            )
        );
        assert!(lengths, "{error}");
    }
}

#[test]
fn a_failed_rank_fails_the_save_on_all() {
    let dir = tempfile::tempdir().unwrap();
    let (mut two, layout) = default_world(DType::F32, 2);

    two.ranks[1].params[0] = common::Buffer::new(&[0.0; 3], DType::F32);
    let errors = save(&mut two, &layout, dir.path(), &SaveMeta::default());
    let messages: Vec<_> = errors.into_iter().map(Result::unwrap_err).collect();
    assert!(
        matches!(
            messages[1],
            CheckpointError::Optim(OptimError::SliceLen { got: 3, .. })
        ),
        "{messages:?}"
    );

    assert!(
        matches!(
            messages[0],
            CheckpointError::Ckpt(CkptError::Rank { rank: 1, .. })
        ),
        "{messages:?}"
    );

    assert!(messages[0].to_string().contains("got 3"), "{messages:?}");
    assert!(Reader::open(dir.path()).is_err());
}

#[test]
fn damaged_progress_changes_nothing() {
    let (mut one, layout) = default_world(DType::F32, 1);

    step(&mut one, &layout, DType::F32, 2);
    let before = (contents(&mut one, &layout), one.ranks[0].optim.progress());
    let mut scale = serde_json::to_value(before.1).unwrap();
    scale["loss_scaler"]["scale"] = json!(0.0);
    let damaged = [
        (Value::Null, "no progress of an optimizer"),
        (json!({ "progress": 7 }), "damaged progress"),
        (
            json!({ "progress": { "adam_steps": -1 } }),
            "damaged progress",
        ),
        (
            json!({ "progress": scale }),
            "saved loss scale does not fit",
        ),
    ];

    for (trainer, message) in damaged {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(dir.path(), 0, StoreOptions::default()).unwrap();
        let zeros = vec![0.0; layout.shard_elems() as usize];
        let mut shard = ShardData::new(&layout, 0).unwrap();
        for kind in KINDS {
            shard.storage_f32(kind.name(), &zeros).unwrap();
        }
        let meta = SaveMeta::default().trainer(trainer);
        store.save(&meta, &shard, &mut SingleRank).unwrap();
        let error = load_rank(&mut one.ranks[0], &layout, 0, dir.path()).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(
            (contents(&mut one, &layout), one.ranks[0].optim.progress()),
            before
        );
    }
}

#[test]
fn trainer_values_are_objects_without_progress() {
    let dir = tempfile::tempdir().unwrap();
    let (mut one, layout) = default_world(DType::F32, 1);
    for trainer in [json!(7), json!([]), json!({ "progress": 1 })] {
        let meta = SaveMeta::default().trainer(trainer);
        let error = save(&mut one, &layout, dir.path(), &meta)
            .pop()
            .unwrap()
            .unwrap_err();
        assert!(matches!(error, CheckpointError::TrainerValue), "{error}");
    }
    assert!(Reader::open(dir.path()).is_err());
}
