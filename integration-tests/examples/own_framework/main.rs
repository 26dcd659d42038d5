//! A small framework trains an MLP in bf16, with parameter groups, at any stage of ZeRO; four
//! ranks save a checkpoint, two resume it. What it writes for ZeRO is between "glue" and "end of
//! glue". `own_framework_crates` is the same without the facade.

use std::{ops::Range, path::Path};

use half::bf16;
use zero_alloc::device::DType;
use zero_comm::Communicator;
use zero_comm::threads::ThreadsComm;
use zero_optim::framework::{Rank, Zero};
use zero_optim::{GroupRules, OptimizerConfig};
use zero_shard::ZeroStage;

mod mlp;
use mlp::{LAYERS, Result, WIDTHS, backward, data, forward, initial, on_threads};

/// Trains steps `steps`, and saves at their end. Resumes a checkpoint if there is one. Returns the
/// losses.
fn train(comm: ThreadsComm, stage: ZeroStage, dir: &Path, steps: Range<u64>) -> Result<Vec<f64>> {
    let (inputs, targets) = data(comm.rank(), comm.world_size());

    // glue: the parameters, by layer
    let decayed = GroupRules::default();
    let mut zero = Zero::builder(Rank::on_host(comm)?)
        .stage(stage)
        .dtype(DType::Bf16)
        .adamw(OptimizerConfig::default().lr(0.02))
        .groups([decayed, decayed.weight_decay(0.0)], |name| {
            usize::from(name.ends_with("bias"))
        });
    for layer in 0..LAYERS {
        let [ins, outs] = [WIDTHS[layer], WIDTHS[layer + 1]].map(|width| width as u64);
        let params = [("weight", vec![outs, ins]), ("bias", vec![outs])];
        zero = zero.unit(format!("layer {layer}"), params);
    }
    let mut zero = zero.build(|_name, _shape, values| {
        (0..).zip(values).for_each(|(i, value)| *value = initial(i))
    })?;
    if steps.start > 0 {
        zero.resume(dir)?;
    }
    // end of glue

    let mut losses = Vec::new();
    for _step in steps {
        // glue
        let mut step = zero.begin()?;
        // end of glue
        let mut outputs = vec![inputs.clone()];
        for layer in 0..LAYERS {
            let x = &outputs[layer];
            // glue: while a layer is used, stage 3 gathers the next one
            let y = step.forward(&format!("layer {layer}"), |params| -> Result<_> {
                let params = [params.get("weight")?, params.get::<bf16>("bias")?];
                Ok(forward(layer, params, x))
            })?;
            // end of glue
            outputs.push(y);
        }

        let y = outputs[LAYERS].iter().zip(&targets);
        let mut dy: Vec<f32> = y.map(|(y, target)| 2.0 * (y - target)).collect();
        let loss = dy.iter().map(|dy| f64::from(dy * dy) / 4.0).sum();
        for layer in (0..LAYERS).rev() {
            let of_layer = [&*outputs[layer], &outputs[layer + 1], &dy];
            // glue: the layer is summed over ranks while backward goes on
            let backward = |weight: &[bf16]| backward(layer, weight, of_layer);
            dy = step.backward(&format!("layer {layer}"), |params, grads| -> Result<_> {
                let (dx, dw) = backward(params.get("weight")?);
                grads.set_all(dw)?;
                Ok(dx)
            })?;
            // end of glue
        }
        // glue: the update; loss and gradients are means over the rows of all ranks
        losses.push(step.end_of(loss, targets.len() as f64)?.loss());
        // end of glue
    }

    // glue
    zero.save(dir)?;
    // end of glue
    Ok(losses)
}

/// Trains on `ranks` threads.
pub(crate) fn on_ranks(
    ranks: usize,
    stage: ZeroStage,
    dir: &Path,
    steps: Range<u64>,
) -> Result<Vec<f64>> {
    on_threads(ranks, |comm| train(comm, stage, dir, steps.clone()))
}

fn main() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let four = on_ranks(4, ZeroStage::Two, dir.path(), 0..50)?;
    println!("four ranks, stage 2: {four:?}");
    let two = on_ranks(2, ZeroStage::Three, dir.path(), 50..60)?;
    println!("two ranks resume, stage 3: {two:?}");
    Ok(())
}
