//! Messages of the control plane, between each rank and the coordinator. Ranks are those of the whole world.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::call::Call;
use crate::split_request::SplitRequest;
use crate::{CommError, RendezvousError};

/// The number of a communicator of the world; communicator 0 contains all ranks.
pub(super) type Context = u32;

/// A rank's entry of a meeting. A meeting is a split or a registration, in which the hosts of all ranks of a
/// communicator wait for each other. Each communicator numbers its meetings from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum MeetingEntry {
    Split(SplitRequest),
    /// Bytes that the rank registered; `None` if it failed to.
    Registration(Option<u64>),
}

impl MeetingEntry {
    pub(super) fn kind(self) -> &'static str {
        match self {
            Self::Split(_) => "split",
            Self::Registration(_) => "registration",
        }
    }
}

/// All frames after the handshake.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// All ranks have joined; `id` initializes NCCL.
    Welcome { id: Vec<u8> },
    /// The rendezvous failed.
    Refused { error: RendezvousError },
    /// The rank's next call on a communicator.
    Called { context: Context, call: Call },
    /// The numbers of calls on a communicator that the rank's streams have reached and that have ended.
    Progress { context: Context, reached: u64, ended: u64 },
    /// A collective of the rank exceeded its limit.
    Late { context: Context, sequence: u64, call: Call, limit: Duration },
    /// To the coordinator: the rank failed. From the coordinator: the failure of the world.
    Failed { error: CommError },
    /// The rank waits in meeting `number` of a communicator.
    Meet { context: Context, number: u64, entry: MeetingEntry },
    /// All ranks have joined that meeting; the entries are in rank order of the communicator. For a split, `first` is
    /// the communicator of the least color; the communicators of the other colors follow in ascending order of color.
    Met { context: Context, number: u64, first: Context, entries: Vec<MeetingEntry> },
    /// The rank waited in that meeting for longer than its limit.
    LateMeeting { context: Context, number: u64, limit: Duration },
    /// The rank dropped a communicator, after `done` calls.
    Left { context: Context, done: u64 },
    /// To the coordinator: the rank ends without an error. From the coordinator: rank 0 and the coordinator end
    /// without one.
    Goodbye,
    /// Keepalive.
    Alive,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zero_alloc::device::DType;

    use super::super::handshake::VERSION;
    use super::super::wire::{decode, encode};
    use super::*;
    use crate::call::Segments;
    use crate::{Collective, ReduceOp};

    fn calls() -> impl Strategy<Value = Call> {
        let segments = prop_oneof![
            any::<usize>().prop_map(Segments::Even),
            any::<usize>().prop_map(Segments::Balanced),
            prop::collection::vec(any::<usize>(), 0..9).prop_map(|counts| Segments::Uneven(counts.into())),
        ];
        let ops = prop::sample::select(vec![None, Some(ReduceOp::Sum), Some(ReduceOp::Avg), Some(ReduceOp::Max)]);
        let dtypes = prop::sample::select(vec![DType::U8, DType::F16, DType::Bf16, DType::F32, DType::F64]);
        let collectives = prop::sample::select(&Collective::ALL[..]);
        (collectives, ops, dtypes, segments, any::<Option<usize>>(), any::<bool>()).prop_map(
            |(collective, op, dtype, segments, root, control)| Call {
                collective,
                op,
                dtype,
                segments,
                root,
                control,
            },
        )
    }

    fn errors() -> impl Strategy<Value = CommError> {
        let fields = (any::<u64>(), calls(), any::<usize>(), any::<u64>(), ".{0,9}", any::<Duration>());
        (0..7, fields, calls()).prop_map(|(kind, (sequence, call, rank, done, text, limit), other)| {
            let (call, other_call) = (Box::new(call), Box::new(other));
            match kind {
                0 => CommError::Mismatch { sequence, rank, call, other_rank: done as usize, other_call },
                1 => CommError::Stalled { sequence, call, rank, limit, done },
                2 => CommError::Left { sequence, call, rank, done },
                3 => CommError::Skipped { sequence, call, rank, stream: text },
                4 => CommError::Panicked { sequence, call, rank },
                5 => CommError::Aborted { rank, reason: text },
                _ => CommError::Peer { rank, message: text },
            }
        })
    }

    fn refusals() -> impl Strategy<Value = RendezvousError> {
        (0..7, any::<[usize; 3]>(), any::<u32>(), ".{0,9}", any::<Duration>()).prop_map(
            |(kind, [rank, got, expected], version, message, limit)| match kind {
                0 => RendezvousError::WorldSize { rank, got, expected },
                1 => RendezvousError::Version { rank, got: version, expected: VERSION },
                2 => RendezvousError::Library { rank, got: got as u64, expected: expected as u64 },
                3 => RendezvousError::Twice { rank },
                4 => RendezvousError::Died { rank },
                5 => {
                    RendezvousError::Missing { ranks: vec![rank, got], world_size: expected, limit, strangers: rank }
                }
                _ => RendezvousError::Broken { message },
            },
        )
    }

    fn messages() -> impl Strategy<Value = Message> {
        let entries = prop_oneof![
            (any::<Option<u64>>(), any::<u64>())
                .prop_map(|(color, key)| MeetingEntry::Split(SplitRequest { color, key })),
            any::<Option<u64>>().prop_map(MeetingEntry::Registration),
        ];
        let numbers = (any::<Context>(), any::<u64>(), any::<u64>());
        prop_oneof![
            prop::collection::vec(any::<u8>(), 0..200).prop_map(|id| Message::Welcome { id }),
            refusals().prop_map(|error| Message::Refused { error }),
            errors().prop_map(|error| Message::Failed { error }),
            (numbers, calls(), any::<Duration>(), prop::collection::vec(entries, 1..9), 0..8).prop_map(
                |((context, a, b), call, limit, entries, kind)| match kind {
                    0 => Message::Called { context, call },
                    1 => Message::Progress { context, reached: a, ended: b },
                    2 => Message::Late { context, sequence: a, call, limit },
                    3 => Message::Meet { context, number: a, entry: entries[0] },
                    4 => Message::Met { context, number: a, first: b as Context, entries },
                    5 => Message::LateMeeting { context, number: a, limit },
                    6 => Message::Left { context, done: a },
                    _ => [Message::Goodbye, Message::Alive][b as usize % 2].clone(),
                }
            ),
        ]
    }

    /// The frame of a message, without its length.
    fn contents(message: &Message) -> Vec<u8> {
        encode(message).unwrap().split_off(4)
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
