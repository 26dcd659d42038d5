//! Thousands of ranks on one thread, which speak the protocol but run nothing: a load for the
//! coordinator.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};

use super::{ID, LIBRARY, LONG, broadcast, ranks};
use crate::CommError;
use crate::split_request::SplitRequest;
use crate::world::RendezvousError;
use crate::world::fnv::Fnv;
use crate::world::frames::{MAX_FRAME_BYTES, decode, encode, frame};
use crate::world::handshake::{Hello, Key};
use crate::world::message::{Context, Message, Progress};
use crate::world::rendezvous::BACKLOG;
use crate::world::server::{self, Options};
use crate::world::wire::{Input, Output};

/// The communicator of all ranks.
const WORLD: Context = 0;

/// Starts the coordinator of `world_size` ranks of this machine in this process; it ends with the
/// world.
///
/// # Errors
/// The coordinator cannot start.
pub fn start_coordinator(world_size: usize, port: u16) -> Result<(), CommError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port));
    let listener = listener.map_err(|e| RendezvousError::System {
        message: format!("port {port}: {e}"),
    })?;
    // As in a rendezvous.
    let _ = rustix::net::listen(&listener, BACKLOG);
    let id = ID.to_vec();
    let key = Key::new(None);
    server::start(
        listener,
        None,
        Options {
            world_size,
            library: LIBRARY,
            key,
            id,
            join_limit: LONG,
            limit: LONG,
        },
    )?;
    Ok(())
}

/// The calls that clients report: broadcasts, all of which have ended.
#[derive(Clone, Debug, Default)]
pub struct Script {
    count: u64,
    hash: Fnv,
    /// The length of the last one.
    len: usize,
}

impl Script {
    /// Makes the next call, of `len` elements.
    pub fn call(&mut self, len: usize) {
        self.count += 1;
        self.hash.add(&broadcast(len));
        self.len = len;
    }

    /// The number of calls made.
    pub fn count(&self) -> u64 {
        self.count
    }
}

/// Messages and bytes between all clients and the coordinator, with the handshakes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Traffic {
    /// Messages to the coordinator.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Messages from the coordinator.
    pub received: u64,
    /// Their bytes.
    pub received_bytes: u64,
}

/// A message of the coordinator to a client.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// All ranks have joined; a rank reports its progress once in this time.
    Joined(Duration),
    /// The rank and the size in the communicator of a split.
    Split(Option<(usize, usize)>),
    /// The failure of the world.
    Failed(CommError),
    /// The end of the connection.
    Ended(String),
}

struct Client {
    stream: TcpStream,
    input: Input,
    output: Output,
    hello: Vec<u8>,
    challenged: bool,
    reported: u64,
    splits: u64,
}

impl Client {
    fn send(&mut self, frame: &[u8], traffic: &mut Traffic) -> io::Result<()> {
        traffic.sent += 1;
        traffic.sent_bytes += frame.len() as u64;
        self.output.append(frame)?;
        self.output.write_to(&mut self.stream).map(drop)
    }
}

/// All ranks of a world, as clients of its coordinator.
pub struct Clients {
    key: Key,
    poll: Poll,
    events: Events,
    clients: Vec<Client>,
    traffic: Traffic,
}

impl Clients {
    /// Connects all ranks, which send the first frame of their handshake.
    ///
    /// # Errors
    /// A connection failed.
    pub fn connect(world_size: usize, port: u16) -> io::Result<Self> {
        let key = Key::new(None);
        let poll = Poll::new()?;
        let events = Events::with_capacity(1024);
        let mut all = Self {
            key,
            poll,
            events,
            clients: Vec::new(),
            traffic: Traffic::default(),
        };

        for rank in 0..world_size {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            let stream = std::net::TcpStream::connect(address)?;
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            let mut stream = TcpStream::from_std(stream);
            let both = Interest::READABLE | Interest::WRITABLE;
            all.poll
                .registry()
                .register(&mut stream, Token(rank), both)?;
            let ranks = ranks(rank, world_size, port);
            let hello = all
                .key
                .hello(&Hello::new(ranks.rank, ranks.world_size, LIBRARY))?;
            let first = frame(&hello)?;
            let input = Input::default();
            let output = Output::default();
            let mut client = Client {
                stream,
                input,
                output,
                hello,
                challenged: false,
                reported: 0,
                splits: 0,
            };
            client.send(&first, &mut all.traffic)?;
            all.clients.push(client);
        }

        Ok(all)
    }

    /// The traffic so far.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Waits for messages for at most `wait`; returns them, with the ranks that received them.
    ///
    /// # Errors
    /// A client cannot decode a message, or cannot answer.
    pub fn receive(&mut self, wait: Duration) -> io::Result<Vec<(usize, Event)>> {
        match self.poll.poll(&mut self.events, Some(wait)) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
            _ => {}
        }

        let mut received = Vec::new();
        let mut ended = Vec::new();
        for rank in self.events.iter().map(|event| event.token().0) {
            let client = &mut self.clients[rank];
            let traffic = &mut self.traffic;
            let mut more = true;
            while more {
                let flushed = client.output.write_to(&mut client.stream);
                more = match flushed
                    .and_then(|_| client.input.read_from(&mut client.stream, MAX_FRAME_BYTES))
                {
                    Ok(more) => more,
                    Err(error) => {
                        ended.push((rank, Event::Ended(error.to_string())));
                        false
                    }
                };
                while let Some(bytes) = client.input.next_frame(MAX_FRAME_BYTES)? {
                    traffic.received += 1;
                    traffic.received_bytes += 4 + bytes.len() as u64;
                    if !std::mem::replace(&mut client.challenged, true) {
                        let proof = self.key.answer(&client.hello, bytes);
                        let proof = proof
                            .ok_or_else(|| io::Error::other("the challenge has a wrong MAC"))?;
                        client.send(&frame(&proof)?, traffic)?;
                        continue;
                    }
                    received.extend(match decode(bytes)? {
                        Message::Welcome { report_every, .. } => {
                            Some((rank, Event::Joined(report_every)))
                        }
                        Message::Placed { place, .. } => Some((
                            rank,
                            Event::Split(place.map(|place| (place.rank, place.size))),
                        )),
                        Message::Failed { error } => Some((rank, Event::Failed(error))),
                        Message::Refused { error } => Some((rank, Event::Failed(error.into()))),
                        _ => None,
                    });
                }
            }
        }

        // First the failure of the world, if that is the cause.
        received.extend(ended);
        Ok(received)
    }

    /// Reports the calls of `script` as those of `rank`. A rank without new calls sends a
    /// keepalive.
    ///
    /// # Errors
    /// The connection ended.
    pub fn report(&mut self, rank: usize, script: &Script) -> io::Result<()> {
        let client = &mut self.clients[rank];
        let traffic = &mut self.traffic;
        let called = script.count;
        if called == std::mem::replace(&mut client.reported, called) {
            return client.send(&encode(&Message::Alive)?, traffic);
        }

        let progress = Progress {
            called,
            reached: called,
            ended: called,
            recent: vec![(broadcast(script.len), script.hash.0)],
        };
        let message = Message::Progress {
            context: WORLD,
            progress,
        };
        client.send(&encode(&message)?, traffic)
    }

    /// Requests a split of all ranks by the parity of their rank, in reverse order.
    ///
    /// # Errors
    /// The connection ended.
    pub fn split(&mut self, rank: usize) -> io::Result<()> {
        let client = &mut self.clients[rank];
        let traffic = &mut self.traffic;
        let number = client.splits;
        client.splits += 1;
        let request = SplitRequest {
            color: Some(rank as u64 % 2),
            key: u64::MAX - rank as u64,
        };
        let split = Message::Split {
            context: WORLD,
            number,
            request,
        };
        client.send(&encode(&split)?, traffic)
    }
}
