//! The units of a run: how they are cut among the ranks of tensor parallelism, sharded over data
//! ranks, and saved.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use serde_json::Value;
use zero_alloc::device::Device;
use zero_ckpt::TensorParallel;
use zero_shard::{GridLayout, Layout, ParamSpec, TensorCut, TensorPart, UnitSpec, joined_units};

use crate::error::TrainError;
use crate::model::ModelError;
use crate::settings::{SHARD_ALIGN_ELEMS, Settings};
use crate::workload::{InitialWeights, Workload};

/// The layouts that all ranks share.
#[derive(Clone, Debug)]
pub(crate) struct RunUnits {
    /// Over the data ranks: the part of the units that a rank of tensor parallelism has, of the same
    /// sizes on all of them.
    pub(crate) layouts: Arc<GridLayout>,
    /// The layout of checkpoints, of all ranks.
    pub(crate) saved: Arc<Layout>,
    pub(crate) tensor: Option<Arc<CutUnits>>,
}

/// The units before they are cut.
#[derive(Debug)]
pub(crate) struct CutUnits {
    /// Ranks of tensor parallelism.
    ranks: u64,
    /// The saved units before they are cut.
    pub(crate) whole: Vec<UnitSpec>,
    params: HashMap<String, (ParamSpec, TensorCut)>,
    /// Elements of a rank's part of each unit that other ranks do not have: the first ones.
    cut_elems: Vec<u64>,
    /// The name and content of the document that says in a checkpoint how they are cut.
    document: (String, Value),
}

impl RunUnits {
    /// The units of `workload` on `ranks` ranks.
    pub(crate) fn new<D: Device>(
        settings: &Settings,
        workload: &dyn Workload<D>,
        ranks: usize,
    ) -> Result<Self, TrainError> {
        let data_ranks = settings.mesh.data_ranks(ranks)? as u64;
        let tensor_ranks = settings.mesh.tensor_ranks.unwrap_or(1) as u64;
        let whole = workload.units();
        if tensor_ranks == 1 {
            return Self::of(settings, &whole, data_ranks);
        }

        let cut_of = |param: &ParamSpec| workload.tensor_cut(param);
        let first = TensorPart::new(0, tensor_ranks)?;
        let units: Vec<_> = whole
            .iter()
            .map(|unit| first.unit(unit, cut_of))
            .collect::<Result<_, _>>()?;
        let cut_elems: Vec<_> = whole
            .iter()
            .map(|unit| first.cut_elems(unit, cut_of))
            .collect::<Result<_, _>>()?;
        if cut_elems.iter().all(|&elems| elems == 0) {
            return Err(TrainError::Usage(
                "this model has no tensor parallelism: none of its parameters is cut".to_owned(),
            ));
        }

        let saved = settings.saved_units(units.len());
        let joined = joined_units(&units[..saved], tensor_ranks, data_ranks, SHARD_ALIGN_ELEMS)?;
        let saved = &whole[..saved];
        let (name, document) = TensorParallel::new(saved, tensor_ranks, cut_of)?.document()?;
        let params = whole.iter().flat_map(|unit| &unit.params);
        let params = params.map(|param| (param.name.clone(), (param.clone(), cut_of(param))));
        let tensor = CutUnits {
            ranks: tensor_ranks,
            params: params.collect(),
            whole: saved.to_vec(),
            cut_elems,
            document: (name, document),
        };
        Ok(Self {
            saved: Arc::new(Layout::new(&joined, ranks as u64, SHARD_ALIGN_ELEMS)?),
            tensor: Some(Arc::new(tensor)),
            ..Self::of(settings, &units, data_ranks)?
        })
    }

    /// Units that are not cut.
    pub(crate) fn of(
        settings: &Settings,
        units: &[UnitSpec],
        ranks: u64,
    ) -> Result<Self, TrainError> {
        let layout = |units| Layout::with_options(units, ranks, settings.layout_options());
        Ok(Self {
            layouts: Arc::new(settings.mesh.layouts(&layout(units)?)?),
            saved: Arc::new(layout(&units[..settings.saved_units(units.len())])?),
            tensor: None,
        })
    }
}

impl CutUnits {
    /// A parameter before it is cut, and its cut.
    pub(crate) fn param(&self, name: &str) -> Option<&(ParamSpec, TensorCut)> {
        self.params.get(name)
    }

    /// How a parameter is cut.
    pub(crate) fn cut_of(&self, param: &ParamSpec) -> TensorCut {
        let cut = self.param(&param.name).map(|(_, cut)| *cut);
        cut.unwrap_or(TensorCut::Replicated)
    }

    /// The name and content of the document of a checkpoint.
    pub(crate) fn document(&self) -> (String, Value) {
        self.document.clone()
    }

    /// The part of rank `rank` of tensor parallelism.
    pub(crate) fn part(&self, rank: usize) -> Result<TensorPart, TrainError> {
        Ok(TensorPart::new(rank as u64, self.ranks)?)
    }

    /// The elements of `range` of a rank's part of `unit` that other ranks do not have.
    pub(crate) fn cut_in(&self, unit: usize, range: Range<u64>) -> Range<u64> {
        let end = range.end.min(self.cut_elems[unit]).max(range.start);
        range.start..end
    }

    /// The initial weights of `part` of the parameters.
    pub(crate) fn weights<'a>(
        &'a self,
        part: TensorPart,
        source: &'a mut InitialWeights<'_>,
    ) -> impl FnMut(&str, Range<u64>, &mut [f32]) -> Result<(), ModelError> + 'a {
        move |name, range, out| {
            let (param, cut) = self
                .param(name)
                .ok_or_else(|| ModelError::from(format!("the model has no parameter {name:?}")))?;
            for run in part.runs(param, *cut, range.clone())? {
                let at = |elem: u64| (elem - range.start) as usize;
                let values = &mut out[at(run.in_part.start)..at(run.in_part.end)];
                match run.in_whole {
                    Some(in_whole) => source(name, in_whole, values)?,
                    None => values.fill(0.0),
                }
            }
            Ok(())
        }
    }
}
