//! How the elements of a state are stored: one by one, or in blocks with a scale.
//!
//! [`spans`] maps a state and a range of a unit to bytes. Everything else that needs the place of
//! an element in a file, or the length of some elements there, is made of it.
//!
//! ```text
//! unit                  | bias | weight                      | norm |
//! in blocks of 256      | fp32 | 0..256 | 256..512 | 512..600 | fp32 |    bias, norm: fewer than `plain_below` elements
//! ```
//!
//! A block is a range of its parameter, from the first element on. So a range that is stored starts
//! and ends between blocks, or at the end of a parameter: [`check_cuts`].

use std::fmt;
use std::num::NonZero;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use zero_shard::{BlockFormat, ParamPlacement, UnitLayout};

use crate::format::runs::elems_of;
use crate::{StateDtype, StateSpec, UnitRange};

/// Elements and bytes of a block of any format, at most.
const MAX_BLOCK_ELEMS: usize = BlockFormat::ALIGN_ELEMS as usize;
const MAX_BLOCK_BYTES: usize = size_of::<f32>() + MAX_BLOCK_ELEMS;

/// How a state is stored. Reading converts to fp32, which is exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "Recorded", into = "Recorded")]
#[non_exhaustive]
pub enum StateEncoding {
    /// One by one, in this type.
    Elements(StateDtype),
    /// Large parameters in blocks, others in fp32.
    Blocks {
        /// The format of the blocks.
        format: BlockFormat,
        /// Parameters with fewer elements are stored in fp32.
        plain_below: u64,
        /// So are those whose elements this does not divide; not 0.
        multiple_of: u64,
    },
}

/// [`StateEncoding`] in JSON: `"F32"`, or `{"blocks": {"format": "dynamic8", "plain_below": 4096,
/// "multiple_of": 256}}`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
enum Recorded {
    F32,
    BF16,
    F16,
    #[serde(rename = "blocks")]
    Blocks {
        format: BlockFormat,
        plain_below: u64,
        multiple_of: NonZero<u64>,
    },
}

impl From<Recorded> for StateEncoding {
    fn from(recorded: Recorded) -> Self {
        match recorded {
            Recorded::F32 => Self::Elements(StateDtype::F32),
            Recorded::BF16 => Self::Elements(StateDtype::BF16),
            Recorded::F16 => Self::Elements(StateDtype::F16),
            Recorded::Blocks {
                format,
                plain_below,
                multiple_of,
            } => Self::Blocks {
                format,
                plain_below,
                multiple_of: multiple_of.get(),
            },
        }
    }
}

impl From<StateEncoding> for Recorded {
    fn from(encoding: StateEncoding) -> Self {
        match encoding {
            StateEncoding::Elements(StateDtype::F32) => Self::F32,
            StateEncoding::Elements(StateDtype::BF16) => Self::BF16,
            StateEncoding::Elements(StateDtype::F16) => Self::F16,
            StateEncoding::Blocks {
                format,
                plain_below,
                multiple_of,
            } => Self::Blocks {
                format,
                plain_below,
                multiple_of: NonZero::new(multiple_of).unwrap_or(NonZero::<u64>::MIN),
            },
        }
    }
}

impl From<StateDtype> for StateEncoding {
    fn from(dtype: StateDtype) -> Self {
        Self::Elements(dtype)
    }
}

impl fmt::Display for StateEncoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Elements(dtype) => f.write_str(dtype.name()),
            Self::Blocks {
                format,
                plain_below,
                multiple_of,
            } => write!(
                f,
                "{format:?} in blocks of {}, F32 below {plain_below} elements and for no multiple of {multiple_of}",
                format.elems()
            ),
        }
    }
}

impl StateEncoding {
    /// Averages of gradients in blocks, as optimizers have them: for the parameters that a format
    /// [holds](BlockFormat::holds).
    pub const fn averages(format: BlockFormat) -> Self {
        Self::Blocks {
            format,
            plain_below: BlockFormat::LEAST_ELEMS,
            multiple_of: BlockFormat::ALIGN_ELEMS,
        }
    }

    /// Every length in a file is a multiple of this, so that states by descending alignment are
    /// aligned.
    pub(crate) fn align_bytes(self) -> u64 {
        match self {
            Self::Elements(dtype) => dtype.bytes(),
            // Blocks have whole words, too.
            Self::Blocks { .. } => size_of::<f32>() as u64,
        }
    }

    /// The dtype and shape of `elems` elements in `bytes` bytes, in a safetensors header.
    pub(crate) fn tensor(self, elems: u64, bytes: u64) -> (&'static str, u64) {
        match self {
            Self::Elements(dtype) => (dtype.name(), elems),
            Self::Blocks { .. } => ("U8", bytes),
        }
    }

    /// How a whole parameter of `numel_elems` elements is stored.
    fn of_param(self, numel_elems: u64) -> Encoding {
        match self {
            Self::Elements(dtype) => Encoding::Elements(dtype),
            Self::Blocks {
                format,
                plain_below,
                multiple_of,
            } if numel_elems >= plain_below && numel_elems.is_multiple_of(multiple_of) => {
                Encoding::Blocks(format)
            }
            Self::Blocks { .. } => Encoding::Elements(StateDtype::F32),
        }
    }
}

/// How contiguous elements are stored. An element that is stored by itself is a block of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    Elements(StateDtype),
    /// From the start of a block on; the last block may have fewer elements, not fewer bytes.
    Blocks(BlockFormat),
}

impl Encoding {
    pub(crate) fn block_elems(self) -> u64 {
        match self {
            Self::Elements(_) => 1,
            Self::Blocks(format) => format.elems() as u64,
        }
    }

    pub(crate) fn block_bytes(self) -> u64 {
        match self {
            Self::Elements(dtype) => dtype.bytes(),
            Self::Blocks(format) => format.block_bytes() as u64,
        }
    }

    /// Bytes of `elems` elements from the start of a block on; `u64::MAX` if there are more.
    pub(crate) fn bytes(self, elems: u64) -> u64 {
        let blocks = elems.div_ceil(self.block_elems());
        blocks.saturating_mul(self.block_bytes())
    }

    /// Converts fp32 from the start of a block on, rounding to nearest;
    /// `bytes.len() == self.bytes(values.len())`.
    pub(crate) fn encode(self, values: &[f32], bytes: &mut [u8]) {
        match self {
            Self::Elements(dtype) => dtype.narrow(values, bytes),
            Self::Blocks(format) => format.encode(values, bytes),
        }
    }

    /// Converts to fp32 the elements behind the first `skip`, which are in one block; `bytes`
    /// starts with that block.
    pub(crate) fn decode(self, bytes: &[u8], skip: usize, out: &mut [f32]) {
        let whole = |bytes: &[u8], out: &mut [f32]| {
            let bytes = &bytes[..self.bytes(out.len() as u64) as usize];
            match self {
                Self::Elements(dtype) => dtype.widen(bytes, out),
                Self::Blocks(format) => format.decode(bytes, out),
            }
        };
        if skip == 0 {
            return whole(bytes, out);
        }
        let mut block = [0.0; MAX_BLOCK_ELEMS];
        let block = &mut block[..self.block_elems() as usize];
        whole(bytes, block);
        let part = &block[skip..];
        let (first, later) = out.split_at_mut(part.len().min(out.len()));
        first.copy_from_slice(&part[..first.len()]);
        if !later.is_empty() {
            whole(&bytes[self.block_bytes() as usize..], later);
        }
    }

    /// Fills bytes `start..start + out.len()` of `elems` encoded elements. Calls `fill` with whole
    /// blocks: the range of their elements, and their bytes. A block of which only a part is wanted
    /// is filled by itself.
    pub(crate) fn fill_range<E>(
        self,
        elems: u64,
        start: u64,
        out: &mut [u8],
        mut fill: impl FnMut(Range<u64>, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let block_bytes = self.block_bytes() as usize;
        let mut elems_of = |first: u64, blocks: usize, bytes: &mut [u8]| {
            let first = first * self.block_elems();
            let end = elems.min(first + blocks as u64 * self.block_elems());
            fill(first..end, bytes)
        };
        let mut block = start / self.block_bytes();
        let mut skip = (start % self.block_bytes()) as usize;
        let mut rest = out;

        while !rest.is_empty() {
            let blocks = rest.len() / block_bytes;
            if skip == 0 && blocks > 0 {
                let (now, later) = rest.split_at_mut(blocks * block_bytes);
                elems_of(block, blocks, now)?;
                block += blocks as u64;
                rest = later;
            } else {
                let mut buffer = [0; MAX_BLOCK_BYTES];
                elems_of(block, 1, &mut buffer[..block_bytes])?;
                let part = &buffer[skip..block_bytes];
                let (now, later) = rest.split_at_mut(part.len().min(rest.len()));
                now.copy_from_slice(&part[..now.len()]);
                block += 1;
                skip = 0;
                rest = later;
            }
        }
        Ok(())
    }
}

/// Elements of a unit that are stored alike, one behind the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Numbered in the unit without padding; the first is the first of a block.
    pub(crate) elems: Range<u64>,
    pub(crate) encoding: Encoding,
}

impl Span {
    /// Bytes in the file; `u64::MAX` if there are more.
    pub(crate) fn bytes(&self) -> u64 {
        self.encoding.bytes(self.elems.end - self.elems.start)
    }
}

/// The spans of a range of a unit, in the order of the file. The range must be within the unit, and
/// start and end where [`check_cuts`] allows it.
pub(crate) fn spans(
    encoding: StateEncoding,
    unit: &UnitLayout,
    range: Range<u64>,
) -> impl Iterator<Item = Span> + '_ {
    let (whole, params) = match encoding {
        StateEncoding::Elements(dtype) => {
            let span = Span {
                elems: range.clone(),
                encoding: Encoding::Elements(dtype),
            };
            (Some(span), &[][..])
        }
        StateEncoding::Blocks { .. } => (None, params_in(unit, &range)),
    };
    let of_params = params.iter().map(move |param| {
        let elems = elems_of(unit, param);
        Span {
            elems: elems.start.max(range.start)..elems.end.min(range.end),
            encoding: encoding.of_param(param.numel_elems),
        }
    });
    let all = whole.into_iter().chain(of_params);
    all.filter(|span| !span.elems.is_empty())
}

/// The parameters with elements in a range of a unit.
fn params_in<'a>(unit: &'a UnitLayout, range: &Range<u64>) -> &'a [ParamPlacement] {
    let elems = |param: &ParamPlacement| elems_of(unit, param);
    let first = unit
        .params
        .partition_point(|param| elems(param).end <= range.start);
    let later = &unit.params[first..];
    &later[..later.partition_point(|param| elems(param).start < range.end)]
}

/// Checks that a piece starts and ends between the blocks of every state; the error says where not
/// and what to do. The piece must be within the unit.
pub(crate) fn check_cuts(
    states: &[StateSpec],
    unit: &UnitLayout,
    piece: UnitRange,
) -> Result<(), String> {
    let ends = [piece.1, piece.2];
    let cuts = states
        .iter()
        .flat_map(|state| ends.map(|elem| (state, elem)));
    for (state, elem) in cuts {
        let Some(param) = params_in(unit, &(elem..elem.saturating_add(1))).first() else {
            continue;
        };
        let in_param = elem.saturating_sub(elems_of(unit, param).start);
        let block_elems = state.encoding.of_param(param.numel_elems).block_elems();
        if !in_param.is_multiple_of(block_elems) {
            return Err(format!(
                "a shard ends at element {in_param} of parameter {:?}, within a block of {block_elems} elements of state {:?}; lay \
                 out the model with param_align_elems and shard_align_elems that are multiples of {}",
                param.name,
                state.name,
                BlockFormat::ALIGN_ELEMS
            ));
        }
    }
    Ok(())
}
