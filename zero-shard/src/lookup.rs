//! Maps between parameters and the ranks that own them.
//!
//! An element has four addresses. Each map between them takes O(log n) time in the number of units
//! and parameters, and allocates nothing:
//!
//! ```text
//! global index  <->  (parameter, offset in it)  <->  unit, offset in the flat parameter  <->  (rank, offset in its shard)
//! ```

use std::ops::Range;

use crate::{Layout, ParamId, ParamPlacement, ShardError, UnitLayout};

/// A part of a unit that one rank owns.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ShardPiece {
    /// The rank that owns it.
    pub rank: u64,
    /// Its range in that rank's shard of the unit.
    pub in_shard: Range<u64>,
    /// Its range in the unit's flat parameter.
    pub in_flat: Range<u64>,
}

/// A part of a unit that belongs to one parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ParamPiece {
    /// Position of the parameter in [`UnitLayout::params`].
    pub param: usize,
    /// Its range in the parameter.
    pub in_param: Range<u64>,
    /// Its range in the unit's flat parameter.
    pub in_flat: Range<u64>,
}

/// A part of a rank's shard storage that belongs to one parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct StoredPiece {
    /// The rank that owns it.
    pub rank: u64,
    /// The parameter.
    pub id: ParamId,
    /// Its range in the parameter.
    pub in_param: Range<u64>,
    /// Its range in the rank's shard storage.
    pub in_storage: Range<u64>,
}

/// The location of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ElemLocation {
    /// The parameter that it belongs to.
    pub id: ParamId,
    /// Its offset in the parameter.
    pub in_param: u64,
    /// The rank that owns it.
    pub rank: u64,
    /// Its offset in that rank's shard storage.
    pub in_storage: u64,
}

fn check(what: &'static str, range: &Range<u64>, len_elems: u64) -> Result<(), ShardError> {
    if range.start > range.end || range.end > len_elems {
        return Err(ShardError::RangeOutside {
            what,
            range: range.clone(),
            len_elems,
        });
    }
    Ok(())
}

impl UnitLayout {
    /// Splits `flat`, a range of the flat parameter, into one piece for each rank that owns a part
    /// of it, ascending.
    ///
    /// # Errors
    /// The range is reversed or ends past the flat parameter.
    pub fn locate(
        &self,
        flat: Range<u64>,
    ) -> Result<impl Iterator<Item = ShardPiece> + use<>, ShardError> {
        check("a flat parameter", &flat, self.padded_elems)?;
        let shard_elems = self.shard_elems;
        let mut at = flat.start;
        Ok(std::iter::from_fn(move || {
            // The range is not empty here, so `shard_elems` is not 0.
            (at < flat.end).then(|| {
                let rank = at / shard_elems;
                let base = at / shard_elems * shard_elems;
                let end = flat.end.min(base + shard_elems);
                let piece = ShardPiece {
                    rank,
                    in_shard: at - base..end - base,
                    in_flat: at..end,
                };
                at = end;
                piece
            })
        }))
    }

    /// Splits `flat`, a range of the flat parameter, into one piece for each parameter in it,
    /// ascending, without padding and empty parameters.
    ///
    /// # Errors
    /// The range is reversed or ends past the flat parameter.
    pub fn params_in(
        &self,
        flat: Range<u64>,
    ) -> Result<impl Iterator<Item = ParamPiece> + '_, ShardError> {
        check("a flat parameter", &flat, self.padded_elems)?;
        let first = self.params.partition_point(|p| p.range().end <= flat.start);
        let touched = self.params[first..].iter().enumerate();
        let touched = touched.take_while(move |(_, p)| p.offset_elems < flat.end);
        Ok(touched.filter_map(move |(i, p)| {
            let in_flat = p.offset_elems.max(flat.start)..p.range().end.min(flat.end);
            let in_param = in_flat.start - p.offset_elems..in_flat.end - p.offset_elems;
            (!in_flat.is_empty()).then_some(ParamPiece {
                param: first + i,
                in_param,
                in_flat,
            })
        }))
    }

    /// The parameter of element `elem` of the flat parameter, and the offset in it; `None` in
    /// padding.
    fn param_at(&self, elem: u64) -> Option<(usize, u64)> {
        let i = self.params.partition_point(|p| p.range().end <= elem);
        let p = self.params.get(i).filter(|p| p.offset_elems <= elem)?;
        Some((i, elem - p.offset_elems))
    }
}

impl Layout {
    /// The rank that owns element `global` of the global numbering; `None` past the last. O(log n).
    pub fn owner(&self, global: u64) -> Option<u64> {
        self.locate_elem(global).map(|at| at.rank)
    }

    /// The location of element `global` of the global numbering; `None` past the last. O(log n).
    pub fn locate_elem(&self, global: u64) -> Option<ElemLocation> {
        let unit = self
            .units
            .partition_point(|u| u.global_offset_elems + u.numel_elems <= global);
        let params = &self.units.get(unit)?.params;
        let param = params.partition_point(|p| p.global_range().end <= global);
        let in_param = global - params[param].global_offset_elems;
        let (rank, in_storage) = self.place_of(ParamId { unit, param }, in_param)?;
        Some(ElemLocation {
            id: ParamId { unit, param },
            in_param,
            rank,
            in_storage,
        })
    }

    /// The global index of the element at offset `in_storage` of `rank`'s shard storage: the
    /// inverse of [`Layout::locate_elem`]. `None` in padding and past the end. O(log n).
    pub fn global_at(&self, rank: u64, in_storage: u64) -> Option<u64> {
        if rank >= self.world_size {
            return None;
        }
        let unit = self
            .units
            .partition_point(|u| u.shard_range().end <= in_storage);
        let unit = self.units.get(unit)?;
        let (param, in_param) =
            unit.param_at(unit.shard(rank).start + in_storage - unit.shard_offset_elems)?;
        Some(unit.params[param].global_offset_elems + in_param)
    }

    /// The rank that owns element `in_param` of parameter `id`, and the offset in its shard
    /// storage; `None` if there is no such element.
    pub fn place_of(&self, id: ParamId, in_param: u64) -> Option<(u64, u64)> {
        let unit = self.units.get(id.unit)?;
        let param = self.param(id).filter(|p| in_param < p.numel_elems)?;
        let flat = param.offset_elems + in_param;
        let rank = flat / unit.shard_elems;
        Some((
            rank,
            unit.shard_offset_elems + flat - rank * unit.shard_elems,
        ))
    }

    /// Splits `in_param`, a range of parameter `id`, into one piece for each rank that owns a part
    /// of it, ascending.
    ///
    /// # Errors
    /// There is no such parameter, or the range is reversed or ends past it.
    pub fn locate(
        &self,
        id: ParamId,
        in_param: Range<u64>,
    ) -> Result<impl Iterator<Item = StoredPiece> + use<>, ShardError> {
        let unit = self.unit(id.unit)?;
        let unknown = || ShardError::UnknownParam {
            name: format!("number {} of {}", id.param, unit.name),
        };
        let offset = self.param(id).ok_or_else(unknown)?;
        check("a parameter", &in_param, offset.numel_elems)?;
        let offset = offset.offset_elems;
        let storage = unit.shard_offset_elems;
        Ok(unit
            .locate(offset + in_param.start..offset + in_param.end)?
            .map(move |piece| StoredPiece {
                rank: piece.rank,
                id,
                in_param: piece.in_flat.start - offset..piece.in_flat.end - offset,
                in_storage: storage + piece.in_shard.start..storage + piece.in_shard.end,
            }))
    }

    /// Splits `in_shard`, a range of `rank`'s shard of unit `unit`, into one piece for each
    /// parameter in it, ascending, without padding. The inverse of [`Layout::locate`].
    ///
    /// # Errors
    /// There is no such unit or rank, or the range is reversed or ends past the shard.
    pub fn params_in(
        &self,
        unit: usize,
        rank: u64,
        in_shard: Range<u64>,
    ) -> Result<impl Iterator<Item = StoredPiece> + '_, ShardError> {
        let placed = self.unit(unit)?;
        self.check_rank(rank)?;
        check("a shard", &in_shard, placed.shard_elems)?;
        let base = placed.shard(rank).start;
        let pieces = placed.params_in(base + in_shard.start..base + in_shard.end)?;
        Ok(pieces.map(move |piece| StoredPiece {
            rank,
            id: ParamId {
                unit,
                param: piece.param,
            },
            in_param: piece.in_param,
            in_storage: placed.shard_offset_elems + piece.in_flat.start - base
                ..placed.shard_offset_elems + piece.in_flat.end - base,
        }))
    }

    /// Splits all of `rank`'s shard storage into one piece for each parameter in it, ascending,
    /// without padding.
    ///
    /// # Errors
    /// There is no such rank.
    pub fn rank_pieces(
        &self,
        rank: u64,
    ) -> Result<impl Iterator<Item = StoredPiece> + '_, ShardError> {
        self.check_rank(rank)?;
        let shards = self.units.iter().enumerate();
        // The rank and ranges are in bounds, so no unit returns an error.
        Ok(shards.flat_map(move |(i, unit)| {
            self.params_in(i, rank, 0..unit.shard_elems)
                .into_iter()
                .flatten()
        }))
    }

    /// All parameters in order.
    pub fn params(&self) -> impl Iterator<Item = (ParamId, &ParamPlacement)> {
        self.units.iter().enumerate().flat_map(|(unit, placed)| {
            placed
                .params
                .iter()
                .enumerate()
                .map(move |(param, p)| (ParamId { unit, param }, p))
        })
    }

    pub(crate) fn check_rank(&self, rank: u64) -> Result<(), ShardError> {
        if rank >= self.world_size {
            return Err(ShardError::UnknownRank {
                rank,
                world_size: self.world_size,
            });
        }
        Ok(())
    }
}
