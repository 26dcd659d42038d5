//! The arrays of optimizer state, their formats, and where they are.
//!
//! A **piece** is at most
//! [`OptimizerConfig::sub_group_elems`](crate::OptimizerConfig::sub_group_elems) elements of one
//! unit: its masters (or remainders) and each slot of the update rule, one after another.

use std::fmt;
use std::ops::Range;
#[cfg(target_os = "linux")]
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use zero_alloc::device::DType;
#[cfg(target_os = "linux")]
use zero_alloc::swap::SwapOptions;
use zero_kernels::{AverageCodecs, Codec, Slot, UpdateRule};
use zero_shard::{BlockFormat, LayoutOptions, WireFormat};

use crate::OptimError;

/// Lengths and offsets of pieces in bytes are multiples of this one.
pub(crate) const PIECE_ALIGN_BYTES: usize = 4096;
/// The parts of a piece start at multiples of this one.
const PART_ALIGN_BYTES: usize = 64;

/// The place of the state of an optimizer of the host; see
/// [`OptimizerBuilder::offload`](crate::OptimizerBuilder::offload).
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum StateHome {
    /// Host memory.
    #[default]
    Memory,
    /// A scratch file without a name, of the length of the state, which disappears with the
    /// optimizer.
    #[cfg(target_os = "linux")]
    Nvme {
        /// The folder of the file.
        dir: PathBuf,
        /// How the file is read and written.
        options: SwapOptions,
        /// Pieces in memory at once; at least 1. With 4, one is read, one is updated and one is
        /// written at the same time, and one is ready.
        buffers: usize,
    },
}

/// The formats of an optimizer's state; see
/// [`OptimizerBuilder::format`](crate::OptimizerBuilder::format). In JSON `{"remainder": false,
/// "bf16_moments": false}`, and for moments of 8 or 4 bits `"moments": "8bit"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Recorded", into = "Recorded")]
#[non_exhaustive]
pub struct StateFormat {
    /// The master weights of 16-bit parameters.
    pub masters: Masters,
    /// Running averages of gradients.
    pub moments: Moments,
}
zero_alloc::setters!(StateFormat {
    masters: Masters,
    moments: Moments
});

/// The format of master weights. As text: `fp32` or `remainder`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Masters {
    /// fp32.
    #[default]
    Fp32,
    /// bf16 parameters with a 16-bit remainder: the same masters. The parameter is the master
    /// rounded to nearest, ties away from zero; without remainders ties go to even.
    Remainder,
}

/// The format of running averages of gradients. As text: `fp32`, `bf16`, `8bit` or `4bit`.
///
/// Averages of 8 and 4 bits are in blocks ([`BlockFormat`]), each a range of a parameter: with the
/// same gradients they have the same bits at any stage and number of ranks. Runs of elements then
/// begin and end at multiples of [`BlockFormat::ALIGN_ELEMS`], to which the layout aligns
/// parameters and shards ([`Moments::layout_options`]). Small parameters, such as biases and norms,
/// have averages in fp32 ([`BlockFormat::holds`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Moments {
    /// fp32.
    #[default]
    Fp32,
    /// bf16, rounded stochastically, on the host: to nearest, a second moment would not fall, since
    /// a step changes it by less than half a unit in the last place. The random bits follow from
    /// the step and the place in this rank's state, so a run has the same bits again, but other
    /// bits at another stage, with other ranks or other frozen elements.
    Bf16,
    /// 8 bits ([`BlockFormat::Dynamic8`], [`BlockFormat::PositiveDynamic8`]): 1.016 bytes each.
    EightBit,
    /// 4 bits ([`BlockFormat::Dynamic4`], [`BlockFormat::PositiveLinear4`]): 0.531 bytes each.
    FourBit,
}

impl Moments {
    /// The formats of an array of them.
    pub fn codecs(self) -> AverageCodecs {
        let blocks = |signed, positive| AverageCodecs {
            signed: Codec::Blocks(signed),
            positive: Codec::Blocks(positive),
        };
        match self {
            Self::Fp32 => Codec::Fp32.into(),
            Self::Bf16 => Codec::Bf16.into(),
            Self::EightBit => blocks(BlockFormat::Dynamic8, BlockFormat::PositiveDynamic8),
            Self::FourBit => blocks(BlockFormat::Dynamic4, BlockFormat::PositiveLinear4),
        }
    }

    /// The options of a layout whose state is in this format: with whole blocks in each shard.
    #[must_use]
    pub fn layout_options(self, options: LayoutOptions) -> LayoutOptions {
        match self {
            Self::Fp32 | Self::Bf16 => options,
            Self::EightBit | Self::FourBit => options.in_blocks(),
        }
    }

    /// The format of a parameter that is not [in blocks](BlockFormat::holds).
    #[must_use]
    pub const fn without_blocks(self) -> Self {
        match self {
            Self::EightBit | Self::FourBit => Self::Fp32,
            _ => self,
        }
    }
}

/// Implements `Display` and `FromStr` by a table of names.
macro_rules! names {
    ($type:ident { $($variant:ident = $name:literal),* }) => {
        impl $type {
            /// All formats.
            pub const ALL: &[Self] = &[$(Self::$variant),*];
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Self::$variant => $name,)*
                })
            }
        }

        impl FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                let all = Self::ALL.iter();
                let named = all.copied().find(|format| format.to_string() == text);
                named.ok_or_else(|| {
                    let names: Vec<_> = Self::ALL.iter().map(Self::to_string).collect();
                    format!("expected {}", names.join(" or "))
                })
            }
        }
    };
}
names!(Masters { Fp32 = "fp32", Remainder = "remainder" });
names!(Moments {
    Fp32 = "fp32",
    Bf16 = "bf16",
    EightBit = "8bit",
    FourBit = "4bit"
});

/// [`StateFormat`] in JSON, as runs of earlier versions recorded it.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Recorded {
    remainder: bool,
    bf16_moments: bool,
    /// Of 8 or 4 bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    moments: Option<String>,
}

impl TryFrom<Recorded> for StateFormat {
    type Error = String;

    fn try_from(recorded: Recorded) -> Result<Self, String> {
        let moments = match (recorded.moments, recorded.bf16_moments) {
            (Some(moments), _) => moments.parse()?,
            (None, true) => Moments::Bf16,
            (None, false) => Moments::Fp32,
        };
        let masters = match recorded.remainder {
            true => Masters::Remainder,
            false => Masters::Fp32,
        };
        Ok(Self { masters, moments })
    }
}

impl From<StateFormat> for Recorded {
    fn from(format: StateFormat) -> Self {
        let is_named = matches!(format.moments, Moments::EightBit | Moments::FourBit);
        Self {
            remainder: format.masters == Masters::Remainder,
            bf16_moments: format.moments == Moments::Bf16,
            moments: is_named.then(|| format.moments.to_string()),
        }
    }
}

/// A kind of optimizer state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StateKind {
    /// The fp32 weights of bf16 or fp16 parameters.
    Master,
    /// The slot of an update rule with this name, such as `first_moment`.
    Slot(&'static str),
}

impl StateKind {
    /// The name in a checkpoint: `master`, or that of the slot.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Master => "master",
            Self::Slot(name) => name,
        }
    }
}

/// The arrays of state of elements: the masters, and the slots of their update rule. Every formula
/// of their memory asks them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateArrays {
    /// `None`: the parameters are the masters.
    masters: Option<Codec>,
    slots: Vec<Slot>,
}

impl StateArrays {
    /// The arrays of elements that `rule` updates, in `format`, with parameters of `param_dtype`.
    pub fn new(rule: &dyn UpdateRule, param_dtype: DType, format: StateFormat) -> Self {
        let masters = match (param_dtype, format.masters) {
            (DType::F32, _) => None,
            (_, Masters::Fp32) => Some(Codec::Fp32),
            (_, Masters::Remainder) => Some(Codec::Remainders),
        };
        Self {
            masters,
            slots: rule.slots(format.moments.codecs()),
        }
    }

    /// Checks the slots that `rules` declare for averages in this format.
    pub(crate) fn check<'a>(
        rules: impl IntoIterator<Item = &'a dyn UpdateRule>,
        averages: AverageCodecs,
    ) -> Result<(), OptimError> {
        let mut of_others: Vec<Slot> = Vec::new();
        for rule in rules {
            let slots = rule.slots(averages);
            for (nth, slot) in slots.iter().enumerate() {
                let is_slot = |other: &Slot| other.name == slot.name;
                let differs = |other: &Slot| is_slot(other) && other.codec != slot.codec;

                let reason = if slot.name == StateKind::Master.name() {
                    "has the name of the master weights: choose another name"
                } else if slot.codec == Codec::Remainders {
                    "is in the format of remainders, which only masters have: use the codec that `slots` is passed, or fp32"
                } else if slots[..nth].iter().any(is_slot) {
                    "is declared twice: give each slot its own name"
                } else if of_others.iter().any(differs) {
                    "has another format than the slot of this name of another rule, with which it shares a state in checkpoints: use one \
                     format, or another name"
                } else {
                    continue;
                };
                return Err(OptimError::Slot {
                    rule: rule.name(),
                    slot: slot.name,
                    reason,
                });
            }
            of_others.extend(slots);
        }
        Ok(())
    }

    /// Bytes of the state of `elems` elements, without the parameters themselves.
    pub fn bytes(&self, elems: usize) -> usize {
        let slots = self.slots.iter().map(|slot| slot.codec.bytes(elems));
        self.masters.map_or(0, |masters| masters.bytes(elems)) + slots.sum::<usize>()
    }

    /// [`Self::bytes`] as the formulas of memory have it.
    pub fn wire(&self) -> WireFormat {
        let block_elems = self.block_elems();
        WireFormat {
            block_elems: block_elems as u64,
            block_bytes: self.bytes(block_elems) as u64,
        }
    }

    /// Elements that are stored together: ranges of the state begin at multiples of it.
    pub fn block_elems(&self) -> usize {
        let slots = self.slots.iter().map(|slot| slot.codec.block_elems());
        slots.max().unwrap_or(1)
    }

    /// The kinds of state, in the order in which checkpoints have them.
    pub fn kinds(&self) -> impl Iterator<Item = StateKind> + '_ {
        let slots = self.slots.iter().map(|slot| StateKind::Slot(slot.name));
        std::iter::once(StateKind::Master).chain(slots)
    }

    pub(crate) fn masters(&self) -> Option<Codec> {
        self.masters
    }

    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The position of the slot with this name.
    pub(crate) fn slot(&self, name: &str) -> Option<usize> {
        self.slots.iter().position(|slot| slot.name == name)
    }

    /// The kinds of state of all, in the order in which checkpoints have them.
    pub(crate) fn all_kinds(all: &[Self]) -> Vec<StateKind> {
        let mut kinds = vec![StateKind::Master];
        for kind in all.iter().flat_map(Self::kinds) {
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        kinds
    }

    /// The parts of a piece, in bytes from its start: the masters, and each slot.
    pub(crate) fn parts(&self, elems: usize) -> PieceLayout {
        let mut end = 0_usize;
        let mut part = |bytes: usize| {
            let start = end.next_multiple_of(PART_ALIGN_BYTES);
            end = start + bytes;
            start..end
        };
        let masters = part(self.masters.map_or(0, |masters| masters.bytes(elems)));
        let slots = self.slots.iter();
        let slots = slots.map(|slot| part(slot.codec.bytes(elems))).collect();
        PieceLayout {
            masters,
            slots,
            bytes: end.next_multiple_of(PIECE_ALIGN_BYTES),
        }
    }
}

/// The parts of a piece, in bytes from its start.
pub(crate) struct PieceLayout {
    pub(crate) masters: Range<usize>,
    pub(crate) slots: Vec<Range<usize>>,
    /// Bytes of the piece.
    pub(crate) bytes: usize,
}

#[cfg(test)]
mod tests {
    use zero_kernels::AdamHyper;

    use super::*;

    #[test]
    fn text_and_json_come_back() {
        for masters in Masters::ALL {
            assert_eq!(masters.to_string().parse(), Ok(*masters));
            for moments in Moments::ALL {
                assert_eq!(moments.to_string().parse(), Ok(*moments));
                let format = StateFormat::default().masters(*masters).moments(*moments);
                let json = serde_json::to_string(&format).unwrap();
                assert_eq!(serde_json::from_str::<StateFormat>(&json).unwrap(), format);
            }
        }

        let json = serde_json::to_string(&StateFormat::default()).unwrap();
        assert_eq!(json, r#"{"remainder":false,"bf16_moments":false}"#);
        assert_eq!(
            "int8".parse::<Moments>(),
            Err("expected fp32 or bf16 or 8bit or 4bit".to_owned())
        );
    }

    #[test]
    fn bytes_follow_from_the_slots() {
        let adam = AdamHyper::default();
        let bytes = |dtype, masters, moments| {
            let format = StateFormat { masters, moments };
            StateArrays::new(&adam, dtype, format).bytes(256)
        };
        assert_eq!(bytes(DType::F32, Masters::Fp32, Moments::Fp32), 8 * 256);
        assert_eq!(bytes(DType::F16, Masters::Fp32, Moments::Fp32), 12 * 256);
        assert_eq!(
            bytes(DType::Bf16, Masters::Remainder, Moments::Fp32),
            10 * 256
        );
        assert_eq!(bytes(DType::Bf16, Masters::Fp32, Moments::Bf16), 8 * 256);
        assert_eq!(
            bytes(DType::Bf16, Masters::Remainder, Moments::Bf16),
            6 * 256
        );
        let remainder = |moments| bytes(DType::Bf16, Masters::Remainder, moments);
        assert_eq!(remainder(Moments::EightBit), 2 * 256 + 2 * 260);
        assert_eq!(remainder(Moments::FourBit), 2 * 256 + 4 * 68);
    }
}
