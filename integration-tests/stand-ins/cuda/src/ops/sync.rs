//! Barriers, shuffles and votes; and hints, which have no effect.

use super::memory::only_address;
use super::{Decoded, act, exactly, holds, mask_where, nothing, store, unknown};
use crate::error::Failure;
use crate::exec::program::{Action, Flow, Mask, Reduction, fault, lanes};
use crate::exec::warp::Warp;
use crate::ptx::build::{Builder, Mods};
use crate::ptx::syntax::Operand;
use crate::ptx::types::{Space, Type};

pub(super) fn decode(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    match mods.name {
        "bar" | "barrier" => barrier(mods, operands, b),
        "shfl" => shuffle(mods, operands, b),
        "vote" => vote(mods, operands, b),
        "match" => matching(mods, operands, b),
        "redux" => reduce(mods, operands, b),
        "activemask" => {
            mods.take_type()?;
            let [to] = exactly(operands)?;
            let to = b.target(to)?;
            Ok(act(move |warp, mask| {
                store(warp, to, mask, &[u64::from(mask); 32])
            }))
        }
        "trap" | "brkpt" => {
            let action: Action = Box::new(|_, _, _| fault(Failure::LaunchFailed, "trap"));
            Ok(Flow::Do(action))
        }
        // Accesses are done in program order, so fences have no effect.
        "membar" | "fence" => {
            mods.ignore(&[
                "sc", "acq_rel", "acquire", "release", "cta", "gl", "sys", "gpu", "cluster",
            ]);
            Ok(nothing())
        }
        "nanosleep" => {
            mods.take_type()?;
            let [time] = exactly(operands)?;
            b.source(time)?;
            Ok(nothing())
        }
        "griddepcontrol" => {
            mods.take_of(&["wait", "launch_dependents"])
                .ok_or("no action")?;
            Ok(nothing())
        }
        "prefetch" | "prefetchu" => {
            let space = mods.take_as(Space::named).unwrap_or(Space::Generic);
            mods.ignore(&["L1", "L2", "L2::evict_last", "L2::evict_normal"]);
            only_address(operands, space, b)?;
            Ok(nothing())
        }
        _ => unknown(),
    }
}

fn barrier(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    mods.ignore(&["cta", "aligned"]);
    if mods.take("warp") {
        // All lanes of the mask must arrive at this instruction.
        mods.take_of(&["sync"]).ok_or("only `.sync` is known")?;
        let [members] = exactly(operands)?;
        let members = b.source(members)?;
        return Ok(Flow::Together {
            members,
            action: Box::new(|_, _, _| Ok(())),
        });
    }

    let kind = mods
        .take_of(&["sync", "arrive", "red"])
        .ok_or("no action")?;
    if kind != "red" {
        let (number, count) = match operands {
            [number] => (number, None),
            [number, count] => (number, Some(count)),
            _ => return Err("the number of operands is wrong".into()),
        };
        let number = b.source(number)?;
        let count = count.map(|count| b.source(count)).transpose()?;
        return Ok(Flow::Barrier {
            number,
            count,
            reduction: Reduction::None,
            waits: kind == "sync",
        });
    }

    let operation = mods.take_of(&["popc", "and", "or"]).ok_or("no operation")?;
    mods.take_type()?;
    let (to, number, count, from) = match operands {
        [to, number, from] => (to, number, None, from),
        [to, number, count, from] => (to, number, Some(count), from),
        _ => return Err("the number of operands is wrong".into()),
    };

    let (source, negate) = b.pred_source(from)?;
    let reduction = match operation {
        "popc" => Reduction::Count {
            source,
            negate,
            to: b.target(to)?,
        },
        "and" => Reduction::All {
            source,
            negate,
            to: b.pred_target(to)?,
        },
        _ => Reduction::Any {
            source,
            negate,
            to: b.pred_target(to)?,
        },
    };

    let number = b.source(number)?;
    let count = count.map(|count| b.source(count)).transpose()?;
    Ok(Flow::Barrier {
        number,
        count,
        reduction,
        waits: true,
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

fn vote(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    mods.take_of(&["sync"]).ok_or("only `.sync` is known")?;
    let mode = mods
        .take_of(&["all", "any", "uni", "ballot"])
        .ok_or("no mode")?;
    mods.take_type()?;
    let [to, a, members] = exactly(operands)?;
    let a = b.pred_source(a)?;
    let members = b.source(members)?;

    if mode == "ballot" {
        let to = b.target(to)?;
        return Ok(together(members, move |warp, mask| {
            let yes = holds(warp, a) & mask;
            store(warp, to, mask, &[u64::from(yes); 32]);
        }));
    }

    let to = b.pred_target(to)?;
    let decide: fn(Mask, Mask) -> bool = match mode {
        "all" => |yes, mask| yes == mask,
        "any" => |yes, _| yes != 0,
        _ => |yes, mask| yes == 0 || yes == mask,
    };

    Ok(together(members, move |warp, mask| {
        let result = decide(holds(warp, a) & mask, mask);
        warp.set_pred(to, mask, if result { !0 } else { 0 });
    }))
}

fn matching(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    let all = mods.take_of(&["any", "all"]).ok_or("no mode")? == "all";
    mods.take_of(&["sync"]).ok_or("only `.sync` is known")?;
    let narrow = crate::ptx::types::mask_of(mods.take_type()?.bits());
    let [to, a, members] = exactly(operands)?;
    let (to, whole) = match to {
        Operand::Pair(to, whole) => (b.target(to)?, Some(b.pred_target(whole)?)),
        one => (b.target(one)?, None),
    };

    let a = b.source(a)?;
    let members = b.source(members)?;
    Ok(together(members, move |warp, mask| {
        let values = warp.regs[a].map(|value| value & narrow);
        let equal = |lane: usize| mask_where(|other| values[other] == values[lane]) & mask;
        let masks: [u64; 32] = std::array::from_fn(|lane| match equal(lane) {
            found if !all || found == mask => u64::from(found),
            _ => 0,
        });
        store(warp, to, mask, &masks);
        if let Some(whole) = whole {
            warp.set_pred(whole, mask, mask_where(|lane| masks[lane] != 0));
        }
    }))
}

fn reduce(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    mods.take_of(&["sync"]).ok_or("only `.sync` is known")?;
    let operation = mods
        .take_of(&["add", "min", "max", "and", "or", "xor"])
        .ok_or("no operation")?;
    let kind = mods.take_type()?;

    let f: fn(u32, u32) -> u32 = match (operation, kind) {
        ("add", Type::Unsigned(32) | Type::Signed(32)) => u32::wrapping_add,
        ("min", Type::Unsigned(32)) => u32::min,
        ("max", Type::Unsigned(32)) => u32::max,
        ("min", Type::Signed(32)) => |a, b| (a as i32).min(b as i32) as u32,
        ("max", Type::Signed(32)) => |a, b| (a as i32).max(b as i32) as u32,
        ("and", Type::Bits(32)) => |a, b| a & b,
        ("or", Type::Bits(32)) => |a, b| a | b,
        ("xor", Type::Bits(32)) => |a, b| a ^ b,
        _ => return unknown(),
    };

    let [to, a, members] = exactly(operands)?;
    let to = b.target(to)?;
    let a = b.source(a)?;
    let members = b.source(members)?;
    Ok(together(members, move |warp, mask| {
        let all = lanes(mask)
            .map(|lane| warp.regs[a][lane] as u32)
            .reduce(f)
            .unwrap_or(0);
        store(warp, to, mask, &[u64::from(all); 32]);
    }))
}
