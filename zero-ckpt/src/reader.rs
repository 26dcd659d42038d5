//! Loading: any range of any state, at any world size and stage, verified.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;

use zero_shard::{Layout, ParamPlacement};

use crate::catalog::{self, aside_of};
use crate::coverage::Coverage;
use crate::dir::Dir;
use crate::manifest::{MANIFEST_NAME, Manifest};
use crate::plan::BLOCK_BYTES;
use crate::shard_file::{ShardFile, open_checked};
use crate::transfer::{IoOptions, chunks, share};
use crate::{CkptError, ModelSpec, StateDtype, View};

/// A whole checkpoint, open for reading. Ranges may be read from many threads at once.
pub struct Reader {
    pub(crate) dir: Dir,
    pub(crate) manifest: Manifest,
    pub(crate) layout: Layout,
    pub(crate) coverage: Coverage,
    pub(crate) io: IoOptions,
    files: Vec<OnceLock<ShardFile>>,
    params: HashMap<String, (usize, ParamPlacement)>,
    notices: Vec<String>,
}

impl Reader {
    /// Opens `path`: a directory that runs save into, or one checkpoint in it (`.../step-00000030`).
    ///
    /// Of a directory, it is the checkpoint that `latest` names, also where a crash left that standing aside
    /// (`step-00000030.old.*`); where it is not whole (a file is missing or has another length, or the manifest is
    /// damaged), the whole checkpoint that was saved last, and [`Reader::notices`] says what was passed over and why.
    /// The content of files is verified when it is read: by [`Reader::read_param`], [`View::read_range`] and
    /// [`Reader::verify`].
    ///
    /// # Errors
    /// There is no whole checkpoint, with the reason for each candidate; or it cannot be read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CkptError> {
        let root = Dir::open(path.as_ref())?;
        if root.has(MANIFEST_NAME) {
            return Self::open_one(root, Vec::new());
        }
        let mut notices = Vec::new();
        let latest = catalog::read_latest(&root);
        match latest.as_ref().map(|name| root.open_dir(name).and_then(|d| Self::open_one(d, Vec::new()))) {
            Ok(Ok(reader)) => return Ok(reader),
            Ok(Err(e)) => notices.push(e.to_string()),
            Err(e) if root.has(catalog::LATEST) => notices.push(e.to_string()),
            Err(_) => {}
        }
        let (entries, reasons) = catalog::list(&root)?;
        notices.extend(reasons.into_iter().filter(|r| !notices.contains(r)).collect::<Vec<_>>());
        for entry in entries.iter().rev() {
            // One that stands aside for what `latest` names is that: nothing was passed over.
            let named = latest.as_deref().is_ok_and(|name| aside_of(&entry.name) == Some(name) && !root.has(name));
            let notices_here = if named { Vec::new() } else { notices.clone() };
            match root.open_dir(&entry.name).and_then(|d| Self::open_one(d, notices_here)) {
                Ok(reader) => return Ok(reader),
                Err(e) if notices.contains(&e.to_string()) => {}
                Err(e) => notices.push(e.to_string()),
            }
        }
        Err(CkptError::NoCheckpoint { dir: root.path().into(), reasons: notices })
    }

    pub(crate) fn open_one(dir: Dir, notices: Vec<String>) -> Result<Self, CkptError> {
        let (manifest, layout) = Manifest::read(&dir)?;
        for file in &manifest.files {
            open_checked(&dir, &file.name, file.bytes, false)?;
        }
        let pieces = manifest.files.iter().map(|f| f.pieces.as_slice());
        let coverage = Coverage::new(&layout, pieces, dir.path())?;
        let files = manifest.files.iter().map(|_| OnceLock::new()).collect();
        let params = layout.units().iter().enumerate();
        let params = params.flat_map(|(u, unit)| unit.params.iter().map(move |p| (p.name.clone(), (u, p.clone()))));
        let params = params.collect();
        Ok(Self { dir, manifest, layout, coverage, io: IoOptions::default(), files, params, notices })
    }

    /// Reads with other threads, chunks or cache use.
    pub fn with_io(mut self, io: IoOptions) -> Self {
        self.io = io;
        self
    }

    /// The directory of the checkpoint.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// What the checkpoint says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// What was passed over to come to this checkpoint, and why; empty where `latest` was whole.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// The parameters by name, each with its shape; in the order of the model.
    pub fn params(&self) -> impl Iterator<Item = &ParamPlacement> {
        self.layout.units().iter().flat_map(|u| &u.params)
    }

    /// This checkpoint seen through another layout of the same model.
    ///
    /// # Errors
    /// [`CkptError::AnotherModel`]: parameters have other names or shapes.
    pub fn view<'a>(&'a self, layout: &'a Layout) -> Result<View<'a>, CkptError> {
        match self.manifest.model.difference(&ModelSpec::from(layout)) {
            Some(difference) => Err(CkptError::AnotherModel { path: self.path().into(), difference }),
            None => Ok(View::new(self, layout)),
        }
    }

    /// Reads elements `range` of parameter `param` (row-major, flat) of `state` as fp32, which is exact.
    ///
    /// # Errors
    /// No such state or parameter, a range outside it, another length of `out`, or the bytes are not those
    /// that were saved.
    pub fn read_param(&self, state: &str, param: &str, range: Range<u64>, out: &mut [f32]) -> Result<(), CkptError> {
        let (unit, placed) = self.param(param)?;
        check_range(param, placed.numel_elems, &range, out.len())?;
        let stored = placed.offset_elems + range.start..placed.offset_elems + range.end;
        let mut reads = Vec::new();
        self.list(state, unit, stored, out, &mut reads)?;
        self.read_all(reads)
    }

    /// Lists the reads of elements of a unit as it was stored. The range lies within the unit and `out` fits it.
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
            let tensor = self.file(held.file)?.plan.tensor_range(index, held.piece).start;
            let start = tensor + (part.start - held.start) * dtype.bytes();
            let (now, later) = rest.split_at_mut((part.end - part.start) as usize);
            rest = later;
            reads.push(Read { file: held.file, start, dtype, out: now });
        }
        Ok(())
    }

    /// Does the reads, chunks of all of them shared out between threads.
    pub(crate) fn read_all(&self, reads: Vec<Read<'_>>) -> Result<(), CkptError> {
        let bytes: u64 = reads.iter().map(|r| r.out.len() as u64 * r.dtype.bytes()).sum();
        // Few bytes come faster through the page cache, and on one thread.
        let few = bytes <= 2 * BLOCK_BYTES;
        let threads = if few { 1 } else { self.io.threads.min(bytes.div_ceil(BLOCK_BYTES) as usize) };
        let chunks = reads.into_iter().flat_map(|read| read.chunks(self.io));
        share(chunks, threads, |(range, read), buffer| {
            let shard = self.file(read.file)?;
            let file = shard.open_state(&self.dir, self.io.direct && !few)?;
            read.dtype.widen(shard.read(&file, &range, buffer)?, read.out);
            Ok(())
        })
    }

    /// The unit of a parameter, and its place in it.
    pub(crate) fn param(&self, name: &str) -> Result<(usize, &ParamPlacement), CkptError> {
        let found = self.params.get(name).map(|(unit, placed)| (*unit, placed));
        found.ok_or_else(|| CkptError::argument("parameter", "one of this checkpoint", name))
    }

    /// Place and dtype of a state.
    pub(crate) fn state(&self, name: &str) -> Result<(usize, StateDtype), CkptError> {
        let found = self.manifest.states.iter().position(|s| s.name == name);
        found.map(|i| (i, self.manifest.states[i].dtype)).ok_or_else(|| CkptError::MissingState {
            path: self.path().into(),
            state: name.into(),
            available: self.manifest.states.iter().map(|s| s.name.clone()).collect(),
        })
    }

    /// A shard file, its front read and checked at first use.
    pub(crate) fn file(&self, index: usize) -> Result<&ShardFile, CkptError> {
        let slot = &self.files[index];
        match slot.get() {
            Some(file) => Ok(file),
            None => {
                let file = ShardFile::open(&self.dir, &self.manifest, index)?;
                Ok(slot.get_or_init(|| file))
            }
        }
    }
}

/// Elements to be read of one file.
pub(crate) struct Read<'o> {
    file: usize,
    /// Where they start in the state of the file, in bytes.
    start: u64,
    dtype: StateDtype,
    out: &'o mut [f32],
}

impl<'o> Read<'o> {
    /// Cut where chunks end: no element is cut, as every tensor is aligned to its elements.
    fn chunks(self, io: IoOptions) -> impl Iterator<Item = (Range<u64>, Read<'o>)> {
        let Self { file, start, dtype, out } = self;
        let end = start + out.len() as u64 * dtype.bytes();
        let mut rest = out;
        chunks(start..end, io).map(move |range| {
            let n = (range.end - range.start) / dtype.bytes();
            let (out, later) = std::mem::take(&mut rest).split_at_mut(n as usize);
            rest = later;
            (range.clone(), Read { file, start: range.start, dtype, out })
        })
    }
}

pub(crate) fn check_range(name: &str, numel: u64, range: &Range<u64>, out: usize) -> Result<(), CkptError> {
    if range.start > range.end || range.end > numel {
        let what = format!("range of {name:?}");
        return Err(CkptError::argument(
            what,
            format!("within 0..{numel}"),
            format!("{}..{}", range.start, range.end),
        ));
    }
    if out as u64 != range.end - range.start {
        return Err(CkptError::argument(format!("elements to read of {name:?}"), range.end - range.start, out));
    }
    Ok(())
}
