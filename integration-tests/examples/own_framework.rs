//! A framework that allocates its parameters itself trains an MLP at stage 2 in bf16, with parameter groups; four ranks save a checkpoint,
//! two ranks resume it. `cargo run -p integration-tests --example own_framework`

use std::{error::Error, path::Path, sync::Arc, time::Duration};

use half::bf16;
use zero_alloc::device::{AnySlice, DType, Device, DeviceId, DeviceSlice, Element, Stream};
use zero_alloc::{Pool, host::HostDevice, host::HostStream};
use zero_ckpt::{ExchangeFn, Reader, SaveMeta, Store, StoreOptions};
use zero_comm::threads::{ThreadsComm, World};
use zero_comm::{BucketOptions, Buckets, CommOptions, Communicator, SumInto};
use zero_kernels::host::HostKernels;
use zero_optim::{Divisor, GroupRules, OptimizerConfig, ParamGroups, RankParams, Segment, ShardedAdamW};
use zero_optim::{StepInputs, UnitSlices};
use zero_shard::{Layout, ParamSpec, UnitLayout, UnitSpec, ZeroStage};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;
const LIMIT: Duration = Duration::from_secs(60);
const INPUTS: usize = 4;
const HIDDEN: usize = 8;
const ROWS: usize = 16;

/// Waits for the streams before the framework's memory is freed, also after an error.
struct Finish(Arc<dyn Communicator<HostDevice>>, [HostStream; 2]);

impl Drop for Finish {
    fn drop(&mut self) {
        if self.1.iter().any(|stream| stream.synchronize(LIMIT).is_err()) {
            self.0.abort("a rank failed"); // ends the collectives that another rank's failure leaves waiting
            self.1.iter().for_each(|stream| drop(stream.synchronize(LIMIT)));
        }
    }
}

/// The framework's memory, for the crates. `Finish` lets it outlive the streams' work.
fn view<T: Element>(memory: &mut [T]) -> AnySlice {
    // SAFETY: see above; within a step, streams and events order the accesses.
    unsafe { DeviceSlice::from_raw_parts(memory.as_mut_ptr(), memory.len(), DeviceId::HOST) }.erase()
}

/// Adds the gradients and the loss of one row of data: y = sum(x)^2, from tanh units.
fn backward(params: &[Vec<bf16>], row: usize, grads: &mut [Vec<f32>], loss: &mut f64) {
    let x: [f32; INPUTS] = std::array::from_fn(|i| ((7 * row + 3 * i) % 11) as f32 / 11.0 - 0.5);
    let (weight, bias) = (|layer: usize, i: usize| params[layer][i].to_f32(), HIDDEN * INPUTS);
    let dot = |h: usize| (0..INPUTS).map(|i| weight(0, h * INPUTS + i) * x[i]).sum::<f32>();
    let hidden: [f32; HIDDEN] = std::array::from_fn(|h| (weight(0, bias + h) + dot(h)).tanh());
    let y = weight(1, HIDDEN) + (0..HIDDEN).map(|h| weight(1, h) * hidden[h]).sum::<f32>();
    let error = y - x.iter().sum::<f32>().powi(2);
    *loss += f64::from(error * error);
    grads[1][HIDDEN] += 2.0 * error;
    for h in 0..HIDDEN {
        grads[1][h] += 2.0 * error * hidden[h];
        let before = 2.0 * error * weight(1, h) * (1.0 - hidden[h] * hidden[h]);
        grads[0][bias + h] += before;
        (0..INPUTS).for_each(|i| grads[0][h * INPUTS + i] += before * x[i]);
    }
}

/// Trains steps `steps`, and saves at their end. Resumes a checkpoint if there is one. Returns the losses.
fn train(comm: ThreadsComm, dir: &Path, steps: std::ops::Range<u64>) -> Result<Vec<f64>> {
    let layer = |name: &str, weights: usize, biases: usize| {
        let param = |kind: &str, elems: usize| ParamSpec::new(format!("{name}.{kind}"), [elems as u64]);
        UnitSpec::new(name, [param("weight", weights), param("bias", biases)])
    };
    let (ranks, rank, id) = (comm.world_size(), comm.rank(), comm.rank() as u64);
    let layout = Layout::new(&[layer("hidden", HIDDEN * INPUTS, HIDDEN), layer("out", HIDDEN, 1)], ranks as u64, 1)?;
    let units = layout.units();
    let range = |range: std::ops::Range<u64>| range.start as usize..range.end as usize;

    // The framework's memory: parameters and gradients of each layer, padded, and this rank's sums of gradients.
    let start = |i: usize| bf16::from_f32(((i * 37) % 19) as f32 / 19.0 - 0.5);
    let whole = |u: &UnitLayout| u.padded_elems as usize;
    let mut params: Vec<Vec<bf16>> = units.iter().map(|u| (0..whole(u)).map(start).collect()).collect();
    let mut grads: Vec<Vec<f32>> = units.iter().map(|u| vec![0.0; whole(u)]).collect();
    let mut sums: Vec<Vec<f32>> = units.iter().map(|u| vec![0.0; u.shard_elems as usize]).collect();
    let whole: Vec<_> = params.iter_mut().map(|p| view(p)).collect();
    let own: Vec<_> = (units.iter().zip(&whole)).map(|(u, p)| [(p.slice(range(u.shard(id))), 0)]).collect();

    let (device, comm) = (HostDevice::new(), Arc::new(comm) as Arc<dyn Communicator<HostDevice>>);
    let (compute, comm_stream) = (device.create_stream("compute")?, device.create_stream("comm")?);
    let _finish = Finish(comm.clone(), [compute.clone(), comm_stream.clone()]);
    let (pool, kernels) = (Pool::new(device, 1 << 20), Arc::new(HostKernels::new(1)?));
    let options = BucketOptions::new(64, DType::Bf16);
    let buckets = Buckets::new(&pool, comm.clone(), compute.clone(), comm_stream.clone(), options)?;
    let exchange = |message: &[u8]| -> Result<_> { Ok(comm.exchange(&pool, &compute, message, LIMIT)?) };

    // Biases have no weight decay. Each layer has a weight and a bias.
    let rules = vec![GroupRules::default(), GroupRules::default().weight_decay(0.0)];
    let groups = ParamGroups::new(rules, layout.group_runs(id, |param| param.param)?);
    let mut config = OptimizerConfig::default().lr(0.02);
    config.hyper.weight_decay = 0.01;
    let segments = units.iter().map(|u| Segment::shard(&u.name, range(u.shard_range()))).collect();
    let mut optim =
        ShardedAdamW::with_groups(&pool, kernels.clone(), &compute, config, DType::Bf16, segments, &groups)?;
    optim.init_masters(&compute, &own)?;

    let rank_params = RankParams { layout: &layout, rank: id, params: &own };
    if steps.start > 0 {
        optim.load(&compute, &Reader::open(dir)?, &rank_params, LIMIT)?;
    }
    let gather = || -> Result<()> {
        comm_stream.wait(&compute.record()?)?;
        own.iter().zip(&whole).try_for_each(|(own, whole)| comm.all_gather(&comm_stream, own[0].0, *whole))?;
        Ok(comm_stream.synchronize(LIMIT)?)
    };
    gather()?;

    let mut losses = Vec::new();
    for _step in steps.clone() {
        let mut loss = 0.0;
        grads.iter_mut().for_each(|unit| unit.fill(0.0));
        let rows = rank * ROWS / ranks..(rank + 1) * ROWS / ranks;
        rows.for_each(|row| backward(&params, row, &mut grads, &mut loss));
        let mut reduced = Vec::new();
        for (grad, sum) in grads.iter_mut().zip(&mut sums) {
            reduced.push(buckets.reduce_unit(&*kernels, &[(view(grad), 0)], SumInto::Write(view(sum)))?);
        }
        let slices: Vec<_> = reduced.iter().zip(&own).map(|(grad, param)| UnitSlices { grad, param }).collect();
        let inputs = StepInputs::new(loss / ROWS as f64, Divisor::Sum(ROWS as f64));
        losses.push(optim.step_with(&compute, &slices, inputs, exchange, LIMIT)?.loss());
        gather()?;
    }

    let store = Store::create(dir, id, StoreOptions::default())?;
    let meta = SaveMeta::default().step(steps.end).stage(ZeroStage::Two);
    optim.save(&compute, &store, meta, &rank_params, &mut ExchangeFn::new(id, exchange), LIMIT)?;
    Ok(losses)
}

/// Trains on `ranks` threads.
pub(crate) fn on_ranks(ranks: usize, dir: &Path, steps: std::ops::Range<u64>) -> Result<Vec<f64>> {
    let comms = World::new(ranks, CommOptions::default())?;
    let train = |comm| train(comm, dir, steps.clone());
    std::thread::scope(|scope| {
        let ranks: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| train(comm))).collect();
        ranks.into_iter().map(|rank| rank.join().map_err(|_| "a rank panicked")?).next_back().ok_or("no ranks")?
    })
}

fn main() -> Result<()> {
    let dir = tempfile::tempdir()?;
    println!("four ranks: {:?}", on_ranks(4, dir.path(), 0..50)?);
    println!("two ranks resume: {:?}", on_ranks(2, dir.path(), 50..60)?);
    Ok(())
}
