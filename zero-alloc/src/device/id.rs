//! Ids of memory, by which operations refuse slices that they cannot access.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

use super::DeviceKind;

/// Identifies the memory of a device within the process. Every slice carries the id of its memory.
///
/// All host devices access the same memory, so it has one id. Each simulated device and each CUDA context has its own.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceId(u32);

/// The kind of memory is in the bits from this one on; the number of the device is below.
const KIND_SHIFT: u32 = 24;

const HOST: u32 = 0;
const PINNED: u32 = 1;
const CUDA: u32 = 2;
const SIMULATED: u32 = 3;

impl DeviceId {
    /// Host memory.
    pub const HOST: Self = Self(HOST << KIND_SHIFT);
    /// Host memory that is pinned for CUDA: the host accesses it, and copies of every CUDA device do.
    pub const PINNED: Self = Self(PINNED << KIND_SHIFT);

    /// The id of a new device: [`DeviceId::HOST`], or for other kinds an id that no device of the process has.
    pub fn new(kind: DeviceKind) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let kind = match kind {
            DeviceKind::Host => return Self::HOST,
            DeviceKind::Cuda => CUDA,
            DeviceKind::Simulated => SIMULATED,
        };
        // Numbers repeat after 16 million devices. Only simulated ones are that many, and they have no memory.
        Self(kind << KIND_SHIFT | NEXT.fetch_add(1, Ordering::Relaxed) & ((1 << KIND_SHIFT) - 1))
    }

    /// Whether operations of this device can access memory with the id `memory`: its own, and for the host also
    /// pinned memory.
    #[inline]
    pub const fn accesses(self, memory: Self) -> bool {
        self.0 == memory.0 || (self.0 == Self::HOST.0 && memory.0 == Self::PINNED.0)
    }
}

impl fmt::Debug for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceId({self})")
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.0 & ((1 << KIND_SHIFT) - 1);
        match self.0 >> KIND_SHIFT {
            HOST => f.write_str("the host"),
            PINNED => f.write_str("pinned host memory"),
            CUDA => write!(f, "CUDA context {number}"),
            _ => write!(f, "simulated device {number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_host_has_one_id() {
        assert_eq!(DeviceId::new(DeviceKind::Host), DeviceId::HOST);
        let ids = [DeviceKind::Cuda, DeviceKind::Cuda, DeviceKind::Simulated].map(DeviceId::new);
        for (i, id) in ids.iter().enumerate() {
            for (j, other) in ids.iter().enumerate() {
                assert_eq!(id.accesses(*other), i == j);
            }
            assert!(!id.accesses(DeviceId::HOST) && !DeviceId::HOST.accesses(*id) && !id.accesses(DeviceId::PINNED));
        }
        assert!(DeviceId::HOST.accesses(DeviceId::PINNED) && !DeviceId::PINNED.accesses(DeviceId::HOST));
    }
}
