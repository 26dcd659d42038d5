//! A block: its warps, shared memory and barriers, and the addresses that its threads may access.

use std::cell::UnsafeCell;
use std::sync::Arc;

use super::program::{Done, Fault, Mask, Program, Special};
use super::races::{Access, Races};
use super::traffic::Traffic;
use super::warp::{Pause, Warp};
use crate::counts::Work;
use crate::driver::space::Space as Registry;
use crate::error::Failure;
use crate::ptx::types::Space;
use crate::settings::settings;

/// Properties shared by all blocks of a launch.
pub(crate) struct LaunchShape {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) dynamic_bytes: usize,
    pub(crate) params: Vec<u8>,
}

/// Threads that have arrived at a barrier.
pub(crate) struct Arrival {
    pub(crate) number: u32,
    pub(crate) warp: usize,
    pub(crate) lanes: Mask,
    pub(crate) next: usize,
}

/// The memory that a block's threads can access.
pub(crate) struct BlockMemory {
    /// Keeps global memory mapped.
    registry: Arc<Registry>,
    /// The last live span that was used.
    last: (u64, u64),
    shared: Cells,
    shared_bytes: usize,
    params: Cells,
    params_bytes: usize,
    arrivals: Vec<Arrival>,
    races: Option<Races>,
    /// Present if work is counted.
    traffic: Option<Traffic>,
}

/// Memory that is written through pointers, in units of 16 bytes.
pub(crate) type Cells = Box<[UnsafeCell<u128>]>;

/// At least `bytes`, filled with one bits.
pub(crate) fn cells(bytes: usize) -> Cells {
    (0..bytes.div_ceil(16))
        .map(|_| UnsafeCell::new(u128::MAX))
        .collect()
}

impl BlockMemory {
    fn new(program: &Program, shape: &LaunchShape, registry: Arc<Registry>) -> Self {
        let shared_bytes = program.shared_bytes + shape.dynamic_bytes;
        let mut params = cells(shape.params.len());
        for (piece, bytes) in params.iter_mut().zip(shape.params.chunks(16)) {
            let mut whole = [0; 16];
            whole[..bytes.len()].copy_from_slice(bytes);
            *piece.get_mut() = u128::from_le_bytes(whole);
        }

        let races = settings().find_races.then(|| Races::new(shared_bytes));
        let shared = cells(shared_bytes);
        let params_bytes = shape.params.len();
        let last = (1, 0);
        let arrivals = Vec::new();
        let traffic = settings().counts_work().then(Traffic::default);

        Self {
            registry,
            last,
            shared,
            shared_bytes,
            params,
            params_bytes,
            arrivals,
            races,
            traffic,
        }
    }

    pub(crate) fn arrive(&mut self, arrival: Arrival) {
        self.arrivals.push(arrival);
    }

    /// Whether these bytes are live.
    fn is_live(&mut self, address: u64, bytes: u64) -> bool {
        let (start, end) = self.last;
        if address >= start && address.saturating_add(bytes) <= end {
            return true;
        }
        let Some(span) = self.registry.span(address, bytes) else {
            return false;
        };
        self.last = span;
        true
    }

    /// Translates a lane's address to a host address that is valid for reads and writes of `bytes`
    /// while this block runs, and aligned to `bytes`, a power of two.
    pub(crate) fn resolve(
        &mut self,
        warp: &Warp,
        lane: usize,
        place: (Space, u64),
        bytes: usize,
        access: Access,
    ) -> Done<*mut u8> {
        let (space, offset) = place;
        if !offset.is_multiple_of(bytes as u64) {
            return self.bad(Failure::MisalignedAddress, lane, space, offset, bytes);
        }
        let place = match space {
            Space::Shared => within(self.shared.as_ptr(), self.shared_bytes, offset, bytes),
            Space::Param => within(self.params.as_ptr(), self.params_bytes, offset, bytes),
            Space::Global => {
                if !self.is_live(offset, bytes as u64) {
                    return self.bad(Failure::IllegalAddress, lane, space, offset, bytes);
                }
                if let Some(traffic) = &mut self.traffic {
                    traffic.note(offset, bytes, access);
                }
                Some(offset as *mut u8)
            }
        };

        match place {
            Some(place) => {
                if space == Space::Shared && self.races.is_some() {
                    self.note(warp.index, lane, offset, bytes, access)?;
                }
                Ok(place)
            }
            None => self.bad(Failure::IllegalAddress, lane, space, offset, bytes),
        }
    }

    /// Checks for a race, if enabled.
    fn note(
        &mut self,
        warp: usize,
        lane: usize,
        offset: u64,
        bytes: usize,
        access: Access,
    ) -> Done {
        let races = self.races.as_mut();
        let Some(race) = races.and_then(|races| races.note(offset as usize, bytes, warp, access))
        else {
            return Ok(());
        };
        let what = format!(
            "a race: lane {lane} has a {access:?} of {bytes} bytes of shared memory at {offset:#x}, which {race} since the last barrier"
        );
        Err(Box::new(Fault {
            failure: Failure::LaunchFailed,
            what,
        }))
    }

    /// Notes the write of a completed asynchronous copy, whose destination `resolve` checked
    /// before.
    pub(crate) fn note_arrival(
        &mut self,
        warp: usize,
        lane: usize,
        to: *const u8,
        bytes: usize,
    ) -> Done {
        let offset = to as usize - self.shared.as_ptr() as usize;
        self.note(warp, lane, offset as u64, bytes, Access::Write)
    }

    #[cold]
    fn bad<T>(
        &self,
        failure: Failure,
        lane: usize,
        space: Space,
        offset: u64,
        bytes: usize,
    ) -> Done<T> {
        let what = format!("lane {lane} accesses {bytes} bytes at {offset:#x} in {space:?} memory");
        Err(Box::new(Fault { failure, what }))
    }
}

fn within(
    base: *const UnsafeCell<u128>,
    size: usize,
    offset: u64,
    bytes: usize,
) -> Option<*mut u8> {
    let end = offset.checked_add(bytes as u64)?;
    (end <= size as u64).then(|| base.cast::<u8>().cast_mut().wrapping_add(offset as usize))
}

/// Runs one block; returns its work if it is counted. After every turn of a warp, `check` may end
/// it with a fault.
pub(crate) fn run_block(
    program: &Program,
    shape: &LaunchShape,
    block: [u32; 3],
    registry: &Arc<Registry>,
    check: &dyn Fn() -> Done,
) -> Done<Work> {
    let threads = shape.block.iter().product::<u32>() as usize;
    let mut memory = BlockMemory::new(program, shape, registry.clone());
    let mut warps: Vec<Warp> = (0..threads.div_ceil(32))
        .map(|index| {
            let live = if threads - index * 32 >= 32 {
                !0
            } else {
                (1 << (threads % 32)) - 1
            };
            let mut warp = Warp::new(program, index, live);
            for &(slot, special) in &program.specials {
                warp.regs[slot] =
                    std::array::from_fn(|lane| value(special, shape, block, index, lane));
            }
            warp
        })
        .collect();

    let mut runs = vec![true; warps.len()];
    loop {
        let mut ran = false;
        for index in 0..warps.len() {
            if runs[index] {
                ran = true;
                runs[index] = warps[index].run(program, &mut memory)? == Pause::Turn;
                check()?;
            }
        }
        let released = release(&mut memory, &mut warps, &mut runs);
        if !ran && !released {
            if warps.iter().all(|warp| warp.live == 0) {
                let operations = warps.iter().map(|warp| warp.steps).sum();
                return Ok(memory
                    .traffic
                    .map_or(Work::default(), |traffic| traffic.work(operations)));
            }
            let what = format!(
                "kernel {}: threads wait at a barrier to which the others never come",
                program.name
            );
            return Err(Box::new(Fault {
                failure: Failure::LaunchTimeout,
                what,
            }));
        }
    }
}

/// Releases every barrier at which all expected threads have arrived.
fn release(memory: &mut BlockMemory, warps: &mut [Warp], runs: &mut [bool]) -> bool {
    let BlockMemory {
        arrivals, races, ..
    } = memory;
    let live: u32 = warps.iter().map(|warp| warp.live.count_ones()).sum();
    let mut released = false;

    for number in 0..16 {
        let here = || arrivals.iter().filter(|a| a.number == number);
        let arrived = here().map(|a| a.lanes.count_ones()).sum::<u32>();
        if arrived == 0 || arrived < live {
            continue;
        }
        released = true;
        races.iter_mut().for_each(Races::barrier);
        for arrival in arrivals.extract_if(.., |a| a.number == number) {
            warps[arrival.warp].resume(arrival.next, arrival.lanes);
            runs[arrival.warp] = true;
        }
    }

    released
}

/// A special register's value.
fn value(special: Special, shape: &LaunchShape, block: [u32; 3], warp: usize, lane: usize) -> u64 {
    let thread = (warp * 32 + lane) as u32;
    let [x, y, _] = shape.block;
    u64::from(match special {
        Special::ThreadId(0) => thread % x,
        Special::ThreadId(1) => thread / x % y,
        Special::ThreadId(_) => thread / (x * y),
        Special::BlockDim(axis) => shape.block[axis],
        Special::BlockId(axis) => block[axis],
        Special::GridDim(axis) => shape.grid[axis],
        Special::Lane => lane as u32,
        Special::Warp => warp as u32,
    })
}
