//! The kinds and matrices of tensors, by their names.

use zero_trainer::param_groups::ParamKind;
use zero_trainer::zero_optim::Matrix;

/// The matrices of a tensor of a block's linear layers, by its name and shape, in all architectures:
/// none in embeddings, the head, norms and biases. Queries, keys and values are a matrix each, or
/// with `head_elems`, the outputs of an attention head, one for each head.
pub fn matrices_of(name: &str, shape: &[u64], head_elems: Option<usize>) -> Vec<Matrix> {
    let &[rows, cols] = shape else {
        return Vec::new();
    };
    let (rows, cols) = (rows as usize, cols as usize);
    let of_layer = |layers: &[&str]| layers.iter().any(|layer| name.contains(layer));
    match param_kind(name) {
        ParamKind::Linear if of_layer(&["lm_head"]) => Vec::new(),
        ParamKind::Linear if of_layer(&[".c_attn."]) => {
            let outputs = head_elems.unwrap_or(cols / 3).max(1);
            Matrix::conv1d(rows, cols).split(&vec![outputs; cols / outputs])
        }
        ParamKind::Linear if of_layer(&[".q_proj.", ".k_proj.", ".v_proj."]) => {
            let outputs = head_elems.unwrap_or(rows).max(1);
            Matrix::linear(rows, cols).split(&vec![outputs; rows / outputs])
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

#[cfg(test)]
mod tests {
    use super::*;

    /// First elements, rows and columns.
    fn places(name: &str, shape: &[u64], head_elems: Option<usize>) -> Vec<[usize; 3]> {
        let matrices = matrices_of(name, shape, head_elems);
        matrices.iter().map(|m| [m.first, m.rows, m.cols]).collect()
    }

    #[test]
    fn heads_are_matrices_on_request() {
        let fused = "h.0.attn.c_attn.weight";
        assert_eq!(
            places(fused, &[4, 12], None),
            [[0, 4, 4], [4, 4, 4], [8, 4, 4]]
        );
        let of_heads = [0, 2, 4, 6, 8, 10].map(|first| [first, 4, 2]);
        assert_eq!(places(fused, &[4, 12], Some(2)), of_heads);
        let keys = "model.layers.0.self_attn.k_proj.weight";
        assert_eq!(places(keys, &[4, 6], None), [[0, 4, 6]]);
        assert_eq!(places(keys, &[4, 6], Some(2)), [[0, 2, 6], [12, 2, 6]]);
        let output = "model.layers.0.self_attn.o_proj.weight";
        assert_eq!(places(output, &[6, 4], Some(2)), [[0, 6, 4]]);
    }
}
