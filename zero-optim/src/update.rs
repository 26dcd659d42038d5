//! The launches of an update.

use std::ops::Range;
use std::sync::Arc;

use zero_alloc::device::{Device, DeviceKind, DeviceSlice};
use zero_kernels::{Kernels, Rounding, StepScalars, UpdateArgs, Weights};

use crate::format::StateArrays;
use crate::groups::Resolved;
use crate::pieces::{Access, MasterSlice, Overlap, PieceState, Pieces};
use crate::segments::{Launch, Phase, UnitSlices, launches};
use crate::{OptimError, ShardedOptimizer};

impl<D: Device> ShardedOptimizer<D> {
    /// Enqueues updates of `units`, after their gradients. They read the scalars from device memory
    /// in stream order.
    pub(crate) fn enqueue_updates<'a>(
        &mut self,
        stream: &D::Stream,
        units: impl Iterator<Item = (usize, &'a UnitSlices<'a, D>)>,
    ) -> Result<(), OptimError> {
        let units: Vec<_> = units.collect();
        self.check_state()?;
        self.is_updating = true;
        let of_elements = |optim: &mut Self| {
            let mut launches = Vec::new();
            for (unit, slices) in units.iter().filter(|(unit, _)| !optim.is_frozen(*unit)) {
                let all = optim.unit_launches(stream, *unit, slices)?.into_iter();
                launches.extend(all.map(|(_, launch)| launch));
            }
            let groups = &optim.groups;
            launches.retain(|launch| !groups.sees_matrices(launch.rules));
            optim.enqueue_launches(stream, launches)
        };
        let enqueued = self.update_matrices(stream, &units, of_elements);
        self.is_updating = false;
        enqueued
    }

    /// The launches of the trained elements of a unit, each with its range of the unit's segment.
    pub(crate) fn unit_launches(
        &self,
        stream: &D::Stream,
        unit: usize,
        slices: &UnitSlices<'_, D>,
    ) -> Result<Vec<(Range<usize>, Launch)>, OptimError> {
        // SAFETY: read by the launches that are enqueued from the result, on `stream`.
        let grad = unsafe { slices.grad.slice_on(stream) }?;
        let of_param = slices.param.iter().flat_map(|&(param, at)| {
            let trained = self.groups.trained(unit, at..at + param.len());
            trained.map(move |(elems, state, rules)| {
                let launch = Launch {
                    state,
                    grad: grad.slice(elems.clone()),
                    param: param.slice(elems.start - at..elems.end - at),
                    rules,
                    phase: Phase::Update,
                };
                (elems, launch)
            })
        });
        Ok(of_param.collect())
    }

    pub(crate) fn enqueue_launches(
        &mut self,
        stream: &D::Stream,
        mut slices: Vec<Launch>,
    ) -> Result<(), OptimError> {
        // In the order of the state: elements of a unit with other arrays are apart there.
        slices.sort_by_key(|slice| slice.state.start);
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
        // Slices of a piece share it, which is held whole; they are in the order of the state.
        let overlaps = slices.iter().flat_map(|slice| state.within(&slice.state));
        let mut overlaps: Vec<Overlap> = overlaps.collect();
        overlaps.dedup_by_key(|overlap| overlap.index);

        for overlap in overlaps {
            let held = state.acquire(stream, &overlap, Access::Update)?;
            let piece = &held.piece;
            for slice in slices {
                let (of_slice, of_piece) = piece.overlap(&slice.state);
                if of_slice.is_empty() {
                    continue;
                }
                self.enqueue(stream, &slice.slice(of_slice), &piece.slice(of_piece))?;
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

        let rule = Arc::clone(&self.groups.updates[rules.update]);
        let (rule, weights, slots, grad) = match launch.phase {
            Phase::Update => (rule, weights, piece.slots.clone(), launch.grad),
            Phase::Direction(direction) => {
                let direction = Weights::Fp32 {
                    master: direction.typed()?,
                    param_out: None,
                };
                (rule, direction, piece.slots.clone(), launch.grad)
            }
            Phase::Apply(update) => {
                let apply = rule.matrix_rule().map_or(rule, |rule| rule.apply);
                (apply, weights, Vec::new(), update)
            }
        };
        let args = UpdateArgs {
            weights,
            slots,
            grad,
            scalars: self.scalars.slice(rules.scalars..rules.scalars + 1),
            weight_decay: rules.weight_decay,
            rounding: Rounding::Stochastic {
                seed: self.seed,
                first: launch.state.start as u64,
            },
        };
        Ok(self.kernels.update(stream, &rule, args)?)
    }
}
