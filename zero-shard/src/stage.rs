//! ZeRO's stages, and the bytes per element of each kind of state.

use crate::WireFormat;

/// A ZeRO stage: the state that is sharded. Source: arXiv 1910.02054, section 5 (stage 1 is P_os,
/// stage 2 P_os+g, stage 3 P_os+g+p).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum ZeroStage {
    /// Nothing: plain data parallelism, the baseline.
    Zero,
    /// The optimizer state.
    One,
    /// The optimizer state and the gradients.
    Two,
    /// The optimizer state, the gradients and the parameters.
    Three,
}

impl ZeroStage {
    /// All stages, from 0 to 3.
    pub const ALL: [Self; 4] = [Self::Zero, Self::One, Self::Two, Self::Three];

    /// The stage with number `n`; `None` above 3.
    pub fn from_number(n: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(n).ok()?).copied()
    }

    /// The stage's number, 0 to 3.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Whether each rank keeps only its shard of the optimizer state (stages 1 to 3).
    pub fn shards_optimizer(self) -> bool {
        self >= Self::One
    }

    /// Whether each rank keeps only its shard of the gradients (stages 2 and 3).
    pub fn shards_grads(self) -> bool {
        self >= Self::Two
    }

    /// Whether each rank keeps only its shard of the parameters (stage 3).
    pub fn shards_params(self) -> bool {
        self >= Self::Three
    }
}

impl std::fmt::Display for ZeroStage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.number())
    }
}

/// Bytes per element, by purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Widths {
    /// Of a parameter in the compute dtype.
    pub param_bytes: u64,
    /// Of the parameters that all-gathers transmit: as a rule, of `param_bytes` each.
    pub gathered: WireFormat,
    /// Of a gradient in the dtype that reductions transmit, unless they are quantised.
    pub comm_grad_bytes: u64,
    /// Of the gradients that quantised reductions transmit, by all-to-all: within a group, or over
    /// all ranks, and between groups.
    #[cfg_attr(feature = "serde", serde(default))]
    pub reduced: Option<[WireFormat; 2]>,
    /// Of a gradient as kept until the optimizer step.
    pub grad_bytes: u64,
    /// Of the optimizer state, master weights included: K in the paper.
    pub optimizer: WireFormat,
}

impl Widths {
    /// fp32 training with Adam: the parameter is its own master, so K = 8 (two moments).
    pub const FP32_ADAM: Self = Self {
        param_bytes: 4,
        gathered: WireFormat::plain(4),
        comm_grad_bytes: 4,
        reduced: None,
        grad_bytes: 4,
        optimizer: WireFormat::plain(8),
    };

    /// bf16 or fp16 training with Adam: K = 12 (fp32 master and two moments).
    pub const MIXED_ADAM: Self = Self {
        param_bytes: 2,
        gathered: WireFormat::plain(2),
        comm_grad_bytes: 2,
        reduced: None,
        grad_bytes: 2,
        optimizer: WireFormat::plain(12),
    };

    /// bf16 or fp16 training with Adam and several micro-batches per step, with gradients
    /// accumulated in fp32.
    pub const MIXED_ADAM_ACCUMULATING: Self = Self {
        param_bytes: 2,
        gathered: WireFormat::plain(2),
        comm_grad_bytes: 2,
        reduced: None,
        grad_bytes: 4,
        optimizer: WireFormat::plain(12),
    };

    /// Parameters of `param_bytes`, state of `optimizer_bytes` and `grad_accum_steps` micro-batches
    /// per step: gradients of 16-bit parameters are accumulated in fp32.
    pub fn new(param_bytes: u64, optimizer_bytes: u64, grad_accum_steps: u64) -> Self {
        Self {
            param_bytes,
            gathered: WireFormat::plain(param_bytes),
            comm_grad_bytes: param_bytes,
            reduced: None,
            grad_bytes: match (param_bytes, grad_accum_steps) {
                (2, 0 | 1) => 2,
                _ => 4,
            },
            optimizer: WireFormat::plain(optimizer_bytes),
        }
    }
}
