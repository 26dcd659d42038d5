//! The optimizer of a host that updates in place of a device.

use std::sync::Arc;
use std::time::Duration;

use zero_alloc::Pool;
use zero_alloc::device::DType;
use zero_alloc::host::{HostDevice, HostStream};
#[cfg(target_os = "linux")]
use zero_alloc::swap::SwapFile;
use zero_kernels::Kernels;

use crate::adamw::State;
use crate::controller::OptimizerConfig;
use crate::tier::Pieces;
use crate::{OffloadOptions, OptimError, ParamGroups, Segment, ShardedAdamW};

impl ShardedAdamW<HostDevice> {
    /// As [`Self::with_groups`], for a host that updates in place of a device (ZeRO-Offload, arXiv
    /// 2101.06840): the state is in host memory or on NVMe, in the format of `options`. Gradients
    /// and parameters are in host memory, which may be pinned. On NVMe the update of a unit is a
    /// pipeline of transfers and launches, with the bits of the update in memory unless the format
    /// rounds.
    ///
    /// # Errors
    /// As [`Self::with_groups`], the format does not fit the parameters, or the file could not be
    /// made.
    #[expect(
        clippy::too_many_arguments,
        reason = "those of the other constructors, and the options"
    )]
    pub fn offloaded(
        pool: &Pool<HostDevice>,
        kernels: Arc<dyn Kernels<HostDevice>>,
        stream: &HostStream,
        config: OptimizerConfig,
        param_dtype: DType,
        segments: Vec<Segment>,
        groups: &ParamGroups,
        options: &OffloadOptions,
    ) -> Result<Self, OptimError> {
        let of_pieces = Arc::clone(&kernels);
        Self::with_state(
            pool,
            kernels,
            stream,
            config,
            param_dtype,
            segments,
            groups,
            |groups, config| {
                let sizes = (param_dtype, config.sub_group_elems);
                Ok(State::Tier(Box::new(Pieces::new(
                    pool, of_pieces, stream, groups, sizes, options,
                )?)))
            },
        )
    }

    /// The scratch file of state on NVMe, with its length, the bytes read and written so far, and
    /// its notices.
    #[cfg(target_os = "linux")]
    pub fn file(&self) -> Option<&SwapFile> {
        match &self.state {
            State::Resident(_) => None,
            State::Tier(tier) => tier.file(),
        }
    }

    /// Waits at most `limit` until all state is written to the file on NVMe.
    ///
    /// # Errors
    /// A transfer failed, or the limit passed.
    pub fn wait_for_transfers(&self, limit: Duration) -> Result<(), OptimError> {
        match &self.state {
            State::Resident(_) => Ok(()),
            State::Tier(tier) => tier.wait_for_transfers(limit),
        }
    }
}
