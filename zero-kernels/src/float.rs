//! Conversions between fp32 and the 16-bit types, written so that compilers vectorise them.
//!
//! Both directions are plain integer and floating-point arithmetic without branches or tables, so a
//! loop over them becomes vector code on any instruction set, and every machine (and Miri) computes
//! the same bits. Rounding is to nearest, ties to even. A NaN keeps its sign and upper payload bits
//! and becomes quiet, as with F16C and AVX-512. Denormals are converted exactly.

use half::{bf16, f16};
use zero_alloc::device::Element;

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

/// A floating-point type of weights and gradients: fp32, bf16 or fp16. Arithmetic is always in
/// fp32.
pub trait Float: Element + sealed::Sealed {
    /// The value as fp32, exactly.
    fn to_f32(self) -> f32;

    /// `x` rounded to nearest, ties to even. Values out of range become infinite.
    fn from_f32(x: f32) -> Self;
}

impl Float for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let nan = (bits >> 16) | 0x40;
        Self::from_bits(if x.is_nan() { nan } else { rounded } as u16)
    }
}

impl Float for f16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        let half = u32::from(self.to_bits());
        let sign = (half & 0x8000) << 16;
        // Exponent and mantissa at fp32's positions make a value 2^112 too small, denormals
        // included.
        let magnitude = (half & 0x7fff) << 13;
        let scaled = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
        let special = magnitude | 0x7f80_0000 | if half & 0x3ff != 0 { 0x40_0000 } else { 0 };
        let is_special = half & 0x7c00 == 0x7c00;
        f32::from_bits(sign | if is_special { special } else { scaled })
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        let bits = x.to_bits();
        let sign = (bits >> 16) & 0x8000;
        let magnitude = bits & 0x7fff_ffff;
        // Rebias the exponent (127 to 15) and round off 13 bits.
        let normal = magnitude
            .wrapping_sub(112 << 23)
            .wrapping_add(0xfff + ((magnitude >> 13) & 1))
            >> 13;
        // The addition rounds: near 0.5 the last place is 2^-24, as in fp16's denormals.
        let denormal = (f32::from_bits(magnitude) + 0.5)
            .to_bits()
            .wrapping_sub(0.5f32.to_bits());
        let nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);

        let out = if magnitude > 0x7f80_0000 {
            nan
        } else if magnitude >= 0x4780_0000 {
            0x7c00
        } else if magnitude < 0x3880_0000 {
            denormal
        } else {
            normal
        };

        Self::from_bits((sign | out) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn same(ours: f32, theirs: f32) -> bool {
        ours.to_bits() == theirs.to_bits()
    }

    #[test]
    fn widening_agrees_with_crate_half() {
        let step = if cfg!(miri) { 331 } else { 1 };
        for bits in (0..=u16::MAX).step_by(step) {
            let b = bf16::from_bits(bits);
            let h = f16::from_bits(bits);
            assert!(
                same(Float::to_f32(b), f32::from_bits(u32::from(bits) << 16)),
                "bf16 {bits:#x}"
            );
            assert!(same(Float::to_f32(h), h.to_f32()), "fp16 {bits:#x}");
        }
    }

    fn check_narrowing(x: f32) {
        let b = <bf16 as Float>::from_f32(x);
        let h = <f16 as Float>::from_f32(x);
        assert_eq!(
            b.to_bits(),
            bf16::from_f32(x).to_bits(),
            "bf16 of {x:e} ({:#x})",
            x.to_bits()
        );
        assert_eq!(
            h.to_bits(),
            f16::from_f32(x).to_bits(),
            "fp16 of {x:e} ({:#x})",
            x.to_bits()
        );
    }

    #[test]
    fn narrowing_agrees_around_every_tie() {
        // Every sixteen-bit pattern, and its neighbourhood at both types' rounding points.
        let step = if cfg!(miri) { 331 } else { 1 };
        for high in (0..=u16::MAX).step_by(step) {
            for low in [
                0u32, 1, 0xfff, 0x1000, 0x1001, 0x2000, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff,
            ] {
                check_narrowing(f32::from_bits((u32::from(high) << 16) | low));
            }
        }
    }

    #[test]
    #[ignore = "all 2^32 values take a minute; run it after a change here"]
    fn narrowing_agrees_for_all_values() {
        (0..=u32::MAX).for_each(|bits| check_narrowing(f32::from_bits(bits)));
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig { failure_persistence: None, ..Default::default() })]
        #[test]
        #[cfg_attr(miri, ignore)]
        fn narrowing_agrees_with_crate_half(bits: u32) {
            check_narrowing(f32::from_bits(bits));
        }
    }
}
