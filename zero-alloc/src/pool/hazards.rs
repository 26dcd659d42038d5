//! What must have run before another stream may touch free bytes.
//!
//! A hazard names the home stream of the block that was freed (all that was enqueued there up to
//! the time of reuse counts) and the uses noted on other streams. On the home stream itself, order is given; any
//! other stream waits for events. Whoever takes bytes takes over their hazards: the waits it enqueued order
//! everything behind it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::device::{Device, DeviceError, Event, Stream};

struct Hazard<D: Device> {
    end: u64,
    home: D::Stream,
    /// By stream id. Where the home stream is among them, its event stands for all of it.
    uses: Arc<[(u64, D::Event)]>,
}

impl<D: Device> Clone for Hazard<D> {
    fn clone(&self) -> Self {
        Self { end: self.end, home: self.home.clone(), uses: Arc::clone(&self.uses) }
    }
}

impl<D: Device> Hazard<D> {
    fn names_home(&self) -> bool {
        self.uses.iter().any(|(id, _)| *id == self.home.id())
    }

    /// All events behind which the bytes are free for anyone.
    fn events(&self) -> Result<Vec<D::Event>, DeviceError> {
        let mut events: Vec<_> = self.uses.iter().map(|(_, event)| event.clone()).collect();
        if !self.names_home() {
            events.push(self.home.record()?);
        }
        Ok(events)
    }
}

/// Hazards by first offset; they do not overlap.
pub(super) struct Hazards<D: Device>(BTreeMap<u64, Hazard<D>>);

impl<D: Device> Default for Hazards<D> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<D: Device> Hazards<D> {
    /// Notes what the freed bytes of `range` wait for.
    pub(super) fn put(&mut self, range: Range<u64>, home: &D::Stream, uses: Vec<(u64, D::Event)>) {
        let below = self.0.range(..range.end).next_back();
        debug_assert!(below.is_none_or(|(_, other)| other.end <= range.start), "{range:?} has a hazard already");
        self.0.insert(range.start, Hazard { end: range.end, home: home.clone(), uses: uses.into() });
    }

    /// Makes `stream` wait for the hazards of `range`, then forgets them there. Where a wait fails, all are kept.
    pub(super) fn take(&mut self, range: Range<u64>, stream: &D::Stream) -> Result<(), DeviceError> {
        self.wait(range.clone(), stream)?;
        self.forget(range);
        Ok(())
    }

    /// The hazards that overlap `range`, with their first offsets.
    fn overlapping(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, &Hazard<D>)> {
        let from = range.start;
        let below = self.0.range(..range.end).rev().map(|(start, hazard)| (*start, hazard));
        below.take_while(move |(_, hazard)| hazard.end > from)
    }

    /// The first offset of the highest hazard that overlaps `range`.
    fn highest(&self, range: &Range<u64>) -> Option<u64> {
        self.overlapping(range).next().map(|(start, _)| start)
    }

    /// Makes `stream` wait for the hazards of `range`, which stay.
    pub(super) fn wait(&self, range: Range<u64>, stream: &D::Stream) -> Result<(), DeviceError> {
        for (_, hazard) in self.overlapping(&range) {
            for (_, event) in hazard.uses.iter().filter(|(id, _)| *id != stream.id()) {
                wait_unless_done(stream, event)?;
            }
            if hazard.home.id() != stream.id() && !hazard.names_home() {
                wait_unless_done(stream, &hazard.home.record()?)?;
            }
        }
        Ok(())
    }

    /// Forgets the hazards of `range`.
    pub(super) fn forget(&mut self, range: Range<u64>) {
        // What is put back no longer overlaps.
        while let Some(start) = self.highest(&range)
            && let Some(hazard) = self.0.remove(&start)
        {
            if hazard.end > range.end {
                self.0.insert(range.end, hazard.clone());
            }
            if start < range.start {
                self.0.insert(start, Hazard { end: range.start, ..hazard });
            }
        }
    }

    /// All events behind which the bytes of `range` are free for anyone, and whether these are all: a stream that is
    /// gone gives none.
    pub(super) fn events_within(&self, range: Range<u64>) -> (Vec<(u64, D::Event)>, bool) {
        let (mut events, mut recorded, mut complete) = (Vec::new(), Vec::new(), true);
        for hazard in self.0.range(range).map(|(_, hazard)| hazard) {
            events.extend(hazard.uses.iter().cloned());
            if hazard.names_home() || recorded.contains(&hazard.home.id()) {
                continue;
            }
            recorded.push(hazard.home.id());
            match hazard.home.record() {
                Ok(event) => events.push((hazard.home.id(), event)),
                Err(_) => complete = false,
            }
        }
        (events, complete)
    }

    /// Up to where bytes of `range` are in use (its start where none is), and an event behind which fewer are; none
    /// where a stream that is gone gives none.
    pub(super) fn settle(&mut self, range: Range<u64>) -> (u64, Option<D::Event>) {
        let starts: Vec<u64> = self.overlapping(&range).map(|(start, _)| start).collect();
        for start in starts {
            let Some(hazard) = self.0.get_mut(&start) else { continue };
            let end = hazard.end.min(range.end);
            if !hazard.names_home() {
                // Noted, so that asking again does not wait for what came later.
                let Ok(event) = hazard.home.record() else { return (end, None) };
                hazard.uses = hazard.uses.iter().cloned().chain([(hazard.home.id(), event)]).collect();
            }
            // A failed event is reached too.
            if let Some((_, event)) = hazard.uses.iter().find(|(_, event)| !event.is_done().unwrap_or(true)) {
                return (end, Some(event.clone()));
            }
        }
        (range.start, None)
    }

    /// Whether everything that used any of the bytes has run, without waiting.
    pub(super) fn all_done(&self) -> bool {
        self.0.values().all(|hazard| {
            // A failed event is reached too: what was before it has run or never will.
            hazard.events().is_ok_and(|events| events.iter().all(|event| event.is_done().unwrap_or(true)))
        })
    }

    /// Waits until everything that used any of the bytes has run.
    pub(super) fn wait_all(&self) {
        for event in self.0.values().filter_map(|hazard| hazard.events().ok()).flatten() {
            while let Err(DeviceError::TimedOut { .. }) = event.synchronize(Duration::from_secs(3600)) {}
        }
    }
}

pub(super) fn wait_unless_done<D: Stream>(stream: &D, event: &D::Event) -> Result<(), DeviceError> {
    match event.is_done() {
        // A failed event is reached too, and its failure is not this stream's.
        Ok(true) | Err(_) => Ok(()),
        Ok(false) => stream.wait(event),
    }
}
