//! Overlap of communication and compute, without a clock: operations of one stream wait for those
//! of the other that must be able to run beside them, so a step without overlap never ends. (In
//! DeepSpeed #7804 a fix removed all overlap unnoticed.)

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use zero_alloc::device::{AnySlice, DeviceError, DeviceSlice};
use zero_alloc::host::{HostDevice, HostStream, Monitor};
use zero_comm::backend::{Checked, Wrapped};
use zero_comm::threads::World;
use zero_comm::{Collective, CommOptions, Communicator};
use zero_trainer::{Batch, Grad, Model, ModelError, Settings, run_as_rank};

use super::support::{Altered, Case};

/// The longest wait of an operation for another stream.
const LIMIT: Duration = Duration::from_secs(300);
/// Units, and passes, of the tiny model: embedding, three blocks, tied head.
const UNITS: u64 = 5;
/// All-gathers of a step of stage 3: units 0 1 2 3 4 0 in forward, 3 2 1 in backward.
const GATHERS: u64 = 9;
/// The all-gathers of a step that are enqueued before each forward pass; the next unit's is among
/// them.
const AHEAD: [u64; 5] = [2, 3, 4, 5, 7];

/// An operation: its kind, and the number of its pass.
type Operation = (&'static str, u64);

/// The operations of a rank that have run, with their counts.
struct Progress {
    stage: u64,
    steps: u64,
    runs: Monitor<HashMap<Operation, u64>>,
}

impl Progress {
    /// Counts `operation` in the order of `stream`.
    fn count(
        self: &Arc<Self>,
        stream: &HostStream,
        operation: Operation,
    ) -> Result<(), DeviceError> {
        let this = Arc::clone(self);
        stream.enqueue("count", move || {
            this.runs
                .update(|runs| *runs.entry(operation).or_default() += 1);
            Ok(())
        })
    }

    /// Blocks `stream` until `operation` has run `times` times.
    fn block(
        self: &Arc<Self>,
        stream: &HostStream,
        operation: Operation,
        times: u64,
    ) -> Result<(), DeviceError> {
        let this = Arc::clone(self);
        stream.enqueue("block", move || {
            let what = || format!("{operation:?} to run {times} times: no overlap");
            this.runs.wait_until(LIMIT, what, |runs| {
                (runs.get(&operation).copied().unwrap_or(0) >= times).then_some(())
            })
        })
    }
}

/// A communicator whose operations wait for compute that must be able to run beside them.
fn blocked_comm(
    inner: Arc<dyn Communicator<HostDevice>>,
    progress: Arc<Progress>,
) -> Wrapped<HostDevice> {
    let reductions = AtomicU64::new(0);
    let gathers = AtomicU64::new(0);
    let enqueue = move |comm: &Wrapped<HostDevice>, stream: &HostStream, checked: Checked| {
        let collective = checked.call().collective;
        let control = checked.call().control;
        let gather = collective == Collective::AllGather && !control;
        if collective == Collective::ReduceScatter && progress.stage == 3 {
            // Each reduction waits for the backward pass after its own.
            let n = reductions.fetch_add(1, Ordering::Relaxed);
            let step = n / UNITS;
            let i = n % UNITS;
            if i + 1 < UNITS {
                progress.block(stream, ("backward", UNITS - 2 - i), step + 1)?;
            }
        }

        if gather && progress.stage < 3 {
            // The gather of a unit after update s waits for the forward pass before the unit's, in
            // step s + 1. Update 0 is the initial weights; no forward follows the last.
            let n = gathers.fetch_add(1, Ordering::Relaxed);
            let update = n / UNITS;
            let unit = n % UNITS;
            if unit > 0 && (1..progress.steps).contains(&update) {
                progress.block(stream, ("forward", unit - 1), update + 1)?;
            }
        }

        comm.inner().enqueue(stream, checked)?;
        if gather {
            progress.count(stream, ("all_gather", 0))?;
        }
        Ok(())
    };
    // SAFETY: the call is the inner communicator's, on the same stream.
    unsafe { Wrapped::new(inner, enqueue) }
}

/// A model whose forward passes wait, at stage 3, for the gather of the next unit.
struct BlockedModel {
    inner: Box<dyn Model<HostDevice>>,
    progress: Arc<Progress>,
    steps: u64,
}

// SAFETY: every call is the wrapped model's.
unsafe impl Model<HostDevice> for BlockedModel {
    fn set_batch(&mut self, stream: &HostStream, batch: &Batch) -> Result<(), ModelError> {
        self.inner.set_batch(stream, batch)
    }

    fn forward(
        &mut self,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
    ) -> Result<(), ModelError> {
        self.steps += u64::from(pass == 0);
        if self.progress.stage == 3 {
            self.progress.block(
                stream,
                ("all_gather", 0),
                GATHERS * (self.steps - 1) + AHEAD[pass],
            )?;
        }
        self.inner.forward(stream, pass, params)?;
        Ok(self.progress.count(stream, ("forward", pass as u64))?)
    }

    fn backward(
        &mut self,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
        grads: &[Grad],
        loss_scale: DeviceSlice<f64>,
    ) -> Result<(), ModelError> {
        self.inner
            .backward(stream, pass, params, grads, loss_scale)?;
        Ok(self.progress.count(stream, ("backward", pass as u64))?)
    }

    fn add_losses(
        &mut self,
        stream: &HostStream,
        params: &[AnySlice],
        tokens: usize,
    ) -> Result<(), ModelError> {
        self.inner.add_losses(stream, params, tokens)
    }

    unsafe fn loss(&self) -> DeviceSlice<f64> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.loss() }
    }
}

fn run(case: &Case) {
    let workload = case.tiny();
    let options = case.options(None);
    let settings = Settings {
        limit: 2 * LIMIT,
        ..case.settings()
    };

    let world = World::new(case.ranks, CommOptions::default().limit(settings.limit)).unwrap();
    std::thread::scope(|scope| {
        for comm in world {
            let workload = &workload;
            let options = &options;
            let settings = &settings;
            scope.spawn(move || {
                let runs = Monitor::new(HashMap::new());
                let progress = Arc::new(Progress {
                    stage: case.stage,
                    steps: case.steps,
                    runs,
                });
                let comm = Arc::new(blocked_comm(Arc::new(comm), Arc::clone(&progress)));
                let mut workload = Altered::batches(workload, |_, _| {});
                workload.model = Box::new(move |inner| {
                    Box::new(BlockedModel {
                        inner,
                        progress: Arc::clone(&progress),
                        steps: 0,
                    })
                });
                run_as_rank(comm, 1, settings, &workload, options, &mut |_| Ok(())).unwrap();
            });
        }
    });
}

/// Every reduction runs beside the next backward pass, every gather beside the forward pass before
/// its own.
#[test]
fn stage_3_overlaps_reductions_and_gathers() {
    // A bucket holds the largest unit, so each unit is one reduction.
    run(&Case {
        bucket_elems: 1 << 16,
        ..Case::default()
    });
}

/// The gathers of an update run beside the next step's forward, unit by unit.
#[test]
fn updates_are_gathered_beside_the_next_forward() {
    for stage in [1, 2] {
        run(&Case {
            stage,
            ..Case::default()
        });
    }
}
