//! Plans that move a model from the ranks of one layout to those of another.
//!
//! A plan is a list of [`Move`]s, each a contiguous copy. There are two ways to compute one:
//!
//! - [`reshard_rank`] plans from one [`Layout`] to another, which may differ in world size, units
//!   and alignment. It plans for one target rank, so its cost does not grow with the target's world
//!   size.
//! - [`Sources`] plans from any list of [`Extent`]s, such as a checkpoint's manifest.
//!
//! A plan copies every requested element to its place exactly once; otherwise the result is an
//! error that names the parameter and the range.

use std::collections::BTreeMap;
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

/// A contiguous range of elements, and the place that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Extent {
    /// The elements, in the global numbering of the target's layout.
    pub elems: Range<u64>,
    /// The place that holds them.
    pub place: u64,
    /// Offset of the first element in that place's storage.
    pub offset_elems: u64,
}

impl Extent {
    /// Creates an extent.
    pub fn new(elems: Range<u64>, place: u64, offset_elems: u64) -> Self {
        Self {
            elems,
            place,
            offset_elems,
        }
    }

    /// The part with elements `start..end`, which must be within this extent.
    fn part(&self, start: u64, end: u64) -> Self {
        Self::new(
            start..end,
            self.place,
            self.offset_elems + (start - self.elems.start),
        )
    }
}

impl Layout {
    /// The extent of elements `in_param` of the parameter `name`, which `place` stores at
    /// `offset_elems`.
    ///
    /// # Errors
    /// There is no such parameter, or the range is reversed or ends past it.
    pub fn extent(
        &self,
        name: &str,
        in_param: Range<u64>,
        place: u64,
        offset_elems: u64,
    ) -> Result<Extent, ShardError> {
        let param = self.find_param(name).and_then(|id| self.param(id));
        let param = param.ok_or_else(|| ShardError::UnknownParam { name: name.into() })?;
        if in_param.start > in_param.end || in_param.end > param.numel_elems {
            return Err(ShardError::RangeOutside {
                what: "a parameter",
                range: in_param,
                len_elems: param.numel_elems,
            });
        }
        let base = param.global_offset_elems;
        Ok(Extent::new(
            base + in_param.start..base + in_param.end,
            place,
            offset_elems,
        ))
    }

    /// The extents of `rank`'s shard storage; their place is `rank`.
    ///
    /// # Errors
    /// There is no such rank.
    pub fn shard_extents(
        &self,
        rank: u64,
    ) -> Result<impl Iterator<Item = Extent> + '_, ShardError> {
        Ok(self.rank_pieces(rank)?.map(move |piece| {
            let global = self.units[piece.id.unit].params[piece.id.param].global_offset_elems;
            let elems = global + piece.in_param.start..global + piece.in_param.end;
            Extent::new(elems, rank, piece.in_storage.start)
        }))
    }

    /// The extents of a whole storage at `place`.
    pub fn whole_extents(&self, place: u64) -> impl Iterator<Item = Extent> + '_ {
        self.params()
            .filter(|(_, p)| p.numel_elems > 0)
            .map(move |(id, p)| {
                Extent::new(
                    p.global_range(),
                    place,
                    self.units[id.unit].whole_offset_elems + p.offset_elems,
                )
            })
    }

    /// The name of the parameter with element `start` of the global numbering, and its range from
    /// there up to `end`.
    fn name_range(&self, start: u64, end: u64) -> (String, Range<u64>) {
        let at = self
            .locate_elem(start)
            .and_then(|at| Some((self.param(at.id)?, at.in_param)));
        at.map_or_else(
            || (String::from("(past the last)"), start..end),
            |(p, from)| {
                (
                    p.name.clone(),
                    from..p.numel_elems.min(from + (end - start)),
                )
            },
        )
    }
}

/// The sources of elements: disjoint extents, by ascending element.
#[derive(Clone, Debug)]
pub struct Sources<'a> {
    layout: &'a Layout,
    extents: Vec<Extent>,
}

impl<'a> Sources<'a> {
    /// Creates sources in which each element has at most one extent, in the global numbering of
    /// `layout`.
    ///
    /// # Errors
    /// An extent is reversed, ends past the model or past 64 bits of storage, or two extents
    /// overlap.
    pub fn new(
        layout: &'a Layout,
        extents: impl IntoIterator<Item = Extent>,
    ) -> Result<Self, ShardError> {
        let mut extents = checked(layout, extents)?;
        extents.sort_unstable_by_key(|e| e.elems.start);
        for pair in extents.windows(2) {
            let [a, b] = [&pair[0], &pair[1]];
            if b.elems.start < a.elems.end {
                let (param, in_param) =
                    layout.name_range(b.elems.start, a.elems.end.min(b.elems.end));
                return Err(ShardError::SourcesOverlap {
                    param,
                    in_param,
                    places: [a.place, b.place],
                });
            }
        }
        Ok(Self { layout, extents })
    }

    /// Creates sources from extents that may overlap, such as those of replicated parameters: the
    /// first extent in the list is used for each element.
    ///
    /// # Errors
    /// An extent is reversed, or ends past the model or past 64 bits of storage.
    pub fn first_of(
        layout: &'a Layout,
        extents: impl IntoIterator<Item = Extent>,
    ) -> Result<Self, ShardError> {
        let mut taken: BTreeMap<u64, Extent> = BTreeMap::new();
        for extent in checked(layout, extents)? {
            // Insert only the parts that no earlier extent covers.
            let before = taken
                .range(..=extent.elems.start)
                .next_back()
                .map(|(_, e)| e.elems.end);
            let mut at = extent.elems.start.max(before.unwrap_or(0));
            if at >= extent.elems.end {
                continue;
            }
            let mut parts = Vec::new();
            for other in taken.range(at..extent.elems.end).map(|(_, e)| &e.elems) {
                parts.push(at..other.start);
                at = other.end;
            }
            parts.push(at..extent.elems.end);
            for part in parts.into_iter().filter(|part| part.start < part.end) {
                taken.insert(part.start, extent.part(part.start, part.end));
            }
        }
        Ok(Self {
            layout,
            extents: taken.into_values().collect(),
        })
    }

    /// The extents, disjoint, by ascending element.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Checks that every element of the model has a source.
    ///
    /// # Errors
    /// [`ShardError::Hole`] with the first missing range.
    pub fn check_complete(&self) -> Result<(), ShardError> {
        let numel = self.layout.numel_elems();
        let mut at = 0;
        for next in self
            .extents
            .iter()
            .map(|e| &e.elems)
            .chain([&(numel..numel)])
        {
            if next.start > at {
                return Err(self.hole(at, next.start));
            }
            at = next.end;
        }
        Ok(())
    }

    fn hole(&self, start: u64, end: u64) -> ShardError {
        let (param, in_param) = self.layout.name_range(start, end);
        ShardError::Hole { param, in_param }
    }

    /// Plans the copies that fill the extents `wanted`, in their order.
    ///
    /// # Errors
    /// A wanted extent ends past the model, two of them overlap in storage, or an element has no
    /// source.
    pub fn plan(&self, wanted: impl IntoIterator<Item = Extent>) -> Result<Vec<Move>, ShardError> {
        let wanted = checked(self.layout, wanted)?;
        let mut filled: Vec<(u64, u64, u64)> = wanted
            .iter()
            .map(|w| {
                (
                    w.place,
                    w.offset_elems,
                    w.offset_elems + (w.elems.end - w.elems.start),
                )
            })
            .collect();
        filled.sort_unstable();
        if let Some(pair) = filled
            .windows(2)
            .find(|p| p[0].0 == p[1].0 && p[1].1 < p[0].2)
        {
            return Err(ShardError::TargetsOverlap {
                place: pair[1].0,
                in_storage: pair[1].1..pair[1].2.min(pair[0].2),
            });
        }
        let mut moves = Vec::new();
        for want in &wanted {
            let first = self
                .extents
                .partition_point(|e| e.elems.end <= want.elems.start);
            let mut at = want.elems.start;
            for have in &self.extents[first..] {
                if have.elems.start >= want.elems.end || have.elems.start > at {
                    break;
                }
                let end = have.elems.end.min(want.elems.end);
                let from = have.part(at, end);
                let to = want.part(at, end);
                push(
                    &mut moves,
                    Move {
                        from: from.place,
                        from_range: from.offset_elems..from.offset_elems + (end - at),
                        to: to.place,
                        to_range: to.offset_elems..to.offset_elems + (end - at),
                    },
                );
                at = end;
            }
            if at < want.elems.end {
                let next = self.extents.partition_point(|e| e.elems.end <= at);
                let next = self
                    .extents
                    .get(next)
                    .map_or(want.elems.end, |e| e.elems.start.min(want.elems.end));
                return Err(self.hole(at, next));
            }
        }
        Ok(moves)
    }
}

/// Returns the non-empty extents if all are within the model and 64 bits of storage.
fn checked(
    layout: &Layout,
    extents: impl IntoIterator<Item = Extent>,
) -> Result<Vec<Extent>, ShardError> {
    let mut all = Vec::new();
    for e in extents {
        if e.elems.start > e.elems.end || e.elems.end > layout.numel_elems() {
            let len_elems = layout.numel_elems();
            return Err(ShardError::RangeOutside {
                what: "the model",
                range: e.elems,
                len_elems,
            });
        }
        if e.offset_elems
            .checked_add(e.elems.end - e.elems.start)
            .is_none()
        {
            return Err(ShardError::TooLarge {
                what: format!("an offset of place {}", e.place),
            });
        }
        if e.elems.start < e.elems.end {
            all.push(e);
        }
    }
    Ok(all)
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

/// Plans the copies that fill the shard storages of all ranks of `to`: [`reshard_rank`] for each
/// rank in order.
///
/// # Errors
/// As for [`reshard_rank`].
pub fn reshard(from: &Layout, to: &Layout) -> Result<Vec<Move>, ShardError> {
    check_same_params(from, to)?;
    let mut moves = Vec::new();
    for rank in 0..to.world_size() {
        append_rank(&mut moves, from, to, rank)?;
    }
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
