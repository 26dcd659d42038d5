//! The records that the phases of a save pass on: slices to fill, staged files, the published
//! checkpoint.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use zero_shard::BlockFormat;

use crate::format::encoding::Encoding;
use crate::format::staged_name::SaveId;
use crate::messages::MESSAGE_BYTES;
use crate::{StateDtype, StateSpec, UnitRange};

/// Elements that [`StagingSlice::fill_f32`] encodes at a time: whole blocks of every format.
const CHUNK_ELEMS: usize = 256 * BlockFormat::ALIGN_ELEMS as usize;

/// A part of the staging buffer, or of the buffer of
/// [`Store::stage_streamed`](crate::Store::stage_streamed): elements of one unit of one state that
/// are stored alike, without padding.
#[non_exhaustive]
pub struct StagingSlice<'a> {
    /// The state.
    pub state: &'a StateSpec,
    /// Index of the unit.
    pub unit: usize,
    /// The elements, as indices in the rank's shard of the unit.
    pub in_shard: Range<u64>,
    /// Their bytes as they are stored: blocks of [`StagingSlice::blocks`], or little-endian
    /// elements in the dtype of the state, which is fp32 beside blocks.
    pub bytes: &'a mut [u8],
    pub(crate) encoding: Encoding,
}

impl StagingSlice<'_> {
    /// The format of the blocks in [`Self::bytes`]: whole ones, the last one of a parameter with
    /// zeros behind its elements. `None` if the elements are stored one by one.
    pub fn blocks(&self) -> Option<BlockFormat> {
        match self.encoding {
            Encoding::Elements(_) => None,
            Encoding::Blocks(format) => Some(format),
        }
    }

    /// Fills the slice with fp32 values, which are encoded; `read` gets ranges of
    /// [`Self::in_shard`], in order, and the values to set. Values in fp32 are read in place,
    /// others through a buffer of at most 256 KiB.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn fill_f32<E>(
        self,
        mut read: impl FnMut(Range<u64>, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.encoding == Encoding::Elements(StateDtype::F32)
            && let Ok(values) = bytemuck::try_cast_slice_mut(self.bytes)
        {
            return read(self.in_shard, values);
        }

        let end = self.in_shard.end;
        let mut values = vec![0.0; CHUNK_ELEMS.min((end - self.in_shard.start) as usize)];
        let chunk_bytes = self.encoding.bytes(CHUNK_ELEMS as u64) as usize;
        let starts = self.in_shard.step_by(CHUNK_ELEMS);
        for (start, bytes) in starts.zip(self.bytes.chunks_mut(chunk_bytes)) {
            let elems = start..end.min(start + CHUNK_ELEMS as u64);
            let values = &mut values[..(elems.end - start) as usize];
            read(elems, values)?;
            self.encoding.encode(values, bytes);
        }
        Ok(())
    }
}

/// A rank's staged file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
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
    pub front_crc64: u64,
    /// The states in it.
    pub states: Vec<StateSpec>,
    /// The elements in it, of each state.
    pub pieces: Vec<UnitRange>,
    pub(crate) save: SaveId,
}

/// The record of a published checkpoint, equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
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
    /// Failures in removing old checkpoints after earlier saves, and other notices; see
    /// [`Store::take_notices`](crate::Store::take_notices). They affect no checkpoint.
    pub notices: Vec<String>,
}

impl PublishedCheckpoint {
    /// Removes notices until the record fits a message.
    pub(super) fn fit(mut self) -> Self {
        while serde_json::to_vec(&self).is_ok_and(|json| json.len() + 16 > MESSAGE_BYTES)
            && !self.notices.is_empty()
        {
            self.notices.pop();
        }
        self
    }
}

/// A published checkpoint, and the saves that it supersedes on each rank.
pub(crate) struct Publication {
    pub(crate) checkpoint: PublishedCheckpoint,
    /// The name of the checkpoint of [`SaveMeta::superseded`](crate::SaveMeta::superseded).
    pub(crate) superseded: Option<String>,
    /// The number of this save in each session of a rank; one session if
    /// [`Store::create_on_ranks`](crate::Store::create_on_ranks) opened the stores.
    pub(crate) numbers: BTreeMap<u64, u32>,
}
