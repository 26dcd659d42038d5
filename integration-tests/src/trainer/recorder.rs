//! The parts of a step, enqueued by calls or, once recorded into graphs of the device, by one call each.
//!
//! A part is what one call of a [`Stage`](super::Stage) enqueues. All that changes from step to step (tokens,
//! learning rate, loss scale, flags) is read from device memory when it runs, so that a part recorded in one step is
//! that part of every later one. The first two steps are not recorded: in them kernels are loaded and products find
//! their algorithms.
//!
//! Between parts the two streams are one: a part begins behind both and ends with both. So nothing of one part runs
//! beside another, which costs the overlap of the gather after an update with the next forward. In a timeline a part is
//! one operation.
//!
//! The streams must be drained before what the parts use is freed; the drop of [`Flags`](super::flags::Flags) does
//! that.

use zero_alloc::device::{Device, DeviceError, Stream};
use zero_comm::Traffic;
use zero_shard::ZeroStage;

use super::rank::Rank;
use crate::error::TrainError;

/// What was recorded.
pub trait Replay<D: Device> {
    /// Enqueues it on `stream`.
    ///
    /// # Errors
    /// The stream refused.
    fn launch(&self, stream: &D::Stream) -> Result<(), DeviceError>;
}

/// Records what a closure enqueues on a stream, and on those that fork from it and come back, instead of running it.
pub type Record<D> = fn(
    &<D as Device>::Stream,
    &mut dyn FnMut() -> Result<(), DeviceError>,
) -> Result<Box<dyn Replay<D>>, DeviceError>;

/// A part of a step.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    /// Forward and backward of the first micro-batch, whose gradients are written.
    First,
    /// Those of a later one, whose gradients are added.
    Later,
    /// The decision.
    Decision,
    /// The update.
    Update,
}

struct Recorded<D: Device> {
    graph: Box<dyn Replay<D>>,
    /// What its collectives send.
    sent: Traffic,
}

/// Enqueues the parts of the steps of one rank.
pub(super) struct Recorder<'a, D: Device> {
    rank: &'a Rank<D>,
    record: Option<Record<D>>,
    parts: [Option<Recorded<D>>; 4],
    warm: bool,
    /// What replays have sent.
    sent: Traffic,
}

impl<'a, D: Device> Recorder<'a, D> {
    /// # Errors
    /// Steps are to be recorded that cannot be.
    pub(super) fn new(rank: &'a Rank<D>) -> Result<Self, TrainError> {
        let record = rank.host.record.filter(|_| rank.settings.graphs);
        if rank.settings.graphs && record.is_none() {
            return Err(TrainError::Usage("steps are recorded into graphs on CUDA only".to_owned()));
        }
        if record.is_some() && rank.settings.stage == ZeroStage::Three {
            return Err(TrainError::Usage(AT_STAGE_3.to_owned()));
        }
        Ok(Self { rank, record, parts: [const { None }; 4], warm: false, sent: Traffic::default() })
    }

    /// Two steps have run: from now on parts are recorded.
    pub(super) fn warm(&mut self) {
        self.warm = true;
    }

    /// Enqueues `part`, which `enqueue` enqueues.
    ///
    /// # Errors
    /// What it returned, or the stream refused.
    pub(super) fn run(
        &mut self,
        part: Part,
        enqueue: impl FnOnce() -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let Some(record) = self.record.filter(|_| self.warm) else { return enqueue() };
        let Rank { comm, compute, comm_stream, .. } = self.rank;
        let place = &mut self.parts[part as usize];
        let recorded = match place {
            Some(recorded) => {
                self.sent = self.sent + recorded.sent;
                recorded
            }
            None => {
                // What was enqueued before is no part of the graph, and its points may not be waited for there.
                self.rank.synchronize()?;
                let before = comm.traffic();
                let graph = forked(self.rank, record, enqueue)?;
                place.insert(Recorded { graph, sent: comm.traffic().since(before) })
            }
        };
        compute.wait(&comm_stream.record()?)?;
        recorded.graph.launch(compute)?;
        Ok(comm_stream.wait(&compute.record()?)?)
    }

    /// What replays have sent until now, which the communicator does not count.
    pub(super) fn sent(&self) -> Traffic {
        self.sent
    }
}

/// Why stage 3 is not recorded.
pub const AT_STAGE_3: &str = "steps of stage 3 cannot be recorded into graphs, since units are gathered into memory \
                              that is taken and given back as they go; stages 0 to 2 can";

/// A graph of what `enqueue` enqueues, in which the communication stream forks from the compute stream and comes back.
fn forked<D: Device>(
    rank: &Rank<D>,
    record: Record<D>,
    enqueue: impl FnOnce() -> Result<(), TrainError>,
) -> Result<Box<dyn Replay<D>>, TrainError> {
    let Rank { compute, comm_stream, .. } = rank;
    let (mut enqueue, mut failed) = (Some(enqueue), None);
    let recorded = record(compute, &mut || {
        comm_stream.wait(&compute.record()?)?;
        if let Some(Err(error)) = enqueue.take().map(|enqueue| enqueue()) {
            let message = error.to_string();
            failed = Some(error);
            return Err(DeviceError::Driver { call: "recording a step", message });
        }
        compute.wait(&comm_stream.record()?)
    });
    match failed {
        Some(error) => Err(error),
        None => Ok(recorded?),
    }
}
