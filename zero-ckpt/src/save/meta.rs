//! The metadata of a save, and the manifest that it makes with the staged files of all ranks.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;
use zero_shard::{Layout, ZeroStage};

use super::records::StagedFile;
use crate::format::file_layout::{checksum, shard_pieces};
use crate::format::manifest::{
    DocumentRecord, FileRecord, LayoutRecord, MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest,
    check_size,
};
use crate::{CkptError, MODEL_FILES_JSON, ModelFiles, ModelSpec, StateDtype, StateSpec, UnitRange};

/// The metadata of a checkpoint, equal on all ranks; rank 0's is stored.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SaveMeta {
    /// Completed optimizer steps.
    pub step: u64,
    /// ZeRO stage.
    pub stage: ZeroStage,
    /// Dtype of the parameters.
    pub dtype: StateDtype,
    /// The trainer's state: data position, seed, schedule, loss scale.
    pub trainer: Value,
    /// The model's `config.json` for export, or null.
    pub model_config: Value,
    /// JSON files to store in the checkpoint, by name; see
    /// [`Reader::document`](crate::Reader::document). That of a tensor-parallel run is
    /// [`TensorParallel::document`](crate::TensorParallel::document).
    pub documents: BTreeMap<String, Value>,
    /// The step of the best checkpoint so far. If it is in the directory, `best` names it and it is
    /// never pruned. Not stored in the manifest.
    pub best: Option<u64>,
    /// The step of an older checkpoint of this run to remove once this one is published. Not stored
    /// in the manifest.
    pub superseded: Option<u64>,
}

impl Default for SaveMeta {
    /// Step 0 at stage 0 in fp32, without any documents.
    fn default() -> Self {
        Self {
            step: 0,
            stage: ZeroStage::Zero,
            dtype: StateDtype::F32,
            trainer: Value::Null,
            model_config: Value::Null,
            documents: BTreeMap::new(),
            best: None,
            superseded: None,
        }
    }
}

zero_shard::setters!(SaveMeta {
    step: u64,
    stage: ZeroStage,
    dtype: StateDtype,
    trainer: Value,
    model_config: Value,
    documents: BTreeMap<String, Value>,
    best: Option<u64>,
    superseded: Option<u64>,
});

/// Encodes the documents of a checkpoint, the list of `model_files` among them; pairs of name and
/// content.
pub(crate) fn encode_documents(
    meta: &SaveMeta,
    model_files: Option<&ModelFiles>,
) -> Result<Vec<(String, Vec<u8>)>, CkptError> {
    let list = model_files.map(|files| (MODEL_FILES_JSON.to_owned(), files.document()));
    let mut documents = meta.documents.clone();
    documents.extend(list);
    let encode = |(name, value): (&String, &Value)| {
        let mut bytes = serde_json::to_vec_pretty(value).map_err(|e| CkptError::BadFile {
            path: name.into(),
            why: e.to_string(),
        })?;
        bytes.push(b'\n');
        Ok((name.clone(), bytes))
    };
    documents.iter().map(encode).collect()
}

/// Checks that the manifests of saves of `layout` can be small enough, by their longest part: the
/// pieces of all ranks.
pub(crate) fn check_pieces(layout: &Layout) -> Result<(), CkptError> {
    let bytes = (0..layout.world_size())
        .map(|rank| Ok(json_bytes(&shard_pieces(layout, rank)?)))
        .sum::<Result<_, _>>()?;
    check_size("the manifest", bytes, MAX_MANIFEST_BYTES)
}

/// The length of a file's pieces in the manifest, with commas and without brackets:
/// "[unit,start,end],".
fn json_bytes(pieces: &[UnitRange]) -> u64 {
    let digits = |number: u64| u64::from(number.checked_ilog10().unwrap_or(0)) + 1;
    pieces
        .iter()
        .map(|p| digits(p.0) + digits(p.1) + digits(p.2) + 5)
        .sum()
}

/// The manifest of a save before its files are known; its sequence is 0.
pub(crate) fn manifest_without_files(
    meta: &SaveMeta,
    layout: &Layout,
    states: Vec<StateSpec>,
    run: Option<String>,
    documents: &[(String, Vec<u8>)],
) -> Manifest {
    let documents = documents.iter().map(|(name, bytes)| DocumentRecord {
        name: name.clone(),
        bytes: bytes.len() as u64,
        crc64: checksum(bytes),
    });

    Manifest {
        step: meta.step,
        sequence: 0,
        stage: meta.stage.number(),
        dtype: meta.dtype.param_name().to_owned(),
        model: ModelSpec::from(layout),
        layout: LayoutRecord::from(layout),
        states,
        files: Vec::new(),
        trainer: meta.trainer.clone(),
        model_config: meta.model_config.clone(),
        run,
        documents: documents.collect(),
    }
}

/// The name of a rank's file in a checkpoint.
pub(crate) fn shard_name(rank: u64, world_size: u64) -> String {
    format!("shard-{rank:05}-of-{world_size:05}.safetensors")
}

/// Adds the staged files to the manifest and checks it as a reader does.
pub(crate) fn with_files(
    manifest: Manifest,
    staged: &[StagedFile],
    path: &Path,
) -> Result<Manifest, CkptError> {
    let mismatch = |why: String| CkptError::Mismatch { why };
    let world_size = manifest.layout.world_size;
    if staged.len() as u64 != world_size {
        return Err(mismatch(format!(
            "{} files for {world_size} ranks",
            staged.len()
        )));
    }

    let states = &manifest.states;
    for (rank, file) in staged.iter().enumerate() {
        if file.rank != rank as u64 || file.step != manifest.step {
            let got = format!("rank {}, step {}", file.rank, file.step);
            return Err(mismatch(format!(
                "expected rank {rank}, step {}; got {got}",
                manifest.step
            )));
        }
        if file.states != *states {
            return Err(mismatch(format!(
                "rank {rank} has states {:?}, rank 0 has {states:?}",
                file.states
            )));
        }
    }

    let files = staged.iter().map(|file| FileRecord {
        name: shard_name(file.rank, world_size),
        bytes: file.bytes,
        front_crc64: file.front_crc64,
        pieces: file.pieces.clone(),
    });

    let manifest = Manifest {
        files: files.collect(),
        ..manifest
    };

    manifest.check(&path.join(MANIFEST_NAME))?;
    Ok(manifest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_have_the_computed_length() {
        let pieces = [
            UnitRange(0, 0, 1),
            UnitRange(9, 10, 99),
            UnitRange(10, 100, u64::MAX),
        ];
        for n in 1..=pieces.len() {
            assert_eq!(
                json_bytes(&pieces[..n]) + 1,
                serde_json::to_vec(&pieces[..n]).unwrap().len() as u64
            );
        }
    }
}
