//! Import: safetensors files as Hugging Face lays them out become a checkpoint that holds weights only.

use std::io;
use std::path::Path;

use zero_shard::{Layout, ParamSpec, UnitSpec};

use crate::manifest::MAX_MANIFEST_BYTES;
use crate::plan::pieces_of;
use crate::report::Published;
use crate::tensors::{TensorFile, open_folder};
use crate::transfer::Source;
use crate::{CkptError, SaveMeta, StateDtype, StateSpec, Store};

/// Bytes of a stored tensor converted at once.
const CHUNK_BYTES: usize = 1 << 20;

/// Saves the tensors of `from` (a folder with `model.safetensors` or an index, or one file) into `store` as a
/// checkpoint of step 0 whose only state is `master`, in fp32. It is loaded by weights-only loading: asking it for
/// a moment is an error. `place` says of a tensor which unit and parameter it becomes, or `None` to leave it
/// out; units come in the order in which they first appear, by name of the tensor. `config.json` goes along.
/// Memory is a few MiB whatever the model.
///
/// # Errors
/// A file is missing or not safetensors, a tensor is not fp32, bf16 or fp16, two tensors have one name, or the
/// store refuses.
pub fn import(
    from: impl AsRef<Path>,
    store: &Store,
    place: impl Fn(&str) -> Option<(String, String)>,
) -> Result<Published, CkptError> {
    let from = from.as_ref();
    let (files, tensors) = open_folder(from)?;
    let mut units: Vec<(String, Vec<(ParamSpec, Part)>)> = Vec::new();
    for (file, tensor) in tensors {
        let Some((unit, param)) = place(&tensor.name) else { continue };
        let bad = |why: String| CkptError::BadHeader { path: files[file].path.clone(), why };
        let dtype = StateDtype::from_name(&tensor.dtype).ok_or_else(|| {
            bad(format!("tensor {:?} has dtype {}; F32, BF16 and F16 can be imported", tensor.name, tensor.dtype))
        })?;
        let part = Part { start: 0, elems: tensor.elems(), dtype, file, offset: tensor.range.start };
        let entry = (ParamSpec::new(param, tensor.shape), part);
        match units.iter_mut().find(|(name, _)| *name == unit) {
            Some((_, params)) => params.push(entry),
            None => units.push((unit, vec![entry])),
        }
    }
    let (mut parts, mut specs, mut end) = (Vec::new(), Vec::new(), 0u64);
    for (name, params) in units {
        let mut of_unit = Vec::new();
        for (spec, mut part) in params {
            part.start = end;
            end = end.saturating_add(part.elems);
            if part.elems > 0 {
                parts.push(part);
            }
            of_unit.push(spec);
        }
        specs.push(UnitSpec::new(name, of_unit));
    }
    let layout = Layout::new(&specs, 1, 1)
        .map_err(|e| CkptError::BadHeader { path: from.into(), why: format!("its tensors: {e}") })?;
    let states = vec![StateSpec { name: "master".into(), dtype: StateDtype::F32 }];
    let source = Widened { files: &files, parts, elems: end };
    let meta = SaveMeta { dtype: "fp32".into(), model_config: config(from)?, ..SaveMeta::default() };
    let receipt = store.stage_source(meta.step, &layout, states, pieces_of(&layout, 0)?, &source);
    store.publish(&meta, &layout, vec![receipt])
}

/// The `config.json` beside the tensors; null where there is none.
fn config(from: &Path) -> Result<serde_json::Value, CkptError> {
    let path = if from.is_file() { from.with_file_name("config.json") } else { from.join("config.json") };
    let Ok(meta) = std::fs::metadata(&path) else { return Ok(serde_json::Value::Null) };
    let bad = |why: String| CkptError::BadManifest { path: path.clone(), why };
    if meta.len() > MAX_MANIFEST_BYTES {
        return Err(bad(format!("{} bytes; at most {MAX_MANIFEST_BYTES} are read", meta.len())));
    }
    let bytes = std::fs::read(&path).map_err(CkptError::io("read", &path))?;
    serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))
}

/// A tensor and its place in the fp32 state.
struct Part {
    /// Where it starts in the state, in elements.
    start: u64,
    elems: u64,
    dtype: StateDtype,
    file: usize,
    /// Where it starts in the data of its file, in bytes.
    offset: u64,
}

/// Tensors of several files and dtypes as one run of fp32.
struct Widened<'a> {
    files: &'a [TensorFile],
    /// By ascending start, without holes, none empty.
    parts: Vec<Part>,
    elems: u64,
}

impl Source for Widened<'_> {
    fn len(&self) -> u64 {
        self.elems.saturating_mul(4)
    }

    /// Chunks of the writer start and end at elements.
    fn fill(&self, start: u64, out: &mut [u8]) -> io::Result<()> {
        let out: &mut [f32] = bytemuck::try_cast_slice_mut(out).map_err(|e| io::Error::other(e.to_string()))?;
        let (mut at, mut rest) = (start / 4, out);
        let first = self.parts.partition_point(|p| p.start + p.elems <= at);
        let mut buffer = Vec::new();
        for part in &self.parts[first..] {
            let width = part.dtype.bytes();
            while !rest.is_empty() && at < part.start + part.elems {
                let left = (part.start + part.elems - at) as usize;
                let n = rest.len().min(left).min(CHUNK_BYTES / width as usize);
                let (now, later) = std::mem::take(&mut rest).split_at_mut(n);
                buffer.resize(n * width as usize, 0);
                self.files[part.file].read(part.offset + (at - part.start) * width, &mut buffer)?;
                part.dtype.widen(&buffer, now);
                rest = later;
                at += n as u64;
            }
        }
        Ok(())
    }
}
