//! The same replay through a whole [`Pool`] on a simulated device: pages, stitching, hazards and all.

use std::time::Duration;

use zero_alloc::device::{DType, Device, Stream};
use zero_alloc::host::HostStream;
use zero_alloc::testing::Simulated;
use zero_alloc::{AllocError, Movable, Pool, Purpose};

use super::{Op, Trace};

const PAGE_BYTES: usize = 2 << 20;
const DEVICE_BYTES: usize = 1 << 40;

/// What a pool held and moved.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PoolOutcome {
    /// The greatest reserved, of pages of 2 MiB.
    pub reserved_peak_bytes: u64,
    /// Bytes copied to make free ones contiguous.
    pub bytes_moved: u64,
    /// Pages mapped, to grow and for stitched blocks.
    pub pages_mapped: u64,
}

/// Replays a trace on one stream; every block may move, and none is told to live long.
///
/// # Errors
/// The pool failed; on a device of 1 TiB it should not.
pub fn replay(trace: &Trace) -> Result<PoolOutcome, AllocError> {
    let device = Simulated::new(DEVICE_BYTES as u64, PAGE_BYTES);
    let stream: HostStream = device.create_stream("replay")?;
    let pool = Pool::new(device, DEVICE_BYTES);
    let mut held: Vec<Option<Movable<Simulated>>> = Vec::new();
    held.resize_with(trace.slots, || None);
    for op in &trace.ops {
        held_after(op, &pool, &stream, &mut held)?;
    }
    stream.synchronize(Duration::from_secs(600))?;
    // Pages are never given back while the pool lives, so what is reserved last is the most.
    let report = pool.report();
    let grown = (report.reserved_bytes / PAGE_BYTES) as u64;
    Ok(PoolOutcome {
        reserved_peak_bytes: report.reserved_bytes as u64,
        bytes_moved: report.moved_bytes,
        pages_mapped: grown + report.stitched_pages,
    })
}

fn held_after(
    op: &Op,
    pool: &Pool<Simulated>,
    stream: &HostStream,
    held: &mut [Option<Movable<Simulated>>],
) -> Result<(), AllocError> {
    match *op {
        Op::Allocate { slot, bytes } => {
            let block = pool.allocate_movable(bytes.max(1) as usize, DType::U8, Purpose::Activations, stream)?;
            held[slot as usize] = Some(block);
        }
        Op::Free { slot } => held[slot as usize] = None,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::programs::{RUNS, Run};
    use crate::replay::synth::{SHAPES, Shape};

    /// At most this much may be reserved beside the greatest live size, wherever that is above some pages.
    const GOAL: f64 = 1.03;

    fn ratio(trace: &Trace) -> f64 {
        let outcome = replay(trace).expect("room");
        outcome.reserved_peak_bytes as f64 / trace.live_peak_bytes as f64
    }

    #[test]
    fn a_pool_reserves_as_little_as_its_planner_on_the_recorded_traces() {
        for name in ["gpt2-124m-fixed", "gpt2-350m-varlen", "fsdp2-350m-varlen"] {
            let path = format!("{}/traces/{name}.csv.gz", env!("CARGO_MANIFEST_DIR"));
            let trace = Trace::read(path.as_ref()).expect("a trace");
            let ratio = ratio(&trace);
            assert!((1.0..=GOAL).contains(&ratio), "{name}: {ratio}");
        }
    }

    #[test]
    fn a_pool_reserves_as_little_on_other_programs() {
        let random = (0..12).map(|seed| Shape::random(seed).trace());
        let runs = RUNS.iter().copied().chain((0..12).map(Run::random)).map(|run| run.trace());
        for trace in SHAPES.iter().map(Shape::trace).chain(random).chain(runs) {
            let ratio = ratio(&trace);
            assert!((1.0..=GOAL).contains(&ratio), "{}: {ratio}", trace.name);
        }
    }
}
