//! One pool used by many threads.

use std::time::Duration;

use zero_alloc::device::{AnySlice, DType, Device, DeviceError, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::{Pool, Purpose};

/// Miri is slow.
const LIMIT: Duration = Duration::from_secs(if cfg!(miri) { 3600 } else { 60 });
const THREADS: u64 = if cfg!(miri) { 3 } else { 8 };
const MAX_BYTES: usize = if cfg!(miri) { 64 } else { 4000 };

fn write_and_check(stream: &HostStream, slice: AnySlice, value: u64) -> Result<(), DeviceError> {
    let slice = slice.typed::<u8>()?;
    stream.enqueue("write", move || {
        // SAFETY: host memory; the block is this thread's.
        unsafe { slice.as_host_mut() }.fill(value as u8);
        Ok(())
    })?;
    stream.enqueue("check", move || {
        // SAFETY: host memory; the block is this thread's.
        let seen = unsafe { slice.as_host() };
        assert!(
            seen.iter().all(|b| *b == value as u8),
            "another thread wrote here"
        );
        Ok(())
    })
}

#[test]
fn threads_share_a_pool() {
    let device = HostDevice::new();
    let pool = Pool::new(device.clone(), 64 << 20);
    let rounds = if cfg!(miri) { 4 } else { 2000 };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let pool = pool.clone();
            let device = device.clone();
            scope.spawn(move || {
                let stream = device
                    .create_stream(&format!("stream {thread}"))
                    .expect("a stream");
                let mut held = Vec::new();
                let mut random = thread;
                for round in 0..rounds {
                    random = random
                        .wrapping_mul(6364136223846793005)
                        .wrapping_add(1442695040888963407);
                    let bytes = 1 + (random >> 33) as usize % MAX_BYTES;
                    let purpose = Purpose::ALL[(random >> 20) as usize % 6];
                    let block = pool
                        .allocate(bytes, DType::U8, purpose, &stream)
                        .expect("allocated");
                    // SAFETY: only the home stream uses the block, in order.
                    let slice = unsafe { block.slice() };
                    write_and_check(&stream, slice, thread * 31 + round).expect("enqueued");
                    if random >> 63 == 0 {
                        held.push(block);
                    }
                    if held.len() > 20 {
                        drop(held.swap_remove((random >> 40) as usize % 20));
                    }
                }
                stream.synchronize(LIMIT).expect("all checks hold");
            });
        }
    });

    pool.check_invariants().expect("sound");
    assert_eq!(pool.report().total.live_bytes, 0);
}
