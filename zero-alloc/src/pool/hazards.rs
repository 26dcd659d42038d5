//! Hazards: the operations that must have run before another stream may touch free bytes.
//!
//! A hazard has the home stream of the freed block (everything enqueued there up to the time of
//! reuse counts) and the recorded uses on other streams. The home stream needs no wait for its own
//! operations; any other stream waits for events. If the home stream may be destroyed before the
//! bytes are allocated again ([`Stream::may_end`]), its event is recorded when the hazard is made.
//! Allocating bytes enqueues these waits and removes
//! the hazards, because every later user is ordered after the allocation.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use crate::device::{Device, DeviceError, Event, Stream};

/// How often the end of a pool tries to record the end of a stream.
pub(super) const RECORD_ATTEMPTS: usize = 3;

struct Hazard<D: Device> {
    end: u64,
    home: D::Stream,
    /// Events by stream id. If there is an event of the home stream, only operations up to it count
    /// there.
    uses: Vec<(u64, D::Event)>,
}

impl<D: Device> Clone for Hazard<D> {
    fn clone(&self) -> Self {
        Self {
            end: self.end,
            home: self.home.clone(),
            uses: self.uses.clone(),
        }
    }
}

impl<D: Device> Hazard<D> {
    fn has_home_event(&self) -> bool {
        self.uses.iter().any(|(id, _)| *id == self.home.id())
    }

    /// All events for which a stream must wait before it may use the bytes.
    fn events(&self) -> Result<Vec<D::Event>, DeviceError> {
        let mut events: Vec<_> = self.uses.iter().map(|(_, event)| event.clone()).collect();
        if !self.has_home_event() {
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
    /// Adds the hazard of the freed bytes of `range`.
    pub(super) fn insert(
        &mut self,
        range: Range<u64>,
        home: &D::Stream,
        mut uses: Vec<(u64, D::Event)>,
    ) {
        if home.may_end() {
            record_end(home, &mut uses);
        }
        let below = self.0.range(..range.end).next_back();
        debug_assert!(
            below.is_none_or(|(_, other)| other.end <= range.start),
            "{range:?} has a hazard already"
        );
        self.0.insert(
            range.start,
            Hazard {
                end: range.end,
                home: home.clone(),
                uses,
            },
        );
    }

    /// Makes `stream` wait for the hazards of `range`, then removes them. If a wait fails, all are
    /// kept.
    pub(super) fn wait_and_remove(
        &mut self,
        range: Range<u64>,
        stream: &D::Stream,
    ) -> Result<(), DeviceError> {
        self.wait(range.clone(), stream)?;
        self.remove(range);
        Ok(())
    }

    /// The hazards that overlap `range`, with their first offsets.
    fn overlapping(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, &Hazard<D>)> {
        let from = range.start;
        let below = self
            .0
            .range(..range.end)
            .rev()
            .map(|(start, hazard)| (*start, hazard));
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
            if hazard.home.id() != stream.id() && !hazard.has_home_event() {
                wait_unless_done(stream, &hazard.home.record()?)?;
            }
        }
        Ok(())
    }

    /// Removes the hazards of `range`.
    pub(super) fn remove(&mut self, range: Range<u64>) {
        // The remainders that are inserted no longer overlap.
        while let Some(start) = self.highest(&range)
            && let Some(hazard) = self.0.remove(&start)
        {
            if hazard.end > range.end {
                self.0.insert(range.end, hazard.clone());
            }
            if start < range.start {
                self.0.insert(
                    start,
                    Hazard {
                        end: range.start,
                        ..hazard
                    },
                );
            }
        }
    }

    /// The events for which any stream must wait before it uses the bytes of `range`, by stream id,
    /// and whether these are all: a closed stream records none.
    pub(super) fn events_within(&self, range: Range<u64>) -> (Vec<(u64, D::Event)>, bool) {
        let mut events = Vec::new();
        let mut recorded = Vec::new();
        let mut complete = true;
        for hazard in self.0.range(range).map(|(_, hazard)| hazard) {
            events.extend(hazard.uses.iter().cloned());
            if hazard.has_home_event() || recorded.contains(&hazard.home.id()) {
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

    /// Returns the end of the highest part of `range` with pending uses (the start of `range` if no
    /// use is pending), and one of the events that are pending there; no event if recording it
    /// failed.
    pub(super) fn find_pending(&mut self, range: Range<u64>) -> (u64, Option<D::Event>) {
        let starts: Vec<u64> = self.overlapping(&range).map(|(start, _)| start).collect();
        for start in starts {
            let Some(hazard) = self.0.get_mut(&start) else {
                continue;
            };
            let end = hazard.end.min(range.end);
            if !hazard.has_home_event() {
                // Recorded once, so that a later call does not wait for later operations.
                let Ok(event) = hazard.home.record() else {
                    return (end, None);
                };
                hazard.uses.push((hazard.home.id(), event));
            }
            // A failed event counts as reached.
            if let Some((_, event)) = hazard
                .uses
                .iter()
                .find(|(_, event)| !event.is_done().unwrap_or(true))
            {
                return (end, Some(event.clone()));
            }
        }

        (range.start, None)
    }

    /// Whether everything that used any of the bytes has run.
    pub(super) fn all_done(&self) -> bool {
        self.0.values().all(|hazard| {
            // A failed event counts as reached: everything before it has run or never will.
            hazard
                .events()
                .is_ok_and(|events| events.iter().all(|event| event.is_done().unwrap_or(true)))
        })
    }

    /// Waits until everything that used any of the bytes has run. Returns false if a stream
    /// repeatedly fails to record its end.
    pub(super) fn wait_all(&self) -> bool {
        self.0.values().all(|hazard| {
            let Some(events) = (0..RECORD_ATTEMPTS).find_map(|_| hazard.events().ok()) else {
                return false;
            };
            for event in events {
                // Waits also if the stream has failed: earlier operations may still use the memory.
                while !event.is_done().unwrap_or(true) {
                    let _ = event.synchronize(Duration::from_secs(3600));
                }
            }
            true
        })
    }
}

/// Adds the event of a stream's end to `uses`, unless they have one. If recording it fails, later
/// users of the memory record it again.
pub(super) fn record_end<S: Stream>(stream: &S, uses: &mut Vec<(u64, S::Event)>) {
    if uses.iter().all(|(id, _)| *id != stream.id()) {
        uses.extend(stream.record().ok().map(|end| (stream.id(), end)));
    }
}

pub(super) fn wait_unless_done<D: Stream>(stream: &D, event: &D::Event) -> Result<(), DeviceError> {
    match event.is_done() {
        // A failed event counts as reached, and its failure is not this stream's.
        Ok(true) | Err(_) => Ok(()),
        Ok(false) => stream.wait(event),
    }
}
