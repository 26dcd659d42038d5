//! A step: backward, and blocks whose parameters are whole only while they run.
//!
//! | tensor | lifetime |
//! |---|---|
//! | parameters of a block at stage 3 | one forward or backward of the block |
//! | input of a block | from its forward to its backward |
//! | gradient of a parameter | from the hook until its unit is packed into a bucket |

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc;
use std::thread;

use candle_core::backprop::GradStore;
use candle_core::{DType, Error, Result, Tensor, TensorId, Var, bail};
use zero_alloc::host::HostDevice;
use zero_optim::StepOutcome;
use zero_optim::framework::{Params, Step};

use crate::error::candle_error;
use crate::hooks::{Claim, Gradient, Param};
use crate::values::{RELEASED, fill, release};

/// The start of a unit's reduction in a backward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitLaunch {
    /// The unit's name.
    pub unit: String,
    /// Parameters whose gradients had arrived: position of the launch in backward.
    pub after_params: usize,
    /// Elements of the unit, with padding.
    pub elems: u64,
}

/// The record of a backward.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackwardReport {
    /// The names of the parameters in the order of their gradients.
    pub arrivals: Vec<String>,
    /// The reductions, in order.
    pub launches: Vec<UnitLaunch>,
    /// Gradient elements copied: into buckets, and before that if candle passed a gradient that is
    /// not contiguous.
    pub copied_elems: u64,
    /// Trained parameters whose gradient candle's `GradStore` has after backward: none, because the
    /// hook takes it.
    pub kept_by_candle: usize,
}

/// The trained parameters, by unit.
pub(crate) struct Units {
    pub(crate) claim: Claim,
    /// In the order of loading.
    pub(crate) params: Vec<Param>,
    pub(crate) units: Vec<Unit>,
    /// Position in `units` of each parameter.
    pub(crate) unit_of: Vec<usize>,
    /// The names of units without trained parameters, of which the run knows nothing.
    pub(crate) frozen: HashSet<String>,
    /// Whether the parameters have elements only while their block runs.
    pub(crate) are_sharded: bool,
}

/// A unit of parameters.
pub(crate) struct Unit {
    pub(crate) name: String,
    /// Positions in [`Units::params`].
    pub(crate) params: Vec<usize>,
    /// Elements, with padding.
    pub(crate) elems: u64,
}

/// The remedy of a use of a block's parameters elsewhere.
const PASS_ON: &str = "pass on only what the function of TrainStep::block returns, and use each \
                       parameter in one block (ZeroConfig::unit_of)";

impl Units {
    /// The position of a unit.
    fn find(&self, name: &str) -> Option<usize> {
        self.units.iter().position(|unit| unit.name == name)
    }

    /// `error`, or its cause if that is a use of a parameter that has no elements now.
    pub(crate) fn explain(&self, error: Error) -> Error {
        if !self.are_sharded || !error.to_string().contains(RELEASED) {
            return error;
        }
        Error::msg(format!(
            "a parameter or an intermediate result of a block is used outside of the block, where \
             the parameters of stage 3 have no elements: {PASS_ON}"
        ))
    }

    /// Calls `with` with each parameter of a unit and its elements. Returns their number.
    pub(crate) fn for_each_param(
        &self,
        unit: &str,
        values: &Params<'_>,
        with: impl Fn(&Tensor, &[f32]) -> Result<()>,
    ) -> Result<u64> {
        let mut elems = 0;
        for unit in self.units.iter().filter(|known| known.name == unit) {
            for &param in &unit.params {
                let Param { name, tensor, .. } = &self.params[param];
                let values = values.get(name).map_err(candle_error)?;
                with(tensor, values)?;
                elems += values.len() as u64;
            }
        }
        Ok(elems)
    }
}

/// The record of a [`ZeroAdamW`](crate::ZeroAdamW).
#[derive(Default)]
pub(crate) struct Record {
    pub(crate) backward: BackwardReport,
    /// Gradients of the last backward, by unit.
    pub(crate) arrived: Vec<usize>,
    /// Parameter elements copied into candle's tensors.
    pub(crate) copied_params: u64,
    /// The losses of the last step with an update: what they were computed with has changed.
    stale: Vec<TensorId>,
}

type Run<'m> = Box<dyn Fn(&Tensor) -> Result<Tensor> + 'm>;

/// A block that ran, to be run again in backward.
struct Block<'m> {
    unit: String,
    input: Tensor,
    /// A variable: candle's backward of what follows ends here.
    output: Tensor,
    run: Run<'m>,
}

/// A step of a [`ZeroAdamW`](crate::ZeroAdamW). `'m` is the lifetime of the model.
pub struct TrainStep<'s, 'm> {
    step: Step<'s, HostDevice>,
    units: &'s Units,
    record: &'s mut Record,
    /// Whether blocks run again in backward.
    trains: bool,
    blocks: Vec<Block<'m>>,
    /// The loss of the last backward, and the losses of all of them.
    loss: Option<f64>,
    losses: Vec<TensorId>,
}

impl std::fmt::Debug for TrainStep<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} with {} blocks", self.step, self.blocks.len())
    }
}

impl<'s, 'm> TrainStep<'s, 'm> {
    pub(crate) fn new(
        step: Step<'s, HostDevice>,
        units: &'s Units,
        record: &'s mut Record,
        trains: bool,
    ) -> Self {
        Self {
            step,
            units,
            record,
            trains,
            blocks: Vec::new(),
            loss: None,
            losses: Vec::new(),
        }
    }

    /// Runs a block of the model: a function of `input` that uses the parameters of `unit` and of
    /// no other. At stage 3 the parameters are gathered for the call. Only the input is kept;
    /// [`Self::backward`] runs the block again, so it must return the same values.
    ///
    /// # Errors
    /// The block failed or ran before in this micro-batch, there is no such unit, or a gather
    /// failed.
    pub fn block(
        &mut self,
        unit: &str,
        input: &Tensor,
        run: impl Fn(&Tensor) -> Result<Tensor> + 'm,
    ) -> Result<Tensor> {
        if self.blocks.iter().any(|block| block.unit == unit) {
            bail!(
                "block {unit} ran a second time before backward: call TrainStep::backward after the \
                 forward of each micro-batch; if a forward uses the block's parameters twice, make \
                 both uses one block"
            );
        }
        let output = self.with_params(unit, |_| Ok(run(input)?.detach()))?;
        if !self.trains {
            return Ok(output);
        }
        let output = Var::from_tensor(&output)?.into_inner();
        self.blocks.push(Block {
            unit: unit.to_owned(),
            input: input.clone(),
            output: output.clone(),
            run: Box::new(run),
        });
        Ok(output)
    }

    /// Runs backward from `loss`, of the model or of its last block. The reduction of a unit starts
    /// when its last gradient is known, and runs beside the rest of backward. It is called once a
    /// micro-batch; losses and gradients of micro-batches are averaged.
    ///
    /// # Errors
    /// candle failed, `loss` depends on parameters of another `ZeroAdamW`, on those of a block
    /// other than by its output, or not on a block; it is from before the last update; a parameter
    /// got no gradient in the micro-batch before, or a reduction or a gather failed.
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        if !self.trains {
            bail!("a backward in ZeroAdamW::evaluate, which updates nothing: call ZeroAdamW::step");
        }
        if self.record.stale.contains(&loss.id()) {
            bail!(
                "backward ran from this loss before the last update, with other parameters: compute \
                 the loss again in each step"
            );
        }
        if let Some(earlier) = self.loss.take() {
            self.step.next_micro_batch(earlier).map_err(candle_error)?;
        }
        self.loss = Some(scalar(loss)?);
        self.losses.push(loss.id());
        self.record.backward = BackwardReport::default();
        self.record.arrived = vec![0; self.units.units.len()];

        let mut blocks = std::mem::take(&mut self.blocks);
        let units: Vec<Option<usize>> = blocks.iter().map(|b| self.units.find(&b.unit)).collect();
        let of_loss = InBlocks {
            all: &units,
            running: None,
        };
        let mut upstream: Vec<Option<Tensor>> = vec![None; blocks.len()];
        let store = self.differentiate(of_loss, || loss.backward())?;
        self.collect(store, &blocks, &mut upstream)?;

        while let Some(block) = blocks.pop() {
            let running = units[blocks.len()];
            let Some(Some(upstream_of_block)) = upstream.pop() else {
                if running.is_some() {
                    bail!(
                        "the loss does not depend on the output of block {}, so that its parameters \
                         have no gradient: use the output, or do not run the block",
                        block.unit
                    );
                }
                continue;
            };
            let of_block = InBlocks { running, ..of_loss };
            let store = self.with_params(&block.unit, |step| {
                step.differentiate(of_block, || {
                    let output = (block.run)(&block.input)?;
                    (output * upstream_of_block)?.sum_all()?.backward()
                })
            })?;
            self.collect(store, &blocks, &mut upstream)?;
        }
        Ok(())
    }

    /// Ends the step, and returns the outcome.
    pub(crate) fn end(self) -> Result<StepOutcome> {
        match self.loss {
            Some(loss) if self.blocks.is_empty() => {
                let outcome = self.step.end(loss).map_err(candle_error)?;
                if !outcome.is_skipped() {
                    self.record.stale = self.losses;
                }
                Ok(outcome)
            }
            _ => bail!("a step without a backward after its forward"),
        }
    }

    /// Ends a step of forward only, and returns the mean of `loss` over ranks.
    pub(crate) fn end_validation(self, loss: f64) -> Result<f64> {
        self.step.end_validation(loss).map_err(candle_error)
    }

    /// Calls `run` while the parameters of a unit have elements. A panic of it fails the step.
    fn with_params<R>(
        &mut self,
        unit: &str,
        run: impl FnOnce(&mut Self) -> Result<R>,
    ) -> Result<R> {
        let units = self.units;
        if units.frozen.contains(unit) {
            return run(self).map_err(|error| units.explain(error));
        }
        let fill = |values: &Params<'_>| {
            if !units.are_sharded {
                return Ok(0);
            }
            units.for_each_param(unit, values, |tensor, values| fill(tensor, values.to_vec()))
        };
        self.record.copied_params += self.step.forward(unit, fill).map_err(candle_error)?;

        let result = catch_unwind(AssertUnwindSafe(|| run(self)));
        if result.is_err() {
            self.step.fail(&format!("block {unit} panicked"));
        }
        if units.are_sharded {
            for unit in units.units.iter().filter(|known| known.name == unit) {
                unit.params
                    .iter()
                    .try_for_each(|&param| release(&units.params[param].tensor))?;
            }
        }
        match result {
            Ok(result) => result.map_err(|error| units.explain(error)),
            Err(panic) => resume_unwind(panic),
        }
    }

    /// Adds the gradients of the outputs of `blocks` to `upstream`.
    fn collect(
        &mut self,
        mut store: GradStore,
        blocks: &[Block<'_>],
        upstream: &mut [Option<Tensor>],
    ) -> Result<()> {
        let params = self.units.params.iter();
        let kept = params.filter(|param| store.get(&param.tensor).is_some());
        self.record.backward.kept_by_candle += kept.count();

        for (block, sum) in blocks.iter().zip(upstream) {
            let Some(grad) = store.remove(&block.output) else {
                continue;
            };
            // Why: candle's gradient of a leaf is itself a function of parameters.
            let grad = grad.detach();
            *sum = Some(match sum.take() {
                Some(earlier) => (earlier + grad)?,
                None => grad,
            });
        }
        Ok(())
    }

    /// Runs a backward, and passes the gradients of parameters on while it runs.
    ///
    /// Why a thread: candle calls the hooks of parameters without a context, so they cannot borrow
    /// the step; they send to the thread that does.
    fn differentiate(
        &mut self,
        blocks: InBlocks<'_>,
        run: impl FnOnce() -> Result<GradStore>,
    ) -> Result<GradStore> {
        let units = self.units;
        let Self { step, record, .. } = self;
        let (sender, gradients) = mpsc::channel();
        thread::scope(|scope| {
            let backward = units.claim.receive(sender);
            let reducing = scope.spawn(move || {
                gradients
                    .iter()
                    .try_for_each(|gradient| reduce(gradient, blocks, step, units, record))
            });
            let store = run().map_err(|error| units.explain(error));
            drop(backward);
            match reducing.join() {
                Ok(reduced) => reduced?,
                Err(panic) => std::panic::resume_unwind(panic),
            }
            store
        })
    }
}

/// The blocks of a forward, and the one that is differentiated, by the positions of their units.
#[derive(Clone, Copy)]
struct InBlocks<'a> {
    all: &'a [Option<usize>],
    running: Option<usize>,
}

/// The value of a loss.
pub(crate) fn scalar(loss: &Tensor) -> Result<f64> {
    loss.to_dtype(DType::F64)?.to_scalar()
}

/// Passes a gradient to the step, and records it.
fn reduce(
    gradient: Gradient,
    blocks: InBlocks<'_>,
    step: &mut Step<'_, HostDevice>,
    units: &Units,
    record: &mut Record,
) -> Result<()> {
    let Gradient {
        param,
        values,
        was_copied,
    } = gradient;

    let report = &mut record.backward;
    let name = &units.params[param].name;
    let index = units.unit_of[param];
    let unit = &units.units[index];
    if blocks.running != Some(index) && blocks.all.contains(&Some(index)) {
        bail!(
            "{name} got a gradient outside of the backward of its block {}: the parameter or an \
             intermediate result of the block is used elsewhere, such as in the loss: {PASS_ON}",
            unit.name
        );
    }
    report.copied_elems += values.len() as u64 * (1 + u64::from(was_copied));
    step.grad(name, values).map_err(candle_error)?;
    report.arrivals.push(name.clone());

    record.arrived[index] += 1;
    if record.arrived[index] == unit.params.len() {
        report.launches.push(UnitLaunch {
            unit: unit.name.clone(),
            after_params: report.arrivals.len(),
            elems: unit.elems,
        });
    }
    Ok(())
}
