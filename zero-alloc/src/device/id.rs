//! Ids of memory, by which operations refuse slices that they cannot access.
//!
//! Why the check is in every build: an id takes the place of padding in a slice and its comparison
//! six instructions, of about 340 that enqueue a copy on the host (counted by callgrind), so a
//! check in debug builds alone would save nothing. There are no copies between devices; `download`
//! and `upload` transfer contents.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

use super::DeviceError;

/// The kind of hardware of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// The host's own memory and cores: slices can be read as Rust slices.
    Host,
    /// An NVIDIA GPU.
    Cuda,
    /// No hardware: addresses are fictitious (see `zero_alloc::testing::Simulated`).
    Simulated,
}

/// Identifies the memory of a device within the process. Every slice carries the id of its memory.
///
/// All host devices access the same memory, so it has one id. Each simulated device and each CUDA
/// context has its own.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceId(u32);

/// The kind of memory is in the bits from this one on; the number of the device is below.
const KIND_SHIFT: u32 = 30;
/// Devices of one kind that a process can have in its time.
const MAX_DEVICES: u32 = 1 << KIND_SHIFT;

const HOST: u32 = 0;
const PINNED: u32 = 1;
const CUDA: u32 = 2;
const SIMULATED: u32 = 3;

impl DeviceId {
    /// Host memory.
    pub const HOST: Self = Self(HOST << KIND_SHIFT);
    /// Host memory that is pinned for CUDA: the host accesses it, and copies of every CUDA device
    /// do.
    pub const PINNED: Self = Self(PINNED << KIND_SHIFT);

    /// The id of a new device: [`DeviceId::HOST`], or for other kinds an id that no device of the
    /// process has had.
    ///
    /// # Errors
    /// The process has had 2^30 devices of this kind.
    pub fn new(kind: DeviceKind) -> Result<Self, DeviceError> {
        static NEXT: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];
        let (kind, next) = match kind {
            DeviceKind::Host => return Ok(Self::HOST),
            DeviceKind::Cuda => (CUDA, &NEXT[0]),
            DeviceKind::Simulated => (SIMULATED, &NEXT[1]),
        };
        Ok(Self(kind << KIND_SHIFT | number(next)?))
    }

    /// Whether operations of this device can access memory with the id `memory`: its own, and for
    /// the host also pinned memory.
    #[inline]
    pub const fn accesses(self, memory: Self) -> bool {
        self.0 == memory.0 || (self.0 == Self::HOST.0 && memory.0 == Self::PINNED.0)
    }
}

/// The next number of a device; never the same one twice.
fn number(next: &AtomicU32) -> Result<u32, DeviceError> {
    let following = |number| (number < MAX_DEVICES).then_some(number + 1);
    next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, following)
        .map_err(|_| DeviceError::Driver {
            call: "DeviceId::new",
            message: format!("this process has made {MAX_DEVICES} devices of one kind; restart it"),
        })
}

impl fmt::Debug for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceId({self})")
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.0 % MAX_DEVICES;
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
        assert_eq!(DeviceId::new(DeviceKind::Host), Ok(DeviceId::HOST));
        let ids = [DeviceKind::Cuda, DeviceKind::Cuda, DeviceKind::Simulated]
            .map(|kind| DeviceId::new(kind).expect("a number is left"));
        for (i, id) in ids.iter().enumerate() {
            for (j, other) in ids.iter().enumerate() {
                assert_eq!(id.accesses(*other), i == j);
            }
            assert!(
                !id.accesses(DeviceId::HOST)
                    && !DeviceId::HOST.accesses(*id)
                    && !id.accesses(DeviceId::PINNED)
            );
        }
        assert!(
            DeviceId::HOST.accesses(DeviceId::PINNED) && !DeviceId::PINNED.accesses(DeviceId::HOST)
        );
    }

    #[test]
    fn numbers_do_not_repeat() {
        let next = AtomicU32::new(MAX_DEVICES - 1);
        assert_eq!(number(&next), Ok(MAX_DEVICES - 1));
        for _ in 0..2 {
            let error = number(&next).expect_err("no number is left").to_string();
            assert!(error.contains("has made 1073741824 devices"), "{error}");
        }
    }
}
