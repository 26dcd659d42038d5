//! The check of a configuration before a decoder is made on a GPU.

use zero_trainer::ModelError;

use crate::decoder::config::DecoderConfig;
use crate::ops::activation::Activation;
use crate::ops::attention;
use crate::ops::mlp::Mlp;
use crate::ops::norm::NormKind;

impl DecoderConfig {
    /// Checks that the passes on a GPU compute the decoder.
    ///
    /// # Errors
    /// The first part that they do not compute.
    pub(crate) fn check_on_gpu(&self) -> Result<(), ModelError> {
        let has_bias_before_norms = self.biases.output && self.biases.mlp;
        let scale = attention::scale_of(self.head_dim);

        let why = match self.norm {
            _ if !matches!(self.mlp, Mlp::SwiGlu | Mlp::Plain(Activation::GeluNew)) => {
                "an MLP on a GPU needs SwiGLU or the activation gelu_new"
            }
            _ if self.scale_by_layer || self.scale != scale => {
                "attention on a GPU needs scores that are divided by the square root of a head's elements"
            }
            _ if self.qk_norm && self.rope.is_none() => {
                "norms of queries and keys on a GPU need a rotary embedding"
            }
            // Their backward sums the gradients of those biases.
            NormKind::Layer if !has_bias_before_norms => {
                "layer norms on a GPU need biases of attention's output and of the MLP"
            }
            // Dropout's backward sums the gradient of a bias that a layer norm follows.
            NormKind::Rms if self.residual_dropout() != 0.0 => {
                "dropout of the residual stream on a GPU needs layer norms"
            }
            _ => return Ok(()),
        };
        Err(ModelError::from(format!("{why}: use --device cpu")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::architecture::ModelConfig;

    /// Asserts that a preset with this change is refused, with part of the error.
    fn refused(preset: &str, change: impl Fn(&mut DecoderConfig), part: &str) {
        let mut config = ModelConfig::preset(preset).unwrap().decoder();
        config.check_on_gpu().unwrap();
        change(&mut config);
        let error = config.check_on_gpu().unwrap_err().to_string();
        assert!(error.contains(part), "{preset}: {error}");
    }

    #[test]
    fn what_gpus_do_not_compute_is_refused() {
        let of_layer_norm = "layer norms on a GPU need biases";
        refused("nano", |c| c.biases.output = false, of_layer_norm);
        refused("nano", |c| c.biases.mlp = false, of_layer_norm);
        let gelu = |c: &mut DecoderConfig| c.mlp = Mlp::Plain(Activation::Gelu);
        refused("nano", gelu, "needs SwiGLU or the activation gelu_new");

        for preset in ["nano", "smollm2-135m"] {
            let of_scores = "needs scores that are divided";
            refused(preset, |c| c.scale_by_layer = true, of_scores);
            refused(preset, |c| c.scale = 1.0, of_scores);
        }

        let drops = |c: &mut DecoderConfig| c.dropout.residual = Some(0.1);
        refused("smollm2-135m", drops, "needs layer norms");
        let norms = |c: &mut DecoderConfig| {
            c.qk_norm = true;
            c.rope = None;
        };
        refused("smollm2-135m", norms, "need a rotary embedding");
    }
}
