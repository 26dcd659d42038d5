//! The messages between ranks during a save, encoded as frames of equal length.
//!
//! This crate has no network: the caller's communicator gathers the frames. All frames have [`frame_bytes`] bytes.

use serde::{Deserialize, Serialize};
use zero_shard::Layout;

use crate::format::manifest::{hex64, short};
use crate::{CkptError, Piece, StateSpec};

/// The record of a rank's staged file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StagedFile {
    /// The rank that staged it.
    pub rank: u64,
    /// Step of the save.
    pub step: u64,
    /// Name of the file in the staging directory.
    pub file: String,
    /// Its length.
    pub bytes: u64,
    /// Checksum of its header and table.
    #[serde(with = "hex64")]
    pub front_crc64: u64,
    /// The states in it.
    pub states: Vec<StateSpec>,
    /// The elements in it, of each state.
    pub pieces: Vec<Piece>,
}

/// The record of a published checkpoint, equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedCheckpoint {
    /// Its name in the directory: `step-00000030`.
    pub name: String,
    /// Its step.
    pub step: u64,
    /// The number of the save in this directory.
    pub sequence: u64,
    /// Bytes of all shard files.
    pub bytes: u64,
    /// The name of the checkpoint that `best` names.
    pub best: Option<String>,
    /// Failures that do not affect the checkpoint, such as in removing an old one.
    pub notices: Vec<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Frame<T> {
    rank: u64,
    #[serde(flatten)]
    outcome: Outcome<T>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Outcome<T> {
    Ok(T),
    Error(String),
}

/// The length of every frame of a save of this layout.
pub fn frame_bytes(layout: &Layout) -> usize {
    // A piece has at most 64 characters: "[20 digits,20 digits,20 digits],".
    6144 + 64 * layout.units().len()
}

/// Encodes a frame of `len` bytes: JSON, padded with spaces. A long error message is shortened; a value that does not
/// fit is replaced by an error message.
pub(crate) fn to_frame<T: Serialize>(rank: u64, result: Result<&T, &CkptError>, len: usize) -> Vec<u8> {
    let encode = |outcome| serde_json::to_vec(&Frame { rank, outcome }).unwrap_or_default();
    let mut bytes = match result {
        Ok(value) => encode(Outcome::Ok(value)),
        Err(error) => encode(Outcome::Error(shorten(&error.to_string()))),
    };
    if bytes.len() > len || bytes.is_empty() {
        bytes = encode(Outcome::Error(format!("a message of {} bytes exceeds the frame of {len}", bytes.len())));
    }
    bytes.resize(len.max(bytes.len()), b' ');
    bytes
}

/// Decodes the frame of `rank`: its value, or its error.
pub(crate) fn from_frame<T: for<'de> Deserialize<'de>>(bytes: &[u8], rank: u64) -> Result<T, CkptError> {
    let bad = |why: String| CkptError::BadFrame { rank, why };
    let frame: Frame<T> = serde_json::from_slice(bytes).map_err(|e| bad(short(&e.to_string())))?;
    if frame.rank != rank {
        return Err(bad(format!("it names rank {}", frame.rank)));
    }
    match frame.outcome {
        Outcome::Ok(value) => Ok(value),
        Outcome::Error(message) => Err(CkptError::Rank { rank, message }),
    }
}

/// Shortens a message to 600 characters; keeps its start (the action) and its end (the cause).
pub(crate) fn shorten(message: &str) -> String {
    let chars: Vec<char> = message.chars().collect();
    if chars.len() <= 600 {
        return message.into();
    }
    let (head, tail) = (&chars[..300], &chars[chars.len() - 290..]);
    format!("{} ... {}", head.iter().collect::<String>(), tail.iter().collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_round_trips() {
        let staged = StagedFile {
            rank: 3,
            step: u64::MAX,
            file: "f".into(),
            bytes: 1,
            front_crc64: 7,
            states: vec![],
            pieces: vec![Piece(u64::MAX, u64::MAX - 1, u64::MAX); 3],
        };
        let frame = to_frame(3, Ok(&staged), 800);
        assert_eq!(frame.len(), 800);
        assert_eq!(from_frame::<StagedFile>(&frame, 3).unwrap(), staged);
        assert!(matches!(from_frame::<StagedFile>(&frame, 2), Err(CkptError::BadFrame { .. })));
        assert!(matches!(from_frame::<StagedFile>(&frame[..40], 3), Err(CkptError::BadFrame { .. })));
    }

    #[test]
    fn long_error_keeps_start_and_end() {
        let error = CkptError::Snapshot { message: format!("{}\n\u{1}\"{}", "a".repeat(5000), "z".repeat(5000)) };
        let frame = to_frame::<StagedFile>(0, Err(&error), 6144);
        assert_eq!(frame.len(), 6144);
        let text = from_frame::<StagedFile>(&frame, 0).unwrap_err().to_string();
        assert!(text.starts_with("rank 0: the snapshot failed: aaa") && text.ends_with("zzz"), "{text}");
    }
}
