//! The rendezvous: all ranks connect to the coordinator at rank 0's address.
//!
//! Why a rank whose connection is dropped tries again: rank 0 closes a connection for a wrong token
//! as soon as it has the first frame, and for lack of places at the earliest after 0.1 s. So a rank
//! gives up after eight drops that came sooner (1.6 s), and repeats all others until its limit.
//! Its error is the end of its last connection, even if rank 0 has ended since.

use std::io::{self, ErrorKind, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::net::sockopt::ipv6_v6only;
use zero_alloc::TimeLimit;

use super::frames::frame;
use super::handshake::{Hello, Key, MAX_HELLO_BYTES};
use super::message::Message;
use super::wire::{Incoming, prepare};
use super::{Ranks, descriptors, server};
use crate::{CommError, RendezvousError};

#[cfg(all(test, not(miri)))] // Miri has no sockets.
mod tests;

/// First and longest pause between attempts.
const PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(500)];
/// Attempts that rank 0 may end sooner than [`server::SILENT_LIMIT`]. It ends a connection that
/// soon for its token; for lack of places it ends a connection only later, and those attempts are
/// repeated until the limit.
const REJECTIONS: usize = 8;
/// Connections that may wait until the coordinator accepts them; the system may allow fewer.
pub(crate) const BACKLOG: i32 = 4096;

/// A rank's connection to the coordinator, after all ranks have joined.
pub(crate) struct Joined {
    /// The id that initializes NCCL, from rank 0.
    pub(crate) id: Vec<u8>,
    /// The time between two reports of this rank's progress.
    pub(crate) report_every: Duration,
    pub(crate) outgoing: TcpStream,
    pub(crate) incoming: Incoming,
}

/// Joins the world, within seven eighths of `limit`; the rest is left for NCCL. Rank 0 first starts
/// the coordinator, with the id that `make_id` returns. It waits for the other ranks for three
/// quarters of `limit`, so that its answer reaches them before their limit.
///
/// # Errors
/// The rendezvous failed or exceeded its limit, or `make_id` failed.
pub(crate) fn join(
    ranks: &Ranks,
    library: u64,
    make_id: impl FnOnce() -> Result<Vec<u8>, CommError>,
    limit: Duration,
) -> Result<Joined, CommError> {
    if ranks.token.is_none() && !ranks.one_machine {
        return Err(RendezvousError::NoToken.into());
    }
    let own_limit = limit / 8 * 7;
    let mut client = Client {
        ranks,
        address: format!("{}:{}", ranks.host, ranks.port),
        key: Key::new(ranks.token.as_ref()),
        limit: own_limit,
        time: TimeLimit::new(own_limit),
        begun: Instant::now(),
        ended: None,
    };

    let hello = Hello::new(ranks.rank, ranks.world_size, library);
    let mut first = None;
    if ranks.rank == 0 {
        // NCCL needs time for an id. Meanwhile connections that nobody accepts would fill the
        // backlog.
        let id = make_id()?;
        let key = client.key.clone();
        let listener = client.listen()?;
        let (own, accepted) = connected_pair().map_err(|e| RendezvousError::System {
            message: format!(
                "failed to connect rank 0 to itself: {e}; check the loopback interface"
            ),
        })?;
        first = Some(own);
        let world_size = ranks.world_size;
        let join_limit = limit / 4 * 3;
        let options = server::Options {
            world_size,
            library,
            key,
            id,
            join_limit,
            limit,
        };
        server::start(listener, Some(accepted), options)?;
    }

    let mut rejections = 0;
    let mut pause = PAUSES[0];
    loop {
        let stream = match first.take() {
            Some(stream) => stream,
            None => client.connect()?,
        };
        let error = match client.handshake(stream, &hello) {
            Ok(joined) => return Ok(joined),
            Err(Failure::Final(error)) => return Err(error.into()),
            Err(Failure::Ended(error)) => error,
        };
        let dropped = matches!(error, RendezvousError::Dropped { .. });
        rejections += usize::from(dropped && client.begun.elapsed() < server::SILENT_LIMIT);
        if rejections == REJECTIONS || client.time.left() <= pause {
            return Err(error.into());
        }
        client.ended = Some(error);
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSES[1]);
    }
}

/// Why an attempt to join failed.
enum Failure {
    /// The connection ended without a reason: another attempt may succeed.
    Ended(RendezvousError),
    /// Rank 0 sent the reason, or the limit has passed.
    Final(RendezvousError),
}

/// The two ends of a connection within this process, which no other connection can delay.
fn connected_pair() -> io::Result<(TcpStream, TcpStream)> {
    let private = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .or_else(|_| TcpListener::bind((Ipv6Addr::LOCALHOST, 0)))?;
    let own = TcpStream::connect(private.local_addr()?)?;
    loop {
        let (accepted, address) = private.accept()?;
        // Another process may have found the port.
        if address == own.local_addr()? {
            return Ok((own, accepted));
        }
    }
}

/// A rank's part of the rendezvous.
struct Client<'a> {
    ranks: &'a Ranks,
    /// Rank 0's address, for errors.
    address: String,
    key: Key,
    limit: Duration,
    time: TimeLimit,
    /// The start of the latest connection.
    begun: Instant,
    /// Why the latest connection ended. It says more than a later failure to connect.
    ended: Option<RendezvousError>,
}

impl Client<'_> {
    /// Listens at a loopback address if all ranks are on this machine, otherwise at all addresses:
    /// rank 0's name may resolve to a loopback address here (as on Debian), or to one that a
    /// network translates.
    fn listen(&self) -> Result<TcpListener, RendezvousError> {
        let all = vec![Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
        let candidates = if self.ranks.one_machine {
            self.loopback()
        } else {
            all
        };

        let mut last = io::Error::from(ErrorKind::AddrNotAvailable);
        for ip in candidates {
            match TcpListener::bind((ip, self.ranks.port)) {
                // Some systems do not accept IPv4 at IPv6's unspecified address.
                Ok(listener)
                    if ip == Ipv6Addr::UNSPECIFIED && ipv6_v6only(&listener).unwrap_or(true) => {}
                Ok(listener) => {
                    // Ranks beyond the backlog of `bind` would connect only after a
                    // second or more. If it fails, that backlog stays.
                    let _ = rustix::net::listen(&listener, BACKLOG);
                    return Ok(listener);
                }
                Err(error) if error.kind() == ErrorKind::AddrInUse => {
                    return Err(RendezvousError::AddressInUse {
                        address: self.address.clone(),
                    });
                }
                Err(error) => last = error,
            }
        }

        Err(RendezvousError::Listen {
            address: self.address.clone(),
            message: last.to_string(),
        })
    }

    /// The loopback addresses at which ranks of one machine meet, in order of preference.
    fn loopback(&self) -> Vec<IpAddr> {
        match self.ranks.host.parse::<IpAddr>() {
            Ok(ip) if ip.is_loopback() => vec![ip],
            _ => vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
        }
    }

    /// The addresses at which rank 0 listens. Each call resolves the name: in a cluster, rank 0's
    /// name can appear after the other ranks start.
    fn addresses(&mut self) -> io::Result<Vec<SocketAddr>> {
        let port = self.ranks.port;
        if self.ranks.rank == 0 || self.ranks.one_machine {
            return Ok(self
                .loopback()
                .into_iter()
                .map(|ip| (ip, port).into())
                .collect());
        }

        // A lookup has no time limit, so it runs on another thread.
        let (sender, receiver) = mpsc::channel();
        let host = self.ranks.host.clone();
        std::thread::Builder::new()
            .name("zero name lookup".to_owned())
            .spawn(move || {
                let addresses = (host.as_str(), port).to_socket_addrs();
                let _ = sender.send(addresses.map(Vec::from_iter));
            })?;

        while !self.time.has_passed() {
            if let Ok(addresses) = receiver.recv_timeout(self.time.slice()) {
                return addresses;
            }
        }

        Err(io::Error::new(
            ErrorKind::TimedOut,
            "the lookup of the name did not end",
        ))
    }

    /// Connects to rank 0, as soon as it listens; if rank 0 ended after it had proved the token,
    /// only while it listens.
    fn connect(&mut self) -> Result<TcpStream, RendezvousError> {
        let mut pause = PAUSES[0];
        loop {
            let error = match self
                .addresses()
                .and_then(|addresses| self.connect_to(&addresses))
            {
                Ok(stream) => return Ok(stream),
                Err(error) => error,
            };
            let has_ended = matches!(self.ended, Some(RendezvousError::Broken { .. }))
                && error.kind() == ErrorKind::ConnectionRefused;
            if has_ended || self.time.left() <= pause {
                let (rank, address, message) =
                    (self.ranks.rank, self.address.clone(), error.to_string());
                let unreachable = RendezvousError::Unreachable {
                    rank,
                    address,
                    limit: self.limit,
                    message,
                };
                return Err(self.ended.take().unwrap_or(unreachable));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSES[1]).min(self.limit / 4);
        }
    }

    fn connect_to(&mut self, addresses: &[SocketAddr]) -> io::Result<TcpStream> {
        let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
        for address in addresses {
            self.begun = Instant::now();
            // An attempt that takes longer would count as one slice only.
            match TcpStream::connect_timeout(address, self.time.slice().max(PAUSES[0])) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
            if self.time.has_passed() {
                break;
            }
        }
        Err(last)
    }

    /// Proves the token to the coordinator, and receives its answer when all ranks have joined.
    fn handshake(&mut self, mut stream: TcpStream, hello: &Hello) -> Result<Joined, Failure> {
        let rank = self.ranks.rank;
        let address = || self.address.clone();
        let broken = |e: io::Error| RendezvousError::Broken {
            message: e.to_string(),
        };
        let not_rank_0 = || {
            Failure::Final(RendezvousError::NotRankZero {
                rank,
                address: address(),
            })
        };

        // The errors of the system, and of the connection before and after rank 0 has proved the
        // token.
        let system = |e: io::Error| Failure::Final(broken(e));
        let dropped = |e: io::Error| match e.kind() {
            ErrorKind::InvalidData => not_rank_0(),
            _ => Failure::Ended(RendezvousError::Dropped {
                rank,
                address: address(),
            }),
        };

        let ended = |e: io::Error| match e.kind() {
            ErrorKind::InvalidData => Failure::Final(broken(e)),
            _ => Failure::Ended(broken(e)),
        };

        prepare(&stream).map_err(system)?;
        let mut incoming = Incoming::new(stream.try_clone().map_err(system)?);
        let hello = self.key.hello(hello).map_err(system)?;
        stream
            .write_all(&frame(&hello).map_err(system)?)
            .map_err(dropped)?;

        let proof = loop {
            if let Some(challenge) = incoming
                .next_frame(self.time.slice(), MAX_HELLO_BYTES)
                .map_err(dropped)?
            {
                break self.key.answer(&hello, challenge).ok_or_else(not_rank_0)?;
            }
            if self.time.has_passed() {
                let limit = self.limit;
                let message = "it accepted the connection, but did not answer".to_owned();
                return Err(Failure::Final(RendezvousError::Unreachable {
                    rank,
                    address: address(),
                    limit,
                    message,
                }));
            }
        };

        stream
            .write_all(&frame(&proof).map_err(system)?)
            .map_err(ended)?;
        loop {
            match incoming.next(self.time.slice()).map_err(ended)? {
                Some(Message::Welcome { id, report_every }) => {
                    descriptors::add_socket(&stream);
                    descriptors::add_socket(&incoming);
                    return Ok(Joined {
                        id,
                        report_every,
                        outgoing: stream,
                        incoming,
                    });
                }
                Some(Message::Refused { error }) => return Err(Failure::Final(error)),
                _ if self.time.has_passed() => {
                    let message = format!("not all ranks joined within {:?}", self.limit);
                    return Err(Failure::Final(RendezvousError::Broken { message }));
                }
                _ => {}
            }
        }
    }
}
