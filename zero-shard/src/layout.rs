//! The assignment of elements to ranks.
//!
//! A model is a list of **units** (embedding, each block, head): parameters that are communicated
//! together. The parameters of a unit are concatenated in one **flat parameter**, which is padded
//! at its end and cut into `world_size` **shards** of equal length. Shard `r` belongs to rank `r`,
//! at every ZeRO stage.
//!
//! ```text
//! flat parameter   | wte ............ | wpe .... | padding |
//! shards           | rank 0 | rank 1 | rank 2 | rank 3    |
//! ```
//!
//! A layout defines two storages. The **whole** storage is the concatenation of all padded flat
//! parameters (`padded_elems`); the **shard** storage of a rank is the concatenation of its shards
//! of all units (`shard_elems = padded_elems / world_size`).
//!
//! The **global** index counts the elements of all parameters in order, `0..numel_elems`, without
//! padding. It is the same at every world size and alignment.

use std::collections::HashMap;
use std::ops::Range;

use crate::ShardError;
use crate::blocks::BlockFormat;
use crate::index::{NameIndex, NameRef};

/// The name and shape of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(deny_unknown_fields)
)]
pub struct ParamSpec {
    /// Name, unique within the model.
    pub name: String,
    /// Extent of each dimension; `[]` is a scalar (one element), an extent of 0 makes the parameter
    /// empty.
    pub shape: Vec<u64>,
}

impl ParamSpec {
    /// Creates the specification of a parameter.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<u64>>) -> Self {
        Self {
            name: name.into(),
            shape: shape.into(),
        }
    }

    /// Number of elements: the product of the extents.
    ///
    /// # Errors
    /// The product does not fit 64 bits.
    pub fn numel_elems(&self) -> Result<u64, ShardError> {
        if self.shape.contains(&0) {
            return Ok(0);
        }
        let product = self.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
        product.ok_or_else(|| ShardError::TooLarge {
            what: self.name.clone(),
        })
    }
}

/// The name and parameters of a unit: parameters that are gathered, freed and reduced together.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(deny_unknown_fields)
)]
pub struct UnitSpec {
    /// Name, unique among the units.
    pub name: String,
    /// The parameters, in the order of the flat parameter.
    pub params: Vec<ParamSpec>,
}

impl UnitSpec {
    /// Creates the specification of a unit.
    pub fn new(name: impl Into<String>, params: impl Into<Vec<ParamSpec>>) -> Self {
        Self {
            name: name.into(),
            params: params.into(),
        }
    }
}

impl UnitSpec {
    /// The units of parameters with names such as `blocks.3.mlp.weight`: `unit_of` returns the name
    /// of a parameter's unit, such as `blocks.3`. Units are in the order of their first parameters.
    ///
    /// ```
    /// use zero_shard::{ParamSpec, UnitSpec};
    ///
    /// let names = ["wte", "blocks.0.w", "blocks.0.b", "blocks.1.w", "norm"];
    /// let params = names.map(|name| ParamSpec::new(name, [4]));
    /// let units = UnitSpec::by_name(params, |name| match name.rsplit_once('.') {
    ///     Some((block, _)) => block.to_owned(),
    ///     None => name.to_owned(),
    /// });
    /// let units: Vec<_> = units.iter().map(|unit| (&*unit.name, unit.params.len())).collect();
    /// assert_eq!(units, [("wte", 1), ("blocks.0", 2), ("blocks.1", 1), ("norm", 1)]);
    /// ```
    pub fn by_name(
        params: impl IntoIterator<Item = ParamSpec>,
        unit_of: impl Fn(&str) -> String,
    ) -> Vec<Self> {
        let mut units: Vec<Self> = Vec::new();
        let mut places = HashMap::new();
        for param in params {
            let name = unit_of(&param.name);
            let place = *places.entry(name).or_insert_with_key(|name| {
                units.push(Self::new(name, []));
                units.len() - 1
            });
            units[place].params.push(param);
        }
        units
    }
}

/// A second name of a parameter, for example of tied embeddings. It owns no elements.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Tie {
    /// The unit that uses the parameter under this name.
    pub unit: String,
    /// The second name.
    pub name: String,
    /// The parameter that holds the elements.
    pub target: String,
}

impl Tie {
    /// `unit` uses `target` under `name`.
    pub fn new(
        unit: impl Into<String>,
        name: impl Into<String>,
        target: impl Into<String>,
    ) -> Self {
        Self {
            unit: unit.into(),
            name: name.into(),
            target: target.into(),
        }
    }
}

/// Alignments and ties of a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct LayoutOptions {
    /// The length of every shard is a multiple of this.
    pub shard_align_elems: u64,
    /// Every parameter starts at a multiple of this in its flat parameter; the gaps are padding.
    pub param_align_elems: u64,
    /// If not 0: neighbours with fewer elements than this, or with a number of elements that
    /// `param_align_elems` does not divide, follow one another without gaps, so that only the first
    /// is aligned.
    #[cfg_attr(feature = "serde", serde(default))]
    pub packed_below_elems: u64,
    /// Second names of parameters.
    pub ties: Vec<Tie>,
}

impl Default for LayoutOptions {
    /// No alignment, no ties.
    fn default() -> Self {
        Self {
            shard_align_elems: 1,
            param_align_elems: 1,
            packed_below_elems: 0,
            ties: Vec::new(),
        }
    }
}

setters!(LayoutOptions {
    shard_align_elems: u64,
    param_align_elems: u64,
    packed_below_elems: u64,
    ties: Vec<Tie>,
});

impl LayoutOptions {
    /// For state in blocks: shards, and parameters with state in blocks ([`BlockFormat::holds`]),
    /// begin with whole blocks.
    #[must_use]
    pub fn in_blocks(self) -> Self {
        // The least common multiple with a power of two; 0 stays 0, which layouts refuse.
        let align = |elems: u64| {
            let common = BlockFormat::ALIGN_ELEMS.min(1 << elems.trailing_zeros().min(63));
            elems.saturating_mul(BlockFormat::ALIGN_ELEMS / common)
        };
        let shard_align_elems = align(self.shard_align_elems);
        let param_align_elems = align(self.param_align_elems);
        Self {
            shard_align_elems,
            param_align_elems,
            packed_below_elems: BlockFormat::LEAST_ELEMS,
            ..self
        }
    }

    /// Whether a parameter of `elems` elements follows another such one without a gap.
    fn packs(&self, elems: u64) -> bool {
        let is_even = elems.is_multiple_of(self.param_align_elems);
        self.packed_below_elems > 0 && (elems < self.packed_below_elems || !is_even)
    }
}

/// A parameter and its place in the flat parameter of its unit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParamPlacement {
    /// Name of the parameter.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Offset in the unit's flat parameter.
    pub offset_elems: u64,
    /// Number of elements.
    pub numel_elems: u64,
    /// Offset in the global numbering.
    pub global_offset_elems: u64,
}

impl ParamPlacement {
    /// The parameter's range in the unit's flat parameter.
    pub fn range(&self) -> Range<u64> {
        self.offset_elems..self.offset_elems + self.numel_elems
    }

    /// The parameter's range in the global numbering.
    pub fn global_range(&self) -> Range<u64> {
        self.global_offset_elems..self.global_offset_elems + self.numel_elems
    }
}

/// A unit's flat parameter, padding and shards, and its place in the storages.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnitLayout {
    /// Name of the unit.
    pub name: String,
    /// The parameters, by ascending offset; the only gaps are those of `param_align_elems`.
    pub params: Vec<ParamPlacement>,
    /// Elements of the flat parameter that belong to parameters.
    pub numel_elems: u64,
    /// Elements of one shard.
    pub shard_elems: u64,
    /// Elements of the flat parameter with its padding: `shard_elems * world_size`.
    pub padded_elems: u64,
    /// Offset in the whole storage.
    pub whole_offset_elems: u64,
    /// Offset of the shard in a rank's shard storage.
    pub shard_offset_elems: u64,
    /// Offset in the global numbering.
    pub global_offset_elems: u64,
}

impl UnitLayout {
    /// The ranges of the flat parameter that belong to no parameter, in order; none is empty.
    pub fn padding(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let starts = self.params.iter().map(|param| param.offset_elems);
        let ends = self.params.iter().map(|param| param.range().end);
        let gaps = std::iter::once(0)
            .chain(ends)
            .zip(starts.chain([self.padded_elems]));
        gaps.filter(|(end, start)| end < start)
            .map(|(end, start)| end..start)
    }

    /// Elements of the flat parameter up to the end of the last parameter: with gaps between
    /// parameters, but without the padding behind them.
    pub fn used_elems(&self) -> u64 {
        self.params.last().map_or(0, |param| param.range().end)
    }

    /// The range of the flat parameter that `rank` owns, which may be padding only. For a rank
    /// outside the world, an empty range at the end.
    pub fn shard(&self, rank: u64) -> Range<u64> {
        let start = rank.saturating_mul(self.shard_elems).min(self.padded_elems);
        start
            ..start
                .saturating_add(self.shard_elems)
                .min(self.padded_elems)
    }

    /// The rank that owns element `elem` of the flat parameter; `None` past its end.
    pub fn owner(&self, elem: u64) -> Option<u64> {
        (elem < self.padded_elems).then(|| elem / self.shard_elems)
    }

    /// The unit's range in the whole storage.
    pub fn whole_range(&self) -> Range<u64> {
        self.whole_offset_elems..self.whole_offset_elems + self.padded_elems
    }

    /// The range of the unit's shard in a rank's shard storage.
    pub fn shard_range(&self) -> Range<u64> {
        self.shard_offset_elems..self.shard_offset_elems + self.shard_elems
    }
}

/// A parameter, by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ParamId {
    /// Position of the unit in [`Layout::units`].
    pub unit: usize,
    /// Position of the parameter in [`UnitLayout::params`].
    pub param: usize,
}

/// The inputs that determine a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct LayoutSpec {
    /// The units, in forward order.
    pub units: Vec<UnitSpec>,
    /// Number of ranks.
    pub world_size: u64,
    /// Alignments and ties.
    pub options: LayoutOptions,
}

impl TryFrom<LayoutSpec> for Layout {
    type Error = ShardError;

    fn try_from(spec: LayoutSpec) -> Result<Self, ShardError> {
        Self::with_options(&spec.units, spec.world_size, spec.options)
    }
}

impl From<Layout> for LayoutSpec {
    fn from(layout: Layout) -> Self {
        let param = |p: ParamPlacement| ParamSpec {
            name: p.name,
            shape: p.shape,
        };
        let unit = |u: UnitLayout| UnitSpec {
            name: u.name,
            params: u.params.into_iter().map(param).collect(),
        };
        let units = layout.units.into_iter().map(unit).collect();
        Self {
            units,
            world_size: layout.world_size,
            options: layout.options,
        }
    }
}

/// The layout of a model over `world_size` ranks. It is serialized as its [`LayoutSpec`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "LayoutSpec", into = "LayoutSpec"))]
pub struct Layout {
    pub(crate) units: Vec<UnitLayout>,
    pub(crate) world_size: u64,
    pub(crate) options: LayoutOptions,
    pub(crate) numel_elems: u64,
    pub(crate) shard_elems: u64,
    names: NameIndex,
    /// (unit that uses, parameter used), in the order of `options.ties`.
    ties: Vec<(usize, ParamId)>,
}

impl Layout {
    /// Lays out `units` over `world_size` ranks; the length of every shard is a multiple of
    /// `align_elems`.
    ///
    /// # Errors
    /// A world without ranks, an alignment of 0, a name used twice, or a size beyond 64 bits.
    pub fn new(units: &[UnitSpec], world_size: u64, align_elems: u64) -> Result<Self, ShardError> {
        let options = LayoutOptions::default().shard_align_elems(align_elems);
        Self::with_options(units, world_size, options)
    }

    /// Lays out `units` over `world_size` ranks.
    ///
    /// # Errors
    /// As [`Layout::new`], or a tie of a unit or parameter that does not exist.
    pub fn with_options(
        units: &[UnitSpec],
        world_size: u64,
        options: LayoutOptions,
    ) -> Result<Self, ShardError> {
        if world_size == 0 {
            return Err(ShardError::NoRanks);
        }
        if options.shard_align_elems == 0 || options.param_align_elems == 0 {
            return Err(ShardError::ZeroAlignment);
        }
        let (mut placed, mut whole, mut shard, mut numel) =
            (Vec::with_capacity(units.len()), 0u64, 0u64, 0u64);

        for unit in units {
            let unit = place(unit, world_size, &options, [whole, shard, numel])?;
            let overflow = || ShardError::TooLarge {
                what: "the whole model".into(),
            };
            whole = whole.checked_add(unit.padded_elems).ok_or_else(overflow)?;
            // Both are at most `whole`, so they do not overflow.
            shard += unit.shard_elems;
            numel += unit.numel_elems;
            placed.push(unit);
        }

        let mut unit_names = HashMap::with_capacity(units.len());
        for (i, unit) in units.iter().enumerate() {
            if unit_names.insert(unit.name.as_str(), i).is_some() {
                return Err(ShardError::DuplicateName {
                    name: unit.name.clone(),
                });
            }
        }

        let tie_names = options.ties.iter().map(|t| t.name.as_str());
        let names = NameIndex::new(&placed, tie_names, |r| name_of(&placed, &options.ties, r))?;
        let mut ties = Vec::with_capacity(options.ties.len());
        for tie in &options.ties {
            let user = unit_names.get(tie.unit.as_str());
            let user = *user.ok_or_else(|| ShardError::UnknownUnitName {
                name: tie.unit.clone(),
            })?;
            match names.find(&tie.target, |r| name_of(&placed, &options.ties, r)) {
                Some(NameRef::Param(id)) => ties.push((user, id)),
                _ => {
                    return Err(ShardError::UnknownParam {
                        name: tie.target.clone(),
                    });
                }
            }
        }

        Ok(Self {
            units: placed,
            world_size,
            options,
            numel_elems: numel,
            shard_elems: shard,
            names,
            ties,
        })
    }

    /// The units, in forward order.
    pub fn units(&self) -> &[UnitLayout] {
        &self.units
    }

    /// Unit number `unit`.
    ///
    /// # Errors
    /// There is no such unit.
    pub fn unit(&self, unit: usize) -> Result<&UnitLayout, ShardError> {
        self.units.get(unit).ok_or(ShardError::UnknownUnit {
            unit,
            units: self.units.len(),
        })
    }

    /// Number of ranks.
    pub fn world_size(&self) -> u64 {
        self.world_size
    }

    /// The length of every shard is a multiple of this.
    pub fn align_elems(&self) -> u64 {
        self.options.shard_align_elems
    }

    /// Alignments and ties.
    pub fn options(&self) -> &LayoutOptions {
        &self.options
    }

    /// Number of elements of all parameters: Ψ in the formulas.
    pub fn numel_elems(&self) -> u64 {
        self.numel_elems
    }

    /// Elements of a rank's shard storage.
    pub fn shard_elems(&self) -> u64 {
        self.shard_elems
    }

    /// Number of elements of the whole storage: Ψ plus the padding.
    pub fn padded_elems(&self) -> u64 {
        self.shard_elems * self.world_size
    }

    /// Finds the parameter with this name, or the target of the tie with this name. O(log n).
    pub fn find_param(&self, name: &str) -> Option<ParamId> {
        match self
            .names
            .find(name, |r| name_of(&self.units, &self.options.ties, r))?
        {
            NameRef::Param(id) => Some(id),
            NameRef::Tie(i) => Some(self.ties[i].1),
        }
    }

    /// The placement of a parameter; `None` if there is no such parameter.
    pub fn param(&self, id: ParamId) -> Option<&ParamPlacement> {
        self.units.get(id.unit)?.params.get(id.param)
    }

    /// The range in the whole storage of the shard of unit `unit` that `rank` owns.
    ///
    /// # Errors
    /// There is no such unit or rank.
    pub fn own_in_whole(&self, unit: usize, rank: u64) -> Result<Range<u64>, ShardError> {
        self.check_rank(rank)?;
        let unit = self.unit(unit)?;
        let base = unit.whole_offset_elems;
        let shard = unit.shard(rank);
        Ok(base + shard.start..base + shard.end)
    }

    /// The ties, each with the unit that uses the second name and the parameter that owns the
    /// elements.
    pub fn ties(&self) -> impl Iterator<Item = (&Tie, usize, ParamId)> {
        self.options
            .ties
            .iter()
            .zip(&self.ties)
            .map(|(tie, &(user, id))| (tie, user, id))
    }

    /// The units that must be gathered to compute `unit`: itself and those that own its tied
    /// parameters. Ascending, without duplicates.
    pub fn units_needed_by(&self, unit: usize) -> Vec<usize> {
        let tied = self
            .ties
            .iter()
            .filter(|(user, _)| *user == unit)
            .map(|(_, id)| id.unit);
        let mut needed: Vec<usize> = std::iter::once(unit).chain(tied).collect();
        needed.sort_unstable();
        needed.dedup();
        needed
    }
}

/// Places the parameters of one unit; `[whole, shard, global]` are its offsets in the two storages
/// and the global numbering.
fn place(
    unit: &UnitSpec,
    world_size: u64,
    options: &LayoutOptions,
    [whole, shard, global]: [u64; 3],
) -> Result<UnitLayout, ShardError> {
    let overflow = || ShardError::TooLarge {
        what: unit.name.clone(),
    };
    let mut params = Vec::with_capacity(unit.params.len());
    let mut end = 0u64;
    let mut numel = 0u64;
    let mut was_packed = false;

    for param in &unit.params {
        let n = param.numel_elems()?;
        let is_packed = options.packs(n);
        let align = match is_packed && was_packed {
            true => 1,
            false => options.param_align_elems,
        };
        let offset = end.checked_next_multiple_of(align).ok_or_else(overflow)?;
        was_packed = is_packed;
        params.push(ParamPlacement {
            name: param.name.clone(),
            shape: param.shape.clone(),
            offset_elems: offset,
            numel_elems: n,
            global_offset_elems: global.checked_add(numel).ok_or_else(overflow)?,
        });
        end = offset.checked_add(n).ok_or_else(overflow)?;
        numel += n; // at most `end`
    }

    let per_rank = end.div_ceil(world_size);
    let shard_elems = per_rank
        .checked_next_multiple_of(options.shard_align_elems)
        .ok_or_else(overflow)?;
    Ok(UnitLayout {
        name: unit.name.clone(),
        params,
        numel_elems: numel,
        shard_elems,
        padded_elems: shard_elems.checked_mul(world_size).ok_or_else(overflow)?,
        whole_offset_elems: whole,
        shard_offset_elems: shard,
        global_offset_elems: global,
    })
}

fn name_of<'a>(units: &'a [UnitLayout], ties: &'a [Tie], at: NameRef) -> &'a str {
    match at {
        NameRef::Param(id) => &units[id.unit].params[id.param].name,
        NameRef::Tie(i) => &ties[i].name,
    }
}
