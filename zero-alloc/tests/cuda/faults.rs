//! Faults of the device. A fault is final for the process's context, so the test runs itself again
//! in a child process.

use std::process::Command;

use zero_alloc::Pool;
use zero_alloc::cuda::CudaDevice;
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, Event, Memory, Stream};

use crate::kernels::{launch, scale_add};
use crate::{LIMIT, floats, slice};

const IN_CHILD: &str = "ZERO_ALLOC_TEST_FAULT";

/// Whether this process is a child of [`run_in_child`].
pub(crate) fn is_child() -> bool {
    std::env::var_os(IN_CHILD).is_some()
}

/// Runs `test` of this program in a child process, with [`IN_CHILD`] and `variables` set.
pub(crate) fn run_in_child(test: &str, variables: &[(&str, &str)]) {
    let program = std::env::current_exe().expect("this program");
    let run = Command::new(program)
        .args(["--ignored", "--exact", test, "--nocapture"])
        .env(IN_CHILD, "1")
        .envs(variables.iter().copied())
        .output()
        .expect("it starts");
    let said =
        String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_kernel_fault_is_sticky() {
    if !is_child() {
        run_in_child("faults::cuda_kernel_fault_is_sticky", &[]);
        return;
    }

    // Its own, so that its drop is the last.
    let device = CudaDevice::open(0).expect("a CUDA device");
    let (a, b) = (
        device.create_stream("a").expect("a stream"),
        device.create_stream("b").expect("a stream"),
    );
    let pool = Pool::new(device.clone(), 8 << 20);
    let function = scale_add(&device);
    let x = floats(&pool, &a, 10, 1.0);
    let before = a.record().expect("recorded");
    before.synchronize(LIMIT).expect("reached");

    // SAFETY: the address is invalid on purpose, and only the device accesses it.
    let nowhere = unsafe {
        AnySlice::from_raw_parts(
            std::ptr::without_provenance_mut(1 << 60),
            10,
            DType::F32,
            device.id(),
        )
    };

    launch(&function, &a, nowhere, 1.0, 0.0).expect("enqueued");
    // The fault may occur before the event is recorded, or after it.
    let after = a.record();
    let error = after.as_ref().map_or_else(Clone::clone, |e| {
        e.synchronize(LIMIT).expect_err("it faulted")
    });
    let DeviceError::Operation { stream, cause, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(stream, "a");
    assert!(cause.to_string().contains("CUDA_ERROR_"), "{cause}");
    assert_eq!(a.synchronize(LIMIT), Err(error.clone()));
    assert!(
        after
            .as_ref()
            .is_ok_and(|e| e.is_done() == Err(error.clone()))
            || after.is_err()
    );
    // An event that was reached before stays reached.
    assert_eq!(before.is_done(), Ok(true));
    // The device is lost for every stream of the process.
    let lost = device
        .upload(&b, &[0; 40], slice(&x), LIMIT)
        .expect_err("the context is lost");
    assert!(lost.to_string().contains("CUDA_ERROR_"), "{lost}");
    // Dropping everything neither hangs nor crashes.
    drop((x, pool, before, after, a, b, function, device));
}
