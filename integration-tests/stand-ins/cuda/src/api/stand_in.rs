//! Functions for the other stand-ins and for tests, which the driver does not have.

use super::{Text, guard};
use crate::counts::Work;
use crate::driver::device::current;
use crate::driver::op::{HostFunction, Op};
use crate::driver::stream::stream;
use crate::settings::settings;

/// Whether the dry mode is on: 1 or 0.
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
pub extern "C" fn standInIsDry() -> u32 {
    u32::from(settings().dry)
}

/// Makes the current device accept the default streams from now on, for tests of memory that a
/// framework uses on them.
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
pub extern "C" fn standInAcceptDefaultStreams() -> u32 {
    guard("standInAcceptDefaultStreams", || {
        current().map(|device| device.accept_default_streams())
    })
}

/// Counts one call of a library when the stream gets there.
///
/// # Safety
/// `kind` and `name` are null or strings.
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standInTally(
    on: usize,
    kind: Text,
    name: Text,
    loaded: u64,
    stored: u64,
    operations: u64,
) -> u32 {
    guard("standInTally", || {
        let kind = kind.get()?.into();
        let name = name.get()?.into();
        let work = Work {
            loaded,
            stored,
            operations,
        };
        if settings().counts.is_none() {
            Ok(())
        } else {
            stream(on)?.submit(Op::Tally { kind, name, work })
        }
    })
}

/// `cuLaunchHostFunc` for the work of a stand-in, which is not counted as a host function.
///
/// # Safety
/// `function` is null or may be called with `data`.
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standInLaunch(
    on: usize,
    function: Option<HostFunction>,
    data: usize,
) -> u32 {
    guard("standInLaunch", || {
        let function = function.ok_or(crate::error::Failure::InvalidValue)?;
        stream(on)?.submit(Op::Host {
            function,
            data,
            counted: false,
        })
    })
}
