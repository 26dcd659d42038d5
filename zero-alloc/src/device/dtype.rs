//! Element types.

use half::{bf16, f16};

/// The type of an element. Types will be added: a match in another crate needs a wildcard arm,
/// which should return an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// Unsigned bytes.
    U8,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision (sums and statistics).
    F64,
}

impl DType {
    /// The size of one element in bytes.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// The name in command lines and reports: `u8`, `fp16`, `bf16`, `fp32`, `fp64`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::F16 => "fp16",
            Self::Bf16 => "bf16",
            Self::F32 => "fp32",
            Self::F64 => "fp64",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type with a [`DType`]. Sealed: copies of slices rely on the size that the dtype has.
///
/// ```compile_fail
/// # use zero_alloc::device::{DType, Element};
/// #[derive(Clone, Copy)]
/// struct Wrong(u8);
/// // SAFETY: every value of a byte is valid.
/// unsafe impl bytemuck::Zeroable for Wrong {}
/// // SAFETY: one byte, without padding, and every value is valid.
/// unsafe impl bytemuck::Pod for Wrong {}
/// impl Element for Wrong {
///     const DTYPE: DType = DType::F32;
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no element of device memory",
    note = "elements are u8, half::f16, half::bf16, f32 and f64"
)]
pub trait Element: bytemuck::Pod + Send + Sync + sealed::Sealed {
    /// The dtype of the Rust type.
    const DTYPE: DType;
}

macro_rules! element {
    ($($t:ty => $d:ident),*) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$d;
        }
        const _: () = assert!(size_of::<$t>() == DType::$d.size_bytes());
    )*};
}
element!(u8 => U8, f16 => F16, bf16 => Bf16, f32 => F32, f64 => F64);
