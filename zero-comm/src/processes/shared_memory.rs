//! The memory that the processes of a communicator share.
//!
//! Its first rank makes it (`memfd_create`) and passes it to the others over a Unix socket in the
//! abstract namespace. So it has no name in a file system and no limit of one; the system frees it
//! when the last process has ended, however it ended.
//!
//! ```text
//! | rank 0: counters | half 0 | half 1 | rank 1: counters | half 0 | half 1 | ...
//! ```
//!
//! Only rank r writes its part: data into the half of the current round, then its counters, on which
//! the others wait ([`rounds`](super::rounds)).

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, sockopt,
};

use crate::CommError;
use crate::call::{Call, Group};

/// Bytes of data of a half.
pub(super) const DATA_BYTES: usize = 256 * 1024;
/// Most ranks: each has a piece of every half.
pub(super) const MOST_RANKS: usize = 1024;
/// Parts start at multiples of it, so that no two ranks write to one cache line.
const ALIGN_BYTES: usize = 128;
/// Pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(2);

/// The progress of a rank, which the others read.
#[repr(C, align(128))]
pub(super) struct Counters {
    /// Rounds whose data are written.
    pub(super) written: AtomicU32,
    /// Rounds whose data this rank has read, from all ranks.
    pub(super) read: AtomicU32,
    /// The rank in the whole world.
    pub(super) world_rank: AtomicUsize,
}

/// A mapping of the shared memory.
pub(super) struct Memory {
    at: *mut u8,
    bytes: usize,
    group: Group,
    header_bytes: usize,
}

// SAFETY: threads share it by atomic counters, and by halves that `Rounds` gives to one at a time.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping of this struct, of which no reference outlives it.
        let unmapped = unsafe { rustix::mm::munmap(self.at.cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Why the ranks did not get their memory.
pub(super) enum Refused {
    /// The world has failed.
    Failed(CommError),
    /// The limit has passed.
    Late,
    /// A call of the system failed.
    System(String),
}

fn system(what: &'static str) -> impl Fn(io::Error) -> Refused {
    move |error| Refused::System(format!("{what}: {error}"))
}

impl Memory {
    /// The memory of the ranks that call it with this `name`; a secret is part of it. `wait` is
    /// called between attempts; it returns an error when they shall end.
    ///
    /// # Errors
    /// The system refused memory or sockets, or `wait` returned an error.
    pub(super) fn meet(
        name: &str,
        group: Group,
        world_rank: usize,
        wait: &dyn Fn() -> Result<(), Refused>,
    ) -> Result<Self, Refused> {
        let header_bytes = (4 + Call::max_serialized_bytes(group.world_size)).next_multiple_of(64);
        let part = size_of::<Counters>() + 2 * half_bytes(header_bytes);
        let bytes = part * group.world_size;
        let address = SocketAddr::from_abstract_name(format!("zero-comm/{name}"))
            .map_err(system("socket name"))?;

        let fd = match group.rank {
            0 => serve(&address, group.world_size - 1, bytes, wait)?,
            _ => receive(&address, wait)?,
        };
        // SAFETY: a new mapping, at an address that the system chooses; the seals keep its length.
        let at = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )
        };
        let at = at.map_err(io::Error::from).map_err(system("mmap"))?;
        let memory = Self {
            at: at.cast(),
            bytes,
            group,
            header_bytes,
        };
        let own = memory.counters(group.rank);
        own.world_rank.store(world_rank, Ordering::Relaxed);
        Ok(memory)
    }

    pub(super) fn group(&self) -> Group {
        self.group
    }

    /// The bytes in front of a half's data, for the call.
    pub(super) fn header_bytes(&self) -> usize {
        self.header_bytes
    }

    fn part(&self, rank: usize) -> *mut u8 {
        assert!(rank < self.group.world_size, "rank {rank}");
        let part = size_of::<Counters>() + 2 * half_bytes(self.header_bytes);
        self.at.wrapping_add(rank * part)
    }

    /// The counters of `rank`.
    pub(super) fn counters(&self, rank: usize) -> &Counters {
        // SAFETY: `part` is within the mapping and aligned as the mapping's start; the system fills
        // new memory with zeros, which are valid counters, and all accesses are atomic.
        unsafe { &*self.part(rank).cast() }
    }

    /// A half of `rank`, with its header.
    ///
    /// # Safety
    /// The rank does not write to it while the slice exists.
    pub(super) unsafe fn half(&self, rank: usize, nth: usize) -> &[u8] {
        let bytes = half_bytes(self.header_bytes);
        let start = self
            .part(rank)
            .wrapping_add(size_of::<Counters>() + (nth & 1) * bytes);
        // SAFETY: within the mapping, as above; the caller's promise.
        unsafe { std::slice::from_raw_parts(start, bytes) }
    }

    /// A half of this rank.
    ///
    /// # Safety
    /// No other slice of it exists, and no rank reads it.
    #[expect(
        clippy::mut_from_ref,
        reason = "the caller promises that it is the only one"
    )]
    pub(super) unsafe fn own_half(&self, nth: usize) -> &mut [u8] {
        let bytes = half_bytes(self.header_bytes);
        let own = self.part(self.group.rank);
        let start = own.wrapping_add(size_of::<Counters>() + (nth & 1) * bytes);
        // SAFETY: within the mapping, as above; the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(start, bytes) }
    }
}

fn half_bytes(header_bytes: usize) -> usize {
    (header_bytes + DATA_BYTES).next_multiple_of(ALIGN_BYTES)
}

/// Makes the memory, of a length that no process can change, and passes it to `others` processes.
fn serve(
    address: &SocketAddr,
    others: usize,
    bytes: usize,
    wait: &dyn Fn() -> Result<(), Refused>,
) -> Result<OwnedFd, Refused> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("zero-comm", flags)
        .map_err(io::Error::from)
        .map_err(system("memfd_create"))?;
    // Memory that is missing is an error here, and not a signal at the first access.
    rustix::fs::fallocate(&fd, rustix::fs::FallocateFlags::empty(), 0, bytes as u64)
        .map_err(io::Error::from)
        .map_err(system("the memory that the ranks share"))?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(io::Error::from)
        .map_err(system("F_ADD_SEALS"))?;

    let listener = UnixListener::bind_addr(address).map_err(system("bind"))?;
    listener.set_nonblocking(true).map_err(system("listen"))?;
    let mut left = others;
    while left > 0 {
        match listener.accept() {
            Ok((stream, _)) if is_of_this_user(&stream) => {
                // A process that has ended is noticed by the world.
                if send(&stream, &fd).is_ok() {
                    left -= 1;
                }
            }
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                wait()?;
                std::thread::sleep(PAUSE);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(system("accept")(error)),
        }
    }
    Ok(fd)
}

/// Receives the memory from the first rank.
fn receive(
    address: &SocketAddr,
    wait: &dyn Fn() -> Result<(), Refused>,
) -> Result<OwnedFd, Refused> {
    loop {
        let received = UnixStream::connect_addr(address).and_then(|stream| {
            if !is_of_this_user(&stream) {
                let other = "rank 0's socket belongs to another user";
                return Err(io::Error::new(ErrorKind::PermissionDenied, other));
            }
            receive_from(&stream)
        });
        match received {
            Ok(Some(fd)) => return Ok(fd),
            // Rank 0 does not listen yet, has a full backlog, or has ended.
            Ok(None) => {}
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                return Err(system("connect")(error));
            }
            Err(_) => {}
        }
        wait()?;
        std::thread::sleep(PAUSE);
    }
}

fn is_of_this_user(stream: &UnixStream) -> bool {
    let peer = sockopt::socket_peercred(stream);
    peer.is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

fn send(stream: &UnixStream, fd: &OwnedFd) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let sent = rustix::net::sendmsg(
        stream,
        &[IoSlice::new(&[1])],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    match sent {
        1 => Ok(()),
        _ => Err(ErrorKind::WriteZero.into()),
    }
}

fn receive_from(stream: &UnixStream) -> io::Result<Option<OwnedFd>> {
    // Rank 0 answers at once, unless it is stopped: then the caller's limit is reached.
    stream.set_read_timeout(Some(Duration::from_millis(200)))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut into = [IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(stream, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok(fds.last())
}
