//! Finds races and uses after free.
//!
//! It keeps the block, the last write, and the reads since of every byte. Two accesses, one of them
//! a write, must be ordered by streams, events, monitors or the host; an access must be ordered
//! before the block is freed.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::clock::Clock;

/// The kind of a [`Violation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ViolationKind {
    /// Two accesses, one of them a write, are not ordered: a wait is missing.
    Race,
    /// An access was not ordered before the block was freed.
    UseAfterFree,
    /// A block was freed without `record_use` or a wait for a stream that used it.
    UnnotedUse,
}

/// An error in the use of streams, found by the seeded scheduler.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Violation {
    /// The kind.
    pub kind: ViolationKind,
    /// The block, or the addresses if no pool owns them.
    pub block: String,
    /// Stream and operation of the earlier access (or use).
    pub first: (Arc<str>, &'static str),
    /// Stream and operation of the later access (or of the free).
    pub second: (Arc<str>, &'static str),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            block,
            first: (stream_a, op_a),
            second: (stream_b, op_b),
            ..
        } = self;

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
                "{block} was freed while {op_a} on stream {stream_a} used it: call record_use, or wait for that stream first"
            ),
        }
    }
}

/// One operation's access.
#[derive(Clone)]
pub(super) struct Access {
    /// The stream's index.
    pub(super) stream: usize,
    /// The stream's time.
    pub(super) epoch: u64,
    /// The operation's number in the stream's queue.
    pub(super) sequence: u64,
    pub(super) name: Arc<str>,
    pub(super) label: &'static str,
    /// The operation has changed or passed a monitor, so that its order may follow from other
    /// streams' operations.
    pub(super) synchronized: bool,
}

#[derive(Clone)]
struct Freed {
    /// For each stream, the last operation in its queue that may use the block.
    allowed: Arc<Clock>,
    home: Arc<str>,
}

#[derive(Clone, Default)]
struct Cell {
    end: usize,
    block: Option<Arc<str>>,
    freed: Option<Freed>,
    write: Option<Access>,
    reads: Vec<Access>,
}

/// The accesses to memory, by address range.
#[derive(Default)]
pub(super) struct Checker {
    cells: BTreeMap<usize, Cell>,
    blocks: u64,
}

impl Checker {
    /// Records that a block was allocated.
    pub(super) fn allocate(&mut self, range: Range<usize>, purpose: impl fmt::Debug, stream: &str) {
        self.blocks += 1;
        let bytes = range.len();
        let name: Arc<str> = format!(
            "block {} ({purpose:?}, {bytes} bytes, of stream {stream})",
            self.blocks
        )
        .into();
        self.each(range, |cell| {
            cell.block = Some(Arc::clone(&name));
            cell.freed = None;
        });
    }

    /// Records that a block was freed. `allowed`: operations that may still use it; `host`: those
    /// the host waited for.
    pub(super) fn free(
        &mut self,
        range: Range<usize>,
        allowed: Clock,
        home: &Arc<str>,
        host: &Clock,
    ) -> Option<Violation> {
        let freed = Freed {
            allowed: Arc::new(allowed),
            home: Arc::clone(home),
        };

        let mut violation = None;
        self.each(range.clone(), |cell| {
            let unrecorded = cell.write.iter().chain(&cell.reads).find(|used| {
                !used.synchronized
                    && used.sequence > freed.allowed.get(used.stream)
                    && used.epoch > host.get(used.stream)
            });
            if let Some(used) = unrecorded {
                violation.get_or_insert_with(|| Violation {
                    kind: ViolationKind::UnnotedUse,
                    block: name_of(cell, &range),
                    first: (Arc::clone(&used.name), used.label),
                    second: (Arc::clone(home), "free"),
                });
            }
            cell.freed = Some(freed.clone());
        });

        violation
    }

    /// Records an access of an operation that is ordered after `clock`.
    pub(super) fn access(
        &mut self,
        range: Range<usize>,
        write: bool,
        me: &Access,
        clock: &Clock,
    ) -> Option<Violation> {
        let mut violation = None;
        self.each(range.clone(), |cell| {
            let second = (Arc::clone(&me.name), me.label);
            if let Some(freed) = &cell.freed
                && !me.synchronized
                && me.sequence > freed.allowed.get(me.stream)
            {
                violation.get_or_insert_with(|| Violation {
                    kind: ViolationKind::UseAfterFree,
                    block: name_of(cell, &range),
                    first: (Arc::clone(&freed.home), "free"),
                    second: second.clone(),
                });
            }
            let conflicting = cell.write.iter().chain(cell.reads.iter().filter(|_| write));
            if let Some(other) = conflicting
                .into_iter()
                .find(|a| a.epoch > clock.get(a.stream))
            {
                violation.get_or_insert_with(|| Violation {
                    kind: ViolationKind::Race,
                    block: name_of(cell, &range),
                    first: (Arc::clone(&other.name), other.label),
                    second,
                });
            }
            if write {
                cell.write = Some(me.clone());
                cell.reads.clear();
            } else {
                cell.reads.retain(|read| read.stream != me.stream);
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
            let next = self
                .cells
                .range(at..range.end)
                .next()
                .map(|(start, cell)| (*start, cell.end));
            let (start, end) = next.unwrap_or((range.end, range.end));
            if at < start {
                // No access yet.
                let cell = self.cells.entry(at).or_insert(Cell {
                    end: start,
                    ..Cell::default()
                });
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

    fn access(stream: usize, epoch: u64) -> Access {
        let name = Arc::from(format!("s{stream}"));
        Access {
            stream,
            epoch,
            sequence: epoch,
            name,
            label: "op",
            synchronized: false,
        }
    }

    fn clock(times: &[(usize, u64)]) -> Clock {
        let mut clock = Clock::default();
        for (stream, time) in times {
            clock.set(*stream, *time);
        }
        clock
    }

    #[test]
    fn unordered_accesses_race_if_one_writes() {
        let mut checker = Checker::default();
        assert_eq!(
            checker.access(0..100, false, &access(0, 1), &clock(&[(0, 1)])),
            None
        );
        assert_eq!(
            checker.access(50..150, false, &access(1, 1), &clock(&[(1, 1)])),
            None
        );
        let violation = checker
            .access(90..95, true, &access(1, 2), &clock(&[(1, 2)]))
            .expect("a race");
        assert_eq!(violation.kind, ViolationKind::Race);
        assert_eq!(&*violation.first.0, "s0");
        // A write is allowed if only its own stream has read, or after the other stream's read.
        assert_eq!(
            checker.access(100..150, true, &access(1, 3), &clock(&[(1, 3)])),
            None
        );
        assert_eq!(
            checker.access(0..50, true, &access(1, 4), &clock(&[(0, 1), (1, 4)])),
            None
        );
    }

    #[test]
    fn recorded_uses_may_follow_a_free() {
        let mut checker = Checker::default();
        checker.allocate(0..64, "Buckets", "s0");
        assert_eq!(
            checker.free(
                0..64,
                clock(&[(0, 2), (1, 1)]),
                &"s0".into(),
                &Clock::default()
            ),
            None
        );

        assert_eq!(
            checker.access(0..64, false, &access(0, 2), &clock(&[(0, 2)])),
            None
        );
        let late = checker
            .access(8..9, false, &access(1, 2), &clock(&[(1, 2)]))
            .expect("too late");
        assert_eq!(late.kind, ViolationKind::UseAfterFree);
        assert!(late.block.contains("Buckets"), "{late}");
        checker.allocate(0..64, "Buckets", "s1");
        assert_eq!(
            checker.access(0..64, false, &access(1, 3), &clock(&[(1, 3)])),
            None
        );
    }

    #[test]
    fn unrecorded_use_is_found_at_the_free() {
        let mut checker = Checker::default();
        checker.allocate(0..64, "Grads", "s0");
        assert_eq!(
            checker.access(0..64, true, &access(1, 5), &clock(&[(1, 5)])),
            None
        );
        let waited = clock(&[(1, 5)]);
        assert_eq!(
            checker.free(0..64, Clock::default(), &"s0".into(), &waited),
            None
        );
        let violation = checker
            .free(0..64, Clock::default(), &"s0".into(), &Clock::default())
            .expect("unrecorded");
        assert_eq!(violation.kind, ViolationKind::UnnotedUse);
        assert!(violation.to_string().contains("stream s1"), "{violation}");
    }
}
