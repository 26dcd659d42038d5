//! Arithmetic of `f16` and `bf16`, scalar and packed in pairs. Every operation rounds once.

use super::format::{BF16, F16, Format, Rounding, add_odd};
use super::{Decoded, exactly, map1, map2, map3, unknown};
use crate::exec::program::Flow;
use crate::ptx::build::{Builder, Mods};
use crate::ptx::syntax::Operand;
use crate::ptx::types::Type;

/// Applies an operation to each half of its operands.
fn each(pair: bool, f: impl Fn([u64; 3]) -> u64) -> impl Fn([u64; 3]) -> u64 {
    move |all| {
        let low = f(all.map(|x| x & 0xffff));
        if pair {
            low | f(all.map(|x| x >> 16 & 0xffff)) << 16
        } else {
            low
        }
    }
}

pub(super) fn decode(
    kind: Type,
    mods: &mut Mods<'_>,
    operands: &[Operand],
    b: &mut Builder<'_>,
) -> Decoded {
    let format = if matches!(kind, Type::F16 | Type::F16x2) {
        F16
    } else {
        BF16
    };

    let pair = matches!(kind, Type::F16x2 | Type::Bf16x2);
    if mods
        .take_as(Rounding::named)
        .is_some_and(|found| found != (Rounding::Nearest, false))
    {
        return Err("only rounding to nearest is supported".into());
    }
    let relu = mods.take("relu");
    let propagates = mods.take("NaN");
    mods.take("approx");

    let narrow = move |x: f64| {
        let x = if relu && !(x > 0.0 || x.is_nan()) {
            0.0
        } else {
            x
        };
        format.narrow(x, Rounding::Nearest)
    };

    let name = mods.name;
    match operands {
        [to, x] => {
            let to = b.target(to)?;
            let x = b.source(x)?;
            let f: fn(Format, u64) -> u64 = match name {
                "neg" => |_, x| x ^ 0x8000,
                "abs" => |_, x| x & 0x7fff,
                "ex2" => |format, x| format.narrow(format.widen(x).exp2(), Rounding::Nearest),
                "tanh" => |format, x| format.narrow(format.widen(x).tanh(), Rounding::Nearest),
                _ => return unknown(),
            };
            let f = each(pair, move |[x, _, _]| f(format, x));
            Ok(map1(to, x, move |x| f([x, 0, 0])))
        }
        [to, x, y] => two(name, format, pair, propagates, narrow, [to, x, y], b),
        _ => {
            let [to, x, y, z] = exactly(operands)?;
            if name != "fma" {
                return unknown();
            }
            let to = b.target(to)?;
            let from = [b.source(x)?, b.source(y)?, b.source(z)?];
            // The product is exact in f64, and the sum rounded to odd.
            let f = each(pair, move |all| {
                let [x, y, z] = all.map(|x| format.widen(x));
                narrow(add_odd(x * y, z))
            });
            Ok(map3(to, from, move |x, y, z| f([x, y, z])))
        }
    }
}

fn two(
    name: &str,
    format: Format,
    pair: bool,
    propagates: bool,
    narrow: impl Fn(f64) -> u64 + Send + Sync + 'static,
    [to, x, y]: [&Operand; 3],
    b: &mut Builder<'_>,
) -> Decoded<Flow> {
    let to = b.target(to)?;
    let from = [b.source(x)?, b.source(y)?];
    let f: fn(f64, f64) -> f64 = match name {
        "add" => add_odd,
        "sub" => |x, y| add_odd(x, -y),
        "mul" => |x, y| x * y,
        "min" => |x, y| {
            if y < x || x.is_nan() || (x == y && y.is_sign_negative()) {
                y
            } else {
                x
            }
        },
        "max" => |x, y| {
            if y > x || x.is_nan() || (x == y && x.is_sign_negative()) {
                y
            } else {
                x
            }
        },
        _ => return unknown(),
    };

    let extreme = matches!(name, "min" | "max");
    let f = each(pair, move |[x, y, _]| {
        let x = format.widen(x);
        let y = format.widen(y);
        narrow(if extreme && propagates && (x.is_nan() || y.is_nan()) {
            f64::NAN
        } else {
            f(x, y)
        })
    });

    Ok(map2(to, from, move |x, y| f([x, y, 0])))
}
