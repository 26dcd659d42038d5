//! The watcher: the thread of a process that sends its progress and detects failures.
//!
//! Every few milliseconds it
//!
//! - queries each communicator for an asynchronous error;
//! - measures how long the oldest collective in flight has run since its stream reached it; earlier
//!   compute does not count. If it exceeds the limit, the coordinator determines which rank is
//!   late;
//! - receives from the coordinator. A failure ends the world: the watcher first poisons the streams
//!   that have collectives in flight, so that nothing uses their results, and then aborts the
//!   communicators.
//!
//! Once a report interval it sends this rank's progress to the coordinator. All other messages are
//! urgent: they are sent at once, after the progress up to them.

use std::io::ErrorKind;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use zero_alloc::TimeLimit;

use super::abort::AbortCompletion;
use super::message::Message;
use super::process::{ANSWER_LIMIT, Fault, State, World};
use super::rendezvous::Joined;
use super::server::{KEEPALIVE, silence_limit};
use super::wire::{Incoming, send};
use crate::CommError;

/// The watcher's period.
const TICK: Duration = Duration::from_millis(10);

/// This process's connection to the world. Dropping it ends the watcher, which sends the goodbye.
pub(crate) struct Connection {
    pub(crate) world: Arc<World>,
    watcher: Option<JoinHandle<()>>,
}

impl Connection {
    pub(crate) fn start(joined: Joined, rank: usize, limit: Duration) -> Result<Self, CommError> {
        let shared = Arc::new(World::new(rank, limit));

        let watcher = Watcher {
            shared: Arc::clone(&shared),
            outgoing: joined.outgoing,
            incoming: joined.incoming,
            silence: TimeLimit::new(silence_limit(limit)),
            // A short limit needs recent reports, so that no rank is named as late that is not.
            report_every: joined.report_every.min(limit / 4),
            reported: Instant::now(),
            sent: Instant::now(),
            unsent: None,
        };

        let spawned = std::thread::Builder::new()
            .name(format!("rank {rank} watcher"))
            .spawn(move || watcher.run());
        let watcher = spawned.map_err(|e| CommError::Peer {
            rank,
            message: format!(
                "failed to start the watcher thread: {e}; check `ulimit -u` and the container's limit"
            ),
        })?;
        Ok(Self {
            world: shared,
            watcher: Some(watcher),
        })
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.world.state.lock().closing = true;
        if let Some(watcher) = self.watcher.take() {
            // It ends by itself, within `ANSWER_LIMIT`.
            let _ = watcher.join();
        }
    }
}

struct Watcher {
    shared: Arc<World>,
    outgoing: TcpStream,
    incoming: Incoming,
    /// The time for which the coordinator may send nothing; starts anew with each message.
    silence: TimeLimit,
    report_every: Duration,
    /// The time of the last report.
    reported: Instant,
    /// The time at which the last message was sent.
    sent: Instant,
    /// The failure to send a message, after which nothing is sent.
    unsent: Option<CommError>,
}

impl Watcher {
    fn run(mut self) {
        loop {
            self.receive();
            let fault = self.check_collectives();
            self.send();
            if let Some(fault) = fault {
                self.report(fault);
            }
            if self.shared.failure().is_some() {
                self.abort_all();
            }
            let state = self.shared.state.lock();
            if state.closing || state.failure.is_some() {
                drop(state);
                return self.leave();
            }
        }
    }

    /// Sends what is urgent or due.
    fn send(&mut self) {
        let mut messages = Vec::new();
        let disconnected = {
            let mut state = self.shared.state.lock();
            let urgent = std::mem::take(&mut state.urgent);
            if !urgent.is_empty() || self.reported.elapsed() >= self.report_every {
                self.reported = Instant::now();
                let open = state.open.iter_mut();
                messages.extend(open.filter_map(|(&context, open)| open.report(context)));
            }
            messages.extend(urgent);
            state.disconnected
        };

        if messages.is_empty() && self.sent.elapsed() > KEEPALIVE {
            messages.push(Message::Alive);
        }

        if !messages.is_empty() && !disconnected && self.unsent.is_none() {
            self.sent = Instant::now();
            if let Err(error) = send(&self.outgoing, &messages) {
                // After a part of a frame, the coordinator must not take the next message for the
                // rest of it. What it has sent, which may be the cause, can still be received.
                let _ = self.outgoing.shutdown(Shutdown::Both);
                let rank = if error.kind() == ErrorKind::InvalidData {
                    self.shared.rank
                } else {
                    0
                };
                let message = format!(
                    "a message of rank {} to rank 0 was not sent: {error}",
                    self.shared.rank
                );
                self.unsent = Some(CommError::Peer { rank, message });
            }
        }
    }

    /// Reports a fault to the coordinator and waits for its answer.
    fn report(&mut self, Fault { message, fallback }: Fault) {
        self.shared.queue(message);
        self.receive_until(|state| state.failure.is_some());
        self.shared.set_failure(fallback);
    }

    /// Sends and receives until `done` or the end of the connection, for at most [`ANSWER_LIMIT`].
    fn receive_until(&mut self, done: impl Fn(&State) -> bool) {
        let mut time = TimeLimit::new(ANSWER_LIMIT);
        let pending = |state: &State| !done(state) && !state.disconnected;
        while pending(&self.shared.state.lock()) && !time.has_passed() {
            self.send();
            self.receive();
        }
    }

    /// Receives one message from the coordinator, waiting for at most one tick.
    fn receive(&mut self) {
        if self.shared.state.lock().disconnected {
            return std::thread::sleep(TICK);
        }
        let received = self.incoming.next(TICK);
        let mut state = self.shared.state.lock();
        let lost = |message| CommError::Peer { rank: 0, message };

        let lost = match received {
            Ok(None) if !self.silence.has_passed() => None,
            Ok(None) => Some(lost(format!(
                "sent nothing for {:?}",
                silence_limit(self.shared.limit)
            ))),
            Ok(Some(message)) => {
                self.silence = TimeLimit::new(silence_limit(self.shared.limit));
                match message {
                    Message::Failed { error } => {
                        state.failure.get_or_insert(error);
                    }
                    Message::Placed {
                        context,
                        number,
                        place,
                    } => {
                        state.places.insert((context, number), place);
                    }
                    Message::Goodbye => state.disconnected = true,
                    _ => {}
                }
                None
            }
            Err(error) => Some(self.unsent.clone().unwrap_or_else(|| {
                lost(format!(
                    "its process or the connection to it ended: {error}"
                ))
            })),
        };

        if let Some(error) = lost {
            state.failure.get_or_insert(error);
            state.disconnected = true;
        }

        drop(state);
        self.shared.changed.notify_all();
    }

    /// Removes collectives that have ended, and returns the first fault.
    fn check_collectives(&mut self) -> Option<Fault> {
        let mut state = self.shared.state.lock();
        if state.failure.is_some() {
            return None;
        }

        for (&context, open) in &mut state.open {
            match open.check(self.shared.rank, self.shared.limit) {
                Ok(None) => {}
                Ok(Some((sequence, call))) => {
                    return Some(self.shared.late_fault(context, sequence, call));
                }
                Err(error) => {
                    return Some(Fault {
                        message: Message::Failed {
                            error: error.clone(),
                        },
                        fallback: error,
                    });
                }
            }
        }

        None
    }

    /// Poisons the streams of the collectives in flight and aborts all communicators.
    fn abort_all(&self) {
        self.shared.poison_in_flight();
        let transports: Vec<_> = self
            .shared
            .state
            .lock()
            .open
            .values()
            .map(|open| Arc::clone(&open.transport))
            .collect();
        // All aborts start before any is awaited: on a stream, a collective can wait behind another
        // communicator's.
        let completions: Vec<AbortCompletion> = transports
            .iter()
            .map(|transport| transport.abort())
            .collect();
        AbortCompletion::wait_for_all(completions);
        self.shared.changed.notify_all();
    }

    fn leave(&mut self) {
        self.shared.state.lock().over = true;
        if self.shared.failure().is_some() {
            return self.send();
        }
        // Rank 0's process may end only when the coordinator has sent its goodbye to all ranks.
        self.shared.queue(Message::Goodbye);
        self.receive_until(|state| state.failure.is_some());
    }
}
