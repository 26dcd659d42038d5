//! The matrices of a rank, and the exchange of their updates with other ranks.

use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::{AnySlice, Device, Stream};
use zero_alloc::host::{HostDevice, HostEvent, HostStream};
use zero_optim::{AllToAll, CommExchange, Matrices, MatrixParam, OptimError};
use zero_shard::{ParamId, TensorPart};

use crate::error::TrainError;
use crate::rank::Rank;

impl<D: Device> Rank<D> {
    /// The matrices of this rank's part of the state, if there are any, and their exchange.
    pub(crate) fn matrices(
        &self,
        by_unit: bool,
    ) -> Result<Option<(Matrices, CommExchange<D>)>, TrainError> {
        let Some(comm) = &self.mesh.matrices else {
            return Ok(None);
        };
        let replicated = !self.settings.stage.shards_optimizer();
        let (layout, shard) = match replicated {
            true => (self.layouts.parts(), self.index()),
            false => self.layouts.optimizer(self.index()),
        };
        let of = |id: ParamId| {
            let group = self.groups.group_with_matrices(id)?;
            let param = &layout.units()[id.unit].params[id.param];
            let cut = self.tensor.as_ref();
            let cut = cut.and_then(|tensor| tensor.param(&param.name)).cloned();
            let shape = cut.as_ref().map_or(&param.shape, |(whole, _)| &whole.shape);
            Some(MatrixParam {
                group,
                matrices: (self.settings.muon.matrices_of)(&param.name, shape),
                cut,
            })
        };
        let part = match &self.tensor {
            Some(tensor) => tensor.part(self.tensor_rank())?,
            None => TensorPart::whole(),
        };
        let matrices = Matrices::new(layout, (shard, part), replicated, by_unit, of)?;
        let stream = match self.settings.overlap {
            true => {
                let name = format!("rank {} matrices", self.comm.rank());
                self.pool.device().create_urgent_stream(&name)?
            }
            false => self.compute.clone(),
        };
        let exchange = CommExchange::new(Arc::clone(comm), stream);
        Ok(Some((matrices, exchange)))
    }
}

/// The exchange of an optimizer of the host, on a device that is the host.
pub(crate) struct HostExchange<D: Device> {
    pub(crate) of_device: CommExchange<D>,
    pub(crate) device: D,
    /// Behind the exchanges.
    pub(crate) done: HostStream,
    pub(crate) limit: Duration,
}

impl<D: Device> AllToAll<HostDevice> for HostExchange<D> {
    fn all_to_all(
        &self,
        stream: &HostStream,
        send: (AnySlice, &[usize]),
        recv: (AnySlice, &[usize]),
    ) -> Result<HostEvent, OptimError> {
        let Self { of_device, .. } = self;
        let ready = stream.record()?;
        self.device
            .wait_for_host(of_device.stream(), &ready, self.limit)?;
        let exchanged = of_device.enqueue(send, recv)?;
        self.device.host_waits(&self.done, &exchanged, self.limit)?;
        Ok(self.done.record()?)
    }
}
