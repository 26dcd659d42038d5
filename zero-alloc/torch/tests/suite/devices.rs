//! Several devices.

use zero_alloc::cuda::{CudaDevice, interop};
use zero_alloc::device::Device;
use zero_alloc_torch::c_api::*;

use crate::{last_error, open, run_alone};

/// The number of the stand-in's devices.
const DEVICES: &str = "ZERO_STANDIN_DEVICES";

/// The context that is current on this thread.
fn current() -> usize {
    // SAFETY: the driver is loaded already, and stays.
    let driver = unsafe { libloading::Library::new("libcuda.so.1") }.expect("a driver");
    // SAFETY: the driver's function has this type.
    let get = unsafe { driver.get::<unsafe extern "C" fn(*mut usize) -> i32>(b"cuCtxGetCurrent") };
    let mut context = 0;
    // SAFETY: writes one handle.
    let code = unsafe { get.expect("found")(&raw mut context) };
    assert_eq!(code, 0);
    context
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_current_device_is_kept() {
    if CudaDevice::count().expect("a driver") == 1 {
        if open().is_stand_in() {
            let output = run_alone("devices::cuda_torch_current_device_is_kept", DEVICES, "2");
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(
                output.status.success() && text.contains("1 passed"),
                "{output:?}"
            );
        } else {
            println!("SKIPPED: there is one device");
        }
        return;
    }

    let [first, second] = [0, 1].map(|ordinal| CudaDevice::open(ordinal).expect("a device"));
    let stream = second.create_stream("second").expect("a stream");
    let raw = interop::raw_stream(&stream);
    first.bind().expect("current");
    let before = current();
    assert_eq!(before, interop::raw_context(&first).addr());

    // SAFETY: the stream lives.
    let block = unsafe { zero_torch_malloc(1000, 1, raw) };
    assert!(!block.is_null(), "{}", last_error());
    assert_eq!(current(), before);
    // SAFETY: as above.
    unsafe { zero_torch_record_stream(block, raw) };
    // SAFETY: nothing uses the block.
    unsafe { zero_torch_free(block, 1000, 1, raw) };
    zero_torch_empty_cache();
    assert_eq!((current(), last_error()), (before, String::new()));
}
