//! Loads and stores.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

use super::{Decoded, exactly};
use crate::exec::program::{Action, Flow, lanes};
use crate::exec::races::Access;
use crate::ptx::build::{Address, Builder, Mods};
use crate::ptx::syntax::Operand;
use crate::ptx::types::{Space, Type};

/// Modifiers for caches and memory ordering. They have no effect: the interpreter's ordering is
/// stronger than all of them require.
const HINTS: [&str; 11] = [
    "nc", "ca", "cg", "cs", "cv", "lu", "wb", "wt", "volatile", "relaxed", "weak",
];

/// Reads `size` bytes (1, 2, 4 or 8).
///
/// # Safety
/// `at` is valid for reads of `size` bytes and aligned to them. Others may access it at the same
/// time.
pub(super) unsafe fn read(at: *mut u8, size: usize) -> u64 {
    match size {
        // SAFETY: valid and aligned, as the caller guarantees; atomic, since other blocks run at
        // the same time.
        1 => u64::from(unsafe { AtomicU8::from_ptr(at) }.load(Relaxed)),
        // SAFETY: as above.
        2 => u64::from(unsafe { AtomicU16::from_ptr(at.cast()) }.load(Relaxed)),
        // SAFETY: as above.
        4 => u64::from(unsafe { AtomicU32::from_ptr(at.cast()) }.load(Relaxed)),
        // SAFETY: as above.
        _ => unsafe { AtomicU64::from_ptr(at.cast()) }.load(Relaxed),
    }
}

/// Writes the lowest `size` bytes (1, 2, 4 or 8) of `value`.
///
/// # Safety
/// `at` is valid for writes of `size` bytes and aligned to them. Others may access it at the same
/// time.
pub(super) unsafe fn write(at: *mut u8, size: usize, value: u64) {
    match size {
        // SAFETY: valid and aligned, as the caller guarantees; atomic, since other blocks run at
        // the same time.
        1 => unsafe { AtomicU8::from_ptr(at) }.store(value as u8, Relaxed),
        // SAFETY: as above.
        2 => unsafe { AtomicU16::from_ptr(at.cast()) }.store(value as u16, Relaxed),
        // SAFETY: as above.
        4 => unsafe { AtomicU32::from_ptr(at.cast()) }.store(value as u32, Relaxed),
        // SAFETY: as above.
        _ => unsafe { AtomicU64::from_ptr(at.cast()) }.store(value, Relaxed),
    }
}

pub(super) fn decode(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    let space = mods.take_as(Space::named).unwrap_or(Space::Global);
    let vector = mods.take_of(&["v2", "v4", "v8"]);
    let kind = mods.take_type()?;
    mods.ignore(&HINTS);
    let [first, second] = exactly(operands)?;
    let load = mods.name != "st";
    let [value, address] = if load {
        [first, second]
    } else {
        [second, first]
    };

    let address = b.address(address, space)?;
    let size = kind.bytes();
    if size > 8 || kind == Type::Pred {
        return Err("the type is not supported".into());
    }
    let values = if load {
        b.targets(value)?
    } else {
        b.sources(value)?
    };

    let wanted = match vector {
        Some("v2") => 2,
        Some("v4") => 4,
        Some(_) => 8,
        None => 1,
    };

    if values.len() != wanted {
        return Err(format!("{} registers, and not {wanted}", values.len()));
    }
    Ok(Flow::Do(if load {
        let keeps = values.iter().map(|&slot| b.width_mask(slot)).collect();
        let shift = if let Type::Signed(bits) = kind {
            64 - bits
        } else {
            0
        };
        load_action(address, size, values, keeps, shift)
    } else {
        store_action(address, size, values)
    }))
}

fn load_action(
    address: Address,
    size: usize,
    to: Vec<usize>,
    keeps: Vec<u64>,
    shift: u32,
) -> Action {
    let bytes = size * to.len();
    Box::new(move |warp, memory, mask| {
        // Copied, since the address register may also be a destination.
        let bases = warp.regs[address.base];
        for lane in lanes(mask) {
            let at = bases[lane].wrapping_add(address.offset);
            let place = memory.resolve(warp, lane, (address.space, at), bytes, Access::Read)?;
            for (index, (&to, &keep)) in to.iter().zip(&keeps).enumerate() {
                // SAFETY: `resolve` checked all bytes and their alignment, which is that of the
                // whole vector.
                let value = unsafe { read(place.wrapping_add(index * size), size) };
                warp.regs[to][lane] = ((value << shift) as i64 >> shift) as u64 & keep;
            }
        }
        Ok(())
    })
}

fn store_action(address: Address, size: usize, from: Vec<usize>) -> Action {
    let bytes = size * from.len();
    Box::new(move |warp, memory, mask| {
        for lane in lanes(mask) {
            let at = warp.regs[address.base][lane].wrapping_add(address.offset);
            let place = memory.resolve(warp, lane, (address.space, at), bytes, Access::Write)?;
            for (index, &from) in from.iter().enumerate() {
                // SAFETY: as for loads.
                unsafe {
                    write(
                        place.wrapping_add(index * size),
                        size,
                        warp.regs[from][lane],
                    )
                };
            }
        }
        Ok(())
    })
}
