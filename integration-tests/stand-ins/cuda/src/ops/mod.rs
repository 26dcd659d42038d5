//! Decoding of instructions to actions, one file per family: those that NVRTC makes of the workspace's
//! sources (`tests/nvrtc.rs` decodes them all), and their close relatives. Others are refused by name.

use crate::exec::program::{ALL, Action, Flow, Mask, PredSlot, Slot, lanes};
use crate::exec::warp::Warp;
use crate::ptx::build::{Builder, Mods};
use crate::ptx::syntax::Operand;
use crate::ptx::types::Type;

mod async_copy;
mod bits;
mod compare;
mod convert;
mod float;
pub(crate) mod format;
mod integer;
mod matrix;
mod memory;
mod moves;
mod sync;

/// The result of decoding. The error describes what is wrong with the instruction.
pub(crate) type Decoded<T = Flow> = Result<T, String>;

/// Decodes an instruction.
pub(crate) fn decode(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    match mods.name {
        "mov" | "cvta" | "selp" => moves::decode(mods, operands, b),
        "ld" | "st" => memory::decode(mods, operands, b),
        "cvt" => convert::decode(mods, operands, b),
        "setp" => compare::decode(mods, operands, b),
        "and" | "or" | "xor" | "not" | "shl" | "shr" | "prmt" | "bfi" | "popc" | "clz" | "brev" => {
            bits::decode(mods, operands, b)
        }
        "bar" | "shfl" => sync::decode(mods, operands, b),
        "cp" => async_copy::decode(mods, operands, b),
        "ldmatrix" | "mma" => matrix::decode(mods, operands, b),
        _ => {
            let kind = mods.take_type()?;
            match kind {
                Type::Bits(_) | Type::Unsigned(_) | Type::Signed(_) => {
                    integer::decode(kind, mods, operands, b)
                }
                Type::F32 => float::single(mods, operands, b),
                Type::F64 => float::double(mods, operands, b),
                Type::Pred | Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2 => unknown(),
            }
        }
    }
}

/// The error for an unsupported instruction.
fn unknown<T>() -> Decoded<T> {
    Err("the instruction is not supported".into())
}

/// The operands as an array, or an error if there are not `N`.
fn exactly<const N: usize>(operands: &[Operand]) -> Decoded<&[Operand; N]> {
    operands
        .try_into()
        .map_err(|_| format!("{} operands, and not {N}", operands.len()))
}

/// The register that is written, and the slots of the `N` values after it.
fn slots<const N: usize>(operands: &[Operand], b: &mut Builder<'_>) -> Decoded<(Slot, [Slot; N])> {
    let Some((to, from)) = operands.split_first() else {
        return Err("no operands".into());
    };
    let mut found = [0; N];
    for (slot, operand) in found.iter_mut().zip(exactly::<N>(from)?) {
        *slot = b.source(operand)?;
    }
    Ok((b.target(to)?, found))
}

/// Stores values in the active lanes of a register.
#[inline]
fn store(warp: &mut Warp, to: Slot, mask: Mask, values: &[u64; 32]) {
    let place = &mut warp.regs[to];
    if mask == ALL {
        *place = *values;
    } else {
        lanes(mask).for_each(|lane| place[lane] = values[lane]);
    }
}

/// An action of one operand, lane by lane.
fn map1(to: Slot, [a]: [Slot; 1], f: impl Fn(u64) -> u64 + Send + Sync + 'static) -> Flow {
    act(move |warp, mask| {
        let a = &warp.regs[a];
        let values = std::array::from_fn(|lane| f(a[lane]));
        store(warp, to, mask, &values);
    })
}

/// An action of two operands, lane by lane. `f` also runs for inactive lanes.
fn map2(to: Slot, [a, b]: [Slot; 2], f: impl Fn(u64, u64) -> u64 + Send + Sync + 'static) -> Flow {
    act(move |warp, mask| {
        let a = &warp.regs[a];
        let b = &warp.regs[b];
        let values = std::array::from_fn(|lane| f(a[lane], b[lane]));
        store(warp, to, mask, &values);
    })
}

/// An action of three operands, lane by lane.
fn map3(
    to: Slot,
    [a, b, c]: [Slot; 3],
    f: impl Fn(u64, u64, u64) -> u64 + Send + Sync + 'static,
) -> Flow {
    act(move |warp, mask| {
        let a = &warp.regs[a];
        let b = &warp.regs[b];
        let c = &warp.regs[c];
        let values = std::array::from_fn(|lane| f(a[lane], b[lane], c[lane]));
        store(warp, to, mask, &values);
    })
}

/// An action on registers alone.
fn act(f: impl Fn(&mut Warp, Mask) + Send + Sync + 'static) -> Flow {
    let action: Action = Box::new(move |warp, _, mask| {
        f(warp, mask);
        Ok(())
    });
    Flow::Do(action)
}

/// The lanes in which a predicate, perhaps negated, is true.
#[inline]
fn holds(warp: &Warp, (pred, negated): (PredSlot, bool)) -> Mask {
    if negated {
        !warp.preds[pred]
    } else {
        warp.preds[pred]
    }
}

/// The lanes for which `f` is true.
#[inline]
fn mask_where(f: impl Fn(usize) -> bool) -> Mask {
    (0..32).fold(0, |mask, lane| mask | (u32::from(f(lane)) << lane))
}

#[cfg(test)]
mod tests;
