//! The coordinator's thread, in rank 0's process: an event loop over non-blocking connections.
//!
//! A connection is a *stranger* until it has passed the [handshake](super::handshake). Strangers
//! may send two small frames within [`HELLO_LIMIT`]. They cannot change the state: those without
//! the token are closed without an answer and counted. When they fill all places, the oldest silent
//! one is closed, so that a rank always gets in. A stranger that passes the handshake becomes the
//! *peer* of its rank, or ends the rendezvous with an error that names it. When all ranks have
//! joined, the listener and all strangers are closed.
//!
//! A peer has a buffer of bytes that it has not read yet. It is lost if that exceeds
//! [`MAX_OUTPUT_BYTES`](super::wire::MAX_OUTPUT_BYTES), if it reads nothing for [`WRITE_LIMIT`], or
//! if it sends nothing within the [`silence_limit`]. No other thread shares this state.
//!
//! Why one event loop: a thread for each rank needed a stack and two descriptors, and a rank that
//! did not read blocked all others under a lock.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, Write};
use std::time::{Duration, Instant};

use mio::event::Event;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use zero_alloc::TimeLimit;

use super::coordinator::{Coordinator, KEEPALIVE_TICKS, Outgoing, report_every};
use super::descriptors;
use super::frames::{MAX_FRAME_BYTES, decode, encode, frame};
use super::handshake::{Expected, Hello, Key, MAX_HELLO_BYTES, VERSION};
use super::message::Message;
use super::wire::{Input, Output, WRITE_LIMIT};
use crate::{CommError, RendezvousError};

#[cfg(all(test, not(miri)))] // Miri has no sockets.
mod tests;

/// Time limit for the handshake of a connection.
const HELLO_LIMIT: Duration = Duration::from_secs(10);
/// Time for which a stranger with a correct hello keeps its place when all places are taken.
const CROWDED_LIMIT: Duration = Duration::from_secs(1);
/// Time for which a silent stranger keeps its place when all places are taken: a rank may be
/// delayed.
pub(crate) const SILENT_LIMIT: Duration = Duration::from_millis(100);
/// Connections to accept before the others have their turn.
const ACCEPTS: usize = 128;
/// Time for which the reason of a failed rendezvous is sent to ranks whose handshake has begun.
const REFUSAL_LIMIT: Duration = Duration::from_secs(2);
/// Time between two ticks.
const TICK: Duration = Duration::from_secs(1);
/// Time without a message after which a keepalive is sent.
pub(crate) const KEEPALIVE: Duration = TICK.saturating_mul(KEEPALIVE_TICKS);
/// Reads from one connection before the others have their turn.
const READS: usize = 16;

/// The time for which a peer may send nothing.
pub(crate) fn silence_limit(limit: Duration) -> Duration {
    limit.max(KEEPALIVE * 3)
}

/// A connection that has not passed the handshake.
pub(crate) struct Stranger {
    stream: TcpStream,
    input: Input,
    time: TimeLimit,
    /// After a correct hello: its claims and the proof that must follow.
    claims: Option<(Hello, Expected)>,
}

/// The connection to a rank that has joined.
struct Peer {
    stream: TcpStream,
    input: Input,
    output: Output,
    /// The time for which it may send nothing.
    silence: TimeLimit,
    /// It has sent a message since the last tick.
    heard: bool,
    /// Ticks since a message was sent to it.
    quiet_ticks: u32,
    /// The time for which it may read nothing while output waits.
    stalled: Option<TimeLimit>,
}

/// The world to coordinate.
pub(crate) struct Options {
    pub(crate) world_size: usize,
    pub(crate) library: u64,
    pub(crate) key: Key,
    /// The id that the welcome sends to every rank.
    pub(crate) id: Vec<u8>,
    /// The time for all ranks to join.
    pub(crate) join_limit: Duration,
    /// The limit of collectives.
    pub(crate) limit: Duration,
}

struct Server {
    options: Options,
    poll: Poll,
    /// `None` when all ranks have joined or the rendezvous has failed.
    listener: Option<TcpListener>,
    /// Connections may be pending at the listener.
    acceptable: bool,
    coordinator: Coordinator,
    /// By rank, which is also the connection's token.
    peers: Vec<Option<Peer>>,
    /// Ranks that have not joined.
    missing: usize,
    /// By token, so oldest first.
    strangers: BTreeMap<usize, Stranger>,
    next_token: usize,
    /// Strangers that may wait at a time, beside the newest.
    places: usize,
    /// Strangers that were closed.
    rejected: usize,
    /// Peers that may have sent more than was read.
    unread: Vec<usize>,
    /// Ranks whose connection has ended, with the cause.
    lost: VecDeque<(usize, String)>,
    /// The failure of the rendezvous, and the time for which it is still sent.
    refused: Option<(RendezvousError, TimeLimit)>,
    /// The time for all ranks to join.
    joining: TimeLimit,
    next_tick: Instant,
}

/// Starts the coordinator on `listener`, with `own` as its first connection.
///
/// # Errors
/// The process may not open enough descriptors, or the system refuses a thread or a descriptor.
pub(crate) fn start(
    listener: std::net::TcpListener,
    own: Option<std::net::TcpStream>,
    options: Options,
) -> Result<(), RendezvousError> {
    let world_size = options.world_size;
    let mut server = Server::new(listener, options)?;
    if let Some(own) = own {
        own.set_nonblocking(true)
            .map_err(|error| failed(&error, world_size))?;
        server.admit(TcpStream::from_std(own));
    }
    let builder = std::thread::Builder::new().name("zero coordinator".to_owned());
    builder.spawn(move || server.run()).map_err(|e| RendezvousError::System {
        message: format!(
            "failed to start the coordinator's thread: {e}; check `ulimit -u` and the container's limit"
        ),
    })?;
    Ok(())
}

impl Server {
    fn new(listener: std::net::TcpListener, options: Options) -> Result<Self, RendezvousError> {
        let n = options.world_size;
        let failed = |error| failed(&error, n);
        let places = descriptors::reserve(n)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let mut listener = TcpListener::from_std(listener);
        let poll = Poll::new().map_err(failed)?;
        poll.registry()
            .register(&mut listener, Token(n), Interest::READABLE)
            .map_err(failed)?;

        Ok(Self {
            poll,
            listener: Some(listener),
            acceptable: true,
            coordinator: Coordinator::new(n, options.library),
            peers: (0..n).map(|_| None).collect(),
            missing: n,
            strangers: BTreeMap::new(),
            next_token: n + 1,
            places: places - 1,
            rejected: 0,
            unread: Vec::new(),
            lost: VecDeque::new(),
            refused: None,
            joining: TimeLimit::new(options.join_limit),
            next_tick: Instant::now() + TICK,
            options,
        })
    }

    fn run(mut self) {
        let mut events = Events::with_capacity(1024.max(self.peers.len()));
        // Without the selector nothing works: the connections close, and the ranks report it.
        while !self.is_done() && self.turn(&mut events).is_ok() {}
    }

    /// Waits for events and handles them.
    fn turn(&mut self, events: &mut Events) -> io::Result<()> {
        let mut wait = self.next_tick.saturating_duration_since(Instant::now());
        if self.is_joining() {
            wait = wait.min(self.joining.slice());
        }

        if self.acceptable && self.listener.is_some() {
            let is_crowded = self.strangers.len() > self.places;
            wait = wait.min(if is_crowded {
                SILENT_LIMIT
            } else {
                Duration::ZERO
            });
        }

        if !self.unread.is_empty() {
            wait = Duration::ZERO;
        }
        match self.poll.poll(events, Some(wait)) {
            Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
            _ => {}
        }

        for rank in std::mem::take(&mut self.unread) {
            self.receive(rank, true);
        }
        events.iter().for_each(|event| self.handle(event));
        self.accept();

        if self.is_joining() && self.joining.has_passed() {
            let ranks = self.coordinator.missing();
            let world_size = self.peers.len();
            let limit = self.options.join_limit;
            let strangers = self.rejected + self.strangers.len();
            self.refuse(RendezvousError::Missing {
                ranks,
                world_size,
                limit,
                strangers,
            });
        }

        if Instant::now() >= self.next_tick {
            self.next_tick = Instant::now() + TICK;
            self.tick();
        }

        while let Some((rank, cause)) = self.lost.pop_front() {
            self.lose(rank, cause);
        }
        Ok(())
    }

    fn is_joining(&self) -> bool {
        self.missing > 0 && self.refused.is_none()
    }

    fn is_done(&mut self) -> bool {
        let sent = |server: &Self| {
            server
                .peers
                .iter()
                .flatten()
                .all(|peer| peer.output.is_empty())
        };
        if let Some((_, time)) = &mut self.refused {
            return time.has_passed() || self.strangers.is_empty() && sent(self);
        }
        self.missing == 0 && self.coordinator.is_over() && sent(self)
    }

    fn handle(&mut self, event: &Event) {
        let Token(token) = event.token();
        if token > self.peers.len() {
            self.greet(token);
        } else if token == self.peers.len() {
            self.acceptable = true;
        } else {
            if let Some(peer) = &mut self.peers[token]
                && let Err(error) = peer.flush()
            {
                self.lost.push_back((token, ended(&error)));
            }
            self.receive(token, event.is_read_closed());
        }
    }

    /// Accepts the pending connections. If one is too many and no other makes room, the rest stays
    /// pending.
    fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            if !self.acceptable || self.strangers.len() > self.places && !self.close_one() {
                return;
            }
            let Some(listener) = &self.listener else {
                return;
            };
            match listener.accept() {
                Ok((stream, _)) => {
                    self.admit(stream);
                    if self.strangers.len() > self.places {
                        self.close_one();
                    }
                }
                Err(error) => match descriptors::exhausted(&error, self.peers.len()) {
                    Some(error) => return self.refuse(error),
                    // Some errors concern the connection only. After the others, the next tick
                    // tries again.
                    None => {
                        self.acceptable = matches!(
                            error.kind(),
                            ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                        );
                    }
                },
            }
        }
    }

    /// Closes the oldest silent stranger, except the newest one, or else the oldest one, if its
    /// time in a crowd is over.
    fn close_one(&mut self) -> bool {
        let mut others = self.strangers.iter_mut().rev().skip(1).rev();
        let silent = others.find(|(_, stranger)| stranger.claims.is_none());
        let is_over = |(&token, stranger): (_, &mut Stranger)| {
            (stranger.time.elapsed() >= SILENT_LIMIT).then_some(token)
        };
        let silent = silent.and_then(is_over);
        let closed = silent.or_else(|| {
            let (&token, oldest) = self.strangers.iter_mut().next()?;
            (oldest.time.elapsed() >= CROWDED_LIMIT).then_some(token)
        });
        closed.is_some_and(|token| {
            self.rejected += 1;
            self.strangers.remove(&token).is_some()
        })
    }

    fn admit(&mut self, mut stream: TcpStream) {
        let token = self.next_token;
        self.next_token += 1;
        let both = Interest::READABLE | Interest::WRITABLE;
        let registered = self
            .poll
            .registry()
            .register(&mut stream, Token(token), both);

        if registered.and_then(|()| stream.set_nodelay(true)).is_err() {
            self.rejected += 1;
            return;
        }

        let input = Input::default();
        let time = TimeLimit::new(HELLO_LIMIT);
        self.strangers.insert(
            token,
            Stranger {
                stream,
                input,
                time,
                claims: None,
            },
        );

        // A rank sends its hello at once: a rank is not taken for a silent stranger.
        self.greet(token);
    }

    /// Continues the handshake of a stranger.
    fn greet(&mut self, token: usize) {
        let Some(mut stranger) = self.strangers.remove(&token) else {
            return;
        };
        match stranger.receive(&self.options.key) {
            Ok(None) => drop(self.strangers.insert(token, stranger)),
            Ok(Some(hello)) => self.join(stranger, &hello),
            Err(_) => self.rejected += 1,
        }
    }

    /// Adds a rank that has passed the handshake to the world.
    fn join(&mut self, mut stranger: Stranger, hello: &Hello) {
        let joined = match (&self.refused, hello) {
            (Some((error, _)), _) => Err(error.clone()),
            (
                None,
                &Hello {
                    version: got, rank, ..
                },
            ) if got != VERSION => Err(RendezvousError::Version {
                rank,
                got,
                expected: VERSION,
            }),
            (None, hello) => self.coordinator.join(hello),
        };

        let rank = match joined {
            Ok(rank) => rank,
            Err(error) => {
                if let Ok(refusal) = encode(&Message::Refused {
                    error: error.clone(),
                }) {
                    // The frame fits into the buffer of a new connection.
                    let _ = stranger.stream.write(&refusal);
                }
                return self.refuse(error);
            }
        };

        let both = Interest::READABLE | Interest::WRITABLE;
        if let Err(error) = self
            .poll
            .registry()
            .reregister(&mut stranger.stream, Token(rank), both)
        {
            self.lost.push_back((rank, ended(&error)));
        }
        let silence = TimeLimit::new(silence_limit(self.options.limit));
        let (Stranger { stream, input, .. }, output) = (stranger, Output::default());
        descriptors::add_socket(&stream);

        let peer = Peer {
            stream,
            input,
            output,
            silence,
            heard: true,
            quiet_ticks: 0,
            stalled: None,
        };

        self.peers[rank] = Some(peer);
        self.missing -= 1;
        if self.missing == 0 {
            self.listener = None;
            self.strangers.clear();
            let report_every = report_every(self.options.world_size);
            self.send_all(&Message::Welcome {
                id: self.options.id.clone(),
                report_every,
            });
        }
    }

    /// Ends the rendezvous and answers the ranks that have joined or try to.
    fn refuse(&mut self, error: RendezvousError) {
        if self.refused.is_none() {
            self.send_all(&Message::Refused {
                error: error.clone(),
            });
            self.refused = Some((error, TimeLimit::new(REFUSAL_LIMIT)));
            // Another rendezvous may use the port.
            self.acceptable = true;
            self.accept();
            self.listener = None;
        }
    }

    /// Receives from a peer. `closed`: its end has arrived, and no event follows.
    fn receive(&mut self, rank: usize, closed: bool) {
        for _ in 0..READS {
            let Some(peer) = &mut self.peers[rank] else {
                return;
            };
            let more = match peer.input.read_from(&mut peer.stream, MAX_FRAME_BYTES) {
                Ok(more) => more,
                Err(error) => return self.lost.push_back((rank, ended(&error))),
            };
            while let Some(peer) = &mut self.peers[rank] {
                let frame = peer.input.next_frame(MAX_FRAME_BYTES);
                match frame.and_then(|frame| frame.map(decode).transpose()) {
                    Ok(None) => break,
                    Ok(Some(message)) if self.missing > 0 && message != Message::Alive => {
                        let cause = "it sent a message before all ranks had joined".to_owned();
                        return self.lost.push_back((rank, cause));
                    }
                    Ok(Some(message)) => {
                        peer.heard = true;
                        let outgoing = self.coordinator.receive(rank, message);
                        self.send(outgoing);
                    }
                    Err(error) => return self.lost.push_back((rank, ended(&error))),
                }
            }
            let drained = self.peers[rank]
                .as_ref()
                .is_none_or(|peer| peer.input.is_drained());
            if !more || drained && !closed {
                return;
            }
        }

        if !self.unread.contains(&rank) {
            self.unread.push(rank);
        }
    }

    /// Closes the connection to a rank.
    fn lose(&mut self, rank: usize, cause: String) {
        if self.peers[rank].is_none() {
            return;
        }
        if self.missing > 0 {
            self.refuse(RendezvousError::Died { rank });
        } else {
            // To it too: if it was stopped, it learns later why.
            let outgoing = self.coordinator.lost(rank, cause);
            self.send(outgoing);
        }
        self.peers[rank] = None;
    }

    /// Once a second: checks time limits, and sends what the coordinator has to send, or else
    /// keepalives.
    fn tick(&mut self) {
        self.acceptable = true;
        let before = self.strangers.len();
        self.strangers
            .retain(|_, stranger| !stranger.time.has_passed());
        self.rejected += before - self.strangers.len();
        if self.missing > 0 {
            return;
        }
        let limit = silence_limit(self.options.limit);

        for (rank, peer) in self
            .peers
            .iter_mut()
            .enumerate()
            .filter_map(|(rank, peer)| Some((rank, peer.as_mut()?)))
        {
            if std::mem::take(&mut peer.heard) {
                peer.silence = TimeLimit::new(limit);
            }
            if peer.silence.has_passed() {
                self.lost
                    .push_back((rank, format!("sent nothing for {limit:?}")));
            } else if peer.stalled.as_mut().is_some_and(TimeLimit::has_passed) {
                self.lost
                    .push_back((rank, format!("received nothing for {WRITE_LIMIT:?}")));
            }
        }

        let outgoing = self.coordinator.tick();
        self.send(outgoing);
        let Ok(alive) = encode(&Message::Alive) else {
            return;
        };

        for rank in 0..self.peers.len() {
            if self.peers[rank]
                .as_ref()
                .is_some_and(|peer| peer.quiet_ticks >= KEEPALIVE_TICKS)
            {
                self.write(rank, &alive);
            }
        }

        self.peers
            .iter_mut()
            .flatten()
            .for_each(|peer| peer.quiet_ticks += 1);
    }

    fn send(&mut self, outgoing: Vec<Outgoing>) {
        for outgoing in outgoing {
            match outgoing {
                Outgoing::To(rank, message) => {
                    let frame = self.encode(&message);
                    self.write(rank, &frame);
                }
                Outgoing::All(message) => self.send_all(&message),
            }
        }
    }

    /// Sends to rank 0 last: when it receives the message, its process, which runs this thread, may
    /// end.
    fn send_all(&mut self, message: &Message) {
        let frame = self.encode(message);
        (0..self.peers.len())
            .rev()
            .for_each(|rank| self.write(rank, &frame));
    }

    /// Encodes a message, or the failure that it is too large.
    fn encode(&self, message: &Message) -> Vec<u8> {
        encode(message).unwrap_or_else(|error| {
            let message = format!("the coordinator failed to send a message: {error}");
            encode(&Message::Failed {
                error: CommError::Peer { rank: 0, message },
            })
            .unwrap_or_default()
        })
    }

    fn write(&mut self, rank: usize, frames: &[u8]) {
        if let Some(peer) = &mut self.peers[rank]
            && let Err(error) = peer.send(frames)
        {
            self.lost.push_back((rank, ended(&error)));
        }
    }
}

/// The error of the coordinator's start.
fn failed(error: &io::Error, world_size: usize) -> RendezvousError {
    descriptors::exhausted(error, world_size).unwrap_or_else(|| RendezvousError::System {
        message: format!("failed to start the coordinator: {error}"),
    })
}

fn ended(error: &io::Error) -> String {
    format!("its process or its connection ended: {error}")
}

impl Stranger {
    /// Reads the handshake as far as it has arrived; returns the claims of a rank that has passed
    /// it.
    ///
    /// # Errors
    /// It is not a rank of this job, or its connection ended.
    fn receive(&mut self, key: &Key) -> io::Result<Option<Hello>> {
        loop {
            let more = self.input.read_from(&mut self.stream, MAX_HELLO_BYTES)?;
            while let Some(received) = self.input.next_frame(MAX_HELLO_BYTES)? {
                let rejected = || io::Error::from(ErrorKind::PermissionDenied);
                if let Some((hello, expected)) = self.claims.take() {
                    return if expected.matches(received) {
                        Ok(Some(hello))
                    } else {
                        Err(rejected())
                    };
                }
                let hello = key.check_hello(received).ok_or_else(rejected)?;
                let (challenge, expected) = key.challenge(received)?;
                let challenge = frame(&challenge)?;
                // The frame fits into the buffer of a new connection.
                if self.stream.write(&challenge)? < challenge.len() {
                    return Err(rejected());
                }
                self.claims = Some((hello, expected));
            }
            if !more {
                return Ok(None);
            }
        }
    }
}

impl Peer {
    /// Sends what the connection accepts now; the rest waits for its next event.
    fn send(&mut self, frames: &[u8]) -> io::Result<()> {
        let waits = !self.output.is_empty();
        self.quiet_ticks = 0;
        self.output.append(frames)?;
        if waits { Ok(()) } else { self.flush() }
    }

    fn flush(&mut self) -> io::Result<()> {
        let progress = self.output.write_to(&mut self.stream)?;
        if self.output.is_empty() {
            self.stalled = None;
        } else if progress || self.stalled.is_none() {
            self.stalled = Some(TimeLimit::new(WRITE_LIMIT));
        }
        Ok(())
    }
}
