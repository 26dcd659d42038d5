//! A shard file opened for reading: its front checked once, its state read with every block verified.

use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;

use crate::CkptError;
use crate::dir::Dir;
use crate::header::{Header, MAX_HEADER_BYTES};
use crate::manifest::Manifest;
use crate::pages::Pages;
use crate::plan::{BLOCK_BYTES, FilePlan, checksum};
use crate::transfer::{IoOptions, ReadError, StateFile, chunks, share};

/// What the front of a shard file says, checked against the manifest.
#[derive(Debug)]
pub(crate) struct ShardFile {
    pub(crate) plan: FilePlan,
    name: String,
    path: PathBuf,
    /// Where the state starts in the file.
    state_start: u64,
    /// Checksum of each block of the state.
    table: Vec<u64>,
}

impl ShardFile {
    /// Reads and checks length, header and table of file `index` of the manifest.
    pub(crate) fn open(dir: &Dir, manifest: &Manifest, index: usize) -> Result<Self, CkptError> {
        let record = &manifest.files[index];
        let path = dir.path().join(&record.name);
        let bad = |why: String| CkptError::BadHeader { path: path.clone(), why };
        let plan = manifest.plan(record).ok_or_else(|| bad("sizes that do not fit 64 bits".into()))?;
        let file = open_checked(dir, &record.name, record.bytes, false)?;
        // The manifest's check bounds this by the greatest header and the table of a file of this length.
        let front_bytes = record.bytes - plan.state_bytes();
        let mut front = vec![0; usize::try_from(front_bytes).map_err(|e| bad(e.to_string()))?];
        let read = std::os::unix::fs::FileExt::read_exact_at(&file, &mut front, 0);
        read.map_err(CkptError::io("read", &path))?;
        let got = checksum(&front);
        if got != record.front_crc64.0 {
            let expected = record.front_crc64.0;
            return Err(CkptError::Corrupt { path, range: 0..front_bytes, expected, got });
        }
        let json_end = front_bytes - plan.table_bytes();
        let (json, table) = front.split_at(json_end as usize);
        let first = json.first_chunk::<8>().ok_or_else(|| bad("no header".into()))?;
        let json_bytes = Header::json_bytes(*first, record.bytes).map_err(bad)?;
        if json_bytes > MAX_HEADER_BYTES || json_bytes + 8 != json_end {
            return Err(bad(format!("a header of {json_bytes} bytes, the manifest makes it {}", json_end - 8)));
        }
        let header = Header::parse(&json[8..], record.bytes).map_err(bad)?;
        let unit_name = |u: u64| manifest.model.units[u as usize].name.as_str();
        let state_start = plan.check(&header, &manifest.states, unit_name).map_err(bad)?;
        let table = table.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        Ok(Self { plan, name: record.name.clone(), path, state_start, table })
    }

    /// Opens the file again for reading its state.
    pub(crate) fn open_state(&self, dir: &Dir, direct: bool) -> Result<File, CkptError> {
        open_checked(dir, &self.name, self.state_start + self.plan.state_bytes(), direct)
    }

    /// Reads a range of the state, verified; see [`StateFile::read`].
    pub(crate) fn read<'b>(
        &self,
        file: &File,
        range: &Range<u64>,
        buffer: &'b mut Option<Pages>,
    ) -> Result<&'b [u8], CkptError> {
        let (offset, len) = (self.state_start, self.plan.state_bytes());
        let state = StateFile { file, offset, len, table: &self.table };
        state.read(range, buffer).map_err(|e| self.explain(e))
    }

    /// Reads all of the state and checks it.
    pub(crate) fn verify(&self, dir: &Dir, io: IoOptions) -> Result<(), CkptError> {
        let file = self.open_state(dir, io.direct)?;
        let all = chunks(0..self.plan.state_bytes(), io);
        let threads = io.threads.min(chunks(0..self.plan.state_bytes(), io).take(io.threads).count());
        share(all, threads, |range, buffer| self.read(&file, &range, buffer).map(drop))
    }

    fn explain(&self, error: ReadError) -> CkptError {
        let path = self.path.clone();
        match error {
            ReadError::Io(e) => CkptError::io("read", path)(e),
            ReadError::Corrupt(block, expected, got) => {
                CkptError::Corrupt { path, range: self.block_range(block), expected, got }
            }
        }
    }

    fn block_range(&self, block: u64) -> Range<u64> {
        let start = block * BLOCK_BYTES;
        let end = (start + BLOCK_BYTES).min(self.plan.state_bytes());
        self.state_start + start..self.state_start + end
    }
}

/// Opens a file of the length that the manifest says; without direct I/O where that is refused.
pub(crate) fn open_checked(dir: &Dir, name: &str, expected_bytes: u64, direct: bool) -> Result<File, CkptError> {
    let opened = match dir.open_file(name, direct) {
        Err(CkptError::Io { source, .. }) if direct && source.kind() == std::io::ErrorKind::InvalidInput => {
            dir.open_file(name, false)
        }
        other => other,
    };
    let (file, got_bytes) = opened?;
    if got_bytes != expected_bytes {
        return Err(CkptError::WrongLength { path: dir.path().join(name), expected_bytes, got_bytes });
    }
    Ok(file)
}
