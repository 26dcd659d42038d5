//! What ranks tell each other beside the data: headers of calls, and notices.

use zero_alloc::device::DType;

use crate::call::{Call, Segments};
use crate::{Collective, ReduceOp};

const COLLECTIVES: [Collective; 6] = [
    Collective::ReduceScatter,
    Collective::AllGather,
    Collective::AllReduce,
    Collective::Broadcast,
    Collective::AllToAll,
    Collective::Barrier,
];
const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max];
const DTYPES: [DType; 5] = [DType::U8, DType::F16, DType::Bf16, DType::F32, DType::F64];

fn place<T: PartialEq>(list: &[T], value: &T) -> u64 {
    list.iter().position(|known| known == value).map_or(0, |i| i as u64 + 1)
}

fn at<T: Copy>(list: &[T], place: u64) -> Option<T> {
    list.get(usize::try_from(place).ok()?.checked_sub(1)?).copied()
}

/// Words of a header among `world_size` ranks: six, and a count a rank.
pub(super) const fn header_words(world_size: usize) -> usize {
    6 + world_size
}

/// The header of `call`.
pub(super) fn header(call: &Call, world_size: usize) -> Vec<u64> {
    let (kind, len) = match &call.segments {
        Segments::Even(n) => (0, *n as u64),
        Segments::Balanced(len) => (1, *len as u64),
        Segments::Uneven(_) => (2, 0),
    };
    let mut words = vec![
        place(&COLLECTIVES, &call.collective) | u64::from(call.control) << 8,
        call.op.map_or(0, |op| place(&OPS, &op)),
        place(&DTYPES, &call.dtype),
        call.root.map_or(0, |root| root as u64 + 1),
        kind,
        len,
    ];
    words.resize(header_words(world_size), 0);
    if let Segments::Uneven(counts) = &call.segments {
        words[6..].iter_mut().zip(counts.iter()).for_each(|(word, &count)| *word = count as u64);
    }
    words
}

/// The call of a header; none if it is not one.
pub(super) fn call_of(words: &[u64]) -> Option<Call> {
    let [first, op, dtype, root, kind, len, counts @ ..] = words else { return None };
    let segments = match kind {
        0 => Segments::Even(usize::try_from(*len).ok()?),
        1 => Segments::Balanced(usize::try_from(*len).ok()?),
        2 => Segments::Uneven(counts.iter().map(|&c| c as usize).collect()),
        _ => return None,
    };
    Some(Call {
        collective: at(&COLLECTIVES, first & 0xff)?,
        op: at(&OPS, *op),
        dtype: at(&DTYPES, *dtype)?,
        segments,
        root: usize::try_from(*root).ok()?.checked_sub(1),
        control: first >> 8 == 1,
    })
}

/// What a rank tells all others, outside any collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// It called `abort`, with these words.
    Aborted(String),
    /// It found rank `blamed` of the world at fault.
    Failed {
        /// Rank in the world.
        blamed: usize,
        /// What was seen.
        message: String,
    },
    /// It dropped the communicator `context` after `done` collectives.
    Left {
        /// Which communicator.
        context: u32,
        /// Collectives that it had called.
        done: u64,
    },
}

impl Notice {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, a, b, text) = match self {
            Self::Aborted(reason) => (0u8, 0, 0, reason.as_str()),
            Self::Failed { blamed, message } => (1, *blamed as u64, 0, message.as_str()),
            Self::Left { context, done } => (2, u64::from(*context), *done, ""),
        };
        // Small enough to leave at once.
        let text = text.char_indices().take_while(|(i, _)| *i < 1000).map(|(_, c)| c).collect::<String>();
        [&[kind][..], &a.to_le_bytes(), &b.to_le_bytes(), text.as_bytes()].concat()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        let (a, rest) = rest.split_first_chunk::<8>()?;
        let (b, text) = rest.split_first_chunk::<8>()?;
        let (a, b) = (u64::from_le_bytes(*a), u64::from_le_bytes(*b));
        let text = || String::from_utf8_lossy(text).into_owned();
        match kind {
            0 => Some(Self::Aborted(text())),
            1 => Some(Self::Failed { blamed: usize::try_from(a).ok()?, message: text() }),
            2 => Some(Self::Left { context: u32::try_from(a).ok()?, done: b }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_call_survives_the_wire(
            collective in prop::sample::select(&COLLECTIVES[..]), op in prop::option::of(prop::sample::select(&OPS[..])),
            dtype in prop::sample::select(&DTYPES[..]), root in prop::option::of(0usize..9), control in any::<bool>(),
            kind in 0..3, counts in prop::collection::vec(0usize..1 << 40, 4),
        ) {
            let segments = match kind {
                0 => Segments::Even(counts[0]),
                1 => Segments::Balanced(counts[0]),
                _ => Segments::Uneven(counts.into()),
            };
            let call = Call { collective, op, dtype, segments, root, control };
            let words = header(&call, 4);
            prop_assert_eq!(words.len(), header_words(4));
            prop_assert_eq!(call_of(&words), Some(call));
        }

        #[test]
        fn any_bytes_are_a_notice_or_none(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Some(notice) = Notice::decode(&bytes) {
                prop_assert_eq!(Notice::decode(&notice.encode()), Some(notice));
            }
            let _no_panic = call_of(&bytes.iter().map(|&b| u64::from(b)).collect::<Vec<_>>());
        }
    }
}
