//! candle's side: where gradients leave candle's backward, and where updated parameters enter its
//! tensors.
//!
//! candle has no hook on the gradient of a variable, which leaves `backward` only at its end. The
//! result of a `CustomOp1` has one: its `bwd` is called with the gradient while `backward` runs,
//! and may return `None`, so that candle keeps nothing. Every trained parameter is therefore such a
//! result. The argument of the operation, the **anchor**, is a variable of one element, which only
//! makes candle track the result; the parameter's elements are those of the result, and no other
//! copy exists.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::{self, ThreadId};

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, Var, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use parking_lot::Mutex;

use crate::values::take;

/// The gradient of a parameter.
pub(crate) struct Gradient {
    /// Position in the order of loading.
    pub(crate) param: usize,
    pub(crate) values: Vec<f32>,
    /// Whether candle's gradient was not contiguous, so that it was copied.
    pub(crate) was_copied: bool,
}

/// The destination of gradients of a [`ShardedVars`]'s hooks.
#[derive(Default)]
pub(crate) struct Receiver {
    has_optimizer: bool,
    /// The backward that runs, and its thread, on which candle calls the hooks.
    backward: Option<(ThreadId, Sender<Gradient>)>,
}

type Sink = Arc<Mutex<Receiver>>;

/// The exclusive right to the gradients of a [`ShardedVars`].
pub(crate) struct Claim(Sink);

impl Claim {
    /// Receives the gradients of a backward on this thread, until the result is dropped.
    pub(crate) fn receive(&self, gradients: Sender<Gradient>) -> Backward<'_> {
        self.0.lock().backward = Some((thread::current().id(), gradients));
        Backward(&self.0)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.0.lock().has_optimizer = false;
    }
}

/// A backward that runs.
#[must_use = "dropping it ends the backward"]
pub(crate) struct Backward<'a>(&'a Sink);

impl Drop for Backward<'_> {
    fn drop(&mut self) {
        self.0.lock().backward = None;
    }
}

/// A trained parameter.
#[derive(Clone)]
pub(crate) struct Param {
    pub(crate) name: String,
    pub(crate) tensor: Tensor,
    /// Whether `candle_nn::embedding` has loaded it.
    pub(crate) is_embedding: bool,
}

/// Whether these are the initial values that `candle_nn::embedding`, and no other layer of
/// candle_nn, requests.
fn is_of_embedding(init: Init) -> bool {
    matches!(
        init,
        Init::Randn {
            mean: 0.0,
            stdev: 1.0
        }
    )
}

struct Inner {
    /// `None` once the optimizer exists, so that the source's copies can be freed.
    source: Mutex<Option<Box<dyn SimpleBackend>>>,
    trains: Box<dyn Fn(&str) -> bool + Send + Sync>,
    params: Mutex<Vec<Param>>,
    /// The names of the parameters that are not trained.
    frozen: Mutex<Vec<String>>,
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
            frozen: Mutex::default(),
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

    /// Ends loading: frees the source, and returns the trained parameters.
    pub(crate) fn finish_loading(&self) -> Vec<Param> {
        *self.0.source.lock() = None;
        self.0.params.lock().clone()
    }

    /// The names of the loaded parameters that are not trained.
    pub(crate) fn frozen(&self) -> Vec<String> {
        self.0.frozen.lock().clone()
    }

    /// Claims the gradients; `None` if there is another optimizer.
    pub(crate) fn claim(&self) -> Option<Claim> {
        let mut receiver = self.0.sink.lock();
        if receiver.has_optimizer {
            return None;
        }
        receiver.has_optimizer = true;
        Some(Claim(Arc::clone(&self.0.sink)))
    }
}

impl SimpleBackend for ShardedVars {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let mut params = self.0.params.lock();
        // A tied parameter: one tensor, so candle adds both gradients before it calls the hook.
        if let Some(param) = params.iter_mut().find(|p| p.name == name) {
            if *param.tensor.shape() != shape {
                bail!(
                    "{name} is loaded with shape {shape:?} and with {:?}",
                    param.tensor.shape()
                );
            }
            param.is_embedding |= is_of_embedding(init);
            return Ok(param.tensor.clone());
        }

        let source = self.0.source.lock();
        let Some(source) = source.as_ref() else {
            bail!("{name} is loaded after ZeroAdamW::new; load the whole model before");
        };
        let values = source.get(shape.clone(), name, init, dtype, device)?;
        if !(self.0.trains)(name) {
            self.0.frozen.lock().push(name.to_owned());
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
            name: name.to_owned(),
            shape,
            initial: Mutex::new(Some(initial)),
            sink: self.0.sink.clone(),
        };

        let anchor = Var::zeros(1, dtype, device)?;
        let tensor = anchor.apply_op1(hook)?;
        params.push(Param {
            name: name.to_owned(),
            tensor: tensor.clone(),
            is_embedding: is_of_embedding(init),
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
    name: String,
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
        let receiver = self.sink.lock();
        let gradients = match &receiver.backward {
            Some((thread, gradients)) if *thread == thread::current().id() => gradients,
            _ => bail!(
                "a gradient of {} from a backward that its ZeroAdamW did not start: the loss of \
                 another ZeroAdamW, of another thread or of a plain Tensor::backward depends on \
                 it; call TrainStep::backward of the optimizer that has this parameter, with a \
                 loss of no other",
                self.name
            ),
        };

        // Why it may be taken: candle has removed the gradient from its store, and computes each
        // as a sum, in other memory.
        let (values, was_copied) = take(grad)?;
        let gradient = Gradient {
            param: self.param,
            values,
            was_copied,
        };
        if gradients.send(gradient).is_err() {
            bail!("the gradient of {} was not reduced", self.name);
        }
        Ok(None)
    }
}
