//! The parameters of a unit, for the framework to read.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use zero_alloc::device::{AnySlice, DType, DeviceId, Element};
use zero_shard::UnitLayout;

use super::FrameworkError;

/// The owner of a slice's memory.
pub(super) type Memory = Arc<dyn Any + Send + Sync>;

/// A hash of the bits of `values`, in order.
pub(super) fn hash(values: &[f32]) -> u64 {
    const PRIME: u64 = 0x0100_0000_01b3; // of FNV-1a
    let next = |hash: u64, value: &f32| (hash ^ u64::from(value.to_bits())).wrapping_mul(PRIME);
    values.iter().fold(0xcbf2_9ce4_8422_2325, next)
}

/// The elements of parameter `param` in the unit.
pub(super) fn range_of(unit: &UnitLayout, param: usize) -> Range<usize> {
    let range = unit.params[param].range();
    range.start as usize..range.end as usize
}

/// The position of a parameter in a unit, by its name, with or without `UNIT.` before it.
pub(super) fn find(unit: &UnitLayout, name: &str) -> Result<usize, FrameworkError> {
    let position = |is: &dyn Fn(&str) -> bool| unit.params.iter().position(|param| is(&param.name));
    let found = position(&|full| full == name)
        .or_else(|| position(&|full| short_name(&unit.name, full) == Some(name)));
    found.ok_or_else(|| FrameworkError::Unknown {
        what: "parameter",
        name: name.to_owned(),
        known: some(unit.params.iter().map(|param| &*param.name)),
    })
}

/// The full name of a parameter without `UNIT.` before it.
pub(super) fn short_name<'a>(unit: &str, full: &'a str) -> Option<&'a str> {
    full.strip_prefix(unit)?.strip_prefix('.')
}

/// Some of the names, and the number of others.
pub(super) fn some<'a>(names: impl Iterator<Item = &'a str>) -> String {
    const SHOWN: usize = 8;
    let names: Vec<&str> = names.collect();
    let shown = names[..names.len().min(SHOWN)].join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// The parameters of a unit, whole, in the dtype of the run.
pub struct Params<'a> {
    pub(super) unit: &'a UnitLayout,
    pub(super) flat: AnySlice,
    pub(super) memory: Memory,
}

impl fmt::Debug for Params<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Params({}, {:?})", self.unit.name, self.flat)
    }
}

impl Params<'_> {
    /// The elements of a parameter in host memory, by its name, with or without `UNIT.` before it.
    ///
    /// # Errors
    /// There is no such parameter, the run has another dtype, or the memory is that of a device.
    pub fn get<T: Element>(&self, name: &str) -> Result<&[T], FrameworkError> {
        let param = find(self.unit, name)?;
        let slice = self.flat.slice(range_of(self.unit, param));
        if slice.dtype() != T::DTYPE {
            return Err(FrameworkError::Type {
                name: self.unit.params[param].name.clone(),
                run: slice.dtype(),
                asked: T::DTYPE,
            });
        }
        if slice.device() != DeviceId::HOST {
            let name = name.to_owned();
            return Err(FrameworkError::OnDevice { name });
        }
        let slice = slice.typed()?;
        // SAFETY: host memory whose writers have ended; the next ones come after the call that this
        // value is borrowed in.
        Ok(unsafe { slice.as_host() })
    }

    /// The memory of a parameter, for a tensor that is a view of it.
    ///
    /// # Errors
    /// There is no such parameter.
    pub fn view(&self, name: &str) -> Result<ParamView, FrameworkError> {
        let param = find(self.unit, name)?;
        Ok(ParamView {
            slice: self.flat.slice(range_of(self.unit, param)),
            shape: self.unit.params[param].shape.clone(),
            _memory: Arc::clone(&self.memory),
        })
    }

    /// The names of the parameters, in the order of the unit.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.unit.params.iter().map(|param| &*param.name)
    }
}

/// A parameter's memory, which it keeps from being freed.
pub struct ParamView {
    pub(super) slice: AnySlice,
    pub(super) shape: Vec<u64>,
    pub(super) _memory: Memory,
}

impl fmt::Debug for ParamView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ParamView({:?}, {:?})", self.shape, self.slice)
    }
}

impl ParamView {
    /// The shape of the parameter.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The dtype of the run.
    pub fn dtype(&self) -> DType {
        self.slice.dtype()
    }

    /// The elements.
    ///
    /// # Safety
    /// They are only read, by the host or by work on the compute stream: at stages 0 to 2 between
    /// [`Zero::begin`](super::Zero::begin) and [`Step::end`](super::Step::end), at stage 3 within
    /// the call that returned it; and before this value is dropped.
    pub unsafe fn slice(&self) -> AnySlice {
        self.slice
    }
}
