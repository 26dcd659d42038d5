//! A device with simulated time: an operation has a given duration, a wait ends at the later of two
//! times, and nothing is computed. The time of a step follows exactly, in nanoseconds, from its
//! operations, waits and events. All ranks behave alike, so only one is simulated.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use zero_alloc::device::{
    AnySlice, Device, DeviceError, DeviceId, DeviceKind, Event, Memory, Stream,
};
use zero_alloc::host::OpSpan;
use zero_alloc::testing::Simulated;
use zero_comm::backend::{Checked, Group};
use zero_comm::slow::Link;
use zero_comm::{CommError, Communicator, Traffic};

/// The device.
#[derive(Clone, Debug)]
pub struct Model {
    memory: Simulated,
    spans: Arc<Mutex<Vec<OpSpan>>>,
}

impl Model {
    pub fn new() -> Self {
        Self {
            memory: Simulated::new(1 << 40, 4096).without_virtual_memory(),
            spans: Arc::default(),
        }
    }

    /// All operations so far.
    pub fn spans(&self) -> Vec<OpSpan> {
        self.spans.lock().unwrap().clone()
    }
}

// SAFETY: allocates host memory.
unsafe impl Memory for Model {
    fn id(&self) -> DeviceId {
        self.memory.id()
    }

    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        self.memory.allocate(bytes)
    }

    unsafe fn deallocate(&self, ptr: NonNull<u8>, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.memory.deallocate(ptr, bytes) };
    }

    fn granularity_bytes(&self) -> usize {
        self.memory.granularity_bytes()
    }
}

// SAFETY: it records operations and accesses no memory.
unsafe impl Device for Model {
    type Stream = ModelStream;
    type Event = Instant;

    fn kind(&self) -> DeviceKind {
        DeviceKind::Simulated
    }

    fn check_stream(&self, _what: &'static str, _stream: &ModelStream) -> Result<(), DeviceError> {
        Ok(())
    }

    fn create_stream(&self, name: &str) -> Result<ModelStream, DeviceError> {
        let id = self.memory.create_stream(name)?.id();
        Ok(ModelStream {
            name: name.into(),
            id,
            now: Arc::default(),
            spans: Arc::clone(&self.spans),
        })
    }

    fn copy(
        &self,
        stream: &ModelStream,
        _src: AnySlice,
        _dst: AnySlice,
    ) -> Result<(), DeviceError> {
        stream.run("copy", Duration::ZERO);
        Ok(())
    }

    fn fill_zero(&self, stream: &ModelStream, _dst: AnySlice) -> Result<(), DeviceError> {
        stream.run("fill_zero", Duration::ZERO);
        Ok(())
    }

    fn upload(
        &self,
        _: &ModelStream,
        _: &[u8],
        _: AnySlice,
        _: Duration,
    ) -> Result<(), DeviceError> {
        Ok(())
    }

    fn download(
        &self,
        _: &ModelStream,
        _: AnySlice,
        _: &mut [u8],
        _: Duration,
    ) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// A stream: the time at which everything enqueued has run.
#[derive(Clone, Debug)]
pub struct ModelStream {
    name: Arc<str>,
    id: u64,
    now: Arc<Mutex<Duration>>,
    spans: Arc<Mutex<Vec<OpSpan>>>,
}

impl ModelStream {
    /// Enqueues an operation of this duration.
    pub fn run(&self, label: &'static str, time: Duration) {
        let mut now = self.now.lock().unwrap();
        let start = *now;
        *now += time;
        let span = OpSpan::new(label, Arc::clone(&self.name), start, *now);
        self.spans.lock().unwrap().push(span);
    }
}

// SAFETY: operations are recorded in order and access no memory.
unsafe impl Stream for ModelStream {
    type Event = Instant;

    fn name(&self) -> &str {
        &self.name
    }

    fn id(&self) -> u64 {
        self.id
    }

    fn record(&self) -> Result<Instant, DeviceError> {
        Ok(Instant(*self.now.lock().unwrap()))
    }

    fn wait(&self, event: &Instant) -> Result<(), DeviceError> {
        let mut now = self.now.lock().unwrap();
        *now = event.0.max(*now);
        Ok(())
    }

    fn synchronize(&self, _limit: Duration) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// An event: the point in time at which its stream reaches it.
#[derive(Clone, Copy, Debug)]
pub struct Instant(Duration);

// SAFETY: no operation accesses memory.
unsafe impl Event for Instant {
    fn is_done(&self) -> Result<bool, DeviceError> {
        Ok(true)
    }

    fn synchronize(&self, _limit: Duration) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Rank 0 of ranks that behave alike: the duration of a collective is that of the link's transfer.
#[derive(Debug)]
pub struct ModelComm {
    pub world_size: usize,
    pub link: Link,
}

// SAFETY: it accesses no memory.
unsafe impl Communicator<Model> for ModelComm {
    fn group(&self) -> Group {
        Group {
            rank: 0,
            world_size: self.world_size,
        }
    }

    fn enqueue(&self, stream: &ModelStream, checked: Checked) -> Result<(), CommError> {
        let mut traffic = Traffic::default();
        self.group().count(checked.call(), &mut traffic);
        stream.run(
            checked.call().collective.name(),
            self.link.time(traffic.total_bytes()),
        );
        Ok(())
    }

    fn split(
        &self,
        _: Option<u64>,
        _: u64,
    ) -> Result<Option<Arc<dyn Communicator<Model>>>, CommError> {
        Ok(None)
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    fn abort(&self, _reason: &str) {}

    fn failure(&self) -> Option<CommError> {
        None
    }
}
