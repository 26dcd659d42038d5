//! State in pieces, in memory and on NVMe, and masters as remainders: the bits of fp32 state in
//! plain memory, in any order that the streams allow.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;
use zero_alloc::device::{DType, Stream};
use zero_alloc::host::HostDevice;
use zero_alloc::swap::SwapOptions;
use zero_kernels::host::UpdateSlices;
use zero_kernels::{
    AdamHyper, AverageCodecs, KernelError, RULE_SCALARS, SettingError, Slot, StepPoint, UpdateForm,
    UpdateRule,
};
use zero_optim::{
    Divisor, GatheredStats, GroupRules, Masters, Moments, OptimError, OptimizerConfig, StateFormat,
    StateHome, StateKind, StateRange, UnitSlices,
};

use super::common::{Buffer, Holding, KINDS, LIMIT, Random, Rank, RankOf, bits, cases};

/// The inputs of a run.
#[derive(Clone, Debug)]
struct Inputs {
    lens: Vec<usize>,
    dtype: DType,
    /// The group of every 700 elements, in turn: the optimizer's own, another, frozen.
    groups: Vec<usize>,
    seed: u64,
}

/// The formats of a run's state, and its home unless it is plain memory.
#[derive(Clone, Copy)]
struct Form<'a> {
    format: StateFormat,
    home: Option<&'a StateHome>,
}

fn plain() -> Form<'static> {
    Form {
        format: StateFormat::default(),
        home: None,
    }
}

fn format(remainder: bool, bf16_moments: bool) -> StateFormat {
    let masters = match remainder {
        true => Masters::Remainder,
        false => Masters::Fp32,
    };
    let moments = match bf16_moments {
        true => Moments::Bf16,
        false => Moments::Fp32,
    };
    StateFormat::default().masters(masters).moments(moments)
}

impl Inputs {
    fn run(&self, device: HostDevice, form: Form<'_>) -> Result<Rank, OptimError> {
        self.run_with(device, form, Arc::new(AdamHyper::default()))
    }

    fn run_with(
        &self,
        device: HostDevice,
        form: Form<'_>,
        rule: Arc<dyn UpdateRule>,
    ) -> Result<Rank, OptimError> {
        let config = OptimizerConfig::default()
            .max_grad_norm(0.5)
            .sub_group_elems(2000);
        let rules = [
            GroupRules::default(),
            GroupRules::default()
                .weight_decay(Some(0.1))
                .betas(Some([0.8, 0.95])),
            GroupRules::frozen(),
        ];
        let group_of = |unit: usize, elem: usize| {
            let at = self.lens[..unit].iter().sum::<usize>() + elem;
            self.groups[at / 700 % self.groups.len()]
        };

        let rank = RankOf {
            config: &config,
            dtype: self.dtype,
            init: &self.values(self.seed),
            place: (0, 1),
            how: Holding::Shard,
            rules: &rules,
            group_of: &group_of,
        };
        rank.build(device, |builder| {
            let builder = builder.rule(rule).format(form.format);
            match form.home {
                Some(home) => builder.offload(home.clone()),
                None => builder,
            }
        })
    }

    /// Random values of all units.
    fn values(&self, seed: u64) -> Vec<Vec<f32>> {
        let mut random = Random(seed);
        self.lens.iter().map(|&len| random.values(len)).collect()
    }

    /// A step with random gradients, unit by unit.
    fn step(&self, rank: &mut Rank, step: u64) {
        let values = self.values(self.seed ^ ((step + 1) << 20));
        let mut buffers = rank.grads(&values, self.dtype);
        let grads = rank.reduced(&mut buffers);
        let params = rank.slices();
        let Rank { stream, optim, .. } = rank;
        for (unit, grad) in grads.iter().enumerate().rev() {
            optim.enqueue_unit_stats(stream, unit, grad).unwrap();
        }
        let own = optim.rank_stats(stream, 0.0, LIMIT).unwrap();

        let own = [own];
        let gathered = GatheredStats::new(&own, Divisor::MicroBatches(1));
        let outcome = optim.decide(stream, gathered, LIMIT).unwrap();

        assert!(!outcome.is_skipped());
        for (unit, (grad, param)) in grads.iter().zip(&params).enumerate() {
            let slices = UnitSlices { grad, param };
            optim.enqueue_unit_update(stream, unit, &slices).unwrap();
        }

        stream.synchronize(LIMIT).unwrap();
    }
}

fn range(kind: StateKind, unit: usize, elems: Range<usize>) -> StateRange {
    StateRange { kind, unit, elems }
}

/// The bits of a unit's state of one kind, read in parts of 600 elements.
fn state(rank: &mut Rank, kind: StateKind, unit: usize) -> Vec<u32> {
    let param = rank.slices()[unit];
    let mut values = vec![f32::NAN; param[0].0.len()];
    for (i, part) in values.chunks_mut(600).enumerate() {
        let range = range(kind, unit, i * 600..i * 600 + part.len());
        let read = rank
            .optim
            .read_state(&rank.stream, &range, &param, part, LIMIT);
        read.unwrap();
    }
    bits(&values)
}

fn set_state(rank: &mut Rank, kind: StateKind, unit: usize, values: &[u32]) {
    let param = rank.slices()[unit];
    let values: Vec<f32> = values.iter().copied().map(f32::from_bits).collect();
    let Rank { optim, stream, .. } = rank;
    for (i, part) in values.chunks(900).enumerate() {
        let range = range(kind, unit, i * 900..i * 900 + part.len());
        let written = optim.write_state(stream, &range, &param, part, LIMIT);
        written.unwrap();
    }
    optim.write_unit_params(stream, unit, &param).unwrap();
    stream.synchronize(LIMIT).unwrap();
}

fn params(rank: &Rank) -> Vec<Vec<u32>> {
    rank.params.iter().map(|p| bits(&p.values())).collect()
}

fn nvme(dir: &std::path::Path, buffers: usize) -> StateHome {
    StateHome::Nvme {
        dir: dir.to_owned(),
        options: SwapOptions::default(),
        buffers,
    }
}

fn inputs() -> impl Strategy<Value = Inputs> {
    let dtype = prop_oneof![Just(DType::F32), Just(DType::Bf16), Just(DType::F16)];
    let parts = (
        prop::collection::vec(0usize..6000, 1..4),
        dtype,
        prop::collection::vec(0usize..3, 1..5),
        any::<u64>(),
    );
    parts.prop_map(|(lens, dtype, groups, seed)| Inputs {
        lens,
        dtype,
        groups,
        seed,
    })
}

proptest! {
    #![proptest_config(cases(12))]

    /// Three steps, a copy of the state into a new optimizer, and two more. No access is unordered.
    #[test]
    fn state_in_pieces_has_the_same_bits(
        inputs in inputs(),
        place in 0..3,
        buffers in 1usize..5,
        remainder in any::<bool>(),
        schedule in any::<u64>(),
    ) {
        let remainder = remainder && inputs.dtype == DType::Bf16;
        let dir = tempfile::tempdir().unwrap();
        let home = if place == 0 { nvme(dir.path(), buffers) } else { StateHome::Memory };
        let form = Form {
            format: format(remainder, false),
            home: (place < 2 || !remainder).then_some(&home),
        };
        let mut plain = inputs.run(HostDevice::new(), plain()).unwrap();
        let device = HostDevice::seeded(schedule);
        let mut pieces = inputs.run(device.clone(), form).unwrap();

        for step in 0..3 {
            inputs.step(&mut plain, step);
            inputs.step(&mut pieces, step);
        }

        let mut copy = inputs.run(device.clone(), form).unwrap();
        for unit in 0..inputs.lens.len() {
            for kind in KINDS {
                let saved = state(&mut pieces, kind, unit);
                prop_assert!(saved == state(&mut plain, kind, unit), "{kind:?} of unit {unit}");
                set_state(&mut copy, kind, unit, &saved);
            }
        }

        let progress = pieces.optim.progress();
        copy.optim.restore(&progress).unwrap();
        for step in 3..5 {
            inputs.step(&mut plain, step);
            inputs.step(&mut copy, step);
        }

        for unit in 0..inputs.lens.len() {
            for kind in KINDS {
                prop_assert!(state(&mut copy, kind, unit) == state(&mut plain, kind, unit), "{kind:?} of unit {unit}, copied");
            }
        }

        // Ties of a remainder's parameter are rounded away from zero.
        prop_assert!(remainder || params(&copy) == params(&plain));
        prop_assert!(device.violations().is_empty(), "{:?}", device.violations());
    }
}

/// The bytes that a step reads and writes: every piece once, masters and moments, in whole blocks
/// of the disk.
#[test]
fn bytes_of_a_step() {
    let dir = tempfile::tempdir().unwrap();
    let inputs = Inputs {
        lens: vec![2048 * 3, 100, 0, 5000],
        dtype: DType::Bf16,
        groups: vec![0],
        seed: 1,
    };

    for (remainder, bf16_moments, bytes) in [
        (false, false, 12),
        (true, false, 10),
        (false, true, 8),
        (true, true, 6),
    ] {
        let form = Form {
            format: format(remainder, bf16_moments),
            home: Some(&nvme(dir.path(), 3)),
        };
        let mut run = inputs.run(HostDevice::new(), form).unwrap();
        let blocks = |elems: usize| (elems * bytes).next_multiple_of(4096) as u64;
        let pieces = [2048, 2048, 2048, 100, 2048, 2048, 904];
        let expected: u64 = pieces.into_iter().map(blocks).sum();
        // Reading the state waits for all writes.
        let read_all = |run: &mut Rank| {
            (0..4).for_each(|unit| drop(state(run, StateKind::Slot("first_moment"), unit)))
        };
        read_all(&mut run);
        let file = run.optim.file().unwrap().clone();
        let before = [file.read_bytes(), file.written_bytes()];
        assert_eq!(file.bytes(), expected);
        for step in 0..3 {
            inputs.step(&mut run, step);
        }
        assert_eq!(file.read_bytes() - before[0], 3 * expected);
        read_all(&mut run);
        assert_eq!(file.written_bytes() - before[1], 3 * expected);
    }
}

/// Moments in bf16 follow those in fp32, also second moments that fall by less than half a unit in
/// the last place a step.
#[test]
fn bf16_moments_are_not_biased() {
    let inputs = Inputs {
        lens: vec![20_000],
        dtype: DType::Bf16,
        groups: vec![0],
        seed: 3,
    };

    let offloaded = Form {
        format: format(false, true),
        home: Some(&StateHome::Memory),
    };
    let mut plain = inputs.run(HostDevice::new(), plain()).unwrap();
    let mut small = inputs.run(HostDevice::new(), offloaded).unwrap();
    let mut again = inputs.run(HostDevice::new(), offloaded).unwrap();

    for step in 0..100 {
        for run in [&mut plain, &mut small, &mut again] {
            inputs.step(run, step);
        }
    }

    let sum = |run: &mut Rank| {
        state(run, StateKind::Slot("second_moment"), 0)
            .into_iter()
            .map(|b| f64::from(f32::from_bits(b)))
            .sum::<f64>()
    };

    let ratio = sum(&mut small) / sum(&mut plain);
    // Rounded to nearest, the second moments of this test are 1.9% off.
    assert!((ratio - 1.0).abs() < 1e-3, "second moments: {ratio}");
    assert!(
        state(&mut small, StateKind::Slot("first_moment"), 0)
            == state(&mut again, StateKind::Slot("first_moment"), 0),
        "the bits are repeatable"
    );
    assert_eq!(params(&small), params(&again));
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let inputs = Inputs {
        lens: vec![10],
        dtype: DType::F16,
        groups: vec![0],
        seed: 0,
    };

    let refused = |form: Form<'_>| {
        inputs
            .run(HostDevice::new(), form)
            .err()
            .unwrap()
            .to_string()
    };

    let error = |home: StateHome| {
        refused(Form {
            home: Some(&home),
            ..plain()
        })
    };
    for home in [None, Some(&StateHome::Memory)] {
        assert_eq!(
            refused(Form {
                format: format(true, false),
                home,
            }),
            "masters as 16-bit remainders need parameters of bf16, got fp16"
        );
    }
    assert_eq!(
        refused(Form {
            format: format(false, true),
            home: None,
        }),
        "first_moment cannot be in Bf16 in memory of this device; use another format, or an optimizer that is offloaded"
    );
    assert_eq!(
        error(nvme(dir.path(), 0)),
        "buffers is 0; it must be at least 1"
    );
    let missing = dir.path().join("missing");
    let error = error(nvme(&missing, 3));
    assert!(error.contains(&missing.display().to_string()), "{error}");
}

/// A failed transfer is the error of the next wait, and the optimizer's memory outlives what is
/// enqueued.
#[test]
fn failed_transfer_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let inputs = Inputs {
        lens: vec![9000, 3000],
        dtype: DType::Bf16,
        groups: vec![0],
        seed: 5,
    };

    let form = Form {
        home: Some(&nvme(dir.path(), 2)),
        ..plain()
    };
    let mut run = inputs.run(HostDevice::new(), form).unwrap();
    let stream = run.stream.clone();

    stream
        .enqueue("unplugged", || {
            Err(zero_alloc::device::DeviceError::Closed {
                stream: "disk".into(),
            })
        })
        .unwrap();

    let mut out = [0.0; 100];
    let param = run.slices()[0];
    let range = range(StateKind::Master, 0, 0..100);

    let error = run
        .optim
        .read_state(&stream, &range, &param, &mut out, LIMIT)
        .unwrap_err();
    assert!(error.to_string().contains("unplugged"), "{error}");
}

/// Adam, whose update panics once it is armed.
#[derive(Debug)]
struct Panics {
    adam: AdamHyper,
    armed: AtomicBool,
}

impl UpdateRule for Panics {
    fn name(&self) -> &'static str {
        "panics"
    }

    fn label(&self, _: &UpdateForm) -> &'static str {
        assert!(!self.armed.swap(false, Ordering::Relaxed), "on purpose");
        "panics"
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        self.adam.settings()
    }

    fn check(&self) -> Result<(), SettingError> {
        self.adam.check()
    }

    fn weight_decay(&self) -> f64 {
        self.adam.weight_decay
    }

    fn betas(&self) -> Option<[f64; 2]> {
        self.adam.betas()
    }

    fn slots(&self, averages: AverageCodecs) -> Vec<Slot> {
        self.adam.slots(averages)
    }

    fn scalars(&self, at: &StepPoint) -> [f32; RULE_SCALARS] {
        self.adam.scalars(at)
    }

    fn update(&self, slices: UpdateSlices<'_>) -> Result<(), KernelError> {
        self.adam.update(slices)
    }
}

#[test]
fn panicked_update_fails_later_ones() {
    let dir = tempfile::tempdir().unwrap();
    let inputs = Inputs {
        lens: vec![9000, 3000],
        dtype: DType::Bf16,
        groups: vec![0],
        seed: 5,
    };

    for home in [StateHome::Memory, nvme(dir.path(), 2)] {
        let rule = Arc::new(Panics {
            adam: AdamHyper::default(),
            armed: AtomicBool::new(false),
        });
        let form = Form {
            home: Some(&home),
            ..plain()
        };
        let mut run = inputs
            .run_with(HostDevice::new(), form, rule.clone())
            .unwrap();
        inputs.step(&mut run, 0);

        rule.armed.store(true, Ordering::Relaxed);
        let panicked = catch_unwind(AssertUnwindSafe(|| inputs.step(&mut run, 1)));
        assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"on purpose"));

        let later = catch_unwind(AssertUnwindSafe(|| inputs.step(&mut run, 2)));
        let error = later.expect_err("the state is lost");
        assert!(
            error
                .downcast_ref::<String>()
                .unwrap()
                .contains("StateLost")
        );
        assert_eq!(
            run.optim.wait_for_transfers(LIMIT),
            Err(OptimError::StateLost)
        );
        let param = run.slices()[0];
        let range = range(StateKind::Master, 0, 0..100);
        let read = run
            .optim
            .read_state(&run.stream, &range, &param, &mut [0.0; 100], LIMIT);
        assert_eq!(read, Err(OptimError::StateLost));
        run.stream.synchronize(LIMIT).unwrap();
    }
}

/// Remainders in memory of the device: the parameters follow from bf16 weights alone, and each is
/// its master rounded to nearest, ties away from zero.
#[test]
fn resident_remainders_split_the_masters() {
    let inputs = Inputs {
        lens: vec![3000, 0, 700],
        dtype: DType::Bf16,
        groups: vec![0, 1, 2],
        seed: 7,
    };

    let mut plain = inputs.run(HostDevice::new(), plain()).unwrap();
    let remainders = Form {
        format: format(true, false),
        home: None,
    };
    let mut split = inputs.run(HostDevice::new(), remainders).unwrap();
    for step in 0..20 {
        inputs.step(&mut plain, step);
        inputs.step(&mut split, step);
    }

    for (unit, params) in params(&split).into_iter().enumerate() {
        let masters = state(&mut split, StateKind::Master, unit);
        assert_eq!(masters, state(&mut plain, StateKind::Master, unit));
        let rounded = masters
            .iter()
            .map(|bits| bits.wrapping_add(0x8000) & 0xffff_0000);
        assert!(params.into_iter().eq(rounded), "unit {unit}");
    }

    // fp32 weights have no place in a bf16 parameter.
    let mut weights = Buffer::new(&[0.5; 3000], DType::F32);
    let mut none = Buffer::new(&[], DType::F32);
    let mut last = Buffer::new(&[0.5; 700], DType::F32);
    let slices = [&mut weights, &mut none, &mut last].map(|weights| [(weights.slice(), 0)]);
    let error = split
        .optim
        .init_masters(&split.stream, &slices)
        .unwrap_err();
    assert!(
        matches!(error, OptimError::Remainders { dtype: DType::F32 }),
        "{error}"
    );
}
