//! Adam on moments in blocks on the host: decoding, update and encoding in one pass over memory,
//! with the bits of these three one after another.
//!
//! Why in one loop: lookups, divisions and roots, and loads from memory use different units of a
//! core, which work at the same time only within a few hundred instructions.
//!
//! Tried on Sapphire Rapids without gain: codes of a block encoded beside the update of the next
//! one (0.7 of the speed in 8 bits), pieces of 32 or 128, tables in registers by AVX512-VBMI.

use multiversion::multiversion;

use super::host::{Coefficients, element};
use super::{AdamHyper, AdamScalars};
use crate::check::same_len;
use crate::codec::{join, split};
use crate::error::KernelError;
use crate::float::Float;
use crate::host::block_codes::{self, Coder, Codes};
use crate::host::prefetch::prefetch;
use crate::host::update::{
    BlockSlot, FloatSlice, FloatSliceMut, UpdateSlices, WeightSlices, with_floats,
};
use zero_shard::BlockFormat;

/// Elements that are decoded and updated together: the block of `blocks`.
const PIECE: usize = 64;

/// As [`UpdateRule::update_blocks`](crate::UpdateRule::update_blocks): `None` for other formats, or
/// if the last block is not whole.
pub(super) fn adam_blocks(
    hyper: &AdamHyper,
    mut slices: UpdateSlices<'_, BlockSlot<'_>>,
) -> Option<Result<(), KernelError>> {
    let moments = std::mem::take(&mut slices.slots);
    let moments: [BlockSlot<'_>; 2] = moments.try_into().ok()?;
    let [first, second] = &moments;
    let elems = [first.format.elems(), second.format.elems()];
    let n = with_floats!(FloatSlice, slices.grad, grad => grad.len());
    if elems.iter().any(|elems| n % elems != 0) {
        return None;
    }
    let decoupled = hyper.decoupled;
    match (Coder::of(first.format), Coder::of(second.format)) {
        (Coder::Eight(first), Coder::Eight(second)) if elems == [256; 2] => Some(match decoupled {
            true => checked::<_, 256, true>(hyper, [first, second], moments, slices),
            false => checked::<_, 256, false>(hyper, [first, second], moments, slices),
        }),
        (Coder::Four(first), Coder::Four(second)) if elems == [128; 2] => Some(match decoupled {
            true => checked::<_, 128, true>(hyper, [first, second], moments, slices),
            false => checked::<_, 128, false>(hyper, [first, second], moments, slices),
        }),
        _ => None,
    }
}

fn checked<C: Codes, const ELEMS: usize, const DECOUPLED: bool>(
    hyper: &AdamHyper,
    codes: [&C; 2],
    moments: [BlockSlot<'_>; 2],
    others: UpdateSlices<'_, BlockSlot<'_>>,
) -> Result<(), KernelError> {
    let UpdateSlices {
        weights,
        grad,
        scalars,
        weight_decay,
        ..
    } = others;
    let n = with_floats!(FloatSlice, grad, grad => grad.len());
    for slot in &moments {
        same_len(
            "adam: bytes of a moment",
            slot.format.bytes(n),
            slot.blocks.len(),
        )?;
    }
    match &weights {
        WeightSlices::Fp32 { master, param_out } => {
            same_len("adam: weights", n, master.len())?;
            if let Some(param) = param_out {
                let len = with_floats!(FloatSliceMut, param, param => param.len());
                same_len("adam: param_out", n, len)?;
            }
        }
        WeightSlices::Remainder { param, remainder } => {
            same_len("adam: param", n, param.len())?;
            same_len("adam: remainder", n, remainder.len())?;
        }
    }

    let scalars: AdamScalars = bytemuck::cast(scalars);
    if scalars.skip != 0 {
        return Ok(());
    }
    let c = Coefficients::new(
        &scalars,
        &AdamHyper {
            weight_decay,
            ..*hyper
        },
    );
    let [first, second] = moments;
    let formats = [first.format, second.format];
    update::<C, ELEMS, DECOUPLED>(
        codes,
        formats,
        first.blocks,
        second.blocks,
        weights,
        grad,
        c,
    );
    Ok(())
}

/// Updates all elements, a block of each moment at a time.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2+lzcnt",
    "x86_64+avx2+fma+bmi1+bmi2+lzcnt"
))]
fn update<C: Codes, const ELEMS: usize, const DECOUPLED: bool>(
    codes: [&C; 2],
    formats: [BlockFormat; 2],
    first: &mut [u8],
    second: &mut [u8],
    mut weights: WeightSlices<'_>,
    grad: FloatSlice<'_>,
    c: Coefficients,
) {
    let block_bytes = size_of::<f32>() + ELEMS * C::BITS / 8;
    let first = first.chunks_exact_mut(block_bytes);
    let second = second.chunks_exact_mut(block_bytes);
    let mut m = [0.0; ELEMS];
    let mut v = [0.0; ELEMS];
    let mut w = [0.0; PIECE];
    let mut g = [0.0; PIECE];

    for (nth, (first, second)) in first.zip(second).enumerate() {
        let (first_scale, first_codes) = block_codes::split(first);
        let (second_scale, second_codes) = block_codes::split(second);
        let piece_bytes = PIECE * C::BITS / 8;
        let codes_of_pieces = first_codes
            .chunks_exact(piece_bytes)
            .zip(second_codes.chunks_exact(piece_bytes));
        let moments = m.as_chunks_mut::<PIECE>().0.iter_mut();
        let moments = moments.zip(v.as_chunks_mut::<PIECE>().0);
        for (piece, ((m, v), (first, second))) in moments.zip(codes_of_pieces).enumerate() {
            let at = nth * (ELEMS / PIECE) + piece;
            prefetch(first, &(0..PIECE));
            prefetch(second, &(0..PIECE));
            codes[0].decode(first, first_scale, m);
            codes[1].decode(second, second_scale, v);
            with_floats!(FloatSlice, grad, grad => widen(grad, at, &mut g));
            match &weights {
                WeightSlices::Fp32 { master, .. } => widen(master, at, &mut w),
                WeightSlices::Remainder { param, remainder } => {
                    let (param, remainder) = (piece_of(param, at), piece_of(remainder, at));
                    for i in 0..PIECE {
                        w[i] = join(param[i], remainder[i]);
                    }
                }
            }

            for i in 0..PIECE {
                (w[i], m[i], v[i]) = element::<DECOUPLED>(&c, w[i], m[i], v[i], g[i]);
            }

            match &mut weights {
                WeightSlices::Fp32 { master, param_out } => {
                    narrow(&w, master, at);
                    if let Some(param) = param_out {
                        with_floats!(FloatSliceMut, param, param => narrow(&w, param, at));
                    }
                }
                WeightSlices::Remainder { param, remainder } => {
                    let param = &mut param.as_chunks_mut::<PIECE>().0[at];
                    let remainder = &mut remainder.as_chunks_mut::<PIECE>().0[at];
                    for i in 0..PIECE {
                        (param[i], remainder[i]) = split(w[i]);
                    }
                }
            }
        }

        // Both scales in front of the codes: the processor finds the one beside the other.
        let (first, first_reciprocal) = block_codes::begin(formats[0], &m, first);
        let (second, second_reciprocal) = block_codes::begin(formats[1], &v, second);
        codes[0].encode(&m, first_reciprocal, first);
        codes[1].encode(&v, second_reciprocal, second);
    }
}

/// Piece `at`; starts to load those behind it.
#[inline(always)]
fn piece_of<T>(x: &[T], at: usize) -> &[T; PIECE] {
    prefetch(x, &(at * PIECE..(at + 1) * PIECE));
    &x.as_chunks::<PIECE>().0[at]
}

/// Piece `at` in fp32.
#[inline(always)]
fn widen<T: Float>(x: &[T], at: usize, wide: &mut [f32; PIECE]) {
    let x = piece_of(x, at);
    for i in 0..PIECE {
        wide[i] = x[i].to_f32();
    }
}

/// The reverse.
#[inline(always)]
fn narrow<T: Float>(wide: &[f32; PIECE], x: &mut [T], at: usize) {
    let x = &mut x.as_chunks_mut::<PIECE>().0[at];
    for i in 0..PIECE {
        x[i] = T::from_f32(wide[i]);
    }
}
