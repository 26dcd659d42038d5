//! A communicator over a simulated slow link, for tests and demonstrations of overlap on one
//! machine.

use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::DeviceId;
use zero_alloc::host::{HostDevice, HostStream};

use crate::backend::{Checked, Wrapped};
use crate::{Communicator, Traffic};

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
pub fn behind(inner: Arc<dyn Communicator<HostDevice>>, link: Link) -> Wrapped<HostDevice> {
    let enqueue = move |comm: &Wrapped<HostDevice>, stream: &HostStream, checked: Checked| {
        checked.check(comm.group(), DeviceId::HOST)?;
        let mut traffic = Traffic::default();
        comm.group().count(checked.call(), &mut traffic);
        let time = link.time(traffic.total_bytes());
        stream.enqueue("link", move || {
            std::thread::sleep(time);
            Ok(())
        })?;
        comm.inner().enqueue(stream, checked)
    };
    // SAFETY: the call is the inner communicator's, on the same stream.
    unsafe { Wrapped::new(inner, enqueue) }
}
