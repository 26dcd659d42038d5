//! Verified reads of any range of any state.

use std::io::Read as _;
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;
use zero_shard::{Layout, ParamPlacement};

use crate::format::blocks::{BLOCK_BYTES, checksum};
use crate::format::catalog::{self, BEST, LATEST, backup_of};
use crate::format::coverage::Coverage;
use crate::format::manifest::{DocumentRecord, MANIFEST_NAME, Manifest};
use crate::format::tensor_folder::check_range;
use crate::io::counts;
use crate::io::dir::Dir;
use crate::io::parallel::{chunks_to_read, in_parallel, threads_for};
use crate::load::resolve::staged_hint;
use crate::load::shard_file::{ShardFile, open_checked};
use crate::{CkptError, ModelSpec, StateDtype, View};

/// Descriptors of shard files that a reader keeps open at a time; others are opened for each read.
/// A rank rarely reads from more files, and a process may have only 1024 descriptors.
const MAX_KEPT: usize = 64;

/// A checkpoint, open for reading. Several threads may read at the same time.
pub struct Reader {
    pub(crate) dir: Dir,
    pub(crate) manifest: Manifest,
    pub(crate) layout: Layout,
    coverage: Coverage,
    /// Checksum of the manifest's content.
    pub(crate) crc64: u64,
    files: Vec<OnceLock<ShardFile>>,
    /// Number of descriptors in `files`, and of attempts to keep more.
    kept: AtomicUsize,
    notices: Vec<String>,
}

impl Reader {
    /// Opens `path`: a directory of checkpoints, or one checkpoint in it (`.../step-00000030`).
    ///
    /// In a directory, opens the checkpoint named by `latest`, or its backup
    /// (`step-00000030.old.*`) if a crash left only that. If it is incomplete (a file is missing or
    /// has another length, or the manifest is damaged), opens the complete checkpoint that was
    /// saved last; [`Reader::notices`] lists the skipped ones with their defects.
    /// [`Reader::read_param`], [`View::read_range`] and [`Reader::verify`] verify file contents as
    /// they read them.
    ///
    /// # Errors
    /// [`CkptError::NoCheckpoint`] with the defect of each candidate, or a failed read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CkptError> {
        let root = Dir::open(path.as_ref())?;
        if root.has(MANIFEST_NAME) {
            return Self::open_one(root, Vec::new());
        }
        let mut notices = Vec::new();
        let latest = catalog::read_pointer(&root, LATEST);

        match latest.as_ref().map(|name| {
            root.open_dir(name)
                .and_then(|d| Self::open_one(d, Vec::new()))
        }) {
            Ok(Ok(reader)) => return Ok(reader),
            Ok(Err(e)) => notices.push(e.to_string()),
            Err(e) if root.has(LATEST) => notices.push(e.to_string()),
            Err(_) => {}
        }

        let (entries, unreadable) = catalog::list(&root)?;
        let reasons = unreadable.into_iter().map(|u| u.reason);
        notices.extend(reasons.filter(|r| !notices.contains(r)).collect::<Vec<_>>());
        for entry in entries.iter().rev() {
            // The backup of the checkpoint named by `latest` is that checkpoint, so no checkpoint
            // was skipped.
            let named = latest
                .as_deref()
                .is_ok_and(|name| backup_of(&entry.name) == Some(name) && !root.has(name));
            let notices_here = if named { Vec::new() } else { notices.clone() };
            match root
                .open_dir(&entry.name)
                .and_then(|d| Self::open_one(d, notices_here))
            {
                Ok(reader) => return Ok(reader),
                Err(e) if notices.contains(&e.to_string()) => {}
                Err(e) => notices.push(e.to_string()),
            }
        }

        notices.extend(staged_hint(&root));
        Err(CkptError::NoCheckpoint {
            dir: root.path().into(),
            reasons: notices,
        })
    }

    /// Opens the checkpoint that `best` names in the directory `path`, or its backup if a crash
    /// left only that.
    ///
    /// # Errors
    /// `best` is missing or damaged, its checkpoint is incomplete, or a failed read.
    pub fn open_best(path: impl AsRef<Path>) -> Result<Self, CkptError> {
        let root = Dir::open(path.as_ref())?;
        let name = catalog::read_pointer(&root, BEST)?;
        let entries = catalog::list(&root)?.0;
        let backup = entries
            .into_iter()
            .rev()
            .find(|e| backup_of(&e.name) == Some(&name));
        let found = backup
            .filter(|_| !root.has(&name))
            .map_or(name, |backup| backup.name);
        root.open_dir(&found)
            .and_then(|dir| Self::open_one(dir, Vec::new()))
    }

    /// Opens a checkpoint and checks that it is complete.
    pub(crate) fn open_one(dir: Dir, notices: Vec<String>) -> Result<Self, CkptError> {
        let reader = Self::open_manifest(dir, notices)?;
        let files = reader
            .manifest
            .files
            .iter()
            .map(|file| (&file.name, file.bytes));
        let documents = reader
            .manifest
            .documents
            .iter()
            .map(|document| (&document.name, document.bytes));
        for (name, bytes) in files.chain(documents) {
            open_checked(&reader.dir, name, bytes, false)?;
        }
        Ok(reader)
    }

    /// Opens a checkpoint and checks its manifest only. The other files are checked when they are
    /// read.
    pub(crate) fn open_manifest(dir: Dir, notices: Vec<String>) -> Result<Self, CkptError> {
        let (manifest, layout, crc64) = Manifest::read(&dir)?;
        let pieces = manifest.files.iter().map(|f| f.pieces.as_slice());
        let coverage = Coverage::new(&layout, pieces, dir.path())?;
        let files = manifest.files.iter().map(|_| OnceLock::new()).collect();
        Ok(Self {
            dir,
            manifest,
            layout,
            coverage,
            crc64,
            files,
            kept: AtomicUsize::new(0),
            notices,
        })
    }

    /// The directory of the checkpoint.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The checkpoint's manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The skipped checkpoints with their defects; empty if the one named by `latest` is complete.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Reads the document `name`; `None` if the checkpoint has no such document.
    ///
    /// # Errors
    /// It is missing, has another length or checksum, or is not JSON.
    pub fn document(&self, name: &str) -> Result<Option<Value>, CkptError> {
        let Some(record) = self.manifest.documents.iter().find(|d| d.name == name) else {
            return Ok(None);
        };
        let why = |e: serde_json::Error| CkptError::BadFile {
            path: self.path().join(name),
            why: e.to_string(),
        };
        serde_json::from_slice(&self.read_document(record)?)
            .map(Some)
            .map_err(why)
    }

    /// Reads a document and verifies it.
    pub(crate) fn read_document(&self, record: &DocumentRecord) -> Result<Vec<u8>, CkptError> {
        let path = self.path().join(&record.name);
        let mut bytes = Vec::new();
        let file = open_checked(&self.dir, &record.name, record.bytes, false)?;
        file.take(record.bytes)
            .read_to_end(&mut bytes)
            .map_err(CkptError::io("read", &path))?;
        counts::read(bytes.len());
        match (record.crc64, checksum(&bytes)) {
            (expected, got) if expected == got => Ok(bytes),
            (expected, got) => Err(CkptError::Corrupt {
                path,
                range: 0..record.bytes,
                expected,
                got,
            }),
        }
    }

    /// The parameters, in the order of the model.
    pub fn params(&self) -> impl Iterator<Item = &ParamPlacement> {
        self.layout.units().iter().flat_map(|u| &u.params)
    }

    /// A view of this checkpoint in another layout of the same model.
    ///
    /// # Errors
    /// [`CkptError::AnotherModel`] if parameters have other names or shapes.
    pub fn view<'a>(&'a self, layout: &'a Layout) -> Result<View<'a>, CkptError> {
        match self.manifest.model.difference(&ModelSpec::from(layout)) {
            Some(difference) => Err(CkptError::AnotherModel {
                path: self.path().into(),
                difference,
            }),
            None => Ok(View::new(self, layout)),
        }
    }

    /// Reads elements `range` of parameter `param` (row-major, flat) of `state` as fp32, which is
    /// exact.
    ///
    /// # Errors
    /// No such state or parameter, a range past its elements, a wrong length of `out`, a failed
    /// read or a wrong checksum.
    pub fn read_param(
        &self,
        state: &str,
        param: &str,
        range: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), CkptError> {
        let (unit, placed) = self.param(param)?;
        check_range(param, placed.numel_elems, &range, out.len())?;
        let stored = placed.offset_elems + range.start..placed.offset_elems + range.end;
        let mut reads = Vec::new();
        self.list(state, unit, stored, out, &mut reads)?;
        self.read_all(reads)
    }

    /// Appends the reads of elements of a stored unit. The range must be within the unit, and `out`
    /// must have its length.
    pub(crate) fn list<'o>(
        &self,
        state: &str,
        unit: usize,
        range: Range<u64>,
        out: &'o mut [f32],
        reads: &mut Vec<Read<'o>>,
    ) -> Result<(), CkptError> {
        let (index, dtype) = self.state(state)?;
        let mut rest = out;
        for (held, part) in self.coverage.find(unit, range) {
            let tensor = self
                .file(held.file)?
                .layout
                .tensor_range(index, held.piece)
                .start;
            let start = tensor + (part.start - held.start) * dtype.bytes();
            let (now, later) = rest.split_at_mut((part.end - part.start) as usize);
            rest = later;
            reads.push(Read {
                file: held.file,
                start,
                dtype,
                out: now,
            });
        }
        Ok(())
    }

    /// Performs the reads; threads share the chunks of all of them.
    pub(crate) fn read_all(&self, reads: Vec<Read<'_>>) -> Result<(), CkptError> {
        let bytes: u64 = reads
            .iter()
            .map(|r| r.out.len() as u64 * r.dtype.bytes())
            .sum();
        // Short reads are faster through the page cache and on one thread.
        let short = bytes <= 2 * BLOCK_BYTES;
        let threads = if short { 1 } else { threads_for(bytes) };

        in_parallel(
            reads.into_iter().flat_map(Read::chunks),
            threads,
            |(range, read), buffer| {
                let shard = self.file(read.file)?;
                let file = shard.open_state(&self.dir, !short, || self.may_keep())?;
                let mut rest = read.out;
                shard.read(&file, &range, buffer, |bytes| {
                    let (out, later) = std::mem::take(&mut rest)
                        .split_at_mut(bytes.len() / read.dtype.bytes() as usize);
                    read.dtype.widen(bytes, out);
                    rest = later;
                })
            },
        )
    }

    /// The unit of a parameter, and its placement there.
    pub(crate) fn param(&self, name: &str) -> Result<(usize, &ParamPlacement), CkptError> {
        let id = self.layout.find_param(name);
        id.and_then(|id| Some((id.unit, self.layout.param(id)?)))
            .ok_or_else(|| CkptError::argument("parameter", "one of this checkpoint", name))
    }

    /// Index and dtype of a state.
    pub(crate) fn state(&self, name: &str) -> Result<(usize, StateDtype), CkptError> {
        let found = self.manifest.states.iter().position(|s| s.name == name);
        found
            .map(|i| (i, self.manifest.states[i].dtype))
            .ok_or_else(|| CkptError::MissingState {
                path: self.path().into(),
                state: name.into(),
                available: self
                    .manifest
                    .states
                    .iter()
                    .map(|s| s.name.clone())
                    .collect(),
            })
    }

    /// A shard file; its front is read and checked at first use.
    pub(crate) fn file(&self, index: usize) -> Result<&ShardFile, CkptError> {
        let cell = &self.files[index];
        match cell.get() {
            Some(file) => Ok(file),
            None => {
                let mut file = ShardFile::open(&self.dir, &self.manifest, index)?;
                if !self.may_keep() {
                    file.close();
                }
                Ok(cell.get_or_init(|| file))
            }
        }
    }

    /// Whether another descriptor may stay open.
    fn may_keep(&self) -> bool {
        self.kept.fetch_add(1, Ordering::Relaxed) < MAX_KEPT
    }
}

/// A pending read from one file.
pub(crate) struct Read<'o> {
    file: usize,
    /// Start in the state bytes of the file.
    start: u64,
    dtype: StateDtype,
    out: &'o mut [f32],
}

impl<'o> Read<'o> {
    /// Splits the read at chunk boundaries; elements are aligned, so none is split.
    fn chunks(self) -> impl Iterator<Item = (Range<u64>, Read<'o>)> {
        let Self {
            file,
            start,
            dtype,
            out,
        } = self;

        let end = start + out.len() as u64 * dtype.bytes();
        let mut rest = out;
        chunks_to_read(start..end).map(move |range| {
            let n = (range.end - range.start) / dtype.bytes();
            let (out, later) = std::mem::take(&mut rest).split_at_mut(n as usize);
            rest = later;
            (
                range.clone(),
                Read {
                    file,
                    start: range.start,
                    dtype,
                    out,
                },
            )
        })
    }
}
