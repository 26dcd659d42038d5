//! A model with units of any sizes and a simple gradient: each weight w has a target t(element,
//! tokens) and the loss 0.5 (w - t)^2. Forward copies the parameters that it reads, and backward
//! asserts that it reads the same values.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use half::bf16;
use parking_lot::Mutex;
use proptest::prelude::*;
use zero_alloc::device::{AnySlice, DType, DeviceError, DeviceSlice};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::{Block, Pool, Purpose};
use zero_shard::{ParamSpec, UnitSpec};
use zero_trainer::BatchAt;
use zero_trainer::{Batch, Grad, Model, Pass};
use zero_trainer::{InitialWeights, Workload};
use zero_trainer::{ModelError, ModelRanks};

/// A forward pass, and the parameters that it read.
type ReadParams = (usize, Vec<f32>);

/// Units of any sizes: empty, smaller than the number of ranks, not divisible by it; parameters without
/// elements. Some write gradients if `may_write`.
pub(crate) fn toys(may_write: bool) -> impl Strategy<Value = Toy> {
    let unit = prop::collection::vec(0u64..40, 1..4);
    let units = prop::collection::vec(unit, 1..6);
    (units, any::<bool>(), any::<bool>()).prop_map(move |(units, tied, writes)| {
        let toy = Toy::new(&units, tied);
        if writes && may_write {
            toy.writing()
        } else {
            toy
        }
    })
}

/// The toy model and its sizes.
#[derive(Debug)]
pub(crate) struct Toy {
    units: Vec<UnitSpec>,
    passes: Vec<Pass>,
    /// The pass of the third forward at which rank 0's model panics.
    pub(crate) panic_at: Option<usize>,
    /// Set by rank 0's model while its third forward runs.
    pub(crate) cancel: Option<Arc<AtomicBool>>,
    /// The parameters that each forward pass of a rank read, with its number.
    pub(crate) read: Arc<Mutex<Vec<ReadParams>>>,
    /// Whether passes write gradients that no other pass adds to.
    writes: bool,
}

impl Toy {
    /// One unit and pass for each list of parameter lengths. If `tied`, the last pass also uses the
    /// first unit.
    pub(crate) fn new(units: &[Vec<u64>], tied: bool) -> Self {
        let spec = |(u, lengths): (usize, &Vec<u64>)| {
            let params = lengths
                .iter()
                .enumerate()
                .map(|(p, &n)| ParamSpec::new(format!("u{u}.p{p}"), [n]));
            UnitSpec::new(format!("u{u}"), params.collect::<Vec<_>>())
        };

        let reads = |u| {
            if tied && u > 0 && u + 1 == units.len() {
                vec![u, 0]
            } else {
                vec![u]
            }
        };

        let pass = |u| Pass {
            forward_reads: reads(u),
            backward_reads: reads(u),
            grads: reads(u),
        };

        Self {
            units: units.iter().enumerate().map(spec).collect(),
            passes: (0..units.len()).map(pass).collect(),
            panic_at: None,
            cancel: None,
            read: Arc::default(),
            writes: false,
        }
    }

    /// The same, with passes that write gradients that no other pass adds to.
    pub(crate) fn writing(self) -> Self {
        Self {
            writes: true,
            ..self
        }
    }
}

impl Workload<HostDevice> for Toy {
    fn units(&self) -> Vec<UnitSpec> {
        self.units.clone()
    }

    fn passes(&self) -> Vec<Pass> {
        self.passes.clone()
    }

    fn model(
        &self,
        pool: &Pool<HostDevice>,
        compute: &HostStream,
        ranks: &ModelRanks<HostDevice>,
    ) -> Result<Box<dyn Model<HostDevice>>, ModelError> {
        ranks.check_alone()?;
        let loss = pool.allocate(1, DType::F64, Purpose::Workspace, compute)?;
        let panic_at = self.panic_at.filter(|_| compute_is_of_rank_0(compute));
        let cancel = self
            .cancel
            .clone()
            .filter(|_| compute_is_of_rank_0(compute));
        let kept = self.passes.iter().map(|_| Arc::default()).collect();

        let alone = |pass: &Pass| {
            self.passes
                .iter()
                .filter(|other| other.grads.contains(&pass.grads[0]))
                .count()
                == 1
        };

        let writes = self
            .passes
            .iter()
            .map(|pass| self.writes && alone(pass))
            .collect();

        Ok(Box::new(ToyModel {
            loss,
            tokens: Arc::default(),
            kept,
            writes,
            panic_at,
            cancel,
            read: Arc::clone(&self.read),
            forwards: 0,
        }))
    }

    fn weights(&self) -> Result<Box<InitialWeights<'_>>, ModelError> {
        Ok(Box::new(|name, range, out| {
            let salt = name.bytes().map(u64::from).sum::<u64>();
            for (x, i) in out.iter_mut().zip(range) {
                *x = ((salt * 31 + i * 17) % 101) as f32 / 50.0 - 1.0;
            }
            Ok(())
        }))
    }

    fn batch(&self, at: BatchAt, batch: &mut Batch) -> Result<(), ModelError> {
        let tokens = batch.inputs.iter_mut().chain(&mut batch.targets);
        for (i, token) in tokens.enumerate() {
            *token =
                ((at.step * 7 + at.micro_batch_index * 5 + at.rank * 3 + i as u64) % 97) as u32;
        }
        Ok(())
    }
}

fn compute_is_of_rank_0(stream: &HostStream) -> bool {
    use zero_alloc::device::Stream;
    stream.name().starts_with("rank 0 ")
}

struct ToyModel {
    loss: Block<HostDevice>,
    tokens: Arc<Vec<u32>>,
    kept: Vec<Arc<Mutex<Vec<f32>>>>,
    /// Whether each pass writes the gradient of the unit with its index.
    writes: Vec<bool>,
    panic_at: Option<usize>,
    cancel: Option<Arc<AtomicBool>>,
    read: Arc<Mutex<Vec<ReadParams>>>,
    forwards: usize,
}

fn values(slice: AnySlice) -> Result<Vec<f32>, DeviceError> {
    Ok(if slice.dtype() == DType::F32 {
        // SAFETY: the trainer passes parameters that nothing writes before the pass has run.
        unsafe { slice.typed::<f32>()?.as_host() }.to_vec()
    } else {
        // SAFETY: as above.
        unsafe { slice.typed::<bf16>()?.as_host() }
            .iter()
            .map(|x| x.to_f32())
            .collect()
    })
}

/// Adds `values` to a gradient, or writes them.
fn store(grad: Grad, values: impl Iterator<Item = f32>) -> Result<(), DeviceError> {
    // SAFETY of the views: the trainer passes distinct gradients that only this pass uses.
    match grad {
        // SAFETY: as above.
        Grad::Add(sums) => unsafe { sums.as_host_mut() }
            .iter_mut()
            .zip(values)
            .for_each(|(sum, x)| *sum += x),
        Grad::Write(out) if out.dtype() == DType::F32 => {
            // SAFETY: as above.
            unsafe { out.typed::<f32>()?.as_host_mut() }
                .iter_mut()
                .zip(values)
                .for_each(|(out, x)| *out = x);
        }
        Grad::Write(out) => {
            // SAFETY: as above.
            let out = unsafe { out.typed::<bf16>()?.as_host_mut() };
            out.iter_mut()
                .zip(values)
                .for_each(|(out, x)| *out = bf16::from_f32(x));
        }
    }

    Ok(())
}

// SAFETY: the slices are used by the operations that a call enqueues on its stream.
unsafe impl Model<HostDevice> for ToyModel {
    fn set_batch(&mut self, _stream: &HostStream, batch: &Batch) -> Result<(), ModelError> {
        let tokens = batch.inputs.iter().chain(&batch.targets);
        self.tokens = Arc::new(tokens.copied().collect());
        Ok(())
    }

    fn forward(
        &mut self,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
    ) -> Result<(), ModelError> {
        self.forwards += usize::from(pass == 0);
        let panics = self.forwards == 3 && self.panic_at == Some(pass);
        let cancel = self.cancel.clone().filter(|_| self.forwards == 3);
        let kept = Arc::clone(&self.kept[pass]);
        let read = Arc::clone(&self.read);
        let params = params.to_vec();
        stream.enqueue("toy forward", move || {
            assert!(!panics, "panic requested by the test");
            if let Some(cancel) = cancel {
                std::thread::sleep(Duration::from_millis(50)); // meanwhile the host enqueues the rest of the step
                cancel.store(true, Ordering::Relaxed);
            }
            *kept.lock() = params
                .into_iter()
                .map(values)
                .collect::<Result<Vec<_>, _>>()?
                .concat();
            read.lock().push((pass, kept.lock().clone()));
            Ok(())
        })?;
        Ok(())
    }

    fn backward(
        &mut self,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
        grads: &[Grad],
        loss_scale: DeviceSlice<f64>,
    ) -> Result<(), ModelError> {
        let kept = Arc::clone(&self.kept[pass]);
        let tokens = Arc::clone(&self.tokens);
        // SAFETY: used by a pass.
        let (params, grads, loss) = (params.to_vec(), grads.to_vec(), unsafe { self.loss() });
        stream.enqueue("toy backward", move || {
            let params = params
                .into_iter()
                .map(values)
                .collect::<Result<Vec<_>, _>>()?;
            assert_eq!(
                *kept.lock(),
                params.concat(),
                "backward reads what forward read"
            );
            // SAFETY: the trainer passes a scale that nothing writes before the pass has run.
            let loss_scale = unsafe { loss_scale.as_host() }[0] as f32;
            let mut sum = 0.0f64;
            for (param, grad) in params.iter().zip(grads) {
                let target = |i: usize| (tokens[i % tokens.len()] as f32 + i as f32) / 97.0;
                let own = param
                    .iter()
                    .enumerate()
                    .map(|(i, w)| loss_scale * (w - target(i)));
                store(grad, own)?;
                sum += param
                    .iter()
                    .enumerate()
                    .map(|(i, w)| 0.5 * f64::from(w - target(i)).powi(2))
                    .sum::<f64>();
            }
            // SAFETY: the model holds the block, and only this stream uses it.
            let loss = unsafe { loss.as_host_mut() };
            loss[0] += sum;
            Ok(())
        })?;

        Ok(())
    }

    fn writes_grad(&self, pass: usize, unit: usize) -> bool {
        self.writes[pass] && unit == pass
    }

    fn add_losses(
        &mut self,
        stream: &HostStream,
        params: &[AnySlice],
        tokens: usize,
    ) -> Result<(), ModelError> {
        let kept = Arc::clone(&self.kept[self.kept.len() - 1]);
        // SAFETY: used by a pass.
        let (batch, params, loss) = (Arc::clone(&self.tokens), params.to_vec(), unsafe {
            self.loss()
        });
        stream.enqueue("toy losses", move || {
            let params = params
                .into_iter()
                .map(values)
                .collect::<Result<Vec<_>, _>>()?
                .concat();
            assert_eq!(*kept.lock(), params, "the losses read what forward read");
            let of_token =
                |t: &u32| f64::from(*t) + params.iter().map(|x| f64::from(*x)).sum::<f64>();
            // SAFETY: the model holds the block, and only this stream uses it.
            let loss = unsafe { loss.as_host_mut() };
            loss[0] += batch[..tokens].iter().map(of_token).sum::<f64>();
            Ok(())
        })?;
        Ok(())
    }

    unsafe fn loss(&self) -> DeviceSlice<f64> {
        // SAFETY: only passes on one stream use it, and the trainer drains that stream before it
        // drops the model.
        unsafe { self.loss.typed() }.expect("it was allocated as fp64")
    }
}
