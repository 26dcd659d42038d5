//! Saving: every rank stages its file, then rank 0 publishes all files atomically.
//!
//! ```text
//! each rank   stage     DIR/.staging/step-00000030.rank-00002.<random>   written, synced
//! all ranks   gather    the records of the staged files, to rank 0
//! rank 0      publish   DIR/.staging/step-00000030.<random>/             files moved in, manifest written, synced
//!                       DIR/step-00000030/                               renamed (see `replace`), directory synced
//!                       DIR/latest                                       one rename, directory synced
//!                       old checkpoints beyond the last k                renamed to .staging, then removed
//! rank 0      broadcast the outcome; a failed rank broadcasts its error
//! ```
//!
//! After a crash at any point, `latest` and its checkpoint are in either the old or the new state. The next
//! publication of the same or a later step removes the staged files of the crashed run.

use std::path::Path;
use std::sync::Mutex;

use zero_shard::Layout;

use super::agreement::{PublishedCheckpoint, StagedFile, staged_name};
use super::assemble::{SaveMeta, encode_documents, manifest_of};
use super::background::StagingSlice;
use super::replace;
use super::streamed::Streamed;
use crate::exchange::shorten;
use crate::format::blocks::{FileLayout, checksum, file_order, shard_pieces};
use crate::format::catalog::{
    self, BEST, Entry, LATEST, STAGING, backup_of, pointer_line, random, random_number, step_name, step_of,
};
use crate::format::header::MAX_HEADER_BYTES;
use crate::format::manifest::{FORMAT_VERSION, MANIFEST_NAME, Manifest, check_size};
use crate::io::dir::Dir;
use crate::io::lock::Lock;
use crate::io::page_buffer::{PAGE_BYTES, PageBuffer};
use crate::io::parallel::{self, Source};
use crate::{CkptError, Exchange, ModelSpec, Piece, ShardData, StateSpec};

/// A point of the save protocol at which tests interrupt a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "testing"), allow(unreachable_pub))]
#[non_exhaustive]
pub enum SavePoint {
    /// The rank's file is created.
    FileCreated,
    /// Its content is written.
    StateWritten,
    /// It is synced.
    FileSynced,
    /// Rank 0: the new checkpoint's directory is created.
    DirCreated,
    /// Rank 0: the files are moved there.
    FilesMoved,
    /// Rank 0: manifest and directory are written and synced.
    ManifestSynced,
    /// Rank 0, if the file system cannot exchange two names: the old checkpoint of this step is renamed to a backup.
    BackedUp,
    /// Rank 0: the checkpoint has its final name.
    Renamed,
    /// Rank 0: `latest` names it.
    LatestMoved,
    /// Rank 0: old checkpoints are removed.
    Pruned,
}

#[cfg(any(test, feature = "testing"))]
impl SavePoint {
    /// The points of every save, in order.
    pub const ALL: [SavePoint; 9] = [
        SavePoint::FileCreated,
        SavePoint::StateWritten,
        SavePoint::FileSynced,
        SavePoint::DirCreated,
        SavePoint::FilesMoved,
        SavePoint::ManifestSynced,
        SavePoint::Renamed,
        SavePoint::LatestMoved,
        SavePoint::Pruned,
    ];
}

/// Options of a [`Store`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct StoreOptions {
    /// Number of newest checkpoints to keep of this run and those that it resumed; `None` keeps all.
    pub keep_last: Option<usize>,
    /// The run that saves, a plain name; it is stored in every checkpoint.
    pub run: Option<String>,
    /// The runs that this one resumed. An empty name means checkpoints without a run.
    pub resumed_runs: Vec<String>,
}

setters!(StoreOptions { resumed_runs: Vec<String> });

impl StoreOptions {
    /// Sets `keep_last`.
    #[must_use]
    pub fn keep_last(mut self, keep_last: impl Into<Option<usize>>) -> Self {
        self.keep_last = keep_last.into();
        self
    }

    /// Sets `run`.
    #[must_use]
    pub fn run(mut self, run: impl Into<String>) -> Self {
        self.run = Some(run.into());
        self
    }

    /// Checks that a run with these options may save into `path`: all checkpoints there are its own or of runs that
    /// it resumed. Reads manifests only and changes nothing; a directory that does not exist is accepted.
    ///
    /// # Errors
    /// [`CkptError::AnotherRun`] with the newest checkpoint of another run, `path` is itself a checkpoint, or a
    /// failed read.
    pub fn check_runs(&self, path: impl AsRef<Path>) -> Result<(), CkptError> {
        match Dir::open(path.as_ref()) {
            Ok(dir) => self.check_runs_in(&dir),
            Err(CkptError::Io { error, .. }) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn check_runs_in(&self, dir: &Dir) -> Result<(), CkptError> {
        if dir.has(MANIFEST_NAME) {
            let what = dir.path().display().to_string();
            return Err(CkptError::argument(what, "a directory of checkpoints", "a checkpoint"));
        }
        let (entries, unreadable) = catalog::list(dir)?;
        let another = entries.iter().rfind(|e| !self.owns(e)).map(|e| (&e.name, e.run.clone()));
        // Damaged checkpoints beside readable ones of this run are assumed to be of this run.
        let unknown = unreadable.last().filter(|_| entries.is_empty()).map(|u| (&u.name, None));
        match another.or(unknown) {
            Some((name, run)) => Err(CkptError::AnotherRun { path: dir.path().join(name), run }),
            None => Ok(()),
        }
    }

    /// Whether this run or one that it resumed saved the checkpoint.
    fn owns(&self, entry: &Entry) -> bool {
        let run = entry.run.as_deref();
        run == self.run.as_deref() || self.resumed_runs.iter().any(|resumed| resumed == run.unwrap_or_default())
    }
}

type Observer = Box<dyn Fn(SavePoint) + Send + Sync>;

/// A rank's access to the directory that a run saves into.
pub struct Store {
    dir: Dir,
    staging: Dir,
    rank: u64,
    options: StoreOptions,
    observer: Option<Observer>,
    /// Rank 0: the published checkpoints, oldest save first.
    published: Mutex<Vec<Entry>>,
    _lock: Option<Lock>,
}

impl Store {
    /// Opens `path` to save as `rank`; creates it if missing. Rank 0 locks the directory until the store is dropped
    /// or the process ends.
    ///
    /// # Errors
    /// The directory cannot be created or written, or another run has locked it ([`CkptError::Busy`]).
    pub fn create(path: impl AsRef<Path>, rank: u64, options: StoreOptions) -> Result<Self, CkptError> {
        let dir = Dir::create(path.as_ref())?;
        let lock = if rank == 0 { Lock::acquire(&dir)? } else { None };
        let staging = dir.create_dir(STAGING)?;
        if rank == 0 {
            replace::resolve_backups(&dir, &staging);
        }
        let probe = format!("probe.{}", random());
        staging.write_new(&probe, b"")?;
        let _ = staging.remove_file(&probe);
        let published = if rank == 0 { catalog::list(&dir)?.0 } else { Vec::new() };
        Ok(Self { dir, staging, rank, options, observer: None, published: Mutex::new(published), _lock: lock })
    }

    /// Calls `observer` at each point of the protocol.
    #[cfg(any(test, feature = "testing"))]
    pub fn observe(mut self, observer: impl Fn(SavePoint) + Send + Sync + 'static) -> Self {
        self.observer = Some(Box::new(observer));
        self
    }

    /// The directory of checkpoints.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// This rank.
    pub fn rank(&self) -> u64 {
        self.rank
    }

    /// Checks that the newest checkpoint in the directory belongs to this model. Call it before training, so that a
    /// mismatch is not found at the first save. Only rank 0 checks.
    ///
    /// # Errors
    /// [`CkptError::AnotherModel`] with the first difference.
    pub fn check_model(&self, model: &ModelSpec) -> Result<(), CkptError> {
        let published = self.published.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match published.last().and_then(|e| Some((e, e.model.difference(model)?))) {
            Some((entry, difference)) => {
                Err(CkptError::AnotherModel { path: self.dir.path().join(&entry.name), difference })
            }
            None => Ok(()),
        }
    }

    /// Checks that no checkpoint in the directory is of another run; see [`StoreOptions::check_runs`]. Only rank 0
    /// checks.
    ///
    /// # Errors
    /// As [`StoreOptions::check_runs`].
    pub fn check_runs(&self) -> Result<(), CkptError> {
        if self.rank == 0 { self.options.check_runs_in(&self.dir) } else { Ok(()) }
    }

    /// Saves a checkpoint together with the other ranks. All ranks call it with the same `meta` and return the same
    /// result: the published checkpoint, or the error of the first rank that failed.
    ///
    /// Every rank gathers once and broadcasts once, even after an error, and once more if a rank other than 0 failed.
    ///
    /// # Errors
    /// The error of any rank, as [`CkptError::Rank`], or a failed exchange.
    pub fn save(
        &self,
        meta: &SaveMeta,
        shard: &ShardData<'_>,
        exchange: &mut impl Exchange,
    ) -> Result<PublishedCheckpoint, CkptError> {
        let staged = self.stage(meta.step, shard);
        self.finish(meta, shard.layout(), staged, exchange)
    }

    /// Writes this rank's file into the staging directory and syncs it.
    ///
    /// # Errors
    /// State is missing, or a system call failed; the file is removed.
    pub fn stage(&self, step: u64, shard: &ShardData<'_>) -> Result<StagedFile, CkptError> {
        if shard.rank() != self.rank {
            return Err(CkptError::argument("rank of the shard", self.rank, shard.rank()));
        }
        self.stage_source(step, shard.layout(), shard.specs(), shard.pieces().to_vec(), &shard.source())
    }

    /// As [`Store::stage`], with state that is not in memory as a whole: `fill` writes the bytes of each slice, which lie
    /// in a buffer of the file's writer. Slices come in any order, one at a time, and cover all elements of `states`.
    ///
    /// # Errors
    /// As [`Store::stage`], or the message of `fill` as [`CkptError::Snapshot`].
    pub fn stage_streamed(
        &self,
        step: u64,
        layout: &Layout,
        mut states: Vec<StateSpec>,
        fill: impl FnMut(StagingSlice<'_>) -> Result<(), String> + Send,
    ) -> Result<StagedFile, CkptError> {
        states.sort_by_key(file_order);
        let source = Streamed::new(layout, self.rank, &states, fill);
        let staged = self.stage_source(step, layout, states.clone(), shard_pieces(layout, self.rank)?, &source);
        match source.into_failure() {
            Some(message) => Err(CkptError::Snapshot { message }),
            None => staged,
        }
    }

    /// Stages a file with the state bytes of `source`.
    pub(crate) fn stage_source(
        &self,
        step: u64,
        layout: &Layout,
        states: Vec<StateSpec>,
        pieces: Vec<Piece>,
        source: &dyn Source,
    ) -> Result<StagedFile, CkptError> {
        let file_layout = FileLayout::new(&states, pieces)
            .filter(|file| file.state_bytes() == source.len())
            .ok_or_else(|| CkptError::argument("bytes of state", "the sum of all pieces", source.len()))?;
        let metadata = [
            ("format", "zero-ckpt shard".to_string()),
            ("version", FORMAT_VERSION.to_string()),
            ("rank", self.rank.to_string()),
            ("world_size", layout.world_size().to_string()),
            ("step", step.to_string()),
        ];
        let metadata = metadata.into_iter().map(|(k, v)| (k.to_string(), v)).collect();
        let header = file_layout.header(&states, |u| layout.units()[u as usize].name.as_str(), metadata);
        let header = header.encode(PAGE_BYTES as u64, file_layout.table_bytes());
        // Eight bytes are the length field.
        check_size("the header of a shard file", header.len() as u64 - 8, MAX_HEADER_BYTES)?;
        let front_bytes = header.len() as u64 + file_layout.table_bytes();
        let bytes = front_bytes + file_layout.state_bytes();

        let name = staged_name(step, self.rank, random_number());
        let path = self.staging.path().join(&name);
        let file = self.staging.create_file(&name, true)?;
        self.at(SavePoint::FileCreated);
        let write = || {
            // Reserves the space before the first write, if the file system supports it.
            match rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes) {
                Err(e) if e != rustix::io::Errno::OPNOTSUPP && e != rustix::io::Errno::INVAL => return Err(e.into()),
                _ => {}
            }
            let table = parallel::write(&file, front_bytes, source)?;
            let mut front = PageBuffer::new(front_bytes as usize);
            let (head, tail) = front.bytes_mut().split_at_mut(header.len());
            head.copy_from_slice(&header);
            tail.chunks_exact_mut(8).zip(&table).for_each(|(to, crc)| to.copy_from_slice(&crc.to_le_bytes()));
            let crc = checksum(front.bytes());
            parallel::write_at(&file, front.whole(), 0)?;
            file.set_len(bytes)?;
            self.at(SavePoint::StateWritten);
            file.sync_all()?;
            Ok(crc)
        };
        let crc = write().map_err(|e| {
            let _ = self.staging.remove_file(&name);
            CkptError::io("write", path)(e)
        })?;
        self.at(SavePoint::FileSynced);
        let FileLayout { pieces, .. } = file_layout;
        Ok(StagedFile { rank: self.rank, step, file: name, bytes, front_crc64: crc, states, pieces })
    }

    /// Removes a staged file.
    pub fn discard(&self, staged: &StagedFile) {
        let _ = self.staging.remove_file(&staged.file);
    }

    /// On rank 0: publishes the staged files of all ranks, in rank order, as a checkpoint and names it in `latest`.
    /// On an error before the checkpoint has its final name, removes the staged files; earlier checkpoints do not
    /// change.
    ///
    /// # Errors
    /// The error of the first failed rank, staged files that do not form one checkpoint, another model in this
    /// directory, a checkpoint of this step by another run, or a failed system call.
    pub fn publish(
        &self,
        meta: &SaveMeta,
        layout: &Layout,
        staged: Vec<Result<StagedFile, CkptError>>,
    ) -> Result<PublishedCheckpoint, CkptError> {
        let (mut good, mut failure) = (Vec::new(), None);
        for result in staged {
            match result {
                Ok(file) => good.push(file),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        let result = failure.map_or(Ok(()), Err).and_then(|()| self.publish_files(meta, layout, &good));
        if result.is_err() {
            good.iter().for_each(|file| self.discard(file));
        }
        result
    }

    fn publish_files(
        &self,
        meta: &SaveMeta,
        layout: &Layout,
        staged: &[StagedFile],
    ) -> Result<PublishedCheckpoint, CkptError> {
        let model = ModelSpec::from(layout);
        self.check_model(&model)?;
        let mut published = self.published.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let sequence = published.last().map_or(0, |e| e.sequence).saturating_add(1);
        let name = step_name(meta.step);
        let path = self.dir.path().join(&name);
        let replaced = published.iter().find(|e| e.name == name || backup_of(&e.name) == Some(&name));
        if let Some(another) = replaced.filter(|e| !self.options.owns(e)) {
            return Err(CkptError::AnotherRun { path, run: another.run.clone() });
        }
        let documents = encode_documents(meta)?;
        let identity = (model, sequence, self.options.run.clone());
        let manifest = manifest_of(meta, layout, identity, staged, &documents, &path)?;
        let encoded = manifest.encode()?;
        for file in staged {
            self.check_staged(file)?;
        }

        let dir_name = format!("{name}.{}", random());
        let ready = self.staging.create_dir(&dir_name)?;
        self.at(SavePoint::DirCreated);
        let backed_up = || self.at(SavePoint::BackedUp);
        let assembled = self
            .assemble(&ready, staged, &documents, (&manifest, &encoded))
            .and_then(|()| replace::replace(&self.staging, &dir_name, &self.dir, &name, backed_up));
        if let Err(error) = assembled {
            let _ = self.staging.remove(&dir_name);
            return Err(error);
        }
        // The checkpoint is complete and has its final name: later errors do not undo it.
        self.dir.sync()?;
        self.at(SavePoint::Renamed);
        self.point(LATEST, &name)?;
        self.at(SavePoint::LatestMoved);
        published.retain(|e| e.name != name && backup_of(&e.name) != Some(&name));
        published.push(Entry { name: name.clone(), sequence, model: manifest.model, run: manifest.run });
        let best = self.update_best(meta.best, &published)?;
        let notices = self.prune(&mut published, meta, best.as_deref());
        self.at(SavePoint::Pruned);
        let bytes = manifest.files.iter().map(|f| f.bytes).sum();
        Ok(PublishedCheckpoint { name, step: meta.step, sequence, bytes, best, notices })
    }

    /// Checks that this machine sees the staged file with its full length.
    fn check_staged(&self, staged: &StagedFile) -> Result<(), CkptError> {
        let rank = staged.rank;
        let (_, got_bytes) = self.staging.open_file(&staged.file, false).map_err(|e| CkptError::Mismatch {
            why: format!("rank 0 does not see the file of rank {rank}; use a directory that all ranks share ({e})"),
        })?;
        match got_bytes == staged.bytes {
            true => Ok(()),
            false => Err(CkptError::WrongLength {
                path: self.staging.path().join(&staged.file),
                expected_bytes: staged.bytes,
                got_bytes,
            }),
        }
    }

    fn assemble(
        &self,
        ready: &Dir,
        staged: &[StagedFile],
        documents: &[(String, Vec<u8>)],
        (manifest, encoded): (&Manifest, &[u8]),
    ) -> Result<(), CkptError> {
        for (staged, file) in staged.iter().zip(&manifest.files) {
            self.staging.rename(&staged.file, ready, &file.name)?;
        }
        self.at(SavePoint::FilesMoved);
        documents.iter().try_for_each(|(name, bytes)| ready.write_new(name, bytes))?;
        ready.write_new(MANIFEST_NAME, encoded)?;
        ready.sync()?;
        self.at(SavePoint::ManifestSynced);
        Ok(())
    }

    /// Atomically makes `pointer`, `latest` or `best`, name the checkpoint `name`.
    fn point(&self, pointer: &str, name: &str) -> Result<(), CkptError> {
        let file = format!("{pointer}.{}", random());
        self.staging.write_new(&file, pointer_line(name).as_bytes())?;
        self.staging.rename(&file, &self.dir, pointer).inspect_err(|_| {
            let _ = self.staging.remove_file(&file);
        })?;
        self.dir.sync()
    }

    /// Makes `best` name the checkpoint of step `best`, if that is published here. Returns the name in `best`.
    fn update_best(&self, best: Option<u64>, published: &[Entry]) -> Result<Option<String>, CkptError> {
        let was = catalog::read_pointer(&self.dir, BEST).ok();
        let now = best.map(step_name).filter(|name| published.iter().any(|e| e.name == *name));
        match now {
            Some(name) if was.as_ref() != Some(&name) => self.point(BEST, &name).map(|()| Some(name)),
            _ => Ok(was),
        }
    }

    /// Removes the superseded checkpoint, this run's checkpoints beyond the last `keep_last` except `best`, the one that
    /// this save replaced, and staged files of steps up to this one, which crashed runs left. Returns the failures.
    fn prune(&self, published: &mut Vec<Entry>, meta: &SaveMeta, best: Option<&str>) -> Vec<String> {
        let mut notices = Vec::new();
        let own = published.iter().filter(|e| self.options.owns(e)).count();
        let mut excess = self.options.keep_last.map_or(0, |keep| own.saturating_sub(keep.max(1)));
        let superseded = meta.superseded.map(step_name);
        published.retain(|entry| {
            if !self.options.owns(entry) {
                return true;
            }
            let due = excess > 0 || superseded.as_ref() == Some(&entry.name);
            excess = excess.saturating_sub(1);
            if !due || best == Some(&entry.name) {
                return true;
            }
            // First hides it by one rename, so that no reader opens it partly removed.
            let old = format!("{}.old.{}", entry.name, random());
            let gone = self.dir.rename(&entry.name, &self.staging, &old).and_then(|()| self.staging.remove(&old));
            notices.extend(gone.err().map(|e| e.to_string()));
            false
        });
        replace::resolve_backups(&self.dir, &self.staging);
        for name in self.staging.names().unwrap_or_default() {
            let of_step = name.split('.').next().and_then(step_of);
            let leftover = ["latest.", "best.", "probe."].iter().any(|prefix| name.starts_with(prefix));
            if leftover || of_step.is_some_and(|s| s <= meta.step) {
                let _ = self.staging.remove(&name);
            }
        }
        notices.iter_mut().for_each(|n| *n = shorten(n));
        notices.truncate(3);
        notices
    }

    fn at(&self, point: SavePoint) {
        if let Some(observer) = &self.observer {
            observer(point);
        }
    }
}
