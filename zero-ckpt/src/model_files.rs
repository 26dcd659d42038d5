//! The small files of a model, such as its tokenizer, kept once beside the checkpoints of a run.
//!
//! ```text
//! DIR/model-files/<id>/tokenizer.json ...    with the bytes that they had
//! DIR/step-00000030/model-files.json         the list of their names, lengths and checksums
//! ```
//!
//! With them a folder of checkpoints needs no other folder of the machine that it was made on. The
//! id is a checksum of the list, so that a run never overwrites the files of another model: other
//! files have another folder. A folder gets its name by one rename, when it is whole.
//!
//! ```
//! use zero_ckpt::{ModelFiles, Reader, SaveMeta, ShardData, SingleRank, Store, StoreOptions};
//! # use zero_shard::{Layout, ParamSpec, UnitSpec};
//!
//! # let dir = tempfile::tempdir().unwrap();
//! # let tokenizer = dir.path().join("tokenizer.json");
//! # std::fs::write(&tokenizer, "{}").unwrap();
//! # let layout = Layout::new(&[UnitSpec::new("head", [ParamSpec::new("w", [1])])], 1, 1).unwrap();
//! # let mut shard = ShardData::new(&layout, 0).unwrap();
//! # shard.storage_f32("master", &[1.0]).unwrap();
//! # let saves = dir.path().join("saves");
//! let files = ModelFiles::read([("tokenizer.json".to_owned(), tokenizer)]).unwrap();
//! let store = Store::create(&saves, 0, StoreOptions::default().model_files(files)).unwrap();
//! store.save(&SaveMeta::default(), &shard, &mut SingleRank).unwrap();
//!
//! let kept = Reader::open(&saves).unwrap().model_files().unwrap().unwrap();
//! let folder = kept.folder_in(&saves);
//! assert_eq!(std::fs::read(folder.join("tokenizer.json")).unwrap(), b"{}");
//! ```

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::format::file_layout::checksum;
use crate::format::manifest::{DocumentRecord, short};
use crate::format::names::random;
use crate::io::dir::{Dir, is_plain};
use crate::load::document::read_document;
use crate::{CkptError, Reader, files};

/// The document of a checkpoint that lists the files.
pub const MODEL_FILES_JSON: &str = "model-files.json";

/// The folder of all kept files, beside checkpoints.
pub const MODEL_FILES_FOLDER: &str = "model-files";
/// Prefix of a folder that is not whole.
const PARTIAL: &str = ".partial.";

/// Maximum size of a file. The tokenizer of Gemma 3, with 262,144 tokens, has 33 MB.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// Maximum number of files.
const MAX_FILES: usize = 256;
/// Maximum number of folders in a name, the file included.
const MAX_DEPTH: usize = 3;

/// Files of a model, and where they are now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFiles {
    /// By name.
    files: Vec<ModelFile>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct ModelFile {
    record: DocumentRecord,
    path: PathBuf,
}

/// The content of [`MODEL_FILES_JSON`].
#[derive(Serialize, Deserialize)]
struct List {
    files: Vec<DocumentRecord>,
}

impl ModelFiles {
    /// The files at these paths, by the names that they are to have: plain names, or several with
    /// `/` between them for a file in folders. Reads them, to know their checksums.
    ///
    /// # Errors
    /// A file cannot be read or is longer than 64 MiB, there are more than 256, or a name is not
    /// plain or occurs twice.
    pub fn read(sources: impl IntoIterator<Item = (String, PathBuf)>) -> Result<Self, CkptError> {
        let mut found = Vec::new();
        for (name, path) in sources {
            let content = files::read(&path, MAX_FILE_BYTES);
            let content = content.map_err(CkptError::io("read", &path))?;
            let record = DocumentRecord {
                name,
                bytes: content.len() as u64,
                crc64: checksum(&content),
            };
            found.push(ModelFile { record, path });
        }
        Self::checked(found)
    }

    fn checked(mut files: Vec<ModelFile>) -> Result<Self, CkptError> {
        files.sort_by(|one, other| one.record.name.cmp(&other.record.name));
        let checked = Self { files };
        checked
            .check()
            .map_err(|why| CkptError::argument("files of a model", "plain names", why))?;
        Ok(checked)
    }

    /// Names and paths, by name.
    pub fn files(&self) -> impl Iterator<Item = (&str, &Path)> {
        let files = self.files.iter();
        files.map(|file| (file.record.name.as_str(), file.path.as_path()))
    }

    /// The same files, of which each has the name that `name` returns for its own; those without
    /// are left out.
    ///
    /// # Errors
    /// A name is not plain, or two files have one.
    pub fn renamed(self, name: impl Fn(&str) -> Option<String>) -> Result<Self, CkptError> {
        let named = self.files.into_iter().filter_map(|mut file| {
            file.record.name = name(&file.record.name)?;
            Some(file)
        });
        Self::checked(named.collect())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// The folder in which they are kept beside the checkpoints of `store_dir`.
    pub fn folder_in(&self, store_dir: &Path) -> PathBuf {
        store_dir.join(MODEL_FILES_FOLDER).join(self.id())
    }

    /// The bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.record.bytes).sum()
    }

    /// The content of [`MODEL_FILES_JSON`].
    pub(crate) fn document(&self) -> Value {
        let files = self.files.iter().map(|file| file.record.clone());
        let list = List {
            files: files.collect(),
        };
        // Strings and numbers: serializing does not fail.
        serde_json::to_value(list).unwrap_or_default()
    }

    /// The name of their folder.
    fn id(&self) -> String {
        let line = |file: &ModelFile| {
            let DocumentRecord { name, bytes, crc64 } = &file.record;
            format!("{name} {bytes} {crc64:016x}\n")
        };
        let lines: String = self.files.iter().map(line).collect();
        format!("{:016x}", checksum(lines.as_bytes()))
    }

    /// The files of a checkpoint's list, in `store_dir`.
    fn of_list(list: List, store_dir: &Path) -> Result<Self, String> {
        let mut listed = Self {
            files: Vec::with_capacity(list.files.len()),
        };
        for record in list.files {
            let path = PathBuf::from(&record.name);
            listed.files.push(ModelFile { record, path });
        }
        listed.check()?;

        let folder = listed.folder_in(store_dir);
        for file in &mut listed.files {
            file.path = folder.join(&file.record.name);
        }
        Ok(listed)
    }

    /// Checks names and sizes.
    fn check(&self) -> Result<(), String> {
        if self.files.len() > MAX_FILES {
            return Err(format!("{} files, at most {MAX_FILES}", self.files.len()));
        }
        if !self.files.is_sorted_by_key(|file| &file.record.name) {
            return Err("the names are not in order".to_owned());
        }
        let mut names = BTreeSet::new();
        for DocumentRecord { name, bytes, .. } in self.files.iter().map(|file| &file.record) {
            let parts: Vec<&str> = name.split('/').collect();
            if parts.len() > MAX_DEPTH || !parts.iter().all(|part| is_plain(part)) {
                return Err(format!("{:?} is not a plain name", short(name)));
            }
            if !names.insert(name) {
                return Err(format!("{name:?} occurs twice"));
            }
            if *bytes > MAX_FILE_BYTES {
                return Err(format!(
                    "{name:?} has {bytes} bytes, at most {MAX_FILE_BYTES}"
                ));
            }
        }
        Ok(())
    }

    /// Keeps the files in the directory of checkpoints `dir`, which this process has locked.
    /// Removes what a killed process has left.
    ///
    /// # Errors
    /// A file has changed since it was read, the kept ones are damaged, or a system call failed.
    pub(crate) fn keep(&self, dir: &Dir) -> Result<(), CkptError> {
        let all = dir.create_dir(MODEL_FILES_FOLDER)?;
        let left = all.names()?;
        for name in left.iter().filter(|name| name.starts_with(PARTIAL)) {
            all.remove(name, &AtomicU64::new(0))?;
        }

        let id = self.id();
        if all.has(&id) {
            return self.verify(&all.open_dir(&id)?);
        }
        let partial = format!("{PARTIAL}{}", random());
        let written = self
            .write(&all.create_dir(&partial)?)
            .and_then(|()| all.rename(&partial, &all, &id));
        if let Err(error) = written {
            let _ = all.remove(&partial, &AtomicU64::new(0));
            return Err(error);
        }
        all.sync()?;
        dir.sync()
    }

    /// Copies the files into a new directory.
    ///
    /// # Errors
    /// A file has changed since it was read, or a system call failed.
    pub(crate) fn write(&self, dir: &Dir) -> Result<(), CkptError> {
        for ModelFile { record, path } in &self.files {
            let content = files::read(path, MAX_FILE_BYTES);
            let content = content.map_err(CkptError::io("read", path))?;
            if checksum(&content) != record.crc64 {
                return Err(CkptError::BadFile {
                    path: path.clone(),
                    why: "the file has changed since it was read; start again".into(),
                });
            }
            within(dir, &record.name, Dir::create_dir, &|parent, name| {
                parent.write_new(name, &content)?;
                parent.sync()
            })?;
        }
        dir.sync()
    }

    /// Checks that a directory has the files.
    fn verify(&self, dir: &Dir) -> Result<(), CkptError> {
        for ModelFile { record, .. } in &self.files {
            within(dir, &record.name, Dir::open_dir, &|parent, name| {
                let record = DocumentRecord {
                    name: name.to_owned(),
                    ..record.clone()
                };
                read_document(parent, &record).map(drop)
            })?;
        }
        Ok(())
    }
}

/// Calls `done` with the directory of the file `name` below `dir`, which `open` opens, and the
/// file's plain name.
fn within(
    dir: &Dir,
    name: &str,
    open: fn(&Dir, &str) -> Result<Dir, CkptError>,
    done: &dyn Fn(&Dir, &str) -> Result<(), CkptError>,
) -> Result<(), CkptError> {
    match name.split_once('/') {
        None => done(dir, name),
        Some((folder, rest)) => within(&open(dir, folder)?, rest, open, done),
    }
}

impl Reader {
    /// The files of the model that are kept beside the checkpoint, of which every byte was
    /// compared; `None` if it lists none.
    ///
    /// # Errors
    /// [`CkptError::NoModelFiles`] if the folder is not there, such as for a checkpoint that was
    /// copied alone; a file is missing or damaged, or a failed read.
    pub fn model_files(&self) -> Result<Option<ModelFiles>, CkptError> {
        self.model_files_in(&self.store_dir()?)
    }

    /// The files of the model that are kept in a directory of checkpoints; see
    /// [`Reader::model_files`].
    pub(crate) fn model_files_in(&self, store_dir: &Path) -> Result<Option<ModelFiles>, CkptError> {
        let Some(document) = self.document(MODEL_FILES_JSON)? else {
            return Ok(None);
        };
        let bad = |why: String| CkptError::BadFile {
            path: self.path().join(MODEL_FILES_JSON),
            why,
        };
        let list: List = serde_json::from_value(document).map_err(|e| bad(e.to_string()))?;
        let listed = ModelFiles::of_list(list, store_dir).map_err(bad)?;
        let dir = Dir::open(store_dir)?
            .open_dir(MODEL_FILES_FOLDER)
            .and_then(|all| all.open_dir(&listed.id()));
        match dir {
            Ok(dir) => listed.verify(&dir).map(|()| Some(listed)),
            Err(CkptError::Io { error, .. }) if error.kind() == ErrorKind::NotFound => {
                Err(CkptError::NoModelFiles {
                    path: listed.folder_in(store_dir),
                })
            }
            Err(error) => Err(error),
        }
    }
}
