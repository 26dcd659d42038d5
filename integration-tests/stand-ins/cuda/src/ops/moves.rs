//! Moves and selections.

use super::{Decoded, act, exactly, holds, map1, slots, store};
use crate::exec::program::Flow;
use crate::ptx::build::{Builder, Mods};
use crate::ptx::syntax::Operand;
use crate::ptx::types::{Type, mask_of};

pub(super) fn decode(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    match mods.name {
        "cvta" => cvta(mods, operands, b),
        "selp" => selp(mods, operands, b),
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
    let (to, from) = slots(operands, b)?;
    Ok(map1(to, from, move |a| a & keep))
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

/// Addresses of global memory are the generic ones.
fn cvta(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded<Flow> {
    mods.take("to");
    if !mods.take("global") || mods.take_type()?.bits() != 64 {
        return Err("only addresses of global memory are converted".into());
    }
    let (to, from) = slots(operands, b)?;
    Ok(map1(to, from, |a| a))
}
