//! Import: creates a checkpoint with weights only from safetensors files in Hugging Face's layout.

use std::io;
use std::path::Path;

use serde_json::Value;
use zero_shard::{Layout, ParamSpec, UnitSpec};

use super::agreement::PublishedCheckpoint;
use crate::format::blocks::shard_pieces;
use crate::format::tensor_folder::{TensorFolder, read_json};
use crate::io::parallel::Source;
use crate::{CkptError, SaveMeta, StateDtype, StateSpec, Store};

/// File of the tokenizer.
const TOKENIZER: &str = "tokenizer.json";

/// Saves the tensors of `from` (see [`TensorFolder::open`]) into `store` as a checkpoint of step 0
/// whose only state is `master`, in fp32. `place` maps a tensor's name to its unit and parameter,
/// or to `None` to omit it; units are in the order in which they first occur, by tensor name.
/// Copies `config.json`, and `tokenizer.json` as a document. Uses a few MiB of memory for any
/// model.
///
/// # Errors
/// A file is missing or invalid, a tensor is not fp32, bf16 or fp16, two parameters have one name,
/// or the save failed.
pub fn import(
    from: impl AsRef<Path>,
    store: &Store,
    place: impl Fn(&str) -> Option<(String, String)>,
) -> Result<PublishedCheckpoint, CkptError> {
    let from = from.as_ref();
    let folder = TensorFolder::open(from)?;
    let bad = |path: &Path, why: String| CkptError::BadSafetensors {
        path: path.into(),
        why,
    };
    let mut units: Vec<(String, Vec<(ParamSpec, &str)>)> = Vec::new();
    for tensor in folder.tensors() {
        let Some((unit, param)) = place(&tensor.name) else {
            continue;
        };
        if StateDtype::from_name(&tensor.dtype).is_none() {
            let why = format!(
                "tensor {:?} has dtype {}; use F32, BF16 or F16",
                tensor.name, tensor.dtype
            );
            return Err(bad(
                folder.tensor(&tensor.name).map_or(from, |(_, path)| path),
                why,
            ));
        }
        let entry = (
            ParamSpec::new(param, tensor.shape.as_slice()),
            tensor.name.as_str(),
        );
        match units.iter_mut().find(|(name, _)| *name == unit) {
            Some((_, params)) => params.push(entry),
            None => units.push((unit, vec![entry])),
        }
    }
    let names: Vec<&str> = units
        .iter()
        .flat_map(|(_, params)| params.iter().map(|(_, name)| *name))
        .collect();
    let specs = units.into_iter().map(|(name, params)| {
        UnitSpec::new(
            name,
            params.into_iter().map(|(spec, _)| spec).collect::<Vec<_>>(),
        )
    });
    let layout = Layout::new(&specs.collect::<Vec<_>>(), 1, 1)
        .map_err(|e| bad(from, format!("unsupported tensors: {e}")))?;
    let params = layout.units().iter().flat_map(|unit| &unit.params);
    let parts = params
        .zip(names)
        .map(|(param, tensor)| (param.global_offset_elems, param.numel_elems, tensor));
    let parts = parts.filter(|part| part.1 > 0).collect();
    let states = vec![StateSpec {
        name: "master".into(),
        dtype: StateDtype::F32,
    }];
    let source = WidenedTensors {
        folder: &folder,
        parts,
        elems: layout.numel_elems(),
    };
    let beside = |name: &str| {
        let path = if from.is_file() {
            from.with_file_name(name)
        } else {
            from.join(name)
        };
        path.exists().then(|| read_json::<Value>(&path)).transpose()
    };
    let model_config = beside("config.json")?.unwrap_or_default();
    let tokenizer = beside(TOKENIZER)?.map(|tokenizer| (TOKENIZER.to_owned(), tokenizer));
    let documents = tokenizer.into_iter().collect();
    let meta = SaveMeta {
        model_config,
        documents,
        ..SaveMeta::default()
    };
    let staged = store.stage_next(
        meta.step,
        &layout,
        states,
        shard_pieces(&layout, 0)?,
        &source,
    );
    store.publish(&meta, &layout, vec![staged])
}

/// The concatenation of tensors as fp32.
struct WidenedTensors<'a> {
    folder: &'a TensorFolder,
    /// Start and length in elements, and the tensor; by ascending start, contiguous, not empty.
    parts: Vec<(u64, u64, &'a str)>,
    elems: u64,
}

impl Source for WidenedTensors<'_> {
    fn len(&self) -> u64 {
        self.elems.saturating_mul(4)
    }

    /// The writer's chunks start and end at element boundaries.
    fn fill(&self, start: u64, out: &mut [u8]) -> io::Result<()> {
        let mut rest: &mut [f32] =
            bytemuck::try_cast_slice_mut(out).map_err(|e| io::Error::other(e.to_string()))?;
        let mut at = start / 4;
        let first = self
            .parts
            .partition_point(|(start, elems, _)| start + elems <= at);
        for (start, elems, tensor) in &self.parts[first..] {
            let n = (rest.len() as u64).min(start + elems - at);
            let (now, later) = std::mem::take(&mut rest).split_at_mut(n as usize);
            self.folder
                .read(tensor, at - start..at - start + n, now)
                .map_err(io::Error::other)?;
            rest = later;
            at += n;
            if rest.is_empty() {
                break;
            }
        }
        Ok(())
    }
}
