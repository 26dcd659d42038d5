//! Operations of a stream, and their execution.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::capture::Graph;
use super::device::Device;
use super::event::Ticket;
use super::host_thread;
use super::queue::{Random, in_host_function};
use super::space::{self, Space};
use super::{memory, space::Kind};
use crate::counts::{self, Work};
use crate::error::{Failure, Outcome};
use crate::settings::settings;

/// In the dry mode, copies and fills of more bytes are not run, and copies from the host (a batch)
/// of more than [`SMALL_UPLOAD_BYTES`].
const SMALL_BYTES: usize = 64 << 10;
const SMALL_UPLOAD_BYTES: usize = 1 << 20;

/// One end of a copy.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// Device or page-locked memory, which must be in the registry.
    Known(u64),
    /// Memory of the process that is not registered with the driver.
    Pageable(u64),
    /// The contents of pageable memory at the call.
    Bytes(Arc<[u8]>),
}

/// A kernel's launch, run in stream order.
pub(crate) type KernelRun = dyn Fn(&Arc<Space>) -> Result<(), (Failure, String)> + Send + Sync;

/// A host function, run in stream order.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut libc::c_void);

#[derive(Clone)]
pub(crate) enum Op {
    Copy {
        to: Place,
        from: Place,
        bytes: usize,
    },
    /// The first `width` bytes of `pattern`, `count` times.
    Fill {
        to: u64,
        pattern: u32,
        width: usize,
        count: usize,
    },
    Kernel(Arc<KernelRun>),
    /// Work of a library that its stand-in does not run; counted only.
    Tally {
        kind: Arc<str>,
        name: Arc<str>,
        work: Work,
    },
    Host {
        function: HostFunction,
        data: usize,
        /// Not a stand-in's own.
        counted: bool,
    },
    /// Waits until the 64-bit value at `at` equals `value`, or is not less, as a signed difference,
    /// if `or_more`.
    WaitValue {
        at: u64,
        value: u64,
        or_more: bool,
    },
    WriteValue {
        at: u64,
        value: u64,
    },
    Free(u64),
    Record(Arc<Ticket>),
    Wait(Arc<Ticket>),
    Graph(Arc<Graph>),
}

impl Place {
    /// The place of a host address: [`Self::Known`] if it is page-locked, else [`Self::Pageable`].
    pub(crate) fn of_host(address: u64) -> Self {
        if space::now()
            .find(address)
            .is_some_and(|(_, r)| r.kind == Kind::Pinned)
        {
            Self::Known(address)
        } else {
            Self::Pageable(address)
        }
    }

    fn check(&self, space: &Space, bytes: usize, what: &str) -> Result<(), (Failure, String)> {
        match *self {
            Self::Known(at) if !space.holds(at, bytes as u64) => {
                let text =
                    format!("a copy of {bytes} bytes {what} {at:#x}, which is not all live memory");
                Err((Failure::IllegalAddress, text))
            }
            _ => Ok(()),
        }
    }
}

/// Runs an operation of a stream of `device`. After the context has failed, only records and waits
/// run.
pub(crate) fn run(op: &Op, device: &'static Device, random: &mut Random) {
    random.delay();
    match op {
        Op::Record(ticket) => {
            counts::add("event", "record", Work::default());
            return ticket.complete();
        }
        Op::Wait(ticket) => {
            counts::add("event", "wait", Work::default());
            return ticket.wait();
        }
        _ if device.check().is_err() => return,
        _ => {}
    }

    let done = match op {
        Op::Copy { to, from, bytes } => {
            let work = Work {
                loaded: *bytes as u64,
                stored: *bytes as u64,
                operations: 0,
            };
            counts::add("copy", direction(to, from), work);
            copy(to, from, *bytes)
        }
        Op::Fill {
            to,
            pattern,
            width,
            count,
        } => {
            counts::add(
                "fill",
                "memset",
                Work {
                    stored: (width * count) as u64,
                    ..Work::default()
                },
            );
            fill(*to, *pattern, *width, *count)
        }
        Op::Tally { kind, name, work } => {
            counts::add(kind, name, *work);
            Ok(())
        }
        Op::Kernel(kernel) => kernel(&space::now()),
        Op::Host {
            function,
            data,
            counted,
        } => {
            let function = *function;
            let data = *data;
            // SAFETY: the caller of cuLaunchHostFunc guarantees that the function may be called
            // with this argument.
            let call = move || in_host_function(|| unsafe { function(data as *mut libc::c_void) });
            if *counted {
                counts::add("host function", "cuLaunchHostFunc", Work::default());
                host_thread::run(call);
            } else {
                call();
            }
            Ok(())
        }
        Op::WaitValue { at, value, or_more } => {
            counts::add("event", "wait for a value", Work::default());
            wait_value(*at, *value, *or_more, device)
        }
        Op::WriteValue { at, value } => value_at(*at, |word| word.store(*value, Ordering::Release)),
        Op::Free(at) => {
            memory::free(*at).map_err(|failure| (failure, format!("cuMemFreeAsync of {at:#x}")))
        }
        Op::Graph(graph) => {
            graph.run(device, random);
            Ok(())
        }
        Op::Record(_) | Op::Wait(_) => Ok(()),
    };

    if let Err((failure, what)) = done {
        device.fail(failure, &what);
    }
}

/// The direction of a copy.
fn direction(to: &Place, from: &Place) -> &'static str {
    let space = space::now();
    let on_device = |place: &Place| match place {
        Place::Known(at) => space
            .find(*at)
            .is_some_and(|(_, range)| range.kind != Kind::Pinned),
        _ => false,
    };
    match (on_device(to), on_device(from)) {
        (true, true) => "device to device",
        (true, false) => "host to device",
        (false, true) => "device to host",
        (false, false) => "host to host",
    }
}

fn copy(to: &Place, from: &Place, bytes: usize) -> Result<(), (Failure, String)> {
    let space = space::now();
    to.check(&space, bytes, "to")?;
    from.check(&space, bytes, "from")?;
    let small = if direction(to, from) == "host to device" {
        SMALL_UPLOAD_BYTES
    } else {
        SMALL_BYTES
    };

    if settings().dry && bytes > small {
        return Ok(());
    }
    let moved = match (to, from) {
        (Place::Known(to), Place::Known(from)) => {
            // SAFETY: both ranges are live, and `space` keeps them mapped; raw bytes have no
            // invalid values.
            unsafe { std::ptr::copy(*from as *const u8, *to as *mut u8, bytes) };
            Ok(())
        }
        (Place::Known(to), Place::Bytes(from)) if from.len() == bytes => {
            // SAFETY: `to` is live and kept mapped by `space`; `from` has this length.
            unsafe { std::ptr::copy(from.as_ptr(), *to as *mut u8, bytes) };
            Ok(())
        }
        (Place::Known(to), Place::Pageable(from)) => transfer(*from, *to, bytes, false),
        (Place::Pageable(to), Place::Known(from)) => transfer(*from, *to, bytes, true),
        (Place::Pageable(to), Place::Pageable(from)) => read(*from, bytes)
            .and_then(|between| transfer(between.as_ptr() as u64, *to, bytes, true)),
        _ => Err(Failure::InvalidValue),
    };

    moved.map_err(|failure| {
        (
            failure,
            format!("a copy of {bytes} bytes from {from:?} to {to:?}"),
        )
    })
}

/// Reads pageable memory. A bad address is an error.
pub(crate) fn read(from: u64, bytes: usize) -> Outcome<Arc<[u8]>> {
    let mut held = vec![0u8; bytes];
    transfer(from, held.as_mut_ptr() as u64, bytes, false)?;
    Ok(held.into())
}

/// Copies by a system call, which returns an error for a bad address where a plain copy would
/// crash. The far end may be a bad address: `to` if `write`, else `from`.
fn transfer(from: u64, to: u64, bytes: usize, write: bool) -> Outcome {
    let vector = |at: u64| libc::iovec {
        iov_base: at as *mut libc::c_void,
        iov_len: bytes,
    };

    let (near, far) = if write {
        (vector(from), vector(to))
    } else {
        (vector(to), vector(from))
    };

    let process = std::process::id() as i32;
    let mut done = 0;
    while done < bytes {
        let rest = |v: &libc::iovec| libc::iovec {
            iov_base: (v.iov_base as usize + done) as *mut libc::c_void,
            iov_len: bytes - done,
        };
        let near = rest(&near);
        let far = rest(&far);
        let moved = if write {
            // SAFETY: `near` is readable for its length; the kernel checks `far`.
            unsafe { libc::process_vm_writev(process, &raw const near, 1, &raw const far, 1, 0) }
        } else {
            // SAFETY: `near` is writable for its length; the kernel checks `far`.
            unsafe { libc::process_vm_readv(process, &raw const near, 1, &raw const far, 1, 0) }
        };
        match usize::try_from(moved) {
            Ok(0) => return Err(Failure::IllegalAddress),
            Ok(moved) => done += moved,
            Err(_) if std::io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT) => {
                return Err(Failure::IllegalAddress);
            }
            Err(_) => {
                // The system forbids the call: relies on the caller's pointer instead.
                // SAFETY: the caller of the driver guarantees the pageable end; the other end was
                // checked.
                unsafe {
                    std::ptr::copy(
                        (from as usize + done) as *const u8,
                        (to as usize + done) as *mut u8,
                        bytes - done,
                    )
                };
                return Ok(());
            }
        }
    }

    Ok(())
}

/// Calls `access` with a live 64-bit value.
fn value_at<T>(at: u64, access: impl FnOnce(&AtomicU64) -> T) -> Result<T, (Failure, String)> {
    let space = space::now();
    if !space.holds(at, size_of::<u64>() as u64) {
        return Err((
            Failure::IllegalAddress,
            format!("a value at {at:#x}, which is not all live memory"),
        ));
    }
    // SAFETY: live, kept mapped by `space`, and aligned, which the call checked.
    Ok(access(unsafe { &*(at as *const AtomicU64) }))
}

/// Waits for a value, or until the context fails.
fn wait_value(
    at: u64,
    value: u64,
    or_more: bool,
    device: &'static Device,
) -> Result<(), (Failure, String)> {
    while device.check().is_ok() {
        let now = value_at(at, |word| word.load(Ordering::Acquire))?;
        if now == value || or_more && now.wrapping_sub(value) as i64 > 0 {
            break;
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    Ok(())
}

fn fill(to: u64, pattern: u32, width: usize, count: usize) -> Result<(), (Failure, String)> {
    let bytes = width * count;
    let space = space::now();
    if !space.holds(to, bytes as u64) {
        let what = format!("a fill of {bytes} bytes at {to:#x}, which is not all live memory");
        return Err((Failure::IllegalAddress, what));
    }

    if settings().dry && bytes > SMALL_BYTES {
        return Ok(());
    }
    // SAFETY: live and kept mapped by `space`; the slice is of bytes and used only in this
    // function. A conflicting access meanwhile is a race of the program under test, whose result is
    // arbitrary bytes.
    let target = unsafe { std::slice::from_raw_parts_mut(to as *mut u8, bytes) };
    let pattern = pattern.to_le_bytes();

    match width {
        1 => target.fill(pattern[0]),
        _ => target
            .chunks_exact_mut(width)
            .for_each(|piece| piece.copy_from_slice(&pattern[..width])),
    }

    Ok(())
}
