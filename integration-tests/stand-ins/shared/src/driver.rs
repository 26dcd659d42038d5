//! Functions of the driver: the stand-in for libcuda, which the process has loaded. Without it each
//! call returns that it failed.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

type LaunchHostFunc =
    unsafe extern "C" fn(*mut c_void, unsafe extern "C" fn(*mut c_void), *mut c_void) -> c_int;

struct Driver {
    launch: LaunchHostFunc,
    current: unsafe extern "C" fn(*mut *mut c_void) -> c_int,
    make_current: unsafe extern "C" fn(*mut c_void) -> c_int,
    is_capturing: unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int,
    tie: LaunchHostFunc,
    is_dry: unsafe extern "C" fn() -> u32,
    tally: unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char, u64, u64, u64) -> u32,
    range: unsafe extern "C" fn(*mut u64, *mut usize, u64) -> c_int,
    retain: unsafe extern "C" fn(*mut u64, u64) -> c_int,
    properties: unsafe extern "C" fn(*mut Properties, u64) -> c_int,
    release: unsafe extern "C" fn(u64) -> c_int,
}

/// `CUmemAllocationProp`, of which only the handle types are read.
type Properties = [u32; 8];

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`, which NCCL shares with the other processes of a
/// machine.
const DESCRIPTOR: u32 = 1;

fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    let find = || {
        // SAFETY: the library is already loaded, so no initializer runs.
        let library = unsafe { Library::new("libcuda.so.1") }.ok()?;
        let driver = Driver {
            // SAFETY: the field has the stand-in's signature.
            launch: *unsafe { library.get(b"standInLaunch\0") }.ok()?,
            // SAFETY: the field has the driver's signature.
            current: *unsafe { library.get(b"cuCtxGetCurrent\0") }.ok()?,
            // SAFETY: as above.
            make_current: *unsafe { library.get(b"cuCtxSetCurrent\0") }.ok()?,
            // SAFETY: as above.
            is_capturing: *unsafe { library.get(b"cuStreamIsCapturing\0") }.ok()?,
            // SAFETY: the field has the stand-in's signature.
            tie: *unsafe { library.get(b"standInTieToCapture\0") }.ok()?,
            // SAFETY: as above.
            is_dry: *unsafe { library.get(b"standInIsDry\0") }.ok()?,
            // SAFETY: as above.
            tally: *unsafe { library.get(b"standInTally\0") }.ok()?,
            // SAFETY: the field has the driver's signature.
            range: *unsafe { library.get(b"cuMemGetAddressRange_v2\0") }.ok()?,
            // SAFETY: as above.
            retain: *unsafe { library.get(b"cuMemRetainAllocationHandle\0") }.ok()?,
            // SAFETY: as above.
            properties: *unsafe { library.get(b"cuMemGetAllocationPropertiesFromHandle\0") }
                .ok()?,
            // SAFETY: as above.
            release: *unsafe { library.get(b"cuMemRelease\0") }.ok()?,
        };
        std::mem::forget(library);
        Some(driver)
    };

    DRIVER.get_or_init(find).as_ref()
}

/// The allocation that contains `address`, if other processes can open it.
pub fn shareable_bytes(address: u64) -> Option<std::ops::Range<u64>> {
    let driver = driver()?;
    let mut start = 0;
    let mut bytes = 0;
    let mut handle = 0;
    let mut properties = Properties::default();

    // SAFETY: both pointers are valid for writes.
    let found = unsafe { (driver.range)(&raw mut start, &raw mut bytes, address) } == 0;
    // SAFETY: the pointer is valid for a write.
    if !found || unsafe { (driver.retain)(&raw mut handle, address) } != 0 {
        return None;
    }
    // SAFETY: `Properties` has the 32 bytes that the function writes.
    let read = unsafe { (driver.properties)(&raw mut properties, handle) } == 0;
    // SAFETY: releases the handle that was retained above, once.
    unsafe { (driver.release)(handle) };
    (read && properties[1] & DESCRIPTOR != 0).then_some(start..start + bytes as u64)
}

/// Whether the process has loaded the driver's stand-in.
pub fn is_loaded() -> bool {
    driver().is_some()
}

/// Whether the driver is in the dry mode, in which large work does not run.
pub fn is_dry() -> bool {
    // SAFETY: the function has no conditions.
    driver().is_some_and(|driver| unsafe { (driver.is_dry)() } == 1)
}

/// One call of a library, as the driver's stand-in counts it.
#[derive(Clone, Copy, Debug)]
pub struct Tally<'a> {
    /// The kind of the call, such as `product`.
    pub kind: &'a CStr,
    /// The name in the table of counts.
    pub name: &'a CStr,
    /// Bytes that it reads.
    pub loaded: u64,
    /// Bytes that it writes.
    pub stored: u64,
    /// Floating-point operations.
    pub operations: u64,
}

/// Counts a call when the stream gets there.
pub fn tally(stream: Stream, call: Tally<'_>) {
    let Some(driver) = driver() else { return };
    // SAFETY: both strings are valid; a stream that does not exist is an error, which the call
    // itself returns too.
    unsafe {
        (driver.tally)(
            stream.0,
            call.kind.as_ptr(),
            call.name.as_ptr(),
            call.loaded,
            call.stored,
            call.operations,
        )
    };
}

/// The context of a thread, for another thread.
pub struct Current(*mut c_void);

// SAFETY: any thread may make the context current.
unsafe impl Send for Current {}

impl Current {
    /// The current context, if there is one.
    pub fn of_this_thread() -> Option<Self> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the pointer is valid for a write.
        let code = unsafe { (driver()?.current)(&raw mut context) };
        (code == 0 && !context.is_null()).then_some(Self(context))
    }

    /// Makes it current in this thread; returns whether the driver accepted it.
    pub fn make(&self) -> bool {
        // SAFETY: the context was current, so it exists.
        driver().is_some_and(|driver| unsafe { (driver.make_current)(self.0) } == 0)
    }
}

/// A stream of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub *mut c_void);

// SAFETY: any thread may use the stream.
unsafe impl Send for Stream {}

impl Stream {
    /// Whether it is being captured.
    pub fn is_capturing(self) -> bool {
        let mut status = 0;
        // SAFETY: the caller's stream is valid, and the pointer is valid for a write.
        driver().is_some_and(
            |driver| unsafe { (driver.is_capturing)(self.0, &raw mut status) } == 0 && status != 0,
        )
    }
}

type Work = Box<dyn FnOnce() + Send>;
type Repeated = Box<dyn Fn() + Send + Sync>;

unsafe extern "C" fn repeat(work: *mut c_void) {
    // SAFETY: `launch_each` leaked this box, so it is never freed.
    let work = unsafe { &*work.cast::<Repeated>() };
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
}

/// Captures `work`, which runs in each launch of the graph; returns whether the driver accepted it.
/// It is never freed, since the driver does not report the end of the graph.
pub fn launch_each(stream: Stream, work: impl Fn() + Send + Sync + 'static) -> bool {
    let Some(driver) = driver() else { return false };
    let work: Box<Repeated> = Box::new(Box::new(work));
    // SAFETY: `repeat` only reads the leaked box.
    unsafe { (driver.launch)(stream.0, repeat, std::ptr::from_mut(Box::leak(work)).cast()) == 0 }
}

unsafe extern "C" fn run(work: *mut c_void) {
    // SAFETY: `hand_over` created this box, and the driver runs it once.
    let work = unsafe { Box::from_raw(work.cast::<Work>()) };
    // A panic must not reach the driver. What waits for the work then hangs.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(*work));
}

/// Enqueues `work`; returns whether the driver accepted it.
pub fn launch(stream: Stream, work: impl FnOnce() + Send + 'static) -> bool {
    hand_over(stream, work, |driver| driver.launch)
}

/// Runs `work` when the graph that the stream is captured into is destroyed, or now if the driver
/// does not accept it.
pub fn tie(stream: Stream, work: impl FnOnce() + Clone + Send + 'static) {
    if !hand_over(stream, work.clone(), |driver| driver.tie) {
        work();
    }
}

/// Passes `work` to a function of the driver; returns whether it accepted it.
fn hand_over(
    stream: Stream,
    work: impl FnOnce() + Send + 'static,
    to: impl FnOnce(&Driver) -> LaunchHostFunc,
) -> bool {
    let Some(driver) = driver() else { return false };
    let work: Box<Work> = Box::new(Box::new(work));
    let raw = Box::into_raw(work).cast();
    // SAFETY: `run` frees the box, once.
    let accepted = unsafe { to(driver)(stream.0, run, raw) } == 0;
    if !accepted {
        // SAFETY: the driver did not accept the box, so this is its only user.
        drop(unsafe { Box::from_raw(raw.cast::<Work>()) });
    }
    accepted
}
