//! The part of a model that one tensor-parallel rank has.

use zero_shard::{ParamSpec, ShardError, TensorCut, TensorPart, UnitSpec};

use crate::ModelSpec;

/// One tensor-parallel rank's part of the whole parameters of a checkpoint.
pub(crate) struct Division {
    pub(super) part: TensorPart,
    /// By unit and parameter of the whole model.
    pub(super) cuts: Vec<Vec<TensorCut>>,
    /// The parameters of the part.
    pub(super) model: ModelSpec,
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
