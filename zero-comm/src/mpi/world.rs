//! What the communicators of a process share: the connection, and the first failure.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::raw::{MAX_BYTES, MpiError, Raw, Request};
use super::wire::Notice;
use crate::CommError;

/// How long transfers may take to end after a failure, before calls are frozen.
const SETTLE: Duration = Duration::from_secs(1);

/// The process's part of the world. Ranks here are those of the whole world.
pub(super) struct World {
    pub(super) raw: Raw,
    pub(super) limit: Duration,
    failure: Mutex<Option<CommError>>,
    /// Collectives called on a communicator by a rank that has left it.
    left: Mutex<HashMap<(u32, usize), u64>>,
    /// The greatest context that this process knows of.
    pub(super) contexts: AtomicU32,
}

/// Why waiting for transfers ended early.
pub(super) enum Interrupt {
    /// The world has failed.
    Failed(CommError),
    /// A transfer with this rank failed.
    Broken(usize, MpiError),
    /// This rank has left after so many collectives.
    Left(usize, u64),
    /// This rank is late.
    Late(usize),
}

impl World {
    pub(super) fn new(raw: Raw, limit: Duration) -> Self {
        Self { raw, limit, failure: Mutex::default(), left: Mutex::default(), contexts: AtomicU32::new(0) }
    }

    pub(super) fn failure(&self) -> Option<CommError> {
        self.failure.lock().clone()
    }

    fn notify_all(&self, notice: &Notice) {
        let bytes = notice.encode();
        (0..self.raw.size).filter(|&q| q != self.raw.rank).for_each(|q| self.raw.notify(q, &bytes));
    }

    /// Ends the world here and tells the others; the first failure stands, and is returned.
    pub(super) fn fail(&self, error: CommError, notice: &Notice) -> CommError {
        let mut failure = self.failure.lock();
        if failure.is_none() {
            *failure = Some(error.clone());
            self.notify_all(notice);
        }
        failure.clone().unwrap_or(error)
    }

    pub(super) fn leave(&self, context: u32, done: u64) {
        if self.failure.lock().is_none() {
            self.notify_all(&Notice::Left { context, done });
        }
    }

    /// Hears what the others have to tell; the failure, if there is one.
    pub(super) fn poll(&self) -> Option<CommError> {
        while let Ok(Some((from, bytes))) = self.raw.notice() {
            let error = match Notice::decode(&bytes) {
                Some(Notice::Aborted(reason)) => CommError::Aborted { rank: from, reason },
                Some(Notice::Failed { blamed, message }) => CommError::Peer { rank: blamed, message },
                Some(Notice::Left { context, done }) => {
                    self.left.lock().insert((context, from), done);
                    continue;
                }
                None => CommError::Peer { rank: from, message: "sent a notice that is none".to_owned() },
            };
            self.failure.lock().get_or_insert(error);
        }
        self.failure()
    }

    /// Waits until all `requests` of collective `sequence` of communicator `context` are done.
    pub(super) fn wait(&self, requests: &mut [Request], context: u32, sequence: u64) -> Result<(), Interrupt> {
        let deadline = Instant::now().checked_add(self.limit);
        let mut pause = Pause::default();
        loop {
            if let Some(error) = self.poll() {
                return Err(Interrupt::Failed(error));
            }
            let (mut waiting, mut progress) = (None, false);
            for request in requests.iter_mut().filter(|request| !request.done) {
                match self.raw.test(request) {
                    Ok(true) => progress = true,
                    Ok(false) => waiting = waiting.or(Some(request.peer)),
                    Err(error) => return Err(Interrupt::Broken(request.peer, error)),
                }
            }
            let Some(peer) = waiting else { return Ok(()) };
            let gone = self.left.lock().get(&(context, peer)).copied();
            if let Some(done) = gone.filter(|&done| done <= sequence) {
                return Err(Interrupt::Left(peer, done));
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(Interrupt::Late(peer));
            }
            pause.sleep(progress);
        }
    }

    /// After a failure: ends `requests`, so that their buffers can be given back.
    pub(super) fn settle(&self, requests: &mut [Request]) {
        let deadline = Instant::now() + SETTLE;
        for request in requests.iter_mut().filter(|request| request.receives) {
            let _given_up = self.raw.cancel(request);
        }
        let mut pause = Pause::default();
        // An error of a test ends the request too, or says that calls are frozen.
        while !requests.iter_mut().all(|request| self.raw.test(request).unwrap_or(true)) {
            if Instant::now() >= deadline {
                return self.raw.freeze();
            }
            pause.sleep(false);
        }
    }

    /// Starts to send `len` bytes, in as many transfers as it takes.
    ///
    /// # Safety
    /// As for [`Raw::send`], for every request.
    pub(super) unsafe fn send(
        &self,
        from: *const u8,
        len: usize,
        (peer, tag): (usize, c_int),
        requests: &mut Vec<Request>,
    ) -> Result<(), (usize, MpiError)> {
        for start in (0..len).step_by(MAX_BYTES) {
            let (from, len) = (from.wrapping_add(start), MAX_BYTES.min(len - start));
            // SAFETY: a part of what the caller vouches for.
            requests.push(unsafe { self.raw.send(from, len, peer, tag) }.map_err(|error| (peer, error))?);
        }
        Ok(())
    }

    /// Starts to receive `len` bytes, in as many transfers as it takes.
    ///
    /// # Safety
    /// As for [`Raw::receive`], for every request.
    pub(super) unsafe fn receive(
        &self,
        to: *mut u8,
        len: usize,
        (peer, tag): (usize, c_int),
        requests: &mut Vec<Request>,
    ) -> Result<(), (usize, MpiError)> {
        for start in (0..len).step_by(MAX_BYTES) {
            let (to, len) = (to.wrapping_add(start), MAX_BYTES.min(len - start));
            // SAFETY: a part of what the caller vouches for.
            requests.push(unsafe { self.raw.receive(to, len, peer, tag) }.map_err(|error| (peer, error))?);
        }
        Ok(())
    }
}

/// Sleeps between tests: not at all while bytes flow, up to half a millisecond while nothing does.
#[derive(Default)]
struct Pause(u32);

impl Pause {
    fn sleep(&mut self, progress: bool) {
        self.0 = if progress { 0 } else { self.0 + 1 };
        match self.0 {
            0..30 => std::thread::yield_now(),
            n => std::thread::sleep(Duration::from_micros(20 * u64::from(n - 29)).min(Duration::from_micros(500))),
        }
    }
}
