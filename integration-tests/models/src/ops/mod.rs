//! The operations of the reference trainer on the host, forward and backward, in fp32; matrix
//! products of bf16 runs are in bf16 on CPUs with instructions for them ([`bf16`]).
//!
//! All are plain functions over slices. They run in parallel over rows, in the rayon pool that
//! calls them; each rank has one, [`Threads`]. The split of the rows depends only on the number of
//! threads, so a rank's results do not depend on timing. Matrix products in fp32 are faer's.

pub mod activation;
pub mod attention;
pub mod bf16;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
pub mod head_norm;
pub mod linear;
pub mod lora;
pub(crate) mod math;
pub mod mlp;
pub mod norm;
pub mod rope;
pub mod sequence;
pub mod swiglu;
#[cfg(test)]
mod tests;
pub(crate) mod transpose;

use std::cell::Cell;
use std::sync::Arc;

use thiserror::Error;

/// The threads of a rank cannot be started.
#[derive(Debug, Error)]
#[error("failed to start the threads of a rank: {0}; try a lower --threads")]
pub struct ThreadsError(rayon::ThreadPoolBuildError);

/// The threads of one rank.
#[derive(Clone, Debug)]
pub struct Threads(Kind);

#[derive(Clone, Debug)]
enum Kind {
    /// The calling thread. Why: handing work to a thread of a pool and back costs two wake-ups an
    /// operation, and a pool's idle thread yields its core many times before it sleeps, each time
    /// for a whole time slice if other programs compute.
    Caller,
    Pool(Arc<rayon::ThreadPool>),
}

impl Threads {
    /// `count` threads, at least one.
    ///
    /// # Errors
    /// The threads cannot be started.
    pub fn new(count: usize) -> Result<Self, ThreadsError> {
        if count <= 1 {
            return Ok(Self(Kind::Caller));
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(count)
            .thread_name(|i| format!("ops-{i}"))
            .build()
            .map_err(ThreadsError)?;
        Ok(Self(Kind::Pool(Arc::new(pool))))
    }

    /// Runs `work` on these threads.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.0 {
            Kind::Caller => on_caller(work),
            Kind::Pool(pool) => pool.install(work),
        }
    }
}

/// Runs `work` on the calling thread, as the only thread of its pool.
fn on_caller<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    thread_local! {
        static ALONE: Option<rayon::ThreadPool> = rayon::ThreadPoolBuilder::new()
            .num_threads(1)
            .use_current_thread()
            .build()
            .ok();
    }
    ALONE.with(|alone| match alone {
        Some(pool) => pool.install(work),
        // The thread belongs to another pool, which then does the work.
        None => work(),
    })
}

/// Rows per thread if `rows` rows are split evenly over the threads of the current pool.
pub(crate) fn rows_per_thread(rows: usize) -> usize {
    rows.div_ceil(rayon::current_num_threads()).max(1)
}

/// The heads of a row of queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Heads of queries.
    pub queries: usize,
    /// Heads of keys, and of values.
    pub keys: usize,
    /// Elements of a head.
    pub d: usize,
}

impl Heads {
    /// Elements of a row.
    pub fn width(&self) -> usize {
        (self.queries + 2 * self.keys) * self.d
    }

    /// Heads that may be normed and rotated: of queries and keys, the first ones of a row.
    pub fn turned(&self) -> usize {
        self.queries + self.keys
    }
}

/// The consecutive tokens of each sequence that are rows of an operation.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// Tokens of a sequence.
    pub tokens: usize,
    /// The first one's place in its sequence.
    pub first: usize,
}

impl Span {
    /// All `seq` tokens of a sequence.
    pub fn whole(seq: usize) -> Self {
        Self {
            tokens: seq,
            first: 0,
        }
    }
}

/// The position in its document of token `row` of a batch's `span`. `starts` has the place in its
/// sequence of the first token of each token's document; empty if all are 0.
pub(crate) fn position(row: usize, span: Span, starts: &[u32]) -> usize {
    let start = starts.get(row).map_or(0, |&start| start as usize);
    (span.first + row % span.tokens).saturating_sub(start)
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
