//! The runs of the tests, and their results.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tempfile::TempDir;
use zero::workload::{ModelWorkload, Weights};
use zero_alloc::Pool;
use zero_alloc::device::DType;
use zero_alloc::host::{HostDevice, HostStream};
use zero_ckpt::Reader;
use zero_comm::PrefetchOptions;
use zero_data::{DataSource, Dataset};
use zero_kernels::Muon;
use zero_models::hf::HfFolder;
use zero_models::lora::LoraConfig;
use zero_models::{ModelConfig, ModelOptions};
use zero_optim::OptimizerConfig;
use zero_shard::{
    BlockFormat, Layout, ParamSpec, Sharding, TensorCut, TensorPart, UnitSpec, ZeroStage,
};
use zero_trainer::param_groups::GroupSettings;
use zero_trainer::{
    Batch, BatchAt, InitialWeights, Model, ModelError, ModelRanks, Pass, TrainError,
};
use zero_trainer::{
    Home, MeshSettings, MuonSettings, OffloadSettings, RankSummary, RunOptions, Settings,
    StepMetrics, ValidationOptions, Workload, run_on_threads,
};

pub(crate) use integration_tests::relative_error;
use integration_tests::{GPT2, Oracle, temporary_folder};

/// A run of an oracle's model. The default is GPT-2, 2 ranks, stage 3, fp32, 4 steps of one micro-batch of 1 x 32 tokens.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) oracle: Oracle,
    pub(crate) ranks: usize,
    pub(crate) stage: u64,
    pub(crate) mesh: MeshSettings,
    pub(crate) node_ranks: Option<usize>,
    pub(crate) dtype: DType,
    pub(crate) steps: u64,
    pub(crate) grad_accum: usize,
    pub(crate) reduce_every_micro_batch: bool,
    pub(crate) micro_batch: usize,
    pub(crate) overlap: bool,
    /// Units that are gathered ahead; by default one with overlap.
    pub(crate) ahead: Option<usize>,
    pub(crate) activation_checkpointing: bool,
    pub(crate) partition_activations: bool,
    pub(crate) sequence_parallel: bool,
    pub(crate) bucket_elems: usize,
    pub(crate) optimizer: OptimizerConfig,
    pub(crate) groups: GroupSettings,
    /// Muon for the matrices of blocks, with this learning rate.
    pub(crate) muon: Option<(Muon, f64)>,
    /// [`MuonSettings::head_elems`].
    pub(crate) head_elems: Option<usize>,
    pub(crate) offload: OffloadSettings,
    pub(crate) quantised_frozen: Option<BlockFormat>,
    /// Adapters on the frozen model.
    pub(crate) lora: Option<LoraConfig>,
    pub(crate) resume: Option<PathBuf>,
    pub(crate) validation: Option<ValidationOptions>,
    pub(crate) cancel: Arc<AtomicBool>,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            oracle: GPT2,
            ranks: 2,
            stage: 3,
            mesh: MeshSettings::default(),
            node_ranks: None,
            dtype: DType::F32,
            steps: 4,
            grad_accum: 1,
            reduce_every_micro_batch: false,
            micro_batch: 1,
            overlap: true,
            ahead: None,
            activation_checkpointing: false,
            partition_activations: false,
            sequence_parallel: false,
            bucket_elems: 1 << 12,
            optimizer: OptimizerConfig::default().max_grad_norm(1.0),
            groups: GroupSettings::default(),
            muon: None,
            head_elems: None,
            offload: OffloadSettings::default(),
            quantised_frozen: None,
            lora: None,
            resume: None,
            validation: None,
            cancel: Arc::default(),
        }
    }
}

/// State of the optimizer and parameters at these places.
pub(crate) fn homes(optimizer: Home, params: Home) -> OffloadSettings {
    OffloadSettings {
        optimizer,
        params,
        ..OffloadSettings::default()
    }
}

/// State of the optimizer at `home`, with the parameters if `stage` shards them.
pub(crate) fn home_at(stage: u64, home: &Home) -> OffloadSettings {
    let params = if stage == 3 {
        home.clone()
    } else {
        Home::Device
    };
    homes(home.clone(), params)
}

/// Groups of ranks over which state is sharded.
pub(crate) fn groups_of(group: usize, sharding: Sharding) -> MeshSettings {
    MeshSettings {
        shard_group: Some(group),
        sharding,
        ..MeshSettings::default()
    }
}

/// Machines of `ranks` ranks.
pub(crate) fn levels_of(ranks: usize) -> MeshSettings {
    MeshSettings {
        two_level: Some(ranks),
        ..MeshSettings::default()
    }
}

/// Tensor parallelism.
pub(crate) fn parts(ranks: usize) -> MeshSettings {
    MeshSettings {
        tensor_ranks: Some(ranks),
        ..MeshSettings::default()
    }
}

/// Ranks that share sequences.
pub(crate) fn shared(ranks: usize) -> MeshSettings {
    MeshSettings {
        sequence_ranks: Some(ranks),
        ..MeshSettings::default()
    }
}

impl Case {
    /// This case with a change.
    pub(crate) fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut changed = self.clone();
        change(&mut changed);
        changed
    }

    /// The error of the oracle's model, which must fail.
    pub(crate) fn refusal(&self) -> String {
        self.refusal_of(&self.tiny())
    }

    /// The error of `workload`, which must fail.
    pub(crate) fn refusal_of(&self, workload: &dyn Workload<HostDevice>) -> String {
        match self.try_run(workload) {
            Ok(_) => panic!("{self:?}: the run went on"),
            Err(error) => error.to_string(),
        }
    }

    /// Continues the checkpoint of `from` with the oracle's model.
    pub(crate) fn resumed(&self, from: &Outcome) -> Outcome {
        self.with(|case| case.resume = Some(from.dir.path().to_owned()))
            .run_tiny()
    }
}

/// A workload with other batches or another model.
pub(crate) struct Altered<'a> {
    pub(crate) inner: &'a dyn Workload<HostDevice>,
    /// Changes a micro-batch.
    pub(crate) batch: fn(BatchAt, &mut Batch),
    /// Wraps the model.
    pub(crate) model: Box<dyn Fn(HostModel) -> HostModel + Sync>,
}

type HostModel = Box<dyn Model<HostDevice>>;

impl<'a> Altered<'a> {
    pub(crate) fn batches(
        inner: &'a dyn Workload<HostDevice>,
        batch: fn(BatchAt, &mut Batch),
    ) -> Self {
        let model = Box::new(|model| model);
        Self {
            inner,
            batch,
            model,
        }
    }
}

impl Workload<HostDevice> for Altered<'_> {
    fn units(&self) -> Vec<UnitSpec> {
        self.inner.units()
    }

    fn passes(&self) -> Vec<Pass> {
        self.inner.passes()
    }

    fn model(
        &self,
        pool: &Pool<HostDevice>,
        compute: &HostStream,
        ranks: &ModelRanks<HostDevice>,
    ) -> Result<HostModel, ModelError> {
        Ok((self.model)(self.inner.model(pool, compute, ranks)?))
    }

    fn tensor_cut(&self, param: &ParamSpec) -> TensorCut {
        self.inner.tensor_cut(param)
    }

    fn weights(&self) -> Result<Box<InitialWeights<'_>>, ModelError> {
        self.inner.weights()
    }

    fn batch(&self, at: BatchAt, batch: &mut Batch) -> Result<(), ModelError> {
        self.inner.batch(at, batch)?;
        (self.batch)(at, batch);
        Ok(())
    }
}

/// The result of a run.
pub(crate) struct Outcome {
    /// Rank 0's metrics of each step.
    pub(crate) steps: Vec<StepMetrics>,
    pub(crate) summaries: Vec<RankSummary>,
    pub(crate) layout: Layout,
    pub(crate) settings: Settings,
    /// The folder of the checkpoint, removed on drop.
    pub(crate) dir: TempDir,
}

impl Outcome {
    /// The bits of losses and norms.
    pub(crate) fn curve(&self) -> Vec<(u64, Option<u64>)> {
        self.steps
            .iter()
            .map(|s| (s.loss.to_bits(), s.grad_norm.map(f64::to_bits)))
            .collect()
    }

    /// The state in the last checkpoint: maps `state/parameter` to the bits of its elements.
    pub(crate) fn state(&self) -> BTreeMap<String, Vec<u32>> {
        let reader = Reader::open(self.dir.path()).unwrap();
        let mut all = BTreeMap::new();
        for state in reader.manifest().states.iter().map(|state| &state.name) {
            for param in reader.params() {
                let mut values = vec![0.0; param.numel_elems as usize];
                reader
                    .read_param(state, &param.name, 0..param.numel_elems, &mut values)
                    .unwrap();
                all.insert(
                    format!("{state}/{}", param.name),
                    bytemuck::cast_vec::<f32, u32>(values),
                );
            }
        }
        all
    }
}

impl Case {
    /// The run's settings.
    pub(crate) fn settings(&self) -> Settings {
        let stage = ZeroStage::from_number(self.stage).unwrap();
        let none = MuonSettings::new(zero_models::matrices_of);
        Settings {
            mesh: self.mesh,
            node_ranks: self.node_ranks,
            grad_accum_steps: self.grad_accum,
            reduce_every_micro_batch: self.reduce_every_micro_batch,
            bucket_capacity_elems: self.bucket_elems,
            overlap: self.overlap,
            prefetch: PrefetchOptions::default().ahead(self.ahead.unwrap_or(self.overlap.into())),
            optimizer: self.optimizer.clone(),
            groups: self.groups.clone(),
            muon: self.muon.map_or(none, |(rule, lr)| MuonSettings {
                by_default: true,
                rule,
                lr: Some(lr),
                head_elems: self.head_elems,
                ..none
            }),
            offload: self.offload.clone(),
            quantised_frozen: self.quantised_frozen,
            adapters: self.lora.as_ref().map(|_| self.model().1.adapter_units()),
            limit: Duration::from_secs(60),
            ..Settings::new(stage, self.dtype, zero_models::param_kind)
        }
    }

    /// The layout of the part of each rank of tensor parallelism over the data ranks.
    pub(crate) fn part_layout(&self, workload: &dyn Workload<HostDevice>) -> Layout {
        let ranks = self.mesh.tensor_ranks.unwrap_or(1);
        let part = TensorPart::new(0, ranks as u64).unwrap();
        let units = workload.units();
        let units = units
            .iter()
            .map(|unit| part.unit(unit, |param| workload.tensor_cut(param)));
        let units: Vec<_> = units.collect::<Result<_, _>>().unwrap();
        let options = self.settings().layout_options();
        Layout::with_options(&units, (self.ranks / ranks) as u64, options).unwrap()
    }

    /// The run's options, with or without a checkpoint at the end.
    pub(crate) fn options(&self, checkpoint: Option<&Path>) -> RunOptions {
        RunOptions {
            steps: self.steps,
            micro_batch: self.micro_batch,
            seq_len: self.oracle.seq,
            seed: 7,
            checkpoint: checkpoint.map(|dir| (dir.to_owned(), 0)),
            keep_last: None,
            validation: self.validation.clone(),
            resume: self.resume.clone(),
            cancel: Arc::clone(&self.cancel),
            breakdown: true,
            log_memory: true,
            ..RunOptions::default()
        }
    }

    /// Runs `workload` and saves at the end.
    pub(crate) fn try_run(
        &self,
        workload: &dyn Workload<HostDevice>,
    ) -> Result<Outcome, TrainError> {
        self.try_run_with(&self.settings(), workload)
    }

    /// As [`Self::try_run`], with `settings`.
    pub(crate) fn try_run_with(
        &self,
        settings: &Settings,
        workload: &dyn Workload<HostDevice>,
    ) -> Result<Outcome, TrainError> {
        let dir = temporary_folder();
        let options = self.options(Some(dir.path()));
        let mut steps = Vec::new();
        let mut observe = |metrics: &StepMetrics| {
            steps.push(metrics.clone());
            Ok(())
        };
        let summaries = run_on_threads(self.ranks, 1, settings, workload, &options, &mut observe)?;
        let options = settings.layout_options();
        let layout = Layout::with_options(&workload.units(), self.ranks as u64, options).unwrap();
        Ok(Outcome {
            steps,
            summaries,
            layout,
            settings: settings.clone(),
            dir,
        })
    }

    /// [`Self::try_run`] for a run that must succeed.
    pub(crate) fn run(&self, workload: &dyn Workload<HostDevice>) -> Outcome {
        self.run_with(&self.settings(), workload)
    }

    /// As [`Self::run`], with `settings`.
    pub(crate) fn run_with(
        &self,
        settings: &Settings,
        workload: &dyn Workload<HostDevice>,
    ) -> Outcome {
        self.try_run_with(settings, workload)
            .unwrap_or_else(|e| panic!("{self:?}: {e}"))
    }

    /// The folder of the oracle's model, and its configuration with the case's adapters.
    fn model(&self) -> (HfFolder, ModelConfig) {
        let folder = HfFolder::open(&self.oracle.data("model")).unwrap();
        let config = folder.config().clone();
        let config = config.with_lora(self.lora.clone()).unwrap();
        (folder, config)
    }

    /// The oracle's model with PyTorch's weights and tokens.
    pub(crate) fn tiny(&self) -> ModelWorkload {
        let (folder, config) = self.model();
        ModelWorkload {
            config,
            weights: Weights::Folder(Box::new(folder)),
            adapters: None,
            adapter_seed: 3,
            data: Dataset::open(&DataSource::at(self.oracle.data("tokens.u16.bin")))
                .unwrap()
                .into(),
            options: ModelOptions {
                sequence_ranks: self.mesh.sequence_ranks(),
                tensor_ranks: self.mesh.tensor_ranks.unwrap_or(1),
                partition_activations: self.partition_activations,
                sequence_parallel: self.sequence_parallel,
                activation_checkpointing: self.activation_checkpointing,
                layout: self.settings().layout_options(),
                ..ModelOptions::new(self.micro_batch, self.oracle.seq, self.dtype)
            },
            threads: 1,
        }
    }

    /// Runs [`Self::tiny`].
    pub(crate) fn run_tiny(&self) -> Outcome {
        self.run(&self.tiny())
    }
}
