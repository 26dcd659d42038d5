//! The document of a tensor-parallel run: the whole parameters of a model of which a checkpoint
//! stores the parts of all ranks.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use zero_shard::{ParamSpec, ShardError, TensorCut, TensorPart, UnitSpec, joined_units};

use crate::CkptError;

/// Name of the document in a checkpoint.
pub const TENSOR_PARALLEL_JSON: &str = "tensor_parallel.json";

/// The whole model of a tensor-parallel run, and how its parameters were cut. A checkpoint with
/// this document stores the [joined units](zero_shard::joined_units) of the parts;
/// [`Reader`](crate::Reader) finds it and reads whole parameters, or parts for any number of ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct TensorParallel {
    /// Number of tensor-parallel ranks.
    pub ranks: u64,
    /// The units of the model before they were cut, in forward order.
    pub units: Vec<TensorUnit>,
}

/// A unit of the whole model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct TensorUnit {
    /// Name of the unit.
    pub name: String,
    /// Its parameters, in the order of the whole model.
    pub params: Vec<TensorParam>,
}

/// A parameter of the whole model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct TensorParam {
    /// Its name.
    pub name: String,
    /// Its whole shape, without the padding of its parts.
    pub shape: Vec<u64>,
    /// How it was cut.
    pub cut: TensorCut,
}

impl TensorParallel {
    /// Describes `units`, those of the whole model, cut over `ranks` tensor-parallel ranks.
    ///
    /// # Errors
    /// No ranks, or a parameter that cannot be cut so; see [`TensorPart::shape`].
    pub fn new(
        units: &[UnitSpec],
        ranks: u64,
        cut_of: impl Fn(&ParamSpec) -> TensorCut,
    ) -> Result<Self, ShardError> {
        let part = TensorPart::new(0, ranks)?;
        let param = |param: &ParamSpec| {
            let cut = cut_of(param);
            part.shape(param, cut).map(|_| TensorParam {
                name: param.name.clone(),
                shape: param.shape.clone(),
                cut,
            })
        };
        let unit = |unit: &UnitSpec| {
            Ok(TensorUnit {
                name: unit.name.clone(),
                params: unit.params.iter().map(param).collect::<Result<_, _>>()?,
            })
        };
        Ok(Self {
            ranks,
            units: units.iter().map(unit).collect::<Result<_, _>>()?,
        })
    }

    /// The entry for [`SaveMeta::documents`](crate::SaveMeta::documents): the name and the content.
    ///
    /// # Errors
    /// It cannot be written as JSON.
    pub fn document(&self) -> Result<(String, Value), CkptError> {
        let content = serde_json::to_value(self).map_err(|e| CkptError::BadFile {
            path: TENSOR_PARALLEL_JSON.into(),
            why: e.to_string(),
        })?;
        Ok((TENSOR_PARALLEL_JSON.to_owned(), content))
    }

    /// The units to save: the [joined units](zero_shard::joined_units) of all parts, each sharded
    /// over `data_ranks` ranks. Their layout has `ranks * data_ranks` ranks and the same alignment.
    ///
    /// # Errors
    /// A parameter cannot be cut so, or as [`zero_shard::joined_units`].
    pub fn joined_units(
        &self,
        data_ranks: u64,
        align_elems: u64,
    ) -> Result<Vec<UnitSpec>, ShardError> {
        let local = self.local_units()?;
        joined_units(&local, self.ranks, data_ranks, align_elems)
    }

    /// The units of the whole model.
    pub(crate) fn whole_units(&self) -> Vec<UnitSpec> {
        let param = |p: &TensorParam| ParamSpec::new(p.name.as_str(), p.shape.as_slice());
        let unit = |u: &TensorUnit| {
            let params: Vec<_> = u.params.iter().map(param).collect();
            UnitSpec::new(u.name.as_str(), params)
        };
        self.units.iter().map(unit).collect()
    }

    /// The units of one part, with the names of the whole parameters.
    pub(crate) fn local_units(&self) -> Result<Vec<UnitSpec>, ShardError> {
        let part = TensorPart::new(0, self.ranks)?;
        let params = self.units.iter().flat_map(|unit| &unit.params);
        let cuts: HashMap<&str, TensorCut> = params.map(|p| (p.name.as_str(), p.cut)).collect();
        let cut_of = |param: &ParamSpec| {
            let cut = cuts.get(param.name.as_str()).copied();
            cut.unwrap_or(TensorCut::Replicated)
        };
        let whole = self.whole_units();
        whole.iter().map(|unit| part.unit(unit, cut_of)).collect()
    }
}
