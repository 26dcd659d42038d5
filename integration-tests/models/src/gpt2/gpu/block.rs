//! A transformer block on CUDA: `x + attention(ln_1 x)`, then `mid + mlp(ln_2 mid)`, as in the
//! host's block.rs.

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{AnySlice, DType, DeviceSlice};

use super::Gpt2Gpu;
use crate::cuda::attention::Masks;
use crate::cuda::dropout::{self, Dropout};
use crate::cuda::layer_norm::{self, Output, Sums};
use crate::cuda::matmul::{Epilogue, Matrix, Product};
use crate::cuda::{OpError, SumOut, column_sums, gelu};
use crate::decoder::gpu::pass_context::{Ops, PassContext};
use crate::decoder::gpu::sequence::AttentionGrads;
use crate::decoder::gpu::slices::{AttentionSlices, ScratchSlices};
use zero_trainer::{Grad, ModelError};

/// The activations of a block: `[M, C]` except for `qkv` `[M, 3 C]`, `fc` and `act` `[M, F]`, the
/// statistics `[M, 2]`, and `lse` `[batch, heads, seq]`.
#[derive(Clone, Copy)]
pub(super) struct BlockSlices {
    pub(super) ln1_stats: DeviceSlice<f32>,
    pub(super) qkv: AnySlice,
    pub(super) attended: AnySlice,
    pub(super) lse: DeviceSlice<f32>,
    pub(super) mid: AnySlice,
    pub(super) ln2_stats: DeviceSlice<f32>,
    pub(super) fc: AnySlice,
    /// GELU's output. If it is not kept it is the start of [`ScratchSlices::wide`], which backward
    /// must not write before its last read of this one.
    pub(super) act: AnySlice,
}

impl BlockSlices {
    fn attention(&self) -> AttentionSlices {
        AttentionSlices {
            qkv: self.qkv,
            attended: self.attended,
            lse: self.lse,
        }
    }
}

/// Whether the library fuses GELU into the product. Not used in fp32, where its accuracy is not
/// specified.
fn fuses_gelu(ops: &Ops, product: &Product) -> Result<bool, OpError> {
    Ok(ops.kernels.dtype() != DType::F32 && ops.matmul.supports(product)?)
}

/// The dropouts of a block.
struct Dropouts {
    masks: Masks,
    /// Of the parts of the residual stream that attention and the MLP compute.
    residual: [Option<Dropout>; 2],
}

impl Dropouts {
    /// Those of the pass. Site 0 is the embedding's.
    fn new(arch: &Gpt2Gpu, cx: &PassContext<'_>) -> Self {
        let site = 1 + 3 * cx.layer as u32;
        let residual = |site| cx.dropout(arch.config.resid_pdrop, site);
        Self {
            masks: cx.masks(arch.config.attn_pdrop, site),
            residual: [residual(site + 1), residual(site + 2)],
        }
    }
}

/// Computes `y = residual + dropout(x w + bias)`. Without dropout, the product adds the residual. With
/// tensor parallelism the first rank does, the others compute `dropout(x w)`, and all are summed; with
/// sequence parallelism the sum of products comes first, and the rest is for own rows.
fn add_to_residual(
    cx: &PassContext<'_>,
    y: AnySlice,
    residual: AnySlice,
    x: AnySlice,
    [w, bias]: [AnySlice; 2],
    dropout: Option<Dropout>,
) -> Result<(), OpError> {
    let PassContext { ops, stream, .. } = *cx;
    let kernels = &ops.kernels;
    let n = bias.len();
    let divides = cx.divides_rows();
    let rest = cx.is_first().then_some(residual);
    let product = linear(cx.before_sum(y), x, w, None, Epilogue::Bias(bias));
    let product = Product {
        add: rest
            .filter(|_| dropout.is_none() && !divides)
            .map(|add| Matrix::new(add, n)),
        epilogue: match cx.is_first() {
            true => product.epilogue,
            false => Epilogue::None,
        },
        ..product
    };
    ops.matmul.run(stream, &product)?;
    if divides {
        cx.sum_to(y)?;
        let dropout = cx.of_own_rows(dropout);
        return dropout::add_residual(kernels, stream, y, Some(residual), n, dropout);
    }
    if dropout.is_some() {
        dropout::add_residual(kernels, stream, y, rest, n, dropout)?;
    }
    cx.sum(y)
}

/// Returns all rows of the gradient of what the dropout was applied to: `s.dres`, or its copy in `copy`
/// with the gradient of the bias before the dropout.
fn gradient_before(
    cx: &PassContext<'_>,
    copy: AnySlice,
    bias: SumOut,
    dropout: Option<Dropout>,
) -> Result<AnySlice, OpError> {
    let PassContext { ops, stream, s, .. } = *cx;
    let Some(dropout) = cx.of_own_rows(dropout) else {
        cx.gather_rows(s.dres)?;
        return Ok(s.dres);
    };
    let copy = copy.slice(0..s.dres.len());
    let kernels = &ops.kernels;
    let [own, dres] = [copy, s.dres].map(|rows| cx.own(rows));
    column_sums::drop_and_sum_rows(kernels, stream, bias, own, dres, dropout, s.partials)?;
    cx.gather_rows(copy)?;
    Ok(copy)
}

/// Computes the block's activations from its input `x` `[M, C]`, up to those of the MLP.
pub(super) fn forward(
    arch: &Gpt2Gpu,
    cx: &PassContext<'_>,
    a: &BlockSlices,
    x: AnySlice,
) -> Result<(), ModelError> {
    let PassContext {
        ops, stream, s, p, ..
    } = *cx;
    let eps = arch.config.layer_norm_epsilon;
    let dropouts = Dropouts::new(arch, cx);
    let kernels = &ops.kernels;
    let get = |part| p.get(0, part);
    let own = cx.own(s.normed);
    layer_norm::forward(
        kernels,
        stream,
        own,
        a.ln1_stats,
        x,
        get("ln_1.weight"),
        get("ln_1.bias"),
        eps,
    )?;
    cx.gather_rows(s.normed)?;

    let bias = Epilogue::Bias(get("c_attn.bias"));
    ops.matmul.run(
        stream,
        &linear(
            cx.qkv(a.attention()),
            s.normed,
            get("c_attn.weight"),
            None,
            bias,
        ),
    )?;
    cx.attend(&arch.attention, a.attention(), dropouts.masks)?;
    let projection = ["attn.c_proj.weight", "attn.c_proj.bias"].map(get);
    add_to_residual(cx, a.mid, x, a.attended, projection, dropouts.residual[0])?;

    layer_norm::forward(
        kernels,
        stream,
        own,
        a.ln2_stats,
        a.mid,
        get("ln_2.weight"),
        get("ln_2.bias"),
        eps,
    )?;
    cx.gather_rows(s.normed)?;

    let epilogue = Epilogue::BiasGelu {
        bias: get("c_fc.bias"),
        input: a.fc,
    };

    let fused = linear(a.act, s.normed, get("c_fc.weight"), None, epilogue);
    if fuses_gelu(ops, &fused)? {
        ops.matmul.run(stream, &fused)?;
    } else {
        let bias = Epilogue::Bias(get("c_fc.bias"));
        ops.matmul.run(
            stream,
            &linear(a.fc, s.normed, get("c_fc.weight"), None, bias),
        )?;
        gelu::forward(kernels, stream, a.act, a.fc)?;
    }
    Ok(())
}

/// Computes the block's output `[M, C]`.
pub(super) fn output(
    arch: &Gpt2Gpu,
    cx: &PassContext<'_>,
    out: AnySlice,
    a: &BlockSlices,
) -> Result<(), OpError> {
    let [_, dropout] = Dropouts::new(arch, cx).residual;
    let projection = ["mlp.c_proj.weight", "mlp.c_proj.bias"].map(|part| cx.p.get(0, part));
    add_to_residual(cx, out, a.mid, a.act, projection, dropout)
}

/// Computes the block's backward, which adds to or writes the unit's gradient in `p`. `s.dres` is
/// the gradient of the output on entry and of the input on return. `a.act` may be in `s.wide`.
///
/// The biases of the two layers whose output is added to the residual stream have as gradient the
/// sums over rows of `s.dres`, which the backward of the next layer norm reads; with dropout, those of
/// the copy of `s.dres` with the dropout's factors. That backward also computes the norm's output
/// again, for the gradient of the weights behind it.
pub(super) fn backward(
    arch: &Gpt2Gpu,
    cx: &PassContext<'_>,
    a: &BlockSlices,
    x: AnySlice,
) -> Result<(), ModelError> {
    let PassContext {
        ops, stream, s, p, ..
    } = *cx;
    let kernels = &ops.kernels;
    let get = |part| p.get(0, part);
    let grad = |part| p.grad(0, part);
    let dropouts = Dropouts::new(arch, cx);
    let weights = |name, x, dy, n| {
        ops.matmul
            .run(stream, &weight_gradient(grad(name), x, dy, n))
    };

    let c = get("ln_1.weight").len();
    let own = |rows| cx.own(rows);
    // The gradients of the second norm and of the bias before it, and those of the first norm.
    let gradients = [
        ["ln_2.weight", "ln_2.bias", "mlp.c_proj.bias"],
        ["ln_1.weight", "ln_1.bias", "attn.c_proj.bias"],
    ]
    .map(|names| names.map(|name| SumOut::from(grad(name))));
    let divides = cx.divides_rows();
    let place = |norm: usize, i: usize| match divides {
        true => cx.partial((3 * norm + i) * c..(3 * norm + i + 1) * c),
        false => gradients[norm][i],
    };
    let places = [0, 1].map(|norm| [0, 1, 2].map(|i| place(norm, i)));

    // Reads the gradient of the norm's output from `s.narrow` and writes the output to `s.normed`.
    let norm = |[gain, bias]: [&'static str; 2], places: [SumOut; 3], drops: bool, x, stats| {
        let [dgain, dbias, residual] = places;
        let sums = Sums {
            gain: dgain,
            bias: dbias,
            residual: (!drops).then_some(residual),
        };
        let output = Some(Output {
            y: own(s.normed),
            bias: get(bias),
        });
        cx.sum_rows(s.narrow)?;
        layer_norm::backward(
            kernels,
            stream,
            own(s.dres),
            sums,
            output,
            own(s.narrow),
            x,
            stats,
            get(gain),
            s.partials,
        )?;
        cx.gather_rows(s.normed)
    };

    let f = get("c_fc.bias").len();
    let width = get("c_attn.bias").len();
    let dfc = s.wide.slice(0..a.fc.len());
    let [in_attention, in_mlp] = dropouts.residual;
    let [of_mlp, of_attention] = places;
    let dout = gradient_before(cx, s.narrow, of_mlp[2], in_mlp)?;
    weights("mlp.c_proj.weight", a.act, dout, c)?;
    let product = input_gradient(dfc, dout, get("mlp.c_proj.weight"), c);
    let fused = Product {
        epilogue: Epilogue::GeluBackward { input: a.fc },
        ..product
    };

    if fuses_gelu(ops, &fused)? {
        ops.matmul.run(stream, &fused)?;
    } else {
        ops.matmul.run(stream, &product)?;
        gelu::backward(kernels, stream, dfc, a.fc)?;
    }

    ops.matmul.run(
        stream,
        &input_gradient(s.narrow, dfc, get("c_fc.weight"), f),
    )?;
    norm(
        ["ln_2.weight", "ln_2.bias"],
        of_mlp,
        in_mlp.is_some(),
        a.mid,
        a.ln2_stats,
    )?;

    fc_gradients(
        ops,
        stream,
        s,
        dfc,
        [grad("c_fc.weight"), grad("c_fc.bias")],
    )?;

    // The gradient of qkv is in the same buffer, and is written after the last use of this one.
    let dout = gradient_before(cx, s.wide, of_attention[2], in_attention)?;
    weights("attn.c_proj.weight", a.attended, dout, c)?;
    let dattended = s.narrow.slice(0..a.attended.len());
    ops.matmul.run(
        stream,
        &input_gradient(dattended, dout, get("attn.c_proj.weight"), c),
    )?;
    let grads = AttentionGrads {
        dbias: Some(grad("c_attn.bias").into()),
        rotated: false,
        masks: dropouts.masks,
    };
    let dqkv = cx.attend_backward(&arch.attention, a.attention(), dattended, grads)?;
    ops.matmul.run(
        stream,
        &input_gradient(s.narrow, dqkv, get("c_attn.weight"), width),
    )?;
    norm(
        ["ln_1.weight", "ln_1.bias"],
        of_attention,
        in_attention.is_some(),
        x,
        a.ln1_stats,
    )?;

    weights("c_attn.weight", s.normed, dqkv, width)?;
    if divides {
        cx.sum_partials(6 * c)?;
        cx.finish_sums(&gradients[0], 0..3 * c)?;
        cx.finish_sums(&gradients[1], 3 * c..6 * c)?;
    }
    Ok(())
}

/// Computes the gradients of the MLP's first weight and bias from `s.normed` and the gradient of
/// GELU's input.
fn fc_gradients(
    ops: &Ops,
    stream: &CudaStream,
    s: &ScratchSlices,
    dfc: AnySlice,
    [weight, bias]: [Grad; 2],
) -> Result<(), OpError> {
    let n = bias.elements().len();
    let product = weight_gradient(weight, s.normed, dfc, n);
    let apart = |stream: &CudaStream| {
        ops.matmul.run(stream, &product)?;
        column_sums::sum_rows(&ops.kernels, stream, bias.into(), dfc, s.partials)
    };
    // Only what is written can be computed several times to compare.
    if let Grad::Write(bias) = bias {
        let fused = Product {
            epilogue: Epilogue::BiasGradient(bias),
            ..product
        };
        if ops.matmul.is_faster(stream, &fused, apart)? {
            return ops.matmul.run(stream, &fused);
        }
    }
    apart(stream)
}

/// `y = epilogue(x w + add)`: w `[k, n]`, n the length of the epilogue's bias.
fn linear(
    y: AnySlice,
    x: AnySlice,
    w: AnySlice,
    add: Option<AnySlice>,
    epilogue: Epilogue,
) -> Product {
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
    let right = Matrix::new(w, n).t();
    let out = Matrix::new(dx, w.len() / n.max(1));
    Product {
        left: Matrix::new(dy, n),
        right,
        out,
        add: None,
        epilogue: Epilogue::None,
    }
}

/// `dw += x^T dy` or `dw = x^T dy`: x `[m, k]`, dy `[m, n]`, dw `[k, n]`.
fn weight_gradient(dw: Grad, x: AnySlice, dy: AnySlice, n: usize) -> Product {
    let (out, adds) = match dw {
        Grad::Add(sums) => (sums.erase(), true),
        Grad::Write(grad) => (grad, false),
    };
    let k = out.len() / n.max(1);
    let out = Matrix::new(out, n);
    let add = adds.then_some(out);
    Product {
        left: Matrix::new(x, k).t(),
        right: Matrix::new(dy, n),
        out,
        add,
        epilogue: Epilogue::None,
    }
}
