//! The layout of a shard file: pure arithmetic, shared by writer, reader and verifier.
//!
//! ```text
//! | u64 n | JSON, spaces | zero.block_crc64 | master/h.0[0:64] | master/h.1[..] | first_moment/h.0[..] | ... |
//! 0       8              8 + n              data (multiple of 4096)
//!         '------------------------ front ----'------------------- state ----------------------------------'
//! ```
//!
//! A file holds one tensor for every state of the checkpoint and every **piece** of the rank. A
//! piece is a range of elements of one unit, without padding, which is not stored.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use zero_shard::Layout;

use crate::format::encoding::{check_cuts, spans};
use crate::format::header::{Header, TensorEntry};
use crate::format::runs::runs;
use crate::io::page_buffer::PAGE_BYTES;
use crate::{CkptError, StateEncoding};

/// Bytes of state that one checksum covers, counted from the start of the state.
pub(crate) const BLOCK_BYTES: u64 = 256 * 1024;
/// Name of the tensor that holds the checksums of the blocks.
const BLOCK_TABLE: &str = "zero.block_crc64";

/// A tensor that a checkpoint stores for every parameter, such as the weights or a moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateSpec {
    /// `master`, `first_moment`, `second_moment`, or any other name.
    pub name: String,
    /// How it is stored.
    #[serde(rename = "dtype")]
    pub encoding: StateEncoding,
}

impl StateSpec {
    /// A state that is stored in this way, such as in a [`StateDtype`](crate::StateDtype).
    pub fn new(name: impl Into<String>, encoding: impl Into<StateEncoding>) -> Self {
        Self {
            name: name.into(),
            encoding: encoding.into(),
        }
    }
}

/// A range of elements of one unit, counted without padding: `(unit, start, end)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UnitRange(pub u64, pub u64, pub u64);

impl UnitRange {
    /// Number of elements.
    pub(crate) fn elems(self) -> u64 {
        self.2.saturating_sub(self.1)
    }
}

/// The tensors of one shard file and their byte ranges.
#[derive(Clone, Debug)]
pub(crate) struct FileLayout {
    pub(crate) pieces: Vec<UnitRange>,
    /// By state and piece: the end of the tensor in the state bytes.
    ends: Vec<u64>,
}

impl FileLayout {
    /// Lays out `pieces`, each within a unit of `layout`, for `states`.
    ///
    /// # Errors
    /// A piece ends within a block, or a size exceeds 64 bits.
    pub(crate) fn new(
        states: &[StateSpec],
        layout: &Layout,
        pieces: Vec<UnitRange>,
    ) -> Result<Self, String> {
        let unit_of = |piece: &UnitRange| &layout.units()[piece.0 as usize];
        for piece in &pieces {
            check_cuts(states, unit_of(piece), *piece)?;
        }

        let mut end = 0u64;
        let mut ends = Vec::with_capacity(states.len() * pieces.len());
        for state in states {
            for piece in &pieces {
                for span in spans(state.encoding, unit_of(piece), piece.1..piece.2) {
                    end = end.saturating_add(span.bytes());
                }
                ends.push(end);
            }
        }

        // Leave room in 64 bits for header and table.
        match end.checked_add(1 << 40) {
            Some(_) => Ok(Self { pieces, ends }),
            None => Err("sizes exceed 64 bits".to_owned()),
        }
    }

    /// Bytes of all states in the file.
    pub(crate) fn state_bytes(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Number of blocks of the state bytes.
    pub(crate) fn blocks(&self) -> u64 {
        self.state_bytes().div_ceil(BLOCK_BYTES)
    }

    /// Bytes of the table of checksums.
    pub(crate) fn table_bytes(&self) -> u64 {
        self.blocks() * 8
    }

    /// The byte range of piece `piece` of state `state`, from the start of the state bytes.
    pub(crate) fn tensor_range(&self, state: usize, piece: usize) -> Range<u64> {
        let tensor = state * self.pieces.len() + piece;
        let start = tensor.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[tensor]
    }

    /// Builds the header of the file; `unit_name` returns the name of a unit.
    pub(crate) fn header<'a>(
        &self,
        states: &[StateSpec],
        unit_name: impl Fn(u64) -> &'a str,
        metadata: BTreeMap<String, String>,
    ) -> Header {
        let table = self.table_bytes();
        let mut tensors = vec![TensorEntry {
            name: BLOCK_TABLE.into(),
            dtype: "U64".into(),
            shape: vec![self.blocks()],
            range: 0..table,
        }];

        for (s, state) in states.iter().enumerate() {
            for (p, piece) in self.pieces.iter().enumerate() {
                let Range { start, end } = self.tensor_range(s, p);
                let (dtype, extent) = state.encoding.tensor(piece.elems(), end - start);
                tensors.push(TensorEntry {
                    name: tensor_name(&state.name, unit_name(piece.0), piece),
                    dtype: dtype.into(),
                    shape: vec![extent],
                    range: table + start..table + end,
                });
            }
        }

        Header {
            metadata,
            tensors,
            data_start: 0,
        }
    }

    /// Checks that a header has exactly the tensors of this layout, and returns the file offset of
    /// the state.
    pub(crate) fn check<'a>(
        &self,
        header: &Header,
        states: &[StateSpec],
        unit_name: impl Fn(u64) -> &'a str,
    ) -> Result<u64, String> {
        let expected = self.header(states, unit_name, BTreeMap::new()).tensors;
        if header.tensors.len() != expected.len() {
            return Err(format!(
                "{} tensors; the manifest requires {}",
                header.tensors.len(),
                expected.len()
            ));
        }

        if let Some((e, g)) = expected.iter().zip(&header.tensors).find(|(e, g)| e != g) {
            return Err(format!(
                "tensor {:?} ({} {:?}) where the manifest requires {:?} ({} {:?})",
                g.name, g.dtype, g.range, e.name, e.dtype, e.range
            ));
        }

        let start = header.data_start + self.table_bytes();
        if !start.is_multiple_of(PAGE_BYTES as u64) {
            return Err(format!(
                "the state starts at byte {start}, which is not a multiple of {PAGE_BYTES}"
            ));
        }

        Ok(start)
    }
}

/// Formats a tensor's name, such as `master/h.0[128:256]`.
pub(crate) fn tensor_name(state: &str, unit: &str, piece: &UnitRange) -> String {
    format!("{state}/{unit}[{}:{}]", piece.1, piece.2)
}

/// CRC-64/NVME, the checksum of the format.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::crc64_nvme(bytes)
}

/// Sort key of states in a file: wider elements first, so that every tensor is aligned to its
/// element. Blocks count as fp32.
pub(crate) fn file_order(state: &StateSpec) -> std::cmp::Reverse<u64> {
    std::cmp::Reverse(state.encoding.align_bytes())
}

/// The pieces of `rank`: its shard of every unit without the padding.
pub(crate) fn shard_pieces(
    layout: &zero_shard::Layout,
    rank: u64,
) -> Result<Vec<UnitRange>, CkptError> {
    if rank >= layout.world_size() {
        return Err(CkptError::argument(
            "rank",
            format!("below {}", layout.world_size()),
            rank,
        ));
    }

    let piece = |(u, unit): (usize, &zero_shard::UnitLayout)| {
        let runs = runs(unit, rank);
        Some(UnitRange(
            u as u64,
            runs.first()?.elems.start,
            runs.last()?.elems.end,
        ))
    };

    Ok(layout
        .units()
        .iter()
        .enumerate()
        .filter_map(piece)
        .collect())
}

#[cfg(test)]
mod tests {
    use zero_shard::{BlockFormat, ParamSpec, UnitSpec};

    use super::*;
    use crate::StateDtype;

    #[test]
    fn checksum_is_crc64_nvme() {
        assert_eq!(checksum(b"123456789"), 0xae8b_1486_0a79_9888);
    }

    fn layout(elems: &[u64]) -> Layout {
        let unit = |(u, elems): (usize, &u64)| {
            UnitSpec::new(format!("u{u}"), [ParamSpec::new(format!("p{u}"), [*elems])])
        };
        let units: Vec<_> = elems.iter().enumerate().map(unit).collect();
        Layout::new(&units, 1, 1).unwrap()
    }

    #[test]
    fn tensors_are_contiguous_and_wider_first() {
        let mut states = vec![
            StateSpec::new("half", StateDtype::BF16),
            StateSpec::new("whole", StateDtype::F32),
        ];
        states.sort_by_key(file_order);
        assert_eq!(states[0].name, "whole");
        let pieces = vec![UnitRange(0, 5, 8), UnitRange(2, 0, 1)];
        let layout = FileLayout::new(&states, &layout(&[8, 3, 2]), pieces).unwrap();
        let ranges = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(s, p)| layout.tensor_range(s, p));
        assert_eq!(ranges, [0..12, 12..16, 16..22, 22..24]);
        assert_eq!(
            (layout.state_bytes(), layout.blocks(), layout.table_bytes()),
            (24, 1, 8)
        );
        let header = layout.header(&states, |_| "u", BTreeMap::new());
        assert_eq!(header.tensors[2].name, "whole/u[0:1]");
        assert_eq!(header.tensors[2].range, 20..24);
    }

    #[test]
    fn sizes_beyond_64_bits_are_rejected() {
        let blocks = |format| StateEncoding::Blocks {
            format,
            plain_below: 0,
            multiple_of: 1,
        };
        for encoding in [
            StateDtype::F32.into(),
            StateDtype::BF16.into(),
            blocks(BlockFormat::Int8),
        ] {
            let states = [StateSpec::new("s", encoding)];
            let layout = layout(&[u64::MAX - 255]);
            let pieces = vec![UnitRange(0, 0, u64::MAX - 255)];
            let error = FileLayout::new(&states, &layout, pieces).unwrap_err();
            assert_eq!(error, "sizes exceed 64 bits");
        }
    }

    #[test]
    fn pieces_within_a_block_are_rejected() {
        let encoding = StateEncoding::Blocks {
            format: BlockFormat::Dynamic8,
            plain_below: 300,
            multiple_of: 1,
        };
        let states = [
            StateSpec::new("master", StateDtype::F32),
            StateSpec::new("moment", encoding),
        ];
        let layout = layout(&[600, 299]);
        let file = |piece| FileLayout::new(&states, &layout, vec![piece]);
        // Blocks of 260 bytes, also the last one; a small parameter in fp32.
        let bytes = |piece| file(piece).unwrap().state_bytes();
        assert_eq!(bytes(UnitRange(0, 0, 600)), 2400 + 3 * 260);
        assert_eq!(bytes(UnitRange(0, 256, 600)), 4 * 344 + 2 * 260);
        assert_eq!(bytes(UnitRange(1, 7, 9)), 2 * 8);
        for (piece, elem) in [(UnitRange(0, 1, 600), 1), (UnitRange(0, 0, 599), 599)] {
            let error = file(piece).unwrap_err();
            let expected = format!("at element {elem} of parameter \"p0\", within a block of 256");
            assert!(error.contains(&expected), "{error}");
            assert!(error.contains("shard_align_elems"), "{error}");
        }
    }
}
