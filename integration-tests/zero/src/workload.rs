//! The workload of `zero train`: a model on a data set.

use zero_alloc::Pool;
use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_data::TrainingData;
use zero_shard::{ParamSpec, TensorCut, UnitSpec};

use zero_models::hf::HfFolder;
use zero_models::hf::adapters::Adapters;
use zero_models::lora::PREFIX;
use zero_models::ops::Threads;
use zero_models::{ModelConfig, ModelOptions};

use zero_trainer::{Batch, BatchAt, InitialWeights, Model, ModelError, ModelRanks, Pass, Workload};

/// The source of the initial weights.
pub enum Weights {
    /// The architecture's initialization with this seed.
    Initial(u64),
    /// A Hugging Face folder.
    Folder(Box<HfFolder>),
}

/// A model with its initial weights and its data.
pub struct ModelWorkload {
    /// The shape of the model.
    pub config: ModelConfig,
    /// The initial weights.
    pub weights: Weights,
    /// The initial adapters, if the model has some that are not drawn.
    pub adapters: Option<Adapters>,
    /// The seed of adapters that are drawn.
    pub adapter_seed: u64,
    /// The training data.
    pub data: TrainingData,
    /// Micro-batch, sequence length, element type and activation checkpointing.
    pub options: ModelOptions,
    /// Threads of each rank on the host.
    pub threads: usize,
}

/// Implements [`Workload`] for a device type; `$model` is the method that creates the model on it.
macro_rules! workload {
    ($device:ty, $stream:ty, $model:ident) => {
        impl Workload<$device> for ModelWorkload {
            fn units(&self) -> Vec<UnitSpec> {
                self.config.units()
            }

            fn passes(&self) -> Vec<Pass> {
                self.config.passes()
            }

            fn model(
                &self,
                pool: &Pool<$device>,
                compute: &$stream,
                ranks: &ModelRanks<$device>,
            ) -> Result<Box<dyn Model<$device>>, ModelError> {
                self.$model(pool, compute, ranks)
            }

            fn weights(&self) -> Result<Box<InitialWeights<'_>>, ModelError> {
                self.initial_weights()
            }

            fn batch(&self, at: BatchAt, batch: &mut Batch) -> Result<(), ModelError> {
                Ok(self.data.batch(at, batch)?)
            }

            fn tensor_cut(&self, param: &ParamSpec) -> TensorCut {
                self.config.tensor_cut(param)
            }

            fn data_fingerprint(&self) -> u64 {
                self.data.fingerprint()
            }

            fn model_config(&self) -> serde_json::Value {
                // Valid JSON by construction.
                serde_json::from_str(&self.config.to_hf_json("float32")).unwrap_or_default()
            }
        }
    };
}

workload!(HostDevice, HostStream, on_host);
workload!(CudaDevice, CudaStream, on_cuda);

impl ModelWorkload {
    fn on_host(
        &self,
        pool: &Pool<HostDevice>,
        compute: &HostStream,
        ranks: &ModelRanks<HostDevice>,
    ) -> Result<Box<dyn Model<HostDevice>>, ModelError> {
        let threads = Threads::new(self.threads)?;
        let options = self.options.clone();
        Ok(self
            .config
            .on_host(options, pool, compute, threads, ranks)?)
    }

    fn on_cuda(
        &self,
        pool: &Pool<CudaDevice>,
        compute: &CudaStream,
        ranks: &ModelRanks<CudaDevice>,
    ) -> Result<Box<dyn Model<CudaDevice>>, ModelError> {
        let options = self.options.clone();
        Ok(self.config.on_cuda(options, pool, compute, ranks)?)
    }

    fn initial_weights(&self) -> Result<Box<InitialWeights<'_>>, ModelError> {
        // Without this pool, rayon would start its global pool, with a thread for each core.
        let threads = Threads::new(self.threads)?;
        Ok(Box::new(move |name, range, out| {
            let seed = match (&self.weights, &self.adapters, name.starts_with(PREFIX)) {
                (_, Some(adapters), true) => return Ok(adapters.read(name, range, out)?),
                (_, None, true) => self.adapter_seed,
                (Weights::Folder(folder), _, false) => return Ok(folder.read(name, range, out)?),
                (Weights::Initial(seed), _, false) => *seed,
            };
            Ok(threads.run(|| self.config.fill_initial(seed, name, range, out))?)
        }))
    }
}
