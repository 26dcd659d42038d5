//! Compiling, caching and loading of kernels, and the errors of each.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, Memory, Stream};
use zero_kernels::cuda::{
    Arch, Compile, CudaError, CudaKernels, KernelCache, KernelSource, Loader, Nvrtc, Target,
};
use zero_kernels::{KernelError, Kernels};

const LIMIT: Duration = Duration::from_secs(60);

/// NVRTC, or a fixed result instead, with a count of compilations.
struct Counting {
    nvrtc: Nvrtc,
    compiled: Arc<AtomicU32>,
    /// Returned instead of NVRTC's result.
    instead: Option<Result<Vec<u8>, CudaError>>,
}

// SAFETY: NVRTC's output, or bytes that the driver refuses at once.
unsafe impl Compile for Counting {
    fn identity(&self) -> String {
        "counting".into()
    }

    fn target(&self, arch: Arch) -> Result<Target, CudaError> {
        self.nvrtc.target(arch)
    }

    fn compile(&self, source: &KernelSource, target: Target) -> Result<Vec<u8>, CudaError> {
        self.compiled.fetch_add(1, Ordering::Relaxed);
        match &self.instead {
            Some(instead) => instead.clone(),
            None => Compile::compile(&self.nvrtc, source, target),
        }
    }
}

struct Setup {
    stream: CudaStream,
    kernels: CudaKernels,
    loader: Loader,
    compiled: Arc<AtomicU32>,
    _folder: tempfile::TempDir,
}

fn setup(instead: Option<Result<Vec<u8>, CudaError>>) -> Setup {
    // One for all tests: each new context takes a third of a second on a GPU.
    static DEVICE: LazyLock<CudaDevice> = LazyLock::new(|| CudaDevice::open(0).unwrap());
    let device = DEVICE.clone();
    let folder = tempfile::tempdir().unwrap();
    let compiled = Arc::<AtomicU32>::default();
    let compiler = Counting {
        nvrtc: Nvrtc::find().unwrap(),
        compiled: Arc::clone(&compiled),
        instead,
    };
    let loader =
        Loader::with_compiler(&device, Box::new(compiler), KernelCache::at(folder.path())).unwrap();
    let stream = device.create_stream("compute").unwrap();
    Setup {
        stream,
        kernels: CudaKernels::with_loader(loader.clone()),
        loader,
        compiled,
        _folder: folder,
    }
}

impl Setup {
    /// A launch of `elems / 2` elements.
    fn cast(&self, elems: usize) -> Result<(), KernelError> {
        let mut host = vec![0f64; elems];
        let id = self.loader.device().id();
        // SAFETY: never accessed: launches fail before they run, or are empty.
        let slice =
            unsafe { AnySlice::from_raw_parts(host.as_mut_ptr().cast(), elems, DType::F32, id) };
        self.kernels.cast(
            &self.stream,
            slice.slice(0..elems / 2),
            slice.slice(elems / 2..elems),
            1.0,
        )
    }

    fn compiled(&self) -> u32 {
        self.compiled.load(Ordering::Relaxed)
    }
}

mod cuda {
    use super::*;

    #[test]
    #[ignore = "needs a CUDA device"]
    fn warming_compiles_every_source_once() {
        let setup = setup(None);
        assert_eq!(setup.compiled(), 0, "nothing is compiled before it is used");
        setup.kernels.warm(&setup.stream, LIMIT).unwrap();
        assert_eq!(setup.compiled(), 15, "one per source");
        setup.kernels.clone().warm(&setup.stream, LIMIT).unwrap();
        assert_eq!(setup.compiled(), 15, "handles share what is loaded");
        // Other kernels of the same loader read the cached files, as another process would.
        CudaKernels::with_loader(setup.loader.clone())
            .warm(&setup.stream, LIMIT)
            .unwrap();
        assert_eq!(setup.compiled(), 15);
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn empty_launches_load_nothing() {
        let setup = setup(None);
        setup.cast(0).unwrap();
        setup.stream.synchronize(LIMIT).unwrap();
        assert_eq!(setup.compiled(), 0);
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn compile_error_leaves_the_stream_usable() {
        let source_name = "cast.cu".to_owned();
        let target = Target::Cubin(Arch(90));
        let log = "line 3: no".to_owned();
        let error = CudaError::Compilation {
            source_name,
            target,
            log,
        };
        let setup = setup(Some(Err(error.clone())));
        assert_eq!(setup.cast(8), Err(KernelError::Cuda(error.clone())));
        assert_eq!(
            setup.cast(8),
            Err(KernelError::Cuda(error)),
            "it is compiled again"
        );
        assert_eq!(setup.compiled(), 2);
        setup.stream.synchronize(LIMIT).unwrap();
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn bad_image_is_a_driver_error() {
        let setup = setup(Some(Ok(b"not an image\0".to_vec())));
        let error = setup.cast(8).unwrap_err();
        assert!(
            matches!(&error, KernelError::Device(DeviceError::Driver { .. })),
            "{error}"
        );
        setup.stream.synchronize(LIMIT).unwrap();
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn foreign_source_is_loaded_by_its_entries() {
        const FOREIGN: KernelSource =
            KernelSource::new("foreign.cu", "extern \"C\" __global__ void nothing() {}");
        let setup = setup(None);
        let functions = setup.loader.load(&FOREIGN, &["nothing"]).unwrap();
        let nothing = &functions["nothing"];
        // SAFETY: the kernel has no parameters and does nothing.
        unsafe { nothing.launch(&setup.stream, [1; 3], [32, 1, 1], 0, &mut []) }.unwrap();
        setup.stream.synchronize(LIMIT).unwrap();
        let error = setup
            .loader
            .load(&FOREIGN, &["nothing", "missing"])
            .unwrap_err();
        assert!(
            matches!(&error, KernelError::Device(DeviceError::Driver { .. })),
            "{error}"
        );
        assert!(error.to_string().contains("missing"), "{error}");
    }
}
