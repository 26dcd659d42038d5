//! Elements of a matrix in memory, read and written as fp32.

use half::{bf16, f16};

/// The supported types (`cudaDataType_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Storage {
    F32,
    F16,
    Bf16,
}

impl Storage {
    pub(crate) fn from_code(code: i32) -> Option<Self> {
        match code {
            0 => Some(Self::F32),
            2 => Some(Self::F16),
            14 => Some(Self::Bf16),
            _ => None,
        }
    }

    /// `x` rounded to the type, to nearest even.
    pub(crate) fn round(self, x: f32) -> f32 {
        match self {
            Self::F32 => x,
            Self::F16 => f16::from_f32(x).to_f32(),
            Self::Bf16 => bf16::from_f32(x).to_f32(),
        }
    }

    /// Bytes of an element.
    pub(crate) fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    /// Element `index` of the array at `base`.
    ///
    /// # Safety
    /// The array has this type and contains the element, and nothing writes it during the call.
    pub(crate) unsafe fn read(self, base: u64, index: usize) -> f32 {
        let at = std::ptr::with_exposed_provenance::<u8>(base as usize)
            .wrapping_add(index * self.bytes());
        let mut bytes = [0u8; 4];
        // SAFETY: the caller guarantees a readable element, of at most 4 bytes.
        unsafe { std::ptr::copy_nonoverlapping(at, bytes.as_mut_ptr(), self.bytes()) };
        let half = u16::from_le_bytes([bytes[0], bytes[1]]);
        match self {
            Self::F32 => f32::from_le_bytes(bytes),
            Self::F16 => f16::from_bits(half).to_f32(),
            Self::Bf16 => bf16::from_bits(half).to_f32(),
        }
    }

    /// Writes element `index` of the array at `base`, rounded to nearest even.
    ///
    /// # Safety
    /// The array has this type and contains the element, and nothing else accesses it during the
    /// call.
    pub(crate) unsafe fn write(self, base: u64, index: usize, value: f32) {
        let at = std::ptr::with_exposed_provenance_mut::<u8>(base as usize)
            .wrapping_add(index * self.bytes());
        let half = match self {
            Self::F32 => 0,
            Self::F16 => f16::from_f32(value).to_bits(),
            Self::Bf16 => bf16::from_f32(value).to_bits(),
        };
        let whole = value.to_le_bytes();
        let half = half.to_le_bytes();
        let source = if self == Self::F32 {
            whole.as_ptr()
        } else {
            half.as_ptr()
        };
        // SAFETY: the caller guarantees a writable element; the type's size is copied.
        unsafe { std::ptr::copy_nonoverlapping(source, at, self.bytes()) };
    }
}
