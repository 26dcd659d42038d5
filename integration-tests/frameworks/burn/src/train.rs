//! A run and its steps.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use burn::module::Module;
use burn::tensor::{Gradients, Tensor};
use zero_alloc::host::HostDevice;
use zero_optim::StepOutcome;
use zero_optim::framework::{Builder, Step, Zero};
use zero_shard::ZeroStage;

use crate::tensors::{
    Initial, Load, Result, StepUses, Tape, Uses, collect, fill, hand_over, setting,
};

/// The unit of a parameter by its path: everything up to the first number, such as
/// `encoder.layers.3` of `encoder.layers.3.norm_2.gamma`, or else the first name.
pub fn unit_of_block(path: &str) -> String {
    let names: Vec<&str> = path.split('.').collect();
    let is_number = |name: &&str| name.parse::<usize>().is_ok();
    let len = names
        .iter()
        .position(is_number)
        .map_or(1, |number| number + 1);
    names[..len].join(".")
}

/// One rank of the training of a burn model.
///
/// The model's parameters live in the run. Between steps the model is a template whose parameters
/// have one element each; a step fills it with views of the run's memory.
pub struct ZeroBurn<M> {
    zero: Zero<HostDevice>,
    template: M,
    units: Vec<String>,
}

impl<M> fmt::Debug for ZeroBurn<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ZeroBurn").field(&self.zero).finish()
    }
}

impl<M: Module> ZeroBurn<M> {
    /// The training of `model` with the settings of `builder`; all ranks pass equal models, such as
    /// clones of one. Parameters have their paths as names, and `unit_of` returns the unit of a
    /// path, such as [`unit_of_block`]. All ranks call it.
    ///
    /// # Errors
    /// A rank has another model or other settings, or could not start: all ranks have the error.
    pub fn new(
        model: M,
        builder: Builder<HostDevice>,
        unit_of: impl Fn(&str) -> String,
    ) -> Result<Self> {
        let (template, mut initial) = Initial::take(model)?;
        let shapes = std::mem::take(&mut initial.shapes);
        let builder = builder.params(shapes, unit_of);
        let zero = builder.build(|name, _shape, values| {
            if let Some(initial) = initial.values.remove(name) {
                values.copy_from_slice(&initial);
            }
        })?;

        let units = zero.layout().units().iter();
        let units = units.map(|unit| unit.name.clone()).collect();
        Ok(Self {
            zero,
            template,
            units,
        })
    }

    /// Trains a step of one micro-batch, whose mean loss `loss` returns, at stages 0 to 2.
    ///
    /// # Errors
    /// As [`TrainStep::backward`] and [`TrainStep::end`].
    pub fn step(&mut self, loss: impl FnOnce(&M) -> Tensor<1>) -> Result<StepOutcome> {
        let mut step = self.begin()?;
        step.backward(loss)?;
        step.end()
    }

    /// Begins a step.
    ///
    /// # Errors
    /// An earlier step did not end, or a rank failed.
    pub fn begin(&mut self) -> Result<TrainStep<'_, M>> {
        Ok(TrainStep {
            stage: self.zero.stage(),
            step: self.zero.begin()?,
            template: &self.template,
            units: &self.units,
            uses: StepUses::new(),
            loss: None,
        })
    }

    /// A copy of the model with its whole parameters, for burn's own records
    /// ([`Module::into_record`], [`Module::save_file`]). All ranks call it, outside of a step.
    ///
    /// # Errors
    /// A rank failed, or an earlier step did not end.
    pub fn model(&mut self) -> Result<M> {
        let mut values = HashMap::new();
        self.zero
            .for_each_param(|name, _shape, elems| -> Result<()> {
                values.insert(name.to_owned(), elems.to_vec());
                Ok(())
            })?;
        Ok(Load::load(&self.template, values))
    }

    /// Saves weights, moments and progress as a checkpoint in `folder`; see [`Zero::save`].
    ///
    /// # Errors
    /// As [`Zero::save`].
    pub fn save(&mut self, folder: impl AsRef<Path>) -> Result<()> {
        self.zero.save(folder)
    }

    /// Loads the newest checkpoint in `folder`, of any number of ranks and any stage; see
    /// [`Zero::resume`].
    ///
    /// # Errors
    /// As [`Zero::resume`].
    pub fn resume(&mut self, folder: impl AsRef<Path>) -> Result<()> {
        self.zero.resume(folder)
    }

    /// The run below: progress, learning rate, gathers.
    pub fn zero(&mut self) -> &mut Zero<HostDevice> {
        &mut self.zero
    }
}

/// A step: a backward of each micro-batch, then [`Self::end`]. If it is dropped before, the run ends
/// on all ranks.
#[must_use = "dropping it ends the run on all ranks"]
pub struct TrainStep<'a, M> {
    pub(crate) step: Step<'a, HostDevice>,
    pub(crate) template: &'a M,
    pub(crate) stage: ZeroStage,
    units: &'a [String],
    /// The tensors that use parameters.
    pub(crate) uses: StepUses,
    /// The loss of the last micro-batch.
    loss: Option<f64>,
}

impl<M> fmt::Debug for TrainStep<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TrainStep").field(&self.step).finish()
    }
}

impl<M: Module> TrainStep<'_, M> {
    /// Computes the mean loss of a micro-batch and its gradients, at stages 0 to 2. The model that
    /// `loss` is called with has views as parameters; no tensor may keep them.
    ///
    /// # Errors
    /// The stage is 3, which needs a [`Chain`](crate::Chain); a tensor outside of the call keeps a
    /// parameter, which ends the run on all ranks; an earlier micro-batch of the step has no
    /// gradient of a parameter; or a rank failed.
    pub fn backward(&mut self, loss: impl FnOnce(&M) -> Tensor<1>) -> Result<()> {
        if self.stage == ZeroStage::Three {
            return Err(setting(
                "stage 3 gathers a block at a time: make the run with Chain".into(),
            ));
        }
        self.next_micro_batch()?;

        let uses = self.uses.of_unit();
        let model = self.whole_model(&uses)?;
        let (value, mut gradients) = differentiate(loss(&model), self.step.loss_scale());
        let named = collect(&model, "", &mut gradients);

        drop((model, gradients));
        uses.check(&mut self.step, "the model")?;
        hand_over(&mut self.step, named)?;
        self.loss = Some(value);
        Ok(())
    }

    fn whole_model(&mut self, uses: &Uses) -> Result<M> {
        let mut views = HashMap::new();
        for unit in self.units {
            self.step.forward(unit, |params| -> Result<()> {
                for name in params.names() {
                    views.insert(name.to_owned(), params.view(name)?);
                }
                Ok(())
            })?;
        }
        fill(self.template, "", Tape::On, uses, |name| {
            let view = views.remove(name);
            view.ok_or_else(|| setting(format!("the run began without a parameter {name}")))
        })
    }

    /// Ends the micro-batch before this one, if there is one.
    pub(crate) fn next_micro_batch(&mut self) -> Result<()> {
        match self.loss.take() {
            Some(loss) => self.step.next_micro_batch(loss),
            None => Ok(()),
        }
    }

    pub(crate) fn set_loss(&mut self, loss: f64) {
        self.loss = Some(loss);
    }

    /// Ends the step: statistics, update, and at stages 1 and 2 a gather. Gradients, and the loss of
    /// the outcome, are means over ranks and micro-batches.
    ///
    /// # Errors
    /// There was no backward, a parameter has no gradient, micro-batches are missing, a tensor
    /// keeps a parameter, or a rank failed. The run has then ended on all ranks.
    pub fn end(mut self) -> Result<StepOutcome> {
        self.uses.check(&mut self.step)?;
        match self.loss {
            Some(loss) => self.step.end(loss),
            None => Err(setting("the step had no backward".into())),
        }
    }
}

/// Returns the loss and the gradients of `loss` times `scale`.
pub(crate) fn differentiate(loss: Tensor<1>, scale: f64) -> (f64, Gradients) {
    let value = f64::from(loss.clone().into_scalar::<f32>());
    let scaled = match scale {
        1.0 => loss,
        scale => loss * scale,
    };
    (value, scaled.backward())
}
