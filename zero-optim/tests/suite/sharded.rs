//! The sharded optimizer compared with the unsharded one and a plain loop; skipping, resuming,
//! memory.

use std::time::Duration;

use proptest::prelude::*;
use zero_alloc::Purpose;
use zero_alloc::device::{AnySlice, DType, DeviceError, Reduced, Stream};
use zero_alloc::host::HostDevice;
use zero_kernels::AdamHyper;
use zero_optim::{
    Divisor, DynamicScaling, GatheredStats, LossScaling, LrSchedule, OptimError, OptimizerConfig,
    Segment, StateKind, StepOutcome, UnitSlices,
};

use crate::common::{Buffer, Holding, Host, KINDS, LIMIT, Random, Rank, World, bits, cases};

fn config() -> OptimizerConfig {
    OptimizerConfig::default()
        .hyper(AdamHyper {
            weight_decay: 0.1,
            ..OptimizerConfig::default().hyper
        })
        .lr(1e-2)
        .schedule(LrSchedule::LinearWarmup { warmup_steps: 3 })
        .max_grad_norm(1.0)
}

/// Initial values of units of these padded sizes, and gradients of `steps` steps.
fn material(sizes: &[usize], steps: usize, seed: u64) -> (Vec<Vec<f32>>, Vec<Vec<Vec<f32>>>) {
    let mut random = Random(seed);
    let init = sizes.iter().map(|&n| random.values(n)).collect();
    let grads = (0..steps)
        .map(|_| sizes.iter().map(|&n| random.values(n)).collect())
        .collect();
    (init, grads)
}

fn all_bits(params: &[Vec<f32>]) -> Vec<Vec<u32>> {
    params.iter().map(|unit| bits(unit)).collect()
}

proptest! {
    #![proptest_config(cases(24))]

    /// Whole units (stage 0) and shards (stages 1 to 3), updated in pieces, have bit-identical
    /// statistics, norms and weights; one step is skipped.
    #[test]
    #[cfg_attr(miri, ignore)]
    fn sharding_changes_no_bit(
        world in 1usize..5,
        shards in prop::collection::vec(0usize..40, 1..4),
        dtype in prop::sample::select(vec![DType::F32, DType::Bf16, DType::F16]),
        grad_dtype_is_fp32: bool,
        sub_group_elems in 1usize..50,
        seed: u64,
    ) {
        let sizes: Vec<usize> = shards.iter().map(|n| n * world).collect();
        let (init, mut grads) = material(&sizes, 4, seed);
        if let Some(g) = grads[2].iter_mut().flatten().last() {
            *g = f32::NAN;
        }
        let grad_dtype = if grad_dtype_is_fp32 { DType::F32 } else { dtype };
        let mut whole = World::new(&config(), dtype, &init, world, Holding::Whole);
        let in_pieces = config().sub_group_elems(sub_group_elems);
        let mut shard = World::new(&in_pieces, dtype, &init, world, Holding::Shard);
        for grads in &grads {
            let (stats0, outcome0) = whole.step(grads, grad_dtype, 3);
            let (stats1, outcome1) = shard.step(grads, grad_dtype, 3);
            prop_assert_eq!(stats0, stats1);
            prop_assert_eq!(outcome0, outcome1);
            prop_assert_eq!(all_bits(&whole.params()), all_bits(&shard.params()));
        }
    }
}

/// Compares with a plain loop of mixed-precision AdamW in fp64.
#[test]
#[cfg_attr(miri, ignore = "Miri's powi is inexact on purpose")]
fn steps_are_clipped_adamw() {
    let world = 3;
    let micro_batches = 2;
    let (init, grads) = material(&[9, 6], 5, 7);
    for dtype in [DType::F32, DType::Bf16] {
        let mut ours = World::new(&config(), dtype, &init, world, Holding::Shard);
        let rounded = |w: &[f32]| Buffer::new(w, dtype).values();
        let mut weights: Vec<f64> = init
            .iter()
            .flat_map(|w| rounded(w))
            .map(f64::from)
            .collect();
        let mut m = vec![0f64; weights.len()];
        let mut v = vec![0f64; weights.len()];
        for (t, grads) in grads.iter().enumerate() {
            let (_, outcome) = ours.step(grads, DType::F32, micro_batches);
            let mean: Vec<f64> = grads
                .iter()
                .flatten()
                .map(|&g| f64::from(g) / (world * micro_batches) as f64)
                .collect();
            let norm = mean.iter().map(|g| g * g).sum::<f64>().sqrt();
            let clip = if norm > 1.0 { 1.0 / (norm + 1e-6) } else { 1.0 };
            let lr = 1e-2 * ((t + 1) as f64 / 3.0).min(1.0);
            for i in 0..weights.len() {
                let g = mean[i] * clip;
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = 0.999 * v[i] + 0.001 * g * g;
                let mh = m[i] / (1.0 - 0.9f64.powi(t as i32 + 1));
                let vh = v[i] / (1.0 - 0.999f64.powi(t as i32 + 1));
                weights[i] = weights[i] * (1.0 - lr * 0.1) - lr * mh / (vh.sqrt() + 1e-8);
            }
            let StepOutcome::Applied {
                grad_norm,
                clip: our_clip,
                lr: our_lr,
                loss,
                ..
            } = outcome
            else {
                panic!("skipped: {outcome:?}")
            };
            assert!((grad_norm - norm).abs() < 1e-9 * norm && (our_clip - clip).abs() < 1e-9);
            assert_eq!((our_lr, loss), (lr, 0.0 + 1.0 + 2.0));
            let masters: Vec<f32> = match dtype {
                DType::F32 => ours.params().concat(),
                _ => {
                    let unit = |range: std::ops::Range<usize>| {
                        let ranks = ours.ranks.iter();
                        ranks.flat_map(move |r| {
                            r.state(StateKind::Master).unwrap()[range.clone()].to_vec()
                        })
                    };
                    unit(0..3).chain(unit(3..5)).collect()
                }
            };
            for (ours, expected) in masters.iter().zip(&weights) {
                assert!(
                    (f64::from(*ours) - expected).abs() < 2e-6,
                    "{ours} and {expected}"
                );
            }
            assert_eq!(
                ours.params().concat(),
                rounded(&masters),
                "the parameter is the rounded master"
            );
        }
    }
}

#[test]
fn skipped_step_changes_only_the_loss_scale() {
    let scaling = LossScaling::Dynamic(
        DynamicScaling::default()
            .initial_scale_power(4)
            .hysteresis(1),
    );
    let config = config().loss_scaling(scaling);
    let (init, mut grads) = material(&[4, 8], 3, 11);

    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let mut world = World::new(&config, DType::F16, &init, 2, Holding::Shard);
        world.step(&grads[0], DType::F16, 1);
        let before: Vec<_> = KINDS
            .map(|k| world.ranks[1].state(k).unwrap().to_vec())
            .into();
        let params = world.params();
        let progress = world.ranks[1].optim.progress();
        grads[1][1][5] = bad;
        grads[1][1][7] = bad;
        let (_, outcome) = world.step(&grads[1], DType::F16, 1);
        let StepOutcome::Skipped {
            overflow,
            loss_scale,
            next_loss_scale,
            lr,
            ..
        } = outcome
        else {
            panic!("not skipped: {outcome:?}")
        };
        // Elements 5 and 7 of unit 1 are in the second half: rank 1's shard.
        assert_eq!(
            (overflow.rank, overflow.unit.as_str(), overflow.nonfinite),
            (1, "unit1", 2)
        );
        assert_eq!((loss_scale, next_loss_scale), (16.0, 8.0));
        assert_eq!(world.ranks[0].optim.loss_scale(), 8.0);
        let after: Vec<_> = KINDS
            .map(|k| world.ranks[1].state(k).unwrap().to_vec())
            .into();
        assert_eq!(after, before);
        assert_eq!(world.params(), params);
        let now = world.ranks[1].optim.progress();
        assert_eq!(
            (now.adam_steps, now.schedule_position),
            (progress.adam_steps, progress.schedule_position)
        );
        assert_eq!(now.skipped_steps, 1);
        let (_, outcome) = world.step(&grads[2], DType::F16, 1);
        assert_eq!(
            outcome.lr(),
            config.schedule.lr(config.lr, 1),
            "the schedule continues: {lr}"
        );
    }
}

#[test]
fn overflow_at_minimum_scale_changes_nothing() {
    let settings = DynamicScaling::default()
        .initial_scale_power(1)
        .hysteresis(1)
        .min_scale(2.0);
    let config = config().loss_scaling(LossScaling::Dynamic(settings));
    let (init, mut grads) = material(&[4], 1, 5);
    grads[0][0][0] = f32::INFINITY;
    let mut rank = Rank::new(&config, DType::F16, &init, 0, 1, Holding::Shard);
    let before = rank.optim.progress();
    let error = rank.step_alone(&grads[0], DType::F16).unwrap_err();

    assert_eq!(
        error,
        OptimError::LossScaleAtMinimum {
            step: 0,
            scale: 2.0,
            rank: 0,
            unit: "unit0".into()
        }
    );

    assert!(
        error.to_string().contains("unit unit0 on rank 0"),
        "{error}"
    );
    assert_eq!(rank.optim.progress(), before);
}

#[test]
fn resumed_run_is_bit_identical() {
    let scaling = LossScaling::Dynamic(DynamicScaling::default().window(2));
    let config = config().loss_scaling(scaling);
    let (init, mut grads) = material(&[6, 0, 10], 8, 3);
    grads[1][0][0] = f32::NAN;
    let mut straight = World::new(&config, DType::Bf16, &init, 2, Holding::Shard);
    grads[..4]
        .iter()
        .for_each(|g| drop(straight.step(g, DType::Bf16, 1)));

    // Progress is saved as JSON, masters and moments as slices; parameters are recomputed from the
    // masters.
    let nothing: Vec<Vec<f32>> = init.iter().map(|u| vec![0.0; u.len()]).collect();
    let mut resumed = World::new(&config, DType::Bf16, &nothing, 2, Holding::Shard);
    for (old, new) in straight.ranks.iter().zip(&mut resumed.ranks) {
        let progress = serde_json::to_string(&old.optim.progress()).unwrap();
        new.optim
            .restore(&serde_json::from_str(&progress).unwrap())
            .unwrap();
        for kind in KINDS {
            new.write_state(kind, old.state(kind).unwrap());
        }
        new.write_params();
    }

    assert_eq!(all_bits(&resumed.params()), all_bits(&straight.params()));
    for g in &grads[4..] {
        assert_eq!(
            straight.step(g, DType::Bf16, 1),
            resumed.step(g, DType::Bf16, 1)
        );
        assert_eq!(all_bits(&resumed.params()), all_bits(&straight.params()));
    }
}

#[test]
fn state_bytes_per_parameter() {
    let (init, grads) = material(&[12, 0, 30], 2, 9);
    for (dtype, bytes) in [(DType::F32, 8), (DType::Bf16, 12), (DType::F16, 12)] {
        let mut world = World::new(&config(), dtype, &init, 3, Holding::Shard);
        world.step(&grads[0], dtype, 1);
        let made = world.ranks[0].pool.report().backing_allocations;
        world.step(&grads[1], dtype, 1);
        let report = world.ranks[0].pool.report();
        assert_eq!(report.of(Purpose::Optimizer).live_bytes, 42 / 3 * bytes);
        assert_eq!(report.backing_allocations, made, "a step allocates nothing");
        let whole = World::new(&config(), dtype, &init, 3, Holding::Whole);
        assert_eq!(
            whole.ranks[0]
                .pool
                .report()
                .of(Purpose::Optimizer)
                .live_bytes,
            42 * bytes
        );
    }
}

/// Separately allocated parameters, with padding behind each, have the bits of one flat parameter.
#[test]
fn scattered_params_have_the_same_bits() {
    let (init, mut grads) = material(&[8], 3, 5);
    for grads in &mut grads {
        (grads[0][3], grads[0][7]) = (0.0, 0.0);
    }

    for dtype in [DType::F32, DType::Bf16] {
        let mut flat = Rank::new(&config(), dtype, &init, 0, 1, Holding::Shard);
        let host = Host::on(flat.pool.device().clone());
        let segments = vec![Segment::shard("unit0", 0..8).with_padding(2)];
        let builder = host.builder().config(config()).param_dtype(dtype);
        let mut optim = builder.build(segments).unwrap();
        let mut params = [0..3, 4..7].map(|range| Buffer::new(&init[0][range], dtype));
        let [first, second] = &mut params;
        let pieces = [(first.slice(), 0), (second.slice(), 4)];
        optim.init_masters(&flat.stream, &[pieces]).unwrap();
        for grads in &grads {
            let stats = [flat.stats(grads, DType::F32, 0.0).unwrap()];
            let gathered = GatheredStats::new(&stats, Divisor::MicroBatches(1));
            let outcome = flat.step(grads, DType::F32, gathered).unwrap();
            let mut grad = Buffer::new(&grads[0], DType::F32);
            // SAFETY: kept until the stream is drained.
            let grad = unsafe { Reduced::new(grad.slice(), flat.stream.record().unwrap()) };
            optim.enqueue_stats(&flat.stream, &[&grad]).unwrap();
            assert_eq!(
                optim.rank_stats(&flat.stream, 0.0, LIMIT).unwrap(),
                stats[0]
            );
            let mut step = |param: &[(AnySlice, usize)]| {
                optim.step(
                    &flat.stream,
                    &[UnitSlices { grad: &grad, param }],
                    gathered,
                    LIMIT,
                )
            };
            let mut refused = |param: &[(AnySlice, usize)]| step(param).unwrap_err().to_string();
            assert_eq!(
                refused(&pieces[..1]),
                "unit unit0, params: expected 6 elements, got 3",
                "a forgotten parameter is not padding"
            );
            assert_eq!(
                refused(&[pieces[1], pieces[0]]),
                "unit unit0, params: a slice covers elements 0..3; it must be within 7..8"
            );
            assert_eq!(step(&pieces), Ok(outcome));
            flat.stream.synchronize(LIMIT).unwrap();
        }
        let whole = flat.params[0].values();
        assert_eq!(params.map(|p| p.values()), [&whole[0..3], &whole[4..7]]);
    }
}

#[test]
fn bad_slices_change_nothing() {
    let (init, grads) = material(&[4, 6], 1, 1);
    let mut rank = Rank::new(&config(), DType::Bf16, &init, 0, 2, Holding::Shard);
    let before = rank.optim.progress();
    let stats = [rank.stats(&grads[0], DType::Bf16, 0.0).unwrap()];
    let gathered = GatheredStats::new(&stats, Divisor::MicroBatches(1));

    let refused = |rank: &mut Rank, grads: &[Vec<f32>], gathered, expected: &str| {
        let error = rank.step(grads, DType::Bf16, gathered).unwrap_err();
        assert_eq!(error.to_string(), expected);
    };
    let slices = "grads: expected 2 slices, one per unit, got 1";
    refused(&mut rank, &grads[0][..1], gathered, slices);
    for (len, dtype, expected) in [
        (2, DType::Bf16, "expected 3 elements, got 2"),
        (3, DType::F32, "expected bf16, got fp32"),
    ] {
        rank.params[1] = Buffer::new(&vec![0.0; len], dtype);
        let expected = format!("unit unit1, params: {expected}");
        refused(&mut rank, &grads[0], gathered, &expected);
    }

    rank.params[1] = Buffer::new(&[0.0; 3], DType::Bf16);
    let none = GatheredStats::new(&[], gathered.divisor);
    let of_none = "no rank statistics: a step needs those of all ranks";
    refused(&mut rank, &grads[0], none, of_none);
    let no_batches = GatheredStats::new(gathered.ranks, Divisor::MicroBatches(0));
    let at_least_1 = "micro_batches is 0; it must be at least 1, at most 2^32 - 1";
    refused(&mut rank, &grads[0], no_batches, at_least_1);

    assert_eq!(rank.optim.progress(), before);
    assert!(
        !rank
            .step(&grads[0], DType::Bf16, gathered)
            .unwrap()
            .is_skipped()
    );
}

#[test]
fn timed_out_step_can_be_retried() {
    let (init, grads) = material(&[4, 6], 1, 1);
    let mut ranks = [0, 1].map(|_| Rank::new(&config(), DType::F32, &init, 0, 2, Holding::Shard));
    let params = ranks.each_mut().map(|rank| {
        rank.step_alone(&grads[0], DType::F32).unwrap();
        rank.params.iter().map(Buffer::values).collect::<Vec<_>>()
    });

    assert_eq!(all_bits(&params[0]), all_bits(&params[1]));

    let [late, _] = &mut ranks;
    let stats = [late.stats(&grads[0], DType::F32, 0.0).unwrap()];
    let gathered = GatheredStats::new(&stats, Divisor::MicroBatches(1));
    let before = late.optim.progress();
    let (go, held_up) = std::sync::mpsc::channel();
    let wait = move || {
        held_up.recv().unwrap();
        Ok(())
    };

    late.stream.enqueue("held up", wait).unwrap();
    let error = late
        .step_within(Duration::from_millis(20), &grads[0], DType::F32, gathered)
        .unwrap_err();
    assert!(
        matches!(error, OptimError::Device(DeviceError::TimedOut { .. })),
        "{error:?}"
    );
    assert_eq!(late.optim.progress(), before);
    go.send(()).unwrap();
    for rank in &mut ranks {
        rank.step(&grads[0], DType::F32, gathered).unwrap();
    }
    let [late, other] = ranks.each_ref().map(|rank| {
        let params: Vec<_> = rank.params.iter().map(Buffer::values).collect();
        (all_bits(&params), rank.optim.progress())
    });

    assert_eq!(late, other);
}

#[test]
fn bad_settings_are_refused() {
    let host = Host::on(HostDevice::new());
    let good = || vec![Segment::shard("a", 0..4)];
    let gap = vec![Segment::shard("a", 0..4), Segment::shard("b", 5..6)];
    let outside = vec![Segment::whole("a", 0..4, 2..5)];
    let uncounted = vec![Segment::whole("a", 0..4, 1..3).with_counted(2..4)];
    for (config, dtype, segments, expected) in [
        (
            config(),
            DType::U8,
            good(),
            "parameters of u8 cannot be trained; use fp32, bf16 or fp16",
        ),
        (
            config(),
            DType::F32,
            gap,
            "unit b: its state starts at element 5, expected 4: segments follow one another without gaps",
        ),
        (
            config(),
            DType::F32,
            outside,
            "unit a: its own shard 2..5 is outside its 4 elements",
        ),
        (
            config(),
            DType::F32,
            uncounted,
            "unit a: the counted elements 2..4 are outside the own shard 1..3",
        ),
        (
            config().betas([0.9, 1.0]),
            DType::F32,
            good(),
            "beta2 is 1; it must be at least 0, below 1",
        ),
        (
            config().lr(f64::NAN),
            DType::F32,
            good(),
            "lr is NaN; it must be a finite number, 0 or above",
        ),
    ] {
        let builder = host.builder().config(config).param_dtype(dtype);
        let error = builder.build(segments).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
    host.stream.synchronize(LIMIT).unwrap();
}
