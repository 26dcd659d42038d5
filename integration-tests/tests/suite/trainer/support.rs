//! The runs of the tests, and their results.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tempfile::TempDir;
use zero::workload::{ModelWorkload, Weights};
use zero_alloc::device::DType;
use zero_alloc::host::HostDevice;
use zero_ckpt::Reader;
use zero_comm::PrefetchOptions;
use zero_data::{DataSource, Dataset};
use zero_models::ModelOptions;
use zero_models::hf::HfFolder;
use zero_optim::OptimizerConfig;
use zero_shard::{Layout, ZeroStage};
use zero_trainer::TrainError;
use zero_trainer::param_groups::GroupSettings;
use zero_trainer::{
    MeshSettings, OffloadSettings, RankSummary, RunOptions, SHARD_ALIGN_ELEMS, Settings,
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
    pub(crate) activation_checkpointing: bool,
    pub(crate) partition_activations: bool,
    pub(crate) sequence_parallel: bool,
    pub(crate) bucket_elems: usize,
    pub(crate) optimizer: OptimizerConfig,
    pub(crate) groups: GroupSettings,
    pub(crate) offload: OffloadSettings,
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
            activation_checkpointing: false,
            partition_activations: false,
            sequence_parallel: false,
            bucket_elems: 1 << 12,
            optimizer: OptimizerConfig::default().max_grad_norm(1.0),
            groups: GroupSettings::default(),
            offload: OffloadSettings::default(),
            resume: None,
            validation: None,
            cancel: Arc::default(),
        }
    }
}

impl Case {
    /// This case with a change.
    pub(crate) fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut changed = self.clone();
        change(&mut changed);
        changed
    }

    /// Continues the checkpoint of `from` with the oracle's model.
    pub(crate) fn resumed(&self, from: &Outcome) -> Outcome {
        self.with(|case| case.resume = Some(from.dir.path().to_owned()))
            .run_tiny()
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
        for state in ["master", "first_moment", "second_moment"] {
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
        Settings {
            mesh: self.mesh,
            node_ranks: self.node_ranks,
            grad_accum_steps: self.grad_accum,
            reduce_every_micro_batch: self.reduce_every_micro_batch,
            bucket_capacity_elems: self.bucket_elems,
            overlap: self.overlap,
            prefetch: PrefetchOptions::default().ahead(usize::from(self.overlap)),
            optimizer: self.optimizer.clone(),
            groups: self.groups.clone(),
            offload: self.offload.clone(),
            limit: Duration::from_secs(60),
            ..Settings::new(stage, self.dtype, zero_models::param_kind)
        }
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
        let layout = Layout::new(&workload.units(), self.ranks as u64, SHARD_ALIGN_ELEMS).unwrap();
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

    /// The oracle's model with PyTorch's weights and tokens.
    pub(crate) fn tiny(&self) -> ModelWorkload {
        let folder = HfFolder::open(&self.oracle.data("model")).unwrap();
        ModelWorkload {
            config: folder.config().clone(),
            weights: Weights::Folder(Box::new(folder)),
            data: Dataset::open(&DataSource::at(self.oracle.data("tokens.u16.bin")))
                .unwrap()
                .into(),
            options: ModelOptions {
                micro_batch: self.micro_batch,
                seq_len: self.oracle.seq,
                sequence_ranks: self.mesh.sequence_ranks(),
                tensor_ranks: self.mesh.tensor_ranks.unwrap_or(1),
                partition_activations: self.partition_activations,
                sequence_parallel: self.sequence_parallel,
                dtype: self.dtype,
                activation_checkpointing: self.activation_checkpointing,
                offload_activations: false,
                matmul_timing: false,
                recompute_gelu: false,
            },
            threads: 1,
        }
    }

    /// Runs [`Self::tiny`].
    pub(crate) fn run_tiny(&self) -> Outcome {
        self.run(&self.tiny())
    }
}
