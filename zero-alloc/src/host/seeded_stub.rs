//! Replaces the seeded scheduler in builds without the feature `testing`. Its types have no values.

use std::time::{Duration, Instant};

use super::HostEvent;

#[derive(Debug)]
pub(super) enum Clock {}

pub(super) enum Mark {}

impl Mark {
    pub(super) fn poll(&self, _event: &HostEvent) {}
    pub(super) fn wait(&self, _event: &HostEvent, _limit: Duration) {}
}

pub(super) fn in_operation() -> bool {
    false
}

pub(super) fn progress() -> u64 {
    0
}

pub(super) fn note_progress() {}
pub(super) fn release(_clock: &mut Option<Clock>) {}
pub(super) fn acquire(_clock: Option<&Clock>) {}
pub(super) fn block(_progress: u64, _deadline: Option<Instant>) {}
