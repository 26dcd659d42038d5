//! The few functions of the driver that are needed: those of the stand-in for libcuda, which the program has loaded.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

type LaunchHostFunc = unsafe extern "C" fn(*mut c_void, unsafe extern "C" fn(*mut c_void), *mut c_void) -> c_int;

struct Driver {
    launch: LaunchHostFunc,
    current: unsafe extern "C" fn(*mut *mut c_void) -> c_int,
    make_current: unsafe extern "C" fn(*mut c_void) -> c_int,
    is_capturing: unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int,
    tie: LaunchHostFunc,
    range: unsafe extern "C" fn(*mut u64, *mut usize, u64) -> c_int,
    retain: unsafe extern "C" fn(*mut u64, u64) -> c_int,
    properties: unsafe extern "C" fn(*mut Properties, u64) -> c_int,
    release: unsafe extern "C" fn(u64) -> c_int,
}

/// `CUmemAllocationProp`, as far as it is looked at: a kind and handle types.
type Properties = [u32; 8];

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`: what NCCL gives to the other processes of a machine.
const DESCRIPTOR: u32 = 1;

fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    let find = || {
        // SAFETY: the program has loaded it already.
        let library = unsafe { Library::new("libcuda.so.1") }.ok()?;
        let driver = Driver {
            // SAFETY: the signature is the driver's.
            launch: *unsafe { library.get(b"cuLaunchHostFunc\0") }.ok()?,
            // SAFETY: as above.
            current: *unsafe { library.get(b"cuCtxGetCurrent\0") }.ok()?,
            // SAFETY: as above.
            make_current: *unsafe { library.get(b"cuCtxSetCurrent\0") }.ok()?,
            // SAFETY: as above.
            is_capturing: *unsafe { library.get(b"cuStreamIsCapturing\0") }.ok()?,
            // SAFETY: the signature is the stand-in's.
            tie: *unsafe { library.get(b"standInTieToCapture\0") }.ok()?,
            // SAFETY: the signatures of these are the driver's.
            range: *unsafe { library.get(b"cuMemGetAddressRange_v2\0") }.ok()?,
            // SAFETY: as above.
            retain: *unsafe { library.get(b"cuMemRetainAllocationHandle\0") }.ok()?,
            // SAFETY: as above.
            properties: *unsafe { library.get(b"cuMemGetAllocationPropertiesFromHandle\0") }.ok()?,
            // SAFETY: as above.
            release: *unsafe { library.get(b"cuMemRelease\0") }.ok()?,
        };
        std::mem::forget(library);
        Some(driver)
    };
    DRIVER.get_or_init(find).as_ref()
}

/// The bytes of the allocation that holds `at`, if other processes can open it; none where they cannot.
pub(crate) fn shareable_bytes(at: u64) -> Option<std::ops::Range<u64>> {
    let driver = driver()?;
    let (mut start, mut bytes, mut handle, mut properties) = (0, 0, 0, Properties::default());
    // SAFETY: writes two numbers.
    let found = unsafe { (driver.range)(&raw mut start, &raw mut bytes, at) } == 0;
    // SAFETY: writes one number.
    if !found || unsafe { (driver.retain)(&raw mut handle, at) } != 0 {
        return None;
    }
    // SAFETY: writes 32 bytes.
    let told = unsafe { (driver.properties)(&raw mut properties, handle) } == 0;
    // SAFETY: retained above.
    unsafe { (driver.release)(handle) };
    (told && properties[1] & DESCRIPTOR != 0).then_some(start..start + bytes as u64)
}

/// The context of the calling thread, to be taken to another.
pub(crate) struct Current(*mut c_void);

// SAFETY: a handle, which any thread may make current.
unsafe impl Send for Current {}

impl Current {
    pub(crate) fn of_this_thread() -> Option<Self> {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let code = unsafe { (driver()?.current)(&raw mut context) };
        (code == 0 && !context.is_null()).then_some(Self(context))
    }

    pub(crate) fn make(&self) -> bool {
        // SAFETY: a context that was current.
        driver().is_some_and(|driver| unsafe { (driver.make_current)(self.0) } == 0)
    }
}

/// A stream of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stream(pub(crate) *mut c_void);

// SAFETY: a handle, which any thread may use.
unsafe impl Send for Stream {}

impl Stream {
    /// Whether it is recorded into a graph.
    pub(crate) fn is_capturing(self) -> bool {
        let mut status = 0;
        // SAFETY: a stream of the caller; writes one number.
        driver().is_some_and(|driver| unsafe { (driver.is_capturing)(self.0, &raw mut status) } == 0 && status != 0)
    }
}

type Work = Box<dyn FnOnce() + Send>;
type Repeated = Box<dyn Fn() + Send + Sync>;

unsafe extern "C" fn repeat(work: *mut c_void) {
    // SAFETY: leaked by `launch_each`.
    let work = unsafe { &*work.cast::<Repeated>() };
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
}

/// Records `work`, which runs whenever its turn in a launch of the graph comes; whether the driver took it. It stays
/// for good, since nobody says when the graph is gone.
pub(crate) fn launch_each(stream: Stream, work: impl Fn() + Send + Sync + 'static) -> bool {
    let Some(driver) = driver() else { return false };
    let work: Box<Repeated> = Box::new(Box::new(work));
    // SAFETY: `repeat` only reads what is given to it here.
    unsafe { (driver.launch)(stream.0, repeat, std::ptr::from_mut(Box::leak(work)).cast()) == 0 }
}

unsafe extern "C" fn run(work: *mut c_void) {
    // SAFETY: made by `launch`, run once.
    let work = unsafe { Box::from_raw(work.cast::<Work>()) };
    // A panic must not reach the driver; what it leaves undone shows as a collective that does not end.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(*work));
}

/// Runs `work` when its turn in the stream comes; whether the driver took it.
pub(crate) fn launch(stream: Stream, work: impl FnOnce() + Send + 'static) -> bool {
    hand_over(stream, work, |driver| driver.launch)
}

/// Runs `work` when the graph that the stream is recorded into is gone; at once where the driver did not take it.
pub(crate) fn tie(stream: Stream, work: impl FnOnce() + Clone + Send + 'static) {
    if !hand_over(stream, work.clone(), |driver| driver.tie) {
        work();
    }
}

/// Gives `work` to a function of the driver; whether it took it.
fn hand_over(
    stream: Stream,
    work: impl FnOnce() + Send + 'static,
    to: impl FnOnce(&Driver) -> LaunchHostFunc,
) -> bool {
    let Some(driver) = driver() else { return false };
    let work: Box<Work> = Box::new(Box::new(work));
    let raw = Box::into_raw(work).cast();
    // SAFETY: `run` takes what is given to it here, once.
    let taken = unsafe { to(driver)(stream.0, run, raw) } == 0;
    if !taken {
        // SAFETY: the driver has not taken it.
        drop(unsafe { Box::from_raw(raw.cast::<Work>()) });
    }
    taken
}
