//! The memory of a rank, by purpose and tier.
//!
//! | purpose | bytes |
//! |---|---|
//! | parameters, gradients, optimizer state | [`StateBytes`], on the tier where [`Placement`] puts each |
//! | gathered units | the maximum of elements gathered at once, at stage 3 |
//! | buckets | a constant, independent of the model's size |
//! | scratch | flat gradients while a backward pass accumulates into them |
//! | staging | host memory for sub-groups in transfer between the device and NVMe |
//! | activations | an estimate, such as [`ActivationBytes`](crate::ActivationBytes) |

use crate::checked::{product, sum};
use crate::{ShardError, StateBytes, Widths, ZeroStage};

const WHAT: &str = "bytes of a rank";

/// A tier of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Tier {
    /// Memory of the accelerator.
    Device,
    /// Memory of the host.
    Host,
    /// A disk.
    Nvme,
}

/// The tier of each kind of shard (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Placement {
    /// Parameters. Off the device only at stage 3, which shards them.
    pub params: Tier,
    /// Gradients. Off the device only at stages 2 and 3, which shard them.
    pub grads: Tier,
    /// Optimizer state. Off the device at any stage.
    pub optimizer: Tier,
}

impl Placement {
    /// All on the device.
    pub const DEVICE: Self = Self { params: Tier::Device, grads: Tier::Device, optimizer: Tier::Device };

    /// Places the optimizer state on `tier`. If that is off the device, gradients of stages 2 and 3 are in host
    /// memory, since the optimizer then runs on the host.
    pub fn offload_optimizer(stage: ZeroStage, tier: Tier) -> Self {
        let away = stage.shards_grads() && tier != Tier::Device;
        Self { params: Tier::Device, grads: if away { Tier::Host } else { Tier::Device }, optimizer: tier }
    }
}

/// Bytes of a rank on one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct TierBytes {
    /// Parameters, gradients and optimizer state kept from step to step.
    pub state: StateBytes,
    /// Units gathered at once (stage 3).
    pub gathered_bytes: u64,
    /// Communication buckets.
    pub buckets_bytes: u64,
    /// Flat gradients while a backward pass accumulates into them.
    pub scratch_bytes: u64,
    /// Sub-groups in transfer between the device and NVMe.
    pub staging_bytes: u64,
    /// Activations.
    pub activations_bytes: u64,
}

impl TierBytes {
    /// The sum.
    ///
    /// # Errors
    /// The sum does not fit 64 bits.
    pub fn total_bytes(&self) -> Result<u64, ShardError> {
        let state = [self.state.params_bytes, self.state.grads_bytes, self.state.optimizer_bytes];
        let moving = [self.gathered_bytes, self.buckets_bytes, self.scratch_bytes, self.staging_bytes];
        sum(WHAT, &[&state[..], &moving[..], &[self.activations_bytes]].concat())
    }
}

/// Bytes of a rank, by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Footprint {
    /// On the device.
    pub device: TierBytes,
    /// In host memory; this rank's share only.
    pub host: TierBytes,
    /// On NVMe; this rank's share only.
    pub nvme: TierBytes,
}

/// The inputs of a rank's memory, except for the model's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct MemoryModel {
    /// The ZeRO stage.
    pub stage: ZeroStage,
    /// Bytes per element.
    pub widths: Widths,
    /// The tier of each kind of shard.
    pub placement: Placement,
    /// Maximum number of elements gathered at once, at stage 3.
    pub gathered_elems: u64,
    /// Elements of a bucket.
    pub bucket_elems: u64,
    /// Number of buckets.
    pub buckets: u64,
    /// Bytes of flat gradients into which a backward pass accumulates.
    pub scratch_bytes: u64,
    /// Elements of a sub-group, for state on NVMe.
    pub sub_group_elems: u64,
    /// Number of sub-groups in host memory at once.
    pub sub_group_buffers: u64,
    /// Bytes of activations.
    pub activations_bytes: u64,
}

setters!(MemoryModel {
    placement: Placement,
    gathered_elems: u64,
    bucket_elems: u64,
    buckets: u64,
    scratch_bytes: u64,
    sub_group_elems: u64,
    sub_group_buffers: u64,
    activations_bytes: u64,
});

impl MemoryModel {
    /// A model of parameters, gradients and optimizer state only, all on the device.
    pub fn state_only(stage: ZeroStage, widths: Widths) -> Self {
        Self {
            stage,
            widths,
            placement: Placement::DEVICE,
            gathered_elems: 0,
            bucket_elems: 0,
            buckets: 0,
            scratch_bytes: 0,
            sub_group_elems: 0,
            sub_group_buffers: 0,
            activations_bytes: 0,
        }
    }

    /// Returns the bytes of a rank that keeps `state`.
    ///
    /// # Errors
    /// State that is not sharded is placed off the device, or a sum does not fit 64 bits.
    pub fn footprint(&self, state: &StateBytes) -> Result<Footprint, ShardError> {
        let stage = self.stage.number();
        if self.placement.params != Tier::Device && !self.stage.shards_params() {
            return Err(ShardError::NotSharded { what: "parameters", needs_stage: 3, stage });
        }
        if self.placement.grads != Tier::Device && !self.stage.shards_grads() {
            return Err(ShardError::NotSharded { what: "gradients", needs_stage: 2, stage });
        }
        let on = |tier: Tier| {
            let here = |placed: Tier, bytes: u64| if placed == tier { bytes } else { 0 };
            StateBytes {
                params_bytes: here(self.placement.params, state.params_bytes),
                grads_bytes: here(self.placement.grads, state.grads_bytes),
                optimizer_bytes: here(self.placement.optimizer, state.optimizer_bytes),
            }
        };
        let widths = &self.widths;
        let gathered = if self.stage.shards_params() { self.gathered_elems } else { 0 };
        let device = TierBytes {
            state: on(Tier::Device),
            gathered_bytes: product(WHAT, &[gathered, widths.param_bytes])?,
            buckets_bytes: product(WHAT, &[self.bucket_elems, self.buckets, widths.comm_grad_bytes])?,
            scratch_bytes: self.scratch_bytes,
            staging_bytes: 0,
            activations_bytes: self.activations_bytes,
        };
        let mut staged = 0u64; // bytes of state on NVMe per element
        for (tier, bytes) in [
            (self.placement.params, widths.param_bytes),
            (self.placement.grads, widths.grad_bytes),
            (self.placement.optimizer, widths.optimizer_bytes),
        ] {
            if tier == Tier::Nvme {
                staged = sum(WHAT, &[staged, bytes])?;
            }
        }
        let staging_bytes = product(WHAT, &[self.sub_group_elems, self.sub_group_buffers, staged])?;
        let host = TierBytes { state: on(Tier::Host), staging_bytes, ..TierBytes::default() };
        let nvme = TierBytes { state: on(Tier::Nvme), ..TierBytes::default() };
        let footprint = Footprint { device, host, nvme };
        for tier in [device, host, nvme] {
            tier.total_bytes()?;
        }
        Ok(footprint)
    }

    /// Returns the maximum number of parameters for which each of `world_size` ranks fits into `device_bytes` of
    /// device memory, with this model's gathered units, buckets and activations; 0 if those alone do not fit.
    ///
    /// # Errors
    /// A world without ranks, or state that is not sharded is placed off the device.
    pub fn largest_model_elems(&self, world_size: u64, device_bytes: u64) -> Result<u64, ShardError> {
        self.footprint(&StateBytes::of_elems(self.stage, &self.widths, 0, world_size)?)?;
        // A size that overflows 64 bits does not fit the device.
        Ok(largest(|elems| {
            let state = StateBytes::of_elems(self.stage, &self.widths, elems, world_size);
            let total = state.and_then(|state| self.footprint(&state)?.device.total_bytes());
            total.is_ok_and(|bytes| bytes <= device_bytes)
        }))
    }
}

/// Returns the greatest n for which the monotone predicate `fits` holds; 0 if it never holds.
pub fn largest(mut fits: impl FnMut(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0u64, u64::MAX);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}
