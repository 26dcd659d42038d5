//! Times the host AdamW on request, so that a script can interleave it with its peers in one run.
//!
//! `adamw_server ELEMS THREADS` reads lines `KIND REPEATS` from its input, with KIND one of `fp32`, `bf16`
//! (bf16 parameter and gradient, fp32 moments) and `bf16_all` (bf16 moments too), `master` (fp32 master and
//! moments, bf16 gradient in and parameter out), and answers each with one line: milliseconds of CPU time per
//! step over all threads (Linux; 0 elsewhere), then milliseconds of each step.
//! See `benches/peers/adamw.py`.

use std::io::{BufRead, Write};
use std::time::Instant;

use half::bf16;
use zero_kernels::host::{AdamSlices, Workers};
use zero_kernels::{AdamHyper, Float, StepScalars};

type AnyError = Box<dyn std::error::Error>;

const HYPER: AdamHyper = AdamHyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, decoupled: true };

/// `len` values that look random, written by the threads that will read them.
fn values<T: Float>(len: usize, scale: f32) -> Vec<T> {
    (0..len as u32)
        .map(|i| T::from_f32((i.wrapping_mul(0x9e37_79b9) >> 8) as f32 * scale / (1 << 24) as f32))
        .collect()
}

/// CPU time of all threads of this process in milliseconds, as the scheduler counts it.
fn cpu_ms() -> f64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return 0.0 };
    let ns = |task: std::io::Result<std::fs::DirEntry>| -> Option<f64> {
        let stat = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        stat.split(' ').next()?.parse().ok()
    };
    tasks.filter_map(ns).sum::<f64>() / 1e6
}

fn time<W: Float, M: Float, G: Float, P: Float>(
    workers: &Workers,
    (elems, repeats): (usize, usize),
    with_param: bool,
) -> Result<Vec<f64>, AnyError> {
    let (mut weights, grad) = (values::<W>(elems, 1.0), values::<G>(elems, 0.1));
    let (mut first_moment, mut second_moment) = (values::<M>(elems, 0.01), values::<M>(elems, 0.001));
    let mut param_out = if with_param { values::<P>(elems, 1.0) } else { Vec::new() };
    let scalars = StepScalars { grad_scale: 1.0, lr: 1e-3, step_size: 1e-2, bias_correction2_sqrt: 0.5, skip: 0 };
    let (mut times, mut cpu_start) = (Vec::new(), 0.0);
    for step in 0..=repeats {
        // Step 0 touches the pages.
        if step == 1 {
            cpu_start = cpu_ms();
        }
        let start = Instant::now();
        let slices = AdamSlices {
            weights: &mut weights[..],
            first_moment: &mut first_moment[..],
            second_moment: &mut second_moment[..],
            grad: &grad[..],
            param_out: with_param.then_some(&mut param_out[..]),
        };
        workers.adam(slices, &scalars, &HYPER)?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    times[0] = (cpu_ms() - cpu_start) / repeats as f64;
    Ok(times)
}

fn main() -> Result<(), AnyError> {
    let mut args = std::env::args().skip(1);
    let mut number = |what: &str| -> Result<usize, AnyError> {
        Ok(args.next().ok_or_else(|| format!("usage: adamw_server ELEMS THREADS ({what} is missing)"))?.parse()?)
    };
    let (elems, threads) = (number("ELEMS")?, number("THREADS")?);
    let workers = Workers::new(threads)?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (kind, repeats) = line.trim().split_once(' ').ok_or("expected: KIND REPEATS")?;
        let work = (elems, repeats.parse()?);
        let times = match kind {
            "fp32" => time::<f32, f32, f32, f32>(&workers, work, false)?,
            "bf16" => time::<bf16, f32, bf16, f32>(&workers, work, false)?,
            "bf16_all" => time::<bf16, bf16, bf16, f32>(&workers, work, false)?,
            "master" => time::<f32, f32, bf16, bf16>(&workers, work, true)?,
            _ => return Err(format!("no kind {kind:?}").into()),
        };
        let times: Vec<String> = times.iter().map(|t| format!("{t:.6}")).collect();
        println!("{}", times.join(" "));
        std::io::stdout().flush()?;
    }
    Ok(())
}
