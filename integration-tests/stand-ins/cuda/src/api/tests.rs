//! The guarantees and errors of the driver API, tested on the stand-in.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::*;
use crate::error::Failure;
use crate::settings::DEFAULT_MEMORY_BYTES;

/// Calls a driver function and returns its code.
macro_rules! code {
    ($call:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: pointers are to live variables; the functions check handles and addresses
        // themselves.
        unsafe { $call($($arg),*) }
    }};
}

/// Calls a driver function, which must succeed.
macro_rules! ok {
    ($call:ident($($arg:expr),* $(,)?)) => {
        assert_eq!(code!($call($($arg),*)), 0, stringify!($call))
    };
}

/// Calls a driver function, which must fail with this code.
macro_rules! fails {
    ($failure:ident, $call:ident($($arg:expr),* $(,)?)) => {
        assert_eq!(code!($call($($arg),*)), Failure::$failure as u32, stringify!($call))
    };
}

/// Makes an unused device current on this thread.
pub(crate) fn own_device() -> i32 {
    static NEXT: AtomicI32 = AtomicI32::new(0);
    let ordinal = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut context = 0;
    ok!(cuInit(0));
    ok!(cuDevicePrimaryCtxRetain((&mut context).into(), ordinal));
    ok!(cuCtxSetCurrent(context));
    ordinal
}

pub(crate) fn new_stream() -> usize {
    let mut stream = 0;
    ok!(cuStreamCreate((&mut stream).into(), 1));
    stream
}

fn new_event() -> usize {
    let mut event = 0;
    ok!(cuEventCreate((&mut event).into(), 0));
    event
}

pub(crate) fn allocate(bytes: usize) -> u64 {
    let mut address = 0;
    ok!(cuMemAlloc_v2((&mut address).into(), bytes));
    address
}

pub(crate) fn upload(stream: usize, bytes: &[u8]) -> u64 {
    let address = allocate(bytes.len());
    ok!(cuMemcpyHtoDAsync_v2(
        address,
        bytes.as_ptr() as u64,
        bytes.len(),
        stream
    ));
    address
}

pub(crate) fn download(stream: usize, address: u64, bytes: usize) -> Vec<u8> {
    let mut held = vec![0u8; bytes];
    ok!(cuMemcpyDtoHAsync_v2(
        held.as_mut_ptr() as u64,
        address,
        bytes,
        stream
    ));
    held
}

#[test]
fn device_name_marks_a_stand_in() {
    let ordinal = own_device();
    let mut name = [0 as c_char; 64];
    let mut major = 0;
    let mut bytes = 0;
    ok!(cuDeviceGetName(name.as_mut_ptr(), 64, ordinal));
    // SAFETY: the call has written a zero-terminated string.
    let result = unsafe { CStr::from_ptr(name.as_ptr()) };
    assert_eq!(result, c"stand-in (PTX on the host)");
    ok!(cuDeviceGetAttribute((&mut major).into(), 75, ordinal));
    ok!(cuDeviceTotalMem_v2((&mut bytes).into(), ordinal));
    assert_eq!((major, bytes), (99, DEFAULT_MEMORY_BYTES as usize));
    fails!(InvalidDevice, cuDeviceGet((&mut major).into(), 4096));
    fails!(
        InvalidValue,
        cuDeviceGetAttribute((&mut major).into(), 4096, ordinal)
    );
}

#[test]
fn codes_have_names_and_functions_addresses() {
    let (mut text, mut found, mut status): (*const c_char, *const c_void, u32) =
        (std::ptr::null(), std::ptr::null(), 0);
    ok!(cuGetErrorName(700, (&mut text).into()));
    // SAFETY: the call returned a static string.
    let result = unsafe { CStr::from_ptr(text) };
    assert_eq!(result, c"CUDA_ERROR_ILLEGAL_ADDRESS");
    fails!(InvalidValue, cuGetErrorString(12345, (&mut text).into()));

    ok!(cuGetProcAddress_v2(
        c"cuMemAlloc".into(),
        (&mut found).into(),
        13000,
        0,
        (&mut status).into()
    ));

    assert_eq!(found, cuMemAlloc_v2 as *const c_void);
    fails!(
        NotFound,
        cuGetProcAddress_v2(
            c"cuNone".into(),
            (&mut found).into(),
            13000,
            0,
            (&mut status).into()
        )
    );

    assert!(found.is_null() && status == 1);
}

#[test]
fn default_stream_and_missing_context_are_refused() {
    ok!(cuInit(0));
    let mut address = 0;
    std::thread::spawn(move || fails!(InvalidContext, cuMemAlloc_v2((&mut address).into(), 64)))
        .join()
        .unwrap();
    own_device();
    let address = allocate(64);
    for default in [0, 1, 2] {
        fails!(InvalidHandle, cuMemsetD8Async(address, 0, 64, default));
        fails!(InvalidHandle, cuStreamSynchronize(default));
    }
}

#[test]
fn contexts_are_pushed_and_popped() {
    own_device();
    let mut first = 0;
    let mut now = 0;
    let mut popped = 0;
    let mut device = 0;
    ok!(cuCtxGetCurrent((&mut first).into()));
    own_device();
    ok!(cuCtxPushCurrent_v2(first));
    ok!(cuCtxGetDevice((&mut device).into()));
    ok!(cuCtxPopCurrent_v2((&mut popped).into()));
    ok!(cuCtxGetCurrent((&mut now).into()));
    assert!(popped == first && now != first);
    fails!(InvalidContext, cuCtxSetCurrent(12345));
}

#[test]
fn new_memory_is_ones_and_copies_round_trip() {
    own_device();
    let stream = new_stream();
    let bytes: Vec<u8> = (0..=255).collect();
    let address = upload(stream, &bytes);
    assert_eq!(download(stream, address, 256), bytes);
    let other = allocate(256);
    assert_eq!(download(stream, other, 256), [0xff; 256]);
    ok!(cuMemcpyDtoDAsync_v2(other, address, 256, stream));
    ok!(cuMemsetD32Async(other + 4, 0x0403_0201, 2, stream));
    ok!(cuMemsetD8Async(other + 20, 9, 3, stream));
    let got = download(stream, other, 24);
    assert_eq!(
        got,
        [
            0, 1, 2, 3, 1, 2, 3, 4, 1, 2, 3, 4, 12, 13, 14, 15, 16, 17, 18, 19, 9, 9, 9, 23
        ]
    );
    fails!(
        InvalidValue,
        cuMemcpyDtoDAsync_v2(address + 1, address, 16, stream)
    );
    fails!(InvalidValue, cuMemsetD32Async(address + 2, 0, 1, stream));
}

#[test]
fn memory_is_counted_and_runs_out() {
    own_device();
    let info = || {
        let mut free = 0;
        let mut total = 0;
        ok!(cuMemGetInfo_v2((&mut free).into(), (&mut total).into()));
        (free, total)
    };

    let (free, total) = info();
    assert_eq!(free, total);
    let bytes = total / 4 * 3;
    let address = allocate(bytes);
    let mut other = 0;
    assert_eq!(info().0, free - bytes);
    fails!(OutOfMemory, cuMemAlloc_v2((&mut other).into(), total / 2));
    fails!(InvalidValue, cuMemAlloc_v2((&mut other).into(), 0));
    ok!(cuMemFree_v2(address));
    assert_eq!(info().0, free);
    fails!(InvalidValue, cuMemFree_v2(address));
    // Freed addresses stay reserved for a while.
    assert!((0..20).all(|_| {
        let other = allocate(bytes);
        ok!(cuMemFree_v2(other));
        other != address
    }));
}

#[test]
fn late_copy_of_freed_memory_fails_the_context() {
    let ordinal = own_device();
    let stream = new_stream();
    let latch = Latch::default();
    let address = allocate(64);
    let other = allocate(64);
    fails!(
        InvalidValue,
        cuMemcpyDtoDAsync_v2(address + 32, other, 33, stream)
    );
    fails!(InvalidValue, cuMemcpyHtoDAsync_v2(address, 16, 8, stream));
    latch.block(stream);
    ok!(cuMemcpyDtoDAsync_v2(other, address, 64, stream));
    ok!(cuMemFree_v2(address));
    latch.open();
    fails!(IllegalAddress, cuStreamSynchronize(stream));
    let mut again = 0;
    fails!(IllegalAddress, cuMemAlloc_v2((&mut again).into(), 64));
    fails!(IllegalAddress, cuCtxSynchronize());
    ok!(cuDevicePrimaryCtxRelease_v2(ordinal));
    fails!(InvalidContext, cuCtxSynchronize());
    // A new context does not inherit the failure.
    let mut context = 0;
    let mut free = 0;
    let mut total = 0;
    ok!(cuDevicePrimaryCtxRetain((&mut context).into(), ordinal));
    ok!(cuCtxSynchronize());
    ok!(cuMemGetInfo_v2((&mut free).into(), (&mut total).into()));
    assert_eq!(free, total);
    fails!(InvalidHandle, cuStreamSynchronize(stream));
}

/// A host function that blocks a stream until the latch opens, for at most 60 s.
#[derive(Default)]
struct Latch {
    open: Box<AtomicBool>,
}

impl Latch {
    fn block(&self, stream: usize) {
        let data = std::ptr::from_ref::<AtomicBool>(&self.open) as usize;
        ok!(cuLaunchHostFunc(stream, Some(Self::wait), data));
    }

    fn open(&self) {
        self.open.store(true, Ordering::Release);
    }

    unsafe extern "C" fn wait(data: *mut c_void) {
        // SAFETY: the latch outlives the stream's work, which every test waits for.
        let open = unsafe { &*data.cast::<AtomicBool>() };
        let since = Instant::now();
        while !open.load(Ordering::Acquire) && since.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

#[test]
fn events_order_concurrent_streams() {
    own_device();
    let first = new_stream();
    let second = new_stream();
    let latch = Latch::default();
    let start = new_event();
    let end = new_event();
    let address = allocate(4);
    ok!(cuEventRecord(start, first));
    ok!(cuEventSynchronize(start));
    latch.block(first);
    ok!(cuMemsetD32Async(address, 7, 1, first));
    ok!(cuEventRecord(end, first));
    // The second stream does not wait for the first.
    ok!(cuStreamSynchronize(second));
    fails!(NotReady, cuStreamQuery(first));
    fails!(NotReady, cuEventQuery(end));
    let mut milliseconds = 0.0;
    fails!(
        NotReady,
        cuEventElapsedTime((&mut milliseconds).into(), start, end)
    );
    // The second stream waits for the event.
    ok!(cuStreamWaitEvent(second, end, 0));
    fails!(NotReady, cuStreamQuery(second));
    std::thread::sleep(Duration::from_millis(20));
    latch.open();
    assert_eq!(download(second, address, 4), [7, 0, 0, 0]);
    ok!(cuEventSynchronize(end));
    ok!(cuEventElapsedTime((&mut milliseconds).into(), start, end));
    assert!(milliseconds >= 15.0, "{milliseconds}");
    ok!(cuStreamDestroy_v2(second));
    fails!(InvalidHandle, cuStreamQuery(second));
}

#[test]
fn accepted_default_streams_are_streams() {
    own_device();
    assert_eq!(standInAcceptDefaultStreams(), 0);
    let id_of = |on| {
        let mut id = 0;
        ok!(cuStreamGetId(on, (&mut id).into()));
        id
    };
    let stream = new_stream();
    assert_eq!(id_of(0), id_of(1));
    assert!(id_of(0) != id_of(2) && id_of(stream) != id_of(0));

    // A thread has a default stream of its own.
    let mut context = 0;
    ok!(cuCtxGetCurrent((&mut context).into()));
    let [legacy, of_thread] = std::thread::scope(|scope| {
        let ids = || {
            ok!(cuCtxSetCurrent(context));
            [1, 2].map(id_of)
        };
        scope.spawn(ids).join().expect("no panic")
    });
    assert!(legacy == id_of(0) && of_thread != id_of(2));

    let address = upload(0, &[5; 64]);
    assert_eq!(download(1, address, 64), [5; 64]);
}

#[test]
fn synchronized_context_includes_destroyed_streams() {
    own_device();
    let stream = new_stream();
    let event = new_event();
    let latch = Latch::default();
    latch.block(stream);
    ok!(cuEventRecord(event, stream));
    ok!(cuStreamDestroy_v2(stream));
    fails!(NotReady, cuEventQuery(event));
    latch.open();
    ok!(cuCtxSynchronize());
    ok!(cuEventQuery(event));
}

#[test]
fn unrecorded_event_is_complete_and_untimed() {
    own_device();
    let stream = new_stream();
    let event = new_event();
    let mut milliseconds = 0.0;
    ok!(cuEventQuery(event));
    ok!(cuStreamWaitEvent(stream, event, 0));
    fails!(
        InvalidHandle,
        cuEventElapsedTime((&mut milliseconds).into(), event, event)
    );
    ok!(cuEventDestroy_v2(event));
    fails!(InvalidHandle, cuEventRecord(event, stream));
}

#[test]
fn pageable_memory_is_read_at_the_call() {
    own_device();
    let stream = new_stream();
    let latch = Latch::default();
    let to = allocate(2);
    let mut pinned = 0u64;
    ok!(cuMemHostAlloc((&mut pinned).into(), 1, 0));
    let mut pageable = [1u8];
    latch.block(stream);
    let other = new_stream();
    ok!(cuMemsetD8Async(pinned, 1, 1, other));
    ok!(cuStreamSynchronize(other));
    ok!(cuMemcpyHtoDAsync_v2(to, pinned, 1, stream));
    ok!(cuMemcpyHtoDAsync_v2(
        to + 1,
        pageable.as_ptr() as u64,
        1,
        stream
    ));
    pageable[0] = 2;
    // SAFETY: one byte of page-locked memory, which no operation writes now.
    unsafe { (pinned as *mut u8).write(2) };
    latch.open();
    assert_eq!(download(stream, to, 2), [2, 1]);
    assert_eq!(pageable, [2]);
    ok!(cuMemFreeHost(pinned));
    fails!(InvalidValue, cuMemFreeHost(pinned));
}

#[test]
fn registered_memory_is_known_until_unregistered() {
    let ordinal = own_device();
    let memory = vec![0u8; 4096];
    let at = memory.as_ptr() as u64;
    let mut kind = 0u32;
    let mut device = -1i32;
    fails!(
        InvalidValue,
        cuPointerGetAttribute((&raw mut kind).cast(), 2, at)
    );
    ok!(cuMemHostRegister_v2(at, 4096, 0));
    fails!(
        HostMemoryAlreadyRegistered,
        cuMemHostRegister_v2(at + 8, 8, 0)
    );
    ok!(cuPointerGetAttribute((&raw mut kind).cast(), 2, at + 100));
    ok!(cuPointerGetAttribute((&raw mut device).cast(), 9, at));
    assert_eq!((kind, device), (1, ordinal));
    fails!(InvalidValue, cuMemFreeHost(at));
    ok!(cuMemHostUnregister(at));
    fails!(HostMemoryNotRegistered, cuMemHostUnregister(at));
    // More than is mapped.
    fails!(InvalidValue, cuMemHostRegister_v2(at, 1 << 36, 0));
    fails!(InvalidValue, cuMemHostRegister_v2(at, 4096, 1 << 20));
}

#[test]
fn virtual_memory_moves_between_addresses() {
    let ordinal = own_device();
    const PAGE: usize = 2 << 20;
    let stream = new_stream();
    let properties = AllocationProperties::of_device(ordinal);
    let allow = AccessDescription::of_device(ordinal, true);
    let mut base = 0u64;
    let mut pages = [0u64; 2];
    let mut granularity = 0usize;
    ok!(cuMemGetAllocationGranularity(
        (&mut granularity).into(),
        (&properties).into(),
        0
    ));
    assert_eq!(granularity, PAGE);
    ok!(cuMemAddressReserve((&mut base).into(), 4 * PAGE, 0, 0, 0));

    for (index, page) in pages.iter_mut().enumerate() {
        ok!(cuMemCreate(page.into(), PAGE, (&properties).into(), 0));
        ok!(cuMemMap(base + (index * PAGE) as u64, PAGE, 0, *page, 0));
    }

    fails!(InvalidValue, cuMemsetD8Async(base, 0, 1, stream));
    fails!(
        InvalidValue,
        cuMemSetAccess(base, 3 * PAGE, (&allow).into(), 1)
    );
    fails!(InvalidValue, cuMemFree_v2(base));
    ok!(cuMemSetAccess(base, 2 * PAGE, (&allow).into(), 1));
    // One operation over both pages, then the second page at another address.
    ok!(cuMemsetD8Async(base, 5, 2 * PAGE, stream));
    ok!(cuStreamSynchronize(stream));
    fails!(AlreadyMapped, cuMemMap(base, PAGE, 0, pages[0], 0));
    ok!(cuMemUnmap(base + PAGE as u64, PAGE));
    ok!(cuMemMap(base + 3 * PAGE as u64, PAGE, 0, pages[1], 0));
    ok!(cuMemSetAccess(
        base + 3 * PAGE as u64,
        PAGE,
        (&allow).into(),
        1
    ));
    assert_eq!(download(stream, base + 3 * PAGE as u64, 16), [5; 16]);
    fails!(
        InvalidValue,
        cuMemsetD8Async(base + PAGE as u64, 0, 1, stream)
    );
    fails!(InvalidValue, cuMemAddressFree(base, 4 * PAGE));
    ok!(cuMemUnmap(base, PAGE));
    ok!(cuMemUnmap(base + 3 * PAGE as u64, PAGE));
    pages.iter().for_each(|&page| ok!(cuMemRelease(page)));
    ok!(cuMemAddressFree(base, 4 * PAGE));
    let mut free = 0;
    let mut total = 0;
    ok!(cuMemGetInfo_v2((&mut free).into(), (&mut total).into()));
    assert_eq!(free, total);
}

#[test]
fn mapped_memory_reports_its_allocation() {
    let ordinal = own_device();
    const BYTES: usize = 4 << 20;
    let mut base = 0u64;
    let mut handle = 0u64;
    let mut again = 0u64;

    fails!(
        NotPermitted,
        cuMemCreate(
            (&mut handle).into(),
            BYTES,
            (&AllocationProperties::shared(ordinal, 9)).into(),
            0
        )
    );

    let shared = AllocationProperties::shared(ordinal, 1);
    ok!(cuMemCreate(
        (&mut handle).into(),
        BYTES,
        (&shared).into(),
        0
    ));
    ok!(cuMemAddressReserve((&mut base).into(), BYTES, 0, 0, 0));
    ok!(cuMemMap(base, BYTES, 0, handle, 0));
    let allow = AccessDescription::of_device(ordinal, true);
    ok!(cuMemSetAccess(base, BYTES, (&allow).into(), 1));
    // Mapped memory outlives its handle, and another handle can be retained.
    ok!(cuMemRelease(handle));
    let mut start = 0u64;
    let mut bytes = 0usize;
    let inside = base + 3_000_000;
    ok!(cuMemGetAddressRange_v2(
        (&mut start).into(),
        (&mut bytes).into(),
        inside
    ));
    assert_eq!((start, bytes), (base, BYTES));
    ok!(cuMemRetainAllocationHandle((&mut again).into(), inside));
    let mut seen = AllocationProperties::of_device(ordinal);
    ok!(cuMemGetAllocationPropertiesFromHandle(
        (&mut seen).into(),
        again
    ));
    assert_eq!(format!("{seen:?}"), format!("{shared:?}"));
    ok!(cuMemRelease(again));
    fails!(
        InvalidValue,
        cuMemGetAllocationPropertiesFromHandle((&mut seen).into(), again)
    );
    let plain = allocate(64);
    fails!(
        InvalidValue,
        cuMemRetainAllocationHandle((&mut again).into(), plain)
    );
    ok!(cuMemUnmap(base, BYTES));
    fails!(
        InvalidValue,
        cuMemRetainAllocationHandle((&mut again).into(), inside)
    );
    ok!(cuMemAddressFree(base, BYTES));
}

#[test]
fn stream_ordered_free_is_deferred() {
    own_device();
    let stream = new_stream();
    let latch = Latch::default();
    let mut address = 0u64;
    ok!(cuMemAllocAsync((&mut address).into(), 64, stream));
    latch.block(stream);
    ok!(cuMemsetD8Async(address, 0, 64, stream));
    ok!(cuMemFreeAsync(address, stream));
    latch.open();
    ok!(cuStreamSynchronize(stream));
    fails!(InvalidValue, cuMemFreeAsync(address, stream));
}

#[test]
fn context_release_waits_for_destroyed_streams() {
    let ordinal = own_device();
    let stream = new_stream();
    let latch = Latch::default();
    let mut address = 0u64;
    ok!(cuMemAllocAsync((&mut address).into(), 64, stream));
    latch.block(stream);
    ok!(cuMemFreeAsync(address, stream));
    ok!(cuStreamDestroy_v2(stream));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            latch.open();
        });
        ok!(cuDevicePrimaryCtxRelease_v2(ordinal));
    });
    let mut context = 0;
    ok!(cuDevicePrimaryCtxRetain((&mut context).into(), ordinal));
    ok!(cuCtxSynchronize());
}

#[test]
fn a_captured_fork_and_join_replays() {
    own_device();
    let origin = new_stream();
    let side = new_stream();
    let fork = new_event();
    let join = new_event();
    let address = allocate(8);
    let mut graph = 0;
    let mut executable = 0;
    let mut nodes = 0;
    let mut status = 9;
    ok!(cuStreamBeginCapture_v2(origin, 1));
    let mut id = 0;
    fails!(CaptureUnsupported, cuStreamGetId(origin, (&mut id).into()));
    ok!(cuStreamIsCapturing(origin, (&mut status).into()));
    assert_eq!(status, 1);
    ok!(cuMemsetD32Async(address, 1, 1, origin));
    ok!(cuEventRecord(fork, origin));
    ok!(cuStreamWaitEvent(side, fork, 0));
    ok!(cuMemcpyDtoDAsync_v2(address + 4, address, 4, side));
    ok!(cuEventRecord(join, side));
    ok!(cuStreamWaitEvent(origin, join, 0));
    ok!(cuMemsetD32Async(address, 2, 1, origin));
    ok!(cuStreamEndCapture(origin, (&mut graph).into()));
    ok!(cuGraphGetNodes(graph, 0, (&mut nodes).into()));
    assert_eq!(nodes, 3);
    ok!(cuGraphInstantiateWithFlags(
        (&mut executable).into(),
        graph,
        0
    ));
    ok!(cuGraphDestroy(graph));
    // Capturing has run nothing.
    assert_eq!(download(origin, address, 8), [0xff; 8]);

    for _ in 0..2 {
        ok!(cuGraphLaunch(executable, side));
        assert_eq!(download(side, address, 8), [2, 0, 0, 0, 1, 0, 0, 0]);
        ok!(cuMemsetD8Async(address, 0, 8, side));
    }

    ok!(cuGraphExecDestroy(executable));
    fails!(InvalidHandle, cuGraphLaunch(executable, side));
}

#[test]
fn captures_refuse_what_would_break_them() {
    own_device();
    let origin = new_stream();
    let side = new_stream();
    let event = new_event();
    let before = new_event();
    let address = allocate(8);
    let mut graph = 0;
    let mut other = 0;
    let begin = || ok!(cuStreamBeginCapture_v2(origin, 1));
    ok!(cuEventRecord(before, side));
    // Synchronizing a captured stream invalidates the capture.
    begin();
    fails!(CaptureUnsupported, cuStreamSynchronize(origin));
    fails!(CaptureInvalidated, cuMemsetD8Async(address, 0, 1, origin));
    fails!(
        CaptureInvalidated,
        cuStreamEndCapture(origin, (&mut graph).into())
    );
    // So does allocating.
    begin();
    fails!(CaptureUnsupported, cuMemAlloc_v2((&mut other).into(), 64));
    fails!(
        CaptureInvalidated,
        cuStreamEndCapture(origin, (&mut graph).into())
    );
    // So does a dependency on work outside the capture.
    begin();
    fails!(CaptureIsolation, cuStreamWaitEvent(origin, before, 0));
    fails!(
        CaptureInvalidated,
        cuStreamEndCapture(origin, (&mut graph).into())
    );
    // So does querying a captured event. A forked stream that does not join is an error at the end.
    begin();
    ok!(cuEventRecord(event, origin));
    ok!(cuStreamWaitEvent(side, event, 0));
    ok!(cuMemsetD8Async(address, 0, 1, side));
    fails!(CapturedEvent, cuEventQuery(event));
    fails!(
        CaptureInvalidated,
        cuStreamEndCapture(origin, (&mut graph).into())
    );
    begin();
    ok!(cuEventRecord(event, origin));
    ok!(cuStreamWaitEvent(side, event, 0));
    ok!(cuMemsetD8Async(address, 0, 1, side));
    fails!(
        CaptureUnmatched,
        cuStreamEndCapture(side, (&mut graph).into())
    );
    fails!(
        CaptureUnjoined,
        cuStreamEndCapture(origin, (&mut graph).into())
    );
    ok!(cuStreamSynchronize(side));
}

#[test]
fn a_host_function_that_calls_the_driver_is_refused() {
    own_device();
    static CODE: AtomicU32 = AtomicU32::new(0);
    unsafe extern "C" fn call(_data: *mut c_void) {
        CODE.store(code!(cuCtxSynchronize()), Ordering::Release);
    }
    let stream = new_stream();
    ok!(cuLaunchHostFunc(stream, Some(call), 0));
    ok!(cuStreamSynchronize(stream));
    assert_eq!(CODE.load(Ordering::Acquire), Failure::NotPermitted as u32);
    fails!(InvalidValue, cuLaunchHostFunc(stream, None, 0));
}

#[test]
fn a_stream_waits_for_a_value_in_pinned_memory() {
    own_device();
    let stream = new_stream();
    let mut page = 0;
    let address = allocate(4);
    ok!(cuMemHostAlloc((&mut page).into(), 4096, 0));
    // SAFETY: pinned memory of this test, freed at its end.
    let words = unsafe { std::slice::from_raw_parts(page as *const AtomicU64, 2) };

    for (flags, released) in [(0, 8), (1, 7)] {
        words
            .iter()
            .for_each(|word| word.store(3, Ordering::Release));
        ok!(cuStreamWaitValue64_v2(stream, page, 7, flags));
        ok!(cuMemsetD32Async(address, flags + 1, 1, stream));
        ok!(cuStreamWriteValue64_v2(stream, page + 8, 9, 0));
        std::thread::sleep(Duration::from_millis(5));
        fails!(NotReady, cuStreamQuery(stream));
        assert_eq!(words[1].load(Ordering::Acquire), 3);
        words[0].store(released, Ordering::Release);
        assert_eq!(download(stream, address, 4), [flags as u8 + 1, 0, 0, 0]);
        assert_eq!(words[1].load(Ordering::Acquire), 9);
    }

    fails!(InvalidValue, cuStreamWaitValue64_v2(stream, page + 4, 7, 0));
    fails!(NotSupported, cuStreamWaitValue64_v2(stream, page, 7, 2));
    fails!(InvalidValue, cuStreamWriteValue64_v2(stream, 64, 7, 0));
    ok!(cuMemFreeHost(page));
}
