//! The axes over which a run divides its ranks.

use zero_shard::{GridLayout, Layout, ShardError, Sharding};

use crate::error::TrainError;

/// The axes of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeshSettings {
    /// Consecutive ranks over which the stage shards; `None`: all.
    pub shard_group: Option<usize>,
    /// The states that are sharded between the groups; with [`Sharding::Flat`] there are no groups.
    /// hpZ ([`Sharding::Secondary`]) is for stage 3.
    pub sharding: Sharding,
    /// Consecutive data ranks, such as those of a machine: collectives over all data ranks run
    /// within them, then between them. `None`: in one ring. Not with a `shard_group`.
    pub two_level: Option<usize>,
    /// Consecutive ranks that have a part of each parameter (tensor parallelism), and the same
    /// micro-batches; `None`: one.
    pub tensor_ranks: Option<usize>,
    /// Consecutive data ranks that share each sequence; `None`: one. They divide the tokens, and
    /// have the same micro-batches.
    pub sequence_ranks: Option<usize>,
}

impl MeshSettings {
    /// Ranks that share a sequence.
    pub fn sequence_ranks(&self) -> usize {
        self.sequence_ranks.unwrap_or(1)
    }

    /// Ranks with the same micro-batches.
    pub fn ranks_of_batch(&self) -> usize {
        self.tensor_ranks.unwrap_or(1) * self.sequence_ranks.unwrap_or(1)
    }

    /// The data ranks of `ranks` ranks.
    ///
    /// # Errors
    /// [`TrainError::Usage`]: ranks with the same micro-batches do not divide the ranks.
    pub fn data_ranks(&self, ranks: usize) -> Result<usize, TrainError> {
        let same = self.ranks_of_batch();
        if same == 0 || !ranks.is_multiple_of(same) {
            return Err(TrainError::Usage(format!(
                "{same} ranks share a micro-batch: expected a number that divides the {ranks} ranks"
            )));
        }
        Ok(ranks / self.tensor_ranks.unwrap_or(1))
    }

    /// Bytes that the data ranks of a machine with `node_ranks` of them send to others, where each
    /// sends `sent` bytes of activations to those that share its sequences, as many to each. Exact
    /// if these and the machine divide each other; otherwise an upper bound.
    pub fn sequence_egress_bytes(&self, node_ranks: usize, sent: u64) -> u64 {
        let share = self.sequence_ranks();
        let others = match share {
            _ if share <= 1 || node_ranks.is_multiple_of(share) => return 0,
            _ if share.is_multiple_of(node_ranks) => (share - node_ranks) as u128,
            _ => (share - 1) as u128,
        };
        let of_machine = node_ranks as u128 * u128::from(sent);
        u64::try_from(of_machine * others / (share - 1) as u128).unwrap_or(u64::MAX)
    }

    /// Ranks of a group, if anything is sharded between groups.
    fn groups(&self) -> Option<usize> {
        self.shard_group.filter(|_| self.sharding != Sharding::Flat)
    }

    /// The layouts of a model, whose layout over all ranks is `parts`.
    ///
    /// # Errors
    /// The size of a group or of a level does not divide the number of ranks.
    pub fn layouts(&self, parts: &Layout) -> Result<GridLayout, ShardError> {
        let (group, sharding) = match (self.groups(), self.two_level) {
            (Some(group), _) => (group as u64, self.sharding),
            (None, Some(level)) => (level as u64, Sharding::Flat),
            (None, None) => (parts.world_size(), Sharding::Flat),
        };
        GridLayout::of_parts(parts.clone(), group, sharding)
    }
}
