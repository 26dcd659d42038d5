//! Conversions.

use super::format::{BF16, F16, F32, Rounding, TF32, bf16_to_f32, f16_to_f32, integer_odd};
use super::{Decoded, exactly, map1, map2, unknown};
use crate::exec::program::Flow;
use crate::ptx::build::{Builder, Mods};
use crate::ptx::syntax::Operand;
use crate::ptx::types::{Type, mask_of};

/// The instruction's modifiers other than its types.
#[derive(Clone, Copy)]
struct How {
    rounding: Option<(Rounding, bool)>,
    ftz: bool,
    sat: bool,
    relu: bool,
}

fn is_float(kind: Type) -> bool {
    matches!(
        kind,
        Type::F16 | Type::Bf16 | Type::Tf32 | Type::F32 | Type::F64
    )
}

/// A float's value in f64, exactly.
fn reader(kind: Type, ftz: bool) -> Decoded<fn(u64) -> f64> {
    Ok(match kind {
        Type::F16 => |a| f64::from(f16_to_f32(a)),
        Type::Bf16 => |a| f64::from(bf16_to_f32(a)),
        Type::F32 if ftz => |a| {
            let a = f32::from_bits(a as u32);
            if a.is_subnormal() {
                0f64.copysign(f64::from(a))
            } else {
                f64::from(a)
            }
        },
        Type::F32 => |a| f64::from(f32::from_bits(a as u32)),
        Type::F64 => f64::from_bits,
        _ => return unknown(),
    })
}

/// Rounds a number to a float's bits.
fn writer(kind: Type, ftz: bool) -> Decoded<fn(f64, Rounding) -> u64> {
    Ok(match kind {
        Type::F16 => |x, rounding| F16.narrow(x, rounding),
        Type::Bf16 => |x, rounding| BF16.narrow(x, rounding),
        Type::Tf32 => |x, rounding| TF32.narrow(x, rounding) << 13,
        Type::F32 if ftz => |x, rounding| {
            let bits = F32.narrow(x, rounding);
            if bits & 0x7f80_0000 == 0 {
                bits & 0x8000_0000
            } else {
                bits
            }
        },
        Type::F32 => |x, rounding| {
            // Fast path: the processor's conversion.
            if rounding == Rounding::Nearest && !x.is_nan() {
                u64::from((x as f32).to_bits())
            } else {
                F32.narrow(x, rounding)
            }
        },
        Type::F64 => |x, _| x.to_bits(),
        _ => return unknown(),
    })
}

pub(super) fn decode(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    let to_kind = mods.take_type()?;
    let from_kind = mods.take_type()?;
    let how = How {
        rounding: mods.take_as(Rounding::named),
        ftz: mods.take("ftz"),
        sat: mods.take("sat"),
        relu: mods.take("relu"),
    };

    if matches!(to_kind, Type::F16x2 | Type::Bf16x2) {
        return packed(to_kind, from_kind, how, operands, b);
    }
    let [to, a] = exactly(operands)?;
    let to = b.target(to)?;
    let a = b.source(a)?;
    // A result narrower than its register is sign- or zero-extended.
    let keep = b.width_mask(to);

    match (is_float(to_kind), is_float(from_kind)) {
        (false, false) => integers(to_kind, from_kind, how, keep, to, a),
        (true, false) => to_float(to_kind, from_kind, how, to, a),
        (false, true) => to_integer(to_kind, from_kind, how, keep, to, a),
        (true, true) => floats(to_kind, from_kind, how, to, a),
    }
}

/// The lowest and highest value of an integer type.
fn range(kind: Type) -> Decoded<(i128, i128)> {
    Ok(match kind {
        Type::Signed(bits) => (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1),
        Type::Unsigned(bits) | Type::Bits(bits) => (0, (1i128 << bits) - 1),
        _ => return unknown(),
    })
}

/// Converts bits of an integer type to their value.
fn integer(kind: Type) -> Decoded<impl Fn(u64) -> i128 + Copy> {
    let (lowest, _) = range(kind)?;
    let shift = 64 - kind.bits();
    let signed = lowest < 0;
    Ok(move |a: u64| {
        let up = a << shift;
        if signed {
            i128::from(up as i64 >> shift)
        } else {
            i128::from(up >> shift)
        }
    })
}

fn integers(
    to_kind: Type,
    from_kind: Type,
    how: How,
    keep: u64,
    to: usize,
    a: usize,
) -> Decoded<Flow> {
    let (read, (lowest, highest)) = (integer(from_kind)?, range(to_kind)?);
    if how.sat {
        return Ok(map1(to, a, move |a| {
            read(a).clamp(lowest, highest) as u64 & keep
        }));
    }
    let write = integer(to_kind)?;
    Ok(map1(to, a, move |a| write(read(a) as u64) as u64 & keep))
}

fn to_float(to_kind: Type, from_kind: Type, how: How, to: usize, a: usize) -> Decoded<Flow> {
    let Some((rounding, false)) = how.rounding else {
        return Err("no rounding".into());
    };
    let read = integer(from_kind)?;
    let write = writer(to_kind, how.ftz)?;
    if to_kind == Type::F64 {
        if from_kind.bits() == 64 && rounding != Rounding::Nearest {
            return Err("only rounding to nearest is supported".into());
        }
        return Ok(map1(to, a, move |a| (read(a) as f64).to_bits()));
    }
    Ok(map1(to, a, move |a| write(integer_odd(read(a)), rounding)))
}

fn to_integer(
    to_kind: Type,
    from_kind: Type,
    how: How,
    keep: u64,
    to: usize,
    a: usize,
) -> Decoded<Flow> {
    let Some((rounding, true)) = how.rounding else {
        return Err("no rounding to an integer".into());
    };
    let (read, (lowest, highest)) = (reader(from_kind, how.ftz)?, range(to_kind)?);
    // The result for NaN depends on the types.
    let wide = from_kind == Type::F64 || to_kind.bits() == 64;
    let nan = if wide {
        1u64 << (to_kind.bits() - 1)
    } else {
        0
    };
    Ok(map1(to, a, move |a| {
        let x = read(a);
        if x.is_nan() {
            nan
        } else {
            (rounding.integer(x) as i128).clamp(lowest, highest) as u64 & keep
        }
    }))
}

fn floats(to_kind: Type, from_kind: Type, how: How, to: usize, a: usize) -> Decoded<Flow> {
    let read = reader(from_kind, how.ftz)?;
    let write = writer(to_kind, how.ftz)?;
    let (rounding, to_integral) = how.rounding.unwrap_or((Rounding::Nearest, false));
    if how.rounding.is_none() && to_kind.bits() < from_kind.bits() {
        return Err("no rounding".into());
    }
    let sixteen = mask_of(to_kind.bits());

    Ok(map1(to, a, move |a| {
        let x = read(a);
        let x = if to_integral { rounding.integer(x) } else { x };
        let x = if how.sat {
            if x > 0.0 { x.min(1.0) } else { 0.0 }
        } else {
            x
        };
        let x = if how.relu && !(x > 0.0 || x.is_nan()) {
            0.0
        } else {
            x
        };
        write(x, rounding) & sixteen
    }))
}

/// Converts two numbers to one register, the first to its upper half.
fn packed(
    to_kind: Type,
    from_kind: Type,
    how: How,
    operands: &[Operand],
    b: &mut Builder<'_>,
) -> Decoded<Flow> {
    let [to, high, low] = exactly(operands)?;
    let to = b.target(to)?;
    let from = [b.source(high)?, b.source(low)?];
    let Some((rounding, false)) = how.rounding else {
        return Err("no rounding".into());
    };
    if from_kind != Type::F32 || how.sat {
        return unknown();
    }
    let format = if to_kind == Type::F16x2 { F16 } else { BF16 };

    let half = move |a: u64| {
        let x = f64::from(f32::from_bits(a as u32));
        format.narrow(
            if how.relu && !(x > 0.0 || x.is_nan()) {
                0.0
            } else {
                x
            },
            rounding,
        )
    };

    Ok(map2(to, from, move |high, low| {
        half(high) << 16 | half(low)
    }))
}
