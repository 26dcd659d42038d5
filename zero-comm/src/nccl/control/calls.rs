//! A rank's calls on a communicator, numbered from 0, with a rolling hash, and the reports of its
//! progress.

use std::collections::VecDeque;
use std::ops::Range;

use postcard::ser_flavors::Flavor;

use super::message::{Context, Message};
use crate::call::Call;
use crate::call::Segments;

/// Bytes of calls in one frame; a frame is larger only if it contains a single call.
const CALLS_BYTES: usize = 1 << 16;
/// The offset basis and the prime of FNV-1a with 64 bits (Fowler, Noll, Vo; RFC 9923).
const FNV: [u64; 2] = [0xcbf2_9ce4_8422_2325, 0x0100_0000_01b3];

/// Hashes the bytes that postcard writes, so that all builds of a protocol version compute the same
/// hash.
struct Fnv(u64);

impl Flavor for Fnv {
    type Output = u64;

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(FNV[1]);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<u64> {
        Ok(self.0)
    }
}

/// The latest calls; earlier ones were dropped.
#[derive(Clone, Debug)]
pub(crate) struct Calls {
    /// The number of calls that were dropped.
    start: u64,
    /// Each call, with the hash of all calls up to and including it.
    kept: VecDeque<(Call, u64)>,
    kept_bytes: usize,
    /// The hash of all calls.
    pub(crate) hash: u64,
}

impl Default for Calls {
    fn default() -> Self {
        Self {
            start: 0,
            kept: VecDeque::new(),
            kept_bytes: 0,
            hash: FNV[0],
        }
    }
}

impl Calls {
    pub(crate) fn push(&mut self, call: Call) {
        // Neither the flavor nor a call's implementation of `Serialize` returns an error.
        self.hash =
            postcard::serialize_with_flavor(&call, Fnv(self.hash)).expect("hashing cannot fail");
        self.kept_bytes += memory_bytes(&call);
        self.kept.push_back((call, self.hash));
    }

    /// The number of all calls.
    pub(crate) fn count(&self) -> u64 {
        self.start + self.kept.len() as u64
    }

    /// The hash of the first `count` calls; `None` if there are fewer, or the last of them was
    /// dropped.
    pub(crate) fn hash_of_first(&self, count: u64) -> Option<u64> {
        Some(self.entry(count.checked_sub(1)?)?.1)
    }

    pub(crate) fn get(&self, sequence: u64) -> Option<&Call> {
        Some(&self.entry(sequence)?.0)
    }

    fn entry(&self, sequence: u64) -> Option<&(Call, u64)> {
        self.kept
            .get(usize::try_from(sequence.checked_sub(self.start)?).ok()?)
    }

    /// Drops the calls before `sequence`.
    pub(crate) fn drop_before(&mut self, sequence: u64) {
        let dropped = sequence.min(self.count()).saturating_sub(self.start);
        self.kept_bytes -= self
            .kept
            .drain(..dropped as usize)
            .map(|(call, _)| memory_bytes(&call))
            .sum::<usize>();
        self.start += dropped;
        // A burst of calls does not keep its memory.
        if self.kept.capacity() > 4 * self.kept.len() + 64 {
            self.kept.shrink_to(2 * self.kept.len());
        }
    }

    /// The number of calls in memory.
    pub(crate) fn kept(&self) -> usize {
        self.kept.len()
    }

    /// The memory of these calls.
    pub(crate) fn kept_bytes(&self) -> usize {
        self.kept_bytes
    }

    /// The messages that send the kept calls of `range`, in frames of limited size.
    pub(crate) fn messages(&self, context: Context, range: Range<u64>) -> Vec<Message> {
        let mut messages = Vec::new();
        let mut bytes = usize::MAX;
        for sequence in range.start.max(self.start)..range.end.min(self.count()) {
            let Some(call) = self.get(sequence) else {
                break;
            };
            let call_bytes = max_bytes(call);
            bytes = bytes.saturating_add(call_bytes);
            if bytes > CALLS_BYTES {
                messages.push(Message::Calls {
                    context,
                    from: sequence,
                    calls: Vec::new(),
                });
                bytes = call_bytes;
            }
            if let Some(Message::Calls { calls, .. }) = messages.last_mut() {
                calls.push(call.clone());
            }
        }

        messages
    }
}

/// The memory of a call that is kept, if it shares its counts with no other.
fn memory_bytes(call: &Call) -> usize {
    let counts = if let Segments::Uneven(counts) = &call.segments {
        counts.len()
    } else {
        0
    };
    size_of::<(Call, u64)>() + counts * size_of::<usize>()
}

/// A rank's calls on a communicator, and its progress.
#[derive(Debug)]
pub(crate) struct Log {
    /// The calls on which not all ranks agree yet.
    pub(crate) calls: Calls,
    /// Calls that its stream has reached.
    pub(crate) reached: u64,
    /// Calls that have ended on its stream.
    pub(crate) ended: u64,
    /// The rank has dropped the communicator.
    pub(crate) left: bool,
    /// The rank is the communicator's first: it sends its calls.
    first: bool,
    /// The last progress sent: calls made, reached and ended.
    reported: (u64, u64, u64),
}

impl Log {
    pub(crate) fn new(first: bool) -> Self {
        Self {
            calls: Calls::default(),
            reached: 0,
            ended: 0,
            left: false,
            first,
            reported: (0, 0, 0),
        }
    }

    /// The messages that report what has changed since the last report.
    pub(crate) fn report(&mut self, context: Context) -> Vec<Message> {
        let called = self.calls.count();
        let reached = self.reached;
        let ended = self.ended;
        let progress = (called, reached, ended);
        let last = std::mem::replace(&mut self.reported, progress);
        if progress == last {
            return Vec::new();
        }
        let mut messages = if self.first {
            self.calls.messages(context, last.0..called)
        } else {
            Vec::new()
        };

        messages.push(Message::Progress {
            context,
            called,
            hash: self.calls.hash,
            reached,
            ended,
        });

        messages
    }

    /// Handles [`Message::Agreed`]. Returns the answer, if one is needed.
    pub(crate) fn agreed(&mut self, context: Context, count: u64, first: u64) -> Option<Message> {
        self.calls.drop_before(count);
        let called = self.calls.count();
        if first <= count || called <= first || called != self.reported.0 {
            return None;
        }
        Some(Message::Hash {
            context,
            count: first,
            hash: self.calls.hash_of_first(first)?,
        })
    }
}

/// Upper bound of the bytes of a serialized call; an integer has at most 10.
fn max_bytes(call: &Call) -> usize {
    32 + 10
        * if let Segments::Uneven(counts) = &call.segments {
            counts.len()
        } else {
            0
        }
}
