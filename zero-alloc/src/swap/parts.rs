//! A file in parts.

use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{SwapError, SwapFile, SwapLane, SwapOptions};
use crate::device::{AnySlice, Device, DeviceError, Stream};
use crate::host::{HostDevice, HostEvent, HostStream};

/// A host stream with its lane of the file.
pub(super) struct Transfers {
    pub(super) stream: HostStream,
    pub(super) lane: SwapLane,
}

impl Transfers {
    pub(super) fn new(host: &HostDevice, name: &str, file: &SwapFile) -> Result<Self, SwapError> {
        Ok(Self {
            stream: host.create_stream(name)?,
            lane: file.lane()?,
        })
    }
}

/// A [`SwapFile`] in parts, which programs read, use and write through the buffers of a
/// [`SwapRing`](super::SwapRing): one part for each unit of parameters or gradients, or for each
/// piece of optimizer state. Cheap to clone.
#[derive(Clone)]
pub struct SwapParts(pub(super) Arc<SharedParts>);

pub(super) struct SharedParts {
    pub(super) file: SwapFile,
    extents: Vec<Extent>,
    transfers: Mutex<Vec<LastTransfers>>,
    pub(super) writes: Transfers,
}

/// The transfers of a part that later ones wait for.
#[derive(Clone, Debug, Default)]
struct LastTransfers {
    /// The point after the last write.
    written: Option<HostEvent>,
    /// The number of writes so far.
    version: u64,
    /// The points after the reads since then: the last of each stream, by its id.
    read: Vec<(u64, HostEvent)>,
}

#[derive(Clone, Copy, Debug)]
struct Extent {
    /// Its first byte in the file, a multiple of [`SwapFile::ALIGN_BYTES`].
    offset: u64,
    bytes: usize,
}

impl std::fmt::Debug for SwapParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "SwapParts({} in {:?})",
            self.0.extents.len(),
            self.0.file
        )
    }
}

impl SwapParts {
    /// Creates a file in the folder `dir` with parts of `part_bytes` bytes, all zero, and the
    /// stream of `host` that writes them, named `name` with ` writes`. In the file each part takes
    /// a multiple of [`SwapFile::ALIGN_BYTES`]. Where the streams of `host` only record, there is no
    /// file.
    ///
    /// # Errors
    /// As [`SwapFile::create`] and [`SwapFile::lane`].
    pub fn create(
        host: &HostDevice,
        name: &str,
        dir: &Path,
        part_bytes: &[usize],
        options: SwapOptions,
    ) -> Result<Self, SwapError> {
        let mut extents = Vec::with_capacity(part_bytes.len());
        let mut end = 0;
        for &bytes in part_bytes {
            extents.push(Extent { offset: end, bytes });
            end += aligned(bytes) as u64;
        }

        let file = match host.is_recorded() {
            true => SwapFile::recorded(dir, end, options)?,
            false => SwapFile::create(dir, end, options)?,
        };
        let writes = Transfers::new(host, &format!("{name} writes"), &file)?;
        let transfers = Mutex::new(vec![LastTransfers::default(); extents.len()]);
        Ok(Self(Arc::new(SharedParts {
            file,
            extents,
            transfers,
            writes,
        })))
    }

    /// The file, with its length, the bytes read and written so far, and its notices.
    pub fn file(&self) -> &SwapFile {
        &self.0.file
    }

    /// The number of parts.
    pub fn count(&self) -> usize {
        self.0.extents.len()
    }

    /// The length of `part` in bytes.
    ///
    /// # Panics
    /// There is no such part.
    pub fn part_bytes(&self, part: usize) -> usize {
        self.0.extents[part].bytes
    }

    /// Bytes of a buffer with room for every part.
    pub(super) fn buffer_bytes(&self) -> usize {
        let largest = self.0.extents.iter().map(|extent| extent.bytes).max();
        aligned(largest.unwrap_or(0))
    }

    /// Enqueues reading the aligned bytes from `first` to `end` of `part` into the start of
    /// `memory`, after the part's last write. Returns the point after it.
    pub(super) fn read(
        &self,
        reads: &Transfers,
        part: usize,
        (first, end): (usize, usize),
        memory: AnySlice,
    ) -> Result<HostEvent, DeviceError> {
        let mut parts = self.0.transfers.lock();
        let last = &mut parts[part];
        if let Some(written) = &last.written {
            reads.stream.wait(written)?;
        }
        let offset = self.0.extents[part].offset + first as u64;
        let to = memory.slice(0..end - first);
        reads.lane.read(&reads.stream, &[(offset, to)])?;

        let read = reads.stream.record()?;
        let id = reads.stream.id();
        last.read.retain(|(stream, _)| *stream != id);
        last.read.push((id, read.clone()));
        Ok(read)
    }

    /// Enqueues writing `part` from the start of `memory`, after its reads. Returns the point after
    /// it.
    pub(super) fn write(&self, part: usize, memory: AnySlice) -> Result<HostEvent, DeviceError> {
        let Transfers { stream, lane } = &self.0.writes;
        let Extent { offset, bytes } = self.0.extents[part];
        let mut parts = self.0.transfers.lock();
        let last = &mut parts[part];
        for (_, read) in last.read.drain(..) {
            stream.wait(&read)?;
        }
        lane.write(stream, &[(offset, memory.slice(0..aligned(bytes)))])?;

        let written = stream.record()?;
        last.written = Some(written.clone());
        last.version += 1;
        Ok(written)
    }

    /// The number of writes of `part` that were enqueued.
    pub(super) fn version(&self, part: usize) -> u64 {
        self.0.transfers.lock()[part].version
    }
}

/// The bytes that a part of `bytes` bytes takes.
pub(super) fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(SwapFile::ALIGN_BYTES)
}
