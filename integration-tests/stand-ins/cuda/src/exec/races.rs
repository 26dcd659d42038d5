//! Race detection in shared memory: a race is two warps accessing a byte between the same two
//! barriers, one of them writing.

/// How an access uses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
    /// A write that completes later: no race.
    Later,
}

/// The byte was used by several warps.
const MANY: u16 = u16::MAX;

/// The last use of a byte: the number of barriers before it, and the warp.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    barriers: u32,
    warp: u16,
}

/// A block's accesses to each byte of its shared memory.
#[derive(Debug)]
pub(crate) struct Races {
    barriers: u32,
    written: Vec<Use>,
    read: Vec<Use>,
}

impl Races {
    pub(crate) fn new(shared_bytes: usize) -> Self {
        // The count starts at 1, so that 0 means never used.
        Self {
            barriers: 1,
            written: vec![Use::default(); shared_bytes],
            read: vec![Use::default(); shared_bytes],
        }
    }

    /// All threads of the block have passed a barrier.
    pub(crate) fn barrier(&mut self) {
        self.barriers += 1;
    }

    /// Notes an access within bounds. Returns a description of the access that it races with, if
    /// any.
    pub(crate) fn note(
        &mut self,
        offset: usize,
        bytes: usize,
        warp: usize,
        access: Access,
    ) -> Option<String> {
        let now = Use {
            barriers: self.barriers,
            warp: warp as u16,
        };

        let other = |last: &Use| last.barriers == now.barriers && last.warp != now.warp;
        let written = &mut self.written[offset..offset + bytes];
        let read = &mut self.read[offset..offset + bytes];
        let name = |last: &Use| {
            if last.warp == MANY {
                "several warps have".into()
            } else {
                format!("warp {} has", last.warp)
            }
        };

        match access {
            Access::Later => None,
            Access::Read => {
                let race = written
                    .iter()
                    .find(|last| other(last))
                    .map(|last| format!("{} written", name(last)));
                for last in read {
                    let warp = if other(last) { MANY } else { now.warp };
                    *last = Use { warp, ..now };
                }
                race
            }
            Access::Write => {
                let race = written
                    .iter()
                    .find(|last| other(last))
                    .map(|last| format!("{} written", name(last)));
                let race = race.or_else(|| {
                    read.iter()
                        .find(|last| other(last))
                        .map(|last| format!("{} read", name(last)))
                });
                written.fill(now);
                race
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_between_two_warps_makes_the_difference() {
        let mut races = Races::new(16);
        let mut all = |barrier: bool, first: Access, second: Access| {
            races.barrier();
            assert_eq!(races.note(0, 8, 0, first), None);
            assert_eq!(races.note(0, 8, 0, Access::Read), None);
            if barrier {
                races.barrier();
            }
            races.note(4, 4, 1, second).is_some()
        };
        assert!(all(false, Access::Write, Access::Read) && !all(true, Access::Write, Access::Read));
        assert!(all(false, Access::Read, Access::Write) && !all(true, Access::Read, Access::Write));
        assert!(
            !all(false, Access::Read, Access::Read) && !all(false, Access::Write, Access::Later)
        );
    }

    #[test]
    fn neighbours_and_one_warp_do_not_race() {
        let mut races = Races::new(16);
        assert_eq!(races.note(0, 2, 0, Access::Write), None);
        assert_eq!(races.note(2, 2, 1, Access::Write), None);
        assert_eq!(races.note(2, 2, 1, Access::Read), None);
        // Read by two warps, then written by one of them.
        assert_eq!(races.note(8, 4, 0, Access::Read), None);
        assert_eq!(races.note(8, 4, 1, Access::Read), None);
        assert!(
            races
                .note(8, 4, 1, Access::Write)
                .is_some_and(|with| with.contains("several"))
        );
    }
}
