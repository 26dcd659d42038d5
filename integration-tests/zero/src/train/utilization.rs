//! Model FLOPs utilization: the rate of a run beside what its machine could do.
//!
//! A token costs `6 N + 12 L C T` FLOPs (PaLM, arXiv 2204.02311, appendix B; nanoGPT counts the
//! same): N parameters that are factors of matrix products, L blocks of width C, T tokens a
//! sequence. Recomputed activations do not count. N excludes the position embedding, and the token
//! embedding if the head is not tied to it.

use std::num::NonZero;
use std::time::{Duration, Instant};

use zero_alloc::device::DType;

use super::setup::RunSetup;
use crate::error::CliError;
use zero_models::ops::{Threads, ThreadsError, linear};
use zero_trainer::StepMetrics;

/// The time for measuring the host.
const MEASURED: Duration = Duration::from_millis(200);
/// Rows and columns of the measured product: three matrices fit a core's cache.
const SIDE: usize = 256;

/// Dense peaks in TFLOP/s from NVIDIA's data sheets, by a part of the device's name: bf16, fp16 and
/// fp32 without TF32. 0 if the card has no units for the type. The first match counts.
const GPUS: [(&str, [f64; 3]); 13] = [
    ("B200", [2250.0, 2250.0, 75.0]),
    ("H200 NVL", [835.5, 835.5, 60.0]),
    ("H200", [989.4, 989.4, 66.9]),
    ("GH200", [989.4, 989.4, 66.9]),
    ("H100 PCIe", [756.0, 756.0, 51.2]),
    ("H100 NVL", [835.5, 835.5, 60.0]),
    ("H100", [989.4, 989.4, 66.9]),
    ("A100", [312.0, 312.0, 19.5]),
    ("L40S", [362.1, 362.1, 91.6]),
    ("L4", [121.0, 121.0, 30.3]),
    ("T4", [0.0, 65.0, 8.1]),
    ("V100-PCIE", [0.0, 112.0, 14.0]),
    ("V100", [0.0, 125.0, 15.7]),
];

/// The FLOPs of a run and the rate that its machine could reach.
pub(crate) struct Utilization {
    flops_per_token: f64,
    /// FLOPs per second of all devices, if known.
    peak: Option<f64>,
    /// The origin of the peak, or why it is not known.
    source: String,
}

impl Utilization {
    /// For the run of `setup`; measures matrix products on the host, which takes a fifth of a
    /// second.
    pub(crate) fn new(setup: &RunSetup) -> Result<Self, CliError> {
        let config = &setup.workload.config;
        let flops_per_token = config.flops_per_token(setup.options.seq_len);
        let (peak, source) = match setup.device.as_ref().map(|gpu| &gpu.name) {
            None => {
                let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
                let threads = (setup.ranks * setup.workload.threads).min(cores);
                let peak = measure(threads).map_err(CliError::failure)?;
                (
                    Some(peak),
                    format!(
                        "the rate of fp32 matrix products here on {threads} threads, measured at the start"
                    ),
                )
            }
            Some(name) => {
                let dtype = setup.settings.dtype;
                match data_sheet(name, dtype) {
                    Some(peak) => (
                        Some(peak * 1e12 * setup.ranks as f64),
                        format!("the dense {dtype} peak of {} x {name}", setup.ranks),
                    ),
                    None => (
                        None,
                        format!("the {dtype} peak of {name} is not known to this program"),
                    ),
                }
            }
        };

        Ok(Self {
            flops_per_token,
            peak,
            source,
        })
    }

    /// Completes the breakdown of a step.
    pub(crate) fn complete(&self, metrics: &mut StepMetrics) {
        let rate = self.flops_per_token * metrics.tokens_per_s;
        if let Some(breakdown) = &mut metrics.breakdown {
            breakdown.tflops = rate / 1e12;
            breakdown.mfu = self.peak.map(|peak| rate / peak);
        }
    }

    /// The utilization at a rate of `tokens_per_s`, if the peak is known.
    pub(crate) fn mfu(&self, tokens_per_s: f64) -> Option<f64> {
        self.peak
            .map(|peak| self.flops_per_token * tokens_per_s / peak)
    }

    /// For `summary.json`.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "flops_per_token": self.flops_per_token,
            "formula": "6 N + 12 L C T",
            "peak_flops": self.peak,
            "peak_source": self.source,
        })
    }

    /// Describes a rate of `tflops` in one line.
    pub(crate) fn describe(&self, tflops: f64) -> String {
        let Self {
            flops_per_token,
            peak,
            source,
        } = self;
        let per_token = format!("{} a token: 6 N + 12 L C T", si(*flops_per_token, "FLOP"));
        match peak {
            Some(peak) => format!(
                "model FLOPs: {} ({per_token})\nutilization (MFU): {:.1}% of {}, {source}",
                si(tflops * 1e12, "FLOP/s"),
                tflops * 1e14 / peak,
                si(*peak, "FLOP/s")
            ),
            None => format!(
                "model FLOPs: {} ({per_token}); {source}",
                si(tflops * 1e12, "FLOP/s")
            ),
        }
    }
}

/// A number with a decimal prefix: `1.25 TFLOP/s`.
fn si(value: f64, unit: &str) -> String {
    let prefixes = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let (scale, prefix) = prefixes
        .into_iter()
        .find(|(scale, _)| value >= *scale)
        .unwrap_or((1.0, ""));
    format!("{:.2} {prefix}{unit}", value / scale)
}

/// The dense peak of a GPU in TFLOP/s.
fn data_sheet(name: &str, dtype: DType) -> Option<f64> {
    let (_, peaks) = GPUS.iter().find(|(part, _)| name.contains(part))?;
    let peak = match dtype {
        DType::Bf16 => peaks[0],
        DType::F16 => peaks[1],
        DType::F32 => peaks[2],
        _ => 0.0,
    };
    (peak > 0.0).then_some(peak)
}

/// The best rate of fp32 matrix products on `threads` threads, in FLOPs per second.
fn measure(threads: usize) -> Result<f64, ThreadsError> {
    let pool = Threads::new(threads)?;
    // Each thread multiplies SIDE rows of x.
    let (x, w) = (
        vec![1.0f32; threads * SIDE * SIDE],
        vec![1.0f32; SIDE * SIDE],
    );
    let mut y = vec![0.0f32; threads * SIDE * SIDE];
    let (started, mut best) = (Instant::now(), f64::INFINITY);
    while started.elapsed() < MEASURED {
        let before = Instant::now();
        pool.run(|| linear::product(&mut y, &x, &w, SIDE));
        best = best.min(before.elapsed().as_secs_f64());
    }
    Ok(2.0 * (threads * SIDE * SIDE * SIDE) as f64 / best.max(1e-9))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_found_by_name() {
        assert_eq!(
            data_sheet("NVIDIA H100 80GB HBM3", DType::Bf16),
            Some(989.4)
        );
        assert_eq!(data_sheet("NVIDIA H100 PCIe", DType::F32), Some(51.2));
        assert_eq!(data_sheet("NVIDIA A100-SXM4-80GB", DType::F16), Some(312.0));
        assert_eq!(data_sheet("NVIDIA L40S", DType::Bf16), Some(362.1));
        assert_eq!(data_sheet("Tesla V100-SXM2-16GB", DType::Bf16), None);
        assert_eq!(data_sheet("a card of the future", DType::Bf16), None);
    }

    #[test]
    fn host_rate_is_measured() {
        assert!(measure(1).unwrap() > 1e6);
    }

    #[test]
    fn rates_have_prefixes() {
        assert_eq!(si(1.25e12, "FLOP/s"), "1.25 TFLOP/s");
        assert_eq!(si(3.0, "FLOP/s"), "3.00 FLOP/s");
    }
}
