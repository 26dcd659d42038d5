//! Arithmetic of `f32` and `f64`. Operations that a GPU approximates (`.approx`, `.full`) are
//! computed in f64 here and rounded once.

use super::format::{self, Rounding, add_odd};
use super::{Decoded, exactly, map1, map2, map3, unknown};
use crate::exec::program::Flow;
use crate::ptx::build::{Builder, Mods};
use crate::ptx::syntax::Operand;
use crate::ptx::types::Type;

/// The bits of an f32 result, with the canonical NaN of GPUs.
#[inline]
fn bits(x: f32) -> u64 {
    u64::from(if x.is_nan() { 0x7fff_ffff } else { x.to_bits() })
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

/// Clamps to `[0, 1]`; NaN becomes 0.
#[inline]
fn saturate(x: f32) -> f32 {
    if x > 0.0 { x.min(1.0) } else { 0.0 }
}

/// The effect of `.ftz` and `.sat` on an operation's numbers.
#[derive(Clone, Copy)]
struct Around {
    ftz: bool,
    sat: bool,
}

impl Around {
    fn input(self, a: u64) -> f32 {
        let a = f32::from_bits(a as u32);
        if self.ftz { flush(a) } else { a }
    }

    fn output(self, x: f32) -> u64 {
        let x = if self.ftz { flush(x) } else { x };
        bits(if self.sat { saturate(x) } else { x })
    }

    fn plain(self) -> bool {
        !self.ftz && !self.sat
    }
}

pub(super) fn decode(
    kind: Type,
    mods: &mut Mods<'_>,
    operands: &[Operand],
    b: &mut Builder<'_>,
) -> Decoded {
    let around = Around {
        ftz: mods.take("ftz"),
        sat: mods.take("sat"),
    };
    let rounding = mods.take_as(Rounding::named);
    if rounding.is_some_and(|(_, integer)| integer) {
        return unknown();
    }
    let rounding = rounding.map_or(Rounding::Nearest, |(rounding, _)| rounding);
    // All are exact here, and rounded once.
    let approximate = mods.take_of(&["approx", "full"]).is_some();
    if matches!(mods.name, "ex2" | "lg2" | "sin" | "cos" | "tanh" | "rsqrt") && !approximate {
        return Err("only `.approx` is known".into());
    }
    match kind {
        Type::F32 => single(rounding, around, mods, operands, b),
        _ => double(rounding, around, mods, operands, b),
    }
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

fn single(
    rounding: Rounding,
    around: Around,
    mods: &mut Mods<'_>,
    operands: &[Operand],
    b: &mut Builder<'_>,
) -> Decoded {
    if let Some(f) = unary(mods.name) {
        let [to, a] = exactly(operands)?;
        let to = b.target(to)?;
        let a = b.source(a)?;
        if rounding != Rounding::Nearest {
            return Err("only rounding to nearest is supported".into());
        }
        // sqrt and 1/x of an f32 computed in f64 are innocuous double roundings (Figueroa, 1995).
        return Ok(map1(to, a, move |a| {
            around.output(f(f64::from(around.input(a))) as f32)
        }));
    }

    if matches!(mods.name, "abs" | "neg") {
        let [to, a] = exactly(operands)?;
        let to = b.target(to)?;
        let a = b.source(a)?;
        let f: fn(u32) -> u32 = if mods.name == "abs" {
            |a| a & !(1 << 31)
        } else {
            |a| a ^ (1 << 31)
        };
        return Ok(map1(to, a, move |a| {
            let a = f32::from_bits(f(a as u32));
            u64::from(if around.ftz { flush(a) } else { a }.to_bits())
        }));
    }

    if matches!(mods.name, "fma" | "mad") {
        let [to, x, y, z] = exactly(operands)?;
        let to = b.target(to)?;
        let from = [b.source(x)?, b.source(y)?, b.source(z)?];
        let input = move |a| around.input(a);
        return Ok(match rounding {
            Rounding::Nearest if around.plain() => map3(to, from, |a, b, c| {
                bits(
                    f32::from_bits(a as u32)
                        .mul_add(f32::from_bits(b as u32), f32::from_bits(c as u32)),
                )
            }),
            Rounding::Nearest => map3(to, from, move |a, b, c| {
                around.output(input(a).mul_add(input(b), input(c)))
            }),
            rounding => map3(to, from, move |a, b, c| {
                // The product of two f32 is exact in f64.
                directed(
                    add_odd(
                        f64::from(input(a)) * f64::from(input(b)),
                        f64::from(input(c)),
                    ),
                    rounding,
                    around,
                )
            }),
        });
    }

    let (pair, third) = match operands {
        [to, x, y] => ((to, [x, y]), None),
        [to, x, y, z] => ((to, [x, y]), Some(z)),
        _ => return Err("the number of operands is wrong".into()),
    };

    let to = b.target(pair.0)?;
    let from = [b.source(pair.1[0])?, b.source(pair.1[1])?];
    if matches!(mods.name, "min" | "max") {
        return extreme(to, from, third, around, mods, b);
    }
    if third.is_some() {
        return unknown();
    }
    if mods.name == "copysign" {
        return Ok(map2(to, from, |a, b| (a & 0x8000_0000) | (b & 0x7fff_ffff)));
    }

    if rounding != Rounding::Nearest {
        let exact: fn(f64, f64) -> f64 = match mods.name {
            "add" => add_odd,
            "sub" => |a, b| add_odd(a, -b),
            "mul" => |a, b| a * b,
            _ => return Err("only rounding to nearest is supported".into()),
        };
        return Ok(map2(to, from, move |x, y| {
            directed(
                exact(f64::from(around.input(x)), f64::from(around.input(y))),
                rounding,
                around,
            )
        }));
    }

    macro_rules! nearest {
        ($op:tt) => {
            if around.plain() {
                map2(to, from, |x, y| bits(f32::from_bits(x as u32) $op f32::from_bits(y as u32)))
            } else {
                map2(to, from, move |x, y| around.output(around.input(x) $op around.input(y)))
            }
        };
    }

    Ok(match mods.name {
        "add" => nearest!(+),
        "sub" => nearest!(-),
        "mul" => nearest!(*),
        "div" => nearest!(/),
        _ => return unknown(),
    })
}

/// Rounds a number, already rounded to odd, to f32 in a direction.
fn directed(x: f64, rounding: Rounding, around: Around) -> u64 {
    around.output(f32::from_bits(format::F32.narrow(x, rounding) as u32))
}

/// The smaller or larger number. If one is NaN, the result is the other, or NaN with `.NaN`. -0 is
/// less than +0.
fn extreme(
    to: usize,
    [a, b]: [usize; 2],
    third: Option<&Operand>,
    around: Around,
    mods: &mut Mods<'_>,
    builder: &mut Builder<'_>,
) -> Decoded<Flow> {
    let (propagates, abs, largest) = (
        mods.take("NaN"),
        mods.take("xorsign") | mods.take("abs"),
        mods.name == "max",
    );
    if abs {
        return Err("`.xorsign.abs` is not supported".into());
    }

    let pick = move |a: u64, b: u64| {
        let x = around.input(a);
        let y = around.input(b);
        around.output(if largest {
            maximum(x, y, propagates)
        } else {
            -maximum(-x, -y, propagates)
        })
    };

    Ok(match third {
        None => map2(to, [a, b], pick),
        Some(third) => {
            let c = builder.source(third)?;
            map3(to, [a, b, c], move |a, b, c| pick(pick(a, b), c))
        }
    })
}

fn maximum(x: f32, y: f32, propagates: bool) -> f32 {
    if x.is_nan() || y.is_nan() {
        return if propagates || (x.is_nan() && y.is_nan()) {
            f32::NAN
        } else if x.is_nan() {
            y
        } else {
            x
        };
    }
    if x == y {
        // Equal numbers, or zeros of different sign.
        return if x.is_sign_positive() { x } else { y };
    }
    if x > y { x } else { y }
}

fn double(
    rounding: Rounding,
    around: Around,
    mods: &mut Mods<'_>,
    operands: &[Operand],
    b: &mut Builder<'_>,
) -> Decoded {
    if rounding != Rounding::Nearest {
        return Err("only rounding to nearest is supported".into());
    }
    if around.sat {
        return Err("`.sat` is not supported".into());
    }
    let float = f64::from_bits;

    match operands {
        [to, a] => {
            let to = b.target(to)?;
            let a = b.source(a)?;
            if let Some(f) = unary(mods.name) {
                return Ok(map1(to, a, move |a| f(float(a)).to_bits()));
            }
            Ok(match mods.name {
                "abs" => map1(to, a, |a| a & !(1 << 63)),
                "neg" => map1(to, a, |a| a ^ (1 << 63)),
                _ => return unknown(),
            })
        }
        [to, x, y] => {
            let to = b.target(to)?;
            let from = [b.source(x)?, b.source(y)?];
            Ok(match mods.name {
                "add" => map2(to, from, move |x, y| (float(x) + float(y)).to_bits()),
                "sub" => map2(to, from, move |x, y| (float(x) - float(y)).to_bits()),
                "mul" => map2(to, from, move |x, y| (float(x) * float(y)).to_bits()),
                "div" => map2(to, from, move |x, y| (float(x) / float(y)).to_bits()),
                "min" => map2(to, from, move |x, y| float(x).min(float(y)).to_bits()),
                "max" => map2(to, from, move |x, y| float(x).max(float(y)).to_bits()),
                "copysign" => map2(to, from, |x, y| (x & (1 << 63)) | (y & !(1 << 63))),
                _ => return unknown(),
            })
        }
        [to, x, y, z] if matches!(mods.name, "fma" | "mad") => {
            let to = b.target(to)?;
            let from = [b.source(x)?, b.source(y)?, b.source(z)?];
            Ok(map3(to, from, move |x, y, z| {
                float(x).mul_add(float(y), float(z)).to_bits()
            }))
        }
        _ => unknown(),
    }
}
