//! Races in shared memory: two warps use a byte between the same two barriers, and one of them writes it.

/// How an access uses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
    /// As one step, or not now: no race.
    Atomic,
}

/// More warps than one.
const MANY: u16 = u16::MAX;

/// The last use of a byte: after how many barriers, and by which warp.
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
        // Uses count from the first barrier on, so 0 means never.
        Self { barriers: 1, written: vec![Use::default(); shared_bytes], read: vec![Use::default(); shared_bytes] }
    }

    /// All threads of the block have met.
    pub(crate) fn barrier(&mut self) {
        self.barriers += 1;
    }

    /// Notes an access that is in bounds; the warp that it races with, if there is one.
    pub(crate) fn note(&mut self, offset: usize, bytes: usize, warp: usize, access: Access) -> Option<String> {
        let now = Use { barriers: self.barriers, warp: warp as u16 };
        let other = |last: &Use| last.barriers == now.barriers && last.warp != now.warp;
        let (written, read) = (&mut self.written[offset..offset + bytes], &mut self.read[offset..offset + bytes]);
        let name = |last: &Use| {
            if last.warp == MANY { "several warps have".into() } else { format!("warp {} has", last.warp) }
        };
        match access {
            Access::Atomic => None,
            Access::Read => {
                let race = written.iter().find(|last| other(last)).map(|last| format!("{} written", name(last)));
                for last in read {
                    let warp = if other(last) { MANY } else { now.warp };
                    *last = Use { warp, ..now };
                }
                race
            }
            Access::Write => {
                let race = written.iter().find(|last| other(last)).map(|last| format!("{} written", name(last)));
                let race =
                    race.or_else(|| read.iter().find(|last| other(last)).map(|last| format!("{} read", name(last))));
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
        assert!(!all(false, Access::Read, Access::Read) && !all(false, Access::Write, Access::Atomic));
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
        assert!(races.note(8, 4, 1, Access::Write).is_some_and(|with| with.contains("several")));
    }
}
