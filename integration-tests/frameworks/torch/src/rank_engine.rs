//! One rank of a run.

use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde::Deserialize;
use zero_alloc::Pool;
use zero_alloc::cuda::CudaDevice;
use zero_alloc::cuda::interop::stream_from_raw;
use zero_alloc::device::{AnySlice, DType, Device, Memory};
use zero_alloc::host::HostDevice;
use zero_comm::{Communicator, PrefetchOptions};
use zero_kernels::Muon;
use zero_kernels::cuda::CudaKernels;
use zero_kernels::host::HostKernels;
use zero_models::cuda::matmul::CublasLtProducts;
use zero_optim::framework::{Builder, FrameworkError, HeldUnit, Rank, Step, Zero};
use zero_optim::{GroupRules, Matrix, Moments, OptimizerConfig, StateFormat};
use zero_shard::ZeroStage;

use crate::connect::Comm;
use crate::detached::detached;
use crate::failed;
use crate::membership::{Process, World};
use crate::torch_memory::{Owner, Tensors};

/// Elements of a bucket: shared memory moves far fewer at a time.
const BUCKET_ELEMS: usize = 1 << 18;

fn dtype_of(name: &str) -> PyResult<DType> {
    match name {
        "fp32" => Ok(DType::F32),
        "bf16" => Ok(DType::Bf16),
        "fp16" => Ok(DType::F16),
        _ => Err(PyValueError::new_err(format!("no dtype {name}"))),
    }
}

/// A run, and the units that it holds.
struct Run<D: Device> {
    // Dropped before the run: they are of its step.
    held: HashMap<String, HeldUnit<D>>,
    zero: Zero<D>,
}

/// A run on this rank's device.
enum AnyRun {
    Host(Run<HostDevice>),
    Cuda(Run<CudaDevice>),
}

impl<D: Device> Run<D> {
    fn step(&mut self) -> PyResult<Step<'_, D>> {
        self.zero
            .open_step()
            .ok_or_else(|| failed("no step is open"))
    }

    /// Ends an open step, on all ranks, with `reason`.
    fn fail(&mut self, reason: &str) {
        if let Some(mut step) = self.zero.open_step() {
            step.fail(reason);
            step.pause();
        }
    }

    /// Calls `call` with the open step, which stays open.
    fn in_step<R>(
        &mut self,
        call: impl FnOnce(&mut Step<'_, D>) -> Result<R, FrameworkError>,
    ) -> PyResult<R> {
        let mut step = self.step()?;
        let result = call(&mut step);
        step.pause();
        result.map_err(failed)
    }
}

/// One rank of a run.
#[pyclass(frozen)]
pub(crate) struct Engine {
    /// Behind the end of the run nothing here keeps the ranks.
    run: Mutex<Option<(AnyRun, Comm)>>,
    process: Process,
}

impl Drop for Engine {
    fn drop(&mut self) {
        if !self.process.is_this() {
            std::mem::forget(self.run.get_mut().take());
        }
    }
}

/// A parameter: full name, unit, shape, position of its group, and whether, of two dimensions, it
/// has the inputs first, as transformers' Conv1D.
type Param = (String, String, Vec<u64>, usize, bool);

/// A unit: name, elements with padding, and the parameters in it with their first elements.
type Unit = (String, u64, Vec<(String, u64)>);

/// A group: factor of the learning rate, weight decay, whether it is trained, whether by Muon.
type Group = (f64, Option<f64>, bool, bool);

impl Engine {
    /// Calls `call` without Python's lock.
    fn call<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut AnyRun) -> PyResult<R> + Send,
    ) -> PyResult<R> {
        if !self.process.is_this() {
            return Err(failed(
                "the engine belongs to the process that made it, and not to a fork of that",
            ));
        }
        let closed = || failed("the engine is closed");
        let comm = self.lock()?.as_ref().map(|(_, comm)| comm.clone());
        detached(py, Some(comm.ok_or_else(closed)?), || {
            let mut open = self.lock()?;
            let (run, _) = open.as_mut().ok_or_else(closed)?;
            call(run)
        })
    }

    /// The run. A handler of a signal that calls the engine may interrupt a call of this thread.
    fn lock(&self) -> PyResult<MutexGuard<'_, Option<(AnyRun, Comm)>>> {
        self.run.try_lock().ok_or_else(|| {
            failed("the engine is in another call, of a thread or below a signal's handler")
        })
    }
}

/// Calls an [`Engine`] with its run, on any device.
macro_rules! with {
    ($engine:ident, $py:ident, |$run:ident| $body:expr) => {
        $engine.call($py, |run| match run {
            AnyRun::Host($run) => $body,
            AnyRun::Cuda($run) => $body,
        })
    };
}

/// The settings of a run.
struct Made<'a> {
    stage: ZeroStage,
    dtypes: (DType, Option<DType>),
    optimizer: OptimizerConfig,
    moments: Moments,
    muon: Option<Muon>,
    micro_batches: usize,
    params: Vec<Param>,
    groups: Vec<Group>,
    init: &'a Py<PyAny>,
    gather: Py<PyAny>,
    allocate: Py<PyAny>,
    limit: Duration,
}

impl Made<'_> {
    fn on_host(self, comm: Arc<dyn Communicator<HostDevice>>) -> PyResult<Run<HostDevice>> {
        let pool = Pool::new(HostDevice::new(), usize::MAX);
        let kernels = Arc::new(HostKernels::new(1).map_err(failed)?);
        let rank = Rank::new(comm, pool, kernels).map_err(failed)?;
        // Shared memory moves far fewer at a time; and what computes backward also reduces.
        self.run(rank, |builder| {
            builder.bucket_elems(BUCKET_ELEMS).waiting_units(0)
        })
    }

    /// On `stream`, torch's, or a new one without.
    fn on_cuda(
        self,
        (device, comm): (CudaDevice, Arc<dyn Communicator<CudaDevice>>),
        stream: usize,
    ) -> PyResult<Run<CudaDevice>> {
        let (_, bytes) = device.memory_bytes().map_err(failed)?;
        let kernels = CudaKernels::new(&device).map_err(failed)?;
        let kernels = Arc::new(match self.muon {
            Some(_) => kernels.with_products(CublasLtProducts::load(&device).map_err(failed)?),
            None => kernels,
        });
        let pool = Pool::new(device.clone(), bytes);
        let rank = match stream {
            0 => Rank::new(comm, pool, kernels),
            handle => {
                // SAFETY: Python keeps the stream as long as the engine.
                let stream = unsafe { stream_from_raw(&device, handle as *mut c_void, "torch") };
                Rank::with_stream(comm, pool, kernels, stream.map_err(failed)?)
            }
        };
        self.run(rank.map_err(failed)?, |builder| builder)
    }

    fn run<D: Device>(
        self,
        rank: Rank<D>,
        set: impl FnOnce(Builder<D>) -> Builder<D>,
    ) -> PyResult<Run<D>> {
        let device = rank.pool().device().id();
        let rules = self.groups.iter().map(|(lr_scale, decay, is_trained, _)| {
            let rules = GroupRules::default().lr_scale(*lr_scale);
            rules.trainable(*is_trained).weight_decay(*decay)
        });
        let rules: Vec<GroupRules> = rules.collect();
        let params = &self.params;
        let group_of = params
            .iter()
            .map(|(name, _, _, group, _)| (name.clone(), *group));
        let group_of: HashMap<String, usize> = group_of.collect();
        let inputs_first = params.iter().filter(|(.., inputs_first)| *inputs_first);
        let inputs_first: HashSet<String> = inputs_first.map(|(name, ..)| name.clone()).collect();
        let unit_of = params.iter().map(|(name, unit, ..)| (&**name, &**unit));
        let unit_of: HashMap<&str, &str> = unit_of.collect();
        let shapes = params
            .iter()
            .map(|(name, _, shape, ..)| (name.clone(), shape.clone()));

        let builder = Zero::builder(rank.limit(self.limit))
            .stage(self.stage)
            .dtype(self.dtypes.0)
            .reduce_dtype(self.dtypes.1.unwrap_or(self.dtypes.0))
            .adamw(self.optimizer)
            .format(StateFormat::default().moments(self.moments))
            .micro_batches(self.micro_batches)
            .prefetch(PrefetchOptions::default())
            .add_gradients()
            .params(shapes, |name| unit_of[name].to_owned())
            .groups(rules, move |name| group_of[name])
            .matrices(move |name, shape| match *shape {
                [inputs, outputs] if inputs_first.contains(name) => {
                    vec![Matrix::conv1d(inputs as usize, outputs as usize)]
                }
                [outputs, inputs] => vec![Matrix::linear(outputs as usize, inputs as usize)],
                _ => Vec::new(),
            })
            .gather_memory(Tensors::new(self.gather, device))
            .gradient_memory(Tensors::new(self.allocate, device));
        let by_muon = self
            .groups
            .iter()
            .enumerate()
            .filter(|(_, (.., is_muon))| *is_muon);
        let builder = by_muon.fold(builder, |builder, (group, _)| match self.muon {
            Some(muon) => builder.group_rule(group, Arc::new(muon)),
            None => builder,
        });
        let mut raised = None;
        let zero = set(builder).build_from_rank_0(|name, _shape, values| {
            let at = values.as_mut_ptr() as usize;
            let written = Python::attach(|py| self.init.call1(py, (name, at, values.len())));
            raised = raised.take().or(written.err());
        });
        let zero = match raised {
            Some(raised) => return Err(raised),
            None => zero.map_err(failed)?,
        };
        let held = HashMap::new();
        Ok(Run { held, zero })
    }
}

#[pymethods]
impl Engine {
    /// `init(name, address, elements)` writes the initial values of a parameter in fp32, on rank 0.
    /// `gather(unit, bytes)` returns the owner of memory for a gathered unit, at stage 3, and its
    /// address; `allocate(unit, bytes)` those for sums of gradients. `stream` is torch's on a GPU.
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
        gather: Py<PyAny>,
        allocate: Py<PyAny>,
        stream: usize,
        limit_seconds: f64,
    ) -> PyResult<Self> {
        let optimizer: serde_json::Value = serde_json::from_str(optimizer).map_err(failed)?;
        let moments = optimizer["moments"].as_str().unwrap_or("fp32").parse();
        let muon = Option::deserialize(&optimizer["muon"]).map_err(failed)?;
        let made = Made {
            stage: ZeroStage::from_number(stage.into())
                .ok_or_else(|| PyValueError::new_err(format!("stage {stage}: expected 0 to 3")))?,
            dtypes: (dtype_of(dtype)?, reduce_dtype.map(dtype_of).transpose()?),
            optimizer: serde_json::from_value(optimizer).map_err(failed)?,
            moments: moments.map_err(PyValueError::new_err)?,
            muon,
            micro_batches,
            params,
            groups,
            init: &init,
            gather,
            allocate,
            limit: Duration::try_from_secs_f64(limit_seconds).map_err(failed)?,
        };
        let comm = world.comm()?;
        let run = detached(py, Some(comm.clone()), || match comm.clone() {
            Comm::Host(comm) => made.on_host(comm).map(AnyRun::Host),
            Comm::Cuda(device, comm) => made.on_cuda((device, comm), stream).map(AnyRun::Cuda),
        })?;
        Ok(Self {
            run: Mutex::new(Some((run, comm))),
            process: Process::this(),
        })
    }

    fn units(&self, py: Python<'_>) -> PyResult<Vec<Unit>> {
        with!(self, py, |run| {
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
        with!(self, py, |run| {
            let view = run.zero.param(name).map_err(failed)?;
            // SAFETY: torch reads it within steps only; the Python engine keeps this one, and so the
            // memory, as long as its module.
            let slice = unsafe { view.slice() };
            Ok((slice.as_ptr() as usize, slice.len()))
        })
    }

    fn begin(&self, py: Python<'_>) -> PyResult<()> {
        with!(self, py, |run| {
            run.zero.begin().map_err(failed)?.pause();
            Ok(())
        })
    }

    /// Gathers a unit into memory that `take` returned.
    fn unshard(&self, py: Python<'_>, unit: &str) -> PyResult<()> {
        with!(self, py, |run| {
            let held = run.in_step(|step| step.unshard(unit))?;
            run.held.insert(unit.to_owned(), held);
            Ok(())
        })
    }

    fn reshard(&self, py: Python<'_>, unit: &str) -> PyResult<()> {
        with!(self, py, |run| {
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
        with!(self, py, |run| {
            let at = at as *mut u8;
            let id = run.zero.rank().pool().device().id();
            // SAFETY: the tensor's memory, of these elements.
            let slice = unsafe { AnySlice::from_raw_parts(at, elems, dtype, id) };
            // SAFETY: torch has written it, and `owner` keeps it.
            run.in_step(|step| unsafe { step.grad_slice(name, slice, Owner::new(owner)) })
        })
    }

    fn unused(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        with!(self, py, |run| run.in_step(|step| step.unused(name)))
    }

    #[getter]
    fn loss_scale(&self, py: Python<'_>) -> PyResult<f64> {
        with!(self, py, |run| Ok(run.zero.optimizer().loss_scale()))
    }

    /// The learning rate of the next step, of which groups have factors.
    #[getter]
    fn next_lr(&self, py: Python<'_>) -> PyResult<f64> {
        with!(self, py, |run| {
            let optim = run.zero.optimizer();
            let config = optim.config();
            let position = optim.progress().schedule_position;
            Ok(config.schedule.lr(config.lr, position))
        })
    }

    fn next_micro_batch(&self, py: Python<'_>, loss: f64) -> PyResult<()> {
        with!(self, py, |run| run
            .in_step(|step| step.next_micro_batch(loss)))
    }

    /// Ends a step: its mean loss, whether it was skipped, the gradients' norm, the learning rate.
    fn end(&self, py: Python<'_>, loss: f64) -> PyResult<(f64, bool, Option<f64>, f64)> {
        with!(self, py, |run| {
            run.held.clear();
            let outcome = run.step()?.end(loss).map_err(failed)?;
            let norm = outcome.grad_norm();
            Ok((outcome.loss(), outcome.is_skipped(), norm, outcome.lr()))
        })
    }

    fn end_without_update(&self, py: Python<'_>) -> PyResult<()> {
        with!(self, py, |run| {
            run.held.clear();
            run.step()?.end_without_update().map_err(failed)
        })
    }

    /// Sets the factor of the learning rate and the weight decay of each trained group.
    fn set_groups(&self, py: Python<'_>, groups: Vec<(f64, Option<f64>)>) -> PyResult<()> {
        with!(self, py, |run| {
            let mut groups = groups.into_iter().enumerate();
            groups.try_for_each(|(group, (lr_scale, decay))| {
                let set = run.zero.set_group(group, lr_scale, decay);
                set.map_err(failed)
            })
        })
    }

    fn set_micro_batches(&self, py: Python<'_>, count: usize) -> PyResult<()> {
        with!(self, py, |run| run
            .zero
            .set_micro_batches(count)
            .map_err(failed))
    }

    /// Saves a checkpoint with `state` and the model's configuration, which are JSON.
    fn save(&self, py: Python<'_>, folder: &str, state: &str, config: &str) -> PyResult<()> {
        let state = serde_json::from_str(state).map_err(failed)?;
        let config = serde_json::from_str(config).map_err(failed)?;
        with!(self, py, |run| {
            run.zero.set_state(state);
            run.zero.set_model_config(config);
            run.zero.save(folder).map_err(failed)
        })
    }

    /// Loads the newest checkpoint; returns its state and its steps.
    fn resume(&self, py: Python<'_>, folder: &str) -> PyResult<(String, u64)> {
        with!(self, py, |run| {
            run.zero.resume(folder).map_err(failed)?;
            Ok((run.zero.state().to_string(), run.zero.steps()))
        })
    }

    /// Calls `take(name, address, elements)` with each whole parameter in fp32.
    fn for_each_param(&self, py: Python<'_>, take: Py<PyAny>) -> PyResult<()> {
        with!(self, py, |run| {
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
        with!(self, py, |run| Ok(format!("{:?}", run.zero.gathers())))
    }

    /// The pool's memory, as text.
    fn memory(&self, py: Python<'_>) -> PyResult<String> {
        with!(self, py, |run| Ok(run
            .zero
            .rank()
            .pool()
            .report()
            .to_string()))
    }

    /// Ends the run; if a step is open, on all ranks, with this rank's name and `reason`.
    fn close(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        if !self.process.is_this() {
            return Ok(());
        }
        py.detach(|| {
            let Some((mut run, _comm)) = self.lock()?.take() else {
                return Ok(());
            };
            match &mut run {
                AnyRun::Host(run) => run.fail(reason),
                AnyRun::Cuda(run) => run.fail(reason),
            }
            Ok(())
        })
    }
}
