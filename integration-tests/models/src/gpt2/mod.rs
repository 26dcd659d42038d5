//! GPT-2: pre-LN blocks, learned positions, tanh GELU, tied or untied head.

pub mod config;
mod hf_json;

use zero_trainer::Pass;

use self::config::GptConfig;
use crate::decoder::passes;

/// The passes of a GPT-2, one per unit: the embedding, each block, the head.
pub fn passes(config: &GptConfig) -> Vec<Pass> {
    passes::passes(&config.decoder())
}
