//! Ranks in two dimensions: groups, such as nodes, and positions within a group.
//!
//! | [`Sharding`] | parameters, gradients, optimizer state | gathers | reductions |
//! |---|---|---|---|
//! | `Flat` (ZeRO) | over all ranks | over all ranks | over all ranks |
//! | `Secondary` (hpZ of ZeRO++, arXiv 2306.10209) | over all ranks; each group also shards a second copy of the parameters | forward over all ranks, backward within the group | over all ranks |
//! | `Replicated` (MiCS, arXiv 2205.00119; HSDP of FSDP) | over each group; each group is a replica | within the group | within the group, then once per step between the groups |

use std::ops::Range;

use crate::checked::{product, sum};
use crate::{
    Layout, LayoutOptions, ShardError, StateBytes, StepTraffic, UnitSpec, Widths, ZeroStage,
};

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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Sharding {
    /// Over all ranks.
    Flat,
    /// Over all ranks; each group also shards a second copy of the parameters.
    Secondary,
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

/// A model's layout over a grid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GridLayout {
    grid: Grid,
    sharding: Sharding,
    primary: Layout,
    secondary: Option<Layout>,
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
        let ranks = if sharding == Sharding::Replicated {
            grid.group_size
        } else {
            grid.world_size
        };
        let primary = Layout::with_options(units, ranks, options)?;
        let secondary = (sharding == Sharding::Secondary)
            .then(|| primary.regroup(grid.group_size))
            .transpose()?;
        Ok(Self {
            grid,
            sharding,
            primary,
            secondary,
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

    /// The layout over all ranks, or over a group if groups are replicas. `rank` holds its shard
    /// [`GridLayout::shard_of`]`(rank)`.
    pub fn primary(&self) -> &Layout {
        &self.primary
    }

    /// The layout of the second copy of the parameters over a group. A rank holds the shard of its
    /// position. Its whole storage is laid out like that of the primary, so both gather the same
    /// values.
    pub fn secondary(&self) -> Option<&Layout> {
        self.secondary.as_ref()
    }

    /// The shard of the primary layout that `rank` holds.
    pub fn shard_of(&self, rank: u64) -> u64 {
        if self.sharding == Sharding::Replicated {
            self.grid.position_of(rank)
        } else {
            rank
        }
    }

    /// The state of each rank at `stage`. The second copy exists only if parameters are sharded
    /// (stage 3).
    ///
    /// # Errors
    /// The sum does not fit 64 bits.
    pub fn state_bytes(&self, stage: ZeroStage, widths: &Widths) -> Result<StateBytes, ShardError> {
        let mut bytes = self.primary.state_bytes(stage, widths)?;
        if let Some(secondary) = self.secondary.as_ref().filter(|_| stage.shards_params()) {
            let second = product(
                "bytes of a rank",
                &[secondary.shard_elems(), widths.param_bytes],
            )?;
            sum("bytes of a rank", &[bytes.total_bytes(), second])?;
            bytes.params_bytes += second;
        }
        Ok(bytes)
    }

    /// Bytes sent in a step of `grad_accum_steps` micro-batches, padding included; an upper bound
    /// at stage 3. Between replicas, gradients are reduced once per step, in the dtype in which
    /// they are kept.
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
        const WHAT: &str = "bytes sent in a step";
        let groups = self.grid.groups();
        let group_size = self.grid.group_size;
        let shard = self.primary.shard_elems();
        let mut rank = self.primary.step_traffic(stage, widths, grad_accum_steps)?;
        // Elements that leave a group in one gather or reduction over all ranks.
        let crossing = match routing {
            _ if groups == 1 => 0,
            Routing::Ring => product(WHAT, &[shard, self.grid.world_size - 1])?,
            Routing::TwoLevel => product(WHAT, &[shard, group_size, groups - 1])?,
        };

        let grad = widths.comm_grad_bytes;
        let param = widths.param_bytes;
        let reductions = product(WHAT, &[crossing, grad, grad_accum_steps])?;
        let gathers = |times: u64, each: u64| product(WHAT, &[crossing, param, times, each]);
        let group_egress_bytes = match (self.sharding, stage) {
            (Sharding::Replicated, _) => {
                // Each shard is all-reduced between the groups. The all-reduce of stage 0 has the
                // same three phases (within, between, within the groups), so it sends the same.
                let part = shard.div_ceil(groups);
                let between = product(WHAT, &[2, part, groups - 1, widths.grad_bytes])?;
                rank.all_reduce_bytes = sum(WHAT, &[rank.all_reduce_bytes, between])?;
                sum(
                    WHAT,
                    &[
                        rank.all_reduce_bytes,
                        rank.reduce_scatter_bytes,
                        rank.all_gather_bytes,
                    ],
                )?;
                product(WHAT, &[between, group_size])?
            }
            (_, ZeroStage::Zero) => product(WHAT, &[2, reductions])?,
            (_, ZeroStage::One | ZeroStage::Two) => sum(WHAT, &[reductions, gathers(1, 1)?])?,
            (Sharding::Flat, ZeroStage::Three) => {
                sum(WHAT, &[reductions, gathers(2, grad_accum_steps)?])?
            }
            (Sharding::Secondary, ZeroStage::Three) => {
                let forward = product(
                    WHAT,
                    &[shard, self.grid.world_size - 1, param, grad_accum_steps],
                )?;
                let second = self.secondary.as_ref().map_or(0, Layout::shard_elems);
                let backward = product(WHAT, &[second, group_size - 1, param, grad_accum_steps])?;
                rank.all_gather_bytes = sum(WHAT, &[forward, backward])?;
                sum(WHAT, &[reductions, gathers(1, grad_accum_steps)?])?
            }
        };

        Ok(GridTraffic {
            rank,
            group_egress_bytes,
        })
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
