//! Barriers and shuffles.

use super::{Decoded, exactly, mask_where, store, unknown};
use crate::exec::program::{Action, Flow, Mask};
use crate::exec::warp::Warp;
use crate::ptx::build::{Builder, Mods};
use crate::ptx::syntax::Operand;
use crate::ptx::types::Type;

pub(super) fn decode(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    if mods.name == "shfl" {
        return shuffle(mods, operands, b);
    }
    let of_warp = mods.take("warp");
    mods.take_of(&["sync"]).ok_or("only `.sync` is known")?;
    let [operand] = exactly(operands)?;
    let slot = b.source(operand)?;
    Ok(if of_warp {
        // All lanes of the mask must arrive at this instruction.
        together(slot, |_, _| {})
    } else {
        Flow::Barrier { number: slot }
    })
}

/// An action that all lanes of the mask in `members` run together.
fn together(members: usize, f: impl Fn(&mut Warp, Mask) + Send + Sync + 'static) -> Flow {
    let action: Action = Box::new(move |warp, _, mask| {
        f(warp, mask);
        Ok(())
    });
    Flow::Together { members, action }
}

fn shuffle(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    mods.take_of(&["sync"]).ok_or("only `.sync` is known")?;
    let mode = mods
        .take_of(&["up", "down", "bfly", "idx"])
        .ok_or("no mode")?;
    // The source lane, before its range check.
    let from: fn(i64, i64, i64, i64) -> i64 = match mode {
        "up" => |lane, by, _, _| lane - by,
        "down" => |lane, by, _, _| lane + by,
        "bfly" => |lane, by, _, _| lane ^ by,
        _ => |_, by, lowest, segment| lowest | (by & !segment),
    };

    let up = mode == "up";
    if mods.take_type()? != Type::Bits(32) {
        return unknown();
    }
    let [to, a, by, clamp, members] = exactly(operands)?;
    let (to, within) = match to {
        Operand::Pair(to, within) => (b.target(to)?, Some(b.pred_target(within)?)),
        one => (b.target(one)?, None),
    };

    let a = b.source(a)?;
    let by = b.source(by)?;
    let clamp = b.source(clamp)?;
    let members = b.source(members)?;
    Ok(together(members, move |warp, mask| {
        let source = |lane: usize| -> Option<usize> {
            let by = warp.regs[by][lane] & 31;
            let clamp = warp.regs[clamp][lane];
            let segment = (clamp >> 8 & 31) as i64;
            let clamp = (clamp & 31) as i64;
            let at = lane as i64;
            let (highest, lowest) = ((at & segment) | (clamp & !segment & 31), at & segment);
            let from = from(at, by as i64, lowest, segment);
            (if up { from >= highest } else { from <= highest }).then_some(from as usize & 31)
        };
        // PTX leaves the value read from an inactive lane undefined.
        let give = |lane: usize| {
            if mask >> lane & 1 == 1 {
                warp.regs[a][lane] & 0xffff_ffff
            } else {
                0xffff_ffff
            }
        };
        let values = std::array::from_fn(|lane| give(source(lane).unwrap_or(lane)));
        let inside = mask_where(|lane| source(lane).is_some());
        store(warp, to, mask, &values);
        if let Some(within) = within {
            warp.set_pred(within, mask, inside);
        }
    }))
}
