//! One rank of a run.

use std::error::Error;
use std::fmt;
use std::path::Path;

use zero_alloc::device::Device;
use zero_comm::{PrefetchReport, Prefetcher, WaitOnDrop};
use zero_shard::{Layout, ZeroStage};

use crate::ShardedOptimizer;

use super::FrameworkError;
use super::core::{Core, Paused};
use super::rank::Rank;
use super::step::Step;
use super::values::{ParamView, range_of};

/// One rank of a run: parameters, gradients and optimizer state under ZeRO. See the
/// [module](super).
pub struct Zero<D: Device> {
    /// Dropped first: the streams end before the memory is freed.
    pub(super) _wait: WaitOnDrop<D>,
    /// The gathers of stage 3.
    pub(super) prefetcher: Option<Prefetcher<D>>,
    pub(super) core: Core<D>,
    pub(super) report: PrefetchReport,
}

impl<D: Device> fmt::Debug for Zero<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Core {
            rank,
            stage,
            layout,
            steps,
            ..
        } = &self.core;
        f.debug_struct("Zero")
            .field("rank", rank)
            .field("stage", stage)
            .field("units", &layout.units().len())
            .field("steps", steps)
            .finish_non_exhaustive()
    }
}

impl<D: Device> Drop for Zero<D> {
    fn drop(&mut self) {
        // Before the wait for the streams: what they wait for does not come.
        if self.core.paused.is_some() {
            let rank = self.core.rank.comm.rank();
            self.core
                .fail(&format!("rank {rank} dropped its run within a step"));
        }
    }
}

impl<D: Device> Zero<D> {
    /// Begins a step.
    ///
    /// # Errors
    /// An earlier step did not end, or a rank failed.
    pub fn begin(&mut self) -> Result<Step<'_, D>, FrameworkError> {
        let Self {
            prefetcher,
            core,
            report,
            ..
        } = self;

        if core.in_step {
            core.fail("a step was not ended");
        }
        core.check()?;
        if core.has_views {
            let ready = (0..core.params.len()).try_for_each(|unit| core.wait_for_params(unit));
            let freed = ready.and_then(|()| core.gradients.free());
            core.or_fail(freed)?;
        }
        let gathers = match prefetcher {
            None => None,
            Some(prefetcher) => Some(prefetcher.step().inspect_err(|error| {
                core.fail(&error.to_string());
            })?),
        };

        core.gradients.begin(core.micro_batches);
        core.in_step = true;
        core.begun += 1;
        core.paused = None;
        Ok(Step {
            core,
            gathers,
            report,
            losses: None,
            last_error: None,
        })
    }

    /// The step that was [paused](Step::pause), if there is one.
    pub fn open_step(&mut self) -> Option<Step<'_, D>> {
        let Paused { losses, last_error } = self.core.paused.take()?;
        let prefetcher = self.prefetcher.as_mut();
        Some(Step {
            core: &mut self.core,
            gathers: prefetcher.map(Prefetcher::continue_step),
            report: &mut self.report,
            losses,
            last_error,
        })
    }

    /// The memory of a parameter at stages 0 to 2, by its full name, for a tensor that is a view of
    /// it: updates and gathers land in the model.
    ///
    /// # Errors
    /// There is no such parameter, or the stage is 3.
    pub fn param(&mut self, name: &str) -> Result<ParamView, FrameworkError> {
        let id = self.core.param(name)?;
        if self.core.stage.shards_params() {
            let name = name.to_owned();
            return Err(FrameworkError::NotWhole { name });
        }
        self.core.has_views = true;
        let unit = &self.core.layout.units()[id.unit];
        let held = &self.core.params[id.unit];
        Ok(ParamView {
            slice: held.held.slice(range_of(unit, id.param)),
            shape: unit.params[id.param].shape.clone(),
            _memory: held.memory.clone(),
        })
    }

    /// Calls `take` with name, shape and elements (those of the run's dtype, as fp32) of every
    /// parameter, in order: for the framework's own format. All ranks call it; a unit at a time is
    /// whole in memory.
    ///
    /// # Errors
    /// A rank failed, an earlier step did not end, or the first error of `take`, which is not
    /// called again; the run then goes on.
    pub fn for_each_param<E: Into<Box<dyn Error + Send + Sync>>>(
        &mut self,
        mut take: impl FnMut(&str, &[u64], &[f32]) -> Result<(), E>,
    ) -> Result<(), FrameworkError> {
        let mut taken = Ok(());
        let mut step = self.begin()?;
        for index in 0..step.core.layout.units().len() {
            let whole = step.read_unit(index)?;
            let unit = &step.core.layout.units()[index];
            for (param, placed) in unit.params.iter().enumerate() {
                if taken.is_ok() {
                    let values = &whole[range_of(unit, param)];
                    taken = take(&placed.name, &placed.shape, values);
                }
            }
        }
        step.end_without_update()?;
        taken.map_err(FrameworkError::of_closure)
    }

    /// Saves weights, moments and progress as a checkpoint in `folder`, with the other ranks. All
    /// ranks call it, after [`Self::set_state`] with the same value. Parameters that several ranks
    /// hold, at stages 0 to 2, are compared first.
    ///
    /// # Errors
    /// A file could not be written, or ranks have different states: all ranks have the error, and
    /// may go on. Or ranks differ in parameters or steps, a rank failed, or an earlier step did not
    /// end: the run has ended on all ranks.
    pub fn save(&mut self, folder: impl AsRef<Path>) -> Result<(), FrameworkError> {
        self.core.check_between_steps("Zero::save")?;
        self.core.save(folder.as_ref())
    }

    /// Loads the newest checkpoint in `folder`, of any number of ranks, stage and dtype. All ranks
    /// call it; rank 0 chooses the checkpoint.
    ///
    /// # Errors
    /// There is no checkpoint, the folder of a rank has another one, it is of another model, or
    /// other rules updated parameters that are trained: all ranks have the error, and nothing has
    /// changed. If a file is damaged or a rank fails, the run has ended on all ranks.
    pub fn resume(&mut self, folder: impl AsRef<Path>) -> Result<(), FrameworkError> {
        self.core.check_between_steps("Zero::resume")?;
        let reader = self.core.open(folder.as_ref())?;
        let loaded = self.core.load(&reader);
        self.core.or_fail(loaded)
    }

    /// Sets the framework's part of the next checkpoints, such as the position in the data: the
    /// same on all ranks.
    pub fn set_state(&mut self, state: serde_json::Value) {
        self.core.state = state;
    }

    /// Sets the `config.json` of Hugging Face of the next checkpoints, the same on all ranks: with it
    /// `zero` trains on from them and exports them, if the parameters have Hugging Face's names. A
    /// resume takes that of the checkpoint.
    pub fn set_model_config(&mut self, config: serde_json::Value) {
        self.core.model_config = config;
    }

    /// The framework's part of the checkpoint that was resumed, or the last that was set; at first
    /// null.
    pub fn state(&self) -> &serde_json::Value {
        &self.core.state
    }

    /// Steps that ended, also before a resume, and skipped ones.
    pub fn steps(&self) -> u64 {
        self.core.steps
    }

    /// The optimizer: settings, progress, loss scale.
    pub fn optimizer(&self) -> &ShardedOptimizer<D> {
        &self.core.optim
    }

    /// Sets the base learning rate of the next steps, the same on all ranks: they compare it at the
    /// end of a step.
    ///
    /// # Errors
    /// The rate is negative or not finite.
    pub fn set_lr(&mut self, lr: f64) -> Result<(), FrameworkError> {
        Ok(self.core.optim.set_lr(lr)?)
    }

    /// Sets the factor of the learning rate and the weight decay (`None`: the optimizer's) of a
    /// parameter group for the next steps, the same on all ranks: they compare it at the end of a
    /// step. Not part of a checkpoint.
    ///
    /// # Errors
    /// There is no such group, it is frozen, or a value is negative or not finite.
    pub fn set_group(
        &mut self,
        group: usize,
        lr_scale: f64,
        weight_decay: Option<f64>,
    ) -> Result<(), FrameworkError> {
        Ok(self.core.optim.set_group(group, lr_scale, weight_decay)?)
    }

    /// Sets the number of micro-batches of the next steps, such as fewer at the end of an epoch: the
    /// same on all ranks, which compare it at the end of a step.
    ///
    /// # Errors
    /// The number is 0, or a step is open.
    pub fn set_micro_batches(&mut self, micro_batches: usize) -> Result<(), FrameworkError> {
        let refuse = |why: &str| Err(FrameworkError::Setting(why.to_owned()));
        match micro_batches {
            0 => refuse("micro_batches is 0; it must be at least 1"),
            _ if self.core.in_step => {
                refuse("micro_batches of an open step; set it before Zero::begin")
            }
            _ => {
                self.core.micro_batches = micro_batches;
                Ok(())
            }
        }
    }

    /// Units, parameters and their distribution over ranks.
    pub fn layout(&self) -> &Layout {
        &self.core.layout
    }

    /// The stage.
    pub fn stage(&self) -> ZeroStage {
        self.core.stage
    }

    /// The rank's context.
    pub fn rank(&self) -> &Rank<D> {
        &self.core.rank
    }

    /// The gathers of the last step that ended, at stage 3.
    pub fn gathers(&self) -> PrefetchReport {
        self.report
    }
}
