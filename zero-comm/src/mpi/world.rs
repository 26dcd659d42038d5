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

/// How long before the limit ranks ask each other whom they wait for, at most.
const ASK: Duration = Duration::from_secs(2);

/// The process's part of the world. Ranks here are those of the whole world.
pub(super) struct World {
    pub(super) raw: Raw,
    pub(super) limit: Duration,
    failure: Mutex<Option<CommError>>,
    /// Collectives called on a communicator by a rank that has left it.
    left: Mutex<HashMap<(u32, usize), u64>>,
    /// What ranks said that they wait for.
    waits: Mutex<Waits>,
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
        let (failure, left, waits) = <_>::default();
        Self { raw, limit, failure, left, waits, contexts: AtomicU32::new(0) }
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
                Some(Notice::Waits { context, sequence, peer }) => {
                    self.waits.lock().hear(context, from, sequence, peer as usize);
                    continue;
                }
                None => CommError::Peer { rank: from, message: "sent a notice that is none".to_owned() },
            };
            self.failure.lock().get_or_insert(error);
        }
        self.failure()
    }

    /// Waits until all `requests` of collective `sequence` of communicator `context` are done.
    ///
    /// A rank that is waited for may itself wait for another. So before the limit each says for whom it waits,
    /// and each that hears it answers; the one that says nothing is late.
    pub(super) fn wait(&self, requests: &mut [Request], context: u32, sequence: u64) -> Result<(), Interrupt> {
        let begun = Instant::now();
        let asks_after = self.limit - (self.limit / 4).min(ASK);
        let mut said = false;
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
            let Some(peer) = waiting else {
                self.waits.lock().done(context, sequence);
                return Ok(());
            };
            let gone = self.left.lock().get(&(context, peer)).copied();
            if let Some(done) = gone.filter(|&done| done <= sequence) {
                return Err(Interrupt::Left(peer, done));
            }
            let waited = begun.elapsed();
            if !said && (waited >= asks_after || self.waits.lock().any(context)) {
                said = true;
                self.notify_all(&Notice::Waits { context, sequence, peer: peer as u32 });
            }
            if waited >= self.limit {
                return Err(Interrupt::Late(self.waits.lock().late(context, sequence, peer)));
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

/// Who said to wait for whom: of a communicator and a rank, the collective and the peer.
#[derive(Default)]
struct Waits(HashMap<(u32, usize), (u64, usize)>);

impl Waits {
    fn hear(&mut self, context: u32, from: usize, sequence: u64, peer: usize) {
        self.0.insert((context, from), (sequence, peer));
    }

    /// This collective has ended: what was said of it says nothing of the next.
    fn done(&mut self, context: u32, sequence: u64) {
        self.0.retain(|&(c, _), &mut (s, _)| c != context || s > sequence);
    }

    fn any(&self, context: u32) -> bool {
        self.0.keys().any(|&(c, _)| c == context)
    }

    /// Who is late, if `peer` is waited for: the end of the chain of those who wait, or `peer` if it is a ring.
    fn late(&self, context: u32, sequence: u64, peer: usize) -> usize {
        let mut last = peer;
        for _ in 0..=self.0.len() {
            match self.0.get(&(context, last)) {
                Some(&(theirs, next)) if theirs <= sequence => last = next,
                _ => return last,
            }
        }
        peer
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_late_rank_is_the_one_that_says_nothing() {
        let mut waits = Waits::default();
        assert_eq!(waits.late(0, 5, 1), 1);
        // 1 waits for 2, 2 for 3, and 3 says nothing.
        waits.hear(0, 1, 5, 2);
        waits.hear(0, 2, 4, 3);
        assert_eq!(waits.late(0, 5, 1), 3);
        // What is said on another communicator, or of a collective further on, counts for nothing here.
        waits.hear(1, 3, 5, 4);
        assert_eq!(waits.late(0, 5, 1), 3);
        waits.hear(0, 3, 6, 4);
        assert_eq!(waits.late(0, 5, 1), 3);
        // In a ring, the next is named.
        waits.hear(0, 3, 5, 1);
        assert_eq!(waits.late(0, 5, 1), 1);
        assert!(waits.any(0) && waits.any(1) && !waits.any(2));
        // An ended collective takes with it what was said of it.
        waits.done(0, 5);
        assert_eq!(waits.late(0, 6, 1), 1);
        assert!(!waits.any(0) && waits.any(1));
    }
}
