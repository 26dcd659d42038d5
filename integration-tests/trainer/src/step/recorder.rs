//! Recording the parts of a step into CUDA graphs and replaying them.
//!
//! A part is the work that one call of a [`Stage`](crate::stages::stage::Stage), or one of its
//! micro-batches, enqueues. Everything that changes from step to step (tokens, learning rate, loss
//! scale, flags) is read from device memory when the part runs, so that a recorded part is valid in
//! every later step. The first two steps are not recorded: they load kernels and choose
//! matrix-product algorithms.
//!
//! A part waits for all streams, and all streams wait for it. Parts therefore do not overlap: in
//! particular, the gather after an update does not overlap the next forward. In a timeline a part
//! is one operation.
//!
//! The streams must be drained before memory that the parts use is freed; the drop of
//! [`Flags`](crate::step::flags::Flags) does it.

use zero_alloc::device::{Device, DeviceError, Stream};
use zero_shard::ZeroStage;

use crate::error::TrainError;
use crate::mesh::Sent;
use crate::rank::Rank;
use crate::step::replay::{Record, Replay};
use crate::telemetry::phase::Phase;

/// A part of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GraphPart {
    /// Forward and backward of the first micro-batch, whose gradients replace those of the last
    /// step.
    First,
    /// Forward and backward of a later micro-batch, whose gradients are added.
    Later,
    /// Forward and backward of the last of several micro-batches, in which sums may be reduced.
    Last,
    /// The decision to update or to skip.
    Decision,
    /// The update.
    Update,
}

struct Recorded<D: Device> {
    graph: Box<dyn Replay<D>>,
    /// Bytes that its collectives send.
    sent: Sent,
}

/// Enqueues the parts of the steps of one rank.
pub(crate) struct Recorder<'a, D: Device> {
    rank: &'a Rank<D>,
    record: Option<Record<D>>,
    parts: [Option<Recorded<D>>; 5],
    warm: bool,
    /// Bytes that replays have sent.
    sent: Sent,
}

impl<'a, D: Device> Recorder<'a, D> {
    /// # Errors
    /// The settings request graphs that the device or the stage does not support.
    pub(crate) fn new(rank: &'a Rank<D>) -> Result<Self, TrainError> {
        let record = rank.host.record.filter(|_| rank.settings.graphs);
        if rank.settings.graphs && record.is_none() {
            return Err(TrainError::Usage(
                "CUDA graphs require --device cuda".to_owned(),
            ));
        }
        if record.is_some() && rank.settings.stage == ZeroStage::Three {
            return Err(TrainError::Usage(AT_STAGE_3.to_owned()));
        }
        Ok(Self {
            rank,
            record,
            parts: [const { None }; 5],
            warm: false,
            sent: Sent::default(),
        })
    }

    /// Starts recording parts; called after two steps.
    pub(crate) fn warm(&mut self) {
        self.warm = true;
    }

    /// Runs `part`: calls `enqueue`, or replays its graph, which the first call after
    /// [`Self::warm`] records.
    pub(crate) fn run(
        &mut self,
        part: GraphPart,
        enqueue: impl FnOnce() -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let Some(record) = self.record.filter(|_| self.warm) else {
            return enqueue();
        };
        let Rank { mesh, compute, .. } = self.rank;

        let slot = &mut self.parts[part as usize];
        let recorded = match slot {
            Some(recorded) => {
                self.sent = self.sent + recorded.sent;
                recorded
            }
            None => {
                // A capture must not wait for events that were recorded before it.
                self.rank.synchronize()?;
                let before = mesh.sent();
                let graph = forked(self.rank, record, enqueue)?;
                slot.insert(Recorded {
                    graph,
                    sent: mesh.sent().since(before),
                })
            }
        };

        join(self.rank)?;
        let in_phase = match part {
            GraphPart::First | GraphPart::Later | GraphPart::Last => Phase::Graph,
            GraphPart::Decision => Phase::Decision,
            GraphPart::Update => Phase::Optimizer,
        };

        let before = self.rank.timeline.set_phase(in_phase.name());
        // SAFETY: the recorded operations use memory and kernels of the rank, the stage and the
        // model, which outlive the recorder's graphs and their launches; all streams are ordered
        // around the launch.
        let launched = unsafe { recorded.graph.launch(compute) };
        self.rank.timeline.set_phase(before);
        launched?;

        Ok(fork(self.rank)?)
    }

    /// Bytes that replays have sent, which the communicator does not count.
    pub(crate) fn sent(&self) -> Sent {
        self.sent
    }
}

/// The error for graphs at stage 3.
pub const AT_STAGE_3: &str = "steps of stage 3 cannot be recorded into graphs, because units are gathered into memory \
                              that is allocated and freed during the step; use --stage 0, 1 or 2";

/// Records `enqueue`, with the other streams forked from the compute stream and joined to it.
fn forked<D: Device>(
    rank: &Rank<D>,
    record: Record<D>,
    enqueue: impl FnOnce() -> Result<(), TrainError>,
) -> Result<Box<dyn Replay<D>>, TrainError> {
    let mut enqueue = Some(enqueue);
    let mut failed = None;
    let recorded = record(&rank.compute, &mut || {
        fork(rank)?;
        if let Some(Err(error)) = enqueue.take().map(|enqueue| enqueue()) {
            let message = error.to_string();
            failed = Some(error);
            return Err(DeviceError::Driver {
                call: "recording a step",
                message,
            });
        }
        join(rank)
    });

    match failed {
        Some(error) => Err(error),
        None => Ok(recorded?),
    }
}

/// Makes the streams of collectives wait for the compute stream.
fn fork<D: Device>(rank: &Rank<D>) -> Result<(), DeviceError> {
    let computed = rank.compute.record()?;
    let mut others = rank.collective_streams();
    others.try_for_each(|stream| stream.wait(&computed))
}

/// Makes the compute stream wait for those of collectives.
fn join<D: Device>(rank: &Rank<D>) -> Result<(), DeviceError> {
    let mut others = rank.collective_streams();
    others.try_for_each(|stream| rank.compute.wait(&stream.record()?))
}
