//! A world of one rank, on any device: each collective is a copy, or does nothing.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use zero_alloc::device::Device;

use crate::call::{Checked, Group};
use crate::{CommError, Communicator, Traffic};

/// The communicator of one rank.
pub struct Solo<D> {
    device: D,
    failure: Mutex<Option<CommError>>,
}

impl<D> fmt::Debug for Solo<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Solo")
    }
}

impl<D: Device> Solo<D> {
    /// Creates the communicator of the only rank, on `device`.
    pub fn new(device: D) -> Self {
        Self {
            device,
            failure: Mutex::new(None),
        }
    }
}

// SAFETY: a call is a copy on the stream.
unsafe impl<D: Device> Communicator<D> for Solo<D> {
    fn group(&self) -> Group {
        Group {
            rank: 0,
            world_size: 1,
        }
    }

    fn enqueue(&self, stream: &D::Stream, checked: Checked) -> Result<(), CommError> {
        checked.check(self.group(), self.device.id())?;
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        // Nothing to copy in place or without elements.
        if checked.send().as_ptr() != checked.recv().as_ptr() && !checked.send().is_empty() {
            self.device.copy(stream, checked.send(), checked.recv())?;
        }
        Ok(())
    }

    fn split(
        &self,
        color: Option<u64>,
        _key: u64,
    ) -> Result<Option<Arc<dyn Communicator<D>>>, CommError> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        Ok(color.map(|_| Arc::new(Self::new(self.device.clone())) as Arc<dyn Communicator<D>>))
    }

    /// Zero: one rank sends nothing.
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    fn abort(&self, reason: &str) {
        self.failure.lock().get_or_insert(CommError::Aborted {
            rank: 0,
            reason: reason.to_owned(),
        });
    }

    fn failure(&self) -> Option<CommError> {
        self.failure.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use zero_alloc::host::HostDevice;

    use super::*;

    #[test]
    fn after_an_abort_nothing_is_enqueued() {
        let device = HostDevice::new();
        let solo = Solo::new(HostDevice::new());
        let stream = device.create_stream("comm").unwrap();
        solo.barrier(&stream).unwrap();
        solo.abort("on purpose");
        let aborted = CommError::Aborted {
            rank: 0,
            reason: "on purpose".to_owned(),
        };
        assert_eq!(solo.barrier(&stream), Err(aborted.clone()));
        assert_eq!(solo.failure(), Some(aborted.clone()));
        assert_eq!(solo.split(Some(0), 0).err(), Some(aborted));
    }
}
