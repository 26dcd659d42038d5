//! A call as words: what processes send each other to compare.

use zero_alloc::device::DType;

use crate::call::{Call, Segments};
use crate::{Collective, ReduceOp};

const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max];
const DTYPES: [DType; 5] = [DType::U8, DType::F16, DType::Bf16, DType::F32, DType::F64];

fn place<T: PartialEq>(list: &[T], value: &T) -> u64 {
    list.iter().position(|known| known == value).map_or(0, |i| i as u64 + 1)
}

fn at<T: Copy>(list: &[T], place: u64) -> Option<T> {
    list.get(usize::try_from(place).ok()?.checked_sub(1)?).copied()
}

/// Words of a header among `world_size` ranks: six, and a count a rank.
pub(crate) const fn header_words(world_size: usize) -> usize {
    6 + world_size
}

/// The header of `call`.
pub(crate) fn header(call: &Call, world_size: usize) -> Vec<u64> {
    let (kind, len) = match &call.segments {
        Segments::Even(n) => (0, *n as u64),
        Segments::Balanced(len) => (1, *len as u64),
        Segments::Uneven(_) => (2, 0),
    };
    let mut words = vec![
        place(&Collective::ALL, &call.collective) | u64::from(call.control) << 8,
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
pub(crate) fn call_of(words: &[u64]) -> Option<Call> {
    let [first, op, dtype, root, kind, len, counts @ ..] = words else { return None };
    let segments = match kind {
        0 => Segments::Even(usize::try_from(*len).ok()?),
        1 => Segments::Balanced(usize::try_from(*len).ok()?),
        2 => Segments::Uneven(counts.iter().map(|&c| c as usize).collect()),
        _ => return None,
    };
    Some(Call {
        collective: at(&Collective::ALL, first & 0xff)?,
        op: at(&OPS, *op),
        dtype: at(&DTYPES, *dtype)?,
        segments,
        root: usize::try_from(*root).ok()?.checked_sub(1),
        control: first >> 8 == 1,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_call_survives_the_wire(
            collective in prop::sample::select(&Collective::ALL[..]), op in prop::option::of(prop::sample::select(&OPS[..])),
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
        fn any_words_are_a_call_or_none(words in prop::collection::vec(0..300u64, 0..12)) {
            if let Some(call) = call_of(&words) {
                let counts = words.len() - header_words(0);
                prop_assert_eq!(call_of(&header(&call, counts)), Some(call));
            }
        }
    }
}
