//! A grid, whose blocks are distributed over host threads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::block::{LaunchShape, run_block};
use super::program::{Done, Fault, Program, fault};
use crate::counts::Work;
use crate::driver::space::Space;
use crate::error::Failure;
use crate::settings::settings;
use stand_in_shared::lock;

/// Host threads per grid.
const THREADS: u64 = 2;

/// Runs all blocks, and returns their work if it is counted.
pub(crate) fn run_grid(
    program: &Program,
    shape: &LaunchShape,
    registry: &Arc<Space>,
) -> Result<Work, (Failure, String)> {
    let [x, y, z] = shape.grid.map(u64::from);
    let block = |number| [number % x, number / x % y, number / (x * y)].map(|n| n as u32);
    run_blocks(program, shape, registry, x * y * z, &block)
}

/// Runs the `blocks` blocks of a grid that `block` numbers. After the first fault no further block
/// starts.
pub(crate) fn run_blocks(
    program: &Program,
    shape: &LaunchShape,
    registry: &Arc<Space>,
    blocks: u64,
    block: &(dyn Fn(u64) -> [u32; 3] + Sync),
) -> Result<Work, (Failure, String)> {
    let next = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let first: Mutex<Option<Box<Fault>>> = Mutex::new(None);
    let sum: Mutex<Work> = Mutex::default();
    let since = Instant::now();

    let check = || -> Done {
        if stop.load(Ordering::Relaxed) {
            return fault(Failure::LaunchFailed, "another block has failed");
        }
        if since.elapsed() > settings().launch_limit {
            let what = format!(
                "kernel {} has run for {:?}",
                program.name,
                settings().launch_limit
            );
            return fault(Failure::LaunchTimeout, what);
        }
        Ok(())
    };

    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= blocks || stop.load(Ordering::Relaxed) {
                return;
            }
            let block = block(number);
            match run_block(program, shape, block, registry, &check) {
                Ok(work) => {
                    let mut sum = lock(&sum);
                    *sum = sum.plus(work);
                }
                Err(mut fault) => {
                    fault.what = format!("{}, block {block:?}", fault.what);
                    lock(&first).get_or_insert(fault);
                    stop.store(true, Ordering::Relaxed);
                }
            }
        }
    };

    if blocks < 2 {
        work();
    } else {
        std::thread::scope(|scope| {
            (1..THREADS).for_each(|_| drop(scope.spawn(work)));
            work();
        });
    }

    match lock(&first).take() {
        None => Ok(*lock(&sum)),
        Some(fault) => Err((fault.failure, fault.what)),
    }
}
