//! Matrix tiles distributed over a warp: `ldmatrix` and `mma`.
//!
//! Products are exact, summed in f64 and rounded to f32 once; a GPU's order and rounding differ.

use super::format::{bf16_to_f32, f16_to_f32};
use super::memory::read;
use super::{Decoded, exactly, unknown};
use crate::error::Failure;
use crate::exec::program::{ALL, Action, Flow, Mask, fault};
use crate::exec::races::Access;
use crate::exec::warp::Warp;
use crate::ptx::build::{Builder, Mods};
use crate::ptx::syntax::Operand;
use crate::ptx::types::{Space, Type};

pub(super) fn decode(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    mods.take_of(&["sync"]).ok_or("only `.sync` is known")?;
    mods.ignore(&["aligned"]);
    match mods.name {
        "mma" => mma(mods, operands, b),
        _ => tiles(mods, operands, b),
    }
}

/// An action that needs all lanes of the warp.
fn whole_warp(
    b: &mut Builder<'_>,
    f: impl Fn(&mut Warp, &mut crate::exec::block::BlockMemory) -> crate::exec::program::Done
    + Send
    + Sync
    + 'static,
) -> Flow {
    let members = b.constant(u64::from(ALL));
    let action: Action = Box::new(move |warp, memory, mask: Mask| {
        if mask != ALL {
            return fault(
                Failure::IllegalInstruction,
                format!("lanes {mask:#x} only, and not the whole warp"),
            );
        }
        f(warp, memory)
    });
    Flow::Together { members, action }
}

/// 8 x 8 tiles of 16-bit elements. Lanes 8i to 8i+7 have the row addresses of tile i; lane l has
/// elements 2(l%4) and 2(l%4)+1 of row l/4, or of column l/4 with `.trans`.
fn tiles(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    mods.take_of(&["m8n8"]).ok_or("only `.m8n8` is known")?;
    let count = match mods.take_of(&["x1", "x2", "x4"]) {
        Some("x1") => 1,
        Some("x2") => 2,
        Some(_) => 4,
        None => return Err("no number of tiles".into()),
    };

    let transposed = mods.take("trans");
    let space = mods.take_as(Space::named).unwrap_or(Space::Global);
    if mods.take_type()? != Type::Bits(16) {
        return unknown();
    }
    let [registers, address] = exactly(operands)?;
    let registers = b.targets(registers)?;
    let address = b.address(address, space)?;
    if registers.len() != count {
        return Err(format!("{} registers for {count} tiles", registers.len()));
    }
    Ok(whole_warp(b, move |warp, memory| {
        for (tile, &register) in registers.iter().enumerate() {
            let mut rows = [std::ptr::null_mut(); 8];
            for (row, place) in rows.iter_mut().enumerate() {
                let lane = tile * 8 + row;
                let at = warp.regs[address.base][lane].wrapping_add(address.offset);
                *place = memory.resolve(warp, lane, (address.space, at), 16, Access::Read)?;
            }
            for lane in 0..32 {
                for half in 0..2 {
                    let row = lane / 4;
                    let column = lane % 4 * 2 + half;
                    let (row, column) = if transposed {
                        (column, row)
                    } else {
                        (row, column)
                    };
                    let place = rows[row].wrapping_add(2 * column);
                    // SAFETY: the row's 16 bytes were resolved.
                    let element = unsafe { read(place, 2) };
                    let value = &mut warp.regs[register][lane];
                    *value = if half == 0 {
                        element
                    } else {
                        *value | element << 16
                    };
                }
            }
        }
        Ok(())
    }))
}

/// `D = A B + C` with A of 16 x 16 and B of 16 x 8, packed in pairs, and C and D of 16 x 8 in f32.
fn mma(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    mods.take_of(&["m16n8k16"])
        .ok_or("only `.m16n8k16` is known")?;
    mods.take_of(&["row"]).ok_or("A must be `.row`")?;
    mods.take_of(&["col"]).ok_or("B must be `.col`")?;
    let kinds = [
        mods.take_type()?,
        mods.take_type()?,
        mods.take_type()?,
        mods.take_type()?,
    ];
    let [Type::F32, a_kind, b_kind, Type::F32] = kinds else {
        return Err("sums must be f32".into());
    };
    if a_kind != b_kind {
        return Err("A and B must have one type".into());
    }
    let widen: fn(u64) -> f32 = match a_kind {
        Type::F16 => f16_to_f32,
        Type::Bf16 => bf16_to_f32,
        _ => return unknown(),
    };
    let element = move |r: u64, i: usize| f64::from(widen(r >> (16 * i) & 0xffff));
    let [d, a, x, c] = exactly(operands)?;
    let d = b.targets(d)?;
    let a = b.sources(a)?;
    let x = b.sources(x)?;
    let c = b.sources(c)?;
    if (d.len(), a.len(), x.len(), c.len()) != (4, 4, 2, 4) {
        return Err("the number of registers is wrong".into());
    }

    Ok(whole_warp(b, move |warp, _| {
        // Lane l, group g = l / 4, place t = l % 4: register r of A holds row g + 8 (r % 2) and
        // columns 2 t + i + 8 (r / 2); register r of B rows 2 t + i + 8 r and column g; register r
        // of C and D row g + 8 (r / 2) and column 2 t + r % 2.
        let mut left = [[0f64; 16]; 16];
        let mut right = [[0f64; 16]; 8];
        for lane in 0..32 {
            let g = lane / 4;
            let t = lane % 4;
            for i in 0..2 {
                for (r, &slot) in a.iter().enumerate() {
                    left[g + 8 * (r % 2)][2 * t + i + 8 * (r / 2)] =
                        element(warp.regs[slot][lane], i);
                }
                for (r, &slot) in x.iter().enumerate() {
                    right[g][2 * t + i + 8 * r] = element(warp.regs[slot][lane], i);
                }
            }
        }
        let mut results = [[0u64; 32]; 4];
        for (r, result) in results.iter_mut().enumerate() {
            for (lane, result) in result.iter_mut().enumerate() {
                let row = lane / 4 + 8 * (r / 2);
                let column = lane % 4 * 2 + r % 2;
                let start = f64::from(f32::from_bits(warp.regs[c[r]][lane] as u32));
                let products = left[row].iter().zip(&right[column]);
                let sum = (start + products.map(|(a, b)| a * b).sum::<f64>()) as f32;
                *result = u64::from(if sum.is_nan() {
                    0x7fff_ffff
                } else {
                    sum.to_bits()
                });
            }
        }
        for (&slot, result) in d.iter().zip(&results) {
            warp.regs[slot] = *result;
        }
        Ok(())
    }))
}
