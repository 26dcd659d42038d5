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
use crate::llama::config::LlamaConfig;
use crate::ops::{Span, Threads, attention, rms_norm, rope, swiglu};
use cache::Cache;
use weights::{Block, Mlp, Weights};

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
    weights: Weights,
    caches: Vec<Cache>,
    /// What only the Llama family has.
    rotary: Option<Rotary>,
    vocab: usize,
    context: usize,
    /// Tokens in the caches.
    tokens: usize,
    threads: Threads,
}

/// The rotary positions and the norm of queries and keys.
struct Rotary {
    /// The angles `[context, d]`.
    table: Vec<f32>,
    eps: f32,
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

        let rotary = match config {
            ModelConfig::Gpt2(_) => None,
            ModelConfig::Llama(config) => Some(Rotary::new(config, context)),
        };
        let caches = (0..config.layers()).map(|layer| Cache::new(shape(config, layer, context)));
        Ok(Self {
            weights: threads.run(|| Weights::read(config, source, dtype))?,
            caches: caches.collect(),
            rotary,
            vocab: config.vocab_size(),
            context,
            tokens: 0,
            threads,
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
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= self.vocab) {
            let vocab = self.vocab;
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
        let width = self.weights.norm.width();
        let mut x = vec![0.0; tokens.len() * width];
        for ((position, token), x) in (first..).zip(tokens).zip(x.chunks_exact_mut(width)) {
            self.weights.embedding.row(*token as usize, x);
            if let Some(positions) = &self.weights.positions {
                let mut row = vec![0.0; width];
                positions.row(position, &mut row);
                add(x, &row);
            }
        }

        let layers = self.weights.blocks.iter().zip(&mut self.caches);
        for (block, cache) in layers {
            let attended = attention_of(block, cache, self.rotary.as_ref(), &x, first);
            add(&mut x, &block.output.apply(&attended));
            let out = mlp(&block.mlp, &block.norm2.apply(&x));
            add(&mut x, &out);
        }

        self.tokens += tokens.len();
        let last = &x[x.len() - width..];
        let mut logits = vec![0.0; self.vocab];
        let head = self.weights.head();
        head.product(&mut logits, &self.weights.norm.apply(last));
        logits
    }
}

/// Attention's output before its projection, of the tokens from `first` with the residual `x`.
fn attention_of(
    block: &Block,
    cache: &mut Cache,
    rotary: Option<&Rotary>,
    x: &[f32],
    first: usize,
) -> Vec<f32> {
    let cache::Shape {
        heads,
        kv_heads,
        d,
        window,
        scale,
        ..
    } = cache.shape();
    let mut qkv = block.qkv.apply(&block.norm1.apply(x));
    let width = (heads + 2 * kv_heads) * d;
    let tokens = qkv.len() / width;
    if let Some(rotary) = rotary {
        rotary.apply(&mut qkv, &block.qk_gains, cache.shape(), first);
    }

    cache.keep(first, &qkv);
    let mut out = vec![0.0; tokens * heads * d];
    if tokens == 1 {
        cache.attend(&mut out, &qkv[..heads * d], first + 1);
    } else {
        let shape = attention::Shape {
            batch: 1,
            seq: tokens,
            heads,
            kv_heads,
            d,
            window: window.min(tokens),
            scale,
        };
        let masks = attention::Masks::default();
        let mut lse = vec![0.0; heads * tokens];
        attention::forward(&mut out, &mut lse, &qkv, masks, shape);
    }
    out
}

fn mlp(mlp: &Mlp, x: &[f32]) -> Vec<f32> {
    match mlp {
        Mlp::Plain {
            fc,
            projection,
            activation,
        } => {
            let mut wide = fc.product(x);
            let mut act = vec![0.0; wide.len()];
            activation.forward(&mut act, &mut wide, &fc.bias);
            projection.apply(&act)
        }
        Mlp::SwiGlu { gate_up, down } => {
            let wide = gate_up.apply(x);
            let mut act = vec![0.0; wide.len() / 2];
            swiglu::forward(&mut act, &wide, gate_up.weight.outputs() / 2);
            down.apply(&act)
        }
    }
}

impl Rotary {
    fn new(config: &LlamaConfig, context: usize) -> Self {
        let mut table = vec![0.0; context * config.head_dim];
        config.rope.fill(&mut table, config.head_dim);
        Self {
            table,
            eps: config.rms_norm_eps,
        }
    }

    /// Norms of queries and keys, if `gains` is not empty, and their rotation.
    fn apply(&self, qkv: &mut [f32], gains: &[f32], shape: cache::Shape, first: usize) {
        let cache::Shape {
            heads, kv_heads, d, ..
        } = shape;
        let width = (heads + 2 * kv_heads) * d;
        let tokens = qkv.len() / width;
        let turned = heads + kv_heads;
        if !gains.is_empty() {
            let mut raw = vec![0.0; tokens * turned * d];
            let mut stats = vec![0.0; tokens * turned];
            let of = rms_norm::Heads {
                queries: heads,
                keys: kv_heads,
                d,
                width,
            };
            rms_norm::forward_heads(qkv, &mut raw, &mut stats, gains, of, self.eps);
        }
        let angles = &self.table[first * d..(first + tokens) * d];
        let rows = rope::Rows {
            width,
            turned: turned * d,
            d,
        };
        rope::forward(qkv, angles, &[], Span::whole(tokens), rows);
    }
}

fn shape(config: &ModelConfig, layer: usize, context: usize) -> cache::Shape {
    let [heads, kv_heads, d, window] = match config {
        ModelConfig::Gpt2(c) => [c.n_head, c.n_head, c.head_dim(), context],
        ModelConfig::Llama(c) => [c.heads, c.kv_heads, c.head_dim, c.window_of(layer, context)],
    };
    let scale = match config {
        ModelConfig::Gpt2(c) => c.attention_scale(layer),
        ModelConfig::Llama(c) => attention::scale_of(c.head_dim),
    };
    cache::Shape {
        context,
        heads,
        kv_heads,
        d,
        window,
        scale,
    }
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt2::config::GptConfig;
    use crate::llama::config::Family;
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
