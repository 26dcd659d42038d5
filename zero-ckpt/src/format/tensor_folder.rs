//! A folder of safetensors files in Hugging Face's layout: one file, or several files and an index.
//!
//! The user chooses the folder, so symbolic links in it are followed (Hugging Face's cache consists
//! of links). Names in the index are untrusted and must be plain file names.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::format::header::{Header, TensorEntry};
use crate::format::manifest::{MAX_MANIFEST_BYTES, short};
use crate::io::dir::is_plain;
use crate::{CkptError, StateDtype, files};

/// Name of a file that holds all tensors.
pub(crate) const SINGLE: &str = "model.safetensors";
/// Name of the index of several files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// Bytes of a tensor that are converted at a time.
const CHUNK_BYTES: usize = 1 << 18;

/// The index of several files.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Index {
    /// `total_size`: bytes of all tensors.
    #[serde(default)]
    pub(crate) metadata: BTreeMap<String, serde_json::Value>,
    /// The file of each tensor.
    pub(crate) weight_map: BTreeMap<String, String>,
}

struct TensorFile {
    path: PathBuf,
    file: File,
    data_start: u64,
}

/// The tensors of an open folder of safetensors files. Only headers are held in memory.
pub struct TensorFolder {
    path: PathBuf,
    files: Vec<TensorFile>,
    /// By name: the file, and the entry in its header.
    tensors: BTreeMap<String, (usize, TensorEntry)>,
}

impl TensorFolder {
    /// Opens `path`: a folder with `model.safetensors` or else `model.safetensors.index.json`, or
    /// one file. Checks all headers.
    ///
    /// # Errors
    /// A file is missing or invalid, or the index names a file that does not hold its tensor.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CkptError> {
        let path = path.as_ref();
        let single = path.join(SINGLE);
        let index = path.join(INDEX);
        let is_folder = path.is_dir();
        let has_index = is_folder && is_present(&index)?;
        if has_index {
            // Also one that is not needed: what is there must be readable.
            files::open_content(&index).map_err(CkptError::io("open", &index))?;
        }
        let only = if !is_folder {
            Some(path.to_path_buf())
        } else if !has_index || is_present(&single)? {
            Some(single)
        } else {
            None
        };
        if let Some(path) = only {
            let mut folder = Self {
                path: path.clone(),
                files: Vec::new(),
                tensors: BTreeMap::new(),
            };
            return folder.add(path, |_| true).map(|()| folder);
        }

        let map = read_json::<Index>(&index)?.weight_map;
        let bad = |why: String| CkptError::BadFile {
            path: index.clone(),
            why,
        };

        let mut folder = Self {
            path: index.clone(),
            files: Vec::new(),
            tensors: BTreeMap::new(),
        };

        let mut file_of = HashMap::new();
        for name in map.values() {
            if !is_plain(name) {
                return Err(bad(format!(
                    "invalid index: {:?} is not a plain file name",
                    short(name)
                )));
            }
            if !file_of.contains_key(name) {
                file_of.insert(name, folder.files.len());
                folder.add(path.join(name), |tensor| {
                    map.get(tensor).is_some_and(|file| file == name)
                })?;
            }
        }

        let misplaced = map.iter().find(|(tensor, file)| {
            folder
                .tensors
                .get(*tensor)
                .is_none_or(|t| t.0 != file_of[file])
        });

        if let Some((tensor, file)) = misplaced {
            return Err(bad(format!(
                "invalid index: tensor {:?} is not in {file}",
                short(tensor)
            )));
        }

        Ok(folder)
    }

    /// Opens a file, checks its header and adds the tensors for which `listed` is true.
    fn add(&mut self, path: PathBuf, listed: impl Fn(&str) -> bool) -> Result<(), CkptError> {
        let bad = |why: String| CkptError::BadSafetensors {
            path: path.clone(),
            why,
        };

        let io = |action| CkptError::io(action, &path);
        let (file, bytes) = files::open_content(&path).map_err(io("open"))?;
        if bytes < 8 {
            return Err(bad(format!(
                "it has {bytes} bytes, the length field alone has 8"
            )));
        }

        let mut first = [0; 8];
        file.read_exact_at(&mut first, 0).map_err(io("read"))?;
        let mut json = vec![0; Header::json_bytes(first, bytes).map_err(bad)? as usize];
        file.read_exact_at(&mut json, 8).map_err(io("read"))?;
        let Header {
            tensors,
            data_start,
            ..
        } = Header::parse(&json, bytes).map_err(bad)?;

        let listed = tensors.into_iter().filter(|tensor| listed(&tensor.name));
        self.tensors
            .extend(listed.map(|tensor| (tensor.name.clone(), (self.files.len(), tensor))));
        self.files.push(TensorFile {
            path,
            file,
            data_start,
        });

        Ok(())
    }

    /// The files with tensors.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// The file that lists the tensors: the index, or the only file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorEntry> {
        self.tensors.values().map(|(_, tensor)| tensor)
    }

    /// A tensor and the path of its file; `None` if there is no such tensor.
    pub fn tensor(&self, name: &str) -> Option<(&TensorEntry, &Path)> {
        self.tensors
            .get(name)
            .map(|(file, tensor)| (tensor, self.files[*file].path.as_path()))
    }

    fn find(&self, name: &str) -> Result<(&TensorFile, &TensorEntry), CkptError> {
        let found = self.tensors.get(name);
        let (file, tensor) =
            found.ok_or_else(|| CkptError::argument("tensor", "one of the folder", name))?;
        Ok((&self.files[*file], tensor))
    }

    /// Reads elements `range` of tensor `name` (row-major, flat) as fp32: exactly, and F64 rounded
    /// to nearest.
    ///
    /// # Errors
    /// No such tensor, a dtype other than F32, BF16, F16 and F64, a range outside the tensor, a
    /// wrong length of `out`, a finite number beyond fp32's range, or a failed read.
    pub fn read(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<(), CkptError> {
        let (file, tensor) = self.find(name)?;
        let elements = Elements::of(&tensor.dtype).ok_or_else(|| {
            CkptError::argument(format!("dtype of {name:?}"), SUPPORTED, &tensor.dtype)
        })?;

        check_range(name, tensor.elems(), &range, out.len())?;

        let element_bytes = elements.bytes() as usize;
        let chunk_elems = CHUNK_BYTES / element_bytes;
        let mut buffer = vec![0; out.len().min(chunk_elems) * element_bytes];
        let mut first = range.start;
        for out in out.chunks_mut(chunk_elems) {
            let bytes = &mut buffer[..out.len() * element_bytes];
            let at = file.data_start + tensor.range.start + first * element_bytes as u64;
            let read = file.file.read_exact_at(bytes, at);
            read.map_err(CkptError::io("read", &file.path))?;

            if let Err(overflow) = elements.to_f32(bytes, out) {
                let at = first + overflow.at as u64;
                return Err(CkptError::BadFile {
                    path: file.path.clone(),
                    why: format!(
                        "tensor {name:?} has {:e} at element {at}, beyond the range of fp32",
                        overflow.value
                    ),
                });
            }
            first += out.len() as u64;
        }
        Ok(())
    }

    /// Reads elements `range` of tensor `name`, whose dtype is U8.
    ///
    /// # Errors
    /// As [`Self::read`], but for the dtype.
    pub fn read_bytes(
        &self,
        name: &str,
        range: Range<u64>,
        out: &mut [u8],
    ) -> Result<(), CkptError> {
        let (file, tensor) = self.find(name)?;
        if tensor.dtype != "U8" {
            let what = format!("dtype of {name:?}");
            return Err(CkptError::argument(what, "U8", &tensor.dtype));
        }
        check_range(name, tensor.elems(), &range, out.len())?;
        let at = file.data_start + tensor.range.start + range.start;
        let read = file.file.read_exact_at(out, at);
        read.map_err(CkptError::io("read", &file.path))
    }
}

/// The dtypes that [`TensorFolder::read`] converts.
pub(crate) const SUPPORTED: &str = "F32, BF16, F16 or F64";

/// How the elements of a tensor are stored.
#[derive(Clone, Copy)]
enum Elements {
    /// In a type that checkpoints have, too.
    Narrow(StateDtype),
    F64,
}

/// A finite fp64 number that is infinite in fp32.
struct Overflow {
    at: usize,
    value: f64,
}

impl Elements {
    /// Those of a dtype in a header.
    fn of(dtype: &str) -> Option<Self> {
        match dtype {
            "F64" => Some(Self::F64),
            other => StateDtype::from_name(other).map(Self::Narrow),
        }
    }

    fn bytes(self) -> u64 {
        match self {
            Self::Narrow(dtype) => dtype.bytes(),
            Self::F64 => 8,
        }
    }

    fn to_f32(self, bytes: &[u8], out: &mut [f32]) -> Result<(), Overflow> {
        match self {
            Self::Narrow(dtype) => {
                dtype.widen(bytes, out);
                Ok(())
            }
            Self::F64 => {
                for (at, (out, bytes)) in out.iter_mut().zip(bytes.as_chunks().0).enumerate() {
                    let value = f64::from_le_bytes(*bytes);
                    *out = value as f32;
                    if out.is_infinite() && value.is_finite() {
                        return Err(Overflow { at, value });
                    }
                }
                Ok(())
            }
        }
    }
}

impl TensorEntry {
    /// Whether [`TensorFolder::read`] converts elements of its dtype to fp32.
    pub fn is_readable(&self) -> bool {
        Elements::of(&self.dtype).is_some()
    }
}

/// Checks that `range` is within `numel` elements and that `out`, the buffer's length, is its
/// length.
pub(crate) fn check_range(
    name: &str,
    numel: u64,
    range: &Range<u64>,
    out: usize,
) -> Result<(), CkptError> {
    if range.start > range.end || range.end > numel {
        let what = format!("range of {name:?}");
        let got = format!("{}..{}", range.start, range.end);
        return Err(CkptError::argument(what, format!("within 0..{numel}"), got));
    }
    if out as u64 != range.end - range.start {
        return Err(CkptError::argument(
            format!("buffer length for {name:?}"),
            range.end - range.start,
            out,
        ));
    }
    Ok(())
}

/// Whether there is an entry at `path`.
fn is_present(path: &Path) -> Result<bool, CkptError> {
    files::is_present(path).map_err(CkptError::io("examine", path))
}

/// Reads a JSON file of bounded size.
pub(crate) fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T, CkptError> {
    let text = files::read(path, MAX_MANIFEST_BYTES).map_err(CkptError::io("read", path))?;
    parse_json(path, &text)
}

/// Reads a JSON file of bounded size; `None` if there is no entry of that name.
pub(crate) fn read_json_if_present<T: for<'de> Deserialize<'de>>(
    path: &Path,
) -> Result<Option<T>, CkptError> {
    let text = files::read_if_present(path, MAX_MANIFEST_BYTES);
    let text = text.map_err(CkptError::io("read", path))?;
    text.map(|text| parse_json(path, &text)).transpose()
}

fn parse_json<T: for<'de> Deserialize<'de>>(path: &Path, text: &[u8]) -> Result<T, CkptError> {
    serde_json::from_slice(text).map_err(|e| CkptError::BadFile {
        path: path.into(),
        why: format!("invalid JSON: {e}"),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    /// A device has no end, and nobody writes to the pipe.
    #[test]
    fn only_regular_files_are_opened() {
        for (name, kind, expected) in [
            (SINGLE, "pipe", "not a regular file"),
            (SINGLE, "device", "not a regular file"),
            (SINGLE, "dangling", "does not exist here"),
            (SINGLE, "folder", "a folder"),
            (INDEX, "pipe", "not a regular file"),
            (INDEX, "device", "not a regular file"),
            (INDEX, "dangling", "does not exist here"),
            (INDEX, "folder", "a folder"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join(name);
            match kind {
                "pipe" => mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap(),
                "device" => symlink("/dev/zero", &path).unwrap(),
                "dangling" => symlink("gone", &path).unwrap(),
                _ => fs::create_dir(&path).unwrap(),
            }
            let paths = [dir.path(), &path];
            let all = if name == SINGLE && kind != "folder" {
                &paths[..]
            } else {
                &paths[..1]
            };
            for opened in all {
                let error = TensorFolder::open(opened).err().unwrap().to_string();
                assert!(error.contains(expected), "{name} {kind}: {error}");
                assert!(error.contains(name), "{name} {kind}: {error}");
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let error = TensorFolder::open(dir.path()).err().unwrap().to_string();
        assert!(error.contains(SINGLE), "{error}");
    }

    /// A folder with one F64 tensor of these values.
    fn fp64(values: &[f64]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let header = Header {
            metadata: BTreeMap::new(),
            tensors: vec![TensorEntry {
                name: "w".to_owned(),
                dtype: "F64".to_owned(),
                shape: vec![values.len() as u64],
                range: 0..8 * values.len() as u64,
            }],
            data_start: 0,
        };
        let mut bytes = header.encode(8, 0);
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        fs::write(dir.path().join(SINGLE), bytes).unwrap();
        dir
    }

    #[test]
    fn fp64_is_rounded_to_nearest() {
        // The middle of two fp32 numbers goes to the even one.
        let ulp = f64::from(f32::EPSILON);
        let values = [
            0.1,
            -0.0,
            1.0 + 0.5 * ulp,
            1.0 + 1.5 * ulp,
            1e-60,
            f64::from(f32::MAX),
        ];
        let folder = TensorFolder::open(fp64(&values).path()).unwrap();
        let mut got = [9.0; 6];
        folder.read("w", 0..6, &mut got).unwrap();
        let want = [0.1, -0.0, 1.0, 1.0 + 2.0 * f32::EPSILON, 0.0, f32::MAX];
        assert_eq!(got.map(f32::to_bits), want.map(f32::to_bits));

        let mut part = [9.0; 2];
        folder.read("w", 3..5, &mut part).unwrap();
        assert_eq!(part, want[3..5]);
    }

    #[test]
    fn fp64_beyond_fp32_is_an_error() {
        // In the second chunk of a read, too.
        let chunk = CHUNK_BYTES / 8;
        for (at, value) in [(1, 3.5e38), (chunk + 2, -1e300)] {
            let mut values = vec![1.0; at + 3];
            values[at] = value;
            let dir = fp64(&values);
            let folder = TensorFolder::open(dir.path()).unwrap();
            let mut out = vec![0.0; at + 2];
            let error = folder.read("w", 1..at as u64 + 3, &mut out).unwrap_err();
            let expected = format!("tensor \"w\" has {value:e} at element {at}, beyond");
            assert!(error.to_string().contains(&expected), "{error}");
        }
        // Those that were infinite remain so.
        let folder = fp64(&[f64::INFINITY, f64::NAN]);
        let folder = TensorFolder::open(folder.path()).unwrap();
        let mut out = [0.0; 2];
        folder.read("w", 0..2, &mut out).unwrap();
        assert!(out[0].is_infinite() && out[1].is_nan());
    }

    #[test]
    fn lfs_pointers_are_named() {
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
        for name in [SINGLE, INDEX] {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join(name), pointer).unwrap();
            let error = TensorFolder::open(dir.path()).err().unwrap().to_string();
            assert!(error.contains(name), "{error}");
            assert!(error.contains("`git lfs pull`"), "{error}");
        }
    }
}
