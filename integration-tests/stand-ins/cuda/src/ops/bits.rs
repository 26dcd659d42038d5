//! Logic and bit operations.

use super::{Decoded, act, exactly, holds, map1, map2, map3, slots, unknown};
use crate::ptx::build::{Builder, Mods};
use crate::ptx::syntax::Operand;
use crate::ptx::types::{Type, mask_of};

pub(super) fn decode(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    let kind = mods.take_type()?;
    if kind == Type::Pred {
        return predicates(mods.name, operands, b);
    }
    let (bits, keep) = (kind.bits(), mask_of(kind.bits()));
    let signed = matches!(kind, Type::Signed(_));
    let extend = move |value: u64| ((value << (64 - bits)) as i64) >> (64 - bits);

    if matches!(mods.name, "not" | "popc" | "clz" | "brev") {
        let (to, from) = slots(operands, b)?;
        return Ok(match mods.name {
            "not" => map1(to, from, move |a| !a & keep),
            "popc" => map1(to, from, move |a| u64::from((a & keep).count_ones())),
            "clz" => map1(to, from, move |a| {
                u64::from((a & keep).leading_zeros() - (64 - bits))
            }),
            _ => map1(to, from, move |a| a.reverse_bits() >> (64 - bits)),
        });
    }

    if mods.name == "prmt" {
        return prmt(kind, operands, b);
    }
    if mods.name == "bfi" {
        let (to, from): (_, [_; 4]) = slots(operands, b)?;
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

    let (to, from) = slots(operands, b)?;
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
fn prmt(kind: Type, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    if kind != Type::Bits(32) {
        return unknown();
    }
    let (to, from) = slots(operands, b)?;
    Ok(map3(to, from, |a, b, selector| {
        let bytes = (u64::from(b as u32) << 32) | u64::from(a as u32);
        let pick = |i: u64| {
            let nibble = selector >> (4 * i) & 0xf;
            let value = bytes >> (8 * (nibble & 7)) & 0xff;
            if nibble & 8 == 0 {
                value
            } else {
                (value >> 7) * 0xff
            }
        };
        (0..4).fold(0, |all, i| all | pick(i) << (8 * i))
    }))
}
