//! Captures of stream operations into graphs, and the replay of graphs.

use std::cell::Cell;
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use super::device::Device;
use super::op::{HostFunction, Op, run};
use super::queue::{Random, in_host_function};
use super::stream::{Part, Stream};
use crate::error::{Failure, Outcome};
use stand_in_shared::{Handles, lock};

/// The threads whose potentially unsafe calls a capture forbids (`CUstreamCaptureMode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Global,
    ThreadLocal,
    Relaxed,
}

impl Mode {
    /// The mode with CUDA's number.
    pub(crate) fn of(number: u32) -> Outcome<Self> {
        [Self::Global, Self::ThreadLocal, Self::Relaxed]
            .get(number as usize)
            .copied()
            .ok_or(Failure::InvalidValue)
    }
}

#[derive(Clone)]
struct Node {
    op: Op,
    after: Vec<usize>,
}

/// A callback of a graph, like CUDA's user objects. It runs after the graph and its executables are
/// destroyed and their last launch has run.
pub(crate) struct Tied {
    pub(crate) gone: HostFunction,
    pub(crate) data: usize,
}

impl Drop for Tied {
    fn drop(&mut self) {
        // SAFETY: the caller of `standInTieToCapture` guarantees that any thread may make this
        // call, once.
        in_host_function(|| unsafe { (self.gone)(self.data as *mut libc::c_void) });
    }
}

#[derive(Default)]
struct State {
    nodes: Vec<Node>,
    tied: Vec<Arc<Tied>>,
    /// The streams in the capture, the origin first.
    streams: Vec<Arc<Stream>>,
    invalid: bool,
}

/// An active capture.
pub(crate) struct Capture {
    mode: Mode,
    thread: ThreadId,
    origin: usize,
    state: Mutex<State>,
}

static RUNNING: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());

thread_local! {
    /// The captures that forbid calls of this thread.
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// Sets this thread's mode, and returns the one before.
pub(crate) fn exchange_mode(mode: Mode) -> Mode {
    MODE.replace(mode)
}

/// Checks for potentially unsafe calls, such as allocations and queries, which may synchronise
/// implicitly: if an active capture forbids them, invalidates the capture and returns an error.
pub(crate) fn forbid_while_capturing() -> Outcome {
    let thread = std::thread::current().id();
    let running = lock(&RUNNING);
    let mut forbidden = Ok(());
    for capture in running.iter() {
        let ours = capture.thread == thread;
        let forbids = match MODE.get() {
            Mode::Global => {
                capture.mode == Mode::Global || (capture.mode == Mode::ThreadLocal && ours)
            }
            Mode::ThreadLocal => capture.mode != Mode::Relaxed && ours,
            Mode::Relaxed => false,
        };
        if forbids {
            capture.invalidate();
            forbidden = Err(Failure::CaptureUnsupported);
        }
    }
    forbidden
}

impl Capture {
    /// Starts capturing the stream's operations.
    pub(crate) fn begin(stream: &Arc<Stream>, mode: Mode) -> Outcome {
        if stream.part().is_some() {
            return Err(Failure::Unknown);
        }
        let state = State {
            streams: vec![stream.clone()],
            ..State::default()
        };
        let thread = std::thread::current().id();
        let capture = Arc::new(Self {
            mode,
            thread,
            origin: stream.number,
            state: Mutex::new(state),
        });
        lock(&RUNNING).push(capture.clone());
        stream.set_part(Some(Part {
            capture,
            after: Vec::new(),
        }));
        Ok(())
    }

    /// Ends the capture that began in `stream`. All forked streams must have joined it.
    pub(crate) fn end(stream: &Arc<Stream>) -> Outcome<Graph> {
        let Part { capture, after } = stream.part().ok_or(Failure::Unknown)?;
        if capture.origin != stream.number {
            return Err(Failure::CaptureUnmatched);
        }
        lock(&RUNNING).retain(|other| !Arc::ptr_eq(other, &capture));
        // Lock order: a stream's lock before its capture's. So the capture's lock is not held here.
        let streams = std::mem::take(&mut lock(&capture.state).streams);
        let mut ends = Vec::new();

        for taking_part in streams {
            ends.extend(
                taking_part
                    .part()
                    .map(|part| part.after)
                    .unwrap_or_default(),
            );
            taking_part.set_part(None);
        }

        let mut state = lock(&capture.state);
        let tied = std::mem::take(&mut state.tied);
        if state.invalid {
            return Err(Failure::CaptureInvalidated);
        }
        let mut joined = vec![false; state.nodes.len()];
        let mut open = after;

        while let Some(node) = open.pop() {
            if !std::mem::replace(&mut joined[node], true) {
                open.extend(&state.nodes[node].after);
            }
        }

        if ends.iter().any(|&node| !joined[node]) {
            return Err(Failure::CaptureUnjoined);
        }
        Ok(Graph {
            nodes: std::mem::take(&mut state.nodes),
            _tied: tied,
        })
    }

    /// Attaches `tied` to the captured graph.
    pub(crate) fn tie(&self, tied: Tied) {
        lock(&self.state).tied.push(Arc::new(tied));
    }

    pub(crate) fn add(&self, op: Op, after: Vec<usize>) -> Outcome<usize> {
        let mut state = lock(&self.state);
        if state.invalid {
            return Err(Failure::CaptureInvalidated);
        }
        state.nodes.push(Node { op, after });
        Ok(state.nodes.len() - 1)
    }

    /// Adds a stream to the capture.
    pub(crate) fn join(&self, stream: Arc<Stream>) -> Outcome {
        let mut state = lock(&self.state);
        if state.invalid || state.streams.is_empty() {
            return Err(Failure::CaptureInvalidated);
        }
        state.streams.push(stream);
        Ok(())
    }

    pub(crate) fn invalidate(&self) {
        lock(&self.state).invalid = true;
    }

    pub(crate) fn is_valid(&self) -> bool {
        !lock(&self.state).invalid
    }
}

/// Operations and their dependencies.
#[derive(Clone)]
pub(crate) struct Graph {
    nodes: Vec<Node>,
    _tied: Vec<Arc<Tied>>,
}

pub(crate) static GRAPHS: Handles<Graph> = Handles::new();
pub(crate) static EXECUTABLES: Handles<Graph> = Handles::new();

impl Graph {
    pub(crate) fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Runs all nodes in dependency order; with a seed, in a random order that respects
    /// dependencies.
    pub(crate) fn run(&self, device: &'static Device, random: &mut Random) {
        self.order(random)
            .into_iter()
            .for_each(|node| run(&self.nodes[node].op, device, random));
    }

    fn order(&self, random: &mut Random) -> Vec<usize> {
        let mut missing: Vec<usize> = self.nodes.iter().map(|node| node.after.len()).collect();
        let mut ready: Vec<usize> = (0..missing.len())
            .filter(|&node| missing[node] == 0)
            .collect();
        let mut order = Vec::with_capacity(missing.len());
        while !ready.is_empty() {
            let node = ready.remove(random.below(ready.len()));
            order.push(node);
            for (later, left) in missing.iter_mut().enumerate() {
                if self.nodes[later].after.contains(&node) {
                    *left -= 1;
                    if *left == 0 {
                        ready.push(later);
                    }
                }
            }
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::event::Ticket;

    #[test]
    fn a_graphs_order_keeps_dependencies_and_is_otherwise_free() {
        let node = |after: &[usize]| Node {
            op: Op::Record(Arc::new(Ticket::default())),
            after: after.to_vec(),
        };
        let nodes = vec![node(&[]), node(&[0]), node(&[0]), node(&[1, 2])];
        let graph = Graph {
            nodes,
            _tied: Vec::new(),
        };
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..32 {
            seen.insert(graph.order(&mut Random::seeded(seed)));
        }
        assert_eq!(Vec::from_iter(seen), [vec![0, 1, 2, 3], vec![0, 2, 1, 3]]);
    }
}
