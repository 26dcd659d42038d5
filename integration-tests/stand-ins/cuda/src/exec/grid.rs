//! A grid, whose blocks are distributed over host threads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::block::{LaunchShape, run_block};
use super::program::{Done, Fault, Program, fault};
use crate::driver::handles::lock;
use crate::driver::space::Space;
use crate::error::Failure;
use crate::settings::settings;

/// Host threads per grid.
const THREADS: u64 = 2;

/// Runs all blocks. After the first fault no further block starts.
pub(crate) fn run_grid(
    program: &Program,
    shape: &LaunchShape,
    registry: &Arc<Space>,
) -> Result<(), (Failure, String)> {
    let [x, y, z] = shape.grid.map(u64::from);
    let (blocks, next, stop) = (x * y * z, AtomicU64::new(0), AtomicBool::new(false));
    let first: Mutex<Option<Box<Fault>>> = Mutex::new(None);
    let since = Instant::now();
    let check = || -> Done {
        if stop.load(Ordering::Relaxed) {
            return fault(Failure::LaunchFailed, "another block has failed");
        }
        if since.elapsed() > settings().launch_limit {
            let what = format!("kernel {} has run for {:?}", program.name, settings().launch_limit);
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
            let block = [number % x, number / x % y, number / (x * y)].map(|n| n as u32);
            if let Err(mut fault) = run_block(program, shape, block, registry, &check) {
                fault.what = format!("{}, block {block:?}", fault.what);
                lock(&first).get_or_insert(fault);
                stop.store(true, Ordering::Relaxed);
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
        None => Ok(()),
        Some(fault) => Err((fault.failure, fault.what)),
    }
}
