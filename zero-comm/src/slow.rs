//! A communicator over a simulated slow link, for tests and demonstrations of overlap on one
//! machine.

use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::DeviceId;
use zero_alloc::host::{HostDevice, HostStream};

use crate::call::{Checked, Group};
use crate::{CommError, Communicator, Traffic};

/// A link between ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Delay before the first byte of each collective.
    pub latency: Duration,
    /// Bytes that a rank sends per second.
    pub bytes_per_second: f64,
}

impl Link {
    /// Time to send `bytes`.
    pub fn time(self, bytes: u64) -> Duration {
        self.latency
            + Duration::try_from_secs_f64(bytes as f64 / self.bytes_per_second)
                .unwrap_or(Duration::MAX)
    }
}

/// Another communicator behind a simulated [`Link`]. Before each collective, an operation labelled
/// `link` sleeps for the time that the link needs for the bytes that the rank sends.
pub struct SlowComm {
    inner: Arc<dyn Communicator<HostDevice>>,
    link: Link,
}

impl std::fmt::Debug for SlowComm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "SlowComm(rank {} of {}, {:?})",
            self.inner.rank(),
            self.inner.world_size(),
            self.link
        )
    }
}

impl SlowComm {
    /// Puts `inner` behind `link`.
    pub fn new(inner: Arc<dyn Communicator<HostDevice>>, link: Link) -> Self {
        Self { inner, link }
    }
}

// SAFETY: calls are those of the inner communicator.
unsafe impl Communicator<HostDevice> for SlowComm {
    fn group(&self) -> Group {
        self.inner.group()
    }

    fn enqueue(&self, stream: &HostStream, checked: Checked) -> Result<(), CommError> {
        checked.check(self.group(), DeviceId::HOST)?;
        let mut traffic = Traffic::default();
        self.group().count(checked.call(), &mut traffic);
        let time = self.link.time(traffic.total_bytes());
        stream.enqueue("link", move || {
            std::thread::sleep(time);
            Ok(())
        })?;
        self.inner.enqueue(stream, checked)
    }

    fn split(
        &self,
        color: Option<u64>,
        key: u64,
    ) -> Result<Option<Arc<dyn Communicator<HostDevice>>>, CommError> {
        let child = self.inner.split(color, key)?;
        Ok(child.map(|inner| {
            Arc::new(Self {
                inner,
                link: self.link,
            }) as Arc<dyn Communicator<HostDevice>>
        }))
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn failure(&self) -> Option<CommError> {
        self.inner.failure()
    }
}
