//! The state of one rank to save, by reference.

use zero_shard::Layout;

use crate::format::blocks::{file_order, shard_pieces};
use crate::format::runs::runs;
use crate::io::parallel::Slices;
use crate::{CkptError, Piece, StateDtype, StateSpec};

/// The state of one rank, borrowed from the trainer's memory.
///
/// Every state must have data for every unit. Data includes the padding of a shard, which is not stored.
pub struct ShardData<'a> {
    layout: &'a Layout,
    rank: u64,
    pieces: Vec<Piece>,
    states: Vec<State<'a>>,
}

struct State<'a> {
    spec: StateSpec,
    /// The shard of each unit, with padding.
    units: Vec<Option<&'a [u8]>>,
}

impl<'a> ShardData<'a> {
    /// Starts without data for `rank`.
    ///
    /// # Errors
    /// The layout has no such rank.
    pub fn new(layout: &'a Layout, rank: u64) -> Result<Self, CkptError> {
        Ok(Self { layout, rank, pieces: shard_pieces(layout, rank)?, states: Vec::new() })
    }

    /// Adds a state in fp32: the rank's shard storage, `layout.shard_elems()` elements.
    ///
    /// # Errors
    /// Another length, or the state was added before.
    pub fn storage_f32(&mut self, state: &str, storage: &'a [f32]) -> Result<&mut Self, CkptError> {
        self.storage(state, StateDtype::F32, bytemuck::cast_slice(storage))
    }

    /// Adds a state: the little-endian bytes of the rank's shard storage, `layout.shard_elems()` elements.
    ///
    /// # Errors
    /// Another length, or the state was added before.
    pub fn storage(&mut self, state: &str, dtype: StateDtype, storage: &'a [u8]) -> Result<&mut Self, CkptError> {
        check_len(state, "shard storage", self.layout.shard_elems(), dtype, storage)?;
        for (u, unit) in self.layout.units().iter().enumerate() {
            let range = unit.shard_range();
            let bytes = (range.start * dtype.bytes()) as usize..(range.end * dtype.bytes()) as usize;
            self.unit(state, dtype, u, &storage[bytes])?;
        }
        Ok(self)
    }

    /// Adds a unit of a state in fp32: the rank's shard of it, `shard_elems` elements with the padding.
    ///
    /// # Errors
    /// No such unit, another length, or it was added before.
    pub fn unit_f32(&mut self, state: &str, unit: usize, shard: &'a [f32]) -> Result<&mut Self, CkptError> {
        self.unit(state, StateDtype::F32, unit, bytemuck::cast_slice(shard))
    }

    /// Adds a unit of a state: the little-endian bytes of the rank's shard of it, `shard_elems` elements with the
    /// padding.
    ///
    /// # Errors
    /// No such unit, another length, another dtype than before, or it was added before.
    pub fn unit(
        &mut self,
        state: &str,
        dtype: StateDtype,
        unit: usize,
        shard: &'a [u8],
    ) -> Result<&mut Self, CkptError> {
        let units = self.layout.units();
        let elems = units.get(unit).map(|u| u.shard_elems);
        let elems = elems.ok_or_else(|| CkptError::argument("unit", format!("below {}", units.len()), unit))?;
        check_len(state, "shard of a unit", elems, dtype, shard)?;
        let index = self.states.iter().position(|s| s.spec.name == state).unwrap_or_else(|| {
            let spec = StateSpec { name: state.into(), dtype };
            self.states.push(State { spec, units: vec![None; units.len()] });
            self.states.len() - 1
        });
        let found = &mut self.states[index];
        if found.spec.dtype != dtype {
            let what = format!("dtype of state {state:?}");
            return Err(CkptError::argument(what, found.spec.dtype.name(), dtype.name()));
        }
        if found.units[unit].replace(shard).is_some() {
            let what = format!("state {state:?} of unit {:?}", units[unit].name);
            return Err(CkptError::argument(what, "once", "twice"));
        }
        Ok(self)
    }

    /// The layout of the model.
    pub fn layout(&self) -> &'a Layout {
        self.layout
    }

    /// The rank of the shard.
    pub fn rank(&self) -> u64 {
        self.rank
    }

    pub(crate) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// The states in file order.
    pub(crate) fn specs(&self) -> Vec<StateSpec> {
        file_order(self.states.iter().map(|s| s.spec.clone()).collect())
    }

    /// The state bytes of the file, without padding.
    pub(crate) fn source(&self) -> Result<Slices<'a>, CkptError> {
        let mut parts = Vec::with_capacity(self.states.len() * self.pieces.len());
        for spec in self.specs() {
            for state in self.states.iter().filter(|s| s.spec.name == spec.name) {
                for piece in &self.pieces {
                    let unit = piece.0 as usize;
                    let shard = state.units[unit].ok_or_else(|| {
                        let what = format!("state {:?} of unit {:?}", spec.name, self.layout.units()[unit].name);
                        CkptError::argument(what, "data for every unit", "no data")
                    })?;
                    let width = spec.dtype.bytes();
                    for run in runs(&self.layout.units()[unit], self.rank) {
                        let range = run.in_shard();
                        parts.push(&shard[(range.start * width) as usize..(range.end * width) as usize]);
                    }
                }
            }
        }
        Ok(Slices::new(parts))
    }
}

fn check_len(state: &str, what: &str, elems: u64, dtype: StateDtype, bytes: &[u8]) -> Result<(), CkptError> {
    if Some(bytes.len() as u64) == elems.checked_mul(dtype.bytes()) {
        return Ok(());
    }
    let expected = format!("{elems} elements of {}", dtype.name());
    Err(CkptError::argument(format!("{what} of state {state:?}"), expected, format!("{} bytes", bytes.len())))
}

#[cfg(test)]
mod tests {
    use zero_shard::{ParamSpec, UnitSpec};

    use super::*;
    use crate::io::parallel::Source;

    fn layout() -> Layout {
        let unit = |n: &str, elems: u64| UnitSpec::new(n, [ParamSpec::new(format!("{n}.p"), [elems])]);
        Layout::new(&[unit("a", 5), unit("b", 0), unit("c", 3)], 2, 1).unwrap()
    }

    #[test]
    fn padding_is_not_stored() {
        let layout = layout();
        let storage = [0.0f32, 1.0, 2.0, 3.0, 4.0];
        let mut data = ShardData::new(&layout, 1).unwrap();
        data.storage_f32("master", &storage).unwrap();
        assert_eq!(data.pieces(), [Piece(0, 3, 5), Piece(2, 2, 3)]);
        assert_eq!(data.source().unwrap().len(), 3 * 4);
    }

    #[test]
    fn wrong_shapes_are_rejected() {
        let layout = layout();
        let storage = [0.0f32; 5];
        assert!(ShardData::new(&layout, 2).is_err());
        let mut data = ShardData::new(&layout, 0).unwrap();
        assert!(data.storage_f32("master", &storage[..4]).is_err());
        assert!(data.unit_f32("master", 3, &storage).is_err());
        data.unit_f32("master", 0, &storage[..3]).unwrap();
        assert!(data.source().err().unwrap().to_string().contains("\"c\""));
        assert!(data.unit_f32("master", 0, &storage[..3]).is_err());
        assert!(data.unit("master", StateDtype::BF16, 2, &[0; 4]).is_err());
    }
}
