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
use zero_models::ops::bf16::Bf16Products;
use zero_models::ops::{Threads, ThreadsError, linear};
use zero_trainer::StepMetrics;

/// The time for measuring the host, once before the first step and once after the last one.
const MEASURED: Duration = Duration::from_millis(100);
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
    peak: Peak,
}

/// The rate that the machine of a run could reach, in FLOPs per second of all devices.
#[derive(Clone, Debug, PartialEq)]
enum Peak {
    /// The best of all tries on the host, on this many threads.
    Measured {
        flops: f64,
        threads: usize,
        /// Those of products in bf16; `None` for products in fp32.
        products: Option<Bf16Products>,
    },
    /// The sum of the devices' data sheets; `devices` names them and the type.
    DataSheet { flops: f64, devices: String },
    /// The device that this program has no peak for, and the type.
    Unknown { device: String },
}

impl Peak {
    fn flops(&self) -> Option<f64> {
        match self {
            Self::Measured { flops, .. } | Self::DataSheet { flops, .. } => Some(*flops),
            Self::Unknown { .. } => None,
        }
    }

    /// The origin of the peak, or why it is not known.
    fn source(&self) -> String {
        match self {
            Self::Measured {
                threads, products, ..
            } => {
                let dtype = products.map_or(DType::F32, |_| DType::Bf16);
                format!(
                    "the rate of {dtype} matrix products here on {threads} threads, the best before the first step and \
                     after the last one"
                )
            }
            Self::DataSheet { devices, .. } => format!("the dense {devices}"),
            Self::Unknown { device } => format!("the {device} is not known to this program"),
        }
    }

    /// How a run can be faster than its peak.
    fn why_exceeded(&self) -> &'static str {
        match self {
            Self::Measured { .. } => {
                "the machine was slower while its rate was measured than while it trained, most likely because another \
                 program ran"
            }
            _ => "the device is faster than the data sheet that its name was found in",
        }
    }

    /// The peak with another measurement of the host: the better of both.
    fn with_rate(self, rate: f64) -> Self {
        match self {
            Self::Measured {
                flops,
                threads,
                products,
            } => Self::Measured {
                flops: flops.max(rate),
                threads,
                products,
            },
            other => other,
        }
    }
}

impl Utilization {
    /// For the run of `setup`; measures matrix products on the host, which takes a tenth of a
    /// second.
    pub(crate) fn new(setup: &RunSetup) -> Result<Self, CliError> {
        let config = &setup.workload.config;
        let flops_per_token = config.flops_per_token(setup.options.seq_len);

        let peak = match setup.device.as_ref().map(|gpu| &gpu.name) {
            None => {
                let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
                let threads = (setup.ranks * setup.workload.threads).min(cores);
                let products = Bf16Products::of_run(setup.settings.dtype);
                let flops = measure(threads, products).map_err(CliError::failure)?;
                Peak::Measured {
                    flops,
                    threads,
                    products,
                }
            }
            Some(name) => {
                let dtype = setup.settings.dtype;
                match data_sheet(name, dtype) {
                    Some(peak) => Peak::DataSheet {
                        flops: peak * 1e12 * setup.ranks as f64,
                        devices: format!("{dtype} peak of {} x {name}", setup.ranks),
                    },
                    None => Peak::Unknown {
                        device: format!("{dtype} peak of {name}"),
                    },
                }
            }
        };

        Ok(Self {
            flops_per_token,
            peak,
        })
    }

    /// Measures the host again, after the last step: another program may have run the first time.
    /// The better rate counts. If no threads can be started now, the first rate remains.
    pub(crate) fn measure_again(&mut self) {
        let Peak::Measured {
            threads, products, ..
        } = self.peak
        else {
            return;
        };
        if let Ok(rate) = measure(threads, products) {
            self.peak = self.peak.clone().with_rate(rate);
        }
    }

    /// Completes the breakdown of a step.
    pub(crate) fn complete(&self, metrics: &mut StepMetrics) {
        let rate = self.flops_per_token * metrics.tokens_per_s;
        if let Some(breakdown) = &mut metrics.breakdown {
            breakdown.tflops = rate / 1e12;
            breakdown.mfu = self.peak.flops().map(|peak| rate / peak);
        }
    }

    /// The utilization at a rate of `tokens_per_s`, if the peak is known.
    pub(crate) fn mfu(&self, tokens_per_s: f64) -> Option<f64> {
        self.peak
            .flops()
            .map(|peak| self.flops_per_token * tokens_per_s / peak)
    }

    /// For `summary.json`.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "flops_per_token": self.flops_per_token,
            "formula": "6 N + 12 L C T",
            "peak_flops": self.peak.flops(),
            "peak_source": self.peak.source(),
        })
    }

    /// Describes a rate of `tflops`. If it is above the peak, the text says how that can be.
    pub(crate) fn describe(&self, tflops: f64) -> String {
        let per_token = format!(
            "{} a token: 6 N + 12 L C T",
            si(self.flops_per_token, "FLOP")
        );
        let rate = format!("model FLOPs: {} ({per_token})", si(tflops * 1e12, "FLOP/s"));
        let source = self.peak.source();
        let Some(peak) = self.peak.flops() else {
            return format!("{rate}; {source}");
        };

        let mfu = tflops * 1e12 / peak;
        let mut text = format!(
            "{rate}\nutilization (MFU): {:.1}% of {}, {source}",
            mfu * 100.0,
            si(peak, "FLOP/s")
        );
        if mfu > 1.0 {
            text += &format!("\nabove 100%: {}", self.peak.why_exceeded());
        }
        text
    }

    /// A note on the utilizations that were written step by step, of which `highest` is the
    /// highest, if that is above 100%. They are relative to the rate before the first step.
    pub(crate) fn note(&self, highest: f64) -> Option<String> {
        let peak = self.peak.flops()?;
        (highest > 1.0).then(|| {
            format!(
                "note: the mfu of single steps in the files is up to {:.1}%: {}; the best rate known now is {}",
                highest * 100.0,
                self.peak.why_exceeded(),
                si(peak, "FLOP/s")
            )
        })
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

/// The best rate of matrix products of a run on `threads` threads, in FLOPs per second.
fn measure(threads: usize, products: Option<Bf16Products>) -> Result<f64, ThreadsError> {
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
        pool.run(|| linear::product(&mut y, &x, &w, SIDE, products));
        best = best.min(before.elapsed().as_secs_f64());
    }
    Ok(2.0 * (threads * SIDE * SIDE * SIDE) as f64 / best.max(1e-9))
}

#[cfg(test)]
mod tests {
    use integration_tests::Printed;

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
        for products in [None, Bf16Products::of_cpu()] {
            assert!(measure(1, products).unwrap() > 1e6);
        }
    }

    fn measured(flops: f64) -> Peak {
        Peak::Measured {
            flops,
            threads: 2,
            products: None,
        }
    }

    /// A run of 1 GFLOP a token on a host of `flops`.
    fn on_host(flops: f64) -> Utilization {
        Utilization {
            flops_per_token: 1e9,
            peak: measured(flops),
        }
    }

    #[test]
    fn better_measurement_counts() {
        assert_eq!(measured(1e12).with_rate(2e12), measured(2e12));
        assert_eq!(measured(2e12).with_rate(1e12), measured(2e12));

        let sheet = Peak::DataSheet {
            flops: 1e15,
            devices: "bf16 peak of 1 x H100".to_owned(),
        };
        assert_eq!(sheet.clone().with_rate(2e15), sheet);
    }

    #[test]
    fn second_measurement_lowers_no_rate() {
        let mut fast = on_host(1e30);
        fast.measure_again();
        assert_eq!(fast.peak.flops(), Some(1e30));
        let mut slow = on_host(1.0);
        slow.measure_again();
        assert!(slow.peak.flops().unwrap() > 1e6);
    }

    #[test]
    fn utilization_above_one_is_explained() {
        let host = on_host(1e12);
        let usual = host.describe(0.9);
        usual.shows(&["utilization (MFU): 90.0% of 1.00 TFLOP/s"]);
        usual.omits(&["above"]);
        assert!(!host.describe(1.0).contains("above"));

        let above = host.describe(1.83);
        let (line, why) = above.rsplit_once('\n').unwrap();
        line.shows(&["183.0% of 1.00 TFLOP/s"]);
        assert!(
            why.starts_with("above 100%: ") && why.contains("another program ran"),
            "{why}"
        );

        let card = Utilization {
            flops_per_token: 1e9,
            peak: Peak::DataSheet {
                flops: 1e12,
                devices: "bf16 peak of 1 x T5".to_owned(),
            },
        };
        let above = card.describe(1.83);
        above.shows(&["of 1.00 TFLOP/s, the dense bf16 peak of 1 x T5\nabove 100%: the device"]);
    }

    #[test]
    fn unknown_peak_has_no_utilization() {
        let unknown = Utilization {
            flops_per_token: 1e9,
            peak: Peak::Unknown {
                device: "bf16 peak of a card of the future".to_owned(),
            },
        };
        assert_eq!((unknown.mfu(1e9), unknown.note(2.0)), (None, None));
        let text = unknown.describe(1.0);
        assert!(
            text.ends_with("; the bf16 peak of a card of the future is not known to this program"),
            "{text}"
        );
    }

    #[test]
    fn written_utilization_above_one_is_noted() {
        let host = on_host(2e12);
        assert_eq!(host.note(1.0), None);
        let note = host.note(1.83).unwrap();
        note.shows(&["up to 183.0%", "another program ran", "2.00 TFLOP/s"]);
    }

    #[test]
    fn rates_have_prefixes() {
        assert_eq!(si(1.25e12, "FLOP/s"), "1.25 TFLOP/s");
        assert_eq!(si(3.0, "FLOP/s"), "3.00 FLOP/s");
    }
}
