//! Integer arithmetic.

use super::{Decoded, map1, map2, map3, slots, unknown};
use crate::ptx::build::{Builder, Mods};
use crate::ptx::syntax::Operand;
use crate::ptx::types::Type;

/// Integers with the operations of PTX.
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

pub(super) fn decode(
    kind: Type,
    mods: &mut Mods<'_>,
    operands: &[Operand],
    b: &mut Builder<'_>,
) -> Decoded {
    match kind {
        Type::Unsigned(16) | Type::Bits(16) => of_type::<u16>(mods, operands, b),
        Type::Signed(16) => of_type::<i16>(mods, operands, b),
        Type::Unsigned(32) | Type::Bits(32) => of_type::<u32>(mods, operands, b),
        Type::Signed(32) => of_type::<i32>(mods, operands, b),
        Type::Unsigned(64) | Type::Bits(64) => of_type::<u64>(mods, operands, b),
        Type::Signed(64) => of_type::<i64>(mods, operands, b),
        _ => unknown(),
    }
}

/// `mul.wide`, of 16 or 32 bits.
fn wide_product<T: Int>(a: u64, b: u64) -> u64 {
    let wide = T::of(a).wide().wrapping_mul(T::of(b).wide()) as u64;
    if T::BITS == 16 {
        u64::from(wide as u32)
    } else {
        wide
    }
}

/// Whether a product is `.wide`, and not `.lo`.
fn is_wide(mods: &mut Mods<'_>) -> Decoded<bool> {
    let part = mods.take_of(&["lo", "wide"]);
    Ok(part.ok_or("only `.lo` and `.wide` are known")? == "wide")
}

fn of_type<T: Int>(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    match mods.name {
        "abs" | "neg" => {
            let (to, from) = slots(operands, b)?;
            Ok(match mods.name {
                "abs" => map1(to, from, |a| {
                    T::of(T::of(a).wide().unsigned_abs() as u64).bits()
                }),
                _ => map1(to, from, |a| T::of(a.wrapping_neg()).bits()),
            })
        }
        "mad" => {
            let (to, from) = slots(operands, b)?;
            Ok(match is_wide(mods)? {
                false => map3(to, from, |a, b, c| {
                    T::of(a.wrapping_mul(b).wrapping_add(c)).bits()
                }),
                true if T::BITS == 16 => map3(to, from, |a, b, c| {
                    u64::from(wide_product::<T>(a, b).wrapping_add(c) as u32)
                }),
                true => map3(to, from, |a, b, c| wide_product::<T>(a, b).wrapping_add(c)),
            })
        }
        _ => two::<T>(mods, operands, b),
    }
}

fn two<T: Int>(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    let (to, from) = slots(operands, b)?;
    Ok(match mods.name {
        "add" => map2(to, from, |a, b| T::of(a.wrapping_add(b)).bits()),
        "sub" => map2(to, from, |a, b| T::of(a.wrapping_sub(b)).bits()),
        "mul" => match is_wide(mods)? {
            true => map2(to, from, wide_product::<T>),
            false => map2(to, from, |a, b| T::of(a.wrapping_mul(b)).bits()),
        },
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
        // `.relu`: at least 0.
        "max" => match mods.take("relu") {
            true => map2(to, from, |a, b| T::of(a).max(T::of(b)).max(T::of(0)).bits()),
            false => map2(to, from, |a, b| T::of(a).max(T::of(b)).bits()),
        },
        _ => return unknown(),
    })
}
