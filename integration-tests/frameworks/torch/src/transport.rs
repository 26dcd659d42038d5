//! Bytes between ranks on several machines, moved by torch.distributed.

use pyo3::prelude::*;
use zero_comm::processes::{Carrier, Part};
use zero_comm::world::{Ranks, Token};

use crate::failed;

/// `zero_torch.transport.Transport`.
pub(crate) struct Transport(Py<PyAny>);

impl Transport {
    /// The transport, and the ranks that it connects.
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<(Self, Ranks)> {
        let rank = object.getattr("rank")?.extract()?;
        let world_size = object.getattr("world_size")?.extract()?;
        let host: String = object.getattr("host")?.extract()?;
        let port = object.getattr("port")?.extract()?;
        let token: String = object.getattr("token")?.extract()?;
        let ranks = Ranks::new(rank, world_size, rank, host, port)
            .token(Some(Token::new(&token).map_err(failed)?));
        Ok((Self(object.clone().unbind()), ranks))
    }
}

impl Carrier for Transport {
    fn exchange(&self, parts: Vec<Part<'_>>) -> Result<(), String> {
        let places = parts.into_iter().map(|Part { rank, send, recv }| {
            let send = (send.as_ptr() as usize, send.len());
            (rank, send, (recv.as_mut_ptr() as usize, recv.len()))
        });
        let places: Vec<_> = places.collect();
        let exchanged = Python::try_attach(|py| {
            let exchanged = self.0.call_method1(py, "exchange", (places,));
            exchanged.map(drop).map_err(|error| error.to_string())
        });
        exchanged.unwrap_or_else(|| Err("the interpreter has ended".to_owned()))
    }

    fn abort(&self) {
        // An error is that of a group that has ended.
        Python::try_attach(|py| drop(self.0.call_method0(py, "abort")));
    }
}
