//! Reading in the layout of the loading run, which may differ from that of the saving run.

use std::ops::Range;
use std::sync::Arc;

use zero_shard::{Layout, ParamSpec, TensorCut, TensorPart, UnitLayout};

use crate::format::runs::{elems_of, runs};
use crate::format::tensor_folder::check_range;
use crate::format::tensor_parallel::TENSOR_PARALLEL_JSON;
use crate::load::division::Division;
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

impl Reader {
    /// A view of this checkpoint in another layout of the same model, or of the part that
    /// [`Reader::of_part`] has set.
    ///
    /// # Errors
    /// [`CkptError::AnotherModel`] if parameters have other names or shapes.
    pub fn view<'a>(&'a self, layout: &'a Layout) -> Result<View<'a>, CkptError> {
        View::new(self, layout, self.division.clone())
    }

    /// A view of one tensor-parallel rank's part of this checkpoint, which was saved by any number
    /// of tensor-parallel ranks. `layout` is that of the part, with the names of the whole
    /// parameters and the shapes of [`TensorPart::unit`]; `cut_of` returns the cut of a whole
    /// parameter over the ranks of `part`. Padding in the part of a parameter is set to zero.
    ///
    /// # Errors
    /// [`CkptError::NoPart`] if a parameter cannot be cut so, [`CkptError::AnotherModel`] if
    /// parameters have other names or shapes.
    pub fn view_of_part<'a>(
        &'a self,
        layout: &'a Layout,
        part: TensorPart,
        cut_of: impl Fn(&ParamSpec) -> TensorCut,
    ) -> Result<View<'a>, CkptError> {
        let division = self.divide(part, cut_of)?;
        View::new(self, layout, division)
    }

    /// Makes [`Reader::view`] a view of one tensor-parallel rank's part, as
    /// [`Reader::view_of_part`]: for code that loads the state of a layout and does not know of
    /// tensor parallelism. Parameters that are read by name stay whole.
    ///
    /// # Errors
    /// [`CkptError::NoPart`] if a parameter cannot be cut so.
    pub fn of_part(
        mut self,
        part: TensorPart,
        cut_of: impl Fn(&ParamSpec) -> TensorCut,
    ) -> Result<Self, CkptError> {
        self.division = self.divide(part, cut_of)?;
        Ok(self)
    }

    /// Makes [`Reader::view`] accept layouts with more units than the checkpoint: of a view's layout
    /// only the first `units` units are in the checkpoint, and reading others is an error.
    #[must_use]
    pub fn of_first_units(mut self, units: usize) -> Self {
        self.first_units = Some(units);
        self
    }

    /// The division of the whole parameters into `part` and others; `None` for the whole model.
    fn divide(
        &self,
        part: TensorPart,
        cut_of: impl Fn(&ParamSpec) -> TensorCut,
    ) -> Result<Option<Arc<Division>>, CkptError> {
        if part.ranks() == 1 {
            return Ok(None);
        }
        let division =
            Division::new(self.whole_units(), part, cut_of).map_err(|e| CkptError::NoPart {
                path: self.path().into(),
                rank: part.rank(),
                ranks: part.ranks(),
                why: e.to_string(),
            })?;
        Ok(Some(Arc::new(division)))
    }
}

impl<'a> View<'a> {
    /// Checks that `layout` is of the model of the checkpoint, or of the part.
    pub(crate) fn new(
        reader: &'a Reader,
        layout: &'a Layout,
        division: Option<Arc<Division>>,
    ) -> Result<Self, CkptError> {
        let mut wanted = ModelSpec::from(layout);
        wanted
            .units
            .truncate(reader.first_units.unwrap_or(usize::MAX));
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
