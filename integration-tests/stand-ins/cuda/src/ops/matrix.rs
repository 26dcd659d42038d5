//! Matrix tiles distributed over a warp: `ldmatrix`, `stmatrix` and `mma`.
//!
//! Products are exact, summed in f64 and rounded to f32 once; a GPU's order and rounding differ.

use super::format::{bf16_to_f32, f16_to_f32};
use super::memory::{read, write};
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
        "ldmatrix" | "stmatrix" => tiles(mods, operands, b),
        _ => unknown(),
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
    let space = mods.take_as(Space::named).unwrap_or(Space::Generic);
    if mods.take_type()? != Type::Bits(16) {
        return unknown();
    }
    let load = mods.name == "ldmatrix";
    let access = if load { Access::Read } else { Access::Write };
    let [first, second] = exactly(operands)?;
    let (registers, address) = if load {
        (first, second)
    } else {
        (second, first)
    };

    let registers = if load {
        b.targets(registers)?
    } else {
        b.sources(registers)?
    };

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
                *place = memory.resolve(warp, lane, (address.space, at), 16, access)?;
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
                    let shift = 16 * half;
                    let value = &mut warp.regs[register][lane];
                    if load {
                        // SAFETY: the row's 16 bytes were resolved.
                        let element = unsafe { read(place, 2) };
                        *value = if half == 0 {
                            element
                        } else {
                            *value | element << shift
                        };
                    } else {
                        // SAFETY: the row's 16 bytes were resolved.
                        unsafe { write(place, 2, *value >> shift & 0xffff) };
                    }
                }
            }
        }
        Ok(())
    }))
}

/// Reads the i-th element of a register.
type Element = fn(u64, usize) -> f32;

/// The number of elements per register, and their reader.
fn elements(kind: Type) -> Decoded<(usize, Element)> {
    Ok(match kind {
        Type::F16 => (2, |r, i| f16_to_f32(r >> (16 * i) & 0xffff)),
        Type::Bf16 => (2, |r, i| bf16_to_f32(r >> (16 * i) & 0xffff)),
        // The lowest 13 bits are ignored.
        Type::Tf32 => (1, |r, _| f32::from_bits(r as u32 & !0x1fff)),
        _ => return unknown(),
    })
}

/// `D = A B + C` with A of 16 x K, B of K x 8, C and D of 16 x 8 in f32.
fn mma(mods: &mut Mods<'_>, operands: &[Operand], b: &mut Builder<'_>) -> Decoded {
    let depth: usize = match mods.take_of(&["m16n8k4", "m16n8k8", "m16n8k16"]) {
        Some("m16n8k4") => 4,
        Some("m16n8k8") => 8,
        Some(_) => 16,
        None => return Err("the shape is not supported".into()),
    };

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
    let (packed, element) = elements(a_kind)?;
    let [d, a, x, c] = exactly(operands)?;
    let d = b.targets(d)?;
    let a = b.sources(a)?;
    let x = b.sources(x)?;
    let c = b.sources(c)?;
    let a_count = 16 * depth / 32 / packed;
    let b_count = depth * 8 / 32 / packed;
    if a_count == 0
        || b_count == 0
        || (d.len(), a.len(), x.len(), c.len()) != (4, a_count, b_count, 4)
    {
        return Err("the number of registers is wrong".into());
    }

    Ok(whole_warp(b, move |warp, _| {
        // Lane l, group g = l / 4, place t = l % 4: register r of A holds row g + 8 (r % 2) and
        // columns packed * t + i + 4 packed (r / 2); register r of B rows packed * t + i + 4 packed
        // r and column g; register r of C and D row g + 8 (r / 2) and column 2 t + r % 2.
        let mut left = [[0f64; 16]; 16];
        let mut right = [[0f64; 16]; 8];
        for lane in 0..32 {
            let g = lane / 4;
            let t = lane % 4;
            for i in 0..packed {
                for (r, &slot) in a.iter().enumerate() {
                    let value = element(warp.regs[slot][lane], i);
                    left[g + 8 * (r % 2)][packed * t + i + 4 * packed * (r / 2)] = f64::from(value);
                }
                for (r, &slot) in x.iter().enumerate() {
                    right[g][packed * t + i + 4 * packed * r] =
                        f64::from(element(warp.regs[slot][lane], i));
                }
            }
        }
        let mut results = [[0u64; 32]; 4];
        for (r, result) in results.iter_mut().enumerate() {
            for (lane, result) in result.iter_mut().enumerate() {
                let row = lane / 4 + 8 * (r / 2);
                let column = lane % 4 * 2 + r % 2;
                let start = f64::from(f32::from_bits(warp.regs[c[r]][lane] as u32));
                let products = left[row][..depth].iter().zip(&right[column][..depth]);
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
