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

/// A graph pool in use.
struct GraphPool {
    id: GraphPoolId,
    /// The graphs that were recorded into it and are not released: PyTorch begins and releases a
    /// pool once for each.
    graphs: usize,
    /// Its freed blocks.
    kept: Vec<Block<CudaDevice>>,
}

/// The graph pools of one device.
#[derive(Default)]
pub(crate) struct GraphPools {
    /// Open pools, the newest last.
    open: Vec<GraphPoolId>,
    used: Vec<GraphPool>,
}

impl GraphPools {
    pub(crate) fn begin(&mut self, id: GraphPoolId) {
        self.open.push(id);
        match self.pool(id) {
            Some(pool) => pool.graphs += 1,
            None => self.used.push(GraphPool {
                id,
                graphs: 1,
                kept: Vec::new(),
            }),
        }
    }

    fn pool(&mut self, id: GraphPoolId) -> Option<&mut GraphPool> {
        self.used.iter_mut().find(|pool| pool.id == id)
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

    /// Keeps a freed block until its pool is released. Returns it if that has happened, such as
    /// that of a result that outlives its graph.
    pub(crate) fn keep(
        &mut self,
        id: GraphPoolId,
        block: Block<CudaDevice>,
    ) -> Option<Block<CudaDevice>> {
        match self.pool(id) {
            Some(pool) => {
                pool.kept.push(block);
                None
            }
            None => Some(block),
        }
    }

    /// Whether the next release of a pool frees blocks.
    pub(crate) fn frees_at_release(&mut self, id: GraphPoolId) -> bool {
        self.pool(id)
            .is_some_and(|pool| pool.graphs == 1 && !pool.kept.is_empty())
    }

    /// Releases a pool. Returns its blocks if no graph uses it any more.
    pub(crate) fn release(&mut self, id: GraphPoolId) -> Vec<Block<CudaDevice>> {
        let Some(at) = self.used.iter().position(|pool| pool.id == id) else {
            return Vec::new();
        };
        self.used[at].graphs -= 1;
        match self.used[at].graphs {
            0 => self.used.swap_remove(at).kept,
            _ => Vec::new(),
        }
    }
}
