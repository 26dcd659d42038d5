//! The manifest: what a checkpoint is, and which file holds which elements.

use std::collections::HashSet;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use zero_shard::Layout;

use crate::coverage::Coverage;
use crate::dir::{Dir, is_plain};
use crate::header::MAX_HEADER_BYTES;
use crate::plan::{FilePlan, checksum};
use crate::{CkptError, ModelSpec, Piece, StateSpec};

/// Name of the manifest in a checkpoint.
pub const MANIFEST_NAME: &str = "manifest.json";
/// Version of the format that this crate writes and reads.
pub const FORMAT_VERSION: u64 = 1;
/// The greatest manifest that is read.
pub const MAX_MANIFEST_BYTES: u64 = 256 << 20;
const FORMAT_NAME: &str = "zero-ckpt";

/// What a checkpoint is, and which file holds which elements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Steps done when it was saved.
    pub step: u64,
    /// Counts the checkpoints saved into one directory: a later save has a greater number.
    pub sequence: u64,
    /// ZeRO stage of the run that saved it. Any other can load it.
    pub stage: u8,
    /// Dtype of the parameters in the run that saved it.
    pub dtype: String,
    /// The model.
    pub model: ModelSpec,
    /// How it was cut. Any other cut can load it.
    pub layout: LayoutRecord,
    /// What is stored for every element.
    pub states: Vec<StateSpec>,
    /// The shard files; file `r` was written by rank `r`.
    pub files: Vec<FileRecord>,
    /// The trainer's own words: data position, seed, schedule, loss scale. Opaque to this crate.
    pub trainer: Value,
    /// The model's `config.json` for export, or null. Opaque to this crate.
    pub model_config: Value,
}

/// How the model was cut when it was saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayoutRecord {
    /// Ranks.
    pub world_size: u64,
    /// Every shard was a multiple of this.
    pub align_elems: u64,
}

/// One shard file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Its name in the checkpoint's directory.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// CRC-64/NVME of its header and table of block checksums, in 16 hexadecimal digits.
    pub front_crc64: Hex64,
    /// The elements it holds, for every state; ascending, none empty.
    pub pieces: Vec<Piece>,
}

/// A 64-bit number that is written as 16 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Hex64(pub u64);

impl TryFrom<String> for Hex64 {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let digits = text.len() == 16 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let number = u64::from_str_radix(&text, 16).ok().filter(|_| digits);
        number.map(Hex64).ok_or_else(|| "a checksum is 16 digits of 0-9 and a-f".to_string())
    }
}

impl From<Hex64> for String {
    fn from(hex: Hex64) -> String {
        format!("{:016x}", hex.0)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope {
    format: String,
    version: u64,
    crc64: Hex64,
    manifest: Box<RawValue>,
}

#[derive(Deserialize)]
struct VersionOnly {
    format: String,
    version: u64,
}

impl Manifest {
    /// The bytes of `manifest.json`.
    ///
    /// # Errors
    /// [`CkptError::BadManifest`] where the trainer's own value cannot be written as JSON.
    pub fn encode(&self) -> Result<Vec<u8>, CkptError> {
        let bad = |e: serde_json::Error| CkptError::BadManifest { path: MANIFEST_NAME.into(), why: e.to_string() };
        let body = serde_json::to_string(self).map_err(bad)?;
        let crc64 = Hex64(checksum(body.as_bytes()));
        let manifest = RawValue::from_string(body).map_err(bad)?;
        let envelope = Envelope { format: FORMAT_NAME.into(), version: FORMAT_VERSION, crc64, manifest };
        let mut bytes = serde_json::to_vec(&envelope).map_err(bad)?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Reads and checks a manifest; `path` is for messages. What is returned is whole: its layout can be
    /// built, its files have plain and distinct names, and every element of every unit is in one of them.
    ///
    /// # Errors
    /// A variant for each cause: unknown version, checksum, broken rule, hole, overlap.
    pub fn decode(bytes: &[u8], path: &Path) -> Result<(Self, Layout), CkptError> {
        let bad = |why: String| CkptError::BadManifest { path: path.to_path_buf(), why };
        let version: VersionOnly = serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))?;
        if version.format != FORMAT_NAME {
            return Err(bad(format!("the format is {:?}, not {FORMAT_NAME:?}", short(&version.format))));
        }
        if version.version != FORMAT_VERSION {
            return Err(CkptError::UnsupportedVersion {
                path: path.to_path_buf(),
                found: version.version,
                supported: FORMAT_VERSION,
            });
        }
        let envelope: Envelope = serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))?;
        let body = envelope.manifest.get();
        let got = checksum(body.as_bytes());
        if got != envelope.crc64.0 {
            return Err(bad(format!(
                "damaged: the content has checksum {got:016x}, recorded was {:016x}",
                envelope.crc64.0
            )));
        }
        let manifest: Manifest = serde_json::from_str(body).map_err(|e| bad(e.to_string()))?;
        let layout = manifest.check(path)?;
        Ok((manifest, layout))
    }

    /// Reads the manifest of an open checkpoint directory.
    pub(crate) fn read(dir: &Dir) -> Result<(Self, Layout), CkptError> {
        let bytes = dir.read_small(MANIFEST_NAME, MAX_MANIFEST_BYTES)?;
        Self::decode(&bytes, &dir.path().join(MANIFEST_NAME))
    }

    /// What `file` holds and where.
    pub(crate) fn plan(&self, file: &FileRecord) -> Option<FilePlan> {
        FilePlan::new(&self.states, file.pieces.clone())
    }

    /// The rules that JSON cannot say.
    pub(crate) fn check(&self, path: &Path) -> Result<Layout, CkptError> {
        let bad = |why: String| CkptError::BadManifest { path: path.to_path_buf(), why };
        let layout = Layout::new(&self.model.unit_specs(), self.layout.world_size, self.layout.align_elems)
            .map_err(|e| bad(format!("its layout: {e}")))?;
        if self.stage > 3 {
            return Err(bad(format!("stage {} is none of 0 to 3", self.stage)));
        }
        let mut states = HashSet::new();
        for state in &self.states {
            if !is_plain(&state.name) || !states.insert(state.name.as_str()) {
                return Err(bad(format!("state {:?} has no plain name or is there twice", short(&state.name))));
            }
        }
        if self.states.is_empty() {
            return Err(bad("it has no states".into()));
        }
        if self.states.windows(2).any(|w| w[0].dtype.bytes() < w[1].dtype.bytes()) {
            return Err(bad("a state of wider elements stands behind one of narrower".into()));
        }
        let mut names = HashSet::new();
        for file in &self.files {
            let name = short(&file.name);
            if !is_plain(&file.name) || file.name == MANIFEST_NAME || !names.insert(file.name.as_str()) {
                return Err(bad(format!("file {name:?} has no plain name or is there twice")));
            }
            let plan = self.plan(file).ok_or_else(|| bad(format!("file {name:?}: sizes that do not fit 64 bits")))?;
            let front = file.bytes.checked_sub(plan.state_bytes()).and_then(|f| f.checked_sub(plan.table_bytes()));
            if front.is_none_or(|front| !(8..=8 + MAX_HEADER_BYTES).contains(&front)) {
                return Err(bad(format!("file {name:?}: {} bytes do not fit its pieces", file.bytes)));
            }
        }
        Coverage::new(&layout, self.files.iter().map(|f| f.pieces.as_slice()), path)?;
        Ok(layout)
    }
}

/// A text of unknown origin, short enough for a message.
pub(crate) fn short(text: &str) -> String {
    text.chars().take(80).collect()
}
