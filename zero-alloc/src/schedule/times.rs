//! The times of a schedule.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::{Item, Operation, Schedule};
use crate::timeline::OpSpan;

/// The cost of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Cost {
    /// Its time, where nothing slows it down. Whole nanoseconds keep the sums exact.
    pub ns: f64,
    /// The time that the program takes to enqueue it.
    pub host_ns: f64,
    /// The resource that it shares with the other operations that run and name it: of n, each runs
    /// at 1/n of its speed. `None`: it shares nothing.
    pub shares: Option<u8>,
    /// Whether it slows others down.
    pub slows: bool,
    /// The part of its speed that it loses while an operation runs that slows others down, at least
    /// 0 and below 1.
    pub slowdown: f64,
}

impl Cost {
    /// `time`, slowed down by nothing.
    pub fn time(time: Duration) -> Self {
        Self::ns(time.as_nanos() as f64)
    }

    /// `ns` nanoseconds, slowed down by nothing.
    pub const fn ns(ns: f64) -> Self {
        Self {
            ns,
            host_ns: 0.0,
            shares: None,
            slows: false,
            slowdown: 0.0,
        }
    }

    /// Sets [`Cost::host_ns`].
    #[must_use]
    pub const fn host_ns(mut self, host_ns: f64) -> Self {
        self.host_ns = host_ns;
        self
    }

    /// Sets [`Cost::shares`].
    #[must_use]
    pub const fn shares(mut self, resource: u8) -> Self {
        self.shares = Some(resource);
        self
    }

    /// Sets [`Cost::slows`].
    #[must_use]
    pub const fn slows(mut self, slows: bool) -> Self {
        self.slows = slows;
        self
    }

    /// Sets [`Cost::slowdown`].
    #[must_use]
    pub const fn slowdown(mut self, slowdown: f64) -> Self {
        self.slowdown = slowdown;
        self
    }
}

/// The times of a schedule's operations and marks, in nanoseconds since the program began.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Times {
    /// Start and end of each operation, in the order of [`Schedule::operations`].
    pub operations: Vec<[f64; 2]>,
    /// When the program came to each mark.
    pub marks: Vec<f64>,
    /// When the program enqueued each operation.
    pub enqueued: Vec<f64>,
}

/// An operation that runs.
struct Running {
    index: usize,
    cost: Cost,
    left_ns: f64,
}

/// A stream: what the program has enqueued, and what runs.
#[derive(Default)]
struct Stream {
    queue: VecDeque<Queued>,
    running: Option<Running>,
}

enum Queued {
    Run(usize),
    Record(usize),
    Wait(usize),
}

struct Machine<'a> {
    schedule: &'a Schedule,
    costs: Vec<Cost>,
    streams: Vec<Stream>,
    reached: Vec<bool>,
    /// The next item of the program.
    next: usize,
    /// Operations that the program has enqueued.
    enqueued: usize,
    /// When the program goes on.
    host_ns: f64,
    now_ns: f64,
    /// Of the running operations, by stream.
    speeds: Vec<f64>,
    times: Times,
}

impl Schedule {
    /// The times if the operations cost what `cost` returns.
    ///
    /// Operations of a stream run in order, each as soon as it is enqueued and the events are
    /// reached for which its stream waits. A program that waits for an event that nothing reaches
    /// ends there: its later operations have the time infinity.
    pub fn times(&self, cost: impl FnMut(&Operation) -> Cost) -> Times {
        let costs: Vec<_> = self.operations().map(cost).collect();
        let operations = costs.len();
        let machine = Machine {
            schedule: self,
            costs,
            streams: self.streams.iter().map(|_| Stream::default()).collect(),
            reached: vec![false; self.events],
            next: 0,
            enqueued: 0,
            host_ns: 0.0,
            now_ns: 0.0,
            speeds: Vec::new(),
            times: Times {
                operations: vec![[f64::INFINITY; 2]; operations],
                enqueued: vec![f64::INFINITY; operations],
                marks: Vec::new(),
            },
        };
        machine.run()
    }

    /// The operations with `times`, for a timeline.
    pub fn spans(&self, times: &Times) -> Vec<OpSpan> {
        let span = |(index, operation): (usize, &Operation)| {
            let [start, end] = times.operations[index].map(duration);
            let stream = Arc::clone(&self.streams[operation.stream]);
            OpSpan::new(operation.label, stream, start, end)
                .phase(operation.phase)
                .enqueued(duration(times.enqueued[index]))
        };
        self.operations().enumerate().map(span).collect()
    }
}

fn duration(ns: f64) -> Duration {
    // A cast of infinity is the greatest number.
    Duration::from_nanos(ns.round() as u64)
}

impl Machine<'_> {
    fn run(mut self) -> Times {
        loop {
            self.settle();
            let Some(wait_ns) = self.next_event_ns() else {
                return self.times;
            };
            self.advance(wait_ns);
        }
    }

    /// Does all that takes no time.
    fn settle(&mut self) {
        loop {
            let program = self.program();
            let streams =
                (0..self.streams.len()).fold(false, |any, stream| self.stream(stream) | any);
            if !program && !streams {
                return;
            }
        }
    }

    /// Runs the program up to its next wait. Returns whether it did anything.
    fn program(&mut self) -> bool {
        let began = self.next;
        while self.host_ns <= self.now_ns
            && let Some(item) = self.schedule.items.get(self.next)
        {
            match *item {
                Item::Run(operation) => {
                    let index = self.enqueued;
                    self.enqueued += 1;
                    self.times.enqueued[index] = self.now_ns;
                    self.streams[operation.stream]
                        .queue
                        .push_back(Queued::Run(index));
                    self.host_ns = self.now_ns + self.costs[index].host_ns;
                }
                Item::Record { stream, event } => {
                    self.streams[stream].queue.push_back(Queued::Record(event));
                }
                Item::Wait { stream, event } => {
                    self.streams[stream].queue.push_back(Queued::Wait(event));
                }
                Item::HostWait { event } if !self.reached[event] => break,
                Item::HostWait { .. } => {}
                Item::Mark => self.times.marks.push(self.now_ns),
            }
            self.next += 1;
        }
        self.next > began
    }

    /// Runs a stream up to its next wait or operation. Returns whether it did anything.
    fn stream(&mut self, stream: usize) -> bool {
        let mut any = false;
        let Stream { queue, running } = &mut self.streams[stream];
        while running.is_none()
            && let Some(queued) = queue.front()
        {
            match *queued {
                Queued::Wait(event) if !self.reached[event] => break,
                Queued::Wait(_) => {}
                Queued::Record(event) => self.reached[event] = true,
                Queued::Run(index) => {
                    let cost = self.costs[index];
                    self.times.operations[index] = [self.now_ns; 2];
                    if cost.ns > 0.0 {
                        let left_ns = cost.ns;
                        *running = Some(Running {
                            index,
                            cost,
                            left_ns,
                        });
                    }
                }
            }
            queue.pop_front();
            any = true;
        }
        any
    }

    fn running(&self) -> impl Iterator<Item = &Running> {
        let streams = self.streams.iter();
        streams.filter_map(|stream| stream.running.as_ref())
    }

    /// The time until the next operation ends or the program goes on; `None`: nothing happens any
    /// more. Sets the speeds of the running operations.
    fn next_event_ns(&mut self) -> Option<f64> {
        let mut speeds = std::mem::take(&mut self.speeds);
        speeds.clear();
        let slowed = self.running().any(|running| running.cost.slows);
        let mut wait_ns = self.host_ns - self.now_ns;
        if wait_ns <= 0.0 {
            wait_ns = f64::INFINITY;
        }
        for Running { cost, left_ns, .. } in self.running() {
            let shares = match cost.shares {
                None => 1,
                shares => self.running().filter(|r| r.cost.shares == shares).count(),
            };
            let alone = if slowed { 1.0 - cost.slowdown } else { 1.0 };
            let speed = alone / shares as f64;
            wait_ns = wait_ns.min(left_ns / speed);
            speeds.push(speed);
        }
        self.speeds = speeds;
        wait_ns.is_finite().then_some(wait_ns)
    }

    /// Lets `elapsed_ns` pass: the time until the next event.
    fn advance(&mut self, elapsed_ns: f64) {
        // The program goes on at its own time, whatever rounding says.
        let host_goes_on = self.host_ns > self.now_ns && self.host_ns - self.now_ns <= elapsed_ns;
        self.now_ns = match host_goes_on {
            true => self.host_ns,
            false => self.now_ns + elapsed_ns,
        };
        let running = self.streams.iter_mut().filter(|s| s.running.is_some());
        for (stream, speed) in running.zip(&self.speeds) {
            let Some(running) = &mut stream.running else {
                continue;
            };
            if running.left_ns / speed <= elapsed_ns {
                self.times.operations[running.index][1] = self.now_ns;
                stream.running = None;
            } else {
                running.left_ns -= elapsed_ns * speed;
            }
        }
    }
}
