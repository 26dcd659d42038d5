//! loom tries every order of the locks that threads of one pool acquire:
//! `RUSTFLAGS="--cfg loom" cargo test -p zero-alloc --lib --release loom_tests`.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use loom::thread::{Builder, JoinHandle};

use crate::device::{
    AnySlice, BlockNote, DType, Device, DeviceError, DeviceId, DeviceKind, Event, Memory, Stream,
};
use crate::{Block, Pool, Purpose};

/// A device without memory or threads: operations complete when enqueued. It checks that blocks do
/// not overlap.
#[derive(Clone, Debug, Default)]
struct Still(Arc<Mutex<Records>>);

#[derive(Debug, Default)]
struct Records {
    allocated: BTreeMap<usize, usize>,
    next: usize,
    blocks: BTreeMap<usize, usize>,
}

#[derive(Clone, Debug)]
struct Now(u64);

// SAFETY: operations run where they are enqueued, and are done then.
unsafe impl Event for Now {
    fn is_done(&self) -> Result<bool, DeviceError> {
        Ok(true)
    }
    fn synchronize(&self, _limit: Duration) -> Result<(), DeviceError> {
        Ok(())
    }
}

// SAFETY: operations run where they are enqueued.
unsafe impl Stream for Now {
    type Event = Self;
    fn name(&self) -> &str {
        "now"
    }
    fn id(&self) -> u64 {
        self.0
    }
    fn record(&self) -> Result<Self, DeviceError> {
        Ok(self.clone())
    }
    fn wait(&self, _event: &Self) -> Result<(), DeviceError> {
        Ok(())
    }
    fn synchronize(&self, _limit: Duration) -> Result<(), DeviceError> {
        Ok(())
    }
}

// SAFETY: addresses that nothing touches.
unsafe impl Memory for Still {
    fn id(&self) -> DeviceId {
        DeviceId::PINNED
    }

    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        let mut records = self.0.lock().expect("sound");
        records.next += 1 << 40;
        let at = records.next;
        records.allocated.insert(at, bytes);
        Ok(NonNull::without_provenance(at.try_into().expect("not 0")))
    }
    unsafe fn deallocate(&self, ptr: NonNull<u8>, bytes: usize) {
        assert_eq!(
            self.0
                .lock()
                .expect("sound")
                .allocated
                .remove(&ptr.addr().get()),
            Some(bytes)
        );
    }
    fn granularity_bytes(&self) -> usize {
        256
    }
}

// SAFETY: no operation touches memory, and the kind is not the host.
unsafe impl Device for Still {
    type Stream = Now;
    type Event = Now;
    fn kind(&self) -> DeviceKind {
        DeviceKind::Simulated
    }
    fn check_stream(&self, _: &'static str, _: &Now) -> Result<(), DeviceError> {
        Ok(())
    }
    fn create_stream(&self, name: &str) -> Result<Now, DeviceError> {
        Ok(Now(name.len() as u64))
    }
    fn note_block(&self, note: BlockNote<'_, Now, Now>) {
        let mut records = self.0.lock().expect("sound");
        match note {
            BlockNote::Allocated { ptr, bytes, .. } => {
                let start = ptr.addr();
                if let Some((below, size)) = records.blocks.range(..start + bytes).next_back() {
                    assert!(below + size <= start, "two blocks overlap");
                }
                records.blocks.insert(start, bytes);
            }
            BlockNote::Freed { ptr, bytes, .. } => {
                assert_eq!(records.blocks.remove(&ptr.addr()), Some(bytes))
            }
        }
    }
    fn copy(&self, _: &Now, _: AnySlice, _: AnySlice) -> Result<(), DeviceError> {
        Ok(())
    }
    fn fill_zero(&self, _: &Now, _: AnySlice) -> Result<(), DeviceError> {
        Ok(())
    }
    fn upload(&self, _: &Now, _: &[u8], _: AnySlice, _: Duration) -> Result<(), DeviceError> {
        Ok(())
    }
    fn download(&self, _: &Now, _: AnySlice, _: &mut [u8], _: Duration) -> Result<(), DeviceError> {
        Ok(())
    }
}

const BUDGET: usize = 4 << 20;

fn allocate(pool: &Pool<Still>, stream: u64) -> Block<Still> {
    pool.allocate(256, DType::U8, Purpose::Buckets, &Now(stream))
        .expect("allocated")
}

/// A thread of the model; its lane is the one of its number.
fn thread<T: Send + 'static>(
    number: u64,
    body: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    Builder::new()
        .name(number.to_string())
        .spawn(body)
        .expect("a thread")
}

/// Runs `body` in every order, and checks that nothing leaks.
fn model(body: impl Fn(&Pool<Still>) + Sync + Send + 'static) {
    loom::model(move || {
        let device = Still::default();
        let pool = Pool::new(device.clone(), BUDGET);
        body(&pool);
        pool.check_invariants().expect("sound");
        assert_eq!(pool.report().total.live_bytes, 0);
        drop(pool);
        let records = device.0.lock().expect("sound");
        assert!(
            records.blocks.is_empty() && records.allocated.is_empty(),
            "{records:?}"
        );
    });
}

#[test]
fn two_threads_allocate_and_free() {
    model(|pool| {
        let other = pool.clone();
        let thread = thread(1, move || drop((allocate(&other, 1), allocate(&other, 1))));
        drop(allocate(pool, 0));
        thread.join().expect("the thread ends");
    });
}

#[test]
fn lane_block_is_freed_by_another_thread() {
    model(|pool| {
        pool.0[0].start_turns();
        let block = allocate(pool, 0);
        let other = pool.clone();
        let thread = thread(1, move || {
            drop(block);
            drop(allocate(&other, 1));
        });
        drop(allocate(pool, 0));
        thread.join().expect("the thread ends");
    });
}

#[test]
fn report_and_exhaustion_meet_busy_lanes() {
    model(|pool| {
        pool.0[1].start_turns();
        let other = pool.clone();
        let thread = thread(1, move || drop(allocate(&other, 1)));
        assert!(pool.report().total.live_bytes <= 256);
        let whole = pool.allocate(BUDGET - 256, DType::U8, Purpose::Params, &Now(0));
        drop(whole);
        thread.join().expect("the thread ends");
    });
}
