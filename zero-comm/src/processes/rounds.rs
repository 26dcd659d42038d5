//! The rounds of a collective: in each, every rank writes to its own part of the shared memory, and
//! reads those of the others.
//!
//! ```text
//! write   when all ranks have read round k - 2, whose half is written again
//! publish written = k + 1
//! read    from rank q when its `written` has reached k + 1
//! end     read = k + 1
//! ```
//!
//! Counters count rounds modulo 2^32; they differ by 2 at most.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rustix::thread::futex;

use super::shared_memory::Memory;
use crate::call::Group;

/// Iterations of a spin loop before a rank sleeps, about 20 microseconds.
const SPINS: u32 = 1000;
/// Yields before a rank sleeps, if there are more ranks than cores.
const YIELDS: u32 = 3;
/// A rank that sleeps looks again after this time, should a call to wake it have been lost.
const SLEEP: futex::Timespec = futex::Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// The world has failed, and with it the collective.
pub(super) struct Broken;

/// The rounds of one communicator. Its collectives run one after another.
pub(super) struct Rounds {
    memory: Arc<Memory>,
    /// The current round.
    round: u32,
    has_core_each: bool,
}

impl Rounds {
    pub(super) fn new(memory: Arc<Memory>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            round: 0,
            has_core_each: memory.group().world_size <= cores,
            memory,
        }
    }

    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Runs one round: `write` fills this rank's half; `read` reads those of the others.
    ///
    /// # Errors
    /// The world has failed, or the error of `read`.
    pub(super) fn run<E: From<Broken>>(
        &mut self,
        broken: &AtomicBool,
        write: impl FnOnce(&mut [u8]),
        read: impl FnOnce(&Halves<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let Group { rank, world_size } = self.memory.group();
        let halves = Halves {
            rounds: self,
            broken,
        };
        for peer in 0..world_size {
            halves.wait(&self.memory.counters(peer).read, self.round.wrapping_sub(1))?;
        }
        // SAFETY: every rank has read round - 2, the last one that used this half, and reads this
        // one only after `written` has its number; this rank's rounds are one after another.
        write(unsafe { self.memory.own_half(self.round as usize) });

        let own = self.memory.counters(rank);
        let next = self.round.wrapping_add(1);
        advance(&own.written, next);
        read(&halves)?;
        advance(&own.read, next);
        self.round = next;
        Ok(())
    }
}

/// The halves of all ranks in a round.
pub(super) struct Halves<'a> {
    rounds: &'a Rounds,
    broken: &'a AtomicBool,
}

impl<'a> Halves<'a> {
    /// The call of `rank`, when it has been written.
    ///
    /// # Errors
    /// The world has failed.
    pub(super) fn header(&self, rank: usize) -> Result<&'a [u8], Broken> {
        Ok(&self.half(rank)?[..self.rounds.memory.header_bytes()])
    }

    /// The data of `rank`, when they have been written.
    ///
    /// # Errors
    /// The world has failed.
    pub(super) fn data(&self, rank: usize) -> Result<&'a [u8], Broken> {
        Ok(&self.half(rank)?[self.rounds.memory.header_bytes()..])
    }

    /// The number in the whole world of a rank that has written this round.
    pub(super) fn world_rank(&self, rank: usize) -> usize {
        let counters = self.rounds.memory.counters(rank);
        counters.world_rank.load(Ordering::Relaxed)
    }

    fn half(&self, rank: usize) -> Result<&'a [u8], Broken> {
        let Rounds { memory, round, .. } = self.rounds;
        self.wait(&memory.counters(rank).written, round.wrapping_add(1))?;
        // SAFETY: the rank writes to this half again in round + 2, when this one has ended here.
        Ok(unsafe { memory.half(rank, *round as usize) })
    }

    /// Waits until `counter` has reached `target`.
    fn wait(&self, counter: &AtomicU32, target: u32) -> Result<(), Broken> {
        let is_behind = |value: u32| (value.wrapping_sub(target) as i32) < 0;
        let mut tries = 0;
        loop {
            let value = counter.load(Ordering::Acquire);
            if !is_behind(value) {
                return Ok(());
            }
            if self.broken.load(Ordering::Acquire) {
                return Err(Broken);
            }
            tries += 1;
            match self.rounds.has_core_each {
                true if tries <= SPINS => std::hint::spin_loop(),
                false if tries <= YIELDS => std::thread::yield_now(),
                // A value that has changed, a signal and the time all lead to another look.
                _ => drop(futex::wait(
                    counter,
                    futex::Flags::empty(),
                    value,
                    Some(&SLEEP),
                )),
            }
        }
    }
}

/// Sets a counter, and wakes those who wait for it.
fn advance(counter: &AtomicU32, to: u32) {
    counter.store(to, Ordering::Release);
    wake(counter);
}

fn wake(counter: &AtomicU32) {
    // Errors are those of invalid addresses.
    let _ = futex::wake(counter, futex::Flags::empty(), i32::MAX as u32);
}

/// Wakes all ranks that wait in `memory`.
pub(super) fn wake_all(memory: &Memory) {
    for rank in 0..memory.group().world_size {
        let counters = memory.counters(rank);
        wake(&counters.written);
        wake(&counters.read);
    }
}
