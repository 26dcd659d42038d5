//! Ranks in two dimensions: groups, such as nodes, and positions within a group. The stage shards
//! within a group; between the groups, [`Sharding`] shards no more than the stage does:
//!
//! | [`Sharding`] | parameters | gradients | optimizer state | between the groups, a step |
//! |---|---|---|---|---|
//! | `Flat` (ZeRO) | all ranks | all ranks | all ranks | every collective |
//! | `Secondary` (hpZ of ZeRO++, arXiv 2306.10209) | a group | all ranks | all ranks | each reduction, and one gather |
//! | `Hybrid` (HFSDP of Megatron-FSDP) | a group | a group | all ranks | one reduce-scatter, and one gather |
//! | `Replicated` (MiCS, arXiv 2205.00119; HSDP of FSDP) | a group | a group | a group | one all-reduce |
//!
//! The whole storage is cut into N **parts**, one for each rank, and for a group into shards of as
//! many consecutive parts as there are groups. So the ranks of one position have one shard, of
//! which each updates, counts or saves its part: a collective over all ranks is one between ranks
//! of a position and one within the groups, without a copy.
//!
//! ZeRO++ has a second copy of the parameters, which each forward fills. Here a rank's part is a
//! range of its group's shard, and the shard is gathered once after the update, so that it is
//! never old and no copy is needed.

use std::ops::Range;

use crate::checked::{product, sum};
use crate::{
    Layout, LayoutOptions, ShardError, StateBytes, StepTraffic, UnitSpec, Widths, WireFormat,
    ZeroStage,
};

const WHAT: &str = "bytes sent in a step";

/// Ranks in groups of consecutive ranks: rank = group x group_size + position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    world_size: u64,
    group_size: u64,
}

impl Grid {
    /// `world_size` ranks in groups of `group_size`.
    ///
    /// # Errors
    /// There are no ranks, or `group_size` does not divide `world_size`.
    pub fn new(world_size: u64, group_size: u64) -> Result<Self, ShardError> {
        if world_size == 0 {
            return Err(ShardError::NoRanks);
        }
        if group_size == 0 || !world_size.is_multiple_of(group_size) {
            return Err(ShardError::NotDivisible {
                world_size,
                group_size,
            });
        }
        Ok(Self {
            world_size,
            group_size,
        })
    }

    /// Number of ranks.
    pub fn world_size(&self) -> u64 {
        self.world_size
    }

    /// Number of ranks in a group.
    pub fn group_size(&self) -> u64 {
        self.group_size
    }

    /// Number of groups.
    pub fn groups(&self) -> u64 {
        self.world_size / self.group_size
    }

    /// The group that `rank` is in.
    pub fn group_of(&self, rank: u64) -> u64 {
        rank / self.group_size
    }

    /// The position of `rank` within its group.
    pub fn position_of(&self, rank: u64) -> u64 {
        rank % self.group_size
    }

    /// The ranks of the group that `rank` is in.
    pub fn group_ranks(&self, rank: u64) -> Range<u64> {
        let start = rank - self.position_of(rank);
        start..start.saturating_add(self.group_size)
    }

    /// The ranks with `rank`'s position, one in each group, ascending. If groups are replicas,
    /// these ranks hold the same shard.
    pub fn peer_ranks(&self, rank: u64) -> impl Iterator<Item = u64> + use<> {
        let grid = *self;
        let position = self.position_of(rank);
        (0..grid.groups()).map(move |group| group * grid.group_size + position)
    }
}

/// The sharding of a model over a [`Grid`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Sharding {
    /// Over all ranks.
    #[default]
    Flat,
    /// Parameters over each group, gradients and optimizer state over all ranks.
    Secondary,
    /// Parameters and gradients over each group, optimizer state over all ranks.
    Hybrid,
    /// Over each group; each group is a replica.
    Replicated,
}

/// The route of a collective over all ranks between the groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Routing {
    /// One ring through all ranks in rank order: (N-1)/N of the buffer leaves each group.
    Ring,
    /// Two phases, between ranks of one position and within the groups: (M-1)/M of the buffer
    /// leaves each of M groups. With both routes a rank sends (N-1)/N of the buffer.
    TwoLevel,
}

/// Bytes that a rank sends in a step, and bytes that leave its group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct GridTraffic {
    /// Sent by one rank, to any rank.
    pub rank: StepTraffic,
    /// Sent by all ranks of a group together to ranks of other groups.
    pub group_egress_bytes: u64,
}

impl GridTraffic {
    /// The sum over a rank's collectives.
    pub fn rank_total_bytes(&self) -> u64 {
        self.rank.total_bytes()
    }
}

/// A model's layouts over a grid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GridLayout {
    grid: Grid,
    sharding: Sharding,
    /// Over all ranks.
    parts: Layout,
    /// Over a group.
    group: Layout,
}

impl GridLayout {
    /// Lays out `units` over `grid`.
    ///
    /// # Errors
    /// As for [`Layout::with_options`].
    pub fn new(
        units: &[UnitSpec],
        grid: Grid,
        sharding: Sharding,
        options: LayoutOptions,
    ) -> Result<Self, ShardError> {
        let parts = Layout::with_options(units, grid.world_size, options)?;
        Self::of_parts(parts, grid.group_size, sharding)
    }

    /// With a layout over all ranks, in groups of `group_size`.
    ///
    /// # Errors
    /// As for [`Grid::new`] and [`Layout::regroup`].
    pub fn of_parts(
        parts: Layout,
        group_size: u64,
        sharding: Sharding,
    ) -> Result<Self, ShardError> {
        let grid = Grid::new(parts.world_size(), group_size)?;
        let group = parts.regroup(group_size)?;
        Ok(Self {
            grid,
            sharding,
            parts,
            group,
        })
    }

    /// The grid of ranks.
    pub fn grid(&self) -> Grid {
        self.grid
    }

    /// The sharding of the model.
    pub fn sharding(&self) -> Sharding {
        self.sharding
    }

    /// The layout over all ranks, of which `rank` has the shard [`Self::part_of`]`(rank)`.
    pub fn parts(&self) -> &Layout {
        &self.parts
    }

    /// The layout over a group, of which `rank` has the shard of its position. A shard is the
    /// concatenation of the parts of all ranks with this position.
    pub fn group(&self) -> &Layout {
        &self.group
    }

    /// The layout of the parameters, if the stage shards them, and the shard of `rank`.
    pub fn params(&self, rank: u64) -> (&Layout, u64) {
        self.over(self.sharding == Sharding::Flat, rank)
    }

    /// The layout of the gradients, if the stage shards them, and the shard of `rank`.
    pub fn grads(&self, rank: u64) -> (&Layout, u64) {
        let all = matches!(self.sharding, Sharding::Flat | Sharding::Secondary);
        self.over(all, rank)
    }

    /// The layout of the optimizer state, if the stage shards it, and the shard of `rank`.
    pub fn optimizer(&self, rank: u64) -> (&Layout, u64) {
        self.over(self.sharding != Sharding::Replicated, rank)
    }

    fn over(&self, all: bool, rank: u64) -> (&Layout, u64) {
        if all {
            (&self.parts, self.part_of(rank))
        } else {
            (&self.group, self.grid.position_of(rank))
        }
    }

    /// The part of `rank`, a range of its group's shard. With one group it is the rank.
    pub fn part_of(&self, rank: u64) -> u64 {
        self.grid.position_of(rank) * self.grid.groups() + self.grid.group_of(rank)
    }

    /// The rank of a part.
    pub fn rank_of_part(&self, part: u64) -> u64 {
        let groups = self.grid.groups();
        part % groups * self.grid.group_size + part / groups
    }

    /// The state of each rank at `stage`.
    ///
    /// # Errors
    /// The sum does not fit 64 bits.
    pub fn state_bytes(&self, stage: ZeroStage, widths: &Widths) -> Result<StateBytes, ShardError> {
        let of = |(layout, _): (&Layout, u64)| layout.state_bytes(stage, widths);
        let bytes = StateBytes {
            params_bytes: of(self.params(0))?.params_bytes,
            grads_bytes: of(self.grads(0))?.grads_bytes,
            optimizer_bytes: of(self.optimizer(0))?.optimizer_bytes,
        };
        let each = [bytes.params_bytes, bytes.grads_bytes, bytes.optimizer_bytes];
        sum("bytes of a rank", &each)?;
        Ok(bytes)
    }

    /// The elements that each rank updates at `stage`.
    pub fn updated_elems(&self, stage: ZeroStage) -> u64 {
        self.optimizer(0).0.updated_elems(stage)
    }

    /// Bytes sent in a step of `grad_accum_steps` micro-batches, padding included; an upper bound
    /// at stage 3. Between groups that keep gradients, these are reduced once per step, in the
    /// dtype in which they are kept, and parameters are gathered once.
    ///
    /// # Errors
    /// A sum does not fit 64 bits.
    pub fn step_traffic(
        &self,
        stage: ZeroStage,
        widths: &Widths,
        grad_accum_steps: u64,
        routing: Routing,
    ) -> Result<GridTraffic, ShardError> {
        let groups = self.grid.groups();
        let mut axes = self.axis_traffic(stage, widths, grad_accum_steps)?;
        if routing == Routing::Ring && self.sharding == Sharding::Flat {
            axes = AxisTraffic {
                all: self.parts.step_traffic(stage, widths, grad_accum_steps)?,
                ..AxisTraffic::default()
            };
        }
        // Elements of a whole unit that leave a group, for each part that a rank sends to all.
        let (part, whole) = match routing {
            Routing::Ring => (1, 1),
            Routing::TwoLevel => (
                self.grid.group_size * (groups - 1),
                self.grid.world_size - 1,
            ),
        };
        let in_order = |sent: &StepTraffic| sent.total_bytes() - sent.all_to_all_bytes;
        let of_all = match groups {
            1 => 0,
            _ => product(WHAT, &[in_order(&axes.all) / whole, part])?,
        };
        let replicas = product(WHAT, &[in_order(&axes.replicas), self.grid.group_size])?;
        let exchanged = axes.all_to_all(&self.grid, self.grid.group_size)?;
        Ok(GridTraffic {
            rank: axes.rank()?,
            group_egress_bytes: sum(WHAT, &[of_all, replicas, exchanged])?,
        })
    }

    /// As [`Self::step_traffic`], by the ranks that take part in a collective.
    ///
    /// # Errors
    /// A sum does not fit 64 bits.
    pub fn axis_traffic(
        &self,
        stage: ZeroStage,
        widths: &Widths,
        grad_accum_steps: u64,
    ) -> Result<AxisTraffic, ShardError> {
        let of_all = self.parts.step_traffic(stage, widths, grad_accum_steps)?;
        let group = self.group.step_traffic(stage, widths, grad_accum_steps)?;
        let others_of_shard = self.grid.groups() - 1;
        // A shard without the part that a rank has of it.
        let others = |format: WireFormat| {
            let part = format.checked_bytes(WHAT, self.parts.shard_elems())?;
            product(WHAT, &[part, others_of_shard])
        };
        let gathered = || others(widths.gathered);
        let grads = || others(WireFormat::plain(widths.grad_bytes));
        let none = StepTraffic::default();
        let exchanged = |bytes: u64| none.with_all_to_all(bytes);
        // A quantised reduction over all ranks: within the groups, then between them.
        let hops = match widths.reduced {
            Some(formats) if stage.shards_optimizer() && self.grid.groups() > 1 => {
                let shard = formats[0].checked_bytes(WHAT, self.group.shard_elems())?;
                let others = self.grid.group_size - 1;
                let within = product(WHAT, &[grad_accum_steps, others, shard])?;
                let part = formats[1].checked_bytes(WHAT, self.parts.shard_elems())?;
                let between = product(WHAT, &[grad_accum_steps, others_of_shard, part])?;
                Some([within, between].map(exchanged))
            }
            _ => None,
        };
        let of_replicas = match widths.reduced {
            Some([_, between]) => exchanged(others(between)?),
            None => StepTraffic {
                reduce_scatter_bytes: grads()?,
                ..none
            },
        };

        Ok(match (self.sharding, stage) {
            (_, ZeroStage::Zero)
            | (Sharding::Flat, _)
            | (Sharding::Secondary, ZeroStage::One | ZeroStage::Two) => match hops {
                Some([group, replicas]) => AxisTraffic {
                    all: of_all.with_all_to_all(0),
                    group,
                    replicas,
                },
                None => AxisTraffic {
                    all: of_all,
                    ..AxisTraffic::default()
                },
            },
            (Sharding::Secondary, ZeroStage::Three) => {
                let [within, between] = hops.unwrap_or_default();
                let reduced = match hops {
                    Some(_) => none,
                    None => of_all,
                };
                AxisTraffic {
                    all: StepTraffic {
                        all_gather_bytes: 0,
                        ..reduced
                    },
                    group: StepTraffic {
                        all_gather_bytes: group.all_gather_bytes,
                        ..within
                    },
                    replicas: StepTraffic {
                        all_gather_bytes: gathered()?,
                        ..between
                    },
                }
            }
            (Sharding::Hybrid, _) => AxisTraffic {
                all: none,
                group,
                replicas: StepTraffic {
                    all_gather_bytes: gathered()?,
                    ..of_replicas
                },
            },
            (Sharding::Replicated, _) => AxisTraffic {
                all: none,
                group,
                replicas: StepTraffic {
                    all_reduce_bytes: product(WHAT, &[2, grads()?])?,
                    ..none
                },
            },
        })
    }
}

/// Bytes that a rank sends in a step, by the ranks that take part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct AxisTraffic {
    /// All ranks.
    pub all: StepTraffic,
    /// The ranks of its group.
    pub group: StepTraffic,
    /// The ranks with its position.
    pub replicas: StepTraffic,
}

impl AxisTraffic {
    /// The sum over the axes.
    ///
    /// # Errors
    /// It does not fit 64 bits.
    pub fn rank(&self) -> Result<StepTraffic, ShardError> {
        let of = |bytes: fn(&StepTraffic) -> u64| {
            sum(
                WHAT,
                &[bytes(&self.all), bytes(&self.group), bytes(&self.replicas)],
            )
        };
        let rank = StepTraffic {
            reduce_scatter_bytes: of(|sent| sent.reduce_scatter_bytes)?,
            all_gather_bytes: of(|sent| sent.all_gather_bytes)?,
            all_reduce_bytes: of(|sent| sent.all_reduce_bytes)?,
            all_to_all_bytes: of(|sent| sent.all_to_all_bytes)?,
        };
        let each = [
            rank.reduce_scatter_bytes,
            rank.all_gather_bytes,
            rank.all_reduce_bytes,
            rank.all_to_all_bytes,
        ];
        sum(WHAT, &each)?;
        Ok(rank)
    }

    /// Bytes that leave a node of `node_size` ranks by all-to-alls.
    fn all_to_all(&self, grid: &Grid, node_size: u64) -> Result<u64, ShardError> {
        let sent = [self.all, self.group, self.replicas].map(|axis| axis.all_to_all_bytes);
        grid.node_exchange_bytes(node_size, sent)
    }

    /// Bytes that the ranks of a node of `node_size` ranks send to other nodes.
    ///
    /// # Errors
    /// As for [`Grid::node_egress_bytes`].
    pub fn node_egress_bytes(&self, grid: &Grid, node_size: u64) -> Result<u64, ShardError> {
        let [all, group, replicas] = [self.all, self.group, self.replicas]
            .map(|sent| sent.total_bytes() - sent.all_to_all_bytes);
        let in_rings = grid.node_egress_bytes(node_size, all, group, replicas)?;
        sum(WHAT, &[in_rings, self.all_to_all(grid, node_size)?])
    }
}

impl Grid {
    /// Bytes that the ranks of a node of `node_size` consecutive ranks send to other nodes, where
    /// each sends `all` bytes to all ranks, `group` to its group and `replicas` to the ranks with
    /// its position, each in a ring that enters and leaves a node once.
    ///
    /// # Errors
    /// `node_size` does not divide the number of ranks; neither of `node_size` and the size of a
    /// group divides the other; or the sum does not fit 64 bits.
    pub fn node_egress_bytes(
        &self,
        node_size: u64,
        all: u64,
        group: u64,
        replicas: u64,
    ) -> Result<u64, ShardError> {
        let nodes = Self::new(self.world_size, node_size)?;
        Self::new(
            node_size.max(self.group_size),
            node_size.min(self.group_size),
        )?;
        if nodes.groups() == 1 {
            return Ok(0);
        }
        let group = if self.group_size > node_size {
            group
        } else {
            0
        };
        let replicas = match self.groups() {
            1 => 0,
            _ => product(WHAT, &[replicas, node_size.min(self.group_size)])?,
        };
        sum(WHAT, &[all, group, replicas])
    }

    /// Bytes that the ranks of a node of `node_size` consecutive ranks send to other nodes by
    /// all-to-alls, in which each sends as much to each other rank: `sent` by one rank to all
    /// ranks, to its group and to the ranks with its position.
    ///
    /// # Errors
    /// As for [`Self::node_egress_bytes`].
    pub fn node_exchange_bytes(&self, node_size: u64, sent: [u64; 3]) -> Result<u64, ShardError> {
        Self::new(self.world_size, node_size)?;
        let ranks = [self.world_size, self.group_size, self.groups()];
        // Those of an axis that are in one node.
        let near = [
            node_size,
            node_size.min(self.group_size),
            (node_size / self.group_size).max(1),
        ];
        let of_axis = |axis: usize| match ranks[axis] {
            0 | 1 => Ok(0),
            ranks => product(
                WHAT,
                &[
                    sent[axis] / (ranks - 1),
                    ranks.saturating_sub(near[axis]),
                    node_size,
                ],
            ),
        };
        sum(WHAT, &[of_axis(0)?, of_axis(1)?, of_axis(2)?])
    }
}

impl Layout {
    /// Cuts the same whole storage into `parts` shards: each is the concatenation of the shards of
    /// `world_size / parts` consecutive ranks, and the alignment grows by that factor.
    ///
    /// # Errors
    /// `parts` does not divide the number of ranks, or the alignment does not fit 64 bits.
    pub fn regroup(&self, parts: u64) -> Result<Self, ShardError> {
        let ranks_each = Grid::new(self.world_size, parts)?.groups();
        let mut layout = self.clone();
        layout.world_size = parts;
        layout.options.shard_align_elems =
            product("an alignment", &[self.align_elems(), ranks_each])?;
        layout.shard_elems *= ranks_each;
        for unit in &mut layout.units {
            unit.shard_elems *= ranks_each;
            unit.shard_offset_elems *= ranks_each;
        }
        Ok(layout)
    }
}
