//! Combining the elements of all ranks on the host, in rank order: `((x0 op x1) op x2) op ...`.
//!
//! All back ends that reduce on the host call [`Reducible::reduce`], so their results are
//! bit-identical. 16-bit types are widened to fp32, combined there and rounded once, to nearest
//! even.
//!
//! The kernel reads all inputs in parallel, in blocks of [`BLOCK`] elements whose result stays in
//! registers until it is stored. Memory accesses are one sequential stream per rank, and each byte
//! is read or written once. Software prefetch covers page boundaries, where hardware prefetchers
//! stop.
//!
//! `multiversion` compiles the loops for several instruction sets and selects one at run time. No
//! sum is contracted or reordered, so all versions are bit-identical.

use half::{bf16, f16};
use multiversion::multiversion;
use zero_alloc::device::Element;

use crate::{ReduceOp, nontemporal};

/// Elements reduced at a time if the result is copied to several outputs, so that it stays in the
/// first-level cache.
pub(crate) const CHUNK_ELEMS: usize = 4096;

/// Elements whose result is in registers; a whole number of cache lines for every type.
const BLOCK: usize = 64;

/// Distance of the software prefetch.
const AHEAD_BYTES: usize = 1024;

/// The stores of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    /// Ordinary stores.
    Cached,
    /// Non-temporal stores, for results larger than the cache.
    PastCache,
}

/// An element that can be combined.
pub(crate) trait Reducible: Element + Default {
    /// `out[i]` = the elements `i` of all inputs, combined in order. There is at least one input;
    /// all lengths are equal.
    fn reduce(op: ReduceOp, inputs: &[&[Self]], out: &mut [Self], store: Store);
}

/// Widens, combines and rounds blocks of a type.
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

/// Reduces one block, in rank order; `of(rank)` is the input of a rank.
#[inline(always)]
fn block<'a, T: Lane>(
    op: ReduceOp,
    ranks: usize,
    of: impl Fn(usize) -> &'a [T; BLOCK],
    out: &mut [T; BLOCK],
) {
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
fn kernel<T: Lane>(op: ReduceOp, inputs: &[&[T]], out: &mut [T], store: Store) {
    // Non-temporal stores write whole lines; the part before the first is a partial block.
    let head = match store {
        Store::Cached => 0,
        Store::PastCache => out
            .as_ptr()
            .align_offset(nontemporal::LINE_BYTES)
            .min(out.len()),
    };

    let (out_head, out) = out.split_at_mut(head);
    partial(op, inputs, 0, out_head);
    let (blocks, tail) = out.as_chunks_mut::<BLOCK>();
    let whole = head + blocks.len() * BLOCK;

    for (i, out) in blocks.iter_mut().enumerate() {
        let at = head + i * BLOCK;
        for input in inputs {
            for line in (0..BLOCK * size_of::<T>()).step_by(nontemporal::LINE_BYTES) {
                nontemporal::prefetch(
                    input
                        .as_ptr()
                        .wrapping_add(at)
                        .wrapping_byte_add(line + AHEAD_BYTES),
                );
            }
        }
        let zeros = &[T::default(); BLOCK];
        let mut result = *zeros;
        // All inputs have the length of the output, so the block exists.
        block(
            op,
            inputs.len(),
            |rank| inputs[rank][at..].first_chunk().unwrap_or(zeros),
            &mut result,
        );
        match store {
            Store::Cached => *out = result,
            Store::PastCache => {
                nontemporal::lines(bytemuck::cast_slice(&result), bytemuck::cast_slice_mut(out))
            }
        }
    }

    partial(op, inputs, whole, tail);
    if store == Store::PastCache {
        nontemporal::fence();
    }
}

/// Reduces less than a block, from element `at`. It is padded with zeros, whose results are
/// dropped.
#[inline(always)]
fn partial<T: Lane>(op: ReduceOp, inputs: &[&[T]], at: usize, out: &mut [T]) {
    if out.is_empty() {
        return;
    }
    let zeros = [T::default(); BLOCK];
    let mut padded = vec![zeros; inputs.len()];
    for (padded, input) in padded.iter_mut().zip(inputs) {
        padded[..out.len()].copy_from_slice(&input[at..at + out.len()]);
    }
    let mut result = zeros;
    block(op, inputs.len(), |rank| &padded[rank], &mut result);
    out.copy_from_slice(&result[..out.len()]);
}

macro_rules! reducible {
    ($($t:ty => $f:ident),*) => {$(
        #[multiversion(targets = "simd")]
        fn $f(op: ReduceOp, inputs: &[&[$t]], out: &mut [$t], store: Store) {
            // Constants, so that the compiler specializes the loops for each operation.
            match op {
                ReduceOp::Sum => kernel(ReduceOp::Sum, inputs, out, store),
                ReduceOp::Avg => kernel(ReduceOp::Avg, inputs, out, store),
                ReduceOp::Max => kernel(ReduceOp::Max, inputs, out, store),
            }
        }

        impl Reducible for $t {
            fn reduce(op: ReduceOp, inputs: &[&[Self]], out: &mut [Self], store: Store) {
                $f(op, inputs, out, store);
            }
        }
    )*};
}
reducible!(f32 => reduce_f32, f64 => reduce_f64, bf16 => reduce_bf16, f16 => reduce_f16, u8 => reduce_u8);

/// The maximum, or NaN if either is: `a` if it is NaN or not less than `b`, otherwise `b`.
#[inline(always)]
fn greater<T: PartialOrd + Copy>(a: T, b: T) -> T {
    #[allow(clippy::eq_op, reason = "the test for NaN")]
    if a >= b || a != a { a } else { b }
}

/// Implements [`Lane`] for a type from functions of one element.
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
                    *a = if op == ReduceOp::Max {
                        greater(*a, ($widen)(x))
                    } else {
                        ($add)(*a, ($widen)(x))
                    };
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
// The check of a call rejects averages of bytes.
lane!(u8, u8, |x| x, u8::wrapping_add, |a, _| a, |a| a);
lane!(
    bf16,
    f32,
    widen_bf16,
    |a, x| a + x,
    |a, n| a / n as f32,
    round_bf16
);

/// bfloat16 is the upper half of an fp32.
#[inline(always)]
fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Rounds to nearest even; a NaN stays a quiet NaN with the upper part of its payload.
#[inline(always)]
fn round_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    bf16::from_bits(if x.is_nan() {
        quiet as u16
    } else {
        nearest as u16
    })
}

lane!(
    f16,
    f32,
    widen_f16,
    |a, x| a + x,
    |a, n| a / n as f32,
    round_f16
);

/// Bit masks of binary16, and fp32 constants for its conversion.
mod f16_parts {
    pub(super) const EXPONENT: u32 = 0x7c00;
    pub(super) const SIGN: u32 = 0x8000;
    pub(super) const NAN: u32 = 0x7e00;
    /// Fraction bits that fp32 has in addition to binary16's.
    pub(super) const EXTRA_DIGITS: u32 = 13;
    /// 2^112 as fp32; 112 is the difference of the exponent biases.
    pub(super) const REBIAS: u32 = (127 + 112) << 23;
    /// 2^-14, the smallest normal number of binary16, as fp32.
    pub(super) const LEAST_NORMAL: u32 = (127 - 14) << 23;
    /// 2^16, greater than all finite numbers of binary16, as fp32.
    pub(super) const BEYOND: u32 = (127 + 16) << 23;
}

/// Exact: binary16's bits at fp32's positions are the number times 2^-112, for subnormals too.
#[inline(always)]
fn widen_f16(x: f16) -> f32 {
    use f16_parts::{EXPONENT, EXTRA_DIGITS, REBIAS, SIGN};
    let bits = u32::from(x.to_bits());
    let magnitude = (bits & !SIGN) << EXTRA_DIGITS;
    let finite = (f32::from_bits(magnitude) * f32::from_bits(REBIAS)).to_bits();
    let magnitude = if bits & EXPONENT == EXPONENT {
        magnitude | f32::INFINITY.to_bits()
    } else {
        finite
    };
    f32::from_bits(magnitude | (bits & SIGN) << 16)
}

/// Rounds to nearest even, overflow to infinity; a NaN stays a NaN.
#[inline(always)]
fn round_f16(x: f32) -> f16 {
    use f16_parts::{BEYOND, EXPONENT, EXTRA_DIGITS, LEAST_NORMAL, NAN, SIGN};
    let sign = (x.to_bits() >> 16) & SIGN;
    let magnitude = x.to_bits() & !(SIGN << 16);
    // Rounding may carry into the exponent, up to infinity; that is the correct result.
    let half_less_one = (1 << (EXTRA_DIGITS - 1)) - 1;
    let nearest = magnitude.wrapping_add(half_less_one + ((magnitude >> EXTRA_DIGITS) & 1));
    let normal = nearest.wrapping_sub(112 << 23) >> EXTRA_DIGITS;
    // The unit in the last place of fp32's 0.5 equals that of binary16's subnormal numbers, so this
    // sum rounds to them.
    let subnormal = (f32::from_bits(magnitude) + 0.5)
        .to_bits()
        .wrapping_sub(0.5f32.to_bits());
    let special = if x.is_nan() { NAN } else { EXPONENT };
    let finite = if magnitude < LEAST_NORMAL {
        subnormal
    } else {
        normal
    };
    f16::from_bits((sign | if magnitude >= BEYOND { special } else { finite }) as u16)
}

#[cfg(test)]
mod tests {
    use bytemuck::bytes_of;
    use proptest::prelude::*;

    use super::*;

    /// The oracle: one element after the other.
    fn plain(op: ReduceOp, values: &[f32]) -> f32 {
        let combine = |a: f32, b: f32| match op {
            ReduceOp::Max if a.is_nan() || b.is_nan() => f32::NAN,
            ReduceOp::Max if a >= b => a,
            ReduceOp::Max => b,
            _ => a + b,
        };
        let all = values[1..].iter().fold(values[0], |a, &b| combine(a, b));
        if op == ReduceOp::Avg {
            all / values.len() as f32
        } else {
            all
        }
    }

    fn check<T: Reducible + PartialEq + std::fmt::Debug>(
        op: ReduceOp,
        bits: &[Vec<u32>],
        of: impl Fn(u32) -> T,
        to_f32: impl Fn(T) -> f32,
        from_f32: impl Fn(f32) -> T,
    ) {
        let inputs: Vec<Vec<T>> = bits
            .iter()
            .map(|bits| bits.iter().map(|&b| of(b)).collect())
            .collect();
        let inputs: Vec<&[T]> = inputs.iter().map(|input| &input[..]).collect();
        let mut out = vec![T::default(); inputs[0].len()];
        T::reduce(op, &inputs, &mut out, Store::Cached);
        // Targets at several offsets in a line.
        let mut past = vec![T::default(); out.len() + 40];

        for offset in [0, 1, 39] {
            let place = &mut past[offset..offset + out.len()];
            T::reduce(op, &inputs, place, Store::PastCache);
            // The payload of a NaN sum depends on the processor.
            let same = |(&a, &b): (&T, &T)| {
                bytes_of(&a) == bytes_of(&b) || to_f32(a).is_nan() && to_f32(b).is_nan()
            };
            assert!(
                place.iter().zip(&out).all(same),
                "{op:?} at {offset}: {place:?}, not {out:?}"
            );
        }

        for (i, &got) in out.iter().enumerate() {
            let values: Vec<f32> = inputs.iter().map(|input| to_f32(input[i])).collect();
            let expected = from_f32(plain(op, &values));
            let both_nan = to_f32(got).is_nan() && to_f32(expected).is_nan();
            assert!(
                got == expected || both_nan,
                "{op:?} of {values:?}: got {got:?}, expected {expected:?}"
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Any bits: infinities, NaN, subnormal numbers, ties of rounding.
        #[test]
        fn blocks_equal_single_elements(
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

    #[test]
    fn halves_convert_as_in_the_crate_half() {
        for bits in (0..=u16::MAX).step_by(if cfg!(miri) { 977 } else { 1 }) {
            let x = f16::from_bits(bits);
            let wide = widen_f16(x);
            assert!(
                wide.to_bits() == x.to_f32().to_bits() || wide.is_nan() && x.is_nan(),
                "{bits:x}"
            );
            assert!(
                round_f16(wide) == x || x.is_nan() && round_f16(wide).is_nan(),
                "{bits:x}"
            );
            // Near this number, and near the midpoint between it and the next.
            let middle = wide.to_bits() ^ (1 << 12);
            for near in [wide.to_bits(), middle]
                .into_iter()
                .flat_map(|b| b.saturating_sub(2)..=b.saturating_add(2))
            {
                let got = round_f16(f32::from_bits(near));
                let expected = f16::from_f32(f32::from_bits(near));
                assert!(
                    got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan(),
                    "{near:x}"
                );
            }
        }
    }
}
