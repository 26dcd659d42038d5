//! Ranks without a library or a device, whose collectives are simulated: for tests, fuzzing and
//! measurements of the control plane.

pub mod clients;
pub mod fuzz;

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use zero_alloc::device::{DType, DeviceError};

use super::Ranks;
use super::abort::AbortCompletion;
use super::descriptors::SPARE_PLACES;
use super::frames::frame;
use super::handshake::{Hello, Key};
use super::process::{Operation, Transport, World};
use super::rendezvous::{Joined, join};
use super::server::Stranger;
use super::watcher::Connection;
use crate::call::{Call, Counts};
use crate::split_request::SplitRequest;
use crate::{Collective, CommError};

/// The library's version that all ranks report.
pub const LIBRARY: u64 = 23_007;
/// The unique id that rank 0 sends.
pub const ID: [u8; 128] = [7; 128];
/// Maximum size of a frame of the handshake.
pub const MAX_HELLO_BYTES: usize = super::handshake::MAX_HELLO_BYTES;
/// Upper bound of the heap that the coordinator uses for a connection that has not passed the
/// handshake: its entry in a tree, whose nodes are filled by at least 5 of 11, and a received
/// frame, whose buffer doubles as it grows.
pub const STRANGER_BYTES: usize = 3 * size_of::<Stranger>() + 2 * (4 + MAX_HELLO_BYTES);

/// Connections that may wait with their handshake at a time.
pub const fn places(world_size: usize) -> usize {
    world_size + SPARE_PLACES as usize
}

/// A limit that does not expire.
pub const LONG: Duration = Duration::from_secs(60);

/// Returns a free port below the ephemeral ports, never the same one twice.
pub fn free_port() -> u16 {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    loop {
        let port = 10_000
            + (std::process::id() as usize * 64 + NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000;
        if TcpListener::bind(("127.0.0.1", port as u16)).is_ok() {
            return port as u16;
        }
    }
}

/// A rank of a world on this machine.
pub fn ranks(rank: usize, world_size: usize, port: u16) -> Ranks {
    Ranks::new(rank, world_size, rank, "127.0.0.1", port).one_machine(true)
}

/// The first frame of a rank, with its length.
///
/// # Panics
/// The system has no random numbers.
pub fn first_frame(ranks: &Ranks) -> Vec<u8> {
    let hello = Hello::new(ranks.rank, ranks.world_size, LIBRARY);
    frame(&Key::new(ranks.token.as_ref()).hello(&hello).unwrap()).unwrap()
}

pub(crate) fn join_as(ranks: &Ranks, limit: Duration) -> Result<Joined, CommError> {
    join(ranks, LIBRARY, || Ok(ID.to_vec()), limit)
}

/// A transport that records aborts.
#[derive(Default)]
pub(crate) struct Fake {
    pub(crate) aborts: AtomicUsize,
    pub(crate) error: Mutex<Option<String>>,
}

impl Transport for Fake {
    fn error(&self) -> Option<String> {
        self.error.lock().clone()
    }

    fn abort(&self) -> AbortCompletion {
        self.aborts.fetch_add(1, Ordering::Relaxed);
        AbortCompletion::new().1
    }
}

pub(crate) fn broadcast(len: usize) -> Call {
    let collective = Collective::Broadcast;
    let segments = Counts::Balanced(len);
    Call {
        collective,
        op: None,
        dtype: DType::F32,
        segments,
        root: None,
        control: false,
    }
}

/// A rank with simulated collectives. Dropping it ends the rank.
pub struct Rank {
    pub(crate) world: Arc<World>,
    _connection: Connection,
    pub(crate) fake: Arc<Fake>,
    pub(crate) poisoned: Arc<Mutex<Vec<String>>>,
    /// Calls on the world's communicator.
    calls: AtomicU64,
    /// Splits of the world's communicator.
    splits: AtomicU64,
}

impl Rank {
    /// Joins the world of `ranks`. `limit` is that of its collectives.
    ///
    /// # Errors
    /// The rendezvous failed.
    pub fn join(ranks: &Ranks, limit: Duration) -> Result<Self, CommError> {
        let connection = Connection::start(join_as(ranks, LONG)?, ranks.rank, limit)?;
        let world = Arc::clone(&connection.world);
        let fake = Arc::new(Fake::default());
        world.open(0, Arc::clone(&fake) as Arc<dyn Transport>);
        let (poisoned, calls, splits) = Default::default();
        Ok(Self {
            world,
            _connection: connection,
            fake,
            poisoned,
            calls,
            splits,
        })
    }

    #[cfg(test)]
    pub(crate) fn start(ranks: &Ranks, limit: Duration) -> Self {
        Self::join(ranks, limit).unwrap()
    }

    /// Calls broadcasts of these lengths, which end at once, and waits until the watcher has seen
    /// their ends.
    ///
    /// # Errors
    /// The failure of the world.
    pub fn broadcast(&self, lens: impl IntoIterator<Item = usize>) -> Result<(), CommError> {
        lens.into_iter()
            .for_each(|len| self.call(len, Ok(true), Ok(true)));
        while self.world.under_way(0) > 0 && self.failure().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.failure().map_or(Ok(()), Err)
    }

    /// Splits the world into one communicator of all ranks: a round trip of all ranks through the
    /// coordinator.
    ///
    /// # Errors
    /// The failure of the world.
    pub fn split(&self) -> Result<(), CommError> {
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        self.world
            .split(
                0,
                number,
                SplitRequest {
                    color: Some(0),
                    key: 0,
                },
            )
            .map(drop)
    }

    /// Calls a broadcast that does not end.
    pub fn start_broadcast(&self, len: usize) {
        self.call(len, Ok(true), Ok(false));
    }

    /// The failure of the world.
    pub fn failure(&self) -> Option<CommError> {
        self.world.failure()
    }

    /// Waits for the failure of the world and the abort of this rank.
    ///
    /// # Panics
    /// The world does not fail.
    pub fn wait_for_failure(&self) -> CommError {
        let begun = Instant::now();
        while self.fake.aborts.load(Ordering::Relaxed) == 0 {
            assert!(begun.elapsed() < LONG, "the world did not fail");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.world.failure().unwrap()
    }

    /// Ends this rank without an error.
    pub fn end(self) {
        self.world.close(0, self.calls.load(Ordering::Relaxed));
    }

    /// Calls a broadcast with these results of its probes.
    pub(crate) fn call(
        &self,
        len: usize,
        reached: Result<bool, DeviceError>,
        ended: Result<bool, DeviceError>,
    ) {
        let poisoned = Arc::clone(&self.poisoned);
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.world.called(0, broadcast(len));
        let operation = Operation {
            stream: "comm".to_owned(),
            reached: Box::new(move || reached.clone()),
            ended: Box::new(move || ended.clone()),
            poison: Box::new(move |error| poisoned.lock().push(error.to_string())),
        };
        self.world.watch(0, operation);
    }
}
