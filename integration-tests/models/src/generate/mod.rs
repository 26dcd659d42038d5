//! Generation on the host: the logits of the next token, with keys and values of all tokens before
//! it in a cache.
//!
//! A prompt is one pass over all its tokens, by the operations of training. Each later token reads
//! every weight once, which bounds its time from below. Weights are in fp32 or bf16, all sums in
//! fp32.
//!
//! ```
//! use zero_alloc::device::DType;
//! use zero_models::generate::{Generator, GeneratorOptions, Sampling};
//! use zero_models::{ModelConfig, ops::Threads};
//!
//! let config = ModelConfig::preset("nano").unwrap();
//! let weights = |name: &str, range, out: &mut [f32]| Ok(config.fill_initial(1, name, range, out)?);
//! let options = GeneratorOptions { context: 8, dtype: DType::F32, threads: Threads::new(1).unwrap() };
//! let mut generator = Generator::new(&config, &weights, options).unwrap();
//!
//! let mut logits = generator.feed(&[1, 2, 3]).unwrap();
//! for position in 3..8 {
//!     let token = Sampling::GREEDY.choose(&logits, position).unwrap();
//!     logits = generator.feed(&[token]).unwrap();
//! }
//! ```

mod cache;
mod matrix;
mod sampler;
mod weights;

use std::ops::Range;

use zero_alloc::device::DType;
use zero_trainer::ModelError;

use crate::ModelConfig;
use crate::decoder::block::{Block, Layer, Positions};
use crate::decoder::config::DecoderConfig;
use crate::ops::{Span, Threads, attention};
use cache::Cache;
use weights::{Linear, Weights};

pub use sampler::Sampling;

/// Writes elements of the parameter of a name, a range of them, to a slice of as many.
pub type WeightSource<'a> =
    dyn Fn(&str, Range<u64>, &mut [f32]) -> Result<(), ModelError> + Sync + 'a;

/// What a generator holds.
#[derive(Clone, Debug)]
pub struct GeneratorOptions {
    /// Most tokens, the prompt included; at most the model's positions.
    pub context: usize,
    /// The type of the weights in memory: fp32 or bf16.
    pub dtype: DType,
    /// The threads of all operations.
    pub threads: Threads,
}

/// A model and the tokens that it has seen.
pub struct Generator {
    config: DecoderConfig,
    weights: Weights,
    caches: Vec<Cache>,
    /// The angles of the rotary embedding `[context, d]`.
    table: Vec<f32>,
    context: usize,
    /// Tokens in the caches.
    tokens: usize,
    threads: Threads,
}

impl Generator {
    /// Reads all weights of a valid configuration.
    ///
    /// # Errors
    /// A context of 0 tokens or above the model's positions, another type than fp32 and bf16, or
    /// weights that cannot be read.
    pub fn new(
        config: &ModelConfig,
        source: &WeightSource<'_>,
        options: GeneratorOptions,
    ) -> Result<Self, ModelError> {
        let GeneratorOptions {
            context,
            dtype,
            threads,
        } = options;
        let positions = config.max_positions();
        if context == 0 || context > positions {
            return Err(format!(
                "a context of {context} tokens: the model has positions for 1 to {positions}"
            )
            .into());
        }
        if ![DType::F32, DType::Bf16].contains(&dtype) {
            return Err(format!("weights in {dtype}: generation has fp32 and bf16").into());
        }

        let config = config.decoder();
        let mut table = vec![0.0; config.table_elems(context)];
        config.fill_table(&mut table);
        let caches = (0..config.layers).map(|layer| Cache::new(shape(&config, layer, context)));
        Ok(Self {
            weights: threads.run(|| Weights::read(&config, source, dtype))?,
            caches: caches.collect(),
            table,
            context,
            tokens: 0,
            threads,
            config,
        })
    }

    /// Bytes of weights that a token after the prompt reads.
    pub fn bytes_of_token(&self) -> u64 {
        self.weights.bytes_of_token()
    }

    /// The number of tokens so far.
    pub fn len(&self) -> usize {
        self.tokens
    }

    /// Whether there was no token yet.
    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// Appends `tokens` and returns the logits `[vocab]` of the token after them.
    ///
    /// # Errors
    /// No tokens, more than fit the context, or a token outside the vocabulary.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        if tokens.is_empty() {
            return Err("no tokens to continue".into());
        }
        let left = self.context - self.tokens;
        if tokens.len() > left {
            return Err(format!(
                "{} tokens do not fit the context of {}, of which {left} are left",
                tokens.len(),
                self.context
            )
            .into());
        }
        if let Some(token) = tokens
            .iter()
            .find(|&&token| token as usize >= self.config.vocab)
        {
            let vocab = self.config.vocab;
            return Err(format!("token {token} is outside the vocabulary of {vocab}").into());
        }

        let threads = self.threads.clone();
        Ok(threads.run(|| {
            if self.tokens == 0 {
                return self.pass(tokens);
            }
            let mut logits = Vec::new();
            for token in tokens {
                logits = self.pass(std::slice::from_ref(token));
            }
            logits
        }))
    }

    /// One pass: of all tokens if they are the first, otherwise of one.
    fn pass(&mut self, tokens: &[u32]) -> Vec<f32> {
        let first = self.tokens;
        let width = self.config.width;
        let mut x = vec![0.0; tokens.len() * width];
        for ((position, token), x) in (first..).zip(tokens).zip(x.chunks_exact_mut(width)) {
            self.weights.tokens.row(*token as usize, x);
            if let Some(positions) = &self.weights.positions {
                let mut row = vec![0.0; width];
                positions.row(position, &mut row);
                x.iter_mut().zip(&row).for_each(|(x, y)| *x += y);
            }
        }

        let angles = self.table.get(first * self.config.head_dim..);
        let positions = Positions {
            table: angles.unwrap_or_default(),
            starts: &[],
            span: Span::whole(tokens.len()),
        };
        let mut a = Activations::new(&self.config, tokens.len());
        for (layer, cache) in self.caches.iter_mut().enumerate() {
            let block = self.weights.block(&self.config, layer);
            a.apply(&block, cache, positions, &mut x, first);
        }

        self.tokens += tokens.len();
        let last = &x[x.len() - width..];
        let mut logits = vec![0.0; self.config.vocab];
        let normed = &mut a.normed[..width];
        self.weights
            .norm(&self.config)
            .forward(normed, &mut a.stats, last);
        self.weights.head().product(&mut logits, normed);
        logits
    }
}

/// The activations of a block; each block writes them anew.
struct Activations {
    normed: Vec<f32>,
    stats: Vec<f32>,
    qkv: Vec<f32>,
    raw: Vec<f32>,
    raw_stats: Vec<f32>,
    attended: Vec<f32>,
    lse: Vec<f32>,
    mid: Vec<f32>,
    up: Vec<f32>,
    act: Vec<f32>,
    /// A product that is added to the residual stream.
    sum: Vec<f32>,
}

impl Activations {
    fn new(config: &DecoderConfig, tokens: usize) -> Self {
        let rows = |elems: usize| vec![0.0; tokens * elems];
        Self {
            normed: rows(config.width),
            stats: rows(config.norm.stats()),
            qkv: rows(config.qkv_width()),
            raw: rows(config.normed_heads() * config.head_dim),
            raw_stats: rows(config.normed_heads()),
            attended: rows(config.q_width()),
            lse: rows(config.heads),
            mid: rows(config.width),
            up: rows(config.up_width()),
            act: rows(config.inner),
            sum: rows(config.width),
        }
    }

    /// Replaces the input `x` of a block, of the tokens from `first`, by its output.
    fn apply(
        &mut self,
        block: &Block<'_, &Linear>,
        cache: &mut Cache,
        positions: Positions<'_>,
        x: &mut [f32],
        first: usize,
    ) {
        let width = block.config.width;
        block.norm1.forward(&mut self.normed, &mut self.stats, x);
        let qkv = [&mut self.qkv, &mut self.raw, &mut self.raw_stats].map(|all| &mut all[..]);
        block.qkv(qkv, &self.normed, positions);
        cache.keep(first, &self.qkv);
        self.attend(cache, first);
        block.output.product(&mut self.sum, &self.attended);
        let output = &block.output;
        output.add_residual(&mut self.mid, x, &self.sum, width);

        block
            .norm2
            .forward(&mut self.normed, &mut self.stats, &self.mid);
        block.mlp(&mut self.act, &mut self.up, &self.normed);
        block.down.product(&mut self.sum, &self.act);
        block.down.add_residual(x, &self.mid, &self.sum, width);
    }

    /// Attention's output of the tokens from `first`: of one token from the cache, of several from their
    /// own keys and values.
    fn attend(&mut self, cache: &Cache, first: usize) {
        let cache::Shape {
            heads,
            kv_heads,
            d,
            window,
            scale,
            ..
        } = cache.shape();
        let tokens = self.attended.len() / (heads * d);
        if tokens == 1 {
            let queries = &self.qkv[..heads * d];
            return cache.attend(&mut self.attended, queries, first + 1);
        }
        let shape = attention::Shape {
            batch: 1,
            seq: tokens,
            heads,
            kv_heads,
            d,
            window: window.min(tokens),
            scale,
            products: None,
        };
        let masks = attention::Masks::default();
        attention::forward(&mut self.attended, &mut self.lse, &self.qkv, masks, shape);
    }
}

fn shape(config: &DecoderConfig, layer: usize, context: usize) -> cache::Shape {
    cache::Shape {
        context,
        heads: config.heads,
        kv_heads: config.kv_heads,
        d: config.head_dim,
        window: config.window_of(layer, context),
        scale: config.scale_of(layer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt2::config::GptConfig;
    use crate::llama::config::{Family, LlamaConfig};
    use crate::ops::activation::Activation;

    fn configs() -> Vec<ModelConfig> {
        let llama = LlamaConfig {
            vocab_size: 40,
            max_positions: 24,
            hidden: 16,
            layers: 3,
            heads: 4,
            kv_heads: 2,
            head_dim: 6,
            intermediate: 20,
            initializer_range: 0.3,
            ..LlamaConfig::llama2()
        };
        let with_biases = LlamaConfig {
            qkv_bias: true,
            output_bias: true,
            mlp_bias: true,
            tied_head: true,
            kv_heads: 1,
            ..llama.clone()
        };
        let windowed = LlamaConfig {
            family: Family::Mistral,
            window: Some(5),
            windowed: vec![true, false, true],
            ..llama.clone()
        };
        let with_norms = LlamaConfig {
            family: Family::Qwen3,
            ..llama.clone()
        };
        let gpt2 = GptConfig {
            vocab_size: 40,
            n_positions: 24,
            initializer_range: 0.3,
            ..GptConfig::gpt2(16, 2, 4)
        };
        let scaled = GptConfig {
            activation: Activation::Relu,
            scale_attn_by_inverse_layer_idx: true,
            ..gpt2.clone()
        };
        let llamas = [llama, with_biases, windowed, with_norms];
        let mut all: Vec<_> = llamas.map(ModelConfig::from).into();
        all.extend([gpt2.into(), scaled.into()]);
        all
    }

    fn generator(config: &ModelConfig, context: usize, dtype: DType) -> Generator {
        let source =
            |name: &str, range, out: &mut [f32]| Ok(config.fill_initial(5, name, range, out)?);
        let options = GeneratorOptions {
            context,
            dtype,
            threads: Threads::new(1).unwrap(),
        };
        Generator::new(config, &source, options).unwrap()
    }

    fn distance(a: &[f32], b: &[f32]) -> f32 {
        let pairs = a.iter().zip(b);
        pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }

    /// The cache changes only rounding: in a pass over all tokens nothing is read from it.
    #[test]
    fn token_by_token_is_one_pass() {
        let tokens: Vec<u32> = (0..24).map(|i| (i * 7) % 40).collect();
        for config in configs() {
            for dtype in [DType::F32, DType::Bf16] {
                let mut cached = generator(&config, 24, dtype);
                cached.feed(&tokens[..3]).unwrap();
                for n in 4..=24 {
                    let next = cached.feed(&tokens[n - 1..n]).unwrap();
                    let whole = generator(&config, 24, dtype).feed(&tokens[..n]).unwrap();
                    let distance = distance(&next, &whole);
                    assert!(distance < 1e-4, "{config:?}, {n} tokens: {distance:e}");
                }
            }
        }
    }

    #[test]
    fn bf16_halves_the_bytes_of_a_token() {
        for config in configs() {
            let [wide, narrow] =
                [DType::F32, DType::Bf16].map(|dtype| generator(&config, 4, dtype));
            assert_eq!(wide.bytes_of_token(), 2 * narrow.bytes_of_token());
        }
    }

    #[test]
    fn wrong_use_is_an_error() {
        let config = &configs()[0];
        let mut generator = generator(config, 4, DType::F32);
        assert!(generator.is_empty());
        for (tokens, why) in [
            (&[][..], "no tokens"),
            (&[1, 2, 3, 4, 5], "5 tokens do not fit the context of 4"),
            (&[40], "token 40 is outside the vocabulary of 40"),
        ] {
            let error = generator.feed(tokens).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }

        let source = |_: &str, _, _: &mut [f32]| Err("damaged".into());
        for (context, dtype, why) in [
            (0, DType::F32, "a context of 0 tokens"),
            (25, DType::F32, "positions for 1 to 24"),
            (4, DType::F16, "fp32 and bf16"),
            (4, DType::F32, "damaged"),
        ] {
            let options = GeneratorOptions {
                context,
                dtype,
                threads: Threads::new(1).unwrap(),
            };
            let error = Generator::new(config, &source, options).err().unwrap();
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
