//! The launches of an update.

use std::ops::Range;

use zero_alloc::device::{Device, DeviceKind, DeviceSlice};
use zero_kernels::{Kernels, Rounding, StepScalars, UpdateArgs, Weights};

use crate::format::StateArrays;
use crate::groups::Resolved;
use crate::pieces::{Access, MasterSlice, PieceState, Pieces};
use crate::segments::{Launch, UnitSlices, launches};
use crate::{OptimError, ShardedOptimizer};

impl<D: Device> ShardedOptimizer<D> {
    /// Enqueues updates of `units`, after their gradients. They read the scalars from device memory
    /// in stream order.
    pub(crate) fn enqueue_updates<'a>(
        &mut self,
        stream: &D::Stream,
        units: impl Iterator<Item = (usize, &'a UnitSlices<'a, D>)>,
    ) -> Result<(), OptimError> {
        let mut slices = Vec::new();
        for (i, unit) in units.filter(|(i, _)| !self.is_frozen(*i)) {
            // SAFETY: read by the launches that are enqueued below, on `stream`.
            let grad = unsafe { unit.grad.slice_on(stream) }?;
            slices.extend(unit.param.iter().flat_map(|&(param, at)| {
                self.groups
                    .trained(i, at..at + param.len())
                    .map(move |(elems, state, rules)| {
                        let param = param.slice(elems.start - at..elems.end - at);
                        Launch {
                            state,
                            grad: grad.slice(elems),
                            param,
                            rules,
                        }
                    })
            }));
        }

        // In the order of the state: elements of a unit with other arrays are apart there.
        slices.sort_by_key(|slice| slice.state.start);
        self.check_state()?;
        self.is_updating = true;
        let enqueued = self.enqueue_launches(stream, slices);
        self.is_updating = false;
        enqueued
    }

    fn enqueue_launches(
        &mut self,
        stream: &D::Stream,
        slices: Vec<Launch>,
    ) -> Result<(), OptimError> {
        let launcher = Launcher {
            kernels: &*self.kernels,
            scalars: self.scalars_slice(),
            groups: &self.groups,
            seed: self.controller.state().iteration,
        };

        if !self.state.is_on_device() {
            return launcher.enqueue_pieces(stream, &mut self.state, &slices);
        }

        let join = self.device.kind() == DeviceKind::Cuda;
        let blocks = self.groups.arrays.iter().map(StateArrays::block_elems);
        let max_elems = self.controller.config().sub_group_elems;
        let max_elems = max_elems.checked_next_multiple_of(blocks.max().unwrap_or(1));
        let max_elems = max_elems.unwrap_or(usize::MAX);
        for launch in launches(slices.into_iter(), join, max_elems) {
            for overlap in self.state.within(&launch.state) {
                let held = self.state.acquire(stream, &overlap, Access::Update)?;
                launcher.enqueue(stream, &launch, &held.piece)?;
                held.release()?;
            }
        }

        Ok(())
    }
}

/// The arguments that all launches of a step have.
struct Launcher<'a, D: Device> {
    kernels: &'a dyn Kernels<D>,
    scalars: DeviceSlice<StepScalars>,
    groups: &'a Resolved,
    /// Selects the random bits of stochastic rounding.
    seed: u64,
}

impl<D: Device> Launcher<'_, D> {
    /// Enqueues updates of state in pieces.
    fn enqueue_pieces(
        &self,
        stream: &D::Stream,
        state: &mut Pieces<D>,
        slices: &[Launch],
    ) -> Result<(), OptimError> {
        // Slices of a piece share it.
        let mut runs: Vec<Range<usize>> = Vec::new();
        for slice in slices {
            match runs.last_mut().filter(|last| last.end == slice.state.start) {
                Some(last) => last.end = slice.state.end,
                None => runs.push(slice.state.clone()),
            }
        }

        for overlap in runs
            .iter()
            .flat_map(|run| state.within(run))
            .collect::<Vec<_>>()
        {
            let held = state.acquire(stream, &overlap, Access::Update)?;
            let piece = &held.piece;
            for slice in slices {
                let (of_slice, of_piece) = piece.overlap(&slice.state);
                if of_slice.is_empty() {
                    continue;
                }
                let launch = Launch {
                    state: slice.state.start + of_slice.start..slice.state.start + of_slice.end,
                    grad: slice.grad.slice(of_slice.clone()),
                    param: slice.param.slice(of_slice),
                    rules: slice.rules,
                };
                self.enqueue(stream, &launch, &piece.slice(of_piece))?;
            }
            held.release()?;
        }

        Ok(())
    }

    /// Enqueues one launch; `piece` is its state.
    fn enqueue(
        &self,
        stream: &D::Stream,
        launch: &Launch,
        piece: &PieceState,
    ) -> Result<(), OptimError> {
        let rules = &self.groups.launch_rules[launch.rules];
        let param = launch.param;
        let weights = match piece.masters {
            MasterSlice::Fp32(master) => Weights::Fp32 {
                master,
                param_out: Some(param),
            },
            MasterSlice::Params => Weights::Fp32 {
                master: param.typed()?,
                param_out: None,
            },
            MasterSlice::Remainders(remainder) => Weights::Remainder {
                param: param.typed()?,
                remainder,
            },
        };

        let args = UpdateArgs {
            weights,
            slots: piece.slots.clone(),
            grad: launch.grad,
            scalars: self.scalars.slice(rules.scalars..rules.scalars + 1),
            weight_decay: rules.weight_decay,
            rounding: Rounding::Stochastic {
                seed: self.seed,
                first: launch.state.start as u64,
            },
        };
        let rule = &self.groups.updates[rules.update];
        Ok(self.kernels.update(stream, rule, args)?)
    }
}
