//! The computations of operations, on the bytes of all ranks.

use std::ffi::CStr;

use half::{bf16, f16};

/// Memory of the device, which is memory of the host here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct At(pub(crate) *mut u8);

// SAFETY: only an address; the caller of the collective guarantees exclusive access to the memory
// until it ends.
unsafe impl Send for At {}
// SAFETY: as above.
unsafe impl Sync for At {}

impl At {
    fn read(self, bytes: usize) -> Vec<u8> {
        if bytes == 0 {
            return Vec::new();
        }
        // SAFETY: the caller of the collective guarantees that this number of bytes is readable.
        unsafe { std::slice::from_raw_parts(self.0, bytes) }.to_vec()
    }

    fn write(self, offset: usize, bytes: &[u8]) {
        if !bytes.is_empty() {
            let to = self.0.wrapping_add(offset);
            // SAFETY: the caller of the collective guarantees that these bytes are writable;
            // `bytes` is another allocation.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        }
    }
}

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    AllReduce,
    Reduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Send,
    Receive,
}

/// A call, alone or in a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) kind: Kind,
    pub(crate) from: At,
    pub(crate) to: At,
    /// The count passed to the call, in elements.
    pub(crate) count: usize,
    /// `ncclDataType_t`.
    pub(crate) dtype: i32,
    /// `ncclRedOp_t`, or 0.
    pub(crate) op: i32,
    /// The root or the peer, or 0.
    pub(crate) other: usize,
    /// The registered buffers: bit 0 for `from`, bit 1 for `to`.
    pub(crate) registered: u64,
}

/// `u64`s of a part's header.
const HEADER: usize = 5;

/// A part as another rank receives it.
struct Received<'a> {
    header: [u64; HEADER],
    bytes: &'a [u8],
}

/// Bytes of an element of `ncclDataType_t`; `None` for unsupported types.
pub(crate) fn width(dtype: i32) -> Option<usize> {
    match dtype {
        0 | 1 => Some(1),
        6 | 9 => Some(2),
        2 | 3 | 7 => Some(4),
        4 | 5 | 8 => Some(8),
        _ => None,
    }
}

impl Kind {
    /// The name of the function.
    pub(crate) fn name(self) -> &'static CStr {
        match self {
            Self::AllReduce => c"ncclAllReduce",
            Self::Reduce => c"ncclReduce",
            Self::ReduceScatter => c"ncclReduceScatter",
            Self::AllGather => c"ncclAllGather",
            Self::Broadcast => c"ncclBroadcast",
            Self::Send => c"ncclSend",
            Self::Receive => c"ncclRecv",
        }
    }
}

impl Part {
    /// The bytes that a rank of a ring of `n` sends for this call.
    pub(crate) fn sent_bytes(&self, n: usize) -> u64 {
        let bytes = self.bytes(self.count) as u64;
        let others = n as u64 - 1;
        match self.kind {
            Kind::AllReduce => 2 * bytes * others / n as u64,
            Kind::ReduceScatter | Kind::AllGather => bytes * others,
            Kind::Reduce | Kind::Broadcast => bytes * others / n as u64,
            Kind::Send => bytes,
            Kind::Receive => 0,
        }
    }

    /// Sets `registered` for a collective of `n` ranks. `is` receives an address and a multiple of
    /// the count. A buffer that only the root uses is not counted as registered.
    pub(crate) fn note_registered(&mut self, is: impl Fn(At, usize) -> bool, n: usize) {
        let (from, to) = match self.kind {
            Kind::AllReduce => (is(self.from, 1), is(self.to, 1)),
            Kind::ReduceScatter => (is(self.from, n), is(self.to, 1)),
            Kind::AllGather => (is(self.from, 1), is(self.to, n)),
            Kind::Broadcast => (false, is(self.to, 1)),
            Kind::Reduce => (is(self.from, 1), false),
            Kind::Send | Kind::Receive => (false, false),
        };
        self.registered = u64::from(from) | u64::from(to) << 1;
    }

    fn bytes(&self, elems: usize) -> usize {
        elems * width(self.dtype).unwrap_or(0)
    }

    fn header(&self, len: usize) -> [u64; HEADER] {
        [
            self.kind as u64,
            self.count as u64,
            self.registered << 16 | (self.dtype as u64) << 8 | self.op as u64,
            self.other as u64,
            len as u64,
        ]
    }

    /// Serializes the part for the other ranks: a header, and the bytes that they need.
    fn serialize(&self, rank: usize, n: usize, out: &mut Vec<u8>) {
        let elems = match self.kind {
            Kind::AllReduce | Kind::Reduce | Kind::AllGather | Kind::Send => self.count,
            Kind::ReduceScatter => self.count * n,
            Kind::Broadcast if rank == self.other => self.count,
            Kind::Broadcast | Kind::Receive => 0,
        };
        let bytes = self.from.read(self.bytes(elems));
        self.header(bytes.len())
            .iter()
            .for_each(|word| out.extend(word.to_le_bytes()));
        out.extend(bytes);
    }
}

/// Serializes all parts of an operation.
pub(crate) fn serialize(parts: &[Part], rank: usize, n: usize) -> Vec<u8> {
    let mut out = Vec::new();
    parts
        .iter()
        .for_each(|part| part.serialize(rank, n, &mut out));
    out
}

fn parse(mut bytes: &[u8]) -> Option<Vec<Received<'_>>> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let mut header = [0; HEADER];
        for word in &mut header {
            let (first, rest) = bytes.split_first_chunk::<8>()?;
            (*word, bytes) = (u64::from_le_bytes(*first), rest);
        }
        let (data, rest) = bytes.split_at_checked(header[4] as usize)?;
        all.push(Received {
            header,
            bytes: data,
        });
        bytes = rest;
    }
    Some(all)
}

/// Runs the parts of rank `rank` on the parts of all ranks. `None` if the ranks' calls differ; then
/// nothing is written.
pub(crate) fn finish(parts: &[Part], rank: usize, all: &[&[u8]]) -> Option<()> {
    let all: Vec<Vec<Received<'_>>> = all
        .iter()
        .map(|bytes| parse(bytes))
        .collect::<Option<_>>()?;
    let to_peers = |kind: u64| kind == Kind::Send as u64 || kind == Kind::Receive as u64;

    // Collectives are the same on all ranks, in the same order.
    let shared = |received: &[Received<'_>]| -> Vec<[u64; 4]> {
        let collectives = received.iter().filter(|part| !to_peers(part.header[0]));
        collectives
            .map(|part| {
                [
                    part.header[0],
                    part.header[1],
                    part.header[2],
                    part.header[3],
                ]
            })
            .collect()
    };

    let own = shared(&all[rank]);
    if all.iter().any(|received| shared(received) != own) {
        return None;
    }
    // The parts for this rank, by sender, in reverse order.
    let mut inboxes: Vec<Vec<&Received<'_>>> = Vec::new();

    for received in &all {
        let to_here = |part: &&Received<'_>| {
            part.header[0] == Kind::Send as u64 && part.header[3] == rank as u64
        };
        inboxes.push(received.iter().filter(to_here).rev().collect());
    }

    let mut writes: Vec<(At, usize, Vec<u8>)> = Vec::new();
    let mut index = 0;
    for part in parts {
        let of = |index: usize| -> Vec<&[u8]> {
            all.iter()
                .filter_map(|g| g.iter().filter(|p| !to_peers(p.header[0])).nth(index))
                .map(|p| p.bytes)
                .collect()
        };
        match part.kind {
            Kind::Send => continue,
            Kind::Receive => {
                let received = inboxes.get_mut(part.other)?.pop()?;
                if (received.header[1], received.header[2])
                    != (part.count as u64, (part.dtype as u64) << 8)
                {
                    return None;
                }
                writes.push((part.to, 0, received.bytes.to_vec()));
                continue;
            }
            Kind::AllReduce => writes.push((part.to, 0, reduce(part, &of(index))?)),
            Kind::Reduce if rank == part.other => {
                writes.push((part.to, 0, reduce(part, &of(index))?))
            }
            Kind::Reduce => {}
            Kind::ReduceScatter => {
                let own = part.bytes(part.count);
                let segments: Vec<&[u8]> = of(index)
                    .into_iter()
                    .map(|b| &b[rank * own..(rank + 1) * own])
                    .collect();
                writes.push((part.to, 0, reduce(part, &segments)?));
            }
            Kind::AllGather => {
                let len = part.bytes(part.count);
                writes.extend(
                    of(index)
                        .into_iter()
                        .enumerate()
                        .map(|(q, bytes)| (part.to, q * len, bytes.to_vec())),
                );
            }
            Kind::Broadcast => writes.push((part.to, 0, of(index).get(part.other)?.to_vec())),
        }
        index += 1;
    }

    writes
        .iter()
        .for_each(|(to, offset, bytes)| to.write(*offset, bytes));
    Some(())
}

/// An element type, whose sums are rounded at each rank.
trait Number: Copy + PartialOrd {
    fn of(bytes: &[u8]) -> Self;
    fn put(self, out: &mut Vec<u8>);
    fn add(self, other: Self) -> Self;
    fn divided(self, n: usize) -> Self;
}

macro_rules! numbers {
    ($($t:ty: $add:expr, $div:expr;)*) => {$(
        impl Number for $t {
            fn of(bytes: &[u8]) -> Self {
                bytes.try_into().map_or(Self::default(), Self::from_le_bytes)
            }
            fn put(self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }
            fn add(self, other: Self) -> Self {
                $add(self, other)
            }
            fn divided(self, n: usize) -> Self {
                $div(self, n)
            }
        }
    )*};
}
numbers! {
    u8: u8::wrapping_add, |a: u8, n: usize| a / n as u8;
    f16: |a: f16, b: f16| f16::from_f32(a.to_f32() + b.to_f32()), |a: f16, n: usize| f16::from_f32(a.to_f32() / n as f32);
    bf16: |a: bf16, b: bf16| bf16::from_f32(a.to_f32() + b.to_f32()), |a: bf16, n: usize| bf16::from_f32(a.to_f32() / n as f32);
    f32: |a, b| a + b, |a: f32, n: usize| a / n as f32;
    f64: |a, b| a + b, |a: f64, n: usize| a / n as f64;
}

/// The reduction of all ranks' buffers.
fn reduce(part: &Part, all: &[&[u8]]) -> Option<Vec<u8>> {
    match part.dtype {
        1 => reduce_as::<u8>(part.op, all, 1),
        6 => reduce_as::<f16>(part.op, all, 2),
        7 => reduce_as::<f32>(part.op, all, 4),
        8 => reduce_as::<f64>(part.op, all, 8),
        9 => reduce_as::<bf16>(part.op, all, 2),
        _ => None,
    }
}

fn reduce_as<T: Number>(op: i32, all: &[&[u8]], width: usize) -> Option<Vec<u8>> {
    let n = all.len();
    let len = all.first()?.len();
    let mut out = Vec::with_capacity(len);
    for at in (0..len).step_by(width) {
        // As in a ring, each part of the buffer starts at another rank.
        let start = at * n / len + 1;
        let mut values = (0..n).map(|i| T::of(&all[(start + i) % n][at..at + width]));
        let first = values.next()?;
        let result = match op {
            0 => values.fold(first, T::add),
            2 => values.fold(first, |a, b| if b > a { b } else { a }),
            4 => values.fold(first, T::add).divided(n),
            _ => return None,
        };
        result.put(&mut out);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(parts: impl Fn(usize) -> Vec<Part>, n: usize) -> Option<()> {
        let all: Vec<Vec<u8>> = (0..n)
            .map(|rank| serialize(&parts(rank), rank, n))
            .collect();
        let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
        (0..n).try_for_each(|rank| finish(&parts(rank), rank, &all))
    }

    fn part(kind: Kind, from: &[f32], to: &mut [f32], count: usize, other: usize) -> Part {
        let from = At(from.as_ptr().cast_mut().cast());
        let to = At(to.as_mut_ptr().cast());
        Part {
            kind,
            from,
            to,
            count,
            dtype: 7,
            op: 0,
            other,
            registered: 0,
        }
    }

    /// Rank r's element i is 10 r + i.
    fn sent(n: usize, len: usize) -> Vec<Vec<f32>> {
        (0..n)
            .map(|r| (0..len).map(|i| (10 * r + i) as f32).collect())
            .collect()
    }

    #[test]
    fn collectives_of_two_ranks() {
        let from = sent(2, 4);
        for (kind, count, expected) in [
            (
                Kind::AllReduce,
                4,
                [[10., 12., 14., 16.], [10., 12., 14., 16.]],
            ),
            (
                Kind::ReduceScatter,
                2,
                [[10., 12., 0., 0.], [14., 16., 0., 0.]],
            ),
            (Kind::AllGather, 2, [[0., 1., 10., 11.], [0., 1., 10., 11.]]),
            (
                Kind::Broadcast,
                4,
                [[10., 11., 12., 13.], [10., 11., 12., 13.]],
            ),
            (Kind::Reduce, 4, [[0.; 4], [10., 12., 14., 16.]]),
        ] {
            let to = std::cell::RefCell::new(vec![vec![0f32; 4]; 2]);
            let other = usize::from(matches!(kind, Kind::Broadcast | Kind::Reduce));
            run(
                |r| vec![part(kind, &from[r], &mut to.borrow_mut()[r], count, other)],
                2,
            )
            .unwrap();
            assert_eq!(to.into_inner(), expected, "{kind:?}");
        }
    }

    #[test]
    fn differing_calls_write_nothing() {
        let from = sent(2, 1);
        let to = std::cell::RefCell::new(vec![vec![0f32; 1]; 2]);
        let pair = |r: usize, count| {
            let mut to = to.borrow_mut();
            vec![
                part(Kind::Send, &from[r], &mut to[r], 1, 1 - r),
                part(Kind::Receive, &from[r], &mut to[r], count, 1 - r),
            ]
        };

        assert!(run(|r| pair(r, 0), 2).is_none());
        run(|r| pair(r, 1), 2).unwrap();
        assert_eq!(*to.borrow(), [[10.], [0.]]);
        let mixed = |r: usize| {
            let mut part = part(Kind::AllReduce, &from[r], &mut to.borrow_mut()[r], 1, 0);
            part.note_registered(|_, _| r == 1, 2);
            vec![part]
        };

        assert!(run(mixed, 2).is_none());
        let differs = |r: usize| {
            vec![part(
                Kind::AllReduce,
                &from[r],
                &mut to.borrow_mut()[r],
                r,
                0,
            )]
        };

        assert!(run(differs, 2).is_none());
    }
}
