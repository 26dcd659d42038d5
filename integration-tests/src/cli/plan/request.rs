//! The input of a plan: flags override the configuration file, which overrides the defaults.

use zero_alloc::device::DType;
use zero_shard::{LayoutOptions, ParamSpec, Tie, TransformerShape, UnitSpec, Widths, ZeroStage};

use super::PlanArgs;
use crate::cli::CliError;
use crate::cli::flags::{check_positive, check_seq_len, find_model};
use crate::cli::offload::{self, Offloaded};
use crate::config::DsConfig;
use crate::model::config::GptConfig;
use crate::trainer::{OffloadSettings, SHARD_ALIGN_ELEMS};

/// Default elements of a gradient bucket, as in the trainer.
const BUCKET_ELEMS: u64 = 1 << 19;

/// The sizes of a model.
#[derive(Clone, Debug)]
pub(super) struct ModelSize {
    pub(super) name: String,
    pub(super) units: Vec<UnitSpec>,
    pub(super) options: LayoutOptions,
    pub(super) shape: TransformerShape,
    /// Whether the shape is derived from the number of parameters.
    pub(super) assumed: bool,
}

/// The run to plan.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) model: ModelSize,
    pub(super) gpus: u64,
    pub(super) nodes: u64,
    pub(super) gpu_memory_bytes: Option<u64>,
    pub(super) dtype: DType,
    pub(super) micro_batch: u64,
    pub(super) grad_accum: u64,
    pub(super) seq_len: u64,
    pub(super) checkpointing: bool,
    /// What is kept off the device; parameters only at stage 3.
    pub(super) offload: OffloadSettings,
    pub(super) bucket_elems: u64,
    /// Whether to limit the bucket to the largest unit, as the trainer does with a bucket size from a configuration.
    pub(super) trims_bucket: bool,
    /// Elements that stage 3 gathers ahead of their use, at least one unit if not 0; `None`: one unit.
    pub(super) prefetch_elems: Option<u64>,
    /// Maximum number of gathered elements at stage 3.
    pub(super) max_live_elems: u64,
    pub(super) persistence_threshold_elems: u64,
    pub(super) sub_group_elems: u64,
    pub(super) configured_stage: Option<ZeroStage>,
}

impl Request {
    /// Builds the request and the warnings about ignored settings.
    pub(super) fn new(args: &PlanArgs) -> Result<(Self, Vec<String>), CliError> {
        let file = args.config.as_deref().map(DsConfig::open).transpose().map_err(CliError::usage)?;
        let mut notices = file.as_ref().map(|f| f.warnings.clone()).unwrap_or_default();
        if args.gpus == 0 || args.nodes == 0 || !args.gpus.is_multiple_of(args.nodes) {
            let (gpus, nodes) = (args.gpus, args.nodes);
            return Err(CliError::Usage(format!(
                "--gpus {gpus} --nodes {nodes}: expected the same number of GPUs, at least 1, on each node"
            )));
        }
        check_positive(&[
            ("--micro-batch", args.micro_batch),
            ("--grad-accum", args.grad_accum),
            ("--bucket-elems", args.bucket_elems),
        ])?;
        let (model, positions) = model(args, &mut notices)?;
        let seq_len = args.seq_len.unwrap_or(positions.unwrap_or(1024));
        check_seq_len(seq_len, positions)?;
        let batch = file.as_ref().map(|f| f.batch).unwrap_or_default();
        let batch = batch.resolve(args.gpus, args.micro_batch, args.grad_accum, 1).map_err(CliError::usage)?;
        let zero = file.as_ref().map(|f| f.zero_for(model.shape.hidden));
        let zero = zero.as_ref();
        let checkpointing =
            args.activation_checkpointing || file.as_ref().is_some_and(|f| f.activation_checkpointing.is_some());
        let dtype = args.dtype.map_or(file.as_ref().map_or(DType::Bf16, configured_dtype), DType::from);
        let run = Offloaded { stage: ZeroStage::Three, dtype, checkpointing };
        let offload = offload::settings(&args.offload, file.as_ref(), &OffloadSettings::default(), run)?;
        let set_sub_group = zero.and_then(|z| z.sub_group_elems).unwrap_or(u64::MAX);
        let request = Self {
            model,
            gpus: args.gpus,
            nodes: args.nodes,
            gpu_memory_bytes: args.gpu_memory,
            dtype,
            micro_batch: batch.micro_batch,
            grad_accum: batch.grad_accum,
            seq_len,
            checkpointing,
            sub_group_elems: offload::sub_group_elems(set_sub_group as usize, &offload) as u64,
            offload,
            trims_bucket: args.bucket_elems.is_none() && zero.is_some(),
            bucket_elems: args.bucket_elems.or(zero.map(|z| z.reduce_bucket_elems)).unwrap_or(BUCKET_ELEMS),
            prefetch_elems: zero.map(|z| if z.overlaps_at(3) { z.prefetch_bucket_elems } else { 0 }),
            max_live_elems: zero.map_or(u64::MAX, |z| z.max_live_elems),
            persistence_threshold_elems: zero.map_or(0, |z| z.persistence_threshold_elems),
            configured_stage: zero.and_then(|z| ZeroStage::from_number(u64::from(z.stage))),
        };
        Ok((request, notices))
    }

    /// Bytes per element.
    pub(super) fn widths(&self) -> Widths {
        Widths::adam(self.dtype.size_bytes() as u64, self.grad_accum)
    }
}

/// The type that the file selects. `"auto"` is the default of a plan, and without a choice it is DeepSpeed's.
fn configured_dtype(file: &DsConfig) -> DType {
    let is_auto = file.is_auto("bf16.enabled") || file.is_auto("fp16.enabled");
    file.dtype.unwrap_or(if is_auto { DType::Bf16 } else { DType::F32 })
}

/// The model, and its number of positions if that is known.
fn model(args: &PlanArgs, notices: &mut Vec<String>) -> Result<(ModelSize, Option<u64>), CliError> {
    match (&args.model, args.params) {
        (Some(name), _) => {
            let (config, _) = find_model(name, notices)?;
            config.validate().map_err(CliError::usage)?;
            Ok((ModelSize::of(name, &config), Some(config.n_positions as u64)))
        }
        (None, Some(params)) => Ok((ModelSize::with_about(params), None)),
        (None, None) => Err(CliError::Usage("expected --model or --params".to_owned())),
    }
}

impl ModelSize {
    /// The sizes of a GPT-2.
    fn of(name: &str, config: &GptConfig) -> Self {
        let tied = config.tied_head.then(|| Tie::new("head", "lm_head.weight", "transformer.wte.weight"));
        let shape = TransformerShape {
            layers: config.n_layer as u64,
            hidden: config.n_embd as u64,
            heads: config.n_head as u64,
            inner: config.n_inner as u64,
            vocab: config.vocab_size as u64,
        };
        let options = LayoutOptions::default().shard_align_elems(SHARD_ALIGN_ELEMS).ties(tied.into_iter().collect());
        Self { name: name.to_owned(), units: config.units(), options, shape, assumed: false }
    }

    /// A transformer of `params` parameters in layers of equal size.
    fn with_about(params: u64) -> Self {
        let shape = TransformerShape::with_about(params);
        let layer = |i: u64| {
            let (start, end) = (cut(params, i, shape.layers), cut(params, i + 1, shape.layers));
            UnitSpec::new(format!("layer.{i}"), [ParamSpec::new(format!("layer.{i}.weight"), [end - start])])
        };
        let units = (0..shape.layers).map(layer).collect();
        Self { name: "transformer".to_owned(), units, options: LayoutOptions::default(), shape, assumed: true }
    }
}

/// The start of part `i` of `parts` nearly equal parts of `whole`.
fn cut(whole: u64, i: u64, parts: u64) -> u64 {
    whole / parts * i + (whole % parts).min(i)
}
