//! The description of a save: what a manifest needs besides the staged files, in a file beside that of rank 0.
//!
//! [`assemble`](crate::assemble) makes the manifest of it that the publication would have written.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use zero_shard::Layout;

use super::agreement::StagedFile;
use super::meta::{encode_documents, manifest_without_files};
use super::staged_name::{Kind, StagedName};
use crate::format::blocks::checksum;
use crate::format::manifest::{MAX_MANIFEST_BYTES, Manifest, check_size, hex64};
use crate::io::dir::Dir;
use crate::{CkptError, SaveMeta, Store};

const FORMAT_NAME: &str = "zero-ckpt staged save";
const VERSION: u64 = 1;

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
        let bad = |e: serde_json::Error| CkptError::BadFile { path: FORMAT_NAME.into(), why: e.to_string() };
        let save = serde_json::to_string(self).and_then(RawValue::from_string).map_err(bad)?;
        let crc64 = checksum(save.get().as_bytes());
        let envelope = Envelope { format: FORMAT_NAME.into(), version: VERSION, crc64, save };
        let bytes = serde_json::to_vec(&envelope).map_err(bad)?;
        check_size("the description of the save", bytes.len() as u64, MAX_MANIFEST_BYTES)?;
        Ok(bytes)
    }

    /// Reads the description `name`, whose name is that of a save of `step`.
    pub(crate) fn read(dir: &Dir, name: &str, step: u64) -> Result<Self, CkptError> {
        let bytes = dir.read_small(name, MAX_MANIFEST_BYTES)?;
        let bad = |why: String| CkptError::BadFile { path: dir.path().join(name), why };
        let envelope: Envelope = serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))?;
        if (envelope.format.as_str(), envelope.version) != (FORMAT_NAME, VERSION) {
            return Err(bad(format!("it is no {FORMAT_NAME} of version {VERSION}")));
        }
        if checksum(envelope.save.get().as_bytes()) != envelope.crc64 {
            return Err(bad("damaged: its content does not match its checksum".into()));
        }
        let description: Self = serde_json::from_str(envelope.save.get()).map_err(|e| bad(e.to_string()))?;
        if description.manifest.step != step {
            return Err(bad(format!("its name has step {step}, its content {}", description.manifest.step)));
        }
        if description.documents.len() != description.manifest.documents.len() {
            return Err(bad("it has other documents than its manifest".into()));
        }
        Ok(description)
    }

    /// The documents by name.
    pub(crate) fn documents(&self) -> Vec<(String, Vec<u8>)> {
        let names = self.manifest.documents.iter().map(|document| document.name.clone());
        names.zip(self.documents.iter().map(|text| text.clone().into_bytes())).collect()
    }
}

impl Store {
    /// On rank 0: writes the description beside the staged file. Removes that file on an error: without a description
    /// nothing can be made of it.
    pub(crate) fn describe(
        &self,
        meta: &SaveMeta,
        layout: &Layout,
        staged: Result<StagedFile, CkptError>,
    ) -> Result<StagedFile, CkptError> {
        match staged {
            Ok(file) if self.rank() == 0 => {
                let described = self.write_description(meta, layout, &file);
                described.inspect_err(|_| drop(self.staging.remove_file(&file.file))).map(|()| file)
            }
            other => other,
        }
    }

    fn write_description(&self, meta: &SaveMeta, layout: &Layout, file: &StagedFile) -> Result<(), CkptError> {
        let documents = encode_documents(meta)?;
        let run = self.options.run.clone();
        let manifest = manifest_without_files(meta, layout, file.states.clone(), run, &documents);
        let documents =
            documents.into_iter().map(|(_, bytes)| String::from_utf8_lossy(&bytes).into_owned()).collect();
        let resumed_runs = self.options.resumed_runs.clone();
        let encoded = Description { manifest, documents, resumed_runs, best: meta.best }.encode()?;
        let name = StagedName { step: file.step, kind: Kind::Description, save: file.save };
        self.staging.write_new(&name.to_string(), &encoded)
    }
}
