//! Models on the device, beside those on the host.

use integration_tests::relative_error;
use zero_alloc::cuda::CudaDevice;
use zero_alloc::device::DType;
use zero_alloc::host::HostDevice;
use zero_models::cuda::cross_entropy::stride_elems;
use zero_models::{GpuModel, ModelConfig, ModelOptions};
use zero_trainer::{Batch, Grad, ModelRanks};

use crate::gpu::{Arrays, Gpu};
use crate::steps::{OnHost, Results, Steps, by_name};

pub(crate) type OnGpu<'a> = Steps<'a, CudaDevice, dyn GpuModel>;

impl<'a> OnGpu<'a> {
    pub(crate) fn new(
        gpu: &'a Gpu,
        config: &ModelConfig,
        options: &ModelOptions,
        weights: &[Vec<f32>],
    ) -> Self {
        Self::with_logits(gpu, config, options, weights, None)
    }

    /// The logits of `rows` tokens at once.
    pub(crate) fn with_logits(
        gpu: &'a Gpu,
        config: &ModelConfig,
        options: &ModelOptions,
        weights: &[Vec<f32>],
        rows: Option<usize>,
    ) -> Self {
        let ranks = &ModelRanks::default();
        let model =
            config.on_cuda_with_logits(options.clone(), rows, &gpu.pool, &gpu.stream, ranks);
        Self::of(gpu, config, model.unwrap(), options.dtype, weights)
    }

    /// Makes blocks write their gradients in `dtype`, over elements that are not numbers.
    pub(crate) fn write_blocks(&mut self, gpu: &Gpu, dtype: DType) {
        let last = self.passes.len() - 1;
        for (i, pass) in self.passes.iter().enumerate() {
            for &unit in &pass.grads {
                let writes = self.model.writes_grad(i, unit);
                assert_eq!(writes, i > 0 && i < last);
                let grad = &mut self.grads[unit];
                if writes {
                    *grad = Grad::Write(gpu.fresh(grad.elements().len(), dtype));
                }
            }
        }
    }

    /// The logits `[tokens, vocab]` after a forward.
    pub(crate) fn logits(&self, gpu: &Gpu, config: &ModelConfig, tokens: usize) -> Vec<f32> {
        let vocab = config.vocab_size();
        let stride = stride_elems(vocab);
        let out = gpu.fresh(tokens * stride, self.params[0].dtype());
        let passes = config.passes();
        let reads = passes.last().unwrap().forward_reads.iter();
        let reads: Vec<_> = reads.map(|&u| self.params[u]).collect();
        self.model.logits(&gpu.stream, &reads, out).unwrap();
        let all = gpu.get(out);
        let rows = all.chunks(stride);
        rows.flat_map(|row| row[..vocab].to_vec()).collect()
    }
}

/// Loss and gradients of a step on the host.
pub(crate) fn on_host(
    config: &ModelConfig,
    options: &ModelOptions,
    weights: &[Vec<f32>],
    batches: &[Batch],
) -> Results {
    let arrays = Arrays::on(HostDevice::new());
    OnHost::new(&arrays, config, options.clone(), weights, 1).step(batches)
}

fn losses_agree(what: &str, got: f64, want: f64, limit: f64) {
    let error = (got - want).abs() / want;
    assert!(error < limit, "{what}: loss {got} for {want}");
}

/// Asserts that the losses and each parameter's gradients differ by less than `limits`, relative.
pub(crate) fn agree(
    config: &ModelConfig,
    what: &str,
    got: &Results,
    want: &Results,
    [loss, gradient]: [f64; 2],
) {
    losses_agree(&format!("{config:?}, {what}"), got.0, want.0, loss);
    let want = by_name(config, &want.1);
    for (name, got) in by_name(config, &got.1) {
        let error = relative_error(&got, &want[&name]);
        assert!(
            error < gradient,
            "{config:?}, {what}: gradient of {name} differs by {error:e}"
        );
    }
}

/// Asserts that the losses and all gradients together differ by less than `limits`, relative.
pub(crate) fn agree_in_all(what: &str, got: &Results, want: &Results, [loss, gradient]: [f64; 2]) {
    losses_agree(what, got.0, want.0, loss);
    let error = relative_error(&got.1.concat(), &want.1.concat());
    assert!(error < gradient, "{what}: gradients differ by {error:e}");
}
