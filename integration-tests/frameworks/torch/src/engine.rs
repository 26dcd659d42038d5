//! One rank of a run.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use zero_alloc::Pool;
use zero_alloc::device::{AnySlice, DType, DeviceId};
use zero_alloc::host::HostDevice;
use zero_comm::{Communicator, PrefetchOptions};
use zero_kernels::host::HostKernels;
use zero_optim::framework::{Builder, FrameworkError, HeldUnit, Rank, Step, Zero};
use zero_optim::{GroupRules, OptimizerConfig};
use zero_shard::ZeroStage;

use crate::storages::{Owner, Storages};
use crate::world::World;
use crate::{Host, failed};

fn dtype_of(name: &str) -> PyResult<DType> {
    match name {
        "fp32" => Ok(DType::F32),
        "bf16" => Ok(DType::Bf16),
        "fp16" => Ok(DType::F16),
        _ => Err(PyValueError::new_err(format!("no dtype {name}"))),
    }
}

/// A run, and the units that it holds.
struct Run {
    // Dropped before the run: they are of its step.
    held: HashMap<String, HeldUnit<Host>>,
    zero: Zero<Host>,
}

impl Run {
    fn step(&mut self) -> PyResult<Step<'_, Host>> {
        self.zero
            .open_step()
            .ok_or_else(|| failed("no step is open"))
    }

    /// Calls `call` with the open step, which stays open.
    fn in_step<R>(
        &mut self,
        call: impl FnOnce(&mut Step<'_, Host>) -> Result<R, FrameworkError>,
    ) -> PyResult<R> {
        let mut step = self.step()?;
        let result = call(&mut step);
        step.pause();
        result.map_err(failed)
    }
}

/// One rank of a run.
#[pyclass(frozen)]
pub(crate) struct Engine(Mutex<Option<Run>>);

/// A parameter: full name, unit, shape, position of its group.
type Param = (String, String, Vec<u64>, usize);

/// A group: factor of the learning rate, weight decay, whether it is trained.
type Group = (f64, Option<f64>, bool);

impl Engine {
    /// Calls `call` without Python's lock.
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Run) -> PyResult<R> + Send,
    ) -> PyResult<R> {
        py.detach(|| {
            let mut run = self.0.lock();
            call(run.as_mut().ok_or_else(|| failed("the engine is closed"))?)
        })
    }
}

/// The settings of a run but its parameters.
fn builder(
    comm: Arc<dyn Communicator<Host>>,
    stage: u8,
    dtypes: (DType, Option<DType>),
    optimizer: &str,
    micro_batches: usize,
    limit: Duration,
) -> PyResult<Builder<Host>> {
    let config: OptimizerConfig = serde_json::from_str(optimizer).map_err(failed)?;
    let stage = ZeroStage::from_number(stage.into())
        .ok_or_else(|| PyValueError::new_err(format!("stage {stage}: expected 0 to 3")))?;
    let pool = Pool::new(HostDevice::new(), usize::MAX);
    let kernels = Arc::new(HostKernels::new(1).map_err(failed)?);
    let rank = Rank::new(comm, pool, kernels).map_err(failed)?;
    let builder = Zero::builder(rank.limit(limit))
        .stage(stage)
        .dtype(dtypes.0)
        .adamw(config)
        .micro_batches(micro_batches)
        .prefetch(PrefetchOptions::default())
        .add_gradients();
    Ok(match dtypes.1 {
        Some(dtype) => builder.reduce_dtype(dtype),
        None => builder,
    })
}

#[pymethods]
impl Engine {
    /// `init(name, address, elements)` writes the initial values of a parameter in fp32, on rank 0.
    /// `take(unit, bytes)` returns the address of memory for a gathered unit, `give(unit)` takes it
    /// back; both only at stage 3.
    #[new]
    #[allow(clippy::too_many_arguments, reason = "called by name in Python")]
    fn new(
        py: Python<'_>,
        world: &World,
        stage: u8,
        dtype: &str,
        reduce_dtype: Option<&str>,
        optimizer: &str,
        micro_batches: usize,
        params: Vec<Param>,
        groups: Vec<Group>,
        init: Py<PyAny>,
        take: Py<PyAny>,
        give: Py<PyAny>,
        limit_seconds: f64,
    ) -> PyResult<Self> {
        let dtypes = (dtype_of(dtype)?, reduce_dtype.map(dtype_of).transpose()?);
        let limit = Duration::try_from_secs_f64(limit_seconds).map_err(failed)?;
        let comm = Arc::clone(&world.comm);
        let zero = py.detach(|| {
            let rules = groups.iter().map(|(lr_scale, decay, is_trained)| {
                let rules = GroupRules::default().lr_scale(*lr_scale);
                rules.trainable(*is_trained).weight_decay(*decay)
            });
            let rules: Vec<GroupRules> = rules.collect();
            let group_of = params
                .iter()
                .map(|(name, _, _, group)| (name.clone(), *group));
            let group_of: HashMap<String, usize> = group_of.collect();
            let unit_of = params.iter().map(|(name, unit, ..)| (&**name, &**unit));
            let unit_of: HashMap<&str, &str> = unit_of.collect();

            let builder = builder(comm, stage, dtypes, optimizer, micro_batches, limit)?;
            let units = params
                .iter()
                .map(|(name, unit, shape, _)| (name, unit, shape));
            let shapes = units.map(|(name, _, shape)| (name.clone(), shape.clone()));
            let builder = builder
                .params(shapes, |name| unit_of[name].to_owned())
                .groups(rules, move |name| group_of[name]);
            let mut raised = None;
            let zero = builder
                .gather_memory(Storages::new(take, give))
                .build_from_rank_0(|name, _shape, values| {
                    let at = values.as_mut_ptr() as usize;
                    let written = Python::attach(|py| init.call1(py, (name, at, values.len())));
                    raised = raised.take().or(written.err());
                });
            match raised {
                Some(raised) => Err(raised),
                None => zero.map_err(failed),
            }
        })?;
        let held = HashMap::new();
        Ok(Self(Mutex::new(Some(Run { held, zero }))))
    }

    /// The units: name, elements with padding, and the parameters in it with their first elements.
    fn units(&self, py: Python<'_>) -> PyResult<Vec<(String, u64, Vec<(String, u64)>)>> {
        self.with(py, |run| {
            let units = run.zero.layout().units().iter().map(|unit| {
                let params = unit.params.iter();
                let params = params.map(|param| (param.name.clone(), param.range().start));
                (unit.name.clone(), unit.padded_elems, params.collect())
            });
            Ok(units.collect())
        })
    }

    /// The address and the elements of a parameter, at stages 0 to 2.
    fn param(&self, py: Python<'_>, name: &str) -> PyResult<(usize, usize)> {
        self.with(py, |run| {
            let view = run.zero.param(name).map_err(failed)?;
            // SAFETY: torch reads it within steps only; the Python engine keeps this one, and so the
            // memory, as long as its module.
            let slice = unsafe { view.slice() };
            Ok((slice.as_ptr() as usize, slice.len()))
        })
    }

    fn begin(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |run| {
            run.zero.begin().map_err(failed)?.pause();
            Ok(())
        })
    }

    /// Gathers a unit into memory that `take` returned.
    fn unshard(&self, py: Python<'_>, unit: &str) -> PyResult<()> {
        self.with(py, |run| {
            let held = run.in_step(|step| step.unshard(unit))?;
            run.held.insert(unit.to_owned(), held);
            Ok(())
        })
    }

    fn reshard(&self, py: Python<'_>, unit: &str) -> PyResult<()> {
        self.with(py, |run| {
            let held = run.held.remove(unit);
            let held = held.ok_or_else(|| failed(format!("{unit} is not whole")))?;
            run.in_step(|step| step.reshard(held))
        })
    }

    /// Takes a gradient of `owner`, which Python does not change.
    fn grad(
        &self,
        py: Python<'_>,
        name: &str,
        place: (usize, usize, String),
        owner: Py<PyAny>,
    ) -> PyResult<()> {
        let (at, elems, dtype) = place;
        let dtype = dtype_of(&dtype)?;
        self.with(py, |run| {
            let at = at as *mut u8;
            // SAFETY: the tensor's memory, of these elements.
            let slice = unsafe { AnySlice::from_raw_parts(at, elems, dtype, DeviceId::HOST) };
            // SAFETY: torch has written it, and `owner` keeps it.
            run.in_step(|step| unsafe { step.grad_slice(name, slice, Owner::new(owner)) })
        })
    }

    fn unused(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.with(py, |run| run.in_step(|step| step.unused(name)))
    }

    #[getter]
    fn loss_scale(&self, py: Python<'_>) -> PyResult<f64> {
        self.with(py, |run| Ok(run.zero.optimizer().loss_scale()))
    }

    fn next_micro_batch(&self, py: Python<'_>, loss: f64) -> PyResult<()> {
        self.with(py, |run| run.in_step(|step| step.next_micro_batch(loss)))
    }

    /// Ends a step: its mean loss, whether it was skipped, the gradients' norm, the learning rate.
    fn end(&self, py: Python<'_>, loss: f64) -> PyResult<(f64, bool, Option<f64>, f64)> {
        self.with(py, |run| {
            run.held.clear();
            let outcome = run.step()?.end(loss).map_err(failed)?;
            let norm = outcome.grad_norm();
            Ok((outcome.loss(), outcome.is_skipped(), norm, outcome.lr()))
        })
    }

    fn end_without_update(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |run| {
            run.held.clear();
            run.step()?.end_without_update().map_err(failed)
        })
    }

    fn set_lr(&self, py: Python<'_>, lr: f64) -> PyResult<()> {
        self.with(py, |run| run.zero.set_lr(lr).map_err(failed))
    }

    fn set_micro_batches(&self, py: Python<'_>, count: usize) -> PyResult<()> {
        self.with(py, |run| run.zero.set_micro_batches(count).map_err(failed))
    }

    /// Saves a checkpoint with `state`, which is JSON.
    fn save(&self, py: Python<'_>, folder: &str, state: &str) -> PyResult<()> {
        let state = serde_json::from_str(state).map_err(failed)?;
        self.with(py, |run| {
            run.zero.set_state(state);
            run.zero.save(folder).map_err(failed)
        })
    }

    /// Loads the newest checkpoint; returns its state and its steps.
    fn resume(&self, py: Python<'_>, folder: &str) -> PyResult<(String, u64)> {
        self.with(py, |run| {
            run.zero.resume(folder).map_err(failed)?;
            Ok((run.zero.state().to_string(), run.zero.steps()))
        })
    }

    /// Calls `take(name, address, elements)` with each whole parameter in fp32.
    fn for_each_param(&self, py: Python<'_>, take: Py<PyAny>) -> PyResult<()> {
        self.with(py, |run| {
            let taken = run.zero.for_each_param(|name, _shape, values| {
                let place = (name, values.as_ptr() as usize, values.len());
                let taken = Python::attach(|py| take.call1(py, place).map(drop));
                taken.map_err(|error| error.to_string())
            });
            taken.map_err(failed)
        })
    }

    /// The gathers of the last step, as text.
    fn gathers(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |run| Ok(format!("{:?}", run.zero.gathers())))
    }

    /// Ends the run; a step that is open ends it on all ranks.
    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.0.lock().take()));
    }
}
