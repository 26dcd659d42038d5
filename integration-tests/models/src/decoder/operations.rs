//! What the passes of a model compute on the host between two exchanges of its ranks.

use std::ops::Range;

use zero_alloc::device::DeviceSlice;

use super::block::{Block, Positions};
use super::block_params::BlockParams;
use super::config::DecoderConfig;
use super::params::{AdapterRanges, Flat, FlatUnit, split_ranges};
use super::sequence_part::{Exchanges, SequencePart};
use super::slices::{BlockSlices, HeadView, ScratchSlices, ScratchView};
use crate::ops::adapted_linear::{AdaptedGrads, AdaptedLinear, Adapter};
use crate::ops::bf16::Bf16Products;
use crate::ops::dropout::{Draws, Dropout};
use crate::ops::linear::{self, Linear};
use crate::ops::norm::Norm;
use crate::ops::{Span, attention, embedding, head_norm, rope};
use crate::options::ModelOptions;
use crate::tensor::TensorRank;

/// A part of a block's forward. Between two parts, ranks that share a micro-batch exchange what the
/// first has computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Forward {
    /// The first norm's output.
    Norm1,
    /// Queries, keys and values, as attention reads them.
    Qkv,
    /// The output of attention.
    Attention,
    /// The second norm's output.
    Norm2,
    /// The activations that the output reads.
    Mlp,
}

/// A part of a block that is added to the residual stream: the product of activations and a second
/// matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Branch {
    Attention,
    Mlp,
}

/// A part of a block's backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backward {
    /// To `s.narrow`, the gradient of the second norm's output.
    Mlp,
    /// To `s.dres`, that of the residual stream behind attention.
    Norm2,
    /// The gradient of what the heads attend to.
    Attended,
    /// The gradient of queries, keys and values, as attention reads them.
    Attention,
    /// To `s.narrow`, that of the first norm's output.
    Qkv,
    /// To `s.dres`, that of the block's input.
    Norm1,
}

/// The gradients of a block's parameters, and of the adapters of its linear layers.
struct BlockGrads<'g> {
    base: BlockParams<&'g mut [f32]>,
    adapters: [Vec<[&'g mut [f32]; 2]>; 4],
}

/// The operations of a model. Shapes: `x`, `out` and gradients `[M, C]`.
pub(super) struct Operations {
    /// With the sizes of the rank's part of a block.
    pub(super) config: DecoderConfig,
    pub(super) options: ModelOptions,
    pub(super) part: SequencePart,
    pub(super) tensor: TensorRank,
    pub(super) exchanges: Exchanges,
    /// How products in bf16 are computed; `None` in runs of other types, and on other CPUs.
    pub(super) products: Option<Bf16Products>,
}

impl Operations {
    /// This rank's tokens of each sequence.
    fn span(&self) -> Span {
        self.part.span(self.options.seq_len)
    }

    fn attention(&self, layer: usize) -> attention::Shape {
        let config = &self.config;
        let seq = self.options.seq_len;
        let [heads, kv_heads] = self.exchanges.qkv.heads_of_rank();
        attention::Shape {
            batch: self.options.micro_batch,
            seq,
            heads,
            kv_heads,
            d: config.head_dim,
            window: config.window_of(layer, seq),
            scale: config.scale_of(layer),
            products: self.products,
        }
    }

    fn masks<'a>(&self, p: &Flat<'a>) -> attention::Masks<'a> {
        let config = &self.config;
        let seq = self.options.seq_len;
        let before = self.tensor.rank * config.heads * seq;
        let first_line = before + self.part.first_line(config.heads, seq);
        let site = config.dropout_site(p.layer);
        let dropout = p.draws.dropout(config.dropout.attention, site);
        attention::Masks {
            starts: &p.whole.starts,
            dropout: dropout.map(|dropout| dropout.from_line(first_line)),
        }
    }

    /// The dropout of a branch.
    fn dropout<'a>(&self, branch: Branch, p: &Flat<'a>) -> Option<Dropout<'a>> {
        let of_block = match branch {
            Branch::Attention => 1,
            Branch::Mlp => 2,
        };
        let site = self.config.dropout_site(p.layer) + of_block;
        let dropout = p.draws.dropout(self.config.residual_dropout(), site)?;
        Some(dropout.from_line(self.span().first))
    }

    /// The block of a pass.
    fn block<'a>(&'a self, p: &Flat<'a>) -> Block<'a, AdaptedLinear<'a>> {
        let config = &self.config;
        let unit = p.flats[0];
        let of = p.ranges.block.clone();
        let vectors = |ranges: [Range<usize>; 2]| ranges.map(|range| unit.vector(range));
        let mut adapters = p.ranges.adapters.iter();
        let mut linear = |[weight, bias]: [Range<usize>; 2], outputs: usize| AdaptedLinear {
            base: Linear {
                weight: unit.matrix(weight),
                bias: unit.vector(bias),
                outputs,
                order: config.order,
            },
            adapters: self.adapters(adapters.next().map_or(&[][..], Vec::as_slice), p),
        };
        Block {
            config,
            norm1: self.norm(vectors(of.norm1)),
            qkv: linear(of.qkv, config.qkv_width()),
            qk_norm: unit.vector(of.qk_norm),
            output: linear(of.output, config.width),
            norm2: self.norm(vectors(of.norm2)),
            up: linear(of.up, config.up_width()),
            down: linear(of.down, config.width),
        }
    }

    /// The adapters of a linear layer.
    fn adapters<'a>(&self, ranges: &[AdapterRanges], p: &Flat<'a>) -> Vec<Adapter<'a>> {
        let (Some(lora), Some(unit)) = (&self.config.lora, p.flats.get(1)) else {
            return Vec::new();
        };
        let span = self.span();
        let adapter = |of: &AdapterRanges| {
            let column = of.first_input(lora.r, self.tensor);
            let site = DecoderConfig::adapter_site(p.layer, of.place);
            let dropout = p.draws.dropout(lora.dropout, site);
            Adapter {
                a: unit.matrix(of.a.clone()),
                b: unit.matrix(of.b.clone()),
                r: lora.r,
                outputs: of.outputs.clone(),
                scale: lora.scale(),
                dropout: dropout.map(|dropout| {
                    (
                        dropout.from_line(span.first).of_columns_from(column),
                        span.tokens,
                    )
                }),
            }
        };
        ranges.iter().map(adapter).collect()
    }

    fn norm<'a>(&self, [gain, bias]: [&'a [f32]; 2]) -> Norm<'a> {
        Norm {
            kind: self.config.norm,
            gain,
            bias,
            eps: self.config.eps,
        }
    }

    fn positions<'a>(&self, p: &Flat<'a>) -> Positions<'a> {
        Positions {
            table: p.table,
            starts: &p.batch.starts,
            span: self.span(),
        }
    }

    /// One part of a block's forward from its input `x`.
    pub(super) fn forward(&self, part: Forward, block: BlockSlices, x: &[f32], p: &Flat<'_>) {
        let a = block.view();
        let block = self.block(p);
        match part {
            Forward::Norm1 => block.norm1.forward(a.norm1, a.stats1, x),
            Forward::Qkv => {
                let positions = self.positions(p);
                block.qkv([a.qkv, a.raw, a.raw_stats], a.norm1, positions);
            }
            Forward::Attention => {
                let shape = self.attention(p.layer);
                attention::forward(a.attended, a.lse, a.qkv, self.masks(p), shape);
            }
            Forward::Norm2 => block.norm2.forward(a.norm2, a.stats2, a.mid),
            Forward::Mlp => block.mlp(a.act, a.up, a.norm2),
        }
    }

    /// The linear layer of a branch, and its input.
    fn branch_layer<'a>(
        &'a self,
        branch: Branch,
        block: BlockSlices,
        p: &Flat<'a>,
    ) -> (AdaptedLinear<'a>, &'a [f32]) {
        let a = block.view();
        let block = self.block(p);
        match branch {
            Branch::Attention => (block.output, a.attended),
            Branch::Mlp => (block.down, a.act),
        }
    }

    /// `out = residual + dropout(x w + bias)` of a branch.
    pub(super) fn branch(
        &self,
        branch: Branch,
        out: &mut [f32],
        residual: &[f32],
        block: BlockSlices,
        p: &Flat<'_>,
    ) {
        let (layer, x) = self.branch_layer(branch, block, p);
        let Some(dropout) = self.dropout(branch, p) else {
            return layer.forward_residual(out, residual, x);
        };
        layer.forward(out, x);
        dropout.apply_and_add(out, residual, self.span().tokens, layer.base.outputs);
    }

    /// `out = x w` of a branch: with tensor parallelism a part of the sum over its ranks.
    pub(super) fn product(
        &self,
        branch: Branch,
        out: &mut [f32],
        block: BlockSlices,
        p: &Flat<'_>,
    ) {
        let (layer, x) = self.branch_layer(branch, block, p);
        layer.product(out, x);
    }

    /// `out = residual + dropout(sum + bias)` of a branch: rows from `first` on.
    pub(super) fn add_branch(
        &self,
        branch: Branch,
        out: &mut [f32],
        [residual, sum]: [&[f32]; 2],
        first: usize,
        p: &Flat<'_>,
    ) {
        let block = self.block(p);
        let bias = match branch {
            Branch::Attention => block.output.base.bias,
            Branch::Mlp => block.down.base.bias,
        };
        let c = self.config.width;
        let Some(dropout) = self.dropout(branch, p) else {
            return linear::add_residual(out, residual, sum, bias, c);
        };
        out.copy_from_slice(sum);
        linear::add_rows(out, bias);
        let dropout = dropout.of_rows_from(first);
        dropout.apply_and_add(out, residual, self.span().tokens, c);
    }

    /// The gradient of the input of a branch's dropout, `[M, C]`, which its backward reads: `s.dres` if
    /// nothing is dropped.
    pub(super) fn before_dropout(&self, s: ScratchSlices, draws: &Draws) -> DeviceSlice<f32> {
        match draws.dropout(self.config.residual_dropout(), 1) {
            Some(_) => s.narrow.slice(0..s.dres.len()),
            None => s.dres,
        }
    }

    /// Computes that gradient, of rows from `first` on, from the gradient `dy` of a branch.
    pub(super) fn drop_gradient(
        &self,
        branch: Branch,
        dx: &mut [f32],
        dy: &[f32],
        first: usize,
        p: &Flat<'_>,
    ) {
        match self.dropout(branch, p) {
            Some(dropout) => {
                let dropout = dropout.of_rows_from(first);
                dropout.of(dx, dy, self.span().tokens, self.config.width);
            }
            None => dx.copy_from_slice(dy),
        }
    }

    /// The gradients of what the heads attend to, and of queries, keys and values, of the lengths that
    /// they have in `block`.
    pub(super) fn attention_grads(s: ScratchSlices, block: BlockSlices) -> [DeviceSlice<f32>; 2] {
        let [attended, qkv] = [block.attended.len(), block.qkv.len()];
        [
            s.wide.slice(0..attended),
            s.wide.slice(attended..attended + qkv),
        ]
    }

    /// Places in the partial sums of the gradients of norms, in the order of [`BlockParams::norms`];
    /// empty where the gradient itself is added to.
    fn partial(&self, p: &Flat<'_>) -> [Range<usize>; 5] {
        let mut of = p.ranges.block.clone();
        let is_cut = self.tensor.ranks > 1;
        let divides = self.options.sequence_parallel;
        let mut is_partial = [is_cut, divides, divides, divides, divides].into_iter();
        let mut end = 0;
        of.norms().map(|range| {
            let start = end;
            if is_partial.next() == Some(true) {
                end += range.len();
            }
            start..end
        })
    }

    /// The places of the gradients of a block's parameters: elements of the partial sums for those that
    /// ranks sum. If the block has adapters, only they have gradients: `grad`.
    fn places<'g>(&self, grad: &'g mut [f32], sums: &'g mut [f32], p: &Flat<'_>) -> BlockGrads<'g> {
        if self.config.lora.is_some() {
            let mut part = split_ranges(grad);
            let mut sum = split_ranges(sums);
            let mut place = |range: &Range<usize>, partial: &Range<usize>| match partial.is_empty()
            {
                true => part(range.clone()),
                false => sum(partial.clone()),
            };
            let mut of = |of: &AdapterRanges| {
                let [a, b] = &of.partial;
                [place(&of.a, a), place(&of.b, b)]
            };
            return BlockGrads {
                base: p.ranges.block.clone().map(|_| &mut [][..]),
                adapters: p
                    .ranges
                    .adapters
                    .each_ref()
                    .map(|all| all.iter().map(&mut of).collect()),
            };
        }
        let mut places = p.ranges.block.clone().map(split_ranges(grad));
        let sums = self.partial(p).map(split_ranges(sums));
        for (place, sums) in places.norms().into_iter().zip(sums) {
            if !sums.is_empty() {
                *place = sums;
            }
        }
        BlockGrads {
            base: places,
            adapters: Default::default(),
        }
    }

    /// Adds the partial sums to the unit's gradient.
    pub(super) fn add_partial_sums(&self, grad: &mut [f32], sums: &mut [f32], p: &Flat<'_>) {
        if self.config.lora.is_some() {
            let mut grad = split_ranges(grad);
            for of in p.ranges.adapters.iter().flatten() {
                for (range, partial) in [&of.a, &of.b].into_iter().zip(&of.partial) {
                    add(grad(range.clone()), &sums[partial.clone()]);
                }
            }
            return;
        }
        let mut grads = p.ranges.block.clone().map(split_ranges(grad));
        let sums = self.partial(p).map(split_ranges(sums));
        for (grad, sums) in grads.norms().into_iter().zip(sums) {
            add(grad, sums);
        }
    }

    /// The gradient that the backward of a branch reads, as in [`Self::before_dropout`].
    fn gradient_of<'s>(
        &self,
        branch: Branch,
        narrow: &'s [f32],
        dres: &'s [f32],
        p: &Flat<'_>,
    ) -> &'s [f32] {
        match self.dropout(branch, p) {
            Some(_) => &narrow[..dres.len()],
            None => dres,
        }
    }

    /// One part of a block's backward. Adds to `grad`, the unit's gradient. `s.dres` is the gradient of
    /// the output before [`Backward::Mlp`] and of the input after [`Backward::Norm1`]. From
    /// [`Backward::Attended`] on, `s.wide` has the gradient of `attended`, and behind it that of `qkv`. A
    /// gradient before a dropout is in `s.narrow`. May overwrite the block's activations except for the
    /// norms' outputs.
    pub(super) fn backward(
        &self,
        part: Backward,
        s: ScratchView<'_>,
        block: BlockSlices,
        x: &[f32],
        p: &Flat<'_>,
        grad: &mut [f32],
    ) {
        let a = block.view();
        let block = self.block(p);
        let BlockGrads { base: g, adapters } = self.places(grad, s.logits, p);
        let [qkv, output, up, down] = adapters;
        let linear = |base, adapters| AdaptedGrads { base, adapters };
        match part {
            Backward::Mlp => {
                let dact = &mut s.wide[..a.act.len()];
                let dout = self.gradient_of(Branch::Mlp, s.narrow, s.dres, p);
                block.down.backward(linear(g.down, down), dact, a.act, dout);
                let config = &self.config;
                let dup = config.mlp.backward(dact, a.up, config.inner);
                block.up.backward(linear(g.up, up), s.narrow, a.norm2, dup);
            }
            Backward::Norm2 => {
                let norm = &block.norm2;
                norm.backward(s.dres, g.norm2, s.narrow, a.mid, a.stats2);
            }
            Backward::Attended => {
                let dattended = &mut s.wide[..a.attended.len()];
                let dout = self.gradient_of(Branch::Attention, s.narrow, s.dres, p);
                let grads = linear(g.output, output);
                block.output.backward(grads, dattended, a.attended, dout);
            }
            Backward::Attention => {
                let (dattended, dqkv) = s.wide.split_at_mut(a.attended.len());
                let dqkv = &mut dqkv[..a.qkv.len()];
                let shape = self.attention(p.layer);
                let masks = self.masks(p);
                attention::backward(dqkv, dattended, a.qkv, a.attended, a.lse, masks, shape);
            }
            Backward::Qkv => {
                let dqkv = &mut s.wide[a.attended.len()..][..a.qkv.len()];
                self.heads_backward(dqkv, g.qk_norm, [a.raw, a.raw_stats], &block, p);
                let dx = match self.config.trains_before(p.layer) {
                    true => s.narrow,
                    false => &mut [],
                };
                block.qkv.backward(linear(g.qkv, qkv), dx, a.norm1, dqkv);
            }
            Backward::Norm1 => {
                let norm = &block.norm1;
                norm.backward(s.dres, g.norm1, s.narrow, x, a.stats1);
            }
        }
    }

    /// Turns the gradient of queries, keys and values into that before their rotation and norms.
    fn heads_backward(
        &self,
        dqkv: &mut [f32],
        dgains: &mut [f32],
        [raw, stats]: [&mut [f32]; 2],
        block: &Block<'_, AdaptedLinear<'_>>,
        p: &Flat<'_>,
    ) {
        let config = &self.config;
        let heads = config.qkv_heads();
        if config.rope.is_some() {
            let Positions {
                table,
                starts,
                span,
            } = self.positions(p);
            rope::backward(dqkv, table, starts, span, heads);
        }
        if config.qk_norm {
            head_norm::backward(dqkv, dgains, raw, stats, block.qk_norm, heads);
        }
    }

    /// The rows of a batch with these places of its tokens.
    fn rows<'a>(&self, p: &Flat<'a>, tokens: &'a [u32]) -> embedding::BatchTokens<'a> {
        embedding::BatchTokens {
            tokens,
            starts: &p.batch.starts,
            span: self.span(),
        }
    }

    /// `x` of the batch, before its dropout.
    pub(super) fn embed(&self, x: &mut [f32], p: &Flat<'_>) {
        let c = self.config.width;
        let local = self.tensor.of_batch(p.batch, self.config.vocab);
        let ranges = [p.ranges.tokens.clone(), p.ranges.positions.clone()];
        let rows = self.rows(p, &local);
        // The first rank adds the positions.
        let is_added = !ranges[1].is_empty() && self.tensor.is_first();
        match p.flats[0] {
            FlatUnit::F32(elems) => embed(x, rows, ranges.map(|range| &elems[range]), is_added, c),
            FlatUnit::Bf16 { elems, .. } => {
                embed(x, rows, ranges.map(|range| &elems[range]), is_added, c);
            }
        }
    }

    /// Applies the embedding's dropout to its output or the gradient of it: rows from `first` on.
    pub(super) fn drop_embedding(&self, x: &mut [f32], first: usize, p: &Flat<'_>) {
        let dropout = p.draws.dropout(self.config.dropout.embedding, 0);
        if let Some(dropout) = dropout {
            let Span {
                tokens,
                first: line,
            } = self.span();
            let dropout = dropout.from_line(line).of_rows_from(first);
            dropout.apply(x, tokens, self.config.width);
        }
    }

    /// Adds to `grad`, the gradient of the embedding's unit.
    pub(super) fn embed_backward(&self, grad: &mut [f32], dx: &[f32], p: &Flat<'_>) {
        let config = &self.config;
        let c = config.width;
        let local = self.tensor.of_batch(p.batch, config.vocab);
        let padding = self.tensor.padding(config);
        let ranges = [p.ranges.tokens.clone(), p.ranges.positions.clone()];
        let [dtokens, dpositions] = ranges.map(split_ranges(grad));
        embedding::backward_tokens(dtokens, &local, dx, c, padding);
        if !dpositions.is_empty() {
            embedding::backward_positions(dpositions, self.rows(p, &local), dx, c);
        }
    }

    /// The last norm of a pass of the head.
    fn last_norm<'a>(&self, p: &Flat<'a>) -> Norm<'a> {
        self.norm(p.ranges.norm.clone().map(|range| p.flats[0].vector(range)))
    }

    /// `h.out`, the last norm of `x`.
    pub(super) fn final_norm(&self, h: &mut HeadView<'_>, x: &[f32], p: &Flat<'_>) {
        self.last_norm(p).forward(h.out, h.stats, x);
    }

    /// Elements of the parameters of the last norm.
    pub(super) fn final_norm_elems(&self) -> usize {
        self.config.norm.params() * self.config.width
    }

    /// The gradient of the last norm, a part of that of the head's unit; empty if it is frozen.
    pub(super) fn final_norm_grad<'g>(&self, grad: &'g mut [f32], p: &Flat<'_>) -> &'g mut [f32] {
        if self.config.lora.is_some() {
            return grad;
        }
        let [gain, _] = &p.ranges.norm;
        // A bias is behind the gain.
        &mut grad[gain.start..][..self.final_norm_elems()]
    }

    /// Adds the gradient of `x` to `dx`, and those of the norm to `dnorm`, as in
    /// [`Self::final_norm_grad`].
    pub(super) fn final_norm_backward(
        &self,
        dx: &mut [f32],
        dnorm: &mut [f32],
        dout: &[f32],
        x: &[f32],
        h: &HeadView<'_>,
        p: &Flat<'_>,
    ) {
        let grads = dnorm
            .split_at_mut(self.config.width.min(dnorm.len()))
            .into();
        self.last_norm(p).backward(dx, grads, dout, x, h.stats);
    }
}

/// The embedding of tokens, with positions or without.
fn embed<T: Copy + Sync + Into<f32>>(
    x: &mut [f32],
    rows: embedding::BatchTokens<'_>,
    [tokens, positions]: [&[T]; 2],
    adds_positions: bool,
    c: usize,
) {
    match adds_positions {
        true => embedding::forward(x, rows, tokens, positions, c),
        false => embedding::forward_tokens(x, rows.tokens, tokens, c),
    }
}

/// `grad += sums`.
pub(super) fn add(grad: &mut [f32], sums: &[f32]) {
    grad.iter_mut()
        .zip(sums)
        .for_each(|(grad, sum)| *grad += *sum);
}
