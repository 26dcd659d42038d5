//! Conversions. Floats are rounded to nearest.

use super::format::{BF16, F16, F32, bf16_to_f32, f16_to_f32};
use super::{Decoded, map1, map2, slots, unknown};
use crate::exec::program::{Flow, Slot};
use crate::ptx::build::{Builder, Mods};
use crate::ptx::syntax::Operand;
use crate::ptx::types::{Type, mask_of};

/// A float's value in f64, exactly.
fn reader(kind: Type) -> Decoded<fn(u64) -> f64> {
    Ok(match kind {
        Type::F16 => |a| f64::from(f16_to_f32(a)),
        Type::Bf16 => |a| f64::from(bf16_to_f32(a)),
        Type::F32 => |a| f64::from(f32::from_bits(a as u32)),
        Type::F64 => f64::from_bits,
        _ => return unknown(),
    })
}

/// Rounds a number to a float's bits.
fn writer(kind: Type) -> Decoded<fn(f64) -> u64> {
    Ok(match kind {
        Type::F16 => |x| F16.narrow(x),
        Type::Bf16 => |x| BF16.narrow(x),
        // The processor's conversion is faster.
        Type::F32 => |x| {
            if x.is_nan() {
                F32.narrow(x)
            } else {
                u64::from((x as f32).to_bits())
            }
        },
        Type::F64 => f64::to_bits,
        _ => return unknown(),
    })
}

/// Converts bits of an integer type to their value.
fn integer(kind: Type) -> Decoded<impl Fn(u64) -> i128 + Copy> {
    let signed = match kind {
        Type::Signed(_) => true,
        Type::Unsigned(_) | Type::Bits(_) => false,
        _ => return unknown(),
    };
    let shift = 64 - kind.bits();
    Ok(move |a: u64| {
        let up = a << shift;
        if signed {
            i128::from(up as i64 >> shift)
        } else {
            i128::from(up >> shift)
        }
    })
}

pub(super) fn decode(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    let to_kind = mods.take_type()?;
    let from_kind = mods.take_type()?;
    let rounds = mods.take("rn");
    if matches!(to_kind, Type::F16x2 | Type::Bf16x2) {
        if from_kind != Type::F32 || !rounds {
            return unknown();
        }
        return packed(to_kind, operands, b);
    }

    let (to, from) = slots(operands, b)?;
    if let (Ok(read), Ok(write)) = (integer(from_kind), integer(to_kind)) {
        // A result narrower than its register is sign- or zero-extended.
        let keep = b.width_mask(to);
        return Ok(map1(to, from, move |a| write(read(a) as u64) as u64 & keep));
    }
    match integer(from_kind) {
        Ok(read) if rounds => to_float(to_kind, read, to, from),
        Ok(_) => Err("no rounding".into()),
        Err(_) if !rounds && to_kind.bits() < from_kind.bits() => Err("no rounding".into()),
        Err(_) => {
            let (read, write) = (reader(from_kind)?, writer(to_kind)?);
            let keep = mask_of(to_kind.bits());
            Ok(map1(to, from, move |a| write(read(a)) & keep))
        }
    }
}

fn to_float(
    kind: Type,
    read: impl Fn(u64) -> i128 + Copy + Send + Sync + 'static,
    to: Slot,
    from: [Slot; 1],
) -> Decoded<Flow> {
    Ok(match kind {
        Type::F32 => map1(to, from, move |a| u64::from((read(a) as f32).to_bits())),
        Type::F64 => map1(to, from, move |a| (read(a) as f64).to_bits()),
        _ => return unknown(),
    })
}

/// Converts two numbers to one register, the first to its upper half.
fn packed(to_kind: Type, operands: &[Operand], b: &mut Builder<'_>) -> Decoded<Flow> {
    let (to, from) = slots(operands, b)?;
    let format = if to_kind == Type::F16x2 { F16 } else { BF16 };
    let half = move |a: u64| format.narrow(f64::from(f32::from_bits(a as u32)));
    Ok(map2(to, from, move |high, low| {
        half(high) << 16 | half(low)
    }))
}
