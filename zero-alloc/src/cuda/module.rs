//! Kernels.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::CUfunction_attribute as Attribute;

use super::CudaStream;
use super::driver::{Code, Entry};
use crate::device::DeviceError;

/// A loaded module. Cloning gives another handle of the same one; it is unloaded when the last handle and the last
/// [`Function`] of it are gone, which must not be before its kernels have run.
#[derive(Clone)]
pub struct Module(Arc<Code>);

impl std::fmt::Debug for Module {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Module")
    }
}

impl Module {
    pub(super) fn new(code: Code) -> Self {
        Self(Arc::new(code))
    }

    /// The kernel of this name (as in the machine code: C++ names are mangled unless declared `extern "C"`).
    ///
    /// # Errors
    /// There is none.
    pub fn function(&self, name: &str) -> Result<Function, DeviceError> {
        // Asking loads it now rather than at its first launch, where loading may wait for the whole device.
        let entry = Entry::find(&self.0, name)?;
        let registers = entry.attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?;
        let local_bytes = entry.attribute(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?;
        Ok(Function(Arc::new(Inner { name: name.into(), entry, registers, local_bytes })))
    }
}

struct Inner {
    name: Box<str>,
    entry: Entry,
    registers: u32,
    local_bytes: u32,
}

/// A kernel. Cloning gives another handle of the same one.
#[derive(Clone)]
pub struct Function(Arc<Inner>);

impl std::fmt::Debug for Function {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Function({})", self.0.name)
    }
}

impl Function {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Registers of a thread.
    pub fn registers(&self) -> u32 {
        self.0.registers
    }

    /// Bytes of local memory of a thread: what is spilled from registers, and arrays.
    pub fn local_bytes(&self) -> u32 {
        self.0.local_bytes
    }

    /// Lets launches ask for up to `bytes` of dynamic shared memory, beyond the 48 KiB that need no leave.
    ///
    /// # Errors
    /// The device has less.
    pub fn allow_shared_bytes(&self, bytes: u32) -> Result<(), DeviceError> {
        self.0.entry.allow_shared_bytes(bytes)
    }

    /// How many blocks of `threads` threads, each with `shared_bytes` of dynamic shared memory, run on one
    /// multiprocessor at once.
    ///
    /// # Errors
    /// The driver failed.
    pub fn blocks_per_multiprocessor(&self, threads: u32, shared_bytes: u32) -> Result<u32, DeviceError> {
        self.0.entry.blocks_per_multiprocessor(threads, shared_bytes)
    }

    /// Enqueues the kernel on `stream`: `grid` blocks of `block` threads, each block with `shared_bytes` of dynamic
    /// shared memory. [`CudaStream::labelled`] around it gives it a place in the timeline.
    ///
    /// # Errors
    /// What poisoned the stream earlier, or the driver refuses the launch; that poisons the stream.
    ///
    /// # Safety
    /// `args` point to values of the kernel's parameter types, as many as it has; what the kernel touches, and a
    /// handle of it or its module, live until it has run; conflicting accesses are ordered by streams and events.
    pub unsafe fn launch(
        &self,
        stream: &CudaStream,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        args: &mut [*mut c_void],
    ) -> Result<(), DeviceError> {
        stream.attempt(&self.0.name, || {
            // SAFETY: the caller's promise.
            unsafe { self.0.entry.launch(stream.queue(), grid, block, shared_bytes, args) }
        })
    }

    pub(super) fn entry(&self) -> &Entry {
        &self.0.entry
    }
}
