//! The axes of the ranks.
//!
//! Consecutive ranks have the parts of tensor parallelism: with M of them, rank r has part r mod M.
//! The ranks with the same part are the *data ranks*, of which the rest of this text is: groups, over which the stage shards, and what is sharded between them.
//!
//! zero-shard's [`GridLayout`] has the layouts, and this module the communicators: with N ranks in
//! groups of K,
//!
//! | | over | when |
//! |---|---|---|
//! | gathers of parameters | a group | each use |
//! | reductions of gradients | a group; hpZ: all | each micro-batch |
//! | sum of a shard's gradients ([`Replicas::sum`]) | the N/K ranks with that shard; not hpZ | once a step |
//! | gather of a shard's new parameters ([`Replicas::gather`]) | those ranks; not HSDP | once a step |
//! | statistics, votes, checkpoints | all | as without groups |
//! | the model's collectives | consecutive ranks with the same micro-batches ([`Mesh::model`]) | in its passes |
//!
//! Without groups, the collectives over the data ranks may run in two levels ([`TwoLevel`]): within
//! machines, and between them. Each rank holds and sends as much as in one ring, and a machine
//! sends less. Parts are then in the order of `TwoLevel`, which is that of [`GridLayout::part_of`].
//!
//! A rank counts and saves its part of its shard, so that each element is in the norm once, and a
//! checkpoint has N files as without groups.

use std::sync::Arc;

use zero_alloc::Pool;
use zero_alloc::device::{AnySlice, Device, Reduced, Stream};
use zero_comm::{CommError, Communicator, Gather, Reduce, Traffic, TwoLevel};
use zero_kernels::Kernels;
use zero_shard::{Grid, GridLayout, Sharding};

use crate::error::TrainError;
use crate::mesh_settings::MeshSettings;
use crate::model::ModelRanks;
use crate::quantised::EncodedSums;
use crate::settings::Settings;

/// The communicators of a rank's axes.
pub(crate) struct Mesh<D: Device> {
    /// All ranks.
    world: Arc<dyn Communicator<D>>,
    /// The data ranks.
    pub(crate) data: Arc<dyn Communicator<D>>,
    /// Gathers parameters over the ranks over which they are sharded.
    pub(crate) gather: Gather<D>,
    /// Reduces gradients, as they are made, over the ranks over which they are sharded.
    pub(crate) reduce: Reduce<D>,
    /// The ranks with this rank's micro-batches.
    pub(crate) model: ModelRanks<D>,
    /// The ranks with this rank's shard; `None` if there is one group.
    pub(crate) replicas: Option<Replicas<D>>,
    /// The ranks among which the optimizer's state is sharded, with all their parts of tensor
    /// parallelism, if it updates whole matrices, and the stream of their exchanges.
    pub(crate) matrices: Option<(Arc<dyn Communicator<D>>, D::Stream)>,
    /// The communicator of `gather` and `reduce`, if it has two levels.
    two_level: Option<Arc<TwoLevel<D>>>,
    grid: Grid,
    settings: MeshSettings,
    /// Ranks of a machine.
    node_ranks: Option<u64>,
}

/// Bytes sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sent {
    /// By this rank, over all axes.
    pub(crate) rank: Traffic,
    /// By the ranks of its machine to other machines, without control data.
    pub(crate) between_bytes: u64,
}

impl Sent {
    /// The bytes since `earlier`.
    pub(crate) fn since(self, earlier: Self) -> Self {
        Self {
            rank: self.rank.since(earlier.rank),
            between_bytes: self.between_bytes - earlier.between_bytes,
        }
    }
}

impl std::ops::Add for Sent {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            rank: self.rank + other.rank,
            between_bytes: self.between_bytes + other.between_bytes,
        }
    }
}

/// The ranks that hold one shard.
#[derive(Clone)]
pub(crate) struct Replicas<D: Device> {
    /// Gathers a shard from the parts that replicas update.
    gather: Gather<D>,
    /// Sums a shard's gradients over the replicas.
    reduce: Reduce<D>,
    /// The stream of their collectives.
    pub(crate) stream: D::Stream,
    sharding: Sharding,
}

impl<D: Device> Mesh<D> {
    /// Splits `world` by `layouts`; all ranks call it. The collectives of replicas run on `stream`,
    /// or on a new one. Nothing is encoded.
    pub(crate) fn new(
        device: &D,
        world: Arc<dyn Communicator<D>>,
        layouts: &GridLayout,
        settings: &Settings,
        stream: Option<D::Stream>,
    ) -> Result<Self, TrainError> {
        let grid = layouts.grid();
        let node_ranks = settings.node_ranks.map(|ranks| ranks as u64);
        let stage = settings.stage;
        let settings = settings.mesh;
        let tensor = settings.tensor_ranks.unwrap_or(1);
        if let Some(node_ranks) = node_ranks {
            if !node_ranks.is_multiple_of(tensor as u64) {
                return Err(TrainError::Usage(format!(
                    "tensor parallelism over {tensor} ranks on machines of {node_ranks}: expected a number that \
                     divides the ranks of a machine"
                )));
            }
            grid.node_egress_bytes(node_ranks / tensor as u64, 0, 0, 0)?;
        }
        let data = match tensor {
            1 => Arc::clone(&world),
            _ => world.split_by(&|rank| (rank % tensor, rank / tensor))?,
        };
        let model = model_ranks(&world, &data, &settings)?;
        if layouts.sharding() == Sharding::Flat || grid.groups() == 1 {
            let two_level = match grid.groups() {
                1 => None,
                _ => Some(Arc::new(TwoLevel::new(&*data, grid.group_size() as usize)?)),
            };
            let all: Arc<dyn Communicator<D>> = match &two_level {
                Some(two_level) => two_level.clone(),
                None => Arc::clone(&data),
            };
            return Ok(Self {
                gather: Gather::new(Arc::clone(&all)),
                reduce: Reduce::of_stage(stage, all),
                world,
                data,
                model,
                replicas: None,
                matrices: None,
                two_level,
                grid,
                settings,
                node_ranks,
            });
        }

        let replica = |rank: usize| grid.group_of(rank as u64) as usize;
        let position = |rank: usize| grid.position_of(rank as u64) as usize;
        let group = data.split_by(&|rank| (replica(rank), position(rank)))?;
        let comm = data.split_by(&|rank| (position(rank), replica(rank)))?;
        let grads = match layouts.sharding() {
            Sharding::Secondary => {
                data.split_by(&|rank| (0, layouts.part_of(rank as u64) as usize))?
            }
            _ => Arc::clone(&group),
        };
        let stream = match stream {
            Some(stream) => stream,
            None => device.create_urgent_stream(&format!("rank {} replicas", world.rank()))?,
        };
        Ok(Self {
            world,
            data,
            gather: Gather::new(group),
            reduce: Reduce::of_stage(stage, grads),
            model,
            replicas: Some(Replicas {
                reduce: match layouts.sharding() {
                    Sharding::Replicated => Reduce::all(Arc::clone(&comm)),
                    _ => Reduce::scatter(Arc::clone(&comm)),
                },
                gather: Gather::new(comm),
                stream,
                sharding: layouts.sharding(),
            }),
            matrices: None,
            two_level: None,
            grid,
            settings,
            node_ranks,
        })
    }

    /// Makes parameters and gradients travel in the formats of `settings`; what is encoded in
    /// blocks adds its statistics to `sums`.
    pub(crate) fn encode(
        &mut self,
        settings: &Settings,
        kernels: &Arc<dyn Kernels<D>>,
        pool: &Pool<D>,
        sums: Option<EncodedSums>,
    ) -> Result<(), TrainError> {
        if let Some(codec) = settings.gather_codec {
            let coded = |gather: &Gather<D>| {
                let gather = gather.clone();
                gather.with_codec(codec, Arc::clone(kernels), pool.clone())
            };
            let counted = |gather: Gather<D>| match sums.map(|sums| sums.params) {
                Some(sums) => gather.with_sums(sums),
                None => gather,
            };
            self.gather = coded(&self.gather)?;
            match &mut self.replicas {
                // A group gathers values that replicas have encoded before; encoding them again
                // changes none.
                Some(replicas) if replicas.sharding != Sharding::Replicated => {
                    replicas.gather = counted(coded(&replicas.gather)?);
                }
                _ => self.gather = counted(self.gather.clone()),
            }
        }

        let Some(grads) = settings.quantised_grads else {
            return Ok(());
        };
        let quantised = |reduce: &Reduce<D>, hops, of_kind| {
            let reduce = reduce.clone();
            let reduce = reduce.quantised(hops, Arc::clone(kernels), pool.clone())?;
            Ok::<_, CommError>(match of_kind {
                Some(sums) => reduce.with_sums(sums),
                None => reduce,
            })
        };
        let first = match (&self.two_level, &self.replicas) {
            (Some(two_level), _) => two_level.levels()[0],
            (None, Some(replicas)) if replicas.sharding == Sharding::Secondary => {
                self.gather.comm()
            }
            _ => self.reduce.comm(),
        };
        let hops = std::iter::once((first, grads.within))
            .chain(self.between().map(|comm| (comm, grads.between)))
            .map(|(comm, format)| (Arc::clone(comm), format));
        self.reduce = quantised(&self.reduce, hops.collect(), sums.map(|sums| sums.grads))?;
        if let Some(replicas) = &mut self.replicas
            && replicas.sharding == Sharding::Hybrid
        {
            let hop = vec![(Arc::clone(replicas.reduce.comm()), grads.between)];
            replicas.reduce =
                quantised(&replicas.reduce, hop, sums.map(|sums| sums.replica_grads))?;
        }
        Ok(())
    }

    /// The ranks of the second hop of a quantised reduction over all data ranks.
    pub(crate) fn between(&self) -> Option<&Arc<dyn Communicator<D>>> {
        match (&self.two_level, &self.replicas) {
            (Some(two_level), _) => Some(two_level.levels()[1]),
            (None, Some(replicas)) if replicas.sharding == Sharding::Secondary => {
                Some(replicas.comm())
            }
            _ => None,
        }
    }

    /// The communicators of the axes, besides that of all ranks.
    fn axes(&self) -> impl Iterator<Item = &Arc<dyn Communicator<D>>> {
        let hpz = |replicas: &&Replicas<D>| replicas.sharding == Sharding::Secondary;
        let replicas = self.replicas.as_ref();
        replicas
            .map(|replicas| [self.gather.comm(), replicas.comm()])
            .into_iter()
            .flatten()
            .chain(replicas.filter(hpz).map(|_| self.reduce.comm()))
            .chain(self.two_level.iter().map(|_| self.gather.comm()))
            .chain(self.model.tensor.iter().map(|_| &self.data))
            .chain(&self.model.tensor)
            .chain(&self.model.sequence)
            .chain(self.matrices.iter().map(|(comm, _)| comm))
    }

    /// The bytes that this rank has sent.
    pub(crate) fn sent(&self) -> Sent {
        let axes = self.axes().map(|comm| comm.traffic());
        Sent {
            rank: axes.fold(self.world.traffic(), |sum, traffic| sum + traffic),
            between_bytes: self.between_bytes(),
        }
    }

    /// Bytes that the ranks of this machine have sent to others, each as many as this one.
    fn between_bytes(&self) -> u64 {
        let Some(node_ranks) = self.node_ranks else {
            return 0;
        };
        // Of collectives that are rings, and of all-to-alls.
        let of_data = |sent: Traffic| {
            let exchanged = sent.all_to_all_bytes;
            [
                sent.total_bytes() - sent.control_bytes - exchanged,
                exchanged,
            ]
        };
        let plus = |[a, b]: [u64; 2], [c, d]: [u64; 2]| [a + c, b + d];
        let data = |comm: &Arc<dyn Communicator<D>>| of_data(comm.traffic());
        // Tensor parallelism is within a machine; each of its ranks has other data ranks.
        let tensor = self
            .model
            .tensor
            .as_ref()
            .map_or(1, |comm| comm.world_size());
        let tensor = tensor as u64;
        let over_all = match tensor {
            1 => data(&self.world),
            _ => data(&self.data),
        };
        let (all, group, replicas) = match (&self.replicas, &self.two_level) {
            (None, None) => (over_all, [0; 2], [0; 2]),
            (None, Some(two_level)) => {
                let sent = two_level.traffic_by_level();
                let [ring, within, between] = [sent.ring, sent.within, sent.between].map(of_data);
                (plus(over_all, ring), within, between)
            }
            (Some(replicas), _) => {
                let hpz = replicas.sharding == Sharding::Secondary;
                let reduced = match hpz {
                    true => data(self.reduce.comm()),
                    false => [0; 2],
                };
                let over_all = plus(over_all, reduced);
                (over_all, data(self.gather.comm()), data(replicas.comm()))
            }
        };
        let of_node = node_ranks / tensor;
        let in_rings = self
            .grid
            .node_egress_bytes(of_node, all[0], group[0], replicas[0]);
        let exchanged = [all[1], group[1], replicas[1]];
        let exchanged = self.grid.node_exchange_bytes(of_node, exchanged);
        let bytes = in_rings.and_then(|bytes| Ok((bytes + exchanged?) * tensor));
        let sequence = self.model.sequence.as_ref();
        let of_sequences = sequence.map_or(0, |comm| data(comm).iter().sum());
        let of_node = (node_ranks / tensor) as usize;
        let of_sequences = self.settings.sequence_egress_bytes(of_node, of_sequences);
        let of_sequences = of_sequences.saturating_mul(tensor);
        // The sizes were checked when the mesh was made.
        bytes.unwrap_or(u64::MAX).saturating_add(of_sequences)
    }

    /// The first failure of an axis.
    pub(crate) fn failure(&self) -> Option<CommError> {
        let of_axes = || self.axes().find_map(|comm| comm.failure());
        self.world.failure().or_else(of_axes)
    }

    /// The replicas, if each updates a part of the shard only.
    pub(crate) fn sharing_update(&self) -> Option<&Replicas<D>> {
        let replicas = self.replicas.as_ref();
        replicas.filter(|replicas| replicas.sharding != Sharding::Replicated)
    }

    /// The replicas, if each reduces the gradients of its group only.
    pub(crate) fn with_own_sums(&self) -> Option<&Replicas<D>> {
        let replicas = self.replicas.as_ref();
        replicas.filter(|replicas| replicas.sharding != Sharding::Secondary)
    }
}

/// The ranks with this rank's micro-batches; all ranks of `world` call it.
fn model_ranks<D: Device>(
    world: &Arc<dyn Communicator<D>>,
    data: &Arc<dyn Communicator<D>>,
    settings: &MeshSettings,
) -> Result<ModelRanks<D>, TrainError> {
    let consecutive = |of: &Arc<dyn Communicator<D>>, ranks: Option<usize>| match ranks {
        None | Some(1) => Ok(None),
        Some(ranks) => of.split_by(&|rank| (rank / ranks, rank % ranks)).map(Some),
    };
    Ok(ModelRanks {
        tensor: consecutive(world, settings.tensor_ranks)?,
        sequence: consecutive(data, settings.sequence_ranks)?,
    })
}

impl<D: Device> Replicas<D> {
    /// The replicas of this rank's shard.
    pub(crate) fn comm(&self) -> &Arc<dyn Communicator<D>> {
        self.gather.comm()
    }

    /// Sums the gradients of a shard, of which each replica has `sum`, in place. Returns what this
    /// rank updates by: the sum, or its part of it.
    pub(crate) fn sum(&self, sum: &Reduced<D>) -> Result<Reduced<D>, TrainError> {
        // SAFETY: used by the collective below, on the stream; the result takes the place of `sum`.
        let shard = unsafe { sum.slice_on(&self.stream) }?;
        let updated = self.reduce.sum_in_place(&self.stream, shard)?;
        // SAFETY: written before the event on the stream, which waits for all earlier writes. The
        // optimizer waits for the event, and what writes the shard next is ordered after it.
        Ok(unsafe { Reduced::new(updated, self.stream.record()?) })
    }

    /// Gathers a shard from its parts, each updated by a replica before `updated`. Returns the
    /// event after which the shard is whole.
    pub(crate) fn gather(
        &self,
        updated: &D::Event,
        shard: AnySlice,
    ) -> Result<D::Event, CommError> {
        self.stream.wait(updated)?;
        self.gather.enqueue_others(&self.stream, shard)?;
        Ok(self.stream.record()?)
    }

    /// This replica's part of a shard.
    pub(crate) fn part_of(&self, shard: AnySlice) -> AnySlice {
        let len = shard.len() / self.comm().world_size();
        let start = self.comm().rank() * len;
        shard.slice(start..start + len)
    }
}
