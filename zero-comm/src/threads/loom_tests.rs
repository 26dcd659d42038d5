//! Loom tests of all interleavings of ranks that arrive, fail and leave:
//! `RUSTFLAGS="--cfg loom" cargo test -p zero-comm --lib --release loom_tests`.
//!
//! Monitors use loom's primitives. The lock of `Shared` is an ordinary mutex that is never held
//! while a monitor is used; each of its critical sections is one step for loom, which explores
//! their orders.

use std::sync::Arc;
use std::time::Duration;

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;

use super::shared::Shared;
use super::ticket::Ticket;
use crate::CommError;
use crate::CommOptions;
use crate::call::Group;

/// The observed state of two ranks.
struct Watched {
    shared: Arc<Shared>,
    /// By rank: it has entered the collective.
    entered: [AtomicBool; 2],
    /// By rank: it has done its share.
    worked: [AtomicBool; 2],
    /// By rank: it has left the collective, and may have freed its buffers.
    left: [AtomicBool; 2],
}

impl Watched {
    fn new() -> Arc<Self> {
        Self::with_options(CommOptions::default())
    }

    fn with_options(options: CommOptions) -> Arc<Self> {
        let flags = || [AtomicBool::new(false), AtomicBool::new(false)];
        let shared = Arc::new(Shared::new(2, options));
        Arc::new(Self {
            shared,
            entered: flags(),
            worked: flags(),
            left: flags(),
        })
    }

    /// Runs one collective of `rank`; asserts that its peer stays in the collective meanwhile.
    fn run(&self, rank: usize) -> Result<(), CommError> {
        let checked = Group {
            rank,
            world_size: 2,
        }
        .barrier();

        let ticket = Ticket::new(
            Arc::clone(&self.shared),
            rank,
            0,
            checked,
            "stream".to_owned(),
        );

        let peer = 1 - rank;
        self.entered[rank].store(true, Ordering::SeqCst);
        let result = ticket.run(|_, _| {
            assert!(
                self.entered[peer].load(Ordering::SeqCst)
                    && !self.left[peer].load(Ordering::SeqCst)
            );
            self.worked[rank].store(true, Ordering::SeqCst);
            assert!(
                !self.left[peer].load(Ordering::SeqCst),
                "the peer's buffers are in use"
            );
        });

        self.left[rank].store(true, Ordering::SeqCst);
        assert!(
            result.is_err() || self.worked[peer].load(Ordering::SeqCst),
            "a result that is not complete"
        );
        result
    }
}

fn aborted() -> CommError {
    CommError::Aborted {
        rank: 1,
        reason: "on purpose".to_owned(),
    }
}

#[test]
fn two_ranks_complete_a_collective() {
    loom::model(|| {
        let watched = Watched::new();
        let other = Arc::clone(&watched);
        let peer = thread::spawn(move || other.run(1));
        assert_eq!(watched.run(0), Ok(()));
        assert_eq!(peer.join().expect("it ends"), Ok(()));
    });
}

#[test]
fn failure_ends_both_and_no_buffer_is_in_use() {
    // Three threads have too many interleavings, so explore those with at most two preemptions.
    let mut bounded = loom::model::Builder::new();
    bounded.preemption_bound = Some(2);
    bounded.check(|| {
        let watched = Watched::new();
        let other = Arc::clone(&watched);
        let third = Arc::clone(&watched);
        let peer = thread::spawn(move || other.run(1));
        let failing = thread::spawn(move || third.shared.fail(aborted()));
        for result in [watched.run(0), peer.join().expect("it ends")] {
            assert!(result == Ok(()) || result == Err(aborted()));
        }
        assert_eq!(failing.join().expect("it ends"), aborted());
    });
}

/// With a limit of zero, a rank that waits is late at any point: it stays as long as its peer uses
/// its buffers.
#[test]
fn late_rank_stays_while_its_buffers_are_in_use() {
    loom::model(|| {
        let watched = Watched::with_options(CommOptions::default().limit(Duration::ZERO));
        let other = Arc::clone(&watched);
        let peer = thread::spawn(move || other.run(1));
        for result in [watched.run(0), peer.join().expect("it ends")] {
            assert!(
                matches!(result, Ok(()) | Err(CommError::Stalled { .. })),
                "{result:?}"
            );
        }
    });
}

/// The same, while a third thread fails the world.
#[test]
fn failure_of_late_rank_leaves_no_buffer_in_use() {
    let mut bounded = loom::model::Builder::new();
    bounded.preemption_bound = Some(2);
    bounded.check(|| {
        let watched = Watched::with_options(CommOptions::default().limit(Duration::ZERO));
        let other = Arc::clone(&watched);
        let third = Arc::clone(&watched);
        let peer = thread::spawn(move || other.run(1));
        let failing = thread::spawn(move || third.shared.fail(aborted()));
        let results = [watched.run(0), peer.join().expect("it ends")];
        let ends = |r: &Result<(), CommError>| {
            matches!(
                r,
                Ok(()) | Err(CommError::Stalled { .. } | CommError::Aborted { .. })
            )
        };
        assert!(results.iter().all(ends), "{results:?}");
        failing.join().expect("it ends");
    });
}

#[test]
fn leaving_rank_fails_its_peer() {
    loom::model(|| {
        let watched = Watched::new();
        let other = Arc::clone(&watched);
        let peer = thread::spawn(move || other.shared.leave(1, 0));
        assert!(matches!(
            watched.run(0),
            Err(CommError::Left {
                rank: 1,
                done: 0,
                ..
            })
        ));
        peer.join().expect("it ends");
    });
}
