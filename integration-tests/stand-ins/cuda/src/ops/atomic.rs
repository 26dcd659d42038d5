//! Atomic operations, each a compare-and-exchange loop.

use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Relaxed};

use super::format::{BF16, F16, Format, Rounding, add_odd};
use super::{Decoded, unknown};
use crate::exec::program::{Action, Flow, lanes};
use crate::exec::races::Access;
use crate::ptx::build::{Builder, Mods};
use crate::ptx::syntax::Operand;
use crate::ptx::types::{Space, Type};

const ORDERS: [&str; 10] = [
    "relaxed",
    "acquire",
    "release",
    "acq_rel",
    "cta",
    "gpu",
    "sys",
    "cluster",
    "noftz",
    "L1::no_allocate",
];

/// The new value, from the old one and one or two operands.
type Change = fn(u64, u64, u64) -> u64;

/// Atomically changes `size` bytes (2, 4 or 8). Returns the old value.
///
/// # Safety
/// `at` is valid for reads and writes of `size` bytes and aligned to them. Others may access it at
/// the same time.
unsafe fn exchange(at: *mut u8, size: usize, change: impl Fn(u64) -> u64) -> u64 {
    macro_rules! with {
        ($atomic:ty, $int:ty) => {{
            // SAFETY: valid and aligned, as the caller guarantees; other accesses are atomic too.
            let place = unsafe { <$atomic>::from_ptr(at.cast()) };
            let changed =
                place.fetch_update(AcqRel, Relaxed, |old| Some(change(u64::from(old)) as $int));
            u64::from(changed.unwrap_or_else(|old| old))
        }};
    }
    match size {
        2 => with!(AtomicU16, u16),
        4 => with!(AtomicU32, u32),
        _ => with!(AtomicU64, u64),
    }
}

fn add_halves(format: Format, pair: bool, a: u64, b: u64) -> u64 {
    let half = |shift: u32| {
        let of = |x: u64| format.widen(x >> shift & 0xffff);
        format.narrow(add_odd(of(a), of(b)), Rounding::Nearest) << shift
    };
    if pair { half(0) | half(16) } else { half(0) }
}

fn change(operation: &str, kind: Type) -> Decoded<Change> {
    Ok(match (operation, kind) {
        ("exch", _) => |_, b, _| b,
        ("cas", Type::Bits(16)) => |old, b, c| if old == b & 0xffff { c } else { old },
        ("cas", Type::Bits(32)) => |old, b, c| if old == u64::from(b as u32) { c } else { old },
        ("cas", Type::Bits(64)) => |old, b, c| if old == b { c } else { old },
        ("and", Type::Bits(_)) => |old, b, _| old & b,
        ("or", Type::Bits(_)) => |old, b, _| old | b,
        ("xor", Type::Bits(_)) => |old, b, _| old ^ b,
        ("add", Type::Unsigned(_) | Type::Signed(_)) => |old, b, _| old.wrapping_add(b),
        ("inc", Type::Unsigned(32)) => |old, b, _| {
            if old >= u64::from(b as u32) {
                0
            } else {
                old + 1
            }
        },
        ("dec", Type::Unsigned(32)) => |old, b, _| {
            if old == 0 || old > u64::from(b as u32) {
                u64::from(b as u32)
            } else {
                old - 1
            }
        },
        ("min", Type::Unsigned(32)) => |old, b, _| old.min(u64::from(b as u32)),
        ("max", Type::Unsigned(32)) => |old, b, _| old.max(u64::from(b as u32)),
        ("min", Type::Signed(32)) => |old, b, _| (old as i32).min(b as i32) as u64,
        ("max", Type::Signed(32)) => |old, b, _| (old as i32).max(b as i32) as u64,
        ("min", Type::Unsigned(64)) => |old, b, _| old.min(b),
        ("max", Type::Unsigned(64)) => |old, b, _| old.max(b),
        ("min", Type::Signed(64)) => |old, b, _| (old as i64).min(b as i64) as u64,
        ("max", Type::Signed(64)) => |old, b, _| (old as i64).max(b as i64) as u64,
        ("add", Type::F32) => {
            |old, b, _| u64::from((f32::from_bits(old as u32) + f32::from_bits(b as u32)).to_bits())
        }
        ("add", Type::F64) => |old, b, _| (f64::from_bits(old) + f64::from_bits(b)).to_bits(),
        ("add", Type::F16) => |old, b, _| add_halves(F16, false, old, b),
        ("add", Type::F16x2) => |old, b, _| add_halves(F16, true, old, b),
        ("add", Type::Bf16) => |old, b, _| add_halves(BF16, false, old, b),
        ("add", Type::Bf16x2) => |old, b, _| add_halves(BF16, true, old, b),
        _ => return unknown(),
    })
}

pub(super) fn decode(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    let space = mods.take_as(Space::named).unwrap_or(Space::Generic);
    mods.ignore(&ORDERS);
    let operations = [
        "add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas",
    ];
    let operation = mods.take_of(&operations).ok_or("no operation")?;
    let vector = mods.take_of(&["v2", "v4", "v8"]).is_some();
    let kind = mods.take_type()?;
    let change = change(operation, kind)?;
    let (to, rest) = match (mods.name, operands) {
        ("atom", [to, rest @ ..]) => (Some(to), rest),
        (_, rest) => (None, rest),
    };

    let (address, values, new) = match rest {
        [address, values] => (address, values, None),
        [address, values, new] if operation == "cas" => (address, values, Some(new)),
        _ => return Err("the number of operands is wrong".into()),
    };

    let address = b.address(address, space)?;
    let values = b.sources(values)?;
    if vector != (values.len() > 1) {
        return Err("the number of values is wrong".into());
    }
    let new = if let Some(new) = new {
        b.source(new)?
    } else {
        values[0]
    };

    let to = to.map(|to| b.targets(to)).transpose()?;
    let size = kind.bytes();
    let narrow = crate::ptx::types::mask_of(kind.bits());
    let action: Action = Box::new(move |warp, memory, mask| {
        for lane in lanes(mask) {
            let at = warp.regs[address.base][lane].wrapping_add(address.offset);
            let place = memory.resolve(
                warp,
                lane,
                (address.space, at),
                size * values.len(),
                Access::Atomic,
            )?;
            for (index, &value) in values.iter().enumerate() {
                let b = warp.regs[value][lane];
                let c = warp.regs[new][lane];
                // SAFETY: `resolve` checked all bytes and their alignment.
                let old = unsafe {
                    exchange(place.wrapping_add(index * size), size, |old| {
                        change(old, b, c) & narrow
                    })
                };
                if let Some(to) = &to {
                    warp.regs[to[index]][lane] = old;
                }
            }
        }
        Ok(())
    });

    Ok(Flow::Do(action))
}
