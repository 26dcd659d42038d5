//! Streams and host functions.

use super::context::{GREATEST_PRIORITY, LEAST_PRIORITY};
use super::{Out, driver};
use crate::driver::capture::forbid_while_capturing;
use crate::driver::device::current;
use crate::driver::event::EVENTS;
use crate::driver::op::{HostFunction, Op};
use crate::driver::space;
use crate::driver::stream::{create, destroy, stream};
use crate::error::{Failure, Outcome, say};

/// `CU_STREAM_NON_BLOCKING`. A stream without it synchronises with the default stream, which the
/// stand-in rejects.
const NON_BLOCKING: u32 = 1;

fn make(found: &Out<usize>, flags: u32, priority: i32) -> Outcome {
    if flags & !NON_BLOCKING != 0 {
        return Err(Failure::InvalidValue);
    }
    found.put(create(current()?, flags, priority)?)
}

/// `CU_STREAM_WAIT_VALUE_GEQ` and `CU_STREAM_WAIT_VALUE_EQ`.
const GEQ: u32 = 0;
const EQ: u32 = 1;

/// Values are aligned, and in memory that the device can access.
fn check_value(address: u64) -> Outcome {
    if !address.is_multiple_of(8) || !space::now().holds(address, 8) {
        say!("a 64-bit value at {address:#x}, which is not aligned or not live memory");
        return Err(Failure::InvalidValue);
    }
    Ok(())
}

driver! {
    cuStreamCreate(found: Out<usize>, flags: u32) {
        make(&found, flags, 0)
    }

    cuStreamCreateWithPriority(found: Out<usize>, flags: u32, priority: i32) {
        make(&found, flags, priority.clamp(GREATEST_PRIORITY, LEAST_PRIORITY))
    }

    cuStreamDestroy_v2(on: usize) {
        current()?;
        destroy(on)
    }

    cuStreamGetCtx(on: usize, context: Out<usize>) {
        context.put(stream(on)?.device.context)
    }

    cuStreamGetId(on: usize, id: Out<u64>) {
        let stream = stream(on)?;
        if stream.part().is_some() {
            return Err(Failure::CaptureUnsupported);
        }
        id.put(stream.number as u64)
    }

    cuStreamGetFlags(on: usize, flags: Out<u32>) {
        flags.put(stream(on)?.flags)
    }

    cuStreamGetPriority(on: usize, priority: Out<i32>) {
        priority.put(stream(on)?.priority)
    }

    cuStreamWaitEvent(on: usize, event: usize, flags: u32) {
        if flags != 0 {
            return Err(Failure::NotSupported);
        }
        current()?;
        stream(on)?.wait_for(&*EVENTS.get(event)?)
    }

    cuStreamQuery(on: usize) {
        current()?;
        forbid_while_capturing()?;
        stream(on)?.query()
    }

    cuStreamSynchronize(on: usize) {
        current()?;
        stream(on)?.synchronize()
    }

    cuStreamWaitValue64_v2(on: usize, address: u64, value: u64, flags: u32) {
        let on = stream(on)?;
        current()?;
        check_value(address)?;
        match flags {
            GEQ | EQ => on.submit(Op::WaitValue { at: address, value, or_more: flags == GEQ }),
            _ => Err(Failure::NotSupported),
        }
    }

    cuStreamWriteValue64_v2(on: usize, address: u64, value: u64, flags: u32) {
        let on = stream(on)?;
        current()?;
        check_value(address)?;
        if flags != 0 {
            return Err(Failure::NotSupported);
        }
        on.submit(Op::WriteValue { at: address, value })
    }

    cuLaunchHostFunc(on: usize, function: Option<HostFunction>, data: usize) {
        let on = stream(on)?;
        current()?;
        let Some(function) = function else {
            say!("cuLaunchHostFunc without a function");
            return Err(Failure::InvalidValue);
        };
        on.submit(Op::Host { function, data, counted: true })
    }
}
