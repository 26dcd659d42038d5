//! Compiling sources and loading their kernels on a device.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use zero_alloc::cuda::{CudaDevice, Function};

use super::{Arch, Compile, KernelCache, KernelSource, Nvrtc};
use crate::KernelError;

/// The kernels of one source, by name.
pub type Functions = HashMap<&'static str, Function>;

/// Compiles sources for one device, or reads their images from the cache, and loads them. A clone
/// is another handle.
#[derive(Clone)]
pub struct Loader(Arc<Inner>);

struct Inner {
    device: CudaDevice,
    compiler: Box<dyn Compile + Send + Sync>,
    cache: KernelCache,
    /// Held while a source is loaded, so that ranks of a process that start together compile each
    /// source only once.
    loading: Mutex<()>,
}

impl fmt::Debug for Loader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader")
            .field("device", &self.0.device)
            .field("cache", &self.0.cache)
            .finish_non_exhaustive()
    }
}

impl Loader {
    /// Compiles with NVRTC and caches kernels in the user's folder ([`KernelCache::of_user`]).
    ///
    /// # Errors
    /// NVRTC is missing, or supports no architecture that the device can run.
    pub fn new(device: &CudaDevice) -> Result<Self, KernelError> {
        Self::with_compiler(device, Box::new(Nvrtc::find()?), KernelCache::of_user())
    }

    /// Compiles with `compiler` and caches kernels in `cache`.
    ///
    /// # Errors
    /// The compiler supports no architecture that the device can run.
    pub fn with_compiler(
        device: &CudaDevice,
        compiler: Box<dyn Compile + Send + Sync>,
        cache: KernelCache,
    ) -> Result<Self, KernelError> {
        compiler.target(Arch::of_capability(device.arch()))?;
        Ok(Self(Arc::new(Inner {
            device: device.clone(),
            compiler,
            cache,
            loading: Mutex::new(()),
        })))
    }

    /// The device for which modules are loaded.
    pub fn device(&self) -> &CudaDevice {
        &self.0.device
    }

    /// Loads the kernels `entries` of `source`. Loading synchronises with the device, so it must
    /// not happen while a collective waits for another rank of the process.
    ///
    /// # Errors
    /// The source does not compile, the driver rejects the image, or a kernel is missing.
    pub fn load(
        &self,
        source: &KernelSource,
        entries: &[&'static str],
    ) -> Result<Functions, KernelError> {
        let inner = &*self.0;
        let _one_at_a_time = inner.loading.lock().unwrap_or_else(PoisonError::into_inner);
        let image = inner.cache.get(
            &*inner.compiler,
            source,
            Arch::of_capability(inner.device.arch()),
        )?;
        // SAFETY: the compiler's output, or the same bytes from the cache, which checks length and
        // checksum.
        let module = unsafe { inner.device.load_module(&image) }?;
        // Never unloaded: the operations that launch its kernels are safe to call just before the
        // last handle is dropped.
        std::mem::forget(module.clone());
        entries
            .iter()
            .map(|&name| Ok((name, module.function(name)?)))
            .collect()
    }
}
