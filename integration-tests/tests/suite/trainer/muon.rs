//! Muon: PyTorch's numbers, and the same bits at all stages, homes and after a resume. Each of four
//! faults that other implementations had under sharding would fail a test here: matrices that are
//! left to AdamW at stage 3, an update of each micro-batch, padding in a matrix, and no offload.

use std::collections::HashMap;

use integration_tests::{GPT2, LLAMA, Oracle, QWEN2};
use serde_json::Value;
use zero_alloc::device::DType;
use zero_alloc::host::HostDevice;
use zero_kernels::{AdamHyper, MatrixScale, Muon};
use zero_models::matrices_of;
use zero_optim::{Masters, Matrix, Moments, OptimizerConfig, StateFormat};
use zero_shard::{ParamId, Sharding, TensorCut, Updaters};
use zero_trainer::param_groups::{GroupRule, ParamGroup, ParamKind};
use zero_trainer::{Home, MeshSettings, Workload, device_steps};

use super::identical::all_same;
use super::resume::{continued, same_without_a_stop};
use super::support::{Case, Outcome, groups_of, home_at, homes, parts};
use super::ulysses::{close, linear};
use super::volumes::planned_on;

const ORACLES: [Oracle; 3] = [GPT2, LLAMA, QWEN2];

fn muon_case(oracle: Oracle) -> Case {
    Case {
        oracle,
        muon: Some((Muon::default(), 0.02)),
        ..Case::default()
    }
}

fn json(oracle: Oracle, name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(oracle.data(name)).unwrap()).unwrap()
}

/// 30 steps of the rule of `torch.optim.Muon` with products in fp32, and AdamW for the rest.
fn matches_pytorch(
    oracle: Oracle,
    (adjust, name): (MatrixScale, &str),
    [data_ranks, tensor_ranks]: [usize; 2],
    stage: u64,
) {
    let expected = json(oracle, "muon.json");
    let config = &json(oracle, "expected.json")["config"];
    let weight_decay = expected["weight_decay"].as_f64().unwrap();
    let hyper = AdamHyper {
        weight_decay,
        ..AdamHyper::default()
    };
    let rule = Muon {
        weight_decay,
        adjust,
        ..Muon::default()
    };
    let run = &expected["runs"][name];
    let case = Case {
        ranks: data_ranks * tensor_ranks,
        mesh: parts(tensor_ranks),
        stage,
        micro_batch: oracle.batch / data_ranks,
        grad_accum: oracle.grad_accum,
        steps: 30,
        optimizer: OptimizerConfig::default()
            .hyper(hyper)
            .lr(expected["adamw_lr"].as_f64().unwrap())
            .max_grad_norm(config["clip"].as_f64().unwrap()),
        muon: Some((rule, run["muon_lr"].as_f64().unwrap())),
        ..muon_case(oracle)
    };
    let steps = run["steps"].as_array().unwrap();
    let outcome = case.run_tiny();
    assert_eq!(outcome.steps.len(), steps.len());
    for (got, want) in outcome.steps.iter().zip(steps) {
        let of = |key: &str| want[key].as_f64().unwrap();
        let loss = got.loss - of("loss");
        let norm = got.grad_norm.unwrap() / of("grad_norm") - 1.0;
        let what = format!("{case:?}, step {}", got.step);
        assert!(loss.abs() < 5e-6, "{what}: loss differs by {loss:e}");
        assert!(norm.abs() < 1e-4, "{what}: norm differs by {norm:e}");
    }
}

#[test]
fn losses_are_pytorchs() {
    let runs = [
        (MatrixScale::Original, "original"),
        (MatrixScale::MatchRmsAdamw, "match_rms_adamw"),
    ];
    // Data and tensor ranks.
    for (oracle, meshes) in [
        (LLAMA, [[2, 1], [2, 1], [4, 1], [1, 2], [2, 2]]),
        (QWEN2, [[2, 1], [2, 1], [3, 1], [1, 4], [2, 2]]),
    ] {
        for (mesh, stage) in meshes.into_iter().zip([0, 3, 2, 1, 3]) {
            for run in runs {
                matches_pytorch(oracle, run, mesh, stage);
            }
        }
    }
}

#[test]
fn stages_and_homes_agree_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let types = [(DType::F32, 2), (DType::Bf16, 3), (DType::F16, 4)];
    for (oracle, (dtype, ranks)) in ORACLES.into_iter().zip(types) {
        let base = Case {
            dtype,
            ranks,
            grad_accum: 2,
            reduce_every_micro_batch: true,
            ..muon_case(oracle)
        };
        let nvme = Home::Nvme(dir.path().to_owned());
        let outcome = all_same((0..4).flat_map(|stage| {
            let at_stage = base.with(|case| case.stage = stage);
            let alone = at_stage.with(|case| case.overlap = false);
            let places = [Home::Host, nvme.clone()].map(|home| {
                let offload = homes(home, Home::Device);
                at_stage.with(|case| case.offload = offload)
            });
            [at_stage, alone].into_iter().chain(places)
        }));

        // Every matrix has a momentum, and no moments; all else the reverse.
        for (name, bits) in outcome.state() {
            let (kind, param) = name.split_once('/').unwrap();
            let shape = outcome
                .layout
                .params()
                .find(|(_, placed)| placed.name == param);
            let shape = &shape.unwrap().1.shape;
            let is_matrix = !matrices_of(param, shape, None).is_empty();
            let is_used = match kind {
                "master" => true,
                "momentum" => is_matrix,
                _ => !is_matrix,
            };
            assert_eq!(
                bits.iter().any(|bits| *bits != 0),
                is_used,
                "{oracle:?}: {name}"
            );
        }
    }

    let few = |masters, moments| {
        let mut offload = home_at(3, &Home::Host);
        offload.format = StateFormat::default().masters(masters).moments(moments);
        offload
    };
    let base = muon_case(LLAMA).with(|case| case.dtype = DType::Bf16);
    for moments in [Moments::EightBit, Moments::FourBit] {
        let offload = few(Masters::Remainder, moments);
        let on_host = base.with(|case| case.offload = offload.clone());
        let on_device = base.with(|case| case.offload.format = offload.format);
        all_same([
            on_host,
            on_device.clone(),
            on_device.with(|case| case.stage = 1),
        ]);
    }
}

/// Micro-batches are summed before the one update of a step.
#[test]
fn micro_batches_are_one_update() {
    for oracle in ORACLES {
        let one = muon_case(oracle).with(|case| {
            case.ranks = 1;
            case.micro_batch = 2;
        });
        let two = one.with(|case| {
            case.micro_batch = 1;
            case.grad_accum = 2;
        });
        for (one, two) in one.run_tiny().steps.iter().zip(two.run_tiny().steps) {
            let error = (one.loss - two.loss).abs();
            assert!(error < 2e-6, "{oracle:?}, step {}: {error:e}", one.step);
        }
    }
}

#[test]
fn resumes() {
    for (oracle, stage) in ORACLES.into_iter().zip([3, 1, 0]) {
        for dtype in [DType::F32, DType::Bf16] {
            same_without_a_stop(&Case {
                stage,
                dtype,
                grad_accum: 2,
                steps: 5,
                ..muon_case(oracle)
            });
        }
        let at = |(ranks, stage)| Case {
            ranks,
            stage,
            micro_batch: 12 / ranks,
            ..muon_case(oracle)
        };
        let cases = [(4, 3), (2, 1), (3, 2), (1, 0)].map(at);
        continued(&cases, Some(&cases[0]));
    }

    let at = |(data_ranks, ranks, stage)| Case {
        ranks: data_ranks * ranks,
        mesh: parts(ranks),
        stage,
        micro_batch: 8 / data_ranks,
        ..muon_case(QWEN2)
    };
    same_without_a_stop(&at((2, 2, 3)).with(|case| case.steps = 5));
    let cases = [(2, 2, 3), (1, 4, 2), (4, 1, 3), (1, 2, 1), (2, 4, 0)].map(at);
    continued(&cases, Some(&at((4, 1, 3))));
}

#[test]
fn groups_of_ranks_are_as_near_as_adamws() {
    for oracle in [GPT2, LLAMA] {
        let four = muon_case(oracle).with(|case| case.ranks = 4);
        let flat = four.run_tiny();
        let groups = [Sharding::Hybrid, Sharding::Replicated, Sharding::Secondary];
        let groups = groups.map(|sharding| groups_of(2, sharding));
        for (mesh, tensor_ranks) in groups.into_iter().flat_map(|mesh| [(mesh, 1), (mesh, 2)]) {
            let grouped = four.with(|case| {
                case.ranks *= tensor_ranks;
                case.mesh = MeshSettings {
                    tensor_ranks: Some(tensor_ranks),
                    ..mesh
                };
            });
            for (ours, flat) in grouped.run_tiny().steps.iter().zip(&flat.steps) {
                let error = (ours.loss - flat.loss).abs();
                assert!(error < 2e-6, "{mesh:?}, step {}: {error:e}", ours.step);
            }
        }
    }
}

/// Bytes of the state and of the exchanges are those of the formulas.
#[test]
fn memory_and_traffic_are_the_formulas() {
    let meshes = [(3, 1), (1, 2), (2, 2)];
    for (oracle, (data_ranks, ranks)) in ORACLES
        .into_iter()
        .flat_map(|oracle| meshes.map(|mesh| (oracle, mesh)))
    {
        for stage in 0..4 {
            let case = Case {
                ranks: data_ranks * ranks,
                mesh: parts(ranks),
                stage,
                ..muon_case(oracle)
            };
            let workload: &dyn Workload<HostDevice> = &case.tiny();
            let outcome = case.run(workload);
            let settings = &outcome.settings;
            let layout = case.part_layout(workload);
            let groups = settings.resolve_groups(&layout).unwrap();
            let held = groups.state_bytes(&layout, settings.stage, &settings.widths());
            let last = outcome.summaries.iter().map(|s| s.last.as_ref().unwrap());
            let most = last.clone().map(|last| last.memory.optimizer_bytes).max();
            assert_eq!(most, Some(held.unwrap().optimizer_bytes), "{case:?}");

            // Costs are those of whole matrices.
            let whole = workload.units();
            let whole = whole.iter().flat_map(|unit| &unit.params);
            let whole: HashMap<_, _> = whole.map(|param| (&param.name, param)).collect();
            let of = |id: ParamId| whole[&layout.units()[id.unit].params[id.param].name];
            let cost = |id| {
                let param = of(id);
                let matrices = matrices_of(&param.name, &param.shape, None);
                let cost = |m: &Matrix| (m.rows * m.cols * m.rows.min(m.cols)) as u64;
                (!matrices.is_empty()).then(|| matrices.iter().map(cost).sum())
            };
            let is_cut = |id| workload.tensor_cut(of(id)) != TensorCut::Replicated;
            let parts = (ranks as u64, is_cut);
            let updaters = Updaters::of_parts(&layout, parts, stage == 0, false, cost);
            for (rank, last) in last.enumerate() {
                let sent = 4 * updaters.sent_elems(rank as u64);
                assert_eq!(last.comm_bytes.all_to_all, sent, "{case:?}");
                assert!(sent > 0);
            }
        }
    }
}

/// The most that a rank has at once, with the buffers of updates.
#[test]
fn peak_is_known_before_the_run() {
    for (oracle, stage) in ORACLES
        .into_iter()
        .flat_map(|of| [0, 1, 2, 3].map(|n| (of, n)))
    {
        for (data_ranks, ranks, home) in [
            (1, 1, Home::Device),
            (3, 1, Home::Device),
            (3, 1, Home::Host),
            (2, 2, Home::Device),
        ] {
            let case = muon_case(oracle).with(|case| {
                case.ranks = data_ranks * ranks;
                case.mesh = parts(ranks);
                case.stage = stage;
                case.steps = 2;
                case.offload = home_at(stage, &home);
            });
            let workload = case.tiny();
            let outcome = case.run(&workload);
            let layout = case.part_layout(&workload);
            let planned = planned_on(&workload, &outcome, &layout);
            // The plan counts decisions on the device, also where the host decides.
            let groups = outcome.settings.resolve_groups(&layout).unwrap();
            let decisions = match case.offload.updates_on_host() {
                true => device_steps(case.ranks).bytes(groups.rate_sets(&case.optimizer)) as u64,
                false => 0,
            };
            let last = outcome.summaries.iter().map(|s| s.last.as_ref().unwrap());
            let peak = last.map(|last| last.memory.peak_bytes).max().unwrap();
            assert!(
                (planned.total() - decisions).abs_diff(peak) < 8 << 10,
                "{case:?}: {peak} bytes, planned {planned:?}"
            );
            assert!(planned.matrices > 0, "{case:?}");
        }
    }
}

#[test]
fn groups_choose_the_rule() {
    let group = |kinds: &[ParamKind], rule| ParamGroup {
        kinds: kinds.to_vec(),
        optimizer: Some(rule),
        ..ParamGroup::default()
    };
    let all_adam = muon_case(LLAMA).with(|case| {
        case.groups.groups = vec![group(&[ParamKind::Linear], GroupRule::Adam)];
    });
    let adam = Case {
        muon: None,
        ..all_adam.clone()
    };
    let losses = |case: &Case| {
        case.run_tiny()
            .steps
            .iter()
            .map(|s| s.loss)
            .collect::<Vec<_>>()
    };
    assert_eq!(losses(&all_adam), losses(&adam));

    let on_embedding = Case {
        muon: None,
        ..muon_case(LLAMA)
    };
    let on_embedding = on_embedding.with(|case| {
        case.groups.groups = vec![group(&[ParamKind::Embedding], GroupRule::Muon)];
    });
    let text = on_embedding.refusal();
    let expected = "Muon is for matrices of linear layers in blocks, and model.embed_tokens.weight";
    assert!(text.contains(expected), "{text}");
}

/// With tensor parallelism the numbers are those of whole parameters, as near as AdamW's, and the
/// bits the same at all stages. One Newton-Schulz step: five multiply the rounding errors of
/// gradients in the directions of small singular values by up to 485.
#[test]
fn parts_of_matrices_are_joined() {
    for (oracle, data_ranks, ranks) in [
        (LLAMA, 1, 2),
        (LLAMA, 2, 2),
        (QWEN2, 1, 2),
        (QWEN2, 2, 4),
        (GPT2, 1, 4),
        (GPT2, 2, 2),
    ] {
        for adjust in [MatrixScale::Original, MatrixScale::MatchRmsAdamw] {
            let rule = |ns_steps| Muon {
                adjust,
                ns_steps,
                ..Muon::default()
            };
            let whole = muon_case(oracle).with(|case| {
                case.ranks = data_ranks;
                case.steps = 2;
                case.micro_batch = 2;
                case.optimizer = linear();
                case.muon = Some((rule(1), 0.02));
            });
            let cut = whole.with(|case| {
                case.ranks *= ranks;
                case.mesh = parts(ranks);
            });
            let stages = (0..4).map(|stage| cut.with(|case| case.stage = stage));
            let alone = cut.with(|case| case.overlap = false);
            let places = [1, 3].map(|stage| {
                cut.with(|case| {
                    case.stage = stage;
                    case.offload = home_at(stage, &Home::Host);
                })
            });
            let got = all_same(stages.chain([alone]).chain(places));
            close(&got, &whole.run_tiny(), 1e-6, &format!("{cut:?}"));
        }
    }
}

/// Each head's queries, keys and values alone: the bits of stages, and with parts the numbers of
/// whole parameters.
#[test]
fn heads_are_orthogonalised_alone() {
    for (oracle, head_elems) in [(GPT2, 16), (LLAMA, 8)] {
        let all_heads = muon_case(oracle).with(|case| {
            case.ranks = 2;
            case.steps = 2;
            case.micro_batch = 2;
            case.optimizer = linear();
            let rule = Muon {
                ns_steps: 1,
                ..Muon::default()
            };
            case.muon = Some((rule, 0.02));
        });
        let alone = all_heads.with(|case| case.head_elems = Some(head_elems));
        let got = all_same((0..4).map(|stage| alone.with(|case| case.stage = stage)));
        let losses = |of: &Outcome| of.steps.iter().map(|s| s.loss).collect::<Vec<_>>();
        let of_all = losses(&all_heads.run_tiny());
        assert_eq!(losses(&got)[0], of_all[0], "before the first update");
        assert_ne!(losses(&got)[1], of_all[1]);

        let cut = alone.with(|case| {
            case.ranks = 4;
            case.mesh = parts(2);
        });
        close(&cut.run_tiny(), &got, 1e-6, &format!("{cut:?}"));
    }
}
