//! The architectures as one type, by `model_type` in a `config.json` or by the name of a preset.

use std::ops::Range;

use serde::Deserialize;
use serde_json::{Value, json};
use zero_alloc::Pool;
use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_shard::{ParamSpec, TransformerShape, UnitSpec};
use zero_trainer::{ModelError, ModelRanks, Pass};

use crate::config::json::{self, Keys};
use crate::config::{ConfigError, init};
use crate::decoder::config::DecoderConfig;
use crate::decoder::gpu::{self, GpuDecoder, GpuModel};
use crate::decoder::passes::passes;
use crate::decoder::sequence_part::Exchanges;
use crate::decoder::{self, Decoder, HostModel};
use crate::gpt2::config::GptConfig;
use crate::llama::config::{Family, LlamaConfig};
use crate::lora::{self, LoraConfig};
use crate::ops::Threads;
use crate::options::{GpuBytes, ModelOptions};

/// Names of the presets.
pub const PRESETS: [&str; 13] = [
    "nano",
    "gpt2-124m",
    "gpt2-350m",
    "gpt2-774m",
    "gpt2-1.5b",
    "smollm2-135m",
    "qwen2.5-0.5b",
    "llama3.2-1b",
    "llama2-7b",
    "llama3-8b",
    "llama2-13b",
    "llama2-70b",
    "llama3-70b",
];

/// The names of presets on Hugging Face's hub, in lower case and without their owner.
const HUB_NAMES: [(&str, &str); 14] = [
    ("gpt2", "gpt2-124m"),
    ("gpt2-small", "gpt2-124m"),
    ("gpt2-medium", "gpt2-350m"),
    ("gpt2-large", "gpt2-774m"),
    ("gpt2-xl", "gpt2-1.5b"),
    ("llama-2-7b-hf", "llama2-7b"),
    ("llama-2-13b-hf", "llama2-13b"),
    ("llama-2-70b-hf", "llama2-70b"),
    ("meta-llama-3-8b", "llama3-8b"),
    ("meta-llama-3-70b", "llama3-70b"),
    ("llama-3.2-1b", "llama3.2-1b"),
    ("llama-3.2-1b-instruct", "llama3.2-1b"),
    ("smollm2-135m-instruct", "smollm2-135m"),
    ("qwen2.5-0.5b-instruct", "qwen2.5-0.5b"),
];

/// A question about the preset that a name may mean; empty if none is near.
fn meant(name: &str) -> String {
    let name = name.to_lowercase();
    let bare = name.rsplit('/').next().unwrap_or(&name);
    let known = HUB_NAMES.iter().find(|(hub, _)| *hub == bare);
    let similar = || {
        PRESETS
            .into_iter()
            .find(|preset| !bare.is_empty() && (preset.starts_with(bare) || *preset == bare))
    };
    let preset = known.map(|(_, preset)| *preset).or_else(similar);
    preset
        .map(|preset| format!(" (did you mean {preset}?)"))
        .unwrap_or_default()
}

/// The shape of a model.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelConfig {
    /// GPT-2.
    Gpt2(GptConfig),
    /// Llama, Mistral and Qwen.
    Llama(LlamaConfig),
}

/// Calls a method or reads a field of either configuration.
macro_rules! each {
    ($self:expr, $config:ident => $body:expr) => {
        match $self {
            ModelConfig::Gpt2($config) => $body,
            ModelConfig::Llama($config) => $body,
        }
    };
}

impl ModelConfig {
    /// The preset of this name (see [`PRESETS`]).
    ///
    /// # Errors
    /// [`ConfigError::UnknownPreset`].
    pub fn preset(name: &str) -> Result<Self, ConfigError> {
        let found = GptConfig::preset(name)
            .map(Self::Gpt2)
            .or_else(|| LlamaConfig::preset(name).map(Self::Llama));
        found.ok_or_else(|| ConfigError::UnknownPreset {
            name: name.to_owned(),
            meant: meant(name),
            presets: PRESETS.join(", "),
        })
    }

    /// The configuration in a `config.json`, and warnings about it.
    ///
    /// # Errors
    /// Text that is not a JSON object, a missing or mistyped key, an unsupported architecture or
    /// variant of one, or an invalid shape.
    pub fn from_hf_json(text: &str) -> Result<(Self, Vec<String>), ConfigError> {
        let keys = Keys::parse(text)?;
        let (config, warnings) = Self::of_family(&keys)?;
        let Some(lora) = keys.get(lora::KEY) else {
            return Ok((config, warnings));
        };
        let lora = LoraConfig::deserialize(lora);
        let lora = lora.map_err(|e| ConfigError::Lora(format!("the key {:?}: {e}", lora::KEY)))?;
        Ok((config.with_lora(Some(lora))?, warnings))
    }

    fn of_family(keys: &Keys) -> Result<(Self, Vec<String>), ConfigError> {
        let model_type = keys.get("model_type");
        if let Some(family) = model_type.and_then(|v| Family::of(v.as_str()?)) {
            let (config, warnings) = LlamaConfig::from_hf_json(family, keys)?;
            return Ok((Self::Llama(config), warnings));
        }
        let known = "\"gpt2\", \"llama\", \"mistral\", \"qwen2\" and \"qwen3\"";
        keys.expect("model_type", |v| v == "gpt2", known)?;
        let (config, warnings) = GptConfig::from_hf_json(keys)?;
        Ok((Self::Gpt2(config), warnings))
    }

    /// The text of a `config.json` that Hugging Face transformers reads as this model.
    ///
    /// `dtype` is Hugging Face's name of the type of the stored weights: `float32`, `float16` or
    /// `bfloat16`. Adapters are in a key of this program.
    pub fn to_hf_json(&self, dtype: &str) -> String {
        let text: String = each!(self, config => config.to_hf_json(dtype));
        match (self.lora(), serde_json::from_str(&text)) {
            (Some(lora), Ok(Value::Object(mut keys))) => {
                keys.insert(lora::KEY.to_owned(), json!(lora));
                json::text(keys.into(), &[])
            }
            _ => text,
        }
    }

    /// The adapters on the frozen model, if it has any.
    pub fn lora(&self) -> Option<&LoraConfig> {
        each!(self, config => config.lora.as_ref())
    }

    /// The same model with these adapters; `None` for the model alone.
    ///
    /// # Errors
    /// Numbers out of range, or targets that the model does not have.
    pub fn with_lora(mut self, mut lora: Option<LoraConfig>) -> Result<Self, ConfigError> {
        if let Some(lora) = &mut lora {
            let linears = self.decoder().linears();
            let modules = linears.iter().flat_map(|linear| &linear.modules);
            let modules: Vec<_> = modules.map(|(name, _)| *name).collect();
            lora.name_all(&modules);
            lora.check(self.hidden(), &modules)?;
        }
        each!(&mut self, config => config.lora = lora);
        Ok(self)
    }

    /// The modules that have adapters unless others are chosen: those of PEFT.
    pub fn default_lora_targets(&self) -> Vec<String> {
        let names: &[&str] = match self {
            Self::Gpt2(_) => &["c_attn"],
            Self::Llama(_) => &["q_proj", "v_proj"],
        };
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    /// Units of adapters, which are the first ones.
    pub fn adapter_units(&self) -> usize {
        self.decoder().adapter_units()
    }

    /// Elements of all adapters.
    pub fn adapter_elems(&self) -> u64 {
        self.decoder().adapter_elems() as u64
    }

    /// Checks each size and the relations between them.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn validate(&self) -> Result<(), ConfigError> {
        each!(self, config => config.validate())
    }

    /// Checks the configuration, and the options for it.
    ///
    /// # Errors
    /// An invalid configuration, or batch sizes outside the model's limits.
    pub fn check(&self, options: &ModelOptions) -> Result<(), ModelError> {
        self.validate()?;
        self.check_tensor_ranks(options.tensor_ranks)?;
        let part = self.decoder().cut(options.tensor_ranks);
        options.validate(self.max_positions(), [part.heads, part.kv_heads])?;
        let row = options.tokens() * self.hidden();
        if options.partition_activations && !row.is_multiple_of(options.tensor_ranks) {
            return Err(ModelError::from(format!(
                "{} ranks do not divide the {row} elements of a block's input: partitioned activations need tokens x hidden size divisible by tensor parallelism",
                options.tensor_ranks
            )));
        }
        Ok(())
    }

    /// Checks that a GPU computes the model.
    ///
    /// # Errors
    /// A setting that the kernels do not follow, or parts of a block that they do not compute
    /// together.
    pub fn check_on_gpu(&self) -> Result<(), ModelError> {
        if let Self::Gpt2(config) = self {
            config.check_kernels()?;
        }
        self.decoder().check_on_gpu()
    }

    /// The decoder of this shape.
    pub(crate) fn decoder(&self) -> DecoderConfig {
        each!(self, config => config.decoder())
    }

    /// Heads of keys and values.
    pub fn kv_heads(&self) -> usize {
        self.decoder().kv_heads
    }

    /// Elements of a head's queries.
    pub fn head_elems(&self) -> usize {
        self.decoder().head_dim
    }

    /// Elements of activations that a rank sends to the other ranks of its sequences for one
    /// micro-batch; 0 if it shares none. The options must be valid for the configuration.
    pub fn sequence_elems(&self, options: &ModelOptions) -> u64 {
        let exchanges = Exchanges::new(&self.decoder(), options);
        let passes = if options.activation_checkpointing {
            3
        } else {
            2
        };
        (passes * self.layers()) as u64 * exchanges.sent_elems() as u64
    }

    /// Tokens of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        each!(self, config => config.vocab_size)
    }

    /// The longest sequence.
    pub fn max_positions(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.n_positions,
            Self::Llama(config) => config.positions(),
        }
    }

    /// Why no longer sequence than [`max_positions`](Self::max_positions) is computed, if others
    /// compute it.
    pub fn positions_limit(&self) -> Option<&'static str> {
        match self {
            Self::Llama(config) => config.rope.positions_limit(),
            Self::Gpt2(_) => None,
        }
    }

    /// Blocks.
    pub fn layers(&self) -> usize {
        self.decoder().layers
    }

    /// Whether the head is the transposed embedding.
    pub fn tied_head(&self) -> bool {
        each!(self, config => config.tied_head)
    }

    /// The name of the embedding's matrix, which a tied head shares.
    pub fn embedding_name(&self) -> &'static str {
        self.decoder().names.tokens
    }

    /// The prefix of names that files of the model without its head omit.
    pub(crate) fn prefix(&self) -> &'static str {
        self.decoder().names.prefix
    }

    /// The width of the residual stream.
    pub fn hidden(&self) -> usize {
        self.decoder().width
    }

    /// The sizes of a transformer of about this shape.
    pub fn shape(&self) -> TransformerShape {
        let config = self.decoder();
        TransformerShape {
            layers: config.layers as u64,
            hidden: config.width as u64,
            heads: config.heads as u64,
            inner: config.inner as u64,
            vocab: config.vocab as u64,
        }
    }

    /// Floating-point operations of forward and backward, for a token of a sequence of `seq_len`:
    /// six for each factor of a product, or four if it is frozen, and those of attention's products.
    pub fn flops_per_token(&self, seq_len: usize) -> f64 {
        let config = self.decoder();
        let looked_up = match config.tied_head {
            true => config.positions,
            false => config.positions + config.vocab,
        };
        let factors = config.elems() as f64 - (looked_up * config.width) as f64;
        let attention = (config.layers * config.q_width()) as f64 * seq_len as f64;
        let frozen = match config.lora {
            Some(_) => factors - config.adapter_elems() as f64,
            None => 0.0,
        };
        6.0 * factors - 2.0 * frozen + 12.0 * attention
    }

    /// The same model, whose initial weights have another standard deviation.
    pub fn with_initializer_range(mut self, range: f32) -> Self {
        each!(&mut self, config => config.initializer_range = range);
        self
    }

    /// The same model, all of whose probabilities of dropout in training are `probability`.
    pub fn with_dropout(mut self, probability: f32) -> Self {
        match &mut self {
            Self::Gpt2(config) => {
                config.resid_pdrop = probability;
                config.embd_pdrop = probability;
                config.attn_pdrop = probability;
            }
            Self::Llama(config) => config.attention_dropout = probability,
        }
        self
    }

    /// The same model with the probabilities of dropout of another of its architecture.
    pub fn with_dropout_of(mut self, other: &Self) -> Self {
        match (&mut self, other) {
            (Self::Gpt2(config), Self::Gpt2(other)) => {
                config.resid_pdrop = other.resid_pdrop;
                config.embd_pdrop = other.embd_pdrop;
                config.attn_pdrop = other.attn_pdrop;
            }
            (Self::Llama(config), Self::Llama(other)) => {
                config.attention_dropout = other.attention_dropout;
            }
            _ => {}
        }
        self
    }

    /// The same model with the special tokens of another of its architecture, which matter to those
    /// who generate.
    pub fn with_special_tokens_of(mut self, other: &Self) -> Self {
        match (&mut self, other) {
            (Self::Gpt2(config), Self::Gpt2(other)) => {
                config.special_tokens.clone_from(&other.special_tokens);
            }
            (Self::Llama(config), Self::Llama(other)) => {
                config.special_tokens.clone_from(&other.special_tokens);
            }
            _ => {}
        }
        self
    }

    /// Standard deviation of the initial weights.
    pub fn initializer_range(&self) -> f32 {
        each!(self, config => config.initializer_range)
    }

    /// Elements of all parameters: Ψ of the formulas.
    pub fn parameter_count(&self) -> u64 {
        self.decoder().elems() as u64
    }

    /// The units in forward order: `embedding`, `block.0` .. and `head`.
    ///
    /// With a tied head, `head` has only the last norm, and the head's product reads the matrix of
    /// `embedding`.
    pub fn units(&self) -> Vec<UnitSpec> {
        self.decoder().units()
    }

    /// The passes, one per unit.
    pub fn passes(&self) -> Vec<Pass> {
        passes(&self.decoder())
    }

    /// The parameter of this name, if the model has it.
    pub fn param(&self, name: &str) -> Option<ParamSpec> {
        self.units()
            .into_iter()
            .flat_map(|u| u.params)
            .find(|p| p.name == name)
    }

    /// Writes the initial values of elements `range` of parameter `name` to `out`.
    ///
    /// An element's value depends only on `seed`, `name` and its index, so a rank can generate any
    /// part without the rest. It is the same on all machines whose maths libraries have the same
    /// `ln`, `sin` and `cos`.
    ///
    /// # Errors
    /// An unknown parameter, or a range that is outside the parameter or does not have the length
    /// of `out`.
    pub fn fill_initial(
        &self,
        seed: u64,
        name: &str,
        range: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), ConfigError> {
        let param = self
            .param(name)
            .ok_or_else(|| ConfigError::UnknownParameter(name.to_owned()))?;
        let rule = match name.starts_with(lora::PREFIX) {
            true => lora::rule(name, param.shape[1]),
            false => each!(self, config => config.rule(name)),
        };
        init::fill(seed, &param, rule, range.clone(), out)?;
        let config = self.decoder();
        if name == config.names.tokens
            && let Some(token) = config.padding_token
        {
            let row = (token * config.width) as u64;
            let first = row.clamp(range.start, range.end) - range.start;
            let end = (row + config.width as u64).clamp(range.start, range.end) - range.start;
            out[first as usize..end as usize].fill(0.0);
        }
        Ok(())
    }

    /// The exact bytes of activations on the host. The options must be valid for the configuration.
    pub fn activations_bytes(&self, options: &ModelOptions) -> u64 {
        decoder::activations_bytes(&self.decoder(), options)
    }

    /// The exact bytes on a GPU. The options must be valid for the configuration.
    pub fn gpu_bytes(&self, options: &ModelOptions) -> GpuBytes {
        gpu::gpu_bytes(&self.decoder(), options)
    }

    /// The model on the host, with activations from `pool`, for passes on `stream` only.
    ///
    /// # Errors
    /// The configuration or the options are not valid or for other numbers of ranks, or memory ran out.
    pub fn on_host(
        &self,
        options: ModelOptions,
        pool: &Pool<HostDevice>,
        stream: &HostStream,
        threads: Threads,
        ranks: &ModelRanks<HostDevice>,
    ) -> Result<Box<dyn HostModel>, ModelError> {
        self.check(&options)?;
        let config = self.decoder();
        let model = Decoder::new(&config, options, pool, stream, threads, ranks)?;
        Ok(Box::new(model))
    }

    /// The model on a GPU, with activations from `pool`, for passes on `stream` only.
    ///
    /// # Errors
    /// As [`Self::on_host`], sizes that no kernel supports, or NVRTC or cuBLASLt is missing.
    pub fn on_cuda(
        &self,
        options: ModelOptions,
        pool: &Pool<CudaDevice>,
        stream: &CudaStream,
        ranks: &ModelRanks<CudaDevice>,
    ) -> Result<Box<dyn GpuModel>, ModelError> {
        self.on_cuda_with_logits(options, None, pool, stream, ranks)
    }

    /// [`Self::on_cuda`] with the logits of `rows` tokens in memory at once, at least of one. The
    /// gradient of the head's matrix is summed over tokens in parts of `rows`.
    ///
    /// # Errors
    /// As for [`Self::on_cuda`].
    pub fn on_cuda_with_logits(
        &self,
        options: ModelOptions,
        rows: Option<usize>,
        pool: &Pool<CudaDevice>,
        stream: &CudaStream,
        ranks: &ModelRanks<CudaDevice>,
    ) -> Result<Box<dyn GpuModel>, ModelError> {
        self.check(&options)?;
        self.check_on_gpu()?;
        let config = self.decoder();
        let model = GpuDecoder::new(&config, &options, rows, pool, stream, ranks)?;
        Ok(Box::new(model))
    }
}

impl From<GptConfig> for ModelConfig {
    fn from(config: GptConfig) -> Self {
        Self::Gpt2(config)
    }
}

impl From<LlamaConfig> for ModelConfig {
    fn from(config: LlamaConfig) -> Self {
        Self::Llama(config)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use zero_trainer::param_groups::ParamKind;

    use super::*;
    use crate::param_kind;

    fn whole(config: &ModelConfig, seed: u64, name: &str) -> Vec<f32> {
        let numel: u64 = config.param(name).unwrap().shape.iter().product();
        let mut out = vec![f32::NAN; numel as usize];
        config.fill_initial(seed, name, 0..numel, &mut out).unwrap();
        out
    }

    fn std_of(values: &[f32]) -> f32 {
        let sum: f64 = values.iter().map(|x| f64::from(*x).powi(2)).sum();
        (sum / values.len() as f64).sqrt() as f32
    }

    #[test]
    fn every_parameter_has_the_deviation_that_gpt2_gives_it() {
        let config = ModelConfig::from(GptConfig {
            n_layer: 2,
            tied_head: false,
            ..GptConfig::preset("nano").unwrap()
        });

        let close = |name: &str, std: f32| {
            let values = whole(&config, 1, name);
            // Five standard errors of a deviation: std / sqrt(2 n).
            let margin = 5.0 * std / (2.0 * values.len() as f32).sqrt();
            assert!(
                (std_of(&values) - std).abs() < margin,
                "{name}: {} for {std}",
                std_of(&values)
            );
        };

        for name in [
            "transformer.wte.weight",
            "transformer.wpe.weight",
            "lm_head.weight",
        ] {
            close(name, 0.02);
        }

        close("transformer.h.1.attn.c_attn.weight", 0.02);
        close("transformer.h.1.mlp.c_fc.weight", 0.02);
        close("transformer.h.0.attn.c_proj.weight", 0.01);
        close("transformer.h.1.mlp.c_proj.weight", 0.01);

        for unit in config.units() {
            for name in unit.params.iter().map(|p| p.name.as_str()) {
                if name.ends_with("bias") {
                    assert!(whole(&config, 1, name).iter().all(|x| *x == 0.0), "{name}");
                } else if name.contains("ln_") {
                    assert!(whole(&config, 1, name).iter().all(|x| *x == 1.0), "{name}");
                }
            }
        }
    }

    #[test]
    fn other_seeds_and_parameters_get_other_values() {
        let config = ModelConfig::preset("nano").unwrap();
        let name = "transformer.h.0.mlp.c_fc.weight";
        assert_eq!(whole(&config, 1, name), whole(&config, 1, name));
        assert_ne!(whole(&config, 1, name), whole(&config, 2, name));
        assert_ne!(
            whole(&config, 1, name),
            whole(&config, 1, "transformer.h.1.mlp.c_fc.weight")
        );
    }

    #[test]
    fn a_part_that_crosses_tasks_is_the_same_part_of_the_whole() {
        let config = ModelConfig::from(GptConfig {
            vocab_size: 1200,
            ..GptConfig::preset("nano").unwrap()
        });
        let name = "transformer.wte.weight";
        let all = whole(&config, 5, name);
        let range = 3..2 * init::CHUNK as u64 + 3;
        let mut part = vec![0.0; 2 * init::CHUNK];
        config.fill_initial(5, name, range, &mut part).unwrap();
        assert!(part == all[3..2 * init::CHUNK + 3]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn any_part_is_the_same_part_of_the_whole(a in 0u64..=512, b in 0u64..=512) {
            let config = ModelConfig::from(GptConfig {
                n_embd: 4, n_head: 1, n_inner: 16, vocab_size: 128, ..GptConfig::preset("nano").unwrap()
            });
            let name = "transformer.wte.weight";
            let (a, b) = (a.min(b), a.max(b));
            let mut part = vec![0.0; (b - a) as usize];
            config.fill_initial(9, name, a..b, &mut part).unwrap();
            prop_assert_eq!(&part[..], &whole(&config, 9, name)[a as usize..b as usize]);
        }
    }

    #[test]
    fn an_unknown_name_and_a_wrong_range_are_errors() {
        let config = ModelConfig::preset("nano").unwrap();
        let error = |name, range, len| {
            let mut out = vec![0.0; len];
            config
                .fill_initial(0, name, range, &mut out)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            error("lm_head.weight", 0..1, 1),
            "the model has no parameter \"lm_head.weight\""
        );
        let ln = "transformer.ln_f.bias";
        let expected = "elements 0..129 of \"transformer.ln_f.bias\" (128 elements) do not fit a buffer of 129";
        assert_eq!(error(ln, 0..129, 129), expected);
        assert!(error(ln, 0..4, 5).contains("a buffer of 5"));
        #[expect(clippy::reversed_empty_ranges, reason = "the case under test")]
        let reversed = 4..0;
        assert!(error(ln, reversed, 4).contains("elements 4..0"));
    }

    #[test]
    fn an_unknown_preset_lists_those_that_exist() {
        let error = |name| ModelConfig::preset(name).unwrap_err().to_string();
        let list = PRESETS.join(", ");
        assert_eq!(
            error("gpt5"),
            format!("no model preset \"gpt5\"; the presets are {list}")
        );
        for (name, meant) in [
            ("gpt2", "gpt2-124m"),
            ("openai-community/gpt2-xl", "gpt2-1.5b"),
            ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
            ("HuggingFaceTB/SmolLM2-135M", "smollm2-135m"),
            ("llama3-", "llama3-8b"),
        ] {
            let error = error(name);
            assert!(error.contains(&format!("did you mean {meant}?")), "{error}");
        }
    }

    fn sum_of_units(config: &ModelConfig) -> u64 {
        let units = config.units();
        let params = units.iter().flat_map(|unit| &unit.params);
        params.map(|p| p.shape.iter().product::<u64>()).sum()
    }

    #[test]
    fn presets_have_hugging_face_parameter_counts() {
        for (name, count) in [
            ("gpt2-124m", 124_439_808),
            ("gpt2-350m", 354_823_168),
            ("gpt2-774m", 774_030_080),
            ("gpt2-1.5b", 1_557_611_200),
            ("llama2-7b", 6_738_415_616),
            ("llama2-13b", 13_015_864_320),
            ("llama2-70b", 68_976_648_192),
            ("llama3-8b", 8_030_261_248),
            ("llama3-70b", 70_553_706_496),
            ("llama3.2-1b", 1_235_814_400),
            ("smollm2-135m", 134_515_008),
            ("qwen2.5-0.5b", 494_032_768),
        ] {
            let config = ModelConfig::preset(name).unwrap();
            assert_eq!(config.parameter_count(), count, "{name}");
        }
    }

    /// Biases, norms of heads, and tied heads and others.
    #[test]
    fn the_count_is_that_of_the_units() {
        for (family, bias) in [(Family::Llama, true), (Family::Qwen3, false)] {
            for name in PRESETS {
                let Some(preset) = LlamaConfig::preset(name) else {
                    continue;
                };
                let config = ModelConfig::from(LlamaConfig {
                    family,
                    output_bias: bias,
                    mlp_bias: bias,
                    tied_head: bias,
                    ..preset
                });
                assert_eq!(sum_of_units(&config), config.parameter_count(), "{name}");
            }
        }
    }

    #[test]
    fn only_an_untied_head_has_a_matrix() {
        let [tied, untied] = [true, false].map(|tied_head| {
            let nano = GptConfig::preset("nano").unwrap();
            ModelConfig::from(GptConfig { tied_head, ..nano })
        });
        assert_eq!(tied.param("lm_head.weight"), None);
        assert_eq!(untied.param("lm_head.weight").unwrap().shape, [256, 128]);
        assert_eq!(untied.parameter_count(), tied.parameter_count() + 256 * 128);
        assert_eq!(sum_of_units(&untied), untied.parameter_count());
        let units = untied.units();
        let last = units.last().unwrap().params.last().unwrap();
        assert_eq!(last.name, "lm_head.weight");
    }

    #[test]
    fn presets_are_valid_and_have_layouts() {
        for name in PRESETS {
            let config = ModelConfig::preset(name).unwrap();
            config.validate().unwrap();
            assert_eq!(config.units().len(), config.layers() + 2, "{name}");
            assert_eq!(sum_of_units(&config), config.parameter_count(), "{name}");
            assert!(config.param(config.embedding_name()).is_some(), "{name}");
            zero_shard::Layout::new(&config.units(), 3, 64).unwrap();
        }
    }

    #[test]
    fn what_is_written_reads_back_the_same() {
        for name in PRESETS {
            let config = ModelConfig::preset(name).unwrap();
            let text = config.to_hf_json("float32");
            let read = ModelConfig::from_hf_json(&text);
            assert_eq!(read, Ok((config, vec![])), "{text}");
        }
    }

    #[test]
    fn every_parameter_has_its_kind() {
        for name in PRESETS {
            for unit in ModelConfig::preset(name).unwrap().units() {
                for param in unit.params {
                    let expected = match param.shape.len() {
                        1 if param.name.ends_with(".bias") && !param.name.contains("ln_") => {
                            ParamKind::Bias
                        }
                        1 => ParamKind::Norm,
                        _ if unit.name == "embedding" => ParamKind::Embedding,
                        _ => ParamKind::Linear,
                    };
                    assert_eq!(param_kind(&param.name), expected, "{}", param.name);
                }
            }
        }
    }
}
