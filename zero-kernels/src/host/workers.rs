//! Updates, cast, accumulate and grad_stats split over threads. Results do not depend on the split.

use std::sync::{Arc, OnceLock};

use super::grad_stats::{CHUNK_ELEMS, chunk, combine};
use super::{accumulate, cast, same_len};
use crate::{Float, GradStats, KernelError};

/// Ranges below this length run on one thread.
const MIN_PART_ELEMS: usize = 32 * 1024;

/// More than any host's cores. Starting as many threads as a process may have takes minutes.
const MOST_THREADS: usize = 4096;

const PARTS_PER_THREAD: usize = 8;

/// Slices of the same length that threads share.
pub trait Parts: Sized {
    /// Elements of each slice.
    fn elems(&self) -> usize;

    /// The first `at` elements and the rest.
    ///
    /// # Panics
    /// A slice has fewer than `at` elements.
    fn split_at(self, at: usize) -> (Self, Self);
}

/// A fixed number of threads. A clone is another handle of the same threads.
#[derive(Clone, Debug)]
pub struct Workers {
    /// `None`: the calling thread does all work.
    pool: Option<Arc<rayon::ThreadPool>>,
}

impl Workers {
    /// `threads` threads; with 0 or 1 the calling thread does the work.
    ///
    /// # Errors
    /// More than 4096, or the operating system refused a thread.
    pub fn new(threads: usize) -> Result<Self, KernelError> {
        if threads <= 1 {
            return Ok(Self { pool: None });
        }
        if threads > MOST_THREADS {
            let message = format!("the maximum is {MOST_THREADS}");
            return Err(KernelError::Threads { threads, message });
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("zero-kernels-{i}"))
            .build()
            .map_err(|e| KernelError::Threads {
                threads,
                message: e.to_string(),
            })?;
        Ok(Self {
            pool: Some(Arc::new(pool)),
        })
    }

    /// The number of threads.
    pub fn threads(&self) -> usize {
        self.pool.as_ref().map_or(1, |p| p.current_num_threads())
    }

    /// The length of each part of a range of `len` elements: a multiple of the chunk length, or at
    /// least `len` if one thread is enough. Each thread gets several parts, so that a preempted
    /// thread delays the others only briefly.
    fn part_elems(&self, len: usize) -> usize {
        match self.threads() {
            1 => len.max(1),
            threads => len
                .div_ceil(threads * PARTS_PER_THREAD)
                .next_multiple_of(CHUNK_ELEMS)
                .max(MIN_PART_ELEMS),
        }
    }

    /// Runs `work` on every part, in any order, and waits until all are done.
    fn each<P: Send>(&self, parts: impl IntoIterator<Item = P>, work: impl Fn(P) + Sync) {
        match &self.pool {
            None => parts.into_iter().for_each(work),
            Some(pool) => {
                let parts = parts.into_iter();
                let work = &work;
                pool.in_place_scope(|scope| {
                    parts.for_each(|part| scope.spawn(move |_| work(part)))
                });
            }
        }
    }

    /// Runs `work` on parts of `slices`, and waits until all are done.
    pub(crate) fn on_parts<S: Parts + Send>(
        &self,
        slices: S,
        work: impl Fn(S) -> Result<(), KernelError> + Sync,
    ) -> Result<(), KernelError> {
        let part_elems = self.part_elems(slices.elems());
        if slices.elems() <= part_elems {
            return work(slices);
        }
        let mut rest = Some(slices);
        let parts = std::iter::from_fn(|| {
            let slices = rest.take()?;
            if slices.elems() <= part_elems {
                return Some(slices);
            }
            let (part, after) = slices.split_at(part_elems);
            rest = Some(after);
            Some(part)
        });

        let first_error = OnceLock::new();
        self.each(parts, |part| {
            if let Err(error) = work(part) {
                let _later = first_error.set(error);
            }
        });
        first_error.into_inner().map_or(Ok(()), Err)
    }

    /// [`cast`](super::cast()) over these threads.
    ///
    /// # Errors
    /// The lengths differ.
    pub fn cast<S: Float, D: Float>(
        &self,
        src: &[S],
        dst: &mut [D],
        scale: f32,
    ) -> Result<(), KernelError> {
        same_len("cast: dst", src.len(), dst.len())?;
        let part_elems = self.part_elems(src.len());
        if src.len() <= part_elems {
            return cast(src, dst, scale);
        }
        self.each(
            src.chunks(part_elems).zip(dst.chunks_mut(part_elems)),
            |(src, dst)| {
                let equal = cast(src, dst, scale);
                debug_assert!(equal.is_ok(), "the lengths were checked above");
            },
        );
        Ok(())
    }

    /// [`accumulate`](super::accumulate()) over these threads.
    ///
    /// # Errors
    /// The lengths differ.
    pub fn accumulate<G: Float>(&self, grad: &[G], acc: &mut [f32]) -> Result<(), KernelError> {
        same_len("accumulate: acc", grad.len(), acc.len())?;
        let part_elems = self.part_elems(grad.len());
        if grad.len() <= part_elems {
            return accumulate(grad, acc);
        }
        self.each(
            grad.chunks(part_elems).zip(acc.chunks_mut(part_elems)),
            |(grad, acc)| {
                let equal = accumulate(grad, acc);
                debug_assert!(equal.is_ok(), "the lengths were checked above");
            },
        );
        Ok(())
    }

    /// [`grad_stats`](super::grad_stats()) over these threads: the same bits.
    pub fn grad_stats<G: Float>(&self, grad: &[G]) -> GradStats {
        let part_elems = self.part_elems(grad.len());
        if grad.len() <= part_elems {
            return super::grad_stats(grad);
        }
        // Parts are whole numbers of chunks, so the chunks are those of the whole gradient.
        let mut partials = vec![GradStats::default(); grad.len().div_ceil(CHUNK_ELEMS)];
        let parts = grad
            .chunks(part_elems)
            .zip(partials.chunks_mut(part_elems / CHUNK_ELEMS));
        self.each(parts, |(grad, partials)| {
            for (g, out) in grad.chunks(CHUNK_ELEMS).zip(partials) {
                *out = chunk(g);
            }
        });
        combine(partials)
    }
}
