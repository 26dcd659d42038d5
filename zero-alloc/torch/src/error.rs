//! Errors, and the boundary that no panic crosses.

use std::cell::RefCell;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

use zero_alloc::AllocError;
use zero_alloc::device::DeviceError;

use crate::fork;

/// The reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArenaError {
    #[error("the size {0} is negative")]
    NegativeSize(isize),
    #[error("there is no device {0}")]
    NoDevice(i32),
    #[error("device {0} has allocated nothing yet")]
    NoArena(i32),
    #[error("{0:#x} is not a live block of the arena: it was freed before, or allocated elsewhere")]
    NotABlock(usize),
    #[error(
        "device {device} has an arena already: set its budget before the first allocation (the budget is {budget_bytes} \
         bytes)"
    )]
    ArenaExists { device: i32, budget_bytes: usize },
    #[error("the fraction {0} is not between 0 and 1")]
    NoFraction(f64),
    #[error("{cause}; {held}")]
    OutOfMemory {
        cause: Box<AllocError>,
        held: String,
    },
    #[error(
        "this process was forked from one that uses the arena, and CUDA does not work in it: start it in another way \
         (multiprocessing_context=\"spawn\" of a DataLoader), or keep CUDA tensors out of it"
    )]
    Forked,
    #[error("a null pointer, or a string that is not UTF-8")]
    BadArgument,
    #[error("{path}: {cause}")]
    File { path: String, cause: std::io::Error },
    #[error(transparent)]
    Alloc(Box<AllocError>),
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl From<AllocError> for ArenaError {
    fn from(error: AllocError) -> Self {
        Self::Alloc(Box::new(error))
    }
}

thread_local! {
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Calls `f` with the text of this thread's last error, empty if no call failed.
pub(crate) fn with_last_error<R>(f: impl FnOnce(&str) -> R) -> Option<R> {
    LAST.try_with(|last| f(&last.borrow())).ok()
}

/// Runs the body of the C function `call`. An error or a panic is printed and kept as the last
/// error, and `failed` returned. In a forked child the body does not run.
pub(crate) fn guard<R>(
    call: &'static str,
    failed: R,
    body: impl FnOnce() -> Result<R, ArenaError>,
) -> R {
    if fork::is_child() {
        let text = keep(call, &ArenaError::Forked.to_string());
        fork::print(&text);
        return failed;
    }

    // The arena's locks are not poisoned by a panic, and its invariants hold whenever they are free.
    let text = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(result)) => return result,
        Ok(Err(error)) => error.to_string(),
        Err(panic) => format!("internal error: {}", text_of(&*panic)),
    };

    let text = keep(call, &text);
    // A closed stderr must not panic.
    let _ = writeln!(std::io::stderr(), "{text}");
    failed
}

/// As [`guard`], for calls that free or end something: in a forked child they do nothing, since it
/// is the parent's.
pub(crate) fn guard_end(call: &'static str, body: impl FnOnce() -> Result<(), ArenaError>) {
    if !fork::is_child() {
        guard(call, (), body);
    }
}

/// Keeps the text of an error of `call` as the thread's last one, and returns it.
fn keep(call: &str, error: &str) -> String {
    let text = format!("zero-alloc-torch: {call}: {error}");
    // A thread that is ending keeps no text.
    let _ = LAST.try_with(|last| last.borrow_mut().clone_from(&text));
    text
}

fn text_of(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("a panic without text")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_become_errors() {
        let failed = guard("call", -1, || panic!("number {}", 7));
        let text = with_last_error(str::to_owned);
        let expected = "zero-alloc-torch: call: internal error: number 7";
        assert_eq!((failed, text.as_deref()), (-1, Some(expected)));
    }
}
