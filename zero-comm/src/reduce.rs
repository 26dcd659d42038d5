//! Combining the elements of all ranks on the host, in rank order: `((x0 op x1) op x2) op ...`.
//!
//! Every back end that adds on the host calls [`reduce`] with one chunk of each rank's buffer, so their
//! results are the same bit for bit. 16-bit types are widened to fp32, combined there and rounded once, to
//! nearest even. A chunk is as long as [`CHUNK_ELEMS`] allows, so that the running result stays in cache.
//!
//! The loops are plain; `multiversion` compiles each for several instruction sets and picks at run time.
//! No sum is contracted or reordered, so all versions give the same bits.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use multiversion::multiversion;
use zero_alloc::device::Element;

use crate::ReduceOp;

/// Elements that [`Scratch`] holds: the running result and one widened input are 16 KiB each in fp32.
pub(crate) const CHUNK_ELEMS: usize = 4096;

/// An element that can be combined.
pub(crate) trait Reducible: Element + Default {
    /// In which the running result is kept.
    type Acc: Accumulator;

    /// `acc = x` of the first rank, or `acc = acc op x` of a later one.
    fn step(op: ReduceOp, first: bool, acc: &mut [Self::Acc], x: &[Self], widened: &mut [Self::Acc]);

    /// `out = acc`, rounded.
    fn finish(acc: &[Self::Acc], out: &mut [Self]);
}

/// The type of a running result.
pub(crate) trait Accumulator: Copy + Default {
    /// Divides by the number of ranks.
    fn divide(acc: &mut [Self], ranks: usize);
}

/// Room for one chunk; allocated once and used for every chunk of an operation.
pub(crate) struct Scratch<T: Reducible> {
    acc: Box<[T::Acc]>,
    widened: Box<[T::Acc]>,
}

impl<T: Reducible> Scratch<T> {
    pub(crate) fn new(len: usize) -> Self {
        let len = len.min(CHUNK_ELEMS);
        Self { acc: vec![T::Acc::default(); len].into(), widened: vec![T::Acc::default(); len].into() }
    }
}

/// Combines `len` elements (at most [`CHUNK_ELEMS`], and what `scratch` was made for) of `ranks` inputs, given
/// by `input(rank)`, and hands the result to `write` as `write(round)`, where `round(out)` fills `out`.
///
/// All inputs have been read before `write` runs, so it may write over them.
pub(crate) fn reduce<'a, T: Reducible>(
    op: ReduceOp,
    ranks: usize,
    len: usize,
    scratch: &mut Scratch<T>,
    input: impl Fn(usize) -> &'a [T],
    write: impl FnOnce(&dyn Fn(&mut [T])),
) {
    let (acc, widened) = (&mut scratch.acc[..len], &mut scratch.widened[..len]);
    for rank in 0..ranks {
        T::step(op, rank == 0, acc, input(rank), widened);
    }
    if op == ReduceOp::Avg {
        T::Acc::divide(acc, ranks);
    }
    write(&|out| T::finish(acc, out));
}

#[multiversion(targets = "simd")]
fn divide_f32(acc: &mut [f32], by: f32) {
    for a in acc {
        *a /= by;
    }
}

impl Accumulator for f32 {
    fn divide(acc: &mut [Self], ranks: usize) {
        divide_f32(acc, ranks as Self);
    }
}

impl Accumulator for f64 {
    fn divide(acc: &mut [Self], ranks: usize) {
        for a in acc {
            *a /= ranks as Self;
        }
    }
}

impl Accumulator for u8 {
    /// Averages of bytes are refused when a call is checked.
    fn divide(_: &mut [Self], _: usize) {}
}

/// The greater of two, or NaN: `a` if it is NaN or not less than `b`.
#[inline(always)]
fn greater<T: PartialOrd + Copy>(a: T, b: T) -> T {
    #[allow(clippy::eq_op, reason = "the test for NaN")]
    if a >= b || a != a { a } else { b }
}

macro_rules! same_type {
    ($t:ty, $add:ident, $max:ident, $plus:expr) => {
        #[multiversion(targets = "simd")]
        fn $add(acc: &mut [$t], x: &[$t]) {
            for (a, &x) in acc.iter_mut().zip(x) {
                *a = ($plus)(*a, x);
            }
        }

        #[multiversion(targets = "simd")]
        fn $max(acc: &mut [$t], x: &[$t]) {
            for (a, &x) in acc.iter_mut().zip(x) {
                *a = greater(*a, x);
            }
        }

        impl Reducible for $t {
            type Acc = Self;

            fn step(op: ReduceOp, first: bool, acc: &mut [Self], x: &[Self], _: &mut [Self]) {
                match op {
                    _ if first => acc.copy_from_slice(x),
                    ReduceOp::Sum | ReduceOp::Avg => $add(acc, x),
                    ReduceOp::Max => $max(acc, x),
                }
            }

            fn finish(acc: &[Self], out: &mut [Self]) {
                out.copy_from_slice(acc);
            }
        }
    };
}
same_type!(f32, add_f32, max_f32, std::ops::Add::add);
same_type!(f64, add_f64, max_f64, std::ops::Add::add);
same_type!(u8, add_u8, max_u8, u8::wrapping_add);

/// bfloat16 is the upper half of an fp32.
#[inline(always)]
fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// To nearest even; a NaN stays one (its payload's upper part, made quiet).
#[inline(always)]
fn round_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    bf16::from_bits(if x.is_nan() { quiet as u16 } else { nearest as u16 })
}

#[multiversion(targets = "simd")]
fn widen_all_bf16(acc: &mut [f32], x: &[bf16]) {
    for (a, &x) in acc.iter_mut().zip(x) {
        *a = widen_bf16(x);
    }
}

#[multiversion(targets = "simd")]
fn add_bf16(acc: &mut [f32], x: &[bf16]) {
    for (a, &x) in acc.iter_mut().zip(x) {
        *a += widen_bf16(x);
    }
}

#[multiversion(targets = "simd")]
fn round_all_bf16(acc: &[f32], out: &mut [bf16]) {
    for (out, &a) in out.iter_mut().zip(acc) {
        *out = round_bf16(a);
    }
}

impl Reducible for bf16 {
    type Acc = f32;

    fn step(op: ReduceOp, first: bool, acc: &mut [f32], x: &[Self], widened: &mut [f32]) {
        match op {
            _ if first => widen_all_bf16(acc, x),
            ReduceOp::Sum | ReduceOp::Avg => add_bf16(acc, x),
            ReduceOp::Max => {
                widen_all_bf16(widened, x);
                max_f32(acc, widened);
            }
        }
    }

    fn finish(acc: &[f32], out: &mut [Self]) {
        round_all_bf16(acc, out);
    }
}

impl Reducible for f16 {
    type Acc = f32;

    fn step(op: ReduceOp, first: bool, acc: &mut [f32], x: &[Self], widened: &mut [f32]) {
        // `half` picks the conversion instructions of the machine at run time.
        if first {
            return x.convert_to_f32_slice(acc);
        }
        x.convert_to_f32_slice(widened);
        match op {
            ReduceOp::Sum | ReduceOp::Avg => add_f32(acc, widened),
            ReduceOp::Max => max_f32(acc, widened),
        }
    }

    fn finish(acc: &[f32], out: &mut [Self]) {
        out.convert_from_f32_slice(acc);
    }
}
