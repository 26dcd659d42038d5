//! One rank's part in one collective.

use std::sync::Arc;

use super::shared::Shared;
use super::slot::Slot;
use crate::CommError;
use crate::call::{Call, Checked};

/// One rank's part in one collective, created when the collective is enqueued. Dropping it before
/// it has completed (the stream failed and skipped it, or the work panicked) fails the world, so
/// that no peer waits for this rank.
pub(super) struct Ticket {
    shared: Arc<Shared>,
    rank: usize,
    sequence: u64,
    checked: Checked,
    stream: String,
    phase: Phase,
}

enum Phase {
    Enqueued,
    Working(Arc<Slot>),
    Ended,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let sequence = self.sequence;
        let rank = self.rank;
        match std::mem::replace(&mut self.phase, Phase::Ended) {
            Phase::Ended => {}
            Phase::Enqueued => {
                let stream = std::mem::take(&mut self.stream);
                self.shared.fail(CommError::Skipped {
                    sequence,
                    call: self.call(),
                    rank,
                    stream,
                });
            }
            Phase::Working(slot) => {
                let error = self.shared.fail(CommError::Panicked {
                    sequence,
                    call: self.call(),
                    rank,
                });
                slot.break_off(&error);
            }
        }
    }
}

impl Ticket {
    pub(super) fn new(
        shared: Arc<Shared>,
        rank: usize,
        sequence: u64,
        checked: Checked,
        stream: String,
    ) -> Self {
        Self {
            shared,
            rank,
            sequence,
            checked,
            stream,
            phase: Phase::Enqueued,
        }
    }

    /// Sets the phase that `Drop` reads if the work panics.
    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
    }

    fn call(&self) -> Box<Call> {
        Box::new(self.checked.call.clone())
    }

    /// Waits until all ranks have posted, runs `work`, and waits until all have done their shares.
    pub(super) fn run(mut self, work: impl FnOnce(&Call, &[Checked])) -> Result<(), CommError> {
        let result = self.arrive().and_then(|(slot, posted)| {
            self.enter(Phase::Working(Arc::clone(&slot)));
            work(&self.checked.call, &posted);
            self.enter(Phase::Ended);
            if slot.finish()? {
                self.shared.retire(self.sequence);
            }
            Ok(())
        });
        self.phase = Phase::Ended;
        result
    }

    fn arrive(&self) -> Result<(Arc<Slot>, Vec<Checked>), CommError> {
        let sequence = self.sequence;
        let rank = self.rank;
        let limit = self.shared.options.limit;
        let slot = self.shared.open(sequence, rank, &self.checked.call)?;
        slot.post(rank, &self.checked)
            .map_err(|error| self.shared.fail(error))?;

        let posted = match slot.arrive(limit)? {
            Some(posted) => posted,
            None => {
                if let Some(&rank) = slot.missing().first() {
                    let done = self.shared.reached(rank);
                    self.shared.fail(CommError::Stalled {
                        sequence,
                        call: self.call(),
                        rank,
                        limit,
                        done,
                    });
                }
                slot.arrive_or_fail()?
            }
        };

        Ok((slot, posted))
    }
}
