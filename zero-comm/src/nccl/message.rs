//! What the processes of a world tell each other beside the data, and how it lies on the wire: a length, a kind, words
//! and texts, all little-endian. What comes from the wire is checked; nothing in it makes this code panic.

use crate::call::{Call, Segments};
use crate::call_codec::{call_of, header};
use crate::split_request::SplitRequest;
use crate::{CommError, RendezvousError};

/// The version of this protocol: all ranks must speak the same.
pub(super) const VERSION: u32 = 2;
/// No message is longer: one that says so is none.
pub(super) const MAX_BYTES: usize = 1 << 26;
/// How a rank begins to speak, so that a stranger at the port is told apart.
const HELLO: &[u8; 8] = b"zero-rs\0";

/// A communicator of the world: 0 is that of all ranks.
pub(super) type Context = u32;

/// From a rank to the hub, or from the hub to ranks. Ranks are those of the world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// A rank comes.
    Hello { version: u32, rank: u64, world_size: u64, library: u64 },
    /// All are here; the id that they initialise NCCL with.
    Welcome { id: Vec<u8> },
    /// They do not come together.
    Refused { error: RendezvousError },
    /// The rank's next call on a communicator.
    Called { context: Context, call: Call },
    /// How many of its calls the rank's streams have reached, and ended.
    Progress { context: Context, reached: u64, ended: u64 },
    /// A collective of the rank takes longer than its limit.
    Late { context: Context, sequence: u64, call: Call, limit_ms: u64 },
    /// To the hub: the rank failed. From the hub: the world did, by this.
    Failed { error: CommError },
    /// The rank comes to meeting `number` of a communicator, which is a split: what it asks. (Splits and
    /// registrations are counted together: they are what all ranks of a communicator wait for.)
    Split { context: Context, number: u64, request: SplitRequest },
    /// All have: what they ask, in rank order of the communicator, and the number of the first new one, which is the
    /// least color's; the next color's is the next.
    SplitDone { context: Context, number: u64, first: Context, requests: Vec<SplitRequest> },
    /// The rank comes to meeting `number`, which is a registration: the bytes it has registered, if it could.
    Register { context: Context, number: u64, bytes: Option<u64> },
    /// All have: the bytes of each, in rank order of the communicator.
    RegisterDone { context: Context, number: u64, bytes: Vec<Option<u64>> },
    /// The rank waits in that meeting longer than its limit.
    LateMeeting { context: Context, number: u64, limit_ms: u64 },
    /// The rank gives up a communicator, after this many calls.
    Left { context: Context, done: u64 },
    /// To the hub: the rank ends well. From the hub: rank 0 did, and nobody listens any more.
    Goodbye,
    /// Nothing new.
    Alive,
}

struct Writer(Vec<u8>);

impl Writer {
    fn word(mut self, word: u64) -> Self {
        self.0.extend(word.to_le_bytes());
        self
    }

    fn bytes(self, bytes: &[u8]) -> Self {
        let mut out = self.word(bytes.len() as u64);
        out.0.extend(bytes);
        out
    }

    fn text(self, text: &str) -> Self {
        self.bytes(text.as_bytes())
    }

    fn words(self, words: impl ExactSizeIterator<Item = u64>) -> Self {
        let out = self.word(words.len() as u64);
        words.fold(out, Self::word)
    }

    fn call(self, call: &Call) -> Self {
        let counts = if let Segments::Uneven(counts) = &call.segments { counts.len() } else { 0 };
        self.words(header(call, counts).into_iter())
    }

    fn error(self, error: &CommError) -> Self {
        match error {
            CommError::Mismatch { sequence, rank, call, other_rank, other_call } => {
                self.word(0).word(*sequence).word(*rank as u64).call(call).word(*other_rank as u64).call(other_call)
            }
            CommError::Stalled { sequence, call, rank, limit, done } => {
                let limit = limit.as_millis().try_into().unwrap_or(u64::MAX);
                self.word(1).word(*sequence).call(call).word(*rank as u64).word(limit).word(*done)
            }
            CommError::Left { sequence, call, rank, done } => {
                self.word(2).word(*sequence).call(call).word(*rank as u64).word(*done)
            }
            CommError::Skipped { sequence, call, rank, stream } => {
                self.word(3).word(*sequence).call(call).word(*rank as u64).text(stream)
            }
            CommError::Aborted { rank, reason } => self.word(4).word(*rank as u64).text(reason),
            CommError::Peer { rank, message } => self.word(5).word(*rank as u64).text(message),
            CommError::BackEnd { message, .. } => self.word(6).text(message),
            other => self.word(6).text(&other.to_string()),
        }
    }

    fn refusal(self, error: &RendezvousError) -> Self {
        let (kind, a, b, c) = match error {
            RendezvousError::WorldSize { rank, says, expected } => (0, *rank, *says as u64, *expected as u64),
            RendezvousError::Version { rank, says, expected } => (1, *rank, u64::from(*says), u64::from(*expected)),
            RendezvousError::Library { rank, says, expected } => (2, *rank, *says, *expected),
            RendezvousError::Twice { rank } => (3, *rank, 0, 0),
            RendezvousError::Died { rank } => (6, *rank, 0, 0),
            RendezvousError::Missing { ranks, world_size, limit } => {
                let (limit, size) = (limit.as_millis().try_into().unwrap_or(u64::MAX), *world_size as u64);
                return self.word(4).word(limit).word(size).words(ranks.iter().map(|&r| r as u64));
            }
            RendezvousError::Broken { message } => return self.word(5).text(message),
            other => return self.word(5).text(&other.to_string()),
        };
        self.word(kind).word(a as u64).word(b).word(c)
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn word(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*word))
    }

    fn size(&mut self) -> Option<usize> {
        self.word()?.try_into().ok()
    }

    fn bytes(&mut self) -> Option<Vec<u8>> {
        let len = self.size()?;
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes.to_vec())
    }

    fn text(&mut self) -> Option<String> {
        Some(String::from_utf8_lossy(&self.bytes()?).into_owned())
    }

    fn words(&mut self) -> Option<Vec<u64>> {
        // As many as are there, however many it says.
        let len = self.size().filter(|len| *len <= self.0.len() / 8)?;
        (0..len).map(|_| self.word()).collect()
    }

    fn call(&mut self) -> Option<Call> {
        call_of(&self.words()?)
    }

    fn context(&mut self) -> Option<Context> {
        self.word()?.try_into().ok()
    }

    fn error(&mut self) -> Option<CommError> {
        let milliseconds = std::time::Duration::from_millis;
        Some(match self.word()? {
            0 => CommError::Mismatch {
                sequence: self.word()?,
                rank: self.size()?,
                call: Box::new(self.call()?),
                other_rank: self.size()?,
                other_call: Box::new(self.call()?),
            },
            1 => CommError::Stalled {
                sequence: self.word()?,
                call: Box::new(self.call()?),
                rank: self.size()?,
                limit: milliseconds(self.word()?),
                done: self.word()?,
            },
            2 => CommError::Left {
                sequence: self.word()?,
                call: Box::new(self.call()?),
                rank: self.size()?,
                done: self.word()?,
            },
            3 => CommError::Skipped {
                sequence: self.word()?,
                call: Box::new(self.call()?),
                rank: self.size()?,
                stream: self.text()?,
            },
            4 => CommError::Aborted { rank: self.size()?, reason: self.text()? },
            5 => CommError::Peer { rank: self.size()?, message: self.text()? },
            6 => CommError::BackEnd { back_end: "nccl", message: self.text()? },
            _ => return None,
        })
    }

    fn refusal(&mut self) -> Option<RendezvousError> {
        Some(match self.word()? {
            0 => RendezvousError::WorldSize { rank: self.size()?, says: self.size()?, expected: self.size()? },
            1 => RendezvousError::Version { rank: self.size()?, says: self.context()?, expected: self.context()? },
            2 => RendezvousError::Library { rank: self.size()?, says: self.word()?, expected: self.word()? },
            kind @ (3 | 6) => {
                let rank = self.size()?;
                self.word()?;
                self.word()?;
                if kind == 3 { RendezvousError::Twice { rank } } else { RendezvousError::Died { rank } }
            }
            4 => {
                let (limit, world_size) = (std::time::Duration::from_millis(self.word()?), self.size()?);
                let ranks = self.words()?.into_iter().map(|r| r as usize).collect();
                RendezvousError::Missing { ranks, world_size, limit }
            }
            5 => RendezvousError::Broken { message: self.text()? },
            _ => return None,
        })
    }
}

fn option_words(option: &Option<u64>) -> [u64; 2] {
    [u64::from(option.is_some()), option.unwrap_or(0)]
}

fn option_of(words: &[u64]) -> Option<Option<u64>> {
    let [is_some, value] = words else { return None };
    Some((*is_some == 1).then_some(*value))
}

fn request_words(request: &SplitRequest) -> [u64; 3] {
    let [has_color, color] = option_words(&request.color);
    [has_color, color, request.key]
}

fn request_of(words: &[u64]) -> Option<SplitRequest> {
    let (key, color) = words.split_last()?;
    Some(SplitRequest { color: option_of(color)?, key: *key })
}

impl Message {
    /// Its length and what follows.
    pub(super) fn encode(&self) -> Vec<u8> {
        let start = |kind: u8| Writer(vec![0, 0, 0, 0, kind]);
        let mut out = match self {
            Self::Hello { version, rank, world_size, library } => {
                start(0).bytes(HELLO).word(u64::from(*version)).word(*rank).word(*world_size).word(*library)
            }
            Self::Welcome { id } => start(1).bytes(id),
            Self::Refused { error } => start(2).refusal(error),
            Self::Called { context, call } => start(3).word(u64::from(*context)).call(call),
            Self::Progress { context, reached, ended } => {
                start(4).word(u64::from(*context)).word(*reached).word(*ended)
            }
            Self::Late { context, sequence, call, limit_ms } => {
                start(5).word(u64::from(*context)).word(*sequence).call(call).word(*limit_ms)
            }
            Self::Failed { error } => start(6).error(error),
            Self::Split { context, number, request } => {
                start(7).word(u64::from(*context)).word(*number).words(request_words(request).into_iter())
            }
            Self::SplitDone { context, number, first, requests } => {
                let words: Vec<u64> = requests.iter().flat_map(request_words).collect();
                start(8).word(u64::from(*context)).word(*number).word(u64::from(*first)).words(words.into_iter())
            }
            Self::Left { context, done } => start(9).word(u64::from(*context)).word(*done),
            Self::Goodbye => start(10),
            Self::Alive => start(11),
            Self::LateMeeting { context, number, limit_ms } => {
                start(12).word(u64::from(*context)).word(*number).word(*limit_ms)
            }
            Self::Register { context, number, bytes } => {
                start(13).word(u64::from(*context)).word(*number).words(option_words(bytes).into_iter())
            }
            Self::RegisterDone { context, number, bytes } => {
                let words: Vec<u64> = bytes.iter().flat_map(option_words).collect();
                start(14).word(u64::from(*context)).word(*number).words(words.into_iter())
            }
        }
        .0;
        let len = (out.len() - 4) as u32;
        out[..4].copy_from_slice(&len.to_le_bytes());
        out
    }

    /// A message without its length; none if it is not one.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        let mut r = Reader(rest);
        let message = match kind {
            0 => {
                (r.bytes()? == HELLO).then_some(())?;
                let version = r.context()?;
                Self::Hello { version, rank: r.word()?, world_size: r.word()?, library: r.word()? }
            }
            1 => Self::Welcome { id: r.bytes()? },
            2 => Self::Refused { error: r.refusal()? },
            3 => Self::Called { context: r.context()?, call: r.call()? },
            4 => Self::Progress { context: r.context()?, reached: r.word()?, ended: r.word()? },
            5 => {
                let (context, sequence) = (r.context()?, r.word()?);
                Self::Late { context, sequence, call: r.call()?, limit_ms: r.word()? }
            }
            6 => Self::Failed { error: r.error()? },
            7 => Self::Split { context: r.context()?, number: r.word()?, request: request_of(&r.words()?)? },
            8 => {
                let (context, number, first) = (r.context()?, r.word()?, r.context()?);
                let words = r.words()?;
                let requests = words.chunks(3).map(request_of).collect::<Option<_>>()?;
                Self::SplitDone { context, number, first, requests }
            }
            9 => Self::Left { context: r.context()?, done: r.word()? },
            10 => Self::Goodbye,
            11 => Self::Alive,
            12 => Self::LateMeeting { context: r.context()?, number: r.word()?, limit_ms: r.word()? },
            13 => Self::Register { context: r.context()?, number: r.word()?, bytes: option_of(&r.words()?)? },
            14 => {
                let (context, number, words) = (r.context()?, r.word()?, r.words()?);
                let bytes = words.chunks(2).map(option_of).collect::<Option<_>>()?;
                Self::RegisterDone { context, number, bytes }
            }
            _ => return None,
        };
        r.0.is_empty().then_some(message)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use zero_alloc::device::DType;

    use super::*;
    use crate::{Collective, ReduceOp};

    fn call(segments: Segments) -> Call {
        let (op, dtype) = (Some(ReduceOp::Avg), DType::Bf16);
        Call { collective: Collective::ReduceScatter, op, dtype, segments, root: None, control: false }
    }

    fn all() -> Vec<Message> {
        let (even, uneven) = (call(Segments::Even(7)), call(Segments::Uneven([1, 0, 5].into())));
        let (boxed, other) = (Box::new(even.clone()), Box::new(uneven.clone()));
        let limit = Duration::from_millis(1500);
        let errors = [
            CommError::Mismatch { sequence: 4, rank: 1, call: boxed.clone(), other_rank: 2, other_call: other },
            CommError::Stalled { sequence: 4, call: boxed.clone(), rank: 1, limit, done: 3 },
            CommError::Left { sequence: 4, call: boxed.clone(), rank: 1, done: 3 },
            CommError::Skipped { sequence: 4, call: boxed, rank: 1, stream: "comm".into() },
            CommError::Aborted { rank: 2, reason: "on purpose".into() },
            CommError::Peer { rank: 2, message: "gone".into() },
            CommError::BackEnd { back_end: "nccl", message: "no".into() },
        ];
        let refusals = [
            RendezvousError::WorldSize { rank: 1, says: 3, expected: 2 },
            RendezvousError::Version { rank: 1, says: 3, expected: 2 },
            RendezvousError::Library { rank: 1, says: 21_800, expected: 23_007 },
            RendezvousError::Twice { rank: 1 },
            RendezvousError::Died { rank: 1 },
            RendezvousError::Missing { ranks: vec![1, 3], world_size: 4, limit },
            RendezvousError::Broken { message: "so".into() },
        ];
        let requests = vec![SplitRequest { color: Some(7), key: 1 }, SplitRequest { color: None, key: 9 }];
        let mut all = vec![
            Message::Hello { version: 1, rank: 2, world_size: 3, library: 4 },
            Message::Welcome { id: vec![1; 128] },
            Message::Called { context: 1, call: even.clone() },
            Message::Called { context: 1, call: uneven },
            Message::Progress { context: 1, reached: 2, ended: 3 },
            Message::Late { context: 1, sequence: 2, call: even, limit_ms: 3 },
            Message::Split { context: 1, number: 2, request: requests[0] },
            Message::SplitDone { context: 1, number: 2, first: 5, requests },
            Message::Register { context: 1, number: 2, bytes: Some(3) },
            Message::RegisterDone { context: 1, number: 2, bytes: vec![None, Some(1 << 33)] },
            Message::Left { context: 1, done: 2 },
            Message::LateMeeting { context: 1, number: 2, limit_ms: 3 },
            Message::Goodbye,
            Message::Alive,
        ];
        all.extend(errors.map(|error| Message::Failed { error }));
        all.extend(refusals.map(|error| Message::Refused { error }));
        all
    }

    #[test]
    fn every_message_survives_the_wire_and_no_part_of_it_does() {
        for message in all() {
            let bytes = message.encode();
            assert_eq!(u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize, bytes.len() - 4);
            for end in 5..bytes.len() {
                assert_eq!(Message::decode(&bytes[4..end]), None, "{message:?} cut at {end}");
            }
            assert_eq!(Message::decode(&bytes[4..]), Some(message));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_none(index in any::<prop::sample::Index>(), at in 4..200usize, byte in any::<u8>()) {
            // A message with one byte changed.
            let all = all();
            let mut bytes = index.get(&all).encode();
            let at = at.min(bytes.len() - 1);
            bytes[at] = byte;
            if let Some(message) = Message::decode(&bytes[4..]) {
                prop_assert_eq!(Message::decode(&message.encode()[4..]), Some(message));
            }
        }
    }
}
