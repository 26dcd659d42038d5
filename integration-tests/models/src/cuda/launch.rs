//! The loaded kernels for one type of storage, and their launches.

use std::ffi::c_void;

use zero_alloc::cuda::{CudaStream, Function};
use zero_alloc::device::{AnySlice, DType, DeviceError, DeviceId, DeviceSlice, Memory};
use zero_kernels::cuda::{Arch, Functions, Loader, Span};

use super::error::OpError;
use super::{KernelFile, kernel_files};

/// Threads of a block of an elementwise kernel (`THREADS` of the prelude).
pub(super) const THREADS: u32 = 256;
/// Maximum blocks of a kernel with a grid-stride loop: enough for the largest devices.
const MAX_BLOCKS: u64 = 132 * 16;

/// The kernels for activations of one type, loaded on a device.
pub struct OpKernels {
    device: DeviceId,
    dtype: DType,
    arch: Arch,
    functions: Functions,
}

impl std::fmt::Debug for OpKernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "OpKernels({}, {})", self.dtype, self.arch)
    }
}

impl OpKernels {
    /// All kernels for `dtype` that the loader's device can run; those that only dropout needs if
    /// `dropout` is set.
    ///
    /// # Errors
    /// There are no kernels for `dtype`, or they cannot be compiled or loaded.
    pub fn load(loader: &Loader, dtype: DType, dropout: bool) -> Result<Self, OpError> {
        let arch = Arch::of_capability(loader.device().arch());
        let mut functions = Functions::new();
        let needed = |file: &&KernelFile| file.oldest <= arch && (dropout || !file.dropout);
        for file in kernel_files(dtype)?.iter().filter(needed) {
            functions.extend(loader.load(&file.source, file.entries)?);
        }
        Ok(Self {
            device: loader.device().id(),
            dtype,
            arch,
            functions,
        })
    }

    /// The type of activations and parameters.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub(super) fn function(&self, entry: &str) -> Result<&Function, OpError> {
        let missing = || OpError::NoKernel {
            entry: entry.to_owned(),
            dtype: self.dtype,
        };
        self.functions.get(entry).ok_or_else(missing)
    }

    /// The address of an argument of the kernels' own type.
    pub(super) fn stored(
        &self,
        what: &'static str,
        slice: AnySlice,
        len: usize,
    ) -> Result<Arg, OpError> {
        if slice.dtype() != self.dtype {
            return Err(OpError::DType {
                what,
                expected: self.dtype,
                got: slice.dtype(),
            });
        }
        super::error::check_len(what, slice.len(), len)?;
        Ok(slice.into())
    }

    /// Enqueues `entry` on `stream`; `op` is its name in errors and timelines.
    ///
    /// # Errors
    /// There is no such kernel, the stream or a slice is of another device, or the stream failed.
    ///
    /// # Safety
    /// `args` are the kernel's parameters in order, and it accesses only elements within the slices
    /// among them.
    pub(super) unsafe fn launch<const N: usize>(
        &self,
        stream: &CudaStream,
        op: &'static str,
        entry: &str,
        shape: Shape,
        args: [Arg; N],
    ) -> Result<(), OpError> {
        let function = self.function(entry)?;
        stream.check_device(op, self.device)?;
        let other = args
            .iter()
            .find_map(|arg| arg.device.filter(|&device| !self.device.accesses(device)));

        if let Some(got) = other {
            return Err(DeviceError::AnotherDevice {
                what: op,
                expected: self.device,
                got,
            }
            .into());
        }

        let mut args = args;
        let mut pointers = args
            .each_mut()
            .map(|arg| (&raw mut arg.value).cast::<c_void>());
        let Shape {
            grid,
            block,
            shared_bytes,
        } = shape;

        let blocks = [block, 1, 1];
        let launch = || {
            // SAFETY: each pointer is to a value of the parameter's type (the caller's promise; the
            // low bytes of an `Arg` are its value); the slices' makers promised ordered accesses.
            unsafe { function.launch(stream, grid, blocks, shared_bytes, &mut pointers) }
        };
        Ok(stream.labelled(op, launch)?)
    }
}

/// The blocks of a launch, the threads of each, and their dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) grid: [u32; 3],
    pub(super) block: u32,
    pub(super) shared_bytes: u32,
}

impl Shape {
    /// `blocks` blocks of `block` threads.
    pub(super) fn blocks(blocks: u32, block: u32) -> Self {
        Self {
            grid: [blocks, 1, 1],
            block,
            shared_bytes: 0,
        }
    }

    /// The blocks of a grid-stride loop over `items` items.
    pub(super) fn over(items: u64) -> Self {
        Self::blocks(
            items.div_ceil(u64::from(THREADS)).clamp(1, MAX_BLOCKS) as u32,
            THREADS,
        )
    }
}

/// A kernel parameter. Its bytes are the first ones of `value`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arg {
    value: [u64; 2],
    /// Of a slice that is not empty.
    device: Option<DeviceId>,
}

impl Arg {
    fn number(x: u64) -> Self {
        Self {
            value: [x, 0],
            device: None,
        }
    }

    /// A structure of four words.
    pub(super) fn words(words: [u32; 4]) -> Self {
        Self {
            value: bytemuck::cast(words),
            device: None,
        }
    }
}

impl From<u32> for Arg {
    fn from(x: u32) -> Self {
        Self::number(x.into())
    }
}

impl From<u64> for Arg {
    fn from(x: u64) -> Self {
        Self::number(x)
    }
}

impl From<f32> for Arg {
    fn from(x: f32) -> Self {
        x.to_bits().into()
    }
}

impl From<AnySlice> for Arg {
    fn from(slice: AnySlice) -> Self {
        let device = (!slice.is_empty()).then_some(slice.device());
        Self {
            device,
            ..Self::number(slice.as_ptr().expose_provenance() as u64)
        }
    }
}

impl<T> From<DeviceSlice<T>> for Arg {
    fn from(slice: DeviceSlice<T>) -> Self {
        let device = (!slice.is_empty()).then_some(slice.device());
        Self {
            device,
            ..Self::number(slice.as_ptr().expose_provenance() as u64)
        }
    }
}

impl From<Span> for Arg {
    fn from(span: Span) -> Self {
        Self {
            value: bytemuck::cast(span),
            device: None,
        }
    }
}

// In little-endian order the low bytes of a number come first.
const _: () = assert!(cfg!(target_endian = "little") && size_of::<Span>() == 16);

/// Columns of a thread in rows of `n` elements: 8 if all `slices` allow 16-byte accesses, else 1.
pub(super) fn columns(n: usize, slices: &[AnySlice]) -> usize {
    let aligned = |s: &AnySlice| s.as_ptr().addr().is_multiple_of(16);
    if n.is_multiple_of(8) && slices.iter().all(aligned) {
        8
    } else {
        1
    }
}

/// A size as a kernel's argument.
pub(super) fn size(what: &'static str, n: usize) -> Result<u32, OpError> {
    u32::try_from(n)
        .ok()
        .filter(|&n| n <= i32::MAX as u32)
        .ok_or(OpError::Size {
            what,
            got: n,
            takes: "less than 2^31",
        })
}
