//! A folder of safetensors files in the way of Hugging Face: one file, or several and an index.
//!
//! The folder is one that the user names and links in it are followed (Hugging Face's own cache is made of
//! links); names inside the index are not trusted and must be plain file names.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::CkptError;
use crate::dir::is_plain;
use crate::header::{Header, TensorEntry};
use crate::manifest::{MAX_MANIFEST_BYTES, short};

/// Name of a file that holds all tensors.
pub(crate) const SINGLE: &str = "model.safetensors";
/// Name of the index of several files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// The index of several files.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Index {
    /// `total_size`: bytes of all tensors.
    #[serde(default)]
    pub(crate) metadata: BTreeMap<String, serde_json::Value>,
    /// Tensor -> file.
    pub(crate) weight_map: BTreeMap<String, String>,
}

/// The tensors of one safetensors file that is open.
pub(crate) struct TensorFile {
    pub(crate) path: PathBuf,
    pub(crate) header: Header,
    pub(crate) file: File,
}

impl TensorFile {
    /// Opens a file and checks its header.
    pub(crate) fn open(path: PathBuf) -> Result<Self, CkptError> {
        let bad = |why: String| CkptError::BadHeader { path: path.clone(), why };
        let io = |action| CkptError::io(action, &path);
        let file = File::open(&path).map_err(io("open"))?;
        let meta = file.metadata().map_err(io("examine"))?;
        if !meta.is_file() {
            return Err(bad("it is no regular file".into()));
        }
        let mut first = [0; 8];
        if meta.len() < 8 {
            return Err(bad(format!("{} bytes are no safetensors file", meta.len())));
        }
        file.read_exact_at(&mut first, 0).map_err(io("read"))?;
        let mut json = vec![0; Header::json_bytes(first, meta.len()).map_err(bad)? as usize];
        file.read_exact_at(&mut json, 8).map_err(io("read"))?;
        let header = Header::parse(&json, meta.len()).map_err(bad)?;
        Ok(Self { path, header, file })
    }

    /// Reads bytes of the data.
    pub(crate) fn read(&self, start: u64, out: &mut [u8]) -> std::io::Result<()> {
        self.file.read_exact_at(out, self.header.data_start + start)
    }
}

/// The files of a folder, and every tensor with the file that holds it, by name.
pub(crate) type Folder = (Vec<TensorFile>, Vec<(usize, TensorEntry)>);

/// Opens the files of a folder, or one file.
pub(crate) fn open_folder(path: &Path) -> Result<Folder, CkptError> {
    let (files, wanted) = if path.is_file() {
        (vec![TensorFile::open(path.to_path_buf())?], None)
    } else if path.join(INDEX).exists() {
        let index_path = path.join(INDEX);
        let bad = |why: String| CkptError::BadHeader { path: index_path.clone(), why };
        let length = std::fs::metadata(&index_path).map_err(CkptError::io("examine", &index_path))?.len();
        if length > MAX_MANIFEST_BYTES {
            return Err(bad(format!("{length} bytes; at most {MAX_MANIFEST_BYTES} are read")));
        }
        let bytes = std::fs::read(&index_path).map_err(CkptError::io("read", &index_path))?;
        let index: Index = serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))?;
        let mut names: Vec<&String> = index.weight_map.values().collect();
        names.sort();
        names.dedup();
        if let Some(name) = names.iter().find(|n| !is_plain(n)) {
            return Err(bad(format!("file name {:?} is no plain name", short(name))));
        }
        let files = names.iter().map(|n| TensorFile::open(path.join(n))).collect::<Result<Vec<_>, _>>()?;
        (files, Some((index_path, index.weight_map)))
    } else {
        (vec![TensorFile::open(path.join(SINGLE))?], None)
    };
    let mut tensors = BTreeMap::new();
    for (f, file) in files.iter().enumerate() {
        for tensor in &file.header.tensors {
            if tensors.insert(tensor.name.clone(), (f, tensor.clone())).is_some() {
                let why = format!("tensor {:?} is in another file too", short(&tensor.name));
                return Err(CkptError::BadHeader { path: file.path.clone(), why });
            }
        }
    }
    if let Some((path, map)) = wanted
        && let Some(missing) = map.keys().find(|name| !tensors.contains_key(*name))
    {
        return Err(CkptError::BadHeader { path, why: format!("tensor {:?} is in no file", short(missing)) });
    }
    Ok((files, tensors.into_values().collect()))
}
