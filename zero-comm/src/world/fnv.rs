//! FNV-1a with 64 bits (Fowler, Noll, Vo; RFC 9923): the same in all builds, unlike the standard
//! library's hashes.

use crate::call::Call;

/// The hash of the bytes so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fnv(pub(crate) u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Extend<u8> for Fnv {
    fn extend<T: IntoIterator<Item = u8>>(&mut self, bytes: T) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

impl Fnv {
    /// Adds the bytes of what is equal on all ranks of a call.
    pub(crate) fn add(&mut self, call: &Call) {
        // Neither a call's `Serialize` nor `extend` fails; if one did, all ranks would agree.
        *self = postcard::to_extend(&call.shared(), *self).unwrap_or(*self);
    }
}
