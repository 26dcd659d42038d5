//! Import: creates a checkpoint with weights only from safetensors files in Hugging Face's layout.

use std::io;
use std::path::Path;

use serde_json::Value;
use zero_shard::{Layout, ParamSpec, UnitSpec};

use super::records::PublishedCheckpoint;
use crate::format::file_layout::shard_pieces;
use crate::format::tensor_folder::{SUPPORTED, TensorFolder, read_json_if_present};
use crate::io::parallel::ByteSource;
use crate::{CkptError, SaveMeta, StateDtype, StateSpec, Store};

/// Saves the tensors of `from` (see [`TensorFolder::open`]) into `store` as a checkpoint of step 0
/// whose only state is `master`, in fp32. `place` maps a tensor's name to its unit and parameter,
/// or to `None` to omit it; units are in the order in which they first occur, by tensor name.
/// Copies `config.json`; other files of the model are those of
/// [`StoreOptions::model_files`](crate::StoreOptions::model_files). Uses a few MiB of memory for
/// any model.
///
/// # Errors
/// A file is missing or invalid, a tensor is not fp32, bf16, fp16 or fp64, two parameters have one
/// name, or the save failed.
pub fn import(
    from: impl AsRef<Path>,
    store: &Store,
    place: impl Fn(&str) -> Option<(String, String)>,
) -> Result<PublishedCheckpoint, CkptError> {
    let from = from.as_ref();
    let folder = TensorFolder::open(from)?;
    let units = placed(from, &folder, place)?;
    let specs: Vec<UnitSpec> = units
        .iter()
        .map(|(name, params)| {
            let specs: Vec<_> = params.iter().map(|(spec, _)| spec.clone()).collect();
            UnitSpec::new(name.clone(), specs)
        })
        .collect();

    let layout =
        Layout::new(&specs, 1, 1).map_err(|e| bad(from, format!("unsupported tensors: {e}")))?;

    let tensors = units.iter().flat_map(|(_, params)| params);
    let params = layout.units().iter().flat_map(|unit| &unit.params);
    let parts = params
        .zip(tensors)
        .map(|(param, (_, tensor))| (param.global_offset_elems, param.numel_elems, *tensor))
        .filter(|(_, elems, _)| *elems > 0)
        .collect();
    let source = WidenedTensors {
        folder: &folder,
        parts,
        elems: layout.numel_elems(),
    };

    let states = vec![StateSpec::new("master", StateDtype::F32)];

    let model_config = json_beside(from, "config.json")?.unwrap_or_default();
    let meta = SaveMeta {
        model_config,
        ..SaveMeta::default()
    };

    let pieces = shard_pieces(&layout, 0)?;
    let staged = store.stage_next(meta.step, &layout, states, pieces, &source);
    store.publish(&meta, &layout, vec![staged])
}

fn bad(path: &Path, why: String) -> CkptError {
    CkptError::BadSafetensors {
        path: path.into(),
        why,
    }
}

/// A unit's name, and its parameters with the tensors that hold them.
type PlacedUnit<'a> = (String, Vec<(ParamSpec, &'a str)>);

/// The tensors that `place` maps to a parameter, by unit; `from` is for error messages.
fn placed<'a>(
    from: &Path,
    folder: &'a TensorFolder,
    place: impl Fn(&str) -> Option<(String, String)>,
) -> Result<Vec<PlacedUnit<'a>>, CkptError> {
    let mut units: Vec<PlacedUnit<'a>> = Vec::new();
    for tensor in folder.tensors() {
        let Some((unit, param)) = place(&tensor.name) else {
            continue;
        };
        if !tensor.is_readable() {
            let path = folder.tensor(&tensor.name).map_or(from, |(_, path)| path);
            let why = format!(
                "tensor {:?} has dtype {}; use {SUPPORTED}",
                tensor.name, tensor.dtype
            );
            return Err(bad(path, why));
        }
        let spec = ParamSpec::new(param, tensor.shape.as_slice());
        let entry = (spec, tensor.name.as_str());
        match units.iter_mut().find(|(name, _)| *name == unit) {
            Some((_, params)) => params.push(entry),
            None => units.push((unit, vec![entry])),
        }
    }

    Ok(units)
}

/// The JSON file `name` in the folder of `from`, if there is one.
fn json_beside(from: &Path, name: &str) -> Result<Option<Value>, CkptError> {
    let path = if from.is_file() {
        from.with_file_name(name)
    } else {
        from.join(name)
    };
    read_json_if_present(&path)
}

/// The concatenation of tensors as fp32.
struct WidenedTensors<'a> {
    folder: &'a TensorFolder,
    /// Start and length in elements, and the tensor; by ascending start, contiguous, not empty.
    parts: Vec<(u64, u64, &'a str)>,
    elems: u64,
}

impl ByteSource for WidenedTensors<'_> {
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
