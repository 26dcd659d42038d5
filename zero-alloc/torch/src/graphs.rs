//! Memory that recorded graphs use.
//!
//! A graph uses the same addresses whenever it is launched, so what was allocated while it was
//! recorded must not be allocated to others before the graph is gone. PyTorch opens a graph pool
//! before it records and releases it when its last graph is destroyed; until then its blocks are
//! kept.

use zero_alloc::Block;
use zero_alloc::cuda::CudaDevice;

/// PyTorch's `MempoolId_t`, a `std::pair` of two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct GraphPoolId {
    /// The first number.
    pub first: u64,
    /// The second number.
    pub second: u64,
}

/// The owner of a block that was allocated while its stream was recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recording {
    /// The graph pool that was open.
    InPool(GraphPoolId),
    /// PyTorch's cache, which opened no pool here and frees the block after its graphs.
    InCache,
}

/// The graph pools of one device.
#[derive(Default)]
pub(crate) struct GraphPools {
    /// Open pools, the newest last.
    open: Vec<GraphPoolId>,
    /// Freed blocks of pools that are not released.
    kept: Vec<(GraphPoolId, Block<CudaDevice>)>,
}

impl GraphPools {
    pub(crate) fn begin(&mut self, id: GraphPoolId) {
        self.open.push(id);
    }

    pub(crate) fn end(&mut self, id: GraphPoolId) {
        if let Some(at) = self.open.iter().rposition(|open| *open == id) {
            self.open.remove(at);
        }
    }

    /// The owner of a block that is allocated while its stream is recorded.
    pub(crate) fn owner(&self) -> Recording {
        self.open
            .last()
            .map_or(Recording::InCache, |id| Recording::InPool(*id))
    }

    pub(crate) fn open_count(&self) -> usize {
        self.open.len()
    }

    /// Keeps a freed block until its pool is released.
    pub(crate) fn keep(&mut self, id: GraphPoolId, block: Block<CudaDevice>) {
        self.kept.push((id, block));
    }

    /// Whether blocks of a pool are kept.
    pub(crate) fn keeps(&self, id: GraphPoolId) -> bool {
        self.kept.iter().any(|(pool, _)| *pool == id)
    }

    /// Removes the blocks of a pool that is released.
    pub(crate) fn release(&mut self, id: GraphPoolId) -> Vec<Block<CudaDevice>> {
        let released = self.kept.extract_if(.., |(pool, _)| *pool == id);
        released.map(|(_, block)| block).collect()
    }
}
