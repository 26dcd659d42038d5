//! Who touched which bytes when, and whether it was ordered.
//!
//! For every byte: the block that it belongs to, the last write and the last reads since. Two accesses, one of
//! them a write, must be ordered by streams, events, gates or the host; an access must not come
//! after the block's end.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::clock::Clock;

/// What was done wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ViolationKind {
    /// Two accesses, one of them a write, with no order between them: a wait is missing.
    Race,
    /// An access that was not ordered before the block's end.
    UseAfterFree,
    /// A block was freed while a stream that used it was neither waited for nor noted by `record_use`.
    UnnotedUse,
}

/// A mistake in the use of streams, found by the seeded scheduler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which.
    pub kind: ViolationKind,
    /// The block, or the addresses where no pool is known to own them.
    pub block: String,
    /// Stream and operation of the earlier access (or use).
    pub first: (Arc<str>, &'static str),
    /// Stream and operation of the later access (or the end of the block).
    pub second: (Arc<str>, &'static str),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { block, first: (stream_a, op_a), second: (stream_b, op_b), .. } = self;
        match self.kind {
            ViolationKind::Race => write!(
                f,
                "missing wait: {op_b} on stream {stream_b} is not ordered behind {op_a} on stream {stream_a}; both use {block}"
            ),
            ViolationKind::UseAfterFree => {
                write!(
                    f,
                    "use after free: {op_b} on stream {stream_b} uses {block}, which was freed on stream {stream_a}"
                )
            }
            ViolationKind::UnnotedUse => write!(
                f,
                "{block} was freed while {op_a} on stream {stream_a} used it: that stream is neither noted by record_use nor waited for"
            ),
        }
    }
}

/// One operation's access.
#[derive(Clone)]
pub(super) struct Touch {
    pub(super) seat: usize,
    /// When it ran, by the stream's own count.
    pub(super) epoch: u64,
    /// Its number in the stream's queue.
    pub(super) sequence: u64,
    pub(super) stream: Arc<str>,
    pub(super) label: &'static str,
    /// It has passed a gate before, so that other streams' operations may stand in for it.
    pub(super) crossed: bool,
}

#[derive(Clone)]
struct Ended {
    /// Per stream, the last number in its queue that may still use the block.
    allowed: Arc<Clock>,
    home: Arc<str>,
}

#[derive(Clone, Default)]
struct Cell {
    end: usize,
    block: Option<Arc<str>>,
    ended: Option<Ended>,
    write: Option<Touch>,
    reads: Vec<Touch>,
}

/// The shadow of all memory seen.
#[derive(Default)]
pub(super) struct Checker {
    cells: BTreeMap<usize, Cell>,
    blocks: u64,
}

impl Checker {
    /// A block begins.
    pub(super) fn begin(&mut self, range: Range<usize>, purpose: impl fmt::Debug, stream: &str) {
        self.blocks += 1;
        let bytes = range.len();
        let name: Arc<str> = format!("block {} ({purpose:?}, {bytes} bytes, of stream {stream})", self.blocks).into();
        self.each(range, |cell| {
            cell.block = Some(Arc::clone(&name));
            cell.ended = None;
        });
    }

    /// A block ends. `allowed`: what may still use it; `host`: what the host has waited for.
    pub(super) fn end(
        &mut self,
        range: Range<usize>,
        allowed: Clock,
        home: &Arc<str>,
        host: &Clock,
    ) -> Option<Violation> {
        let ended = Ended { allowed: Arc::new(allowed), home: Arc::clone(home) };
        let mut violation = None;
        self.each(range.clone(), |cell| {
            let unnoted = cell.write.iter().chain(&cell.reads).find(|touch| {
                !touch.crossed && touch.sequence > ended.allowed.get(touch.seat) && touch.epoch > host.get(touch.seat)
            });
            if let Some(touch) = unnoted {
                violation.get_or_insert_with(|| Violation {
                    kind: ViolationKind::UnnotedUse,
                    block: name_of(cell, &range),
                    first: (Arc::clone(&touch.stream), touch.label),
                    second: (Arc::clone(home), "free"),
                });
            }
            cell.ended = Some(ended.clone());
        });
        violation
    }

    /// An operation that knows what `clock` says touches bytes.
    pub(super) fn access(
        &mut self,
        range: Range<usize>,
        write: bool,
        me: &Touch,
        clock: &Clock,
    ) -> Option<Violation> {
        let mut violation = None;
        self.each(range.clone(), |cell| {
            let second = (Arc::clone(&me.stream), me.label);
            if let Some(ended) = &cell.ended
                && !me.crossed
                && me.sequence > ended.allowed.get(me.seat)
            {
                violation.get_or_insert_with(|| Violation {
                    kind: ViolationKind::UseAfterFree,
                    block: name_of(cell, &range),
                    first: (Arc::clone(&ended.home), "free"),
                    second: second.clone(),
                });
            }
            let conflicting = cell.write.iter().chain(cell.reads.iter().filter(|_| write));
            if let Some(other) = conflicting.into_iter().find(|t| t.epoch > clock.get(t.seat)) {
                violation.get_or_insert_with(|| Violation {
                    kind: ViolationKind::Race,
                    block: name_of(cell, &range),
                    first: (Arc::clone(&other.stream), other.label),
                    second,
                });
            }
            if write {
                cell.write = Some(me.clone());
                cell.reads.clear();
            } else {
                cell.reads.retain(|t| t.seat != me.seat);
                cell.reads.push(me.clone());
            }
        });
        violation
    }

    /// Calls `change` for cells that together are exactly `range`.
    fn each(&mut self, range: Range<usize>, mut change: impl FnMut(&mut Cell)) {
        if range.is_empty() {
            return;
        }
        self.split(range.start);
        self.split(range.end);
        let mut at = range.start;
        while at < range.end {
            let next = self.cells.range(at..range.end).next().map(|(start, cell)| (*start, cell.end));
            let (start, end) = next.unwrap_or((range.end, range.end));
            if at < start {
                // Never seen before.
                let cell = self.cells.entry(at).or_insert(Cell { end: start, ..Cell::default() });
                change(cell);
            }
            if start < range.end
                && let Some(cell) = self.cells.get_mut(&start)
            {
                change(cell);
            }
            at = end;
        }
    }

    /// Makes `at` a boundary between cells.
    fn split(&mut self, at: usize) {
        if let Some((&start, cell)) = self.cells.range_mut(..at).next_back()
            && start < at
            && cell.end > at
        {
            let upper = cell.clone();
            cell.end = at;
            self.cells.insert(at, upper);
        }
    }
}

fn name_of(cell: &Cell, range: &Range<usize>) -> String {
    match &cell.block {
        Some(name) => name.to_string(),
        None => format!("{} bytes at {:#x}", range.len(), range.start),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(seat: usize, epoch: u64) -> Touch {
        let stream = Arc::from(format!("s{seat}"));
        Touch { seat, epoch, sequence: epoch, stream, label: "op", crossed: false }
    }

    fn clock(times: &[(usize, u64)]) -> Clock {
        let mut clock = Clock::default();
        for (seat, time) in times {
            clock.set(*seat, *time);
        }
        clock
    }

    #[test]
    fn unordered_accesses_race_only_if_one_writes() {
        let mut checker = Checker::default();
        assert_eq!(checker.access(0..100, false, &touch(0, 1), &clock(&[(0, 1)])), None);
        assert_eq!(checker.access(50..150, false, &touch(1, 1), &clock(&[(1, 1)])), None);
        let violation = checker.access(90..95, true, &touch(1, 2), &clock(&[(1, 2)])).expect("a race");
        assert_eq!(violation.kind, ViolationKind::Race);
        assert_eq!(&*violation.first.0, "s0");
        // Where only its own stream has read, a write is fine; as it is behind the other's read.
        assert_eq!(checker.access(100..150, true, &touch(1, 3), &clock(&[(1, 3)])), None);
        assert_eq!(checker.access(0..50, true, &touch(1, 4), &clock(&[(0, 1), (1, 4)])), None);
    }

    #[test]
    fn a_block_may_be_used_up_to_its_noted_end() {
        let mut checker = Checker::default();
        checker.begin(0..64, "Buckets", "s0");
        assert_eq!(checker.end(0..64, clock(&[(0, 2), (1, 1)]), &"s0".into(), &Clock::default()), None);
        assert_eq!(checker.access(0..64, false, &touch(0, 2), &clock(&[(0, 2)])), None);
        let late = checker.access(8..9, false, &touch(1, 2), &clock(&[(1, 2)])).expect("too late");
        assert_eq!(late.kind, ViolationKind::UseAfterFree);
        assert!(late.block.contains("Buckets"), "{late}");
        checker.begin(0..64, "Buckets", "s1");
        assert_eq!(checker.access(0..64, false, &touch(1, 3), &clock(&[(1, 3)])), None);
    }

    #[test]
    fn a_use_that_nobody_noted_is_seen_at_the_end() {
        let mut checker = Checker::default();
        checker.begin(0..64, "Grads", "s0");
        assert_eq!(checker.access(0..64, true, &touch(1, 5), &clock(&[(1, 5)])), None);
        let waited = clock(&[(1, 5)]);
        assert_eq!(checker.end(0..64, Clock::default(), &"s0".into(), &waited), None);
        let violation = checker.end(0..64, Clock::default(), &"s0".into(), &Clock::default()).expect("unnoted");
        assert_eq!(violation.kind, ViolationKind::UnnotedUse);
        assert!(violation.to_string().contains("stream s1"), "{violation}");
    }
}
