//! The manifest: the description of a checkpoint and of the elements in each of its files.

use std::collections::HashSet;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use zero_shard::{Layout, LayoutOptions, ShardError, UnitSpec};

use crate::format::coverage::Coverage;
use crate::format::file_layout::{FileLayout, checksum, file_order};
use crate::format::header::MAX_HEADER_BYTES;
use crate::io::dir::{Dir, is_plain};
use crate::{CkptError, ModelSpec, StateSpec, UnitRange};

/// Name of the manifest in a checkpoint.
pub const MANIFEST_NAME: &str = "manifest.json";
/// The version of the format that this crate writes, and the only one that it reads.
pub(crate) const FORMAT_VERSION: u64 = 2;
/// Maximum size of a manifest.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 256 << 20;
/// Maximum size of a document.
pub(crate) const MAX_DOCUMENT_BYTES: u64 = 256 << 20;
const FORMAT_NAME: &str = "zero-ckpt";

/// The description of a checkpoint and of the elements in each of its files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Manifest {
    /// Completed optimizer steps.
    pub step: u64,
    /// The number of the save in its directory; later saves have greater numbers.
    pub sequence: u64,
    /// ZeRO stage of the run that saved it; any other can load it.
    pub stage: u8,
    /// Dtype of the parameters in the run that saved it.
    pub dtype: String,
    /// The model.
    pub model: ModelSpec,
    /// The sharding of the run that saved it; any other can load it.
    pub layout: LayoutRecord,
    /// The tensors stored for every parameter.
    pub states: Vec<StateSpec>,
    /// The shard files; rank `r` wrote file `r`.
    pub files: Vec<FileRecord>,
    /// The trainer's state: data position, seed, schedule, loss scale. Opaque to this crate.
    pub trainer: Value,
    /// The model's `config.json` for export, or null. Opaque to this crate.
    pub model_config: Value,
    /// The run that saved it; `None` if the writer does not name its runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// JSON files of the trainer; see [`Reader::document`](crate::Reader::document).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub documents: Vec<DocumentRecord>,
}

/// The sharding of the run that saved a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct LayoutRecord {
    /// Number of ranks.
    pub world_size: u64,
    /// Shards were multiples of this many elements.
    pub align_elems: u64,
    /// Parameters started at multiples of this many elements.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub param_align_elems: u64,
    /// Of neighbours with fewer elements only the first was aligned.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub packed_below_elems: u64,
}

fn one() -> u64 {
    1
}

fn is_one(number: &u64) -> bool {
    *number == 1
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl From<&Layout> for LayoutRecord {
    fn from(layout: &Layout) -> Self {
        let options = layout.options();
        Self {
            world_size: layout.world_size(),
            align_elems: options.shard_align_elems,
            param_align_elems: options.param_align_elems,
            packed_below_elems: options.packed_below_elems,
        }
    }
}

impl LayoutRecord {
    /// The layout of `units`, without ties.
    pub(crate) fn layout(&self, units: &[UnitSpec]) -> Result<Layout, ShardError> {
        let options = LayoutOptions::default()
            .shard_align_elems(self.align_elems)
            .param_align_elems(self.param_align_elems)
            .packed_below_elems(self.packed_below_elems);
        Layout::with_options(units, self.world_size, options)
    }
}

/// One shard file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct FileRecord {
    /// Its name in the checkpoint.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// CRC-64/NVME of its header and its table of block checksums; 16 hexadecimal digits in JSON.
    #[serde(with = "hex64")]
    pub front_crc64: u64,
    /// The elements that it holds of every state; ascending, not empty.
    pub pieces: Vec<UnitRange>,
}

/// A JSON file of the trainer. Its content is opaque to this crate, except that of
/// [`TensorParallel`](crate::TensorParallel).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct DocumentRecord {
    /// Its name in the checkpoint.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// CRC-64/NVME of its bytes; 16 hexadecimal digits in JSON.
    #[serde(with = "hex64")]
    pub crc64: u64,
}

/// A 64-bit number as 16 lower-case hexadecimal digits.
pub(crate) mod hex64 {
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(number: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{number:016x}"))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digits =
            text.len() == 16 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let number = u64::from_str_radix(&text, 16).ok().filter(|_| digits);
        number.ok_or_else(|| D::Error::custom("a checksum is 16 digits of 0-9 and a-f"))
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope {
    format: String,
    version: u64,
    #[serde(with = "hex64")]
    crc64: u64,
    manifest: Box<RawValue>,
}

#[derive(Deserialize)]
struct VersionOnly {
    format: String,
    version: u64,
}

impl Manifest {
    /// Encodes `manifest.json`.
    ///
    /// # Errors
    /// [`CkptError::BadManifest`] if the trainer's state cannot be written as JSON;
    /// [`CkptError::TooLarge`] if readers would reject the manifest.
    pub fn encode(&self) -> Result<Vec<u8>, CkptError> {
        self.encode_within(MAX_MANIFEST_BYTES)
    }

    fn encode_within(&self, limit_bytes: u64) -> Result<Vec<u8>, CkptError> {
        let bad = |e: serde_json::Error| CkptError::BadManifest {
            path: MANIFEST_NAME.into(),
            why: e.to_string(),
        };
        let body = serde_json::to_string(self).map_err(bad)?;
        let crc64 = checksum(body.as_bytes());
        let manifest = RawValue::from_string(body).map_err(bad)?;
        let envelope = Envelope {
            format: FORMAT_NAME.into(),
            version: FORMAT_VERSION,
            crc64,
            manifest,
        };
        let mut bytes = serde_json::to_vec(&envelope).map_err(bad)?;
        bytes.push(b'\n');
        check_size("the manifest", bytes.len() as u64, limit_bytes)?;
        Ok(bytes)
    }

    /// Decodes and checks a manifest; `path` is for error messages. The layout of the result is
    /// valid, its files have plain and distinct names, and every element of every unit is in
    /// exactly one of them.
    ///
    /// # Errors
    /// The version is unknown, the checksum is wrong, a rule is broken, or elements are missing or
    /// in two files.
    pub fn decode(bytes: &[u8], path: &Path) -> Result<(Self, Layout), CkptError> {
        Self::decode_checked(bytes, path).map(|(manifest, layout, _)| (manifest, layout))
    }

    /// [`Manifest::decode`], with the checksum of the content.
    fn decode_checked(bytes: &[u8], path: &Path) -> Result<(Self, Layout, u64), CkptError> {
        let bad = |why: String| CkptError::BadManifest {
            path: path.to_path_buf(),
            why,
        };

        let version: VersionOnly = serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))?;
        if version.format != FORMAT_NAME {
            return Err(bad(format!(
                "the format is {:?}, not {FORMAT_NAME:?}",
                short(&version.format)
            )));
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
        if got != envelope.crc64 {
            return Err(bad(format!(
                "damaged: the content has checksum {got:016x}; recorded is {:016x}",
                envelope.crc64
            )));
        }

        let manifest: Manifest = serde_json::from_str(body).map_err(|e| bad(e.to_string()))?;
        let layout = manifest.check(path)?;
        Ok((manifest, layout, got))
    }

    /// Reads the manifest of an open checkpoint directory; also returns its layout and the checksum
    /// of its content.
    pub(crate) fn read(dir: &Dir) -> Result<(Self, Layout, u64), CkptError> {
        let bytes = dir.read_small(MANIFEST_NAME, MAX_MANIFEST_BYTES)?;
        Self::decode_checked(&bytes, &dir.path().join(MANIFEST_NAME))
    }

    /// Checks the rules that the types do not express.
    pub(crate) fn check(&self, path: &Path) -> Result<Layout, CkptError> {
        let bad = |why: String| CkptError::BadManifest {
            path: path.to_path_buf(),
            why,
        };

        let layout = self
            .layout
            .layout(&self.model.units)
            .map_err(|e| bad(format!("layout: {e}")))?;

        if self.stage > 3 {
            return Err(bad(format!("stage {}; stages are 0 to 3", self.stage)));
        }
        self.check_states().map_err(bad)?;
        let pieces = self.files.iter().map(|file| file.pieces.as_slice());
        Coverage::new(&layout, pieces, path)?;
        let mut names = HashSet::new();
        self.check_files(&layout, &mut names).map_err(bad)?;
        self.check_documents(&mut names).map_err(bad)?;
        if let Some(run) = self.run.as_deref().filter(|run| !is_plain(run)) {
            return Err(bad(format!("run {:?} is not a plain name", short(run))));
        }
        Ok(layout)
    }

    fn check_states(&self) -> Result<(), String> {
        let mut names = HashSet::new();
        for state in &self.states {
            if !is_plain(&state.name) || !names.insert(state.name.as_str()) {
                let name = short(&state.name);
                return Err(format!("state name {name:?} is not plain or occurs twice"));
            }
        }
        if self.states.is_empty() {
            return Err("it has no states".into());
        }
        if !self.states.is_sorted_by_key(file_order) {
            return Err("states are not ordered from wider to narrower elements".into());
        }
        Ok(())
    }

    /// Adds the files' names to `names`. Every piece must be within its unit.
    fn check_files<'a>(
        &'a self,
        model: &Layout,
        names: &mut HashSet<&'a str>,
    ) -> Result<(), String> {
        for file in &self.files {
            let name = short(&file.name);
            if !is_new_name(&file.name, names) {
                return Err(format!("file name {name:?} is not plain or occurs twice"));
            }
            let layout = FileLayout::new(&self.states, model, file.pieces.clone())
                .map_err(|why| format!("file {name:?}: {why}"))?;
            let front = file
                .bytes
                .checked_sub(layout.state_bytes())
                .and_then(|f| f.checked_sub(layout.table_bytes()));
            if front.is_none_or(|front| !(8..=8 + MAX_HEADER_BYTES).contains(&front)) {
                return Err(format!(
                    "file {name:?}: {} bytes do not match its pieces",
                    file.bytes
                ));
            }
        }
        Ok(())
    }

    /// `names` are those of the other files.
    fn check_documents<'a>(&'a self, names: &mut HashSet<&'a str>) -> Result<(), String> {
        for document in &self.documents {
            let name = short(&document.name);
            if !is_new_name(&document.name, names) {
                return Err(format!(
                    "document name {name:?} is not plain or occurs twice"
                ));
            }
            if document.bytes > MAX_DOCUMENT_BYTES {
                return Err(format!(
                    "document {name:?}: {} bytes; the limit is {MAX_DOCUMENT_BYTES}",
                    document.bytes
                ));
            }
        }
        Ok(())
    }
}

/// Adds the name of a file to `names`; returns whether it is plain and new.
fn is_new_name<'a>(name: &'a str, names: &mut HashSet<&'a str>) -> bool {
    is_plain(name) && name != MANIFEST_NAME && names.insert(name)
}

/// Rejects what readers would reject for its size.
pub(crate) fn check_size(
    what: &'static str,
    bytes: u64,
    limit_bytes: u64,
) -> Result<(), CkptError> {
    if bytes > limit_bytes {
        Err(CkptError::TooLarge {
            what,
            bytes,
            limit_bytes,
        })
    } else {
        Ok(())
    }
}

/// The first 80 characters of untrusted text, for an error message.
pub(crate) fn short(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A manifest with a trainer's state of `elems` numbers.
    fn manifest(elems: usize) -> Manifest {
        let json = serde_json::json!({
            "step": 1, "sequence": 1, "stage": 3, "dtype": "bf16", "model_config": null, "trainer": vec![7; elems],
            "model": {"units": [{"name": "a", "params": [{"name": "a.w", "shape": []}]}]},
            "layout": {"world_size": 1, "align_elems": 1},
            "states": [{"name": "master", "dtype": "F32"}],
            "files": [{"name": "f", "bytes": 20, "front_crc64": "0000000000000000", "pieces": [[0, 0, 1]]}],
        });
        serde_json::from_value(json).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        /// The writer accepts exactly what the reader accepts.
        #[test]
        #[cfg_attr(miri, ignore)]
        fn writer_and_reader_have_the_same_limit(elems in 0..400usize, off in -3..=3i64) {
            let manifest = manifest(elems);
            let encoded = manifest.encode().unwrap();
            let limit_bytes = encoded.len().saturating_add_signed(off as isize) as u64;
            let dir = tempfile::tempdir().unwrap();
            let dir = Dir::open(dir.path()).unwrap();
            dir.write_new(MANIFEST_NAME, &encoded).unwrap();
            let read = dir.read_small(MANIFEST_NAME, limit_bytes);
            match manifest.encode_within(limit_bytes) {
                Ok(written) => prop_assert_eq!(read.unwrap(), written),
                Err(CkptError::TooLarge { bytes, .. }) => {
                    prop_assert!(bytes == encoded.len() as u64 && bytes > limit_bytes && read.is_err());
                }
                Err(other) => panic!("{other}"),
            }
        }
    }

    #[test]
    fn too_large_manifest_says_what_to_do() {
        let manifest = manifest(100);
        let bytes = manifest.encode().unwrap().len() as u64;
        let error = manifest.encode_within(bytes - 1).unwrap_err().to_string();
        let parts = [
            format!("the manifest would have {bytes} bytes"),
            format!("at most {}", bytes - 1),
        ];
        assert!(
            parts.iter().all(|part| error.contains(part)) && error.contains("fewer, larger units"),
            "{error}"
        );
        assert!(check_size("x", MAX_MANIFEST_BYTES, MAX_MANIFEST_BYTES).is_ok());
    }
}
