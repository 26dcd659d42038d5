//! PTX's types and state spaces.

/// A type, as in `add.s32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    Pred,
    Bits(u32),
    Unsigned(u32),
    Signed(u32),
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
}

impl Type {
    /// The type with this name, without the dot.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "pred" => Self::Pred,
            "b8" => Self::Bits(8),
            "b16" => Self::Bits(16),
            "b32" => Self::Bits(32),
            "b64" => Self::Bits(64),
            "u8" => Self::Unsigned(8),
            "u16" => Self::Unsigned(16),
            "u32" => Self::Unsigned(32),
            "u64" => Self::Unsigned(64),
            "s8" => Self::Signed(8),
            "s16" => Self::Signed(16),
            "s32" => Self::Signed(32),
            "s64" => Self::Signed(64),
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::Bf16,
            "bf16x2" => Self::Bf16x2,
            "f32" => Self::F32,
            "f64" => Self::F64,
            _ => return None,
        })
    }

    /// Width in bits; 1 for a predicate.
    pub(crate) fn bits(self) -> u32 {
        match self {
            Self::Pred => 1,
            Self::Bits(n) | Self::Unsigned(n) | Self::Signed(n) => n,
            Self::F16 | Self::Bf16 => 16,
            Self::F16x2 | Self::Bf16x2 | Self::F32 => 32,
            Self::F64 => 64,
        }
    }

    pub(crate) fn bytes(self) -> usize {
        (self.bits() as usize).div_ceil(8)
    }
}

/// A mask of the lowest `bits` bits.
pub(crate) fn mask_of(bits: u32) -> u64 {
    if bits >= 64 { !0 } else { (1 << bits) - 1 }
}

/// A state space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    /// Generic addresses are those of global memory: nothing else is converted to one.
    Global,
    Shared,
    Param,
}

impl Space {
    /// The space with this name, without the dot.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "global" => Self::Global,
            "shared" | "shared::cta" => Self::Shared,
            "param" | "param::entry" => Self::Param,
            _ => return None,
        })
    }
}
