//! What ranks tell each other outside any collective.

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
    /// It waits for rank `peer` of the world in collective `sequence` of `context`.
    Waits {
        /// Which communicator.
        context: u32,
        /// Which collective.
        sequence: u64,
        /// For whom.
        peer: u32,
    },
}

impl Notice {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, a, b, text) = match self {
            Self::Aborted(reason) => (0u8, 0, 0, reason.as_str()),
            Self::Failed { blamed, message } => (1, *blamed as u64, 0, message.as_str()),
            Self::Left { context, done } => (2, u64::from(*context), *done, ""),
            Self::Waits { context, sequence, peer } => {
                (3, u64::from(*context) << 32 | u64::from(*peer), *sequence, "")
            }
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
            3 => Some(Self::Waits { context: (a >> 32) as u32, sequence: b, peer: a as u32 }),
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
        fn any_bytes_are_a_notice_or_none(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Some(notice) = Notice::decode(&bytes) {
                prop_assert_eq!(Notice::decode(&notice.encode()), Some(notice));
            }
        }
    }
}
