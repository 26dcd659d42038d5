//! The matrices of a rank, and the exchange of their updates with other ranks.

use std::sync::Arc;

use zero_alloc::device::Device;
use zero_optim::{CommExchange, Matrices, MatrixParam};
use zero_shard::{GridLayout, ParamId, ParamPlacement, ParamSpec, TensorCut, TensorPart};

use crate::error::TrainError;
use crate::param_groups::ModelGroups;
use crate::rank::Rank;
use crate::settings::Settings;

impl<D: Device> Rank<D> {
    /// The matrices of this rank's part of the state, if there are any, and their exchange.
    pub(crate) fn matrices(&self) -> Result<Option<(Matrices, CommExchange<D>)>, TrainError> {
        let Some((comm, stream)) = &self.mesh.matrices else {
            return Ok(None);
        };
        let part = match &self.tensor {
            Some(tensor) => tensor.part(self.tensor_rank())?,
            None => TensorPart::whole(),
        };
        let whole_of = |param: &ParamPlacement| {
            let tensor = self.tensor.as_ref()?;
            tensor.param(&param.name).cloned()
        };
        let place = (self.index(), part);
        let matrices = matrices(&self.settings, &self.groups, &self.layouts, place, whole_of)?;
        let exchange = CommExchange::new(Arc::clone(comm), stream.clone());
        Ok(Some((matrices, exchange)))
    }
}

/// The matrices of data rank `index` with `part` of the model; `whole_of` returns a parameter
/// before it is cut, and its cut.
pub(crate) fn matrices(
    settings: &Settings,
    groups: &ModelGroups,
    layouts: &GridLayout,
    (index, part): (u64, TensorPart),
    whole_of: impl Fn(&ParamPlacement) -> Option<(ParamSpec, TensorCut)>,
) -> Result<Matrices, TrainError> {
    let replicated = !settings.stage.shards_optimizer();
    let by_unit = settings.offload.updates_on_host();
    let (layout, shard) = match replicated {
        true => (layouts.parts(), index),
        false => layouts.optimizer(index),
    };
    let of = |id: ParamId| {
        let group = groups.group_with_matrices(id)?;
        let param = &layout.units()[id.unit].params[id.param];
        let cut = whole_of(param);
        let shape = cut.as_ref().map_or(&param.shape, |(whole, _)| &whole.shape);
        Some(MatrixParam {
            group,
            matrices: settings.muon.matrices(&param.name, shape),
            cut,
        })
    };
    Ok(Matrices::new(
        layout,
        (shard, part),
        replicated,
        by_unit,
        of,
    )?)
}
