//! The oracles' models, and steps of a model without the trainer.

use std::collections::HashMap;

use integration_tests::{Oracle, relative_error};
use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice};
use zero_alloc::host::HostDevice;
use zero_models::ops::Threads;
use zero_models::{HostModel, ModelConfig, ModelOptions};
use zero_shard::UnitSpec;
use zero_trainer::{Batch, Grad, Model, ModelError, ModelRanks, Pass};

use crate::arrays::Arrays;

pub(crate) fn config_of(oracle: Oracle) -> ModelConfig {
    let text = std::fs::read_to_string(oracle.data("model/config.json")).unwrap();
    ModelConfig::from_hf_json(&text).unwrap().0
}

/// PyTorch's initial weights, a flat parameter for each unit.
pub(crate) fn weights_of(oracle: Oracle) -> Vec<Vec<f32>> {
    let tensors = oracle.tensors("model/model.safetensors");
    let tensors: HashMap<_, _> = tensors.into_iter().collect();
    let flat = |unit: UnitSpec| {
        let params = unit.params.iter();
        params.flat_map(|p| tensors[&p.name].clone()).collect()
    };
    config_of(oracle).units().into_iter().map(flat).collect()
}

/// The micro-batches of step `step` of PyTorch's run.
pub(crate) fn batches_of(oracle: Oracle, step: usize) -> Vec<Batch> {
    let tokens = oracle.tokens();
    let micro_batch = |micro: usize| {
        let rows = (0..oracle.batch).map(|row| (micro * oracle.batch + row) * oracle.seq);
        let (inputs, targets): (Vec<u32>, Vec<u32>) = rows
            .flat_map(|at| at..at + oracle.seq)
            .map(|at| (tokens[at], tokens[at + 1]))
            .unzip();
        Batch::plain(inputs, targets)
    };
    let micros = step * oracle.grad_accum..(step + 1) * oracle.grad_accum;
    micros.map(micro_batch).collect()
}

/// Options of the oracle's micro-batches.
pub(crate) fn options_of(oracle: Oracle, dtype: DType) -> ModelOptions {
    ModelOptions::new(oracle.batch, oracle.seq, dtype)
}

/// Splits flat parameters by name.
pub(crate) fn by_name(config: &ModelConfig, flat: &[Vec<f32>]) -> HashMap<String, Vec<f32>> {
    let mut all = HashMap::new();
    for (unit, flat) in config.units().into_iter().zip(flat) {
        let mut rest = flat.as_slice();
        for param in unit.params {
            let (own, tail) = rest.split_at(param.shape.iter().product::<u64>() as usize);
            all.insert(param.name, own.to_vec());
            rest = tail;
        }
    }
    all
}

/// Asserts that each parameter's gradient is within `limit` of PyTorch's in the first step.
pub(crate) fn are_pytorchs(oracle: Oracle, gradients: &[Vec<f32>], limit: f64) {
    let want = oracle.tensors("grads_first_step.safetensors");
    let got = by_name(&config_of(oracle), gradients);
    assert_eq!(want.len(), got.len());
    for (name, want) in want {
        let error = relative_error(&got[&name], &want);
        assert!(error < limit, "gradient of {name} differs by {error:e}");
    }
}

/// The loss of a step, and its gradients by unit.
pub(crate) type Results = (f64, Vec<Vec<f32>>);

/// A model with its parameters and gradients.
pub(crate) struct Steps<'a, D: Device, M: ?Sized> {
    arrays: &'a Arrays<D>,
    pub(crate) passes: Vec<Pass>,
    pub(crate) model: Box<M>,
    pub(crate) params: Vec<AnySlice>,
    pub(crate) grads: Vec<Grad>,
    scale: DeviceSlice<f64>,
    micro_batches: usize,
}

pub(crate) type OnHost<'a> = Steps<'a, HostDevice, dyn HostModel>;

impl<'a> OnHost<'a> {
    pub(crate) fn new(
        arrays: &'a Arrays<HostDevice>,
        config: &ModelConfig,
        options: ModelOptions,
        weights: &[Vec<f32>],
        threads: usize,
    ) -> Self {
        let dtype = options.dtype;
        let threads = Threads::new(threads).unwrap();
        let model = config.on_host(
            options,
            &arrays.pool,
            &arrays.stream,
            threads,
            &ModelRanks::default(),
        );
        Self::of(arrays, config, model.unwrap(), dtype, weights)
    }
}

impl<'a, D: Device, M: Model<D> + ?Sized> Steps<'a, D, M> {
    pub(crate) fn of(
        arrays: &'a Arrays<D>,
        config: &ModelConfig,
        model: Box<M>,
        dtype: DType,
        weights: &[Vec<f32>],
    ) -> Self {
        let sums = |w: &Vec<f32>| Grad::Add(arrays.zeros(w.len()));
        Self {
            arrays,
            passes: config.passes(),
            model,
            params: weights.iter().map(|w| arrays.put(w, dtype)).collect(),
            grads: weights.iter().map(sums).collect(),
            scale: arrays.double(1.0),
            micro_batches: 1,
        }
    }

    pub(crate) fn set_batch(&mut self, batch: &Batch) -> Result<(), ModelError> {
        self.model.set_batch(&self.arrays.stream, batch)
    }

    pub(crate) fn forward(&mut self) -> Result<(), ModelError> {
        for (i, pass) in self.passes.iter().enumerate() {
            let reads: Vec<_> = pass.forward_reads.iter().map(|&u| self.params[u]).collect();
            self.model.forward(&self.arrays.stream, i, &reads)?;
        }
        Ok(())
    }

    pub(crate) fn backward(&mut self) -> Result<(), ModelError> {
        let stream = &self.arrays.stream;
        // As in the trainer, nothing is computed before the first pass that trains something.
        let trains = |pass: &Pass| !pass.grads.is_empty();
        let first = self.passes.iter().position(trains).unwrap_or_default();
        for (i, pass) in self.passes.iter().enumerate().skip(first).rev() {
            let reads = pass.backward_reads.iter().map(|&u| self.params[u]);
            let reads: Vec<_> = reads.collect();
            let grads: Vec<_> = pass.grads.iter().map(|&u| self.grads[u]).collect();
            self.model.backward(stream, i, &reads, &grads, self.scale)?;
        }
        Ok(())
    }

    /// Forgets the sums of losses and gradients.
    pub(crate) fn clear(&self) {
        // SAFETY: used on the stream of the passes.
        let loss = unsafe { self.model.loss() }.erase();
        let sums = self.grads.iter().filter_map(|grad| match grad {
            Grad::Add(sums) => Some(sums.erase()),
            Grad::Write(_) => None,
        });
        for sum in sums.chain([loss]) {
            let device = &self.arrays.device;
            device.fill_zero(&self.arrays.stream, sum).unwrap();
        }
    }

    /// The loss and the gradients since [`Self::clear`].
    pub(crate) fn results(&self) -> Results {
        // SAFETY: used on the stream of the passes.
        let loss = self.arrays.get_double(unsafe { self.model.loss() });
        let grads = self.grads.iter().map(|g| self.arrays.get(g.elements()));
        (loss / self.micro_batches as f64, grads.collect())
    }

    /// Returns the loss and the gradients of a step of these micro-batches.
    pub(crate) fn step(&mut self, batches: &[Batch]) -> Results {
        self.micro_batches = batches.len();
        let scale = [1.0 / batches.len() as f64];
        self.arrays.set(self.scale.erase(), &scale);
        self.clear();
        for batch in batches {
            self.set_batch(batch).unwrap();
            self.forward().unwrap();
            self.backward().unwrap();
        }
        self.results()
    }
}
