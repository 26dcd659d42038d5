//! Momentum SGD as an update rule outside of the crates: what one must write to add an optimizer.

use std::path::Path;
use std::sync::Arc;

use zero_alloc::device::{AnySlice, Device, DeviceId, DeviceSlice, Reduced, Stream};
use zero_kernels::host::UpdateSlices;
use zero_kernels::{
    AverageCodecs, Codec, KernelError, Muon, RULE_SCALARS, SettingError, Slot, StepPoint,
    UpdateRule,
};
use zero_optim::{
    Divisor, GatheredStats, LrSchedule, OptimError, ParamGroups, Segment, ShardedOptimizer,
    StateKind, StateRange, UnitSlices,
};

use super::*;

/// PyTorch's SGD without dampening: `m = momentum m + g; w -= lr m`.
#[derive(Clone, Copy, Debug)]
struct MomentumSgd {
    momentum: f64,
    weight_decay: f64,
    slots: fn(Codec) -> Vec<Slot>,
}

const RULE: MomentumSgd = MomentumSgd {
    momentum: 0.75,
    weight_decay: 0.0,
    slots: |averages| vec![slot("momentum", averages)],
};

fn slot(name: &'static str, codec: Codec) -> Slot {
    Slot { name, codec }
}

impl UpdateRule for MomentumSgd {
    fn name(&self) -> &'static str {
        "momentum_sgd"
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        vec![
            ("momentum", self.momentum.to_string()),
            ("weight_decay", self.weight_decay.to_string()),
        ]
    }

    fn check(&self) -> Result<(), SettingError> {
        let holds = (0.0..1.0).contains(&self.momentum);
        SettingError::unless(holds, "momentum", self.momentum, "at least 0, below 1")
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn slots(&self, averages: AverageCodecs) -> Vec<Slot> {
        (self.slots)(averages.signed)
    }

    fn scalars(&self, at: &StepPoint) -> [f32; RULE_SCALARS] {
        let mut scalars = [0.0; RULE_SCALARS];
        scalars[..2].copy_from_slice(&[at.lr as f32, self.momentum as f32]);
        scalars
    }

    fn update(&self, mut slices: UpdateSlices<'_>) -> Result<(), KernelError> {
        let [lr, momentum, ..] = slices.scalars.of_rule;
        for i in 0..slices.slots[0].len() {
            let weight = slices.weight(i);
            let grad = slices.grad(i) + slices.weight_decay as f32 * weight;
            let average = momentum * slices.slots[0][i] + grad;
            slices.slots[0][i] = average;
            slices.set_weight(i, weight - lr * average);
        }
        Ok(())
    }
}

const STEPS: usize = 6;
/// Micro-batches of a step, over all ranks.
const BATCHES: usize = 4;

fn momentum(comm: ThreadsComm, stage: ZeroStage) -> Result<Zero<Host>, Error> {
    let micro_batches = BATCHES / comm.world_size();
    let config = OptimizerConfig::default().lr(0.05);
    let builder = builder(comm, stage).adamw(config).rule(Arc::new(RULE));
    Ok(builder.micro_batches(micro_batches).build(init)?)
}

/// Steps with gradients that are multiples of 1/4, so that their sums are exact in any order.
fn train(zero: &mut Zero<Host>, (rank, ranks): (usize, usize), steps: usize) -> Result<(), Error> {
    for _step in 0..steps {
        let first = zero.steps() as usize * BATCHES;
        let micro_batches = BATCHES / ranks;
        let mut step = zero.begin()?;
        for micro in 0..micro_batches {
            if micro > 0 {
                step.next_micro_batch(0.0)?;
            }
            let batch = first + micro * ranks + rank;
            for (unit, _) in UNITS {
                step.forward(unit, |_| Ok::<_, Error>(()))?;
            }
            for (unit, params) in UNITS.iter().rev() {
                step.backward(unit, |_, grads| -> Result<(), Error> {
                    for (name, len) in *params {
                        let grad = (0..*len as usize).map(|i| target(i, batch));
                        grads.set(name, grad.collect::<Vec<f32>>())?;
                    }
                    Ok(())
                })?;
            }
        }
        step.end(0.0)?;
    }
    Ok(())
}

/// The weights after `STEPS` steps on one machine, in a plain loop.
fn plain_loop() -> Vec<f32> {
    let params = UNITS.iter().flat_map(|(unit, params)| {
        let of_param = move |(name, len): &(&str, u64)| {
            let name = format!("{unit}.{name}");
            (0..*len as usize).map(move |i| (i, initial(&name, i)))
        };
        params.iter().flat_map(of_param)
    });
    let trained = params.map(|(i, mut weight)| {
        let mut average = 0.0;
        for step in 0..STEPS {
            let batches = step * BATCHES..(step + 1) * BATCHES;
            let grad = batches.map(|batch| target(i, batch)).sum::<f32>() / BATCHES as f32;
            average = 0.75 * average + grad;
            weight -= 0.05 * average;
        }
        weight
    });
    trained.collect()
}

/// 1, 2 and 4 ranks at stages 1 to 3 have the bits of the plain loop, also when they resume each
/// other's checkpoints.
#[test]
fn momentum_has_the_same_bits_on_all_ranks() {
    let expected = plain_loop();
    let dir = tempfile::tempdir().unwrap();
    let stages = [ZeroStage::One, ZeroStage::Two, ZeroStage::Three];
    let mut saved: Option<&Path> = None;
    let folders: Vec<_> = (0..9).map(|i| dir.path().join(i.to_string())).collect();
    let mut folder = folders.iter();

    for ranks in [1, 2, 4] {
        for stage in stages {
            let save_to = folder.next().unwrap();
            let run = |comm: ThreadsComm| -> Result<_, Error> {
                let place = (comm.rank(), comm.world_size());
                let mut zero = momentum(comm, stage)?;
                let half = STEPS / 2;
                match saved {
                    Some(saved) => zero.resume(saved)?,
                    None => train(&mut zero, place, half)?,
                }
                zero.save(save_to)?;
                train(&mut zero, place, STEPS - half)?;
                Ok((weights(&mut zero)?, zero.optimizer().kinds()))
            };
            for rank in on_ranks(ranks, run) {
                let (weights, kinds) = rank.unwrap();
                assert_eq!(weights, expected, "{ranks} ranks at stage {stage}");
                assert_eq!(kinds, [StateKind::Master, StateKind::Slot("momentum")]);
            }
            saved = Some(save_to);
        }
    }
}

/// An optimizer of one unit of 8 elements; the second half is group 1.
fn of_groups(
    rule: Arc<dyn UpdateRule>,
    change: impl FnOnce(ParamGroups) -> ParamGroups,
) -> Result<(ShardedOptimizer<Host>, Pool<Host>), OptimError> {
    of_schedule(LrSchedule::Constant, rule, change)
}

fn of_schedule(
    schedule: LrSchedule,
    rule: Arc<dyn UpdateRule>,
    change: impl FnOnce(ParamGroups) -> ParamGroups,
) -> Result<(ShardedOptimizer<Host>, Pool<Host>), OptimError> {
    let device = HostDevice::new();
    let stream = device.create_stream("compute")?;
    let pool = Pool::new(device, 1 << 20);
    let kernels = Arc::new(HostKernels::new(1)?);
    let groups = ParamGroups::new(vec![GroupRules::default(); 2], [(0..4, 0), (4..8, 1)]);
    let groups = change(groups);
    let optim = ShardedOptimizer::builder(&pool, kernels, &stream)
        .config(OptimizerConfig::default().schedule(schedule))
        .rule(rule)
        .groups(&groups)
        .build(vec![Segment::shard("unit", 0..8)])?;
    Ok((optim, pool))
}

/// The weights and the state after a step from 1 with gradients of 1/2.
fn stepped(mut optim: ShardedOptimizer<Host>, pool: &Pool<Host>) -> (Vec<f32>, Vec<Vec<f32>>) {
    let stream = pool.device().create_stream("compute").unwrap();
    let mut param = vec![1.0_f32; 8];
    let mut grad = vec![0.5_f32; 8];
    let slice = |values: &mut Vec<f32>| -> AnySlice {
        // SAFETY: the vectors outlive the work of the stream, which is drained below.
        unsafe { DeviceSlice::from_raw_parts(values.as_mut_ptr(), 8, DeviceId::HOST) }.erase()
    };
    let of_param = [(slice(&mut param), 0)];
    // SAFETY: complete, and nothing else writes to it.
    let grad = unsafe { Reduced::new(slice(&mut grad), stream.record().unwrap()) };

    optim.enqueue_stats(&stream, &[&grad]).unwrap();
    let own = optim.rank_stats(&stream, 0.0, LIMIT).unwrap();
    let stats = GatheredStats::new(std::slice::from_ref(&own), Divisor::MicroBatches(1));
    let units = [UnitSlices {
        grad: &grad,
        param: &of_param,
    }];
    optim.step(&stream, &units, stats, LIMIT).unwrap();
    let state = optim.kinds().into_iter().map(|kind| {
        let range = StateRange {
            kind,
            unit: 0,
            elems: 0..8,
        };
        let mut values = vec![0.0; 8];
        optim
            .read_state(&stream, &range, &of_param, &mut values, LIMIT)
            .unwrap();
        values
    });
    let state = state.collect();
    stream.synchronize(LIMIT).unwrap();
    (param, state)
}

#[test]
fn groups_choose_their_rule() {
    let adam = || OptimizerConfig::default().rule();
    let (optim, pool) = of_groups(adam(), |groups| groups).unwrap();
    let (by_adam, adams_state) = stepped(optim, &pool);
    let (optim, pool) = of_groups(adam(), |groups| groups.update(1, Arc::new(RULE))).unwrap();
    let slots = ["first_moment", "second_moment", "momentum"].map(StateKind::Slot);
    assert_eq!(optim.kinds()[1..], slots);
    let (mixed, state) = stepped(optim, &pool);

    assert_eq!(mixed[..4], by_adam[..4]);
    assert_eq!(mixed[4..], [1.0 - 0.001 * 0.5; 4]);
    assert_eq!(state[1][..4], adams_state[1][..4]);
    assert_eq!(state[1][4..], [0.0; 4], "Adam's slots of the other group");
    assert_eq!(state[3], [[0.0; 4], [0.5; 4]].concat());
}

#[test]
fn rules_that_cannot_work_are_refused() {
    fn refused<R: UpdateRule + 'static>(rule: R, change: fn(ParamGroups) -> ParamGroups) -> String {
        let built = of_groups(Arc::new(rule), change);
        built.err().unwrap().to_string()
    }
    let diverging = MomentumSgd {
        momentum: 1.5,
        ..RULE
    };
    assert_eq!(
        refused(Muon::default(), |groups| groups),
        "the update rule muon needs whole parameters, which is not supported yet"
    );
    assert_eq!(
        refused(diverging, |groups| groups),
        "momentum is 1.5; it must be at least 0, below 1"
    );
    assert_eq!(
        refused(RULE, |groups| groups.update(2, Arc::new(RULE))),
        "group of an update rule is 2; it must be the position of a group"
    );
    let with_betas = |mut groups: ParamGroups| {
        groups.rules[1].betas = Some([0.5, 0.5]);
        groups
    };
    assert_eq!(
        refused(RULE, with_betas),
        "betas is 0.5; it must be unset: the update rule has none"
    );

    let (mut optim, pool) = of_groups(Arc::new(RULE), |groups| groups).unwrap();
    let stream = pool.device().create_stream("compute").unwrap();
    let range = StateRange {
        kind: StateKind::Slot("first_moment"),
        unit: 0,
        elems: 0..0,
    };
    let unknown = optim.read_state(&stream, &range, &[], &mut [], LIMIT);
    assert_eq!(
        unknown.unwrap_err().to_string(),
        "no state first_moment: the optimizer has master, momentum"
    );
}

#[test]
fn slots_that_cannot_be_kept_are_refused() {
    type Slots = fn(Codec) -> Vec<Slot>;
    let refused = |slots: Slots, of_group: Slots| {
        let own = Arc::new(MomentumSgd { slots, ..RULE });
        let other = Arc::new(MomentumSgd {
            slots: of_group,
            ..RULE
        });
        let built = of_groups(own, |groups| groups.update(1, other));
        built.map(|_| ()).map_err(|error| error.to_string())
    };

    let cases: [(Slots, &str); 4] = [
        (
            |_| vec![slot("momentum", Codec::Bf16)],
            "slot momentum of the update rule momentum_sgd has another format than the slot of this name of another rule, \
             with which it shares a state in checkpoints: use one format, or another name",
        ),
        (
            |_| vec![slot("average", Codec::Fp32); 2],
            "slot average of the update rule momentum_sgd is declared twice: give each slot its own name",
        ),
        (
            |_| vec![slot("average", Codec::Remainders)],
            "slot average of the update rule momentum_sgd is in the format of remainders, which only masters have: use the \
             codec that `slots` is passed, or fp32",
        ),
        (
            |averages| vec![slot("master", averages)],
            "slot master of the update rule momentum_sgd has the name of the master weights: choose another name",
        ),
    ];
    let momentum = RULE.slots;
    assert_eq!(refused(momentum, momentum), Ok(()));
    for (slots, expected) in cases {
        assert_eq!(refused(momentum, slots), Err(expected.to_owned()));
        assert_eq!(refused(slots, momentum), Err(expected.to_owned()));
    }
}

#[test]
fn a_schedule_that_cycles_betas_needs_a_rule_with_betas() {
    let built = |cycle_momentum: bool, rule: Arc<dyn UpdateRule>, group: GroupRules| {
        let cycle = serde_json::json!({
            "cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_momentum": cycle_momentum
        });
        let schedule = LrSchedule::OneCycle(serde_json::from_value(cycle).unwrap());
        let change = |mut groups: ParamGroups| {
            groups.rules[1] = group;
            groups.update(1, Arc::new(RULE))
        };
        let built = of_schedule(schedule, rule, change);
        built.map(|_| ()).map_err(|error| error.to_string())
    };

    let adam = || OptimizerConfig::default().rule();
    let trained = GroupRules::default();
    let refused = Err(
        "cycle_momentum is 1; it must be false: the update rule of a group has no betas for the \
         schedule to cycle"
            .to_owned(),
    );
    assert_eq!(built(true, Arc::new(RULE), trained), refused);
    assert_eq!(built(true, adam(), trained), refused);
    assert_eq!(built(true, adam(), GroupRules::frozen()), Ok(()));
    assert_eq!(built(false, Arc::new(RULE), trained), Ok(()));
}

#[test]
fn ranks_agree_on_the_rule_of_each_group() {
    let agreed = |group_of_other: usize| {
        let run = |comm: ThreadsComm| {
            let group = comm.rank() * group_of_other;
            let adam = OptimizerConfig::default().rule();
            let built = of_groups(adam, |groups| groups.update(group, Arc::new(RULE)));
            let (optim, pool) = built.unwrap();
            let stream = pool.device().create_stream("settings").unwrap();
            let exchange = |message: &[u8]| comm.exchange(&pool, &stream, message, LIMIT);
            optim.agree(comm.rank(), exchange)
        };
        on_ranks(2, run)
    };

    assert_eq!(agreed(0), [Ok(()), Ok(())]);
    for differs in agreed(1) {
        assert_eq!(
            differs.unwrap_err().to_string(),
            "rank 1 has other settings than rank 0: update rule of group 0 is adam (0) on rank 1 and momentum_sgd (1) on \
             rank 0; start all ranks with the same settings and files"
        );
    }
}
