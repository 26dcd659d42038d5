//! The arena alone: blocks come and go, holes appear, compaction closes them, and a picture shows it.
//!
//! `cargo run -p zero-alloc --example arena > map.svg`

use zero_alloc::device::{DType, Device};
use zero_alloc::host::HostDevice;
use zero_alloc::pool::MapHistory;
use zero_alloc::{Pool, Purpose};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = HostDevice::new();
    let stream = device.create_stream("compute")?;
    let pool = Pool::new(device, 16 << 20);
    let mut history = MapHistory::default();

    let state = pool.allocate(1 << 20, DType::F32, Purpose::Optimizer, &stream)?;
    let mut activations = Vec::new();
    for layer in 1..=12 {
        activations.push(pool.allocate_movable(layer * 40_000, DType::Bf16, Purpose::Activations, &stream)?);
    }
    history.push("full", pool.map());

    // Every other one is dropped: half of the memory is free, in pieces.
    let mut layer = 0;
    activations.retain(|_| {
        layer += 1;
        layer % 2 == 0
    });
    history.push("holes", pool.map());
    let before = pool.report();

    let contiguous = pool.compact(before.free_bytes, &stream)?;
    history.push("compacted", pool.map());

    eprintln!("{}", history.text(72));
    eprintln!(
        "{} bytes are free; the largest hole was {}, and is {contiguous} after moving {} bytes",
        before.free_bytes,
        before.largest_free_bytes,
        pool.report().moved_bytes
    );
    println!("{}", history.svg());
    drop(state);
    Ok(())
}
