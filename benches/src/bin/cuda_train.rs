//! The trainer's speed and memory on one GPU, to compare with the PyTorch figures in README.md.
//!
//! `cuda_train MODEL BATCH SEQ STAGE STEPS [fp32|bf16] [graph] [ops] [offload] [remainder] [recompute-gelu]`
//! trains a preset from random weights on random tokens on one rank, and prints a line of JSON: the
//! median milliseconds of the steps after the fifth, tokens per second, and the pool's peak bytes.
//! With `ops` it also prints the last step's time per operation; recording costs time, so published
//! figures come from runs without it. With `graph` steps are replayed from a graph (stages 0 to 2).
//! `remainder` and `recompute-gelu` are `--masters remainder` and `--recompute-gelu` of
//! `zero train`; without the latter a second run with it follows, unless operations are listed.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use zero::workload::{ModelWorkload, Weights};
use zero_alloc::cuda::CudaDevice;
use zero_alloc::device::DType;
use zero_comm::Solo;
use zero_data::{DataSource, Dataset};
use zero_models::cuda::matmul::CublasLtProducts;
use zero_models::lora::{ALL_LINEAR, LoraConfig};
use zero_models::{ModelConfig, ModelOptions};
use zero_optim::{Masters, OptimizerConfig, StateFormat};
use zero_shard::ZeroStage;
use zero_trainer::{
    CudaOptions, Home, MuonSettings, OffloadSettings, RankSummary, RunOptions, Settings,
    StepMetrics, run_on_cuda,
};

type AnyError = Box<dyn std::error::Error>;

const USAGE: &str = "usage: cuda_train MODEL BATCH SEQ STAGE STEPS [fp32|bf16] [graph] [ops] [offload] [remainder] \
     [recompute-gelu] [muon | lora]";
/// Warm-up steps, which do not count.
const WARM_STEPS: usize = 5;

fn main() -> Result<(), AnyError> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, batch, seq, stage, steps, flags @ ..] = args.as_slice() else {
        return Err(USAGE.into());
    };
    let batch = batch.parse::<usize>()?;
    let seq = seq.parse::<usize>()?;
    let steps = steps.parse::<u64>()?;
    let dtype = if flags.iter().any(|f| f == "fp32") {
        DType::F32
    } else {
        DType::Bf16
    };

    let ops = flags.iter().any(|f| f == "ops");
    let stage = ZeroStage::from_number(stage.parse()?).ok_or("stages are 0 to 3")?;
    let optimizer = if flags.iter().any(|f| f == "offload") {
        Home::Host
    } else {
        Home::Device
    };

    let masters = match flags.iter().any(|f| f == "remainder") {
        true => Masters::Remainder,
        false => Masters::Fp32,
    };
    let format = StateFormat::default().masters(masters);

    let has = |flag: &str| flags.iter().any(|f| f == flag);
    let lora = LoraConfig {
        r: 16,
        alpha: 32.0,
        dropout: 0.0,
        rslora: false,
        targets: vec![ALL_LINEAR.to_owned()],
    };
    let config = ModelConfig::preset(model)?.with_lora(has("lora").then_some(lora))?;
    let settings = Settings {
        adapters: has("lora").then(|| config.adapter_units()),
        muon: MuonSettings {
            by_default: has("muon"),
            ..MuonSettings::new(zero_models::matrices_of)
        },
        bucket_capacity_elems: 1 << 25,
        optimizer: OptimizerConfig::default().max_grad_norm(1.0),
        graphs: flags.iter().any(|f| f == "graph"),
        offload: OffloadSettings {
            optimizer,
            format,
            ..OffloadSettings::default()
        },
        limit: Duration::from_secs(120),
        ..Settings::new(stage, dtype, zero_models::param_kind)
    };

    let options = RunOptions {
        steps,
        micro_batch: batch,
        seq_len: seq,
        seed: 1,
        checkpoint: None,
        keep_last: None,
        validation: None,
        resume: None,
        cancel: Arc::default(),
        signal: Arc::default(),
        ..RunOptions::default()
    };

    let folder = tempfile::tempdir()?;
    let tokens = folder.path().join("tokens.bin");
    write_tokens(
        &tokens,
        config.vocab_size(),
        (steps as usize * batch + 1) * seq + 1,
    )?;

    let mut workload = ModelWorkload {
        config,
        weights: Weights::Initial(1),
        data: Dataset::open(&DataSource::at(tokens))?.into(),
        options: ModelOptions {
            matmul_timing: true,
            recompute_gelu: flags.iter().any(|f| f == "recompute-gelu"),
            ..ModelOptions::new(batch, seq, dtype)
        },
        threads: 1,
        adapters: None,
        adapter_seed: 0,
    };

    let device = CudaDevice::open(0)?;
    let comm = Arc::new(Solo::new(device.clone()));
    let run = |workload: &ModelWorkload| -> Result<RankSummary, AnyError> {
        let mut seen: Vec<StepMetrics> = Vec::new();
        let mut observe = |metrics: &StepMetrics| {
            seen.push(metrics.clone());
            Ok(())
        };
        let summary = run_on_cuda(
            &device,
            comm.clone(),
            CudaOptions {
                record: ops,
                products: CublasLtProducts::load,
            },
            &settings,
            workload,
            &options,
            &mut observe,
        )?;
        let mut times: Vec<f64> = seen.iter().skip(WARM_STEPS).map(|m| m.step_ms).collect();
        times.sort_by(f64::total_cmp);
        let (Some(step_ms), Some(last)) = (times.get(times.len() / 2), seen.last()) else {
            return Err(format!("{steps} steps; give more than {WARM_STEPS}").into());
        };
        let line = serde_json::json!({
            "device": device.name(), "model": model, "batch": batch, "seq": seq, "stage": stage.number(),
            "dtype": dtype.name(), "recompute_gelu": workload.options.recompute_gelu, "step_ms": step_ms,
            "tokens_per_s": (batch * seq) as f64 / step_ms * 1e3, "peak_bytes": last.memory.peak_bytes,
            "loss": last.loss, "recorded": ops, "muon": has("muon"), "lora": has("lora"),
        });
        println!("{line}");
        Ok(summary)
    };

    let summary = run(&workload)?;
    if ops {
        print_ops(&summary);
    } else if !workload.options.recompute_gelu {
        workload.options.recompute_gelu = true;
        run(&workload)?;
    }

    Ok(())
}

/// Writes pseudorandom tokens as little-endian u16.
fn write_tokens(path: &Path, vocab: usize, count: usize) -> std::io::Result<()> {
    let token = |i: usize| ((i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33) % vocab as u64;
    let bytes: Vec<u8> = (0..count)
        .flat_map(|i| (token(i) as u16).to_le_bytes())
        .collect();
    std::fs::write(path, bytes)
}

/// Prints the last step's operations per stream, the longest first.
fn print_ops(summary: &RankSummary) {
    let mut by_op: BTreeMap<(&str, &str), (usize, Duration)> = BTreeMap::new();
    for span in &summary.last_spans {
        let (count, total) = by_op.entry((&span.stream, span.label)).or_default();
        *count += 1;
        *total += span.end.saturating_sub(span.start);
    }
    let mut rows: Vec<_> = by_op.into_iter().collect();
    rows.sort_by_key(|(_, (_, total))| std::cmp::Reverse(*total));
    for ((stream, op), (count, total)) in rows {
        println!(
            "{:10.3} ms {count:5} x {op} ({stream})",
            total.as_secs_f64() * 1e3
        );
    }
}
