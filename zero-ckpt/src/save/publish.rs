//! Publication: rank 0 makes a checkpoint of the staged files of all ranks.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use zero_shard::Layout;

use super::meta::{SaveMeta, encode_documents, manifest_without_files, with_files};
use super::records::{Publication, PublishedCheckpoint, StagedFile};
use super::replace;
use super::store::{SavePoint, Store};
use crate::format::manifest::{MANIFEST_NAME, Manifest};
use crate::format::names::{BEST, LATEST, backup_of, random, step_name};
use crate::format::staged_name::EntryKind;
use crate::format::tensor_parallel::TENSOR_PARALLEL_JSON;
use crate::io::dir::Dir;
use crate::load::catalog::{self, Entry, pointer_line};
use crate::load::joined::whole_model;
use crate::load::shard_file::check_length;
use crate::{CkptError, ModelSpec};

/// Whether an entry with the name of a checkpoint whose manifest cannot be read, for this reason, is
/// the checkpoint of nobody: it is damaged, or has no manifest. Not if the disk does not answer, or
/// if another version of this crate may read it.
fn is_of_nobody(error: &CkptError) -> bool {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    match error {
        CkptError::Io { error, .. } => matches!(error.kind(), NotFound | NotADirectory),
        CkptError::UnsupportedVersion { .. } => false,
        _ => true,
    }
}

impl Store {
    /// On rank 0: publishes the staged files of all ranks, in rank order, as a checkpoint, names it
    /// in `latest` and removes old checkpoints. On an error before the checkpoint has its final
    /// name, the staged files stay, and earlier checkpoints do not change.
    ///
    /// # Errors
    /// The error of the first failed rank, staged files that do not form one checkpoint, another
    /// model in this directory, a checkpoint of this step by another run, or a failed system call.
    pub fn publish(
        &self,
        meta: &SaveMeta,
        layout: &Layout,
        staged: Vec<Result<StagedFile, CkptError>>,
    ) -> Result<PublishedCheckpoint, CkptError> {
        let publication = self.publish_files(meta, layout, staged)?;
        self.prune(&publication);
        Ok(publication.checkpoint)
    }

    /// [`Store::publish`] without the removals.
    pub(crate) fn publish_files(
        &self,
        meta: &SaveMeta,
        layout: &Layout,
        staged: Vec<Result<StagedFile, CkptError>>,
    ) -> Result<Publication, CkptError> {
        let staged = staged.into_iter().collect::<Result<Vec<_>, _>>()?;
        let states = staged
            .first()
            .map(|file| file.states.clone())
            .unwrap_or_default();
        let documents = encode_documents(meta, self.options.model_files.as_ref())?;
        let manifest =
            manifest_without_files(meta, layout, states, self.options.run.clone(), &documents);

        for file in &staged {
            self.check_staged(file)?;
            self.progress.fetch_add(1, Ordering::Relaxed);
        }

        let checkpoint = self.publish_manifest(manifest, &staged, &documents, meta.best)?;
        let superseded = meta.superseded.map(step_name);
        let numbers: BTreeMap<u64, u32> = staged
            .iter()
            .map(|file| (file.save.session, file.save.number))
            .collect();

        Ok(Publication {
            checkpoint,
            superseded,
            numbers,
        })
    }

    /// Publishes a checkpoint of `manifest` and the staged files.
    pub(crate) fn publish_manifest(
        &self,
        mut manifest: Manifest,
        staged: &[StagedFile],
        documents: &[(String, Vec<u8>)],
        best: Option<u64>,
    ) -> Result<PublishedCheckpoint, CkptError> {
        let model = self.check_publication(&manifest, documents)?;
        let mut published = self.published();
        let last = published.last().map_or(0, |entry| entry.sequence);
        manifest.sequence = last.saturating_add(1);
        let name = step_name(manifest.step);
        let path = self.dir.path().join(&name);
        let manifest = with_files(manifest, staged, &path)?;
        self.rename_into_place(&manifest, staged, documents)?;

        // The checkpoint is complete and has its final name: later errors do not undo it.
        let bytes = manifest.files.iter().map(|f| f.bytes).sum();
        let step = manifest.step;
        let sequence = manifest.sequence;
        self.newest_sequence.store(sequence, Ordering::Relaxed);
        published.retain(|e| e.name != name && backup_of(&e.name) != Some(&name));
        published.push(Entry {
            name: name.clone(),
            sequence,
            model: Some(model),
            run: manifest.run,
        });
        let best = self.point_to(&name, best, &published)?;
        if let Some(moved) = self.dir.moved() {
            self.removals.notice(moved.to_string());
        }

        Ok(PublishedCheckpoint {
            name,
            step,
            sequence,
            bytes,
            best,
            notices: self.take_notices(),
        })
    }

    /// Checks that a checkpoint of `manifest` may have its name in this directory, as
    /// [`Store::publish_manifest`] does, and returns its model.
    ///
    /// # Errors
    /// The directory was moved, or has checkpoints of another model or, of this step, of another run.
    pub(crate) fn check_publication(
        &self,
        manifest: &Manifest,
        documents: &[(String, Vec<u8>)],
    ) -> Result<ModelSpec, CkptError> {
        if let Some(moved) = self.dir.moved() {
            return Err(moved);
        }
        let mut named = documents.iter();
        let described = named.find(|(name, _)| name == TENSOR_PARALLEL_JSON);
        let described = described.map(|(_, bytes)| bytes.as_slice());
        let model = whole_model(manifest, described, self.dir.path())?;
        self.check_model(&model)?;
        self.check_replaced(&step_name(manifest.step), &self.published())?;
        Ok(model)
    }

    /// Collects the files of the checkpoint of `manifest` in a directory, and renames that to the
    /// checkpoint's name. On an error, the staged files have their names again.
    fn rename_into_place(
        &self,
        manifest: &Manifest,
        staged: &[StagedFile],
        documents: &[(String, Vec<u8>)],
    ) -> Result<(), CkptError> {
        let encoded = manifest.encode()?;
        let name = step_name(manifest.step);
        let own = self.save_id(manifest.step, 0);
        let save = staged.first().map_or(own, |file| file.save);
        let ready_name = save.name(EntryKind::Ready);
        let ready = self.staging.create_dir(&ready_name)?;
        self.at(SavePoint::DirCreated);
        let backed_up = || self.at(SavePoint::BackedUp);

        self.collect(&ready, staged, documents, (manifest, &encoded))
            .and_then(|()| {
                replace::replace(&self.staging, &ready_name, &self.dir, &name, backed_up)
            })
            .inspect_err(|_| self.put_back(&ready, &ready_name, staged, manifest))
    }

    /// Checks that the checkpoint `name`, which a publication replaces, is not of another run.
    fn check_replaced(&self, name: &str, published: &[Entry]) -> Result<(), CkptError> {
        let known = published
            .iter()
            .find(|e| e.name == name || backup_of(&e.name) == Some(name));
        let run = match known {
            Some(entry) => entry.run.clone(),
            None if !self.dir.has(name) => return Ok(()),
            // It came after the directory was opened, or could not be read then.
            None => match self.dir.open_dir(name).and_then(|dir| Manifest::read(&dir)) {
                Ok((manifest, ..)) => manifest.run,
                Err(error) if is_of_nobody(&error) => return Ok(()),
                Err(error) => return Err(error),
            },
        };
        if self.options.owns(run.as_deref()) {
            return Ok(());
        }
        Err(CkptError::AnotherRun {
            path: self.dir.path().join(name),
            run,
        })
    }

    /// Makes the new name durable, and `latest` and `best` name the checkpoint. Returns the name in
    /// `best`.
    fn point_to(
        &self,
        name: &str,
        best: Option<u64>,
        published: &[Entry],
    ) -> Result<Option<String>, CkptError> {
        let but = |what: &'static str| {
            let name = name.to_owned();
            move |error| CkptError::Published {
                name,
                what,
                error: Box::new(error),
            }
        };
        self.dir
            .sync()
            .map_err(but("its folder could not be synced"))?;
        self.at(SavePoint::Renamed);
        self.point(LATEST, name)
            .map_err(but("`latest` could not be updated"))?;
        self.at(SavePoint::LatestMoved);
        self.update_best(best, published)
            .map_err(but("`best` could not be updated"))
    }

    /// Moves the files of a checkpoint that could not be published back to their staged names, and
    /// removes what was written with them. Keeps what cannot be moved.
    fn put_back(&self, ready: &Dir, ready_name: &str, staged: &[StagedFile], manifest: &Manifest) {
        for (staged, file) in staged.iter().zip(&manifest.files) {
            let _ = ready.rename(&file.name, &self.staging, &staged.file);
        }
        let documents = manifest.documents.iter().map(|document| &*document.name);
        for written in documents.chain([MANIFEST_NAME]) {
            let _ = ready.remove_file(written);
        }
        let _ = self.staging.remove_empty_dir(ready_name);
    }

    /// The place in which a failed save has left the staged file of this rank: the file, or the
    /// directory that rank 0 has moved it into. `None` once the checkpoint has its final name.
    pub(crate) fn kept(&self, staged: &StagedFile) -> Option<PathBuf> {
        let ready = staged.save.name(EntryKind::Ready);
        let name = [&staged.file, &ready]
            .into_iter()
            .find(|name| self.staging.has(name))?;
        Some(self.staging.path().join(name))
    }

    /// Checks that this machine sees the staged file with its full length.
    fn check_staged(&self, staged: &StagedFile) -> Result<(), CkptError> {
        let rank = staged.rank;
        let (_, got_bytes) = self.staging.open_file(&staged.file, false).map_err(|e| CkptError::Mismatch {
            why: format!("rank 0 does not see the file of rank {rank}; use a directory that all ranks share ({e})"),
        })?;
        let path = self.staging.path().join(&staged.file);
        check_length(&path, staged.bytes, got_bytes)
    }

    /// Moves the staged files into `ready`, and writes the documents and the manifest there.
    fn collect(
        &self,
        ready: &Dir,
        staged: &[StagedFile],
        documents: &[(String, Vec<u8>)],
        (manifest, encoded): (&Manifest, &[u8]),
    ) -> Result<(), CkptError> {
        for (staged, file) in staged.iter().zip(&manifest.files) {
            self.staging.rename(&staged.file, ready, &file.name)?;
            self.progress.fetch_add(1, Ordering::Relaxed);
        }
        self.at(SavePoint::FilesMoved);
        documents
            .iter()
            .try_for_each(|(name, bytes)| ready.write_new(name, bytes))?;
        ready.write_new(MANIFEST_NAME, encoded)?;
        ready.sync()?;
        self.at(SavePoint::ManifestSynced);
        Ok(())
    }

    /// Atomically makes `pointer`, `latest` or `best`, name the checkpoint `name`.
    fn point(&self, pointer: &str, name: &str) -> Result<(), CkptError> {
        let file = format!("{pointer}.{}", random());
        self.staging
            .write_new(&file, pointer_line(name).as_bytes())?;
        self.staging
            .rename(&file, &self.dir, pointer)
            .inspect_err(|_| {
                let _ = self.staging.remove_file(&file);
            })?;
        self.dir.sync()
    }

    /// Makes `best` name the checkpoint of step `best`, if that is published here. Returns the name
    /// in `best`.
    fn update_best(
        &self,
        best: Option<u64>,
        published: &[Entry],
    ) -> Result<Option<String>, CkptError> {
        let was = catalog::read_pointer(&self.dir, BEST).ok();
        let now = best
            .map(step_name)
            .filter(|name| published.iter().any(|e| e.name == *name));
        match now {
            Some(name) if was.as_ref() != Some(&name) => {
                self.point(BEST, &name).map(|()| Some(name))
            }
            _ => Ok(was),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use zero_shard::{Layout, ParamSpec, UnitSpec};

    use super::*;
    use crate::{ShardData, StoreOptions};

    /// A file system that is slow, but answers, is not taken for one that does not.
    #[test]
    #[cfg_attr(miri, ignore)]
    fn every_point_of_a_publication_is_progress() {
        let dir = tempfile::tempdir().unwrap();
        let layout =
            Layout::new(&[UnitSpec::new("head", [ParamSpec::new("w", [3])])], 1, 1).unwrap();
        let mut shard = ShardData::new(&layout, 0).unwrap();
        shard.storage_f32("master", &[1.0; 3]).unwrap();
        let seen: Arc<Mutex<Vec<u64>>> = Arc::default();
        let store = Store::create(dir.path(), 0, StoreOptions::default()).unwrap();
        let progress = Arc::clone(&store.progress);
        let record = Arc::clone(&seen);
        let store = store.observe(move |_| {
            record
                .lock()
                .unwrap()
                .push(progress.load(Ordering::Relaxed))
        });

        let staged = store.stage(1, &shard);
        store
            .publish_files(&SaveMeta::default().step(1), &layout, vec![staged])
            .unwrap();
        let seen = seen.lock().unwrap();
        // Three points of the staging and five of the publication.
        assert_eq!(seen.len(), 8);
        assert!(
            seen.is_sorted_by(|earlier, later| earlier < later),
            "{seen:?}"
        );
    }
}
