//! Device steps equal host steps bit for bit: the same outcomes, weights, moments and progress, and
//! the same errors. One suite, on the host and on CUDA.

#[allow(dead_code)]
#[path = "suite/common.rs"]
mod common;

use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::sync::LazyLock;
use std::time::Duration;

use common::{KINDS, LIMIT, Random, unit_slices};
#[cfg(feature = "cuda")]
use zero_alloc::cuda::CudaDevice;
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, DeviceSlice, Reduced, Stream};
use zero_alloc::host::{HostDevice, Monitor};
use zero_alloc::{Block, Pool, Purpose};
use zero_kernels::Kernels;
#[cfg(feature = "cuda")]
use zero_kernels::cuda::CudaKernels;
use zero_kernels::host::HostKernels;
use zero_optim::{
    DeviceStepConfig, Divisor, DynamicScaling, GatheredStats, GroupRules, LossScaling, LrSchedule,
    OneCycle, OptimError, OptimizerConfig, ParamGroups, Progress, RankStats, Segment,
    ShardedOptimizer, StepOutcome,
};

/// Elements of a rank's shard of each unit; the shards are adjacent.
const SHARDS: [usize; 4] = [37, 0, if cfg!(miri) { 20 } else { 300 }, 5];
const RANKS: usize = 2;

struct Rig<D: Device> {
    pool: Pool<D>,
    stream: D::Stream,
    kernels: Arc<dyn Kernels<D>>,
    groups: ParamGroups,
}

fn host() -> Rig<HostDevice> {
    let device = HostDevice::new();
    let stream = device.create_stream("compute").unwrap();
    let kernels = HostKernels::new(1).unwrap();
    Rig {
        pool: Pool::new(device, 1 << 30),
        stream,
        kernels: Arc::new(kernels),
        groups: ParamGroups::default(),
    }
}

#[cfg(feature = "cuda")]
fn cuda() -> Rig<CudaDevice> {
    // One for all tests: each new context takes a third of a second on a GPU.
    static DEVICE: LazyLock<CudaDevice> = LazyLock::new(|| CudaDevice::open(0).unwrap());
    let device = DEVICE.clone();
    let stream = device.create_stream("compute").unwrap();
    let kernels = CudaKernels::new(&device).unwrap();
    kernels.warm(&stream, LIMIT).unwrap();
    Rig {
        pool: Pool::new(device, 1 << 30),
        stream,
        kernels: Arc::new(kernels),
        groups: ParamGroups::default(),
    }
}

impl<D: Device> Rig<D> {
    fn block(&self, elems: usize, dtype: DType) -> Block<D> {
        self.pool
            .allocate(elems, dtype, Purpose::Workspace, &self.stream)
            .unwrap()
    }

    fn upload(&self, block: &Block<D>, bytes: &[u8]) {
        self.pool
            .device()
            .upload(&self.stream, bytes, view(block), LIMIT)
            .unwrap();
    }

    fn read(&self, slice: AnySlice) -> Vec<u8> {
        let mut bytes = vec![0; slice.len_bytes()];
        self.pool
            .device()
            .download(&self.stream, slice, &mut bytes, LIMIT)
            .unwrap();
        bytes
    }
}

fn scale_address<D: Device>(optim: &ShardedOptimizer<D>) -> *mut f64 {
    // SAFETY: never accessed.
    unsafe { optim.device_loss_scale() }.unwrap().as_ptr()
}

fn view<D: Device>(block: &Block<D>) -> AnySlice {
    // SAFETY: a test's blocks are used on its one stream, which is drained before they are freed.
    unsafe { block.slice() }
}

/// A rank's optimizer, parameters and gradients.
struct Rank<D: Device> {
    optim: ShardedOptimizer<D>,
    params: Block<D>,
    grads: Block<D>,
    loss: Block<D>,
    flags: Block<D>,
}

fn units(storage: AnySlice) -> Vec<AnySlice> {
    let mut end = 0;
    SHARDS
        .map(|len| (end, end += len).0)
        .iter()
        .zip(SHARDS)
        .map(|(&at, len)| storage.slice(at..at + len))
        .collect()
}

fn pieces(storage: AnySlice) -> Vec<[(AnySlice, usize); 1]> {
    units(storage).into_iter().map(|unit| [(unit, 0)]).collect()
}

fn values(seed: usize) -> Vec<f32> {
    Random(seed as u64 + 1).values(SHARDS.iter().sum())
}

impl<D: Device> Rank<D> {
    fn new(rig: &Rig<D>, config: &OptimizerConfig, dtype: DType, rank: usize) -> Self {
        let mut end = 0;
        let segments = SHARDS.iter().enumerate().map(|(u, len)| {
            end += len;
            Segment::shard(format!("unit{u}"), end - len..end)
        });

        let segments: Vec<Segment> = segments.collect();
        let elems = end;
        let params = rig.block(elems, dtype);
        let grads = rig.block(elems, DType::F32);
        let loss = rig.block(1, DType::F64);
        let flags = rig.block(8, DType::U8);
        let kernels = Arc::clone(&rig.kernels);
        let stream = &rig.stream;
        let config = config.clone();
        let mut optim = ShardedOptimizer::builder(&rig.pool, kernels, stream)
            .config(config)
            .param_dtype(dtype)
            .groups(&rig.groups)
            .build(segments)
            .unwrap();
        rig.upload(&grads, bytemuck::cast_slice(&values(1000 + rank)));
        optim
            .init_masters(&rig.stream, &pieces(view(&grads)))
            .unwrap();
        rig.kernels
            .cast(&rig.stream, view(&grads), view(&params), 1.0)
            .unwrap();

        Self {
            optim,
            params,
            grads,
            loss,
            flags,
        }
    }

    fn set_grads(&self, rig: &Rig<D>, rank: usize, step: usize, bad: bool) {
        let mut grads = values(10 * step + rank);
        if bad && rank == 1 {
            grads[40] = f32::NAN;
        }
        rig.upload(&self.grads, bytemuck::cast_slice(&grads));
        rig.upload(&self.loss, bytemuck::bytes_of(&loss(rank, step)));
        rig.upload(&self.flags, bytemuck::bytes_of(&flags(rank, step)));
    }

    /// The gradients, complete from now on.
    fn reduced(&self, rig: &Rig<D>) -> Vec<Reduced<D>> {
        // SAFETY: uploaded before; a test's blocks are freed after its stream is drained.
        let reduced = |grad| unsafe { Reduced::new(grad, rig.stream.record().unwrap()) };
        units(view(&self.grads)).into_iter().map(reduced).collect()
    }

    /// Parameters and state.
    fn bits(&self, rig: &Rig<D>) -> Vec<Vec<u8>> {
        let mut all = vec![rig.read(view(&self.params))];
        for kind in KINDS {
            // SAFETY: read on the stream that the optimizer is driven on.
            all.extend(unsafe { self.optim.state(kind) }.map(|s| rig.read(s.erase())));
        }
        all
    }
}

fn loss(rank: usize, step: usize) -> f64 {
    step as f64 + 0.25 * rank as f64
}

/// Bit 0 on all ranks, bit 1 on the first, bit 2 on all ranks in every third step.
fn flags(rank: usize, step: usize) -> u64 {
    1 | u64::from(rank == 0) << 1 | u64::from(step.is_multiple_of(3)) << 2
}

fn device_steps(rank: usize, steps: usize) -> DeviceStepConfig {
    DeviceStepConfig::new(rank, RANKS, Divisor::MicroBatches(3), steps)
}

/// One host step.
fn step_on_host<D: Device>(
    rig: &Rig<D>,
    ranks: &mut [Rank<D>],
    step: usize,
) -> Result<StepOutcome, OptimError> {
    let mut stats = Vec::new();
    for (r, rank) in ranks.iter_mut().enumerate() {
        rank.optim.enqueue_stats(&rig.stream, &rank.reduced(rig))?;
        let of_rank = rank.optim.rank_stats(&rig.stream, loss(r, step), LIMIT)?;
        stats.push(RankStats {
            flags: flags(r, step),
            ..of_rank
        });
    }

    let gathered = GatheredStats::new(&stats, Divisor::MicroBatches(3));
    let mut outcomes = Vec::new();
    for rank in ranks {
        let grads = rank.reduced(rig);
        let params = pieces(view(&rank.params));
        outcomes.push(rank.optim.step(
            &rig.stream,
            &unit_slices(&grads, &params),
            gathered,
            LIMIT,
        )?);
    }

    assert_eq!(outcomes[0], outcomes[1]);
    Ok(outcomes.remove(0))
}

/// One device step; copies replace the all-gather of statistics.
fn enqueue_on_device<D: Device>(rig: &Rig<D>, ranks: &mut [Rank<D>]) -> Result<(), OptimError> {
    let mut stats = Vec::new();
    for rank in &mut *ranks {
        // SAFETY: the rank's own block, used on the one stream.
        let loss = unsafe { rank.loss.typed::<f64>() }?;
        // SAFETY: as above; eight bytes at the start of a block.
        let flags = unsafe {
            DeviceSlice::from_raw_parts(
                view(&rank.flags).as_ptr().cast(),
                1,
                view(&rank.flags).device(),
            )
        };
        rank.optim.enqueue_stats(&rig.stream, &rank.reduced(rig))?;
        rank.optim.enqueue_rank_stats(&rig.stream, loss, flags)?;
        // SAFETY: gathered below, on the stream of all launches.
        stats.push(unsafe { rank.optim.rank_stats_slices() }?);
    }

    for (from, sender) in stats.iter().enumerate() {
        let range = from * sender.own.len()..(from + 1) * sender.own.len();
        for (_, receiver) in stats.iter().enumerate().filter(|(to, _)| *to != from) {
            rig.pool
                .device()
                .copy(&rig.stream, sender.own, receiver.all.slice(range.clone()))?;
        }
    }

    for rank in ranks {
        let grads = rank.reduced(rig);
        let params = pieces(view(&rank.params));
        rank.optim.enqueue_advance(&rig.stream)?;
        rank.optim
            .enqueue_update(&rig.stream, &unit_slices(&grads, &params))?;
    }

    Ok(())
}

fn step_on_device<D: Device>(rig: &Rig<D>, ranks: &mut [Rank<D>]) -> Result<(), OptimError> {
    enqueue_on_device(rig, ranks)?;
    ranks
        .iter_mut()
        .try_for_each(|rank| rank.optim.expect_outcome(&rig.stream))
}

fn world<D: Device>(
    rig: &Rig<D>,
    config: &OptimizerConfig,
    dtype: DType,
    steps: usize,
) -> Vec<Rank<D>> {
    let mut ranks: Vec<_> = (0..RANKS)
        .map(|r| Rank::new(rig, config, dtype, r))
        .collect();
    if steps > 0 {
        for (r, rank) in ranks.iter_mut().enumerate() {
            rank.optim
                .prepare_device_steps(&rig.pool, &rig.stream, device_steps(r, steps), LIMIT)
                .unwrap();
        }
    }
    ranks
}

fn config(loss_scaling: LossScaling) -> OptimizerConfig {
    let schedule = LrSchedule::LinearWarmup { warmup_steps: 5 };
    OptimizerConfig::default()
        .lr(1e-2)
        .schedule(schedule)
        .max_grad_norm(0.5)
        .loss_scaling(loss_scaling)
}

fn dynamic() -> LossScaling {
    let settings = DynamicScaling::default()
        .initial_scale_power(3)
        .window(2)
        .hysteresis(1);
    LossScaling::Dynamic(settings)
}

/// Sets the gradients of all ranks; `bad` makes one not finite.
fn set_grads<D: Device>(rig: &Rig<D>, ranks: &[Rank<D>], step: usize, bad: bool) {
    for (r, rank) in ranks.iter().enumerate() {
        rank.set_grads(rig, r, step, bad);
    }
}

fn progress<D: Device>(ranks: &[Rank<D>]) -> Vec<Progress> {
    ranks.iter().map(|r| r.optim.progress()).collect()
}

fn device_steps_equal_host_steps<D: Device>(rig: &Rig<D>) {
    steps_are_equal(rig);
    if cfg!(miri) {
        return;
    }
    // Rules that change within units, and frozen elements.
    let rules = [
        GroupRules::default(),
        GroupRules::default().lr_scale(0.5).weight_decay(0.3),
        GroupRules::default().betas([0.7, 0.98]),
        GroupRules::frozen(),
    ];
    let all = SHARDS.iter().sum();

    let runs = [
        (0..10, 1),
        (10..45, 0),
        (45..47, 3),
        (47..50, 1),
        (50..all, 2),
    ];

    let Rig {
        pool,
        stream,
        kernels,
        ..
    } = rig;

    let groups = ParamGroups::new(rules.into(), runs);

    steps_are_equal(&Rig {
        pool: pool.clone(),
        stream: stream.clone(),
        kernels: Arc::clone(kernels),
        groups,
    });
}

fn steps_are_equal<D: Device>(rig: &Rig<D>) {
    const STEPS: usize = if cfg!(miri) { 5 } else { 9 };
    const WAITS_FOR_ALL: usize = STEPS - 4;
    // This schedule also changes the betas.
    let cycle = config(LossScaling::NONE).schedule(LrSchedule::OneCycle(one_cycle()));
    let all = [
        (DType::F16, config(dynamic())),
        (DType::F32, config(LossScaling::NONE)),
        (DType::Bf16, config(LossScaling::NONE)),
        (DType::F32, cycle),
    ];

    for (dtype, config) in all.into_iter().take(if cfg!(miri) { 1 } else { 4 }) {
        let mut on_host = world(rig, &config, dtype, 0);
        let mut on_device = world(rig, &config, dtype, STEPS);
        let mut expected = Vec::new();
        let mut read_so_far = Vec::new();
        for step in 0..STEPS {
            for world in [&on_host, &on_device] {
                set_grads(rig, world, step, step == 3);
            }
            expected.push(step_on_host(rig, &mut on_host, step).unwrap());
            step_on_device(rig, &mut on_device).unwrap();
            if step == WAITS_FOR_ALL {
                read_so_far.extend(on_device[0].optim.all_outcomes(LIMIT).unwrap());
                assert_eq!(read_so_far, expected);
            }
        }
        for (a, b) in on_host.iter().zip(&on_device) {
            assert!(
                a.bits(rig) == b.bits(rig),
                "{dtype}: weights or state differ"
            );
        }
        read_so_far.extend(on_device[0].optim.all_outcomes(LIMIT).unwrap());
        assert_eq!(read_so_far, expected);
        assert!(expected[3].is_skipped() && !expected[4].is_skipped());
        assert_eq!((expected[3].flags().any, expected[3].flags().all), (7, 5));
        assert_eq!((expected[4].flags().any, expected[4].flags().all), (3, 1));
        assert_eq!(
            on_device[1].optim.all_outcomes(LIMIT).unwrap(),
            expected,
            "every rank reads the same"
        );
        assert_eq!(progress(&on_device), progress(&on_host));

        // Prepared again, with the same buffers.
        let held = |rig: &Rig<D>| rig.pool.report().total.live_bytes;
        let before = held(rig);
        let scale = scale_address(&on_device[0].optim);
        for (r, rank) in on_device.iter_mut().enumerate() {
            rank.optim
                .prepare_device_steps(&rig.pool, &rig.stream, device_steps(r, STEPS), LIMIT)
                .unwrap();
        }
        assert_eq!(
            (held(rig), scale_address(&on_device[0].optim)),
            (before, scale)
        );
        let outcome = step_on_host(rig, &mut on_host, STEPS).unwrap();
        step_on_device(rig, &mut on_device).unwrap();
        let again = on_device[0].optim.all_outcomes(LIMIT).unwrap().remove(0);
        assert_eq!(again.lr(), outcome.lr());
        assert_eq!(again.grad_norm(), outcome.grad_norm());
    }
}

/// A call on another stream waits for the optimizer's earlier work.
#[test]
fn calls_on_two_streams_are_ordered() {
    let rig = host();
    let other = rig.pool.device().create_stream("other").unwrap();
    let mut rank = Rank::new(&rig, &config(LossScaling::NONE), DType::F32, 0);
    let grads = rank.reduced(&rig);
    rig.stream.synchronize(LIMIT).unwrap();
    let held = Arc::new(Monitor::new(true));
    let until_open = Arc::clone(&held);
    let hold =
        move || until_open.wait_until(LIMIT, || "the test".into(), |held| (!*held).then_some(()));
    rig.stream.enqueue("hold", hold).unwrap();
    rank.optim.enqueue_stats(&rig.stream, &grads).unwrap();
    let early = rank.optim.rank_stats(&other, 0.0, Duration::from_millis(5));
    assert!(
        matches!(early, Err(OptimError::Device(DeviceError::TimedOut { .. }))),
        "{early:?}"
    );
    held.update(|held| *held = false);
    let stats = rank.optim.rank_stats(&other, 0.0, LIMIT).unwrap();
    assert!(stats.sum_sq > 0.0);
}

fn halted_run_reports_its_cause<D: Device>(rig: &Rig<D>) {
    let least = DynamicScaling::default()
        .initial_scale_power(1)
        .hysteresis(1)
        .min_scale(2.0);
    let mut ranks = world(rig, &config(LossScaling::Dynamic(least)), DType::F16, 10);

    for step in 0..4 {
        set_grads(rig, &ranks, step, step == 1);
        step_on_device(rig, &mut ranks).unwrap();
    }

    let before = ranks[0].bits(rig);
    let optim = &mut ranks[0].optim;
    assert_eq!(
        optim.all_outcomes(LIMIT).unwrap().len(),
        1,
        "outcomes before the failure come first"
    );
    let halted = OptimError::LossScaleAtMinimum {
        step: 1,
        scale: 2.0,
        rank: 1,
        unit: "unit2".into(),
    };

    assert_eq!(optim.all_outcomes(LIMIT), Err(halted.clone()));
    assert_eq!(optim.all_outcomes(LIMIT), Err(halted));
    assert_eq!(optim.progress().adam_steps, 1);
    step_on_device(rig, &mut ranks).unwrap();
    assert!(ranks[0].bits(rig) == before, "a halted run updates nothing");

    let mut ranks = world(rig, &config(LossScaling::NONE), DType::F32, 2);
    for step in 0..3 {
        set_grads(rig, &ranks, step, false);
        step_on_device(rig, &mut ranks).unwrap();
    }

    assert_eq!(ranks[1].optim.all_outcomes(LIMIT).unwrap().len(), 2);
    assert_eq!(
        ranks[1].optim.all_outcomes(LIMIT),
        Err(OptimError::NoRate { position: 2 })
    );
}

fn bad_device_steps_are_refused<D: Device>(rig: &Rig<D>) {
    let mut ranks = world(rig, &config(LossScaling::NONE), DType::F32, 0);
    assert_eq!(
        step_on_device(rig, &mut ranks).unwrap_err(),
        OptimError::NotPrepared
    );
    assert_eq!(ranks[0].optim.all_outcomes(LIMIT), Ok(Vec::new()));
    let rank = &mut ranks[0];

    let refused = |device_steps| {
        let config = config(LossScaling::NONE);
        Rank::new(rig, &config, DType::F32, 0)
            .optim
            .prepare_device_steps(&rig.pool, &rig.stream, device_steps, LIMIT)
            .unwrap_err()
    };

    let no_micro_batch = DeviceStepConfig::new(0, RANKS, Divisor::MicroBatches(0), 5);
    let no_such_rank = device_steps(RANKS, 5);
    for (device_steps, named) in [(no_micro_batch, "micro_batches"), (no_such_rank, "rank")] {
        let error = refused(device_steps);
        let is_named = matches!(error, OptimError::Setting { setting, .. } if setting == named);
        assert!(is_named, "{error}");
    }

    // SAFETY: there is none.
    let scale = unsafe { rank.optim.device_loss_scale() };
    assert_eq!(scale.unwrap_err(), OptimError::NotPrepared);

    let one_rank = DeviceStepConfig::new(0, 1, Divisor::MicroBatches(3), 100);
    rank.optim
        .prepare_device_steps(&rig.pool, &rig.stream, one_rank, LIMIT)
        .unwrap();
    let grads = rank.reduced(rig);
    let params = pieces(view(&rank.params));
    let units = unit_slices(&grads, &params);
    let short = rank
        .optim
        .enqueue_update(&rig.stream, &units[1..])
        .unwrap_err();

    assert_eq!(
        short,
        OptimError::SliceCount {
            what: "grads",
            expected: 4,
            got: 3
        }
    );

    for _ in 0..65 {
        step_on_device(rig, std::slice::from_mut(rank)).unwrap();
    }
    let again = rank
        .optim
        .prepare_device_steps(&rig.pool, &rig.stream, device_steps(0, 5), LIMIT);
    assert_eq!(again, Err(OptimError::UnreadOutcomes));
    assert_eq!(
        rank.optim.all_outcomes(LIMIT),
        Err(OptimError::OutcomeLost { iteration: 0 })
    );
    // After a restore, device steps must be prepared again.
    let saved = rank.optim.progress();
    rank.optim.restore(&saved).unwrap();
    assert_eq!(
        rank.optim.enqueue_advance(&rig.stream),
        Err(OptimError::NotPrepared)
    );
}

fn one_cycle() -> OneCycle {
    serde_json::from_str(
        r#"{"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 5}"#,
    )
    .unwrap()
}

mod on_the_host {
    use super::host;

    #[test]
    fn device_steps_equal_host_steps() {
        super::device_steps_equal_host_steps(&host());
    }

    #[test]
    fn halted_run_reports_its_cause() {
        super::halted_run_reports_its_cause(&host());
    }

    #[test]
    #[cfg_attr(miri, ignore = "many steps")]
    fn bad_device_steps_are_refused() {
        super::bad_device_steps_are_refused(&host());
    }
}

#[cfg(feature = "cuda")]
mod on_cuda {
    use super::*;

    #[test]
    #[ignore = "needs a CUDA device"]
    fn device_steps_equal_host_steps() {
        super::device_steps_equal_host_steps(&cuda());
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn halted_run_reports_its_cause() {
        super::halted_run_reports_its_cause(&cuda());
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn bad_device_steps_are_refused() {
        super::bad_device_steps_are_refused(&cuda());
    }

    /// A whole step is recorded once and replayed.
    #[test]
    #[ignore = "needs a CUDA device"]
    fn graph_step_equals_plain_step() {
        let rig = cuda();
        let config = config(dynamic());
        let mut plain = world(&rig, &config, DType::F16, 8);
        let mut replayed = world(&rig, &config, DType::F16, 8);
        let record = || {
            let driver_error = |e: OptimError| DeviceError::Driver {
                call: "a step",
                message: e.to_string(),
            };
            enqueue_on_device(&rig, &mut replayed).map_err(driver_error)
        };

        let graph = rig.stream.capture(record).unwrap();
        for step in 0..8 {
            for world in [&plain, &replayed] {
                set_grads(&rig, world, step, step % 4 == 2);
            }
            step_on_device(&rig, &mut plain).unwrap();
            // SAFETY: the optimizers and the kernels outlive the stream's work, which
            // `all_outcomes` waits for.
            unsafe { graph.launch(&rig.stream) }.unwrap();
            replayed
                .iter_mut()
                .for_each(|rank| rank.optim.expect_outcome(&rig.stream).unwrap());
        }

        for (a, b) in plain.iter_mut().zip(&mut replayed) {
            assert!(a.bits(&rig) == b.bits(&rig));
            assert_eq!(
                a.optim.all_outcomes(LIMIT).unwrap(),
                b.optim.all_outcomes(LIMIT).unwrap()
            );
        }

        assert_eq!(progress(&plain), progress(&replayed));
        assert_eq!(progress(&plain)[0].skipped_steps, 2);
        rig.stream.synchronize(LIMIT).unwrap();
    }
}
