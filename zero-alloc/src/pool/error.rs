//! Allocation errors.

use super::state::State;
use super::{Purpose, Report};
use crate::device::{Device, DeviceError};

/// The reason why a block could not be allocated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum AllocError {
    /// The request exceeds the budget, or the device is out of memory.
    #[error(
        "failed to allocate {requested_bytes} bytes for {purpose:?}: {}; the pool has {live_bytes} bytes live ({}), and \
         {free_bytes} bytes reserved and free, {largest_free_bytes} of them contiguous",
        cause(*budget_bytes, device.as_deref()),
        list(holders)
    )]
    OutOfMemory {
        /// The size of the request.
        requested_bytes: usize,
        /// The purpose of the request.
        purpose: Purpose,
        /// The device's message if the device is out of memory; `None` if the budget is exhausted.
        device: Option<String>,
        /// Live in the pool.
        live_bytes: usize,
        budget_bytes: usize,
        /// Reserved and in no block.
        free_bytes: usize,
        /// The largest contiguous part of `free_bytes`.
        largest_free_bytes: usize,
        /// Live bytes by purpose, the largest first.
        holders: Vec<(Purpose, usize)>,
    },
    /// Another device error.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

fn cause(budget_bytes: usize, device: Option<&str>) -> String {
    match device {
        Some(message) => format!("the device is out of memory ({message})"),
        None if budget_bytes == usize::MAX => "the request exceeds the address space".to_owned(),
        None => format!("the pool's budget is {budget_bytes} bytes"),
    }
}

fn list(holders: &[(Purpose, usize)]) -> String {
    let holders: Vec<_> = holders
        .iter()
        .map(|(purpose, bytes)| format!("{purpose:?} {bytes}"))
        .collect();
    if holders.is_empty() {
        "no blocks".to_owned()
    } else {
        holders.join(", ")
    }
}

impl<D: Device> State<D> {
    /// The error for a failed request; `report` has the live bytes of all lanes.
    pub(super) fn out_of_memory(
        &self,
        report: &Report,
        requested_bytes: usize,
        purpose: Purpose,
        budget_bytes: usize,
        device: Option<String>,
    ) -> AllocError {
        let planner = self.planner.report();
        let mut holders: Vec<_> = Purpose::ALL
            .iter()
            .map(|p| (*p, report.of(*p).live_bytes))
            .filter(|(_, bytes)| *bytes > 0)
            .collect();
        holders.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        AllocError::OutOfMemory {
            requested_bytes,
            purpose,
            device,
            live_bytes: report.total.live_bytes,
            budget_bytes,
            free_bytes: planner.free_bytes as usize,
            largest_free_bytes: planner.largest_free_bytes as usize,
            holders,
        }
    }
}
