//! Everything a rank holds, by purpose and by tier of memory.
//!
//! | purpose | bytes |
//! |---|---|
//! | parameters, gradients, optimizer state | [`StateBytes`], on the tier where [`Placement`] puts each |
//! | gathered units | the most elements live at once, at stage 3 |
//! | buckets | of constant size: they do not grow with the model |
//! | scratch | flat gradients while a backward pass adds to them |
//! | staging | host memory between the device and NVMe: sub-groups in flight |
//! | activations | an estimate, such as [`ActivationBytes`](crate::ActivationBytes) |

use crate::checked::{product, sum};
use crate::{ShardError, StateBytes, Widths, ZeroStage};

const WHAT: &str = "bytes of a rank";

/// A tier of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Tier {
    /// The accelerator's own.
    Device,
    /// The host's.
    Host,
    /// A disk.
    Nvme,
}

/// Where the shards live (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Placement {
    /// Parameters; away from the device only where they are sharded (stage 3).
    pub params: Tier,
    /// Gradients; away from the device only where they are sharded (stages 2 and 3).
    pub grads: Tier,
    /// Optimizer state; away from the device at any stage.
    pub optimizer: Tier,
}

impl Placement {
    /// All on the device.
    pub const DEVICE: Self = Self { params: Tier::Device, grads: Tier::Device, optimizer: Tier::Device };

    /// Optimizer state on `tier`, and with it the gradients of stages 2 and 3 in host memory, where the step
    /// is taken.
    pub fn offload_optimizer(stage: ZeroStage, tier: Tier) -> Self {
        let away = stage.shards_grads() && tier != Tier::Device;
        Self { params: Tier::Device, grads: if away { Tier::Host } else { Tier::Device }, optimizer: tier }
    }
}

/// What a rank holds on one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TierBytes {
    /// Parameters, gradients and optimizer state kept from step to step.
    pub state: StateBytes,
    /// Units gathered at once (stage 3).
    pub gathered_bytes: u64,
    /// Communication buckets.
    pub buckets_bytes: u64,
    /// Flat gradients while a backward pass adds to them.
    pub scratch_bytes: u64,
    /// Sub-groups on their way between the host and NVMe.
    pub staging_bytes: u64,
    /// Activations.
    pub activations_bytes: u64,
}

impl TierBytes {
    /// All of it.
    ///
    /// # Errors
    /// The sum does not fit 64 bits.
    pub fn total_bytes(&self) -> Result<u64, ShardError> {
        let state = [self.state.params_bytes, self.state.grads_bytes, self.state.optimizer_bytes];
        let moving = [self.gathered_bytes, self.buckets_bytes, self.scratch_bytes, self.staging_bytes];
        sum(WHAT, &[&state[..], &moving[..], &[self.activations_bytes]].concat())
    }
}

/// What a rank holds, by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Footprint {
    /// On the device.
    pub device: TierBytes,
    /// In host memory, for this rank alone.
    pub host: TierBytes,
    /// On disk, for this rank alone.
    pub nvme: TierBytes,
}

/// Everything that the bytes of a rank depend on, but the model's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MemoryModel {
    /// What is sharded.
    pub stage: ZeroStage,
    /// Bytes an element.
    pub widths: Widths,
    /// Where the shards live.
    pub placement: Placement,
    /// The most elements gathered at once, at stage 3.
    pub gathered_elems: u64,
    /// Elements of a bucket.
    pub bucket_elems: u64,
    /// How many buckets there are.
    pub buckets: u64,
    /// Bytes of flat gradients to which a backward pass adds.
    pub scratch_bytes: u64,
    /// Elements of a sub-group, for what lies on NVMe.
    pub sub_group_elems: u64,
    /// How many sub-groups are in host memory at once.
    pub sub_group_buffers: u64,
    /// Bytes of activations.
    pub activations_bytes: u64,
}

impl MemoryModel {
    /// Only parameters, gradients and optimizer state, all on the device.
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

    /// The bytes of a rank that keeps `state`.
    ///
    /// # Errors
    /// Something is placed away from the device that is not sharded, or a sum does not fit 64 bits.
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
        let mut staged = 0u64; // bytes an element of what comes and goes
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

    /// The most parameters whose rank fits `device_bytes` of device memory on `world_size` ranks, the
    /// gathered units, buckets and activations being as given. 0 if not even those fit.
    ///
    /// # Errors
    /// A world of no ranks, or something is placed away from the device that is not sharded.
    pub fn largest_model_elems(&self, world_size: u64, device_bytes: u64) -> Result<u64, ShardError> {
        self.footprint(&StateBytes::of_elems(self.stage, &self.widths, 0, world_size)?)?;
        // What does not fit 64 bits does not fit the device.
        Ok(largest(|elems| {
            let state = StateBytes::of_elems(self.stage, &self.widths, elems, world_size);
            let total = state.and_then(|state| self.footprint(&state)?.device.total_bytes());
            total.is_ok_and(|bytes| bytes <= device_bytes)
        }))
    }
}

/// The greatest n for which `fits` holds, which must hold up to some n and not above; 0 if it never holds.
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
