//! One rank that differs in one thing that decides bits: an error on all ranks, before anything is
//! updated or saved.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use proptest::sample::select;
use zero_alloc::device::{Device, Stream};
use zero_alloc::swap::SwapOptions;
use zero_comm::PrefetchOptions;
use zero_optim::{LrSchedule, Moments, StateFormat, StateHome};

use super::*;

/// A setting of the builder.
type Change = fn(Builder<Host>) -> Builder<Host>;

/// Settings of one rank, each with its part of the error.
const SETTINGS: &[(Change, &str)] = &[
    (|b| b.stage(ZeroStage::Three), "stage is "),
    (|b| b.dtype(DType::Bf16), "param_dtype is "),
    (|b| b.reduce_dtype(DType::Bf16), "buckets is "),
    (|b| b.adamw(config().lr(0.06)), "lr is "),
    (|b| b.adamw(config().betas([0.8, 0.999])), "beta1 is "),
    (|b| b.adamw(config().betas([0.9, 0.99])), "beta2 is "),
    (|b| b.adamw(config().eps(1e-7)), "eps is "),
    (|b| b.adamw(config().weight_decay(0.1)), "weight_decay is "),
    (|b| b.adamw(hyper(|h| h.decoupled = false)), "decoupled is "),
    (
        |b| b.adamw(hyper(|h| h.bias_correction = false)),
        "bias_correction is ",
    ),
    (|b| b.adamw(config().schedule(WARMUP)), "schedule is "),
    (
        |b| b.adamw(config().max_grad_norm(0.5)),
        "max_grad_norm is ",
    ),
    (
        |b| b.adamw(config().loss_scaling(LossScaling::Static { scale: 2.0 })),
        "loss_scaling is ",
    ),
    (|b| b.micro_batches(3), "micro_batches is "),
    (
        |b| b.groups(rules(|r| r.lr_scale(0.5)), group_of),
        "rules of groups is ",
    ),
    (
        |b| b.groups(rules(|r| r.weight_decay(0.2)), group_of),
        "rules of groups is ",
    ),
    (
        |b| b.groups(rules(|r| r.betas([0.5, 0.5])), group_of),
        "rules of groups is ",
    ),
    (
        |b| b.groups(rules(|r| r.trainable(false)), group_of),
        "rules of groups is ",
    ),
    (
        |b| b.groups(rules(|r| r), |name| usize::from(name.ends_with(".w"))),
        "group of a.w is ",
    ),
    (
        |b| {
            b.groups(rules(|r| r), |name| {
                usize::from(name == "d.none") + group_of(name)
            })
        },
        "group of d.none is ",
    ),
    (|b| b.groups(rules(|r| r), |_| 2), "is in group 2 of 2"),
    (|b| b.unit("g", [("w", [2_u64])]), "shape of g.w is "),
    (|b| b.unit("g", [("none", [0_u64])]), "shape of g.none is "),
    (
        |b| b.unit("g", std::iter::empty::<(&str, [u64; 1])>()),
        "units is ",
    ),
    (
        |b| b.unit("a", [("x", [2_u64])]),
        "the name \"a\" is used twice",
    ),
    (|b| b.unit("a.", [("w", [2_u64])]), "shape of a..w is "),
    (|b| b.bucket_elems(7), "buckets is "),
    (
        |b| b.prefetch(PrefetchOptions::default().ahead(2)),
        "prefetch is ",
    ),
    (
        |b| b.prefetch(PrefetchOptions::default().persistence_threshold_elems(8)),
        "prefetch is ",
    ),
    (
        |b| {
            b.format(StateFormat::default().moments(Moments::Bf16))
                .offload(StateHome::Memory)
        },
        "moments is ",
    ),
    (|b| b.offload(StateHome::Memory), "home of the state is "),
    (|b| b.offload(on_nvme()), "home of the state is "),
];

const WARMUP: LrSchedule = LrSchedule::LinearWarmup { warmup_steps: 3 };

fn hyper(change: impl FnOnce(&mut zero_kernels::AdamHyper)) -> OptimizerConfig {
    let mut hyper = config().hyper;
    change(&mut hyper);
    config().hyper(hyper)
}

/// Two groups, of which `change` changes the second.
fn rules(change: impl FnOnce(GroupRules) -> GroupRules) -> [GroupRules; 2] {
    let other = GroupRules::default().weight_decay(0.01);
    [GroupRules::default(), change(other)]
}

fn group_of(name: &str) -> usize {
    usize::from(name.ends_with(".b"))
}

fn on_nvme() -> StateHome {
    StateHome::Nvme {
        dir: std::env::temp_dir(),
        options: SwapOptions::default(),
        buffers: 2,
    }
}

cases! {
    /// A deviation of one rank in or after a step.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Deviation {
        /// The least bit of an initial value.
        InitialValue,
        /// Names of parameters, or their order, in a unit.
        OtherNames,
        OtherParamOrder,
        OtherUnitOrder,
        /// Weights of losses.
        Weighted,
        Mixed,
        LearningRate,
        GroupDecay,
        /// Other calls, where the others save.
        TrainsInstead,
        ValidatesInstead,
        ResumesInstead,
        OrderOfValidation,
        /// In a save, or a resume.
        State,
        WritesIntoParams,
        OtherRun,
        OtherStep,
        NoCheckpoint,
    }
}

use Deviation::*;

impl Deviation {
    /// A part of the error of all ranks at `stage`.
    fn named(self, stage: ZeroStage) -> &'static str {
        match self {
            InitialValue => "hash of the initial values of c.w is ",
            OtherNames => "shape of ",
            OtherParamOrder | OtherUnitOrder => "shape of ",
            Weighted => "the kind of losses is ",
            Mixed => "a loss with a weight beside one without",
            LearningRate => "the learning rate is ",
            GroupDecay => "learning rate's factor and weight decay of group 0 is ",
            // A collective of gradients, or the first gather, comes before.
            TrainsInstead => "collective",
            ValidatesInstead if stage == ZeroStage::Three => "collective",
            ValidatesInstead => "Step::end_validation",
            ResumesInstead => "Zero::resume",
            OrderOfValidation => "of units in the step is the gather of ",
            State => "the state of Zero::set_state is ",
            WritesIntoParams => "the parameters of c on rank ",
            OtherRun | OtherStep | NoCheckpoint => "rank ",
        }
    }

    /// Whether there is such a difference at `stage`.
    fn is_at(self, stage: ZeroStage) -> bool {
        match self {
            OrderOfValidation => stage == ZeroStage::Three,
            WritesIntoParams => stage < ZeroStage::Three,
            _ => true,
        }
    }
}

/// A rank of a run with the groups of [`rules`].
fn with_groups(comm: ThreadsComm, stage: ZeroStage) -> Builder<Host> {
    builder(comm, stage).groups(rules(|rules| rules), group_of)
}

/// Trains for `steps`, saving after each, and returns the folder.
fn trained(dir: &Path, stage: ZeroStage, name: &str, lr: f64, steps: usize) -> PathBuf {
    let folder = dir.join(name);
    let run = |comm: ThreadsComm| -> Result<(), Error> {
        let place = (comm.rank(), comm.world_size());
        let mut zero = with_groups(comm, stage).build(init)?;
        zero.set_lr(lr)?;
        for _step in 0..steps {
            step(&mut zero, place, 1)?;
        }
        Ok(zero.save(&folder)?)
    };
    for rank in on_ranks(2, run) {
        rank.unwrap();
    }
    folder
}

/// Makes the run of a rank that may differ in names or values.
fn built(
    comm: ThreadsComm,
    (stage, micro_batches): (ZeroStage, usize),
    deviation: Option<Deviation>,
) -> Result<Zero<Host>, FrameworkError> {
    let rank = Rank::on_host(comm)?.limit(LIMIT);
    let mut units: Vec<(&str, Vec<(&str, u64)>)> = UNITS
        .iter()
        .map(|(unit, params)| (*unit, params.to_vec()))
        .collect();
    match deviation {
        Some(OtherNames) => units[1].1[0].0 = "v",
        Some(OtherParamOrder) => units[2].1.reverse(),
        // Of equal lengths.
        Some(OtherUnitOrder) => units.swap(1, 3),
        _ => {}
    }
    let mut builder = Zero::builder(rank).stage(stage).adamw(config());
    for (unit, params) in units {
        builder = builder.unit(unit, params.into_iter().map(|(name, len)| (name, [len])));
    }
    builder
        .micro_batches(micro_batches)
        .build(|name, shape, values| {
            init(name, shape, values);
            if name == "c.w" && deviation == Some(InitialValue) {
                values[3] = f32::from_bits(values[3].to_bits() ^ 1);
            }
        })
}

/// A step of micro-batches whose gradients do not depend on the parameters.
fn plain_step(
    zero: &mut Zero<Host>,
    micro_batches: usize,
    (is_weighted, deviation): (bool, Option<Deviation>),
) -> Result<(), FrameworkError> {
    let mut step = zero.begin()?;
    for micro in 0..micro_batches {
        for (unit, params) in UNITS.iter().rev() {
            step.backward(unit, |_, grads| {
                let mut params = params.iter();
                params.try_for_each(|(name, len)| grads.set(name, vec![0.5_f32; *len as usize]))
            })?;
        }
        let is_last = micro + 1 == micro_batches;
        let is_weighted = match deviation {
            Some(Weighted) => !is_weighted,
            Some(Mixed) if is_last => !is_weighted,
            _ => is_weighted,
        };
        match (is_last, is_weighted) {
            (true, true) => return step.end_of(3.0, 2.0).map(drop),
            (true, false) => return step.end(1.5).map(drop),
            (false, true) => step.next_micro_batch_of(3.0, 2.0)?,
            (false, false) => step.next_micro_batch(1.5)?,
        }
    }
    Ok(())
}

/// Reads all units, of which the second and the last have equal lengths.
fn validate(zero: &mut Zero<Host>, is_other: bool) -> Result<(), FrameworkError> {
    let mut step = zero.begin()?;
    let mut units = UNITS.map(|(unit, _)| unit);
    if is_other {
        units.swap(1, 3);
    }
    for unit in units {
        step.forward(unit, |_| Ok::<_, FrameworkError>(()))?;
    }
    step.end_validation(1.0).map(drop)
}

/// Changes an element of a parameter behind the facade.
fn write_into_params(zero: &mut Zero<Host>) -> Result<(), FrameworkError> {
    let view = zero.param("c.w")?;
    // It waits for gathers.
    zero.begin()?.end_without_update()?;
    let rank = zero.rank();
    // SAFETY: no operation of the facade is enqueued between steps, and the write ends here.
    let slice = unsafe { view.slice() };
    let value = 77.0_f32.to_ne_bytes();
    rank.pool()
        .device()
        .upload(rank.compute(), &value, slice.slice(2..3), LIMIT)?;
    Ok(rank.compute().synchronize(LIMIT)?)
}

/// Runs a rank; `folders` are those of [`trained`].
fn deviating(
    comm: ThreadsComm,
    (stage, micro_batches): (ZeroStage, usize),
    (is_weighted, deviation, is_other): (bool, Deviation, bool),
    folders: &[PathBuf; 4],
) -> Result<(), FrameworkError> {
    let own = is_other.then_some(deviation);
    let mut zero = built(comm, (stage, micro_batches), own)?;
    plain_step(&mut zero, micro_batches, (is_weighted, None))?;
    let [run, other_run, other_step, out] = folders;

    match own {
        Some(LearningRate) => zero.set_lr(0.02)?,
        Some(GroupDecay) => zero.set_group(0, 1.0, Some(0.5))?,
        Some(ValidatesInstead) => return zero.begin()?.end_validation(1.0).map(drop),
        Some(ResumesInstead) => return zero.resume(run),
        Some(TrainsInstead) => return plain_step(&mut zero, micro_batches, (is_weighted, None)),
        Some(WritesIntoParams) => write_into_params(&mut zero)?,
        _ => {}
    }
    match deviation {
        OrderOfValidation => return validate(&mut zero, is_other),
        State | WritesIntoParams | ValidatesInstead | ResumesInstead | TrainsInstead => {
            if own != Some(State) {
                zero.set_state(serde_json::json!({ "row": 3 }));
            }
            return zero.save(out);
        }
        OtherRun | OtherStep | NoCheckpoint => {
            return zero.resume(match own {
                Some(OtherRun) => other_run,
                Some(OtherStep) => other_step,
                Some(_) => out,
                None => run,
            });
        }
        _ => {}
    }
    plain_step(&mut zero, micro_batches, (is_weighted, own))
}

/// All ranks have an error with `named` in it, and before a time limit.
fn check_errors(results: Vec<Result<(), FrameworkError>>, named: &str) {
    for result in &results {
        let error = result.as_ref().expect_err(named).to_string();
        let is_late = error.contains("within 1") || error.contains("longer than");
        assert!(!is_late && error.contains(named), "{named}: {results:?}");
    }
}

fn check_setting(stage: ZeroStage, (ranks, rank): (usize, usize), (change, named): (Change, &str)) {
    let run = |comm: ThreadsComm| {
        let is_other = comm.rank() == rank;
        let zero = with_groups(comm, stage);
        let zero = if is_other { change(zero) } else { zero };
        zero.build(init).map(drop)
    };
    check_errors(on_ranks(ranks, run), named);
}

fn check_deviation(
    dir: &Path,
    of_run: (ZeroStage, usize),
    (ranks, rank): (usize, usize),
    (is_weighted, deviation): (bool, Deviation),
) {
    let folders = ["run", "other run", "other step", "out"].map(|name| dir.join(name));
    let run = |comm: ThreadsComm| {
        let is_other = comm.rank() == rank;
        deviating(comm, of_run, (is_weighted, deviation, is_other), &folders)
    };
    check_errors(on_ranks(ranks, run), deviation.named(of_run.0));
    assert!(!folders[3].exists() || !zero_ckpt::has_checkpoints(&folders[3]).unwrap());
}

/// Folders of two runs, and of another step of the first, if `deviation` resumes.
fn folders(stage: ZeroStage, deviation: Deviation) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    if !matches!(
        deviation,
        OtherRun | OtherStep | NoCheckpoint | ResumesInstead
    ) {
        return dir;
    }
    trained(dir.path(), stage, "run", 0.05, 1);
    trained(dir.path(), stage, "other run", 0.04, 1);
    trained(dir.path(), stage, "other step", 0.05, 2);
    dir
}

/// Each setting of one rank is named on all ranks, at each stage.
#[test]
fn each_setting_is_agreed() {
    for stage in [ZeroStage::Zero, ZeroStage::Two] {
        for change in SETTINGS {
            check_setting(stage, (2, 1), *change);
        }
    }
}

/// Each deviation of one rank is named on all ranks, at each stage.
#[test]
fn each_deviation_is_an_error() {
    for stage in ZeroStage::ALL {
        for &deviation in Deviation::ALL.iter().filter(|other| other.is_at(stage)) {
            let dir = folders(stage, deviation);
            check_deviation(dir.path(), (stage, 2), (3, 1), (false, deviation));
        }
    }
}

/// Losses of one convention; a mixed call leaves the step as it was.
#[test]
fn losses_are_means_or_sums() {
    let of_weights = |comm: ThreadsComm, is_weighted: bool| -> Result<(), Error> {
        let mut zero = builder(comm, ZeroStage::Two).micro_batches(2).build(init)?;
        let mut step = zero.begin()?;
        micro_batch(&mut step, 0)?;
        match is_weighted {
            true => step.next_micro_batch_of(1.0, 1.0)?,
            false => step.next_micro_batch(1.0)?,
        }
        micro_batch(&mut step, 1)?;
        let mixed = match is_weighted {
            true => step.next_micro_batch(1.0),
            false => step.next_micro_batch_of(1.0, 1.0),
        };
        let error = mixed.unwrap_err().to_string();
        assert!(error.contains("a weight beside one without"), "{error}");
        match is_weighted {
            true => step.end_of(1.0, 1.0)?,
            false => step.end(1.0)?,
        };
        Ok(())
    };
    for is_weighted in [false, true] {
        for rank in on_ranks(2, |comm| of_weights(comm, is_weighted)) {
            rank.unwrap();
        }
    }
}

/// Two runs on one communicator, which differ in their initial values only, and which one rank
/// steps in another order.
#[test]
fn runs_on_one_communicator_do_not_mix() {
    let run = |comm: ThreadsComm| -> Result<(), Error> {
        let rank = comm.rank();
        let comm: Arc<dyn Communicator<Host>> = Arc::new(comm);
        let made = |value: f32| -> Result<Zero<Host>, FrameworkError> {
            let pool = Pool::new(Host::new(), usize::MAX);
            let kernels = Arc::new(HostKernels::new(1)?);
            let rank = Rank::new(Arc::clone(&comm), pool, kernels)?.limit(LIMIT);
            with_units(Zero::builder(rank)).build(|_, _, values| values.fill(value))
        };
        let mut runs = [made(0.5)?, made(0.25)?];
        for run in &mut runs {
            plain_step(run, 1, (false, None))?;
        }
        Ok(plain_step(&mut runs[rank], 1, (false, None))?)
    };
    for result in on_ranks(2, run) {
        let error = result.unwrap_err().to_string();
        assert!(
            error.contains("the hash of the run's settings is "),
            "{error}"
        );
    }
}

/// A full name is not another parameter's short name; a unit in which it is one is refused.
#[test]
fn full_names_come_first() {
    let zero = |unit: &str, params: [&str; 2]| {
        let comm = on_ranks(1, |comm| comm).remove(0);
        let params = params.map(|name| (name.to_owned(), [2]));
        let builder = Zero::builder(Rank::on_host(comm).unwrap()).unit(unit, params);
        builder.build(|name, _, values| values.fill(name.len() as f32))
    };
    let error = zero("l", ["l.w", "w"]).unwrap_err().to_string();
    let expected = r#"in unit "l" the name "l.w" means two parameters, l.w and l.l.w; rename one"#;
    assert!(error.ends_with(expected), "{error}");

    let mut zero = zero("l", ["l.w", "v"]).unwrap();
    let mut step = zero.begin().unwrap();
    let lens = |params: &Params<'_>| -> Result<_, FrameworkError> {
        let names = ["l.l.w", "l.w", "l.v", "v"];
        names
            .map(|name| params.get::<f32>(name).map(|values| values[0]))
            .into_iter()
            .collect()
    };
    let lens: Vec<f32> = step.forward("l", lens).unwrap();
    assert_eq!(lens, [5.0, 5.0, 3.0, 3.0]);
    step.end_without_update().unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]

    /// A random program of which one rank differs in one thing.
    #[test]
    #[cfg_attr(miri, ignore = "minutes")]
    fn one_rank_that_differs_is_an_error(
        stage in 0..3_usize, ranks in 2..5_usize, rank in 0..4_usize, micro_batches in 1..4_usize,
        is_weighted: bool,
        setting in proptest::option::of(select(SETTINGS)), deviation in select(Deviation::ALL),
    ) {
        let place = (ranks, rank % ranks);
        if let Some(setting) = setting {
            // The changed stage is the last one.
            check_setting(ZeroStage::ALL[stage], place, setting);
            return Ok(());
        }
        let stage = ZeroStage::ALL[stage + usize::from(deviation == OrderOfValidation)];
        let is_mixed = deviation == Mixed && micro_batches == 1;
        prop_assume!(deviation.is_at(stage) && !is_mixed);
        let dir = folders(stage, deviation);
        check_deviation(dir.path(), (stage, micro_batches), place, (is_weighted, deviation));
    }
}
