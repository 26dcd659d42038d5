//! The hub's threads, in rank 0's process: one accepts the ranks and then looks after them, one a rank listens.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::coordinator::{Coordinator, Out};
use super::message::Message;
use super::wire::{Incoming, prepare, send};
use crate::RendezvousError;

/// How long a new connection may take to say who it is.
const HELLO_LIMIT: Duration = Duration::from_secs(10);
/// Between two looks at who comes.
const ACCEPT_PAUSE: Duration = Duration::from_millis(5);
/// Between two signs of life.
pub(super) const BEAT: Duration = Duration::from_secs(1);

/// A connection to a rank.
struct Peer {
    stream: TcpStream,
    heard: Instant,
}

struct State {
    hub: Coordinator,
    peers: Vec<Option<Peer>>,
    /// What every rank gets when all have come.
    id: Vec<u8>,
    /// Why they never will.
    refused: Option<RendezvousError>,
}

impl State {
    fn send(&self, rank: usize, message: &Message) {
        // Where it fails the listener sees the end of the connection.
        let _ = self.peers[rank].as_ref().map(|peer| send(&peer.stream, std::slice::from_ref(message)));
    }

    /// Rank 0 is last: its process, and the hub with it, may end as soon as it has heard.
    fn send_all(&self, message: &Message) {
        (0..self.peers.len()).rev().for_each(|rank| self.send(rank, message));
    }

    fn carry_out(&self, outs: Vec<Out>) {
        for out in outs {
            match out {
                Out::To(rank, message) => self.send(rank, &message),
                Out::All(message) => self.send_all(&message),
            }
        }
    }

    fn refuse(&mut self, error: RendezvousError) {
        self.send_all(&Message::Refused { error: error.clone() });
        self.refused.get_or_insert(error);
    }
}

type Shared = Arc<Mutex<State>>;

/// Starts the hub of `world_size` ranks at `listener`; those who come within `limit` get `id`.
///
/// # Errors
/// The system has no thread for it.
pub(super) fn start(
    listener: TcpListener,
    world_size: usize,
    library: u64,
    id: Vec<u8>,
    limit: Duration,
) -> io::Result<()> {
    let peers = (0..world_size).map(|_| None).collect();
    let state = State { hub: Coordinator::new(world_size, library), peers, id, refused: None };
    let shared = Arc::new(Mutex::new(state));
    listener.set_nonblocking(true)?;
    std::thread::Builder::new().name("zero hub".to_owned()).spawn(move || {
        accept_all(listener, &shared, limit);
        look_after(&shared, limit);
    })?;
    Ok(())
}

/// Until all have come, or one came that does not belong here, or the limit passed.
fn accept_all(listener: TcpListener, shared: &Shared, limit: Duration) {
    let deadline = Instant::now().checked_add(limit);
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                let shared = Arc::clone(shared);
                let name = "zero hub, a rank".to_owned();
                // Without a thread for it the rank is missing in the end.
                let _ = std::thread::Builder::new().name(name).spawn(move || greet(stream, &shared));
                continue;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // Of one connection that ended again, or of the whole process: the limit tells.
            Err(_) => {}
        }
        let mut state = shared.lock();
        let ranks = state.hub.missing();
        if ranks.is_empty() || state.refused.is_some() {
            return;
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            let world_size = state.peers.len();
            return state.refuse(RendezvousError::Missing { ranks, world_size, limit });
        }
        drop(state);
        std::thread::sleep(ACCEPT_PAUSE);
    }
}

/// Learns who a connection is, and listens to it from then on. A stranger's is dropped.
fn greet(stream: TcpStream, shared: &Shared) {
    let Ok(reading) = prepare(&stream).and_then(|()| stream.try_clone()) else { return };
    let mut incoming = Incoming::new(reading);
    let deadline = Instant::now() + HELLO_LIMIT;
    let hello = loop {
        match incoming.next(BEAT) {
            Ok(Some(message)) => break message,
            Ok(None) if Instant::now() < deadline => {}
            _ => return,
        }
    };
    let mut state = shared.lock();
    let refused = state.refused.clone().map_or(Ok(()), Err);
    match refused.and_then(|()| state.hub.join(&hello)) {
        Err(error) => {
            let _ = send(&stream, &[Message::Refused { error: error.clone() }]);
            state.refuse(error);
        }
        Ok(None) => {}
        Ok(Some(rank)) => {
            state.peers[rank] = Some(Peer { stream, heard: Instant::now() });
            if state.hub.missing().is_empty() {
                state.send_all(&Message::Welcome { id: state.id.clone() });
            }
            drop(state);
            listen(rank, incoming, shared);
        }
    }
}

fn listen(rank: usize, mut incoming: Incoming, shared: &Shared) {
    loop {
        let heard = incoming.next(BEAT);
        let mut state = shared.lock();
        match heard {
            Ok(None) => {}
            Ok(Some(message)) => {
                if let Some(peer) = &mut state.peers[rank] {
                    peer.heard = Instant::now();
                }
                let outs = state.hub.hear(rank, message);
                state.carry_out(outs);
            }
            Err(_) if !state.hub.missing().is_empty() => return state.refuse(RendezvousError::Died { rank }),
            Err(error) => {
                let outs = state.hub.lost(rank, &format!("its process ended, or its connection did: {error}"));
                state.peers[rank] = None;
                return state.carry_out(outs);
            }
        }
        if state.refused.is_some() {
            return;
        }
    }
}

/// Gives signs of life, and counts as lost whoever gives none for `limit`.
fn look_after(shared: &Shared, limit: Duration) {
    loop {
        std::thread::sleep(BEAT);
        let mut state = shared.lock();
        if state.refused.is_some() || state.hub.is_over() {
            return;
        }
        state.send_all(&Message::Alive);
        let silent = |peer: &Option<Peer>| peer.as_ref().is_some_and(|p| p.heard.elapsed() > limit.max(BEAT * 5));
        let silent: Vec<usize> = (0..state.peers.len()).filter(|&rank| silent(&state.peers[rank])).collect();
        for rank in silent {
            let outs = state.hub.lost(rank, &format!("gave no sign of life for {limit:?}"));
            state.peers[rank] = None;
            state.carry_out(outs);
        }
    }
}
