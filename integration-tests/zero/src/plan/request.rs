//! The input of a plan: flags override the configuration file, which overrides the defaults.

use std::sync::Arc;

use zero_alloc::device::DType;
use zero_comm::PrefetchOptions;
use zero_optim::{Moments, OptimizerConfig};
use zero_shard::{
    Layout, LayoutOptions, ParamSpec, TensorCut, Tie, TransformerShape, UnitSpec, ZeroStage,
};

use super::args::{Architecture, PlanArgs};
use crate::error::CliError;
use crate::flags::{check_positive, check_seq_len, find_config};
use crate::settings::args::{Collectives, TrainArgs};
use crate::settings::collectives;
use crate::settings::formats_of_run;
use crate::settings::mesh;
use crate::settings::offload::{self, Offloaded};
use crate::settings::record::RunRecord;
use crate::settings::sources::{Sources, of_file};
use zero_config::{DsConfig, ZeroOptimization};
use zero_models::ModelConfig;
use zero_models::ModelOptions;
use zero_models::gpt2::config::GptConfig;
use zero_models::llama::config::LlamaConfig;
use zero_trainer::Pass;
use zero_trainer::{Home, MeshSettings, OffloadSettings, SHARD_ALIGN_ELEMS, Settings};

/// The sizes of a model.
#[derive(Clone, Debug)]
pub(crate) struct ModelSize {
    pub(crate) name: String,
    pub(crate) units: Vec<UnitSpec>,
    pub(crate) options: LayoutOptions,
    pub(crate) shape: TransformerShape,
    pub(crate) passes: Vec<Pass>,
    /// The configuration of a GPT-2; `None` if only the number of parameters is known.
    pub(crate) config: Option<ModelConfig>,
    /// Whether the shape is derived from the number of parameters.
    pub(crate) assumed: bool,
}

/// The run to plan.
#[derive(Clone, Debug)]
pub(crate) struct PlanRequest {
    /// Shared by the many requests of a search; a model may have thousands of units.
    pub(crate) model: Arc<ModelSize>,
    /// The settings of the run, but for what its stage decides; see [`PlanRequest::settings`].
    pub(crate) run: Settings,
    /// The options of the model; see [`PlanRequest::model_options`].
    pub(crate) options: ModelOptions,
    /// Whether GELU's output is recomputed; `None`: where it does not fit otherwise.
    pub(crate) recompute_gelu: Option<bool>,
    /// Whether to limit the bucket to the largest unit, as the trainer does by default and with a
    /// size from a configuration.
    pub(crate) trims_bucket: bool,
    pub(crate) configured_stage: Option<ZeroStage>,
    pub(crate) machine: MachineSize,
    /// The configuration file, some of whose sizes depend on the width of the model.
    pub(crate) file: Option<Box<DsConfig>>,
}

/// The GPUs of a plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MachineSize {
    pub(crate) gpus: u64,
    pub(crate) nodes: u64,
    pub(crate) gpu_memory_bytes: Option<u64>,
    /// Threads of each rank of a run on a host; `None` on GPUs.
    pub(crate) host_threads: Option<u64>,
    /// The speed of a GPU.
    pub(crate) peak_tflops: f64,
    /// The rated life of a drive: terabytes written.
    pub(crate) drive_tbw: f64,
    /// The speed at which a drive reads and at which it writes.
    pub(crate) drive_bytes_per_s: f64,
}

impl MachineSize {
    /// GPUs whose speed and drives do not matter.
    fn of_run(gpus: u64, nodes: u64, gpu_memory_bytes: Option<u64>) -> Self {
        Self {
            gpus,
            nodes,
            gpu_memory_bytes,
            host_threads: None,
            peak_tflops: 1.0,
            drive_tbw: 1.0,
            drive_bytes_per_s: 1.0,
        }
    }
}

/// The most GPUs of a node that a plan accepts; more were not meant to be on one.
const MAX_GPUS_OF_NODE: u64 = 1024;

impl PlanRequest {
    /// Builds the request and the warnings about ignored settings.
    pub(crate) fn new(args: &PlanArgs) -> Result<(Self, Vec<String>), CliError> {
        let file = args.config.as_deref().map(DsConfig::open);
        let file = file.transpose().map_err(CliError::usage)?;
        let file = file.map(Box::new);
        let mut notices = Vec::new();
        if let Some(file) = &file {
            notices.extend(file.warnings.iter().cloned());
        }
        check_gpus(args)?;
        check_positive(&[
            ("--micro-batch", args.micro_batch),
            ("--grad-accum", args.grad_accum),
            ("--bucket-elems", args.bucket_elems),
        ])?;

        let model = model(args, &mut notices)?;
        let config = model.config.as_ref();
        let positions = config.map_or(1024, |config| config.max_positions() as u64);
        let seq_len = args.seq_len.unwrap_or(positions);
        check_seq_len(seq_len, config)?;
        let zero = file.as_ref().map(|f| f.zero_for(model.shape.hidden));
        let head = head_elems(&model);
        let (mut run, options) = run_of(args, file.as_deref(), zero.as_ref(), head, &mut notices)?;
        run.adapters = adapters(&model);
        let with_stage = file
            .as_ref()
            .filter(|file| !file.is_auto("zero_optimization.stage"));

        let request = Self {
            model: Arc::new(model.cut(run.mesh.tensor_ranks.unwrap_or(1))?),
            options: ModelOptions {
                seq_len: seq_len as usize,
                ..options
            },
            run,
            recompute_gelu: args.recompute_gelu,
            trims_bucket: args.bucket_elems.is_none(),
            configured_stage: with_stage
                .and_then(|file| ZeroStage::from_number(file.zero.stage.into())),
            machine: MachineSize {
                gpus: args.gpus(),
                nodes: args.nodes,
                gpu_memory_bytes: args.gpu_memory,
                host_threads: args.host_threads,
                peak_tflops: args.peak_tflops,
                drive_tbw: args.drive_tbw,
                drive_bytes_per_s: args.drive_gb_per_s * 1e9,
            },
            file,
        };

        request.check_shares()?;
        Ok((request.with_sizes_of_file(), notices))
    }

    /// The same model, cut in the same way, with the run of `args`: its groups, batch, activations,
    /// offload and buckets. `args` have no configuration file.
    ///
    /// # Errors
    /// As [`PlanRequest::new`].
    pub(crate) fn with_run(&self, args: &PlanArgs) -> Result<Self, CliError> {
        let (mut run, options) =
            run_of(args, None, None, head_elems(&self.model), &mut Vec::new())?;
        run.adapters = self.run.adapters;
        let request = Self {
            options: ModelOptions {
                seq_len: self.options.seq_len,
                ..options
            },
            run,
            trims_bucket: args.bucket_elems.is_none(),
            ..self.clone()
        };
        request.check_shares()?;
        Ok(request)
    }

    /// The same run with another batch.
    ///
    /// # Errors
    /// The ranks cannot share the micro-batches.
    pub(crate) fn with_batch(
        mut self,
        micro_batch: u64,
        grad_accum: u64,
    ) -> Result<Self, CliError> {
        self.options.micro_batch = micro_batch as usize;
        self.run.grad_accum_steps = grad_accum as usize;
        self.check_shares()?;
        Ok(self)
    }

    /// The same run with sequences of `seq_len` tokens.
    pub(crate) fn with_seq_len(&self, seq_len: u64) -> Self {
        let mut request = self.clone();
        request.options.seq_len = seq_len as usize;
        request
    }

    /// The same run, which gathers up to `elems` ahead of their use, at least one unit if not 0;
    /// `None`: one unit.
    pub(crate) fn with_prefetch(mut self, elems: Option<u64>) -> Self {
        let ahead = match elems {
            None => PrefetchOptions::default(),
            Some(0) => PrefetchOptions::default().ahead(0),
            Some(elems) => PrefetchOptions::default()
                .ahead(usize::MAX)
                .ahead_elems(elems as usize),
        };
        let limits = self.run.prefetch;
        self.run.prefetch = ahead
            .max_live_elems(limits.max_live_elems)
            .persistence_threshold_elems(limits.persistence_threshold_elems);
        self
    }

    /// Sequences of a micro-batch of a rank.
    pub(crate) fn micro_batch(&self) -> u64 {
        self.options.micro_batch as u64
    }

    /// Micro-batches of a step.
    pub(crate) fn grad_accum(&self) -> u64 {
        self.run.grad_accum_steps as u64
    }

    /// Tokens of a sequence.
    pub(crate) fn seq_len(&self) -> u64 {
        self.options.seq_len as u64
    }

    /// Ranks that have a part of each parameter.
    pub(crate) fn tensor_ranks(&self) -> usize {
        self.run.mesh.tensor_ranks.unwrap_or(1)
    }

    /// Checks that Muon has matrices, and that ranks can share the micro-batches of a model of
    /// known shape.
    fn check_shares(&self) -> Result<(), CliError> {
        if self.run.names_muon() && self.model.config.is_none() {
            return Err(usage!(
                "--optimizer muon: the matrices are those of a model of known shape: pass --model, or --layers and \
                 --hidden"
            ));
        }
        if self.run.names_muon() && self.run.adapters.is_some() {
            return Err(usage!(
                "Muon is for the matrices of whole models, and adapters are trained: use AdamW with --lora"
            ));
        }
        match &self.model.config {
            Some(config) if self.run.mesh.ranks_of_batch() > 1 => {
                let options = self.options(false);
                config.check(&options).map_err(CliError::usage)?;
                match self.tensor_ranks() {
                    2.. => config.check_on_gpu().map_err(CliError::usage),
                    _ => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    /// Tokens of a sequence that a rank has.
    pub(crate) fn rank_tokens(&self) -> u64 {
        self.seq_len()
            .div_ceil(self.run.mesh.sequence_ranks() as u64)
    }

    /// Sets the sizes of the configuration file, for the width of this model.
    fn with_sizes_of_file(mut self) -> Self {
        let Some(zero) = self
            .file
            .as_ref()
            .map(|file| file.zero_for(self.model.shape.hidden))
        else {
            return self;
        };
        if self.trims_bucket {
            self.run.bucket_capacity_elems = zero.reduce_bucket_elems as usize;
        }
        let ahead = match zero.overlaps_at(3) {
            true => zero.prefetch_bucket_elems,
            false => 0,
        };
        let prefetch = &mut self.run.prefetch;
        prefetch.max_live_elems = zero.max_live_elems as usize;
        prefetch.persistence_threshold_elems = zero.persistence_threshold_elems as usize;
        self.with_prefetch(Some(ahead))
    }

    /// The same run of a transformer of typical shape with `params` parameters.
    pub(crate) fn with_about(&self, params: u64) -> Self {
        Self {
            model: Arc::new(ModelSize::with_about(params)),
            ..self.clone()
        }
        .with_sizes_of_file()
    }

    /// The request of a run of `settings` on GPUs with `gpu_memory_bytes` of memory each.
    pub(crate) fn of_run(
        config: &ModelConfig,
        options: &ModelOptions,
        settings: &Settings,
        gpus: usize,
        gpu_memory_bytes: u64,
    ) -> Self {
        let model = ModelSize::of("model", config);
        let parts = config.units_of_part(options.tensor_ranks);
        Self {
            model: Arc::new(ModelSize {
                // A run of a model that cannot be cut does not begin.
                units: parts.unwrap_or_else(|_| model.units.clone()),
                ..model
            }),
            options: options.clone(),
            recompute_gelu: None,
            trims_bucket: false,
            configured_stage: Some(settings.stage),
            machine: MachineSize::of_run(gpus as u64, 1, Some(gpu_memory_bytes)),
            file: None,
            run: settings.clone(),
        }
    }

    /// The request of a run that was measured, on machines with `node_ranks` ranks.
    ///
    /// # Errors
    /// A record of another program.
    pub(crate) fn of_record(record: &RunRecord, node_ranks: usize) -> Result<Self, CliError> {
        let (config, _) =
            ModelConfig::from_hf_json(&record.model.config.to_string()).map_err(CliError::usage)?;
        let mesh = record.mesh.settings()?;
        let model = ModelSize::of(&record.model.name, &config);
        let gpus = record.batch.ranks as u64;
        let mut run = Settings {
            mesh,
            grad_accum_steps: record.batch.grad_accum as usize,
            offload: record.offload.clone(),
            ..Settings::new(
                ZeroStage::Three,
                record.dtype.into(),
                zero_models::param_kind,
            )
        };
        record.communication.apply(&mut run);
        run.muon = record.muon.settings(0.0, head_elems(&model));
        run.adapters = adapters(&model);
        Ok(Self {
            model: Arc::new(model.cut(mesh.tensor_ranks.unwrap_or(1))?),
            options: ModelOptions {
                seq_len: record.batch.seq_len,
                partition_activations: record.activations.partition_activations,
                sequence_parallel: record.activations.sequence_parallel,
                activation_checkpointing: record.activations.activation_checkpointing,
                ..ModelOptions::new(record.batch.micro_batch as usize, 1, DType::F32)
            },
            run,
            recompute_gelu: Some(record.activations.recompute_gelu),
            trims_bucket: false,
            configured_stage: ZeroStage::from_number(record.stage),
            machine: MachineSize::of_run(gpus, gpus.div_ceil(node_ranks.max(1) as u64), None),
            file: None,
        })
    }

    /// Whether the recomputation of GELU's output frees memory.
    pub(crate) fn can_recompute_gelu(&self) -> bool {
        let has_gelu = !matches!(self.model.config, Some(ModelConfig::Llama(_)));
        has_gelu && !self.options.activation_checkpointing
    }

    /// The options of a model, with those that follow from the settings.
    fn options(&self, recompute_gelu: bool) -> ModelOptions {
        ModelOptions {
            sequence_ranks: self.run.mesh.sequence_ranks(),
            tensor_ranks: self.tensor_ranks(),
            dtype: self.run.dtype,
            offload_activations: self.run.offload.activations,
            matmul_timing: false,
            recompute_gelu,
            layout: self.run.layout_options(),
            ..self.options.clone()
        }
    }

    /// The options of the model; `None` if its shape is assumed.
    pub(crate) fn model_options(
        &self,
        recompute_gelu: bool,
    ) -> Option<(&ModelConfig, ModelOptions)> {
        let config = self.model.config.as_ref()?;
        let options = self.options(recompute_gelu);
        config.check(&options).ok().map(|()| (config, options))
    }

    /// The most elements, with padding, of a unit that is trained.
    pub(crate) fn largest_trained(&self, layout: &Layout) -> u64 {
        match self.run.resolve_groups(layout) {
            Ok(groups) => groups.largest_trained(layout),
            // The names of a model of assumed shape are not those of rules.
            Err(_) => {
                let units = layout.units().iter();
                units.map(|unit| unit.padded_elems).max().unwrap_or(0)
            }
        }
    }

    /// The trainer's settings at `stage` on GPUs, for a model whose largest unit has `largest_unit`
    /// elements.
    pub(crate) fn settings(&self, stage: ZeroStage, largest_unit: u64) -> Settings {
        let mut settings = Settings {
            stage,
            mesh: mesh::at_stage(self.run.mesh, stage),
            ..self.run.clone()
        };
        if !stage.shards_optimizer() {
            settings.gather_codec = None;
            settings.quantised_grads = None;
        }
        let offload = &mut settings.offload;
        if !stage.shards_params() {
            offload.params = Home::Device;
        }
        // The host updates parameters that are off the device.
        if offload.params != Home::Device && offload.optimizer == Home::Device {
            offload.optimizer = Home::Host;
        }
        if offload.optimizer == Home::Device && offload.format.moments == Moments::Bf16 {
            offload.format.moments = Moments::Fp32;
        }

        let sub_group = &mut settings.optimizer.sub_group_elems;
        *sub_group = offload::sub_group_elems(*sub_group, offload);
        let bucket = &mut settings.bucket_capacity_elems;
        if self.trims_bucket {
            *bucket = (*bucket).min(largest_unit as usize);
        }
        *bucket = (*bucket).max(self.machine.gpus as usize);
        settings
    }
}

/// Units of adapters, if the model has some.
fn adapters(model: &ModelSize) -> Option<usize> {
    let config = model.config.as_ref()?;
    config.lora().map(|_| config.adapter_units())
}

/// Checks the GPUs and the nodes.
fn check_gpus(args: &PlanArgs) -> Result<(), CliError> {
    let gpus = args.gpus();
    let nodes = args.nodes;
    if gpus == 0 || nodes == 0 || !gpus.is_multiple_of(nodes) {
        return Err(usage!(
            "--gpus {gpus} --nodes {nodes}: expected the same number of GPUs, at least 1, on each node"
        ));
    }
    let of_node = gpus / nodes;
    if of_node > MAX_GPUS_OF_NODE {
        return Err(usage!(
            "--gpus {gpus} --nodes {nodes}: on how many nodes are they? {of_node} GPUs are too many for one (at most \
             {MAX_GPUS_OF_NODE}); pass --nodes"
        ));
    }
    Ok(())
}

/// Elements of a head's queries, if they are known.
fn head_elems(model: &ModelSize) -> Option<usize> {
    model.config.as_ref().map(ModelConfig::head_elems)
}

/// The run of `args`: its settings, but for what its stage decides, and the options of its model.
///
/// # Errors
/// Flags or keys of the file that the run cannot follow.
fn run_of(
    args: &PlanArgs,
    file: Option<&DsConfig>,
    zero: Option<&ZeroOptimization>,
    head_elems: Option<usize>,
    notices: &mut Vec<String>,
) -> Result<(Settings, ModelOptions), CliError> {
    let of_file = file.map(|file| of_file(file, zero)).unwrap_or_default();
    let from = Sources::new(&args.settings(), &of_file, TrainArgs::default());
    let all = &from.all;
    let mesh = mesh(args, &from)?;
    let flags = [args.partition_activations, args.sequence_parallel];
    mesh::check_tensor_flags(&mesh, flags, "GPUs")?;

    let batch = file.map(|file| file.batch).unwrap_or_default();
    let batches = args.gpus() / mesh.ranks_of_batch() as u64;
    let batch = batch
        .resolve(batches, args.micro_batch, args.grad_accum, 1)
        .map_err(CliError::usage)?;
    let dtype = all.dtype.map_or_else(|| default_dtype(file), DType::from);
    let checkpointing = all.activation_checkpointing.unwrap_or(false);
    let run = Offloaded {
        stage: ZeroStage::Three,
        dtype,
        checkpointing,
        tensor_parallel: mesh.tensor_ranks.is_some(),
    };
    let offload = offload(args, file, run, notices)?;
    let sub_group = all.unflagged.sub_group_elems.unwrap_or(usize::MAX);
    let has_parts = mesh.tensor_ranks.is_some();

    let mut settings = Settings {
        mesh,
        grad_accum_steps: batch.grad_accum as usize,
        reduce_every_micro_batch: all.reduce_every_micro_batch.unwrap_or(false),
        bucket_capacity_elems: all.bucket_elems.unwrap_or(usize::MAX),
        optimizer: OptimizerConfig::default().sub_group_elems(sub_group),
        muon: all.muon.settings(0.0, head_elems),
        offload,
        ..Settings::new(ZeroStage::Three, dtype, zero_models::param_kind)
    };
    formats_of_run::apply(&from, &mut settings)?;
    let options = ModelOptions {
        partition_activations: has_parts && all.partition_activations.unwrap_or(false),
        sequence_parallel: has_parts && all.sequence_parallel.unwrap_or(false),
        activation_checkpointing: checkpointing,
        ..ModelOptions::new(batch.micro_batch as usize, 1, DType::F32)
    };
    Ok((settings, options))
}

/// The groups of ranks. They and the nodes divide each other.
fn mesh(args: &PlanArgs, from: &Sources) -> Result<MeshSettings, CliError> {
    let mesh = mesh::planned(from, args.gpus())?;
    let of_node = args.gpus() / args.nodes;
    let tensor_ranks = mesh.tensor_ranks.unwrap_or(1) as u64;
    if !of_node.is_multiple_of(tensor_ranks) {
        return Err(usage!(
            "--tensor-parallel {tensor_ranks} on nodes of {of_node} GPUs: expected a number that divides them"
        ));
    }
    // Of the GPUs with the same part of the parameters.
    let of_node = of_node / tensor_ranks;
    match mesh.shard_group.map(|group| group as u64) {
        Some(group) if !group.is_multiple_of(of_node) && !of_node.is_multiple_of(group) => {
            return Err(usage!(
                "groups of {group} GPUs on nodes of {of_node}: expected whole groups on a node, or whole nodes in a group"
            ));
        }
        _ => {}
    }

    // The route of the stages that the groups do not fit.
    let requested = args.mesh.collectives.unwrap_or_default();
    let of_route = match requested {
        Collectives::TwoLevel => mesh,
        _ => MeshSettings {
            shard_group: None,
            ..mesh
        },
    };
    let gpus = args.gpus() as usize;
    let of_node = gpus / args.nodes as usize;
    let route = collectives::route(requested, &of_route, gpus, Some(of_node))?;
    Ok(MeshSettings {
        two_level: route.two_level,
        ..mesh
    })
}

/// The offload at stage 3. At stages without offloaded parameters the optimizer is where it was
/// placed.
fn offload(
    args: &PlanArgs,
    file: Option<&DsConfig>,
    run: Offloaded,
    notices: &mut Vec<String>,
) -> Result<OffloadSettings, CliError> {
    let default = OffloadSettings::default();
    let mut offload = offload::settings(&args.offload, file, &default, run, notices)?;
    offload.optimizer = match (&args.offload.offload, file) {
        (Some(home), _) => home.clone(),
        (None, Some(file)) => file.zero.offload_optimizer.clone(),
        (None, None) => Home::default(),
    };
    Ok(offload)
}

/// The type without a choice: a plan's default, also for `"auto"`, or DeepSpeed's for a file.
fn default_dtype(file: Option<&DsConfig>) -> DType {
    let is_auto = |file: &DsConfig| file.is_auto("bf16.enabled") || file.is_auto("fp16.enabled");
    match file {
        Some(file) if !is_auto(file) => DType::F32,
        _ => DType::Bf16,
    }
}

/// The model.
fn model(args: &PlanArgs, notices: &mut Vec<String>) -> Result<ModelSize, CliError> {
    match (&args.model, args.params) {
        (Some(name), _) => {
            let config = find_config(name, notices)?;
            config.validate().map_err(CliError::usage)?;
            let config = match &args.lora {
                Some(lora) => lora.on(&config)?.0,
                None => config,
            };
            Ok(ModelSize::of(name, &config))
        }
        (None, _) if args.lora.is_some() => Err(usage!(
            "--lora: the adapters are those of the modules of a model: pass --model"
        )),
        (None, Some(params)) => Ok(ModelSize::with_about(params)),
        (None, None) => Ok(ModelSize::of("gpt2", &shape(args)?)),
    }
}

/// Width of an attention head, unless --heads is given.
const HEAD_WIDTH: u64 = 64;

/// The model of the shape that the flags give, with positions for --seq-len.
fn shape(args: &PlanArgs) -> Result<ModelConfig, CliError> {
    let (Some(layers), Some(hidden)) = (args.layers, args.hidden) else {
        return Err(usage!(
            "expected --model, --params, or --layers and --hidden"
        ));
    };

    check_positive(&[
        ("--layers", Some(layers)),
        ("--hidden", Some(hidden)),
        ("--heads", args.heads),
        ("--kv-heads", args.kv_heads),
        ("--ffn", args.ffn),
        ("--vocab", args.vocab),
        ("--seq-len", args.seq_len),
    ])?;

    let heads = match args.heads {
        Some(heads) => heads,
        None if hidden.is_multiple_of(HEAD_WIDTH) => hidden / HEAD_WIDTH,
        None => {
            return Err(usage!(
                "--hidden {hidden}: not a multiple of {HEAD_WIDTH}, the usual width of a head; pass --heads"
            ));
        }
    };

    let or = |size: Option<u64>, default: usize| size.map_or(default, |size| size as usize);
    let n_embd = hidden as usize;
    let n_layer = layers as usize;
    let n_head = heads as usize;
    let n_inner = args.ffn.unwrap_or(hidden.saturating_mul(4)) as usize;
    let kv_heads = args.kv_heads.unwrap_or(heads);
    let architecture = match args.architecture {
        Some(architecture) => architecture,
        None if kv_heads == heads => Architecture::Gpt2,
        None => Architecture::Llama,
    };

    let config = match architecture {
        Architecture::Gpt2 if kv_heads != heads => {
            return Err(usage!(
                "--architecture gpt2 --kv-heads {kv_heads}: a GPT-2 has as many as --heads, {heads}; use --architecture llama"
            ));
        }
        Architecture::Gpt2 => {
            let gpt2 = GptConfig::gpt2(n_embd, n_layer, n_head);
            ModelConfig::from(GptConfig {
                vocab_size: or(args.vocab, gpt2.vocab_size),
                n_positions: or(args.seq_len, gpt2.n_positions),
                n_inner,
                ..gpt2
            })
        }
        Architecture::Llama => {
            let llama = LlamaConfig::llama2();
            ModelConfig::from(LlamaConfig {
                vocab_size: or(args.vocab, llama.vocab_size),
                max_positions: or(args.seq_len, llama.max_positions),
                hidden: n_embd,
                layers: n_layer,
                heads: n_head,
                kv_heads: kv_heads as usize,
                head_dim: n_embd / n_head,
                intermediate: n_inner,
                ..llama
            })
        }
    };

    config
        .validate()
        .map_err(|e| usage!("--layers {layers} --hidden {hidden}: {e}"))?;
    Ok(config)
}

impl ModelSize {
    /// The sizes of a model.
    fn of(name: &str, config: &ModelConfig) -> Self {
        let tied = config
            .tied_head()
            .then(|| Tie::new("head", "lm_head.weight", config.embedding_name()));
        let shape = config.shape();

        let options = LayoutOptions::default()
            .shard_align_elems(SHARD_ALIGN_ELEMS)
            .ties(tied.into_iter().collect());
        let (units, passes, config) = (config.units(), config.passes(), Some(config.clone()));
        Self {
            name: name.to_owned(),
            units,
            options,
            shape,
            passes,
            config,
            assumed: false,
        }
    }

    /// How tensor parallelism cuts a parameter.
    pub(crate) fn cut_of(&self, param: &ParamSpec) -> TensorCut {
        let config = self.config.as_ref();
        config.map_or(TensorCut::Replicated, |config| config.tensor_cut(param))
    }

    /// The part of the model on one of `ranks` ranks of tensor parallelism.
    ///
    /// # Errors
    /// The shape is assumed, or the parameters cannot be cut.
    fn cut(self, ranks: usize) -> Result<Self, CliError> {
        let units = match (&self.config, ranks) {
            (_, 1) => return Ok(self),
            (Some(config), _) => config.units_of_part(ranks).map_err(CliError::usage)?,
            (None, _) => {
                return Err(usage!(
                    "--tensor-parallel cuts the parameters of a model of known shape: pass --model"
                ));
            }
        };
        Ok(Self { units, ..self })
    }

    /// A transformer of `params` parameters in layers of equal size.
    fn with_about(params: u64) -> Self {
        let shape = TransformerShape::with_about(params);
        let layer = |i: u64| {
            let (start, end) = (
                cut(params, i, shape.layers),
                cut(params, i + 1, shape.layers),
            );
            UnitSpec::new(
                format!("layer.{i}"),
                [ParamSpec::new(format!("layer.{i}.weight"), [end - start])],
            )
        };

        let units = (0..shape.layers).map(layer).collect();
        let pass = |i| Pass {
            forward_reads: vec![i],
            backward_reads: vec![i],
            grads: vec![i],
        };

        Self {
            name: "transformer".to_owned(),
            units,
            options: LayoutOptions::default(),
            shape,
            passes: (0..shape.layers as usize).map(pass).collect(),
            config: None,
            assumed: true,
        }
    }
}

/// The start of part `i` of `parts` nearly equal parts of `whole`.
fn cut(whole: u64, i: u64, parts: u64) -> u64 {
    whole / parts * i + (whole % parts).min(i)
}
