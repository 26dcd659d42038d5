//! Calls without Python's lock, whose waits Ctrl-C ends.

use std::cell::RefCell;
use std::rc::Rc;

use pyo3::prelude::*;
use zero_alloc::with_interrupt;

use crate::connect::Comm;

/// Calls `call` without Python's lock. While it waits, handlers of signals run, about once a second.
/// If one raises, as that of SIGINT does, `comm` is aborted with it, which ends the waits on all
/// ranks; without `comm`, the limit of the wait passes at once. Then it is returned.
pub(crate) fn detached<R: Send>(
    py: Python<'_>,
    comm: Option<Comm>,
    call: impl FnOnce() -> PyResult<R> + Send,
) -> PyResult<R> {
    if comm.as_ref().is_some_and(|comm| comm.world_size() == 1) {
        // Nothing to wait for.
        return py.detach(call);
    }
    py.detach(move || {
        let raised = Rc::new(RefCell::new(None));
        let seen = Rc::clone(&raised);
        let interrupt = move || {
            if seen.borrow().is_some() {
                return comm.is_none();
            }
            let Some(Err(error)) = Python::try_attach(|py| py.check_signals()) else {
                return false;
            };
            let reason = error.to_string().trim_end_matches(": ").to_owned();
            seen.replace(Some(error));
            match comm.clone() {
                // Not on this thread: the wait may hold what an abort needs.
                Some(comm) => drop(std::thread::spawn(move || comm.abort(&reason))),
                None => return true,
            }
            false
        };
        let result = with_interrupt(interrupt, call);
        match raised.take() {
            Some(error) => Err(error),
            None => result,
        }
    })
}
