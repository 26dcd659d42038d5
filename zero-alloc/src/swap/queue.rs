//! A queue of requests in flight, by io_uring or by threads, with the faults of tests.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::open_file::OpenFile;
use super::request::TransferRequest;
use super::threads::Threads;
use super::uring::Uring;
use super::{SwapBuffer, SwapEngine};

enum Engine {
    Uring(Box<Uring>),
    Threads(Threads),
}

/// The queue. Requests are named by their slot, a number below `queue_depth`.
pub(super) struct Queue {
    engine: Engine,
    #[cfg(any(test, feature = "testing"))]
    injected: super::fault::Injected,
}

impl Queue {
    pub(super) fn new(file: &Arc<OpenFile>) -> io::Result<Self> {
        let ring = match file.uring.then(|| Uring::new(file)).transpose() {
            // Another ring worked; now a limit is reached, such as that of locked memory.
            Err(error) if file.options.engine == SwapEngine::Auto => {
                file.notice_threads(&error);
                None
            }
            ring => ring?,
        };
        let engine = match ring {
            Some(ring) => Engine::Uring(Box::new(ring)),
            None => Engine::Threads(Threads::new(Arc::clone(file))?),
        };
        Ok(Self {
            engine,
            #[cfg(any(test, feature = "testing"))]
            injected: Default::default(),
        })
    }

    /// Registers buffers with the kernel, which threads do not need.
    pub(super) fn register(&mut self, buffers: &[SwapBuffer]) -> io::Result<()> {
        match &mut self.engine {
            Engine::Uring(ring) => ring.register(buffers),
            Engine::Threads(_) => Ok(()),
        }
    }

    /// Queues a request. On an error the kernel does not access its memory.
    pub(super) fn push(
        &mut self,
        slot: usize,
        request: TransferRequest,
        file: &OpenFile,
    ) -> io::Result<()> {
        let _ = file;
        #[cfg(any(test, feature = "testing"))]
        let Some(request) = self.injected.apply(file.faults.next(), slot, request) else {
            return Ok(());
        };
        match &mut self.engine {
            Engine::Uring(ring) => ring.push(slot, request),
            Engine::Threads(threads) => {
                threads.push(slot, request);
                Ok(())
            }
        }
    }

    /// Submits what is queued and appends finished requests to `done`: slot, and bytes or a
    /// negative errno. Waits at most `limit` for the first. After an error the queue is only good
    /// for waiting.
    pub(super) fn wait(&mut self, limit: Duration, done: &mut Vec<(usize, i32)>) -> io::Result<()> {
        #[cfg(any(test, feature = "testing"))]
        let limit = if self.injected.is_due() {
            Duration::ZERO
        } else {
            limit
        };
        let result = match &mut self.engine {
            Engine::Uring(ring) => ring.wait(limit, done),
            Engine::Threads(threads) => {
                threads.wait(limit, done);
                Ok(())
            }
        };
        #[cfg(any(test, feature = "testing"))]
        self.injected.finish(done);
        result
    }

    /// The number of requests that only wait for the next submission.
    pub(super) fn unsubmitted(&mut self) -> usize {
        match &mut self.engine {
            Engine::Uring(ring) => ring.unsubmitted(),
            Engine::Threads(_) => 0,
        }
    }

    /// Whether a test makes the limit pass now.
    pub(super) fn is_late(&mut self) -> bool {
        #[cfg(any(test, feature = "testing"))]
        return self.injected.pass_limit();
        #[cfg(not(any(test, feature = "testing")))]
        false
    }
}
