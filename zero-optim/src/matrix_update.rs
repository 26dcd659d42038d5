//! The update of matrices: directions, exchange, orthogonalisation, exchange, application.
//!
//! ```text
//! compute  | directions 0 | directions 1 | matrices 0 | directions 2 | apply 0 | matrices 1 | ...
//! exchange |              | to 0         | to 1       | back 0       | to 2    | back 1     | ...
//! ```

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use zero_alloc::device::{AnySlice, DType, Device, Stream};
use zero_alloc::{Block, Pool, Purpose};

use crate::Matrices;
use crate::matrices::{Buffer, Wave};
use crate::matrix_exchange::{Rest, Updates, WaveExchange};
use crate::pieces::view;
use crate::segments::{Launch, Phase, UnitSlices};
use crate::{OptimError, ShardedOptimizer};

/// [`Matrices`] with what an update needs.
pub(crate) struct MatrixExchange<D: Device> {
    pub(crate) matrices: Matrices,
    pub(crate) of_waves: Box<dyn WaveExchange<D>>,
    /// The memory of directions.
    pub(crate) pool: Pool<D>,
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

        let waves: Vec<_> = exchange.matrices.waves().filter(is_now).collect();
        let mut waves = waves.iter();
        let mut others = Some(others);
        let mut sent: Option<(&Wave<'_>, Block<D>, Rest<'_, D>)> = None;
        let mut returning: Option<(&Wave<'_>, Block<D>, Updates<D>)> = None;
        loop {
            let next = waves.next().map(|wave| {
                let buffer = wave.held();
                let elems = buffer.elems();
                let held = exchange
                    .pool
                    .allocate(elems, DType::F32, Purpose::Workspace, stream)?;
                let directions = (&held, Phase::Direction as fn(AnySlice) -> Phase);
                self.launch(stream, wave, &buffer, directions, &slices_of)?;
                let rest = exchange.of_waves.send(stream, wave, view(&held))?;
                Ok::<_, OptimError>((wave, held, rest))
            });
            let next = next.transpose()?;
            if let Some(others) = others.take() {
                others(self)?;
            }
            if let Some((wave, held, updates)) = returning.take() {
                stream.wait(&updates.complete)?;
                let updates = (&held, Phase::Apply as fn(AnySlice) -> Phase);
                self.launch(stream, wave, &wave.held(), updates, &slices_of)?;
            }
            if let Some((wave, held, rest)) = sent.take() {
                returning = Some((wave, held, rest()?));
            }
            sent = next;
            if sent.is_none() && returning.is_none() {
                return Ok(());
            }
        }
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
}
