//! Logic and bit operations.

use super::{Decoded, act, exactly, holds, map1, map2, map3, unknown};
use crate::exec::program::Flow;
use crate::ptx::build::{Builder, Mods};
use crate::ptx::syntax::Operand;
use crate::ptx::types::{Type, mask_of};

pub(super) fn decode(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    match mods.name {
        "prmt" => return prmt(mods, operands, b),
        "shf" => return shf(mods, operands, b),
        "szext" | "bmsk" => return unknown(),
        _ => {}
    }

    let kind = mods.take_type()?;
    if kind == Type::Pred {
        return predicates(mods.name, operands, b);
    }
    let (bits, keep) = (kind.bits(), mask_of(kind.bits()));
    let signed = matches!(kind, Type::Signed(_));
    let extend = move |value: u64| ((value << (64 - bits)) as i64) >> (64 - bits);

    if matches!(
        mods.name,
        "not" | "cnot" | "popc" | "clz" | "brev" | "bfind"
    ) {
        let [to, a] = exactly(operands)?;
        let to = b.target(to)?;
        let a = b.source(a)?;
        return Ok(match mods.name {
            "not" => map1(to, a, move |a| !a & keep),
            "cnot" => map1(to, a, move |a| u64::from(a & keep == 0)),
            "popc" => map1(to, a, move |a| u64::from((a & keep).count_ones())),
            "clz" => map1(to, a, move |a| {
                u64::from((a & keep).leading_zeros() - (64 - bits))
            }),
            "brev" => map1(to, a, move |a| a.reverse_bits() >> (64 - bits)),
            _ => {
                let shift = mods.take("shiftamt");
                map1(to, a, move |a| {
                    // The highest bit that differs from the sign.
                    let a = if signed && extend(a) < 0 {
                        !a & keep
                    } else {
                        a & keep
                    };
                    match 63u32.checked_sub(a.leading_zeros()) {
                        None => u64::from(u32::MAX),
                        Some(at) => u64::from(if shift { bits - 1 - at } else { at }),
                    }
                })
            }
        });
    }

    if mods.name == "lop3" {
        let [to, x, y, z, table] = exactly(operands)?;
        let Operand::Integer(table) = *table else {
            return Err("the table is not a number".into());
        };
        let to = b.target(to)?;
        let from = [b.source(x)?, b.source(y)?, b.source(z)?];
        return Ok(map3(to, from, move |a, b, c| {
            let term = |row: u64| {
                let pick = |bit: u64, v: u64| if row & bit != 0 { v } else { !v };
                if table >> row & 1 == 1 {
                    pick(4, a) & pick(2, b) & pick(1, c)
                } else {
                    0
                }
            };
            (0..8).fold(0, |all, row| all | term(row)) & keep
        }));
    }

    if mods.name == "bfe" {
        let [to, x, y, z] = exactly(operands)?;
        let to = b.target(to)?;
        let from = [b.source(x)?, b.source(y)?, b.source(z)?];
        return Ok(map3(to, from, move |a, at, len| {
            let at = (at & 0xff) as u32;
            let len = (len & 0xff) as u32;
            let sign_at = (at + len).saturating_sub(1).min(bits - 1);
            let fill = signed && len > 0 && (a & keep) >> sign_at & 1 == 1;
            let field = if at >= bits {
                0
            } else {
                (a & keep) >> at & mask_of(len.min(bits))
            };
            let present = len.min(bits.saturating_sub(at));
            if fill {
                (field | !mask_of(present)) & keep
            } else {
                field & keep
            }
        }));
    }

    if mods.name == "bfi" {
        let [to, x, y, at, len] = exactly(operands)?;
        let to = b.target(to)?;
        let from = [b.source(x)?, b.source(y)?, b.source(at)?, b.source(len)?];
        return Ok(act(move |warp, mask| {
            for lane in crate::exec::program::lanes(mask) {
                let [insert, into, at, len] = from.map(|slot| warp.regs[slot][lane]);
                let at = (at & 0xff) as u32;
                let len = (len & 0xff) as u32;
                let field = if at >= bits {
                    0
                } else {
                    mask_of(len.min(bits)) << at & keep
                };
                let shifted = if at >= bits { 0 } else { insert << at };
                warp.regs[to][lane] = ((into & !field) | (shifted & field)) & keep;
            }
        }));
    }

    let [to, x, y] = exactly(operands)?;
    let to = b.target(to)?;
    let from = [b.source(x)?, b.source(y)?];
    Ok(match mods.name {
        "and" => map2(to, from, move |a, b| a & b & keep),
        "or" => map2(to, from, move |a, b| (a | b) & keep),
        "xor" => map2(to, from, move |a, b| (a ^ b) & keep),
        // The amount is 32 bits wide and clamped to the width.
        "shl" => map2(to, from, move |a, n| {
            if n as u32 >= bits {
                0
            } else {
                a << (n as u32) & keep
            }
        }),
        "shr" if signed => map2(to, from, move |a, n| {
            (extend(a) >> (n as u32).min(bits - 1)) as u64 & keep
        }),
        "shr" => map2(to, from, move |a, n| {
            if n as u32 >= bits {
                0
            } else {
                (a & keep) >> (n as u32)
            }
        }),
        _ => return unknown(),
    })
}

fn predicates(name: &str, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    if name == "not" {
        let [to, a] = exactly(operands)?;
        let to = b.pred_target(to)?;
        let a = b.pred_source(a)?;
        return Ok(act(move |warp, mask| {
            warp.set_pred(to, mask, !holds(warp, a))
        }));
    }

    let [to, x, y] = exactly(operands)?;
    let to = b.pred_target(to)?;
    let x = b.pred_source(x)?;
    let y = b.pred_source(y)?;
    let f: fn(u32, u32) -> u32 = match name {
        "and" => |x, y| x & y,
        "or" => |x, y| x | y,
        "xor" => |x, y| x ^ y,
        _ => return unknown(),
    };

    Ok(act(move |warp, mask| {
        warp.set_pred(to, mask, f(holds(warp, x), holds(warp, y)))
    }))
}

/// Selects four bytes of two registers.
fn prmt(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded<Flow> {
    if mods.take_type()? != Type::Bits(32) {
        return unknown();
    }
    const MODES: [&str; 6] = ["f4e", "b4e", "rc8", "ecl", "ecr", "rc16"];
    let mode = mods
        .take_of(&MODES)
        .and_then(|mode| MODES.into_iter().find(|&m| m == mode));
    let [to, x, y, z] = exactly(operands)?;
    let to = b.target(to)?;
    let from = [b.source(x)?, b.source(y)?, b.source(z)?];

    Ok(map3(to, from, move |a, b, selector| {
        let bytes = (u64::from(b as u32) << 32) | u64::from(a as u32);
        let byte = |at: u64| bytes >> (8 * (at & 7)) & 0xff;
        let s = selector & 3;
        let pick = |i: u64| match mode {
            None => {
                let nibble = selector >> (4 * i) & 0xf;
                let value = byte(nibble);
                if nibble & 8 == 0 {
                    value
                } else {
                    (value >> 7) * 0xff
                }
            }
            Some("f4e") => byte(s + i),
            Some("b4e") => byte(s.wrapping_sub(i)),
            Some("rc8") => byte(s),
            Some("ecl") => byte(i.max(s)),
            Some("ecr") => byte(i.min(s)),
            _ => byte((s & 1) * 2 + (i & 1)),
        };
        (0..4).fold(0, |all, i| all | pick(i) << (8 * i))
    }))
}

/// Funnel shift.
fn shf(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded<Flow> {
    let left = mods.take_of(&["l", "r"]).ok_or("no direction")? == "l";
    let wraps = mods.take_of(&["wrap", "clamp"]).ok_or("no mode")? == "wrap";
    if mods.take_type()? != Type::Bits(32) {
        return unknown();
    }
    let [to, x, y, z] = exactly(operands)?;
    let to = b.target(to)?;
    let from = [b.source(x)?, b.source(y)?, b.source(z)?];

    Ok(map3(to, from, move |low, high, n| {
        let both = (u64::from(high as u32) << 32) | u64::from(low as u32);
        let n = if wraps {
            n as u32 & 31
        } else {
            (n as u32).min(32)
        };
        if left {
            both << n >> 32
        } else {
            u64::from((both >> n) as u32)
        }
    }))
}
