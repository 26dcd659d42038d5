//! A decoded kernel: every operand is a slot, every instruction a closure on all lanes of a warp.

use super::block::BlockMemory;
use super::warp::Warp;
use crate::error::Failure;

/// A set of lanes, lane 0 in the lowest bit.
pub(crate) type Mask = u32;

/// All lanes of a warp.
pub(crate) const ALL: Mask = !0;

/// The lanes of a set, ascending.
pub(crate) fn lanes(mask: Mask) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        let lane = rest.trailing_zeros() as usize;
        (rest != 0).then(|| {
            rest &= rest - 1;
            lane
        })
    })
}

/// An error that ended a kernel.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) failure: Failure,
    pub(crate) what: String,
}

pub(crate) fn fault<T>(failure: Failure, what: impl Into<String>) -> Result<T, Box<Fault>> {
    Err(Box::new(Fault {
        failure,
        what: what.into(),
    }))
}

pub(crate) type Done<T = ()> = Result<T, Box<Fault>>;

/// The effect of an instruction on the active lanes.
pub(crate) type Action = Box<dyn Fn(&mut Warp, &mut BlockMemory, Mask) -> Done + Send + Sync>;

/// The index of a register of 64 bits per lane. Constants and special registers have slots too.
pub(crate) type Slot = usize;

/// The index of a register of one bit per lane.
pub(crate) type PredSlot = usize;

/// A special register, constant during a thread's lifetime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    ThreadId(usize),
    BlockDim(usize),
    BlockId(usize),
    GridDim(usize),
    Lane,
    Warp,
}

/// The control flow after an instruction.
pub(crate) enum Flow {
    /// Continues with the next instruction.
    Do(Action),
    /// Continues with the next instruction once all live lanes of the mask in `members` have
    /// arrived here.
    Together {
        members: Slot,
        action: Action,
    },
    Jump(usize),
    Exit,
    /// Waits for all threads of the block.
    Barrier {
        number: Slot,
    },
}

pub(crate) struct Instruction {
    /// The predicate, and whether it is negated.
    pub(crate) guard: Option<(PredSlot, bool)>,
    pub(crate) flow: Flow,
    pub(crate) line: u32,
}

/// A kernel, ready to run.
pub(crate) struct Program {
    pub(crate) name: String,
    pub(crate) code: Vec<Instruction>,
    pub(crate) slots: usize,
    pub(crate) pred_slots: usize,
    pub(crate) constants: Vec<(Slot, u64)>,
    pub(crate) specials: Vec<(Slot, Special)>,
    /// Predicate slots that are true in all lanes.
    pub(crate) true_pred: PredSlot,
    /// Static shared memory; dynamic memory follows it.
    pub(crate) shared_bytes: usize,
    /// Offset and size of each parameter.
    pub(crate) params: Vec<(usize, usize)>,
    pub(crate) max_threads: u32,
    pub(crate) required_block: Option<[u32; 3]>,
    /// Declared 32-bit registers; a GPU's count is unknown here.
    pub(crate) registers: u32,
}
