//! Moves, selections, and conversions of addresses between spaces.

use super::{Decoded, act, exactly, holds, map1, mask_where, store, unknown};
use crate::exec::block::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};
use crate::exec::program::Flow;
use crate::ptx::build::{Builder, Mods};
use crate::ptx::syntax::Operand;
use crate::ptx::types::{Space, Type, mask_of};

pub(super) fn decode(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    match mods.name {
        "cvta" => cvta(mods, operands, b),
        "isspacep" => isspacep(mods, operands, b),
        "selp" => selp(mods, operands, b),
        "slct" => unknown(),
        _ => mov(mods, operands, b),
    }
}

fn mov(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded<Flow> {
    let kind = mods.take_type()?;
    let [to, from] = exactly(operands)?;
    if kind == Type::Pred {
        let to = b.pred_target(to)?;
        let from = b.pred_source(from)?;
        return Ok(act(move |warp, mask| {
            warp.set_pred(to, mask, holds(warp, from))
        }));
    }

    if let Operand::Vector(parts) = to {
        let parts = b.targets(to).map(|targets| (targets, parts.len()))?;
        let from = b.source(from)?;
        let targets = parts.0;
        let bits = kind.bits() / parts.1.max(1) as u32;
        return Ok(act(move |warp, mask| {
            let all = warp.regs[from];
            for (index, &to) in targets.iter().enumerate() {
                let values =
                    std::array::from_fn(|lane| all[lane] >> (bits * index as u32) & mask_of(bits));
                store(warp, to, mask, &values);
            }
        }));
    }

    if let Operand::Vector(parts) = from {
        let bits = kind.bits() / parts.len().max(1) as u32;
        let parts = b.sources(from)?;
        let to = b.target(to)?;
        return Ok(act(move |warp, mask| {
            let part = |lane: usize, index: usize| {
                (warp.regs[parts[index]][lane] & mask_of(bits)) << (bits * index as u32)
            };
            let values = std::array::from_fn(|lane| {
                (0..parts.len()).fold(0, |all, index| all | part(lane, index))
            });
            store(warp, to, mask, &values);
        }));
    }

    let keep = mask_of(kind.bits());
    let to = b.target(to)?;
    if let Operand::Name(name) = from
        && let "%clock" | "%clock64" | "%clock_hi" | "%globaltimer" | "%globaltimer_lo"
        | "%globaltimer_hi" = name.as_str()
    {
        let shift = if name.ends_with("_hi") { 32 } else { 0 };
        let counts = name.starts_with("%clock");
        return Ok(act(move |warp, mask| {
            let now = if counts { warp.steps } else { nanoseconds() };
            store(warp, to, mask, &[now >> shift & keep; 32]);
        }));
    }

    let from = b.source(from)?;
    Ok(map1(to, from, move |a| a & keep))
}

fn nanoseconds() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |time| time.as_nanos() as u64)
}

fn selp(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded<Flow> {
    let keep = mask_of(mods.take_type()?.bits());
    let [to, yes, no, by] = exactly(operands)?;
    let to = b.target(to)?;
    let yes = b.source(yes)?;
    let no = b.source(no)?;
    let by = b.pred_source(by)?;
    Ok(act(move |warp, mask| {
        let by = holds(warp, by);
        let yes = &warp.regs[yes];
        let no = &warp.regs[no];
        let values = std::array::from_fn(|lane| if by >> lane & 1 == 1 { yes[lane] } else { no[lane] } & keep);
        store(warp, to, mask, &values);
    }))
}

/// The start of the space's window in generic addresses.
fn window(space: Space) -> u64 {
    match space {
        Space::Shared => SHARED_WINDOW,
        Space::Local => LOCAL_WINDOW,
        Space::Param => PARAM_WINDOW,
        Space::Global | Space::Const | Space::Generic => 0,
    }
}

fn cvta(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded<Flow> {
    let away = mods.take("to");
    let space = mods.take_as(Space::named).ok_or("no space")?;
    if mods.take_type()?.bits() != 64 {
        return Err("addresses must have 64 bits".into());
    }
    let [to, a] = exactly(operands)?;
    let to = b.target(to)?;
    let a = b.source(a)?;
    let window = window(space);
    Ok(map1(to, a, move |a| {
        if away {
            a.wrapping_sub(window)
        } else {
            a.wrapping_add(window)
        }
    }))
}

fn isspacep(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded<Flow> {
    let space = mods.take_as(Space::named).ok_or("no space")?;
    let [to, a] = exactly(operands)?;
    let to = b.pred_target(to)?;
    let a = b.source(a)?;
    if space == Space::Const {
        return Err("constant memory is not told from global memory here".into());
    }
    let window = window(space) >> 56;
    Ok(act(move |warp, mask| {
        let is = mask_where(|lane| warp.regs[a][lane] >> 56 == window);
        warp.set_pred(to, mask, is);
    }))
}
