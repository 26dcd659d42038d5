//! Times the host AdamW on request, so that a script can interleave it with peers in one run.
//!
//! `adamw_server ELEMS THREADS` reads lines `KIND REPEATS` from standard input. KIND is `fp32`,
//! `bf16` (bf16 parameter and gradient, fp32 moments), `bf16_all` (bf16 moments too), `master`
//! (fp32 master and moments, bf16 gradient and parameter) or `limit` (the traffic of `fp32` with
//! almost no arithmetic). For each line it prints milliseconds of CPU time per step over all
//! threads (Linux; 0 elsewhere), then milliseconds of each step. The buffers of a kind are kept
//! until a line has another kind. See `benches/peers/adamw.py`.

use std::io::{BufRead, Write};
use std::time::Instant;

use half::bf16;
use zero_kernels::host::{AdamSlices, Workers};
use zero_kernels::{AdamHyper, AdamScalars, Float};

type AnyError = Box<dyn std::error::Error>;

const HYPER: AdamHyper = AdamHyper {
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.01,
    decoupled: true,
    bias_correction: true,
};

/// `len` pseudorandom values.
fn values<T: Float>(len: usize, scale: f32) -> Vec<T> {
    (0..len as u32)
        .map(|i| T::from_f32((i.wrapping_mul(0x9e37_79b9) >> 8) as f32 * scale / (1 << 24) as f32))
        .collect()
}

/// CPU time of all threads of this process in milliseconds, from the scheduler.
fn cpu_ms() -> f64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return 0.0;
    };
    let ns = |task: std::io::Result<std::fs::DirEntry>| -> Option<f64> {
        let stat = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        stat.split(' ').next()?.parse().ok()
    };
    tasks.filter_map(ns).sum::<f64>() / 1e6
}

/// A step with its buffers, ready to run.
type Step = Box<dyn FnMut() -> Result<(), AnyError>>;

fn step_of<W: Float, M: Float, G: Float, P: Float>(
    workers: &Workers,
    elems: usize,
    with_param: bool,
) -> Step {
    let workers = workers.clone();
    let grad = values::<G>(elems, 0.1);
    let mut weights = values::<W>(elems, 1.0);
    let mut first_moment = values::<M>(elems, 0.01);
    let mut second_moment = values::<M>(elems, 0.001);
    let mut param_out = if with_param {
        values::<P>(elems, 1.0)
    } else {
        Vec::new()
    };

    let scalars = AdamScalars::new(10, 1e-3, &HYPER, 1.0);
    Box::new(move || {
        let slices = AdamSlices {
            weights: &mut weights[..],
            first_moment: &mut first_moment[..],
            second_moment: &mut second_moment[..],
            grad: &grad[..],
            param_out: with_param.then_some(&mut param_out[..]),
        };
        Ok(workers.adam(slices, &scalars, &HYPER)?)
    })
}

/// The memory traffic of `fp32`, 28 bytes per element, with almost no arithmetic: the limit of the
/// memory.
fn limit_of(workers: &Workers, elems: usize) -> Step {
    let workers = workers.clone();
    let grad = values::<f32>(7 * elems / 3, 0.1);
    let mut sum = values::<f32>(7 * elems / 3, 1.0);
    Box::new(move || Ok(workers.accumulate(&grad, &mut sum)?))
}

fn main() -> Result<(), AnyError> {
    let mut args = std::env::args().skip(1);
    let mut number = |what: &str| -> Result<usize, AnyError> {
        Ok(args
            .next()
            .ok_or_else(|| format!("usage: adamw_server ELEMS THREADS ({what} is missing)"))?
            .parse()?)
    };

    let elems = number("ELEMS")?;
    let threads = number("THREADS")?;
    let workers = Workers::new(threads)?;
    let mut current: Option<(String, Step)> = None;

    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (kind, repeats) = line
            .trim()
            .split_once(' ')
            .ok_or("expected: KIND REPEATS")?;
        if current.as_ref().is_none_or(|(k, _)| k != kind) {
            drop(current.take()); // frees the memory before the next allocation
            let mut step = match kind {
                "fp32" => step_of::<f32, f32, f32, f32>(&workers, elems, false),
                "bf16" => step_of::<bf16, f32, bf16, f32>(&workers, elems, false),
                "bf16_all" => step_of::<bf16, bf16, bf16, f32>(&workers, elems, false),
                "master" => step_of::<f32, f32, bf16, bf16>(&workers, elems, true),
                "limit" => limit_of(&workers, elems),
                _ => return Err(format!("no kind {kind:?}").into()),
            };
            step()?; // touches the pages
            current = Some((kind.to_owned(), step));
        }
        let Some((_, step)) = &mut current else {
            continue;
        };
        let repeats = repeats.parse::<usize>()?;
        let cpu_start = cpu_ms();
        let mut times = Vec::new();
        for _ in 0..repeats {
            let start = Instant::now();
            step()?;
            times.push(format!("{:.6}", start.elapsed().as_secs_f64() * 1e3));
        }
        println!(
            "{:.6} {}",
            (cpu_ms() - cpu_start) / repeats as f64,
            times.join(" ")
        );
        std::io::stdout().flush()?;
    }

    Ok(())
}
