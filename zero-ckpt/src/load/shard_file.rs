//! A shard file open for reading: its front is checked once, its state is verified block by block.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use zero_shard::Layout;

use crate::CkptError;
use crate::format::file_layout::{BLOCK_BYTES, FileLayout, checksum};
use crate::format::header::Header;
use crate::format::manifest::Manifest;
use crate::io::counts;
use crate::io::dir::Dir;
use crate::io::page_buffer::{PAGE_BYTES, PageBuffer};
use crate::io::parallel::{chunks_to_read, in_parallel, read_at, threads_for};

/// The front of a shard file, checked against the manifest.
#[derive(Debug)]
pub(crate) struct ShardFile {
    pub(crate) layout: FileLayout,
    name: String,
    path: PathBuf,
    /// Offset of the state in the file, a multiple of [`PAGE_BYTES`].
    state_start: u64,
    /// Checksum of each block of the state.
    table: Vec<u64>,
    /// Open descriptors for later reads, buffered and direct.
    kept: [Mutex<Option<Arc<File>>>; 2],
}

impl ShardFile {
    /// Reads and checks length, header and checksum table of file `index` of the manifest, of which
    /// `model` is the layout.
    pub(crate) fn open(
        dir: &Dir,
        manifest: &Manifest,
        model: &Layout,
        index: usize,
    ) -> Result<Self, CkptError> {
        let record = &manifest.files[index];
        let path = dir.path().join(&record.name);
        let bad = |why: String| CkptError::BadSafetensors {
            path: path.clone(),
            why,
        };

        let layout =
            FileLayout::new(&manifest.states, model, record.pieces.clone()).map_err(bad)?;
        let file = open_checked(dir, &record.name, record.bytes, false)?;
        // `Manifest::check` bounds this: at most the maximum header and the table of a file of this
        // length.
        let front_bytes = record.bytes - layout.state_bytes();
        let front_len = usize::try_from(front_bytes).map_err(|e| bad(e.to_string()))?;
        let front = read_front(&file, &path, front_len, record.front_crc64)?;

        let json_end = front_bytes - layout.table_bytes();
        let (json, table) = front.split_at(json_end as usize);
        let first = json
            .first_chunk::<8>()
            .ok_or_else(|| bad("it has no header".into()))?;
        let json_bytes = Header::json_bytes(*first, record.bytes).map_err(bad)?;

        if json_bytes + 8 != json_end {
            return Err(bad(format!(
                "the header has {json_bytes} bytes; the manifest requires {}",
                json_end - 8
            )));
        }

        let header = Header::parse(&json[8..], record.bytes).map_err(bad)?;
        let unit_name = |u: u64| manifest.model.units[u as usize].name.as_str();
        let state_start = layout
            .check(&header, &manifest.states, unit_name)
            .map_err(bad)?;
        let table = table
            .as_chunks::<8>()
            .0
            .iter()
            .map(|b| u64::from_le_bytes(*b))
            .collect();
        let kept = [Mutex::new(Some(Arc::new(file))), Mutex::default()];

        Ok(Self {
            layout,
            name: record.name.clone(),
            path,
            state_start,
            table,
            kept,
        })
    }

    /// Returns a descriptor to read the state. A new one stays open with this value if `may_keep`
    /// returns true.
    pub(crate) fn open_state(
        &self,
        dir: &Dir,
        direct: bool,
        may_keep: impl FnOnce() -> bool,
    ) -> Result<Arc<File>, CkptError> {
        // Threads that need the file at the same time open it once.
        let kept = self.kept[usize::from(direct)].lock();
        let mut kept = kept.unwrap_or_else(PoisonError::into_inner);
        let bytes = self.state_start + self.layout.state_bytes();
        if let Some(file) = &*kept {
            // It may have been truncated since.
            let got_bytes = file
                .metadata()
                .map_err(CkptError::io("examine", &self.path))?
                .len();
            return check_length(&self.path, bytes, got_bytes).map(|()| Arc::clone(file));
        }
        let file = Arc::new(open_checked(dir, &self.name, bytes, direct)?);
        if may_keep() {
            *kept = Some(Arc::clone(&file));
        }
        Ok(file)
    }

    /// Closes the descriptor that [`ShardFile::open`] used.
    pub(crate) fn close(&mut self) {
        self.kept = Default::default();
    }

    /// Reads the blocks that hold `range` of the state into `buffer`. Verifies one after the other,
    /// and calls `verified` with the bytes of the range so far, of which the last are in cache. The
    /// range must be within the state and not empty; a buffer that is too small is replaced.
    pub(crate) fn read(
        &self,
        file: &File,
        range: &Range<u64>,
        buffer: &mut Option<PageBuffer>,
        mut verified: impl FnMut(&[u8]),
    ) -> Result<(), CkptError> {
        let start = range.start / BLOCK_BYTES * BLOCK_BYTES;
        let end = range
            .end
            .next_multiple_of(BLOCK_BYTES)
            .min(self.layout.state_bytes());
        let n = (end - start) as usize;
        if buffer.as_ref().is_some_and(|b| b.bytes().len() < n) {
            *buffer = None;
        }
        let buffer = buffer.get_or_insert_with(|| PageBuffer::new(n)).whole();

        read_at(
            file,
            &mut buffer[..n.next_multiple_of(PAGE_BYTES)],
            self.state_start + start,
            n,
        )
        .map_err(|e| CkptError::io("read", &self.path)(e))?;

        for (i, bytes) in buffer[..n].chunks(BLOCK_BYTES as usize).enumerate() {
            let at = start + i as u64 * BLOCK_BYTES;
            let expected = self.table[(at / BLOCK_BYTES) as usize];
            check_bytes(&self.path, self.state_start + at, bytes, expected)?;
            let end = range.end.min(at + bytes.len() as u64);
            verified(&buffer[(range.start - start) as usize..(end - start) as usize]);
        }

        Ok(())
    }

    /// Reads and verifies all of the state.
    pub(crate) fn verify(&self, dir: &Dir) -> Result<(), CkptError> {
        let file = self.open_state(dir, true, || false)?;
        let bytes = self.layout.state_bytes();
        in_parallel(
            chunks_to_read(0..bytes),
            threads_for(bytes),
            |range, buffer| self.read(&file, &range, buffer, |_| {}),
        )
    }
}

/// Reads the first bytes of a file and checks their checksum.
fn read_front(file: &File, path: &Path, len: usize, expected: u64) -> Result<Vec<u8>, CkptError> {
    let mut front = vec![0; len];
    let read = std::os::unix::fs::FileExt::read_exact_at(file, &mut front, 0);
    read.map_err(CkptError::io("read", path))?;
    counts::read(front.len());
    check_bytes(path, 0, &front, expected).map(|()| front)
}

/// Checks the checksum of `bytes`, which start at byte `start` of a file.
pub(crate) fn check_bytes(
    path: &Path,
    start: u64,
    bytes: &[u8],
    expected: u64,
) -> Result<(), CkptError> {
    let got = checksum(bytes);
    if got == expected {
        return Ok(());
    }
    Err(CkptError::Corrupt {
        path: path.to_owned(),
        range: start..start + bytes.len() as u64,
        expected,
        got,
    })
}

/// Opens a file and checks its length; falls back to buffered I/O if the file system rejects direct
/// I/O.
pub(crate) fn open_checked(
    dir: &Dir,
    name: &str,
    expected_bytes: u64,
    direct: bool,
) -> Result<File, CkptError> {
    let opened = match dir.open_file(name, direct) {
        Err(CkptError::Io { error, .. })
            if direct && error.kind() == std::io::ErrorKind::InvalidInput =>
        {
            dir.open_file(name, false)
        }
        other => other,
    };
    let (file, got_bytes) = opened?;
    check_length(&dir.path().join(name), expected_bytes, got_bytes).map(|()| file)
}

pub(crate) fn check_length(
    path: &Path,
    expected_bytes: u64,
    got_bytes: u64,
) -> Result<(), CkptError> {
    if got_bytes == expected_bytes {
        return Ok(());
    }
    Err(CkptError::WrongLength {
        path: path.into(),
        expected_bytes,
        got_bytes,
    })
}
