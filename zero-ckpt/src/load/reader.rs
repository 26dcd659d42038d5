//! Verified reads of any range of any state.

use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use serde_json::Value;
use zero_shard::{Layout, ParamId, ParamPlacement, UnitSpec};

use crate::format::coverage::Coverage;
use crate::format::manifest::{MANIFEST_NAME, Manifest};
use crate::format::names::{BEST, LATEST, backup_of};
use crate::io::dir::Dir;
use crate::load::catalog;
use crate::load::division::Division;
use crate::load::document::read_document;
use crate::load::joined::Joined;
use crate::load::shard_file::{ShardFile, open_checked};
use crate::save::staged::staged_hint;
use crate::{CkptError, ModelSpec, StateEncoding, TensorParallel};

/// Descriptors of shard files that a reader keeps open at a time; others are opened for each read.
/// A rank rarely reads from more files, and a process may have only 1024 descriptors.
const MAX_KEPT: usize = 64;

/// A checkpoint, open for reading. Several threads may read at the same time.
pub struct Reader {
    pub(crate) dir: Dir,
    pub(crate) manifest: Manifest,
    /// The layout of the stored units.
    pub(crate) layout: Layout,
    /// The whole model, if the stored units are the parts of tensor-parallel ranks.
    pub(crate) joined: Option<Joined>,
    /// The part of the model that views are of.
    pub(super) division: Option<Arc<Division>>,
    /// The number of units, the first ones of a layout, that views have; `None`: all.
    pub(super) first_units: Option<usize>,
    pub(crate) coverage: Coverage,
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
    /// [`Reader::read_param`], [`View::read_range`](crate::View::read_range) and [`Reader::verify`]
    /// verify file contents as they read them.
    ///
    /// # Errors
    /// [`CkptError::NoCheckpoint`] with the defect of each candidate, or a failed read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CkptError> {
        let root = Dir::open(path.as_ref())?;
        if root.has(MANIFEST_NAME) {
            return Self::open_one(root, Vec::new());
        }
        catalog::again_if_removed(|| Self::open_newest(&root))
    }

    /// Opens the checkpoint that `latest` names, or the complete one that was saved last.
    ///
    /// # Errors
    /// As [`Reader::open`], or [`CkptError::Removed`].
    fn open_newest(root: &Dir) -> Result<Self, CkptError> {
        let mut notices = Vec::new();
        let latest = catalog::read_pointer(root, LATEST);

        match latest
            .as_ref()
            .map(|name| Self::open_pointed(root, LATEST, name, name))
        {
            Ok(Ok(reader)) => return Ok(reader),
            Ok(Err(removed @ CkptError::Removed { .. })) => return Err(removed),
            Ok(Err(e)) => notices.push(e.to_string()),
            Err(e) if root.has(LATEST) => notices.push(e.to_string()),
            Err(_) => {}
        }

        let (entries, unreadable) = catalog::list(root)?;
        let reasons = unreadable.into_iter().map(|u| u.reason);
        notices.extend(reasons.filter(|r| !notices.contains(r)).collect::<Vec<_>>());
        for entry in entries.iter().rev() {
            // The backup of the checkpoint named by `latest` is that checkpoint, so no checkpoint
            // was skipped.
            let named = latest
                .as_deref()
                .is_ok_and(|name| backup_of(&entry.name) == Some(name) && !root.has(name));
            let notices_here = if named { Vec::new() } else { notices.clone() };
            match Self::open_listed(root, &entry.name, notices_here) {
                Ok(reader) => return Ok(reader),
                Err(removed @ CkptError::Removed { .. }) => return Err(removed),
                Err(e) if notices.contains(&e.to_string()) => {}
                Err(e) => notices.push(e.to_string()),
            }
        }

        notices.extend(staged_hint(root));
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
        catalog::again_if_removed(|| Self::open_best_of(&root))
    }

    fn open_best_of(root: &Dir) -> Result<Self, CkptError> {
        let name = catalog::read_pointer(root, BEST)?;
        let entries = catalog::list(root)?.0;
        let backup = entries
            .into_iter()
            .rev()
            .find(|e| backup_of(&e.name) == Some(&name));
        let found = backup
            .filter(|_| !root.has(&name))
            .map_or_else(|| name.clone(), |backup| backup.name);
        Self::open_pointed(root, BEST, &name, &found)
    }

    /// Opens the checkpoint `found`, which the file `pointer` of `root` names as `name`.
    ///
    /// # Errors
    /// As [`Reader::open_listed`]; if `pointer` still has that name, nobody has removed it just
    /// now.
    fn open_pointed(root: &Dir, pointer: &str, name: &str, found: &str) -> Result<Self, CkptError> {
        match Self::open_listed(root, found, Vec::new()) {
            Err(CkptError::Removed { .. })
                if catalog::read_pointer(root, pointer).is_ok_and(|now| now == name) =>
            {
                root.open_dir(found)
                    .and_then(|dir| Self::open_one(dir, Vec::new()))
            }
            opened => opened,
        }
    }

    /// Opens the checkpoint `name` of a listing of `root`, which nobody removes from then on.
    ///
    /// # Errors
    /// [`CkptError::Removed`] if it was removed meanwhile, or as [`Reader::open_one`].
    pub(crate) fn open_listed(
        root: &Dir,
        name: &str,
        notices: Vec<String>,
    ) -> Result<Self, CkptError> {
        let reader = catalog::open_listed(root, name, |dir| Self::open_one(dir, notices))?;
        // It may have been renamed before it was held.
        match root.names_dir(name, &reader.dir) {
            true => Ok(reader),
            false => Err(reader.dir.removed()),
        }
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

    /// Opens a checkpoint and checks its manifest only, and its description of tensor-parallel
    /// ranks. The other files are checked when they are read.
    pub(crate) fn open_manifest(dir: Dir, notices: Vec<String>) -> Result<Self, CkptError> {
        dir.hold()?;
        let (manifest, layout, crc64) = Manifest::read(&dir)?;
        let pieces = manifest.files.iter().map(|f| f.pieces.as_slice());
        let coverage = Coverage::new(&layout, pieces, dir.path())?;
        let joined = Joined::read(&dir, &manifest)?;
        let files = manifest.files.iter().map(|_| OnceLock::new()).collect();
        Ok(Self {
            dir,
            manifest,
            layout,
            joined,
            division: None,
            first_units: None,
            coverage,
            crc64,
            files,
            kept: AtomicUsize::new(0),
            notices,
        })
    }

    /// Lets a run with `--keep-last` remove the checkpoint, which is otherwise kept until the
    /// reader is dropped (where the file system has locks).
    pub fn release(&self) {
        self.dir.release();
    }

    /// The directory of the checkpoint.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The directory of checkpoints that holds this one.
    ///
    /// # Errors
    /// The path ends in `.` or `..` and cannot be resolved.
    pub fn store_dir(&self) -> Result<PathBuf, CkptError> {
        let path = match self.path().components().next_back() {
            Some(Component::Normal(_)) => self.path().to_owned(),
            _ => self
                .path()
                .canonicalize()
                .map_err(CkptError::io("open", self.path()))?,
        };
        let parent = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        Ok(parent.unwrap_or(Path::new(".")).to_owned())
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
        serde_json::from_slice(&read_document(&self.dir, record)?)
            .map(Some)
            .map_err(why)
    }

    /// The whole model and the cuts of the tensor-parallel run that saved the checkpoint; `None` if
    /// no document describes them, as of a run without tensor parallelism.
    pub fn tensor_parallel(&self) -> Option<&TensorParallel> {
        self.joined.as_ref().map(|joined| &joined.document)
    }

    /// The whole parameters, in the order of the model.
    pub fn params(&self) -> impl Iterator<Item = &ParamPlacement> {
        self.whole_layout().units().iter().flat_map(|u| &u.params)
    }

    /// The parameters of the model: whole ones, also if tensor-parallel ranks saved parts.
    pub fn model(&self) -> ModelSpec {
        ModelSpec {
            units: self.whole_units().to_vec(),
        }
    }

    /// The units of the whole model.
    pub(crate) fn whole_units(&self) -> &[UnitSpec] {
        let joined = self.joined.as_ref();
        joined.map_or(&self.manifest.model.units, |joined| &joined.units)
    }

    /// The layout of the whole model, of which only the parameters count.
    pub(crate) fn whole_layout(&self) -> &Layout {
        let joined = self.joined.as_ref();
        joined.map_or(&self.layout, |joined| &joined.layout)
    }

    /// A whole parameter: its position in the model, and its placement.
    pub(crate) fn param(&self, name: &str) -> Result<(ParamId, &ParamPlacement), CkptError> {
        let layout = self.whole_layout();
        let id = layout.find_param(name);
        id.and_then(|id| Some((id, layout.param(id)?)))
            .ok_or_else(|| CkptError::argument("parameter", "one of this checkpoint", name))
    }

    /// Index and encoding of a state.
    pub(crate) fn state(&self, name: &str) -> Result<(usize, StateEncoding), CkptError> {
        let found = self.manifest.states.iter().position(|s| s.name == name);
        found
            .map(|i| (i, self.manifest.states[i].encoding))
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
                let mut file = ShardFile::open(&self.dir, &self.manifest, &self.layout, index)?;
                if !self.may_keep() {
                    file.close();
                }
                Ok(cell.get_or_init(|| file))
            }
        }
    }

    /// Whether another descriptor may stay open.
    pub(crate) fn may_keep(&self) -> bool {
        self.kept.fetch_add(1, Ordering::Relaxed) < MAX_KEPT
    }
}
