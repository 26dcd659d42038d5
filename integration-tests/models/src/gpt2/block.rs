//! A transformer block: `x + attention(ln_1 x)`, then `mid + mlp(ln_2 mid)`.

use crate::decoder::buffers::{ScratchView, views};
use crate::decoder::params::Flat;
use crate::decoder::{Backward, Forward};
use crate::ops::activation::Activation;
use crate::ops::dropout::Dropout;
use crate::ops::{attention, layer_norm, linear};
use crate::tensor::TensorRank;
use zero_alloc::device::DeviceSlice;

views! {
    /// Activations of a block: `[M, C]` except for the statistics `[M, 2]`, `qkv` `[M, 3 C]`, `lse`
    /// `[batch, heads, seq]`, `fc` and `act` `[M, F]`.
    BlockSlices, BlockView { ln1, ln1_stats, qkv, attended, lse, mid, ln2, ln2_stats, fc, act }
}

/// The parts of the names of a block's parameters.
const PARAMS: [&str; 12] = [
    "ln_1.weight",
    "ln_1.bias",
    "c_attn.weight",
    "c_attn.bias",
    "attn.c_proj.weight",
    "attn.c_proj.bias",
    "ln_2.weight",
    "ln_2.bias",
    "c_fc.weight",
    "c_fc.bias",
    "mlp.c_proj.weight",
    "mlp.c_proj.bias",
];

/// The sizes of a block's operations, and what a batch drops in them.
#[derive(Clone, Copy)]
pub(super) struct Shape<'a> {
    pub(super) attention: attention::Shape,
    /// Tokens of a sequence that the rank has.
    pub(super) tokens: usize,
    /// C
    pub(super) width: usize,
    pub(super) tensor: TensorRank,
    pub(super) masks: attention::Masks<'a>,
    pub(super) eps: f32,
    pub(super) activation: Activation,
    /// Dropout of attention's and of the MLP's part of the residual stream.
    pub(super) dropouts: [Option<Dropout<'a>>; 2],
}

impl Shape<'_> {
    /// `y = residual + dropout(x w + bias)`, or of the ranks but the first of tensor parallelism
    /// `dropout(x w)`: their sum is that of the whole.
    fn add_to_residual(
        &self,
        y: &mut [f32],
        residual: &[f32],
        x: &[f32],
        [w, bias]: [&[f32]; 2],
        dropout: Option<Dropout<'_>>,
    ) {
        if !self.tensor.is_first() {
            linear::product(y, x, w, bias.len());
            if let Some(dropout) = dropout {
                dropout.apply(y, self.tokens, bias.len());
            }
            return;
        }
        let Some(dropout) = dropout else {
            return linear::forward_residual(y, residual, x, w, bias);
        };
        linear::forward(y, x, w, bias);
        dropout.apply_and_add(y, residual, self.tokens, bias.len());
    }

    /// The gradient of what the dropout was applied to: `dy`, or its copy in `copy`.
    fn gradient_before<'g>(
        &self,
        copy: &'g mut [f32],
        dy: &'g [f32],
        dropout: Option<Dropout<'_>>,
    ) -> &'g [f32] {
        let Some(dropout) = dropout else {
            return dy;
        };
        let copy = &mut copy[..dy.len()];
        dropout.of(copy, dy, self.tokens, self.width);
        copy
    }
}

/// Computes a part of the block's activations from its input `x` `[M, C]`.
pub(super) fn forward(
    part: Forward,
    a: &mut BlockView<'_>,
    x: &[f32],
    p: &Flat<'_>,
    shape: Shape<'_>,
) {
    let get = |part| p.get(0, part);
    let eps = shape.eps;
    match part {
        Forward::Qkv => {
            let [gain, bias] = ["ln_1.weight", "ln_1.bias"].map(get);
            layer_norm::forward(a.ln1, a.ln1_stats, x, gain, bias, eps);
            linear::forward(a.qkv, a.ln1, get("c_attn.weight"), get("c_attn.bias"));
        }
        Forward::Attention => {
            attention::forward(a.attended, a.lse, a.qkv, shape.masks, shape.attention);
        }
        Forward::Mid => {
            let projection = ["attn.c_proj.weight", "attn.c_proj.bias"].map(get);
            shape.add_to_residual(a.mid, x, a.attended, projection, shape.dropouts[0]);
        }
        Forward::Mlp => {
            let [gain, bias] = ["ln_2.weight", "ln_2.bias"].map(get);
            layer_norm::forward(a.ln2, a.ln2_stats, a.mid, gain, bias, eps);
            let bias = get("c_fc.bias");
            linear::product(a.fc, a.ln2, get("c_fc.weight"), bias.len());
            shape.activation.forward(a.act, a.fc, bias);
        }
    }
}

/// Computes the block's output `[M, C]`.
pub(super) fn output(out: &mut [f32], a: &BlockView<'_>, p: &Flat<'_>, shape: Shape<'_>) {
    let projection = ["mlp.c_proj.weight", "mlp.c_proj.bias"].map(|part| p.get(0, part));
    shape.add_to_residual(out, a.mid, a.act, projection, shape.dropouts[1]);
}

/// Computes a part of the block's backward and adds to `grad`, the unit's gradient. After
/// [`Backward::Mid`], `s.narrow` has the gradient of `attended`; then `s.wide` has that of `qkv`.
pub(super) fn backward(
    part: Backward,
    s: ScratchView<'_>,
    a: &BlockView<'_>,
    x: &[f32],
    p: &Flat<'_>,
    grad: &mut [f32],
    shape: Shape<'_>,
) {
    let get = |part| p.get(0, part);
    let c = shape.width;
    let [
        ln1_w,
        ln1_b,
        qkv_w,
        qkv_b,
        proj_w,
        proj_b,
        ln2_w,
        ln2_b,
        fc_w,
        fc_b,
        out_w,
        out_b,
    ] = p.unit(0).of_names(grad, PARAMS);

    match part {
        Backward::Mlp => {
            let dact = &mut s.wide[..a.fc.len()];
            let dout = shape.gradient_before(s.narrow, s.dres, shape.dropouts[1]);
            linear::backward_weight(out_w, out_b, a.act, dout);
            linear::product_transposed(dact, dout, get("mlp.c_proj.weight"), fc_b.len());
            shape.activation.backward(dact, a.fc);
            linear::backward_weight(fc_w, fc_b, a.ln2, dact);
            linear::product_transposed(s.narrow, dact, get("c_fc.weight"), c);
        }
        Backward::Mid => {
            let gain = get("ln_2.weight");
            layer_norm::backward(s.dres, ln2_w, ln2_b, s.narrow, a.mid, a.ln2_stats, gain);
            let dout = shape.gradient_before(s.wide, s.dres, shape.dropouts[0]);
            linear::backward_weight(proj_w, proj_b, a.attended, dout);
            let dattended = &mut s.narrow[..a.attended.len()];
            let heads = proj_w.len() / c;
            linear::product_transposed(dattended, dout, get("attn.c_proj.weight"), heads);
        }
        Backward::Attention => {
            let dqkv = &mut s.wide[..a.qkv.len()];
            let dattended = &s.narrow[..a.attended.len()];
            let operands = shape.attention;
            let masks = shape.masks;
            attention::backward(dqkv, dattended, a.qkv, a.attended, a.lse, masks, operands);
        }
        Backward::Qkv => {
            let dqkv = &s.wide[..a.qkv.len()];
            linear::backward_weight(qkv_w, qkv_b, a.ln1, dqkv);
            linear::product_transposed(s.narrow, dqkv, get("c_attn.weight"), c);
        }
        Backward::Input => {
            let gain = get("ln_1.weight");
            layer_norm::backward(s.dres, ln1_w, ln1_b, s.narrow, x, a.ln1_stats, gain);
        }
    }
}
