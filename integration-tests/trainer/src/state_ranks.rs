//! The ranks that share the state of matrices.

use std::sync::Arc;

use zero_alloc::device::Device;
use zero_comm::{CommError, Communicator};
use zero_shard::{GridLayout, Sharding};

use crate::error::TrainError;
use crate::param_groups::ModelGroups;
use crate::settings::Settings;

/// Refuses what Muon cannot do in these settings.
pub(crate) fn check(settings: &Settings, groups: &ModelGroups) -> Result<(), TrainError> {
    let why = match () {
        () if !groups.has_matrices() => return Ok(()),
        () if settings.adapters.is_some() => {
            "is for the matrices of whole models, and adapters are trained: use AdamW with --lora"
        }
        () if settings.graphs => {
            "exchanges matrices in memory that is allocated and freed during the step, which CUDA graphs cannot record: use --cuda-graph=false"
        }
        () => return Ok(()),
    };
    Err(TrainError::Usage(format!("Muon {why}")))
}

/// Splits all ranks by the groups among which the optimizer's state is sharded, in the order of
/// shards, and of one shard those of tensor parallelism. All ranks call it.
pub(crate) fn split_by_shards<D: Device>(
    world: &dyn Communicator<D>,
    layouts: &GridLayout,
    settings: &Settings,
) -> Result<Arc<dyn Communicator<D>>, CommError> {
    let is_sharded = settings.stage.shards_optimizer();
    let in_groups = is_sharded && layouts.sharding() == Sharding::Replicated;
    let parts = settings.mesh.tensor_ranks.unwrap_or(1);
    world.split_by(&|rank| {
        let data_rank = (rank / parts) as u64;
        let shard = match is_sharded {
            true => layouts.optimizer(data_rank).1,
            false => data_rank,
        };
        let group = match in_groups {
            true => layouts.grid().group_of(data_rank),
            false => 0,
        };
        (group as usize, shard as usize * parts + rank % parts)
    })
}
