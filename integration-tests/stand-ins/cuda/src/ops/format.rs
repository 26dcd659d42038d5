//! Floating-point formats, and rounding to them.

/// A direction of rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// To nearest, ties to even.
    Nearest,
    /// To nearest, ties away from zero.
    NearestAway,
    Zero,
    Down,
    Up,
}

impl Rounding {
    /// The rounding with this name, and whether it is to an integer: `.rn`, or `.rni`.
    pub(crate) fn named(name: &str) -> Option<(Self, bool)> {
        Some(match name {
            "rn" => (Self::Nearest, false),
            "rna" => (Self::NearestAway, false),
            "rz" => (Self::Zero, false),
            "rm" => (Self::Down, false),
            "rp" => (Self::Up, false),
            "rni" => (Self::Nearest, true),
            "rzi" => (Self::Zero, true),
            "rmi" => (Self::Down, true),
            "rpi" => (Self::Up, true),
            _ => return None,
        })
    }

    /// Rounds to an integer.
    pub(crate) fn integer(self, x: f64) -> f64 {
        match self {
            Self::Nearest => x.round_ties_even(),
            Self::NearestAway => x.round(),
            Self::Zero => x.trunc(),
            Self::Down => x.floor(),
            Self::Up => x.ceil(),
        }
    }
}

/// A binary format of at most 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Format {
    exponent_bits: u32,
    fraction_bits: u32,
}

pub(crate) const F16: Format = Format {
    exponent_bits: 5,
    fraction_bits: 10,
};
pub(crate) const BF16: Format = Format {
    exponent_bits: 8,
    fraction_bits: 7,
};
pub(crate) const F32: Format = Format {
    exponent_bits: 8,
    fraction_bits: 23,
};
/// As wide as f32, with the lowest 13 bits zero.
pub(crate) const TF32: Format = Format {
    exponent_bits: 8,
    fraction_bits: 10,
};

impl Format {
    fn nan(self) -> u64 {
        // All ones except the sign: the canonical NaN of GPUs.
        (1 << (self.exponent_bits + self.fraction_bits)) - 1
    }

    fn infinity(self) -> u64 {
        ((1 << self.exponent_bits) - 1) << self.fraction_bits
    }

    /// Rounds to the format and returns the bits. A NaN becomes the canonical NaN.
    pub(crate) fn narrow(self, x: f64, rounding: Rounding) -> u64 {
        if x.is_nan() {
            return self.nan();
        }
        let negative = x.is_sign_negative();
        let sign = u64::from(negative) << (self.exponent_bits + self.fraction_bits);
        sign | self.narrow_magnitude(x.abs(), rounding, negative)
    }

    fn narrow_magnitude(self, x: f64, rounding: Rounding, negative: bool) -> u64 {
        if x.is_infinite() {
            return self.infinity();
        }
        let bias = (1i32 << (self.exponent_bits - 1)) - 1;
        let lowest = 1 - bias;
        // x = significand * 2^(exponent - 52)
        let bits = x.to_bits();
        let raw = (x.to_bits() >> 52) as i32;
        let (significand, exponent) = match raw {
            0 => (bits, -1022),
            _ => ((bits & ((1 << 52) - 1)) | 1 << 52, raw - 1023),
        };

        // The unit in the last place of the result is 2^(scale - fraction_bits).
        let scale = exponent.max(lowest);
        let shift = (52 - self.fraction_bits as i32) + (scale - exponent);
        let (kept, rest, half) = if shift > 63 {
            (0, u64::from(significand != 0), 2)
        } else {
            (
                significand >> shift,
                significand & ((1 << shift) - 1),
                1u64 << (shift - 1),
            )
        };

        let up = match rounding {
            Rounding::Nearest => rest > half || (rest == half && kept & 1 == 1),
            Rounding::NearestAway => rest >= half,
            Rounding::Zero => false,
            Rounding::Down => negative && rest != 0,
            Rounding::Up => !negative && rest != 0,
        };

        let rounded = kept + u64::from(up);
        // A significand with its leading bit adds one to the exponent field, as does a carry from
        // rounding.
        let field = if kept >> self.fraction_bits == 0 {
            0
        } else {
            (scale + bias - 1) as u64
        };

        let result = (field << self.fraction_bits) + rounded;
        if result < self.infinity() {
            return result;
        }
        let to_infinity = match rounding {
            Rounding::Nearest | Rounding::NearestAway => true,
            Rounding::Zero => false,
            Rounding::Down => negative,
            Rounding::Up => !negative,
        };

        if to_infinity {
            self.infinity()
        } else {
            self.infinity() - 1
        }
    }

    /// Converts bits of the format to their value.
    pub(crate) fn widen(self, bits: u64) -> f64 {
        let fraction = bits & ((1 << self.fraction_bits) - 1);
        let field = (bits >> self.fraction_bits) & ((1 << self.exponent_bits) - 1);
        let bias = (1i32 << (self.exponent_bits - 1)) - 1;
        let scale = |e: i32| 2f64.powi(e - self.fraction_bits as i32);
        let magnitude = if field == (1 << self.exponent_bits) - 1 {
            if fraction == 0 {
                f64::INFINITY
            } else {
                f64::NAN
            }
        } else if field == 0 {
            fraction as f64 * scale(1 - bias)
        } else {
            (fraction | 1 << self.fraction_bits) as f64 * scale(field as i32 - bias)
        };
        if bits >> (self.exponent_bits + self.fraction_bits) & 1 == 1 {
            -magnitude
        } else {
            magnitude
        }
    }
}

/// `f16` bits to f32, exactly.
pub(crate) fn f16_to_f32(bits: u64) -> f32 {
    F16.widen(bits & 0xffff) as f32
}

/// `bf16` bits to f32, exactly.
pub(crate) fn bf16_to_f32(bits: u64) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// `a + b`, rounded to odd: an inexact sum becomes the neighbour whose last bit is one. Rounding it
/// again to a format of at most 51 bits, in any direction, equals rounding the exact sum (Boldo and
/// Melquiond, 2008).
pub(crate) fn add_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    if !sum.is_finite() {
        return sum;
    }
    // The rounding error (Knuth's two-sum).
    let part = sum - a;
    let rest = (a - (sum - part)) + (b - part);
    if rest == 0.0 || sum.to_bits() & 1 == 1 {
        return sum;
    }
    let outward = (rest > 0.0) == (sum > 0.0);
    f64::from_bits(if outward {
        sum.to_bits() + 1
    } else {
        sum.to_bits() - 1
    })
}

/// An integer as f64, rounded to odd.
pub(crate) fn integer_odd(x: i128) -> f64 {
    let high = (x >> 32) << 32;
    add_odd(high as f64, (x - high) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_round_trip_and_f32_rounds_natively() {
        for bits in 0..=0xffffu64 {
            for format in [F16, BF16] {
                let value = format.widen(bits);
                if !value.is_nan() {
                    assert_eq!(format.narrow(value, Rounding::Nearest), bits);
                    assert_eq!(format.narrow(value, Rounding::Down), bits);
                }
            }
        }

        let mut x = 1.0e-46f64;
        while x < 1.0e40 {
            assert_eq!(
                F32.narrow(x, Rounding::Nearest),
                u64::from((x as f32).to_bits()),
                "{x:e}"
            );
            assert_eq!(
                F32.narrow(-x, Rounding::Nearest),
                u64::from((-x as f32).to_bits()),
                "{x:e}"
            );
            let down = F32.widen(F32.narrow(x, Rounding::Down));
            let up = F32.widen(F32.narrow(x, Rounding::Up));
            assert!(
                down <= x
                    && x <= up
                    && F32.narrow(x, Rounding::Zero) == F32.narrow(x, Rounding::Down)
            );
            x *= 1.001_234_567;
        }
    }

    #[test]
    fn ties_and_overflow_go_where_the_rounding_says() {
        // Between 1 and the next bf16, 1.0078125.
        let tie = 1.003_906_25;
        assert_eq!(BF16.narrow(tie, Rounding::Nearest), 0x3f80);
        assert_eq!(BF16.narrow(tie, Rounding::NearestAway), 0x3f81);
        assert_eq!(F16.narrow(65520.0, Rounding::Nearest), 0x7c00);
        assert_eq!(F16.narrow(65519.9, Rounding::Nearest), 0x7bff);
        assert_eq!(F16.narrow(1e9, Rounding::Zero), 0x7bff);
        assert_eq!(F16.narrow(-1e9, Rounding::Up), 0xfbff);
        assert_eq!(F16.narrow(f64::NAN, Rounding::Nearest), 0x7fff);
        assert_eq!(TF32.narrow(1.0, Rounding::NearestAway), 0x1fc00);
    }

    #[test]
    fn sums_rounded_to_odd_remember_what_was_cut_off() {
        let tiny = 2f64.powi(-80);
        for (a, b) in [(1.0, tiny), (1.0, -tiny), (-1.0, tiny)] {
            let sum = add_odd(a, b);
            assert!(sum != a && (sum > a) == (b > 0.0));
        }
        assert_eq!(
            F32.narrow(add_odd(1.0, tiny), Rounding::Up),
            u64::from(1.0f32.to_bits()) + 1
        );
        assert_eq!(add_odd(1.5, 2.5), 4.0);
        assert_eq!(
            F32.narrow(integer_odd((1 << 60) + 1), Rounding::Up),
            u64::from(2f32.powi(60).to_bits()) + 1
        );
    }
}
