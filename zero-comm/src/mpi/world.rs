//! The state that a process's communicators share: MPI and the first failure.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use zero_alloc::TimeLimit;

use super::notice::Notice;
use super::raw::{MAX_BYTES, MpiError, Raw, Request};
use crate::CommError;

/// Time limit for transfers to end after a failure. If it passes, their memory is leaked.
const SETTLE_LIMIT: Duration = Duration::from_secs(1);

/// The maximum time before the limit at which a waiting rank notifies the others of the rank that
/// it waits for.
const NOTIFY_BEFORE: Duration = Duration::from_secs(2);

/// The process's part of the world. Ranks are those of the whole world.
pub(super) struct World {
    pub(super) raw: Raw,
    pub(super) limit: Duration,
    failure: Mutex<Option<CommError>>,
    /// By communicator and rank: the number of collectives that the rank had called when it dropped
    /// the communicator.
    left: Mutex<HashMap<(u32, usize), u64>>,
    /// The ranks that other ranks wait for.
    waits: Mutex<Waits>,
    /// The greatest context that this process knows.
    pub(super) contexts: AtomicU32,
    /// Held by a split.
    pub(super) splitting: Mutex<()>,
}

/// The reason why a wait for transfers ended early.
pub(super) enum Interrupt {
    /// The world failed.
    Failed(CommError),
    /// A transfer with this rank failed.
    Broken(usize, MpiError),
    /// This rank dropped the communicator after this number of collectives.
    Left(usize, u64),
    /// This rank is late, or what it sends does not arrive.
    Late(Silent),
}

/// A rank of which another one has waited for data until the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Silent {
    pub(super) rank: usize,
    /// The rank that waits for it.
    pub(super) waits: usize,
}

impl World {
    pub(super) fn new(raw: Raw, limit: Duration) -> Self {
        let (failure, left, waits) = <_>::default();
        Self {
            raw,
            limit,
            failure,
            left,
            waits,
            contexts: AtomicU32::new(0),
            splitting: Mutex::default(),
        }
    }

    pub(super) fn failure(&self) -> Option<CommError> {
        self.failure.lock().clone()
    }

    fn notify_all(&self, notice: &Notice) {
        let bytes = notice.encode();
        (0..self.raw.size)
            .filter(|&q| q != self.raw.rank)
            .for_each(|q| self.raw.notify(q, &bytes));
    }

    /// Ends the world and notifies the other ranks. Returns the first failure.
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

    /// Receives notices; returns the failure.
    pub(super) fn poll(&self) -> Option<CommError> {
        while let Ok(Some((from, bytes))) = self.raw.notice() {
            let error = match Notice::decode(&bytes) {
                Some(Notice::Aborted(reason)) => CommError::Aborted { rank: from, reason },
                Some(Notice::Failed { at_fault, message }) => CommError::Peer {
                    rank: at_fault,
                    message,
                },
                Some(Notice::Left { context, done }) => {
                    self.left.lock().insert((context, from), done);
                    continue;
                }
                Some(Notice::Waits {
                    context,
                    sequence,
                    peer,
                }) => {
                    self.waits.lock().insert(context, from, sequence, peer);
                    continue;
                }
                None => CommError::Peer {
                    rank: from,
                    message: "sent an undecodable notice".to_owned(),
                },
            };
            self.failure.lock().get_or_insert(error);
        }

        self.failure()
    }

    /// Waits until all `requests` of collective `sequence` of communicator `context` are done.
    ///
    /// The rank that this one waits for may itself wait for another. To find the late rank, a
    /// waiting rank notifies all others before the limit, and every waiting rank that receives such
    /// a notice does the same, again when it waits for another rank; the rank that sends none is
    /// late, or its link is cut.
    pub(super) fn wait(
        &self,
        requests: &mut [Request],
        context: u32,
        sequence: u64,
    ) -> Result<(), Interrupt> {
        let mut time = TimeLimit::new(self.limit);
        let notify_after = self.limit - (self.limit / 4).min(NOTIFY_BEFORE);
        let mut notified = None;
        let mut pause = Pause::default();

        loop {
            if let Some(error) = self.poll() {
                return Err(Interrupt::Failed(error));
            }
            let mut waiting = None;
            let mut progress = false;
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
            let waited = time.elapsed();
            if notified != Some(peer) && (waited >= notify_after || self.waits.lock().any(context))
            {
                notified = Some(peer);
                self.notify_all(&Notice::Waits {
                    context,
                    sequence,
                    peer,
                });
            }
            if waited >= self.limit {
                let own = Silent {
                    rank: peer,
                    waits: self.raw.rank,
                };
                return Err(Interrupt::Late(
                    self.waits.lock().late(context, sequence, own),
                ));
            }
            pause.sleep(progress);
        }
    }

    /// After a failure: cancels the receives and waits for `requests`. Returns whether all have
    /// ended, so that their buffers may be freed.
    pub(super) fn settle(&self, requests: &mut [Request]) -> bool {
        let deadline = Instant::now() + SETTLE_LIMIT;
        for request in requests.iter_mut().filter(|request| request.receives) {
            let _ = self.raw.cancel(request);
        }
        let mut pause = Pause::default();
        while Instant::now() < deadline {
            let mut tests = requests.iter_mut().map(|request| self.raw.test(request));
            match tests.try_fold(true, |all, test| Ok::<_, MpiError>(all & test?)) {
                Ok(true) => return true,
                Ok(false) => pause.sleep(false),
                // The state of this request is unknown.
                Err(_) => return false,
            }
        }
        false
    }

    /// Starts to receive `len` bytes from `peer` into `buffer` if `receives`, otherwise to send
    /// them, in transfers of at most [`MAX_BYTES`].
    ///
    /// # Safety
    /// As for [`Raw::start`], for every request.
    pub(super) unsafe fn start(
        &self,
        receives: bool,
        buffer: *mut u8,
        len: usize,
        peer: usize,
        tag: c_int,
        requests: &mut Vec<Request>,
    ) -> Result<(), (usize, MpiError)> {
        for start in (0..len).step_by(MAX_BYTES) {
            let buffer = buffer.wrapping_add(start);
            let len = MAX_BYTES.min(len - start);
            // SAFETY: this range is within the caller's buffer, for which the promise holds.
            let request = unsafe { self.raw.start(receives, buffer, len, peer, tag) };
            requests.push(request.map_err(|error| (peer, error))?);
        }
        Ok(())
    }
}

/// By communicator and rank: the collective in which the rank waits, and the peer that it waits
/// for.
#[derive(Default)]
struct Waits(HashMap<(u32, usize), (u64, usize)>);

impl Waits {
    fn insert(&mut self, context: u32, from: usize, sequence: u64, peer: usize) {
        self.0.insert((context, from), (sequence, peer));
    }

    /// Removes the entries of a collective that has ended, and of those before it.
    fn done(&mut self, context: u32, sequence: u64) {
        self.0
            .retain(|&(c, _), &mut (s, _)| c != context || s > sequence);
    }

    fn any(&self, context: u32) -> bool {
        self.0.keys().any(|&(c, _)| c == context)
    }

    /// The late rank and the one that waits for it, if this rank waits as `own` says: the end of
    /// the chain of waiting ranks, or `own` if the chain is a cycle.
    fn late(&self, context: u32, sequence: u64, own: Silent) -> Silent {
        let mut last = own;
        for _ in 0..=self.0.len() {
            match self.0.get(&(context, last.rank)) {
                // This rank waits, and its own notice is not among those of others.
                Some(&(_, next)) if next == own.waits => return own,
                Some(&(theirs, next)) if theirs <= sequence => {
                    last = Silent {
                        rank: next,
                        waits: last.rank,
                    };
                }
                _ => return last,
            }
        }
        own
    }
}

/// The pause between polls: yields while transfers progress, then sleeps for up to half a
/// millisecond.
#[derive(Default)]
pub(super) struct Pause(u32);

impl Pause {
    pub(super) fn sleep(&mut self, progress: bool) {
        self.0 = if progress { 0 } else { self.0 + 1 };
        match self.0 {
            0..30 => std::thread::yield_now(),
            n => std::thread::sleep(
                Duration::from_micros(20 * u64::from(n - 29)).min(Duration::from_micros(500)),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn late_rank_is_the_end_of_the_chain() {
        let mut waits = Waits::default();
        // This rank is 0.
        let own = Silent { rank: 1, waits: 0 };
        let late = |waits: &Waits, sequence| waits.late(0, sequence, own);
        assert_eq!(late(&waits, 5), own);
        // 1 waits for 2, 2 for 3, and 3 for nobody.
        waits.insert(0, 1, 5, 2);
        waits.insert(0, 2, 4, 3);
        let third = Silent { rank: 3, waits: 2 };
        assert_eq!(late(&waits, 5), third);
        // Other communicators and later collectives do not count.
        waits.insert(1, 3, 5, 4);
        assert_eq!(late(&waits, 5), third);
        waits.insert(0, 3, 6, 4);
        assert_eq!(late(&waits, 5), third);
        // In a cycle without this rank or with it, it names the rank that it waits for itself.
        waits.insert(0, 3, 5, 1);
        assert_eq!(late(&waits, 5), own);
        waits.insert(0, 3, 5, 0);
        assert_eq!(late(&waits, 5), own);
        waits.insert(0, 1, 5, 0);
        assert_eq!(late(&waits, 5), own);
        assert!(waits.any(0) && waits.any(1) && !waits.any(2));
        // The end of a collective removes its entries.
        waits.done(0, 5);
        assert_eq!(late(&waits, 6), own);
        assert!(!waits.any(0) && waits.any(1));
    }

    proptest! {
        /// Whatever ranks wait for, none names itself.
        #[test]
        fn no_rank_names_itself(peers in prop::collection::vec(0_usize..6, 6), missing in 0_usize..6) {
            for own in 0..6 {
                let mut waits = Waits::default();
                let others = peers.iter().enumerate().filter(|(rank, peer)| rank != *peer);
                for (rank, peer) in others.filter(|(rank, _)| *rank != own && *rank != missing) {
                    waits.insert(0, rank, 1, *peer);
                }
                if peers[own] == own {
                    continue;
                }
                let late = waits.late(0, 1, Silent { rank: peers[own], waits: own });
                prop_assert_ne!(late.rank, own);
                prop_assert_eq!(peers[late.waits], late.rank);
            }
        }
    }
}
