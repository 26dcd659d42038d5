//! Reading in the layout of the loading run, which may differ from that of the saving run.

use std::ops::Range;
use std::sync::Arc;

use zero_shard::{Layout, ParamSpec, ShardError, TensorCut, TensorPart, UnitLayout, UnitSpec};

use crate::format::runs::{elems_of, runs};
use crate::format::tensor_folder::check_range;
use crate::format::tensor_parallel::TENSOR_PARALLEL_JSON;
use crate::load::read_list::ReadList;
use crate::{CkptError, ModelSpec, Reader};

/// A view of a checkpoint in another layout of its model, or of one tensor-parallel rank's part of
/// it, which may differ in units, ranks and alignment.
#[derive(Clone)]
pub struct View<'a> {
    reader: &'a Reader,
    layout: &'a Layout,
    /// The part that the layout is of; `None` for the whole model.
    division: Option<Arc<Division>>,
}

/// One tensor-parallel rank's part of the whole parameters of a checkpoint.
pub(crate) struct Division {
    part: TensorPart,
    /// By unit and parameter of the whole model.
    cuts: Vec<Vec<TensorCut>>,
    /// The parameters of the part.
    model: ModelSpec,
}

impl Division {
    pub(crate) fn new(
        units: &[UnitSpec],
        part: TensorPart,
        cut_of: impl Fn(&ParamSpec) -> TensorCut,
    ) -> Result<Self, ShardError> {
        let cuts_of = |unit: &UnitSpec| unit.params.iter().map(&cut_of).collect();
        let local = units.iter().map(|unit| part.unit(unit, &cut_of));
        Ok(Self {
            part,
            cuts: units.iter().map(cuts_of).collect(),
            model: ModelSpec {
                units: local.collect::<Result<_, _>>()?,
            },
        })
    }
}

impl<'a> View<'a> {
    /// Checks that `layout` is of the model of the checkpoint, or of the part.
    pub(crate) fn new(
        reader: &'a Reader,
        layout: &'a Layout,
        division: Option<Arc<Division>>,
    ) -> Result<Self, CkptError> {
        let wanted = ModelSpec::from(layout);
        let difference = match &division {
            None => difference_of_whole(reader, &wanted),
            Some(division) => division.model.difference(&wanted).map(|difference| {
                let part = division.part;
                let (rank, ranks) = (part.rank(), part.ranks());
                format!("in the part of tensor-parallel rank {rank} of {ranks}, {difference}")
            }),
        };
        match difference {
            Some(difference) => Err(CkptError::AnotherModel {
                path: reader.path().into(),
                difference,
            }),
            None => Ok(Self {
                reader,
                layout,
                division,
            }),
        }
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
        let placed = self.unit(unit)?;
        check_range(&placed.name, placed.numel_elems, &range, out.len())?;
        let mut reads = ReadList::new(self.reader, state, out)?;
        self.list_range(placed, range, &mut reads)?;
        reads.finish()
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
        let placed = self.unit(unit)?;
        self.check_rank(rank)?;
        if out.len() as u64 != placed.shard_elems {
            let what = format!("elements of the shard of unit {:?}", placed.name);
            return Err(CkptError::argument(what, placed.shard_elems, out.len()));
        }
        let mut reads = ReadList::new(self.reader, state, out)?;
        self.list_shard(placed, rank, &mut reads)?;
        reads.finish()
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
        self.check_rank(rank)?;
        let mut reads = ReadList::new(self.reader, state, out)?;
        for unit in self.layout.units() {
            self.list_shard(unit, rank, &mut reads)?;
        }
        reads.finish()
    }

    fn list_shard(
        &self,
        unit: &UnitLayout,
        rank: u64,
        reads: &mut ReadList<'_, '_>,
    ) -> Result<(), CkptError> {
        let mut at = 0;
        for run in runs(unit, rank) {
            reads.zeros(run.at - at)?;
            at = run.in_shard().end;
            self.list_range(unit, run.elems, reads)?;
        }
        reads.zeros(unit.shard_elems - at)
    }

    /// Lists the reads of elements of a unit, which must be within it.
    fn list_range(
        &self,
        unit: &UnitLayout,
        range: Range<u64>,
        reads: &mut ReadList<'_, '_>,
    ) -> Result<(), CkptError> {
        let first = unit
            .params
            .partition_point(|p| elems_of(unit, p).end <= range.start);
        for param in &unit.params[first..] {
            let elems = elems_of(unit, param);
            if elems.start >= range.end {
                break;
            }
            let start = elems.start.max(range.start) - elems.start;
            let end = elems.end.min(range.end) - elems.start;
            self.list_param(&param.name, start..end, reads)?;
        }
        Ok(())
    }

    /// Lists the reads of elements of a parameter, or of its part.
    fn list_param(
        &self,
        name: &str,
        range: Range<u64>,
        reads: &mut ReadList<'_, '_>,
    ) -> Result<(), CkptError> {
        let (id, _) = self.reader.param(name)?;
        let Some(division) = &self.division else {
            return self.reader.list(id, range, reads);
        };

        let whole = &self.reader.whole_units()[id.unit].params[id.param];
        let cut = division.cuts[id.unit][id.param];
        let runs = division.part.runs(whole, cut, range).map_err(|e| {
            CkptError::argument(format!("range of the part of {name:?}"), "one within it", e)
        })?;
        for run in runs {
            match run.in_whole {
                Some(in_whole) => self.reader.list(id, in_whole, reads)?,
                None => reads.zeros(run.in_part.end - run.in_part.start)?,
            }
        }
        Ok(())
    }

    fn check_rank(&self, rank: u64) -> Result<(), CkptError> {
        let ranks = self.layout.world_size();
        if rank >= ranks {
            return Err(CkptError::argument("rank", format!("below {ranks}"), rank));
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

/// The first difference between the whole model of a checkpoint and that of a layout.
fn difference_of_whole(reader: &Reader, wanted: &ModelSpec) -> Option<String> {
    if let Some(joined) = &reader.joined {
        let units = joined.units.clone();
        return ModelSpec { units }.difference(wanted);
    }
    let difference = reader.manifest.model.difference(wanted)?;
    let mut params = reader.params();
    let hint = match params.any(|param| is_part_name(&param.name)) {
        true => format!(
            "; it stores the parts of tensor-parallel ranks, but no {TENSOR_PARALLEL_JSON} that describes them: save with \
             the document of `TensorParallel::document`"
        ),
        false => String::new(),
    };
    Some(difference + &hint)
}

/// Whether a name ends as those of the first part in joined units: `@0/M`.
fn is_part_name(name: &str) -> bool {
    let ranks = name.rsplit_once("@0/").map(|(_, ranks)| ranks);
    ranks.is_some_and(|ranks| ranks.parse::<u64>().is_ok())
}
