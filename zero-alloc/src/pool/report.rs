//! What a pool holds, by purpose.

use std::fmt;

use super::Purpose;
use crate::device::DeviceError;

/// What a pool takes from its device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MemoryKind {
    /// Backings: the device lends no pages.
    #[default]
    Backings,
    /// Pages under one range of addresses.
    Pages,
    /// Backings, though the device lends pages: it refused addresses for them, with this error. So nothing is
    /// stitched, and nothing holds what is reserved near the peak.
    BackingsForPages(DeviceError),
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Backings => f.write_str("backings"),
            Self::Pages => f.write_str("pages"),
            Self::BackingsForPages(error) => {
                write!(f, "backings in place of pages, since there are no addresses: {error}")
            }
        }
    }
}

/// What one purpose holds, in bytes as asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Now.
    pub live_bytes: usize,
    /// At most, since the pool was made or [`Pool::reset_peaks`](super::Pool::reset_peaks).
    pub peak_bytes: usize,
}

/// What a pool holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// By purpose, in the order of [`Purpose::ALL`].
    pub purposes: [Held; 6],
    /// All purposes together.
    pub total: Held,
    /// What is taken from the device.
    pub memory: MemoryKind,
    /// Taken from the device.
    pub reserved_bytes: usize,
    /// How often the device was asked for more memory so far: it stands still in a steady step.
    pub backing_allocations: u64,
    /// Taken from the device and in no block.
    pub free_bytes: usize,
    /// The largest contiguous part of that.
    pub largest_free_bytes: usize,
    /// Bytes that compaction has moved so far.
    pub moved_bytes: u64,
    /// How often it has.
    pub compactions: u64,
    /// Pages mapped for stitched blocks so far.
    pub stitched_pages: u64,
}

impl Report {
    /// What `purpose` holds.
    pub fn of(&self, purpose: Purpose) -> Held {
        self.purposes[purpose as usize]
    }
}

/// In one line.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { total, reserved_bytes, free_bytes, largest_free_bytes, memory, .. } = self;
        write!(f, "{} bytes live (at most {}), {reserved_bytes} reserved, ", total.live_bytes, total.peak_bytes)?;
        write!(f, "{free_bytes} of them free, the largest contiguous {largest_free_bytes}")?;
        for purpose in Purpose::ALL {
            let held = self.of(purpose);
            if held.peak_bytes > 0 {
                write!(f, "; {purpose:?} {} (at most {})", held.live_bytes, held.peak_bytes)?;
            }
        }
        write!(f, "; {} bytes moved, {} pages stitched; {memory}", self.moved_bytes, self.stitched_pages)
    }
}

impl Report {
    /// Adds what others hold.
    pub(super) fn add_held(&mut self, other: &Self) {
        let others = other.purposes.iter().chain([&other.total]);
        for (held, more) in self.purposes.iter_mut().chain([&mut self.total]).zip(others) {
            held.live_bytes += more.live_bytes;
            held.peak_bytes += more.peak_bytes;
        }
    }
}

/// The running account of a pool.
#[derive(Debug, Default)]
pub(super) struct Account(pub(super) Report);

impl Account {
    fn each(&mut self, purpose: Purpose, change: impl Fn(&mut Held)) {
        change(&mut self.0.purposes[purpose as usize]);
        change(&mut self.0.total);
    }

    pub(super) fn add(&mut self, purpose: Purpose, bytes: usize) {
        self.each(purpose, |held| {
            held.live_bytes += bytes;
            held.peak_bytes = held.peak_bytes.max(held.live_bytes);
        });
    }

    pub(super) fn sub(&mut self, purpose: Purpose, bytes: usize) {
        self.each(purpose, |held| held.live_bytes -= bytes);
    }

    pub(super) fn reset_peaks(&mut self) {
        for held in self.0.purposes.iter_mut().chain([&mut self.0.total]) {
            held.peak_bytes = held.live_bytes;
        }
    }
}
