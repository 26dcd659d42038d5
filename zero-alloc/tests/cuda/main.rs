//! Tests of features that only CUDA has: modules, graphs, pinned memory, foreign handles, device
//! times, leaks. Tests of the device contract are in `suite/conformance`.
//!
//! They need a device (`cargo gpu-test cuda`) or the stand-in driver of
//! `integration-tests/stand-ins`.

mod faults;
mod graphs;
mod handles;
mod host_waits;
mod kernels;
mod leaks;
mod limits;
mod pinned;
mod timelines;

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DType, Device};
use zero_alloc::{Block, Pool, Purpose};

const LIMIT: Duration = Duration::from_secs(60);

/// Drivers round sizes and keep some memory for themselves. Less than what a test would leak.
const SLACK_BYTES: usize = 4 << 20;

/// The first GPU, one for all tests: each new context takes a third of a second on a GPU.
fn open() -> CudaDevice {
    static DEVICE: LazyLock<CudaDevice> =
        LazyLock::new(|| CudaDevice::open(0).expect("a CUDA device"));
    DEVICE.clone()
}

/// The first GPU with a pool, and streams with these names.
fn rig<const N: usize>(names: [&str; N]) -> (CudaDevice, Pool<CudaDevice>, [CudaStream; N]) {
    let device = open();
    let pool = Pool::new(device.clone(), 8 << 20);
    let streams = names.map(|name| device.create_stream(name).expect("a stream"));
    (device, pool, streams)
}

/// Waits until `bytes` of the device are free again, or a few less; otherwise fails. Memory may be
/// freed late, by another thread that waits for the streams of a dropped pool, and by the driver.
fn assert_free(device: &CudaDevice, bytes: usize) {
    let start = Instant::now();
    let mut free = 0;
    while start.elapsed() < LIMIT {
        free = device.memory_bytes().expect("a number").0;
        if free + SLACK_BYTES >= bytes {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{} bytes are gone: {device:?}", bytes - free);
}

/// A block of `len` floats, all `value`.
fn floats(
    pool: &Pool<CudaDevice>,
    stream: &CudaStream,
    len: usize,
    value: f32,
) -> Block<CudaDevice> {
    let block = pool
        .allocate(len, DType::F32, Purpose::Params, stream)
        .expect("room");
    let bytes: Vec<u8> = std::iter::repeat_n(value.to_le_bytes(), len)
        .flatten()
        .collect();
    pool.device()
        .upload(stream, &bytes, slice(&block), LIMIT)
        .expect("uploaded");
    block
}

fn slice(block: &Block<CudaDevice>) -> AnySlice {
    // SAFETY: the tests keep their blocks until all uses have run, and order them by streams and
    // events.
    unsafe { block.slice() }
}

/// The floats of a block.
fn read(device: &CudaDevice, stream: &CudaStream, block: &Block<CudaDevice>) -> Vec<f32> {
    let mut bytes = vec![0; block.len() * 4];
    device
        .download(stream, slice(block), &mut bytes, LIMIT)
        .expect("downloaded");
    bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect()
}

#[test]
fn missing_driver_is_an_error() {
    // SAFETY: loading runs the library's initialisers; the name is the driver's.
    let driver = unsafe { libloading::Library::new("libcuda.so.1") };
    match (CudaDevice::count(), CudaDevice::open(0)) {
        (Err(count), Err(open)) if driver.is_err() => {
            assert_eq!(count, open);
            let text = open.to_string();
            assert!(
                text.starts_with("no driver found") && text.contains("libcuda.so.1"),
                "{text}"
            );
        }
        (count, open) => assert!(driver.is_ok(), "{count:?} {open:?}"),
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_device_has_properties() {
    let device = open();
    assert!(CudaDevice::count().expect("a driver") >= 1);
    assert_eq!(device.ordinal(), 0);
    assert!(!device.name().is_empty() && format!("{device:?}").contains(device.name()));
    assert!(device.arch().0 >= 5);
    let (free, total) = device.memory_bytes().expect("a number");
    assert!(0 < free && free <= total);
    device.bind().expect("current");
    let count = CudaDevice::count().expect("a driver");
    let error = CudaDevice::open(count).expect_err("there is one fewer");
    assert!(
        error.to_string().contains("CUDA_ERROR_INVALID_DEVICE"),
        "{error}"
    );
}
