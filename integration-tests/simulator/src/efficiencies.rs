//! The six parameters of calibration.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Machine;

/// The parts of a machine's peaks that a software reaches: the six parameters of calibration.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Efficiencies {
    /// Part of the peak that matrix products reach.
    pub products: f64,
    /// Part of the peak that flash attention reaches.
    pub attention: f64,
    /// Part of the memory's bandwidth that kernels reach.
    pub memory: f64,
    /// Part of the speed of computation that is lost while a collective runs.
    pub slowdown: f64,
    /// Microseconds in which the host launches one kernel.
    pub launch_us: f64,
    /// Part of .8 of the network's bandwidth between nodes that collectives reach.
    pub network: f64,
}

impl Efficiencies {
    /// Typical values of training software. Calibration starts here.
    pub const PRIOR: Self = Self {
        products: 0.70,
        attention: 0.30,
        memory: 0.70,
        slowdown: 0.25,
        launch_us: 20.0,
        network: 1.0,
    };

    /// Those of our trainer: fitted to the six rows of `tests/data/ours.csv`, one H200 on 2026-11-26.
    /// Nothing ran on several GPUs, so the last three are the prior's.
    pub const OURS: Self = Self {
        products: 0.67,
        attention: 0.50,
        memory: 0.95,
        ..Self::PRIOR
    };

    /// [`Efficiencies::OURS`] as parts of measured rates, of which `zero measure` gets fewer than data
    /// sheets say: the best product about .77 of the peak, a copy .93 of the memory's rate, as on an
    /// H200.
    pub const OF_MEASURED: Self = Self {
        products: 0.87,
        attention: 0.65,
        memory: 1.02,
        ..Self::PRIOR
    };

    /// Those of our trainer on two cores of an AMD EPYC (Zen 4), 2026-11-26. `zero measure` measures the
    /// peaks of a host, with the same products. `slowdown` is what the threads of a rank lose against
    /// ranks of one thread.
    pub const HOST: Self = Self {
        products: 1.0,
        attention: 0.8,
        memory: 0.9,
        slowdown: 0.04,
        launch_us: 17.0,
        network: 0.8,
    };

    /// Those of our trainer on this machine, as far as they are known.
    pub fn ours(machine: &Machine) -> Self {
        match machine {
            Machine { cores: Some(_), .. } => Self::HOST,
            Machine { measured: true, .. } => Self::OF_MEASURED,
            _ => Self::OURS,
        }
    }

    /// Where calibration starts on this machine.
    pub fn prior(machine: &Machine) -> Self {
        match machine {
            Machine { cores: Some(_), .. } => Self::HOST,
            Machine { measured: true, .. } => Self::OF_MEASURED,
            _ => Self::PRIOR,
        }
    }

    /// The lowest values that calibration accepts.
    pub const LOW: Self = Self {
        products: 0.2,
        attention: 0.05,
        memory: 0.15,
        slowdown: 0.01,
        launch_us: 1.0,
        network: 0.2,
    };

    /// The highest values that calibration accepts. A part above 1 means that the
    /// formulas count more work than is done.
    pub const HIGH: Self = Self {
        products: 1.1,
        attention: 1.0,
        memory: 1.2,
        slowdown: 0.8,
        launch_us: 200.0,
        network: 1.5,
    };

    /// The fields in order.
    pub(crate) fn to_array(self) -> [f64; 6] {
        [
            self.products,
            self.attention,
            self.memory,
            self.slowdown,
            self.launch_us,
            self.network,
        ]
    }

    /// The inverse of [`Efficiencies::to_array`].
    pub(crate) fn from_array(values: [f64; 6]) -> Self {
        let [products, attention, memory, slowdown, launch_us, network] = values;
        Self {
            products,
            attention,
            memory,
            slowdown,
            launch_us,
            network,
        }
    }
}

impl fmt::Display for Efficiencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [products, attention, memory, slowdown, launch_us, network] = self.to_array();
        write!(
            f,
            "products {products:.3} of the peak, attention {attention:.3}, memory {memory:.3}, \
             slowdown {slowdown:.3}, {launch_us:.1} us a launch, network {network:.3}"
        )
    }
}
