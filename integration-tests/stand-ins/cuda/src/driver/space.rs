//! The registry of live memory: the addresses that a device may access. It is copied on write, so
//! that an operation uses one version and keeps all memory of that version mapped while it runs.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use crate::error::{Failure, Outcome};

/// The memory behind a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Device memory of an allocation.
    Device,
    /// Device memory that is mapped at reserved addresses.
    Mapped,
    /// Page-locked memory of the host.
    Pinned,
}

/// One live range of addresses.
#[derive(Clone)]
pub(crate) struct Range {
    pub(crate) bytes: u64,
    pub(crate) kind: Kind,
    pub(crate) device: u32,
    /// Keeps the addresses mapped.
    keep: Arc<dyn Any + Send + Sync>,
}

impl Range {
    /// Whether its memory is kept by a `T`.
    pub(crate) fn is_kept_by<T: 'static>(&self) -> bool {
        self.keep.is::<T>()
    }
}

/// One version of the registry.
#[derive(Clone, Default)]
pub(crate) struct Space {
    ranges: BTreeMap<u64, Range>,
    spans: OnceLock<Vec<(u64, u64)>>,
}

impl Space {
    /// The range that contains `address`, with its start.
    pub(crate) fn find(&self, address: u64) -> Option<(u64, &Range)> {
        let (&start, range) = self.ranges.range(..=address).next_back()?;
        (address - start < range.bytes).then_some((start, range))
    }

    /// Live addresses as `[start, end)`, ascending. Adjacent ranges are one span.
    pub(crate) fn spans(&self) -> &[(u64, u64)] {
        self.spans.get_or_init(|| {
            let mut spans: Vec<(u64, u64)> = Vec::new();
            for (&start, range) in &self.ranges {
                match spans.last_mut() {
                    Some(last) if last.1 == start => last.1 += range.bytes,
                    _ => spans.push((start, start + range.bytes)),
                }
            }
            spans
        })
    }

    /// The span that contains `address .. address + bytes`.
    pub(crate) fn span(&self, address: u64, bytes: u64) -> Option<(u64, u64)> {
        let spans = self.spans();
        let after = spans.partition_point(|&(start, _)| start <= address);
        let span = *spans.get(after.checked_sub(1)?)?;
        (address.checked_add(bytes)? <= span.1 && address < span.1).then_some(span)
    }

    /// Whether all of these bytes are live; true for 0 bytes.
    pub(crate) fn holds(&self, address: u64, bytes: u64) -> bool {
        bytes == 0 || self.span(address, bytes).is_some()
    }
}

static SPACE: RwLock<Option<Arc<Space>>> = RwLock::new(None);

/// The current version.
pub(crate) fn now() -> Arc<Space> {
    SPACE
        .read()
        .unwrap_or_else(PoisonError::into_inner)
        .clone()
        .unwrap_or_default()
}

fn change<T>(change: impl FnOnce(&mut BTreeMap<u64, Range>) -> Outcome<T>) -> Outcome<T> {
    let mut space = SPACE.write().unwrap_or_else(PoisonError::into_inner);
    let space = Arc::make_mut(space.get_or_insert_default());
    space.spans = OnceLock::new();
    change(&mut space.ranges)
}

/// Adds a range. `keep` is dropped when no version with the range is in use.
pub(crate) fn insert(
    start: u64,
    bytes: u64,
    kind: Kind,
    device: u32,
    keep: Arc<dyn Any + Send + Sync>,
) -> Outcome {
    change(|ranges| {
        let before = ranges.range(..start + bytes).next_back();
        if before.is_some_and(|(&at, range)| at + range.bytes > start) {
            return Err(Failure::HostMemoryAlreadyRegistered);
        }
        ranges.insert(
            start,
            Range {
                bytes,
                kind,
                device,
                keep,
            },
        );
        Ok(())
    })
}

/// Removes the range that starts at `start` and has this kind.
pub(crate) fn remove(start: u64, kind: Kind) -> Outcome<Range> {
    change(|ranges| match ranges.get(&start) {
        Some(range) if range.kind == kind => ranges.remove(&start).ok_or(Failure::InvalidValue),
        _ => Err(Failure::InvalidValue),
    })
}

/// Removes all allocations of a device. Returns the bytes of device memory among them.
pub(crate) fn forget(device: u32) -> u64 {
    let removed = change(|ranges| {
        let mut bytes = 0;
        ranges.retain(|_, range| {
            let stays = range.device != device || range.kind == Kind::Mapped;
            bytes += if stays || range.kind != Kind::Device {
                0
            } else {
                range.bytes
            };
            stays
        });
        Ok(bytes)
    });
    removed.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(ranges: &[(u64, u64)]) -> Space {
        let range = |&(start, bytes): &(u64, u64)| {
            (
                start,
                Range {
                    bytes,
                    kind: Kind::Device,
                    device: 0,
                    keep: Arc::new(()),
                },
            )
        };
        Space {
            ranges: ranges.iter().map(range).collect(),
            spans: OnceLock::new(),
        }
    }

    #[test]
    fn ranges_that_touch_are_one_span_and_gaps_are_not() {
        let space = space(&[(100, 10), (110, 10), (130, 10)]);
        assert_eq!(space.spans(), [(100, 120), (130, 140)]);
        assert!(space.holds(105, 15) && space.holds(130, 10) && space.holds(0, 0));
        for (at, bytes) in [
            (99, 1),
            (119, 2),
            (120, 1),
            (125, 10),
            (139, 2),
            (140, 1),
            (u64::MAX, 2),
        ] {
            assert!(!space.holds(at, bytes), "{at} {bytes}");
        }
        assert_eq!(space.find(111).map(|(start, _)| start), Some(110));
        assert!(space.find(120).is_none());
    }
}
