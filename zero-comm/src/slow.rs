//! A communicator as slow as a given link: for tests and demonstrations of overlap on one machine.

use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::AnySlice;
use zero_alloc::host::{HostDevice, HostStream};

use crate::call::{Call, Checked, Group};
use crate::{CommError, Communicator, ReduceOp, Traffic};

/// A link between ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Before the first byte of each collective.
    pub latency: Duration,
    /// Of what a rank sends.
    pub bytes_per_second: f64,
}

impl Link {
    /// How long `bytes` take.
    pub fn time(self, bytes: u64) -> Duration {
        self.latency + Duration::try_from_secs_f64(bytes as f64 / self.bytes_per_second).unwrap_or(Duration::MAX)
    }
}

/// Another communicator behind a [`Link`]: before each collective its stream sleeps for as long as the link
/// would take for the bytes that the rank sends, in an operation labelled `link`.
pub struct SlowComm {
    inner: Arc<dyn Communicator<HostDevice>>,
    link: Link,
}

impl std::fmt::Debug for SlowComm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SlowComm(rank {} of {}, {:?})", self.inner.rank(), self.inner.world_size(), self.link)
    }
}

impl SlowComm {
    /// `inner` behind `link`.
    pub fn new(inner: Arc<dyn Communicator<HostDevice>>, link: Link) -> Self {
        Self { inner, link }
    }

    fn group(&self) -> Group {
        Group { rank: self.inner.rank(), world_size: self.inner.world_size() }
    }

    fn send(&self, stream: &HostStream, call: &Call) -> Result<(), CommError> {
        let mut traffic = Traffic::default();
        self.group().count(call, &mut traffic);
        let time = self.link.time(traffic.total_bytes());
        stream.enqueue("link", move || {
            std::thread::sleep(time);
            Ok(())
        })?;
        Ok(())
    }

    /// Sleeps for a call that `checked` let pass.
    fn pass(&self, stream: &HostStream, checked: Result<Checked, CommError>) -> Result<(), CommError> {
        self.send(stream, &checked?.call)
    }
}

impl Communicator<HostDevice> for SlowComm {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn reduce_scatter(
        &self,
        stream: &HostStream,
        send: AnySlice,
        recv: AnySlice,
        op: ReduceOp,
    ) -> Result<(), CommError> {
        self.pass(stream, self.group().reduce_scatter(send, recv, op))?;
        self.inner.reduce_scatter(stream, send, recv, op)
    }

    fn reduce_scatter_uneven(
        &self,
        stream: &HostStream,
        send: AnySlice,
        recv: AnySlice,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<(), CommError> {
        self.pass(stream, self.group().reduce_scatter_uneven(send, recv, counts, op))?;
        self.inner.reduce_scatter_uneven(stream, send, recv, counts, op)
    }

    fn all_gather(&self, stream: &HostStream, send: AnySlice, recv: AnySlice) -> Result<(), CommError> {
        self.pass(stream, self.group().all_gather(send, recv))?;
        self.inner.all_gather(stream, send, recv)
    }

    fn all_gather_uneven(
        &self,
        stream: &HostStream,
        send: AnySlice,
        recv: AnySlice,
        counts: &[usize],
    ) -> Result<(), CommError> {
        self.pass(stream, self.group().all_gather_uneven(send, recv, counts))?;
        self.inner.all_gather_uneven(stream, send, recv, counts)
    }

    fn control_all_gather(&self, stream: &HostStream, send: AnySlice, recv: AnySlice) -> Result<(), CommError> {
        self.pass(stream, self.group().control_all_gather(send, recv))?;
        self.inner.control_all_gather(stream, send, recv)
    }

    fn all_reduce(&self, stream: &HostStream, send: AnySlice, recv: AnySlice, op: ReduceOp) -> Result<(), CommError> {
        self.pass(stream, self.group().all_reduce(send, recv, op))?;
        self.inner.all_reduce(stream, send, recv, op)
    }

    fn broadcast(&self, stream: &HostStream, buffer: AnySlice, root: usize) -> Result<(), CommError> {
        self.pass(stream, self.group().broadcast(buffer, root))?;
        self.inner.broadcast(stream, buffer, root)
    }

    fn all_to_all(&self, stream: &HostStream, send: AnySlice, recv: AnySlice) -> Result<(), CommError> {
        self.pass(stream, self.group().all_to_all(send, recv))?;
        self.inner.all_to_all(stream, send, recv)
    }

    fn barrier(&self, stream: &HostStream) -> Result<(), CommError> {
        self.pass(stream, Ok(self.group().barrier()))?;
        self.inner.barrier(stream)
    }

    fn split(&self, color: Option<u64>, key: u64) -> Result<Option<Arc<dyn Communicator<HostDevice>>>, CommError> {
        let child = self.inner.split(color, key)?;
        Ok(child.map(|inner| Arc::new(Self { inner, link: self.link }) as Arc<dyn Communicator<HostDevice>>))
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
