//! Times of device operations, converted to the time of a timeline.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;

use super::driver::{Context, Point, Queue};
use super::poll::Deadline;
use crate::device::DeviceError;
use crate::timeline::{Enqueued, OpSpan, Pending, Timeline};

/// Elapsed times are milliseconds in fp32, exact to 60 ns within a second. Beyond it the anchor is
/// renewed.
const EXACT_MS: f32 = 1_000.0;
/// The uncertainty wanted for the anchor, and the number of tries, since the host may be
/// interrupted.
const ANCHOR_UNCERTAINTY: Duration = Duration::from_micros(50);
const ANCHOR_TRIES: usize = 32;
/// The limit for an event on an empty stream.
const ANCHOR_LIMIT: Duration = Duration::from_secs(30);

/// A device event whose time on the host is known.
struct Anchor {
    point: Arc<Point>,
    at: Duration,
}

/// Relates the events of one device to a timeline.
pub(super) struct Clock {
    timeline: Timeline,
    anchor: Mutex<Anchor>,
}

impl Clock {
    /// Relates the clocks of device and timeline; waits for an event on an empty stream.
    pub(super) fn new(context: &Arc<Context>, timeline: Timeline) -> Result<Self, DeviceError> {
        let queue = Queue::new(context)?;
        let mut best: Option<(Duration, Anchor)> = None;
        for _ in 0..ANCHOR_TRIES {
            let before = timeline.now();
            let point = queue.record(true)?;
            Deadline::after(ANCHOR_LIMIT)
                .wait(|| "the clock of a timeline".into(), || point.query())?;
            // The point was reached between the two readings of the host's clock.
            let uncertainty = timeline.now() - before;
            if best.as_ref().is_none_or(|(least, _)| uncertainty < *least) {
                best = Some((
                    uncertainty,
                    Anchor {
                        point: Arc::new(point),
                        at: before + uncertainty / 2,
                    },
                ));
            }
            if uncertainty < ANCHOR_UNCERTAINTY {
                break;
            }
        }

        let none = || DeviceError::Driver {
            call: "cuEventRecord",
            message: "no event for the timeline's clock".into(),
        };

        let (_, anchor) = best.ok_or_else(none)?;
        Ok(Self {
            timeline,
            anchor: Mutex::new(anchor),
        })
    }

    /// An operation that is enqueued now.
    pub(super) fn enqueued(&self, label: &'static str) -> Enqueued {
        Enqueued::new(label, Some(&self.timeline))
    }

    /// Adds the operation between two points to the timeline, once it has run.
    pub(super) fn expect(
        self: &Arc<Self>,
        enqueued: Enqueued,
        stream: &Arc<str>,
        start: Point,
        end: Point,
    ) {
        let clock = Arc::clone(self);
        let stream = Arc::clone(stream);
        let start = Arc::new(start);
        let end = Arc::new(end);
        self.timeline.expect(Box::new(Measured {
            clock,
            enqueued,
            stream,
            start,
            end,
        }));
    }

    /// The time of a reached point.
    fn time_of(&self, point: &Arc<Point>) -> Result<Duration, DeviceError> {
        let mut anchor = self.anchor.lock();
        let ms = point.since_ms(&anchor.point)?;
        let at = if ms >= 0.0 {
            anchor.at + Duration::from_secs_f64(f64::from(ms) / 1e3)
        } else {
            anchor
                .at
                .saturating_sub(Duration::from_secs_f64(f64::from(-ms) / 1e3))
        };
        if ms > EXACT_MS {
            *anchor = Anchor {
                point: Arc::clone(point),
                at,
            };
        }
        Ok(at)
    }
}

/// An operation between two points.
struct Measured {
    clock: Arc<Clock>,
    enqueued: Enqueued,
    stream: Arc<str>,
    start: Arc<Point>,
    end: Arc<Point>,
}

impl Pending for Measured {
    fn poll(&self) -> Poll<Option<OpSpan>> {
        match self.end.query() {
            Ok(false) => return Poll::Pending,
            Ok(true) => {}
            Err(_) => return Poll::Ready(None),
        }
        let (Ok(start), Ok(end)) = (
            self.clock.time_of(&self.start),
            self.clock.time_of(&self.end),
        ) else {
            return Poll::Ready(None);
        };
        Poll::Ready(Some(self.enqueued.span(
            &self.stream,
            start,
            end.max(start),
        )))
    }
}
