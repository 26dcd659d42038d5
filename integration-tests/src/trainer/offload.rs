//! Where a run keeps its optimizer state, parameters and activation checkpoints.

use std::path::PathBuf;

use zero_shard::Tier;

/// Where a kind of state is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Home {
    /// Memory of the compute device.
    #[default]
    Device,
    /// Host memory, pinned where the device is a GPU. The same as the device if that is the host.
    Host,
    /// A scratch file in this folder.
    Nvme(PathBuf),
}

impl Home {
    /// Its tier.
    pub fn tier(&self) -> Tier {
        match self {
            Self::Device => Tier::Device,
            Self::Host => Tier::Host,
            Self::Nvme(_) => Tier::Nvme,
        }
    }
}

/// What is offloaded, and how.
#[derive(Clone, Debug, PartialEq)]
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
    /// The format of offloaded masters and moments.
    pub format: StateFormat,
}

/// The format of offloaded masters and moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateFormat {
    /// bf16 parameters with a 16-bit remainder instead of fp32 masters.
    pub remainder: bool,
    /// Moments in bf16, rounded stochastically, instead of fp32.
    pub bf16_moments: bool,
}

impl StateFormat {
    /// Bytes of state per element, without the parameter itself. `has_master`: fp32 masters apart from the parameters.
    pub fn bytes(self, has_master: bool) -> u64 {
        let master = match (has_master, self.remainder) {
            (false, _) => 0,
            (true, true) => 2,
            (true, false) => 4,
        };
        master + if self.bf16_moments { 4 } else { 8 }
    }
}

impl Default for OffloadSettings {
    fn default() -> Self {
        Self {
            optimizer: Home::Device,
            params: Home::Device,
            activations: false,
            buffers: 3,
            queue_depth: 32,
            request_bytes: 1 << 20,
            format: StateFormat::default(),
        }
    }
}

impl OffloadSettings {
    /// Whether the host updates, from state in host memory or on NVMe.
    pub fn updates_on_host(&self) -> bool {
        self.optimizer != Home::Device
    }
}
