//! Asynchronous copies from global to shared memory. They complete only at the wait, which exposes
//! a missing wait.

use super::memory::{read, write};
use super::{Decoded, exactly, unknown};
use crate::exec::block::BlockMemory;
use crate::exec::program::{Action, Done, Flow, lanes};
use crate::exec::races::Access;
use crate::exec::warp::{AsyncCopy, Warp};
use crate::ptx::build::{Builder, Mods};
use crate::ptx::syntax::Operand;
use crate::ptx::types::Space;

pub(super) fn decode(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    mods.take_of(&["async"]).ok_or("only `cp.async` is known")?;
    if mods.take("commit_group") {
        let action: Action = Box::new(|warp, _, mask| {
            lanes(mask).for_each(|lane| warp.committed[lane] += 1);
            Ok(())
        });
        return Ok(Flow::Do(action));
    }

    if mods.take("wait_group") {
        let [Operand::Integer(left)] = *operands else {
            return Err("no number of groups".into());
        };
        let action: Action = Box::new(move |warp, memory, mask| {
            let committed = warp.committed;
            let due = |copy: &AsyncCopy| {
                let lane = copy.lane as usize;
                mask >> lane & 1 == 1 && u64::from(copy.group) + left < u64::from(committed[lane])
            };
            arrive(warp, memory, due)
        });
        return Ok(Flow::Do(action));
    }

    mods.take_of(&["ca", "cg"]).ok_or("no cache")?;
    mods.take_of(&["shared", "shared::cta"])
        .ok_or("only copies to shared memory are known")?;
    mods.take_of(&["global"])
        .ok_or("only copies from global memory are known")?;
    let [to, from, size] = exactly(operands)?;
    let bytes = match size {
        Operand::Integer(bytes @ (4 | 8 | 16)) => *bytes as usize,
        _ => return unknown(),
    };

    let to = b.address(to, Space::Shared)?;
    let from = b.address(from, Space::Global)?;

    let action: Action = Box::new(move |warp, memory, mask| {
        for lane in lanes(mask) {
            let address = |warp: &Warp, of: &crate::ptx::build::Address| {
                warp.regs[of.base][lane].wrapping_add(of.offset)
            };
            let at = address(warp, &to);
            let to = memory.resolve(warp, lane, (Space::Shared, at), bytes, Access::Later)?;
            let mut data = [0u8; 16];
            let at = address(warp, &from);
            let from = memory.resolve(warp, lane, (Space::Global, at), bytes, Access::Read)?;
            for (index, byte) in data[..bytes].iter_mut().enumerate() {
                // SAFETY: `resolve` checked all bytes.
                *byte = unsafe { read(from.wrapping_add(index), 1) } as u8;
            }
            let group = warp.committed[lane];
            warp.copies.push(AsyncCopy {
                lane: lane as u32,
                group,
                to,
                bytes: bytes as u32,
                data,
            });
        }
        Ok(())
    });

    Ok(Flow::Do(action))
}

/// Completes the copies that are due: writes them to shared memory.
fn arrive(warp: &mut Warp, memory: &mut BlockMemory, due: impl Fn(&AsyncCopy) -> bool) -> Done {
    for copy in warp.copies.iter().filter(|copy| due(copy)) {
        memory.note_arrival(warp.index, copy.lane as usize, copy.to, copy.bytes as usize)?;
    }
    warp.copies.retain(|copy| {
        if due(copy) {
            for (index, piece) in copy.data[..copy.bytes as usize].chunks(4).enumerate() {
                let value = piece
                    .iter()
                    .rev()
                    .fold(0, |all, &byte| all << 8 | u64::from(byte));
                // SAFETY: shared memory of the block, which is running; all bytes were resolved
                // when the copy started.
                unsafe { write(copy.to.wrapping_add(4 * index), 4, value) };
            }
        }
        !due(copy)
    });
    Ok(())
}
