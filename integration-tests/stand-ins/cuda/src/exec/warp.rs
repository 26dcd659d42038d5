//! A warp: 32 lanes, in groups at the same instruction. The group with the lowest instruction index
//! runs, so groups merge where control flow joins.

use super::block::{Arrival, BlockMemory};
use super::program::{ALL, Done, Fault, Flow, Mask, Program, Slot, lanes};
use crate::error::Failure;

/// The number of instructions that a warp runs before the other warps of its block get a turn.
const TURN: u32 = 100_000;

/// Lanes at one instruction.
#[derive(Clone, Copy, Debug)]
struct Group {
    at: usize,
    lanes: Mask,
    /// Waits for lanes that are at other instructions.
    blocked: bool,
}

/// An asynchronous copy to shared memory that a lane has started and not yet waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AsyncCopy {
    pub(crate) lane: u32,
    /// The lane's number of committed groups when it started the copy.
    pub(crate) group: u32,
    pub(crate) to: *mut u8,
    pub(crate) bytes: u32,
    pub(crate) data: [u8; 16],
}

pub(crate) struct Warp {
    pub(crate) index: usize,
    pub(crate) regs: Vec<[u64; 32]>,
    pub(crate) preds: Vec<Mask>,
    pub(crate) live: Mask,
    pub(crate) copies: Vec<AsyncCopy>,
    pub(crate) committed: [u32; 32],
    /// Instructions run so far; the clock.
    pub(crate) steps: u64,
    groups: Vec<Group>,
}

/// The reason why a warp's turn ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Pause {
    /// All lanes have ended.
    Ended,
    /// All live lanes wait at barriers.
    Barrier,
    /// The turn's instructions are used up.
    Turn,
}

impl Warp {
    pub(crate) fn new(program: &Program, index: usize, live: Mask) -> Self {
        let mut regs = vec![[u64::MAX; 32]; program.slots];
        for &(slot, value) in &program.constants {
            regs[slot] = [value; 32];
        }
        let mut preds = vec![0; program.pred_slots];
        preds[program.true_pred] = ALL;

        Self {
            index,
            regs,
            preds,
            live,
            copies: Vec::new(),
            committed: [0; 32],
            steps: 0,
            groups: vec![Group {
                at: 0,
                lanes: live,
                blocked: false,
            }],
        }
    }

    /// The value of a slot that is the same in all lanes of `mask`.
    pub(crate) fn uniform(&self, slot: Slot, mask: Mask) -> u64 {
        self.regs[slot][(mask.trailing_zeros() & 31) as usize]
    }

    /// Sets a predicate in the lanes of `mask`.
    pub(crate) fn set_pred(&mut self, slot: usize, mask: Mask, value: Mask) {
        self.preds[slot] = (self.preds[slot] & !mask) | (value & mask);
    }

    /// Continues lanes after a barrier.
    pub(crate) fn resume(&mut self, at: usize, lanes: Mask) {
        self.groups.push(Group {
            at,
            lanes,
            blocked: false,
        });
    }

    /// Runs until the warp must wait, has ended, or its turn is over.
    pub(crate) fn run(&mut self, program: &Program, memory: &mut BlockMemory) -> Done<Pause> {
        let mut left = TURN;
        while let Some((at, mask)) = self.take_group()? {
            let end = self.run_group(program, memory, at, mask, &mut left);
            if end.is_err() || left == 0 {
                return end.map(|()| Pause::Turn);
            }
        }
        Ok(if self.live == 0 {
            Pause::Ended
        } else {
            Pause::Barrier
        })
    }

    /// Takes the group at the lowest instruction index, merged with all others there.
    fn take_group(&mut self) -> Done<Option<(usize, Mask)>> {
        let Some(at) = self
            .groups
            .iter()
            .filter(|g| !g.blocked)
            .map(|g| g.at)
            .min()
        else {
            if self.groups.is_empty() {
                return Ok(None);
            }
            let lanes = self.groups.iter().fold(0, |all, g| all | g.lanes);
            let what = format!("lanes {lanes:#x} wait for lanes of their mask that never come");
            return Err(Box::new(Fault {
                failure: Failure::LaunchTimeout,
                what,
            }));
        };

        let mut mask = 0;
        self.groups.retain(|group| {
            if group.at == at {
                mask |= group.lanes;
            }
            group.at != at
        });

        Ok(Some((at, mask)))
    }

    /// Runs a group until it diverges, or until another group is at a lower index.
    fn run_group(
        &mut self,
        program: &Program,
        memory: &mut BlockMemory,
        mut at: usize,
        mut mask: Mask,
        left: &mut u32,
    ) -> Done {
        // The lowest index of another group, which must run or merge before this group goes beyond
        // it.
        let mut limit = self
            .groups
            .iter()
            .filter(|g| !g.blocked)
            .map(|g| g.at)
            .min()
            .unwrap_or(usize::MAX);

        let meets: Vec<usize> = self
            .groups
            .iter()
            .filter(|g| g.blocked)
            .map(|g| g.at)
            .collect();

        loop {
            if at >= limit || *left == 0 || meets.contains(&at) {
                self.groups.push(Group {
                    at,
                    lanes: mask,
                    blocked: false,
                });
                return Ok(());
            }
            *left -= 1;
            self.steps += 1;
            let instruction = &program.code[at];
            let active = match instruction.guard {
                None => mask,
                Some((pred, negated)) => {
                    mask & if negated {
                        !self.preds[pred]
                    } else {
                        self.preds[pred]
                    }
                }
            };
            match &instruction.flow {
                Flow::Do(action) => {
                    if active != 0 {
                        action(self, memory, active).map_err(|f| self.located(f, program, at))?;
                    }
                    at += 1;
                }
                Flow::Together { members, action } => {
                    if active != 0 {
                        let needed = self.members(*members, active) & self.live;
                        if needed & !active != 0 {
                            self.groups.push(Group {
                                at,
                                lanes: mask,
                                blocked: true,
                            });
                            return Ok(());
                        }
                        action(self, memory, active).map_err(|f| self.located(f, program, at))?;
                    }
                    at += 1;
                }
                Flow::Jump(to) => {
                    if active == mask {
                        at = *to;
                    } else if active == 0 {
                        at += 1;
                    } else {
                        self.groups.push(Group {
                            at: *to,
                            lanes: active,
                            blocked: false,
                        });
                        self.groups.push(Group {
                            at: at + 1,
                            lanes: mask & !active,
                            blocked: false,
                        });
                        return Ok(());
                    }
                }
                Flow::Exit => {
                    self.live &= !active;
                    mask &= !active;
                    at += 1;
                    // Blocked groups wait only for live lanes, so they are checked again.
                    self.groups
                        .iter_mut()
                        .for_each(|group| group.blocked = false);
                    if mask == 0 {
                        return Ok(());
                    }
                    limit = self.groups.iter().map(|g| g.at).min().unwrap_or(usize::MAX);
                }
                Flow::Barrier { number } => {
                    if active != 0 {
                        memory.arrive(Arrival {
                            number: self.uniform(*number, active) as u32,
                            warp: self.index,
                            lanes: active,
                            next: at + 1,
                        });
                        mask &= !active;
                    }
                    at += 1;
                    if mask == 0 {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// The union of the lanes' masks.
    fn members(&self, slot: Slot, active: Mask) -> Mask {
        let masks = &self.regs[slot];
        lanes(active).fold(0, |all, lane| all | masks[lane] as u32)
    }

    fn located(&self, mut fault: Box<Fault>, program: &Program, at: usize) -> Box<Fault> {
        let line = program.code[at].line;
        fault.what = format!(
            "kernel {}, PTX line {line}, warp {}: {}",
            program.name, self.index, fault.what
        );
        fault
    }
}
