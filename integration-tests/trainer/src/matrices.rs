//! The ranks that share the state of matrices.

use std::sync::Arc;

use zero_alloc::device::Device;
use zero_comm::{CommError, Communicator};
use zero_shard::{GridLayout, Sharding};

use crate::error::TrainError;
use crate::param_groups::ModelGroups;
use crate::settings::Settings;

/// Refuses what Muon cannot do in these settings.
pub(crate) fn check(
    settings: &Settings,
    groups: &ModelGroups,
    is_host: bool,
) -> Result<(), TrainError> {
    let why = match () {
        () if !groups.has_matrices() => return Ok(()),
        () if !is_host => "has no products on CUDA yet: use --device cpu, or AdamW",
        () if settings.mesh.tensor_ranks.is_some_and(|ranks| ranks > 1) => {
            "sees whole matrices, and tensor parallelism cuts them: use one of the two"
        }
        () if settings.adapters.is_some() => {
            "is for the matrices of whole models, and adapters are trained: use AdamW with --lora"
        }
        () if settings.graphs => {
            "exchanges matrices in memory that is allocated and freed during the step, which CUDA graphs cannot record"
        }
        () => return Ok(()),
    };
    Err(TrainError::Usage(format!("Muon {why}")))
}

/// Splits the data ranks by the groups among which the optimizer's state is sharded, in the order
/// of shards. All ranks call it.
pub(crate) fn split_by_shards<D: Device>(
    data: &dyn Communicator<D>,
    layouts: &GridLayout,
    settings: &Settings,
) -> Result<Arc<dyn Communicator<D>>, CommError> {
    let is_sharded = settings.stage.shards_optimizer();
    let in_groups = is_sharded && layouts.sharding() == Sharding::Replicated;
    data.split_by(&|rank| {
        let rank = rank as u64;
        let shard = match is_sharded {
            true => layouts.optimizer(rank).1,
            false => rank,
        };
        let group = match in_groups {
            true => layouts.grid().group_of(rank),
            false => 0,
        };
        (group as usize, shard as usize)
    })
}
