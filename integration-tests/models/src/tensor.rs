//! Tensor parallelism: a rank's part of a model's parameters and of the vocabulary (Megatron-LM, arXiv
//! 1909.08053). [`DecoderConfig::cut_of`] has the cut of each parameter.

use std::borrow::Cow;

use zero_alloc::device::Device;
use zero_shard::{ParamSpec, TensorPart, UnitSpec};
use zero_trainer::{Batch, ModelError, ModelRanks};

use crate::decoder::config::DecoderConfig;
use crate::ops::cross_entropy::VocabPart;
use crate::options::ModelOptions;

/// A rank of tensor parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TensorRank {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
}

impl TensorRank {
    /// This rank.
    ///
    /// # Errors
    /// The options are for another number of ranks.
    pub(crate) fn new<D: Device>(
        options: &ModelOptions,
        ranks: &ModelRanks<D>,
    ) -> Result<Self, ModelError> {
        let group = ranks.tensor.as_ref();
        let this = group.map_or(Self::ALONE, |comm| Self {
            rank: comm.rank(),
            ranks: comm.world_size(),
        });
        if this.ranks != options.tensor_ranks {
            return Err(ModelError::from(format!(
                "the options of the model are for tensor parallelism over {} ranks, and it runs over {}: set ModelOptions::tensor_ranks to the ranks of ModelRanks::tensor",
                options.tensor_ranks, this.ranks
            )));
        }
        Ok(this)
    }

    /// Without tensor parallelism.
    pub(crate) const ALONE: Self = Self { rank: 0, ranks: 1 };

    /// Whether it adds what is the same on all ranks to sums over them: biases, positions, losses,
    /// and the residual stream.
    pub(crate) fn is_first(self) -> bool {
        self.rank == 0
    }

    /// The tokens of this rank's part of a vocabulary.
    pub(crate) fn vocab(self, vocab: usize) -> VocabPart {
        let len = vocab.div_ceil(self.ranks);
        let first = (self.rank * len).min(vocab);
        VocabPart {
            first,
            len: len.min(vocab - first),
        }
    }

    /// The places of tokens in this rank's part of the vocabulary; [`IGNORED`] if they are in
    /// another.
    pub(crate) fn local_tokens(self, tokens: &[u32], vocab: usize) -> Vec<u32> {
        let part = self.vocab(vocab);
        tokens.iter().map(|&token| part.local(token)).collect()
    }

    /// [`local_tokens`](Self::local_tokens) of a batch.
    pub(crate) fn of_batch(self, batch: &Batch, vocab: usize) -> Cow<'_, [u32]> {
        match self.ranks {
            1 => Cow::Borrowed(&batch.inputs),
            _ => Cow::Owned(self.local_tokens(&batch.inputs, vocab)),
        }
    }

    /// This rank's place of the token whose embedding is not trained.
    pub(crate) fn padding(self, config: &DecoderConfig) -> Option<u32> {
        let token = config.padding_token?;
        Some(self.vocab(config.vocab).local(token as u32))
    }

    /// This rank's part of a model's units.
    pub(crate) fn units(self, config: &DecoderConfig) -> Result<Vec<UnitSpec>, ModelError> {
        let part = TensorPart::new(self.rank as u64, self.ranks as u64)?;
        let cut_of = |param: &ParamSpec| config.cut_of(&param.name);
        let units = config.units();
        let units = units.iter().map(|unit| part.unit(unit, cut_of));
        Ok(units.collect::<Result<_, _>>()?)
    }
}

#[cfg(test)]
mod tests {
    use zero_shard::TensorCut;
    use zero_trainer::IGNORED;

    use super::*;
    use crate::ModelConfig;
    use crate::lora::PREFIX;

    /// Each kind of parameter of each preset, by hand.
    #[test]
    fn parameters_are_cut_as_megatron_does() {
        let [gpt2, llama] = ["nano", "llama2-7b"].map(|name| ModelConfig::preset(name).unwrap());
        let cut = |name: &str| {
            let config = if name.contains("model.layers.") || name.starts_with("model.") {
                &llama
            } else {
                &gpt2
            };
            config.tensor_cut(&ParamSpec::new(name, [1, 1]))
        };
        let h = "transformer.h.3.";
        let l = "model.layers.3.";
        for (name, dim, blocks) in [
            (format!("{h}attn.c_attn.weight"), 1, 3),
            (format!("{h}attn.c_attn.bias"), 0, 3),
            (format!("{h}attn.c_proj.weight"), 0, 1),
            (format!("{h}mlp.c_fc.weight"), 1, 1),
            (format!("{h}mlp.c_fc.bias"), 0, 1),
            (format!("{h}mlp.c_proj.weight"), 0, 1),
            ("transformer.wte.weight".into(), 0, 1),
            ("lm_head.weight".into(), 0, 1),
            ("model.embed_tokens.weight".into(), 0, 1),
            (format!("{l}self_attn.q_proj.weight"), 0, 1),
            (format!("{l}self_attn.v_proj.bias"), 0, 1),
            (format!("{l}self_attn.o_proj.weight"), 1, 1),
            (format!("{l}mlp.gate_proj.weight"), 0, 1),
            (format!("{l}mlp.up_proj.bias"), 0, 1),
            (format!("{l}mlp.down_proj.weight"), 1, 1),
            (format!("{PREFIX}{h}attn.c_attn.lora_B.weight"), 0, 3),
            (format!("{PREFIX}{h}mlp.c_proj.lora_A.weight"), 1, 1),
            (format!("{PREFIX}{l}mlp.gate_proj.lora_B.weight"), 0, 1),
            (format!("{PREFIX}{l}self_attn.o_proj.lora_A.weight"), 1, 1),
        ] {
            assert_eq!(cut(&name), TensorCut::Dim { dim, blocks }, "{name}");
        }
        for name in [
            "transformer.wpe.weight",
            "transformer.ln_f.weight",
            "transformer.h.0.attn.c_proj.bias",
            "transformer.h.0.mlp.c_proj.bias",
            "model.norm.weight",
            "model.layers.0.self_attn.o_proj.bias",
            "model.layers.0.self_attn.q_norm.weight",
            "model.layers.0.mlp.down_proj.bias",
            "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight",
            "base_model.model.transformer.h.0.attn.c_proj.lora_B.weight",
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
            "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight",
        ] {
            assert_eq!(cut(name), TensorCut::Replicated, "{name}");
        }
    }

    #[test]
    fn vocabulary_is_covered_once() {
        for (vocab, ranks) in [(7, 1), (7, 2), (7, 3), (256, 4), (50257, 8)] {
            let parts = (0..ranks).map(|rank| TensorRank { rank, ranks }.vocab(vocab));
            let tokens: Vec<_> = parts
                .flat_map(|part| part.first..part.first + part.len)
                .collect();
            assert_eq!(tokens, (0..vocab).collect::<Vec<_>>());
        }
        let second = TensorRank { rank: 1, ranks: 2 };
        assert_eq!(
            second.local_tokens(&[0, 3, 4, 6], 7),
            [IGNORED, IGNORED, 0, 2]
        );
    }
}
