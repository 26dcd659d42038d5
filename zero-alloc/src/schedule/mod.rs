//! Schedules: what a program enqueues on its streams, recorded and not run, and the times that
//! follow from the costs of its operations.
//!
//! A [`Recorder`] makes devices whose streams record: [`Recorder::host`], with memory that takes no
//! pages until something touches it, and [`Recorder::device`], whose addresses are fictitious. A
//! program that enqueues its work on them, with its own streams, events and waits, leaves a
//! [`Schedule`]. [`Schedule::times`] adds it up for any costs, as often as needed: a step of a
//! thousand operations takes tens of microseconds.
//!
//! Times are those of [`HostDevice::modelled`](crate::host::HostDevice), to the nanosecond, where
//! nothing [slows](Cost::slowdown) an operation down; `tests/suite/schedule.rs` compares the two for
//! random programs.

mod causality;
mod device;
mod recorded_queue;
mod recorder;
mod times;

pub use crate::timeline::Work;
pub(crate) use causality::{CausalPoint, CausalStream, Causality};
pub use device::ScheduledDevice;
pub(crate) use recorded_queue::RecordedQueue;
pub(crate) use recorder::RecordedPoint;
pub use recorder::{Item, Operation, Recorder, Schedule};
pub use times::{Cost, Times};
