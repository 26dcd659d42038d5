//! Replay of a trace through a whole [`Pool`] on a simulated device, with pages, stitching and
//! hazards.

use std::time::Duration;

use zero_alloc::device::{DType, Device, Stream};
use zero_alloc::host::HostStream;
use zero_alloc::testing::Simulated;
use zero_alloc::{AllocError, Block, Pool, Purpose};

use super::{Op, Trace};

const PAGE_BYTES: usize = 2 << 20;
const DEVICE_BYTES: usize = 1 << 40;

/// Reserved bytes and mapped pages of one replay.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PoolOutcome {
    /// The peak of reserved bytes, in pages of 2 MiB.
    pub reserved_peak_bytes: u64,
    /// Pages mapped by growth and for stitched blocks.
    pub pages_mapped: u64,
}

/// Replays a trace on one stream. Every block is an activation.
///
/// # Errors
/// The pool failed, for example because the trace exceeds the device's 1 TiB.
pub fn replay(trace: &Trace) -> Result<PoolOutcome, AllocError> {
    let device = Simulated::new(DEVICE_BYTES as u64, PAGE_BYTES);
    let stream: HostStream = device.create_stream("replay")?;
    let pool = Pool::new(device, DEVICE_BYTES);
    let mut held: Vec<Option<Block<Simulated>>> = Vec::new();
    held.resize_with(trace.slots, || None);

    for op in &trace.ops {
        match *op {
            Op::Allocate { slot, bytes } => {
                let bytes = bytes.max(1) as usize;
                let block = pool.allocate(bytes, DType::U8, Purpose::Activations, &stream)?;
                held[slot as usize] = Some(block);
            }
            Op::Free { slot } => held[slot as usize] = None,
        }
    }

    stream.synchronize(Duration::from_secs(600))?;
    // The pool is never trimmed, so the reserved bytes are at their peak now.
    let report = pool.report();
    let grown = (report.reserved_bytes / PAGE_BYTES) as u64;
    Ok(PoolOutcome {
        reserved_peak_bytes: report.reserved_bytes as u64,
        pages_mapped: grown + report.stitched_pages,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::synth::{SHAPES, Shape};

    /// The bound of reserved over peak live bytes.
    const GOAL: f64 = 1.03;

    fn ratio(trace: &Trace) -> f64 {
        let outcome = replay(trace).expect("allocated");
        outcome.reserved_peak_bytes as f64 / trace.live_peak_bytes as f64
    }

    #[test]
    fn recorded_traces_stay_within_the_bound() {
        for name in ["gpt2-124m-fixed", "gpt2-350m-varlen", "fsdp2-350m-varlen"] {
            let path = format!("{}/traces/{name}.csv.gz", env!("CARGO_MANIFEST_DIR"));
            let trace = Trace::read(path.as_ref()).expect("a trace");
            let ratio = ratio(&trace);
            assert!((1.0..=GOAL).contains(&ratio), "{name}: {ratio}");
        }
    }

    #[test]
    fn synthetic_programs_stay_within_the_bound() {
        for trace in SHAPES.iter().map(Shape::trace) {
            let ratio = ratio(&trace);
            assert!((1.0..=GOAL).contains(&ratio), "{}: {ratio}", trace.name);
        }
    }
}
