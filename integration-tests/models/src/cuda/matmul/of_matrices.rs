//! Products for the Newton-Schulz iterations of [`CudaKernels`](zero_kernels::cuda::CudaKernels).

use std::sync::Arc;

use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DType, DeviceError, DeviceSlice, Memory};
use zero_kernels::KernelError;
use zero_kernels::cuda::{MatrixProduct, MatrixProducts};

use super::{LEAST_WORKSPACE_BYTES, Matmul, Matrix, OpError, Product};

/// Bytes of workspace of each product.
pub const PRODUCTS_WORKSPACE_BYTES: usize = LEAST_WORKSPACE_BYTES as usize;

/// Products by the algorithm that the library proposes first, so the same on all cards of a kind.
#[derive(Debug)]
pub struct CublasLtProducts(Matmul);

impl CublasLtProducts {
    /// Loads the library.
    ///
    /// # Errors
    /// It was not found, or does not support this device.
    pub fn load(device: &CudaDevice) -> Result<Arc<dyn MatrixProducts>, KernelError> {
        // SAFETY: it has no elements.
        let none =
            unsafe { AnySlice::from_raw_parts(std::ptr::null_mut(), 0, DType::U8, device.id()) };
        let matmul = Matmul::with_limit(device, none, PRODUCTS_WORKSPACE_BYTES);
        Ok(Arc::new(Self(matmul.map_err(kernel_error)?)))
    }
}

fn kernel_error(error: OpError) -> KernelError {
    match error {
        OpError::Kernel(error) => error,
        OpError::Device(error) => error.into(),
        error => {
            let message =
                format!("{error}; Muon needs products in bf16: use AdamW where there are none");
            let call = "a product of matrices";
            DeviceError::Driver { call, message }.into()
        }
    }
}

// SAFETY: `Matmul` checks lengths and devices, also of the workspace, and enqueues one product.
unsafe impl MatrixProducts for CublasLtProducts {
    fn workspace_bytes(&self) -> usize {
        PRODUCTS_WORKSPACE_BYTES
    }

    fn enqueue(
        &self,
        stream: &CudaStream,
        product: &MatrixProduct,
        workspace: AnySlice,
    ) -> Result<(), KernelError> {
        let [m, n, k] = product.sizes;
        let factor = |data: DeviceSlice<_>, [rows, cols]: [usize; 2], transposed| match transposed {
            false => Matrix::new(data.erase(), cols),
            true => Matrix::new(data.erase(), rows).t(),
        };
        let left = factor(product.left, [m, k], product.transposed[0]);
        let right = factor(product.right, [k, n], product.transposed[1]);
        let result = |data: DeviceSlice<_>| Matrix::new(data.erase(), n);
        let of_matmul = Product::new(left, right, result(product.out)).times(product.scale);
        let of_matmul = match product.add {
            Some(add) => of_matmul.onto(result(add), product.add_scale),
            None => of_matmul,
        };
        let run = self.0.run_in(stream, &of_matmul, workspace);
        run.map_err(kernel_error)
    }
}
