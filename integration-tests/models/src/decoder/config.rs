//! The configuration of a decoder-only transformer: the sizes and the parts of a block that families
//! choose, and the names and the cuts of its parameters.
//!
//! A block is `mid = x + attention(norm x)`, then `mid + mlp(norm mid)`. A family maps its
//! `config.json` to a [`DecoderConfig`]; host, GPU and generation compute what that says.

use std::ops::Range;

use zero_shard::{ParamSpec, TensorCut, UnitSpec};

use super::block_params::BlockParams;
use crate::config::rope::Rope;
use crate::lora::{self, LoraConfig};
use crate::ops::Heads;
use crate::ops::linear::MatrixOrder;
use crate::ops::mlp::Mlp;
use crate::ops::norm::NormKind;
use crate::options::ModelOptions;

/// The name of an untied head's matrix.
const HEAD: &str = "lm_head.weight";

/// Sites of the dropouts of adapters: this bit, and the module's place among those of all blocks.
const ADAPTER_SITES: u32 = 1 << 31;

/// Modules of a block at most.
const PLACES: u32 = 8;

/// The shape of a decoder, and the parts of its blocks.
#[derive(Clone, Debug)]
pub(crate) struct DecoderConfig {
    pub(crate) names: &'static Names,
    /// Tokens of the vocabulary.
    pub(crate) vocab: usize,
    /// Width of the residual stream, C.
    pub(crate) width: usize,
    /// Blocks.
    pub(crate) layers: usize,
    /// Heads of queries.
    pub(crate) heads: usize,
    /// Heads of keys, and of values.
    pub(crate) kv_heads: usize,
    /// Elements of a head.
    pub(crate) head_dim: usize,
    /// Width inside the MLP, F.
    pub(crate) inner: usize,
    pub(crate) norm: NormKind,
    /// Added to the variance, or the mean square, in a norm.
    pub(crate) eps: f32,
    pub(crate) mlp: Mlp,
    pub(crate) order: MatrixOrder,
    pub(crate) biases: Biases,
    /// Whether queries and keys have norms.
    pub(crate) qk_norm: bool,
    /// Rows of the embedding of positions; 0 if there is none.
    pub(crate) positions: usize,
    /// The rotation of queries and keys.
    pub(crate) rope: Option<Rope>,
    /// The factor of attention's scores.
    pub(crate) scale: f32,
    /// Whether the scores of block i, from 0, are divided by i + 1, too.
    pub(crate) scale_by_layer: bool,
    /// Keys that a query of the layers in `windowed` sees.
    pub(crate) window: Option<usize>,
    /// Whether each layer has the window; a layer without an entry has it.
    pub(crate) windowed: Vec<bool>,
    pub(crate) dropout: Dropouts,
    /// Whether the head is the transposed embedding.
    pub(crate) tied_head: bool,
    /// The token whose embedding is not trained where it is looked up.
    pub(crate) padding_token: Option<usize>,
    /// Adapters; the rest is then frozen.
    pub(crate) lora: Option<LoraConfig>,
}

/// A linear layer of a block: the modules that one product computes, with their outputs.
pub(crate) struct LinearModules {
    pub(crate) inputs: usize,
    pub(crate) modules: Vec<(&'static str, usize)>,
}

/// The adapter of a module.
pub(crate) struct ModuleAdapter {
    /// The outputs of the linear layer that are the module's.
    pub(crate) outputs: Range<usize>,
    pub(crate) a: ParamSpec,
    pub(crate) b: ParamSpec,
    /// The number of the module in its block.
    pub(crate) place: u32,
}

/// Which linear layers have biases.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Biases {
    /// That of queries, keys and values.
    pub(crate) qkv: bool,
    /// That of attention's output.
    pub(crate) output: bool,
    /// Those of the MLP.
    pub(crate) mlp: bool,
}

/// The probabilities with which training drops elements.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Dropouts {
    /// Of the embedding's output.
    pub(crate) embedding: f32,
    /// Of attention's probabilities.
    pub(crate) attention: f32,
    /// Of what attention and the MLP add to the residual stream; `None` if the family has no such
    /// dropout. On GPUs it needs biases before layer norms.
    pub(crate) residual: Option<f32>,
}

/// The names of a family's parameters.
#[derive(Debug)]
pub(crate) struct Names {
    /// The family in messages about its gradients.
    pub(crate) family: &'static str,
    /// The prefix of names that files of the model without its head omit.
    pub(crate) prefix: &'static str,
    /// The token embedding.
    pub(crate) tokens: &'static str,
    /// The position embedding, in families that have one.
    pub(crate) positions: &'static str,
    /// A block, up to its number.
    pub(crate) block: &'static str,
    /// The last norm.
    pub(crate) norm: &'static str,
    /// The modules of a block. Those of one linear layer are neighbours in their unit, and one
    /// product reads them; a single module has queries, keys and values in its columns.
    pub(crate) norm1: &'static str,
    pub(crate) qkv: &'static [&'static str],
    /// The norms of queries and of keys.
    pub(crate) qk_norm: [&'static str; 2],
    pub(crate) output: &'static str,
    pub(crate) norm2: &'static str,
    pub(crate) up: &'static [&'static str],
    pub(crate) down: &'static str,
}

impl DecoderConfig {
    /// A decoder without sizes and without any part that only some families have.
    pub(crate) fn empty(names: &'static Names) -> Self {
        Self {
            names,
            vocab: 0,
            width: 0,
            layers: 0,
            heads: 0,
            kv_heads: 0,
            head_dim: 0,
            inner: 0,
            norm: NormKind::Rms,
            eps: 0.0,
            mlp: Mlp::SwiGlu,
            order: MatrixOrder::OutputsFirst,
            biases: Biases::default(),
            qk_norm: false,
            positions: 0,
            rope: None,
            scale: 1.0,
            scale_by_layer: false,
            window: None,
            windowed: Vec::new(),
            dropout: Dropouts::default(),
            tied_head: false,
            padding_token: None,
            lora: None,
        }
    }

    /// The configuration of a block's part on one of the ranks of tensor parallelism.
    pub(crate) fn cut(&self, ranks: usize) -> Self {
        Self {
            heads: self.heads / ranks,
            kv_heads: self.kv_heads / ranks,
            inner: self.inner / ranks,
            ..self.clone()
        }
    }

    /// Elements of a token's queries.
    pub(crate) fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// The heads of a token's queries, keys and values.
    pub(crate) fn qkv_heads(&self) -> Heads {
        Heads {
            queries: self.heads,
            keys: self.kv_heads,
            d: self.head_dim,
        }
    }

    /// Elements of a token's queries, keys and values.
    pub(crate) fn qkv_width(&self) -> usize {
        self.qkv_heads().width()
    }

    /// Outputs of the MLP's first matrix.
    pub(crate) fn up_width(&self) -> usize {
        self.mlp.up_width(self.inner)
    }

    /// Heads of a token that are normed: of queries and keys, if they have norms.
    pub(crate) fn normed_heads(&self) -> usize {
        match self.qk_norm {
            true => self.qkv_heads().turned(),
            false => 0,
        }
    }

    /// Elements of the table of angles.
    pub(crate) fn table_elems(&self, seq: usize) -> usize {
        self.rope.map_or(0, |_| seq * self.head_dim)
    }

    /// Writes the angles of the first positions to the table.
    pub(crate) fn fill_table(&self, table: &mut [f32]) {
        if let Some(rope) = self.rope {
            rope.fill(table, self.head_dim);
        }
    }

    /// Keys that a query of a layer sees in sequences of `seq` tokens.
    pub(crate) fn window_of(&self, layer: usize, seq: usize) -> usize {
        match self.window {
            Some(window) if self.windowed.get(layer).copied().unwrap_or(true) => window.min(seq),
            _ => seq,
        }
    }

    /// The factor of the scores of block `layer`, from 0.
    pub(crate) fn scale_of(&self, layer: usize) -> f32 {
        match self.scale_by_layer {
            true => self.scale / (layer + 1) as f32,
            false => self.scale,
        }
    }

    /// The site of the dropout of a block's attention, which those of the residual stream follow.
    /// Site 0 is the embedding's.
    pub(crate) fn dropout_site(&self, layer: usize) -> u32 {
        let sites = self.dropout.residual.map_or(1, |_| 3);
        1 + sites * layer as u32
    }

    /// The site of the dropout of the adapter of module `place` of a block.
    pub(crate) fn adapter_site(layer: usize, place: u32) -> u32 {
        ADAPTER_SITES | (layer as u32 * PLACES + place)
    }

    /// Probability of the dropout of the residual stream.
    pub(crate) fn residual_dropout(&self) -> f32 {
        self.dropout.residual.unwrap_or(0.0)
    }

    /// Whether training drops elements.
    pub(crate) fn drops(&self) -> bool {
        let all = self.dropout;
        let of_adapters = self.lora.as_ref().map_or(0.0, |lora| lora.dropout);
        let residual = self.residual_dropout();
        [all.embedding, all.attention, residual, of_adapters] != [0.0; 4]
    }

    /// Elements of the gradients of a block of which each rank of tensor parallelism has a part of
    /// the sum: those of the norms of heads, and with sequence parallelism of all norms. If the
    /// block has adapters, those of their matrices that are not cut, of which one side is the
    /// width.
    pub(crate) fn partial_elems(&self, options: &ModelOptions) -> usize {
        if let Some(lora) = &self.lora {
            return match options.tensor_ranks {
                1 => 0,
                _ => lora.r * self.width * self.adapters(0).iter().flatten().count(),
            };
        }
        let of_heads = match self.qk_norm && options.tensor_ranks > 1 {
            true => 2 * self.head_dim,
            false => 0,
        };
        let of_norms = match options.sequence_parallel {
            true => 2 * self.norm.params() * self.width,
            false => 0,
        };
        of_heads + of_norms
    }

    /// Whether anything is trained that a block's input depends on. Otherwise its gradient is not
    /// computed.
    pub(crate) fn trains_before(&self, layer: usize) -> bool {
        self.lora.is_none() || layer > 0
    }

    /// Units of adapters, which are the first ones.
    pub(crate) fn adapter_units(&self) -> usize {
        self.lora.as_ref().map_or(0, |_| self.layers)
    }

    /// The adapters of a block's linear layers, in the order of [`Self::linears`].
    pub(crate) fn adapters(&self, layer: usize) -> [Vec<ModuleAdapter>; 4] {
        let Some(lora) = &self.lora else {
            return Default::default();
        };
        let block = format!("{}{}{layer}", lora::PREFIX, self.names.block);
        let mut place = 0;
        self.linears().map(|linear| {
            let mut end = 0;
            let mut adapters = Vec::new();
            for (module, outputs) in linear.modules {
                end += outputs;
                place += 1;
                if lora.adapts(module) {
                    let param = |matrix, shape: [usize; 2]| {
                        let name = format!("{block}.{module}.{matrix}.weight");
                        ParamSpec::new(name, shape.map(wide))
                    };
                    adapters.push(ModuleAdapter {
                        outputs: end - outputs..end,
                        a: param("lora_A", [lora.r, linear.inputs]),
                        b: param("lora_B", [outputs, lora.r]),
                        place,
                    });
                }
            }
            adapters
        })
    }

    /// The unit of a block's adapters.
    fn adapter_unit(&self, layer: usize) -> UnitSpec {
        let adapters = self.adapters(layer).into_iter().flatten();
        let params = adapters.flat_map(|adapter| [adapter.a, adapter.b]);
        UnitSpec::new(format!("block.{layer}.lora"), params.collect::<Vec<_>>())
    }

    /// Elements of all adapters.
    pub(crate) fn adapter_elems(&self) -> u128 {
        self.adapter_units() as u128 * elems_of(&self.adapter_unit(0).params)
    }

    /// Elements of all parameters.
    pub(crate) fn elems(&self) -> u128 {
        elems_of(&self.embedding_params())
            + self.layers as u128 * elems_of(&self.params_of_block(0))
            + elems_of(&self.head_params())
            + self.adapter_elems()
    }

    /// The units in forward order: `embedding`, `block.0` .. and `head`; before them the adapters of
    /// all blocks, if there are any.
    ///
    /// With a tied head, `head` has only the last norm, and the head's product reads the matrix of
    /// `embedding`.
    pub(crate) fn units(&self) -> Vec<UnitSpec> {
        let adapters = (0..self.adapter_units()).map(|layer| self.adapter_unit(layer));
        let mut units: Vec<_> = adapters.collect();
        units.push(UnitSpec::new("embedding", self.embedding_params()));
        for layer in 0..self.layers {
            let params = self.params_of_block(layer);
            units.push(UnitSpec::new(format!("block.{layer}"), params));
        }
        units.push(UnitSpec::new("head", self.head_params()));
        units
    }

    /// The embeddings of tokens and, if there is one, of positions.
    pub(crate) fn embedding_params(&self) -> Vec<ParamSpec> {
        let param = |name: &str, rows: usize| ParamSpec::new(name, [rows, self.width].map(wide));
        let mut params = vec![param(self.names.tokens, self.vocab)];
        if self.positions > 0 {
            params.push(param(self.names.positions, self.positions));
        }
        params
    }

    /// The last norm and, unless the head is the embedding, the head's matrix.
    fn head_params(&self) -> Vec<ParamSpec> {
        let mut params = self.norm_params(self.names.norm).concat();
        params.extend(self.head_matrix());
        params
    }

    /// The gain of a norm, and its bias if it has one.
    pub(crate) fn norm_params(&self, module: &str) -> [Vec<ParamSpec>; 2] {
        let param = |kind: &str| ParamSpec::new(format!("{module}.{kind}"), [wide(self.width)]);
        let bias = match self.norm {
            NormKind::Layer => vec![param("bias")],
            NormKind::Rms => Vec::new(),
        };
        [vec![param("weight")], bias]
    }

    /// The matrix of a head that is not the embedding.
    pub(crate) fn head_matrix(&self) -> Option<ParamSpec> {
        let shape = [self.vocab, self.width].map(wide);
        (!self.tied_head).then(|| ParamSpec::new(HEAD, shape))
    }

    /// All parameters of a block, in the order of the unit.
    fn params_of_block(&self, layer: usize) -> Vec<ParamSpec> {
        let mut all = Vec::new();
        self.block_params(layer).map(|params| all.extend(params));
        all
    }

    /// The linear layers of a block: `qkv`, `output`, `up` and `down`.
    pub(crate) fn linears(&self) -> [LinearModules; 4] {
        let names = self.names;
        let kv = self.kv_heads * self.head_dim;
        let qkv = match names.qkv.len() {
            1 => vec![self.qkv_width()],
            _ => vec![self.q_width(), kv, kv],
        };
        let up = vec![self.up_width() / names.up.len(); names.up.len()];
        let linear = |inputs, modules: &[&'static str], outputs: &[usize]| LinearModules {
            inputs,
            modules: modules
                .iter()
                .copied()
                .zip(outputs.iter().copied())
                .collect(),
        };
        [
            linear(self.width, names.qkv, &qkv),
            linear(self.q_width(), &[names.output], &[self.width]),
            linear(self.width, names.up, &up),
            linear(self.inner, &[names.down], &[self.width]),
        ]
    }

    /// The parameters of a block: each is one or several tensors, or none.
    pub(crate) fn block_params(&self, layer: usize) -> BlockParams<Vec<ParamSpec>> {
        let names = self.names;
        let name = |module: &str| format!("{}{layer}.{module}", names.block);
        // The weights of the modules of a linear layer, then their biases.
        let linear = |linear: LinearModules, biased: bool| {
            let of = |kind: &str, shape: &dyn Fn(u64) -> Vec<u64>| -> Vec<_> {
                let modules = linear.modules.iter();
                modules
                    .map(|&(module, outputs)| {
                        ParamSpec::new(format!("{}.{kind}", name(module)), shape(wide(outputs)))
                    })
                    .collect()
            };
            let inputs = wide(linear.inputs);
            let weights = of("weight", &|outputs| match self.order {
                MatrixOrder::InputsFirst => vec![inputs, outputs],
                MatrixOrder::OutputsFirst => vec![outputs, inputs],
            });
            let biases = of("bias", &|outputs| vec![outputs]);
            [weights, if biased { biases } else { Vec::new() }]
        };

        let [qkv, output, up, down] = self.linears();
        let gains = names.qk_norm.iter().filter(|_| self.qk_norm);
        let gains = gains.map(|module| {
            ParamSpec::new(format!("{}.weight", name(module)), [wide(self.head_dim)])
        });

        BlockParams {
            norm1: self.norm_params(&name(names.norm1)),
            qkv: linear(qkv, self.biases.qkv),
            qk_norm: gains.collect(),
            output: linear(output, self.biases.output),
            norm2: self.norm_params(&name(names.norm2)),
            up: linear(up, self.biases.mlp),
            down: linear(down, self.biases.mlp),
        }
    }

    /// How tensor parallelism cuts the parameter of this name.
    ///
    /// The first matrix of attention and of the MLP is cut by its outputs, so that each rank has
    /// whole heads; the second by its inputs, so that the ranks' outputs are summed. Embedding and
    /// head are cut by tokens. Norms, the biases of second matrices and positions are the same on
    /// all ranks. An adapter is cut as its matrix: B by the outputs of a first one, and A by the
    /// inputs of a second.
    pub(crate) fn cut_of(&self, name: &str) -> TensorCut {
        let names = self.names;
        let dim = |dim, blocks| TensorCut::Dim { dim, blocks };
        if [names.tokens, HEAD].contains(&name) {
            return dim(0, 1);
        }
        let Some((module, kind)) = name.rsplit_once('.') else {
            return TensorCut::Replicated;
        };
        let (module, matrix) = module.rsplit_once(".lora_").unwrap_or((module, ""));
        let is_any = |modules: &[&str]| modules.iter().any(|&end| module.ends_with(end));
        let is_first = is_any(names.qkv) || is_any(names.up);
        let is_second = is_any(&[names.output, names.down]);
        // Queries, keys and values of one matrix are cut by heads, each.
        let blocks = match is_any(names.qkv) && names.qkv.len() == 1 {
            true => 3,
            false => 1,
        };
        match (matrix, kind, self.order) {
            ("B", _, _) if is_first => dim(0, blocks),
            ("A", _, _) if is_second => dim(1, 1),
            ("A" | "B", _, _) => TensorCut::Replicated,
            (_, "bias", _) if is_first => dim(0, blocks),
            (_, "weight", MatrixOrder::InputsFirst) if is_first => dim(1, blocks),
            (_, "weight", MatrixOrder::OutputsFirst) if is_first => dim(0, blocks),
            (_, "weight", MatrixOrder::InputsFirst) if is_second => dim(0, 1),
            (_, "weight", MatrixOrder::OutputsFirst) if is_second => dim(1, 1),
            _ => TensorCut::Replicated,
        }
    }
}

/// Elements of parameters.
fn elems_of(params: &[ParamSpec]) -> u128 {
    let dims = params.iter().map(|param| &param.shape);
    dims.map(|dims| dims.iter().map(|&n| u128::from(n)).product::<u128>())
        .sum()
}

/// A size in a shape.
fn wide(n: usize) -> u64 {
    n as u64
}
