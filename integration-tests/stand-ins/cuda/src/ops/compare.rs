//! Comparisons.

use super::{Decoded, act, holds, mask_where, unknown};
use crate::exec::program::Mask;
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

fn compare(operator: &str, kind: Type, from: [usize; 2]) -> Decoded<Compare> {
    let is_float = matches!(kind, Type::F32 | Type::F64);
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
        Type::F32 => with(operator, from, |a| f32::from_bits(a as u32)),
        Type::F64 => with(operator, from, f64::from_bits),
        _ => unknown(),
    }
}

pub(super) fn decode(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    let operator = mods.take_of(&OPERATORS).ok_or("no comparison")?;
    let combine: fn(Mask, Mask) -> Mask = match mods.take_of(&["and", "or", "xor"]) {
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
    let compare = compare(operator, mods.take_type()?, from)?;
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
