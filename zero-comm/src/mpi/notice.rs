//! Notices between ranks, outside any collective.

use serde::{Deserialize, Serialize};

use crate::error::shorten;

/// Maximum bytes of text, small enough that MPI sends a notice eagerly.
const MAX_TEXT_BYTES: usize = 1000;

/// A notice from a rank to all others. Ranks are those of the world.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Notice {
    /// The rank called `abort`, with this reason.
    Aborted(String),
    /// The rank detected a failure of the rank `at_fault`.
    Failed { at_fault: usize, message: String },
    /// The rank dropped a communicator, after `done` collectives.
    Left { context: u32, done: u64 },
    /// The rank waits for `peer` in collective `sequence` of a communicator.
    Waits {
        context: u32,
        sequence: u64,
        peer: usize,
    },
}

impl Notice {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut notice = self.clone();
        if let Self::Aborted(text) | Self::Failed { message: text, .. } = &mut notice {
            shorten(text, MAX_TEXT_BYTES);
        }
        postcard::to_allocvec(&notice).unwrap_or_default()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        postcard::take_from_bytes(bytes)
            .ok()
            .and_then(|(notice, rest)| rest.is_empty().then_some(notice))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Some(notice) = Notice::decode(&bytes) {
                prop_assert_eq!(Notice::decode(&notice.encode()), Some(notice));
            }
        }

        #[test]
        fn notices_survive_a_round_trip(kind in 0..4, text in ".{0,40}", a in any::<usize>(), b in any::<u64>()) {
            let notice = match kind {
                0 => Notice::Aborted(text),
                1 => Notice::Failed { at_fault: a, message: text },
                2 => Notice::Left { context: a as u32, done: b },
                _ => Notice::Waits { context: a as u32, sequence: b, peer: a },
            };
            prop_assert_eq!(Notice::decode(&notice.encode()), Some(notice));
        }
    }
}
