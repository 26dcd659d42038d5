//! Which rank owns which element.
//!
//! A model is a list of **units** (embedding, each block, head): parameters that travel together. The
//! parameters of a unit are laid end to end in one **flat parameter**, which is padded at its end and cut
//! into `world_size` **shards** of equal length. Shard `r` belongs to rank `r`, at every ZeRO stage.
//!
//! ```text
//! flat parameter   | wte ............ | wpe .... | padding |
//! shards           | rank 0 | rank 1 | rank 2 | rank 3    |
//! ```
//!
//! Two storages hold a model, and both are laid out here: the **whole** storage is all padded flat
//! parameters end to end (`padded_elems`); the **shard** storage of a rank is its shards of all units end
//! to end (`shard_elems = padded_elems / world_size`).

use std::ops::Range;

use crate::ShardError;

/// A parameter before it is placed: its name and shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamSpec {
    /// Name, unique within the model.
    pub name: String,
    /// Extent of each dimension; `[]` is a scalar (one element), a zero extent is an empty parameter.
    pub shape: Vec<u64>,
}

impl ParamSpec {
    /// A parameter of this name and shape.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<u64>>) -> Self {
        Self { name: name.into(), shape: shape.into() }
    }
}

/// Parameters that are gathered, released and reduced together, before they are placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitSpec {
    /// Name, unique within the model.
    pub name: String,
    /// The parameters, in the order in which they lie in the flat parameter.
    pub params: Vec<ParamSpec>,
}

impl UnitSpec {
    /// A unit of this name and these parameters.
    pub fn new(name: impl Into<String>, params: impl Into<Vec<ParamSpec>>) -> Self {
        Self { name: name.into(), params: params.into() }
    }
}

/// A parameter in its place in the flat parameter of its unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamPlacement {
    /// Name of the parameter.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Where it starts in the unit's flat parameter.
    pub offset_elems: u64,
    /// How many elements it has.
    pub numel_elems: u64,
}

impl ParamPlacement {
    /// The parameter's range in the unit's flat parameter.
    pub fn range(&self) -> Range<u64> {
        self.offset_elems..self.offset_elems + self.numel_elems
    }
}

/// A unit in its place: its flat parameter, padding and shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitLayout {
    /// Name of the unit.
    pub name: String,
    /// The parameters, by ascending offset, without gaps.
    pub params: Vec<ParamPlacement>,
    /// Elements of the flat parameter that belong to parameters.
    pub numel_elems: u64,
    /// Elements of one shard.
    pub shard_elems: u64,
    /// Elements of the flat parameter with its padding: `shard_elems * world_size`.
    pub padded_elems: u64,
    /// Where this unit starts in the whole storage.
    pub whole_offset_elems: u64,
    /// Where this unit's shard starts in a rank's shard storage.
    pub shard_offset_elems: u64,
}

impl UnitLayout {
    /// Elements of padding at the end of the flat parameter.
    pub fn padding_elems(&self) -> u64 {
        self.padded_elems - self.numel_elems
    }

    /// The part of the flat parameter that `rank` owns (it may lie partly or wholly in the padding).
    pub fn shard(&self, rank: u64) -> Range<u64> {
        rank * self.shard_elems..(rank + 1) * self.shard_elems
    }

    /// The rank that owns element `elem` of the flat parameter; `None` past its end.
    pub fn owner(&self, elem: u64) -> Option<u64> {
        (elem < self.padded_elems).then(|| elem / self.shard_elems)
    }

    /// Where this unit lies in the whole storage.
    pub fn whole_range(&self) -> Range<u64> {
        self.whole_offset_elems..self.whole_offset_elems + self.padded_elems
    }

    /// Where this unit's shard lies in a rank's shard storage.
    pub fn shard_range(&self) -> Range<u64> {
        self.shard_offset_elems..self.shard_offset_elems + self.shard_elems
    }
}

/// The layout of a model over `world_size` ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub(crate) units: Vec<UnitLayout>,
    pub(crate) world_size: u64,
    pub(crate) align_elems: u64,
    pub(crate) numel_elems: u64,
    pub(crate) shard_elems: u64,
}

impl Layout {
    /// Lays out `units` over `world_size` ranks; every shard is a multiple of `align_elems`.
    ///
    /// # Errors
    /// A world of no ranks, an alignment of 0, a name used twice, or a size beyond 64 bits.
    pub fn new(units: &[UnitSpec], world_size: u64, align_elems: u64) -> Result<Self, ShardError> {
        if world_size == 0 {
            return Err(ShardError::NoRanks);
        }
        if align_elems == 0 {
            return Err(ShardError::ZeroAlignment);
        }
        let mut names = std::collections::HashSet::new();
        let (mut placed, mut whole, mut shard, mut numel) = (Vec::with_capacity(units.len()), 0u64, 0u64, 0u64);
        for unit in units {
            let overflow = || ShardError::TooLarge { what: unit.name.clone() };
            let (mut params, mut end) = (Vec::with_capacity(unit.params.len()), 0u64);
            for param in &unit.params {
                if !names.insert(param.name.as_str()) {
                    return Err(ShardError::DuplicateName { name: param.name.clone() });
                }
                let n = param.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).ok_or_else(overflow)?;
                params.push(ParamPlacement {
                    name: param.name.clone(),
                    shape: param.shape.clone(),
                    offset_elems: end,
                    numel_elems: n,
                });
                end = end.checked_add(n).ok_or_else(overflow)?;
            }
            let shard_elems = end.div_ceil(world_size).checked_next_multiple_of(align_elems).ok_or_else(overflow)?;
            let padded_elems = shard_elems.checked_mul(world_size).ok_or_else(overflow)?;
            placed.push(UnitLayout {
                name: unit.name.clone(),
                params,
                numel_elems: end,
                shard_elems,
                padded_elems,
                whole_offset_elems: whole,
                shard_offset_elems: shard,
            });
            whole = whole.checked_add(padded_elems).ok_or_else(overflow)?;
            shard += shard_elems;
            numel += end;
        }
        Ok(Self { units: placed, world_size, align_elems, numel_elems: numel, shard_elems: shard })
    }

    /// The units, in forward order.
    pub fn units(&self) -> &[UnitLayout] {
        &self.units
    }

    /// How many ranks share the model.
    pub fn world_size(&self) -> u64 {
        self.world_size
    }

    /// Every shard is a multiple of this.
    pub fn align_elems(&self) -> u64 {
        self.align_elems
    }

    /// Elements of all parameters: Ψ of the formulas.
    pub fn numel_elems(&self) -> u64 {
        self.numel_elems
    }

    /// Elements of a rank's shard storage.
    pub fn shard_elems(&self) -> u64 {
        self.shard_elems
    }

    /// Elements of the whole storage: Ψ and the padding.
    pub fn padded_elems(&self) -> u64 {
        self.shard_elems * self.world_size
    }
}
