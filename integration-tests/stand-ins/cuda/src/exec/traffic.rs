//! The traffic of a block with global memory: the distinct sectors of 32 bytes that it loads and
//! stores. So a block's repeated accesses count once, as if a cache served the others.

use std::collections::HashSet;

use super::races::Access;
use crate::counts::Work;

const SECTOR_BYTES: u64 = 32;

/// Sectors that a block has loaded and stored.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    loaded: HashSet<u64>,
    stored: HashSet<u64>,
    /// The sector of the last access, which neighbouring lanes share.
    last: Option<(u64, Access)>,
}

impl Traffic {
    /// Notes an access of a lane.
    pub(crate) fn note(&mut self, address: u64, bytes: usize, access: Access) {
        for sector in address / SECTOR_BYTES..(address + bytes as u64).div_ceil(SECTOR_BYTES) {
            if self.last.replace((sector, access)) == Some((sector, access)) {
                continue;
            }
            if access != Access::Write {
                self.loaded.insert(sector);
            }
            if access != Access::Read {
                self.stored.insert(sector);
            }
        }
    }

    /// The bytes so far, and `operations`.
    pub(crate) fn work(&self, operations: u64) -> Work {
        let bytes = |sectors: &HashSet<u64>| sectors.len() as u64 * SECTOR_BYTES;
        Work {
            loaded: bytes(&self.loaded),
            stored: bytes(&self.stored),
            operations,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_count_once_a_block() {
        let mut traffic = Traffic::default();
        for _ in 0..2 {
            (0..32).for_each(|lane| traffic.note(4096 + 4 * lane, 4, Access::Read));
            (0..32).for_each(|lane| traffic.note(4096 + 64 * lane, 8, Access::Write));
        }
        traffic.note(8192 + 28, 4, Access::Later);
        assert_eq!(
            traffic.work(7),
            Work {
                loaded: 128 + 32,
                stored: 32 * 32 + 32,
                operations: 7
            }
        );
    }
}
