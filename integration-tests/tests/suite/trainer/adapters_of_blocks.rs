//! Adapters on a frozen model: PEFT's numbers, and the same bits, bytes and resumes as whole models
//! have.

use integration_tests::{GPT2, LLAMA, Oracle, QWEN2, bytes_below, relative_error};
use serde_json::Value;
use zero::workload::ModelWorkload;
use zero_alloc::device::DType;
use zero_kernels::AdamHyper;
use zero_models::hf::adapters::Adapters;
use zero_models::lora::LoraConfig;
use zero_optim::OptimizerConfig;
use zero_shard::{BlockFormat, Sharding};
use zero_trainer::Home;

use super::identical::all_same;
use super::resume::{continued, same_without_a_stop};
use super::support::{Case, groups_of, homes, shared};
use super::tensor;
use super::ulysses::{close, stages_agree};
use super::volumes::{peak_bytes, planned};

fn lora(targets: &[&str], dropout: f32) -> LoraConfig {
    LoraConfig {
        r: 3,
        alpha: 12.0,
        dropout,
        rslora: false,
        targets: targets.iter().map(|target| (*target).to_owned()).collect(),
    }
}

/// Adapters of some or all modules of a block.
fn cases() -> [(Oracle, LoraConfig); 4] {
    let all = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ];
    [
        (GPT2, lora(&["c_attn"], 0.0)),
        (GPT2, lora(&["c_attn", "c_proj", "c_fc"], 0.1)),
        (LLAMA, lora(&["q_proj", "v_proj"], 0.0)),
        (QWEN2, lora(&all, 0.1)),
    ]
}

fn json(oracle: Oracle, name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(oracle.data(name)).unwrap()).unwrap()
}

/// 30 steps from PEFT's initial adapters.
fn matches_peft(oracle: Oracle, ranks: usize, stage: u64) {
    let expected = json(oracle, "lora.json");
    let clip = json(oracle, "expected.json")["config"]["clip"]
        .as_f64()
        .unwrap();
    let hyper = AdamHyper {
        weight_decay: expected["weight_decay"].as_f64().unwrap(),
        ..AdamHyper::default()
    };
    let optimizer = OptimizerConfig::default()
        .hyper(hyper)
        .lr(expected["lr"].as_f64().unwrap())
        .max_grad_norm(clip);
    let base = Case {
        oracle,
        ranks,
        stage,
        micro_batch: oracle.batch / ranks,
        grad_accum: oracle.grad_accum,
        steps: 30,
        optimizer,
        ..Case::default()
    };
    let model = base.tiny().config;
    let open = |name: &str| Adapters::open(&oracle.data(name), &model).unwrap();
    let adapters = open("lora");
    let case = base.with(|case| case.lora = adapters.config().lora().cloned());
    let mut workload = case.tiny();
    workload.adapters = Some(adapters);

    let outcome = case.run(&workload);
    let steps = expected["steps"].as_array().unwrap();
    assert_eq!(outcome.steps.len(), steps.len());
    for (got, want) in outcome.steps.iter().zip(steps) {
        let of = |key: &str| want[key].as_f64().unwrap();
        let [loss, norm] = [
            got.loss - of("loss"),
            got.grad_norm.unwrap() - of("grad_norm"),
        ];
        let what = format!("{case:?}, step {}", got.step);
        assert!(loss.abs() < 2e-5, "{what}: loss differs by {loss:e}");
        assert!(norm.abs() < 2e-5, "{what}: norm differs by {norm:e}");
    }

    let last = open("lora-last");
    let state = outcome.state();
    assert_eq!(
        state.keys().filter(|name| !name.contains(".lora_")).count(),
        0
    );
    for param in outcome.layout.units().iter().flat_map(|unit| &unit.params) {
        let Some(bits) = state.get(&format!("master/{}", param.name)) else {
            assert!(!param.name.contains(".lora_"), "{}", param.name);
            continue;
        };
        let got: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
        let mut want = vec![0.0; got.len()];
        last.read(&param.name, 0..got.len() as u64, &mut want)
            .unwrap();
        let error = relative_error(&got, &want);
        assert!(
            error < 1e-4,
            "{case:?}: {} differs by {error:e}",
            param.name
        );
    }
}

#[test]
fn losses_and_adapters_are_pefts() {
    for (oracle, ranks) in [(LLAMA, [1, 2, 4]), (QWEN2, [1, 2, 3])] {
        for ranks in ranks {
            for stage in 0..4 {
                matches_peft(oracle, ranks, stage);
            }
        }
    }
}

#[test]
fn stages_agree_to_the_bit() {
    let types = [
        (DType::F32, 2),
        (DType::Bf16, 3),
        (DType::F16, 1),
        (DType::Bf16, 2),
    ];
    for ((oracle, lora), (dtype, ranks)) in cases().into_iter().zip(types) {
        let base = Case {
            oracle,
            dtype,
            ranks,
            grad_accum: 2,
            reduce_every_micro_batch: true,
            stage: 0,
            lora: Some(lora),
            ..Case::default()
        };
        let at = |stage| base.with(|case| case.stage = stage);
        let outcome = all_same((0..4).flat_map(|stage| {
            let at_stage = at(stage);
            let checkpoints = at_stage.with(|case| case.activation_checkpointing = true);
            let alone = at_stage.with(|case| case.overlap = false);
            let buckets = at_stage.with(|case| case.bucket_elems = 100);
            [at_stage, checkpoints, alone, buckets]
        }));
        assert!(
            outcome.steps.iter().any(|step| !step.skipped),
            "nothing was trained"
        );
        // Both matrices are trained.
        let state = outcome.state();
        for (name, bits) in &state {
            assert!(bits.iter().any(|bits| *bits != 0), "{oracle:?}: {name}");
        }
        let local = base.with(|case| case.reduce_every_micro_batch = false);
        all_same([local.clone(), Case { stage: 1, ..local }]);
    }
}

/// With a base in blocks, in groups of ranks and with state on the host.
#[test]
fn other_places_have_the_same_bits() {
    for format in [BlockFormat::Nf4, BlockFormat::Int8] {
        let base = Case {
            oracle: LLAMA,
            quantised_frozen: Some(format),
            lora: Some(lora(&["q_proj", "down_proj"], 0.1)),
            stage: 0,
            ..Case::default()
        };
        let at = |stage| base.with(|case| case.stage = stage);
        all_same((0..4).map(at));
        same_without_a_stop(&at(3));
    }
    let base = Case {
        lora: Some(lora(&["c_attn", "c_fc"], 0.0)),
        ..Case::default()
    };
    let offloaded = base.with(|case| case.offload = homes(Home::Host, Home::Host));
    let optimizer = base.with(|case| case.offload = homes(Home::Host, Home::Device));
    all_same([base.clone(), offloaded, optimizer]);
    let four = base.with(|case| case.ranks = 4);
    for sharding in [Sharding::Hybrid, Sharding::Replicated, Sharding::Secondary] {
        let grouped = four.with(|case| case.mesh = groups_of(2, sharding));
        let error = (grouped.run_tiny().steps[3].loss - four.run_tiny().steps[3].loss).abs();
        assert!(error < 1e-6, "{sharding:?}: {error:e}");
    }
}

/// Dropout of adapters, too: masks are those of the tokens.
#[test]
fn ranks_of_a_sequence_drop_the_same() {
    for (oracle, lora) in cases() {
        let one = Case {
            oracle,
            ranks: 1,
            steps: 3,
            lora: Some(lora),
            ..Case::default()
        };
        let two = one.with(|case| {
            case.ranks = 2;
            case.mesh = shared(2);
        });
        for (one, two) in one.run_tiny().steps.iter().zip(two.run_tiny().steps) {
            let error = (one.loss - two.loss).abs() / one.loss;
            assert!(error < 1e-6, "{oracle:?}, step {}: {error:e}", one.step);
        }
    }
}

#[test]
fn resumes_have_the_same_bits() {
    for ((oracle, lora), stage) in cases().into_iter().zip(0..4) {
        for dtype in [DType::F32, DType::Bf16] {
            same_without_a_stop(&Case {
                oracle,
                stage,
                dtype,
                grad_accum: 2,
                steps: 5,
                lora: Some(lora.clone()),
                ..Case::default()
            });
        }
    }
}

#[test]
fn resumes_at_other_ranks_and_stages() {
    for (oracle, lora) in cases() {
        let at = |(ranks, stage)| Case {
            oracle,
            ranks,
            stage,
            micro_batch: 12 / ranks,
            lora: Some(lora.clone()),
            ..Case::default()
        };
        let cases = [(4, 3), (2, 1), (3, 2), (1, 0)].map(at);
        continued(&cases, Some(&cases[0]));
    }
}

/// A frozen base has no gradient, no optimizer state, no bytes in a checkpoint, and of the traffic
/// only its gathers.
#[test]
fn base_costs_its_parameters_alone() {
    for (oracle, lora) in cases() {
        for stage in 0..4 {
            let case = Case {
                oracle,
                stage,
                lora: Some(lora.clone()),
                ..Case::default()
            };
            let workload = case.tiny();
            let outcome = case.run(&workload);
            let settings = &outcome.settings;
            let groups = settings.resolve_groups(&outcome.layout).unwrap();
            let widths = settings.widths();
            let held = groups
                .state_bytes(&outcome.layout, settings.stage, &widths)
                .unwrap();
            let last = outcome.steps.last().unwrap();
            let memory = &last.memory;
            let measured = [
                memory.params_bytes,
                memory.grads_bytes,
                memory.optimizer_bytes,
            ];
            let formula = [held.params_bytes, held.grads_bytes, held.optimizer_bytes];
            assert_eq!(measured, formula, "{case:?}");
            let padded = outcome.layout.units()[..settings.adapters.unwrap()].iter();
            let padded: u64 = padded.map(|unit| unit.padded_elems).sum();
            let all = if stage < 2 { padded } else { padded / 2 };
            assert_eq!(memory.grads_bytes, 4 * all, "{case:?}");
            let planned = workload.config.activations_bytes(&workload.options);
            assert_eq!(memory.activations_bytes, planned, "{case:?}");

            let layouts = settings.mesh.layouts(&outcome.layout).unwrap();
            let formula = settings.axis_traffic(&layouts).unwrap().rank().unwrap();
            let sent = last.comm_bytes;
            assert_eq!(
                sent.reduce_scatter, formula.reduce_scatter_bytes,
                "{case:?}"
            );
            assert_eq!(sent.all_reduce, formula.all_reduce_bytes, "{case:?}");
            // The embedding is gathered for forward alone.
            let embedding = match stage {
                3 => outcome.layout.units()[settings.adapters.unwrap()].shard_elems * 4,
                _ => 0,
            };
            let is_tied = workload.config.tied_head();
            let once = if is_tied { 0 } else { embedding };
            let slack = formula.all_gather_bytes - sent.all_gather;
            assert!(
                slack >= once && slack <= formula.all_gather_bytes / 2,
                "{case:?}: {slack}"
            );

            let files = bytes_below(outcome.dir.path());
            let elems = workload.config.adapter_elems();
            assert!(files < 12 * elems + 200_000, "{case:?}: {files} bytes");
        }
    }
}

/// The most that a rank has at once: at stage 3 a gathered unit beside its blocks, at others the
/// decoded units of a pass.
#[test]
fn peak_is_known_before_the_run() {
    for (stage, ranks) in [(0, 2), (1, 3), (2, 2), (3, 2), (3, 8)] {
        for (oracle, lora) in [cases()[1].clone(), cases()[3].clone()] {
            for frozen in [None, Some(BlockFormat::Nf4), Some(BlockFormat::Int8)] {
                let case = Case {
                    oracle,
                    ranks,
                    stage,
                    steps: 2,
                    micro_batch: 1,
                    lora: Some(lora.clone()),
                    dtype: DType::Bf16,
                    quantised_frozen: frozen,
                    ..Case::default()
                };
                let workload = case.tiny();
                let outcome = case.run(&workload);
                let planned = planned(&workload, &outcome);
                let peak = peak_bytes(&outcome);
                // The most units are gathered in a pass that may read none in blocks.
                let limit = if frozen.is_some() { 16 << 10 } else { 8 << 10 };
                assert!(
                    planned.total().abs_diff(peak) < limit && peak < planned.total() + (8 << 10),
                    "{case:?}: {peak} bytes, planned {planned:?}"
                );
            }
        }
    }
}

/// Tensor parallelism cuts A or B of an adapter, and sums the gradient of the other over its ranks.
#[test]
fn parts_have_the_numbers_of_whole_adapters() {
    for ((oracle, lora), ranks) in cases().into_iter().zip([2, 4, 2, 4]) {
        for sequence_parallel in [false, true] {
            let base = tensor::case(oracle, 2, ranks).with(|case| {
                case.lora = Some(lora.clone());
                case.sequence_parallel = sequence_parallel;
                case.activation_checkpointing = ranks == 4;
                case.steps = 3;
            });
            stages_agree(&base, &tensor::whole(&base));

            if ranks == 2 {
                let shared = base.with(|case| case.mesh.sequence_ranks = Some(2));
                let what = format!("{shared:?}");
                close(&shared.run_tiny(), &tensor::whole(&shared), 1e-6, &what);
            }
        }
    }
}

#[test]
fn parts_send_the_bytes_of_the_formula() {
    for (oracle, lora) in cases() {
        for (sequence_parallel, activation_checkpointing) in
            [(false, false), (true, false), (true, true)]
        {
            let case = tensor::case(oracle, 1, 2).with(|case| {
                case.lora = Some(lora.clone());
                case.sequence_parallel = sequence_parallel;
                case.activation_checkpointing = activation_checkpointing;
            });
            let workload = case.tiny();
            let last = case.run(&workload).steps.pop().unwrap();
            let ModelWorkload {
                config, options, ..
            } = &workload;
            let sent = config.tensor_elems(options, false).bytes(4);
            let counted = last.comm_bytes;
            assert_eq!(counted.all_reduce, sent.all_reduce, "{case:?}");
            assert_eq!(counted.reduce_scatter, sent.reduce_scatter, "{case:?}");
            assert_eq!(counted.all_gather, sent.all_gather, "{case:?}");
            let held = config.activations_bytes(options);
            assert_eq!(last.memory.activations_bytes, held, "{case:?}");
        }
    }
}

#[test]
fn resumes_at_any_number_of_parts() {
    let (_, lora) = cases().into_iter().next_back().unwrap();
    let at = |(data_ranks, ranks, stage)| Case {
        stage,
        micro_batch: 8 / data_ranks,
        lora: Some(lora.clone()),
        ..tensor::case(QWEN2, data_ranks, ranks)
    };
    let cases = [(2, 2, 3), (1, 4, 2), (4, 1, 3), (1, 2, 1)].map(at);
    continued(&cases, Some(&at((4, 1, 3))));
}
