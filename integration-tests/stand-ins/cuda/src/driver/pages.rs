//! Virtual memory management: reserved addresses, physical memory, and mappings of physical memory
//! at addresses.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::device::{Charge, Device};
use super::mapping::{Mapping, Physical, unmap};
use super::space::{self, Kind};
use crate::error::{Failure, Outcome, say};
use stand_in_shared::{Handles, fresh_number, lock};

/// Sizes and addresses are multiples of this.
pub(crate) const GRANULARITY: usize = 2 << 20;

/// Time limit of [`unmap_range`] for operations that still use the memory.
const UNMAP_LIMIT: Duration = Duration::from_secs(60);

/// Physical memory of a device. It exists until its handles are released and it is no longer
/// mapped.
pub(crate) struct Pages {
    physical: Physical,
    device: &'static Device,
    /// The `CUmemAllocationHandleType`s by which other processes may open it.
    handle_types: u32,
    filled: Mutex<bool>,
    _charge: Charge,
}

static HANDLES: Handles<Pages> = Handles::new();

struct Reservation {
    mapping: Mapping,
    bytes: usize,
}

struct Mapped {
    pages: Arc<Pages>,
    /// Present while the device has access. Each registry version with the range holds a clone.
    access: Option<Arc<()>>,
}

#[derive(Default)]
struct State {
    reserved: BTreeMap<u64, Reservation>,
    mapped: BTreeMap<u64, Mapped>,
}

static STATE: Mutex<State> = Mutex::new(State {
    reserved: BTreeMap::new(),
    mapped: BTreeMap::new(),
});

fn granular(bytes: u64) -> bool {
    bytes.is_multiple_of(GRANULARITY as u64)
}

/// Reserves addresses.
pub(crate) fn reserve(bytes: usize, alignment: usize) -> Outcome<u64> {
    if bytes == 0 || !granular(bytes as u64) || (alignment != 0 && !alignment.is_power_of_two()) {
        return Err(Failure::InvalidValue);
    }
    let mapping = Mapping::reservation(bytes, alignment.max(GRANULARITY))
        .map_err(|_| Failure::OutOfMemory)?;
    let start = mapping.start();
    lock(&STATE)
        .reserved
        .insert(start, Reservation { mapping, bytes });
    Ok(start)
}

/// Frees reserved addresses. Nothing may be mapped there.
pub(crate) fn free_reservation(start: u64, bytes: usize) -> Outcome {
    let mut state = lock(&STATE);
    let whole = state.reserved.get(&start).is_some_and(|r| r.bytes == bytes);
    if !whole
        || state
            .mapped
            .range(start..start + bytes as u64)
            .next()
            .is_some()
    {
        return Err(Failure::InvalidValue);
    }
    drop(state.reserved.remove(&start).map(|r| r.mapping));
    Ok(())
}

/// Allocates physical memory.
pub(crate) fn create(device: &'static Device, bytes: usize, handle_types: u32) -> Outcome<usize> {
    if bytes == 0 || !granular(bytes as u64) {
        return Err(Failure::InvalidValue);
    }
    let charge = device.charge(bytes as u64)?;
    let physical = Physical::new(bytes).map_err(|_| Failure::OutOfMemory)?;
    let pages = Pages {
        physical,
        device,
        handle_types,
        filled: Mutex::new(false),
        _charge: charge,
    };
    Ok(HANDLES.insert(fresh_number(), Arc::new(pages)))
}

/// Another handle of the memory that is mapped at `address`.
pub(crate) fn retain(address: u64) -> Outcome<usize> {
    let state = lock(&STATE);
    let (&start, mapped) = state
        .mapped
        .range(..=address)
        .next_back()
        .ok_or(Failure::InvalidValue)?;
    if address - start >= mapped.pages.physical.bytes() as u64 {
        return Err(Failure::InvalidValue);
    }
    Ok(HANDLES.insert(fresh_number(), mapped.pages.clone()))
}

/// The ordinal of the device that a handle's memory is on, and its handle types.
pub(crate) fn properties(handle: usize) -> Outcome<(i32, u32)> {
    let pages = HANDLES.get(handle).map_err(|_| Failure::InvalidValue)?;
    Ok((pages.device.ordinal as i32, pages.handle_types))
}

/// Releases the handle. Mapped memory stays mapped.
pub(crate) fn release(handle: usize) -> Outcome {
    HANDLES
        .remove(handle)
        .map_err(|_| Failure::InvalidValue)
        .map(drop)
}

/// Maps a whole physical allocation at reserved addresses, without access.
pub(crate) fn map(start: u64, bytes: usize, offset: usize, handle: usize) -> Outcome {
    let pages = HANDLES.get(handle).map_err(|_| Failure::InvalidValue)?;
    if offset != 0 || bytes != pages.physical.bytes() || !granular(start) {
        return Err(Failure::InvalidValue);
    }
    let mut state = lock(&STATE);
    let end = start
        .checked_add(bytes as u64)
        .ok_or(Failure::InvalidValue)?;
    let reserved = state.reserved.range(..=start).next_back();
    if reserved.is_none_or(|(&at, r)| end > at + r.bytes as u64) {
        return Err(Failure::InvalidValue);
    }
    let before = state.mapped.range(..end).next_back();
    if before.is_some_and(|(&at, m)| at + m.pages.physical.bytes() as u64 > start) {
        return Err(Failure::AlreadyMapped);
    }
    // SAFETY: within a reservation, with nothing mapped there; the lock excludes changes.
    unsafe { pages.physical.map_at(start) }.map_err(|_| Failure::MapFailed)?;
    let mut filled = lock(&pages.filled);

    if !*filled {
        // SAFETY: mapped above for the first time, so nothing else has an address of it.
        unsafe { pages.physical.fill(start) };
        *filled = true;
    }

    drop(filled);
    state.mapped.insert(
        start,
        Mapped {
            pages,
            access: None,
        },
    );

    Ok(())
}

/// Grants or revokes the device's access to mapped memory. The range must consist of whole mappings
/// without gaps.
pub(crate) fn set_access(start: u64, bytes: usize, allow: bool) -> Outcome {
    let mut state = lock(&STATE);
    let end = start
        .checked_add(bytes as u64)
        .ok_or(Failure::InvalidValue)?;
    let mut next = start;

    for (&at, mapped) in state.mapped.range(start..end) {
        if at != next {
            break;
        }
        next += mapped.pages.physical.bytes() as u64;
    }

    if next != end || bytes == 0 {
        return Err(Failure::InvalidValue);
    }
    for (&at, mapped) in state.mapped.range_mut(start..end) {
        match (allow, mapped.access.is_some()) {
            (true, false) => {
                let len = mapped.pages.physical.bytes() as u64;
                let keep = Arc::new(());
                space::insert(
                    at,
                    len,
                    Kind::Mapped,
                    mapped.pages.device.ordinal,
                    keep.clone(),
                )?;
                mapped.access = Some(keep);
            }
            (false, true) => {
                space::remove(at, Kind::Mapped)?;
                mapped.access = None;
            }
            _ => {}
        }
    }

    Ok(())
}

/// Unmaps whole mappings, after the operations that use them.
pub(crate) fn unmap_range(start: u64, bytes: usize) -> Outcome {
    let mut state = lock(&STATE);
    let end = start
        .checked_add(bytes as u64)
        .ok_or(Failure::InvalidValue)?;
    let inside: Vec<(u64, usize)> = state
        .mapped
        .range(start..end)
        .map(|(&at, m)| (at, m.pages.physical.bytes()))
        .collect();
    let covered: usize = inside.iter().map(|&(_, len)| len).sum();
    if bytes == 0 || covered != bytes {
        return Err(Failure::InvalidValue);
    }

    for (at, len) in inside {
        let Some(mapped) = state.mapped.remove(&at) else {
            continue;
        };
        if let Some(access) = &mapped.access {
            space::remove(at, Kind::Mapped)?;
            let since = Instant::now();
            while Arc::strong_count(access) > 1 {
                if since.elapsed() > UNMAP_LIMIT {
                    say!(
                        "cuMemUnmap: an operation has used the memory for {UNMAP_LIMIT:?}; it stays mapped"
                    );
                    return Err(Failure::Unknown);
                }
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        // SAFETY: reserved and mapped by this module; no registry version in use has the range.
        unsafe { unmap(at, len) }.map_err(|_| Failure::Unknown)?;
    }

    Ok(())
}
