//! Kernels.

use std::ffi::c_void;
use std::sync::Arc;

use super::CudaStream;
use super::driver::{Code, Entry};
use crate::device::DeviceError;

/// A handle of a loaded module. Dropping the last handle and the last [`Function`] unloads the
/// module, which must not happen before its kernels have run.
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

    /// Finds and loads the kernel of this name (as in the machine code: C++ names are mangled
    /// unless declared `extern "C"`).
    ///
    /// # Errors
    /// The module has no such kernel.
    pub fn function(&self, name: &str) -> Result<Function, DeviceError> {
        Ok(Function(Arc::new(Inner {
            name: name.into(),
            entry: Entry::find(&self.0, name)?,
        })))
    }
}

struct Inner {
    name: Box<str>,
    entry: Entry,
}

/// A handle of a kernel, which keeps the module loaded.
#[derive(Clone)]
pub struct Function(Arc<Inner>);

impl std::fmt::Debug for Function {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Function({})", self.0.name)
    }
}

impl Function {
    /// The kernel's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Allows launches with up to `bytes` of dynamic shared memory; without this call the limit is
    /// 48 KiB.
    ///
    /// # Errors
    /// The device has less shared memory.
    pub fn allow_shared_bytes(&self, bytes: u32) -> Result<(), DeviceError> {
        self.0.entry.allow_shared_bytes(bytes)
    }

    /// Enqueues the kernel on `stream`: `grid` blocks of `block` threads, each block with
    /// `shared_bytes` of dynamic shared memory. Wrap it in [`CudaStream::labelled`] to record it in
    /// the timeline.
    ///
    /// # Errors
    /// The error that poisoned the stream, or the driver refuses the launch, which poisons the
    /// stream.
    ///
    /// # Safety
    /// `args` point to values of the kernel's parameters, one each; the memory that the kernel
    /// accesses, and a handle of the kernel or its module, live until it has run; conflicting
    /// accesses are ordered by streams and events.
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
            unsafe {
                self.0
                    .entry
                    .launch(stream.queue(), grid, block, shared_bytes, args)
            }
        })
    }
}
