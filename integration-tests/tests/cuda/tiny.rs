//! gpt2-tiny with PyTorch's weights, tokens and micro-batches, on the device and on the host.

use std::collections::HashMap;

use zero_alloc::Pool;
use zero_alloc::device::{AnySlice, DType, Device, DeviceId, DeviceSlice, Element};
use zero_alloc::host::HostDevice;
use zero_models::cuda::cross_entropy::stride_elems;
use zero_models::gpt2;
use zero_models::gpt2::config::GptConfig;
use zero_models::ops::Threads;
use zero_models::{GpuModel, ModelConfig, ModelOptions};
use zero_trainer::{Batch, Grad, ModelError};

use crate::gpu::{Gpu, LIMIT};
use integration_tests::data;
use integration_tests::{tensors, tokens};

pub(crate) const BATCH: usize = 4;
pub(crate) const SEQ: usize = 32;
/// Micro-batches of a step.
pub(crate) const ACCUM: usize = 2;

pub(crate) fn config() -> GptConfig {
    let text = std::fs::read_to_string(data("model/config.json")).unwrap();
    match ModelConfig::from_hf_json(&text).unwrap() {
        (ModelConfig::Gpt2(config), _) => config,
        (other, _) => panic!("{other:?}"),
    }
}

/// PyTorch's initial weights, a flat parameter for each unit.
pub(crate) fn weights() -> Vec<Vec<f32>> {
    let all: HashMap<String, Vec<f32>> = tensors("model/model.safetensors").into_iter().collect();
    let flat =
        |u: zero_shard::UnitSpec| u.params.iter().flat_map(|p| all[&p.name].clone()).collect();
    config().units().into_iter().map(flat).collect()
}

pub(crate) fn options(dtype: DType, activation_checkpointing: bool) -> ModelOptions {
    ModelOptions {
        micro_batch: BATCH,
        seq_len: SEQ,
        sequence_ranks: 1,
        tensor_ranks: 1,
        partition_activations: false,
        sequence_parallel: false,
        dtype,
        activation_checkpointing,
        offload_activations: false,
        matmul_timing: false,
        recompute_gelu: false,
    }
}

/// The inputs and targets of micro-batch `micro`, counted over all steps.
pub(crate) fn batch(micro: usize) -> Batch {
    let tokens = tokens();
    let rows = (0..BATCH).map(|b| (micro * BATCH + b) * SEQ);
    let pairs = rows
        .flat_map(|at| at..at + SEQ)
        .map(|at| (tokens[at], tokens[at + 1]));
    let (inputs, targets): (Vec<u32>, Vec<u32>) = pairs.unzip();
    Batch::plain(inputs, targets)
}

/// The model with its parameters and gradients on the device.
pub(crate) struct OnGpu<'a> {
    gpu: &'a Gpu,
    pub(crate) model: Box<dyn GpuModel>,
    pub(crate) params: Vec<AnySlice>,
    pub(crate) grads: Vec<Grad>,
    scale: DeviceSlice<f64>,
}

impl<'a> OnGpu<'a> {
    pub(crate) fn new(
        gpu: &'a Gpu,
        options: ModelOptions,
        logits_rows: usize,
        weights: &[Vec<f32>],
    ) -> Self {
        let params: Vec<_> = weights.iter().map(|w| gpu.put(w, options.dtype)).collect();
        let grads = weights
            .iter()
            .map(|w| Grad::Add(gpu.zeros(w.len())))
            .collect();
        let model = ModelConfig::from(config())
            .on_cuda_with_logits(options, Some(logits_rows), &gpu.pool, &gpu.stream)
            .unwrap();
        Self {
            gpu,
            model,
            params,
            grads,
            scale: gpu.double(1.0 / ACCUM as f64),
        }
    }

    pub(crate) fn forward(&mut self) -> Result<(), ModelError> {
        for (i, pass) in gpt2::passes(&config()).iter().enumerate() {
            let reads: Vec<_> = pass.forward_reads.iter().map(|&u| self.params[u]).collect();
            self.model.forward(&self.gpu.stream, i, &reads)?;
        }
        Ok(())
    }

    pub(crate) fn backward(&mut self) -> Result<(), ModelError> {
        for (i, pass) in gpt2::passes(&config()).iter().enumerate().rev() {
            let reads: Vec<_> = pass
                .backward_reads
                .iter()
                .map(|&u| self.params[u])
                .collect();
            let adds: Vec<_> = pass.grads.iter().map(|&u| self.grads[u]).collect();
            self.model
                .backward(&self.gpu.stream, i, &reads, &adds, self.scale)?;
        }
        Ok(())
    }

    /// Computes the gradients and the loss of step `step`.
    pub(crate) fn step(&mut self, step: usize) {
        let device = &self.gpu.device;
        let stream = &self.gpu.stream;
        // SAFETY: used on the stream of the passes.
        device
            .fill_zero(stream, unsafe { self.model.loss() }.erase())
            .unwrap();
        self.grads
            .iter()
            .for_each(|g| device.fill_zero(stream, g.elements()).unwrap());
        (step * ACCUM..(step + 1) * ACCUM).for_each(|micro| self.micro_batch(micro));
    }

    /// Computes the gradients of micro-batch `micro`, and adds its loss.
    pub(crate) fn micro_batch(&mut self, micro: usize) {
        let batch = batch(micro);
        self.model.set_batch(&self.gpu.stream, &batch).unwrap();
        self.forward().unwrap();
        self.backward().unwrap();
    }

    /// Makes blocks write their gradients in `dtype`, over elements that are not numbers.
    pub(crate) fn write_blocks(&mut self, dtype: DType) {
        for pass in 1..self.grads.len() - 1 {
            assert!(self.model.writes_grad(pass, pass));
            self.grads[pass] = Grad::Write(
                self.gpu
                    .put(&vec![f32::NAN; self.grads[pass].elements().len()], dtype),
            );
        }
    }

    pub(crate) fn loss(&self) -> f64 {
        let mut sum = [0.0f64];
        let bytes = bytemuck::cast_slice_mut(&mut sum);
        // SAFETY: used on the stream of the passes.
        let loss = unsafe { self.model.loss() };
        self.gpu
            .device
            .download(&self.gpu.stream, loss.erase(), bytes, LIMIT)
            .unwrap();
        sum[0] / ACCUM as f64
    }

    pub(crate) fn gradients(&self) -> Vec<Vec<f32>> {
        self.grads
            .iter()
            .map(|g| self.gpu.get(g.elements()))
            .collect()
    }

    pub(crate) fn logits(&self) -> Vec<f32> {
        let vocab = config().vocab_size;
        let rows = BATCH * SEQ;
        let stride = stride_elems(vocab);
        let out = self.gpu.fresh(rows * stride, self.params[0].dtype());
        let reads = [self.params[self.params.len() - 1], self.params[0]];
        self.model.logits(&self.gpu.stream, &reads, out).unwrap();
        self.gpu
            .get(out)
            .chunks(stride)
            .flat_map(|row| row[..vocab].to_vec())
            .collect()
    }
}

/// The gradients by parameter.
pub(crate) fn by_name(gradients: &[Vec<f32>]) -> Vec<(String, Vec<f32>)> {
    let mut all = Vec::new();
    for (unit, flat) in config().units().into_iter().zip(gradients) {
        let mut rest = flat.as_slice();
        for param in unit.params {
            let (own, tail) = rest.split_at(param.shape.iter().product::<u64>() as usize);
            all.push((param.name, own.to_vec()));
            rest = tail;
        }
    }
    all
}

/// A slice of a vector that outlives all uses in its function.
fn slice<T>(data: &mut [T]) -> DeviceSlice<T> {
    // SAFETY: the vectors live to the end of the function, which drains the stream before it reads
    // them.
    unsafe { DeviceSlice::from_raw_parts(data.as_mut_ptr(), data.len(), DeviceId::HOST) }
}

/// Loss and gradients of a step of these micro-batches on the host.
pub(crate) fn on_host<T: Element>(
    config: &ModelConfig,
    options: ModelOptions,
    mut params: Vec<Vec<T>>,
    batches: &[Batch],
) -> (f64, Vec<Vec<f32>>) {
    let device = HostDevice::new();
    let stream = device.create_stream("host").unwrap();
    let pool = Pool::new(device, usize::MAX);
    let threads = Threads::new(1).unwrap();
    let mut model = config.on_host(options, &pool, &stream, threads).unwrap();

    let mut grads: Vec<Vec<f32>> = params.iter().map(|w| vec![0.0; w.len()]).collect();
    let params: Vec<AnySlice> = params.iter_mut().map(|p| slice(p).erase()).collect();
    let slices: Vec<_> = grads.iter_mut().map(|g| slice(g)).collect();
    // SAFETY: used on the stream of the passes.
    let sum = unsafe { model.loss() }.erase();
    pool.device().fill_zero(&stream, sum).unwrap();
    let mut scale = [1.0 / batches.len() as f64];
    let passes = config.passes();

    for batch in batches {
        model.set_batch(&stream, batch).unwrap();
        for (i, pass) in passes.iter().enumerate() {
            let reads: Vec<_> = pass.forward_reads.iter().map(|&u| params[u]).collect();
            model.forward(&stream, i, &reads).unwrap();
        }
        for (i, pass) in passes.iter().enumerate().rev() {
            let reads: Vec<_> = pass.backward_reads.iter().map(|&u| params[u]).collect();
            let adds: Vec<_> = pass.grads.iter().map(|&u| Grad::Add(slices[u])).collect();
            model
                .backward(&stream, i, &reads, &adds, slice(&mut scale))
                .unwrap();
        }
    }

    let mut loss = [0.0f64];
    pool.device()
        .download(&stream, sum, bytemuck::cast_slice_mut(&mut loss), LIMIT)
        .unwrap();
    (loss[0] / batches.len() as f64, grads)
}
