//! How the ranks find each other: at rank 0's address, each with its rank and what it was told of the world.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::Ranks;
use super::message::{Message, VERSION};
use super::server;
use super::wire::{Incoming, prepare, send};
use crate::{CommError, RendezvousError};

/// The longest that one attempt to connect takes.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Between attempts, at first and at most.
const PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(500)];
/// How much longer than rank 0 the others wait for its word.
const GRACE: Duration = Duration::from_secs(5);

/// A rank that has met the others.
pub(super) struct Joined {
    /// What rank 0 made, for all.
    pub(super) id: Vec<u8>,
    pub(super) outgoing: TcpStream,
    pub(super) incoming: Incoming,
}

/// Meets the other ranks; rank 0 starts the hub, with what `make_id` makes.
///
/// # Errors
/// They do not come together within `limit`, or `make_id` failed.
pub(super) fn join(
    ranks: &Ranks,
    library: u64,
    make_id: impl FnOnce() -> Result<Vec<u8>, CommError>,
    limit: Duration,
) -> Result<Joined, CommError> {
    let address = format!("{}:{}", ranks.host, ranks.port);
    let stream = if ranks.rank == 0 {
        let listener = listen(ranks, &address)?;
        let refused = |e: io::Error| RendezvousError::Listen { address: address.clone(), message: e.to_string() };
        let here = reachable(listener.local_addr().map_err(refused)?);
        server::start(listener, ranks.world_size, library, make_id()?, limit).map_err(refused)?;
        TcpStream::connect_timeout(&here, ATTEMPT).map_err(refused)?
    } else {
        connect(ranks, &address, limit)?
    };
    Ok(meet(stream, ranks, library, limit)?)
}

/// Listens at what `MASTER_ADDR` names; where that is not an address of this machine's own (a name of a service, an
/// address that is translated), at all of them.
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

/// Where rank 0 itself reaches its listener.
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
        // Names are resolved anew: in a cluster a node's name may come later than its peers.
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

fn meet(stream: TcpStream, ranks: &Ranks, library: u64, limit: Duration) -> Result<Joined, RendezvousError> {
    let broken = |e: io::Error| RendezvousError::Broken { message: e.to_string() };
    prepare(&stream).map_err(broken)?;
    let (rank, world_size) = (ranks.rank as u64, ranks.world_size as u64);
    send(&stream, &[Message::Hello { version: VERSION, rank, world_size, library }]).map_err(broken)?;
    let mut incoming = Incoming::new(stream.try_clone().map_err(broken)?);
    let deadline = Instant::now().checked_add(limit.saturating_add(GRACE));
    loop {
        match incoming.next(server::BEAT).map_err(broken)? {
            Some(Message::Welcome { id }) => return Ok(Joined { id, outgoing: stream, incoming }),
            Some(Message::Refused { error }) => return Err(error),
            // Signs of life.
            Some(_) => {}
            None if deadline.is_some_and(|deadline| Instant::now() >= deadline) => {
                let message = format!("rank 0 said nothing within {limit:?}");
                return Err(RendezvousError::Broken { message });
            }
            None => {}
        }
    }
}
