//! Saving: every rank stages its file, rank 0 publishes all of them at once.
//!
//! ```text
//! each rank   stage     DIR/.staging/step-00000030.rank-00002.<random>   written, synced      -> receipt
//! all ranks   exchange  the receipts (or errors)
//! rank 0      publish   DIR/.staging/step-00000030.<random>/             files moved in, manifest written, synced
//!                       DIR/step-00000030/                               takes its name (see `replace`), directory synced
//!                       DIR/latest                                       one rename, directory synced
//!                       old checkpoints beyond the last k                moved out, then removed
//! all ranks   exchange  the verdict
//! ```
//!
//! A crash at any point leaves `latest` and the checkpoint it names as they were, or as they are to be. Staged
//! files of runs that died are swept at the next publication of their step or a later one.

use std::path::Path;
use std::sync::Mutex;

use zero_shard::Layout;

use crate::assemble::{SaveMeta, manifest_of};
use crate::catalog::{self, Entry, LATEST, STAGING, aside_of, latest_line, random, step_name, step_of};
use crate::dir::Dir;
use crate::lock::Lock;
use crate::manifest::{FORMAT_VERSION, Hex64, MANIFEST_NAME, Manifest};
use crate::pages::{PAGE_BYTES, Pages};
use crate::plan::{FilePlan, checksum};
use crate::replace;
use crate::report::{Published, Receipt, middle_cut};
use crate::transfer::{self, IoOptions, Source};
use crate::{CkptError, ModelSpec, Piece, ShardData, StateSpec};

/// A point of the protocol, for tests that stop a run there and for progress displays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SavePoint {
    /// The rank's file exists, empty.
    FileCreated,
    /// Its state is written, not synced.
    StateWritten,
    /// It is whole and synced.
    FileSynced,
    /// Rank 0: the directory to publish exists, empty.
    DirCreated,
    /// Rank 0: the files are in it.
    FilesMoved,
    /// Rank 0: so is the manifest; all is synced.
    ManifestSynced,
    /// Rank 0, where the file system cannot exchange two names and another checkpoint has that of this step: the old
    /// one stands aside.
    OldAside,
    /// Rank 0: the checkpoint has its name.
    Renamed,
    /// Rank 0: `latest` names it.
    LatestMoved,
    /// Rank 0: old checkpoints are gone.
    Pruned,
}

/// The points that every save passes, in order.
pub const SAVE_POINTS: [SavePoint; 9] = [
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

/// How to save.
#[derive(Clone, Debug, Default)]
pub struct StoreOptions {
    /// Keep this many checkpoints, the newest; `None` keeps all.
    pub keep_last: Option<usize>,
    /// How files are written.
    pub io: IoOptions,
}

type Observer = Box<dyn Fn(SavePoint) + Send + Sync>;

/// A rank's door to the directory that a run saves into.
pub struct Store {
    dir: Dir,
    staging: Dir,
    rank: u64,
    options: StoreOptions,
    observer: Option<Observer>,
    /// Rank 0: what is published, oldest save first.
    published: Mutex<Vec<Entry>>,
    _lock: Option<Lock>,
}

impl Store {
    /// Opens (and makes, where missing) `path` to save into it as `rank`. Rank 0 holds the directory against
    /// other runs until the store is dropped or its process ends, however it ends.
    ///
    /// # Errors
    /// The directory cannot be made or written, or another live run saves into it ([`CkptError::Busy`]).
    pub fn create(path: impl AsRef<Path>, rank: u64, options: StoreOptions) -> Result<Self, CkptError> {
        let dir = Dir::create(path.as_ref())?;
        let lock = if rank == 0 { Lock::take(&dir)? } else { None };
        let staging = dir.create_dir(STAGING)?;
        if rank == 0 {
            replace::settle(&dir, &staging);
        }
        let probe = format!("probe.{}", random());
        staging.write_new(&probe, b"")?;
        let _ = staging.remove_file(&probe);
        let published = if rank == 0 { catalog::list(&dir)?.0 } else { Vec::new() };
        Ok(Self { dir, staging, rank, options, observer: None, published: Mutex::new(published), _lock: lock })
    }

    /// Calls `observer` at each point of the protocol.
    pub fn observe(mut self, observer: impl Fn(SavePoint) + Send + Sync + 'static) -> Self {
        self.observer = Some(Box::new(observer));
        self
    }

    /// Where this store saves.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// This rank.
    pub fn rank(&self) -> u64 {
        self.rank
    }

    /// Whether the checkpoints that are here already are of this model; asked before training, it saves the
    /// hours until the first save. Rank 0 knows; the others agree to all.
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

    /// Saves a checkpoint together with the other ranks, and returns on all of them the same: what was
    /// published, or the error of the first rank that failed. All ranks call it, with the same `meta`.
    ///
    /// `exchange` is the communicator: it takes this rank's frame and returns the frames of all ranks in rank order;
    /// all frames have [`frame_bytes`](crate::frame_bytes) bytes. It is called twice, on every rank, whatever goes
    /// wrong.
    ///
    /// # Errors
    /// The error of any rank, as [`CkptError::Rank`]; or the exchange failed.
    pub fn save<E: std::fmt::Display>(
        &self,
        meta: &SaveMeta,
        shard: &ShardData<'_>,
        exchange: impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>,
    ) -> Result<Published, CkptError> {
        let staged = self.stage(meta.step, shard);
        self.finish(meta, shard.layout(), staged, exchange)
    }

    /// Writes this rank's file into the staging directory and syncs it.
    ///
    /// # Errors
    /// State is missing, or the system refused; nothing is left behind.
    pub fn stage(&self, step: u64, shard: &ShardData<'_>) -> Result<Receipt, CkptError> {
        if shard.rank() != self.rank {
            return Err(CkptError::argument("rank of the shard", self.rank, shard.rank()));
        }
        self.stage_source(step, shard.layout(), shard.specs(), shard.pieces().to_vec(), &shard.source()?)
    }

    /// Writes a file whose state bytes are `source`.
    pub(crate) fn stage_source(
        &self,
        step: u64,
        layout: &Layout,
        states: Vec<StateSpec>,
        pieces: Vec<Piece>,
        source: &dyn Source,
    ) -> Result<Receipt, CkptError> {
        let plan = FilePlan::new(&states, pieces)
            .filter(|plan| plan.state_bytes() == source.len())
            .ok_or_else(|| CkptError::argument("bytes of state", "those of the plan", source.len()))?;
        let metadata = [
            ("format", "zero-ckpt shard".to_string()),
            ("version", FORMAT_VERSION.to_string()),
            ("rank", self.rank.to_string()),
            ("world_size", layout.world_size().to_string()),
            ("step", step.to_string()),
        ];
        let metadata = metadata.into_iter().map(|(k, v)| (k.to_string(), v)).collect();
        let header = plan.header(&states, |u| layout.units()[u as usize].name.as_str(), metadata);
        let header = header.encode(PAGE_BYTES as u64, plan.table_bytes());
        let front_bytes = header.len() as u64 + plan.table_bytes();
        let bytes = front_bytes + plan.state_bytes();

        let name = format!("{}.rank-{:05}.{}", step_name(step), self.rank, random());
        let path = self.staging.path().join(&name);
        let file = self.staging.create_file(&name, self.options.io.direct)?;
        self.at(SavePoint::FileCreated);
        let write = || {
            // Takes the space before anything is written, where the file system can.
            match rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes) {
                Err(e) if e != rustix::io::Errno::OPNOTSUPP && e != rustix::io::Errno::INVAL => return Err(e.into()),
                _ => {}
            }
            let table = transfer::write(&file, front_bytes, source, self.options.io)?;
            let mut front = Pages::new(front_bytes as usize);
            let (head, tail) = front.bytes_mut().split_at_mut(header.len());
            head.copy_from_slice(&header);
            tail.chunks_exact_mut(8).zip(&table).for_each(|(to, crc)| to.copy_from_slice(&crc.to_le_bytes()));
            let crc = checksum(front.bytes());
            transfer::write_at(&file, front.whole(), 0)?;
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
        let FilePlan { pieces, .. } = plan;
        Ok(Receipt { rank: self.rank, step, file: name, bytes, front_crc64: Hex64(crc), states, pieces })
    }

    /// Removes a staged file that will not be published.
    pub fn discard(&self, receipt: &Receipt) {
        let _ = self.staging.remove_file(&receipt.file);
    }

    /// Rank 0: makes a checkpoint of the receipts of all ranks, given in rank order, and names it in `latest`.
    /// Where a rank failed, or anything goes wrong before the checkpoint has its name, what is staged of this
    /// save is removed and all that was published before stays as it is.
    ///
    /// # Errors
    /// The first rank's error, receipts that do not fit together, another model in this directory, or the system
    /// refused.
    pub fn publish(
        &self,
        meta: &SaveMeta,
        layout: &Layout,
        receipts: Vec<Result<Receipt, CkptError>>,
    ) -> Result<Published, CkptError> {
        let (mut good, mut failure) = (Vec::new(), None);
        for result in receipts {
            match result {
                Ok(receipt) => good.push(receipt),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        let result = failure.map_or(Ok(()), Err).and_then(|()| self.publish_receipts(meta, layout, &good));
        if result.is_err() {
            good.iter().for_each(|receipt| self.discard(receipt));
        }
        result
    }

    fn publish_receipts(
        &self,
        meta: &SaveMeta,
        layout: &Layout,
        receipts: &[Receipt],
    ) -> Result<Published, CkptError> {
        let model = ModelSpec::from(layout);
        self.check_model(&model)?;
        let mut published = self.published.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let sequence = published.last().map_or(0, |e| e.sequence).saturating_add(1);
        let name = step_name(meta.step);
        let manifest = manifest_of(meta, layout, model, sequence, receipts, &self.dir.path().join(&name))?;
        for receipt in receipts {
            self.check_staged(receipt)?;
        }

        let dir_name = format!("{name}.{}", random());
        let ready = self.staging.create_dir(&dir_name)?;
        self.at(SavePoint::DirCreated);
        let stood_aside = || self.at(SavePoint::OldAside);
        let assembled = self
            .assemble(&ready, receipts, &manifest)
            .and_then(|()| replace::take_name(&self.staging, &dir_name, &self.dir, &name, stood_aside));
        if let Err(error) = assembled {
            let _ = self.staging.remove(&dir_name);
            return Err(error);
        }
        // From here on the checkpoint is whole and has its name: a failure is reported, nothing is undone.
        self.dir.sync()?;
        self.at(SavePoint::Renamed);
        self.move_latest(&name)?;
        self.at(SavePoint::LatestMoved);
        published.retain(|e| e.name != name && aside_of(&e.name) != Some(&name));
        published.push(Entry { name: name.clone(), sequence, model: manifest.model });
        let notices = self.prune(&mut published, meta.step);
        self.at(SavePoint::Pruned);
        let bytes = manifest.files.iter().map(|f| f.bytes).sum();
        Ok(Published { name, step: meta.step, sequence, bytes, notices })
    }

    /// The staged file is here, on this machine's view of the file system, and is the one of the receipt.
    fn check_staged(&self, receipt: &Receipt) -> Result<(), CkptError> {
        let rank = receipt.rank;
        let seen = self.staging.open_file(&receipt.file, false).map_err(|e| CkptError::Receipts {
            why: format!("rank 0 does not see the file of rank {rank}; is the directory shared? ({e})"),
        })?;
        match seen.1 == receipt.bytes {
            true => Ok(()),
            false => Err(CkptError::WrongLength {
                path: self.staging.path().join(&receipt.file),
                expected_bytes: receipt.bytes,
                got_bytes: seen.1,
            }),
        }
    }

    fn assemble(&self, ready: &Dir, receipts: &[Receipt], manifest: &Manifest) -> Result<(), CkptError> {
        for (receipt, file) in receipts.iter().zip(&manifest.files) {
            self.staging.rename(&receipt.file, ready, &file.name)?;
        }
        self.at(SavePoint::FilesMoved);
        ready.write_new(MANIFEST_NAME, &manifest.encode()?)?;
        ready.sync()?;
        self.at(SavePoint::ManifestSynced);
        Ok(())
    }

    fn move_latest(&self, name: &str) -> Result<(), CkptError> {
        let file = format!("latest.{}", random());
        self.staging.write_new(&file, latest_line(name).as_bytes())?;
        self.staging.rename(&file, &self.dir, LATEST).inspect_err(|_| {
            let _ = self.staging.remove_file(&file);
        })?;
        self.dir.sync()
    }

    /// Removes checkpoints beyond the last k, the one that this save replaced, and what dead runs left staged of steps
    /// up to this one.
    fn prune(&self, published: &mut Vec<Entry>, step: u64) -> Vec<String> {
        let mut notices = Vec::new();
        let excess = self.options.keep_last.map_or(0, |keep| published.len().saturating_sub(keep.max(1)));
        for entry in published.drain(..excess) {
            // First out of sight in one step, so that no reader ever finds half of it.
            let old = format!("{}.old.{}", entry.name, random());
            let gone = self.dir.rename(&entry.name, &self.staging, &old).and_then(|()| self.staging.remove(&old));
            notices.extend(gone.err().map(|e| e.to_string()));
        }
        replace::settle(&self.dir, &self.staging);
        for name in self.staging.names().unwrap_or_default() {
            let of_step = name.split('.').next().and_then(step_of);
            if of_step.is_some_and(|s| s <= step) || name.starts_with("latest.") || name.starts_with("probe.") {
                let _ = self.staging.remove(&name);
            }
        }
        notices.iter_mut().for_each(|n| *n = middle_cut(n));
        notices.truncate(3);
        notices
    }

    fn at(&self, point: SavePoint) {
        if let Some(observer) = &self.observer {
            observer(point);
        }
    }
}
