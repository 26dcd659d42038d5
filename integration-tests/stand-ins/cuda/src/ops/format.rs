//! Floating-point formats, and rounding to them.

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
impl Format {
    fn nan(self) -> u64 {
        // All ones except the sign: the canonical NaN of GPUs.
        (1 << (self.exponent_bits + self.fraction_bits)) - 1
    }

    fn infinity(self) -> u64 {
        ((1 << self.exponent_bits) - 1) << self.fraction_bits
    }

    /// Rounds to the nearest number of the format, ties to even, and returns the bits. A NaN becomes the canonical NaN.
    pub(crate) fn narrow(self, x: f64) -> u64 {
        if x.is_nan() {
            return self.nan();
        }
        let sign = u64::from(x.is_sign_negative()) << (self.exponent_bits + self.fraction_bits);
        sign | self.narrow_magnitude(x.abs())
    }

    fn narrow_magnitude(self, x: f64) -> u64 {
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

        let up = rest > half || (rest == half && kept & 1 == 1);
        let rounded = kept + u64::from(up);
        // A significand with its leading bit adds one to the exponent field, as does a carry from
        // rounding.
        let field = if kept >> self.fraction_bits == 0 {
            0
        } else {
            (scale + bias - 1) as u64
        };

        ((field << self.fraction_bits) + rounded).min(self.infinity())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_round_trip_and_f32_rounds_natively() {
        for bits in 0..=0xffffu64 {
            for format in [F16, BF16] {
                let value = format.widen(bits);
                if !value.is_nan() {
                    assert_eq!(format.narrow(value), bits);
                }
            }
        }

        let mut x = 1.0e-46f64;
        while x < 1.0e40 {
            for x in [x, -x] {
                assert_eq!(F32.narrow(x), u64::from((x as f32).to_bits()), "{x:e}");
            }
            x *= 1.001_234_567;
        }
    }

    #[test]
    fn ties_are_even_and_overflow_is_infinite() {
        // Between 1 and the next bf16, 1.0078125.
        assert_eq!(BF16.narrow(1.003_906_25), 0x3f80);
        assert_eq!(F16.narrow(65520.0), 0x7c00);
        assert_eq!(F16.narrow(65519.9), 0x7bff);
        assert_eq!(F16.narrow(f64::NAN), 0x7fff);
    }
}
