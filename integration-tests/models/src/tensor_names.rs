//! The kinds and matrices of tensors, by their names.

use zero_trainer::param_groups::ParamKind;
use zero_trainer::zero_optim::Matrix;

/// The matrices of a tensor of a block's linear layers, by its name and shape, in all architectures:
/// none in embeddings, the head, norms and biases. Queries, keys and values of GPT-2 are three.
pub fn matrices_of(name: &str, shape: &[u64]) -> Vec<Matrix> {
    let &[rows, cols] = shape else {
        return Vec::new();
    };
    let (rows, cols) = (rows as usize, cols as usize);
    let of_layer = |layers: &[&str]| layers.iter().any(|layer| name.contains(layer));
    match param_kind(name) {
        ParamKind::Linear if of_layer(&["lm_head"]) => Vec::new(),
        ParamKind::Linear if of_layer(&[".c_attn."]) => {
            Matrix::conv1d(rows, cols).split(&[cols / 3; 3])
        }
        ParamKind::Linear if of_layer(&[".c_proj.", ".c_fc."]) => {
            vec![Matrix::conv1d(rows, cols)]
        }
        ParamKind::Linear => vec![Matrix::linear(rows, cols)],
        _ => Vec::new(),
    }
}

/// The kind of a tensor by its name, in all architectures.
pub fn param_kind(name: &str) -> ParamKind {
    match name {
        _ if [".wte.", ".wpe.", "embed_tokens."]
            .iter()
            .any(|part| name.contains(part)) =>
        {
            ParamKind::Embedding
        }
        _ if name.contains("ln_") || name.contains("norm.") => ParamKind::Norm,
        _ if name.ends_with(".bias") => ParamKind::Bias,
        _ => ParamKind::Linear,
    }
}
