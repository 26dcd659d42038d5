//! A loaded module: decoded kernels, and variables in device memory.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use super::build::build;
use super::lexer::Mistake;
use super::parser::parse;
use super::syntax::{Value, Variable};
use super::types::Space;
use crate::driver::device::Device;
use crate::driver::memory;
use crate::error::Failure;
use crate::exec::program::Program;

/// The decoded kernels of a module, by name.
type Kernels = HashMap<String, Arc<Program>>;

/// The kernels of each text without variables: they are the same in every module that is loaded from
/// it. Decoding takes longer than most tests run the kernels.
static DECODED: LazyLock<Mutex<HashMap<String, Kernels>>> = LazyLock::new(Mutex::default);

/// A module. Its variables are freed on drop.
pub(crate) struct Loaded {
    pub(crate) kernels: Kernels,
    /// Address and size of each variable.
    pub(crate) variables: HashMap<String, (u64, usize)>,
}

impl Drop for Loaded {
    fn drop(&mut self) {
        for &(address, _) in self.variables.values() {
            // Fails if the context's end has freed it already.
            let _ = memory::free(address);
        }
    }
}

/// An error of loading a module.
#[derive(Debug)]
pub(crate) enum LoadError {
    Ptx(Mistake),
    Driver(Failure),
}

/// Decodes PTX, and allocates and initialises its variables in device memory.
pub(crate) fn load(device: &'static Device, text: &str) -> Result<Loaded, LoadError> {
    let decoded = || DECODED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(kernels) = decoded().get(text).cloned() {
        return Ok(Loaded {
            kernels,
            variables: HashMap::new(),
        });
    }

    let loaded = decode(device, text)?;
    if loaded.variables.is_empty() {
        decoded().insert(text.to_owned(), loaded.kernels.clone());
    }
    Ok(loaded)
}

fn decode(device: &'static Device, text: &str) -> Result<Loaded, LoadError> {
    let module = parse(text).map_err(LoadError::Ptx)?;
    let mut loaded = Loaded {
        kernels: HashMap::new(),
        variables: HashMap::new(),
    };

    let global = |v: &&Variable| matches!(v.space, Space::Global | Space::Const);
    for variable in module.variables.iter().filter(global) {
        if variable.external {
            let what = format!(
                "{} is defined in another module, which is not supported",
                variable.name
            );
            return Err(LoadError::Ptx(Mistake {
                line: variable.line,
                what,
            }));
        }
        let address = memory::allocate(device, variable.bytes.max(1)).map_err(LoadError::Driver)?;
        loaded
            .variables
            .insert(variable.name.clone(), (address, variable.bytes));
    }

    let addresses: HashMap<String, u64> = loaded
        .variables
        .iter()
        .map(|(n, &(at, _))| (n.clone(), at))
        .collect();

    for variable in module.variables.iter().filter(global) {
        let bytes = image(variable, &addresses).map_err(LoadError::Ptx)?;
        let address = addresses[&variable.name];
        // SAFETY: allocated above with at least this many bytes, and not yet shared.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
    }

    for function in module
        .functions
        .iter()
        .filter(|f| f.entry && f.body.is_some())
    {
        let program = build(&module, function, &addresses).map_err(LoadError::Ptx)?;
        loaded
            .kernels
            .insert(function.name.clone(), Arc::new(program));
    }

    Ok(loaded)
}

/// A variable's initial bytes: its initialiser, padded with zeros.
fn image(variable: &Variable, addresses: &HashMap<String, u64>) -> Result<Vec<u8>, Mistake> {
    let size = variable.element.bytes();
    let mut bytes = Vec::with_capacity(variable.bytes);
    for value in &variable.values {
        let bits = match value {
            Value::Bits(bits) => *bits,
            Value::Address(name, offset) => match addresses.get(name) {
                Some(address) => address.wrapping_add(*offset as u64),
                None => {
                    return Err(Mistake {
                        line: variable.line,
                        what: format!("{name} has no address"),
                    });
                }
            },
        };
        bytes.extend_from_slice(&bits.to_le_bytes()[..size]);
    }

    if bytes.len() > variable.bytes {
        let what = format!("{} has more values than room", variable.name);
        return Err(Mistake {
            line: variable.line,
            what,
        });
    }

    bytes.resize(variable.bytes, 0);
    Ok(bytes)
}
