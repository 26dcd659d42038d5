//! A model of bigrams, an embedding and a head that predict the next token, on two ranks: trained
//! at every stage, offloaded, and resumed from a checkpoint.

use std::sync::{Arc, Mutex, PoisonError};

use zero_trainer::zero_alloc::device::{AnySlice, DType, DeviceError, DeviceSlice};
use zero_trainer::zero_alloc::host::{HostDevice, HostStream};
use zero_trainer::zero_alloc::{Block, Pool, Purpose};
use zero_trainer::zero_optim::OptimizerConfig;
use zero_trainer::zero_shard::{ParamSpec, UnitSpec, ZeroStage};
use zero_trainer::{
    Batch, BatchAt, Grad, Home, InitialWeights, Model, ModelError, ModelRanks, OffloadSettings,
    Pass, RunOptions, Settings, TrainError, Workload, param_groups::ParamKind, run_on_threads,
};

const TOKENS: usize = 32;
const WIDTH: usize = 8;
type Rows = [[f32; WIDTH]];

/// Units, initial weights and batches.
struct Bigrams;

impl Workload<HostDevice> for Bigrams {
    fn units(&self) -> Vec<UnitSpec> {
        let unit = |name| UnitSpec::new(name, [ParamSpec::new(name, [32, 8])]);
        vec![unit("embedding"), unit("head")]
    }

    fn passes(&self) -> Vec<Pass> {
        vec![Pass::of_unit(0), Pass::of_unit(1)]
    }

    fn model(
        &self,
        pool: &Pool<HostDevice>,
        compute: &HostStream,
        ranks: &ModelRanks<HostDevice>,
    ) -> Result<Box<dyn Model<HostDevice>>, ModelError> {
        ranks.check_alone()?;
        let loss = pool.allocate(1, DType::F64, Purpose::Workspace, compute)?;
        let kept = Arc::default();
        Ok(Box::new(Bigram { loss, kept }))
    }

    fn weights(&self) -> Result<Box<InitialWeights<'_>>, ModelError> {
        Ok(Box::new(|name, range, out| {
            let value = |i: u64| 0.3 * (name.len() as f32 + 1.7 * i as f32).sin();
            out.iter_mut().zip(range).for_each(|(x, i)| *x = value(i));
            Ok(())
        }))
    }

    fn batch(&self, at: BatchAt, batch: &mut Batch) -> Result<(), ModelError> {
        let pairs = batch.inputs.iter_mut().zip(&mut batch.targets);
        for (i, (input, next)) in pairs.enumerate() {
            *input = ((at.step * 13 + at.rank * 7 + i as u64) % TOKENS as u64) as u32;
            *next = (5 * *input + 1) % TOKENS as u32;
        }
        Ok(())
    }
}

/// The model of one rank.
struct Bigram {
    loss: Block<HostDevice>,
    kept: Arc<Mutex<Kept>>,
}

/// Values that operations leave for later ones of the micro-batch.
#[derive(Default)]
struct Kept {
    /// Each token, and the next one.
    tokens: Vec<(usize, usize)>,
    /// The embeddings of the tokens, and then their gradients.
    hidden: Vec<[f32; WIDTH]>,
}

impl Bigram {
    /// Enqueues an operation of the model, with what it keeps.
    fn enqueue(
        &self,
        stream: &HostStream,
        label: &'static str,
        run: impl FnOnce(&mut Kept) -> Result<(), DeviceError> + Send + 'static,
    ) -> Result<(), ModelError> {
        let kept = Arc::clone(&self.kept);
        let run = move || run(&mut kept.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(stream.enqueue(label, run)?)
    }
}

// SAFETY: the slices are used by the operations that a call enqueues on its stream.
unsafe impl Model<HostDevice> for Bigram {
    fn set_batch(&mut self, stream: &HostStream, batch: &Batch) -> Result<(), ModelError> {
        let pairs = batch.inputs.iter().zip(&batch.targets);
        let tokens = pairs.map(|(a, b)| (*a as usize, *b as usize)).collect();
        self.enqueue(stream, "set batch", |kept| {
            kept.tokens = tokens;
            Ok(())
        })
    }

    fn forward(
        &mut self,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
    ) -> Result<(), ModelError> {
        // The head is computed with its backward, which follows at once.
        if pass == 1 {
            return Ok(());
        }
        let embedding = params[0].typed::<f32>()?;
        self.enqueue(stream, "embed", move |kept| {
            // SAFETY: host memory, which the trainer lets nothing write before this has run.
            let embedding: &Rows = unsafe { embedding.as_host() }.as_chunks().0;
            kept.hidden = kept.tokens.iter().map(|(at, _)| embedding[*at]).collect();
            Ok(())
        })
    }

    fn backward(
        &mut self,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
        grads: &[Grad],
        loss_scale: DeviceSlice<f64>,
    ) -> Result<(), ModelError> {
        let sums = grads[0].sums("bigrams")?;
        let head = params[0].typed::<f32>()?;
        // SAFETY: used by the operation below.
        let loss = unsafe { self.loss() };
        self.enqueue(stream, "backward", move |kept| {
            // SAFETY: host memory that the trainer gives to this operation alone.
            let sums = unsafe { sums.as_host_mut() }.as_chunks_mut().0;
            if pass == 0 {
                for ((token, _), grad) in kept.tokens.iter().zip(&kept.hidden) {
                    add(&mut sums[*token], 1.0, grad);
                }
                return Ok(());
            }
            // SAFETY: as above, and nothing writes it before this has run.
            let head = unsafe { head.as_host() }.as_chunks().0;
            // SAFETY: as above.
            let scale = unsafe { loss_scale.as_host() }[0] as f32;
            // SAFETY: as above; it is the model's own.
            let loss = unsafe { loss.as_host_mut() };
            loss[0] += cross_entropy(kept, head, sums, scale);
            Ok(())
        })
    }

    unsafe fn loss(&self) -> DeviceSlice<f64> {
        // SAFETY: the caller keeps the same promise.
        unsafe { self.loss.typed() }.expect("it was allocated as fp64")
    }
}

/// The mean loss; adds the head's gradients to `sums`, and replaces the embeddings by theirs.
fn cross_entropy(kept: &mut Kept, head: &Rows, sums: &mut Rows, scale: f32) -> f64 {
    let scale = scale / kept.tokens.len() as f32;
    let mut loss = 0.0;
    for ((_, next), hidden) in kept.tokens.iter().zip(&mut kept.hidden) {
        let dot = |row: &[f32; WIDTH]| row.iter().zip(&*hidden).map(|(w, h)| w * h).sum::<f32>();
        let exps: Vec<f32> = head.iter().map(|row| dot(row).exp()).collect();
        let total: f32 = exps.iter().sum();
        let mut grad = [0.0; WIDTH];
        for (token, exp) in exps.iter().enumerate() {
            let of_logit = scale * (exp / total - f32::from(token == *next));
            add(&mut sums[token], of_logit, hidden);
            add(&mut grad, of_logit, &head[token]);
        }
        loss -= f64::from((exps[*next] / total).ln());
        *hidden = grad;
    }
    loss / kept.tokens.len() as f64
}

fn add(to: &mut [f32; WIDTH], factor: f32, from: &[f32; WIDTH]) {
    to.iter_mut().zip(from).for_each(|(x, y)| *x += factor * y);
}

/// Trains on two ranks. Returns the loss of each step.
fn train(stage: ZeroStage, optimizer: Home, run: &RunOptions) -> Result<Vec<f64>, TrainError> {
    let mut settings = Settings::new(stage, DType::F32, |_| ParamKind::Linear);
    settings.optimizer = OptimizerConfig::default().lr(0.05);
    settings.offload = OffloadSettings {
        optimizer,
        ..OffloadSettings::default()
    };
    let mut losses = Vec::new();
    run_on_threads(2, 1, &settings, &Bigrams, run, &mut |metrics| {
        losses.push(metrics.loss);
        Ok(())
    })?;
    Ok(losses)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let run = RunOptions {
        steps: 40,
        micro_batch: 4,
        seq_len: 8,
        ..RunOptions::default()
    };

    let expected = train(ZeroStage::Zero, Home::Device, &run)?;
    println!("loss {:.4}, then {:.4}", expected[0], expected[39]);
    assert!(expected[39] < 0.5 * expected[0]);

    // The same bits at every stage, and with the optimizer's state in host memory or in a file.
    let scratch = Home::Nvme(std::env::temp_dir());
    for stage in ZeroStage::ALL {
        for optimizer in [Home::Device, Home::Host, scratch.clone()] {
            assert_eq!(train(stage, optimizer, &run)?, expected, "{stage:?}");
        }
    }

    // Stopped after 20 steps, and resumed at another stage.
    let dir = std::env::temp_dir().join(format!("bigrams-{}", std::process::id()));
    let first = RunOptions {
        steps: 20,
        checkpoint: Some((dir.clone(), 0)),
        ..run.clone()
    };

    let rest = RunOptions {
        resume: Some(dir.clone()),
        ..run
    };

    let mut losses = train(ZeroStage::Two, Home::Device, &first)?;
    losses.extend(train(ZeroStage::Three, Home::Host, &rest)?);
    assert_eq!(losses, expected);
    Ok(std::fs::remove_dir_all(dir)?)
}
