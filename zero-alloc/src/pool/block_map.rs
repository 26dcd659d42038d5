//! Blocks by address, for callers that keep only pointers, such as the allocators of frameworks.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::ptr::NonNull;

use super::{AllocError, Block, Pool, Purpose};
use crate::device::{DType, Device};
use crate::primitive::Mutex;

/// The map is divided by address, so that threads seldom wait for each other's lock.
const SHARDS: usize = 16;

/// Blocks start at multiples of this many bytes where the device allows it.
const ADDRESS_SHIFT: u32 = 8;

/// A pool whose blocks are found by their addresses. Each block has a `tag` of the caller's.
pub struct BlockMap<D: Device, T> {
    pool: Pool<D>,
    shards: [Mutex<Shard<D, T>>; SHARDS],
}

type Shard<D, T> = HashMap<usize, (Block<D>, T), BuildHasherDefault<AddressHasher>>;

impl<D: Device, T> fmt::Debug for BlockMap<D, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockMap")
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}

impl<D: Device, T> BlockMap<D, T> {
    /// A map without blocks.
    pub fn new(pool: Pool<D>) -> Self {
        Self {
            pool,
            shards: std::array::from_fn(|_| Mutex::new(Shard::default())),
        }
    }

    /// The pool.
    pub fn pool(&self) -> &Pool<D> {
        &self.pool
    }

    /// Allocates `bytes`, at least one, as [`Pool::allocate`] does, and returns the address.
    ///
    /// # Errors
    /// As for [`Pool::allocate`].
    pub fn allocate(
        &self,
        bytes: usize,
        purpose: Purpose,
        stream: &D::Stream,
        tag: T,
    ) -> Result<NonNull<u8>, AllocError> {
        let block = self
            .pool
            .allocate(bytes.max(1), DType::U8, purpose, stream)?;
        let ptr = NonNull::new(block.address()).unwrap_or(NonNull::dangling());
        let address = ptr.addr().get();
        let previous = self.shard(address).lock().insert(address, (block, tag));
        debug_assert!(previous.is_none(), "two blocks at {address:#x}");
        Ok(ptr)
    }

    /// Removes the block that starts at `ptr`; dropping it frees it. `None` if there is no such
    /// block, for example because it was removed before.
    pub fn remove(&self, ptr: *mut u8) -> Option<(Block<D>, T)> {
        self.shard(ptr.addr()).lock().remove(&ptr.addr())
    }

    /// Calls `f` with the tag of the block that starts at `ptr`, if there is one. `f` must not use
    /// the map.
    pub fn with_tag<R>(&self, ptr: *mut u8, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        let mut shard = self.shard(ptr.addr()).lock();
        shard.get_mut(&ptr.addr()).map(|(_, tag)| f(tag))
    }

    /// Calls `f` with the address, the size and the tag of every block, in no order. `f` must not
    /// use the map.
    pub fn for_each(&self, mut f: impl FnMut(usize, usize, &mut T)) {
        for shard in &self.shards {
            for (address, (block, tag)) in shard.lock().iter_mut() {
                f(*address, block.len(), tag);
            }
        }
    }

    fn shard(&self, address: usize) -> &Mutex<Shard<D, T>> {
        let mut hasher = AddressHasher::default();
        hasher.write_usize(address);
        // Not the bits that a shard's own map uses.
        &self.shards[(hasher.finish() >> 40) as usize % SHARDS]
    }
}

/// Hashes one address (Knuth's multiplicative hashing). Addresses are the pool's own, so no
/// adversary chooses them.
#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_usize(usize::from(*byte));
        }
    }

    fn write_usize(&mut self, address: usize) {
        let product =
            (self.0 ^ (address as u64 >> ADDRESS_SHIFT)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // The high bits depend on all bits of the address, the low bits only on low ones.
        self.0 = product ^ product.rotate_right(32);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::host::HostDevice;

    #[test]
    fn blocks_are_found_once() {
        let device = HostDevice::new();
        let stream = device.create_stream("a").expect("a stream");
        let map = BlockMap::new(Pool::new(device, 1 << 20));
        let allocate = |bytes, tag| {
            let allocated = map.allocate(bytes, Purpose::Workspace, &stream, tag);
            allocated.expect("allocated").as_ptr()
        };

        let a = allocate(1000, 1);
        let b = allocate(2000, 2);
        assert_eq!(map.with_tag(a, |tag| std::mem::replace(tag, 3)), Some(1));
        assert_eq!(map.with_tag(a.wrapping_add(1), |tag| *tag), None);
        let mut found = Vec::new();
        map.for_each(|address, bytes, tag| found.push((*tag, address, bytes)));
        found.sort_unstable();
        assert_eq!(found, [(2, b.addr(), 2000), (3, a.addr(), 1000)]);

        let (block, tag) = map.remove(a).expect("a block");
        assert_eq!((block.len(), tag), (1000, 3));
        assert!(map.remove(a).is_none(), "removed before");
        drop(block);
        assert_eq!(map.pool().report().total.live_bytes, 2000);
        drop(map.remove(b));
        assert_eq!(map.pool().report().total.live_bytes, 0);
    }

    #[test]
    fn shards_share_the_addresses_of_pages() {
        let map: BlockMap<HostDevice, ()> = BlockMap::new(Pool::new(HostDevice::new(), 1));
        for stride in [256, 4096, 2 << 20, 32 << 20] {
            let mut counts = [0; SHARDS];
            for i in 0..1600 {
                let shard = map.shard(0x7f00_0000_0000 + i * stride);
                let at = map.shards.iter().position(|s| std::ptr::eq(s, shard));
                counts[at.expect("a shard")] += 1;
            }
            let most = counts.into_iter().max().unwrap_or(0);
            assert!(most < 200, "{most} of 1600 at {stride}");
        }
    }
}
