//! The head's logits and losses with tensor parallelism: each rank has those of its part of the
//! vocabulary.

use zero_alloc::device::{AnySlice, DeviceSlice};
use zero_alloc::host::{HostDevice, HostStream};
use zero_trainer::ModelError;

use super::engine::Engine;
use super::head;
use super::tensor_group::TensorGroup;
use crate::ops::cross_entropy;

impl Engine {
    /// Enqueues the logits of this rank's token `token`, gathers them, and returns those of the
    /// whole vocabulary.
    pub(super) fn cut_token_logits(
        &self,
        group: &TensorGroup<HostDevice>,
        stream: &HostStream,
        params: &[AnySlice],
        token: usize,
    ) -> Result<AnySlice, ModelError> {
        let head = self.buffers.head;
        let logits = self.buffers.scratch.logits;
        let part = group.part();
        let tokens = self.options.tokens();
        let len = group.vocab.div_ceil(group.rank.ranks);
        let own = logits.slice(0..len);
        let all = logits.slice(len..len * (group.rank.ranks + 1));
        let pass = self.passes.len() - 1;
        self.enqueue(stream, "token logits", pass, params, &[], move |flat, _| {
            let h = head.view();
            let c = h.out.len() / tokens;
            let out = &h.out[token * c..(token + 1) * c];
            // SAFETY: the buffer is this model's, and the stream orders its passes.
            let own = unsafe { own.as_host_mut() };
            head::logits(&mut own[..part.len], out, &flat, part.len);
        })?;
        group.gather(stream, own.erase(), all.erase())?;
        // Only the last ranks' parts are shorter than the others: nothing is between the tokens.
        Ok(all.slice(0..group.vocab).erase())
    }

    /// Enqueues the sum of the losses of the first `tokens` tokens after a forward, or their loss
    /// and gradients.
    pub(super) fn cut_losses(
        &self,
        group: &TensorGroup<HostDevice>,
        stream: &HostStream,
        params: &[AnySlice],
        tokens: usize,
        gradients: Option<(&[DeviceSlice<f32>], DeviceSlice<f64>)>,
    ) -> Result<(), ModelError> {
        let pass = self.passes.len() - 1;
        let head = self.buffers.head;
        let loss = self.buffers.loss;
        let scratch = self.buffers.scratch;
        let part = group.part();
        let width = head.out.len() / self.options.tokens();
        let chunk = group.rows();
        let is_first = group.rank.is_first();
        let rank = group.rank.rank;

        for start in (0..tokens).step_by(chunk) {
            let end = tokens.min(start + chunk);
            let rows = end - start;
            let [stats, all_stats] = group.stats(rows);
            let label = "logits";
            self.enqueue(stream, label, pass, params, &[], move |flat, _| {
                let logits = &mut scratch.view().logits[..rows * part.len];
                let out = &head.view().out[start * width..end * width];
                head::logits(logits, out, &flat, part.len);
                // SAFETY: the buffer is this model's, and the stream orders its passes.
                let stats = unsafe { stats.as_host_mut() };
                let targets = &flat.batch.targets[start..end];
                cross_entropy::part_statistics(stats, logits, targets, part);
            })?;
            group.gather_stats(stream, rows)?;

            let grads = gradients.map_or(&[][..], |(grads, _)| grads);
            let loss_scale = gradients.map(|(_, scale)| scale);
            let label = "losses";
            self.enqueue(
                stream,
                label,
                pass,
                params,
                grads,
                move |flat, mut grads| {
                    let s = scratch.view();
                    let logits = &mut s.logits[..rows * part.len];
                    let out = &head.view().out[start * width..end * width];
                    // SAFETY: as above.
                    let stats = unsafe { all_stats.as_host() };
                    let targets = &flat.batch.targets[start..end];
                    let divisor = loss_scale.map_or(1.0, |_| flat.batch.divisor);
                    let scale = loss_scale.map_or(0.0, |scale| {
                        // SAFETY: checked to be host memory; its maker promised ordered accesses.
                        let scale = unsafe { scale.as_host() };
                        scale[0] as f32 / flat.batch.divisor as f32
                    });
                    let sum =
                        cross_entropy::part_gradient(logits, stats, rank, targets, part, scale);
                    if is_first {
                        // SAFETY: as above.
                        let loss = unsafe { loss.as_host_mut() };
                        loss[0] += sum / divisor;
                    }
                    if loss_scale.is_none() {
                        return;
                    }
                    let w = flat.head_weight(part.len * width);
                    let layer = head::layer(w, part.len);
                    layer.input_gradient(&mut s.narrow[start * width..end * width], logits);
                    // No gradient: all is frozen.
                    let Some(matrix) = grads.pop() else { return };
                    let dw = match grads.is_empty() {
                        true => &mut matrix[flat.ranges.head.start..],
                        false => &mut matrix[flat.ranges.tokens.start..],
                    };
                    layer.weight_gradient([&mut dw[..w.len()], &mut []], out, logits);
                },
            )?;
        }
        Ok(())
    }
}
