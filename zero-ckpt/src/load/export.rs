//! Export: streams a checkpoint to safetensors files in Hugging Face's layout.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::Value;
use zero_shard::ParamSpec;

use crate::format::header::{Header, TensorEntry};
use crate::format::names::random;
use crate::format::tensor_folder::{INDEX, Index, SINGLE};
use crate::io::dir::Dir;
use crate::{CkptError, ModelFiles, Reader, StateDtype};

/// Elements converted at a time.
const CHUNK_ELEMS: u64 = 1 << 20;

/// File of the model's configuration.
const CONFIG: &str = "config.json";

/// Files of adapters and of their configuration, as Hugging Face's PEFT names them.
const ADAPTERS: [&str; 2] = ["adapter_model.safetensors", "adapter_config.json"];

/// Reads elements of a tensor.
pub type ReadTensor<'a> = dyn Fn(&str, Range<u64>, &mut [f32]) -> Result<(), CkptError> + 'a;

/// Options of [`Reader::export`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ExportOptions {
    /// The state to export: `master` for the weights.
    pub state: String,
    /// Element type of the files; rounds to nearest even.
    pub dtype: StateDtype,
    /// Maximum bytes of tensors in a file; a larger tensor gets a separate file.
    pub max_file_bytes: u64,
    /// The content of `config.json`; `None` for the checkpoint's.
    pub model_config: Option<Value>,
    /// Other files of the model.
    pub model_files: Option<ModelFiles>,
    /// Whether the tensors are adapters: in one file, with the names of PEFT's files.
    pub are_adapters: bool,
}

impl Default for ExportOptions {
    /// The weights in fp32, in files of at most 5 GB as in Hugging Face's layout.
    fn default() -> Self {
        Self {
            state: "master".into(),
            dtype: StateDtype::F32,
            max_file_bytes: 5_000_000_000,
            model_config: None,
            model_files: None,
            are_adapters: false,
        }
    }
}

zero_shard::setters!(ExportOptions {
    state: String,
    dtype: StateDtype,
    model_config: impl Into<Option<Value>>,
    model_files: impl Into<Option<ModelFiles>>,
    max_file_bytes: u64,
    are_adapters: bool,
});

/// The result of [`Reader::export`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportReport {
    /// The files, in the order of the model's parameters.
    pub files: Vec<PathBuf>,
    /// Number of tensors.
    pub tensors: usize,
    /// Bytes of tensors.
    pub tensor_bytes: u64,
}

impl Reader {
    /// Writes the parameters of one state to `out`, a new or empty directory: `model.safetensors`,
    /// or several files and `model.safetensors.index.json`; `config.json` if the checkpoint has
    /// one; and the other files of the model. Verifies every byte; uses about 20 MiB of memory for
    /// any model. Unfinished files are in a separate directory, `out` + `.partial.` + random digits
    /// (inside `out` if that exists), which is removed on failure.
    ///
    /// # Errors
    /// No such state, `out` is not empty, the checkpoint is damaged, or a system call failed.
    pub fn export(
        &self,
        out: impl AsRef<Path>,
        options: &ExportOptions,
    ) -> Result<ExportReport, CkptError> {
        self.state(&options.state)?;
        let tensors = self.params();
        let tensors = tensors.map(|param| ParamSpec::new(&param.name, param.shape.clone()));
        let mut options = options.clone();
        let config = &self.manifest().model_config;
        options.model_config.get_or_insert_with(|| config.clone());
        let read =
            |name: &str, range, out: &mut [f32]| self.read_param(&options.state, name, range, out);
        export(out.as_ref(), &tensors.collect::<Vec<_>>(), &read, &options)
    }
}

/// [`Reader::export`] of tensors of any source, which `read` reads. The state is that of the source.
///
/// # Errors
/// As [`Reader::export`], or those of `read`.
pub fn export(
    out: &Path,
    tensors: &[ParamSpec],
    read: &ReadTensor<'_>,
    options: &ExportOptions,
) -> Result<ExportReport, CkptError> {
    if out.exists() && !std::fs::read_dir(out).is_ok_and(|mut d| d.next().is_none()) {
        let what = format!("{}", out.display());
        return Err(CkptError::argument(
            what,
            "a new or empty directory",
            "an existing file or a directory with content",
        ));
    }
    // Removes a trailing separator, after which the partial directory would be inside `out`.
    let out: &Path = &out.components().collect::<PathBuf>();
    let partial = Partial::create(out)?;
    let export = Export {
        tensors,
        read,
        options,
    };
    let mut exported = export.export_files(&partial.path)?;
    partial.publish(out)?;
    exported.files.iter_mut().for_each(|f| *f = out.join(&*f));
    Ok(exported)
}

/// An export that has begun.
struct Export<'a> {
    tensors: &'a [ParamSpec],
    read: &'a ReadTensor<'a>,
    options: &'a ExportOptions,
}

impl Export<'_> {
    fn export_files(&self, dir: &Path) -> Result<ExportReport, CkptError> {
        let options = self.options;
        let [single, config_file] = match options.are_adapters {
            true => ADAPTERS,
            false => [SINGLE, CONFIG],
        };
        let groups = self.groups()?;
        let mut files = Vec::new();
        let mut map = BTreeMap::new();
        let mut total = 0;

        for (i, group) in groups.iter().enumerate() {
            let name = match groups.len() {
                1 => single.to_string(),
                n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
            };
            self.export_file(&dir.join(&name), group)?;
            total += group.last().map_or(0, |t| t.range.end);
            map.extend(group.iter().map(|t| (t.name.clone(), name.clone())));
            files.push(PathBuf::from(name));
        }

        let tensors = map.len();
        if files.len() > 1 {
            let metadata = BTreeMap::from([("total_size".to_string(), Value::from(total))]);
            write_json(
                &dir.join(INDEX),
                &Index {
                    metadata,
                    weight_map: map,
                },
            )?;
        }

        if let Some(files) = &options.model_files {
            files.write(&Dir::open(dir)?)?;
        }
        let config = options.model_config.as_ref();
        if let Some(config) = config.filter(|config| !config.is_null()) {
            write_json(&dir.join(config_file), config)?;
        }
        Ok(ExportReport {
            files,
            tensors,
            tensor_bytes: total,
        })
    }

    /// Distributes the tensors to files.
    fn groups(&self) -> Result<Vec<Vec<TensorEntry>>, CkptError> {
        let options = self.options;
        let most = match options.are_adapters {
            true => u64::MAX,
            false => options.max_file_bytes,
        };
        let mut groups = vec![Vec::new()];
        let mut end = 0u64;
        for param in self.tensors {
            let elems = param
                .numel_elems()
                .map_err(|e| CkptError::NotStorable { why: e.to_string() })?;
            let bytes = elems.saturating_mul(options.dtype.bytes());
            if end > 0 && end.saturating_add(bytes) > most {
                groups.push(Vec::new());
                end = 0;
            }
            let start = end;
            end = end.saturating_add(bytes);
            if let Some(group) = groups.last_mut() {
                group.push(TensorEntry {
                    name: param.name.clone(),
                    dtype: options.dtype.name().into(),
                    shape: param.shape.clone(),
                    range: start..end,
                });
            }
        }
        Ok(groups)
    }

    fn export_file(&self, path: &Path, tensors: &[TensorEntry]) -> Result<(), CkptError> {
        let options = self.options;
        let io = || CkptError::io("write", path);
        let mut file = File::create_new(path).map_err(io())?;
        // Hugging Face's library rejects files without this entry.
        let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
        let header = Header {
            metadata,
            tensors: tensors.to_vec(),
            data_start: 0,
        };

        file.write_all(&header.encode(8, 0)).map_err(io())?;
        let largest = tensors
            .iter()
            .map(TensorEntry::elems)
            .max()
            .unwrap_or(0)
            .min(CHUNK_ELEMS);
        let mut values = vec![0.0; largest as usize];
        let mut bytes = vec![0; values.len() * options.dtype.bytes() as usize];

        for tensor in tensors {
            let elems = tensor.elems();
            let mut start = 0;
            while start < elems {
                let end = elems.min(start + CHUNK_ELEMS);
                let values = &mut values[..(end - start) as usize];
                (self.read)(&tensor.name, start..end, values)?;
                let bytes = &mut bytes[..values.len() * options.dtype.bytes() as usize];
                options.dtype.narrow(values, bytes);
                file.write_all(bytes).map_err(io())?;
                start = end;
            }
        }

        file.sync_all().map_err(io())
    }
}

/// A directory of unfinished files. It is renamed to `out`, or its files are moved into `out`; it
/// is removed when dropped.
struct Partial {
    path: PathBuf,
    /// `out` exists, possibly as a link or a mount, so it stays and the files are moved into it.
    inside: bool,
}

impl Partial {
    fn create(out: &Path) -> Result<Self, CkptError> {
        let inside = out.is_dir();
        let mut path = if inside {
            out.join("")
        } else {
            out.to_path_buf()
        }
        .into_os_string();
        path.push(format!(".partial.{}", random()));
        let path = PathBuf::from(path);
        let create = || {
            path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
            // Must be new: `drop` removes it with its contents.
            std::fs::create_dir(&path)
        };
        create().map_err(CkptError::io("create", &path))?;
        Ok(Self { path, inside })
    }

    /// Moves the files into place and syncs the directories, so that a crash afterwards loses
    /// nothing.
    fn publish(&self, out: &Path) -> Result<(), CkptError> {
        let failed = || CkptError::io("move into place", out);
        if !self.inside {
            Dir::open(&self.path)?.sync()?;
            std::fs::rename(&self.path, out).map_err(failed())?;
            let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty());
            return Dir::open(parent.unwrap_or(Path::new(".")))?.sync();
        }

        let dir = Dir::open(out)?;
        let names = std::fs::read_dir(&self.path).and_then(|entries| {
            entries
                .map(|entry| entry.map(|entry| entry.file_name()))
                .collect::<Result<Vec<_>, _>>()
        });

        let names = names.map_err(failed())?;
        // `config.json` is last: with it, other programs accept the folder as a model.
        let (config, others): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| name == CONFIG);
        for names in [others, config] {
            for name in names {
                std::fs::rename(self.path.join(&name), out.join(&name)).map_err(failed())?;
            }
            dir.sync()?;
        }

        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

fn write_json(path: &Path, value: &impl serde::Serialize) -> Result<(), CkptError> {
    let mut text = serde_json::to_vec_pretty(value).map_err(|e| CkptError::BadFile {
        path: path.into(),
        why: e.to_string(),
    })?;
    text.push(b'\n');
    let write = || {
        let mut file = File::create_new(path)?;
        file.write_all(&text)?;
        file.sync_all()
    };
    write().map_err(CkptError::io("write", path))
}
