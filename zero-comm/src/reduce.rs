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
    /// `acc = from`, widened.
    fn start(from: &[Self; BLOCK], acc: &mut [Self::Acc; BLOCK]);
    /// `acc = acc op from`, widened.
    fn fold(op: ReduceOp, from: &[Self; BLOCK], acc: &mut [Self::Acc; BLOCK]);
    fn divide(acc: &mut [Self::Acc; BLOCK], by: usize);
    /// `to = acc`, rounded.
    fn round(acc: &[Self::Acc; BLOCK], to: &mut [Self; BLOCK]);
}

/// One block: the first rank's, then all others' in order.
#[inline(always)]
fn block<'a, T: Lane>(op: ReduceOp, ranks: usize, of: impl Fn(usize) -> &'a [T; BLOCK], out: &mut [T; BLOCK]) {
    let mut acc = [T::Acc::default(); BLOCK];
    T::start(of(0), &mut acc);
    for rank in 1..ranks {
        T::fold(op, of(rank), &mut acc);
    }
    if op == ReduceOp::Avg {
        T::divide(&mut acc, ranks);
    }
    T::round(&acc, out);
}

#[inline(always)]
fn kernel<T: Lane>(op: ReduceOp, inputs: &[&[T]], out: &mut [T]) {
    let zeros = [T::default(); BLOCK];
    let (blocks, tail) = out.as_chunks_mut::<BLOCK>();
    let whole = blocks.len() * BLOCK;
    for (i, out) in blocks.iter_mut().enumerate() {
        // All inputs have the length of the output, so there is such a block.
        block(op, inputs.len(), |rank| inputs[rank][i * BLOCK..].first_chunk().unwrap_or(&zeros), out);
    }
    if !tail.is_empty() {
        // Filled up with zeros, which are combined too and go nowhere.
        let mut padded = vec![zeros; inputs.len()];
        for (padded, input) in padded.iter_mut().zip(inputs) {
            padded[..tail.len()].copy_from_slice(&input[whole..]);
        }
        let mut result = zeros;
        block(op, inputs.len(), |rank| &padded[rank], &mut result);
        tail.copy_from_slice(&result[..tail.len()]);
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

/// A type whose elements are widened and rounded one by one.
macro_rules! lane {
    ($t:ty, $acc:ty, $widen:expr, $add:expr, $divide:expr, $round:expr) => {
        impl Lane for $t {
            type Acc = $acc;

            #[inline(always)]
            fn start(from: &[Self; BLOCK], acc: &mut [$acc; BLOCK]) {
                for (a, &x) in acc.iter_mut().zip(from) {
                    *a = ($widen)(x);
                }
            }

            #[inline(always)]
            fn fold(op: ReduceOp, from: &[Self; BLOCK], acc: &mut [$acc; BLOCK]) {
                for (a, &x) in acc.iter_mut().zip(from) {
                    *a = if op == ReduceOp::Max { greater(*a, ($widen)(x)) } else { ($add)(*a, ($widen)(x)) };
                }
            }

            #[inline(always)]
            fn divide(acc: &mut [$acc; BLOCK], by: usize) {
                for a in acc {
                    *a = ($divide)(*a, by);
                }
            }

            #[inline(always)]
            fn round(acc: &[$acc; BLOCK], to: &mut [Self; BLOCK]) {
                for (to, &a) in to.iter_mut().zip(acc) {
                    *to = ($round)(a);
                }
            }
        }
    };
}
lane!(f32, f32, |x| x, |a, x| a + x, |a, n| a / n as f32, |a| a);
lane!(f64, f64, |x| x, |a, x| a + x, |a, n| a / n as f64, |a| a);
// Averages of bytes are refused when a call is checked.
lane!(u8, u8, |x| x, u8::wrapping_add, |a, _| a, |a| a);
lane!(bf16, f32, widen_bf16, |a, x| a + x, |a, n| a / n as f32, round_bf16);

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

/// `half` picks the conversion instructions of the machine at run time, for a whole block.
impl Lane for f16 {
    type Acc = f32;

    #[inline(always)]
    fn start(from: &[Self; BLOCK], acc: &mut [f32; BLOCK]) {
        from.convert_to_f32_slice(acc);
    }

    #[inline(always)]
    fn fold(op: ReduceOp, from: &[Self; BLOCK], acc: &mut [f32; BLOCK]) {
        let mut wide = [0.0; BLOCK];
        from.convert_to_f32_slice(&mut wide);
        f32::fold(op, &wide, acc);
    }

    #[inline(always)]
    fn divide(acc: &mut [f32; BLOCK], by: usize) {
        f32::divide(acc, by);
    }

    #[inline(always)]
    fn round(acc: &[f32; BLOCK], to: &mut [Self; BLOCK]) {
        to.convert_from_f32_slice(acc);
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
