//! Combining the elements of all ranks on the host, in rank order: `((x0 op x1) op x2) op ...`.
//!
//! Every back end that adds on the host calls [`Reducible::reduce`], so their results are the same bit for bit.
//! 16-bit types are widened to fp32, combined there and rounded once, to nearest even.
//!
//! The kernel goes through all inputs side by side, one block of [`BLOCK`] elements at a time whose running
//! result stays in registers. So memory sees one forward stream for each rank, which is what its prefetchers are
//! good at: combining one whole chunk after the other takes 1.5 to 2 times as long.
//!
//! The loops are plain; `multiversion` compiles them for several instruction sets and picks at run time. No sum
//! is contracted or reordered, so all versions give the same bits.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use multiversion::multiversion;
use zero_alloc::device::Element;

use crate::ReduceOp;

/// Elements that callers hand over at a time: the result of a chunk stays in the first-level cache.
pub(crate) const CHUNK_ELEMS: usize = 4096;

/// Elements whose running result is in registers.
const BLOCK: usize = 64;

/// An element that can be combined.
pub(crate) trait Reducible: Element + Default {
    /// `out[i]` = the elements `i` of all inputs, combined in order. All are of one length, and there is an input.
    fn reduce(op: ReduceOp, inputs: &[&[Self]], out: &mut [Self]);
}

/// How blocks of a type are widened, combined and rounded.
trait Lane: Element + Default {
    type Acc: Copy + Default;
    fn widen(from: &[Self; BLOCK], to: &mut [Self::Acc; BLOCK]);
    fn round(from: &[Self::Acc; BLOCK], to: &mut [Self; BLOCK]);
    fn add(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn greater(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn divide(a: Self::Acc, by: usize) -> Self::Acc;
}

#[inline(always)]
fn kernel<T: Lane>(op: ReduceOp, inputs: &[&[T]], out: &mut [T]) {
    let (mut x, mut result) = ([T::default(); BLOCK], [T::default(); BLOCK]);
    let (mut acc, mut wide) = ([T::Acc::default(); BLOCK], [T::Acc::default(); BLOCK]);
    let mut start = 0;
    for out in out.chunks_mut(BLOCK) {
        for (rank, input) in inputs.iter().enumerate() {
            // The last block may be short: what is beyond it is combined too, and goes nowhere.
            let block = match input[start..].first_chunk::<BLOCK>() {
                Some(block) => block,
                None => {
                    x[..out.len()].copy_from_slice(&input[start..start + out.len()]);
                    &x
                }
            };
            if rank == 0 {
                T::widen(block, &mut acc);
                continue;
            }
            T::widen(block, &mut wide);
            if op == ReduceOp::Max {
                for (a, &w) in acc.iter_mut().zip(&wide) {
                    *a = T::greater(*a, w);
                }
            } else {
                for (a, &w) in acc.iter_mut().zip(&wide) {
                    *a = T::add(*a, w);
                }
            }
        }
        if op == ReduceOp::Avg {
            for a in &mut acc {
                *a = T::divide(*a, inputs.len());
            }
        }
        T::round(&acc, &mut result);
        out.copy_from_slice(&result[..out.len()]);
        start += BLOCK;
    }
}

macro_rules! reducible {
    ($($t:ty => $f:ident),*) => {$(
        #[multiversion(targets = "simd")]
        fn $f(op: ReduceOp, inputs: &[&[$t]], out: &mut [$t]) {
            // Each operation gets loops of its own.
            match op {
                ReduceOp::Sum => kernel(ReduceOp::Sum, inputs, out),
                ReduceOp::Avg => kernel(ReduceOp::Avg, inputs, out),
                ReduceOp::Max => kernel(ReduceOp::Max, inputs, out),
            }
        }

        impl Reducible for $t {
            fn reduce(op: ReduceOp, inputs: &[&[Self]], out: &mut [Self]) {
                $f(op, inputs, out);
            }
        }
    )*};
}
reducible!(f32 => reduce_f32, f64 => reduce_f64, bf16 => reduce_bf16, f16 => reduce_f16, u8 => reduce_u8);

/// The greater of two, or NaN: `a` if it is NaN or not less than `b`.
#[inline(always)]
fn greater<T: PartialOrd + Copy>(a: T, b: T) -> T {
    #[allow(clippy::eq_op, reason = "the test for NaN")]
    if a >= b || a != a { a } else { b }
}

macro_rules! float_lane {
    ($t:ty, $acc:ty, $widen:expr, $round:expr) => {
        impl Lane for $t {
            type Acc = $acc;

            #[inline(always)]
            fn widen(from: &[Self; BLOCK], to: &mut [$acc; BLOCK]) {
                ($widen)(from, to)
            }

            #[inline(always)]
            fn round(from: &[$acc; BLOCK], to: &mut [Self; BLOCK]) {
                ($round)(from, to)
            }

            #[inline(always)]
            fn add(a: $acc, b: $acc) -> $acc {
                a + b
            }

            #[inline(always)]
            fn greater(a: $acc, b: $acc) -> $acc {
                greater(a, b)
            }

            #[inline(always)]
            fn divide(a: $acc, by: usize) -> $acc {
                a / by as $acc
            }
        }
    };
}
float_lane!(f32, f32, copy_block, copy_block);
float_lane!(f64, f64, copy_block, copy_block);
float_lane!(bf16, f32, widen_bf16, round_bf16);
// `half` picks the conversion instructions of the machine at run time.
float_lane!(
    f16,
    f32,
    |from: &[f16; BLOCK], to: &mut [f32; BLOCK]| from.convert_to_f32_slice(to),
    |from: &[f32; BLOCK], to: &mut [f16; BLOCK]| to.convert_from_f32_slice(from)
);

impl Lane for u8 {
    type Acc = Self;

    #[inline(always)]
    fn widen(from: &[Self; BLOCK], to: &mut [Self; BLOCK]) {
        *to = *from;
    }

    #[inline(always)]
    fn round(from: &[Self; BLOCK], to: &mut [Self; BLOCK]) {
        *to = *from;
    }

    #[inline(always)]
    fn add(a: Self, b: Self) -> Self {
        a.wrapping_add(b)
    }

    #[inline(always)]
    fn greater(a: Self, b: Self) -> Self {
        a.max(b)
    }

    /// Averages of bytes are refused when a call is checked.
    #[inline(always)]
    fn divide(a: Self, _: usize) -> Self {
        a
    }
}

#[inline(always)]
fn copy_block<T: Copy>(from: &[T; BLOCK], to: &mut [T; BLOCK]) {
    *to = *from;
}

/// bfloat16 is the upper half of an fp32.
#[inline(always)]
fn widen_bf16(from: &[bf16; BLOCK], to: &mut [f32; BLOCK]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = f32::from_bits(u32::from(from.to_bits()) << 16);
    }
}

/// To nearest even; a NaN stays one (its payload's upper part, made quiet).
#[inline(always)]
fn round_bf16(from: &[f32; BLOCK], to: &mut [bf16; BLOCK]) {
    for (to, from) in to.iter_mut().zip(from) {
        let bits = from.to_bits();
        let nearest = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        *to = bf16::from_bits(if from.is_nan() { quiet as u16 } else { nearest as u16 });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// One element after the other.
    fn plain(op: ReduceOp, values: &[f32]) -> f32 {
        let combine = |a: f32, b: f32| match op {
            ReduceOp::Max if a.is_nan() || b.is_nan() => f32::NAN,
            ReduceOp::Max if a >= b => a,
            ReduceOp::Max => b,
            _ => a + b,
        };
        let all = values[1..].iter().fold(values[0], |a, &b| combine(a, b));
        if op == ReduceOp::Avg { all / values.len() as f32 } else { all }
    }

    fn check<T: Reducible + PartialEq + std::fmt::Debug>(
        op: ReduceOp,
        bits: &[Vec<u32>],
        of: impl Fn(u32) -> T,
        to_f32: impl Fn(T) -> f32,
        from_f32: impl Fn(f32) -> T,
    ) {
        let inputs: Vec<Vec<T>> = bits.iter().map(|bits| bits.iter().map(|&b| of(b)).collect()).collect();
        let inputs: Vec<&[T]> = inputs.iter().map(|input| &input[..]).collect();
        let mut out = vec![T::default(); inputs[0].len()];
        T::reduce(op, &inputs, &mut out);
        for (i, &got) in out.iter().enumerate() {
            let values: Vec<f32> = inputs.iter().map(|input| to_f32(input[i])).collect();
            let expected = from_f32(plain(op, &values));
            let both_nan = to_f32(got).is_nan() && to_f32(expected).is_nan();
            assert!(got == expected || both_nan, "{op:?} of {values:?}: got {got:?}, expected {expected:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 3 } else { 200 }, ..ProptestConfig::default() })]

        /// Any bits: infinities, NaN, subnormal numbers, ties of rounding.
        #[test]
        fn blocks_give_what_single_elements_give(
            op in prop::sample::select(vec![ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max]),
            ranks in 1usize..6, len in 0usize..200, seed in any::<u32>(),
        ) {
            let draw = |rank: usize, i: usize| (seed ^ (rank * 977 + i) as u32).wrapping_mul(0x9e37_79b9).rotate_left(13);
            let bits: Vec<Vec<u32>> = (0..ranks).map(|r| (0..len).map(|i| draw(r, i)).collect()).collect();
            check(op, &bits, f32::from_bits, |x| x, |x| x);
            check(op, &bits, |b| bf16::from_bits(b as u16), bf16::to_f32, bf16::from_f32);
            check(op, &bits, |b| f16::from_bits(b as u16), f16::to_f32, f16::from_f32);
        }
    }
}
