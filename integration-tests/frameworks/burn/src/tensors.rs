//! burn's side: parameters by their path, as views of the run's memory, and gradients.
//!
//! | tensor | memory | lifetime |
//! |---|---|---|
//! | placeholder in the template | one element, expanded | the run's |
//! | view in a filled module | the pool's | the call that it was filled for |
//! | gradient | burn's | until its unit is packed |

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{AllocationProperty, Bytes, DType, Gradients, Tensor, TensorData};
use zero_alloc::device::{AnySlice, DType as ZeroDType, DeviceId};
use zero_alloc::host::HostDevice;
use zero_optim::framework::{FrameworkError, ParamView, Step};

pub(crate) type Result<T> = std::result::Result<T, FrameworkError>;

/// The path of the parameter that is visited.
#[derive(Default)]
struct Path(Vec<String>);

impl Path {
    /// A path below `unit`; the root if it is empty.
    fn below(unit: &str) -> Self {
        match unit {
            "" => Self::default(),
            unit => Self(vec![unit.to_owned()]),
        }
    }

    fn name(&self) -> String {
        self.0.join(".")
    }

    /// Whether `param` is a running statistic, such as those of `BatchNorm`: burn maps them like
    /// parameters, but changes them in forward. They stay in the model.
    fn is_running<const D: usize>(&self, param: &Param<Tensor<D>>) -> bool {
        let named = self
            .0
            .last()
            .is_some_and(|name| name.starts_with("running_"));
        named && !param.base().is_require_grad()
    }
}

/// Keeps the path of a traversal.
macro_rules! keep_path {
    () => {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.0.push(name.to_owned());
        }

        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.0.pop();
        }
    };
}

/// The initial values of a model.
#[derive(Default)]
pub(crate) struct Initial {
    path: Path,
    /// Names and shapes in the order of the model.
    pub(crate) shapes: Vec<(String, Vec<u64>)>,
    pub(crate) values: HashMap<String, Vec<f32>>,
    error: Option<FrameworkError>,
}

impl Initial {
    /// Moves the values out of `model`, and returns it with placeholders.
    pub(crate) fn take<M: Module>(model: M) -> Result<(M, Self)> {
        let mut initial = Self::default();
        // Gradients are required of active parameters, also if the model was made without autodiff.
        let template = model.train().map(&mut initial);
        match initial.error.take() {
            Some(error) => Err(error),
            None => Ok((template, initial)),
        }
    }
}

impl ModuleMapper for Initial {
    keep_path!();

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.path.is_running(&param) {
            return param;
        }
        let name = self.path.name();
        let (id, tensor, mapper) = param.consume();
        let placeholder = placeholder(&tensor);
        let shape = tensor.dims().iter().map(|&dim| dim as u64).collect();

        let values = tensor.inner().into_data_as::<f32>().try_into_vec();
        match values {
            Ok(values) => {
                self.shapes.push((name.clone(), shape));
                self.values.insert(name, values);
            }
            Err(error) => self.error = Some(setting(format!("{name} could not be read: {error}"))),
        }
        Param::from_mapped_value(id, placeholder, mapper)
    }
}

/// A tensor of the shape, device and gradient requirement of `tensor` that has one element, NaN.
fn placeholder<const D: usize>(tensor: &Tensor<D>) -> Tensor<D> {
    let one = Tensor::<D>::full([1; D], f32::NAN, &tensor.device());
    let placeholder = one.expand(tensor.dims());
    placeholder.set_require_grad(tensor.is_require_grad())
}

/// Whether gradients of parameters are recorded.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tape {
    On,
    Off,
}

/// Counts the tensors that use parameters in a step.
pub(crate) struct StepUses(Arc<()>);

/// Counts those of a unit, or of the whole model.
pub(crate) struct Uses {
    step: Arc<()>,
    tensors: Arc<()>,
}

impl StepUses {
    pub(crate) fn new() -> Self {
        Self(Arc::new(()))
    }

    /// The uses of a unit.
    pub(crate) fn of_unit(&self) -> Uses {
        Uses {
            step: Arc::clone(&self.0),
            tensors: Arc::new(()),
        }
    }

    /// Fails `step` if a tensor is left, also one of a call that returned an error or panicked:
    /// before what writes parameters.
    pub(crate) fn check(&self, step: &mut Step<'_, HostDevice>) -> Result<()> {
        check(&self.0, step, "the model")
    }
}

impl Uses {
    /// Fails `step` if a tensor is left.
    pub(crate) fn check(&self, step: &mut Step<'_, HostDevice>, unit: &str) -> Result<()> {
        check(&self.tensors, step, unit)
    }
}

fn check(uses: &Arc<()>, step: &mut Step<'_, HostDevice>, unit: &str) -> Result<()> {
    if Arc::strong_count(uses) > 1 {
        let kept = FrameworkError::Kept { unit: unit.into() };
        step.fail(&kept.to_string());
        return Err(kept);
    }
    // Reads of tensors that other threads dropped come before the writes of the update.
    fence(Ordering::Acquire);
    Ok(())
}

/// Replaces placeholders with views.
struct Fill<'a, F> {
    path: Path,
    view: F,
    tape: Tape,
    uses: &'a Uses,
    error: Option<FrameworkError>,
}

/// `template`, whose parameters have names below `unit`, with the parameters that `view` returns.
/// `uses` counts its tensors.
pub(crate) fn fill<M: Module>(
    template: &M,
    unit: &str,
    tape: Tape,
    uses: &Uses,
    view: impl FnMut(&str) -> Result<ParamView>,
) -> Result<M> {
    let mut fill = Fill {
        path: Path::below(unit),
        view,
        tape,
        uses,
        error: None,
    };
    let module = template.clone().map(&mut fill);
    match fill.error {
        Some(error) => Err(error),
        None => Ok(module),
    }
}

impl<F: FnMut(&str) -> Result<ParamView>> ModuleMapper for Fill<'_, F> {
    keep_path!();

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.path.is_running(&param) {
            return param;
        }
        let view = match (self.view)(&self.path.name()) {
            Ok(view) => view,
            Err(error) => {
                self.error.get_or_insert(error);
                return param;
            }
        };
        let (id, placeholder, mapper) = param.consume();
        let is_trained = self.tape == Tape::On && placeholder.is_require_grad();

        let shape = placeholder.dims().map(|dim| dim as u64);
        if *view.shape() != shape {
            let error = setting(format!(
                "{} has the shape {:?} in the run, and {shape:?} in the model: the run is of another \
                 model",
                self.path.name(),
                view.shape()
            ));
            self.error.get_or_insert(error);
            return Param::from_mapped_value(id, placeholder, mapper);
        }
        let data = data_of(view, self.uses, placeholder.dims());
        let options = (&placeholder.device(), data.dtype());
        let tensor = Tensor::from_data(data, options).set_require_grad(is_trained);
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// The memory of a parameter, and the count of its uses.
struct Elements {
    view: ParamView,
    /// Of the step and of the unit.
    _uses: [Arc<()>; 2],
}

impl AsRef<[u8]> for Elements {
    fn as_ref(&self) -> &[u8] {
        // Why nobody writes it: at stage 3 the call that returned the view fails the step if the
        // view outlives it; at the others `StepUses::check` does before `Step::end` writes
        // parameters.
        // SAFETY: it is only read (burn copies shared bytes before it writes), and nobody writes it
        // while the view lives.
        let slice = unsafe { self.view.slice() };
        let Ok(bytes) = slice.bytes().typed::<u8>() else {
            unreachable!("`bytes` has elements of u8")
        };
        // SAFETY: runs of this crate are on a `HostDevice`. The facade has waited for the writers, and
        // the next ones come after the last reader, as above.
        unsafe { bytes.as_host() }
    }
}

/// The parameter's elements, not copied.
fn data_of<const D: usize>(view: ParamView, uses: &Uses, shape: [usize; D]) -> TensorData {
    let dtype = match view.dtype() {
        ZeroDType::Bf16 => DType::BF16,
        ZeroDType::F16 => DType::F16,
        _ => DType::F32,
    };
    let elements = bytes::Bytes::from_owner(Elements {
        view,
        _uses: [Arc::clone(&uses.step), Arc::clone(&uses.tensors)],
    });
    let elements = Bytes::from_shared(elements, AllocationProperty::Other);
    TensorData::from_bytes(elements, shape, dtype)
}

/// The gradients of a module, by name.
pub(crate) type Named = Vec<(String, TensorData)>;

/// Moves gradients of a module out of those of a backward.
struct Collect<'a> {
    path: Path,
    gradients: &'a mut Gradients,
    named: Named,
}

/// Returns the gradients of `module`, whose parameters have names below `unit`. A parameter without
/// one is an error of the run at the end of the micro-batch.
pub(crate) fn collect<M: Module>(module: &M, unit: &str, gradients: &mut Gradients) -> Named {
    let mut collect = Collect {
        path: Path::below(unit),
        gradients,
        named: Vec::new(),
    };
    module.visit(&mut collect);
    collect.named
}

impl ModuleVisitor for Collect<'_> {
    keep_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = param.base().grad_remove(self.gradients) {
            self.named.push((self.path.name(), gradient.into_data()));
        }
    }
}

/// Passes gradients to the step, in burn's memory.
pub(crate) fn hand_over(step: &mut Step<'_, HostDevice>, gradients: Named) -> Result<()> {
    for (name, data) in gradients {
        let (bytes, shape, dtype) = data.into_parts();
        let dtype = match dtype {
            DType::F32 => ZeroDType::F32,
            DType::BF16 => ZeroDType::Bf16,
            DType::F16 => ZeroDType::F16,
            other => return Err(setting(format!("the gradient of {name} is {other:?}"))),
        };

        let elems = shape.num_elements();
        let at = bytes.as_ptr().cast_mut();
        // SAFETY: `bytes` has these elements, aligned as burn's tensors of them are, and keeps them
        // in one place until it is dropped, since nothing writes to it.
        let slice = unsafe { AnySlice::from_raw_parts(at, elems, dtype, DeviceId::HOST) };
        // SAFETY: burn's writers have ended, and `bytes` is the owner, whose only user is the step.
        let taken = unsafe { step.grad_slice(&name, slice, bytes) };
        taken.map_err(|error| match error.cause() {
            FrameworkError::Twice { name } => setting(format!(
                "{name} has a gradient of an earlier backward of this micro-batch, which failed; \
                 after an error or a panic of backward the step cannot go on"
            )),
            _ => error,
        })?;
    }
    Ok(())
}

/// Replaces placeholders with copies of whole parameters.
pub(crate) struct Load {
    path: Path,
    values: HashMap<String, Vec<f32>>,
}

impl Load {
    /// `template` with `values`, which has all its parameters.
    pub(crate) fn load<M: Module>(template: &M, values: HashMap<String, Vec<f32>>) -> M {
        let path = Path::default();
        template.clone().map(&mut Self { path, values })
    }
}

impl ModuleMapper for Load {
    keep_path!();

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(values) = self.values.remove(&self.path.name()) else {
            return param;
        };
        param.map(|placeholder| {
            let data = TensorData::new(values, placeholder.dims());
            let tensor = Tensor::from_data(data, (&placeholder.device(), DType::F32));
            tensor.set_require_grad(placeholder.is_require_grad())
        })
    }
}

pub(crate) fn setting(why: String) -> FrameworkError {
    FrameworkError::Setting(why)
}
