//! Writing a model folder that Hugging Face transformers reads.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use serde_json::{Map, Value, json};
use zero_alloc::device::DType;

use super::{HfError, write_error};
use crate::model::config::GptConfig;

/// Elements that are converted at a time.
const CHUNK_ELEMS: usize = 1 << 16;

/// Writes a model folder, a parameter or a part of one at a time, in any order of parameters.
///
/// Nothing is in place before [`finish`](Self::finish): values go to a temporary file in the folder, which
/// is flushed to disk and then renamed to `model.safetensors`. A writer that is dropped removes it.
#[must_use = "the folder is complete only after `finish`"]
pub struct FolderWriter {
    dir: PathBuf,
    temporary: PathBuf,
    config: GptConfig,
    dtype: DType,
    file: File,
    slots: HashMap<String, Slot>,
    finished: bool,
}

/// Where a parameter's values go, and how many are there.
struct Slot {
    at_bytes: u64,
    numel_elems: u64,
    written_elems: u64,
}

impl FolderWriter {
    /// Starts a folder (made where it is missing) for weights stored as `dtype`: F32, F16 or Bf16.
    ///
    /// # Errors
    /// Another type, a model that is not valid, or a folder that cannot be written.
    pub fn create(dir: &Path, config: &GptConfig, dtype: DType) -> Result<Self, HfError> {
        let stored = match dtype {
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::Bf16 => "BF16",
            got => return Err(HfError::WriteType { got }),
        };
        config.validate().map_err(|source| HfError::Config { path: dir.join("config.json"), source })?;
        fs::create_dir_all(dir).map_err(write_error(dir))?;
        let temporary = dir.join(format!(".model.safetensors.{}.tmp", std::process::id()));
        let file = File::create(&temporary).map_err(write_error(&temporary))?;
        let mut writer = Self {
            dir: dir.to_owned(),
            temporary,
            config: config.clone(),
            dtype,
            file,
            slots: HashMap::new(),
            finished: false,
        };
        writer.write_header(stored)?;
        Ok(writer)
    }

    fn write_header(&mut self, stored: &str) -> Result<(), HfError> {
        let mut header = Map::new();
        // transformers refuses a file that does not say that it is PyTorch's.
        header.insert("__metadata__".into(), json!({ "format": "pt" }));
        let mut end = 0;
        for param in self.config.units().into_iter().flat_map(|u| u.params) {
            let numel_elems = param.shape.iter().product();
            let start = end;
            end += numel_elems * self.dtype.size_bytes() as u64;
            header.insert(
                param.name.clone(),
                json!({ "dtype": stored, "shape": param.shape, "data_offsets": [start, end] }),
            );
            self.slots.insert(param.name, Slot { at_bytes: start, numel_elems, written_elems: 0 });
        }
        let mut text = Value::Object(header).to_string();
        // The format asks that values start at a multiple of 8 bytes.
        text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
        let data_start = 8 + text.len() as u64;
        self.slots.values_mut().for_each(|slot| slot.at_bytes += data_start);
        let path = &self.temporary;
        self.file.write_all(&(text.len() as u64).to_le_bytes()).map_err(write_error(path))?;
        self.file.write_all(text.as_bytes()).map_err(write_error(path))
    }

    /// Appends `values` to parameter `name`.
    ///
    /// # Errors
    /// A name that the model has not, more values than it has elements, or a failed write.
    pub fn write(&mut self, name: &str, values: &[f32]) -> Result<(), HfError> {
        let slot = self.slots.get_mut(name).ok_or_else(|| HfError::UnknownParameter { name: name.to_owned() })?;
        let got = values.len() as u64;
        if got > slot.numel_elems - slot.written_elems {
            let (name, numel) = (name.to_owned(), slot.numel_elems);
            return Err(HfError::TooManyValues { name, numel, got: slot.written_elems + got });
        }
        let width = self.dtype.size_bytes();
        let mut buffer = Vec::with_capacity(values.len().min(CHUNK_ELEMS) * width);
        for chunk in values.chunks(CHUNK_ELEMS) {
            buffer.clear();
            match self.dtype {
                DType::F16 => buffer.extend(chunk.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes())),
                DType::Bf16 => buffer.extend(chunk.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes())),
                _ => buffer.extend(chunk.iter().flat_map(|x| x.to_le_bytes())),
            }
            let at = slot.at_bytes + slot.written_elems * width as u64;
            self.file.write_all_at(&buffer, at).map_err(write_error(&self.temporary))?;
            slot.written_elems += chunk.len() as u64;
        }
        Ok(())
    }

    /// Puts the folder in place: the weights and `config.json`.
    ///
    /// # Errors
    /// A parameter that lacks values, or a failed write; the folder then is as it was.
    pub fn finish(mut self) -> Result<(), HfError> {
        for name in self.config.units().into_iter().flat_map(|u| u.params).map(|p| p.name) {
            let slot = &self.slots[&name];
            if slot.written_elems != slot.numel_elems {
                return Err(HfError::Incomplete { name, numel: slot.numel_elems, got: slot.written_elems });
            }
        }
        self.file.sync_all().map_err(write_error(&self.temporary))?;
        let dtype = match self.dtype {
            DType::F16 => "float16",
            DType::Bf16 => "bfloat16",
            _ => "float32",
        };
        let config = self.dir.join("config.json");
        let config_temporary = self.temporary.with_extension("json.tmp");
        replace(&config_temporary, self.config.to_hf_json(dtype).as_bytes(), &config)
            .map_err(write_error(&config))?;
        let weights = self.dir.join("model.safetensors");
        fs::rename(&self.temporary, &weights).map_err(write_error(&weights))?;
        self.finished = true;
        File::open(&self.dir).and_then(|dir| dir.sync_all()).map_err(write_error(&self.dir))
    }
}

impl Drop for FolderWriter {
    fn drop(&mut self) {
        if !self.finished {
            // Nothing more can be done about a file that cannot be removed.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Writes a file under a temporary name, flushes it and gives it its name.
fn replace(temporary: &Path, bytes: &[u8], path: &Path) -> io::Result<()> {
    let written = File::create(temporary).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.and_then(|()| fs::rename(temporary, path)).inspect_err(|_| {
        let _ = fs::remove_file(temporary);
    })
}

/// Writes a whole model folder from parameters in any order: `(name, values)`.
///
/// # Errors
/// As [`FolderWriter`]'s, and whatever error an item is.
pub fn write_folder<V: AsRef<[f32]>, E: From<HfError>>(
    dir: &Path,
    config: &GptConfig,
    dtype: DType,
    params: impl IntoIterator<Item = Result<(String, V), E>>,
) -> Result<(), E> {
    let mut writer = FolderWriter::create(dir, config, dtype)?;
    for param in params {
        let (name, values) = param?;
        writer.write(&name, values.as_ref())?;
    }
    Ok(writer.finish()?)
}
