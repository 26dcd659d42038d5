//! Comparisons.

use super::format::{bf16_to_f32, f16_to_f32};
use super::{Decoded, act, exactly, holds, mask_where, store, unknown};
use crate::exec::program::{Mask, lanes};
use crate::exec::warp::Warp;
use crate::ptx::build::{Builder, Mods};
use crate::ptx::syntax::Operand;
use crate::ptx::types::Type;

const OPERATORS: [&str; 18] = [
    "eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu", "ltu", "leu", "gtu",
    "geu", "num", "nan",
];

/// Compares two values in all lanes.
type Compare = Box<dyn Fn(&Warp) -> Mask + Send + Sync>;

/// A comparison of two slots, converted by `read`.
fn with<T: PartialOrd>(
    operator: &str,
    [a, b]: [usize; 2],
    read: impl Fn(u64) -> T + Copy + Send + Sync + 'static,
) -> Decoded<Compare> {
    macro_rules! all {
        ($x:ident, $y:ident, $e:expr) => {
            Box::new(move |warp: &Warp| {
                let a = &warp.regs[a];
                let b = &warp.regs[b];
                mask_where(|lane| {
                    let $x = read(a[lane]);
                    let $y = read(b[lane]);
                    $e
                })
            })
        };
    }

    Ok(match operator {
        "eq" => all!(x, y, x == y),
        // Not equal, and neither is NaN.
        "ne" => all!(x, y, x != y && x.partial_cmp(&y).is_some()),
        "lt" | "lo" => all!(x, y, x < y),
        "le" | "ls" => all!(x, y, x <= y),
        "gt" | "hi" => all!(x, y, x > y),
        "ge" | "hs" => all!(x, y, x >= y),
        // Or one of them is NaN.
        "equ" => all!(x, y, x == y || x.partial_cmp(&y).is_none()),
        "neu" => all!(x, y, x != y),
        "ltu" => all!(
            x,
            y,
            x.partial_cmp(&y).is_none_or(std::cmp::Ordering::is_lt)
        ),
        "leu" => all!(
            x,
            y,
            x.partial_cmp(&y).is_none_or(std::cmp::Ordering::is_le)
        ),
        "gtu" => all!(
            x,
            y,
            x.partial_cmp(&y).is_none_or(std::cmp::Ordering::is_gt)
        ),
        "geu" => all!(
            x,
            y,
            x.partial_cmp(&y).is_none_or(std::cmp::Ordering::is_ge)
        ),
        "num" => all!(x, y, x.partial_cmp(&y).is_some()),
        "nan" => all!(x, y, x.partial_cmp(&y).is_none()),
        _ => return unknown(),
    })
}

fn compare(operator: &str, kind: Type, from: [usize; 2], ftz: bool) -> Decoded<Compare> {
    let is_float = matches!(kind, Type::F16 | Type::Bf16 | Type::F32 | Type::F64);
    let unsigned_only = matches!(operator, "lo" | "ls" | "hi" | "hs");
    if (!is_float && (operator.ends_with('u') || matches!(operator, "num" | "nan")))
        || (is_float && unsigned_only)
    {
        return Err(format!("`.{operator}` is not for this type"));
    }

    match kind {
        Type::Bits(16) | Type::Unsigned(16) => with(operator, from, |a| a as u16),
        Type::Bits(32) | Type::Unsigned(32) => with(operator, from, |a| a as u32),
        Type::Bits(64) | Type::Unsigned(64) => with(operator, from, |a| a),
        Type::Signed(16) => with(operator, from, |a| a as i16),
        Type::Signed(32) => with(operator, from, |a| a as i32),
        Type::Signed(64) => with(operator, from, |a| a as i64),
        Type::F16 => with(operator, from, f16_to_f32),
        Type::Bf16 => with(operator, from, bf16_to_f32),
        Type::F32 if ftz => with(operator, from, |a| {
            let a = f32::from_bits(a as u32);
            if a.is_subnormal() { 0.0 } else { a }
        }),
        Type::F32 => with(operator, from, |a| f32::from_bits(a as u32)),
        Type::F64 => with(operator, from, f64::from_bits),
        _ => unknown(),
    }
}

pub(super) fn decode(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    if mods.name == "testp" {
        return testp(mods, operands, b);
    }
    let operator = mods.take_of(&OPERATORS).ok_or("no comparison")?;
    let ftz = mods.take("ftz");
    let combine = mods.take_of(&["and", "or", "xor"]);
    let combine: fn(Mask, Mask) -> Mask = match combine {
        Some("or") => |x, y| x | y,
        Some("xor") => |x, y| x ^ y,
        _ => |x, y| x & y,
    };

    let (to, x, y, with) = match operands {
        [to, x, y] => (to, x, y, (b.true_pred(), false)),
        [to, x, y, with] => (to, x, y, b.pred_source(with)?),
        _ => return Err("the number of operands is wrong".into()),
    };

    let from = [b.source(x)?, b.source(y)?];
    if mods.name == "set" {
        let result = mods.take_type()?;
        let kind = mods.take_type()?;
        let yes = match result {
            Type::F32 => u64::from(1f32.to_bits()),
            Type::Unsigned(32) | Type::Signed(32) => u64::from(u32::MAX),
            _ => return unknown(),
        };
        let to = b.target(to)?;
        let compare = compare(operator, kind, from, ftz)?;
        return Ok(act(move |warp, mask| {
            let found = combine(compare(warp), holds(warp, with));
            let values = std::array::from_fn(|lane| if found >> lane & 1 == 1 { yes } else { 0 });
            store(warp, to, mask, &values);
        }));
    }

    let kind = mods.take_type()?;
    let compare = compare(operator, kind, from, ftz)?;
    let (first, second) = match to {
        Operand::Pair(first, second) => (b.pred_target(first)?, Some(b.pred_target(second)?)),
        one => (b.pred_target(one)?, None),
    };

    Ok(act(move |warp, mask| {
        let found = compare(warp);
        let with = holds(warp, with);
        warp.set_pred(first, mask, combine(found, with));
        if let Some(second) = second {
            warp.set_pred(second, mask, combine(!found, with));
        }
    }))
}

/// Whether a float is of a class.
fn testp(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    let classes = [
        "finite",
        "infinite",
        "number",
        "notanumber",
        "normal",
        "subnormal",
    ];

    let class = mods.take_of(&classes).ok_or("no class")?;
    let kind = mods.take_type()?;
    let [to, a] = exactly(operands)?;
    let to = b.pred_target(to)?;
    let a = b.source(a)?;

    // Subnormal in the number's format, not in f64.
    let (smallest, read): (f64, fn(u64) -> f64) = match kind {
        Type::F32 => (f64::from(f32::MIN_POSITIVE), |a| {
            f64::from(f32::from_bits(a as u32))
        }),
        Type::F64 => (f64::MIN_POSITIVE, f64::from_bits),
        _ => return unknown(),
    };

    let test: fn(f64, f64) -> bool = match class {
        "finite" => |x, _| x.is_finite(),
        "infinite" => |x, _| x.is_infinite(),
        "number" => |x, _| !x.is_nan(),
        "notanumber" => |x, _| x.is_nan(),
        "normal" => |x, smallest| x.is_finite() && x.abs() >= smallest,
        _ => |x, smallest| x != 0.0 && x.abs() < smallest,
    };

    Ok(act(move |warp, mask| {
        let found = lanes(mask).fold(0, |all, lane| {
            all | u32::from(test(read(warp.regs[a][lane]), smallest)) << lane
        });
        warp.set_pred(to, mask, found);
    }))
}
