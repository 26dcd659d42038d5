//! Messages of the control plane, between each rank and the coordinator. Ranks are those of the
//! whole world.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::frames::encode;
use crate::call::Call;
use crate::error::shorten;
use crate::split_request::SplitRequest;
use crate::{CommError, RendezvousError};

/// The number of a communicator of the world; communicator 0 contains all ranks.
pub(crate) type Context = u32;

/// A rank's place in a new communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SplitRank {
    pub(crate) context: Context,
    /// Its rank in the new communicator.
    pub(crate) rank: usize,
    /// Ranks of the new communicator.
    pub(crate) size: usize,
}

/// A rank's progress on a communicator, in numbers of calls.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Progress {
    /// Calls that the rank has made.
    pub(crate) called: u64,
    /// Calls that its streams have reached.
    pub(crate) reached: u64,
    /// Calls that have ended on its streams.
    pub(crate) ended: u64,
    /// The call at which the rank is, after at most [`BEFORE`](Self::BEFORE) others. Each has the
    /// hash of all calls up to and including it.
    pub(crate) recent: Vec<(Call, u64)>,
}

impl Progress {
    /// Calls of a report before that at which the rank is.
    pub(crate) const BEFORE: u64 = 3;

    /// The number of the call at which the rank is: the oldest that runs, or the last one.
    pub(crate) fn number(&self) -> u64 {
        self.ended.min(self.called.saturating_sub(1))
    }

    /// A call by its number, with its hash.
    pub(crate) fn recent(&self, number: u64) -> Option<(&Call, u64)> {
        let before = usize::try_from(self.number().checked_sub(number)?).ok()?;
        let (call, hash) = self.recent.iter().rev().nth(before)?;
        Some((call, *hash))
    }
}

/// All frames after the handshake.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Message {
    // From the coordinator.
    /// All ranks have joined. `id` initializes NCCL; ranks report their progress once every
    /// `report_every`.
    Welcome { id: Vec<u8>, report_every: Duration },
    /// The rendezvous failed.
    Refused { error: RendezvousError },
    /// All ranks have joined split `number` of a communicator: the rank's place in its new
    /// communicator; `None` if it joins none.
    Placed {
        context: Context,
        number: u64,
        place: Option<SplitRank>,
    },

    // From a rank.
    /// The rank's progress on a communicator.
    Progress {
        context: Context,
        progress: Progress,
    },
    /// A collective of the rank exceeded its limit.
    Late {
        context: Context,
        sequence: u64,
        call: Call,
        limit: Duration,
    },
    /// The rank waits in split `number` of a communicator. Each communicator numbers its splits
    /// from 0.
    Split {
        context: Context,
        number: u64,
        request: SplitRequest,
    },
    /// The rank waited in that split for longer than its limit.
    LateSplit {
        context: Context,
        number: u64,
        limit: Duration,
    },
    /// The rank dropped a communicator, after `done` calls.
    Left { context: Context, done: u64 },

    // In both directions.
    /// To the coordinator: the rank failed. From the coordinator: the failure of the world.
    Failed { error: CommError },
    /// To the coordinator: the rank ends without an error; it waits for the answer. From the
    /// coordinator: the answer, or rank 0 and the coordinator end without an error.
    Goodbye,
    /// Keepalive.
    Alive,
}

/// Maximum size of a failure, which is sent to every rank.
const MAX_ERROR_BYTES: usize = 16 << 10;
/// Maximum size of the text of a larger one.
const MAX_TEXT_BYTES: usize = 4 << 10;

/// The rank that an error names; `None` if it concerns one process only, and has no form that ranks
/// send each other.
pub(crate) fn named_rank(error: &CommError) -> Option<usize> {
    use CommError::{
        Aborted, Diverged, Left, Lost, Mismatch, Panicked, Peer, Skipped, Stalled, Unmatched,
    };
    match error {
        Mismatch { rank, .. }
        | Diverged { rank, .. }
        | Stalled { rank, .. }
        | Left { rank, .. }
        | Lost { rank, .. }
        | Skipped { rank, .. }
        | Panicked { rank, .. }
        | Aborted { rank, .. }
        | Unmatched { rank, .. }
        | Peer { rank, .. } => Some(*rank),
        _ => None,
    }
}

/// A failure of limited size. Of a larger one it keeps the rank and the beginning of the text.
pub(crate) fn bounded(error: CommError) -> CommError {
    let text = |mut text: String| {
        shorten(&mut text, MAX_TEXT_BYTES);
        text
    };

    let is_small = encode(&error).is_ok_and(|frame| frame.len() <= MAX_ERROR_BYTES);
    match (error, is_small) {
        (error, true) => error,
        (CommError::Aborted { rank, reason }, _) => CommError::Aborted {
            rank,
            reason: text(reason),
        },
        (CommError::Peer { rank, message }, _) => CommError::Peer {
            rank,
            message: text(message),
        },
        // Its calls have as many counts as the communicator has ranks.
        (error, _) => named_rank(&error).map_or(error.clone(), |rank| CommError::Peer {
            rank,
            message: text(error.to_string()),
        }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zero_alloc::device::DType;

    use super::super::frames::decode;
    use super::super::handshake::VERSION;
    use super::*;
    use crate::call::Counts;
    use crate::{Collective, ReduceOp};

    fn calls() -> impl Strategy<Value = Call> {
        let segments = prop_oneof![
            any::<usize>().prop_map(Counts::Even),
            any::<usize>().prop_map(Counts::Balanced),
            prop::collection::vec(any::<usize>(), 0..9)
                .prop_map(|counts| Counts::Uneven(counts.into())),
            prop::collection::vec(any::<[usize; 2]>(), 0..9)
                .prop_map(|counts| Counts::Pairs(counts.into())),
        ];
        let ops = prop::sample::select(vec![
            None,
            Some(ReduceOp::Sum),
            Some(ReduceOp::Avg),
            Some(ReduceOp::Max),
        ]);

        let dtypes = prop::sample::select(vec![
            DType::U8,
            DType::F16,
            DType::Bf16,
            DType::F32,
            DType::F64,
        ]);

        let collectives = prop::sample::select(&Collective::ALL[..]);
        (
            collectives,
            ops,
            dtypes,
            segments,
            any::<Option<usize>>(),
            any::<bool>(),
        )
            .prop_map(|(collective, op, dtype, segments, root, control)| Call {
                collective,
                op,
                dtype,
                segments,
                root,
                control,
            })
    }

    fn errors() -> impl Strategy<Value = CommError> {
        let fields = (any::<u64>(), any::<usize>(), any::<u64>());
        (0..10, fields, ".{0,9}", any::<Duration>(), calls(), calls()).prop_map(
            |(kind, (sequence, rank, done), text, limit, call, other)| {
                let call = Box::new(call);
                let other_call = Box::new(other);
                let other_rank = done as usize;
                match kind {
                    0 => CommError::Mismatch {
                        sequence,
                        rank,
                        call,
                        other_rank,
                        other_call,
                    },
                    1 => CommError::Stalled {
                        sequence,
                        call,
                        rank,
                        limit,
                        done,
                    },
                    2 => CommError::Left {
                        sequence,
                        call,
                        rank,
                        done,
                    },
                    3 => CommError::Skipped {
                        sequence,
                        call,
                        rank,
                        stream: text,
                    },
                    4 => CommError::Panicked {
                        sequence,
                        call,
                        rank,
                    },
                    5 => CommError::Aborted { rank, reason: text },
                    6 => CommError::Lost {
                        sequence,
                        call,
                        rank,
                        message: text,
                    },
                    7 => CommError::Diverged {
                        sequence,
                        rank,
                        call,
                        other_rank,
                        other_call,
                        agreed: done,
                    },
                    8 => CommError::Unmatched {
                        sequence,
                        rank,
                        sent: done as usize,
                        other_rank,
                        received: rank,
                    },
                    _ => CommError::Peer {
                        rank,
                        message: text,
                    },
                }
            },
        )
    }

    fn refusals() -> impl Strategy<Value = RendezvousError> {
        (
            0..7,
            any::<[usize; 3]>(),
            any::<u32>(),
            ".{0,9}",
            any::<Duration>(),
        )
            .prop_map(
                |(kind, [rank, got, expected], version, message, limit)| match kind {
                    0 => RendezvousError::WorldSize {
                        rank,
                        got,
                        expected,
                    },
                    1 => RendezvousError::Version {
                        rank,
                        got: version,
                        expected: VERSION,
                    },
                    2 => RendezvousError::Library {
                        rank,
                        got: got as u64,
                        expected: expected as u64,
                    },
                    3 => RendezvousError::Twice { rank },
                    4 => RendezvousError::Died { rank },
                    5 => RendezvousError::Missing {
                        ranks: vec![rank, got],
                        world_size: expected,
                        limit,
                        strangers: rank,
                    },
                    _ => RendezvousError::Broken { message },
                },
            )
    }

    fn messages() -> impl Strategy<Value = Message> {
        let numbers = (any::<Context>(), any::<[u64; 3]>(), any::<Duration>());
        let texts = (
            refusals(),
            errors(),
            prop::collection::vec(any::<u8>(), 0..200),
        );
        (0..10, numbers, texts, calls(), any::<Option<u64>>()).prop_map(
            |(kind, (context, [a, b, c], limit), (refusal, error, id), call, color)| match kind {
                0 => Message::Welcome {
                    id,
                    report_every: limit,
                },
                1 => Message::Refused { error: refusal },
                2 => Message::Failed { error },
                3 => Message::Progress {
                    context,
                    progress: Progress {
                        called: a,
                        reached: b,
                        ended: c,
                        recent: vec![(call, a ^ b)],
                    },
                },
                4 => Message::Late {
                    context,
                    sequence: a,
                    call,
                    limit,
                },
                5 => Message::Split {
                    context,
                    number: a,
                    request: SplitRequest { color, key: b },
                },
                6 => Message::Placed {
                    context,
                    number: a,
                    place: color.map(|rank| SplitRank {
                        context,
                        rank: rank as usize,
                        size: b as usize,
                    }),
                },
                7 => Message::LateSplit {
                    context,
                    number: a,
                    limit,
                },
                8 => Message::Left { context, done: a },
                _ => [Message::Goodbye, Message::Alive][b as usize % 2].clone(),
            },
        )
    }

    /// The frame of a message, without its length.
    fn contents(message: &Message) -> Vec<u8> {
        encode(message).unwrap().split_off(4)
    }

    #[test]
    fn failures_are_bounded() {
        let long = || "\u{e9}".repeat(MAX_ERROR_BYTES);
        let segments = Counts::Uneven(vec![usize::MAX; 5000].into());
        let collective = Collective::AllGather;
        let dtype = DType::F32;
        let op = None;
        let root = None;

        let call = || {
            Box::new(Call {
                collective,
                op,
                dtype,
                segments: segments.clone(),
                root,
                control: false,
            })
        };

        let short = CommError::Aborted {
            rank: 1,
            reason: "r".repeat(MAX_TEXT_BYTES),
        };

        assert_eq!(bounded(short.clone()), short);
        for error in [
            CommError::Aborted {
                rank: 1,
                reason: long(),
            },
            CommError::Peer {
                rank: 1,
                message: long(),
            },
            CommError::Skipped {
                sequence: 7,
                call: call(),
                rank: 1,
                stream: long(),
            },
            CommError::Mismatch {
                sequence: 7,
                rank: 1,
                call: call(),
                other_rank: 0,
                other_call: call(),
            },
        ] {
            let bounded = bounded(error.clone());
            assert!(
                encode(&bounded).unwrap().len() <= MAX_TEXT_BYTES + 16,
                "{bounded}"
            );
            let begins = bounded.to_string();
            assert!(
                begins.starts_with("rank 1") && begins.len() > MAX_TEXT_BYTES - 2,
                "{begins}"
            );
        }
    }

    proptest! {
        #[test]
        fn messages_survive_a_round_trip(message in messages(), cut in any::<prop::sample::Index>()) {
            let frame = contents(&message);
            prop_assert!(decode::<Message>(&frame[..cut.index(frame.len())]).is_err());
            prop_assert!(decode::<Message>(&[&frame[..], &[0]].concat()).is_err());
            prop_assert_eq!(decode::<Message>(&frame).unwrap(), message);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(message) = decode::<Message>(&bytes) {
                prop_assert_eq!(decode::<Message>(&contents(&message)).unwrap(), message);
            }
        }

        #[test]
        fn damaged_messages_never_panic(message in messages(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut frame = contents(&message);
            *at.get_mut(&mut frame) = byte;
            let _ = decode::<Message>(&frame);
        }
    }
}
