//! The facade on a device.

use std::any::Any;
use std::sync::Mutex;

use zero_alloc::Purpose;
use zero_alloc::cuda::CudaDevice;
use zero_alloc::device::{AnySlice, Device};
use zero_comm::{CallerMemory, PrefetchError, Solo};
use zero_kernels::Kernels;
use zero_kernels::cuda::CudaKernels;

use super::*;

/// Memory in the order of the compute stream, as a framework's.
struct InOrder<D: Device>(Pool<D>, D::Stream);

// SAFETY: blocks of a pool, allocated for the compute stream.
unsafe impl<D: Device> CallerMemory for InOrder<D> {
    fn allocate(
        &mut self,
        _unit: usize,
        elems: usize,
        dtype: DType,
    ) -> Result<(AnySlice, Box<dyn Any + Send + Sync>), PrefetchError> {
        let block = self.0.allocate(elems, dtype, Purpose::Workspace, &self.1)?;
        // SAFETY: the block is the owner, dropped in the order of its stream.
        let slice = unsafe { block.slice() };
        Ok((slice, Box::new(Mutex::new(block))))
    }
}

/// Steps on one rank of a device: losses and weights. Parameters are read through views. Units and
/// sums of gradients are in memory of the caller, if it `has_memory`.
fn run<D: Device>(
    device: &D,
    kernels: Arc<dyn Kernels<D>>,
    stage: ZeroStage,
    has_memory: bool,
) -> Result<(Vec<f64>, Vec<f32>), Error> {
    let pool = Pool::new(device.clone(), 1 << 28);
    let comm = Arc::new(Solo::new(device.clone()));
    let rank = Rank::new(comm, pool.clone(), kernels)?;
    let compute = rank.compute().clone();
    let mut zero = Zero::builder(rank)
        .stage(stage)
        .adamw(config())
        .micro_batches(2);
    for (unit, params) in UNITS {
        zero = zero.unit(unit, params.iter().map(|(name, len)| (*name, [*len])));
    }
    if has_memory {
        let memory = || InOrder(pool.clone(), compute.clone());
        zero = zero.gather_memory(memory()).gradient_memory(memory());
    }
    let mut zero = zero.build(init)?;

    let mut losses = Vec::new();
    for at in 0..4 {
        let mut step = zero.begin()?;
        for micro in 0..2 {
            let mut loss = 0.0;
            for (unit, params) in UNITS {
                step.backward(unit, |values, grads| -> Result<(), Error> {
                    for (name, len) in params {
                        let view = values.view(name)?;
                        let mut w = vec![0.0_f32; *len as usize];
                        // SAFETY: within the call, and before the view is dropped.
                        let slice = unsafe { view.slice() };
                        let bytes = bytemuck::cast_slice_mut(&mut w);
                        device.download(&compute, slice, bytes, LIMIT)?;
                        let (grad, of_param) = grad(&w, 2 * at + micro);
                        loss += of_param;
                        grads.set(name, grad)?;
                    }
                    Ok(())
                })?;
            }
            match micro {
                0 => step.next_micro_batch(loss)?,
                _ => {
                    losses.push(step.end(loss)?.loss());
                    break;
                }
            }
        }
    }
    let mut weights = Vec::new();
    zero.for_each_param(|_, _, values| {
        weights.extend(values);
        Ok::<_, FrameworkError>(())
    })?;
    Ok((losses, weights))
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_stages_train_as_the_host() {
    let device = CudaDevice::open(0).unwrap();
    let kernels: Arc<dyn Kernels<CudaDevice>> = Arc::new(CudaKernels::new(&device).unwrap());
    for stage in ZeroStage::ALL {
        let on_host = Arc::new(HostKernels::new(1).unwrap());
        let (losses, weights) = run(&HostDevice::new(), on_host, stage, false).unwrap();
        let on_cuda = run(&device, Arc::clone(&kernels), stage, false).unwrap();
        let in_order = run(&device, Arc::clone(&kernels), stage, true).unwrap();
        assert_eq!(in_order, on_cuda, "{stage}");
        for (got, expected) in on_cuda.0.iter().zip(&losses) {
            assert!(
                (got - expected).abs() < 1e-6 * expected,
                "{stage}: {got} {expected}"
            );
        }
        for (got, expected) in on_cuda.1.iter().zip(&weights) {
            assert!((got - expected).abs() < 1e-6, "{stage}: {got} {expected}");
        }
    }
}

/// The host cannot read memory of a device.
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_parameters_are_not_read_by_the_host() {
    let device = CudaDevice::open(0).unwrap();
    let comm = Arc::new(Solo::new(device.clone()));
    let kernels = Arc::new(CudaKernels::new(&device).unwrap());
    let rank = Rank::new(comm, Pool::new(device, 1 << 28), kernels).unwrap();
    let zero = Zero::builder(rank).unit("u", [("w", [4])]);
    let mut zero = zero.build(|_, _, _| {}).unwrap();
    let mut step = zero.begin().unwrap();
    let read = |params: &zero_optim::framework::Params<'_>| {
        Ok::<_, Error>(params.get::<f32>("w").map(drop).unwrap_err().to_string())
    };
    let error = step.forward("u", read).unwrap();
    assert!(error.starts_with("w is in memory of a device"), "{error}");
    step.end_without_update().unwrap();
}
