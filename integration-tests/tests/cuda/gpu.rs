//! A device for the tests, with uploads and downloads of arrays.

use std::sync::LazyLock;
use std::time::Duration;

use half::{bf16, f16};
use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Stream};
use zero_alloc::{Block, Pool, Purpose};
use zero_kernels::cuda::Loader;
use zero_models::cuda::OpKernels;

pub(crate) const LIMIT: Duration = Duration::from_secs(300);
pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// The first GPU, one for all tests: each new context takes a third of a second on a GPU.
pub(crate) fn device() -> CudaDevice {
    static DEVICE: LazyLock<CudaDevice> = LazyLock::new(|| CudaDevice::open(0).unwrap());
    DEVICE.clone()
}

/// The first device, with a stream and a pool. It owns the arrays of a test.
pub(crate) struct Gpu {
    pub(crate) device: CudaDevice,
    pub(crate) stream: CudaStream,
    pub(crate) pool: Pool<CudaDevice>,
    held: std::sync::Mutex<Vec<Block<CudaDevice>>>,
}

impl Gpu {
    pub(crate) fn open() -> Self {
        let device = device();
        let stream = device.create_stream("test").unwrap();
        Self {
            pool: Pool::new(device.clone(), usize::MAX),
            device,
            stream,
            held: Default::default(),
        }
    }

    /// Whether this is a GPU and not a stand-in, so that tests can use large sizes.
    pub(crate) fn is_real(&self) -> bool {
        !self.device.name().contains("stand-in")
    }

    /// All kernels, with those of dropout.
    pub(crate) fn kernels(&self, dtype: DType) -> OpKernels {
        OpKernels::load(&Loader::new(&self.device).unwrap(), dtype, true).unwrap()
    }

    fn bytes(&self, bytes: &[u8], elems: usize, dtype: DType) -> AnySlice {
        let block = self
            .pool
            .allocate(elems, dtype, Purpose::Workspace, &self.stream)
            .unwrap();
        // SAFETY: held to the end of the test, which drains the one stream that uses it.
        let slice = unsafe { block.slice() };
        self.held.lock().unwrap().push(block);
        self.device
            .upload(&self.stream, bytes, slice, LIMIT)
            .unwrap();
        slice
    }

    /// `values` on the device, rounded to `dtype`.
    pub(crate) fn put(&self, values: &[f32], dtype: DType) -> AnySlice {
        let bytes: Vec<u8> = match dtype {
            DType::Bf16 => values
                .iter()
                .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
                .collect(),
            DType::F16 => values
                .iter()
                .flat_map(|v| f16::from_f32(*v).to_le_bytes())
                .collect(),
            _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        };
        self.bytes(&bytes, values.len(), dtype)
    }

    /// Elements that are NaN.
    pub(crate) fn fresh(&self, elems: usize, dtype: DType) -> AnySlice {
        self.put(&vec![f32::NAN; elems], dtype)
    }

    pub(crate) fn floats(&self, values: &[f32]) -> DeviceSlice<f32> {
        self.put(values, DType::F32).typed().unwrap()
    }

    pub(crate) fn zeros(&self, elems: usize) -> DeviceSlice<f32> {
        self.floats(&vec![0.0; elems])
    }

    pub(crate) fn words(&self, values: &[u32]) -> DeviceSlice<u32> {
        let bytes = self.bytes(bytemuck::cast_slice(values), values.len() * 4, DType::U8);
        // SAFETY: the length of `values`, at the start of a block; held as above.
        unsafe { DeviceSlice::from_raw_parts(bytes.as_ptr().cast(), values.len(), bytes.device()) }
    }

    /// One fp64.
    pub(crate) fn double(&self, value: f64) -> DeviceSlice<f64> {
        let bytes = self.bytes(&value.to_le_bytes(), 8, DType::U8);
        // SAFETY: eight bytes at the start of a block; held as above.
        unsafe { DeviceSlice::from_raw_parts(bytes.as_ptr().cast(), 1, bytes.device()) }
    }

    pub(crate) fn get(&self, slice: AnySlice) -> Vec<f32> {
        let mut bytes = vec![0u8; slice.len_bytes()];
        self.device
            .download(&self.stream, slice, &mut bytes, LIMIT)
            .unwrap();
        let halves = || {
            bytes
                .chunks_exact(2)
                .map(|b| u16::from_le_bytes(b.try_into().unwrap()))
        };
        match slice.dtype() {
            DType::Bf16 => halves().map(|b| bf16::from_bits(b).to_f32()).collect(),
            DType::F16 => halves().map(|b| f16::from_bits(b).to_f32()).collect(),
            _ => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                .collect(),
        }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let _ = self.stream.synchronize(LIMIT);
    }
}

/// Reproducible values in -1..1.
pub(crate) fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut x = (seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// `values` rounded to `dtype`, in fp64.
pub(crate) fn rounded(values: &[f32], dtype: DType) -> Vec<f64> {
    let round = |v: &f32| match dtype {
        DType::Bf16 => bf16::from_f32(*v).to_f64(),
        DType::F16 => f16::from_f32(*v).to_f64(),
        _ => f64::from(*v),
    };
    values.iter().map(round).collect()
}

/// Maximum error of a result relative to its norm. For 16-bit types: half a unit in the last place
/// for the result, and as much again for the roundings within an operation.
pub(crate) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::Bf16 => 2.0 * 2f64.powi(-9),
        DType::F16 => 2.0 * 2f64.powi(-12),
        _ => 2e-6,
    }
}

/// ‖got - want‖ / ‖want‖.
pub(crate) fn relative_error(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let norm = |it: &mut dyn Iterator<Item = f64>| it.map(|x| x * x).sum::<f64>().sqrt();
    let diff = norm(&mut got.iter().zip(want).map(|(g, w)| f64::from(*g) - w));
    diff / norm(&mut want.iter().copied()).max(1e-3)
}

pub(crate) fn close(got: &[f32], want: &[f64], tolerance: f64, what: &str) {
    let error = relative_error(got, want);
    // NaN is not within any tolerance.
    assert!(
        error <= tolerance,
        "{what}: relative error {error:e}, {tolerance:e} allowed"
    );
}
