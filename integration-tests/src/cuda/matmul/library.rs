//! cuBLASLt, found at run time. All calls into the library are in this file.
//!
//! Signatures, numbers and the sizes of what it fills are those of cublasLt.h, versions 12 and 13.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use libloading::Library;
use thiserror::Error;
use zero_alloc::cuda::{CudaStream, interop};
use zero_alloc::device::DType;

/// What can go wrong with cuBLASLt.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum LibraryError {
    /// It is not on this machine.
    #[error(
        "cuBLASLt was not found; tried {}. Install it (pip install nvidia-cublas, or the CUDA toolkit) and set \
         ZERO_CUBLASLT to the library's path if the loader does not find it",
        tried.join("; ")
    )]
    NotFound {
        /// What was tried, each with the loader's answer.
        tried: Vec<String>,
    },
    /// The library lacks a function.
    #[error("{library} has no {symbol}: {message}")]
    MissingSymbol {
        /// The library.
        library: String,
        /// The function.
        symbol: &'static str,
        /// What the loader said.
        message: String,
    },
    /// It knows no way to compute this product.
    #[error("cuBLASLt has no algorithm for {product}")]
    NoAlgorithm {
        /// The product, in words.
        product: String,
    },
    /// A call failed.
    #[error("{call}: {message}")]
    Call {
        /// The function.
        call: &'static str,
        /// What it said.
        message: String,
    },
}

/// The loader's own words, which its error keeps as its source.
fn said(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

type Status = c_int;
type Raw = *mut c_void;

/// What the library says of an algorithm (`cublasLtMatmulHeuristicResult_t`).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Algorithm {
    data: [u64; 8],
    pub(super) workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// The functions that are used.
struct Calls {
    create: unsafe extern "C" fn(*mut Raw) -> Status,
    destroy: unsafe extern "C" fn(Raw) -> Status,
    status_string: unsafe extern "C" fn(Status) -> *const c_char,
    desc_create: unsafe extern "C" fn(*mut Raw, c_int, c_int) -> Status,
    desc_destroy: unsafe extern "C" fn(Raw) -> Status,
    desc_set: unsafe extern "C" fn(Raw, c_int, *const c_void, usize) -> Status,
    layout_create: unsafe extern "C" fn(*mut Raw, c_int, u64, u64, i64) -> Status,
    layout_destroy: unsafe extern "C" fn(Raw) -> Status,
    preference_create: unsafe extern "C" fn(*mut Raw) -> Status,
    preference_destroy: unsafe extern "C" fn(Raw) -> Status,
    preference_set: unsafe extern "C" fn(Raw, c_int, *const c_void, usize) -> Status,
    heuristic: unsafe extern "C" fn(Raw, Raw, Raw, Raw, Raw, Raw, Raw, c_int, *mut Algorithm, *mut c_int) -> Status,
    #[allow(clippy::type_complexity)]
    matmul: unsafe extern "C" fn(
        Raw,
        Raw,
        *const c_void,
        *const c_void,
        Raw,
        *const c_void,
        Raw,
        *const c_void,
        *const c_void,
        Raw,
        *mut c_void,
        Raw,
        *const c_void,
        *mut c_void,
        usize,
        Raw,
    ) -> Status,
}

impl Calls {
    fn load(library: &Library, path: &str) -> Result<Self, LibraryError> {
        macro_rules! get {
            ($symbol:literal) => {{
                // SAFETY: cublasLt.h gives the function this signature; the library outlives the pointer, since
                // `CublasLt` holds both.
                let found = unsafe { library.get(concat!($symbol, "\0").as_bytes()) };
                *found.map_err(|e| LibraryError::MissingSymbol {
                    library: path.to_owned(),
                    symbol: $symbol,
                    message: said(&e),
                })?
            }};
        }
        Ok(Self {
            create: get!("cublasLtCreate"),
            destroy: get!("cublasLtDestroy"),
            status_string: get!("cublasLtGetStatusString"),
            desc_create: get!("cublasLtMatmulDescCreate"),
            desc_destroy: get!("cublasLtMatmulDescDestroy"),
            desc_set: get!("cublasLtMatmulDescSetAttribute"),
            layout_create: get!("cublasLtMatrixLayoutCreate"),
            layout_destroy: get!("cublasLtMatrixLayoutDestroy"),
            preference_create: get!("cublasLtMatmulPreferenceCreate"),
            preference_destroy: get!("cublasLtMatmulPreferenceDestroy"),
            preference_set: get!("cublasLtMatmulPreferenceSetAttribute"),
            heuristic: get!("cublasLtMatmulAlgoGetHeuristic"),
            matmul: get!("cublasLtMatmul"),
        })
    }

    fn check(&self, call: &'static str, status: Status) -> Result<(), LibraryError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: takes any status, returns a static string or null.
        let text = unsafe { (self.status_string)(status) };
        let message = if text.is_null() {
            format!("status {status}")
        } else {
            // SAFETY: a string of the library, which is loaded.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(LibraryError::Call { call, message })
    }
}

/// A handle of the library, which the context that was current when it was made belongs to.
pub(super) struct CublasLt {
    calls: Calls,
    handle: Raw,
    /// Keeps `calls` valid.
    _library: Library,
}

// SAFETY: a handle may be used from any thread, also by several at once (the library's documentation says so).
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

/// The library's names, best first: `ZERO_CUBLASLT` alone if it is set, else the usual ones by the loader's own search
/// and in the toolkit that `CUDA_HOME` or `CUDA_PATH` names.
fn candidates(variable: impl Fn(&str) -> Option<String>) -> Vec<String> {
    if let Some(path) = variable("ZERO_CUBLASLT") {
        return vec![path];
    }
    let names = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
    let mut all: Vec<String> = names.iter().map(|&n| n.to_owned()).collect();
    for home in ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|v| variable(v)) {
        all.extend(names.iter().map(|n| format!("{home}/lib64/{n}")));
    }
    all
}

impl CublasLt {
    /// Looks for the library and makes a handle for the context that is current on this thread.
    pub(super) fn find() -> Result<Arc<Self>, LibraryError> {
        Self::find_among(&usual_paths())
    }

    fn find_among(paths: &[String]) -> Result<Arc<Self>, LibraryError> {
        let (library, calls) = load_among(paths)?;
        let mut handle: Raw = ptr::null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { (calls.create)(&raw mut handle) };
        calls.check("cublasLtCreate", status)?;
        Ok(Arc::new(Self { calls, handle, _library: library }))
    }
}

fn usual_paths() -> Vec<String> {
    candidates(|name| std::env::var(name).ok().filter(|v| !v.is_empty()))
}

/// Whether the library is there, without making anything.
pub(super) fn is_there() -> Result<(), LibraryError> {
    load_among(&usual_paths()).map(drop)
}

fn load_among(paths: &[String]) -> Result<(Library, Calls), LibraryError> {
    let mut tried = Vec::new();
    for path in paths {
        // SAFETY: loading runs the library's initialisers; the names are cuBLASLt's, or the user's choice.
        match unsafe { Library::new(path) } {
            Ok(library) => {
                let calls = Calls::load(&library, path)?;
                return Ok((library, calls));
            }
            Err(error) => tried.push(format!("{path}: {}", said(&error))),
        }
    }
    Err(LibraryError::NotFound { tried })
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: made by `create`, destroyed once.
        unsafe { (self.calls.destroy)(self.handle) };
    }
}

/// `cudaDataType_t`.
pub(super) fn data_type(dtype: DType) -> Option<c_int> {
    match dtype {
        DType::F32 => Some(0),
        DType::F16 => Some(2),
        DType::Bf16 => Some(14),
        _ => None,
    }
}

/// `CUBLAS_COMPUTE_32F`: fp32 sums; fp32 factors are not rounded to TF32.
const COMPUTE_F32: c_int = 68;
/// `CUDA_R_32F`, the type of alpha and beta.
const SCALE_F32: c_int = 0;

/// Attributes of a product (`cublasLtMatmulDescAttributes_t`).
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub(super) enum Attribute {
    TransposeA = 3,
    TransposeB = 4,
    Epilogue = 7,
    BiasPointer = 8,
    AuxPointer = 11,
    AuxStride = 12,
}

/// An object of the library, destroyed when it goes.
struct Owned {
    raw: Raw,
    destroy: unsafe extern "C" fn(Raw) -> Status,
    /// Keeps `destroy` valid.
    library: Arc<CublasLt>,
}

// SAFETY: plain data of the library, which no thread owns.
unsafe impl Send for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: made by the create function that belongs to `destroy`, destroyed once.
        unsafe { (self.destroy)(self.raw) };
    }
}

/// A matrix in column-major order.
pub(super) struct MatrixLayout(Owned);

impl MatrixLayout {
    pub(super) fn new(
        library: &Arc<CublasLt>,
        dtype: c_int,
        rows: usize,
        cols: usize,
        stride: usize,
    ) -> Result<Self, LibraryError> {
        let mut raw: Raw = ptr::null_mut();
        // SAFETY: writes one descriptor.
        let status =
            unsafe { (library.calls.layout_create)(&raw mut raw, dtype, rows as u64, cols as u64, stride as i64) };
        library.calls.check("cublasLtMatrixLayoutCreate", status)?;
        Ok(Self(Owned { raw, destroy: library.calls.layout_destroy, library: Arc::clone(library) }))
    }
}

/// What is computed: `d = epilogue(op(a) op(b) + c)`.
pub(super) struct Description(Owned);

impl Description {
    pub(super) fn new(library: &Arc<CublasLt>) -> Result<Self, LibraryError> {
        let mut raw: Raw = ptr::null_mut();
        // SAFETY: writes one descriptor.
        let status = unsafe { (library.calls.desc_create)(&raw mut raw, COMPUTE_F32, SCALE_F32) };
        library.calls.check("cublasLtMatmulDescCreate", status)?;
        Ok(Self(Owned { raw, destroy: library.calls.desc_destroy, library: Arc::clone(library) }))
    }

    /// Sets a 4-byte attribute.
    pub(super) fn set_number(&self, attribute: Attribute, value: u32) -> Result<(), LibraryError> {
        self.set(attribute, &value.to_le_bytes())
    }

    /// Sets an 8-byte attribute: an address or a stride.
    pub(super) fn set_wide(&self, attribute: Attribute, value: u64) -> Result<(), LibraryError> {
        self.set(attribute, &value.to_le_bytes())
    }

    fn set(&self, attribute: Attribute, bytes: &[u8]) -> Result<(), LibraryError> {
        let calls = &self.0.library.calls;
        // SAFETY: a live descriptor; the attribute is copied from as many bytes as are given.
        let status = unsafe { (calls.desc_set)(self.0.raw, attribute as c_int, bytes.as_ptr().cast(), bytes.len()) };
        calls.check("cublasLtMatmulDescSetAttribute", status)
    }
}

/// The layouts of the four matrices.
pub(super) struct Layouts {
    pub(super) a: MatrixLayout,
    pub(super) b: MatrixLayout,
    /// Of what is added, and of the result: their types and strides may differ.
    pub(super) c: MatrixLayout,
    pub(super) d: MatrixLayout,
}

/// The addresses of the four matrices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub(super) a: *const c_void,
    pub(super) b: *const c_void,
    pub(super) c: *const c_void,
    pub(super) d: *mut c_void,
}

/// `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES`.
const PREFERENCE_WORKSPACE: c_int = 1;
/// `CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES`; those of b, c and d follow.
const PREFERENCE_ALIGNMENT: c_int = 5;

impl CublasLt {
    /// The algorithm that the library thinks fastest, or none: for matrices aligned to `alignments` bytes (a, b, c, d).
    pub(super) fn choose(
        self: &Arc<Self>,
        what: &Description,
        layouts: &Layouts,
        alignments: [u32; 4],
        workspace_bytes: usize,
    ) -> Result<Option<Algorithm>, LibraryError> {
        let calls = &self.calls;
        let mut raw: Raw = ptr::null_mut();
        // SAFETY: writes one descriptor.
        let status = unsafe { (calls.preference_create)(&raw mut raw) };
        calls.check("cublasLtMatmulPreferenceCreate", status)?;
        let preference = Owned { raw, destroy: calls.preference_destroy, library: Arc::clone(self) };
        let set = |attribute: c_int, bytes: &[u8]| {
            // SAFETY: a live descriptor; the attribute is copied from as many bytes as are given.
            let status =
                unsafe { (calls.preference_set)(preference.raw, attribute, bytes.as_ptr().cast(), bytes.len()) };
            calls.check("cublasLtMatmulPreferenceSetAttribute", status)
        };
        set(PREFERENCE_WORKSPACE, &workspace_bytes.to_le_bytes())?;
        for (attribute, alignment) in (PREFERENCE_ALIGNMENT..).zip(alignments) {
            set(attribute, &alignment.to_le_bytes())?;
        }
        let (mut found, mut count) = (Algorithm::default(), 0);
        let (a, b, c, d) = (layouts.a.0.raw, layouts.b.0.raw, layouts.c.0.raw, layouts.d.0.raw);
        // SAFETY: live descriptors; at most one result and its count are written.
        let status = unsafe {
            (calls.heuristic)(self.handle, what.0.raw, a, b, c, d, preference.raw, 1, &raw mut found, &raw mut count)
        };
        // The library's way to say that there is none is an error or no result.
        Ok((status == 0 && count > 0 && found.state == 0).then_some(found))
    }

    /// Enqueues the product on `stream`: `beta` times c is added.
    ///
    /// # Safety
    /// The addresses are of matrices with these layouts (and those in the description too), and of a workspace of as many
    /// bytes as the algorithm asks for; all stay valid until the stream has run, which orders all conflicting accesses.
    #[allow(clippy::too_many_arguments)]
    pub(super) unsafe fn matmul(
        &self,
        stream: &CudaStream,
        what: &Description,
        layouts: &Layouts,
        at: Addresses,
        beta: f32,
        algorithm: &Algorithm,
        workspace: *mut c_void,
    ) -> Result<(), LibraryError> {
        let alpha = 1.0f32;
        let (a, b, c, d) = (layouts.a.0.raw, layouts.b.0.raw, layouts.c.0.raw, layouts.d.0.raw);
        // SAFETY: live descriptors, host scalars that are read before the call returns, and the caller's promise.
        let status = unsafe {
            (self.calls.matmul)(
                self.handle,
                what.0.raw,
                (&raw const alpha).cast(),
                at.a,
                a,
                at.b,
                b,
                (&raw const beta).cast(),
                at.c,
                c,
                at.d,
                d,
                (&raw const algorithm.data).cast(),
                workspace,
                algorithm.workspace_bytes,
                interop::raw_stream(stream),
            )
        };
        self.calls.check("cublasLtMatmul", status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_choice_is_the_only_one_tried() {
        let chosen = |name: &str| (name == "ZERO_CUBLASLT").then(|| "/opt/mine.so".to_owned());
        assert_eq!(candidates(chosen), ["/opt/mine.so"]);
        let usual = candidates(|name| (name == "CUDA_HOME").then(|| "/cuda".to_owned()));
        assert!(usual.len() == 6 && usual[3].starts_with("/cuda/"), "{usual:?}");
    }

    #[test]
    fn a_missing_library_is_an_error_that_names_what_was_tried() {
        let error = CublasLt::find_among(&["libno-such-blas.so.1".into(), "libnor-this.so".into()]).err().unwrap();
        let LibraryError::NotFound { tried } = &error else { panic!("{error}") };
        assert_eq!(tried.len(), 2);
        let text = error.to_string();
        assert!(text.contains("libno-such-blas.so.1") && text.contains("libnor-this.so"), "{text}");
    }

    #[test]
    fn another_library_in_its_place_is_an_error_that_names_the_function() {
        let error = CublasLt::find_among(&["libc.so.6".into()]).err().unwrap();
        assert!(matches!(error, LibraryError::MissingSymbol { symbol: "cublasLtCreate", .. }), "{error}");
    }
}
