//! The sources of a run's settings. Each is a [`TrainArgs`], of which any setting may be missing:
//! flags override the configuration file, which overrides the run that is resumed.

use zero_alloc::device::DType;
use zero_comm::PrefetchOptions;
use zero_shard::ZeroStage;

use super::args::{MeshArgs, TrainArgs, Unflagged};
use super::muon_flags::MuonArgs;
use super::offload::MIN_SUB_GROUP_ELEMS;
use super::quantise::QuantiseArgs;
use super::record::RunRecord;
use super::stage_choice::StageChoice;
use crate::error::CliError;
use crate::flags::DTypeFlag;
use zero_config::{DsConfig, ZeroOptimization};

/// The properties of a run that decide which settings it can follow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conditions {
    pub(crate) ranks: usize,
    pub(crate) stage: ZeroStage,
    /// Whether the ranks are on GPUs.
    pub(crate) on_gpus: bool,
    /// Whether activations are recomputed from the inputs of blocks.
    pub(crate) checkpointing: bool,
    /// Whether any state is offloaded.
    pub(crate) offloads: bool,
    /// Whether ranks share micro-batches.
    pub(crate) shares_batches: bool,
}

/// The step, the stage and the type of parameters of a checkpoint, which older versions saved
/// without `run.json`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Saved {
    /// The completed steps.
    pub(crate) step: u64,
    pub(crate) stage: u64,
    pub(crate) dtype: Option<DType>,
}

/// The settings of a run by source.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sources {
    pub(crate) flags: TrainArgs,
    /// Those of flags, and of the configuration file where no flag is.
    pub(crate) given: TrainArgs,
    /// Those of the run that is resumed.
    pub(crate) recorded: TrainArgs,
    /// Those that are given, and those that are recorded where none is given.
    pub(crate) all: TrainArgs,
}

impl Sources {
    pub(crate) fn new(flags: &TrainArgs, file: &TrainArgs, recorded: TrainArgs) -> Self {
        let given = flags.or(file);
        let all = given.or(&recorded);
        Self {
            flags: flags.clone(),
            given,
            recorded,
            all,
        }
    }
}

/// The settings of a configuration file. `zero` is its block `zero_optimization` with the sizes for
/// the model, if the block counts. `"auto"` sets nothing.
pub(crate) fn of_file(file: &DsConfig, zero: Option<&ZeroOptimization>) -> TrainArgs {
    let ranks = |ranks: Option<u64>| ranks.map(|ranks| ranks as usize);
    let optimizer = file.optimizer.as_ref();
    let param = |name: &str| {
        let is_auto = file.is_auto(&format!("optimizer.params.{name}"));
        optimizer.filter(|_| !is_auto)
    };
    let muon = optimizer.and_then(|optimizer| optimizer.muon.as_ref());
    let checkpointing = file.activation_checkpointing;
    let partitions = "activation_checkpointing.partition_activations";

    TrainArgs {
        dtype: file.dtype.and_then(DTypeFlag::of),
        lr: param("lr").map(|optimizer| optimizer.lr),
        betas: param("betas").map(|optimizer| [optimizer.hyper.beta1, optimizer.hyper.beta2]),
        eps: param("eps").map(|optimizer| optimizer.hyper.eps),
        weight_decay: param("weight_decay").map(|optimizer| optimizer.hyper.weight_decay),
        clip: file.gradient_clipping,
        activation_checkpointing: checkpointing.map(|_| true),
        partition_activations: checkpointing
            .filter(|_| !file.is_auto(partitions))
            .map(|block| block.partition_activations),
        no_overlap: zero.and_then(|zero| zero.overlap_comm).map(|on| !on),
        bucket_elems: zero.map(|zero| zero.reduce_bucket_elems as usize),
        mesh: MeshArgs {
            shard_group: ranks(zero.and_then(|zero| zero.mics_shard_ranks)),
            hpz: ranks(zero.and_then(|zero| zero.hpz_ranks)),
            ulysses: ranks(file.sequence_ranks),
            tensor_parallel: ranks(file.tensor_ranks),
            ..MeshArgs::default()
        },
        muon: muon.map(MuonArgs::of_file).unwrap_or_default(),
        quantise: zero.map(QuantiseArgs::of_file).unwrap_or_default(),
        unflagged: Unflagged {
            decoupled: optimizer.map(|optimizer| optimizer.hyper.decoupled),
            bias_correction: optimizer.map(|optimizer| optimizer.hyper.bias_correction),
            loss_scaling: file.loss_scaling.clone(),
            groups: file.param_groups.clone(),
            prefetch: zero.map(prefetch),
            sub_group_elems: zero.map(|zero| {
                let elems = zero.sub_group_elems.unwrap_or(u64::MAX);
                elems.max(MIN_SUB_GROUP_ELEMS) as usize
            }),
        },
        ..TrainArgs::default()
    }
}

fn prefetch(zero: &ZeroOptimization) -> PrefetchOptions {
    let ahead = match zero.prefetch_bucket_elems {
        0 => 0,
        _ => usize::MAX,
    };
    PrefetchOptions::default()
        .ahead(ahead)
        .ahead_elems(zero.prefetch_bucket_elems as usize)
        .max_live_elems(zero.max_live_elems as usize)
        .persistence_threshold_elems(zero.persistence_threshold_elems as usize)
}

/// The settings of a run that is resumed. Its seed is that of the checkpoint.
pub(crate) fn of_run(run: &RunRecord) -> TrainArgs {
    let optimizer = &run.optimizer;
    let hyper = &optimizer.hyper;
    let communication = &run.communication;
    let sub_group = communication.sub_group_elems.unwrap_or(usize::MAX);

    let mut settings = TrainArgs {
        dtype: Some(run.dtype),
        steps: Some(run.steps),
        epochs: run.data.epochs,
        pack: run.data.rows.as_ref().map(|rows| rows.packed),
        micro_batch: Some(run.batch.micro_batch as usize),
        grad_accum: Some(run.batch.grad_accum as usize),
        seq_len: Some(run.batch.seq_len),
        lr: Some(optimizer.lr),
        betas: Some([hyper.beta1, hyper.beta2]),
        eps: Some(hyper.eps),
        weight_decay: Some(hyper.weight_decay),
        clip: Some(optimizer.max_grad_norm),
        no_decay_1d: Some(run.param_groups.no_decay_1d),
        activation_checkpointing: Some(run.activations.activation_checkpointing),
        partition_activations: Some(run.activations.partition_activations),
        sequence_parallel: Some(run.activations.sequence_parallel),
        // A run on the host has none.
        recompute_gelu: run.gpu.as_ref().map(|_| run.activations.recompute_gelu),
        reduce_every_micro_batch: Some(communication.reduce_every_micro_batch),
        bucket_elems: Some(communication.bucket_elems),
        no_overlap: Some(!communication.overlap),
        cuda_graph: Some(communication.cuda_graph),
        checkpoint_every: Some(run.saving.checkpoint_every),
        keep_last: run.saving.keep_last,
        check_replicas: run.saving.check_replicas,
        mesh: run.mesh,
        muon: run.muon,
        quantise: run.quantise,
        unflagged: Unflagged {
            decoupled: Some(hyper.decoupled),
            bias_correction: Some(hyper.bias_correction),
            loss_scaling: Some(optimizer.loss_scaling.clone()),
            groups: Some(run.param_groups.groups.clone()),
            prefetch: Some(communication.prefetch()),
            sub_group_elems: Some(sub_group),
        },
        ..TrainArgs::default()
    };

    if let Some(validation) = &run.validation {
        validation.fill(&mut settings);
    }
    if let Some(samples) = &run.samples {
        samples.fill(&mut settings);
    }
    settings
}

/// The sources of a run's settings, and what its checkpoint has apart from `run.json`.
#[derive(Clone, Copy)]
pub(crate) struct RunSources<'a> {
    pub(crate) args: &'a TrainArgs,
    pub(crate) file: Option<&'a DsConfig>,
    pub(crate) recorded: Option<&'a RunRecord>,
    /// The last step, if epochs decide it.
    pub(crate) epoch_steps: Option<u64>,
    /// The checkpoint that the run resumes.
    pub(crate) saved: Option<Saved>,
}

impl<'a> RunSources<'a> {
    /// The configuration file, if its block `zero_optimization` counts: a resumed run keeps its
    /// sizes and places unless the block has a stage.
    pub(crate) fn file_with_block(&self) -> Option<&'a DsConfig> {
        self.file
            .filter(|file| file.has_stage || self.saved.is_none())
    }

    /// The settings without those of `zero_optimization`, whose sizes depend on the model.
    pub(crate) fn sources(&self) -> Sources {
        self.with_sizes(None)
    }

    pub(crate) fn with_sizes(&self, zero: Option<&ZeroOptimization>) -> Sources {
        let file = self.file.map(|file| of_file(file, zero));
        let recorded = self.recorded.map(of_run);
        Sources::new(
            self.args,
            &file.unwrap_or_default(),
            recorded.unwrap_or_default(),
        )
    }

    /// Whether the run chooses its stage: a resumed one keeps its stage.
    pub(crate) fn has_auto_stage(&self) -> bool {
        let in_file = || {
            self.file
                .is_some_and(|file| file.is_auto("zero_optimization.stage"))
        };
        let is_auto = match self.args.stage {
            Some(flag) => flag == StageChoice::Auto,
            None => in_file(),
        };
        is_auto && self.saved.is_none()
    }

    /// The ZeRO stage: by default 3, or DeepSpeed's default 0 with a configuration file. Auto is
    /// resolved before.
    ///
    /// # Errors
    /// A number other than 0 to 3.
    pub(crate) fn stage(&self) -> Result<ZeroStage, CliError> {
        let flag = self.args.stage.and_then(StageChoice::number);
        let of_file = self.file_with_block().map(|file| file.zero.stage.into());
        let recorded = self.recorded.map(|run| run.stage);
        let saved = self.saved.map(|saved| saved.stage);
        let stage = flag.or(of_file).or(recorded).or(saved).unwrap_or(3);
        ZeroStage::from_number(stage)
            .ok_or_else(|| usage!("--stage {stage}: expected 0, 1, 2, 3 or auto"))
    }

    /// The type of parameters of the run that is resumed.
    pub(crate) fn earlier_dtype(&self) -> Option<DType> {
        let recorded = self.recorded.map(|run| run.dtype.into());
        recorded.or(self.saved.and_then(|saved| saved.dtype))
    }

    pub(crate) fn dtype(&self) -> DType {
        let given = self.sources().given.dtype.map(DType::from);
        given.or(self.earlier_dtype()).unwrap_or(DType::F32)
    }

    /// A resumed run has the seed of its checkpoint as a flag.
    pub(crate) fn seed(&self) -> u64 {
        self.args.seed.unwrap_or(0)
    }

    /// The last step. The default ends within a minute on two slow cores.
    pub(crate) fn steps(&self) -> u64 {
        let steps = self.epoch_steps.or(self.sources().all.steps);
        steps.unwrap_or(400)
    }

    /// The conditions of a run at `stage`, before its offload and its groups are known.
    pub(crate) fn conditions(&self, ranks: usize, stage: ZeroStage, on_gpus: bool) -> Conditions {
        Conditions {
            ranks,
            stage,
            on_gpus,
            checkpointing: self.checkpoints_activations(),
            offloads: false,
            shares_batches: false,
        }
    }

    /// Whether the run recomputes activations in backward.
    pub(crate) fn checkpoints_activations(&self) -> bool {
        let settings = self.sources().all;
        settings.activation_checkpointing.unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use zero_optim::OptimizerConfig;

    use super::*;
    use crate::settings::args::parsed;
    use crate::settings::table;

    #[test]
    fn sources_are_in_order() {
        let clip = |clip| TrainArgs {
            clip,
            ..TrainArgs::default()
        };
        let of_file = |clip: &str| {
            let text = format!(r#"{{"gradient_clipping": {clip}}}"#);
            of_file(&DsConfig::parse(&text).unwrap(), None)
        };
        for (flag, file, recorded, expected) in [
            (Some(4.0), "3.0", Some(2.0), Some(4.0)),
            (None, "3.0", Some(2.0), Some(3.0)),
            (None, "\"auto\"", Some(2.0), Some(2.0)),
            (None, "\"auto\"", None, None),
        ] {
            let sources = Sources::new(&clip(flag), &of_file(file), clip(recorded));
            assert_eq!(sources.all.clip, expected);
        }
    }

    /// A record of the first version, without the fields that came later.
    fn run() -> Value {
        json!({
            "format": 1, "run": "0123456789abcdef", "resumed_runs": [], "program": "zero 0.1.0",
            "model": {"name": "nano", "config": {}, "parameters": 1, "weights": "seed 0"},
            "data": {"path": "/a", "default": false, "tokenizer": null, "fingerprint": "0", "tokens": 9},
            "batch": {"ranks": 2, "micro_batch": 4, "grad_accum": 1, "seq_len": 9, "step_tokens": 72},
            "optimizer": OptimizerConfig::default(), "dtype": "fp32", "seed": 0, "steps": 400, "stage": 3,
            "communication": {"bucket_elems": 9, "overlap": true, "gather_ahead": 1,
                "gather_ahead_elems": null, "max_live_elems": null, "persistence_threshold_elems": 0},
            "activation_checkpointing": false, "checkpoint_every": 0, "keep_last": null,
            "device": "auto", "gpu": "H200", "metrics": null
        })
    }

    /// The flag of each row that a resumed run takes up, and a value of its field in `run.json`.
    const RESUMED: &str = "
        --dtype bf16                     => dtype = \"bf16\"
        --steps 7                        => steps = 7
        --micro-batch 2                  => batch.micro_batch = 2
        --grad-accum 3                   => batch.grad_accum = 3
        --seq-len 5                      => batch.seq_len = 5
        --epochs 1.5                     => data.epochs = 1.5
        --lr 0.5                         => optimizer.lr = 0.5
        --eps 0.5                        => optimizer.hyper.eps = 0.5
        --weight-decay 0.5               => optimizer.hyper.weight_decay = 0.5
        --betas 0.5,0.999                => optimizer.hyper.beta1 = 0.5
        --betas 0.9,0.5                  => optimizer.hyper.beta2 = 0.5
        --clip 0.5                       => optimizer.max_grad_norm = 0.5
        --no-decay-1d                    => param_groups.no_decay_1d = true
        --activation-checkpointing       => activation_checkpointing = true
        --recompute-gelu                 => recompute_gelu = true
        --partition-activations          => partition_activations = true
        --sequence-parallel              => sequence_parallel = true
        --reduce-every-micro-batch=false => communication.reduce_every_micro_batch = false
        --bucket-elems 5                 => communication.bucket_elems = 5
        --no-overlap                     => communication.overlap = false
        --cuda-graph                     => communication.cuda_graph = true
        --shard-group 2                  => mesh.shard_group = 2
        --hpz 2                          => mesh.hpz = 2
        --ulysses 2                      => mesh.ulysses = 2
        --tensor-parallel 2              => mesh.tensor_parallel = 2
        --optimizer muon                 => muon.optimizer = \"muon\"
        --muon-lr 0.5                    => muon.muon_lr = 0.5
        --muon-momentum 0.5              => muon.muon_momentum = 0.5
        --muon-adjust match_rms_adamw    => muon.muon_adjust = \"match_rms_adamw\"
        --ns-steps 3                     => muon.ns_steps = 3
        --muon-heads                     => muon.muon_heads = true
        --quantize-params int8           => quantise.quantize_params = \"int8\"
        --quantize-grads int8,int4       => quantise.quantize_grads = \"int8,int4\"
        --quantize-frozen nf4            => quantise.quantize_frozen = \"nf4\"
        --error-feedback                 => quantise.error_feedback = true
        --error-feedback-beta 0.5        => quantise.error_feedback_beta = 0.5
        --error-feedback-reset 5         => quantise.error_feedback_reset = 5
        --checkpoint-every 5             => checkpoint_every = 5
        --keep-last 5                    => keep_last = 5
        --check-replicas 5               => check_replicas = 5
    ";

    /// A run that resumes with a flag has the settings of one that recorded its value.
    #[test]
    fn flags_and_records_agree() {
        let of = |document| of_run(&RunRecord::parse(document).unwrap());
        let shown = |settings: TrainArgs| format!("{:#?}", TrainArgs::default().or(&settings));

        for line in RESUMED.lines().filter(|line| !line.trim().is_empty()) {
            let (flags, field) = line.split_once("=> ").unwrap();
            let (name, value) = field.split_once(" = ").unwrap();
            let mut recorded = run();
            let place = name.split('.').fold(&mut recorded, |at, key| &mut at[key]);
            *place = serde_json::from_str(value).unwrap();
            let flags = parsed(flags);
            assert_eq!(shown(flags.or(&of(run()))), shown(of(recorded)), "{name}");
            // Of this setting ranks compare what it does.
            let (_, row) = table::covering(name).unwrap();
            let is_named = row.flag.split_whitespace().any(|flag| line.contains(flag));
            assert!(
                is_named || name == "communication.reduce_every_micro_batch",
                "{row:?}"
            );
        }
    }

    #[test]
    fn validation_data_and_split_are_one_setting() {
        let recorded = TrainArgs {
            val_data: Some("a".into()),
            eval_every: Some(5),
            ..TrainArgs::default()
        };
        let split = TrainArgs {
            val_split: Some(0.5),
            ..TrainArgs::default()
        };
        let all = split.or(&recorded);
        assert_eq!((all.val_data, all.eval_every), (None, Some(5)));
        assert_eq!(
            TrainArgs::default().or(&recorded).val_data,
            Some("a".into())
        );
    }
}
