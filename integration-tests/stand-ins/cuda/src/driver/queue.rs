//! The queue and thread of a stream. Only events order two queues.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::device::Device;
use super::op::{Op, run};
use crate::error::{Failure, Outcome};
use crate::settings::settings;
use stand_in_shared::lock;

#[derive(Default)]
struct State {
    waiting: VecDeque<Op>,
    submitted: u64,
    finished: u64,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// The queue. After it is dropped, the thread runs the submitted operations and exits.
pub(crate) struct Queue {
    shared: Arc<Shared>,
}

impl Queue {
    /// Starts the thread. `number` seeds its random numbers.
    pub(crate) fn start(device: &'static Device, number: usize) -> Outcome<Self> {
        let shared = Arc::new(Shared::default());
        let theirs = shared.clone();
        let mut all = lock(&QUEUES);
        all.retain(|(_, queue)| queue.strong_count() > 0);
        all.push((device.ordinal, Arc::downgrade(&shared)));
        drop(all);
        let thread = std::thread::Builder::new().name(format!("stream {number:#x}"));
        let work = move || theirs.work(device, &mut Random::of_stream(number));
        thread.spawn(work).map_err(|_| Failure::OutOfMemory)?;
        Ok(Self { shared })
    }

    pub(crate) fn push(&self, op: Op) {
        let mut state = lock(&self.shared.state);
        state.waiting.push_back(op);
        state.submitted += 1;
        self.shared.changed.notify_all();
    }

    pub(crate) fn is_idle(&self) -> bool {
        let state = lock(&self.shared.state);
        state.finished == state.submitted
    }

    /// Waits for all operations submitted so far.
    pub(crate) fn wait(&self) {
        self.shared.wait();
    }
}

/// All queues with a running thread, including those of destroyed streams.
static QUEUES: Mutex<Vec<(u32, Weak<Shared>)>> = Mutex::new(Vec::new());

/// Waits for all operations submitted to a device so far.
pub(crate) fn wait_for_all(device: u32) {
    let queues: Vec<Arc<Shared>> = lock(&QUEUES)
        .iter()
        .filter(|(of, _)| *of == device)
        .filter_map(|(_, queue)| queue.upgrade())
        .collect();
    queues.iter().for_each(|queue| queue.wait());
}

impl Drop for Queue {
    fn drop(&mut self) {
        lock(&self.shared.state).closed = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn wait(&self) {
        let state = lock(&self.state);
        let until = state.submitted;
        let wait = self
            .changed
            .wait_while(state, |state| state.finished < until);
        drop(wait.unwrap_or_else(PoisonError::into_inner));
    }

    fn work(&self, device: &'static Device, random: &mut Random) {
        loop {
            let state = lock(&self.state);
            let wait = self
                .changed
                .wait_while(state, |state| state.waiting.is_empty() && !state.closed);
            let Some(op) = wait
                .unwrap_or_else(PoisonError::into_inner)
                .waiting
                .pop_front()
            else {
                return;
            };
            let ran =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&op, device, random)));
            if ran.is_err() {
                device.fail(
                    Failure::Unknown,
                    "the stand-in itself failed; its message is above",
                );
                if let Op::Record(ticket) = &op {
                    ticket.complete();
                }
            }
            // Released before the operation is reported as finished.
            drop(op);
            lock(&self.state).finished += 1;
            self.changed.notify_all();
        }
    }
}

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is running a host function, which may not call the driver.
pub(crate) fn is_in_host_function() -> bool {
    IN_HOST_FUNCTION.get()
}

pub(crate) fn in_host_function(function: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    function();
    IN_HOST_FUNCTION.set(false);
}

/// Random numbers for delays and orders (SplitMix64, Steele et al. 2014). Without a seed all are 0.
pub(crate) struct Random(Option<u64>);

impl Random {
    fn of_stream(number: usize) -> Self {
        Self(
            settings()
                .delay_seed
                .map(|seed| seed ^ (number as u64) << 32),
        )
    }

    #[cfg(test)]
    pub(crate) fn seeded(seed: u64) -> Self {
        Self(Some(seed))
    }

    /// A number below `end`; 0 without a seed.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        let Some(state) = &mut self.0 else { return 0 };
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end.max(1) as u64) as usize
    }

    /// Sleeps in half of the calls, for up to 200 us, and once in 64 calls for up to 5 ms.
    pub(crate) fn delay(&mut self) {
        if self.0.is_none() || self.below(2) == 0 {
            return;
        }
        let most = if self.below(32) == 0 { 5000 } else { 200 };
        std::thread::sleep(Duration::from_micros(self.below(most) as u64));
    }
}
