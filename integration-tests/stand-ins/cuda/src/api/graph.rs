//! Captures and graphs.

use std::sync::Arc;

use super::{Out, driver, guard};
use crate::driver::capture::{Capture, EXECUTABLES, GRAPHS, Mode, Tied, exchange_mode};
use crate::driver::device::current;
use crate::driver::op::{HostFunction, Op};
use crate::driver::stream::stream;
use crate::error::Failure;
use stand_in_shared::fresh_number;

driver! {
    cuStreamBeginCapture_v2(on: usize, mode: u32) {
        current()?;
        Capture::begin(&stream(on)?, Mode::of(mode)?)
    }

    cuThreadExchangeStreamCaptureMode(mode: Out<u32>) {
        let before = exchange_mode(Mode::of(mode.get()?)?);
        mode.put(before as u32)
    }

    cuStreamEndCapture(on: usize, graph: Out<usize>) {
        current()?;
        let captured = Capture::end(&stream(on)?);
        if captured.is_err() {
            graph.put_if_wanted(0);
        }
        graph.put(GRAPHS.insert(fresh_number(), Arc::new(captured?)))
    }

    cuStreamIsCapturing(on: usize, status: Out<u32>) {
        current()?;
        let part = stream(on)?.part();
        status.put(part.map_or(0, |part| if part.capture.is_valid() { 1 } else { 2 }))
    }

    cuGraphGetNodes(graph: usize, nodes: usize, count: Out<usize>) {
        if nodes != 0 {
            return Err(Failure::NotSupported);
        }
        count.put(GRAPHS.get(graph)?.nodes())
    }

    cuGraphInstantiateWithFlags(executable: Out<usize>, graph: usize, _flags: u64) {
        current()?;
        let graph = GRAPHS.get(graph)?;
        executable.put(EXECUTABLES.insert(fresh_number(), graph))
    }

    cuGraphUpload(executable: usize, on: usize) {
        stream(on)?;
        EXECUTABLES.get(executable)?;
        Ok(())
    }

    cuGraphLaunch(executable: usize, on: usize) {
        let on = stream(on)?;
        current()?;
        on.submit(Op::Graph(EXECUTABLES.get(executable)?))
    }

    cuGraphExecDestroy(executable: usize) {
        EXECUTABLES.remove(executable)?;
        Ok(())
    }

    cuGraphDestroy(graph: usize) {
        GRAPHS.remove(graph)?;
        Ok(())
    }
}

/// Registers `gone(data)` to be called when the graph of the stream's current capture and all its
/// executables are destroyed. It replaces CUDA's user objects, which a library creates and attaches
/// to a graph.
///
/// # Safety
/// Any thread may call `gone(data)`, once.
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standInTieToCapture(on: usize, gone: HostFunction, data: usize) -> u32 {
    guard("standInTieToCapture", || {
        stream(on)?
            .part()
            .ok_or(Failure::InvalidValue)?
            .capture
            .tie(Tied { gone, data });
        Ok(())
    })
}
