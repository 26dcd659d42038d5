//! The fused step on a framework's device pointers and stream: `fused_step` is the whole interface.
//!
//! Here the "framework" is a few allocations and a raw stream handle. Needs a GPU and NVRTC; prints
//! an error without them.

use std::error::Error;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use zero_alloc::cuda::{CudaDevice, interop};
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, DeviceSlice, Memory, Stream};
use zero_kernels::cuda::CudaKernels;
use zero_kernels::{
    AdamHyper, AdamScalars, KernelError, Kernels, Rounding, StepScalars, UpdateArgs, UpdateRule,
    Weights,
};

/// A framework's tensor: a pointer to device memory and a length.
#[derive(Clone, Copy)]
struct Tensor {
    pointer: *mut c_void,
    elems: usize,
}

impl Tensor {
    /// # Safety
    /// The memory holds `elems` values of `T` on the device while launches use it, and streams
    /// order the accesses.
    unsafe fn view<T>(self, device: &CudaDevice) -> DeviceSlice<T> {
        // SAFETY: the caller guarantees memory and order.
        unsafe { DeviceSlice::from_raw_parts(self.pointer.cast(), self.elems, device.id()) }
    }
}

const HYPER: AdamHyper = AdamHyper {
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    decoupled: true,
    bias_correction: true,
};

/// One AdamW step: fp32 master and moments, bf16 gradient in, bf16 parameter out.
///
/// # Safety
/// As for [`Tensor::view`], of fp32, bf16 and [`StepScalars`] in this order; `stream` is a stream
/// of the device.
unsafe fn fused_step(
    (device, kernels): (&CudaDevice, &CudaKernels),
    [master, first_moment, second_moment, grad, param, scalars]: [Tensor; 6],
    stream: *mut c_void,
) -> Result<(), KernelError> {
    // SAFETY: the caller passes a stream of the device.
    let stream = unsafe { interop::stream_from_raw(device, stream, "framework") }?;
    // SAFETY: the caller guarantees the memory of each tensor, with these types.
    let [master, first_moment, second_moment] =
        [master, first_moment, second_moment].map(|t| unsafe { t.view(device) });
    // SAFETY: as above.
    let [grad, param] = [grad, param].map(|t| unsafe { t.view::<half::bf16>(device) }.erase());
    // SAFETY: as above.
    let scalars = unsafe { scalars.view::<StepScalars>(device) };
    let args = UpdateArgs {
        weights: Weights::Fp32 {
            master,
            param_out: Some(param),
        },
        slots: vec![first_moment.into(), second_moment.into()],
        grad,
        scalars,
        weight_decay: HYPER.weight_decay,
        rounding: Rounding::Nearest,
    };
    let rule: Arc<dyn UpdateRule> = Arc::new(HYPER);
    kernels.update(&stream, &rule, args)
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = match CudaDevice::open(0) {
        Err(error @ DeviceError::NoDriver { .. }) => {
            println!("{error}");
            return Ok(());
        }
        opened => opened?,
    };

    let elems = 1000;
    let limit = Duration::from_secs(30);
    let kernels = CudaKernels::new(&device)?;
    let framework_stream = device.create_stream("framework's own")?;
    kernels.warm(&framework_stream, limit)?;

    // The framework's memory: master 1, moments 0, gradient 0.5, and the scalars of step 1.
    let master = vec![1f32; elems];
    let moment = vec![0f32; elems];
    let grad = vec![half::bf16::from_f32(0.5); elems];
    let param = vec![half::bf16::ZERO; elems];
    let scalars = AdamScalars::new(1, 1e-2, &HYPER, 1.0);

    let images: [&[u8]; 6] = [
        bytemuck::cast_slice(&master),
        bytemuck::cast_slice(&moment),
        bytemuck::cast_slice(&moment),
        bytemuck::cast_slice(&grad),
        bytemuck::cast_slice(&param),
        bytemuck::bytes_of(&scalars),
    ];

    let mut tensors = Vec::new();
    for image in images {
        let memory = device.allocate(image.len())?;
        // SAFETY: allocated above with this size.
        let bytes = unsafe {
            AnySlice::from_raw_parts(memory.as_ptr(), image.len(), DType::U8, device.id())
        };
        device.upload(&framework_stream, image, bytes, limit)?;
        tensors.push((memory, bytes));
    }

    let lens = [elems, elems, elems, elems, elems, 1];
    let tensor = |i: usize| Tensor {
        pointer: tensors[i].0.as_ptr().cast(),
        elems: lens[i],
    };

    // SAFETY: the memory above, used on this one stream, which is drained below.
    unsafe {
        fused_step(
            (&device, &kernels),
            [0, 1, 2, 3, 4, 5].map(tensor),
            interop::raw_stream(&framework_stream),
        )
    }?;

    let mut param = param;
    device.download(
        &framework_stream,
        tensors[4].1,
        bytemuck::cast_slice_mut(&mut param),
        limit,
    )?;
    framework_stream.synchronize(limit)?;
    println!("{}: {elems} parameters, 1 -> {}", device.name(), param[0]);

    for (memory, bytes) in tensors {
        // SAFETY: allocated above with this size; the stream is drained.
        unsafe { device.deallocate(memory, bytes.len()) };
    }

    Ok(())
}
