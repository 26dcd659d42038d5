//! The thread that runs the host functions of all streams, in the mode with only one.

use std::sync::LazyLock;
use std::sync::mpsc::{Sender, channel};

use crate::settings::settings;

type Call = Box<dyn FnOnce() + Send>;

/// The calls to run, in order.
static CALLS: LazyLock<Sender<Call>> = LazyLock::new(|| {
    let (calls, run) = channel::<Call>();
    std::thread::spawn(move || run.into_iter().for_each(|call| call()));
    calls
});

/// Calls a host function and waits for its end: on this thread, which is its stream's, or on the
/// one of all streams.
pub(crate) fn run(function: impl FnOnce() + Send + 'static) {
    if !settings().one_host_thread {
        return function();
    }
    let (ended, end) = channel();
    let call = move || {
        function();
        let _ = ended.send(());
    };
    // The thread lives as long as the process; if it panicked, its message is on stderr.
    let _ = CALLS.send(Box::new(call));
    let _ = end.recv();
}
