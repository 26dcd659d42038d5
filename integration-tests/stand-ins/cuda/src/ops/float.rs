//! Arithmetic of `f32` and `f64`, rounded to nearest. Operations that a GPU approximates (`.approx`,
//! `.full`) are computed in f64 here and rounded once.

use super::{Decoded, map1, map2, map3, slots, unknown};
use crate::ptx::build::{Builder, Mods};
use crate::ptx::syntax::Operand;

/// The bits of an f32 result, with the canonical NaN of GPUs.
#[inline]
fn bits(x: f32) -> u64 {
    u64::from(if x.is_nan() { 0x7fff_ffff } else { x.to_bits() })
}

#[inline]
fn f32_of(a: u64) -> f32 {
    f32::from_bits(a as u32)
}

/// A subnormal number as the zero of its sign.
#[inline]
fn flush(x: f32) -> f32 {
    if x.is_subnormal() {
        0f32.copysign(x)
    } else {
        x
    }
}

/// Uses the modifiers of rounding. `.approx` and `.full` are exact here, and rounded once.
fn take_rounding(mods: &mut Mods<'_>) -> Decoded<()> {
    mods.take("rn");
    let approximate = mods.take_of(&["approx", "full"]).is_some();
    if matches!(mods.name, "ex2" | "lg2" | "sin" | "cos" | "tanh" | "rsqrt") && !approximate {
        return Err("only `.approx` is known".into());
    }
    Ok(())
}

fn unary(name: &str) -> Option<fn(f64) -> f64> {
    Some(match name {
        "sqrt" => f64::sqrt,
        "rcp" => |x| 1.0 / x,
        "rsqrt" => |x| 1.0 / x.sqrt(),
        "ex2" => f64::exp2,
        "lg2" => f64::log2,
        "sin" => f64::sin,
        "cos" => f64::cos,
        "tanh" => f64::tanh,
        _ => return None,
    })
}

pub(super) fn single(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    take_rounding(mods)?;
    if let Some(f) = unary(mods.name) {
        let (to, from) = slots(operands, b)?;
        // sqrt and 1/x of an f32 computed in f64 are innocuous double roundings (Figueroa, 1995).
        return Ok(if mods.take("ftz") {
            map1(to, from, move |a| {
                bits(flush(f(f64::from(flush(f32_of(a)))) as f32))
            })
        } else {
            map1(to, from, move |a| bits(f(f64::from(f32_of(a))) as f32))
        });
    }

    if matches!(mods.name, "abs" | "neg") {
        let (to, from) = slots(operands, b)?;
        return Ok(match mods.name {
            "abs" => map1(to, from, |a| a & 0x7fff_ffff),
            _ => map1(to, from, |a| u64::from(a as u32 ^ 1 << 31)),
        });
    }

    if mods.name == "fma" {
        let (to, from) = slots(operands, b)?;
        return Ok(map3(to, from, |x, y, z| {
            bits(f32_of(x).mul_add(f32_of(y), f32_of(z)))
        }));
    }

    let (to, from) = slots(operands, b)?;
    Ok(match mods.name {
        "add" => map2(to, from, |x, y| bits(f32_of(x) + f32_of(y))),
        "sub" => map2(to, from, |x, y| bits(f32_of(x) - f32_of(y))),
        "mul" => map2(to, from, |x, y| bits(f32_of(x) * f32_of(y))),
        "div" => map2(to, from, |x, y| bits(f32_of(x) / f32_of(y))),
        "max" => map2(to, from, |x, y| bits(maximum(f32_of(x), f32_of(y)))),
        "min" => map2(to, from, |x, y| bits(-maximum(-f32_of(x), -f32_of(y)))),
        _ => return unknown(),
    })
}

/// The larger number. If one is NaN, the result is the other. -0 is less than +0.
fn maximum(x: f32, y: f32) -> f32 {
    if x.is_nan() || x < y {
        return y;
    }
    if x == y {
        // Equal numbers, or zeros of different sign.
        return if x.is_sign_positive() { x } else { y };
    }
    x
}

pub(super) fn double(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    take_rounding(mods)?;
    let float = f64::from_bits;
    if let Some(f) = unary(mods.name) {
        let (to, from) = slots(operands, b)?;
        return Ok(map1(to, from, move |a| f(float(a)).to_bits()));
    }

    if matches!(mods.name, "abs" | "neg") {
        let (to, from) = slots(operands, b)?;
        return Ok(match mods.name {
            "abs" => map1(to, from, |a| a & !(1 << 63)),
            _ => map1(to, from, |a| a ^ (1 << 63)),
        });
    }

    if mods.name == "fma" {
        let (to, from) = slots(operands, b)?;
        return Ok(map3(to, from, move |x, y, z| {
            float(x).mul_add(float(y), float(z)).to_bits()
        }));
    }

    let (to, from) = slots(operands, b)?;
    Ok(match mods.name {
        "add" => map2(to, from, move |x, y| (float(x) + float(y)).to_bits()),
        "sub" => map2(to, from, move |x, y| (float(x) - float(y)).to_bits()),
        "mul" => map2(to, from, move |x, y| (float(x) * float(y)).to_bits()),
        "div" => map2(to, from, move |x, y| (float(x) / float(y)).to_bits()),
        "min" => map2(to, from, move |x, y| float(x).min(float(y)).to_bits()),
        "max" => map2(to, from, move |x, y| float(x).max(float(y)).to_bits()),
        _ => return unknown(),
    })
}
