//! The places of a run's optimizer state, parameters and activation checkpoints.
//!
//! Parameters off the device imply that the host updates: the optimizer state then is at least in
//! host memory. With parameters on NVMe the gradients are there, too: they are as large, so if the
//! parameters do not fit, the gradients would not. Parameters are then read three times a step (two
//! gathers, and the updates that need old values) and written once.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use zero_alloc::swap::SwapOptions;
use zero_comm::PrefetchOptions;
use zero_optim::StateFormat;
pub use zero_shard::Home;
use zero_shard::{Layout, Tier};

/// The offload of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OffloadSettings {
    /// Masters and moments, and with them the update: off the device, the host updates.
    pub optimizer: Home,
    /// Parameters; only at stage 3.
    pub params: Home,
    /// Whether activation checkpoints are kept in host memory.
    pub activations: bool,
    /// Sub-groups of optimizer state in host memory at once, if it is on NVMe.
    pub buffers: usize,
    /// Requests in flight to a scratch file.
    pub queue_depth: usize,
    /// Bytes of one request.
    pub request_bytes: usize,
    /// The format of masters and moments. Moments in bf16 need an optimizer that is off the device.
    pub format: StateFormat,
}

impl fmt::Display for OffloadSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StateFormat {
            masters, moments, ..
        } = self.format;
        let mut parts = Vec::new();
        if self.updates_on_host() {
            parts.push(format!(
                "optimizer state in {} (masters {masters}, moments {moments})",
                self.optimizer
            ));
        }

        if self.params != Home::Device {
            parts.push(format!("parameters in {}", self.params));
        }
        if self.activations {
            parts.push("activation checkpoints in cpu".to_owned());
        }

        f.write_str(&parts.join(", "))
    }
}

impl Default for OffloadSettings {
    fn default() -> Self {
        Self {
            optimizer: Home::Device,
            params: Home::Device,
            activations: false,
            buffers: 4,
            queue_depth: 32,
            request_bytes: 1 << 20,
            format: StateFormat::default(),
        }
    }
}

impl OffloadSettings {
    /// Whether the host updates, from state in host memory or on NVMe.
    pub fn updates_on_host(&self) -> bool {
        self.optimizer != Home::Device || self.params != Home::Device
    }

    /// The folder of the gradients' scratch file: that of the parameters, whose gradients are as
    /// large.
    pub fn grads_on_file(&self) -> Option<&Path> {
        match &self.params {
            Home::Nvme(dir) => Some(dir),
            _ => None,
        }
    }

    /// How scratch files are read and written.
    pub(crate) fn swap(&self) -> SwapOptions {
        SwapOptions::default()
            .queue_depth(self.queue_depth)
            .request_bytes(self.request_bytes)
    }

    /// Whether all is on the device and nothing else is set.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Whether anything is offloaded.
    pub fn is_any(&self) -> bool {
        self.updates_on_host() || self.activations
    }

    /// The most units that are gathered ahead from parameters on NVMe; each needs a buffer of the
    /// largest shard. Why the number does not follow from the bandwidth: the reads of one unit fill
    /// the disk's queue, so more units are read no faster. In modelled time four units ahead gain
    /// nothing over one (`one_unit_ahead_is_enough`).
    pub fn units_ahead(prefetch: &PrefetchOptions, layout: &Layout) -> usize {
        let largest = layout
            .units()
            .iter()
            .map(|u| u.padded_elems as usize)
            .max()
            .unwrap_or(0)
            .max(1);
        // One unit is gathered ahead even if it is larger than the limit of elements.
        let within_limit = (prefetch.ahead_elems / largest).max(1);
        prefetch.ahead.min(within_limit).min(layout.units().len())
    }

    /// Whether anything is on NVMe.
    pub fn uses_nvme(&self) -> bool {
        [&self.optimizer, &self.params]
            .into_iter()
            .any(|home| home.tier() == Tier::Nvme)
    }
}
