//! Every order of the locks that threads of one pool take, tried by loom:
//! `RUSTFLAGS="--cfg loom" cargo test -p zero-alloc --lib --release loom_tests`.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use loom::thread::{Builder, JoinHandle};

use crate::device::{AnySlice, BlockNote, DType, Device, DeviceError, DeviceKind, Event, Memory, Stream};
use crate::{Block, Pool, Purpose};

/// A device without memory or threads: every operation has run at once. It checks that no two blocks overlap.
#[derive(Clone, Debug, Default)]
struct Still(Arc<Mutex<Books>>);

#[derive(Debug, Default)]
struct Books {
    lent: BTreeMap<usize, usize>,
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
    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        let mut books = self.0.lock().expect("sound");
        books.next += 1 << 40;
        let at = books.next;
        books.lent.insert(at, bytes);
        Ok(NonNull::without_provenance(at.try_into().expect("not 0")))
    }
    unsafe fn deallocate(&self, ptr: NonNull<u8>, bytes: usize) {
        assert_eq!(self.0.lock().expect("sound").lent.remove(&ptr.addr().get()), Some(bytes));
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
    fn create_stream(&self, name: &str) -> Result<Now, DeviceError> {
        Ok(Now(name.len() as u64))
    }
    fn note_block(&self, note: BlockNote<'_, Now, Now>) {
        let mut books = self.0.lock().expect("sound");
        match note {
            BlockNote::Taken { ptr, bytes, .. } => {
                let start = ptr.addr();
                if let Some((below, size)) = books.blocks.range(..start + bytes).next_back() {
                    assert!(below + size <= start, "two blocks overlap");
                }
                books.blocks.insert(start, bytes);
            }
            BlockNote::Freed { ptr, bytes, .. } => assert_eq!(books.blocks.remove(&ptr.addr()), Some(bytes)),
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

fn take(pool: &Pool<Still>, stream: u64) -> Block<Still> {
    pool.allocate(256, DType::U8, Purpose::Buckets, &Now(stream)).expect("room")
}

/// A thread of the model; its lane is the one of its number.
fn thread<T: Send + 'static>(number: u64, body: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    Builder::new().name(number.to_string()).spawn(body).expect("a thread")
}

/// Runs `body` in every order, and checks that nothing is left of it.
fn model(body: impl Fn(&Pool<Still>) + Sync + Send + 'static) {
    loom::model(move || {
        let device = Still::default();
        let pool = Pool::new(device.clone(), BUDGET);
        body(&pool);
        pool.check_invariants().expect("sound");
        assert_eq!(pool.report().total.live_bytes, 0);
        drop(pool);
        let books = device.0.lock().expect("sound");
        assert!(books.blocks.is_empty() && books.lent.is_empty(), "{books:?}");
    });
}

#[test]
fn two_threads_take_and_give() {
    model(|pool| {
        let other = pool.clone();
        let thread = thread(1, move || drop((take(&other, 1), take(&other, 1))));
        drop(take(pool, 0));
        thread.join().expect("it ends");
    });
}

#[test]
fn a_block_of_one_lane_is_given_back_by_another_thread() {
    model(|pool| {
        pool.0[0].stay();
        let block = take(pool, 0);
        let other = pool.clone();
        let thread = thread(1, move || {
            drop(block);
            drop(take(&other, 1));
        });
        drop(take(pool, 0));
        thread.join().expect("it ends");
    });
}

#[test]
fn a_report_and_a_search_for_the_last_byte_meet_lanes_at_work() {
    model(|pool| {
        pool.0[1].stay();
        let other = pool.clone();
        let thread = thread(1, move || drop(take(&other, 1)));
        assert!(pool.report().total.live_bytes <= 256);
        let whole = pool.allocate(BUDGET - 256, DType::U8, Purpose::Params, &Now(0));
        drop(whole);
        thread.join().expect("it ends");
    });
}
