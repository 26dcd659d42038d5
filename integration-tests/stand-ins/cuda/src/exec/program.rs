//! A kernel, decoded: every operand is a slot, every instruction a closure that works on all lanes of a warp at once.

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

/// Why a kernel ended early.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) failure: Failure,
    pub(crate) what: String,
}

pub(crate) fn fault<T>(failure: Failure, what: impl Into<String>) -> Result<T, Box<Fault>> {
    Err(Box::new(Fault { failure, what: what.into() }))
}

pub(crate) type Done<T = ()> = Result<T, Box<Fault>>;

/// The effect of an instruction on the active lanes.
pub(crate) type Action = Box<dyn Fn(&mut Warp, &mut BlockMemory, Mask) -> Done + Send + Sync>;

/// The index of an operand's register, 64 bits a lane. Constants and special registers have slots too.
pub(crate) type Slot = usize;

/// A register of one bit a lane.
pub(crate) type PredSlot = usize;

/// A special register, constant for a thread's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    ThreadId(usize),
    BlockDim(usize),
    BlockId(usize),
    GridDim(usize),
    Lane,
    Warp,
    Warps,
    Multiprocessor,
    Multiprocessors,
    Grid,
    LanesEqual,
    LanesLess,
    LanesLessOrEqual,
    LanesGreater,
    LanesGreaterOrEqual,
    DynamicSharedBytes,
    TotalSharedBytes,
}

/// How a barrier combines its threads' predicates, and where the result goes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reduction {
    None,
    Count { source: PredSlot, negate: bool, to: Slot },
    All { source: PredSlot, negate: bool, to: PredSlot },
    Any { source: PredSlot, negate: bool, to: PredSlot },
}

/// The control flow after an instruction.
pub(crate) enum Flow {
    /// The next one.
    Do(Action),
    /// The next one, once all live lanes of the mask in this slot are here.
    Together {
        members: Slot,
        action: Action,
    },
    Jump(usize),
    /// By an index into the targets.
    JumpTable {
        index: Slot,
        targets: Vec<usize>,
    },
    Exit,
    /// The threads wait for `count` threads of the block, or for all.
    Barrier {
        number: Slot,
        count: Option<Slot>,
        reduction: Reduction,
        waits: bool,
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
    pub(crate) local_bytes: usize,
    /// Static shared memory; dynamic memory follows it.
    pub(crate) shared_bytes: usize,
    /// Offset and size of each parameter.
    pub(crate) params: Vec<(usize, usize)>,
    pub(crate) max_threads: u32,
    pub(crate) required_block: Option<[u32; 3]>,
    /// As declared in 32-bit registers; what a GPU would need is not known here.
    pub(crate) registers: u32,
}
