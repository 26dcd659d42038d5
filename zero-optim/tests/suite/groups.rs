//! Parameter groups against one optimizer a group, and against torch.optim.AdamW.

use serde::Deserialize;
use zero_alloc::Purpose;
use zero_alloc::device::{DType, Device, Reduced, Stream};
use zero_alloc::host::HostDevice;
use zero_kernels::AdamHyper;
use zero_optim::{
    Divisor, DynamicScaling, GatheredStats, GroupRules, LossScaling, LrSchedule, Masters, Moments,
    OptimError, OptimizerConfig, ParamGroups, RankStats, Segment, StateFormat, StateHome,
};

use crate::common::{Holding, Host, KINDS, LIMIT, Random, Rank, World, bits};

const UNITS: [usize; 3] = [18, 6, 24];
const WORLD: usize = 3;

fn config() -> OptimizerConfig {
    let hyper = AdamHyper {
        weight_decay: 0.1,
        beta2: 0.95,
        ..OptimizerConfig::default().hyper
    };
    let schedule = LrSchedule::LinearWarmup { warmup_steps: 3 };
    let dynamic = DynamicScaling::default()
        .initial_scale_power(3)
        .window(2)
        .hysteresis(1);
    let loss_scaling = LossScaling::Dynamic(dynamic);
    OptimizerConfig::default()
        .hyper(hyper)
        .lr(1e-2)
        .schedule(schedule)
        .max_grad_norm(0.5)
        .loss_scaling(loss_scaling)
}

fn rules() -> [GroupRules; 3] {
    [
        GroupRules::default(),
        GroupRules::default().weight_decay(0.0),
        GroupRules::default()
            .lr_scale(0.25)
            .weight_decay(0.5)
            .betas([0.8, 0.9]),
    ]
}

/// Groups that change within units and within shards.
fn group_of(unit: usize, elem: usize) -> usize {
    (unit + elem / 5) % 3
}

fn random_units(random: &mut Random) -> Vec<Vec<f32>> {
    UNITS.iter().map(|n| random.values(*n)).collect()
}

/// One vote, given to all: the statistics of a whole gradient.
fn step_all(worlds: &mut [World], grads: &[Vec<f32>], dtype: DType) {
    let mut votes: Vec<Vec<RankStats>> = Vec::new();
    for world in &mut *worlds {
        votes.push(
            world
                .ranks
                .iter_mut()
                .map(|rank| rank.stats(grads, dtype, 1.0).unwrap())
                .collect(),
        );
    }
    assert!(
        votes.iter().all(|vote| *vote == votes[0]),
        "groups do not change the statistics"
    );
    let gathered = GatheredStats::new(&votes[0], Divisor::MicroBatches(2));
    for rank in worlds.iter_mut().flat_map(|world| &mut world.ranks) {
        rank.step(grads, dtype, gathered).unwrap();
    }
}

#[test]
#[cfg_attr(miri, ignore = "minutes")]
fn groups_equal_an_optimizer_each() {
    for (dtype, how) in [
        (DType::F32, Holding::Shard),
        (DType::Bf16, Holding::Shard),
        (DType::F16, Holding::Whole),
    ] {
        let mut random = Random(7);
        let init = random_units(&mut random);
        // The optimizers of one group each, on all elements; the last one has all groups.
        let alone = rules().map(|rules| {
            let mut config = config();
            config.lr *= rules.lr_scale;
            config.hyper.weight_decay = rules.weight_decay.unwrap_or(config.hyper.weight_decay);
            if let Some([beta1, beta2]) = rules.betas {
                (config.hyper.beta1, config.hyper.beta2) = (beta1, beta2);
            }
            World::new(&config, dtype, &init, WORLD, how)
        });
        let mut worlds = Vec::from(alone);
        worlds.push(World::with_groups(
            &config(),
            dtype,
            &init,
            WORLD,
            how,
            &rules(),
            &group_of,
        ));
        for step in 0..6 {
            let mut grads = random_units(&mut random);
            if step == 3 {
                grads[1][2] = f32::NAN;
            }
            step_all(&mut worlds, &grads, dtype);
        }
        let grouped = worlds[3].params();
        let alone = [0, 1, 2].map(|group| worlds[group].params());
        for (unit, values) in grouped.iter().enumerate() {
            for (elem, x) in values.iter().enumerate() {
                assert_eq!(
                    x.to_bits(),
                    alone[group_of(unit, elem)][unit][elem].to_bits(),
                    "{dtype} {unit} {elem}"
                );
            }
        }
        let progress = worlds[3].ranks[0].optim.progress();
        assert!(
            worlds
                .iter()
                .all(|world| world.ranks[0].optim.progress() == progress)
        );
        assert_eq!((progress.adam_steps, progress.skipped_steps), (5, 1));
    }
}

/// The gradients of frozen elements are set to zero after earlier readers on other streams, and
/// before later ones.
#[test]
#[cfg_attr(miri, ignore = "minutes")]
fn readers_of_gradients_are_ordered_around_the_statistics() {
    for seed in 0..100 {
        let device = HostDevice::seeded(seed);
        let host = Host::on(device.clone());
        let compute = &host.stream;
        let [writer, before, after] =
            ["writer", "before", "after"].map(|name| device.create_stream(name).unwrap());
        let block = || {
            host.pool
                .allocate(8, DType::F32, Purpose::Workspace, &writer)
                .unwrap()
        };
        let blocks = [block(), block(), block()];
        // SAFETY: the blocks are dropped after all streams are synchronized.
        let [grad, first, second] = blocks.each_ref().map(|block| unsafe { block.slice() });
        let rules = vec![GroupRules::default(), GroupRules::frozen()];
        let groups = ParamGroups::new(rules, [(0..5, 0), (5..8, 1)]);
        let segments = vec![Segment::shard("unit", 0..8)];
        let mut optim = host.builder().groups(&groups).build(segments).unwrap();
        let values = grad.typed::<f32>().unwrap();
        let fill = move || {
            // SAFETY: host memory of the block; streams and events order the accesses, which is
            // tested.
            unsafe { values.as_host_mut() }.fill(3.0);
            Ok(())
        };
        writer.enqueue("fill", fill).unwrap();
        // SAFETY: the writes precede the event, and no others follow; the block is dropped at the
        // end.
        let reduced = unsafe { Reduced::new(grad, writer.record().unwrap()) };
        // SAFETY: read on the stream, while the gradient lives.
        let read_on = |stream| unsafe { reduced.slice_on(stream) }.unwrap();
        device.copy(&before, read_on(&before), first).unwrap();
        optim.enqueue_stats(compute, &[&reduced]).unwrap();
        device.copy(&after, read_on(&after), second).unwrap();
        for stream in [&writer, compute, &before, &after] {
            stream.synchronize(LIMIT).unwrap();
        }
        assert!(
            device.violations().is_empty(),
            "seed {seed}: {:?}",
            device.violations()
        );
        // SAFETY: all streams are synchronized.
        let [first, second] =
            [first, second].map(|copy| unsafe { copy.typed::<f32>().unwrap().as_host().to_vec() });
        assert_eq!(
            (first, second),
            (vec![3.0; 8], [[3.0; 5].to_vec(), vec![0.0; 3]].concat()),
            "seed {seed}"
        );
    }
}

#[test]
#[cfg_attr(miri, ignore = "minutes")]
fn equal_rules_change_nothing() {
    let mut random = Random(8);
    let init = random_units(&mut random);
    let own = config().hyper;
    let same = GroupRules::default()
        .weight_decay(own.weight_decay)
        .betas([own.beta1, own.beta2]);
    let rules = [GroupRules::default(), same];

    let grouped = World::with_groups(
        &config(),
        DType::Bf16,
        &init,
        WORLD,
        Holding::Shard,
        &rules,
        &|_, elem| elem % 2,
    );

    assert!((0..UNITS.len()).all(|unit| grouped.ranks[0].optim.pieces(unit).len() == 1));
    let mut worlds = [
        World::new(&config(), DType::Bf16, &init, WORLD, Holding::Shard),
        grouped,
    ];
    for _ in 0..4 {
        step_all(&mut worlds, &random_units(&mut random), DType::Bf16);
    }

    for kind in KINDS {
        let [plain, grouped] = worlds
            .each_ref()
            .map(|world| bits(world.ranks[1].state(kind).unwrap()));
        assert_eq!(plain, grouped);
    }
}

/// Frozen elements have no state, do not change, and count in no statistics, even if they are not
/// finite.
#[test]
fn frozen_elements_do_not_take_part() {
    let rules = [GroupRules::default(), GroupRules::frozen()];
    // All of unit 1, and elements 4..9 of the others: parts of two shards.
    let frozen = |unit: usize, elem: usize| unit == 1 || (4..9).contains(&elem);
    for (dtype, how) in [(DType::F32, Holding::Shard), (DType::Bf16, Holding::Whole)] {
        let mut random = Random(9);
        let init = random_units(&mut random);
        let group_of = |unit, elem| usize::from(frozen(unit, elem));
        let mut world = World::with_groups(&config(), dtype, &init, WORLD, how, &rules, &group_of);
        let mut plain = World::new(&config(), dtype, &init, WORLD, how);
        let before = world.params();
        for _ in 0..3 {
            let mut grads = random_units(&mut random);
            let mut zeroed = grads.clone();
            for (unit, of_unit) in grads.iter_mut().enumerate() {
                for elem in (0..of_unit.len()).filter(|elem| frozen(unit, *elem)) {
                    (of_unit[elem], zeroed[unit][elem]) = (f32::NAN, 0.0);
                }
            }
            let (ours, outcome) = world.step(&grads, dtype, 1);
            assert_eq!((ours, outcome), plain.step(&zeroed, dtype, 1));
        }
        let after = world.params();
        let plain = plain.params();
        for (unit, values) in after.iter().enumerate() {
            for elem in 0..values.len() {
                let expected = if frozen(unit, elem) {
                    before[unit][elem]
                } else {
                    plain[unit][elem]
                };
                assert_eq!(
                    values[elem].to_bits(),
                    expected.to_bits(),
                    "{dtype} {unit} {elem}"
                );
            }
        }
        let state: usize = world
            .ranks
            .iter()
            .map(|rank| rank.optim.state_elems())
            .sum();
        let trained = 18 + 24 - 2 * 5;
        assert_eq!(
            state,
            if how == Holding::Whole {
                WORLD * trained
            } else {
                trained
            }
        );
    }
}

#[test]
fn learning_rate_and_divisor_can_be_set() {
    let init = vec![vec![0.5f32; 4]];
    let config = OptimizerConfig::default().max_grad_norm(1.0);
    let grads = vec![vec![3.0f32; 4]];
    let run = |lr: f64, divisor: Divisor, config: &OptimizerConfig| {
        let mut rank = Rank::new(config, DType::F32, &init, 0, 1, Holding::Shard);
        rank.optim.set_lr(lr).unwrap();
        let stats = [rank.stats(&grads, DType::F32, 0.0).unwrap()];
        let outcome = rank
            .step(&grads, DType::F32, GatheredStats::new(&stats, divisor))
            .unwrap();
        (rank.params[0].values(), outcome)
    };

    let expected = run(0.1, Divisor::MicroBatches(12), &config.clone().lr(0.1));
    assert_eq!(run(0.1, Divisor::Sum(12.0), &config), expected);
    assert_eq!(expected.1.grad_norm(), Some(0.5));
    let mut rank = Rank::new(&config, DType::F32, &init, 0, 1, Holding::Shard);
    assert!(rank.optim.set_lr(f64::NAN).is_err());
    let stats = [rank.stats(&grads, DType::F32, 0.0).unwrap()];
    let error = rank.step(
        &grads,
        DType::F32,
        GatheredStats::new(&stats, Divisor::Sum(0.0)),
    );
    assert_eq!(
        error.unwrap_err().to_string(),
        "divisor is 0; it must be a finite number above 0"
    );
}

/// `step_with` does the four parts, with the votes of all ranks.
#[test]
fn one_call_does_the_four_parts() {
    let mut random = Random(10);
    let init = random_units(&mut random);
    let mut worlds =
        [(); 2].map(|()| World::new(&config(), DType::F32, &init, WORLD, Holding::Shard));

    for _ in 0..3 {
        let grads = random_units(&mut random);
        let [four, one] = &mut worlds;
        let (votes, outcome) = four.step(&grads, DType::F32, 2);
        for (r, rank) in one.ranks.iter_mut().enumerate() {
            let exchange = |own: &[u8]| {
                assert_eq!(own, bytemuck::bytes_of(&votes[r]));
                Ok(votes
                    .iter()
                    .map(|vote| bytemuck::bytes_of(vote).to_vec())
                    .collect())
            };
            assert_eq!(
                rank.step_with(&grads, DType::F32, r as f64, exchange)
                    .unwrap(),
                outcome
            );
        }
        assert_eq!(one.params(), four.params());
    }

    let short = worlds[0].ranks[0].step_with(&random_units(&mut random), DType::F32, 0.0, |own| {
        Ok(vec![own[1..].into()])
    });
    assert_eq!(
        short,
        Err(OptimError::StatsLen {
            rank: 0,
            expected: 40,
            got: 39
        })
    );
}

#[derive(Deserialize)]
struct Torch {
    lr: f64,
    betas: [f64; 2],
    weight_decay: f64,
    max_grad_norm: f64,
    params: Vec<TorchParam>,
    initial: Vec<Vec<f32>>,
    grads: Vec<Vec<Vec<f32>>>,
    steps: Vec<TorchStep>,
}

#[derive(Deserialize)]
struct TorchParam {
    elems: usize,
    lr_scale: f64,
    weight_decay: Option<f64>,
    betas: Option<[f64; 2]>,
    trainable: bool,
}

#[derive(Deserialize)]
struct TorchStep {
    grad_norm: f64,
    params: Vec<Vec<f32>>,
}

/// The numbers of integration-tests/scripts/torch_param_groups.py: one unit of all parameters.
#[test]
#[cfg_attr(miri, ignore = "minutes")]
fn groups_match_pytorch() {
    let torch: Torch =
        serde_json::from_str(include_str!("../data/torch_param_groups.json")).unwrap();
    let rules: Vec<GroupRules> = torch
        .params
        .iter()
        .map(|p| {
            GroupRules::default()
                .lr_scale(p.lr_scale)
                .weight_decay(p.weight_decay)
                .betas(p.betas)
                .trainable(p.trainable)
        })
        .collect();

    let ends: Vec<usize> = torch
        .params
        .iter()
        .scan(0, |end, p| Some((*end += p.elems, *end).1))
        .collect();
    let group_of = |_, elem: usize| ends.iter().position(|end| elem < *end).unwrap();
    let [beta1, beta2] = torch.betas;
    let hyper = AdamHyper {
        beta1,
        beta2,
        weight_decay: torch.weight_decay,
        ..OptimizerConfig::default().hyper
    };

    let config = OptimizerConfig::default()
        .hyper(hyper)
        .lr(torch.lr)
        .max_grad_norm(torch.max_grad_norm);
    let init = vec![torch.initial.concat()];

    for (world, how) in [
        (1, Holding::Shard),
        (5, Holding::Shard),
        (5, Holding::Whole),
    ] {
        let mut world =
            World::with_groups(&config, DType::F32, &init, world, how, &rules, &group_of);
        let ranks = world.ranks.len();
        for (grads, expected) in torch.grads.iter().zip(&torch.steps) {
            // The optimizer gets sums over ranks.
            let sums = grads
                .concat()
                .into_iter()
                .map(|x| x * ranks as f32)
                .collect();
            let (_, outcome) = world.step(&[sums], DType::F32, 1);
            assert!((outcome.grad_norm().unwrap() / expected.grad_norm - 1.0).abs() < 1e-6);
            for (got, want) in world.params()[0].iter().zip(expected.params.concat()) {
                assert!(
                    (got - want).abs() < 1e-6 * want.abs().max(1e-3),
                    "{got} and {want}"
                );
            }
        }
    }
}

/// Ranks compare the format and home of the state, the rules of groups, and who has which.
#[test]
fn settings_name_formats_and_groups() {
    let differing = |format: Option<StateFormat>, frozen: bool, group: usize| {
        let host = Host::on(HostDevice::new());
        let other = GroupRules::default().trainable(!frozen);
        let groups = ParamGroups::new(vec![GroupRules::default(), other], [(0..4, 0)])
            .assigned([("u.w".to_owned(), group)]);

        let builder = host.builder().param_dtype(DType::Bf16).groups(&groups);
        let builder = match format {
            Some(format) => builder.format(format).offload(StateHome::Memory),
            None => builder,
        };
        let optim = builder.build(vec![Segment::shard("u", 0..4)]).unwrap();
        optim.settings()
    };

    let own = differing(None, false, 0);
    let difference = |other: zero_optim::RankSettings| -> Vec<(String, String)> {
        let pairs = own.iter().zip(other.iter());
        let pairs = pairs.filter(|(own, other)| own != other);
        pairs
            .map(|(_, (name, value))| (name.to_owned(), value.to_owned()))
            .collect()
    };
    let named = |name: &str, value: &str| (name.to_owned(), value.to_owned());

    let home = named("home of the state", "host memory");
    let only_home = std::slice::from_ref(&home);
    let fp32 = StateFormat::default();
    assert_eq!(difference(differing(None, false, 0)), []);
    assert_eq!(difference(differing(Some(fp32), false, 0)), only_home);
    assert_eq!(
        difference(differing(Some(fp32.moments(Moments::Bf16)), false, 0)),
        [named("moments", "bf16"), home.clone()]
    );
    assert_eq!(
        difference(differing(Some(fp32.masters(Masters::Remainder)), false, 0)),
        [named("masters", "Remainders"), home]
    );
    assert_eq!(
        difference(differing(None, false, 1)),
        [named("group of u.w", "1")]
    );
    // A group without elements on this rank may have some on others.
    let rules = difference(differing(None, true, 0));
    assert_eq!(rules.len(), 1);
    assert_eq!(rules[0].0, "rules of groups");
}
