//! A small model for tests: an embedding, three blocks and a head, with GPT-2's names.

use zero_shard::{ParamSpec, UnitSpec};

use crate::model::Pass;
use crate::param_groups::ParamKind;

const WIDTH: u64 = 64;
const BLOCKS: usize = 3;

/// The units in forward order.
pub(crate) fn units() -> Vec<UnitSpec> {
    let embedding = UnitSpec::new(
        "embedding",
        [
            ParamSpec::new("transformer.wte.weight", [256, WIDTH]),
            ParamSpec::new("transformer.wpe.weight", [128, WIDTH]),
        ],
    );

    let blocks = (0..BLOCKS).map(|i| {
        let name = |part: &str| format!("transformer.h.{i}.{part}");
        UnitSpec::new(
            format!("block {i}"),
            [
                ParamSpec::new(name("ln_1.weight"), [WIDTH]),
                ParamSpec::new(name("attn.c_attn.weight"), [WIDTH, 3 * WIDTH]),
                ParamSpec::new(name("attn.c_attn.bias"), [3 * WIDTH]),
                ParamSpec::new(name("mlp.c_fc.weight"), [WIDTH, 4 * WIDTH]),
            ],
        )
    });

    let head = UnitSpec::new("head", [ParamSpec::new("transformer.ln_f.weight", [WIDTH])]);
    std::iter::once(embedding)
        .chain(blocks)
        .chain([head])
        .collect()
}

/// The passes: one a unit; the head is tied to the embedding.
pub(crate) fn passes() -> Vec<Pass> {
    let last = BLOCKS + 1;
    let reads = |pass| {
        if pass == last {
            vec![last, 0]
        } else {
            vec![pass]
        }
    };
    (0..=last)
        .map(|pass| Pass {
            forward_reads: reads(pass),
            backward_reads: reads(pass),
            grads: reads(pass),
        })
        .collect()
}

/// The kinds of the tensors of [`units`].
pub(crate) fn kind_of(name: &str) -> ParamKind {
    match name {
        _ if name.contains(".wte.") || name.contains(".wpe.") => ParamKind::Embedding,
        _ if name.contains("ln_") => ParamKind::Norm,
        _ if name.ends_with(".bias") => ParamKind::Bias,
        _ => ParamKind::Linear,
    }
}
