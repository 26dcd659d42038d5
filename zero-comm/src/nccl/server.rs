//! The coordinator's threads, in rank 0's process: one thread accepts connections and later sends keepalives; one
//! thread per rank receives messages.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use zero_alloc::TimeLimit;

use super::coordinator::{Coordinator, Outgoing};
use super::message::{Hello, Message};
use super::wire::{Incoming, prepare, send};
use crate::RendezvousError;

/// Time limit for the first frame of a connection.
const HELLO_LIMIT: Duration = Duration::from_secs(10);
/// Connections that may wait with their first frame, beside one for each rank. Others are closed.
const MAX_STRANGERS: usize = 64;
/// Time between two attempts to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(5);
/// Time between two keepalives.
pub(super) const KEEPALIVE: Duration = Duration::from_secs(1);

/// The time for which a peer may send nothing.
pub(super) fn silence_limit(limit: Duration) -> TimeLimit {
    TimeLimit::new(limit.max(KEEPALIVE * 5))
}

/// A connection to a rank.
struct Peer {
    stream: TcpStream,
    /// The time for which it may send nothing; starts anew with each message.
    silence: TimeLimit,
}

struct State {
    coordinator: Coordinator,
    peers: Vec<Option<Peer>>,
    /// The id that the welcome sends to every rank.
    id: Vec<u8>,
    /// The failure of the rendezvous.
    refused: Option<RendezvousError>,
    /// Connections whose first frame has not arrived.
    greeting: usize,
}

impl State {
    fn send(&self, rank: usize, message: &Message) {
        // If sending fails, the receiving thread detects the end of the connection.
        let _ = self.peers[rank].as_ref().map(|peer| send(&peer.stream, std::slice::from_ref(message)));
    }

    /// Sends to rank 0 last: when it receives the message, its process, which runs these threads, may end.
    fn send_all(&self, message: &Message) {
        (0..self.peers.len()).rev().for_each(|rank| self.send(rank, message));
    }

    fn send_outgoing(&self, outgoing: Vec<Outgoing>) {
        for outgoing in outgoing {
            match outgoing {
                Outgoing::To(rank, message) => self.send(rank, &message),
                Outgoing::All(message) => self.send_all(&message),
            }
        }
    }

    fn refuse(&mut self, error: RendezvousError) {
        self.send_all(&Message::Refused { error: error.clone() });
        self.refused.get_or_insert(error);
    }
}

type Shared = Arc<Mutex<State>>;

/// Starts the coordinator of `world_size` ranks on `listener`. It sends `id` to all ranks if they join within
/// `limit`.
///
/// # Errors
/// The system cannot start a thread.
pub(super) fn start(
    listener: TcpListener,
    world_size: usize,
    library: u64,
    id: Vec<u8>,
    limit: Duration,
) -> io::Result<()> {
    let peers = (0..world_size).map(|_| None).collect();
    let state = State { coordinator: Coordinator::new(world_size, library), peers, id, refused: None, greeting: 0 };
    let shared = Arc::new(Mutex::new(state));
    listener.set_nonblocking(true)?;
    std::thread::Builder::new().name("zero coordinator".to_owned()).spawn(move || {
        accept_all(listener, &shared, limit);
        keep_alive(&shared, limit);
    })?;
    Ok(())
}

/// Accepts connections until all ranks have joined, the rendezvous failed, or the limit passed.
fn accept_all(listener: TcpListener, shared: &Shared, limit: Duration) {
    let mut time = TimeLimit::new(limit);
    loop {
        if let Ok((stream, _)) = listener.accept() {
            let mut state = shared.lock();
            if state.greeting >= state.peers.len() + MAX_STRANGERS {
                continue;
            }
            state.greeting += 1;
            drop(state);
            let shared = Arc::clone(shared);
            // If the system has no thread for it, the rank is reported as missing at the limit.
            let builder = std::thread::Builder::new().name("zero coordinator, receiving".to_owned());
            let _ = builder.spawn(move || greet(stream, &shared, limit));
            continue;
        }
        // No connection is pending, or accepting failed; a persistent failure ends at the limit.
        let mut state = shared.lock();
        let ranks = state.coordinator.missing();
        if ranks.is_empty() || state.refused.is_some() {
            return;
        }
        if time.has_passed() {
            let world_size = state.peers.len();
            return state.refuse(RendezvousError::Missing { ranks, world_size, limit });
        }
        drop(state);
        std::thread::sleep(ACCEPT_PAUSE);
    }
}

/// Reads the first frame of a connection, then receives from that rank. An unrelated connection is dropped.
fn greet(stream: TcpStream, shared: &Shared, limit: Duration) {
    let greeting = prepare(&stream).and_then(|()| {
        let mut incoming = Incoming::from_stranger(stream.try_clone()?);
        let mut time = TimeLimit::new(HELLO_LIMIT);
        loop {
            match incoming.next_frame(KEEPALIVE)? {
                Some(frame) => return Ok((frame, incoming)),
                None if time.has_passed() => return Err(io::ErrorKind::TimedOut.into()),
                None => {}
            }
        }
    });
    let mut state = shared.lock();
    state.greeting -= 1;
    let Ok((frame, incoming)) = greeting else { return };
    let hello = Hello::decode(&frame);
    // Nobody can join or end a world that is complete.
    if hello == Ok(None) || state.coordinator.missing().is_empty() {
        return;
    }
    let refused = state.refused.clone().map_or(Ok(()), Err);
    let joined = refused.and(hello).and_then(|hello| hello.map(|hello| state.coordinator.join(&hello)).transpose());
    match joined {
        Err(error) => {
            let _ = send(&stream, &[Message::Refused { error: error.clone() }]);
            state.refuse(error);
        }
        Ok(None) => {}
        Ok(Some(rank)) => {
            state.peers[rank] = Some(Peer { stream, silence: silence_limit(limit) });
            if state.coordinator.missing().is_empty() {
                state.send_all(&Message::Welcome { id: state.id.clone() });
            }
            drop(state);
            receive(rank, incoming.into_known(), shared, limit);
        }
    }
}

fn receive(rank: usize, mut incoming: Incoming, shared: &Shared, limit: Duration) {
    loop {
        let received = incoming.next(KEEPALIVE);
        let mut state = shared.lock();
        match received {
            Ok(None) => {}
            Ok(Some(message)) => {
                if let Some(peer) = &mut state.peers[rank] {
                    peer.silence = silence_limit(limit);
                }
                let outgoing = state.coordinator.receive(rank, message);
                state.send_outgoing(outgoing);
            }
            Err(_) if !state.coordinator.missing().is_empty() => return state.refuse(RendezvousError::Died { rank }),
            Err(error) => {
                let outgoing = state.coordinator.lost(rank, format!("its process or its connection ended: {error}"));
                state.peers[rank] = None;
                return state.send_outgoing(outgoing);
            }
        }
        if state.refused.is_some() {
            return;
        }
    }
}

/// Sends keepalives, and declares a rank lost if it sends nothing within the [`silence_limit`].
fn keep_alive(shared: &Shared, limit: Duration) {
    loop {
        std::thread::sleep(KEEPALIVE);
        let mut state = shared.lock();
        if state.refused.is_some() || state.coordinator.is_over() {
            return;
        }
        state.send_all(&Message::Alive);
        for rank in 0..state.peers.len() {
            if state.peers[rank].as_mut().is_some_and(|peer| peer.silence.has_passed()) {
                let outgoing = state.coordinator.lost(rank, format!("sent nothing for {limit:?}"));
                state.peers[rank] = None;
                state.send_outgoing(outgoing);
            }
        }
    }
}
