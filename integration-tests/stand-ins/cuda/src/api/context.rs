//! Primary contexts, and the current context of a thread.

use super::{Out, driver};
use crate::driver::device::{self, Device, current, current_even_failed, of_context, with_stack};
use crate::driver::memory;
use crate::driver::queue::wait_for_all;
use crate::driver::stream::{destroy_all, of_device};
use crate::error::{Failure, Outcome};

fn reset(device: &'static Device) {
    destroy_all(device);
    memory::free_all(device);
    device.forget_failure();
}

driver! {
    cuDevicePrimaryCtxRetain(context: Out<usize>, ordinal: i32) {
        let device = device::device(ordinal)?;
        context.put(device.context)?;
        device.retain();
        Ok(())
    }

    cuDevicePrimaryCtxRelease_v2(ordinal: i32) {
        let device = device::device(ordinal)?;
        if device.release()? {
            reset(device);
        }
        Ok(())
    }

    cuDevicePrimaryCtxReset_v2(ordinal: i32) {
        reset(device::device(ordinal)?);
        Ok(())
    }

    cuDevicePrimaryCtxGetState(ordinal: i32, flags: Out<u32>, active: Out<i32>) {
        let device = device::device(ordinal)?;
        flags.put(0)?;
        active.put(i32::from(device.is_retained()))
    }

    cuDevicePrimaryCtxSetFlags_v2(ordinal: i32, _flags: u32) {
        device::device(ordinal).map(drop)
    }

    cuCtxGetCurrent(context: Out<usize>) {
        device::all()?;
        context.put(with_stack(|stack| stack.last().copied().unwrap_or(0)))
    }

    cuCtxSetCurrent(context: usize) {
        if context != 0 {
            of_context(context)?;
        }
        with_stack(|stack| {
            stack.pop();
            if context != 0 {
                stack.push(context);
            }
        });
        Ok(())
    }

    cuCtxPushCurrent_v2(context: usize) {
        of_context(context)?;
        with_stack(|stack| stack.push(context));
        Ok(())
    }

    cuCtxPopCurrent_v2(context: Out<usize>) {
        device::all()?;
        let popped = with_stack(Vec::pop).ok_or(Failure::InvalidContext)?;
        context.put_if_wanted(popped);
        Ok(())
    }

    cuCtxGetDevice(ordinal: Out<i32>) {
        ordinal.put(current_even_failed()?.ordinal as i32)
    }

    cuCtxSynchronize() {
        synchronize(current()?)
    }

    cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        current()?;
        least.put_if_wanted(LEAST_PRIORITY);
        greatest.put_if_wanted(GREATEST_PRIORITY);
        Ok(())
    }
}

/// A lower number is a higher priority. The stand-in ignores priorities.
pub(super) const LEAST_PRIORITY: i32 = 0;
pub(super) const GREATEST_PRIORITY: i32 = -5;

/// Waits for all streams, also for what destroyed ones still run.
fn synchronize(device: &'static Device) -> Outcome {
    of_device(device)
        .into_iter()
        .try_for_each(|stream| stream.synchronize())?;
    wait_for_all(device.ordinal);
    device.check()
}
