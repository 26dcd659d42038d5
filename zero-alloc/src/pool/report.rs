//! A pool's statistics, by purpose.

use std::fmt;
use std::time::Instant;

use super::Purpose;
use crate::device::DeviceError;

/// The kind of memory that a pool reserves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Backings: the device has no virtual memory.
    #[default]
    Backings,
    /// Pages in one range of addresses.
    Pages,
    /// Backings, because the device failed to reserve addresses for pages, with this error. So
    /// blocks are not stitched, and reserved memory is not kept near the peak.
    BackingsForPages(DeviceError),
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Backings => f.write_str("backings"),
            Self::Pages => f.write_str("pages"),
            Self::BackingsForPages(error) => {
                write!(
                    f,
                    "backings, because reserving addresses for pages failed: {error}"
                )
            }
        }
    }
}

/// Requested bytes, without padding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AllocatedBytes {
    /// Live now.
    pub live_bytes: usize,
    /// The peak since the pool was made or [`Pool::reset_peaks`](super::Pool::reset_peaks).
    pub peak_bytes: usize,
}

/// The statistics of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// By purpose, in the order of [`Purpose::ALL`].
    pub purposes: [AllocatedBytes; Purpose::COUNT],
    /// All purposes together.
    pub total: AllocatedBytes,
    /// The kind of memory.
    pub memory: MemoryKind,
    /// Reserved from the device.
    pub reserved_bytes: usize,
    /// The number of requests to the device for more memory so far: constant in a steady step.
    pub backing_allocations: u64,
    /// Reserved and in no block.
    pub free_bytes: usize,
    /// The largest contiguous part of `free_bytes`.
    pub largest_free_bytes: usize,
    /// Pages mapped for stitched blocks so far.
    pub stitched_pages: u64,
}

impl Report {
    /// Adds the live and peak bytes of a lane.
    pub(super) fn add_held(&mut self, lane: &Self) {
        let held = self
            .purposes
            .iter_mut()
            .zip(lane.purposes)
            .chain([(&mut self.total, lane.total)]);
        for (held, lane) in held {
            held.live_bytes += lane.live_bytes;
            held.peak_bytes += lane.peak_bytes;
        }
    }

    /// The bytes of one purpose.
    pub fn of(&self, purpose: Purpose) -> AllocatedBytes {
        self.purposes[purpose as usize]
    }
}

/// In one line.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            total,
            reserved_bytes,
            free_bytes,
            largest_free_bytes,
            memory,
            ..
        } = self;

        write!(
            f,
            "{} bytes live (peak {}), {reserved_bytes} reserved, ",
            total.live_bytes, total.peak_bytes
        )?;
        write!(
            f,
            "{free_bytes} of them free, {largest_free_bytes} of these contiguous"
        )?;

        for purpose in Purpose::ALL {
            let held = self.of(purpose);
            if held.peak_bytes > 0 {
                write!(
                    f,
                    "; {purpose:?} {} (peak {})",
                    held.live_bytes, held.peak_bytes
                )?;
            }
        }

        write!(f, "; {} pages stitched; {memory}", self.stitched_pages)
    }
}

/// A change of a pool's live bytes, recorded between
/// [`Pool::record_changes`](super::Pool::record_changes) and
/// [`Pool::take_changes`](super::Pool::take_changes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Change {
    /// When the host allocated or freed the block, which may be before its stream uses it.
    pub at: Instant,
    /// The purpose of the block.
    pub purpose: Purpose,
    /// Its bytes; negative if it was freed.
    pub bytes: isize,
}

/// The running account of a pool.
#[derive(Debug, Default)]
pub(super) struct Account {
    pub(super) report: Report,
    /// The changes since recording started; `None` while nothing is recorded.
    pub(super) changes: Option<Vec<Change>>,
}

impl Account {
    pub(super) fn add(&mut self, purpose: Purpose, bytes: usize) {
        for held in [
            &mut self.report.purposes[purpose as usize],
            &mut self.report.total,
        ] {
            held.live_bytes += bytes;
            held.peak_bytes = held.peak_bytes.max(held.live_bytes);
        }
        self.record(purpose, bytes as isize);
    }

    pub(super) fn sub(&mut self, purpose: Purpose, bytes: usize) {
        self.report.purposes[purpose as usize].live_bytes -= bytes;
        self.report.total.live_bytes -= bytes;
        self.record(purpose, -(bytes as isize));
    }

    fn record(&mut self, purpose: Purpose, bytes: isize) {
        if let Some(changes) = &mut self.changes {
            changes.push(Change {
                at: Instant::now(),
                purpose,
                bytes,
            });
        }
    }

    pub(super) fn reset_peaks(&mut self) {
        for held in self
            .report
            .purposes
            .iter_mut()
            .chain([&mut self.report.total])
        {
            held.peak_bytes = held.live_bytes;
        }
    }
}
