//! The facade for frameworks: its numbers at all stages, and what misuse does.
#![cfg(unix)]

/// An enum, and the list `ALL` of its variants.
macro_rules! cases {
    ($(#[$of_enum:meta])* enum $name:ident { $($(#[$of_case:meta])* $case:ident),* $(,)? }) => {
        $(#[$of_enum])*
        enum $name {
            $($(#[$of_case])* $case),*
        }

        impl $name {
            const ALL: &[Self] = &[$(Self::$case),*];
        }
    };
}

mod differences;
mod hooks;
mod misuse;
mod momentum;
mod muon_groups;
#[cfg(feature = "cuda")]
mod on_cuda;

use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use zero_alloc::Pool;
use zero_alloc::device::DType;
use zero_alloc::host::HostDevice;
use zero_comm::threads::{ThreadsComm, World};
use zero_comm::{CommOptions, Communicator};
use zero_kernels::host::HostKernels;
use zero_optim::framework::{Builder, FrameworkError, Params, Rank, Step, Zero};
use zero_optim::{GroupRules, LossScaling, OptimizerConfig, StepOutcome};
use zero_shard::ZeroStage;

type Host = HostDevice;
type Error = Box<dyn std::error::Error + Send + Sync>;

/// No wait is as long, also under Miri on a busy machine: an abort ends it.
const LIMIT: Duration = Duration::from_secs(1800);

const UNITS: [(&str, &[(&str, u64)]); 4] = [
    ("a", &[("w", 5), ("b", 3)]),
    ("c", &[("w", 8)]),
    ("d", &[("e", 1), ("none", 0)]),
    ("f", &[("w", 8)]),
];

/// Runs `run` on a thread a rank.
fn on_ranks<R: Send>(ranks: usize, run: impl Fn(ThreadsComm) -> R + Sync) -> Vec<R> {
    let comms = World::new(ranks, CommOptions::default().limit(LIMIT)).unwrap();
    let run = &run;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = comms
            .into_iter()
            .map(|comm| scope.spawn(move || run(comm)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn rank_on(device: &HostDevice, comm: ThreadsComm) -> Result<Rank<Host>, FrameworkError> {
    let pool = Pool::new(device.clone(), usize::MAX);
    Rank::new(Arc::new(comm), pool, Arc::new(HostKernels::new(1)?))
}

fn with_units(mut builder: Builder<Host>) -> Builder<Host> {
    for (unit, params) in UNITS {
        builder = builder.unit(unit, params.iter().map(|(name, len)| (*name, [*len])));
    }
    builder
}

fn config() -> OptimizerConfig {
    OptimizerConfig::default().lr(0.05).max_grad_norm(0.3)
}

fn builder(comm: ThreadsComm, stage: ZeroStage) -> Builder<Host> {
    let rank = Rank::on_host(comm).unwrap().limit(LIMIT);
    with_units(Zero::builder(rank).stage(stage).adamw(config()))
}

/// The initial value of an element.
fn initial(name: &str, i: usize) -> f32 {
    let seed = name.bytes().map(usize::from).sum::<usize>();
    ((i * 7 + seed) % 11) as f32 / 8.0 - 0.5
}

fn init(name: &str, _shape: &[u64], values: &mut [f32]) {
    (0..)
        .zip(values)
        .for_each(|(i, value)| *value = initial(name, i));
}

/// The target that a rank's rows of a micro-batch pull element `i` to.
fn target(i: usize, batch: usize) -> f32 {
    ((i * 5 + batch * 3) % 7) as f32 / 4.0 - 0.75
}

/// The gradient of (w - target)^2 / 2, and the loss.
fn grad(params: &[f32], batch: usize) -> (Vec<f32>, f64) {
    let grad: Vec<f32> = (0..)
        .zip(params)
        .map(|(i, w)| w - target(i, batch))
        .collect();
    let loss = grad.iter().map(|g| f64::from(g * g) / 2.0).sum();
    (grad, loss)
}

/// Forward and backward of a micro-batch; returns its loss.
fn micro_batch(step: &mut Step<'_, Host>, batch: usize) -> Result<f64, Error> {
    for (unit, _) in UNITS {
        let of_unit =
            |params: &Params<'_>| params.get::<f32>(params.names().next().unwrap()).map(drop);
        step.forward(unit, of_unit)?;
    }
    let mut loss = 0.0;
    for (unit, params) in UNITS.iter().rev() {
        loss += step.backward(unit, |values, grads| -> Result<f64, Error> {
            let mut loss = 0.0;
            for (name, _) in *params {
                let (grad, of_param) = grad(values.get(name)?, batch);
                grads.set(name, grad)?;
                loss += of_param;
            }
            Ok(loss)
        })?;
    }
    Ok(loss)
}

/// A step of `micro_batches`, on rows of rank `rank` of `ranks`.
fn step(
    zero: &mut Zero<Host>,
    (rank, ranks): (usize, usize),
    micro_batches: usize,
) -> Result<StepOutcome, Error> {
    let first = zero.steps() as usize * ranks * micro_batches;
    let mut step = zero.begin()?;
    for micro in 0..micro_batches {
        let loss = micro_batch(&mut step, first + micro * ranks + rank)?;
        match micro + 1 == micro_batches {
            true => return Ok(step.end(loss)?),
            false => step.next_micro_batch(loss)?,
        }
    }
    unreachable!("there is a last micro-batch")
}

/// Steps of one micro-batch.
fn steps(zero: &mut Zero<Host>, place: (usize, usize), count: usize) -> Result<(), Error> {
    (0..count).try_for_each(|_| step(zero, place, 1).map(drop))
}

fn weights(zero: &mut Zero<Host>) -> Result<Vec<f32>, FrameworkError> {
    let mut all = Vec::new();
    zero.for_each_param(|_, _, values| {
        all.extend(values);
        Ok::<_, FrameworkError>(())
    })?;
    Ok(all)
}

/// AdamW over the whole batch on one machine, in fp64, with the settings of [`config`]: losses and
/// weights.
fn reference(steps: usize, batches: usize) -> (Vec<f64>, Vec<f64>) {
    let params = UNITS.iter().flat_map(|(unit, params)| {
        let of_param = move |(name, len): &(&str, u64)| {
            let name = format!("{unit}.{name}");
            (0..*len as usize).map(move |i| (i, f64::from(initial(&name, i))))
        };
        params.iter().flat_map(of_param)
    });
    let (places, mut w): (Vec<usize>, Vec<f64>) = params.unzip();
    let (mut m, mut v) = (vec![0.0; w.len()], vec![0.0; w.len()]);
    let mut losses = Vec::new();

    for step in 0..steps {
        let batch = |b: usize| step * batches + b;
        let grad = |w: &[f64], i: usize, b| w[i] - f64::from(target(places[i], batch(b)));
        let all = || (0..w.len()).flat_map(|i| (0..batches).map(move |b| (i, b)));
        let loss: f64 = all().map(|(i, b)| grad(&w, i, b).powi(2) / 2.0).sum();
        losses.push(loss / batches as f64);

        let mean = |i| (0..batches).map(|b| grad(&w, i, b)).sum::<f64>() / batches as f64;
        let grads: Vec<f64> = (0..w.len()).map(mean).collect();
        let norm = grads.iter().map(|g| g * g).sum::<f64>().sqrt();
        let clip = (0.3 / (norm + 1e-6)).min(1.0);
        let t = step as i32 + 1;
        for i in 0..w.len() {
            let g = grads[i] * clip;
            m[i] = 0.9 * m[i] + 0.1 * g;
            v[i] = 0.999 * v[i] + 0.001 * g * g;
            let m = m[i] / (1.0 - 0.9_f64.powi(t));
            let v = v[i] / (1.0 - 0.999_f64.powi(t));
            let decay = zero_optim::OptimizerConfig::default().hyper.weight_decay;
            w[i] -= 0.05 * (m / (v.sqrt() + 1e-8) + decay * w[i]);
        }
    }
    (losses, w)
}

/// The settings that the reference has as numbers.
#[test]
fn reference_has_the_default_settings() {
    let hyper = config().hyper;
    assert_eq!((hyper.beta1, hyper.beta2, hyper.eps), (0.9, 0.999, 1e-8));
}

/// fp32: within rounding of a run without ZeRO, with the same bits at all stages.
#[test]
fn all_stages_train_as_one_machine() {
    let steps = if cfg!(miri) { 2 } else { 50 };
    for (ranks, micro_batches) in [(1, 1), (1, 2), (2, 2), (4, 1), (3, 3)] {
        let (expected, expected_weights) = reference(steps, ranks * micro_batches);
        let mut first: Option<(Vec<f64>, Vec<f32>)> = None;
        for stage in ZeroStage::ALL {
            let run = |comm: ThreadsComm| -> Result<_, Error> {
                let place = (comm.rank(), comm.world_size());
                let zero = builder(comm, stage).micro_batches(micro_batches);
                let mut zero = zero.build(init)?;
                let mut losses = Vec::new();
                for _step in 0..steps {
                    losses.push(step(&mut zero, place, micro_batches)?.loss());
                }
                Ok((losses, weights(&mut zero)?))
            };

            let mut ranks: Vec<_> = on_ranks(ranks, run)
                .into_iter()
                .map(|r| r.unwrap())
                .collect();
            assert!(ranks.iter().all(|rank| *rank == ranks[0]));
            let (losses, weights) = ranks.remove(0);
            for (got, expected) in losses.iter().zip(&expected) {
                assert!(
                    (got - expected).abs() < 1e-6 * expected,
                    "{stage}: {got} {expected}"
                );
            }
            for (got, expected) in weights.iter().zip(&expected_weights) {
                assert!(
                    (f64::from(*got) - expected).abs() < 2e-6,
                    "{stage}: {got} {expected}"
                );
            }
            match &first {
                // With several micro-batches, stages 0 and 1 sum them before the ranks.
                Some((_, same)) if micro_batches > 1 => {
                    let differ = same.iter().zip(&weights).map(|(a, b)| (a - b).abs());
                    assert!(differ.fold(0.0, f32::max) < 1e-6);
                }
                Some(first) => assert_eq!((losses, weights), *first, "stage {stage}"),
                None => first = Some((losses, weights)),
            }
        }
    }
}

/// Four ranks save at one stage, two resume at another, as if they had not stopped.
#[test]
fn checkpoint_loads_at_any_stage_and_number_of_ranks() {
    let stages = [ZeroStage::Zero, ZeroStage::Two, ZeroStage::Three];
    for (from, to) in stages
        .into_iter()
        .zip([ZeroStage::Three, ZeroStage::One, ZeroStage::Two])
    {
        let dir = tempfile::tempdir().unwrap();
        let save = |comm: ThreadsComm| -> Result<_, Error> {
            let place = (comm.rank(), comm.world_size());
            let mut zero = builder(comm, from).build(init)?;
            steps(&mut zero, place, 3)?;
            zero.save(dir.path())?;
            Ok(weights(&mut zero)?)
        };
        let saved = on_ranks(4, save).remove(0).unwrap();

        let resume = |comm: ThreadsComm| -> Result<_, Error> {
            let place = (comm.rank(), comm.world_size());
            let mut zero = builder(comm, to).micro_batches(2).build(|_, _, _| {})?;
            zero.resume(dir.path())?;
            let loaded = weights(&mut zero)?;
            let losses = (0..4).map(|_| Ok(step(&mut zero, place, 2)?.loss()));
            Ok((loaded, losses.collect::<Result<Vec<f64>, Error>>()?))
        };
        let (loaded, losses) = on_ranks(2, resume).remove(0).unwrap();
        assert_eq!(saved, loaded);
        for (got, expected) in losses.iter().zip(&reference(7, 4).0[3..]) {
            assert!((got - expected).abs() < 1e-6 * expected, "{got} {expected}");
        }
    }
}

/// bf16: the losses of fp32 within its rounding, with the same bits at all stages; fp16 skips a
/// step whose gradients overflow, on all ranks.
#[test]
fn smaller_formats_train_and_overflow_is_skipped() {
    let run = |stage, dtype: DType| {
        let run = |comm: ThreadsComm| -> Result<_, Error> {
            let rank = comm.rank();
            let config = match dtype {
                DType::F16 => config().loss_scaling(LossScaling::Static { scale: 1024.0 }),
                _ => config(),
            };
            let zero = builder(comm, stage).dtype(dtype).adamw(config);
            let mut zero = zero.reduce_dtype(DType::F32).build(init)?;
            let mut losses = Vec::new();
            for at in 0..8 {
                let mut step = zero.begin()?;
                let scale = step.loss_scale() as f32;
                let mut loss = 0.0;
                for (unit, params) in UNITS {
                    step.backward(unit, |values, grads| -> Result<(), Error> {
                        for (name, _) in params {
                            let w: Vec<f32> = match dtype {
                                DType::Bf16 => {
                                    let w = values.get::<bf16>(name)?;
                                    w.iter().map(|w| w.to_f32()).collect()
                                }
                                _ => {
                                    let w = values.get::<half::f16>(name)?;
                                    w.iter().map(|w| w.to_f32()).collect()
                                }
                            };
                            let (mut grad, of_param) = grad(&w, 2 * at + rank);
                            grad.iter_mut().for_each(|g| *g *= scale);
                            if dtype == DType::F16 && at == 3 && rank == 1 && unit == "c" {
                                grad[0] = f32::INFINITY;
                            }
                            loss += of_param;
                            grads.set(name, grad)?;
                        }
                        Ok(())
                    })?;
                }
                let outcome = step.end(loss)?;
                losses.push((outcome.loss(), outcome.is_skipped()));
            }
            Ok((losses, weights(&mut zero)?))
        };
        on_ranks(2, run).remove(0).unwrap()
    };

    let (expected, _) = reference(8, 2);
    for dtype in [DType::Bf16, DType::F16] {
        let all: Vec<_> = ZeroStage::ALL.into_iter().map(|s| run(s, dtype)).collect();
        assert!(all.iter().all(|run| *run == all[0]));
        for (at, ((loss, skipped), expected)) in all[0].0.iter().zip(&expected).enumerate() {
            assert_eq!(*skipped, dtype == DType::F16 && at == 3);
            let limit = if at > 3 { 0.2 } else { 0.02 };
            assert!(
                (loss - expected).abs() < limit * expected,
                "{loss} {expected}"
            );
        }
    }
}

/// Losses that are sums over tokens, of which ranks have different numbers.
#[test]
fn weights_of_all_ranks_divide_once() {
    let run = |comm: ThreadsComm| -> Result<_, Error> {
        let rank = comm.rank();
        let zero = Zero::builder(Rank::on_host(comm)?).unit("u", [("w", [1])]);
        let mut zero = zero.micro_batches(2).build(|_, _, w| w.fill(1.0))?;
        let mut step = zero.begin()?;
        // 1, 2 tokens on rank 0, and 3, 4 on rank 1, each with a loss of 3 and a gradient of 2.
        let tokens = [[1.0, 2.0], [3.0, 4.0]][rank];
        step.grad("u.w", [2.0 * tokens[0] as f32])?;
        step.next_micro_batch_of(3.0 * tokens[0], tokens[0])?;
        step.grad("u.w", [2.0 * tokens[1] as f32])?;
        Ok(step.end_of(3.0 * tokens[1], tokens[1])?)
    };
    for outcome in on_ranks(2, run) {
        let outcome = outcome.unwrap();
        assert_eq!((outcome.loss(), outcome.grad_norm()), (3.0, Some(2.0)));
    }
}

/// Frozen parameters need no gradient, stay, and their gradients do not count.
#[test]
fn frozen_parameters_stay() {
    for stage in ZeroStage::ALL {
        let run = |comm: ThreadsComm| -> Result<_, Error> {
            let rules = [GroupRules::default(), GroupRules::frozen()];
            let frozen = |name: &str| usize::from(name == "a.b" || name.starts_with("c."));
            let mut zero = builder(comm, stage).groups(rules, frozen).build(init)?;
            let before = weights(&mut zero)?;
            let mut step = zero.begin()?;
            step.grad("a.w", [1.0_f32; 5])?;
            step.grad("d.e", [1.0_f32])?;
            step.grad("d.none", [] as [f32; 0])?;
            step.grad("f.w", [1.0_f32; 8])?;
            step.grad("c.w", [f32::NAN; 8])?;
            let outcome = step.end(0.0)?;
            Ok((before, weights(&mut zero)?, outcome.grad_norm()))
        };
        for rank in on_ranks(2, run) {
            let (before, after, norm) = rank.unwrap();
            assert_eq!(before[5..16], after[5..16]);
            let moved = |range: std::ops::Range<usize>| {
                let mut pairs = before[range.clone()].iter().zip(&after[range]);
                pairs.all(|(before, after)| before != after)
            };
            assert!(moved(0..5) && moved(16..25));
            assert_eq!(norm, Some(14_f64.sqrt()));
        }
    }
}

/// The optimizer's state on NVMe has the bits of memory.
#[test]
#[cfg_attr(miri, ignore = "io_uring")]
#[cfg(target_os = "linux")]
fn state_on_nvme_changes_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let run = |nvme: bool| {
        let run = |comm: ThreadsComm| -> Result<_, Error> {
            let place = (comm.rank(), comm.world_size());
            let mut zero = builder(comm, ZeroStage::Three);
            if nvme {
                let home = zero_optim::StateHome::Nvme {
                    dir: dir.path().to_owned(),
                    options: zero_alloc::swap::SwapOptions::default(),
                    buffers: 3,
                };
                zero = zero.offload(home);
            }
            let mut zero = zero.build(init)?;
            steps(&mut zero, place, 3)?;
            Ok(weights(&mut zero)?)
        };
        on_ranks(2, run).remove(0).unwrap()
    };
    assert_eq!(run(false), run(true));
}

/// Under the seeded scheduler no access is unordered, and the seed changes no bit, also with views
/// of parameters.
#[test]
fn seeds_change_no_bit() {
    use zero_alloc::device::Element;
    let seeds = if cfg!(miri) { 1 } else { 20 };
    for stage in ZeroStage::ALL {
        let mut first = None;
        for seed in 0..seeds {
            let device = HostDevice::seeded(seed);
            let run = |comm: ThreadsComm| -> Result<_, Error> {
                let place = (comm.rank(), comm.world_size());
                let rank = rank_on(&device, comm)?;
                let zero = with_units(Zero::builder(rank).stage(stage).adamw(config()));
                let mut zero = zero.micro_batches(2).build(init)?;
                let view = (stage < ZeroStage::Three).then(|| zero.param("c.w"));
                for _step in 0..3 {
                    step(&mut zero, place, 2)?;
                }
                let weights = weights(&mut zero)?;
                if let Some(view) = view.transpose()? {
                    let _step = zero.begin()?;
                    // SAFETY: within a step, and before the view is dropped.
                    let slice = unsafe { view.slice() }.typed::<f32>()?;
                    assert_eq!((view.shape(), view.dtype()), (&[8][..], f32::DTYPE));
                    // SAFETY: as above; nothing writes within a step.
                    assert_eq!(unsafe { slice.as_host() }, &weights[8..16]);
                    _step.end_without_update()?;
                }
                Ok(weights)
            };
            let weights = on_ranks(2, run).remove(0).unwrap();
            assert_eq!(device.violations().len(), 0, "{:?}", device.violations());
            assert_eq!(*first.get_or_insert_with(|| weights.clone()), weights);
        }
    }
}

/// In modelled time, on a link on which a step's communication takes as long as its compute, most of
/// the communication of stages 2 and 3 is inside forward and backward.
#[test]
#[cfg_attr(miri, ignore = "many operations")]
fn communication_is_inside_compute() {
    const BLOCKS: usize = 8;
    let ms = Duration::from_millis;
    let name = |block: usize| format!("block {block}");
    for stage in [ZeroStage::Two, ZeroStage::Three] {
        // A forward takes 1 ms, a backward 2 ms a block: 3 ms. At stage 2 a block's gradients are
        // reduced and its parameters gathered once, at stage 3 they are gathered twice.
        let of_collective = if stage == ZeroStage::Two { 1500 } else { 1000 };
        // The all-gather of a step's statistics is on the compute stream: nothing hides it, and it
        // costs nothing here.
        let cost = move |stream: &str, label: &str| match label {
            "forward" => ms(1),
            "backward" => ms(2),
            "all_gather" | "reduce_scatter" if stream.ends_with(" comm") => {
                Duration::from_micros(of_collective)
            }
            _ => Duration::ZERO,
        };
        let run = |comm: ThreadsComm| -> Result<_, Error> {
            let device = HostDevice::modelled(cost);
            let rank = rank_on(&device, comm)?;
            let compute = rank.compute().clone();
            let mut zero = Zero::builder(rank).stage(stage);
            for block in 0..BLOCKS {
                zero = zero.unit(name(block), [("w", [64])]);
            }
            let mut zero = zero.build(|_, _, _| {})?;
            for _step in 0..16 {
                let mut step = zero.begin()?;
                for block in 0..BLOCKS {
                    step.forward(&name(block), |_| compute.enqueue("forward", || Ok(())))?;
                }
                for block in (0..BLOCKS).rev() {
                    step.backward(&name(block), |_, grads| -> Result<(), Error> {
                        compute.enqueue("backward", || Ok(()))?;
                        Ok(grads.set("w", [1.0_f32; 64])?)
                    })?;
                }
                step.end(0.0)?;
            }
            drop(zero);
            Ok(device.modelled_spans())
        };
        let spans = on_ranks(2, run).remove(0).unwrap();
        let overlap = zero_comm::overlap::Overlap::of(&spans, &["rank 0 comm"]);
        let inside = 1.0 - overlap.exposed.as_secs_f64() / overlap.comm.as_secs_f64();
        println!(
            "stage {stage}: {:.0}% inside compute, {overlap:?}",
            100.0 * inside
        );
        assert!(overlap.comm >= overlap.compute * 9 / 10, "{overlap:?}");
        assert!(inside >= 0.7, "{inside}: {overlap:?}");
    }
}

/// At stage 3 no more is whole at a time than the unit in use and the one ahead, however many there
/// are.
#[test]
fn gathered_parameters_are_bounded() {
    for blocks in [3, 30] {
        let run = |comm: ThreadsComm| -> Result<_, Error> {
            let mut zero = Zero::builder(Rank::on_host(comm)?).stage(ZeroStage::Three);
            for block in 0..blocks {
                zero = zero.unit(format!("{block}"), [("w", [40])]);
            }
            let mut zero = zero.build(|_, _, _| {})?;
            for _step in 0..2 {
                let mut step = zero.begin()?;
                for block in 0..blocks {
                    step.forward(&format!("{block}"), |_| Ok::<_, FrameworkError>(()))?;
                }
                for block in (0..blocks).rev() {
                    let set = step.backward(&format!("{block}"), |_, grads| {
                        grads.set("w", [1.0_f32; 40])
                    });
                    set?;
                }
                step.end(0.0)?;
            }
            Ok(zero.gathers())
        };
        for report in on_ranks(4, run) {
            let report = report.unwrap();
            assert_eq!((report.peak_live_elems, report.wasted), (80, 0));
            assert_eq!(report.on_demand, 0);
        }
    }
}

/// Errors of settings, each with its reason.
#[test]
fn bad_settings_are_refused() {
    type Change = fn(Builder<Host>) -> Builder<Host>;
    let changes: [(Change, &str); 4] = [
        (|b| b.micro_batches(0), "micro_batches is 0"),
        (
            |b| b.groups([GroupRules::default()], |_| 1),
            "a.w is in group 1 of 1",
        ),
        (|b| b.dtype(DType::F64), "parameters of fp64"),
        (|b| b.bucket_elems(0), "0 elements"),
    ];
    for (change, expected) in changes {
        let run = |comm| change(builder(comm, ZeroStage::Two)).build(init).map(drop);
        let error = on_ranks(2, run).remove(0).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let none = |comm| {
        Zero::builder(Rank::on_host(comm).unwrap())
            .build(init)
            .map(drop)
    };
    let error = on_ranks(1, none).remove(0).unwrap_err().to_string();
    assert!(error.contains("no parameters"), "{error}");
}

/// The framework's errors leave the step as it was, reach the caller, and are the reason where the
/// step is then dropped.
#[test]
fn errors_of_closures_have_their_reason() {
    let run = |comm: ThreadsComm| -> Result<(), Error> {
        let place = (comm.rank(), comm.world_size());
        let mut zero = builder(comm, ZeroStage::Two).build(init)?;
        step(&mut zero, place, 1)?;
        if place.0 == 0 {
            return step(&mut zero, place, 1).map(drop);
        }
        let mut step = zero.begin()?;
        let error = step.forward("a", |_| Err::<(), _>("no rows")).unwrap_err();
        assert_eq!(error.to_string(), "no rows");
        let error = step.forward("a", |params| params.get::<bf16>("w").map(drop));
        let error = error.unwrap_err().to_string();
        assert_eq!(error, "a.w is fp32 in this run, not bf16");
        step.grad("a.w", [1.0_f32; 4])?;
        Ok(())
    };
    let mut errors = on_ranks(2, run)
        .into_iter()
        .map(|rank| rank.unwrap_err().to_string());
    let why = "the gradient of a.w has 4 elements, expected 5";
    let [other, own] = [errors.next().unwrap(), errors.next().unwrap()];
    assert_eq!(own, why);
    let all = format!("rank 1 dropped a step before its end, after: {why}");
    assert!(other.contains(&all), "{other}");
}

/// Validation has no update, and its mean over ranks; the framework's state is in a checkpoint.
#[test]
fn validation_and_state() {
    let dir = tempfile::tempdir().unwrap();
    let run = |comm: ThreadsComm| -> Result<(), Error> {
        let place = (comm.rank(), comm.world_size());
        let mut zero = builder(comm, ZeroStage::Three).build(init)?;
        step(&mut zero, place, 1)?;
        let before = weights(&mut zero)?;
        let mut valid = zero.begin()?;
        valid.forward("a", |_| Ok::<_, Error>(()))?;
        assert_eq!(valid.end_validation(1.0 + place.0 as f64)?, 1.5);
        assert_eq!((weights(&mut zero)?, zero.steps()), (before, 1));
        assert!(zero.state().is_null());
        zero.set_state(serde_json::json!({ "epoch": 3 }));
        zero.save(dir.path())?;

        zero.set_state(serde_json::Value::Null);
        zero.resume(dir.path())?;
        assert_eq!(zero.state()["epoch"], 3);
        let refused = zero.for_each_param(|_, _, _| Err("disk full"));
        assert_eq!(refused.unwrap_err().to_string(), "disk full");
        step(&mut zero, place, 1)?;
        Ok(())
    };
    for rank in on_ranks(2, run) {
        rank.unwrap();
    }
}

/// A save or a resume that cannot be done is an error on all ranks, which go on.
#[test]
fn failed_saves_and_resumes_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "a file").unwrap();
    let other = dir.path().join("other");
    let run = |comm: ThreadsComm| -> Result<_, Error> {
        let mut zero = Zero::builder(Rank::on_host(comm)?)
            .unit("other", [("w", [3])])
            .build(init)?;
        Ok(zero.save(&other)?)
    };
    for rank in on_ranks(2, run) {
        rank.unwrap();
    }

    let run = |comm: ThreadsComm| -> Result<_, Error> {
        let place = (comm.rank(), comm.world_size());
        let mut zero = builder(comm, ZeroStage::Three).build(init)?;
        let saved = zero.save(&file).unwrap_err().to_string();
        let none = zero
            .resume(dir.path().join("none"))
            .unwrap_err()
            .to_string();
        let model = zero.resume(&other).unwrap_err().to_string();
        let loss = step(&mut zero, place, 1)?.loss();
        Ok((saved, none, model, loss))
    };
    for rank in on_ranks(2, run) {
        let (saved, none, model, loss) = rank.unwrap();
        assert!(saved.contains("file"), "{saved}");
        assert!(none.contains("none"), "{none}");
        assert!(model.contains("a.w"), "{model}");
        let expected = reference(1, 2).0[0];
        assert!((loss - expected).abs() < 1e-6 * expected);
    }
}
