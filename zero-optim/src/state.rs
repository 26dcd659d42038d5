//! The kinds of optimizer state and their names in checkpoints.

use serde::{Deserialize, Serialize};

/// A kind of optimizer state; each is fp32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StateKind {
    /// The fp32 weights of bf16 or fp16 parameters.
    Master,
    /// Adam's running mean of gradients.
    FirstMoment,
    /// Adam's running mean of squared gradients.
    SecondMoment,
}

impl StateKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Master, Self::FirstMoment, Self::SecondMoment];

    /// The name in a checkpoint: `master`, `first_moment`, `second_moment`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Master => "master",
            Self::FirstMoment => "first_moment",
            Self::SecondMoment => "second_moment",
        }
    }
}
