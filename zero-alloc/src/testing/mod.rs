//! Devices for tests: one without memory, and one whose calls fail on request.

mod faulty;
mod simulated;

pub use faulty::{Call, Faulty, FaultyStream};
pub use simulated::{Simulated, SimulatedUse};
