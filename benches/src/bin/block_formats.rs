//! Times block formats on the host beside a copy of the same fp32 bytes, and AdamW with moments in
//! blocks beside fp32 moments.
//!
//! `block_formats [ELEMS [THREADS [ROUNDS]]]`: by default 2^26 elements, 2 threads, 15 rounds. A
//! round runs everything once, and a ratio is the median of those of the rounds, so that a slow
//! minute of the machine is on both sides. Wall time by default; with `CPU_TIME=1` the time that
//! the threads ran, for a machine where other programs run: of AdamW only, as the copy's threads
//! end before they are counted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use zero_alloc::device::{AnySlice, DType, Device, DeviceId, DeviceSlice, Element, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_kernels::host::HostKernels;
use zero_kernels::{
    AdamHyper, AdamScalars, AverageCodecs, Codec, CodedSlice, KernelError, Kernels, Rounding,
    StepScalars, UpdateArgs, UpdateRule, Weights,
};
use zero_shard::BlockFormat;

type AnyError = Box<dyn std::error::Error>;

const LIMIT: Duration = Duration::from_secs(600);

/// An array in host memory, kept until the end of the program.
struct Array(Vec<u64>, DType, usize);

impl Array {
    fn new(dtype: DType, elems: usize) -> Self {
        let words = (elems * dtype.size_bytes()).div_ceil(8);
        Self(vec![0; words], dtype, elems)
    }

    fn any(&self) -> AnySlice {
        let at = self.0.as_ptr().cast_mut().cast();
        // SAFETY: the array outlives each launch, which `time` waits for; there is one stream.
        unsafe { AnySlice::from_raw_parts(at, self.2, self.1, DeviceId::HOST) }
    }

    fn typed<T: Element>(&self) -> Result<DeviceSlice<T>, KernelError> {
        Ok(self.any().typed()?)
    }
}

struct Bench {
    kernels: HostKernels,
    stream: HostStream,
    threads: usize,
    rounds: usize,
    cpu_time: bool,
}

/// Seconds that this process's threads ran, over all of them (Linux; 0 elsewhere).
fn cpu_seconds() -> f64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return 0.0;
    };
    let ns = |task: std::io::Result<std::fs::DirEntry>| -> Option<f64> {
        let stat = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        stat.split(' ').next()?.parse().ok()
    };
    tasks.filter_map(ns).sum::<f64>() / 1e9
}

/// An operation that is timed.
type Run<'a> = &'a dyn Fn(&Bench) -> Result<(), KernelError>;

impl Bench {
    /// Seconds of each round of each of `what`.
    fn time(&self, what: &[Run<'_>]) -> Result<Vec<Vec<f64>>, AnyError> {
        let mut times = vec![Vec::new(); what.len()];
        // The first round touches the pages.
        for round in 0..=self.rounds {
            for (times, run) in times.iter_mut().zip(what) {
                let start = Instant::now();
                let cpu = cpu_seconds();
                run(self)?;
                self.stream.synchronize(LIMIT)?;
                if round > 0 {
                    times.push(match self.cpu_time {
                        true => (cpu_seconds() - cpu) / self.threads as f64,
                        false => start.elapsed().as_secs_f64(),
                    });
                }
            }
        }
        Ok(times)
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The median over the rounds of `base / this`.
fn speed(base: &[f64], this: &[f64]) -> f64 {
    median(base.iter().zip(this).map(|(base, this)| base / this))
}

/// Pseudorandom values of many magnitudes.
fn fill(array: &Array) -> Result<(), KernelError> {
    // SAFETY: nothing else uses the array yet.
    let values: &mut [f32] = unsafe { array.typed()?.as_host_mut() };
    let mut x = 1u32;
    for value in values {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let uniform = (x >> 8) as f32 / (1 << 23) as f32 - 1.0;
        *value = uniform * uniform * uniform;
    }
    Ok(())
}

/// A copy by as many threads as the kernels have.
fn memcpy(bench: &Bench, src: &Array, dst: &Array) -> Result<(), KernelError> {
    // SAFETY: nothing is in flight.
    let src = unsafe { src.typed::<f32>()?.as_host() };
    // SAFETY: as above; the arrays differ.
    let dst = unsafe { dst.typed()?.as_host_mut() };
    let part = src.len().div_ceil(bench.threads).max(1);
    std::thread::scope(|scope| {
        for (src, dst) in src.chunks(part).zip(dst.chunks_mut(part)) {
            let dst: &mut [f32] = dst;
            scope.spawn(move || dst.copy_from_slice(src));
        }
    });
    Ok(())
}

fn formats(bench: &Bench, elems: usize) -> Result<(), AnyError> {
    let src = Array::new(DType::F32, elems);
    let dst = Array::new(DType::F32, elems);
    fill(&src)?;
    for format in BlockFormat::ALL {
        let blocks = Array::new(DType::U8, format.bytes(elems));
        let times = bench.time(&[
            &|b| memcpy(b, &src, &dst),
            &|b| {
                let src = src.any();
                let blocks = blocks.any();
                b.kernels
                    .encode_blocks(&b.stream, format, src, blocks, None, None)
            },
            &|b| {
                let blocks = blocks.any();
                let dst = dst.any();
                b.kernels.decode_blocks(&b.stream, format, blocks, 1, dst)
            },
        ])?;
        let gb = |times: &[f64]| 4e-9 * elems as f64 / median(times.iter().copied());
        println!(
            "{format:?}: memcpy {:.1} GB/s of fp32, encode {:.1} ({:.2} of memcpy), decode {:.1} ({:.2})",
            gb(&times[0]),
            gb(&times[1]),
            speed(&times[0], &times[1]),
            gb(&times[2]),
            speed(&times[0], &times[2]),
        );
    }
    Ok(())
}

fn adam(bench: &Bench, elems: usize) -> Result<(), AnyError> {
    let hyper = AdamHyper {
        weight_decay: 0.01,
        ..AdamHyper::default()
    };
    let rule: Arc<dyn UpdateRule> = Arc::new(hyper);
    let mut scalars = [StepScalars::from(AdamScalars::new(10, 1e-3, &hyper, 1.0))];
    // SAFETY: as for `Array::any`.
    let scalars = unsafe { DeviceSlice::from_raw_parts(scalars.as_mut_ptr(), 1, DeviceId::HOST) };
    let [master, grad] = [(); 2].map(|()| Array::new(DType::F32, elems));
    let [narrow_grad, param] = [(); 2].map(|()| Array::new(DType::Bf16, elems));
    fill(&master)?;
    fill(&grad)?;
    bench
        .kernels
        .cast(&bench.stream, grad.any(), narrow_grad.any(), 0.01)?;
    bench.stream.synchronize(LIMIT)?;

    let kinds: [(_, AverageCodecs); 3] = [
        ("fp32", Codec::Fp32.into()),
        ("8-bit", AverageCodecs::EIGHT_BITS),
        ("4-bit", AverageCodecs::FOUR_BITS),
    ];
    let slots = kinds.map(|(_, codecs)| {
        [codecs.signed, codecs.positive].map(|codec| {
            let elems = codec.bytes(elems) / codec.dtype().size_bytes();
            (codec, Array::new(codec.dtype(), elems))
        })
    });
    for (name, grad, param_out) in [
        ("fp32 gradient", grad.any(), None),
        (
            "bf16 gradient and parameter",
            narrow_grad.any(),
            Some(param.any()),
        ),
    ] {
        let master = master.typed()?;
        let run = |b: &Bench, slots: &[(Codec, Array); 2]| {
            let args = UpdateArgs {
                weights: Weights::Fp32 { master, param_out },
                slots: slots
                    .iter()
                    .map(|(codec, array)| CodedSlice::new(*codec, array.any()))
                    .collect(),
                grad,
                scalars,
                weight_decay: hyper.weight_decay,
                rounding: Rounding::Nearest,
            };
            b.kernels.update(&b.stream, &rule, args)
        };
        let times = bench.time(&[&|b| run(b, &slots[0]), &|b| run(b, &slots[1]), &|b| {
            run(b, &slots[2])
        }])?;
        for ((kind, _), of) in kinds.iter().zip(&times) {
            let rate = 1e-6 * elems as f64 / median(of.iter().copied());
            let ratio = speed(&times[0], of);
            println!("AdamW, {name}, {kind} moments: {rate:.0} M elements/s, {ratio:.2} of fp32");
        }
    }
    Ok(())
}

fn main() -> Result<(), AnyError> {
    let numbers: Result<Vec<usize>, _> = std::env::args().skip(1).map(|a| a.parse()).collect();
    let numbers = numbers.map_err(|_| "usage: block_formats [ELEMS [THREADS [ROUNDS]]]")?;
    let number = |nth: usize, default| numbers.get(nth).copied().unwrap_or(default);
    let elems = number(0, 1 << 26);
    let threads = number(1, 2);
    let bench = Bench {
        kernels: HostKernels::new(threads)?,
        stream: HostDevice::new().create_stream("bench")?,
        threads,
        rounds: number(2, 15),
        cpu_time: std::env::var_os("CPU_TIME").is_some(),
    };
    println!("{elems} elements, {threads} threads");
    formats(&bench, elems)?;
    adam(&bench, elems)
}
