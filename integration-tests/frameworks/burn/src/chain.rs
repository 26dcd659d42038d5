//! Models that are a list of blocks: stage 3, and overlap at the other stages.
//!
//! Backward goes from block to block: it differentiates the sum of `output * upstream`, where
//! `upstream` is the loss's gradient of the block's output, and hands over the block's gradients.
//!
//! | stage | forward of a block | kept for backward | backward of a block |
//! |---|---|---|---|
//! | 0 to 2 | records | the block's graph | differentiates |
//! | 3 | does not record | the block's input | gathers again, records, differentiates |

use burn::module::{Module, ModuleDisplay};
use burn::tensor::{Gradients, Tensor};
use zero_alloc::host::HostDevice;
use zero_optim::StepOutcome;
use zero_optim::framework::{Builder, Params, Step};
use zero_shard::ZeroStage;

use crate::tensors::{Named, Result, StepUses, Tape, Uses, collect, fill, hand_over, setting};
use crate::train::{TrainStep, ZeroBurn, differentiate};

const FIRST: &str = "first";
const LAYERS: &str = "layers";
const LAST: &str = "last";

/// A model that is a list of blocks. Each is a unit of the run: `first`, `layers.0`, .., `last`.
///
/// Blocks are any modules, such as a `Linear`, `TransformerEncoderLayer`s and another `Linear`.
#[derive(Module, Debug)]
pub struct Chain<F, B, L> {
    /// The first block, from the batch to the first hidden state.
    pub first: F,
    /// The blocks from hidden state to hidden state.
    pub layers: Vec<B>,
    /// The last block, from the last hidden state to the loss.
    pub last: L,
}

/// A block of a [`Chain`]: any module.
pub trait Block: Module + ModuleDisplay {}

impl<M: Module + ModuleDisplay> Block for M {}

/// The unit of a parameter of a chain.
fn unit_of(path: &str) -> String {
    let mut names = path.split('.');
    match (names.next(), names.next()) {
        (Some(LAYERS), Some(number)) => layer_unit(number),
        (block, _) => block.unwrap_or_default().to_owned(),
    }
}

fn layer_unit(number: impl std::fmt::Display) -> String {
    format!("{LAYERS}.{number}")
}

impl<F: Block, B: Block, L: Block> ZeroBurn<Chain<F, B, L>> {
    /// The training of `chain` at any stage; see [`Self::new`].
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn chain(chain: Chain<F, B, L>, builder: Builder<HostDevice>) -> Result<Self> {
        Self::new(chain, builder, unit_of)
    }

    /// Trains a step of one micro-batch; see [`TrainStep::backward_chain`].
    ///
    /// # Errors
    /// As [`TrainStep::backward_chain`] and [`TrainStep::end`].
    pub fn step_chain<const D: usize>(
        &mut self,
        first: impl Fn(&F) -> Tensor<D>,
        layer: impl Fn(&B, Tensor<D>) -> Tensor<D>,
        last: impl Fn(&L, Tensor<D>) -> Tensor<1>,
    ) -> Result<StepOutcome> {
        let mut step = self.begin()?;
        step.backward_chain(first, layer, last)?;
        step.end()
    }
}

impl<F: Block, B: Block, L: Block> TrainStep<'_, Chain<F, B, L>> {
    /// Computes the mean loss of a micro-batch and its gradients, block by block. `first` returns
    /// the first hidden state, `layer` the next one, and `last` the loss. No tensor may keep
    /// parameters of the blocks that they are called with. At stage 3 `first` and `layer` run twice,
    /// and must return the same both times.
    ///
    /// # Errors
    /// A tensor outside of the calls keeps a parameter; a block returned something else when it ran
    /// again; an earlier micro-batch of the step has no gradient of a parameter; or a rank failed.
    pub fn backward_chain<const D: usize>(
        &mut self,
        first: impl Fn(&F) -> Tensor<D>,
        layer: impl Fn(&B, Tensor<D>) -> Tensor<D>,
        last: impl Fn(&L, Tensor<D>) -> Tensor<1>,
    ) -> Result<()> {
        self.next_micro_batch()?;
        let run_first = |block: &F, (): ()| first(block);
        let chain = self.template;
        let mut pass = Pass {
            step: &mut self.step,
            recompute: self.stage == ZeroStage::Three,
        };

        let uses = &self.uses;
        let first = Unit::new(FIRST, &chain.first, uses);
        let (of_first, mut hidden) = pass.forward(&first, (), &run_first)?;
        let mut saved = Vec::new();
        for (number, block) in chain.layers.iter().enumerate() {
            let unit = Unit::new(layer_unit(number), block, uses);
            let (of_layer, output) = pass.forward(&unit, hidden, &layer)?;
            saved.push((unit, of_layer));
            hidden = output;
        }

        let unit = Unit::new(LAST, &chain.last, uses);
        let (loss, mut upstream) = pass.last(&unit, &hidden, last)?;
        while let Some((unit, of_layer)) = saved.pop() {
            let input = of_layer.input().clone();
            upstream = pass.backward(&unit, of_layer, &layer, (hidden, upstream))?;
            hidden = input;
        }
        pass.backward(&first, of_first, &run_first, (hidden, upstream))?;
        self.set_loss(loss);
        Ok(())
    }
}

/// The input of a block: nothing, or a hidden state.
trait Input: Clone {
    /// The input as a leaf of a graph.
    fn leaf(&self) -> Self;

    /// The gradient of a leaf.
    fn gradient(&self, unit: &str, gradients: Option<&mut Gradients>) -> Result<Self>;
}

impl Input for () {
    fn leaf(&self) {}

    fn gradient(&self, _unit: &str, _gradients: Option<&mut Gradients>) -> Result<()> {
        Ok(())
    }
}

impl<const D: usize> Input for Tensor<D> {
    fn leaf(&self) -> Self {
        self.clone().autodiff().detach().require_grad()
    }

    fn gradient(&self, unit: &str, gradients: Option<&mut Gradients>) -> Result<Self> {
        let gradient = gradients.and_then(|gradients| self.grad_remove(gradients));
        gradient
            .ok_or_else(|| setting(format!("the output of {unit} does not depend on its input")))
    }
}

/// A block's unit and template, and the tensors that use its parameters.
struct Unit<'a, M> {
    name: String,
    template: &'a M,
    uses: Uses,
}

impl<'a, M: Module> Unit<'a, M> {
    fn new(name: impl Into<String>, template: &'a M, uses: &StepUses) -> Self {
        Self {
            name: name.into(),
            template,
            uses: uses.of_unit(),
        }
    }

    fn fill(&self, params: &Params<'_>, tape: Tape) -> Result<M> {
        fill(self.template, &self.name, tape, &self.uses, |name| {
            params.view(name)
        })
    }

    /// Runs the block and records its graph.
    fn record<I: Input, const D: usize>(
        &self,
        params: &Params<'_>,
        input: &I,
        run: &impl Fn(&M, I) -> Tensor<D>,
    ) -> Result<Recorded<M, I, D>> {
        let block = self.fill(params, Tape::On)?;
        let input = input.leaf();
        let output = run(&block, input.clone());
        Ok(Recorded {
            block,
            input,
            output,
        })
    }
}

/// A block that ran, and its graph.
struct Recorded<M, I, const D: usize> {
    block: M,
    input: I,
    output: Tensor<D>,
}

impl<M: Module, I: Input, const D: usize> Recorded<M, I, D> {
    /// Returns the gradients of the block and of its input.
    fn differentiate(self, unit: &str, upstream: Tensor<D>) -> Result<(Named, I)> {
        // Nothing is recorded of a first block whose parameters are all frozen.
        let mut gradients = match self.output.is_tracked() {
            true => Some((self.output * upstream).sum().backward()),
            false => None,
        };
        let named = gradients
            .as_mut()
            .map(|gradients| collect(&self.block, unit, gradients));
        let of_input = self.input.gradient(unit, gradients.as_mut())?;
        Ok((named.unwrap_or_default(), of_input))
    }
}

/// The part of a block that forward keeps for backward.
enum Saved<M, I, const D: usize> {
    Input(I),
    Graph(Box<Recorded<M, I, D>>),
}

impl<M, I, const D: usize> Saved<M, I, D> {
    fn input(&self) -> &I {
        match self {
            Self::Input(input) => input,
            Self::Graph(recorded) => &recorded.input,
        }
    }
}

/// Forward and backward of a micro-batch.
struct Pass<'p, 's> {
    step: &'p mut Step<'s, HostDevice>,
    /// Whether backward runs blocks again.
    recompute: bool,
}

impl Pass<'_, '_> {
    /// Runs a block. Returns what backward needs, and the output.
    fn forward<M: Module, I: Input, const D: usize>(
        &mut self,
        unit: &Unit<'_, M>,
        input: I,
        run: &impl Fn(&M, I) -> Tensor<D>,
    ) -> Result<(Saved<M, I, D>, Tensor<D>)> {
        let Self { step, recompute } = self;
        step.forward(&unit.name, |params| -> Result<_> {
            if *recompute {
                let block = unit.fill(params, Tape::Off)?;
                let output = run(&block, input.clone());
                return Ok((Saved::Input(input), output));
            }
            let recorded = unit.record(params, &input, run)?;
            let output = recorded.output.clone().detach();
            Ok((Saved::Graph(Box::new(recorded)), output))
        })
    }

    /// Runs and differentiates the last block. Returns the loss, and the gradient of `hidden`.
    fn last<M: Module, const D: usize>(
        &mut self,
        unit: &Unit<'_, M>,
        hidden: &Tensor<D>,
        run: impl Fn(&M, Tensor<D>) -> Tensor<1>,
    ) -> Result<(f64, Tensor<D>)> {
        let scale = self.step.loss_scale();
        let (loss, named, of_input) = self.step.forward(&unit.name, |params| -> Result<_> {
            let Recorded {
                block,
                input,
                output,
            } = unit.record(params, hidden, &run)?;
            let (loss, mut gradients) = differentiate(output, scale);
            let named = collect(&block, &unit.name, &mut gradients);
            Ok((
                loss,
                named,
                input.gradient(&unit.name, Some(&mut gradients))?,
            ))
        })?;

        unit.uses.check(self.step, &unit.name)?;
        hand_over(self.step, named)?;
        Ok((loss, of_input))
    }

    /// Differentiates a block, given its output and the loss's gradient of it. Returns the gradient
    /// of the input.
    fn backward<M: Module, I: Input, const D: usize>(
        &mut self,
        unit: &Unit<'_, M>,
        saved: Saved<M, I, D>,
        run: &impl Fn(&M, I) -> Tensor<D>,
        (output, upstream): (Tensor<D>, Tensor<D>),
    ) -> Result<I> {
        let (named, of_input) = self.step.forward(&unit.name, |params| -> Result<_> {
            let (recorded, is_same) = match saved {
                Saved::Graph(recorded) => (*recorded, Ok(())),
                Saved::Input(input) => {
                    let recorded = unit.record(params, &input, run)?;
                    let is_same = check_same(&unit.name, &recorded.output, &output);
                    (recorded, is_same)
                }
            };
            // A graph keeps parameters until it is differentiated.
            let gradients = recorded.differentiate(&unit.name, upstream);
            is_same.and(gradients)
        })?;

        unit.uses.check(self.step, &unit.name)?;
        hand_over(self.step, named)?;
        Ok(of_input)
    }
}

/// Checks that a block returned the same when it ran again.
fn check_same<const D: usize>(unit: &str, again: &Tensor<D>, first: &Tensor<D>) -> Result<()> {
    let again = again.clone().inner();
    let first = first.clone().inner();
    // NaN differs from itself.
    let is_nan = again.clone().is_nan().bool_and(first.clone().is_nan());
    let differs = again.not_equal(first).bool_and(is_nan.bool_not());
    if differs.any().into_scalar::<bool>() {
        return Err(setting(format!(
            "{unit} returned something else when it ran again in backward: at stage 3 a block must \
             not use random numbers; set the probability of its dropout to 0"
        )));
    }
    Ok(())
}
