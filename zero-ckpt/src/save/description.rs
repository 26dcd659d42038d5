//! The description of a save: what a manifest needs besides the staged files, in a file beside that
//! of rank 0.
//!
//! [`assemble`](crate::assemble) makes the manifest of it that the publication would have written.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use zero_shard::Layout;

use super::meta::{encode_documents, manifest_without_files};
use super::records::StagedFile;
use crate::format::file_layout::checksum;
use crate::format::manifest::{
    DocumentRecord, MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, check_size, hex64,
};
use crate::format::staged_name::{EntryKind, SaveId};
use crate::io::dir::Dir;
use crate::{CkptError, SaveMeta, Store};

const FORMAT_NAME: &str = "zero-ckpt staged save";
const VERSION: u64 = 2;

/// The content of a manifest besides the staged files.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Description {
    /// The manifest, without files and with sequence 0.
    pub(crate) manifest: Manifest,
    /// The contents of its documents, in their order.
    pub(crate) documents: Vec<String>,
    pub(crate) resumed_runs: Vec<String>,
    pub(crate) best: Option<u64>,
    /// Checksum of the header and table of rank 0's file.
    #[serde(with = "hex64")]
    pub(crate) front_crc64: u64,
    /// The sequence of the newest checkpoint in the directory, when this was written.
    pub(crate) published: u64,
    /// The names of the descriptions in the staging directory, when this was written.
    pub(crate) staged: Vec<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope {
    format: String,
    version: u64,
    #[serde(with = "hex64")]
    crc64: u64,
    save: Box<RawValue>,
}

impl Description {
    fn encode(&self) -> Result<Vec<u8>, CkptError> {
        let bad = |e: serde_json::Error| CkptError::BadFile {
            path: FORMAT_NAME.into(),
            why: e.to_string(),
        };

        let save = serde_json::to_string(self)
            .and_then(RawValue::from_string)
            .map_err(bad)?;
        let crc64 = checksum(save.get().as_bytes());
        let envelope = Envelope {
            format: FORMAT_NAME.into(),
            version: VERSION,
            crc64,
            save,
        };

        let bytes = serde_json::to_vec(&envelope).map_err(bad)?;
        check_size(
            "the description of the save",
            bytes.len() as u64,
            MAX_MANIFEST_BYTES,
        )?;

        Ok(bytes)
    }

    /// Reads the description `name`, whose name is that of a save of `step`.
    pub(crate) fn read(dir: &Dir, name: &str, step: u64) -> Result<Self, CkptError> {
        let bytes = dir.read_small(name, MAX_MANIFEST_BYTES)?;
        let bad = |why: String| CkptError::BadFile {
            path: dir.path().join(name),
            why,
        };

        let envelope: Envelope = serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))?;
        if (envelope.format.as_str(), envelope.version) != (FORMAT_NAME, VERSION) {
            return Err(bad(format!("it is no {FORMAT_NAME} of version {VERSION}")));
        }

        if checksum(envelope.save.get().as_bytes()) != envelope.crc64 {
            return Err(bad(
                "damaged: its content does not match its checksum".into()
            ));
        }

        let description: Self =
            serde_json::from_str(envelope.save.get()).map_err(|e| bad(e.to_string()))?;
        if description.manifest.step != step {
            return Err(bad(format!(
                "its name has step {step}, its content {}",
                description.manifest.step
            )));
        }

        let records = &description.manifest.documents;
        let is_recorded = |(record, text): (&DocumentRecord, &String)| {
            (record.bytes, record.crc64) == (text.len() as u64, checksum(text.as_bytes()))
        };
        let documents = &description.documents;
        if documents.len() != records.len() || !records.iter().zip(documents).all(is_recorded) {
            return Err(bad("it has other documents than its manifest".into()));
        }

        Ok(description)
    }

    /// Whether the directory `ready` of this save holds another checkpoint: the one that the save has
    /// replaced.
    ///
    /// Why: an atomic exchange leaves it under the save's name, until that is changed.
    pub(crate) fn is_replaced(&self, ready: &Dir) -> bool {
        if !ready.has(MANIFEST_NAME) {
            return false;
        }
        // A manifest that was not written completely says nothing.
        Manifest::read(ready).is_ok_and(|(manifest, ..)| !self.fits(manifest))
    }

    /// Whether `manifest` is that of this save.
    fn fits(&self, manifest: Manifest) -> bool {
        let is_later = manifest.sequence > self.published;
        let without_files = Manifest {
            files: Vec::new(),
            sequence: 0,
            ..manifest
        };
        is_later && without_files == self.manifest
    }

    /// The documents by name.
    pub(crate) fn documents(&self) -> Vec<(String, Vec<u8>)> {
        let names = self
            .manifest
            .documents
            .iter()
            .map(|document| document.name.clone());
        names
            .zip(self.documents.iter().map(|text| text.clone().into_bytes()))
            .collect()
    }
}

impl Store {
    /// On rank 0: writes the description beside the staged file. Removes that file on an error:
    /// without a description nothing can be made of it.
    pub(crate) fn describe(
        &self,
        meta: &SaveMeta,
        layout: &Layout,
        staged: Result<StagedFile, CkptError>,
    ) -> Result<StagedFile, CkptError> {
        match staged {
            Ok(file) if self.rank() == 0 => {
                let described = self.write_description(meta, layout, &file);
                // A description that did not fit is there in part.
                described
                    .inspect_err(|_| self.discard(&file))
                    .map(|()| file)
            }
            other => other,
        }
    }

    fn write_description(
        &self,
        meta: &SaveMeta,
        layout: &Layout,
        file: &StagedFile,
    ) -> Result<(), CkptError> {
        let documents = encode_documents(meta, self.options.model_files.as_ref())?;
        let run = self.options.run.clone();
        let manifest = manifest_without_files(meta, layout, file.states.clone(), run, &documents);
        let documents = documents
            .into_iter()
            .map(|(_, bytes)| String::from_utf8_lossy(&bytes).into_owned())
            .collect();
        let resumed_runs = self.options.resumed_runs.clone();
        let mut staged = self.staging.names()?;
        staged.retain(|name| matches!(SaveId::parse(name), Some((_, EntryKind::Description))));

        let description = Description {
            manifest,
            documents,
            resumed_runs,
            best: meta.best,
            front_crc64: file.front_crc64,
            published: self.newest_sequence.load(Ordering::Relaxed),
            staged,
        };

        let name = file.save.name(EntryKind::Description);
        self.staging.write_new(&name, &description.encode()?)
    }
}

#[cfg(test)]
mod tests {
    use zero_shard::{ParamSpec, UnitSpec};

    use super::*;
    use crate::{ShardData, assemble};

    fn layout() -> Layout {
        let units = [UnitSpec::new("head", [ParamSpec::new("w", [3, 5])])];
        Layout::new(&units, 1, 1).unwrap()
    }

    /// Stages `meta` and describes it, as the only rank.
    fn stage(store: &Store, meta: &SaveMeta) -> Result<StagedFile, CkptError> {
        let layout = layout();
        let mut shard = ShardData::new(&layout, 0)?;
        shard.storage_f32("master", &[1.0; 15])?;
        store.describe(meta, &layout, store.stage(meta.step, &shard))
    }

    /// Stages step 7 with a document; then changes the description.
    fn change(path: &std::path::Path, change: impl FnOnce(&mut Description)) {
        let store = Store::create(path, 0, crate::StoreOptions::default()).unwrap();
        let document = ("run.json".to_owned(), serde_json::json!({"lr": 0.1}));
        let meta = SaveMeta::default().step(7).documents([document].into());
        let name = stage(&store, &meta)
            .unwrap()
            .save
            .name(EntryKind::Description);
        let mut description = Description::read(&store.staging, &name, 7).unwrap();
        change(&mut description);
        store.staging.remove_file(&name).unwrap();
        let changed = description.encode().unwrap();
        store.staging.write_new(&name, &changed).unwrap();
    }

    fn error(path: &std::path::Path) -> String {
        let error = assemble(path.join("new"), &[path]).unwrap_err();
        assert!(matches!(error, CkptError::NotAssembled { .. }), "{error}");
        error.to_string()
    }

    /// The description of a save is written while an earlier one of its session is in flight, which
    /// is then published.
    #[test]
    #[cfg_attr(miri, ignore)]
    fn earlier_save_in_flight_is_not_newer() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(dir.path(), 0, crate::StoreOptions::default()).unwrap();
        let meta = |step| SaveMeta::default().step(step);
        let earlier = stage(&store, &meta(7));
        stage(&store, &meta(8)).unwrap();
        store.publish(&meta(7), &layout(), vec![earlier]).unwrap();
        store.finish_removals();

        let assembled = assemble(dir.path().join("new"), &[dir.path()]).unwrap();
        assert_eq!(assembled.checkpoint.step, 8);
    }

    /// The cost of an error does not depend on the number of ranks that a file names: its list is
    /// short and made at once.
    #[test]
    #[cfg_attr(miri, ignore)]
    fn many_missing_ranks_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        change(dir.path(), |description| {
            description.manifest.layout.world_size = 1_000_000_000_000
        });
        let text = error(dir.path());
        let count = "the files of 999999999999 of 1000000000000 ranks are missing: 1, 2, 3, 4, 5, 6, 7, 8 and 999999999991";
        assert!(text.contains(count), "{text}");
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn changed_document_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        change(dir.path(), |description| {
            description.documents[0] = description.documents[0].replace("0.1", "0.2")
        });
        assert!(error(dir.path()).contains("it has other documents than its manifest"));
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn file_of_another_save_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        change(dir.path(), |description| description.front_crc64 ^= 1);
        assert!(error(dir.path()).contains("its checksums are not those in the description"));
    }
}
