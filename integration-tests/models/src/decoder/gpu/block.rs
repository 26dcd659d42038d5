//! A block on CUDA: `mid = x + attention(norm x)`, then `mid + mlp(norm mid)`, as on the host.
//!
//! What is kept from forward to backward: see [`BlockSlices`]. GELU's output takes no memory where it is
//! recomputed, nor does SwiGLU's: it is in the buffer of the gradient that backward writes after its last
//! use, in forward and in backward. cuBLASLt's fused GELU reads the fp32 sum, the recomputed one its
//! 16-bit rounding, so low bits of one gradient differ. A forward without the fusion would have equal
//! bits and cost more than the recomputation.

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{AnySlice, DType, DeviceSlice};
use zero_trainer::{Grad, ModelError};

use super::adapter::Adapter;
use super::linear::Linear;
use super::pass_context::{Flat, Ops, PassContext};
use super::sequence::AttentionGrads;
use super::slices::{AttentionSlices, BlockSlices};
use crate::cuda::attention::{Attention, Masks};
use crate::cuda::dropout::{self, Dropout};
use crate::cuda::matmul::{Epilogue, Matrix, Product};
use crate::cuda::norm::{self, Norm};
use crate::cuda::rope;
use crate::cuda::{OpError, SumOut, column_sums, gelu, swiglu};
use crate::decoder::block_params::BlockParams;
use crate::decoder::config::DecoderConfig;
use crate::ops::linear::MatrixOrder;
use crate::ops::mlp::Mlp;
use crate::ops::norm::NormKind;
use crate::options::ModelOptions;

/// Most gradients that one addition of partial sums finishes.
const MOST_SUMS: usize = 3;

/// A block of a pass, with its parameters and activations.
pub(super) struct Block<'a> {
    cx: &'a PassContext<'a>,
    config: &'a DecoderConfig,
    attention: &'a Attention,
    a: BlockSlices,
    norm1: Norm,
    qkv: Linear<'a>,
    /// The gains of the norms of queries and of keys; empty if there are none.
    qk_norm: AnySlice,
    output: Linear<'a>,
    norm2: Norm,
    up: Linear<'a>,
    down: Linear<'a>,
    masks: Masks,
    /// Of what attention and the MLP add to the residual stream.
    dropouts: [Option<Dropout>; 2],
}

/// The gradients that are sums over rows and that ranks of tensor parallelism may sum: of the norms of
/// heads, and of gain and bias of each norm, with that of the bias which was added before a layer norm.
/// Empty if they are frozen.
struct ParamSums {
    heads: Option<SumOut>,
    norms: [Vec<SumOut>; 2],
}

/// Gradients of C elements that the backward of a norm sums over rows, at most.
fn sums_of_norm(kind: NormKind) -> usize {
    match kind {
        NormKind::Layer => 3,
        NormKind::Rms => 1,
    }
}

/// Elements of the gradients of a block of which each rank of tensor parallelism has a part of the sum.
pub(crate) fn partial_elems(config: &DecoderConfig, options: &ModelOptions) -> usize {
    let biases = match options.sequence_parallel && config.lora.is_none() {
        true => sums_of_norm(config.norm) - config.norm.params(),
        false => 0,
    };
    config.partial_elems(options) + 2 * biases * config.width
}

/// Whether the library fuses GELU into the product of `layer`. Not used in fp32, where its accuracy
/// is not specified, nor with adapters, whose sums are an addend: no GPU has shown that the library
/// adds and fuses.
fn fuses_gelu(ops: &Ops, layer: &Linear<'_>, product: &Product) -> Result<bool, OpError> {
    let may_fuse = ops.kernels.dtype() != DType::F32 && layer.adapters.is_empty();
    Ok(may_fuse && ops.matmul.supports(product)?)
}

impl<'a> Block<'a> {
    /// The block of a pass, whose attention has these kernels.
    pub(super) fn new(
        cx: &'a PassContext<'a>,
        config: &'a DecoderConfig,
        attention: &'a Attention,
        a: BlockSlices,
    ) -> Self {
        let ranges = cx.p.ranges.block.clone();
        let of = ranges.map(|range| cx.p.params[0].slice(range));
        let mut adapters = cx.p.ranges.adapters.iter();
        let mut linear = |[weight, bias]: [AnySlice; 2], outputs| Linear {
            cx,
            weight,
            bias,
            outputs,
            order: config.order,
            adapters: match (&config.lora, adapters.next()) {
                (Some(lora), Some(ranges)) => Adapter::of_layer(cx, lora, ranges),
                _ => Vec::new(),
            },
        };
        let site = config.dropout_site(cx.layer);
        let residual = |of_block| cx.dropout(config.residual_dropout(), site + of_block);
        Self {
            cx,
            config,
            attention,
            a,
            norm1: cx.norm(config, of.norm1),
            qkv: linear(of.qkv, config.qkv_width()),
            qk_norm: of.qk_norm,
            output: linear(of.output, config.width),
            norm2: cx.norm(config, of.norm2),
            up: linear(of.up, config.up_width()),
            down: linear(of.down, config.width),
            masks: cx.masks(config.dropout.attention, site),
            dropouts: [1, 2].map(residual),
        }
    }

    /// Computes the block's activations from its input `x` `[M, C]`, up to those of the MLP.
    fn forward(&self, x: AnySlice) -> Result<(), ModelError> {
        let PassContext { ops, stream, s, .. } = *self.cx;
        let Self { cx, a, .. } = self;
        let kernels = &ops.kernels;
        let own = cx.own(s.normed);
        norm::forward(kernels, stream, self.norm1, own, a.stats1, x)?;
        cx.gather_rows(s.normed)?;
        let qkv = cx.qkv(self.attention_slices());
        self.qkv.run_forward(&self.qkv.forward(qkv, s.normed))?;
        self.rotate(qkv)?;
        cx.attend(self.attention, self.attention_slices(), self.masks)?;
        let [dropout, _] = self.dropouts;
        self.add_to_residual(a.mid, x, a.attended, &self.output, dropout)?;

        norm::forward(kernels, stream, self.norm2, own, a.stats2, a.mid)?;
        cx.gather_rows(s.normed)?;
        let product = self.up.forward(a.up, s.normed);
        if self.config.mlp == Mlp::SwiGlu {
            return Ok(self.up.run_forward(&product)?);
        }
        let fused = Product {
            out: Matrix::new(a.act, self.up.outputs),
            epilogue: Epilogue::BiasGelu {
                bias: self.up.bias,
                input: a.up,
            },
            ..product
        };
        if fuses_gelu(ops, &self.up, &fused)? {
            return Ok(self.up.run_forward(&fused)?);
        }
        self.up.run_forward(&product)?;
        Ok(gelu::forward(kernels, stream, a.act, a.up)?)
    }

    fn attention_slices(&self) -> AttentionSlices {
        AttentionSlices {
            qkv: self.a.qkv,
            attended: self.a.attended,
            lse: self.a.lse,
        }
    }

    /// Norms and rotates queries and keys, if the family does.
    fn rotate(&self, qkv: AnySlice) -> Result<(), OpError> {
        let PassContext { ops, stream, .. } = *self.cx;
        if self.config.rope.is_none() {
            return Ok(());
        }
        let kernels = &ops.kernels;
        let heads = self.config.qkv_heads();
        let angles = self.cx.angles();
        if !self.config.qk_norm {
            return rope::forward(kernels, stream, qkv, angles, heads);
        }
        rope::norm_forward(
            kernels,
            stream,
            qkv,
            self.a.raw,
            self.a.raw_stats,
            self.qk_norm,
            angles,
            heads,
            self.config.eps,
        )
    }

    /// Computes the block's output `[M, C]`, and the activations that its backward reads.
    pub(super) fn output(&self, x: AnySlice, out: AnySlice) -> Result<(), ModelError> {
        self.forward(x)?;
        let PassContext { ops, stream, .. } = *self.cx;
        let a = self.a;
        if self.config.mlp == Mlp::SwiGlu {
            swiglu::forward(&ops.kernels, stream, a.act, a.up, self.config.inner)?;
        }
        let [_, dropout] = self.dropouts;
        Ok(self.add_to_residual(out, a.mid, a.act, &self.down, dropout)?)
    }

    /// Computes again what forward did not keep.
    pub(super) fn recompute(&self, x: AnySlice, options: &ModelOptions) -> Result<(), ModelError> {
        let PassContext { ops, stream, .. } = *self.cx;
        if options.activation_checkpointing {
            return self.forward(x);
        }
        match self.config.mlp {
            Mlp::Plain(_) if options.recompute_gelu => {
                Ok(gelu::forward(&ops.kernels, stream, self.a.act, self.a.up)?)
            }
            _ => Ok(()),
        }
    }

    /// Computes `y = residual + dropout(x w + bias)`. Without dropout, the product adds the residual.
    /// With tensor parallelism the first rank does, the others compute `dropout(x w)`, and all are
    /// summed; with sequence parallelism the sum of products comes first, and the rest is for own rows.
    fn add_to_residual(
        &self,
        y: AnySlice,
        residual: AnySlice,
        x: AnySlice,
        layer: &Linear<'_>,
        dropout: Option<Dropout>,
    ) -> Result<(), OpError> {
        let cx = self.cx;
        let PassContext { ops, stream, .. } = *cx;
        let kernels = &ops.kernels;
        let n = layer.outputs;
        let divides = cx.divides_rows();
        let rest = cx.is_first().then_some(residual);
        let product = layer.forward(cx.before_sum(y), x);
        let product = Product {
            add: rest
                .filter(|_| dropout.is_none() && !divides)
                .map(|add| Matrix::new(add, n)),
            ..product
        };
        let product = match cx.is_first() {
            true => product,
            false => product.with(Epilogue::None),
        };
        layer.run_forward(&product)?;
        if divides {
            cx.sum_to(y)?;
            let dropout = cx.of_own_rows(dropout);
            return dropout::add_residual(kernels, stream, y, y, Some(residual), n, dropout);
        }
        if dropout.is_some() {
            dropout::add_residual(kernels, stream, y, y, rest, n, dropout)?;
        }
        cx.sum(y)
    }

    /// Computes the block's backward, which adds to or writes the unit's gradient. `s.dres` is the
    /// gradient of the output on entry and of the input on return. `a.act` may be in `s.wide`, and `a.up`
    /// may be overwritten by its gradient.
    ///
    /// The biases of the two layers whose output is added to the residual stream have as gradient the sums
    /// over rows of `s.dres`, which the backward of the next layer norm reads; with dropout, those of the
    /// copy of `s.dres` with the dropout's factors. The backward of a norm also computes its output again,
    /// for the gradient of the weights behind it.
    pub(super) fn backward(&self, x: AnySlice) -> Result<(), ModelError> {
        let PassContext { s, .. } = *self.cx;
        let a = self.a;
        let g = self.grads();
        let narrow = s.narrow.slice(0..s.dres.len());
        let sums = self.sums(&g);
        let [of_norm1, of_norm2] = &sums.norms;
        let [in_attention, in_mlp] = self.dropouts;

        let dout = self.gradient_before(s.narrow, of_norm2, in_mlp)?;
        let dup = self.mlp_backward(g.down, dout)?;
        self.up.begin_backward(dup)?;
        let product = self.up.input_gradient(narrow, dup);
        self.up.run_input_gradient(&product)?;
        self.norm_backward(self.norm2, of_norm2, in_mlp.is_some(), a.mid, a.stats2)?;
        self.up_gradients(g.up, dup)?;

        // The gradient of qkv is in the same buffer, and is written after the last use of this one.
        let dout = self.gradient_before(s.wide, of_norm1, in_attention)?;
        self.output.begin_backward(dout)?;
        self.weight_gradients(&self.output, g.output, a.attended, dout)?;
        let dattended = s.narrow.slice(0..a.attended.len());
        let product = self.output.input_gradient(dattended, dout);
        self.output.run_input_gradient(&product)?;
        let [qkv, qkv_bias] = g.qkv;
        let dqkv = self.attention_backward(dattended, qkv_bias, sums.heads)?;
        self.qkv.begin_backward(dqkv)?;
        if self.config.trains_before(self.cx.layer) {
            let product = self.qkv.input_gradient(narrow, dqkv);
            self.qkv.run_input_gradient(&product)?;
            self.norm_backward(self.norm1, of_norm1, in_attention.is_some(), x, a.stats1)?;
        } else {
            self.norm_again(x)?;
        }
        // Attention's backward has summed the gradient of the bias.
        self.qkv.run_weight_gradients(qkv, s.normed, dqkv)?;
        Ok(self.finish_sums(&g)?)
    }

    /// The gradients of the block's own parameters; empty if they are frozen.
    fn grads(&self) -> BlockParams<Grad> {
        let Flat { ranges, grads, .. } = self.cx.p;
        let is_frozen = self.config.lora.is_some();
        ranges.block.clone().map(|range| match is_frozen {
            true => grads[0].slice(0..0),
            false => grads[0].slice(range),
        })
    }

    /// Computes all rows of the first norm's output again.
    fn norm_again(&self, x: AnySlice) -> Result<(), OpError> {
        let cx = self.cx;
        let normed = cx.s.normed;
        let kernels = &cx.ops.kernels;
        let own = cx.own(normed);
        norm::forward(kernels, cx.stream, self.norm1, own, self.a.stats1, x)?;
        cx.gather_rows(normed)
    }

    /// The gradients of the parameters of norms, as in [`ParamSums`].
    fn norm_grads(&self, g: &BlockParams<Grad>) -> ParamSums {
        let trained = |grads: &[Grad]| -> Vec<SumOut> {
            let trained = grads.iter().filter(|grad| !grad.elements().is_empty());
            trained.map(|grad| SumOut::from(*grad)).collect()
        };
        let of = |[gain, bias]: [Grad; 2], bias_before: Grad| match self.config.norm {
            NormKind::Layer => trained(&[gain, bias, bias_before]),
            NormKind::Rms => trained(&[gain]),
        };
        let [_, output_bias] = g.output;
        let [_, down_bias] = g.down;
        ParamSums {
            heads: trained(&[g.qk_norm]).pop(),
            norms: [of(g.norm1, output_bias), of(g.norm2, down_bias)],
        }
    }

    /// Elements of the partial sums of the norms of heads; 0 if they are not partial.
    fn partial_of_heads(&self, sums: &ParamSums) -> usize {
        match (self.cx.tensor, sums.heads) {
            (Some(_), Some(_)) => self.qk_norm.len(),
            _ => 0,
        }
    }

    /// The places of those gradients: elements of the partial sums where ranks of tensor parallelism sum
    /// them, otherwise the gradients themselves.
    fn sums(&self, g: &BlockParams<Grad>) -> ParamSums {
        let cx = self.cx;
        let mut sums = self.norm_grads(g);
        let mut end = self.partial_of_heads(&sums);
        if end > 0 {
            sums.heads = Some(cx.partial(0..end));
        }
        if cx.divides_rows() {
            for sum in sums.norms.iter_mut().flatten() {
                let start = end;
                end += self.config.width;
                *sum = cx.partial(start..end);
            }
        }
        sums
    }

    /// Sums the partial sums over the ranks, and adds them to the gradients.
    fn finish_sums(&self, g: &BlockParams<Grad>) -> Result<(), OpError> {
        let cx = self.cx;
        let c = self.config.width;
        if self.config.lora.is_some() {
            cx.sum_partials(cx.s.sums.len())?;
            let layers = [&self.qkv, &self.output, &self.up, &self.down];
            let mut adapters = layers.into_iter().flat_map(|layer| &layer.adapters);
            return adapters.try_for_each(Adapter::finish_sums);
        }
        let sums = self.norm_grads(g);
        let of_heads = self.partial_of_heads(&sums);
        let of_norms = match cx.divides_rows() {
            true => sums.norms.concat(),
            false => Vec::new(),
        };
        cx.sum_partials(of_heads + of_norms.len() * c)?;
        if let (Some(heads), 1..) = (sums.heads, of_heads) {
            cx.finish_sums(&[heads], 0..of_heads)?;
        }
        let mut start = of_heads;
        for outs in of_norms.chunks(MOST_SUMS) {
            let end = start + outs.len() * c;
            cx.finish_sums(outs, start..end)?;
            start = end;
        }
        Ok(())
    }

    /// Returns all rows of the gradient of what the dropout was applied to: `s.dres`, or its copy
    /// in `copy` with the gradient of the bias before the dropout, which is the last of `sums`
    /// unless it is frozen.
    fn gradient_before(
        &self,
        copy: AnySlice,
        sums: &[SumOut],
        dropout: Option<Dropout>,
    ) -> Result<AnySlice, OpError> {
        let cx = self.cx;
        let PassContext { ops, stream, s, .. } = *cx;
        let Some(dropout) = cx.of_own_rows(dropout) else {
            cx.gather_rows(s.dres)?;
            return Ok(s.dres);
        };
        let copy = copy.slice(0..s.dres.len());
        let kernels = &ops.kernels;
        let [own, dres] = [copy, s.dres].map(|rows| cx.own(rows));
        match sums {
            [.., bias] => {
                let partials = s.partials;
                column_sums::drop_and_sum_rows(
                    kernels, stream, *bias, own, dres, dropout, partials,
                )?;
            }
            [] => {
                let n = self.config.width;
                dropout::add_residual(kernels, stream, own, dres, None, n, Some(dropout))?;
            }
        }
        cx.gather_rows(copy)?;
        Ok(copy)
    }

    /// Computes the gradients of the MLP's second layer, and returns that of what its first layer
    /// computed.
    fn mlp_backward(&self, down: [Grad; 2], dout: AnySlice) -> Result<AnySlice, OpError> {
        let PassContext { ops, stream, s, .. } = *self.cx;
        let kernels = &ops.kernels;
        let a = self.a;
        self.down.begin_backward(dout)?;
        if self.config.mlp == Mlp::SwiGlu {
            // `act` is its gradient until SwiGLU's backward.
            let product = self.down.input_gradient(a.act, dout);
            self.down.run_input_gradient(&product)?;
            swiglu::backward(kernels, stream, a.act, a.up, self.config.inner)?;
            self.weight_gradients(&self.down, down, a.act, dout)?;
            return Ok(a.up);
        }

        self.weight_gradients(&self.down, down, a.act, dout)?;
        let dup = s.wide.slice(0..a.up.len());
        let product = self.down.input_gradient(dup, dout);
        let fused = product.with(Epilogue::GeluBackward { input: a.up });
        if fuses_gelu(ops, &self.down, &fused)? {
            self.down.run_input_gradient(&fused)?;
        } else {
            self.down.run_input_gradient(&product)?;
            gelu::backward(kernels, stream, dup, a.up)?;
        }
        Ok(dup)
    }

    /// Reads the gradient of the norm's output from `s.narrow`, adds to `s.dres`, and writes the norm's
    /// output to `s.normed`.
    fn norm_backward(
        &self,
        norm: Norm,
        sums: &[SumOut],
        drops: bool,
        x: AnySlice,
        stats: DeviceSlice<f32>,
    ) -> Result<(), OpError> {
        let cx = self.cx;
        let PassContext { ops, stream, s, .. } = *cx;
        let narrow = s.narrow.slice(0..s.dres.len());
        let own = |rows| cx.own(rows);
        // With dropout, the gradient of the bias before the norm was summed with it.
        let sums = match drops {
            true => &sums[..sums.len().min(norm.kind.params())],
            false => sums,
        };
        cx.sum_rows(narrow)?;
        norm::backward(
            &ops.kernels,
            stream,
            norm,
            own(s.dres),
            sums,
            Some(own(s.normed)),
            own(narrow),
            x,
            stats,
            s.partials,
        )?;
        cx.gather_rows(s.normed)
    }

    /// Computes the gradients of a layer whose output is added to the residual stream, without that of a
    /// bias before a layer norm, which the norm's backward sums.
    fn weight_gradients(
        &self,
        layer: &Linear<'_>,
        [dw, dbias]: [Grad; 2],
        x: AnySlice,
        dy: AnySlice,
    ) -> Result<(), OpError> {
        let PassContext { ops, stream, s, .. } = *self.cx;
        if !dbias.elements().is_empty() && self.config.norm == NormKind::Rms {
            column_sums::sum_rows(&ops.kernels, stream, dbias.into(), dy, s.partials)?;
        }
        layer.run_weight_gradients(dw, x, dy)
    }

    /// Computes the gradients of the MLP's first layer from `s.normed` and the gradient of its output.
    fn up_gradients(&self, [dw, dbias]: [Grad; 2], dup: AnySlice) -> Result<(), OpError> {
        let PassContext { ops, stream, s, .. } = *self.cx;
        if dbias.elements().is_empty() {
            return self.up.run_weight_gradients(dw, s.normed, dup);
        }
        let product = self.up.weight_gradient(dw, s.normed, dup);
        let apart = |stream: &CudaStream| {
            ops.matmul.run(stream, &product)?;
            column_sums::sum_rows(&ops.kernels, stream, dbias.into(), dup, s.partials)
        };
        // Only what is written can be computed several times to compare, and the library sums the columns
        // of the right operand.
        if let (Grad::Write(bias), MatrixOrder::InputsFirst) = (dbias, self.up.order) {
            let fused = product.with(Epilogue::BiasGradient(bias));
            if ops.matmul.is_faster(stream, &fused, apart)? {
                return ops.matmul.run(stream, &fused);
            }
        }
        apart(stream)
    }

    /// Computes the gradient of qkv from that of what the heads attend to, and returns it as the product
    /// wrote it; with the gradients of its bias and of the norms of heads.
    fn attention_backward(
        &self,
        dattended: AnySlice,
        bias: Grad,
        of_heads: Option<SumOut>,
    ) -> Result<AnySlice, ModelError> {
        let cx = self.cx;
        let PassContext { ops, stream, s, .. } = *cx;
        let kernels = &ops.kernels;
        let sums_bias = !bias.elements().is_empty();
        let has_norm = self.config.qk_norm;
        let grads = AttentionGrads {
            // The norms are between the bias and the rotation.
            dbias: (sums_bias && !has_norm).then(|| bias.into()),
            rotated: self.config.rope.is_some(),
            masks: self.masks,
        };
        let slices = self.attention_slices();
        let dqkv = cx.attend_backward(self.attention, slices, dattended, grads)?;
        if has_norm {
            rope::norm_backward(
                kernels,
                stream,
                dqkv,
                of_heads,
                self.a.raw,
                self.a.raw_stats,
                self.qk_norm,
                self.config.qkv_heads(),
                s.partials,
            )?;
            if sums_bias {
                column_sums::sum_rows(kernels, stream, bias.into(), dqkv, s.partials)?;
            }
        }
        Ok(dqkv)
    }
}
