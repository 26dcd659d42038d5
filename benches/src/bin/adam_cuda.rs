//! Times AdamW on a GPU beside a device-to-device copy of the same number of bytes, in one run.
//!
//! ```text
//! cargo run --release -p benches --bin adam_cuda [-- ELEMS...]      prints a table; by default 1M to 1B parameters
//! cargo run --release -p benches --bin adam_cuda -- --serve         for benches/peers/adam_cuda.py
//! ```
//!
//! Gradients and parameters are bf16, masters and moments fp32: 28 bytes per parameter; 26 with
//! 16-bit remainders in place of masters. Each figure is a median over rounds. In a round the
//! subjects run in turn, each repeated for a tenth of a second, and the host waits only at the end.
//! `--serve` reads lines `KIND ELEMS` and prints milliseconds per step for each, measured once.

use std::io::{BufRead, Write};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::bf16;
use zero_alloc::cuda::{CudaDevice, CudaStream, Graph};
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, DeviceSlice, Memory, Stream};
use zero_kernels::cuda::CudaKernels;
use zero_kernels::step::{StepConfig, StepRates, StepRecord, StepState};
use zero_kernels::{
    AdamHyper, AdamScalars, AdvanceArgs, Float, GradStats, Kernels, RankStats, Rounding,
    StepScalars, UpdateArgs, UpdateRule, Weights,
};

type AnyError = Box<dyn std::error::Error>;

const LIMIT: Duration = Duration::from_secs(120);
const HYPER: AdamHyper = AdamHyper {
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.01,
    decoupled: true,
    bias_correction: true,
};
/// Master and moments read and written, gradient read, parameter written.
const ADAM_BYTES: usize = 28;
/// The norm reads the gradient a second time.
const STEP_BYTES: usize = 30;
/// The same without masters: parameter and remainder read and written.
const REMAINDER_BYTES: usize = 28;
/// Length of the table of learning rates.
const RATES: usize = 1 << 20;
const ROUNDS: usize = 9;

/// Device memory, freed on drop.
struct Buffer {
    device: CudaDevice,
    ptr: NonNull<u8>,
    bytes: usize,
}

impl Buffer {
    fn new(device: &CudaDevice, bytes: usize) -> Result<Self, DeviceError> {
        Ok(Self {
            device: device.clone(),
            ptr: device.allocate(bytes)?,
            bytes,
        })
    }

    fn all(&self) -> AnySlice {
        // SAFETY: the buffer's own memory, used on one stream, which is drained before the buffer
        // is dropped.
        unsafe {
            AnySlice::from_raw_parts(self.ptr.as_ptr(), self.bytes, DType::U8, self.device.id())
        }
    }

    fn typed<T>(&self, len: usize) -> DeviceSlice<T> {
        assert!(len * size_of::<T>() <= self.bytes);
        // SAFETY: as for `all`; the driver aligns to 256 bytes.
        unsafe { DeviceSlice::from_raw_parts(self.ptr.as_ptr().cast(), len, self.device.id()) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this size; every measurement ends with a drained stream.
        unsafe { self.device.deallocate(self.ptr, self.bytes) };
    }
}

/// A timed subject.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// A copy with the traffic of Adam.
    Copy,
    /// The fused update alone.
    Adam,
    /// Norm and check, rank statistics, step scalars, update.
    Step,
    /// `Step`, recorded into a graph once and replayed.
    Graph,
    /// `Step` with remainders in place of masters.
    Remainder,
}

impl Kind {
    const ALL: [Self; 5] = [
        Self::Copy,
        Self::Adam,
        Self::Step,
        Self::Graph,
        Self::Remainder,
    ];

    fn named(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|kind| format!("{kind:?}").eq_ignore_ascii_case(name))
    }
}

/// One shard and the buffers of its steps.
struct Shard {
    device: CudaDevice,
    stream: CudaStream,
    kernels: CudaKernels,
    elems: usize,
    master: Buffer,
    first_moment: Buffer,
    second_moment: Buffer,
    grad: Buffer,
    param: Buffer,
    remainder: Buffer,
    scratch: Buffer,
    /// Gradient statistics, loss, rank statistics, config, state, scalars, record and flags, 256
    /// bytes each.
    control: Buffer,
    rates: Buffer,
    graph: Option<Graph>,
    copy: Option<[Buffer; 2]>,
}

impl Shard {
    fn new(
        device: &CudaDevice,
        stream: &CudaStream,
        kernels: &CudaKernels,
        elems: usize,
    ) -> Result<Self, AnyError> {
        let buffer = |bytes: usize| Buffer::new(device, bytes.max(1));
        let scratch = kernels.stats_scratch_elems(&[elems]) * 8;
        let shard = Self {
            device: device.clone(),
            stream: stream.clone(),
            kernels: kernels.clone(),
            elems,
            master: buffer(4 * elems)?,
            first_moment: buffer(4 * elems)?,
            second_moment: buffer(4 * elems)?,
            grad: buffer(2 * elems)?,
            param: buffer(2 * elems)?,
            remainder: buffer(2 * elems)?,
            scratch: buffer(scratch)?,
            control: buffer(8 * 256)?,
            rates: buffer(size_of::<StepRates>() * RATES)?,
            graph: None,
            copy: None,
        };

        shard.fill(&shard.master, |x| x)?;
        shard.fill(&shard.first_moment, |x| x * 1e-3)?;
        shard.fill(&shard.second_moment, |x| x * x * 1e-6)?;
        shard.fill(&shard.grad, |x| bf16::from_f32(x * 1e-3))?;
        shard.fill(&shard.param, bf16::from_f32)?;
        // The bits of any 16-bit type will do.
        shard.fill(&shard.remainder, bf16::from_f32)?;
        shard.reset()?;

        Ok(shard)
    }

    /// Fills a buffer with 2^20 pseudorandom values, repeated.
    fn fill<T: Float>(&self, buffer: &Buffer, value: impl Fn(f32) -> T) -> Result<(), AnyError> {
        let mut x = 1u32;
        let mut next = || {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            value((x >> 8) as f32 / (1 << 23) as f32 - 1.0)
        };

        let block: Vec<T> = (0..self.elems.min(1 << 20)).map(|_| next()).collect();
        let bytes: &[u8] = bytemuck::cast_slice(&block);
        let all = buffer.all();
        let mut done = bytes.len();
        self.device
            .upload(&self.stream, bytes, all.slice(0..done), LIMIT)?;
        let whole = self.elems * size_of::<T>();

        while done < whole {
            let next = done.min(whole - done);
            self.device.copy(
                &self.stream,
                all.slice(0..next),
                all.slice(done..done + next),
            )?;
            done += next;
        }

        Ok(())
    }

    /// The `nth` value of the control block.
    fn control<T>(&self, nth: usize) -> DeviceSlice<T> {
        let place = self
            .control
            .all()
            .slice(nth * 256..nth * 256 + size_of::<T>());
        // SAFETY: the shard's own memory, aligned to 256 bytes.
        unsafe { DeviceSlice::from_raw_parts(place.as_ptr().cast(), 1, place.device()) }
    }

    /// Uploads the state before the first step.
    fn reset(&self) -> Result<(), AnyError> {
        let config = StepConfig {
            max_grad_norm: 1.0,
            min_scale: 1.0,
            window: 1000,
            micro_batches: 1,
            first_position: 0,
            dynamic: 0,
            hysteresis: 1,
            consecutive_hysteresis: 0,
            fail_at_min: 1,
            divisor: 0.0,
        };

        let state = StepState::new(1.0, 1);
        let scalars = StepScalars::from(AdamScalars::new(1, 1e-4, &HYPER, 1.0));
        let mut image = vec![0u8; 8 * 256];
        let values = [
            bytemuck::bytes_of(&config),
            bytemuck::bytes_of(&state),
            bytemuck::bytes_of(&scalars),
        ];
        for (value, nth) in values.into_iter().zip([3, 4, 5]) {
            image[nth * 256..][..value.len()].copy_from_slice(value);
        }
        self.device
            .upload(&self.stream, &image, self.control.all(), LIMIT)?;

        let rates = vec![
            StepRates {
                lr: 1e-4,
                of_rule: scalars.of_rule,
            };
            RATES
        ];

        self.device.upload(
            &self.stream,
            bytemuck::cast_slice(&rates),
            self.rates.all(),
            LIMIT,
        )?;

        Ok(())
    }

    fn adam(&self) -> Result<(), AnyError> {
        self.update(Weights::Fp32 {
            master: self.master.typed(self.elems),
            param_out: Some(self.param.typed::<bf16>(self.elems).erase()),
        })
    }

    fn adam_remainder(&self) -> Result<(), AnyError> {
        self.update(Weights::Remainder {
            param: self.param.typed(self.elems),
            remainder: self.remainder.typed(self.elems),
        })
    }

    fn update(&self, weights: Weights) -> Result<(), AnyError> {
        let args = UpdateArgs {
            weights,
            slots: vec![
                self.first_moment.typed::<f32>(self.elems).into(),
                self.second_moment.typed::<f32>(self.elems).into(),
            ],
            grad: self.grad.typed::<bf16>(self.elems).erase(),
            scalars: self.control(5),
            weight_decay: HYPER.weight_decay,
            rounding: Rounding::Nearest,
        };
        let rule: Arc<dyn UpdateRule> = Arc::new(HYPER);
        Ok(self.kernels.update(&self.stream, &rule, args)?)
    }

    /// All that decides a step, on the device.
    fn decide(&self) -> Result<(), AnyError> {
        let stats: DeviceSlice<GradStats> = self.control(0);
        let scratch = self
            .scratch
            .typed(self.kernels.stats_scratch_elems(&[self.elems]));
        let ranks: DeviceSlice<RankStats> = self.control(2);
        let records: DeviceSlice<StepRecord> = self.control(6);
        let grad = self.grad.typed::<bf16>(self.elems).erase();
        self.kernels
            .grad_stats(&self.stream, &[grad], scratch, stats)?;
        self.kernels
            .rank_stats(&self.stream, stats, self.control(1), self.control(7), ranks)?;
        let config = self.control(3);
        let rates = self.rates.typed(RATES);
        let state = self.control(4);

        let advance = AdvanceArgs {
            ranks,
            config,
            rates,
            state,
            scalars: self.control(5),
            records,
        };

        Ok(self.kernels.advance_step(&self.stream, advance)?)
    }

    fn step(&self) -> Result<(), AnyError> {
        self.decide()?;
        self.adam()
    }

    fn enqueue(&mut self, kind: Kind) -> Result<(), AnyError> {
        match kind {
            Kind::Copy => {
                if self.copy.is_none() {
                    let bytes = ADAM_BYTES / 2 * self.elems;
                    self.copy = Some([
                        Buffer::new(&self.device, bytes)?,
                        Buffer::new(&self.device, bytes)?,
                    ]);
                }
                if let Some([from, to]) = &self.copy {
                    self.device.copy(&self.stream, from.all(), to.all())?;
                }
            }
            Kind::Adam => self.adam()?,
            Kind::Step => self.step()?,
            Kind::Remainder => {
                self.decide()?;
                self.adam_remainder()?;
            }
            Kind::Graph => {
                if self.graph.is_none() {
                    let driver_error = |e: AnyError| DeviceError::Driver {
                        call: "a step",
                        message: e.to_string(),
                    };
                    self.graph = Some(self.stream.capture(|| self.step().map_err(driver_error))?);
                }
                if let Some(graph) = &self.graph {
                    // SAFETY: the shard's memory and kernels outlive the measurement, which drains
                    // the stream.
                    unsafe { graph.launch(&self.stream) }?;
                }
            }
        }

        Ok(())
    }

    /// Milliseconds per repetition, over enough repetitions to last `at_least`.
    fn time(&mut self, kind: Kind, at_least: Duration) -> Result<f64, AnyError> {
        self.reset()?;
        // The first run does the one-time work. Then the count grows until a measurement is long
        // enough.
        self.enqueue(kind)?;
        self.stream.synchronize(LIMIT)?;
        let mut count = 2u32;
        let mut done = 1u64;

        loop {
            let start = Instant::now();
            for _ in 0..count {
                self.enqueue(kind)?;
            }
            self.stream.synchronize(LIMIT)?;
            let took = start.elapsed();
            done += u64::from(count);
            let enough = took >= at_least || done + 4 * u64::from(count) > RATES as u64;
            if enough {
                self.check(kind, done)?;
                return Ok(took.as_secs_f64() * 1e3 / f64::from(count));
            }
            count *= if took * 4 < at_least { 4 } else { 2 };
        }
    }

    /// Checks that every step was applied.
    fn check(&self, kind: Kind, steps: u64) -> Result<(), AnyError> {
        let state: DeviceSlice<StepState> = self.control(4);
        let bytes = self
            .control
            .all()
            .slice(4 * 256..4 * 256 + size_of::<StepState>());
        assert_eq!(bytes.as_ptr().cast::<StepState>(), state.as_ptr());
        let mut now = [0u8; size_of::<StepState>()];
        self.device.download(&self.stream, bytes, &mut now, LIMIT)?;
        let now: StepState = bytemuck::pod_read_unaligned(&now);
        let expected = if matches!(kind, Kind::Step | Kind::Graph | Kind::Remainder) {
            steps
        } else {
            0
        };
        if (now.halted, now.skipped_steps, now.adam_steps) != (StepState::RUNNING, 0, expected) {
            return Err(
                format!("{kind:?}: expected {expected} steps, the device has {now:?}").into(),
            );
        }
        Ok(())
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn table(
    sizes: &[usize],
    shard: impl Fn(usize) -> Result<Shard, AnyError>,
    fast: bool,
) -> Result<(), AnyError> {
    let (rounds, at_least) = if fast {
        (1, Duration::ZERO)
    } else {
        (ROUNDS, Duration::from_millis(100))
    };

    let columns = [
        "adam",
        "whole step",
        "step in a graph",
        "step with remainders",
    ];
    println!(
        "{:>12} {:>16}{}",
        "parameters",
        "copy",
        columns.map(|name| format!(" {name:>28}")).concat()
    );

    for &elems in sizes {
        let mut shard = shard(elems)?;
        let mut times: [Vec<f64>; 5] = Default::default();
        for _ in 0..rounds {
            for (kind, times) in Kind::ALL.into_iter().zip(&mut times) {
                times.push(shard.time(kind, at_least)?);
            }
        }
        let [copy, adam, step, graph, remainder] = times;
        let of_copy = |times: &[f64], bytes: usize| {
            let ratios = copy
                .iter()
                .zip(times)
                .map(|(c, t)| (bytes as f64 / t) / (ADAM_BYTES as f64 / c));
            median(ratios.collect())
        };
        let gb = |ms: f64, bytes: usize| bytes as f64 * elems as f64 / ms / 1e6;
        let column = |times: &[f64], bytes: usize| {
            let ms = median(times.to_vec());
            let ratio = of_copy(times, bytes);
            format!("{ms:8.4} ms {:5.0} GB/s {ratio:5.3}", gb(ms, bytes))
        };
        let copied = median(copy.clone());
        println!(
            "{elems:>12} {copied:6.3} {:4.0} GB/s {:>28} {:>28} {:>28} {:>28}",
            gb(copied, ADAM_BYTES),
            column(&adam, ADAM_BYTES),
            column(&step, STEP_BYTES),
            column(&graph, STEP_BYTES),
            column(&remainder, REMAINDER_BYTES)
        );
    }

    println!(
        "(the third figure of a column: bytes a second as a share of the copy's, median over {rounds} rounds)"
    );
    Ok(())
}

fn serve(shard: impl Fn(usize) -> Result<Shard, AnyError>) -> Result<(), AnyError> {
    let mut current: Option<Shard> = None;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (kind, elems) = line.trim().split_once(' ').ok_or("expected: KIND ELEMS")?;
        let kind = Kind::named(kind).ok_or("KIND is copy, adam, step, graph or remainder")?;
        let elems = elems.parse()?;
        if current.as_ref().is_none_or(|s| s.elems != elems) {
            drop(current.take()); // frees the memory before the next allocation
            current = Some(shard(elems)?);
        }
        if let Some(shard) = &mut current {
            println!("{:.6}", shard.time(kind, Duration::from_millis(100))?);
            std::io::stdout().flush()?;
        }
    }
    Ok(())
}

fn main() -> Result<(), AnyError> {
    let device = CudaDevice::open(0)?;
    let stand_in = device.name().contains("stand-in");
    eprintln!(
        "{}{}",
        device.name(),
        if stand_in {
            ": a check that this runs; its figures are meaningless"
        } else {
            ""
        }
    );

    let stream = device.create_stream("bench")?;
    let kernels = CudaKernels::new(&device)?;
    kernels.warm(&stream, LIMIT)?;
    let shard = |elems| Shard::new(&device, &stream, &kernels, elems);
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.iter().any(|a| a == "--serve") {
        return serve(shard);
    }
    let mut sizes = args
        .iter()
        .map(|a| a.parse())
        .collect::<Result<Vec<usize>, _>>()?;

    if sizes.is_empty() {
        sizes = if stand_in {
            vec![1000]
        } else {
            [1, 4, 16, 64, 256, 512, 1024].map(|m| m << 20).to_vec()
        };
    }

    table(&sizes, shard, stand_in)
}
