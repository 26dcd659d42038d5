//! A transformer block: `x + attention(ln_1 x)`, then `mid + mlp(ln_2 mid)`.

use crate::decoder::buffers::{ScratchView, views};
use crate::decoder::params::Flat;
use crate::ops::{attention, gelu, layer_norm, linear};
use zero_alloc::device::DeviceSlice;

views! {
    /// Activations of a block: `[M, C]` except for the statistics `[M, 2]`, `qkv` `[M, 3 C]`, `lse`
    /// `[batch, heads, seq]`, `fc` and `act` `[M, F]`.
    BlockSlices, BlockView { ln1, ln1_stats, qkv, attended, lse, mid, ln2, ln2_stats, fc, act }
}

/// Computes the block's activations from its input `x` `[M, C]`, up to those of the MLP.
pub(super) fn forward(
    a: &mut BlockView<'_>,
    x: &[f32],
    p: &Flat<'_>,
    shape: attention::Shape,
    eps: f32,
) {
    let get = |part| p.get(0, part);
    layer_norm::forward(
        a.ln1,
        a.ln1_stats,
        x,
        get("ln_1.weight"),
        get("ln_1.bias"),
        eps,
    );

    linear::forward(a.qkv, a.ln1, get("c_attn.weight"), get("c_attn.bias"));
    attention::forward(a.attended, a.lse, a.qkv, &p.batch.starts, shape);
    linear::forward_residual(
        a.mid,
        x,
        a.attended,
        get("attn.c_proj.weight"),
        get("attn.c_proj.bias"),
    );

    layer_norm::forward(
        a.ln2,
        a.ln2_stats,
        a.mid,
        get("ln_2.weight"),
        get("ln_2.bias"),
        eps,
    );

    let bias = get("c_fc.bias");
    linear::product(a.fc, a.ln2, get("c_fc.weight"), bias.len());
    gelu::forward(a.act, a.fc, bias);
}

/// Computes the block's output `[M, C]`.
pub(super) fn output(out: &mut [f32], a: &BlockView<'_>, p: &Flat<'_>) {
    linear::forward_residual(
        out,
        a.mid,
        a.act,
        p.get(0, "mlp.c_proj.weight"),
        p.get(0, "mlp.c_proj.bias"),
    );
}

/// Computes the block's backward and adds to `grad`, the unit's gradient. `s.dres` is the gradient
/// of the output on entry and of the input on return.
pub(super) fn backward(
    s: ScratchView<'_>,
    a: &BlockView<'_>,
    x: &[f32],
    p: &Flat<'_>,
    grad: &mut [f32],
    shape: attention::Shape,
) {
    let get = |part| p.get(0, part);
    let c = shape.heads * shape.d;
    // In the order of `GptConfig::units`.
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
    ] = p.unit(0).split_mut(grad);

    let dact = &mut s.wide[..a.fc.len()];
    linear::backward_weight(out_w, out_b, a.act, s.dres);
    linear::product_transposed(
        dact,
        s.dres,
        get("mlp.c_proj.weight"),
        a.fc.len() * c / s.dres.len(),
    );
    gelu::backward(dact, a.fc);
    linear::backward_weight(fc_w, fc_b, a.ln2, dact);
    linear::product_transposed(s.narrow, dact, get("c_fc.weight"), c);

    layer_norm::backward(
        s.dres,
        ln2_w,
        ln2_b,
        s.narrow,
        a.mid,
        a.ln2_stats,
        get("ln_2.weight"),
    );

    let dqkv = &mut s.wide[..a.qkv.len()];
    linear::backward_weight(proj_w, proj_b, a.attended, s.dres);
    linear::product_transposed(s.narrow, s.dres, get("attn.c_proj.weight"), c);
    let starts = &p.batch.starts;
    attention::backward(dqkv, s.narrow, a.qkv, a.attended, a.lse, starts, shape);
    linear::backward_weight(qkv_w, qkv_b, a.ln1, dqkv);
    linear::product_transposed(s.narrow, dqkv, get("c_attn.weight"), c);

    layer_norm::backward(
        s.dres,
        ln1_w,
        ln1_b,
        s.narrow,
        x,
        a.ln1_stats,
        get("ln_1.weight"),
    );
}
