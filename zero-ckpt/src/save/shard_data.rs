//! The state of one rank to save, by reference.

use zero_shard::Layout;

use crate::format::blocks::{file_order, shard_pieces};
use crate::format::runs::runs;
use crate::io::parallel::Slices;
use crate::{CkptError, StateDtype, StateSpec, UnitRange};

/// The state of one rank, borrowed from the trainer's memory.
pub struct ShardData<'a> {
    layout: &'a Layout,
    rank: u64,
    pieces: Vec<UnitRange>,
    /// Each state and its shard storage, with padding; in file order.
    states: Vec<(StateSpec, &'a [u8])>,
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

        if self.states.iter().any(|(spec, _)| spec.name == state) {
            return Err(CkptError::argument("state", "a new one", state));
        }
        self.states.push((
            StateSpec {
                name: state.into(),
                dtype,
            },
            storage,
        ));

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
        let mut parts = Vec::with_capacity(self.states.len() * self.pieces.len());
        for (spec, storage) in &self.states {
            let width = spec.dtype.bytes();
            for unit in self.layout.units() {
                let at = unit.shard_range().start;
                for run in runs(unit, self.rank) {
                    let range = run.in_shard();
                    parts.push(
                        &storage[((at + range.start) * width) as usize
                            ..((at + range.end) * width) as usize],
                    );
                }
            }
        }
        Slices::new(parts)
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
