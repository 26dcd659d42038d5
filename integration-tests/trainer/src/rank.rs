//! A rank's resources: streams, memory, communicator and kernels, and the layout that all ranks
//! share.

use std::ops::Range;
use std::sync::Arc;

use zero_alloc::Pool;
use zero_alloc::device::{Device, DeviceKind, Memory, Stream};
use zero_alloc::host::{HostDevice, Timeline};
use zero_comm::Communicator;
use zero_kernels::Kernels;
use zero_kernels::host::HostKernels;
use zero_optim::ParamGroups;
use zero_shard::{GridLayout, Layout, Sharding};

use crate::error::TrainError;
use crate::mesh::Mesh;
use crate::model::Pass;
use crate::param_groups::ModelGroups;
use crate::settings::Settings;
use crate::stages::frozen::FrozenUnits;
use crate::state_ranks::{self, split_by_shards};
use crate::step::quant_sums::QuantSums;
use crate::step::replay::Record;
use crate::units::{CutUnits, RunUnits};

/// The host's side of a device.
pub(crate) struct HostSide<D: Device> {
    /// Memory for host operations and for copies to and from the device.
    pub(crate) memory: Arc<dyn Memory>,
    /// Records a graph, if the device supports it.
    pub(crate) record: Option<Record<D>>,
    /// Operations of the host.
    pub(crate) kernels: Arc<dyn Kernels<HostDevice>>,
    /// Operations of the update of state on NVMe.
    pub(crate) nvme_kernels: Arc<dyn Kernels<HostDevice>>,
    /// Host memory of offloaded state.
    pub(crate) plain: Pool<HostDevice>,
    /// Host memory for copies from and to the device.
    pub(crate) pinned: Pool<HostDevice>,
}

impl<D: Device> HostSide<D> {
    /// With pools of `host`, and of `memory` for copies.
    pub(crate) fn new(
        host: &HostDevice,
        memory: Arc<dyn Memory>,
        record: Option<Record<D>>,
        threads: usize,
    ) -> Result<Self, TrainError> {
        let kernels: Arc<dyn Kernels<HostDevice>> = Arc::new(HostKernels::new(threads)?);
        // One thread updates as fast as several drives read and write; more take memory bandwidth
        // from the transfers.
        let nvme_kernels = Arc::new(HostKernels::new(threads.div_ceil(4))?);
        Self::with_kernels(host, memory, record, [kernels, nvme_kernels])
    }

    /// [`Self::new`] with the kernels of operations of the host, and of the update of state on NVMe.
    pub(crate) fn with_kernels(
        host: &HostDevice,
        memory: Arc<dyn Memory>,
        record: Option<Record<D>>,
        [kernels, nvme_kernels]: [Arc<dyn Kernels<HostDevice>>; 2],
    ) -> Result<Self, TrainError> {
        let plain = Pool::new(host.clone(), usize::MAX);
        let pinned = Pool::new(host.clone().with_memory(Arc::clone(&memory))?, usize::MAX);
        Ok(Self {
            memory,
            record,
            kernels,
            nvme_kernels,
            plain,
            pinned,
        })
    }
}

/// One rank of a run.
pub(crate) struct Rank<D: Device> {
    /// All ranks: statistics, votes and checkpoints.
    pub(crate) comm: Arc<dyn Communicator<D>>,
    /// The communicators of parameters and gradients.
    pub(crate) mesh: Mesh<D>,
    /// Operations on flat ranges.
    pub(crate) kernels: Arc<dyn Kernels<D>>,
    /// The pool of all device memory.
    pub(crate) pool: Pool<D>,
    /// Host memory and graphs.
    pub(crate) host: HostSide<D>,
    /// The stream of forward, backward and the optimizer.
    pub(crate) compute: D::Stream,
    /// The stream of collectives, ordered with compute by events alone; the compute stream, if
    /// nothing overlaps.
    pub(crate) comm_stream: D::Stream,
    /// The operations of the two streams with their times.
    pub(crate) timeline: Timeline,
    /// The sharding of the parameters.
    pub(crate) layout: Arc<Layout>,
    /// The sharding of gradients and optimizer state, too.
    pub(crate) layouts: Arc<GridLayout>,
    /// The layout of checkpoints, of all ranks.
    pub(crate) saved: Arc<Layout>,
    /// How the ranks of tensor parallelism cut the units.
    pub(crate) tensor: Option<Arc<CutUnits>>,
    /// The passes of the model.
    pub(crate) passes: Vec<Pass>,
    /// The rules of each tensor.
    pub(crate) groups: ModelGroups,
    /// Frozen units in blocks.
    pub(crate) frozen: Option<Arc<FrozenUnits<D>>>,
    /// Settings that are equal on all ranks.
    pub(crate) settings: Settings,
    /// Statistics of what is encoded in blocks.
    pub(crate) quant_sums: Option<QuantSums<D>>,
}

impl<D: Device> Rank<D> {
    /// A rank on `device`, whose operations `timeline` records, with new streams and a new pool.
    /// `parts` creates the kernels and the host side.
    pub(crate) fn new(
        device: D,
        timeline: Timeline,
        comm: Arc<dyn Communicator<D>>,
        units: RunUnits,
        passes: Vec<Pass>,
        settings: &Settings,
        parts: impl FnOnce(&D, &D::Stream) -> Result<(Arc<dyn Kernels<D>>, HostSide<D>), TrainError>,
    ) -> Result<Self, TrainError> {
        let RunUnits {
            layouts,
            saved,
            tensor,
        } = units;
        let index = comm.rank();
        let compute = device.create_stream(&format!("rank {index} compute"))?;
        // On one stream communication and compute wait for each other.
        let comm_stream = match settings.overlap {
            true => device.create_urgent_stream(&format!("rank {index} comm"))?,
            false => compute.clone(),
        };
        let (kernels, host) = parts(&device, &compute)?;
        let in_groups = layouts.sharding() != Sharding::Flat && layouts.grid().groups() > 1;
        let of_stage_3 = layouts.sharding() == Sharding::Secondary;
        if of_stage_3 && !settings.stage.shards_params()
            || in_groups && !settings.stage.shards_optimizer()
        {
            let stage = settings.stage;
            return Err(TrainError::Usage(format!(
                "groups of ranks do not fit {stage}, which has nothing to share in them"
            )));
        }
        if settings.mesh.shard_group.is_some() && settings.mesh.two_level.is_some() {
            return Err(TrainError::Usage(
                "collectives in two levels are for runs that shard over all ranks: set MeshSettings::shard_group or \
                 MeshSettings::two_level to None"
                    .to_owned(),
            ));
        }
        settings.check_formats()?;
        if settings.graphs && settings.mesh.ranks_of_batch() > 1 {
            return Err(TrainError::Usage(
                "steps whose ranks share micro-batches cannot be recorded into CUDA graphs: set Settings::graphs to false"
                    .to_owned(),
            ));
        }
        // A graph may run its branches one after the other, in an order that differs by rank: all
        // collectives are then in one stream.
        let one_stream = settings.graphs || !settings.overlap;
        let of_replicas = one_stream.then(|| comm_stream.clone());
        let mut mesh = Mesh::new(&device, Arc::clone(&comm), &layouts, settings, of_replicas)?;
        let pool = Pool::new(device, usize::MAX);
        let quant_sums = match settings.encodes_blocks() {
            true => {
                let of_replicas = mesh.replicas.iter().map(|replicas| replicas.stream.clone());
                let streams = std::iter::once(comm_stream.clone()).chain(of_replicas);
                let streams = streams.collect();
                let sums = QuantSums::new(&pool, &host.pinned, streams, comm.world_size())?;
                Some(sums)
            }
            false => None,
        };
        let sums = quant_sums.as_ref().map(QuantSums::of_kinds);
        mesh.encode(settings, &kernels, &pool, sums)?;
        let layout = Arc::new(layouts.params(0).0.clone());
        let groups = settings.resolve_groups(&layout)?;
        state_ranks::check(settings, &groups)?;
        if groups.has_matrices() {
            let stream = match settings.overlap {
                true => {
                    let name = format!("rank {} matrices", comm.rank());
                    pool.device().create_urgent_stream(&name)?
                }
                false => compute.clone(),
            };
            mesh.matrices = Some((split_by_shards(&*comm, &layouts, settings)?, stream));
        }
        let is_sharded = settings.stage.shards_params();
        let shards = layouts.params(mesh.data.rank() as u64);
        let held = |unit: usize| match is_sharded {
            true => of(shards, unit),
            false => 0..layout.units()[unit].padded_elems,
        };
        let comm_of_shards = is_sharded.then(|| Arc::clone(mesh.gather.comm()));
        let streams = vec![compute.clone(), comm_stream.clone()];
        let memory = (&pool, &kernels);
        let frozen = FrozenUnits::new(
            settings,
            &groups,
            &layout,
            held,
            comm_of_shards,
            memory,
            streams,
        )?;
        Ok(Self {
            frozen: frozen.map(Arc::new),
            comm,
            mesh,
            kernels,
            pool,
            host,
            compute,
            comm_stream,
            timeline,
            layout,
            layouts,
            saved,
            tensor,
            passes,
            groups,
            settings: settings.clone(),
            quant_sums,
        })
    }

    /// Elements of `unit` without the padding behind its last parameter.
    pub(crate) fn used_elems(&self, unit: usize) -> usize {
        self.layout.units()[unit].used_elems() as usize
    }

    /// The number of units.
    pub(crate) fn units(&self) -> usize {
        self.layout.units().len()
    }

    /// Whether the device is the host.
    pub(crate) fn is_host(&self) -> bool {
        self.pool.device().kind() == DeviceKind::Host
    }

    /// Whether `unit` is frozen and in blocks: it has no other memory.
    pub(crate) fn is_in_blocks(&self, unit: usize) -> bool {
        self.frozen.as_ref().is_some_and(|frozen| frozen.has(unit))
    }

    /// Whether a tensor of `unit` is trained.
    pub(crate) fn trains(&self, unit: usize) -> bool {
        !self.groups.is_frozen(unit)
    }

    /// This rank among the data ranks.
    pub(crate) fn index(&self) -> u64 {
        self.mesh.data.rank() as u64
    }

    /// Ranks of tensor parallelism.
    pub(crate) fn tensor_ranks(&self) -> usize {
        self.comm.world_size() / self.mesh.data.world_size()
    }

    /// This rank among those of tensor parallelism.
    pub(crate) fn tensor_rank(&self) -> usize {
        let tensor = self.mesh.model.tensor.as_ref();
        tensor.map_or(0, |tensor| tensor.rank())
    }

    /// Ranks with different micro-batches, and this rank's place among them.
    pub(crate) fn batches(&self) -> [usize; 2] {
        let same = self.settings.mesh.ranks_of_batch();
        [self.comm.world_size() / same, self.comm.rank() / same]
    }

    /// The range of the unit's flat parameter that this rank has at stage 3.
    pub(crate) fn shard(&self, unit: usize) -> Range<u64> {
        of(self.layouts.params(self.index()), unit)
    }

    /// The range of the unit's flat parameter whose reduced gradients this rank has: a shard, or
    /// all of it at stage 0.
    pub(crate) fn reduced(&self, unit: usize) -> Range<u64> {
        match self.settings.stage.shards_optimizer() {
            true => of(self.layouts.grads(self.index()), unit),
            false => 0..self.layout.units()[unit].padded_elems,
        }
    }

    /// The range of the unit's flat parameter that this rank updates: that of its gradients, or a
    /// part of it.
    pub(crate) fn held(&self, unit: usize) -> Range<u64> {
        match self.settings.stage.shards_optimizer() {
            true => of(self.layouts.optimizer(self.index()), unit),
            false => self.reduced(unit),
        }
    }

    /// The range of the unit's flat parameter that this rank saves: within what it updates.
    pub(crate) fn saves(&self, unit: usize) -> Range<u64> {
        of((self.layouts.parts(), self.part()), unit)
    }

    /// The range of the unit's flat parameter that this rank counts in the norm: within what it
    /// saves. What all ranks of tensor parallelism have, the first of them counts.
    pub(crate) fn counted(&self, unit: usize) -> Range<u64> {
        let saved = self.saves(unit);
        match &self.tensor {
            Some(tensor) if self.tensor_rank() > 0 => tensor.cut_in(unit, saved),
            _ => saved,
        }
    }

    /// The part of all shards of the data ranks that this rank saves.
    pub(crate) fn part(&self) -> u64 {
        self.layouts.part_of(self.index())
    }

    /// The shard of [`saved`](Self::saved) that this rank saves.
    pub(crate) fn saved_shard(&self) -> u64 {
        self.tensor_rank() as u64 * self.mesh.data.world_size() as u64 + self.part()
    }

    /// The rank that saves a shard of [`saved`](Self::saved).
    pub(crate) fn rank_of_shard(&self, shard: u64) -> u64 {
        let data_ranks = self.mesh.data.world_size() as u64;
        let tensor_ranks = self.tensor_ranks() as u64;
        let data_rank = self.layouts.rank_of_part(shard % data_ranks);
        data_rank * tensor_ranks + shard / data_ranks
    }

    /// The groups of tensors in what this rank updates.
    pub(crate) fn groups_held(&self) -> Result<ParamGroups, TrainError> {
        let (layout, shard) = self.layouts.optimizer(self.index());
        let sharded = self.settings.stage.shards_optimizer();
        Ok(self.groups.of(layout, sharded.then_some(shard))?)
    }

    /// The streams of collectives beside the compute stream.
    pub(crate) fn collective_streams(&self) -> impl Iterator<Item = &D::Stream> {
        let replicas = self.mesh.replicas.iter();
        std::iter::once(&self.comm_stream)
            .chain(replicas.map(|replicas| &replicas.stream))
            .filter(|stream| stream.id() != self.compute.id())
    }

    /// All streams.
    pub(crate) fn streams(&self) -> Vec<D::Stream> {
        let collectives = self.collective_streams();
        let matrices = self.mesh.matrices.iter().map(|(_, stream)| stream);
        std::iter::once(&self.compute)
            .chain(collectives)
            .chain(matrices)
            .cloned()
            .collect()
    }

    /// The passes whose backward is run, in reverse: behind the first that adds to a trained
    /// gradient it has no use.
    pub(crate) fn backward_passes(&self) -> impl Iterator<Item = (usize, &Pass)> {
        let first = first_trained(&self.passes, &self.groups);
        self.passes.iter().enumerate().skip(first).rev()
    }

    /// The trained units whose gradient is complete after the backward of `pass`. Backward runs
    /// from the last pass on.
    pub(crate) fn complete_after(&self, pass: usize) -> impl Iterator<Item = usize> + '_ {
        complete_after(&self.passes, pass).filter(|&unit| self.trains(unit))
    }

    /// Blocks the host until the streams are idle.
    pub(crate) fn synchronize(&self) -> Result<(), TrainError> {
        let limit = self.settings.host_limit();
        let mut streams = self.streams().into_iter();
        Ok(streams.try_for_each(|stream| stream.synchronize(limit))?)
    }
}

/// The units that a micro-batch at stage 3 holds at once, in order. The last pass holds its units
/// until its backward.
pub(crate) fn uses(passes: &[Pass], groups: &ModelGroups) -> Vec<Vec<usize>> {
    let forward = passes.iter().map(|pass| &pass.forward_reads);
    let last = passes.len().saturating_sub(1);
    let first = first_trained(passes, groups).min(last);
    let backward = passes[first..last].iter().rev();
    forward
        .chain(backward.map(|pass| &pass.backward_reads))
        .cloned()
        .collect()
}

/// The range of a shard of a unit.
fn of((layout, shard): (&Layout, u64), unit: usize) -> Range<u64> {
    layout.units()[unit].shard(shard)
}

/// The first pass that adds to a trained gradient.
pub(crate) fn first_trained(passes: &[Pass], groups: &ModelGroups) -> usize {
    passes
        .iter()
        .position(|pass| pass.grads.iter().any(|&unit| !groups.is_frozen(unit)))
        .unwrap_or(0)
}

/// The units whose gradient is complete after the backward of `pass`. Backward runs from the last
/// pass on.
pub(crate) fn complete_after(passes: &[Pass], pass: usize) -> impl Iterator<Item = usize> + '_ {
    let grads = |p: usize| passes[p].grads.iter().copied();
    grads(pass).filter(move |unit| !(0..pass).any(|earlier| grads(earlier).any(|u| u == *unit)))
}
