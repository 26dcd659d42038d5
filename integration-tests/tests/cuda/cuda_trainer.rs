//! The trainer on the device with one rank: PyTorch's losses and the same bits at every stage, no
//! allocation from the device after the second step, and checkpoints that the host resumes.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use zero::workload::{ModelWorkload, Weights};
use zero_alloc::cuda::PinnedMemory;
use zero_alloc::device::DType;
use zero_ckpt::Reader;
use zero_comm::Solo;
use zero_data::{DataSource, Dataset};
use zero_kernels::AdamHyper;
use zero_models::cuda::matmul::CublasLtProducts;
use zero_models::hf::HfFolder;
use zero_models::{ModelConfig, ModelOptions};
use zero_optim::{DynamicScaling, LossScaling, LrSchedule, Masters, OptimizerConfig, StateFormat};
use zero_shard::{BlockFormat, ZeroStage};
use zero_trainer::TrainError;
use zero_trainer::{
    CudaOptions, Home, MuonSettings, OffloadSettings, RankSummary, RunOptions, Settings,
    StepMetrics, ValidationOptions, run_on_cuda, run_on_threads,
};

use crate::cuda_adapters::adapted;
use crate::gpu::device;
use integration_tests::{GPT2, LLAMA, Oracle, data, relative_error};

/// Micro-batches of PyTorch's run, and sequences of smaller ones, which the stand-ins run in a few
/// seconds.
const TORCH: [usize; 2] = [4, 32];
const SMALL: [usize; 2] = [2, 16];

fn settings(stage: u64, dtype: DType) -> Settings {
    let stage = ZeroStage::from_number(stage).unwrap();
    Settings {
        grad_accum_steps: 2,
        // All stages have the same bits.
        reduce_every_micro_batch: true,
        bucket_capacity_elems: 1 << 14,
        optimizer: OptimizerConfig::default()
            .hyper(AdamHyper {
                weight_decay: 0.1,
                ..AdamHyper::default()
            })
            .lr(1e-3)
            .max_grad_norm(1.0),
        limit: Duration::from_secs(300),
        ..Settings::new(stage, dtype, zero_models::param_kind)
    }
}

fn workload(dtype: DType, options: &RunOptions) -> ModelWorkload {
    workload_of(GPT2, dtype, options)
}

fn workload_of(oracle: Oracle, dtype: DType, options: &RunOptions) -> ModelWorkload {
    let folder = HfFolder::open(&oracle.data("model")).unwrap();
    ModelWorkload {
        config: folder.config().clone(),
        weights: Weights::Folder(Box::new(folder)),
        data: Dataset::open(&DataSource::at(oracle.data("tokens.u16.bin")))
            .unwrap()
            .into(),
        options: ModelOptions::new(options.micro_batch, options.seq_len, dtype),
        threads: 1,
        adapters: None,
        adapter_seed: 0,
    }
}

fn options(steps: u64, checkpoint: Option<&Path>, resume: Option<&Path>) -> RunOptions {
    RunOptions {
        steps,
        micro_batch: SMALL[0],
        seq_len: SMALL[1],
        seed: 7,
        checkpoint: checkpoint.map(|dir| (dir.to_owned(), 0)),
        keep_last: None,
        validation: None,
        resume: resume.map(Path::to_owned),
        cancel: Arc::default(),
        signal: Arc::default(),
        ..RunOptions::default()
    }
}

fn on_gpu(stage: u64, dtype: DType, options: &RunOptions) -> (Vec<StepMetrics>, RankSummary) {
    run(&settings(stage, dtype), options).unwrap()
}

fn run(
    settings: &Settings,
    options: &RunOptions,
) -> Result<(Vec<StepMetrics>, RankSummary), TrainError> {
    run_workload(settings, &workload(settings.dtype, options), options)
}

fn run_workload(
    settings: &Settings,
    workload: &ModelWorkload,
    options: &RunOptions,
) -> Result<(Vec<StepMetrics>, RankSummary), TrainError> {
    let device = device();
    let comm = Arc::new(Solo::new(device.clone()));
    let mut steps = Vec::new();
    let mut observe = |metrics: &StepMetrics| {
        steps.push(metrics.clone());
        Ok(())
    };
    let summary = run_on_cuda(
        &device,
        comm,
        CudaOptions {
            record: true,
            products: CublasLtProducts::load,
        },
        settings,
        workload,
        options,
        &mut observe,
    )?;
    Ok((steps, summary))
}

fn on_host(stage: u64, dtype: DType, options: &RunOptions) -> Vec<StepMetrics> {
    workload_on_host(&settings(stage, dtype), &workload(dtype, options), options)
}

fn workload_on_host(
    settings: &Settings,
    workload: &ModelWorkload,
    options: &RunOptions,
) -> Vec<StepMetrics> {
    let mut steps = Vec::new();
    let mut observe = |metrics: &StepMetrics| {
        steps.push(metrics.clone());
        Ok(())
    };
    run_on_threads(1, 1, settings, workload, options, &mut observe).unwrap();
    steps
}

/// Asserts that two runs have the same steps, with losses that differ by less than `limit`, relative.
fn close(got: &[StepMetrics], want: &[StepMetrics], limit: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (got, want) in got.iter().zip(want) {
        assert_eq!(got.step, want.step, "{what}");
        is_near(
            got.loss,
            want.loss,
            limit,
            &format!("{what}, step {}: loss", got.step),
        );
    }
}

fn is_near(got: f64, want: f64, limit: f64, what: &str) {
    let error = (got - want).abs() / want;
    assert!(error < limit, "{what} {got} for {want}");
}

/// Asserts that the pool took no memory after the second step.
fn memory_stays(summary: &RankSummary, what: &str) {
    let [after_two, at_end] = summary.backing_allocations;
    assert_eq!(
        after_two, at_end,
        "{what}: memory was taken after the second step"
    );
}

fn bits(steps: &[StepMetrics]) -> Vec<(u64, Option<u64>)> {
    steps
        .iter()
        .map(|s| (s.loss.to_bits(), s.grad_norm.map(f64::to_bits)))
        .collect()
}

#[test]
#[ignore = "needs a CUDA device"]
fn losses_are_pytorchs_at_every_stage_with_the_same_bits() {
    let expected: Value =
        serde_json::from_str(&std::fs::read_to_string(data("expected.json")).unwrap()).unwrap();
    let torch = |steps| RunOptions {
        micro_batch: TORCH[0],
        seq_len: TORCH[1],
        ..options(steps, None, None)
    };

    let are_pytorchs = |steps: &[StepMetrics], what: &str| {
        for (got, want) in steps.iter().zip(expected["steps"].as_array().unwrap()) {
            let what = format!("{what}, step {}", got.step);
            let number = |key: &str| want[key].as_f64().unwrap();
            let norm = got.grad_norm.unwrap();
            is_near(got.loss, number("loss"), 1e-5, &format!("{what}: loss"));
            is_near(norm, number("grad_norm"), 1e-4, &format!("{what}: norm"));
        }
    };

    let mut first = None;
    for stage in 0..4 {
        let what = format!("stage {stage}");
        let (steps, summary) = on_gpu(stage, DType::F32, &torch(5));
        are_pytorchs(&steps, &what);
        assert_eq!(steps.len(), 5);
        memory_stays(&summary, &what);
        let ran = |label| {
            let mut spans = summary.last_spans.iter();
            spans.any(|s| s.label == label && s.stream.ends_with("compute"))
        };
        let labels = [
            "matmul",
            "attention",
            "attention backward dq",
            "attention backward dkv",
            "cross entropy",
        ];
        assert!(labels.into_iter().all(ran));
        let own = bits(&steps);
        assert_eq!(&own, first.get_or_insert(own.clone()), "{what}");
    }

    // Micro-batches that are summed on the rank and reduced once.
    let mut first = None;
    for stage in 0..2 {
        let what = format!("stage {stage}, local sums");
        let settings = Settings {
            reduce_every_micro_batch: false,
            ..settings(stage, DType::F32)
        };
        let (steps, _) = run(&settings, &torch(3)).unwrap();
        are_pytorchs(&steps, &what);
        let own = bits(&steps);
        assert_eq!(&own, first.get_or_insert(own.clone()), "{what}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn in_bf16_it_learns_as_the_host_does() {
    let host = on_host(2, DType::Bf16, &options(8, None, None));
    let mut first = None;
    for stage in 0..4 {
        let (steps, _) = on_gpu(stage, DType::Bf16, &options(8, None, None));
        close(&steps, &host, 1e-3, &format!("stage {stage}"));
        let own = bits(&steps);
        assert_eq!(&own, first.get_or_insert(own.clone()), "stage {stage}");
    }
}

/// One micro-batch a step: blocks write their gradients to the place of the sum. The bits are those
/// of every stage, and of gradients that leave for the host.
#[test]
#[ignore = "needs a CUDA device"]
fn written_gradients_learn_as_the_host_does() {
    let settings = |stage| Settings {
        grad_accum_steps: 1,
        ..settings(stage, DType::Bf16)
    };

    let steps = options(4, None, None);
    let host = workload_on_host(&settings(2), &workload(DType::Bf16, &steps), &steps);

    let mut first = None;
    for (stage, optimizer) in [
        (0, Home::Device),
        (1, Home::Device),
        (2, Home::Host),
        (3, Home::Device),
    ] {
        let offload = OffloadSettings {
            optimizer,
            ..OffloadSettings::default()
        };
        let settings = Settings {
            offload,
            ..settings(stage)
        };
        let (steps, _) = run(&settings, &steps).unwrap();
        close(&steps, &host, 1e-3, &format!("stage {stage}"));
        let own = bits(&steps);
        assert_eq!(&own, first.get_or_insert(own.clone()), "stage {stage}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_run_goes_on_across_device_and_host() {
    let (straight, _) = on_gpu(3, DType::F32, &options(6, None, None));
    let dir = tempfile::tempdir().unwrap();
    let start = on_gpu(3, DType::F32, &options(3, Some(dir.path()), None)).0;
    assert_eq!(bits(&start), bits(&straight[..3]));
    let (rest, summary) = on_gpu(1, DType::F32, &options(6, None, Some(dir.path())));
    assert_eq!(summary.resumed_at, 3);
    assert_eq!(bits(&rest), bits(&straight[3..]), "at another stage");
    let host = on_host(2, DType::F32, &options(6, None, Some(dir.path())));
    close(&host, &straight[3..], 1e-5, "on the host");
}

/// Learning rates, loss scales, skipped steps and tokens are those of each replayed step, not of
/// the recorded one.
#[test]
#[ignore = "needs a CUDA device"]
fn recorded_steps_have_the_same_bits() {
    // The first steps overflow; later the scale grows again.
    let scaling = DynamicScaling::default()
        .initial_scale_power(22)
        .window(2)
        .hysteresis(1);

    for (stage, dtype) in [(0, DType::F32), (1, DType::F16), (2, DType::Bf16)] {
        let mut settings = settings(stage, dtype);
        // Local sums have three kinds of micro-batches: the first, the last, and those between.
        if stage == 0 {
            (settings.reduce_every_micro_batch, settings.grad_accum_steps) = (false, 3);
        }
        settings.optimizer.schedule = LrSchedule::LinearWarmup { warmup_steps: 20 };
        if dtype == DType::F16 {
            settings.optimizer.loss_scaling = LossScaling::Dynamic(scaling);
        }
        let plain = tempfile::tempdir().unwrap();
        let recorded = tempfile::tempdir().unwrap();
        let (want, _) = run(&settings, &options(9, Some(plain.path()), None)).unwrap();
        settings.graphs = true;
        let (got, summary) = run(&settings, &options(9, Some(recorded.path()), None)).unwrap();
        assert_eq!(bits(&got), bits(&want), "stage {stage}");
        for (got, want) in got.iter().zip(&want) {
            let figures = |s: &StepMetrics| (s.lr, s.loss_scale, s.skipped, s.comm_bytes);
            assert_eq!(
                figures(got),
                figures(want),
                "stage {stage}, step {}",
                got.step
            );
        }
        assert!(
            weights(plain.path()) == weights(recorded.path()),
            "stage {stage}: weights"
        );
        if dtype == DType::F16 {
            let late = want.iter().any(|s| s.skipped && s.step > 3);
            assert!(late && want.iter().any(|s| !s.skipped), "{want:?}");
        }
        memory_stays(&summary, &format!("stage {stage}"));
        // The last step ran graphs: two micro-batches, the decision and the update.
        let ran = |label| {
            summary
                .last_spans
                .iter()
                .filter(|s| s.label == label)
                .count()
        };
        assert!(
            ran("graph") >= 3 && ran("matmul") == 0,
            "stage {stage}: {:?}",
            summary.last_spans
        );
    }

    let refused = Settings {
        graphs: true,
        ..settings(3, DType::F32)
    };

    let error = run(&refused, &options(1, None, None))
        .unwrap_err()
        .to_string();
    assert!(error.contains("stage 3 cannot be recorded"), "{error}");
}

/// Masks change with every micro-batch and step, recorded or not, as on the host.
#[test]
#[ignore = "needs a CUDA device"]
fn dropout_learns_as_on_the_host() {
    let options = options(5, None, None);
    let mut workload = workload(DType::F32, &options);
    let (plain, _) = run_workload(&settings(0, DType::F32), &workload, &options).unwrap();
    workload.config = workload.config.with_dropout(0.2);
    let host = workload_on_host(&settings(0, DType::F32), &workload, &options);
    assert!((plain[0].loss - host[0].loss).abs() > 1e-4);

    let mut all = Vec::new();
    for (stage, graphs) in [(3, false), (0, true)] {
        let settings = Settings {
            graphs,
            ..settings(stage, DType::F32)
        };
        let (steps, _) = run_workload(&settings, &workload, &options).unwrap();
        close(&steps, &host, 1e-5, &format!("stage {stage}"));
        all.push(bits(&steps));
    }
    assert_eq!(all[0], all[1]);
}

/// Adapters on a frozen base, which may be in blocks, have the host's losses and values, and the
/// same bits at all stages, recorded and with checkpointing.
#[test]
#[ignore = "needs a CUDA device"]
fn adapters_learn_as_on_the_host() {
    for (oracle, targets, dropout, quantised_frozen) in [
        (GPT2, ["c_attn", "c_proj", "c_fc"], 0.1, None),
        (
            LLAMA,
            ["q_proj", "up_proj", "down_proj"],
            0.0,
            Some(BlockFormat::Nf4),
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let saving = |name: &str| options(3, Some(&folder.path().join(name)), None);
        let mut workload = workload_of(oracle, DType::F32, &saving("host"));
        workload.config = adapted(workload.config, &targets, dropout);
        let settings = |stage| Settings {
            adapters: Some(workload.config.adapter_units()),
            quantised_frozen,
            ..settings(stage, DType::F32)
        };
        let host = workload_on_host(&settings(2), &workload, &saving("host"));
        let want = weights(&folder.path().join("host"));

        let mut checkpointed = workload_of(oracle, DType::F32, &saving("host"));
        checkpointed.config = workload.config.clone();
        checkpointed.options.activation_checkpointing = true;
        let mut first = None;
        for (stage, graphs, workload) in [
            (0, true, &workload),
            (1, false, &workload),
            (2, false, &workload),
            (3, false, &workload),
            (3, false, &checkpointed),
        ] {
            let what = format!("{oracle:?}, stage {stage}");
            let settings = Settings {
                // Blocks are decoded to memory that no graph may allocate.
                graphs: graphs && quantised_frozen.is_none(),
                ..settings(stage)
            };
            let (steps, summary) = run_workload(&settings, workload, &saving(&what)).unwrap();
            close(&steps, &host, 1e-5, &what);
            let [got, want] = [&weights(&folder.path().join(&what)), &want]
                .map(|bits| bits.iter().copied().map(f32::from_bits).collect::<Vec<_>>());
            let error = relative_error(&got, &want);
            assert!(error < 1e-4, "{what}: adapters differ by {error:e}");
            memory_stays(&summary, &what);
            // Norms and biases are frozen.
            let mut spans = summary.last_spans.iter();
            assert!(!spans.any(|span| span.label == "column sums"), "{what}");
            let own = bits(&steps);
            assert_eq!(&own, first.get_or_insert(own.clone()), "{what}");
        }
    }
}

/// Evaluations between steps, recorded or not, change no bit of training, and their losses are the
/// host's.
#[test]
#[ignore = "needs a CUDA device"]
fn evaluations_change_nothing() {
    let data = Arc::new(Dataset::open(&DataSource::at(data("tokens.u16.bin"))).unwrap());
    let plain = options(6, None, None);
    let evaluating = RunOptions {
        validation: Some(ValidationOptions {
            data,
            every: 2,
            windows: 5,
        }),
        ..plain.clone()
    };

    let losses = |steps: &[StepMetrics]| {
        steps
            .iter()
            .filter_map(|s| Some(s.validation?.loss))
            .collect::<Vec<f64>>()
    };

    let host = losses(&on_host(2, DType::F32, &evaluating));
    assert_eq!(host.len(), 3);
    let want = bits(&on_gpu(2, DType::F32, &plain).0);
    let mut first = None;

    for (stage, graphs) in [(0, false), (1, true), (2, true), (3, false)] {
        let settings = Settings {
            graphs,
            ..settings(stage, DType::F32)
        };
        let got = run(&settings, &evaluating).unwrap().0;
        assert_eq!(bits(&got), want, "stage {stage}, graphs {graphs}");
        let own = losses(&got);
        assert_eq!(
            &own,
            first.get_or_insert_with(|| own.clone()),
            "stage {stage}, graphs {graphs}"
        );
        for (got, want) in own.iter().zip(&host) {
            is_near(*got, *want, 1e-5, &format!("stage {stage}: loss"));
        }
    }
}

/// Six blocks: the inputs of four are on the host.
#[test]
#[ignore = "needs a CUDA device"]
fn offloaded_activations_change_no_bit() {
    for (stage, dtype) in [(1, DType::F32), (3, DType::Bf16)] {
        let [kept, offloaded] = [false, true].map(|offload_activations| {
            let two_steps = options(2, None, None);
            let mut workload = workload(dtype, &two_steps);
            let ModelConfig::Gpt2(config) = &mut workload.config else {
                panic!("the folder has a GPT-2");
            };
            config.n_layer = 6;
            workload.weights = Weights::Initial(3);
            workload.options = ModelOptions {
                activation_checkpointing: true,
                offload_activations,
                ..workload.options
            };
            let settings = settings(stage, dtype);
            let (steps, summary) = run_workload(&settings, &workload, &two_steps).unwrap();
            let copies = summary
                .last_spans
                .iter()
                .filter(|s| s.label == "copy" && s.stream.ends_with("activations"));
            // Four copies each way in each of two micro-batches.
            assert_eq!(
                copies.count(),
                if offload_activations { 16 } else { 0 },
                "stage {stage}"
            );
            let activations = steps.last().unwrap().memory.activations_bytes;
            assert_eq!(PinnedMemory::new(&device()).notices(), Vec::<String>::new());
            (bits(&steps), activations)
        });
        assert_eq!(kept.0, offloaded.0, "stage {stage}");
        let row = (SMALL[0] * SMALL[1] * 64) as u64 * dtype.size_bytes() as u64;
        assert_eq!(kept.1 - offloaded.1, 4 * row, "stage {stage}");
    }
}

/// The bits of the weights in the newest checkpoint.
fn weights(dir: &Path) -> Vec<u32> {
    let reader = Reader::open(dir).unwrap();
    let mut bits = Vec::new();
    for param in reader.params() {
        let mut values = vec![f32::NAN; param.numel_elems as usize];
        reader
            .read_param("master", &param.name, 0..param.numel_elems, &mut values)
            .unwrap();
        bits.extend(values.into_iter().map(f32::to_bits));
    }
    bits
}

/// Remainders on the device have the bits of those that the host updates, two bytes a parameter
/// less than fp32 masters, and a checkpoint that resumes with fp32 masters.
#[test]
#[ignore = "needs a CUDA device"]
fn remainders_have_the_bits_of_the_hosts() {
    let format = StateFormat::default().masters(Masters::Remainder);

    for (stage, graphs) in [(0, true), (3, false)] {
        let run = |optimizer, format, steps, graphs, saved: &Path, resume| {
            let offload = OffloadSettings {
                optimizer,
                format,
                ..OffloadSettings::default()
            };
            let settings = Settings {
                offload,
                graphs,
                ..settings(stage, DType::Bf16)
            };
            run(&settings, &options(steps, Some(saved), resume)).unwrap()
        };
        let [device, host, plain] = [(); 3].map(|()| tempfile::tempdir().unwrap());
        let (got, summary) = run(Home::Device, format, 4, graphs, device.path(), None);
        let (want, _) = run(Home::Host, format, 4, false, host.path(), None);
        assert_eq!(bits(&got), bits(&want), "stage {stage}");
        assert!(
            weights(device.path()) == weights(host.path()),
            "stage {stage}: masters"
        );
        let held = summary.last.unwrap().memory;
        assert_eq!(
            held.optimizer_bytes,
            5 * held.params_bytes,
            "stage {stage}: 10 bytes of state, 2 of parameters"
        );
        let masters = weights(device.path());
        let (rest, summary) = run(
            Home::Device,
            StateFormat::default(),
            5,
            false,
            plain.path(),
            Some(device.path()),
        );
        assert_eq!(
            (rest.len(), summary.resumed_at, masters.is_empty()),
            (1, 4, false)
        );
    }
}

/// Each kind of offload has the bits of the run that offloads nothing, with its gradients and
/// parameters in pinned memory or in files.
#[test]
#[ignore = "needs a CUDA device"]
fn offload_changes_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let nvme = || Home::Nvme(dir.path().to_owned());
    for (dtype, grad_accum_steps) in [(DType::Bf16, 2), (DType::F32, 1)] {
        let plain = Settings {
            grad_accum_steps,
            ..settings(2, dtype)
        };
        let (expected, _) = run(&plain, &options(3, None, None)).unwrap();
        for (stage, optimizer, params) in [
            (0, Home::Host, Home::Device),
            (1, nvme(), Home::Device),
            (2, Home::Host, Home::Device),
            (3, Home::Host, Home::Device),
            (3, Home::Host, Home::Host),
            (3, nvme(), nvme()),
        ] {
            let what =
                format!("{dtype}, stage {stage}, optimizer {optimizer}, parameters {params}");
            let offload = OffloadSettings {
                optimizer,
                params,
                ..OffloadSettings::default()
            };
            let stage = ZeroStage::from_number(stage).unwrap();
            let settings = Settings {
                stage,
                offload,
                ..plain.clone()
            };
            let (steps, summary) = run(&settings, &options(3, None, None)).unwrap();
            assert_eq!(bits(&steps), bits(&expected), "{what}");
            let memory = summary.last.unwrap().memory;
            assert_eq!(
                (memory.optimizer_bytes, memory.grads_bytes),
                (0, 0),
                "{what}: on the device"
            );
        }
    }
}

/// Muon's matrices are orthogonalised on the device, with the same bits at every stage and where
/// the state is on the host; the host's fp32 products are as near as 15 products in bf16 allow.
#[test]
#[ignore = "needs a CUDA device"]
fn muon_has_equal_bits_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    let with_muon = |stage, dtype, optimizer| {
        let plain = settings(stage, dtype);
        Settings {
            muon: MuonSettings {
                by_default: true,
                lr: Some(0.02),
                ..MuonSettings::new(zero_models::matrices_of)
            },
            offload: OffloadSettings {
                optimizer,
                ..OffloadSettings::default()
            },
            ..plain
        }
    };
    let options = options(4, None, None);
    let nvme = || Home::Nvme(dir.path().to_owned());
    for dtype in [DType::F32, DType::Bf16] {
        let (expected, summary) = run(&with_muon(0, dtype, Home::Device), &options).unwrap();
        memory_stays(&summary, "Muon");
        for (stage, home) in [
            (1, Home::Device),
            (2, Home::Host),
            (3, Home::Device),
            (3, nvme()),
        ] {
            let what = format!("{dtype}, stage {stage}, optimizer {home}");
            let (steps, _) = run(&with_muon(stage, dtype, home), &options).unwrap();
            assert_eq!(bits(&steps), bits(&expected), "{what}");
        }
        let muon = with_muon(0, dtype, Home::Device);
        let host = workload_on_host(&muon, &workload(dtype, &options), &options);
        close(&expected, &host, 2e-3, "Muon");
    }
}
