//! Muon for matrices: which tensors have it, and the exchange of their updates between ranks.

use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::{AnySlice, Device, Stream};
use zero_alloc::host::{HostDevice, HostEvent, HostStream};
use zero_comm::{CommError, Communicator};
use zero_kernels::Muon;
use zero_optim::{AllToAll, CommExchange, GroupRule, Matrices, Matrix, MatrixParam, OptimError};
use zero_shard::{GridLayout, ParamId, ParamPlacement, Sharding};

use crate::error::TrainError;
use crate::param_groups::ModelGroups;
use crate::rank::Rank;
use crate::settings::Settings;

/// Returns the matrices in a tensor, by its name and shape: those of blocks' linear layers. None in
/// embeddings, the head, norms and biases.
pub type MatricesOf = fn(&str, &[u64]) -> Vec<Matrix>;

/// Muon in a run.
#[derive(Clone, Copy, Debug)]
pub struct MuonSettings {
    /// Whether tensors with matrices have it, unless their group has another rule. If not, those of
    /// groups with it have.
    pub by_default: bool,
    /// The rule.
    pub rule: Muon,
    /// Its learning rate, in place of the optimizer's, with the same schedule.
    pub lr: Option<f64>,
    /// The matrices of the model's tensors.
    pub matrices_of: MatricesOf,
}

impl MuonSettings {
    /// Muon in groups that name it.
    pub fn new(matrices_of: MatricesOf) -> Self {
        Self {
            by_default: false,
            rule: Muon::default(),
            lr: None,
            matrices_of,
        }
    }

    /// Whether a tensor has Muon; `group` is the rule that its group names.
    ///
    /// # Errors
    /// Its group names Muon, and it has no matrices.
    pub(crate) fn updates(
        &self,
        param: &ParamPlacement,
        group: Option<GroupRule>,
    ) -> Result<bool, TrainError> {
        let has_matrices = !(self.matrices_of)(&param.name, &param.shape).is_empty();
        match group {
            None => Ok(self.by_default && has_matrices),
            Some(GroupRule::Muon) if has_matrices => Ok(true),
            Some(GroupRule::Muon) => Err(TrainError::Usage(format!(
                "param_groups: Muon is for matrices of linear layers in blocks, and {} of shape {:?} is none: give its \
                 group \"optimizer\": \"adamw\", or narrow the group",
                param.name, param.shape
            ))),
            Some(_) => Ok(false),
        }
    }

    /// The factor of the learning rate, whose base is `lr`.
    pub(crate) fn lr_scale(&self, lr: f64) -> f64 {
        match self.lr {
            Some(own) if lr > 0.0 => own / lr,
            _ => 1.0,
        }
    }
}

/// Refuses what Muon cannot do in these settings.
pub(crate) fn check(
    settings: &Settings,
    groups: &ModelGroups,
    is_host: bool,
) -> Result<(), TrainError> {
    let why = match () {
        () if !groups.has_matrices() => return Ok(()),
        () if !is_host => "has no products on CUDA yet: use --device cpu, or AdamW",
        () if settings.mesh.tensor_ranks.is_some_and(|ranks| ranks > 1) => {
            "sees whole matrices, and tensor parallelism cuts them: use one of the two"
        }
        () if settings.adapters.is_some() => {
            "is for the matrices of whole models, and adapters are trained: use AdamW with --lora"
        }
        () if settings.graphs => {
            "exchanges matrices in memory that is allocated and freed during the step, which CUDA graphs cannot record"
        }
        () => return Ok(()),
    };
    Err(TrainError::Usage(format!("Muon {why}")))
}

impl<D: Device> Rank<D> {
    /// The matrices of this rank's part of the state, if there are any.
    pub(crate) fn matrices(&self, by_unit: bool) -> Result<Option<Matrices>, TrainError> {
        if !self.groups.has_matrices() {
            return Ok(None);
        }
        let replicated = !self.settings.stage.shards_optimizer();
        let (layout, shard) = match replicated {
            true => (self.layouts.parts(), self.index()),
            false => self.layouts.optimizer(self.index()),
        };
        let of = |id: ParamId| {
            let group = self.groups.group_with_matrices(id)?;
            let param = &layout.units()[id.unit].params[id.param];
            let matrices = (self.settings.muon.matrices_of)(&param.name, &param.shape);
            Some(MatrixParam { group, matrices })
        };
        Ok(Some(Matrices::new(layout, shard, replicated, by_unit, of)?))
    }

    /// The exchange of this rank's matrices.
    pub(crate) fn exchange(&self) -> Result<Option<CommExchange<D>>, TrainError> {
        let Some(comm) = &self.mesh.matrices else {
            return Ok(None);
        };
        let stream = match self.settings.overlap {
            true => {
                let name = format!("rank {} matrices", self.comm.rank());
                self.pool.device().create_urgent_stream(&name)?
            }
            false => self.compute.clone(),
        };
        Ok(Some(CommExchange::new(Arc::clone(comm), stream)))
    }
}

/// Splits the data ranks by the groups among which the optimizer's state is sharded, in the order
/// of shards. All ranks call it.
pub(crate) fn split_by_shards<D: Device>(
    data: &dyn Communicator<D>,
    layouts: &GridLayout,
    settings: &Settings,
) -> Result<Arc<dyn Communicator<D>>, CommError> {
    let is_sharded = settings.stage.shards_optimizer();
    let in_groups = is_sharded && layouts.sharding() == Sharding::Replicated;
    data.split_by(&|rank| {
        let rank = rank as u64;
        let shard = match is_sharded {
            true => layouts.optimizer(rank).1,
            false => rank,
        };
        let group = match in_groups {
            true => layouts.grid().group_of(rank),
            false => 0,
        };
        (group as usize, shard as usize)
    })
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
