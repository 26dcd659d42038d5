//! The traffic of a block with global memory, in sectors of 32 bytes as profilers count it: the lanes of one
//! instruction of a warp load or store a sector once.

use super::races::Access;
use crate::counts::Work;

const SECTOR_BYTES: u64 = 32;

/// Sectors that a block has loaded and stored.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    /// The current instruction: warp and step.
    instruction: (usize, u64),
    /// Its sectors so far.
    sectors: Vec<u64>,
    pub(crate) work: Work,
}

impl Traffic {
    /// Notes an access of a lane, in an instruction that all lanes run before the next one.
    pub(crate) fn note(&mut self, instruction: (usize, u64), address: u64, bytes: usize, access: Access) {
        if self.instruction != instruction {
            self.instruction = instruction;
            self.sectors.clear();
        }
        for sector in address / SECTOR_BYTES..(address + bytes as u64).div_ceil(SECTOR_BYTES) {
            if self.sectors.iter().rev().any(|&seen| seen == sector) {
                continue;
            }
            self.sectors.push(sector);
            if access != Access::Write {
                self.work.loaded += SECTOR_BYTES;
            }
            if access != Access::Read {
                self.work.stored += SECTOR_BYTES;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_of_an_instruction_share_sectors() {
        let mut traffic = Traffic::default();
        for lane in 0..32 {
            traffic.note((0, 1), 4096 + 4 * lane, 4, Access::Read);
            traffic.note((0, 2), 4096, 4, Access::Read);
        }
        // Instructions alternate above, so the second one's sector is counted for each lane.
        assert_eq!(traffic.work, Work { loaded: 32 * 32 * 2, ..Work::default() });
        let mut traffic = Traffic::default();
        (0..32).for_each(|lane| traffic.note((0, 1), 4096 + 4 * lane, 4, Access::Read));
        (0..32).for_each(|_| traffic.note((0, 2), 4096, 4, Access::Read));
        (0..32).for_each(|lane| traffic.note((0, 3), 4096 + 64 * lane, 8, Access::Write));
        traffic.note((1, 3), 4096 + 28, 4, Access::Atomic);
        assert_eq!(traffic.work, Work { loaded: 128 + 32 + 32, stored: 32 * 32 + 32, operations: 0 });
    }
}
