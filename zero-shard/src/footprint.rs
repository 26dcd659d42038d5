//! The memory of a rank, by purpose and tier.
//!
//! | purpose | bytes |
//! |---|---|
//! | parameters, gradients, optimizer state | [`StateBytes`], on the tier where [`Placement`] puts each |
//! | gathered units | the maximum of elements gathered at once, at stage 3 |
//! | buckets | a constant, independent of the model's size |
//! | scratch | flat gradients while a backward pass accumulates into them |
//! | copies | host copies of the parameters that the host updates and that are on the device |
//! | staging | buffers of transfers: on the device two shards of a unit; on the host those to and from NVMe |
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

/// The tier of each kind of shard (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv
/// 2104.07857).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Placement {
    /// Parameters. Off the device only at stage 3, which shards them.
    pub params: Tier,
    /// Gradients. Off the device, a rank keeps those that it updates with: its shard, or all of
    /// them at stage 0.
    pub grads: Tier,
    /// Optimizer state. Off the device at any stage.
    pub optimizer: Tier,
}

impl Placement {
    /// All on the device.
    pub const DEVICE: Self = Self {
        params: Tier::Device,
        grads: Tier::Device,
        optimizer: Tier::Device,
    };

    /// Places the optimizer state on `tier`. If that is off the device, gradients are in host
    /// memory, since the optimizer then runs on the host.
    pub fn offload_optimizer(tier: Tier) -> Self {
        let grads = if tier == Tier::Device {
            Tier::Device
        } else {
            Tier::Host
        };
        Self {
            params: Tier::Device,
            grads,
            optimizer: tier,
        }
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
    /// Copies of parameters on another tier.
    pub copies_bytes: u64,
    /// Buffers of transfers between tiers.
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
        let state = [
            self.state.params_bytes,
            self.state.grads_bytes,
            self.state.optimizer_bytes,
        ];
        let moving = [self.gathered_bytes, self.buckets_bytes, self.scratch_bytes];
        let offloaded = [self.copies_bytes, self.staging_bytes];
        sum(
            WHAT,
            &[
                &state[..],
                &moving[..],
                &offloaded[..],
                &[self.activations_bytes],
            ]
            .concat(),
        )
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
    /// Elements of the largest shard of a unit, the size of a transfer of parameters between tiers.
    pub unit_shard_elems: u64,
    /// Number of shards of units in host memory at once, for parameters on NVMe.
    pub param_buffers: u64,
    /// Bytes of activations on the device.
    pub activations_bytes: u64,
    /// Bytes of activation checkpoints in host memory.
    pub host_activations_bytes: u64,
}

setters!(MemoryModel {
    placement: Placement,
    gathered_elems: u64,
    bucket_elems: u64,
    buckets: u64,
    scratch_bytes: u64,
    sub_group_elems: u64,
    sub_group_buffers: u64,
    unit_shard_elems: u64,
    param_buffers: u64,
    activations_bytes: u64,
    host_activations_bytes: u64,
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
            unit_shard_elems: 0,
            param_buffers: 0,
            activations_bytes: 0,
            host_activations_bytes: 0,
        }
    }

    /// Returns the bytes of a rank that keeps `state` and updates `updated_elems` elements
    /// ([`Layout::updated_elems`](crate::Layout::updated_elems)).
    ///
    /// # Errors
    /// Parameters that are not sharded are placed off the device, or a sum does not fit 64 bits.
    pub fn footprint(
        &self,
        state: &StateBytes,
        updated_elems: u64,
    ) -> Result<Footprint, ShardError> {
        let stage = self.stage.number();
        if self.placement.params != Tier::Device && !self.stage.shards_params() {
            return Err(ShardError::NotSharded {
                what: "parameters",
                needs_stage: 3,
                stage,
            });
        }

        let grads_bytes = match self.placement.grads {
            Tier::Device => state.grads_bytes,
            _ => product(WHAT, &[updated_elems, self.widths.grad_bytes])?,
        };

        let state = StateBytes {
            grads_bytes,
            ..*state
        };

        let on = |tier: Tier| {
            let here = |placed: Tier, bytes: u64| if placed == tier { bytes } else { 0 };
            StateBytes {
                params_bytes: here(self.placement.params, state.params_bytes),
                grads_bytes: here(self.placement.grads, state.grads_bytes),
                optimizer_bytes: here(self.placement.optimizer, state.optimizer_bytes),
            }
        };

        let device = self.device_bytes(on(Tier::Device))?;
        let host = self.host_bytes(on(Tier::Host), updated_elems)?;
        let nvme = TierBytes {
            state: on(Tier::Nvme),
            ..TierBytes::default()
        };

        let footprint = Footprint { device, host, nvme };
        for tier in [device, host, nvme] {
            tier.total_bytes()?;
        }
        Ok(footprint)
    }

    /// The device's bytes, of which `state` is the state.
    fn device_bytes(&self, state: StateBytes) -> Result<TierBytes, ShardError> {
        let widths = &self.widths;
        let gathered = if self.stage.shards_params() {
            self.gathered_elems
        } else {
            0
        };

        let buckets = [self.bucket_elems, self.buckets, widths.comm_grad_bytes];
        let staging_bytes = match (self.placement.params, self.placement.optimizer) {
            (Tier::Device, Tier::Device) => 0,
            _ => product(WHAT, &[2, self.unit_shard_elems, widths.param_bytes])?,
        };

        Ok(TierBytes {
            state,
            gathered_bytes: product(WHAT, &[gathered, widths.param_bytes])?,
            buckets_bytes: product(WHAT, &buckets)?,
            scratch_bytes: self.scratch_bytes,
            copies_bytes: 0,
            staging_bytes,
            activations_bytes: self.activations_bytes,
        })
    }

    /// The host's bytes, of which `state` is the state.
    fn host_bytes(&self, state: StateBytes, updated_elems: u64) -> Result<TierBytes, ShardError> {
        let widths = &self.widths;
        let placement = &self.placement;
        let through_host = |tier: Tier, factors: &[u64]| match tier {
            Tier::Nvme => product(WHAT, factors),
            _ => Ok(0),
        };

        // Two units that arrive, and two whose sums are read or written.
        let grad_bytes = sum(WHAT, &[widths.comm_grad_bytes, widths.grad_bytes])?;
        let grads = [2, self.unit_shard_elems, grad_bytes];
        let sub_group = widths.optimizer.checked_bytes(WHAT, self.sub_group_elems)?;
        let optimizer = [sub_group, self.sub_group_buffers];
        let params = [
            self.unit_shard_elems,
            self.param_buffers,
            widths.param_bytes,
        ];
        let staging = [
            through_host(placement.grads, &grads)?,
            through_host(placement.optimizer, &optimizer)?,
            through_host(placement.params, &params)?,
        ];
        let copies_bytes = match (placement.params, placement.optimizer) {
            (Tier::Device, Tier::Host | Tier::Nvme) => {
                product(WHAT, &[updated_elems, widths.param_bytes])?
            }
            _ => 0,
        };

        Ok(TierBytes {
            state,
            copies_bytes,
            staging_bytes: sum(WHAT, &staging)?,
            activations_bytes: self.host_activations_bytes,
            ..TierBytes::default()
        })
    }
}

/// Returns the greatest n for which the monotone predicate `fits` holds; 0 if it never holds.
pub fn largest(mut fits: impl FnMut(u64) -> bool) -> u64 {
    let mut low = 0u64;
    let mut high = u64::MAX;
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
