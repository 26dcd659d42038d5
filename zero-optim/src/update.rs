//! The launches of an update, over state in memory of the device or in a tier.

use std::ops::Range;

use zero_alloc::device::{Device, DeviceKind};
use zero_kernels::{AdamArgs, AdamHyper, RemainderArgs};

use crate::adamw::State;
use crate::groups::LaunchRules;
use crate::segments::{Launch, UnitSlices, launches};
use crate::tier::{Access, Away, Masters, PieceState};
use crate::{OptimError, ShardedAdamW};

impl<D: Device> ShardedAdamW<D> {
    /// Enqueues the update, after the gradients. It reads the scalars from device memory in stream
    /// order.
    pub(crate) fn enqueue_adam(
        &mut self,
        stream: &D::Stream,
        units: &[UnitSlices<'_, D>],
    ) -> Result<(), OptimError> {
        self.enqueue_updates(stream, units.iter().enumerate())
    }

    pub(crate) fn enqueue_updates<'a>(
        &mut self,
        stream: &D::Stream,
        units: impl Iterator<Item = (usize, &'a UnitSlices<'a, D>)>,
    ) -> Result<(), OptimError> {
        let mut slices = Vec::new();
        for (i, unit) in units.filter(|(i, _)| !self.is_frozen(*i)) {
            let grad = unit.grad.wait_on(stream)?;
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
        let resident = match &self.state {
            State::Tier(_) => return self.enqueue_pieces(stream, &slices),
            State::Resident(resident) => resident,
        };
        let join = self.device.kind() == DeviceKind::Cuda;
        let max_elems = self.controller.config().sub_group_elems;
        for launch in launches(slices.into_iter(), join, max_elems) {
            let piece = resident.piece(launch.state.clone())?;
            self.launch(stream, &launch, &piece)?;
        }
        Ok(())
    }

    /// Enqueues updates of state in a tier, piece by piece.
    fn enqueue_pieces(&mut self, stream: &D::Stream, slices: &[Launch]) -> Result<(), OptimError> {
        let seed = Some(self.controller.state().iteration);
        // Slices of a piece share one visit.
        let mut runs: Vec<Range<usize>> = Vec::new();
        for slice in slices {
            match runs.last_mut().filter(|last| last.end == slice.state.start) {
                Some(last) => last.end = slice.state.end,
                None => runs.push(slice.state.clone()),
            }
        }
        for run in runs {
            self.visit(stream, run, Access::Update { seed }, |optim, piece| {
                let parts = slices
                    .iter()
                    .filter(|s| s.state.start < piece.state.end && piece.state.start < s.state.end);
                for slice in parts {
                    let (of_slice, of_piece) = piece.overlap(&slice.state);
                    let launch = Launch {
                        state: slice.state.start + of_slice.start..slice.state.start + of_slice.end,
                        grad: slice.grad.slice(of_slice.clone()),
                        param: slice.param.slice(of_slice),
                        rules: slice.rules,
                    };
                    optim.launch(stream, &launch, &piece.slice(of_piece))?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Visits the pieces of a range of the state; in memory of the device the range is one piece.
    pub(crate) fn visit(
        &mut self,
        stream: &D::Stream,
        range: Range<usize>,
        access: Access,
        mut run: impl FnMut(&Self, &PieceState) -> Result<(), OptimError>,
    ) -> Result<(), OptimError> {
        let tier = match &mut self.state {
            State::Resident(resident) => {
                let piece = resident.piece(range)?;
                return run(self, &piece);
            }
            State::Tier(tier) => tier,
        };
        // The tier leaves `self` for the visit, whose operations need the rest. After a panic
        // `Away` stays.
        let mut tier = std::mem::replace(tier, Box::new(Away));
        let visited = tier.visit(stream, range, access, &mut |piece| run(self, piece));
        self.state = State::Tier(tier);
        visited
    }

    /// Enqueues one launch; `piece` is its state.
    fn launch(
        &self,
        stream: &D::Stream,
        launch: &Launch,
        piece: &PieceState,
    ) -> Result<(), OptimError> {
        let &Launch {
            grad, param, rules, ..
        } = launch;
        let LaunchRules {
            scalars,
            weight_decay,
        } = self.groups.launch_rules[rules];
        let scalars = self.scalars_slice().slice(scalars..scalars + 1);
        let hyper = AdamHyper {
            weight_decay,
            ..self.controller.config().hyper
        };
        let PieceState {
            first_moment,
            second_moment,
            ..
        } = *piece;
        let (master, param_out) = match piece.masters {
            Masters::Fp32(master) => (master, Some(param)),
            Masters::Params => (param.typed::<f32>()?, None),
            Masters::Remainders(remainder) => {
                let param = param.typed()?;
                let args = RemainderArgs {
                    param,
                    remainder,
                    first_moment,
                    second_moment,
                    grad,
                    scalars,
                    hyper,
                };
                return Ok(self.kernels.adam_remainder(stream, args)?);
            }
        };
        let args = AdamArgs {
            master,
            first_moment,
            second_moment,
            grad,
            param_out,
            scalars,
            hyper,
        };
        Ok(self.kernels.adam(stream, args)?)
    }
}
