//! `own_framework` at stage 3 without the facade, with the crates beneath it: for a framework
//! whose parameters stay in its own memory, or that orders its work otherwise.

use std::{ops::Range, path::Path, sync::Arc, time::Duration};

use half::bf16;
use zero_alloc::device::{AnySlice, DType, Device, DeviceId, DeviceSlice, Element};
use zero_alloc::{Pool, host::HostDevice};
use zero_ckpt::{ExchangeFn, Reader, SaveMeta, Store, StoreOptions};
use zero_comm::threads::ThreadsComm;
use zero_comm::{BucketOptions, Buckets, Communicator};
use zero_comm::{PrefetchOptions, Prefetcher, SumInto, WaitOnDrop};
use zero_kernels::host::HostKernels;
use zero_optim::{Divisor, GroupRules, OptimizerConfig, ParamGroups, RankParams};
use zero_optim::{Segment, ShardedOptimizer, StepInputs, UnitSlices};
use zero_shard::{Layout, ParamSpec, UnitSpec, ZeroStage};

#[path = "own_framework/mlp.rs"]
mod mlp;
use mlp::{LAYERS, ROWS, Result, WIDTHS, backward, data, forward, initial, on_threads};

const LIMIT: Duration = Duration::from_secs(60);

// glue
/// The framework's memory, for the crates.
fn view<T: Element>(memory: &mut [T]) -> AnySlice {
    // SAFETY: the memory outlives `WaitOnDrop`; within a step, streams and events order the
    // accesses.
    unsafe { DeviceSlice::from_raw_parts(memory.as_mut_ptr(), memory.len(), DeviceId::HOST) }
        .erase()
}

/// Weight and bias of a layer.
fn split(layer: usize, params: &[bf16]) -> [&[bf16]; 2] {
    let (weight, rest) = params.split_at(WIDTHS[layer] * WIDTHS[layer + 1]);
    [weight, &rest[..WIDTHS[layer + 1]]]
}
// end of glue

/// Trains steps `steps`, and saves at their end. Resumes a checkpoint if there is one. Returns the
/// losses.
fn train(comm: ThreadsComm, dir: &Path, steps: Range<u64>) -> Result<Vec<f64>> {
    // glue: what each rank owns
    let (ranks, rank, id) = (comm.world_size(), comm.rank(), comm.rank() as u64);
    let unit = |i: usize| {
        let [ins, outs] = [WIDTHS[i], WIDTHS[i + 1]].map(|width| width as u64);
        let weight = ParamSpec::new(format!("layer {i}.weight"), [outs, ins]);
        let bias = ParamSpec::new(format!("layer {i}.bias"), [outs]);
        UnitSpec::new(format!("layer {i}"), [weight, bias])
    };

    let layout = Layout::new(&(0..LAYERS).map(unit).collect::<Vec<_>>(), ranks as u64, 1)?;
    let units = layout.units();
    // end of glue

    // This rank's shards of the parameters and of the sums of gradients, and the padded gradients
    // of each layer.
    let initial = |layer: usize, i: u64| {
        let in_bias = (i as usize).checked_sub(WIDTHS[layer] * WIDTHS[layer + 1]);
        bf16::from_f32(initial(in_bias.unwrap_or(i as usize)))
    };
    let mut shards: Vec<Vec<bf16>> = units
        .iter()
        .enumerate()
        .map(|(layer, u)| u.shard(id).map(|i| initial(layer, i)).collect())
        .collect();
    let mut grads: Vec<Vec<f32>> = units
        .iter()
        .map(|u| vec![0.0; u.padded_elems as usize])
        .collect();
    let mut sums: Vec<Vec<f32>> = shards.iter().map(|shard| vec![0.0; shard.len()]).collect();

    // glue: streams, buckets, and the optimizer of this rank's shards
    let shards: Vec<_> = shards.iter_mut().map(|shard| view(shard)).collect();
    let own: Vec<_> = shards.iter().map(|shard| [(*shard, 0)]).collect();
    let sums: Vec<_> = sums.iter_mut().map(|sum| view(sum)).collect();
    let device = HostDevice::new();
    let comm = Arc::new(comm) as Arc<dyn Communicator<HostDevice>>;
    let compute = device.create_stream("compute")?;
    let comm_stream = device.create_stream("comm")?;
    let _wait = WaitOnDrop::new(comm.clone(), [compute.clone(), comm_stream.clone()], LIMIT);
    let pool = Pool::new(device, 1 << 20);
    let kernels = Arc::new(HostKernels::new(1)?);
    let options = BucketOptions::new(64, DType::Bf16);

    let buckets = Buckets::new(
        &pool,
        comm.clone(),
        compute.clone(),
        comm_stream.clone(),
        options,
    )?;

    let exchange =
        |message: &[u8]| -> Result<_> { Ok(comm.exchange(&pool, &compute, message, LIMIT)?) };
    let rules = vec![
        GroupRules::default(),
        GroupRules::default().weight_decay(0.0),
    ]; // of weights, of biases
    let groups = ParamGroups::new(rules, layout.group_runs(id, |param| param.param)?);
    let config = OptimizerConfig::default().lr(0.02);
    let mut optim = ShardedOptimizer::builder(&pool, kernels.clone(), &compute)
        .config(config)
        .param_dtype(DType::Bf16)
        .groups(&groups)
        .build(Segment::shards(&layout))?;
    let own_params = RankParams {
        layout: &layout,
        rank: id,
        params: &own,
    };

    match steps.start {
        0 => optim.init_masters(&compute, &own)?,
        _ => optim.load(&compute, &Reader::open(dir)?, &own_params, LIMIT)?,
    }

    let streams = (compute.clone(), comm_stream.clone());
    let options = PrefetchOptions::default();
    let mut prefetcher = Prefetcher::new(
        pool.clone(),
        comm.clone(),
        streams.0,
        streams.1,
        shards,
        options,
    );

    // end of glue

    let ((inputs, targets), mut losses) = (data(rank, ranks), Vec::new());
    for _step in steps.clone() {
        let mut outputs = vec![inputs.clone()];
        // glue: while a layer is used, the next one is gathered
        let mut gathered = prefetcher.step()?;
        for layer in 0..LAYERS {
            let unit = gathered.unshard(layer)?;
            let forward = |params: &[bf16]| forward(layer, split(layer, params), &outputs[layer]);
            outputs.push(unit.read(LIMIT, forward)?);
            gathered.reshard(unit);
        }
        // end of glue
        let mut dy: Vec<f32> = outputs[LAYERS]
            .iter()
            .zip(&targets)
            .map(|(y, target)| 2.0 * (y - target))
            .collect();
        let loss = dy.iter().map(|dy| f64::from(dy * dy) / 4.0).sum::<f64>();
        let mut reduced = Vec::new();
        for (layer, grads) in grads.iter_mut().enumerate().rev() {
            // glue: the layer is summed over ranks while backward goes on
            let unit = gathered.unshard(layer)?;
            let outputs = [&*outputs[layer], &outputs[layer + 1], &dy];
            let backward = |params: &[bf16]| backward(layer, split(layer, params)[0], outputs);
            let dw;
            (dy, dw) = unit.read(LIMIT, backward)?;
            grads[..dw.len()].copy_from_slice(&dw);
            gathered.reshard(unit);
            reduced.insert(
                0,
                buckets.reduce_unit(&*kernels, &[(view(grads), 0)], SumInto::Write(sums[layer]))?,
            );
            // end of glue
        }
        // glue: the step
        gathered.end();
        let slices: Vec<_> = reduced
            .iter()
            .zip(&own)
            .map(|(grad, param)| UnitSlices { grad, param })
            .collect();
        let inputs = StepInputs::new(loss / ROWS as f64, Divisor::Sum(ROWS as f64));
        losses.push(
            optim
                .step_with(&compute, &slices, inputs, exchange, LIMIT)?
                .loss(),
        );
        // end of glue
    }

    // glue: the checkpoint
    let meta = SaveMeta::default().step(steps.end).stage(ZeroStage::Three);
    let store = Store::create(dir, id, StoreOptions::default())?;
    optim.save(
        &compute,
        &store,
        meta,
        &own_params,
        &mut ExchangeFn::new(id, exchange),
        LIMIT,
    )?;

    // end of glue
    Ok(losses)
}

/// Trains on `ranks` threads.
pub(crate) fn on_ranks(ranks: usize, dir: &Path, steps: Range<u64>) -> Result<Vec<f64>> {
    on_threads(ranks, |comm| train(comm, dir, steps.clone()))
}

fn main() -> Result<()> {
    let dir = tempfile::tempdir()?;
    println!("four ranks: {:?}", on_ranks(4, dir.path(), 0..50)?);
    println!("two ranks resume: {:?}", on_ranks(2, dir.path(), 50..60)?);
    Ok(())
}
