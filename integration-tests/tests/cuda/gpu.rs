//! A device for the tests, values, and tolerances.

use std::sync::LazyLock;

use half::{bf16, f16};
use zero_alloc::cuda::CudaDevice;
use zero_alloc::device::{AnySlice, DType, DeviceSlice};
use zero_kernels::cuda::Loader;
use zero_models::cuda::OpKernels;

pub(crate) use crate::arrays::{Arrays, LIMIT};

pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// The first GPU, one for all tests: each new context takes a third of a second on a GPU.
pub(crate) fn device() -> CudaDevice {
    static DEVICE: LazyLock<CudaDevice> = LazyLock::new(|| CudaDevice::open(0).unwrap());
    DEVICE.clone()
}

/// The first device.
pub(crate) type Gpu = Arrays<CudaDevice>;

impl Gpu {
    pub(crate) fn open() -> Self {
        Self::on(device())
    }

    /// Whether this is a GPU and not a stand-in, so that tests can use large sizes.
    pub(crate) fn is_real(&self) -> bool {
        !self.device.name().contains("stand-in")
    }

    /// Elements that are NaN.
    pub(crate) fn fresh(&self, elems: usize, dtype: DType) -> AnySlice {
        self.put(&vec![f32::NAN; elems], dtype)
    }

    pub(crate) fn words(&self, values: &[u32]) -> DeviceSlice<u32> {
        let bytes = self.bytes(bytemuck::cast_slice(values), values.len() * 4, DType::U8);
        // SAFETY: the length of `values`, at the start of a block; held as above.
        unsafe { DeviceSlice::from_raw_parts(bytes.as_ptr().cast(), values.len(), bytes.device()) }
    }

    /// All kernels, with those of dropout.
    pub(crate) fn kernels(&self, dtype: DType) -> OpKernels {
        OpKernels::load(&Loader::new(&self.device).unwrap(), dtype, true).unwrap()
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
