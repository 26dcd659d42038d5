//! Errors of the launcher's variables and of the rendezvous.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The reason why the launcher's variables are inconsistent.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum LaunchError {
    /// Some variables of a launcher are set, but not all.
    #[error("{present} is set, but {missing} is not")]
    Missing {
        /// A variable that is set.
        present: &'static str,
        /// The missing variable.
        missing: &'static str,
    },
    /// A variable has a value of the wrong form.
    #[error("{variable}={value}: expected {expected}")]
    Value {
        variable: &'static str,
        value: String,
        /// A description of valid values.
        expected: &'static str,
    },
    /// The rank is not less than the world size.
    #[error("{variable}={rank}, but there are {world_size} ranks")]
    Rank {
        /// The variable of the rank.
        variable: &'static str,
        rank: usize,
        /// The number of ranks.
        world_size: usize,
    },
    /// The local rank is not less than the number of ranks of the machine, or that number is larger
    /// than the world.
    #[error("{variable}={value} contradicts {limit_variable}={limit}")]
    Contradiction {
        variable: &'static str,
        value: usize,
        /// The variable that limits it.
        limit_variable: &'static str,
        limit: usize,
    },
    /// The secret of `ZERO_TOKEN` can be guessed.
    #[error(
        "ZERO_TOKEN has {len} bytes; use at least 16, for example those of `openssl rand -hex 16`"
    )]
    ShortToken { len: usize },
}

/// The reason why the ranks did not connect at rank 0's address.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum RendezvousError {
    /// Another program listens at rank 0's address.
    #[error("{address} is in use, perhaps by another run; set MASTER_PORT to another port")]
    AddressInUse { address: String },
    /// Rank 0 cannot listen at its address.
    #[error("rank 0 cannot listen at {address}: {message}; is MASTER_ADDR this machine?")]
    Listen { address: String, message: String },
    /// A rank cannot connect to rank 0.
    #[error("rank {rank} did not reach rank 0 at {address} within {limit:?}: {message}")]
    Unreachable {
        /// The rank that tried.
        rank: usize,
        address: String,
        /// The limit that passed.
        limit: Duration,
        /// The system's last error.
        message: String,
    },
    /// The world sizes of two ranks differ.
    #[error("rank {rank} was started as one of {got} ranks, rank 0 as one of {expected}")]
    WorldSize {
        /// The rank that differs.
        rank: usize,
        got: usize,
        /// Rank 0's world size.
        expected: usize,
    },
    /// Two ranks run different builds.
    #[error(
        "rank {rank} has protocol version {got}, rank 0 version {expected}; start the same build on all ranks"
    )]
    Version {
        /// The rank that differs.
        rank: usize,
        got: u32,
        /// Rank 0's protocol version.
        expected: u32,
    },
    /// Two ranks have different back ends, or different versions of NCCL.
    #[error("rank {rank} has {}, rank 0 {}", library_text(*got), library_text(*expected))]
    Library {
        /// The rank that differs.
        rank: usize,
        got: u64,
        /// Rank 0's NCCL version; 0 for shared memory.
        expected: u64,
    },
    /// Two processes have the same rank.
    #[error("two processes were started as rank {rank}")]
    Twice { rank: usize },
    /// A rank's process ended during the rendezvous.
    #[error("rank {rank}'s process ended before all ranks had joined")]
    Died { rank: usize },
    /// Some ranks did not join.
    #[error(
        "{} of {world_size} ranks did not join within {limit:?}: {}{}", ranks.len(), list(ranks), strangers_text(*strangers)
    )]
    Missing {
        ranks: Vec<usize>,
        /// Ranks of the world.
        world_size: usize,
        /// The limit that passed.
        limit: Duration,
        /// Connections that did not prove that they know the token.
        strangers: usize,
    },
    /// Rank 0 ended the connection during the handshake, as it does if the tokens differ.
    #[error(
        "rank 0 at {address} closed rank {rank}'s connection: its ZERO_TOKEN is probably another; set the same \
         ZERO_TOKEN on all ranks, and check that no other job uses this port"
    )]
    Dropped { rank: usize, address: String },
    /// The program at rank 0's address does not know the token.
    #[error(
        "the program at {address} does not know the ZERO_TOKEN of rank {rank}: set the same ZERO_TOKEN on all ranks, or \
         MASTER_PORT to another port if another program uses this one"
    )]
    NotRankZero {
        /// The rank that connected.
        rank: usize,
        address: String,
    },
    /// Ranks on several machines have no token.
    #[error(
        "the ranks are on several machines and ZERO_TOKEN is not set, so that anyone on the network could join: set one \
         value on all ranks, `export ZERO_TOKEN=$(openssl rand -hex 16)` (mpirun passes it on with `-x ZERO_TOKEN`, srun \
         by itself), or ZERO_TOKEN=none on a network that you trust"
    )]
    NoToken,
    /// Rank 0's process may not open one connection per rank.
    #[error(
        "rank 0 needs {needed} file descriptors for {world_size} ranks, and the limit is {limit}: raise it on rank 0's \
         machine (`ulimit -n {needed}`, or LimitNOFILE= of its service)"
    )]
    Descriptors {
        /// Descriptors that the process needs.
        needed: u64,
        /// The limit that applies.
        limit: u64,
        /// Ranks of the world.
        world_size: usize,
    },
    /// The system refused rank 0 a resource.
    #[error("rank 0: {message}")]
    System {
        /// What failed, and what to do.
        message: String,
    },
    /// The connection to rank 0 ended during the rendezvous.
    #[error("the connection to rank 0 ended before all ranks had joined: {message}")]
    Broken { message: String },
}

/// Formats NCCL's version number: 22809 is 2.28.9.
pub(crate) fn version_text(version: u64) -> String {
    format!(
        "{}.{}.{}",
        version / 10_000,
        version / 100 % 100,
        version % 100
    )
}

fn library_text(version: u64) -> String {
    match version {
        0 => "shared memory".to_owned(),
        _ => format!("NCCL {}", version_text(version)),
    }
}

fn strangers_text(strangers: usize) -> String {
    match strangers {
        0 => String::new(),
        1 => "; 1 connection came without the right ZERO_TOKEN".to_owned(),
        n => format!("; {n} connections came without the right ZERO_TOKEN"),
    }
}

fn list(ranks: &[usize]) -> String {
    let shown: Vec<String> = ranks.iter().take(8).map(usize::to_string).collect();
    format!(
        "{}{}",
        shown.join(", "),
        if ranks.len() > 8 { ", ..." } else { "" }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_ranks_and_versions() {
        let limit = Duration::from_secs(3);
        let missing = |strangers| {
            RendezvousError::Missing {
                ranks: (1..12).collect(),
                world_size: 16,
                limit,
                strangers,
            }
            .to_string()
        };

        let text = "11 of 16 ranks did not join within 3s: 1, 2, 3, 4, 5, 6, 7, 8, ...";
        assert_eq!(missing(0), text);
        assert_eq!(
            missing(1),
            format!("{text}; 1 connection came without the right ZERO_TOKEN")
        );
        assert_eq!(
            missing(9),
            format!("{text}; 9 connections came without the right ZERO_TOKEN")
        );
        let library = RendezvousError::Library {
            rank: 2,
            got: 22_809,
            expected: 23_007,
        };

        assert_eq!(
            library.to_string(),
            "rank 2 has NCCL 2.28.9, rank 0 NCCL 2.30.7"
        );
        assert_eq!(library_text(0), "shared memory");
    }
}
