//! Integer arithmetic.

use super::{Decoded, act, exactly, map1, map2, map3, mask_where, store, unknown};
use crate::exec::program::Flow;
use crate::ptx::build::{Builder, Mods};
use crate::ptx::syntax::Operand;
use crate::ptx::types::Type;

/// Integers with the operations of PTX. `Wide` has twice the bits.
trait Int: Copy + Ord + Send + Sync + 'static {
    fn of(bits: u64) -> Self;
    fn bits(self) -> u64;
    fn wide(self) -> i128;
    const BITS: u32;
}

macro_rules! ints {
    ($($int:ty as $unsigned:ty),*) => {
        $(impl Int for $int {
            fn of(bits: u64) -> Self { bits as $int }
            fn bits(self) -> u64 { self as $unsigned as u64 }
            fn wide(self) -> i128 { self as i128 }
            const BITS: u32 = <$int>::BITS;
        })*
    };
}
ints!(
    u16 as u16, i16 as u16, u32 as u32, i32 as u32, u64 as u64, i64 as u64
);

/// Calls a generic function with the Rust type of `$kind`.
macro_rules! for_type {
    ($kind:expr, $call:ident($($arg:expr),*)) => {
        match $kind {
            Type::Unsigned(16) | Type::Bits(16) => $call::<u16>($($arg),*),
            Type::Signed(16) => $call::<i16>($($arg),*),
            Type::Unsigned(32) | Type::Bits(32) => $call::<u32>($($arg),*),
            Type::Signed(32) => $call::<i32>($($arg),*),
            Type::Unsigned(64) | Type::Bits(64) => $call::<u64>($($arg),*),
            Type::Signed(64) => $call::<i64>($($arg),*),
            _ => unknown(),
        }
    };
}

pub(super) fn decode(
    kind: Type,
    mods: &mut Mods<'_>,
    operands: &[Operand],
    b: &mut Builder<'_>,
) -> Decoded {
    if mods.take("cc") || matches!(mods.name, "addc" | "subc" | "madc") {
        return for_type!(kind, carrying(mods, operands, b));
    }
    match mods.name {
        "abs" | "neg" => for_type!(kind, one(mods, operands, b)),
        "mad" => for_type!(kind, mad(mods, operands, b)),
        "sad" => for_type!(kind, sad(operands, b)),
        _ => for_type!(kind, two(mods, operands, b)),
    }
}

fn one<T: Int>(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    let [to, a] = exactly(operands)?;
    let to = b.target(to)?;
    let a = b.source(a)?;
    Ok(match mods.name {
        "abs" => map1(to, a, |a| {
            T::of(T::of(a).wide().unsigned_abs() as u64).bits()
        }),
        _ => map1(to, a, |a| T::of(a.wrapping_neg()).bits()),
    })
}

/// `mul.lo`, `.hi` and `.wide` of two numbers.
fn product<T: Int>(part: &str) -> fn(u64, u64) -> u64 {
    match part {
        "lo" => |a, b| T::of(a.wrapping_mul(b)).bits(),
        "hi" => |a, b| {
            let a = T::of(a);
            let b = T::of(b);
            // The product of unsigned 64-bit numbers has 128 bits, which exceeds an i128.
            let high = if T::of(u64::MAX).wide() >= 0 {
                (((a.wide() as u128).wrapping_mul(b.wide() as u128)) >> T::BITS) as u64
            } else {
                (a.wide().wrapping_mul(b.wide()) >> T::BITS) as u64
            };
            T::of(high).bits()
        },
        _ => |a, b| {
            let wide = T::of(a).wide().wrapping_mul(T::of(b).wide()) as u64;
            if T::BITS == 16 {
                u64::from(wide as u32)
            } else {
                wide
            }
        },
    }
}

fn two<T: Int>(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    let [to, x, y] = exactly(operands)?;
    let to = b.target(to)?;
    let from = [b.source(x)?, b.source(y)?];
    let saturates = mods.take("sat");
    let clamp =
        move |wide: i128| wide.clamp(i128::from(i32::MIN), i128::from(i32::MAX)) as u32 as u64;

    Ok(match mods.name {
        "add" if saturates => map2(to, from, move |a, b| {
            clamp(T::of(a).wide() + T::of(b).wide())
        }),
        "sub" if saturates => map2(to, from, move |a, b| {
            clamp(T::of(a).wide() - T::of(b).wide())
        }),
        _ if saturates => return Err("`.sat` is not supported".into()),
        "add" => map2(to, from, |a, b| T::of(a.wrapping_add(b)).bits()),
        "sub" => map2(to, from, |a, b| T::of(a.wrapping_sub(b)).bits()),
        "mul" => {
            let part = mods
                .take_of(&["lo", "hi", "wide"])
                .ok_or("no part of the product")?;
            match part {
                // A separate closure, so that the compiler vectorises it.
                "lo" => map2(to, from, |a, b| T::of(a.wrapping_mul(b)).bits()),
                part => map2(to, from, product::<T>(part)),
            }
        }
        // As on GPUs, x / 0 has all bits set and x % 0 is x; PTX leaves both undefined.
        "div" => map2(to, from, |a, b| match T::of(b).wide() {
            0 => T::of(u64::MAX).bits(),
            b => T::of((T::of(a).wide() / b) as u64).bits(),
        }),
        "rem" => map2(to, from, |a, b| match T::of(b).wide() {
            0 => T::of(a).bits(),
            b => T::of((T::of(a).wide() % b) as u64).bits(),
        }),
        "min" => map2(to, from, |a, b| T::of(a).min(T::of(b)).bits()),
        "max" => map2(to, from, |a, b| T::of(a).max(T::of(b)).bits()),
        _ => return unknown(),
    })
}

fn mad<T: Int>(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    let [to, x, y, z] = exactly(operands)?;
    let to = b.target(to)?;
    let from = [b.source(x)?, b.source(y)?, b.source(z)?];
    let part = mods
        .take_of(&["lo", "hi", "wide"])
        .ok_or("no part of the product")?;
    let product = product::<T>(part);
    Ok(match part {
        "lo" => map3(to, from, |a, b, c| {
            T::of(a.wrapping_mul(b).wrapping_add(c)).bits()
        }),
        "wide" if T::BITS == 16 => map3(to, from, move |a, b, c| {
            u64::from(product(a, b).wrapping_add(c) as u32)
        }),
        "wide" => map3(to, from, move |a, b, c| product(a, b).wrapping_add(c)),
        _ => map3(to, from, move |a, b, c| {
            T::of(product(a, b).wrapping_add(c)).bits()
        }),
    })
}

fn sad<T: Int>(operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    let [to, x, y, z] = exactly(operands)?;
    let to = b.target(to)?;
    let from = [b.source(x)?, b.source(y)?, b.source(z)?];
    Ok(map3(to, from, |a, b, c| {
        T::of(c.wrapping_add((T::of(a).wide() - T::of(b).wide()).unsigned_abs() as u64)).bits()
    }))
}

/// Multi-word arithmetic: `.cc` sets the carry; `addc`, `subc` and `madc` read it.
fn carrying<T: Int>(
    mods: &mut Mods<'_>,
    operands: &[Operand],
    b: &mut Builder<'_>,
) -> Decoded<Flow> {
    let carry = b.carry();
    let name = mods.name;
    // The caller used `cc` of add.cc; that of addc.cc, subc.cc and madc.cc may remain.
    mods.take("cc");
    let reads = matches!(name, "addc" | "subc" | "madc");
    let subtracts = name.starts_with("sub");
    let part = mods.take_of(&["lo", "hi"]);

    let (to, from) = match operands {
        [to, x, y] if part.is_none() => (b.target(to)?, [b.source(x)?, b.source(y)?, 0]),
        [to, x, y, z] if part.is_some() => {
            (b.target(to)?, [b.source(x)?, b.source(y)?, b.source(z)?])
        }
        _ => return Err("the number of operands is wrong".into()),
    };

    let product = part.map(product::<T>);
    let ones = T::of(u64::MAX).bits();
    Ok(act(move |warp, mask| {
        let before = if reads { warp.preds[carry] } else { 0 };
        let sum = |lane: usize| -> (u64, bool) {
            let operand = |slot: usize| warp.regs[slot][lane] & ones;
            let (a, c) = match product {
                Some(product) => (
                    product(operand(from[0]), operand(from[1])),
                    operand(from[2]),
                ),
                None => (operand(from[0]), operand(from[1])),
            };
            let carried = u128::from(before >> lane & 1);
            let a = u128::from(a);
            let c = u128::from(c);
            if subtracts {
                let wide = a.wrapping_sub(c).wrapping_sub(carried);
                (wide as u64 & ones, a < c + carried)
            } else {
                let wide = a + c + carried;
                (wide as u64 & ones, wide > u128::from(ones))
            }
        };
        let values = std::array::from_fn(|lane| sum(lane).0);
        let carries = mask_where(|lane| sum(lane).1);
        store(warp, to, mask, &values);
        warp.set_pred(carry, mask, carries);
    }))
}
