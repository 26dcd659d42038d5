//! The update of matrices: directions, exchange, orthogonalisation, exchange, application.
//!
//! ```text
//! compute  | directions 0 | directions 1 | matrices 0 | directions 2 | apply 0 | matrices 1 | ...
//! exchange |              | to 0         | to 1       | back 0       | to 2    | back 1     | ...
//! ```
//!
//! Buffers of a wave, in fp32, from its directions to its application:
//!
//! | buffer | elements |
//! |---|---|
//! | held | what the rank holds of the wave's parameters |
//! | received, returned | what all ranks hold of the parameters that it updates; one buffer, unless every rank holds all |
//! | whole | those parameters, joined from their parts |
//! | scratch | [`Kernels::orthogonalise_scratch_elems`] of the largest matrix |

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use zero_alloc::device::{AnySlice, DType, Device, Stream};
use zero_alloc::{Block, Purpose};
use zero_kernels::{MatrixRows, MatrixRule, OrthogonaliseArgs};

use crate::matrices::{Buffer, MatrixExchange, Part, Wave};
use crate::pieces::view;
use crate::run_rows::run_rows;
use crate::segments::{Launch, Phase, UnitSlices};
use crate::{OptimError, ShardedOptimizer};

/// A wave of which the directions are on their way.
struct InFlight<'a, D: Device> {
    wave: Wave<'a>,
    held: Block<D>,
    received: Block<D>,
    /// The end of the exchange that was enqueued last.
    exchanged: D::Event,
}

impl<D: Device> MatrixExchange<D> {
    fn allocate(&self, stream: &D::Stream, elems: usize) -> Result<Block<D>, OptimError> {
        Ok(self
            .pool
            .allocate(elems, DType::F32, Purpose::Workspace, stream)?)
    }
}

impl<D: Device> ShardedOptimizer<D> {
    /// Enqueues the updates of the matrices of `units`. `others` enqueues those of all other
    /// elements, behind the directions of the first wave.
    pub(crate) fn update_matrices<'a>(
        &mut self,
        stream: &D::Stream,
        units: &[(usize, &'a UnitSlices<'a, D>)],
        others: impl FnOnce(&mut Self) -> Result<(), OptimError>,
    ) -> Result<(), OptimError> {
        let Some(exchange) = self.exchange.take() else {
            return others(self);
        };
        let updated = self.update_waves(stream, &exchange, units, others);
        self.exchange = Some(exchange);
        updated
    }

    fn update_waves<'a>(
        &mut self,
        stream: &D::Stream,
        exchange: &MatrixExchange<D>,
        units: &[(usize, &'a UnitSlices<'a, D>)],
        others: impl FnOnce(&mut Self) -> Result<(), OptimError>,
    ) -> Result<(), OptimError> {
        let slices_of = |unit: usize| {
            let mut all = units.iter();
            all.find(|(nth, _)| *nth == unit).map(|(_, slices)| *slices)
        };
        let is_now = |wave: &Wave<'_>| {
            let mut of_units = wave.params.iter().map(|(param, _)| param.id.unit);
            of_units.any(|unit| slices_of(unit).is_some())
        };

        let mut others = Some(others);
        let mut sent: Option<InFlight<'_, D>> = None;
        let mut returning: Option<InFlight<'_, D>> = None;
        let mut waves = exchange.matrices.waves().filter(is_now);
        loop {
            let next = waves.next();
            let next = next.map(|wave| self.begin(stream, exchange, wave, &slices_of));
            let next = next.transpose()?;
            if let Some(others) = others.take() {
                others(self)?;
            }
            if let Some(wave) = returning.take() {
                self.apply(stream, &wave, &slices_of)?;
            }
            let orthogonalised = sent.take().map(|wave| self.middle(stream, exchange, wave));
            returning = orthogonalised.transpose()?;
            sent = next;
            if sent.is_none() && returning.is_none() {
                return Ok(());
            }
        }
    }

    /// Computes the directions of a wave and sends them to the updaters.
    fn begin<'a, 'b>(
        &mut self,
        stream: &D::Stream,
        exchange: &MatrixExchange<D>,
        wave: Wave<'b>,
        slices_of: &impl Fn(usize) -> Option<&'a UnitSlices<'a, D>>,
    ) -> Result<InFlight<'b, D>, OptimError> {
        let buffer = wave.held();
        let held = exchange.allocate(stream, buffer.elems())?;
        self.launch(stream, &wave, &buffer, (&held, Phase::Direction), slices_of)?;

        let given = wave.given();
        let of_held = |part: &Part<'_>| {
            let mut held = buffer.parts.iter();
            held.find(|held| held.param.id == part.param.id)
                .map(|held| held.at)
        };
        let first = given.parts.first().and_then(of_held).unwrap_or(0);
        let send = view(&held).slice(first..first + given.elems());
        let arriving = wave.received();
        let received = exchange.allocate(stream, arriving.elems())?;
        let exchanged = exchange.comm.all_to_all(
            stream,
            (send, &given.counts),
            (view(&received), &arriving.counts),
        )?;
        Ok(InFlight {
            wave,
            held,
            received,
            exchanged,
        })
    }

    /// Orthogonalises the matrices of this rank and returns them.
    fn middle<'a>(
        &mut self,
        stream: &D::Stream,
        exchange: &MatrixExchange<D>,
        sent: InFlight<'a, D>,
    ) -> Result<InFlight<'a, D>, OptimError> {
        stream.wait(&sent.exchanged)?;
        let InFlight {
            wave,
            held,
            received,
            ..
        } = sent;
        let own = wave.own();
        let whole = exchange.allocate(stream, own.elems())?;
        let arrived = wave.received();
        self.copy_parts(stream, &own, view(&whole), &arrived, view(&received), true)?;

        let scratch = own.parts.iter().flat_map(|part| &part.matrices.matrices);
        let scratch = scratch.map(|m| self.kernels.orthogonalise_scratch_elems(m.rows, m.cols));
        let scratch = exchange.allocate(stream, scratch.max().unwrap_or(0))?;
        for part in &own.parts {
            let rule = self.matrix_rule(part)?;
            for matrix in &part.matrices.matrices {
                let range = matrix.range();
                let values = part.at + range.start..part.at + range.end;
                let factor = rule.adjust.factor(matrix.outputs(), matrix.inputs());
                let args = OrthogonaliseArgs {
                    values: view(&whole).slice(values).typed()?,
                    rows: matrix.rows,
                    cols: matrix.cols,
                    row_stride: matrix.row_stride,
                    scratch: view(&scratch).typed()?,
                    rule: rule.newton_schulz,
                    scale: factor as f32,
                };
                self.kernels.orthogonalise(stream, args)?;
            }
        }

        let leaving = wave.returned();
        // The same parts, unless every rank holds all.
        let returned = match leaving.elems() == arrived.elems() {
            true => received,
            false => exchange.allocate(stream, leaving.elems())?,
        };
        self.copy_parts(stream, &own, view(&whole), &leaving, view(&returned), false)?;
        let arriving = wave.held();
        let exchanged = exchange.comm.all_to_all(
            stream,
            (view(&returned), &leaving.counts),
            (view(&held), &arriving.counts),
        )?;
        Ok(InFlight {
            wave,
            held,
            received: returned,
            exchanged,
        })
    }

    /// Applies the updates that came back.
    fn apply<'a>(
        &mut self,
        stream: &D::Stream,
        returning: &InFlight<'_, D>,
        slices_of: &impl Fn(usize) -> Option<&'a UnitSlices<'a, D>>,
    ) -> Result<(), OptimError> {
        let InFlight {
            wave,
            held,
            exchanged,
            ..
        } = returning;
        stream.wait(exchanged)?;
        self.launch(stream, wave, &wave.held(), (held, Phase::Apply), slices_of)
    }

    /// Enqueues a phase of all parts that this rank holds, whose directions or updates are in
    /// `block`.
    fn launch<'a>(
        &mut self,
        stream: &D::Stream,
        wave: &Wave<'_>,
        held: &Buffer<'_>,
        (block, phase): (&Block<D>, fn(AnySlice) -> Phase),
        slices_of: &impl Fn(usize) -> Option<&'a UnitSlices<'a, D>>,
    ) -> Result<(), OptimError> {
        let mut of_units = BTreeMap::new();
        for part in &held.parts {
            let unit = part.param.id.unit;
            if let Entry::Vacant(of_unit) = of_units.entry(unit) {
                let missing = || OptimError::PartOfWave {
                    unit: self.names[unit].clone(),
                };
                let slices = slices_of(unit).ok_or_else(missing)?;
                of_unit.insert(self.unit_launches(stream, unit, slices)?);
            }
        }

        let mut launches = Vec::new();
        for part in &held.parts {
            let elems = wave.in_segment(part);
            for (of_launch, launch) in &of_units[&part.param.id.unit] {
                let start = of_launch.start.max(elems.start);
                let end = of_launch.end.min(elems.end);
                if start >= end || self.groups.matrix_rule(launch.rules).is_none() {
                    continue;
                }
                let at = part.at + start - elems.start;
                let direction = view(block).slice(at..at + (end - start));
                launches.push(Launch {
                    phase: phase(direction),
                    ..launch.slice(start - of_launch.start..end - of_launch.start)
                });
            }
        }
        self.enqueue_launches(stream, launches)
    }

    /// Copies between a rank's own parameters and the parts of a buffer.
    fn copy_parts(
        &self,
        stream: &D::Stream,
        own: &Buffer<'_>,
        whole: AnySlice,
        buffer: &Buffer<'_>,
        parts: AnySlice,
        to_whole: bool,
    ) -> Result<(), OptimError> {
        for part in &buffer.parts {
            let mut all = own.parts.iter();
            let Some(of_own) = all.find(|own| own.param.id == part.param.id) else {
                continue;
            };
            for rows in run_rows(part.runs()?) {
                let place = part.in_buffer(rows.in_part.elems());
                let in_parts = MatrixRows {
                    data: parts.slice(place),
                    stride: rows.in_part.stride as usize,
                };
                let Some(place) = &rows.in_whole else {
                    if !to_whole {
                        self.device.fill_zero(stream, in_parts.data)?;
                    }
                    continue;
                };
                let in_whole = MatrixRows {
                    data: whole.slice(of_own.in_buffer(place.elems())),
                    stride: place.stride as usize,
                };
                let [from, to] = match to_whole {
                    true => [in_parts, in_whole],
                    false => [in_whole, in_parts],
                };
                let shape = [rows.in_part.count, rows.in_part.len].map(|n| n as usize);
                self.kernels.cast_rows(stream, from, to, shape, 1.0)?;
            }
        }
        Ok(())
    }

    /// The rule of a parameter's matrices.
    fn matrix_rule(&self, part: &Part<'_>) -> Result<&MatrixRule, OptimError> {
        let group = part.matrices.group;
        let update = self.groups.update_of(group);
        let rule = update.and_then(|update| self.groups.matrix_rules[update].as_ref());
        rule.ok_or_else(|| OptimError::NoMatrixRule {
            unit: self.names[part.param.id.unit].clone(),
            group,
        })
    }
}
