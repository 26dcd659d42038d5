//! Rank 0's file descriptors, one for each rank; and the sockets that a fork must close.

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::RendezvousError;

/// Descriptors that the process may open while its ranks join.
const RESERVE: u64 = 64;
/// Fewest connections that can wait with their handshake.
const MIN_PLACES: u64 = 16;
/// Sockets that can wait with their handshake, beside one for each rank.
pub(crate) const SPARE_PLACES: u64 = 64;

/// Reserves the descriptors for `world_size` ranks: raises the soft limit, up to the hard limit.
/// Returns the number of connections that may wait with their handshake.
///
/// # Errors
/// [`RendezvousError::Descriptors`]: the hard limit is too low.
pub(crate) fn reserve(world_size: usize) -> Result<usize, RendezvousError> {
    let ranks = world_size as u64;
    let used = open() + ranks + RESERVE;
    let wanted = used + ranks + SPARE_PLACES;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);

    if current.is_some_and(|current| current < wanted) {
        let raised = Some(maximum.map_or(wanted, |maximum| maximum.min(wanted)));
        // If it fails, the check below decides.
        let _ = setrlimit(
            Resource::Nofile,
            Rlimit {
                current: raised,
                maximum,
            },
        );
    }

    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if limit < used + MIN_PLACES {
        return Err(RendezvousError::Descriptors {
            needed: used + MIN_PLACES,
            limit,
            world_size,
        });
    }

    Ok((limit - used).min(ranks + SPARE_PLACES) as usize)
}

/// The sockets of this process's worlds, also those that have ended.
static SOCKETS: Mutex<Vec<Socket>> = Mutex::new(Vec::new());

/// A socket by its descriptor and its inode. Later files can have the same descriptor, but not both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Socket {
    /// The descriptor.
    pub fd: RawFd,
    /// The inode that `fstat` returns.
    pub inode: u64,
}

/// The sockets of this process to the coordinator and, of rank 0, to the other ranks.
///
/// The end of a process is noticed by the end of its connections, which a child that it has forked
/// keeps open. The child must close each descriptor that still has its inode.
pub fn sockets() -> Vec<Socket> {
    SOCKETS.lock().clone()
}

/// Adds a socket to [`sockets`].
pub(crate) fn add_socket(socket: impl AsFd) {
    // Without the inode a later file would look the same.
    if let Ok(stat) = rustix::fs::fstat(&socket) {
        let fd = socket.as_fd().as_raw_fd();
        let inode = stat.st_ino;
        SOCKETS.lock().push(Socket { fd, inode });
    }
}

/// The descriptors that are open now.
fn open() -> u64 {
    std::fs::read_dir("/dev/fd").map_or(0, |entries| entries.count() as u64)
}

/// If `error` means that no descriptor was left, the error of the rendezvous.
pub(crate) fn exhausted(error: &io::Error, world_size: usize) -> Option<RendezvousError> {
    match Errno::from_io_error(error)? {
        Errno::MFILE => {
            let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
            let needed = limit.saturating_add(world_size as u64 + RESERVE);
            Some(RendezvousError::Descriptors {
                needed,
                limit,
                world_size,
            })
        }
        Errno::NFILE => {
            let message =
                "rank 0's machine has no file descriptor left (ENFILE); raise `sysctl fs.file-max`";
            Some(RendezvousError::System {
                message: message.to_owned(),
            })
        }
        _ => None,
    }
}
