//! PyTorch's streams.
//!
//! A stream is known by its handle, and from CUDA 12 on by the driver's id, so that a new stream
//! with the handle of a destroyed one is another stream. The driver tells no id while a stream is
//! recorded into a graph: it is then the stream that had the handle before. Handle 2 is a different
//! stream in every thread.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;
use zero_alloc::cuda::{CudaDevice, CudaEvent, CudaStream, interop};
use zero_alloc::device::DeviceError;

/// The stream that a handle means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Which {
    /// The legacy default stream, which is never destroyed: handles 0 and 1.
    Legacy,
    /// The default stream of the thread with this number: handle 2.
    OfThread(usize),
    /// Any other stream, by its handle.
    Other(usize),
}

impl Which {
    fn of(handle: *mut c_void) -> Self {
        match handle.addr() {
            0 | 1 => Self::Legacy,
            2 => Self::OfThread(thread_number()),
            other => Self::Other(other),
        }
    }
}

/// A stream of PyTorch's.
pub(crate) struct TorchStream {
    pub(crate) stream: CudaStream,
    pub(crate) which: Which,
    /// The driver's id of a stream that can be destroyed, once the driver has told it.
    unique_id: OnceLock<u64>,
    /// The end of the stream, once the program has announced that it destroys it.
    end: OnceLock<CudaEvent>,
}

impl TorchStream {
    /// The announced end of the stream.
    pub(crate) fn end(&self) -> Option<&CudaEvent> {
        self.end.get()
    }

    /// Announces the end. A second announcement has no effect.
    pub(crate) fn set_end(&self, end: CudaEvent) {
        let _ = self.end.set(end);
    }

    /// Whether the calling thread may record events on the stream now.
    pub(crate) fn is_usable(&self, device: &CudaDevice) -> bool {
        match self.which {
            Which::Legacy => true,
            Which::OfThread(number) => number == thread_number(),
            Which::Other(handle) => {
                let is_same = || unique_id(device, handle).is_ok_and(|id| self.has_id(id));
                self.end.get().is_none() && is_same()
            }
        }
    }

    /// Whether the stream with its handle, whose id the driver gives as `id`, is this one.
    fn has_id(&self, id: Option<u64>) -> bool {
        id.is_none_or(|id| *self.unique_id.get_or_init(|| id) == id)
    }

    /// Whether operations are being recorded into a graph. The default streams cannot be recorded.
    pub(crate) fn is_recorded(&self) -> bool {
        matches!(self.which, Which::Other(_))
            && self.end.get().is_none()
            && self.stream.is_recorded()
    }

    /// The stream in messages.
    pub(crate) fn name(&self) -> String {
        match self.which {
            Which::Legacy => "the default stream".to_owned(),
            Which::OfThread(number) => format!("the default stream of thread {number}"),
            Which::Other(handle) => format!("stream {handle:#x}"),
        }
    }
}

/// The streams that an arena has seen.
#[derive(Default)]
pub(crate) struct Streams(RwLock<HashMap<Which, Arc<TorchStream>>>);

impl Streams {
    /// The stream of a handle.
    pub(crate) fn get(
        &self,
        device: &CudaDevice,
        handle: *mut c_void,
    ) -> Result<Arc<TorchStream>, DeviceError> {
        let which = Which::of(handle);
        let unique_id = match which {
            Which::Other(handle) => unique_id(device, handle)?,
            Which::Legacy | Which::OfThread(_) => None,
        };
        if let Some(known) = self.known(which, unique_id) {
            return Ok(known);
        }

        let name = format!("torch {which:?}");
        // SAFETY: the caller of the C function passes a stream that lives during the call. Events
        // of it are recorded later only if it is usable, and otherwise added by the arena.
        let stream = unsafe { interop::pool_stream_from_raw(device, handle, &name) }?;
        let stream = Arc::new(TorchStream {
            stream,
            which,
            unique_id: unique_id.map(OnceLock::from).unwrap_or_default(),
            end: OnceLock::new(),
        });
        self.0.write().insert(which, Arc::clone(&stream));
        Ok(stream)
    }

    fn known(&self, which: Which, unique_id: Option<u64>) -> Option<Arc<TorchStream>> {
        let known = self.0.read();
        let stream = known.get(&which)?;
        stream.has_id(unique_id).then(|| Arc::clone(stream))
    }

    /// Forgets the stream of a handle, and returns it if it was known.
    pub(crate) fn forget(&self, handle: *mut c_void) -> Option<Arc<TorchStream>> {
        self.0.write().remove(&Which::of(handle))
    }
}

/// The driver's id of a stream.
fn unique_id(device: &CudaDevice, handle: usize) -> Result<Option<u64>, DeviceError> {
    let handle = std::ptr::without_provenance_mut(handle);
    // SAFETY: by the contract of the C functions the handle is a live stream, or its end was
    // announced, and then it is not passed here.
    unsafe { interop::unique_stream_id(device, handle) }
}

/// The calling thread's number: threads count from 0 in the order of their first call.
fn thread_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed));
    // A thread that is ending is nobody's: memory of its stream is freed by waiting.
    NUMBER.try_with(|number| *number).unwrap_or(usize::MAX)
}
