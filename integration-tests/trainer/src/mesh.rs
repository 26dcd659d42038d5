//! The axes of the ranks: the group over which a rank's states are sharded, and its replicas.
//!
//! With N ranks in groups of K, rank = replica x K + position. The ranks of a group hold the shards
//! of one copy of the states, and the ranks of one position hold the same shard:
//!
//! | | over | when |
//! |---|---|---|
//! | gathers of parameters, reduce-scatter of gradients | the K ranks of a group | each use; each micro-batch |
//! | sum of a shard's gradients | the N/K replicas | once a step, on a stream of its own ([`Replicas::sum`]) |
//! | gather of a shard's new parameters, if replicas share the update | the N/K replicas | once a step ([`Replicas::gather`]) |
//! | statistics, votes, checkpoints | all N | as without groups |
//!
//! The whole storage of a unit is cut into N *parts*, and K shards of N/K consecutive parts each.
//! Replica r counts and saves part r of its shard, so that each element is in the norm once, and a
//! checkpoint has N files as without groups. With [`OptimizerShards::World`] it also updates no
//! more than that part.

use std::ops::Range;
use std::sync::Arc;

use zero_alloc::device::{AnySlice, Device, Reduced, Stream};
use zero_comm::{CommError, Communicator, ReduceOp, Traffic};
use zero_shard::{Grid, Layout, ShardError, UnitSpec};

use crate::error::TrainError;
use crate::launch::SHARD_ALIGN_ELEMS;

/// The ranks that share the optimizer state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OptimizerShards {
    /// Those of a group: each replica updates its copy of the parameters.
    #[default]
    Group,
    /// All: each replica updates a part of the shard, and gathers the others.
    World,
}

/// The axes of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeshSettings {
    /// Consecutive ranks over which states are sharded; `None`: all.
    pub shard_group: Option<usize>,
    /// The ranks that share the optimizer state.
    pub optimizer: OptimizerShards,
}

impl MeshSettings {
    /// The groups of `ranks` ranks.
    ///
    /// # Errors
    /// The size of a group does not divide the number of ranks.
    pub fn grid(&self, ranks: u64) -> Result<Grid, ShardError> {
        Grid::new(ranks, self.shard_group.map_or(ranks, |group| group as u64))
    }
}

/// The layouts of a model over the axes.
#[derive(Clone, Debug)]
pub struct MeshLayout {
    /// The groups.
    pub grid: Grid,
    /// Over the ranks of a group: parameters and gradients.
    pub group: Arc<Layout>,
    /// Over all ranks: what a rank counts and saves.
    pub parts: Arc<Layout>,
    optimizer: OptimizerShards,
}

impl MeshLayout {
    /// Lays out `units` over `ranks` ranks.
    ///
    /// # Errors
    /// As [`MeshSettings::grid`] and [`Layout::new`].
    pub fn new(units: &[UnitSpec], ranks: u64, mesh: &MeshSettings) -> Result<Self, ShardError> {
        let grid = mesh.grid(ranks)?;
        let parts = Layout::new(units, ranks, SHARD_ALIGN_ELEMS)?;
        let group = parts.regroup(grid.group_size())?;
        Ok(Self {
            grid,
            group: Arc::new(group),
            parts: Arc::new(parts),
            optimizer: mesh.optimizer,
        })
    }

    /// The shard of a group that `rank` holds.
    pub fn shard(&self, rank: u64) -> u64 {
        self.grid.position_of(rank)
    }

    /// The part of all ranks' that `rank` counts and saves: within its shard.
    pub fn part(&self, rank: u64) -> u64 {
        self.shard(rank) * self.grid.groups() + self.grid.group_of(rank)
    }

    /// The rank whose part is `part`.
    pub fn rank_of_part(&self, part: u64) -> u64 {
        let replicas = self.grid.groups();
        part % replicas * self.grid.group_size() + part / replicas
    }

    /// The layout of the optimizer state, and the shard of `rank` in it.
    pub fn updated(&self, rank: u64) -> (&Arc<Layout>, u64) {
        match self.optimizer {
            OptimizerShards::Group => (&self.group, self.shard(rank)),
            OptimizerShards::World => (&self.parts, self.part(rank)),
        }
    }

    /// The ranks that hold the shard of `rank`, one in each group.
    pub(crate) fn peers(&self, rank: u64) -> Vec<usize> {
        let peers = self.grid.peer_ranks(rank);
        peers.map(|peer| peer as usize).collect()
    }

    /// The range of the flat parameter that `rank` counts and saves.
    pub(crate) fn counted(&self, unit: usize, rank: u64) -> Range<u64> {
        self.parts.units()[unit].shard(self.part(rank))
    }
}

/// The communicators of a rank's axes.
pub(crate) struct Mesh<D: Device> {
    /// All ranks.
    world: Arc<dyn Communicator<D>>,
    /// The ranks of this rank's group.
    pub(crate) group: Arc<dyn Communicator<D>>,
    /// The ranks with this rank's shard; `None` if there is one group.
    pub(crate) replicas: Option<Replicas<D>>,
}

/// The ranks that hold one shard.
#[derive(Clone)]
pub(crate) struct Replicas<D: Device> {
    pub(crate) comm: Arc<dyn Communicator<D>>,
    /// The stream of their collectives.
    pub(crate) stream: D::Stream,
    optimizer: OptimizerShards,
}

impl<D: Device> Mesh<D> {
    /// Splits `world` by `grid`; all ranks call it.
    pub(crate) fn new(
        device: &D,
        world: Arc<dyn Communicator<D>>,
        grid: Grid,
        optimizer: OptimizerShards,
    ) -> Result<Self, TrainError> {
        if grid.groups() == 1 {
            return Ok(Self {
                group: Arc::clone(&world),
                world,
                replicas: None,
            });
        }
        let rank = world.rank() as u64;
        let (replica, position) = (grid.group_of(rank), grid.position_of(rank));
        let split = |color, key| {
            let of_color = world.split(Some(color), key)?;
            of_color.ok_or_else(|| TrainError::State("internal error: a split gave none".into()))
        };
        let group = split(replica, position)?;
        let comm = split(position, replica)?;
        let stream = device.create_urgent_stream(&format!("rank {rank} replicas"))?;
        Ok(Self {
            world,
            group,
            replicas: Some(Replicas {
                comm,
                stream,
                optimizer,
            }),
        })
    }

    /// The replicas, if each updates a part of the shard only.
    pub(crate) fn sharing_update(&self) -> Option<&Replicas<D>> {
        let replicas = self.replicas.as_ref();
        replicas.filter(|replicas| replicas.optimizer == OptimizerShards::World)
    }

    /// Bytes that this rank has sent over all axes.
    pub(crate) fn traffic(&self) -> Traffic {
        let of_axes = self
            .replicas
            .as_ref()
            .map(|replicas| self.group.traffic() + replicas.comm.traffic());
        self.world.traffic() + of_axes.unwrap_or_default()
    }

    /// The first failure of an axis.
    pub(crate) fn failure(&self) -> Option<CommError> {
        let replicas = self.replicas.as_ref();
        self.world
            .failure()
            .or_else(|| self.group.failure())
            .or_else(|| replicas.and_then(|replicas| replicas.comm.failure()))
    }
}

impl<D: Device> Replicas<D> {
    /// Sums the gradients of a shard, of which each replica has `sum`, in place. Returns what this
    /// rank updates by: the sum, or its part of it.
    pub(crate) fn sum(&self, sum: &Reduced<D>) -> Result<Reduced<D>, TrainError> {
        let shard = sum.wait_on(&self.stream)?;
        let (comm, stream) = (&self.comm, &self.stream);
        let updated = match self.optimizer {
            OptimizerShards::World => {
                let own = self.part_of(shard);
                comm.reduce_scatter(stream, shard, own, ReduceOp::Sum)?;
                own
            }
            OptimizerShards::Group => {
                comm.all_reduce(stream, shard, shard, ReduceOp::Sum)?;
                shard
            }
        };
        // SAFETY: written before the event on the stream, which waits for all earlier writes. The
        // optimizer waits for the event, and what writes the shard next is ordered after it.
        Ok(unsafe { Reduced::new(updated, stream.record()?) })
    }

    /// Gathers a shard from its parts, each updated by a replica before `updated`. Returns the
    /// event after which the shard is whole.
    pub(crate) fn gather(
        &self,
        updated: &D::Event,
        shard: AnySlice,
    ) -> Result<D::Event, CommError> {
        self.stream.wait(updated)?;
        self.comm
            .all_gather(&self.stream, self.part_of(shard), shard)?;
        Ok(self.stream.record()?)
    }

    /// This replica's part of a shard.
    pub(crate) fn part_of(&self, shard: AnySlice) -> AnySlice {
        let len = shard.len() / self.comm.world_size();
        let start = self.comm.rank() * len;
        shard.slice(start..start + len)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fixtures::units;

    proptest! {
        /// Each element is counted once, within what the rank updates, which is within its shard.
        #[test]
        fn parts_tile_the_units(group in 1_u64..5, replicas in 1_u64..5, world: bool) {
            let optimizer = if world { OptimizerShards::World } else { OptimizerShards::Group };
            let mesh = MeshSettings { shard_group: Some(group as usize), optimizer };
            let ranks = group * replicas;
            let layout = MeshLayout::new(&units(), ranks, &mesh).unwrap();

            for unit in 0..layout.group.units().len() {
                let mut end = 0;
                for part in 0..ranks {
                    let rank = layout.rank_of_part(part);
                    prop_assert_eq!(layout.part(rank), part);
                    let counted = layout.counted(unit, rank);
                    prop_assert_eq!(counted.start, end);
                    end = counted.end;

                    let shard = layout.group.units()[unit].shard(layout.shard(rank));
                    let (updated, index) = layout.updated(rank);
                    let updated = updated.units()[unit].shard(index);
                    prop_assert!(shard.start <= updated.start && updated.end <= shard.end);
                    prop_assert!(updated.start <= counted.start && counted.end <= updated.end);
                    prop_assert!(!world || updated == counted);
                }
                prop_assert_eq!(end, layout.group.units()[unit].padded_elems);
            }
        }
    }
}
