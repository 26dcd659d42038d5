//! Plans that move a model from the ranks of one layout to those of another.
//!
//! A plan is a list of [`Move`]s, each a contiguous copy. [`reshard_rank`] plans from one
//! [`Layout`] to another, which may differ in world size, units and alignment. It plans for one
//! target rank, so its cost does not grow with the target's world size.
//!
//! A plan copies every element of the target to its place exactly once; otherwise the result is an
//! error that names the parameter and the range.
//!
//! Its user is a framework that changes its number of ranks without a checkpoint; zero-ckpt reads
//! the ranges of a checkpoint's tensors by itself.

use std::ops::Range;

use crate::{Layout, ParamId, ShardError, StoredPiece};

/// A contiguous copy between two places. A place is a rank or a file; the caller numbers them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Move {
    /// The source place.
    pub from: u64,
    /// The range in the source's storage.
    pub from_range: Range<u64>,
    /// The target place.
    pub to: u64,
    /// The range in the target's storage, of the same length.
    pub to_range: Range<u64>,
}

impl Move {
    /// Number of elements.
    pub fn elems(&self) -> u64 {
        self.to_range.end - self.to_range.start
    }

    fn continues(&self, last: &Self) -> bool {
        (last.from, last.to) == (self.from, self.to)
            && (last.from_range.end, last.to_range.end)
                == (self.from_range.start, self.to_range.start)
    }
}

/// Appends a move, merged with the last if contiguous.
fn push(moves: &mut Vec<Move>, next: Move) {
    match moves.last_mut().filter(|last| next.continues(last)) {
        Some(last) => {
            last.from_range.end = next.from_range.end;
            last.to_range.end = next.to_range.end;
        }
        None => moves.push(next),
    }
}

/// Plans the copies that fill `rank`'s shard storage of `to` from the shard storages of `from`;
/// places are ranks.
///
/// # Errors
/// There is no such rank, or the two layouts have different parameters: one is missing in `from`
/// ([`ShardError::Hole`]) or in `to` ([`ShardError::Unwanted`]), or has a different shape.
pub fn reshard_rank(from: &Layout, to: &Layout, rank: u64) -> Result<Vec<Move>, ShardError> {
    check_same_params(from, to)?;
    let mut moves = Vec::new();
    append_rank(&mut moves, from, to, rank)?;
    Ok(moves)
}

fn append_rank(
    moves: &mut Vec<Move>,
    from: &Layout,
    to: &Layout,
    rank: u64,
) -> Result<(), ShardError> {
    for StoredPiece {
        id,
        in_param,
        in_storage,
        ..
    } in to.rank_pieces(rank)?
    {
        let name = &to.units[id.unit].params[id.param].name;
        let hole = || ShardError::Hole {
            param: name.clone(),
            in_param: in_param.clone(),
        };
        let source = find(from, id, name).ok_or_else(hole)?;
        for piece in from.locate(source, in_param.clone())? {
            let start = in_storage.start + (piece.in_param.start - in_param.start);
            let len = piece.in_param.end - piece.in_param.start;
            push(
                moves,
                Move {
                    from: piece.rank,
                    from_range: piece.in_storage,
                    to: rank,
                    to_range: start..start + len,
                },
            );
        }
    }

    Ok(())
}

/// Finds the parameter with this name; tries position `guess` first.
fn find(layout: &Layout, guess: ParamId, name: &str) -> Option<ParamId> {
    let there = layout.param(guess).is_some_and(|p| p.name == name);
    if there {
        Some(guess)
    } else {
        layout.find_param(name)
    }
}

fn check_same_params(from: &Layout, to: &Layout) -> Result<(), ShardError> {
    let mut wanted: Vec<Vec<bool>> = from
        .units
        .iter()
        .map(|u| vec![false; u.params.len()])
        .collect();

    for (id, p) in to.params() {
        let found = find(from, id, &p.name).and_then(|id| Some((id, from.param(id)?)));
        let Some((id, source)) = found else {
            return Err(ShardError::Hole {
                param: p.name.clone(),
                in_param: 0..p.numel_elems,
            });
        };
        if source.shape != p.shape {
            let expected = p.shape.clone();
            let got = source.shape.clone();
            return Err(ShardError::ShapeMismatch {
                param: p.name.clone(),
                expected,
                got,
            });
        }
        wanted[id.unit][id.param] = true;
    }

    let unwanted = from.params().find(|(id, _)| !wanted[id.unit][id.param]);
    unwanted.map_or(Ok(()), |(_, p)| {
        Err(ShardError::Unwanted {
            param: p.name.clone(),
        })
    })
}
