//! The operations of the reference trainer on the host, forward and backward, in fp32.
//!
//! All are plain functions over slices. They run in parallel over rows, in the rayon pool that
//! calls them; each rank has one, [`Threads`]. The split of the rows depends only on the number of
//! threads, so a rank's results do not depend on timing. Matrix products are faer's.

pub mod attention;
pub mod cross_entropy;
pub mod embedding;
pub mod gelu;
pub mod layer_norm;
pub mod linear;
mod math;
#[cfg(test)]
mod tests;
mod transpose;

use std::cell::Cell;
use std::sync::Arc;

use thiserror::Error;

/// The threads of a rank cannot be started.
#[derive(Debug, Error)]
#[error("failed to start the threads of a rank: {0}; try a lower --threads")]
pub struct ThreadsError(rayon::ThreadPoolBuildError);

/// The threads of one rank.
#[derive(Clone, Debug)]
pub struct Threads(Arc<rayon::ThreadPool>);

impl Threads {
    /// A pool of `count` threads (at least one).
    ///
    /// # Errors
    /// The threads cannot be started.
    pub fn new(count: usize) -> Result<Self, ThreadsError> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(count.max(1))
            .thread_name(|i| format!("ops-{i}"))
            .build()
            .map_err(ThreadsError)?;
        Ok(Self(Arc::new(pool)))
    }

    /// Runs `work` in the pool.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.0.install(work)
    }
}

/// Rows per thread if `rows` rows are split evenly over the threads of the current pool.
pub(crate) fn rows_per_thread(rows: usize) -> usize {
    rows.div_ceil(rayon::current_num_threads()).max(1)
}

/// Calls `work` with `len` elements of the calling thread's scratch memory, which has any values.
/// It stays allocated.
fn with_scratch<R>(len: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
    thread_local! {
        static SCRATCH: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    }
    let mut scratch = SCRATCH.take();
    if scratch.len() < len {
        scratch = vec![0.0; len];
    }
    let result = work(&mut scratch[..len]);
    SCRATCH.set(scratch);
    result
}
