//! From a source to kernels that can be launched.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use zero_alloc::cuda::{CudaDevice, Function};

use super::{Arch, Compile, KernelCache, Nvrtc, Source};
use crate::KernelError;

/// The kernels of one source, by name.
pub type Functions = HashMap<&'static str, Function>;

/// Compiles sources for one device, or takes them from disk, and loads them. Cloning gives another handle of the same
/// one.
#[derive(Clone)]
pub struct Loader(Arc<Inner>);

struct Inner {
    device: CudaDevice,
    compiler: Box<dyn Compile + Send + Sync>,
    cache: KernelCache,
    /// One source at a time: ranks of a process that start together compile each only once.
    loading: Mutex<()>,
}

impl fmt::Debug for Loader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader").field("device", &self.0.device).field("cache", &self.0.cache).finish_non_exhaustive()
    }
}

impl Loader {
    /// Compiles by NVRTC, and keeps kernels in the user's folder ([`KernelCache::of_user`]).
    ///
    /// # Errors
    /// NVRTC is missing, or knows nothing that the device could run.
    pub fn new(device: &CudaDevice) -> Result<Self, KernelError> {
        Self::with_compiler(device, Box::new(Nvrtc::find()?), KernelCache::of_user())
    }

    /// Compiles by `compiler`, and keeps kernels in `cache`.
    ///
    /// # Errors
    /// The compiler knows nothing that the device could run.
    pub fn with_compiler(
        device: &CudaDevice,
        compiler: Box<dyn Compile + Send + Sync>,
        cache: KernelCache,
    ) -> Result<Self, KernelError> {
        compiler.target(Arch::of_capability(device.arch()))?;
        Ok(Self(Arc::new(Inner { device: device.clone(), compiler, cache, loading: Mutex::new(()) })))
    }

    /// The device.
    pub fn device(&self) -> &CudaDevice {
        &self.0.device
    }

    /// The kernels `entries` of `source`, loaded. Loading synchronises with the device: it must not happen while a
    /// collective waits for another rank of the process.
    ///
    /// # Errors
    /// The source does not compile, the driver does not take it, or it has no such kernel.
    pub fn load(&self, source: &Source, entries: &[&'static str]) -> Result<Functions, KernelError> {
        let inner = &*self.0;
        let _one_at_a_time = inner.loading.lock().unwrap_or_else(PoisonError::into_inner);
        let compiled = inner.cache.get(&*inner.compiler, source, Arch::of_capability(inner.device.arch()))?;
        let module = inner.device.load_module(&compiled.image)?;
        entries.iter().map(|&name| Ok((name, module.function(name)?))).collect()
    }
}
