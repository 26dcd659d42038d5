//! What ranks tell each other about a save: receipts and verdicts, as frames of equal length.
//!
//! This crate has no network. A report is turned into bytes that every rank's communicator can gather, all
//! of one length, which each rank knows beforehand: [`frame_bytes`].

use serde::{Deserialize, Serialize};
use zero_shard::Layout;

use crate::manifest::{Hex64, short};
use crate::{CkptError, Piece, StateSpec};

/// What a rank has staged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    /// Who staged it.
    pub rank: u64,
    /// Of which step.
    pub step: u64,
    /// The file in the staging directory.
    pub file: String,
    /// Its length.
    pub bytes: u64,
    /// Checksum of its header and table.
    pub front_crc64: Hex64,
    /// The states it holds.
    pub states: Vec<StateSpec>,
    /// The elements it holds of each state.
    pub pieces: Vec<Piece>,
}

/// What was published, as every rank gets to know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// The checkpoint's name in the directory: `step-00000030`.
    pub name: String,
    /// Its step.
    pub step: u64,
    /// Its number among the saves into this directory.
    pub sequence: u64,
    /// Bytes of all shard files.
    pub bytes: u64,
    /// What did not work and did not matter for the checkpoint, such as removing an old one.
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

/// Length of every frame of a save of this layout, on every rank.
pub fn frame_bytes(layout: &Layout) -> usize {
    // A piece is at most "[20 digits,20 digits,20 digits],"; the rest is names, numbers and messages.
    6144 + 64 * layout.units().len()
}

/// A frame of `len` bytes: JSON, then spaces. Too long a message is cut; too long a value is an error message.
pub(crate) fn to_frame<T: Serialize>(rank: u64, result: Result<&T, &CkptError>, len: usize) -> Vec<u8> {
    let encode = |outcome| serde_json::to_vec(&Frame { rank, outcome }).unwrap_or_default();
    let mut bytes = match result {
        Ok(value) => encode(Outcome::Ok(value)),
        Err(error) => encode(Outcome::Error(middle_cut(&error.to_string()))),
    };
    if bytes.len() > len || bytes.is_empty() {
        bytes = encode(Outcome::Error(format!("a report of {} bytes does not fit a frame of {len}", bytes.len())));
    }
    bytes.resize(len.max(bytes.len()), b' ');
    bytes
}

/// What `rank` reported; its own error where it failed.
pub(crate) fn from_frame<T: for<'de> Deserialize<'de>>(bytes: &[u8], rank: u64) -> Result<T, CkptError> {
    let bad = |why: String| CkptError::BadFrame { what: format!("rank {rank}"), why };
    let frame: Frame<T> = serde_json::from_slice(bytes).map_err(|e| bad(short(&e.to_string())))?;
    if frame.rank != rank {
        return Err(bad(format!("it is signed by rank {}", frame.rank)));
    }
    match frame.outcome {
        Outcome::Ok(value) => Ok(value),
        Outcome::Error(message) => Err(CkptError::Rank { rank, message }),
    }
}

/// At most 600 characters: the start, which says what, and the end, which says why.
pub(crate) fn middle_cut(message: &str) -> String {
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
    fn a_report_survives_its_frame() {
        let receipt = Receipt {
            rank: 3,
            step: u64::MAX,
            file: "f".into(),
            bytes: 1,
            front_crc64: Hex64(7),
            states: vec![],
            pieces: vec![Piece(u64::MAX, u64::MAX - 1, u64::MAX); 3],
        };
        let frame = to_frame(3, Ok(&receipt), 800);
        assert_eq!(frame.len(), 800);
        assert_eq!(from_frame::<Receipt>(&frame, 3).unwrap(), receipt);
        assert!(matches!(from_frame::<Receipt>(&frame, 2), Err(CkptError::BadFrame { .. })));
        assert!(matches!(from_frame::<Receipt>(&frame[..40], 3), Err(CkptError::BadFrame { .. })));
    }

    #[test]
    fn an_error_keeps_its_start_and_its_end() {
        let error = CkptError::Snapshot { message: format!("{}\n\u{1}\"{}", "a".repeat(5000), "z".repeat(5000)) };
        let frame = to_frame::<Receipt>(0, Err(&error), 6144);
        assert_eq!(frame.len(), 6144);
        let text = from_frame::<Receipt>(&frame, 0).unwrap_err().to_string();
        assert!(text.starts_with("rank 0: the snapshot failed: aaa") && text.ends_with("zzz"), "{text}");
    }
}
