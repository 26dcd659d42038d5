//! candle's side: where gradients leave candle's backward, and where updated parameters enter its
//! tensors.
//!
//! candle has no hook on the gradient of a variable, which leaves `backward` only at its end. The
//! result of a `CustomOp1` has one: its `bwd` is called with the gradient while `backward` runs,
//! and may return `None`, so that candle keeps nothing. Every trained parameter is therefore such a
//! result. The argument of the operation, the **anchor**, is a variable of one element, which only
//! makes candle track the result; the parameter's elements are those of the result, and no other
//! copy exists.
//!
//! Parameters are written in place, under nested in-place operations: the only exclusive access
//! that candle grants.

use std::cell::Cell;
use std::sync::Arc;

use candle_core::{
    CpuStorage, CustomOp1, DType, Device, InplaceOp1, Layout, Result, Shape, Tensor, Var, bail,
};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use parking_lot::Mutex;
use zero_alloc::device::{AnySlice, DType as ZeroDType, DeviceId};

use crate::reducer::Reducer;

/// The receiver of the gradients of a [`ShardedVars`].
#[derive(Default)]
pub(crate) enum Receiver {
    /// There is no `ZeroAdamW`.
    #[default]
    None,
    /// A `ZeroAdamW` is being created.
    Claimed,
    /// The reducer of the only `ZeroAdamW`, whose memory it writes to.
    Reducer(Box<Reducer>),
}

pub(crate) type Sink = Arc<Mutex<Receiver>>;

/// The right of a `ZeroAdamW` that is being created to set the receiver. Dropping it makes way for
/// another.
pub(crate) struct Claim(Sink);

impl Claim {
    /// `None` if there is another `ZeroAdamW`.
    pub(crate) fn of(sink: &Sink) -> Option<Self> {
        let mut receiver = sink.lock();
        if !matches!(*receiver, Receiver::None) {
            return None;
        }
        *receiver = Receiver::Claimed;
        Some(Self(Arc::clone(sink)))
    }

    /// Sets the receiver, which its optimizer removes when it is dropped.
    pub(crate) fn keep(self, reducer: Reducer) -> Sink {
        *self.0.lock() = Receiver::Reducer(Box::new(reducer));
        Arc::clone(&self.0)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut receiver = self.0.lock();
        if matches!(*receiver, Receiver::Claimed) {
            *receiver = Receiver::None;
        }
    }
}

/// A trained parameter.
#[derive(Clone)]
pub(crate) struct Param {
    pub(crate) name: String,
    pub(crate) tensor: Tensor,
}

struct Inner {
    /// `None` once the optimizer exists, so that the source's copies can be freed.
    source: Mutex<Option<Box<dyn SimpleBackend>>>,
    trains: Box<dyn Fn(&str) -> bool + Send + Sync>,
    params: Mutex<Vec<Param>>,
    sink: Sink,
}

/// The parameters of a model, for a `VarBuilder`: each trained one passes its gradient to the
/// optimizer during backward.
#[derive(Clone)]
pub struct ShardedVars(Arc<Inner>);

impl std::fmt::Debug for ShardedVars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ShardedVars({} trained)", self.0.params.lock().len())
    }
}

impl ShardedVars {
    /// Takes the initial values from `source`: a `VarMap`, safetensors files, or any other back end
    /// of a `VarBuilder`. Parameters whose name `trains` rejects stay as they are: no gradient, no
    /// optimizer state, no traffic.
    pub fn new(
        source: impl SimpleBackend + 'static,
        trains: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Self {
        let source = Mutex::new(Some(Box::new(source) as Box<dyn SimpleBackend>));
        Self(Arc::new(Inner {
            source,
            trains: Box::new(trains),
            params: Mutex::default(),
            sink: Sink::default(),
        }))
    }

    /// The builder to load the model with.
    pub fn var_builder(&self, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), DType::F32, device.clone())
    }

    /// The names and current values of the trained parameters, in the order in which the model
    /// loaded them.
    pub fn trained(&self) -> Vec<(String, Tensor)> {
        self.0
            .params
            .lock()
            .iter()
            .map(|p| (p.name.clone(), p.tensor.detach()))
            .collect()
    }

    /// Ends loading: frees the source, and returns the trained parameters and the receiver of their
    /// gradients.
    pub(crate) fn finish_loading(&self) -> (Vec<Param>, Sink) {
        *self.0.source.lock() = None;
        (self.0.params.lock().clone(), Arc::clone(&self.0.sink))
    }
}

impl SimpleBackend for ShardedVars {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let mut params = self.0.params.lock();
        // A tied parameter: one tensor, so candle adds both gradients before it calls the hook.
        if let Some(param) = params.iter().find(|p| p.name == name) {
            if *param.tensor.shape() != shape {
                bail!(
                    "{name} is loaded with shape {shape:?} and with {:?}",
                    param.tensor.shape()
                );
            }
            return Ok(param.tensor.clone());
        }

        let source = self.0.source.lock();
        let Some(source) = source.as_ref() else {
            bail!("{name} is loaded after ZeroAdamW::new; load the whole model before");
        };
        let values = source.get(shape.clone(), name, init, dtype, device)?;
        if !(self.0.trains)(name) {
            return Ok(values.detach());
        }

        if dtype != DType::F32 || !device.is_cpu() {
            bail!(
                "{name} has dtype {dtype:?} on {device:?}; trained parameters must be F32 on the CPU"
            );
        }

        let initial = CpuStorage::F32(values.flatten_all()?.to_vec1::<f32>()?);
        let hook = GradientHook {
            param: params.len(),
            shape,
            initial: Mutex::new(Some(initial)),
            sink: self.0.sink.clone(),
        };

        let anchor = Var::zeros(1, dtype, device)?;
        let tensor = anchor.apply_op1(hook)?;
        params.push(Param {
            name: name.to_owned(),
            tensor: tensor.clone(),
        });

        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        bail!("{name} is loaded without a shape; use `get`")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let known = self.0.params.lock().iter().any(|p| p.name == name);
        known
            || self
                .0
                .source
                .lock()
                .as_ref()
                .is_some_and(|source| source.contains_tensor(name))
    }
}

/// The operation whose result is a parameter, and whose `bwd` receives the parameter's gradient.
struct GradientHook {
    param: usize,
    shape: Shape,
    /// Moved into the result.
    initial: Mutex<Option<CpuStorage>>,
    sink: Sink,
}

impl CustomOp1 for GradientHook {
    fn name(&self) -> &'static str {
        "zero-gradient-hook"
    }

    fn cpu_fwd(&self, _anchor: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let Some(initial) = self.initial.lock().take() else {
            bail!("the hook of a parameter is applied once")
        };
        Ok((initial, self.shape.clone()))
    }

    fn bwd(&self, _anchor: &Tensor, _param: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        match &mut *self.sink.lock() {
            Receiver::Reducer(reducer) => reducer.gradient(self.param, grad)?,
            Receiver::None | Receiver::Claimed => {
                bail!("backward of sharded parameters without a ZeroAdamW")
            }
        }
        Ok(None)
    }
}

/// The function to run while all parameters are locked.
type Run<'a> = Box<dyn FnOnce(&[AnySlice]) -> Result<()> + 'a>;

/// Locks the elements of all `tensors` for writing, and calls `run` with a slice of each, in order.
/// No other access to the tensors is possible until `run` returns. No two tensors share a storage.
///
/// # Safety
/// When `run` returns or panics, no enqueued operation uses the slices any more.
pub(crate) unsafe fn with_locked<'a>(tensors: &'a [Tensor], run: Run<'a>) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { lock_next(tensors, Vec::with_capacity(tensors.len()), run) }
}

/// Locks `tensors`, after those of `slices`.
///
/// # Safety
/// As for [`with_locked`].
unsafe fn lock_next<'a>(tensors: &'a [Tensor], slices: Vec<AnySlice>, run: Run<'a>) -> Result<()> {
    match tensors.split_first() {
        Some((first, rest)) => first.inplace_op1(&Lock {
            rest,
            state: Cell::new(Some((slices, run))),
        }),
        None => run(&slices),
    }
}

/// An in-place operation of candle has the storage of a tensor while it runs; this one locks the
/// next tensor within.
struct Lock<'a> {
    rest: &'a [Tensor],
    state: Cell<Option<(Vec<AnySlice>, Run<'a>)>>,
}

impl InplaceOp1 for Lock<'_> {
    fn name(&self) -> &'static str {
        "zero-lock"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        let (CpuStorage::F32(values), Some((mut slices, run))) = (storage, self.state.take())
        else {
            bail!("a parameter is not F32 any more");
        };
        // SAFETY: `values` is borrowed exclusively until `run` has returned, which leaves no
        // operation behind; the elements are initialised.
        slices.push(unsafe {
            AnySlice::from_raw_parts(
                values.as_mut_ptr().cast(),
                values.len(),
                ZeroDType::F32,
                DeviceId::HOST,
            )
        });
        // SAFETY: only `lock_next` makes a `Lock`; its caller's promise.
        unsafe { lock_next(self.rest, slices, run) }
    }
}
