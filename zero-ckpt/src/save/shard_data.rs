//! The state of one rank to save, by reference.

use zero_shard::Layout;

use super::unit_parts::{UnitPart, unit_parts};
use crate::format::file_layout::{file_order, shard_pieces};
use crate::io::parallel::{Slice, Slices};
use crate::{CkptError, StateDtype, StateEncoding, StateSpec, UnitRange};

/// The state of one rank, borrowed from the trainer's memory.
pub struct ShardData<'a> {
    layout: &'a Layout,
    rank: u64,
    pieces: Vec<UnitRange>,
    /// Each state and its shard storage, with padding; in file order.
    states: Vec<(StateSpec, Storage<'a>)>,
}

/// The shard storage of a state.
#[derive(Clone, Copy)]
enum Storage<'a> {
    /// As it is stored.
    Bytes(StateDtype, &'a [u8]),
    /// To be encoded as it is written.
    Values(&'a [f32]),
}

impl<'a> ShardData<'a> {
    /// Creates an empty set of states for `rank`.
    ///
    /// # Errors
    /// The layout has no such rank.
    pub fn new(layout: &'a Layout, rank: u64) -> Result<Self, CkptError> {
        Ok(Self {
            layout,
            rank,
            pieces: shard_pieces(layout, rank)?,
            states: Vec::new(),
        })
    }

    /// Adds a state in fp32: the rank's shard storage, `layout.shard_elems()` elements. Padding is
    /// not stored.
    ///
    /// # Errors
    /// The length is wrong, or the state was added before.
    pub fn storage_f32(&mut self, state: &str, storage: &'a [f32]) -> Result<&mut Self, CkptError> {
        self.storage(state, StateDtype::F32, bytemuck::cast_slice(storage))
    }

    /// Adds a state: the little-endian bytes of the rank's shard storage, `layout.shard_elems()`
    /// elements.
    ///
    /// # Errors
    /// The length is wrong, or the state was added before.
    pub fn storage(
        &mut self,
        state: &str,
        dtype: StateDtype,
        storage: &'a [u8],
    ) -> Result<&mut Self, CkptError> {
        let elems = self.layout.shard_elems();
        if Some(storage.len() as u64) != elems.checked_mul(dtype.bytes()) {
            let what = format!("shard storage of state {state:?}");
            let got = format!("{} bytes", storage.len());
            return Err(CkptError::argument(
                what,
                format!("{elems} elements of {}", dtype.name()),
                got,
            ));
        }
        self.add(StateSpec::new(state, dtype), Storage::Bytes(dtype, storage))
    }

    /// Adds a state in fp32 that is stored as `encoding`, to which it is converted as it is
    /// written: the rank's shard storage, `layout.shard_elems()` elements. Nothing is rounded where
    /// the values are already those of `encoding`, such as the decoded blocks of an optimizer.
    ///
    /// # Errors
    /// As [`Self::storage_f32`].
    pub fn storage_as(
        &mut self,
        state: &str,
        encoding: impl Into<StateEncoding>,
        storage: &'a [f32],
    ) -> Result<&mut Self, CkptError> {
        let encoding = encoding.into();
        if encoding == StateDtype::F32.into() {
            return self.storage_f32(state, storage);
        }
        let elems = self.layout.shard_elems();
        if storage.len() as u64 != elems {
            let what = format!("elements of the shard storage of state {state:?}");
            return Err(CkptError::argument(what, elems, storage.len()));
        }
        self.add(StateSpec::new(state, encoding), Storage::Values(storage))
    }

    fn add(&mut self, spec: StateSpec, storage: Storage<'a>) -> Result<&mut Self, CkptError> {
        if self.states.iter().any(|(other, _)| other.name == spec.name) {
            return Err(CkptError::argument("state", "a new one", spec.name));
        }
        self.states.push((spec, storage));
        self.states.sort_by_key(|(spec, _)| file_order(spec));
        Ok(self)
    }

    /// The layout of the model.
    pub(crate) fn layout(&self) -> &'a Layout {
        self.layout
    }

    /// The rank of the shard.
    pub(crate) fn rank(&self) -> u64 {
        self.rank
    }

    pub(crate) fn pieces(&self) -> &[UnitRange] {
        &self.pieces
    }

    /// The states in file order.
    pub(crate) fn specs(&self) -> Vec<StateSpec> {
        self.states.iter().map(|(spec, _)| spec.clone()).collect()
    }

    /// The state bytes of the file, without padding.
    pub(crate) fn source(&self) -> Slices<'a> {
        let slice = |part: UnitPart| {
            let first = self.layout.units()[part.unit].shard_offset_elems;
            let start = (first + part.in_shard.start) as usize;
            let end = (first + part.in_shard.end) as usize;
            match self.states[part.state].1 {
                Storage::Bytes(dtype, bytes) => {
                    let width = dtype.bytes() as usize;
                    Slice::Bytes(&bytes[start * width..end * width])
                }
                Storage::Values(values) => Slice::Values(part.encoding, &values[start..end]),
            }
        };
        let parts = unit_parts(self.layout, self.rank, &self.specs());
        Slices::new(parts.into_iter().map(slice).collect())
    }
}

#[cfg(test)]
mod tests {
    use zero_shard::{ParamSpec, UnitSpec};

    use super::*;
    use crate::io::parallel::ByteSource;

    fn layout() -> Layout {
        let unit =
            |n: &str, elems: u64| UnitSpec::new(n, [ParamSpec::new(format!("{n}.p"), [elems])]);
        Layout::new(&[unit("a", 5), unit("b", 0), unit("c", 3)], 2, 1).unwrap()
    }

    #[test]
    fn padding_is_not_stored() {
        let layout = layout();
        let storage = [0.0f32, 1.0, 2.0, 3.0, 4.0];
        let mut data = ShardData::new(&layout, 1).unwrap();
        data.storage_f32("master", &storage).unwrap();
        assert_eq!(data.pieces(), [UnitRange(0, 3, 5), UnitRange(2, 2, 3)]);
        assert_eq!(data.source().len(), 3 * 4);
    }

    #[test]
    fn invalid_data_is_rejected() {
        let layout = layout();
        let storage = [0.0f32; 5];
        assert!(ShardData::new(&layout, 2).is_err());
        let mut data = ShardData::new(&layout, 0).unwrap();
        assert!(data.storage_f32("master", &storage[..4]).is_err());
        data.storage_f32("master", &storage).unwrap();
        assert!(data.storage_f32("master", &storage).is_err());
        assert!(data.storage("master", StateDtype::BF16, &[0; 10]).is_err());
    }
}
