//! A loaded module: decoded kernels.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use super::build::build;
use super::lexer::Mistake;
use super::parser::parse;
use crate::exec::program::Program;

/// The decoded kernels of a module, by name.
pub(crate) type Kernels = HashMap<String, Arc<Program>>;

/// The kernels of each text: decoding takes longer than most tests run them.
static DECODED: LazyLock<Mutex<HashMap<String, Kernels>>> = LazyLock::new(Mutex::default);

/// Decodes PTX.
pub(crate) fn load(text: &str) -> Result<Kernels, Mistake> {
    let decoded = || DECODED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(kernels) = decoded().get(text).cloned() {
        return Ok(kernels);
    }
    let module = parse(text)?;
    let mut kernels = Kernels::new();
    for function in &module.functions {
        kernels.insert(function.name.clone(), Arc::new(build(&module, function)?));
    }
    decoded().insert(text.to_owned(), kernels.clone());
    Ok(kernels)
}
