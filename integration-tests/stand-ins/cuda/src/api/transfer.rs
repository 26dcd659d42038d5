//! Copies and fills, in stream order.

use super::driver;
use crate::driver::device::current;
use crate::driver::op::{Op, Place, read};
use crate::driver::space;
use crate::driver::stream::{Stream, stream};
use crate::error::{Failure, Outcome, say};

/// An end of a copy that must be registered with the driver (device or pinned memory); checked at
/// the call.
fn known(address: u64, bytes: usize) -> Outcome<Place> {
    if space::now().holds(address, bytes as u64) {
        Ok(Place::Known(address))
    } else {
        Err(Failure::InvalidValue)
    }
}

/// An end of `cuMemcpyAsync`, whose kind of memory the call does not state. A GPU's driver also
/// accepts pageable memory there, but then waits inside the call for all earlier work, holding
/// locks that a peer may need. This workspace never passes pageable memory, so the stand-in rejects
/// it.
fn anywhere(address: u64, bytes: usize) -> Outcome<Place> {
    known(address, bytes).inspect_err(|_| {
        say!("a copy at {address:#x}, which is neither the device's memory nor pinned")
    })
}

/// Enqueues a copy. As on a GPU, pageable memory is read during the call, and a write to it is
/// complete on return.
fn copy(on: &Stream, to: Place, from: Place, bytes: usize) -> Outcome {
    if let (Place::Known(to), Place::Known(from)) = (&to, &from)
        && to.abs_diff(*from) < bytes as u64
    {
        say!(
            "a copy of {bytes} bytes from {from:#x} to {to:#x}: the ranges overlap, which CUDA does not define"
        );
        return Err(Failure::InvalidValue);
    }
    if on.part().is_some() {
        return on.submit(Op::Copy { to, from, bytes });
    }
    let from = match from {
        Place::Pageable(from) => {
            Place::Bytes(read(from, bytes).map_err(|_| Failure::InvalidValue)?)
        }
        from => from,
    };
    let wait = matches!(to, Place::Pageable(_));
    on.submit(Op::Copy { to, from, bytes })?;
    if wait { on.synchronize() } else { Ok(()) }
}

fn fill(on: usize, to: u64, pattern: u32, width: usize, count: usize) -> Outcome {
    let on = stream(on)?;
    current()?;
    let bytes = count.checked_mul(width).ok_or(Failure::InvalidValue)?;
    if !to.is_multiple_of(width as u64) {
        return Err(Failure::InvalidValue);
    }
    known(to, bytes)?;
    on.submit(Op::Fill {
        to,
        pattern,
        width,
        count,
    })
}

driver! {
    cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, on: usize) {
        let on = stream(on)?;
        current()?;
        copy(&on, known(to, bytes)?, Place::of_host(from), bytes)
    }

    cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, on: usize) {
        let on = stream(on)?;
        current()?;
        copy(&on, Place::of_host(to), known(from, bytes)?, bytes)
    }

    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, on: usize) {
        let on = stream(on)?;
        current()?;
        copy(&on, known(to, bytes)?, known(from, bytes)?, bytes)
    }

    cuMemcpyAsync(to: u64, from: u64, bytes: usize, on: usize) {
        let on = stream(on)?;
        current()?;
        copy(&on, anywhere(to, bytes)?, anywhere(from, bytes)?, bytes)
    }

    cuMemcpyPeerAsync(to: u64, _to_context: usize, from: u64, _from_context: usize, bytes: usize, on: usize) {
        let on = stream(on)?;
        current()?;
        copy(&on, known(to, bytes)?, known(from, bytes)?, bytes)
    }

    cuMemsetD8Async(to: u64, value: u8, count: usize, on: usize) {
        fill(on, to, u32::from(value), 1, count)
    }

    cuMemsetD16Async(to: u64, value: u16, count: usize, on: usize) {
        fill(on, to, u32::from(value), 2, count)
    }

    cuMemsetD32Async(to: u64, value: u32, count: usize, on: usize) {
        fill(on, to, value, 4, count)
    }
}
