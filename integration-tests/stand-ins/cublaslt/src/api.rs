//! The library's functions, with C's names and types.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use stand_in_shared::driver::{self, Stream, Tally};

use crate::choice::{Algorithm, Preference};
use crate::product::{Description, Layout, NOTHING, Product, is_supported};
use crate::storage::Storage;

/// `cublasStatus_t`.
type Status = c_int;
const SUCCESS: Status = 0;
const INVALID_VALUE: Status = 7;
const EXECUTION_FAILED: Status = 13;
const INTERNAL_ERROR: Status = 14;
const NOT_SUPPORTED: Status = 15;

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Debug)]
#[repr(C)]
pub struct HeuristicResult {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

/// The text of a status.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusString(status: Status) -> *const c_char {
    let text: &CStr = match status {
        SUCCESS => c"CUBLAS_STATUS_SUCCESS",
        INVALID_VALUE => c"CUBLAS_STATUS_INVALID_VALUE",
        EXECUTION_FAILED => c"CUBLAS_STATUS_EXECUTION_FAILED",
        INTERNAL_ERROR => c"CUBLAS_STATUS_INTERNAL_ERROR",
        NOT_SUPPORTED => c"CUBLAS_STATUS_NOT_SUPPORTED",
        _ => c"an unknown status",
    };
    text.as_ptr()
}

/// Boxes `value` and writes its handle to `out`.
///
/// # Safety
/// `out` is null or valid for a write.
unsafe fn make<T>(out: *mut *mut c_void, value: T) -> Status {
    if out.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not null, so valid.
    unsafe { out.write(Box::into_raw(Box::new(value)).cast()) };
    SUCCESS
}

/// # Safety
/// `object` is null or was created by `make::<T>`, and is not used again.
unsafe fn destroy<T>(object: *mut c_void) -> Status {
    if object.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller guarantees it.
    drop(unsafe { Box::from_raw(object.cast::<T>()) });
    SUCCESS
}

/// # Safety
/// `place` is null or valid for reading a `T` of `size` bytes.
unsafe fn read<T: Copy>(place: *const c_void, size: usize) -> Option<T> {
    // SAFETY: the caller guarantees it.
    (!place.is_null() && size == size_of::<T>())
        .then(|| unsafe { place.cast::<T>().read_unaligned() })
}

/// Creates a handle.
///
/// # Safety
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtCreate(out: *mut *mut c_void) -> Status {
    // SAFETY: the caller guarantees it.
    unsafe { make(out, 0u8) }
}

/// Destroys a handle.
///
/// # Safety
/// `handle` was created by `cublasLtCreate` and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtDestroy(handle: *mut c_void) -> Status {
    // SAFETY: the caller guarantees it.
    unsafe { destroy::<u8>(handle) }
}

/// Creates a description of a product. Only fp32 sums, alpha and beta are supported.
///
/// # Safety
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescCreate(
    out: *mut *mut c_void,
    compute: c_int,
    scale: c_int,
) -> Status {
    if (compute, scale) != (68, 0) {
        return NOT_SUPPORTED;
    }
    let plain = Description {
        transposed: [false; 2],
        epilogue: NOTHING,
        bias: 0,
        aux: 0,
        aux_stride: 0,
    };
    // SAFETY: the caller guarantees it.
    unsafe { make(out, plain) }
}

/// Destroys a description.
///
/// # Safety
/// It was created by `cublasLtMatmulDescCreate` and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescDestroy(description: *mut c_void) -> Status {
    // SAFETY: the caller guarantees it.
    unsafe { destroy::<Description>(description) }
}

/// Sets an attribute.
///
/// # Safety
/// The description is live and not used by another thread; `value` is valid for reading `size`
/// bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescSetAttribute(
    description: *mut c_void,
    attribute: c_int,
    value: *const c_void,
    size: usize,
) -> Status {
    // SAFETY: the caller guarantees it.
    let Some(what) = (unsafe { description.cast::<Description>().as_mut() }) else {
        return INVALID_VALUE;
    };
    // SAFETY: the caller guarantees it.
    let number = unsafe { read::<u32>(value, size) };
    // SAFETY: the caller guarantees it.
    let wide = unsafe { read::<u64>(value, size) };
    match (attribute, number, wide) {
        (3, Some(op @ (0 | 1)), _) => what.transposed[0] = op == 1,
        (4, Some(op @ (0 | 1)), _) => what.transposed[1] = op == 1,
        (7, Some(epilogue), _) => what.epilogue = epilogue,
        (8, _, Some(address)) => what.bias = address,
        (11, _, Some(address)) => what.aux = address,
        (12, _, Some(stride)) => what.aux_stride = stride as usize,
        (3 | 4 | 7 | 8 | 11 | 12, ..) => return INVALID_VALUE,
        _ => return NOT_SUPPORTED,
    }
    SUCCESS
}

/// Creates a layout.
///
/// # Safety
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutCreate(
    out: *mut *mut c_void,
    data_type: c_int,
    rows: u64,
    cols: u64,
    stride: i64,
) -> Status {
    let Some(storage) = Storage::from_code(data_type) else {
        return NOT_SUPPORTED;
    };
    let Ok(stride) = usize::try_from(stride) else {
        return INVALID_VALUE;
    };
    // SAFETY: the caller guarantees it.
    unsafe {
        make(
            out,
            Layout {
                storage,
                rows: rows as usize,
                cols: cols as usize,
                stride,
            },
        )
    }
}

/// Destroys a layout.
///
/// # Safety
/// It was created by `cublasLtMatrixLayoutCreate` and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutDestroy(layout: *mut c_void) -> Status {
    // SAFETY: the caller guarantees it.
    unsafe { destroy::<Layout>(layout) }
}

/// Creates preferences.
///
/// # Safety
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceCreate(out: *mut *mut c_void) -> Status {
    // SAFETY: the caller guarantees it.
    unsafe { make(out, Preference::default()) }
}

/// Destroys preferences.
///
/// # Safety
/// They were created by `cublasLtMatmulPreferenceCreate` and are not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceDestroy(preference: *mut c_void) -> Status {
    // SAFETY: the caller guarantees it.
    unsafe { destroy::<Preference>(preference) }
}

/// Sets the workspace limit, the reduction schemes or an alignment.
///
/// # Safety
/// The preferences are live and not used by another thread; `value` is valid for reading `size`
/// bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceSetAttribute(
    preference: *mut c_void,
    attribute: c_int,
    value: *const c_void,
    size: usize,
) -> Status {
    // SAFETY: the caller guarantees it.
    let Some(preference) = (unsafe { preference.cast::<Preference>().as_mut() }) else {
        return INVALID_VALUE;
    };
    // SAFETY: the caller guarantees it.
    let number = unsafe { read::<u32>(value, size) };
    // SAFETY: the caller guarantees it.
    let wide = unsafe { read::<u64>(value, size) };
    match (attribute, number, wide) {
        (1, _, Some(bytes)) => preference.workspace_bytes = bytes,
        (3, Some(schemes @ 0..=7), _) => preference.reductions = schemes,
        (5..=8, Some(bytes), _) if bytes.is_power_of_two() => {
            preference.alignments[attribute as usize - 5] = bytes
        }
        _ => return INVALID_VALUE,
    }
    SUCCESS
}

/// # Safety
/// Null, or live layouts.
unsafe fn layouts(handles: [*mut c_void; 4]) -> Option<[Layout; 4]> {
    // SAFETY: the caller guarantees it.
    let [a, b, c, d] = handles.map(|h| unsafe { h.cast::<Layout>().as_ref() }.copied());
    Some([a?, b?, c?, d?])
}

fn gelu_is_known() -> bool {
    std::env::var_os("ZERO_STANDIN_NO_GELU").is_none_or(|v| v != "1")
}

/// The library's version: 13.0.0.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    130_000
}

impl HeuristicResult {
    fn new(algorithm: Algorithm) -> Self {
        let workspace_bytes = algorithm.workspace_bytes();
        Self {
            algorithm,
            workspace_bytes,
            state: SUCCESS,
            waves: 1.0,
            reserved: [0; 4],
        }
    }
}

/// Returns the algorithms of a supported product, at most as many as requested.
///
/// # Safety
/// Handles are null or live; `results` is valid for writing the requested number of results,
/// `count` for a write.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _handle: *mut c_void,
    description: *mut c_void,
    a: *mut c_void,
    b: *mut c_void,
    c: *mut c_void,
    d: *mut c_void,
    preference: *mut c_void,
    asked: c_int,
    results: *mut HeuristicResult,
    count: *mut c_int,
) -> Status {
    // SAFETY: the caller guarantees it.
    let what = unsafe { description.cast::<Description>().as_ref() };
    // SAFETY: the caller guarantees it.
    let layouts = unsafe { layouts([a, b, c, d]) };
    // SAFETY: the caller guarantees it.
    let preference = unsafe { preference.cast::<Preference>().as_ref() };
    let (Some(what), Some(layouts), Some(preference)) = (what, layouts, preference) else {
        return INVALID_VALUE;
    };
    if asked < 1 || results.is_null() || count.is_null() {
        return INVALID_VALUE;
    }
    let found = match is_supported(what, &layouts, gelu_is_known()) {
        true => Algorithm::candidates(preference, what),
        false => Vec::new(),
    };

    let found = &found[..found.len().min(asked as usize)];
    for (index, &algorithm) in found.iter().enumerate() {
        // SAFETY: not null, so valid for as many as requested.
        unsafe {
            results
                .wrapping_add(index)
                .write(HeuristicResult::new(algorithm))
        };
    }

    // SAFETY: not null, so valid.
    unsafe { count.write(found.len() as c_int) };
    if found.is_empty() {
        NOT_SUPPORTED
    } else {
        SUCCESS
    }
}

/// Checks an algorithm, which may come from a file, for a product.
///
/// # Safety
/// Handles are null or live; `algorithm` is null or valid for reading, `result` is null or valid
/// for a write.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn cublasLtMatmulAlgoCheck(
    _handle: *mut c_void,
    description: *mut c_void,
    a: *mut c_void,
    b: *mut c_void,
    c: *mut c_void,
    d: *mut c_void,
    algorithm: *const c_void,
    result: *mut HeuristicResult,
) -> Status {
    // SAFETY: the caller guarantees it.
    let what = unsafe { description.cast::<Description>().as_ref() };
    // SAFETY: the caller guarantees it.
    let layouts = unsafe { layouts([a, b, c, d]) };
    // SAFETY: the caller guarantees it.
    let algorithm = unsafe { read::<Algorithm>(algorithm, size_of::<Algorithm>()) };
    let (Some(what), Some(layouts), Some(algorithm)) = (what, layouts, algorithm) else {
        return INVALID_VALUE;
    };
    if result.is_null() {
        return INVALID_VALUE;
    }
    if !algorithm.is_valid() || !is_supported(what, &layouts, gelu_is_known()) {
        return NOT_SUPPORTED;
    }
    // SAFETY: not null, so valid.
    unsafe { result.write(HeuristicResult::new(algorithm)) };
    SUCCESS
}

/// Returns an attribute of an algorithm's configuration; those of 32 bits only.
///
/// # Safety
/// `algorithm` is null or valid for reading, `value` null or valid for writing `size` bytes,
/// `written` null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulAlgoConfigGetAttribute(
    algorithm: *const c_void,
    attribute: c_int,
    value: *mut c_void,
    size: usize,
    written: *mut usize,
) -> Status {
    // SAFETY: the caller guarantees it.
    let algorithm = unsafe { read::<Algorithm>(algorithm, size_of::<Algorithm>()) };
    let number = algorithm
        .filter(Algorithm::is_valid)
        .and_then(|algorithm| algorithm.attribute(attribute));
    let Some(number) = number.filter(|_| !value.is_null() && size >= size_of::<u32>()) else {
        return INVALID_VALUE;
    };
    // SAFETY: not null and large enough.
    unsafe { value.cast::<u32>().write_unaligned(number) };
    // SAFETY: the caller guarantees it.
    if let Some(written) = unsafe { written.as_mut() } {
        *written = size_of::<u32>();
    }
    SUCCESS
}

/// Enqueues a product.
///
/// # Safety
/// As for cuBLASLt: handles are live, and the matrices match their layouts and stay valid until the
/// product has run.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn cublasLtMatmul(
    _handle: *mut c_void,
    description: *mut c_void,
    alpha: *const f32,
    a: *const c_void,
    a_layout: *mut c_void,
    b: *const c_void,
    b_layout: *mut c_void,
    beta: *const f32,
    c: *const c_void,
    c_layout: *mut c_void,
    d: *mut c_void,
    d_layout: *mut c_void,
    algorithm: *const c_void,
    workspace: *mut c_void,
    workspace_bytes: usize,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller guarantees it.
    let what = unsafe { description.cast::<Description>().as_ref() };
    // SAFETY: the caller guarantees it.
    let layouts = unsafe { layouts([a_layout, b_layout, c_layout, d_layout]) };
    // SAFETY: the caller guarantees it.
    let alpha = unsafe { alpha.as_ref() };
    // SAFETY: the caller guarantees it.
    let beta = unsafe { beta.as_ref() };
    // SAFETY: the caller guarantees it.
    let algorithm = unsafe { algorithm.cast::<Algorithm>().as_ref() };
    let (Some(what), Some(layouts), Some(&alpha), Some(&beta), Some(algorithm)) =
        (what, layouts, alpha, beta, algorithm)
    else {
        return INVALID_VALUE;
    };

    let at = [a, b, c, d.cast_const()].map(|p| p.addr() as u64);
    let lacks = workspace.is_null() || stream.is_null() || at.contains(&0);
    if lacks || !algorithm.takes(at, what, (workspace.addr(), workspace_bytes)) {
        return INVALID_VALUE;
    }
    if !is_supported(what, &layouts, gelu_is_known()) {
        return NOT_SUPPORTED;
    }
    if !driver::is_loaded() {
        return INTERNAL_ERROR;
    }

    let product = Product {
        what: *what,
        layouts,
        at,
        alpha,
        beta,
        sums: algorithm.sums(),
    };

    let Ok(name) = CString::new(product.name()) else {
        return INTERNAL_ERROR;
    };
    let [loaded, stored, operations] = product.work();
    let call = Tally {
        kind: c"product",
        name: &name,
        loaded,
        stored,
        operations,
    };

    let stream = Stream(stream);
    driver::tally(stream, call);
    if driver::is_dry() {
        return SUCCESS;
    }

    // Never freed, since a graph may run it any number of times: about 200 bytes a product, in a
    // test tool.
    let run = move || {
        // SAFETY: the caller guarantees that the matrices are valid when the stream gets there.
        unsafe { product.run() };
    };

    if driver::launch_each(stream, run) {
        SUCCESS
    } else {
        EXECUTION_FAILED
    }
}
