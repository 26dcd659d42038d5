//! Making one manifest of the receipts of all ranks.

use std::path::Path;

use serde_json::Value;
use zero_shard::Layout;

use crate::manifest::{FileRecord, LayoutRecord, MANIFEST_NAME, Manifest};
use crate::report::Receipt;
use crate::{CkptError, ModelSpec};

/// What a checkpoint says besides its state. The same on every rank; rank 0's is stored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SaveMeta {
    /// Steps done.
    pub step: u64,
    /// ZeRO stage, 0 to 3.
    pub stage: u8,
    /// Dtype of the parameters.
    pub dtype: String,
    /// The trainer's own words: data position, seed, schedule, loss scale.
    pub trainer: Value,
    /// The model's `config.json` for export, or null.
    pub model_config: Value,
}

/// The manifest of these receipts, checked as a reader will check it.
pub(crate) fn manifest_of(
    meta: &SaveMeta,
    layout: &Layout,
    model: ModelSpec,
    sequence: u64,
    receipts: &[Receipt],
    path: &Path,
) -> Result<Manifest, CkptError> {
    let unfit = |why: String| CkptError::Receipts { why };
    let world_size = layout.world_size();
    if receipts.len() as u64 != world_size {
        return Err(unfit(format!("{} receipts of {world_size} ranks", receipts.len())));
    }
    let states = receipts.first().map(|r| r.states.clone()).unwrap_or_default();
    for (rank, receipt) in receipts.iter().enumerate() {
        if receipt.rank != rank as u64 || receipt.step != meta.step {
            let found = format!("rank {}, step {}", receipt.rank, receipt.step);
            return Err(unfit(format!("expected rank {rank}, step {}; got {found}", meta.step)));
        }
        if receipt.states != states {
            return Err(unfit(format!("rank {rank} has states {:?}, rank 0 has {states:?}", receipt.states)));
        }
    }
    let files = receipts.iter().map(|r| FileRecord {
        name: format!("shard-{:05}-of-{world_size:05}.safetensors", r.rank),
        bytes: r.bytes,
        front_crc64: r.front_crc64,
        pieces: r.pieces.clone(),
    });
    let manifest = Manifest {
        step: meta.step,
        sequence,
        stage: meta.stage,
        dtype: meta.dtype.clone(),
        model,
        layout: LayoutRecord { world_size, align_elems: layout.align_elems() },
        states,
        files: files.collect(),
        trainer: meta.trainer.clone(),
        model_config: meta.model_config.clone(),
    };
    manifest.check(&path.join(MANIFEST_NAME))?;
    Ok(manifest)
}
