//! A transformer block: `x + attention(ln_1 x)`, then `mid + mlp(ln_2 mid)`.

use crate::decoder::arch::{Backward, Branch, Forward};
use crate::decoder::params::{Flat, split_ranges};
use crate::decoder::slices::{ScratchView, views};
use crate::ops::activation::Activation;
use crate::ops::dropout::Dropout;
use crate::ops::{attention, layer_norm, linear};
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
    /// Whether the ranks of tensor parallelism divide the rows of norms.
    pub(super) divides_rows: bool,
    pub(super) masks: attention::Masks<'a>,
    pub(super) eps: f32,
    pub(super) activation: Activation,
    /// Dropout of attention's and of the MLP's part of the residual stream.
    pub(super) dropouts: [Option<Dropout<'a>>; 2],
}

impl Shape<'_> {
    /// The dropout of a branch.
    pub(super) fn dropout(&self, branch: Branch) -> Option<Dropout<'_>> {
        let [attention, mlp] = self.dropouts;
        match branch {
            Branch::Attention => attention,
            Branch::Mlp => mlp,
        }
    }

    /// `y = residual + dropout(sum + bias)`: rows from `first` on.
    pub(super) fn add_branch(
        &self,
        branch: Branch,
        y: &mut [f32],
        [residual, sum]: [&[f32]; 2],
        first: usize,
        p: &Flat<'_>,
    ) {
        let [_, bias] = projection(branch, p);
        let n = bias.len();
        let Some(dropout) = self.dropout(branch) else {
            return linear::add_residual(y, residual, sum, bias, n);
        };
        y.copy_from_slice(sum);
        linear::add_rows(y, bias);
        dropout
            .of_rows_from(first)
            .apply_and_add(y, residual, self.tokens, n);
    }

    /// Elements of the partial sums: the gradients of gains and biases of the norms, or nothing.
    fn partial(&self) -> [std::ops::Range<usize>; 4] {
        let n = if self.divides_rows { self.width } else { 0 };
        std::array::from_fn(|i| i * n..(i + 1) * n)
    }
}

/// The matrix and the bias of a branch.
fn projection<'a>(branch: Branch, p: &Flat<'a>) -> [&'a [f32]; 2] {
    let names = match branch {
        Branch::Attention => ["attn.c_proj.weight", "attn.c_proj.bias"],
        Branch::Mlp => ["mlp.c_proj.weight", "mlp.c_proj.bias"],
    };
    names.map(|name| p.get(0, name))
}

/// The input of a branch's matrix.
fn operand<'a>(branch: Branch, a: &'a BlockView<'_>) -> &'a [f32] {
    match branch {
        Branch::Attention => a.attended,
        Branch::Mlp => a.act,
    }
}

/// `out = residual + dropout(x w + bias)` of a branch.
pub(super) fn branch(
    branch: Branch,
    out: &mut [f32],
    residual: &[f32],
    a: &BlockView<'_>,
    p: &Flat<'_>,
    shape: Shape<'_>,
) {
    let x = operand(branch, a);
    let [w, bias] = projection(branch, p);
    let Some(dropout) = shape.dropout(branch) else {
        return linear::forward_residual(out, residual, x, w, bias);
    };
    linear::forward(out, x, w, bias);
    dropout.apply_and_add(out, residual, shape.tokens, bias.len());
}

/// `out = x w` of a branch.
pub(super) fn product(branch: Branch, out: &mut [f32], a: &BlockView<'_>, p: &Flat<'_>) {
    let [w, bias] = projection(branch, p);
    linear::product(out, operand(branch, a), w, bias.len());
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
        Forward::Norm1 => {
            let [gain, bias] = ["ln_1.weight", "ln_1.bias"].map(get);
            layer_norm::forward(a.ln1, a.ln1_stats, x, gain, bias, eps);
        }
        Forward::Qkv => {
            linear::forward(a.qkv, a.ln1, get("c_attn.weight"), get("c_attn.bias"));
        }
        Forward::Attention => {
            attention::forward(a.attended, a.lse, a.qkv, shape.masks, shape.attention);
        }
        Forward::Norm2 => {
            let [gain, bias] = ["ln_2.weight", "ln_2.bias"].map(get);
            layer_norm::forward(a.ln2, a.ln2_stats, a.mid, gain, bias, eps);
        }
        Forward::Mlp => {
            let bias = get("c_fc.bias");
            linear::product(a.fc, a.ln2, get("c_fc.weight"), bias.len());
            shape.activation.forward(a.act, a.fc, bias);
        }
    }
}

/// Computes a part of the block's backward and adds to `grad`, the unit's gradient. After
/// [`Backward::Attended`], `s.narrow` has the gradient of `attended`; then `s.wide` has that of `qkv`.
/// A gradient before a dropout is in `s.narrow` (of the MLP) or `s.wide` (of attention).
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

    let norms = [ln1_w, ln1_b, ln2_w, ln2_b];
    let partial = split_ranges(s.logits, &shape.partial());
    if part == Backward::PartialSums {
        for (grad, sums) in norms.into_iter().zip(partial) {
            grad.iter_mut()
                .zip(sums)
                .for_each(|(grad, sum)| *grad += *sum);
        }
        return;
    }
    let [ln1_w, ln1_b, ln2_w, ln2_b] = match shape.divides_rows {
        true => partial,
        false => norms,
    };

    match part {
        Backward::Mlp => {
            let dact = &mut s.wide[..a.fc.len()];
            let dout = match shape.dropouts[1] {
                Some(_) => &s.narrow[..s.dres.len()],
                None => &*s.dres,
            };
            linear::backward_weight(out_w, out_b, a.act, dout);
            linear::product_transposed(dact, dout, get("mlp.c_proj.weight"), fc_b.len());
            shape.activation.backward(dact, a.fc);
            linear::backward_weight(fc_w, fc_b, a.ln2, dact);
            linear::product_transposed(s.narrow, dact, get("c_fc.weight"), c);
        }
        Backward::Norm2 => {
            let gain = get("ln_2.weight");
            layer_norm::backward(s.dres, ln2_w, ln2_b, s.narrow, a.mid, a.ln2_stats, gain);
        }
        Backward::Attended => {
            let dout = match shape.dropouts[0] {
                Some(_) => &s.wide[..s.dres.len()],
                None => &*s.dres,
            };
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
        Backward::Norm1 => {
            let gain = get("ln_1.weight");
            layer_norm::backward(s.dres, ln1_w, ln1_b, s.narrow, x, a.ln1_stats, gain);
        }
        Backward::PartialSums => {}
    }
}
