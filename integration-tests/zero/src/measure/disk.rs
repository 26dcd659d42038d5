//! The rate at which scratch files are read, as the offload to NVMe reads them.

use std::path::Path;
use std::time::{Duration, Instant};

use zero_alloc::device::{Device, Stream};
use zero_alloc::host::HostDevice;
use zero_alloc::swap::{SwapBuffer, SwapFile, SwapOptions};
use zero_alloc::{Pool, Purpose};

use super::{TIME, median};
use crate::error::CliError;
use crate::output::print_note;

/// Bytes of a transfer, and of the file.
const TRANSFER_BYTES: usize = 64 << 20;
const TRANSFERS: u64 = 8;
const LIMIT: Duration = Duration::from_secs(120);

/// Bytes per second of reads past the page cache, in transfers of 64 MiB.
pub(super) fn read_bytes_per_s(dir: &Path) -> Result<f64, CliError> {
    let failed = |what: &dyn std::fmt::Display| {
        failure!(
            "failed to measure the disk of {}: {what}; choose another folder with --scratch",
            dir.display()
        )
    };
    let device = HostDevice::new();
    let stream = device.create_stream("disk").map_err(|e| failed(&e))?;
    let pool = Pool::new(device, usize::MAX);
    let bytes = TRANSFERS * TRANSFER_BYTES as u64;
    let file = SwapFile::create(dir, bytes, SwapOptions::default()).map_err(|e| failed(&e))?;
    for notice in file.notices() {
        print_note(format_args!("note: {notice}"));
    }
    let buffer = SwapBuffer::allocate(&pool, TRANSFER_BYTES, Purpose::Workspace, &stream)
        .map_err(|e| failed(&e))?;
    let lane = file.lane().map_err(|e| failed(&e))?;
    lane.register(std::slice::from_ref(&buffer));
    // SAFETY: the buffer outlives the transfers, which one stream orders and each is waited for.
    let slice = unsafe { buffer.slice() };
    let transfer = |at: u64, writes: bool| {
        let range = [(at * TRANSFER_BYTES as u64, slice)];
        let enqueued = match writes {
            true => lane.write(&stream, &range),
            false => lane.read(&stream, &range),
        };
        enqueued
            .and_then(|()| stream.synchronize(LIMIT))
            .map_err(|e| failed(&e))
    };

    (0..TRANSFERS).try_for_each(|at| transfer(at, true))?;
    let began = Instant::now();
    let mut seconds = Vec::new();
    while began.elapsed() < TIME {
        for at in 0..TRANSFERS {
            let start = Instant::now();
            transfer(at, false)?;
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    Ok(TRANSFER_BYTES as f64 / median(seconds))
}
