//! The rendezvous: all ranks connect to the coordinator at rank 0's address.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use zero_alloc::TimeLimit;

use super::Ranks;
use super::message::{Hello, Message};
use super::server;
use super::wire::{Incoming, prepare, send};
use crate::{CommError, RendezvousError};

/// Limit of one attempt to connect.
const ATTEMPT: Duration = Duration::from_secs(5);
/// First and longest pause between attempts.
const PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(500)];
/// Extra time after the limit for rank 0's answer to arrive.
const GRACE: Duration = Duration::from_secs(5);

/// A rank's connection to the coordinator, after all ranks have joined.
pub(super) struct Joined {
    /// The id that initializes NCCL, from rank 0.
    pub(super) id: Vec<u8>,
    pub(super) outgoing: TcpStream,
    pub(super) incoming: Incoming,
}

/// Joins the world. Rank 0 first starts the coordinator, with the id that `make_id` returns.
///
/// # Errors
/// The rendezvous failed or exceeded `limit`, or `make_id` failed.
pub(super) fn join(
    ranks: &Ranks,
    library: u64,
    make_id: impl FnOnce() -> Result<Vec<u8>, CommError>,
    limit: Duration,
) -> Result<Joined, CommError> {
    let address = format!("{}:{}", ranks.host, ranks.port);
    let stream = if ranks.rank == 0 {
        let listener = listen(ranks, &address)?;
        let failed = |e: io::Error| RendezvousError::Listen { address: address.clone(), message: e.to_string() };
        let here = reachable(listener.local_addr().map_err(failed)?);
        let id = make_id()?;
        // Connects before the coordinator accepts: after another rank's refusal it accepts only what is pending.
        let stream = TcpStream::connect_timeout(&here, ATTEMPT).map_err(failed)?;
        server::start(listener, ranks.world_size, library, id, limit).map_err(failed)?;
        stream
    } else {
        connect(ranks, &address, limit)?
    };
    Ok(handshake(stream, ranks, library, limit)?)
}

/// Listens at `MASTER_ADDR`. If that is not an address of this machine (for example a service's or a translated
/// address), listens at all of this machine's addresses.
fn listen(ranks: &Ranks, address: &str) -> Result<TcpListener, RendezvousError> {
    let error = |e: io::Error| match e.kind() {
        io::ErrorKind::AddrInUse => RendezvousError::AddressInUse { address: address.to_owned() },
        _ => RendezvousError::Listen { address: address.to_owned(), message: e.to_string() },
    };
    match TcpListener::bind((ranks.host.as_str(), ranks.port)) {
        Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, ranks.port)).map_err(error)
        }
        bound => bound.map_err(error),
    }
}

/// Returns the address at which rank 0 connects to its own listener.
fn reachable(mut listening: SocketAddr) -> SocketAddr {
    if listening.ip().is_unspecified() {
        listening.set_ip(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    listening
}

fn connect(ranks: &Ranks, address: &str, limit: Duration) -> Result<TcpStream, RendezvousError> {
    let begun = Instant::now();
    let mut pause = PAUSES[0];
    loop {
        // Each attempt resolves the name: in a cluster, rank 0's name can appear after the other ranks start.
        let most = limit.saturating_sub(begun.elapsed()).clamp(PAUSES[0], ATTEMPT);
        let attempt = (ranks.host.as_str(), ranks.port).to_socket_addrs().and_then(|addresses| {
            let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
            for address in addresses {
                match TcpStream::connect_timeout(&address, most) {
                    Ok(stream) => return Ok(stream),
                    Err(error) => last = error,
                }
            }
            Err(last)
        });
        let error = match attempt {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        if begun.elapsed() + pause >= limit {
            let (rank, address, message) = (ranks.rank, address.to_owned(), error.to_string());
            return Err(RendezvousError::Unreachable { rank, address, limit, message });
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSES[1]);
    }
}

fn handshake(stream: TcpStream, ranks: &Ranks, library: u64, limit: Duration) -> Result<Joined, RendezvousError> {
    let broken = |e: io::Error| RendezvousError::Broken { message: e.to_string() };
    prepare(&stream).map_err(broken)?;
    send(&stream, &[Hello::new(ranks.rank, ranks.world_size, library)]).map_err(broken)?;
    let mut incoming = Incoming::new(stream.try_clone().map_err(broken)?);
    let mut time = TimeLimit::new(limit.saturating_add(GRACE));
    loop {
        match incoming.next(server::KEEPALIVE).map_err(broken)? {
            Some(Message::Welcome { id }) => return Ok(Joined { id, outgoing: stream, incoming }),
            Some(Message::Refused { error }) => return Err(error),
            // Keepalives.
            Some(_) => {}
            None if time.has_passed() => {
                let message = format!("rank 0 did not answer within {limit:?}");
                return Err(RendezvousError::Broken { message });
            }
            None => {}
        }
    }
}
