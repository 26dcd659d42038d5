//! A transformer block on CUDA: `x + attention(ln_1 x)`, then `mid + mlp(ln_2 mid)`, as in the host's block.rs.

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::AnySlice;

use super::buffers::{BlockSlices, ScratchSlices};
use super::{Flat, Ops};
use crate::cuda::matmul::{Epilogue, Matrix, Product};
use crate::cuda::{OpError, column_sums, gelu, layer_norm};
use crate::model::Grad;

/// Computes the block's activations from its input `x` `[M, C]`, up to those of the MLP.
pub(super) fn forward(
    ops: &Ops,
    stream: &CudaStream,
    s: &ScratchSlices,
    a: &BlockSlices,
    x: AnySlice,
    p: &Flat<'_>,
    eps: f32,
) -> Result<(), OpError> {
    let (kernels, get) = (&ops.kernels, |part| p.get(0, part));
    layer_norm::forward(kernels, stream, s.normed, a.ln1_stats, x, get("ln_1.weight"), get("ln_1.bias"), eps)?;
    let bias = Epilogue::Bias(get("c_attn.bias"));
    ops.matmul.run(stream, &linear(a.qkv, s.normed, get("c_attn.weight"), None, bias))?;
    ops.attention.forward(kernels, stream, a.attended, a.lse, a.qkv)?;
    let bias = Epilogue::Bias(get("attn.c_proj.bias"));
    ops.matmul.run(stream, &linear(a.mid, a.attended, get("attn.c_proj.weight"), Some(x), bias))?;
    layer_norm::forward(kernels, stream, s.normed, a.ln2_stats, a.mid, get("ln_2.weight"), get("ln_2.bias"), eps)?;
    let epilogue = Epilogue::BiasGelu { bias: get("c_fc.bias"), input: a.fc };
    let fused = linear(a.act, s.normed, get("c_fc.weight"), None, epilogue);
    if ops.fuses_gelu(&fused)? {
        ops.matmul.run(stream, &fused)
    } else {
        let bias = Epilogue::Bias(get("c_fc.bias"));
        ops.matmul.run(stream, &linear(a.fc, s.normed, get("c_fc.weight"), None, bias))?;
        gelu::forward(kernels, stream, a.act, a.fc)
    }
}

/// Computes the block's output `[M, C]`.
pub(super) fn output(
    ops: &Ops,
    stream: &CudaStream,
    out: AnySlice,
    a: &BlockSlices,
    p: &Flat<'_>,
) -> Result<(), OpError> {
    let bias = Epilogue::Bias(p.get(0, "mlp.c_proj.bias"));
    ops.matmul.run(stream, &linear(out, a.act, p.get(0, "mlp.c_proj.weight"), Some(a.mid), bias))
}

/// Computes the block's backward and adds to the unit's gradient in `p`, or writes it. `s.dres` is the gradient of the
/// output on entry and of the input on return. `a.act` may be in `s.wide`.
pub(super) fn backward(
    ops: &Ops,
    stream: &CudaStream,
    s: &ScratchSlices,
    a: &BlockSlices,
    x: AnySlice,
    p: &Flat<'_>,
    eps: f32,
) -> Result<(), OpError> {
    let (kernels, get, grad) = (&ops.kernels, |part| p.get(0, part), |part| p.grad(0, part));
    // Adds the gradients of a layer's weights and bias, from its input and the gradient of its output.
    let weights = |name: [&'static str; 2], x, dy| {
        ops.matmul.run(stream, &weight_gradient(grad(name[0]), x, dy, grad(name[1]).elements().len()))?;
        column_sums::sum_rows(kernels, stream, grad(name[1]).into(), dy, s.partials)
    };
    // Recomputes a norm's output and statistics, with the same bits.
    let normed = |name: [&'static str; 2], x, stats| {
        layer_norm::forward(kernels, stream, s.normed, stats, x, get(name[0]), get(name[1]), eps)
    };
    let norm = |name: [&'static str; 2], x, stats| {
        let own = [grad(name[0]).into(), grad(name[1]).into()];
        layer_norm::backward(kernels, stream, s.dres, own, s.narrow, x, stats, get(name[0]), s.partials)
    };

    let (c, f) = (get("ln_1.weight").len(), get("c_fc.bias").len());
    let dfc = s.wide.slice(0..a.fc.len());
    weights(["mlp.c_proj.weight", "mlp.c_proj.bias"], a.act, s.dres)?;
    let product = input_gradient(dfc, s.dres, get("mlp.c_proj.weight"), c);
    let fused = Product { epilogue: Epilogue::GeluBackward { input: a.fc }, ..product };
    if ops.fuses_gelu(&fused)? {
        ops.matmul.run(stream, &fused)?;
    } else {
        ops.matmul.run(stream, &product)?;
        gelu::backward(kernels, stream, dfc, a.fc)?;
    }
    normed(["ln_2.weight", "ln_2.bias"], a.mid, a.ln2_stats)?;
    weights(["c_fc.weight", "c_fc.bias"], s.normed, dfc)?;
    ops.matmul.run(stream, &input_gradient(s.narrow, dfc, get("c_fc.weight"), f))?;
    norm(["ln_2.weight", "ln_2.bias"], a.mid, a.ln2_stats)?;

    let dqkv = s.wide.slice(0..a.qkv.len());
    weights(["attn.c_proj.weight", "attn.c_proj.bias"], a.attended, s.dres)?;
    ops.matmul.run(stream, &input_gradient(s.narrow, s.dres, get("attn.c_proj.weight"), c))?;
    ops.attention.backward(kernels, stream, dqkv, s.narrow, a.qkv, a.attended, a.lse, s.delta)?;
    normed(["ln_1.weight", "ln_1.bias"], x, a.ln1_stats)?;
    weights(["c_attn.weight", "c_attn.bias"], s.normed, dqkv)?;
    ops.matmul.run(stream, &input_gradient(s.narrow, dqkv, get("c_attn.weight"), 3 * c))?;
    norm(["ln_1.weight", "ln_1.bias"], x, a.ln1_stats)
}

/// `y = epilogue(x w + add)`: w `[k, n]`, n the length of the epilogue's bias.
fn linear(y: AnySlice, x: AnySlice, w: AnySlice, add: Option<AnySlice>, epilogue: Epilogue) -> Product {
    let n = match epilogue {
        Epilogue::Bias(bias) | Epilogue::BiasGelu { bias, .. } => bias.len(),
        _ => 0,
    };
    let k = w.len() / n.max(1);
    Product {
        left: Matrix::new(x, k),
        right: Matrix::new(w, n),
        out: Matrix::new(y, n),
        add: add.map(|add| Matrix::new(add, n)),
        epilogue,
    }
}

/// `dx = dy w^T`: dy `[m, n]`, w `[k, n]`.
fn input_gradient(dx: AnySlice, dy: AnySlice, w: AnySlice, n: usize) -> Product {
    let (right, out) = (Matrix::new(w, n).t(), Matrix::new(dx, w.len() / n.max(1)));
    Product { left: Matrix::new(dy, n), right, out, add: None, epilogue: Epilogue::None }
}

/// `x^T dy`, added to `dw` or written to it: x `[m, k]`, dy `[m, n]`, dw `[k, n]`.
fn weight_gradient(dw: Grad, x: AnySlice, dy: AnySlice, n: usize) -> Product {
    let out = Matrix::new(dw.elements(), n);
    let add = matches!(dw, Grad::Add(_)).then_some(out);
    let left = Matrix::new(x, dw.elements().len() / n.max(1)).t();
    Product { left, right: Matrix::new(dy, n), out, add, epilogue: Epilogue::None }
}
