//! Saving: every rank stages its file, then rank 0 publishes all files atomically.
//!
//! ```text
//! each rank   stage     DIR/.staging/step-00000030.rank-00002.<save>     written, synced
//! rank 0      describe  DIR/.staging/step-00000030.save.<save>           written, synced; for `assemble`
//! all ranks   gather    the records of the staged files, to rank 0; again while a rank stages (see `agreement`)
//! rank 0      publish   DIR/.staging/step-00000030.ready.<save>/         files moved in, manifest written, synced
//!                       DIR/step-00000030/                               renamed (see `replace`), directory synced
//!                       DIR/latest                                       one rename, directory synced
//! rank 0      broadcast the outcome; a failed rank broadcasts its error
//! rank 0      prune     old checkpoints beyond the last k                renamed to .staging, then removed (see `sweep`)
//! ```
//!
//! After a crash at any point, `latest` and its checkpoint are in either the old or the new state.
//! If a save fails after all ranks have staged, or crashes, staged files stay: `assemble` makes a
//! checkpoint of them. The next publication of the same or a later step of the same run, or of one
//! that resumed it, removes them.
//!
//! Staged files of which no checkpoint can be made do not stay, or a full disk would stay full: if
//! a rank could not stage, every rank removes its own file, and the next opening removes incomplete
//! saves of its own runs (see `leftovers`).

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use zero_shard::Layout;

use super::meta::SaveMeta;
use super::records::StagingSlice;
use super::records::{PublishedCheckpoint, StagedFile};
use super::removals::Removals;
use super::replace;
use super::streamed::Streamed;
use crate::format::file_layout::{FileLayout, checksum, file_order, shard_pieces};
use crate::format::header::MAX_HEADER_BYTES;
use crate::format::manifest::{FORMAT_VERSION, MANIFEST_NAME, check_size};
use crate::format::names::{STAGING, random, random_number};
use crate::format::staged_name::{EntryKind, SaveId, run_checksum};
use crate::io::dir::{Dir, is_plain};
use crate::io::lock::Lock;
use crate::io::page_buffer::{PAGE_BYTES, PageBuffer};
use crate::io::parallel::{self, ByteSource};
use crate::load::catalog::{self, Entry};
use crate::{CkptError, Exchange, ModelFiles, ModelSpec, ShardData, StateSpec, UnitRange};

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
    /// Rank 0, if the file system cannot exchange two names: the old checkpoint of this step is
    /// renamed to a backup.
    BackedUp,
    /// Rank 0: the checkpoint has its final name.
    Renamed,
    /// Rank 0: `latest` names it.
    LatestMoved,
    /// Rank 0: the outcome is sent, old checkpoints are removed next.
    Pruning,
    /// Rank 0: old checkpoints are removed.
    Pruned,
}

#[cfg(any(test, feature = "testing"))]
impl SavePoint {
    /// The points of every save, in order.
    pub const ALL: [SavePoint; 10] = [
        SavePoint::FileCreated,
        SavePoint::StateWritten,
        SavePoint::FileSynced,
        SavePoint::DirCreated,
        SavePoint::FilesMoved,
        SavePoint::ManifestSynced,
        SavePoint::Renamed,
        SavePoint::LatestMoved,
        SavePoint::Pruning,
        SavePoint::Pruned,
    ];
}

/// The default of [`StoreOptions::stall_limit`].
const STALL_LIMIT: Duration = Duration::from_secs(600);

/// Options of a [`Store`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoreOptions {
    /// Number of newest checkpoints to keep of this run and those that it resumed; `None` keeps
    /// all.
    pub keep_last: Option<usize>,
    /// The run that saves, a plain name; it is stored in every checkpoint.
    pub run: Option<String>,
    /// The runs that this one resumed. An empty name means checkpoints without a run.
    pub resumed_runs: Vec<String>,
    /// The time without progress after which a save fails, 600 s by default: with no byte written
    /// by a rank, or no step of the publication done. At most the time limit of the communicator,
    /// of which a quarter is the longest interval between messages.
    pub stall_limit: Duration,
    /// Files to keep beside the checkpoints, which list them.
    pub model_files: Option<ModelFiles>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            keep_last: None,
            run: None,
            resumed_runs: Vec::new(),
            stall_limit: STALL_LIMIT,
            model_files: None,
        }
    }
}

impl StoreOptions {
    /// Sets `run`.
    #[must_use]
    pub fn run(mut self, run: impl Into<String>) -> Self {
        self.run = Some(run.into());
        self
    }

    /// Sets `model_files`; without any file, none are kept.
    #[must_use]
    pub fn model_files(mut self, model_files: impl Into<Option<ModelFiles>>) -> Self {
        let files: Option<ModelFiles> = model_files.into();
        self.model_files = files.filter(|files| !files.is_empty());
        self
    }

    /// Checks that a run with these options may save into `path`: all checkpoints there are its own
    /// or of runs that it resumed. Reads manifests only and changes nothing; a directory that does
    /// not exist is accepted.
    ///
    /// # Errors
    /// [`CkptError::AnotherRun`] with the newest checkpoint of another run, `path` is itself a
    /// checkpoint, or a failed read.
    pub fn check_runs(&self, path: impl AsRef<Path>) -> Result<(), CkptError> {
        match Dir::open(path.as_ref()) {
            Ok(dir) => self.check_runs_in(&dir),
            Err(error) if error.is_missing() => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn check_runs_in(&self, dir: &Dir) -> Result<(), CkptError> {
        if dir.has(MANIFEST_NAME) {
            let what = dir.path().display().to_string();
            return Err(CkptError::argument(
                what,
                "a directory of checkpoints",
                "a checkpoint",
            ));
        }

        let (entries, unreadable) = catalog::list(dir)?;
        let another = entries
            .iter()
            .rfind(|e| !self.owns(e.run.as_deref()))
            .map(|e| (&e.name, e.run.clone()));
        // Damaged checkpoints beside readable ones of this run are assumed to be of this run.
        let unknown = unreadable
            .last()
            .filter(|_| entries.is_empty())
            .map(|u| (&u.name, None));

        match another.or(unknown) {
            Some((name, run)) => Err(CkptError::AnotherRun {
                path: dir.path().join(name),
                run,
            }),
            None => Ok(()),
        }
    }

    /// Readers reject other names, and the ranks' messages have no room for a long one.
    fn check_run_name(&self) -> Result<(), CkptError> {
        match self.run.as_deref().filter(|run| !is_plain(run)) {
            None => Ok(()),
            Some(run) => {
                let expected = "a plain name of 1 to 200 letters, digits, `.`, `_`, `-`";
                let shown: String = run.chars().take(80).collect();
                Err(CkptError::argument(
                    "the name of the run",
                    expected,
                    format_args!("{shown:?}, {} bytes", run.len()),
                ))
            }
        }
    }

    /// Whether `run`, of a checkpoint, is this run or one that it resumed.
    pub(super) fn owns(&self, run: Option<&str>) -> bool {
        run == self.run.as_deref()
            || self
                .resumed_runs
                .iter()
                .any(|resumed| resumed == run.unwrap_or_default())
    }
}

zero_shard::setters!(StoreOptions {
    keep_last: impl Into<Option<usize>>,
    resumed_runs: Vec<String>,
    stall_limit: Duration,
});

pub(crate) type Observer = Arc<dyn Fn(SavePoint) + Send + Sync>;

/// A rank's access to the directory that a run saves into.
pub struct Store {
    pub(super) dir: Dir,
    pub(super) staging: Arc<Dir>,
    rank: u64,
    pub(super) options: StoreOptions,
    pub(super) observer: Option<Observer>,
    /// See [`SaveId`].
    pub(super) session: u64,
    /// The number of the next save, equal on all ranks.
    next_save: AtomicU32,
    /// Whether [`Store::stage`] has numbered the save that [`Store::save_with`] ends.
    is_numbered: AtomicBool,
    /// Bytes written and files published or removed so far.
    pub(super) progress: Arc<AtomicU64>,
    /// Rank 0: the sequence of the newest checkpoint.
    pub(super) newest_sequence: AtomicU64,
    /// Rank 0: the published checkpoints, oldest save first.
    published: Mutex<Vec<Entry>>,
    /// Old checkpoints and staged files that a thread deletes.
    pub(super) removals: Removals,
    /// Rank 0: the lock of the directory, if its file system has locks.
    lock: Option<Lock>,
}

impl Store {
    /// Opens `path` to save as `rank`; creates it if missing. Rank 0 locks the directory until the
    /// store is dropped or the process ends. Ranks in several processes open it by
    /// [`Store::create_on_ranks`].
    ///
    /// # Errors
    /// The directory cannot be created or written, another run has locked it ([`CkptError::Busy`]),
    /// the files of the model cannot be kept, or the name of the run is not a plain name.
    pub fn create(
        path: impl AsRef<Path>,
        rank: u64,
        options: StoreOptions,
    ) -> Result<Self, CkptError> {
        options.check_run_name()?;
        let dir = Dir::create(path.as_ref())?;
        let lock = if rank == 0 {
            Lock::acquire(&dir)?
        } else {
            None
        };

        let staging = dir.create_dir(STAGING)?;
        if rank == 0 {
            // The next publication deletes those that are moved.
            let _ = replace::resolve_backups(&dir, &staging);
        }

        let probe = format!("probe.{}", random());
        staging.write_new(&probe, b"")?;
        let _ = staging.remove_file(&probe);
        if let Some(files) = options.model_files.as_ref().filter(|_| rank == 0) {
            files.keep(&dir)?;
        }
        let published = if rank == 0 {
            catalog::list(&dir)?.0
        } else {
            Vec::new()
        };

        Ok(Self {
            dir,
            staging: Arc::new(staging),
            rank,
            options,
            observer: None,
            session: random_number(),
            next_save: AtomicU32::new(0),
            is_numbered: AtomicBool::new(false),
            progress: Arc::default(),
            newest_sequence: AtomicU64::new(published.last().map_or(0, |entry| entry.sequence)),
            published: Mutex::new(published),
            removals: Removals::default(),
            lock,
        })
    }

    /// Calls `observer` at each point of the protocol.
    #[cfg(any(test, feature = "testing"))]
    pub fn observe(mut self, observer: impl Fn(SavePoint) + Send + Sync + 'static) -> Self {
        self.observer = Some(Arc::new(observer));
        self
    }

    /// The directory of checkpoints.
    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// This rank.
    pub fn rank(&self) -> u64 {
        self.rank
    }

    /// Checks that the newest checkpoint in the directory belongs to this model. Call it before
    /// training, so that a mismatch is not found at the first save. Only rank 0 checks. The model of
    /// a tensor-parallel run has its whole parameters, not those of the saved layout.
    ///
    /// # Errors
    /// [`CkptError::AnotherModel`] with the first difference.
    pub fn check_model(&self, model: &ModelSpec) -> Result<(), CkptError> {
        let published = self.published();
        match published
            .last()
            .and_then(|e| Some((e, e.model.as_ref()?.difference(model)?)))
        {
            Some((entry, difference)) => Err(CkptError::AnotherModel {
                path: self.dir.path().join(&entry.name),
                difference,
            }),
            None => Ok(()),
        }
    }

    /// Checks that no checkpoint in the directory is of another run; see
    /// [`StoreOptions::check_runs`]. Only rank 0 checks.
    ///
    /// # Errors
    /// As [`StoreOptions::check_runs`].
    pub fn check_runs(&self) -> Result<(), CkptError> {
        if self.rank == 0 {
            self.options.check_runs_in(&self.dir)
        } else {
            Ok(())
        }
    }

    /// Saves a checkpoint together with the other ranks. All ranks call it with the same `meta` and
    /// return the same result: the published checkpoint, or the error of the first rank that
    /// failed.
    ///
    /// Every rank gathers once and broadcasts once, even after an error, and once more if a rank
    /// could not stage; and again at least every 500 ms while a rank writes.
    ///
    /// # Errors
    /// The error of any rank, as [`CkptError::Rank`], or a failed exchange; as [`CkptError::Kept`]
    /// if this rank's file is staged, which stays. If a rank could not stage, no file of this save
    /// stays. [`CkptError::Published`] on rank 0 if the checkpoint is published all the same.
    pub fn save(
        &self,
        meta: &SaveMeta,
        shard: &ShardData<'_>,
        exchange: &mut impl Exchange,
    ) -> Result<PublishedCheckpoint, CkptError> {
        self.save_with(
            meta,
            shard.layout(),
            || self.stage(meta.step, shard),
            exchange,
        )
    }

    /// Writes this rank's file into the staging directory and syncs it.
    ///
    /// # Errors
    /// State is missing, or a system call failed; the file is removed.
    pub fn stage(&self, step: u64, shard: &ShardData<'_>) -> Result<StagedFile, CkptError> {
        if shard.rank() != self.rank {
            return Err(CkptError::argument(
                "rank of the shard",
                self.rank,
                shard.rank(),
            ));
        }
        self.stage_next(
            step,
            shard.layout(),
            shard.specs(),
            shard.pieces().to_vec(),
            &shard.source(),
        )
    }

    /// As [`Store::stage`], with state that is not in memory as a whole: `fill` writes the bytes of
    /// each slice, which are in a buffer of the file's writer. Slices come in any order, one at a
    /// time, and cover all elements of `states`; a block of a format may come twice.
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
        let staged = self.stage_next(
            step,
            layout,
            states.clone(),
            shard_pieces(layout, self.rank)?,
            &source,
        );
        match source.into_failure() {
            Some(message) => Err(CkptError::Snapshot { message }),
            None => staged,
        }
    }

    /// Stages the file of the next save.
    pub(crate) fn stage_next(
        &self,
        step: u64,
        layout: &Layout,
        states: Vec<StateSpec>,
        pieces: Vec<UnitRange>,
        source: &dyn ByteSource,
    ) -> Result<StagedFile, CkptError> {
        let number = self.number_save();
        self.is_numbered.store(true, Ordering::Relaxed);
        self.stage_source((step, number), layout, states, pieces, source)
    }

    /// Numbers the next save.
    pub(crate) fn number_save(&self) -> u32 {
        self.next_save.fetch_add(1, Ordering::Relaxed)
    }

    /// Numbers the save that ends, unless its staging has, so that the numbers stay equal on all
    /// ranks whatever failed.
    pub(crate) fn end_numbered_save(&self) {
        if !self.is_numbered.swap(false, Ordering::Relaxed) {
            self.number_save();
        }
    }

    /// Stages a file with the state bytes of `source`, for the save `number` of `step`.
    pub(crate) fn stage_source(
        &self,
        (step, number): (u64, u32),
        layout: &Layout,
        states: Vec<StateSpec>,
        pieces: Vec<UnitRange>,
        source: &dyn ByteSource,
    ) -> Result<StagedFile, CkptError> {
        let file_layout = FileLayout::new(&states, layout, pieces)
            .map_err(|why| CkptError::NotStorable { why })?;
        if file_layout.state_bytes() != source.len() {
            return Err(CkptError::argument(
                "bytes of state",
                file_layout.state_bytes(),
                source.len(),
            ));
        }

        let header = encode_header(layout, (self.rank, step), &states, &file_layout)?;
        let front_bytes = header.len() as u64 + file_layout.table_bytes();
        let bytes = front_bytes + file_layout.state_bytes();

        let save = self.save_id(step, number);
        let name = save.name(EntryKind::File(self.rank));
        let path = self.staging.path().join(&name);
        let file = self.staging.create_file(&name, true)?;
        self.at(SavePoint::FileCreated);
        let written = self.write_file(&file, &header, front_bytes, source);
        let front_crc64 = written.map_err(|error| {
            let _ = self.staging.remove_file(&name);
            self.write_error(path, bytes, error)
        })?;

        self.at(SavePoint::FileSynced);

        Ok(StagedFile {
            rank: self.rank,
            step,
            file: name,
            bytes,
            front_crc64,
            states,
            pieces: file_layout.pieces,
            save,
        })
    }

    /// Writes and syncs a staged file: `header`, the table of checksums up to byte `front_bytes`,
    /// the state. Returns the checksum of header and table.
    fn write_file(
        &self,
        file: &File,
        header: &[u8],
        front_bytes: u64,
        source: &dyn ByteSource,
    ) -> io::Result<u64> {
        let bytes = front_bytes + source.len();
        // Reserves the space before the first write, if the file system supports it.
        match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, bytes) {
            Err(e) if e != rustix::io::Errno::OPNOTSUPP && e != rustix::io::Errno::INVAL => {
                return Err(e.into());
            }
            _ => {}
        }

        let table = parallel::write(file, front_bytes, source, &self.progress)?;

        let mut front = PageBuffer::new(front_bytes as usize);
        let (head, tail) = front.bytes_mut().split_at_mut(header.len());
        head.copy_from_slice(header);
        for (to, crc) in tail.chunks_exact_mut(8).zip(&table) {
            to.copy_from_slice(&crc.to_le_bytes());
        }
        let front_crc64 = checksum(front.bytes());
        parallel::write_at(file, front.whole(), 0)?;
        file.set_len(bytes)?;
        self.at(SavePoint::StateWritten);
        file.sync_all()?;

        Ok(front_crc64)
    }

    /// The error of a staged file of `bytes` that could not be written.
    fn write_error(&self, path: PathBuf, bytes: u64, error: io::Error) -> CkptError {
        use io::ErrorKind::{QuotaExceeded, StorageFull};
        match error.kind() {
            StorageFull | QuotaExceeded => {
                let folder = self.dir.path().to_owned();
                CkptError::NoSpace {
                    path,
                    bytes,
                    folder,
                    free_bytes: self.staging.free_bytes(),
                    error,
                }
            }
            _ => CkptError::io("write", path)(error),
        }
    }

    /// Counts as progress, calls the observer.
    pub(crate) fn at(&self, point: SavePoint) {
        self.progress.fetch_add(1, Ordering::Relaxed);
        if let Some(observer) = &self.observer {
            observer(point);
        }
    }

    /// Makes this store one of `session`, with the run of rank 0.
    pub(crate) fn join(&mut self, session: u64, run: Option<String>) {
        self.session = session;
        self.options.run = run;
    }

    /// The save `number` of this store, of `step`.
    pub(crate) fn save_id(&self, step: u64, number: u32) -> SaveId {
        SaveId {
            step,
            run: self.run_checksum(),
            session: self.session,
            number,
        }
    }

    pub(crate) fn run_checksum(&self) -> u32 {
        run_checksum(self.options.run.as_deref())
    }

    pub(crate) fn stall_limit(&self) -> Duration {
        self.options.stall_limit
    }

    pub(crate) fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// Whether no other run saves into the directory as long as this store is open.
    pub(crate) fn is_locked(&self) -> bool {
        self.lock.is_some()
    }

    pub(crate) fn published(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.published
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Store {
    /// Waits until removed checkpoints are deleted, while that makes progress.
    fn drop(&mut self) {
        let _ = self.finish_removals();
    }
}

/// The first bytes of a rank's file: the header, padded so that the state starts at a page.
pub(crate) fn encode_header(
    layout: &Layout,
    (rank, step): (u64, u64),
    states: &[StateSpec],
    file_layout: &FileLayout,
) -> Result<Vec<u8>, CkptError> {
    let metadata = [
        ("format", "zero-ckpt shard".to_string()),
        ("version", FORMAT_VERSION.to_string()),
        ("rank", rank.to_string()),
        ("world_size", layout.world_size().to_string()),
        ("step", step.to_string()),
    ];

    let metadata = metadata
        .into_iter()
        .map(|(k, v)| (k.to_string(), v))
        .collect();
    let header = file_layout.header(
        states,
        |u| layout.units()[u as usize].name.as_str(),
        metadata,
    );
    let header = header.encode(PAGE_BYTES as u64, file_layout.table_bytes());
    // Eight bytes are the length field.
    check_size(
        "the header of a shard file",
        header.len() as u64 - 8,
        MAX_HEADER_BYTES,
    )?;

    Ok(header)
}
