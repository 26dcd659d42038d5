//! Why the processes of a world do not come together.

use std::time::Duration;

use thiserror::Error;

/// Why the ranks did not meet at rank 0's address.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// Another program listens where rank 0 should.
    #[error("{address} is in use: another run may be going on there; set MASTER_PORT to another port")]
    AddressInUse {
        /// Where.
        address: String,
    },
    /// Rank 0 cannot listen.
    #[error("rank 0 cannot listen at {address}: {message}; is MASTER_ADDR this machine?")]
    Listen {
        /// Where.
        address: String,
        /// What the system said.
        message: String,
    },
    /// Rank 0 does not answer.
    #[error("rank {rank} did not reach rank 0 at {address} within {limit:?}: {message}")]
    Unreachable {
        /// Who tried.
        rank: usize,
        /// Where.
        address: String,
        /// How long was tried.
        limit: Duration,
        /// What the system said last.
        message: String,
    },
    /// Ranks were told of different worlds.
    #[error("rank {rank} was told of {says} ranks, rank 0 of {expected}")]
    WorldSize {
        /// Which rank.
        rank: usize,
        /// What it was told.
        says: usize,
        /// What rank 0 was told.
        expected: usize,
    },
    /// Ranks run different versions of this program.
    #[error(
        "rank {rank} speaks version {says} of this protocol, rank 0 version {expected}: they run different builds"
    )]
    Version {
        /// Which rank.
        rank: usize,
        /// What it speaks.
        says: u32,
        /// What rank 0 speaks.
        expected: u32,
    },
    /// Ranks have different versions of NCCL.
    #[error("rank {rank} has NCCL {}, rank 0 NCCL {}", version_text(*says), version_text(*expected))]
    Library {
        /// Which rank.
        rank: usize,
        /// What it has.
        says: u64,
        /// What rank 0 has.
        expected: u64,
    },
    /// Two processes say that they are the same rank.
    #[error("two processes say that they are rank {rank}")]
    Twice {
        /// Which rank.
        rank: usize,
    },
    /// A rank came, and ended before the others came.
    #[error("rank {rank}'s process ended before all ranks had come")]
    Died {
        /// Which rank.
        rank: usize,
    },
    /// Not all ranks came.
    #[error("of {world_size} ranks, {} did not come within {limit:?}: {}", ranks.len(), list(ranks))]
    Missing {
        /// Who is missing.
        ranks: Vec<usize>,
        /// How many there should be.
        world_size: usize,
        /// How long was waited.
        limit: Duration,
    },
    /// The connection to rank 0 ended before all had come.
    #[error("the connection to rank 0 ended before all ranks had come: {message}")]
    Broken {
        /// What was seen.
        message: String,
    },
}

/// NCCL's version number for people: 22809 is 2.28.9.
pub(super) fn version_text(version: u64) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

fn list(ranks: &[usize]) -> String {
    let shown: Vec<String> = ranks.iter().take(8).map(usize::to_string).collect();
    format!("{}{}", shown.join(", "), if ranks.len() > 8 { ", ..." } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_name_the_ranks() {
        let limit = Duration::from_secs(3);
        let missing = RendezvousError::Missing { ranks: (1..12).collect(), world_size: 16, limit };
        assert_eq!(missing.to_string(), "of 16 ranks, 11 did not come within 3s: 1, 2, 3, 4, 5, 6, 7, 8, ...");
        let library = RendezvousError::Library { rank: 2, says: 22_809, expected: 23_007 };
        assert_eq!(library.to_string(), "rank 2 has NCCL 2.28.9, rank 0 NCCL 2.30.7");
    }
}
