//! Buffers through which a program uses the parts of a file.
//!
//! | call | on the stream | operation | it waits for | after it |
//! |---|---|---|---|---|
//! | [`SwapRing::acquire`] to read or update | `NAME reads` | read the part into the next buffer | the buffer is free; the part is written | the user's stream may go on |
//! | [`SwapRing::acquire`] to overwrite, or of a part that a buffer still has | the user's | none | the buffer is free | |
//! | [`SwapRing::acquire_range`] | `NAME reads` | read a range of the part | as above | as above |
//! | the program's operations | the user's | | | |
//! | [`HeldPart::write_back`] | `NAME writes` | write the buffer to the part | the user's stream; reads of the part, also into other rings | the buffer is free, the part is written |
//! | the drop of [`HeldPart`] | the user's | none | | the buffer is free |
//!
//! So with three buffers, one part is read, one is used and one is written at the same time.
//!
//! Why a buffer remembers what it has: the last unit of a forward pass is the first of the backward
//! pass, and a model of few units needs no reads.

use std::ops::Range;
use std::time::Duration;

use super::parts::{Transfers, aligned};
use super::{SwapBuffer, SwapError, SwapFile, SwapParts};
use crate::device::{AnySlice, DType, Device, DeviceError, Event, Stream};
use crate::host::{HostDevice, HostEvent};
use crate::{Pool, Purpose};

/// The access of operations to an acquired part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwapAccess {
    /// They read it.
    Read,
    /// They read and write it.
    Update,
    /// They write all of it, so that it is not read from the file.
    Overwrite,
}

/// Buffers in host memory for the parts of a file, used in turn by operations of a stream of the
/// device `D`.
pub struct SwapRing<D: Device = HostDevice> {
    parts: SwapParts,
    device: D,
    reads: Transfers,
    buffers: Vec<Buffer<D>>,
    /// The next buffer.
    next: usize,
    /// Whether the lane that writes knows the buffers.
    registered_for_writes: bool,
    limit: Duration,
}

struct Buffer<D: Device> {
    memory: SwapBuffer,
    /// The point after which it may be overwritten.
    free: Option<Point<D>>,
    content: Option<Content>,
}

/// The part that a buffer has, as the write `version` of that part left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Content {
    part: usize,
    version: u64,
}

/// A point on a stream of the user, or on one that reads or writes.
enum Point<D: Device> {
    /// The end of the stream at the next use, if a [`HeldPart`] was forgotten instead of dropped.
    Held(D::Stream),
    User(D::Event),
    Transfer(HostEvent),
}

impl<D: Device> std::fmt::Debug for SwapRing<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "SwapRing({} buffers of {:?})",
            self.buffers.len(),
            self.parts
        )
    }
}

impl<D: Device> SwapRing<D> {
    /// A ring of `buffers` buffers from `pool`, each with room for the largest of `parts`, for
    /// streams of `device`. Reads are on a stream of the pool's device, named `name` with ` reads`.
    /// Waits between the host and the device, and the drop, take at most `limit`.
    ///
    /// # Errors
    /// There is no buffer, or the system is out of memory, threads or descriptors.
    pub fn new(
        parts: &SwapParts,
        device: &D,
        pool: &Pool<HostDevice>,
        name: &str,
        buffers: usize,
        limit: Duration,
    ) -> Result<Self, SwapError> {
        if buffers == 0 {
            return Err(SwapError::Option {
                name: "buffers",
                expected: "at least 1",
                got: 0,
            });
        }

        let reads = Transfers::new(pool.device(), &format!("{name} reads"), parts.file())?;
        let bytes = parts.buffer_bytes();
        let buffer = |_| {
            let memory = SwapBuffer::allocate(pool, bytes, Purpose::Workspace, &reads.stream)?;
            Ok(Buffer {
                memory,
                free: None,
                content: None,
            })
        };

        let buffers: Vec<_> = (0..buffers).map(buffer).collect::<Result<_, SwapError>>()?;
        let ring = Self {
            parts: parts.clone(),
            device: device.clone(),
            reads,
            buffers,
            next: 0,
            registered_for_writes: false,
            limit,
        };

        ring.reads.lane.register(&ring.memory());
        Ok(ring)
    }

    /// The file of the parts.
    pub fn file(&self) -> &SwapFile {
        self.parts.file()
    }

    /// The length of each buffer, in bytes.
    pub fn buffer_bytes(&self) -> usize {
        self.parts.buffer_bytes()
    }

    /// A part in a buffer, for operations on `stream`, which waits for it.
    ///
    /// # Errors
    /// A stream is closed, or `stream` is of another device than the ring.
    ///
    /// # Panics
    /// There is no such part.
    pub fn acquire(
        &mut self,
        stream: &D::Stream,
        part: usize,
        access: SwapAccess,
    ) -> Result<HeldPart<'_, D>, DeviceError> {
        self.device.check_stream("SwapRing::acquire", stream)?;
        let bytes = self.parts.part_bytes(part);
        let last = Content {
            part,
            version: self.parts.version(part),
        };

        let kept = self.buffers.iter().position(|b| b.content == Some(last));
        let buffer = match kept.filter(|_| access != SwapAccess::Overwrite) {
            Some(kept) => kept,
            None => self.take_next(),
        };

        if kept == Some(buffer) || access == SwapAccess::Overwrite {
            self.wait_until_free(stream, buffer)?;
        } else {
            self.fill(stream, buffer, part, (0, aligned(bytes)))?;
        }

        // A written part counts as content once it is written back.
        self.buffers[buffer].content = (access == SwapAccess::Read).then_some(last);
        Ok(self.held(stream, (part, access), buffer, 0..bytes))
    }

    /// A part in a buffer, of which `bytes` are used.
    fn held(
        &mut self,
        stream: &D::Stream,
        (part, access): (usize, SwapAccess),
        buffer: usize,
        bytes: Range<usize>,
    ) -> HeldPart<'_, D> {
        self.buffers[buffer].free = Some(Point::Held(stream.clone()));
        HeldPart {
            stream: stream.clone(),
            part,
            access,
            memory: self.slice(buffer).slice(bytes),
            buffer,
            is_released: false,
            ring: self,
        }
    }

    /// The bytes `range` of a part in a buffer, for operations on `stream` that read them.
    ///
    /// # Errors
    /// A stream is closed, or `stream` is of another device than the ring.
    ///
    /// # Panics
    /// There is no such part, or the range is not in it.
    pub fn acquire_range(
        &mut self,
        stream: &D::Stream,
        part: usize,
        range: Range<usize>,
    ) -> Result<HeldPart<'_, D>, DeviceError> {
        self.device
            .check_stream("SwapRing::acquire_range", stream)?;
        let bytes = self.parts.part_bytes(part);
        assert!(
            range.start <= range.end && range.end <= bytes,
            "bytes {range:?} of a part of {bytes} bytes"
        );
        let first = range.start / SwapFile::ALIGN_BYTES * SwapFile::ALIGN_BYTES;
        let buffer = self.take_next();
        self.fill(stream, buffer, part, (first, aligned(range.end)))?;
        let bytes = range.start - first..range.end - first;
        Ok(self.held(stream, (part, SwapAccess::Read), buffer, bytes))
    }

    /// Waits at most `limit` for the reads and writes enqueued so far.
    ///
    /// # Errors
    /// One of them failed, or the limit passed.
    pub fn synchronize(&self, limit: Duration) -> Result<(), DeviceError> {
        let reads = self.reads.stream.synchronize(limit);
        let writes = self.parts.0.writes.stream.synchronize(limit);
        reads.and(writes)
    }

    /// The next buffer, which loses its content.
    fn take_next(&mut self) -> usize {
        let at = self.next;
        self.next = (at + 1) % self.buffers.len();
        self.buffers[at].content = None;
        at
    }

    /// Enqueues reading the bytes `range` of `part` into a buffer; `stream` waits for it.
    fn fill(
        &mut self,
        stream: &D::Stream,
        buffer: usize,
        part: usize,
        range: (usize, usize),
    ) -> Result<(), DeviceError> {
        self.record_forgotten(buffer)?;
        let reads = &self.reads.stream;
        match &self.buffers[buffer].free {
            Some(Point::User(free)) => self.device.host_waits(reads, free, self.limit)?,
            Some(Point::Transfer(free)) => reads.wait(free)?,
            Some(Point::Held(_)) | None => {}
        }
        self.parts
            .read(&self.reads, part, range, self.slice(buffer))?;

        let filled = reads.record()?;
        self.buffers[buffer].free = Some(Point::Transfer(filled.clone()));
        self.device.wait_for_host(stream, &filled, self.limit)
    }

    /// Makes `stream` wait until a buffer may be overwritten, and its part is in the file.
    fn wait_until_free(&mut self, stream: &D::Stream, buffer: usize) -> Result<(), DeviceError> {
        self.record_forgotten(buffer)?;
        match &self.buffers[buffer].free {
            Some(Point::User(free)) => stream.wait(free),
            Some(Point::Transfer(free)) => self.device.wait_for_host(stream, free, self.limit),
            Some(Point::Held(_)) | None => Ok(()),
        }
    }

    /// Records the end of the uses of a buffer whose [`HeldPart`] was forgotten.
    fn record_forgotten(&mut self, buffer: usize) -> Result<(), DeviceError> {
        let free = &mut self.buffers[buffer].free;
        if let Some(Point::Held(stream)) = free {
            *free = Some(Point::User(stream.record()?));
        }
        Ok(())
    }

    fn slice(&self, buffer: usize) -> AnySlice {
        // SAFETY: the ring owns the buffer. `free` orders its uses, which are those of `HeldPart` and
        // the transfers, and the drop of the ring waits for the last of them.
        unsafe { self.buffers[buffer].memory.slice() }
    }

    fn memory(&self) -> Vec<SwapBuffer> {
        let memory = |buffer: &Buffer<D>| buffer.memory.clone();
        self.buffers.iter().map(memory).collect()
    }
}

/// Waits until the buffers are free.
impl<D: Device> Drop for SwapRing<D> {
    fn drop(&mut self) {
        for buffer in &mut self.buffers {
            let free = match buffer.free.take() {
                Some(Point::Held(stream)) => stream
                    .record()
                    .and_then(|free| free.synchronize(self.limit)),
                Some(Point::User(free)) => free.synchronize(self.limit),
                Some(Point::Transfer(free)) => free.synchronize(self.limit),
                None => Ok(()),
            };
            // A stream with another error runs nothing more.
            if let Err(DeviceError::TimedOut { .. }) = free {
                std::mem::forget(buffer.memory.clone());
            }
        }
    }
}

/// A part in a buffer, which is free again after the operations that are enqueued on the stream
/// until this is dropped.
#[must_use = "a part that was written must be written back"]
pub struct HeldPart<'a, D: Device> {
    ring: &'a mut SwapRing<D>,
    stream: D::Stream,
    buffer: usize,
    part: usize,
    access: SwapAccess,
    memory: AnySlice,
    is_released: bool,
}

impl<D: Device> HeldPart<'_, D> {
    /// The bytes of the part, or of its range.
    ///
    /// # Safety
    /// Operations on them are enqueued on the stream for which the part was acquired, before this
    /// is dropped or written back, and write only if the access says so.
    pub unsafe fn bytes(&self) -> AnySlice {
        self.memory
    }

    /// [`HeldPart::bytes`] as elements of `dtype`.
    ///
    /// # Safety
    /// As for [`HeldPart::bytes`].
    ///
    /// # Panics
    /// The length is not a multiple of the element's.
    pub unsafe fn elems(&self, dtype: DType) -> AnySlice {
        let bytes = self.memory.len_bytes();
        let elem_bytes = dtype.size_bytes();
        assert!(
            bytes.is_multiple_of(elem_bytes),
            "{bytes} bytes are no elements of {dtype}"
        );
        // SAFETY: memory of the buffer, initialised by the pool or a read and aligned to
        // `SwapFile::ALIGN_BYTES` or, in a range, as the caller's elements are; every bit pattern
        // is a value. The rest is the caller's promise.
        unsafe {
            AnySlice::from_raw_parts(
                self.memory.as_ptr(),
                bytes / elem_bytes,
                dtype,
                self.memory.device(),
            )
        }
    }

    /// Enqueues writing the part to the file, after the operations on it.
    ///
    /// # Errors
    /// A stream is closed, or the part was acquired to be read.
    pub fn write_back(mut self) -> Result<(), DeviceError> {
        if self.access == SwapAccess::Read {
            return Err(DeviceError::Argument {
                what: "write back",
                message: format!("part {} was acquired to be read only", self.part),
            });
        }

        let ring = &mut *self.ring;
        let writes = &ring.parts.0.writes;
        if !std::mem::replace(&mut ring.registered_for_writes, true) {
            writes.lane.register(&ring.memory());
        }
        let used = self.stream.record()?;
        ring.buffers[self.buffer].free = Some(Point::User(used.clone()));
        self.is_released = true;

        ring.device.host_waits(&writes.stream, &used, ring.limit)?;
        let written = ring.parts.write(self.part, ring.slice(self.buffer))?;
        let buffer = &mut ring.buffers[self.buffer];
        buffer.free = Some(Point::Transfer(written));
        buffer.content = Some(Content {
            part: self.part,
            version: ring.parts.version(self.part),
        });

        Ok(())
    }
}

impl<D: Device> Drop for HeldPart<'_, D> {
    fn drop(&mut self) {
        // A closed stream runs nothing more.
        if !self.is_released
            && let Ok(used) = self.stream.record()
        {
            self.ring.buffers[self.buffer].free = Some(Point::User(used));
        }
    }
}
