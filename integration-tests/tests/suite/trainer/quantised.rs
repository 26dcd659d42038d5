//! Quantised parameters and gradients: the same bits at all stages and after a resume, the bytes of
//! the formulas, the measured error within its bound, and what is refused.

use zero_alloc::device::DType;
use zero_kernels::Codec;
use zero_shard::{BlockFormat, Routing, Sharding};
use zero_trainer::{ErrorFeedback, Home, MeshSettings, QuantisedGrads, Settings, StepMetrics};

use super::support::{Case, Outcome, groups_of, home_at, levels_of, parts};
use super::toy::Toy;

const INT8: BlockFormat = BlockFormat::Int8;
const INT4: BlockFormat = BlockFormat::Int4;

/// The formats of a run.
#[derive(Clone, Copy, Debug, Default)]
struct Formats {
    params: Option<BlockFormat>,
    grads: Option<QuantisedGrads>,
}

impl Formats {
    const PARAMS: Self = Self {
        params: Some(INT8),
        grads: None,
    };
    const GRADS: Self = Self {
        params: None,
        grads: Some(QuantisedGrads {
            within: INT8,
            between: INT4,
            feedback: None,
        }),
    };

    fn with_feedback(self, keep: f32, reset_every: Option<u64>) -> Self {
        let feedback = Some(ErrorFeedback { keep, reset_every });
        let grads = self.grads.map(|grads| QuantisedGrads { feedback, ..grads });
        Self { grads, ..self }
    }

    fn both() -> Self {
        Self {
            grads: Self::GRADS.grads,
            ..Self::PARAMS
        }
    }

    fn settings(self, case: &Case) -> Settings {
        Settings {
            gather_codec: self.params.map(Codec::Blocks),
            quantised_grads: self.grads,
            ..case.settings()
        }
    }
}

/// Units within a block, of several, and of parts of one.
fn toy() -> Toy {
    Toy::new(&[vec![700, 3], vec![41], vec![2560], vec![300, 900]], true)
}

fn run(case: &Case, formats: Formats) -> Outcome {
    case.run_with(&formats.settings(case), &toy())
}

fn resumed(case: &Case, formats: Formats, from: &Outcome) -> Outcome {
    let case = case.with(|case| case.resume = Some(from.dir.path().to_owned()));
    run(&case, formats)
}

/// The shapes of ranks.
fn meshes() -> [(usize, MeshSettings); 4] {
    [
        (2, MeshSettings::default()),
        (4, MeshSettings::default()),
        (4, levels_of(2)),
        (4, groups_of(2, Sharding::Hybrid)),
    ]
}

/// The bytes of each step are those of the formulas.
fn check_bytes(case: &Case, outcome: &Outcome) {
    let settings = &outcome.settings;
    let layouts = settings.mesh.layouts(&outcome.layout).unwrap();
    let axes = settings.axis_traffic(&layouts).unwrap();
    let expected = axes.rank().unwrap();
    let sent = outcome.steps[1].comm_bytes;
    assert_eq!(sent.all_to_all, expected.all_to_all_bytes, "{case:?}");
    assert_eq!(sent.reduce_scatter, expected.reduce_scatter_bytes);
    if case.stage < 3 {
        assert_eq!(sent.all_gather, expected.all_gather_bytes, "{case:?}");
        if let Some(node_ranks) = case.node_ranks {
            let between = match settings.mesh.two_level {
                None => axes.node_egress_bytes(&layouts.grid(), node_ranks as u64),
                Some(_) => {
                    let stage = settings.stage;
                    let widths = settings.widths();
                    let times = settings.reductions();
                    let sent = layouts.step_traffic(stage, &widths, times, Routing::TwoLevel);
                    sent.map(|sent| sent.group_egress_bytes)
                }
            };
            assert_eq!(sent.between, between.unwrap(), "{case:?}");
        }
    }
}

/// The error of each step is above 0 and within its bound, for what travels in blocks.
fn check_errors(formats: Formats, steps: &[StepMetrics]) {
    for step in steps {
        let [error, bound] = [step.quant_error.unwrap(), step.quant_bound.unwrap()];
        assert_eq!(error.params.is_some(), formats.params.is_some());
        assert_eq!(error.grads.is_some(), formats.grads.is_some());
        let params = error.params.zip(bound.params);
        let grads = error.grads.zip(bound.grads);
        for (error, bound) in [params, grads].into_iter().flatten() {
            assert!(0.0 < error && error <= bound, "{error} of {bound}");
        }
    }
}

#[test]
fn parameters_have_the_bits_of_all_stages() {
    for (ranks, mesh) in meshes() {
        for grad_accum in [1, 2] {
            let outcomes = [1, 2, 3].map(|stage| {
                let case = Case {
                    stage,
                    ranks,
                    mesh,
                    grad_accum,
                    node_ranks: (ranks == 4).then_some(2),
                    reduce_every_micro_batch: true,
                    ..Case::default()
                };
                let outcome = run(&case, Formats::PARAMS);
                check_bytes(&case, &outcome);
                check_errors(Formats::PARAMS, &outcome.steps);

                // The host updates.
                let offloaded = case.with(|case| case.offload = home_at(stage, &Home::Host));
                let offloaded = run(&offloaded, Formats::PARAMS);
                assert_eq!(offloaded.curve(), outcome.curve(), "{case:?}");
                assert_eq!(offloaded.state(), outcome.state(), "{case:?}");

                let half = run(&case.with(|case| case.steps = 2), Formats::PARAMS);
                let rest = resumed(&case, Formats::PARAMS, &half);
                assert_eq!(rest.curve(), outcome.curve()[2..], "{case:?}");
                assert_eq!(rest.state(), outcome.state(), "{case:?}");
                (outcome.curve(), outcome.state())
            });
            assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]));
        }
    }
}

/// hpZ encodes what replicas send and what a group gathers; the second encoding changes nothing.
/// Quantised gradients are summed in the order of two levels.
#[test]
fn hpz_has_the_bits_of_two_levels() {
    for dtype in [DType::F32, DType::Bf16] {
        let levels = Case {
            ranks: 4,
            dtype,
            mesh: levels_of(2),
            ..Case::default()
        };
        let hpz = levels.with(|case| case.mesh = groups_of(2, Sharding::Secondary));
        let formats = Formats::both().with_feedback(0.0, None);
        let expected = run(&levels, formats);
        let outcome = run(&hpz, formats);
        assert_eq!(outcome.curve(), expected.curve(), "{dtype}");
        assert_eq!(outcome.state(), expected.state(), "{dtype}");
        check_errors(formats, &outcome.steps);
        let offloaded = hpz.with(|case| case.offload = home_at(3, &Home::Host));
        assert_eq!(run(&offloaded, formats).state(), expected.state());
    }
}

#[test]
fn gradients_have_the_bits_of_all_stages() {
    for formats in [Formats::GRADS, Formats::both()] {
        for (ranks, mesh) in meshes() {
            let outcomes = [1, 2, 3].map(|stage| {
                let case = Case {
                    stage,
                    ranks,
                    mesh,
                    grad_accum: 2,
                    reduce_every_micro_batch: true,
                    node_ranks: (ranks == 4).then_some(2),
                    ..Case::default()
                };
                let outcome = run(&case, formats);
                check_bytes(&case, &outcome);
                check_errors(formats, &outcome.steps);
                let offloaded = case.with(|case| case.offload = home_at(stage, &Home::Host));
                assert_eq!(run(&offloaded, formats).state(), outcome.state());
                // Cuts are whole blocks, so the buckets do not matter.
                let small = case.with(|case| case.bucket_elems = ranks * 256);
                assert_eq!(run(&small, formats).state(), outcome.state());
                (outcome.curve(), outcome.state())
            });
            assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]));
        }
    }
}

#[test]
fn resume_with_feedback_is_bit_identical() {
    for mesh in [
        MeshSettings::default(),
        levels_of(2),
        groups_of(2, Sharding::Secondary),
    ] {
        for (keep, reset_every) in [(0.0, None), (0.8, Some(3))] {
            let formats = Formats::both().with_feedback(keep, reset_every);
            let case = Case {
                ranks: 4,
                mesh,
                grad_accum: 2,
                steps: 6,
                ..Case::default()
            };
            let whole = run(&case, formats);
            let without = run(&case, Formats::both());
            assert_ne!(whole.state(), without.state(), "feedback has an effect");
            for at in [2, 3, 4] {
                let half = run(&case.with(|case| case.steps = at), formats);
                let rest = resumed(&case, formats, &half);
                assert_eq!(rest.curve(), whole.curve()[at as usize..], "{mesh:?}");
                assert_eq!(rest.state(), whole.state(), "{mesh:?} at {at}");
            }
        }
    }
}

/// The sum over ranks of the errors moves to other ranks.
#[test]
fn errors_are_resharded() {
    let formats = Formats::GRADS.with_feedback(0.0, None);
    let of = |ranks, mesh| Case {
        ranks,
        mesh,
        ..Case::default()
    };
    let four = run(&of(4, levels_of(2)), formats);
    let reader = |outcome: &Outcome| zero_ckpt::Reader::open(outcome.dir.path()).unwrap();
    let sum = |outcome: &Outcome| {
        let reader = reader(outcome);
        let states: Vec<_> = reader.manifest().trainer["grad_errors"]["hops"]
            .as_array()
            .unwrap()
            .iter()
            .enumerate()
            .flat_map(|(hop, ranks)| {
                let ranks = 0..ranks.as_u64().unwrap();
                ranks.map(move |rank| format!("grad_error_{hop}_{rank}"))
            })
            .collect();
        let mut all = Vec::new();
        for param in reader.params() {
            let mut sum = vec![0.0; param.numel_elems as usize];
            for state in &states {
                let mut values = vec![0.0; sum.len()];
                reader
                    .read_param(state, &param.name, 0..param.numel_elems, &mut values)
                    .unwrap();
                sum.iter_mut().zip(values).for_each(|(a, b)| *a += b);
            }
            all.extend(sum);
        }
        all
    };
    let before = sum(&four);
    assert!(before.iter().any(|error| *error != 0.0));

    for (ranks, mesh) in [
        (4, MeshSettings::default()),
        (3, MeshSettings::default()),
        (2, levels_of(1)),
    ] {
        // No step: the resumed state is saved for these ranks.
        let after = sum(&resumed(&of(ranks, mesh), formats, &four));
        assert_eq!(before.len(), after.len());
        for (before, after) in before.iter().zip(after) {
            let expected = before * ranks as f32 / 4.0;
            assert!((after - expected).abs() <= 1e-6 * expected.abs().max(1e-3));
        }
    }
    // One rank has no errors.
    let alone = resumed(&of(1, MeshSettings::default()), formats, &four);
    assert!(
        reader(&alone)
            .manifest()
            .trainer
            .get("grad_errors")
            .is_none()
    );
}

/// Stage 3 on two machines of four ranks: ZeRO++ sends at most a quarter of the bytes between them.
#[test]
fn bytes_between_machines() {
    let sent = |dtype, formats: Formats, mesh| {
        let case = Case {
            ranks: 8,
            node_ranks: Some(4),
            mesh,
            dtype,
            steps: 3,
            ..Case::default()
        };
        let toy = Toy::new(&[vec![1 << 16], vec![1 << 16], vec![1 << 16]], false);
        let outcome = case.run_with(&formats.settings(&case), &toy);
        outcome.steps[1].comm_bytes.between
    };
    let hpz = groups_of(4, Sharding::Secondary);
    for dtype in [DType::F32, DType::Bf16] {
        let none = Formats::default();
        let rows = [
            ("none, one ring", none, MeshSettings::default()),
            ("none, two levels", none, levels_of(4)),
            ("qwZ", Formats::PARAMS, levels_of(4)),
            ("hpZ", none, hpz),
            ("qgZ", Formats::GRADS, levels_of(4)),
            ("all", Formats::both(), hpz),
        ];
        let bytes = rows.map(|(name, formats, mesh)| {
            let bytes = sent(dtype, formats, mesh);
            println!("{dtype} {name}: {bytes}");
            bytes
        });
        assert!(bytes[0] >= 4 * bytes[5], "{dtype}: {bytes:?}");
    }
}

#[test]
fn what_has_no_form_is_refused() {
    let refused = |case: &Case, change: &dyn Fn(&mut Settings)| {
        let mut settings = Formats::both().settings(case);
        change(&mut settings);
        let error = case.try_run_with(&settings, &toy()).err().unwrap();
        error.to_string()
    };
    let zero = Case {
        stage: 0,
        ..Case::default()
    };
    let text = refused(&zero, &|_| {});
    assert!(text.contains("quantised gradients at stage 0"), "{text}");
    let text = refused(&zero, &|settings| settings.quantised_grads = None);
    assert!(text.contains("quantised parameters at stage 0"), "{text}");
    let one = zero.with(|case| case.stage = 1);
    let text = refused(&one, &|settings| {
        settings.graphs = true;
        settings.gather_codec = None;
    });
    assert!(
        text.contains("quantised gradients cannot be recorded"),
        "{text}"
    );
    let cut = Case {
        ranks: 4,
        mesh: parts(2),
        ..Case::default()
    };
    let settings = Formats::both().settings(&cut);
    let error = cut.try_run_with(&settings, &cut.tiny()).err().unwrap();
    let text = error.to_string();
    assert!(text.contains("with tensor parallelism"), "{text}");
    let hybrid = Case {
        ranks: 4,
        mesh: groups_of(2, Sharding::Hybrid),
        ..Case::default()
    };
    let text = refused(&hybrid, &|settings| {
        settings.quantised_grads = Formats::GRADS.with_feedback(0.0, None).grads;
    });
    assert!(text.contains("error feedback in groups"), "{text}");
}
