//! Reading in the layout of the loading run, which may differ from that of the saving run.

use std::ops::Range;

use zero_shard::{Layout, ParamPlacement, UnitLayout};

use crate::format::runs::{elems_of, runs};
use crate::format::tensor_folder::check_range;
use crate::load::reader::Read;
use crate::{CkptError, Reader};

/// A view of a checkpoint in another layout of its model, which may differ in units, ranks and
/// alignment.
#[derive(Clone, Copy)]
pub struct View<'a> {
    reader: &'a Reader,
    layout: &'a Layout,
}

impl<'a> View<'a> {
    pub(crate) fn new(reader: &'a Reader, layout: &'a Layout) -> Self {
        Self { reader, layout }
    }

    /// Reads elements `range` of unit `unit` of this view's layout as fp32. Elements are numbered
    /// without padding: the concatenated parameters of the unit, `numel_elems` in total.
    ///
    /// # Errors
    /// No such state or unit, a range past the unit's elements, a wrong length of `out`, a failed
    /// read or a wrong checksum.
    pub fn read_range(
        &self,
        state: &str,
        unit: usize,
        range: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), CkptError> {
        let mut reads = Vec::new();
        self.list_range(state, unit, range, out, &mut reads)?;
        self.reader.read_all(reads)
    }

    /// Reads the shard of `rank` of unit `unit`: `shard_elems` elements; padding is set to zero.
    ///
    /// # Errors
    /// As [`View::read_range`].
    pub fn read_shard(
        &self,
        state: &str,
        unit: usize,
        rank: u64,
        out: &mut [f32],
    ) -> Result<(), CkptError> {
        let mut reads = Vec::new();
        self.list_shard(state, unit, rank, out, &mut reads)?;
        self.reader.read_all(reads)
    }

    /// Reads the shard storage of `rank`: `layout.shard_elems()` elements; padding is set to zero.
    ///
    /// # Errors
    /// As [`View::read_range`].
    pub fn read_storage(&self, state: &str, rank: u64, out: &mut [f32]) -> Result<(), CkptError> {
        if out.len() as u64 != self.layout.shard_elems() {
            return Err(CkptError::argument(
                "elements of the shard storage",
                self.layout.shard_elems(),
                out.len(),
            ));
        }
        let mut reads = Vec::new();
        let mut rest = out;
        for (u, unit) in self.layout.units().iter().enumerate() {
            let (now, later) = rest.split_at_mut(unit.shard_elems as usize);
            rest = later;
            self.list_shard(state, u, rank, now, &mut reads)?;
        }
        self.reader.read_all(reads)
    }

    fn list_shard<'o>(
        &self,
        state: &str,
        unit: usize,
        rank: u64,
        out: &'o mut [f32],
        reads: &mut Vec<Read<'o>>,
    ) -> Result<(), CkptError> {
        let placed = self.unit(unit)?;
        if rank >= self.layout.world_size() {
            return Err(CkptError::argument(
                "rank",
                format!("below {}", self.layout.world_size()),
                rank,
            ));
        }

        if out.len() as u64 != placed.shard_elems {
            let what = format!("elements of the shard of unit {:?}", placed.name);
            return Err(CkptError::argument(what, placed.shard_elems, out.len()));
        }

        let mut rest = out;
        let mut at = 0;
        for run in runs(placed, rank) {
            let (padding, later) = rest.split_at_mut((run.at - at) as usize);
            padding.fill(0.0);
            let (now, later) = later.split_at_mut(run.len() as usize);
            rest = later;
            at = run.in_shard().end;
            self.list_range(state, unit, run.elems, now, reads)?;
        }

        rest.fill(0.0);
        Ok(())
    }

    fn list_range<'o>(
        &self,
        state: &str,
        unit: usize,
        range: Range<u64>,
        out: &'o mut [f32],
        reads: &mut Vec<Read<'o>>,
    ) -> Result<(), CkptError> {
        let placed = self.unit(unit)?;
        check_range(&placed.name, placed.numel_elems, &range, out.len())?;
        self.reader.state(state)?;
        // A stored unit with the same parameters is read as one range, otherwise parameter by
        // parameter.
        if self
            .reader
            .layout
            .units()
            .get(unit)
            .is_some_and(|stored| same_params(stored, placed))
        {
            return self.reader.list(state, unit, range, out, reads);
        }
        let mut rest = out;
        let first = placed
            .params
            .partition_point(|p| elems_of(placed, p).end <= range.start);

        for param in &placed.params[first..] {
            let whole = elems_of(placed, param);
            let part = whole.start.max(range.start)..whole.end.min(range.end);
            if part.start >= part.end {
                continue;
            }
            let (now, later) = rest.split_at_mut((part.end - part.start) as usize);
            rest = later;
            let (stored_unit, stored) = self.reader.param(&param.name)?;
            let start = stored.offset_elems + part.start - whole.start;
            self.reader.list(
                state,
                stored_unit,
                start..start + part.end - part.start,
                now,
                reads,
            )?;
        }

        Ok(())
    }

    fn unit(&self, unit: usize) -> Result<&UnitLayout, CkptError> {
        let units = self.layout.units();
        units
            .get(unit)
            .ok_or_else(|| CkptError::argument("unit", format!("below {}", units.len()), unit))
    }
}

/// Whether two units have the same parameters in the same order.
fn same_params(a: &UnitLayout, b: &UnitLayout) -> bool {
    let same = |(a, b): (&ParamPlacement, &ParamPlacement)| a.name == b.name && a.shape == b.shape;
    a.params.len() == b.params.len() && a.params.iter().zip(&b.params).all(same)
}
