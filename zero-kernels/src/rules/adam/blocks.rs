//! Adam on moments in blocks on the host: decoding, update and encoding in one pass over memory,
//! with the bits of these three one after another.
//!
//! Why in one loop: the lookups of the decoding, the divisions and roots, and the loads from memory
//! use different units of a core, which work at the same time only within a few hundred
//! instructions.

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

/// `None`: there is no loop for these formats.
pub(super) fn adam_blocks(
    hyper: &AdamHyper,
    slices: UpdateSlices<'_, BlockSlot<'_>>,
) -> Option<Result<(), KernelError>> {
    let [first, second] = &slices.slots[..] else {
        return None;
    };
    let elems = [first.format.elems(), second.format.elems()];
    let decoupled = hyper.decoupled;
    match (Coder::of(first.format), Coder::of(second.format)) {
        (Coder::Eight(first), Coder::Eight(second)) if elems == [256; 2] => Some(match decoupled {
            true => checked::<_, 256, true>(hyper, [first, second], slices),
            false => checked::<_, 256, false>(hyper, [first, second], slices),
        }),
        (Coder::Four(first), Coder::Four(second)) if elems == [128; 2] => Some(match decoupled {
            true => checked::<_, 128, true>(hyper, [first, second], slices),
            false => checked::<_, 128, false>(hyper, [first, second], slices),
        }),
        _ => None,
    }
}

fn checked<C: Codes, const ELEMS: usize, const DECOUPLED: bool>(
    hyper: &AdamHyper,
    codes: [&C; 2],
    slices: UpdateSlices<'_, BlockSlot<'_>>,
) -> Result<(), KernelError> {
    let UpdateSlices {
        weights,
        mut slots,
        grad,
        scalars,
        weight_decay,
    } = slices;
    let n = with_floats!(FloatSlice, grad, grad => grad.len());
    for slot in &slots {
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
    if let [first, second] = &mut slots[..] {
        let formats = [first.format, second.format];
        let (first, second) = (&mut *first.blocks, &mut *second.blocks);
        update::<C, ELEMS, DECOUPLED>(codes, formats, first, second, weights, grad, c);
    }
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
    let n = with_floats!(FloatSlice, grad, grad => grad.len());
    let mut m = [0.0; ELEMS];
    let mut v = [0.0; ELEMS];
    let mut w = [0.0; PIECE];
    let mut g = [0.0; PIECE];

    for (nth, (first, second)) in first.zip(second).enumerate() {
        let (first_scale, first_codes) = block_codes::split(first);
        let (second_scale, second_codes) = block_codes::split(second);
        let start = nth * ELEMS;
        let piece_bytes = PIECE * C::BITS / 8;
        let pieces = m.as_chunks_mut::<PIECE>().0.iter_mut();
        let pieces = pieces.zip(v.as_chunks_mut::<PIECE>().0);
        for (piece, (m, v)) in pieces.enumerate() {
            let at = n.min(start + piece * PIECE);
            let first_codes = &first_codes[piece * piece_bytes..][..piece_bytes];
            let second_codes = &second_codes[piece * piece_bytes..][..piece_bytes];
            prefetch(first_codes, &(0..PIECE));
            prefetch(second_codes, &(0..PIECE));
            codes[0].decode(first_codes, first_scale, m);
            codes[1].decode(second_codes, second_scale, v);
            with_floats!(FloatSlice, grad, grad => widen(&grad[at..], &mut g));
            match &weights {
                WeightSlices::Fp32 { master, .. } => widen(&master[at..], &mut w),
                WeightSlices::Remainder { param, remainder } => {
                    prefetch(&param[at..], &(0..PIECE));
                    prefetch(&remainder[at..], &(0..PIECE));
                    let weights = param[at..].iter().zip(&remainder[at..]);
                    for (w, (param, remainder)) in w.iter_mut().zip(weights) {
                        *w = join(*param, *remainder);
                    }
                }
            }

            for i in 0..PIECE {
                (w[i], m[i], v[i]) = element::<DECOUPLED>(&c, w[i], m[i], v[i], g[i]);
            }

            match &mut weights {
                WeightSlices::Fp32 { master, param_out } => {
                    narrow(&w, &mut master[at..]);
                    if let Some(param) = param_out {
                        with_floats!(FloatSliceMut, param, param => narrow(&w, &mut param[at..]));
                    }
                }
                WeightSlices::Remainder { param, remainder } => {
                    let weights = param[at..].iter_mut().zip(&mut remainder[at..]);
                    for (w, (param, remainder)) in w.iter().zip(weights) {
                        (*param, *remainder) = split(*w);
                    }
                }
            }
        }

        // Behind the last value of a short block are codes of 0.
        if n - start < ELEMS {
            m[n - start..].fill(0.0);
            v[n - start..].fill(0.0);
        }
        let scales = [
            block_codes::scale(formats[0], &m),
            block_codes::scale(formats[1], &v),
        ];
        let reciprocals = scales.map(BlockFormat::reciprocal);
        first[..4].copy_from_slice(&scales[0].to_le_bytes());
        second[..4].copy_from_slice(&scales[1].to_le_bytes());
        codes[0].encode(&m, reciprocals[0], &mut first[4..][..ELEMS * C::BITS / 8]);
        codes[1].encode(&v, reciprocals[1], &mut second[4..][..ELEMS * C::BITS / 8]);
    }
}

/// The first values in fp32, as many as there are.
#[inline(always)]
fn widen<T: Float>(x: &[T], wide: &mut [f32; PIECE]) {
    prefetch(x, &(0..PIECE));
    if let Some(x) = x.first_chunk::<PIECE>() {
        for i in 0..PIECE {
            wide[i] = x[i].to_f32();
        }
        return;
    }
    for (wide, x) in wide.iter_mut().zip(x) {
        *wide = x.to_f32();
    }
}

/// The reverse.
#[inline(always)]
fn narrow<T: Float>(wide: &[f32; PIECE], x: &mut [T]) {
    if let Some(x) = x.first_chunk_mut::<PIECE>() {
        for i in 0..PIECE {
            x[i] = T::from_f32(wide[i]);
        }
        return;
    }
    for (x, wide) in x.iter_mut().zip(wide) {
        *x = T::from_f32(*wide);
    }
}
