//! Calls of cuBLASLt: descriptors of matrices and products, the choice of an algorithm, and the product itself.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use zero_alloc::cuda::{CudaStream, interop};
use zero_alloc::device::DType;

use super::library::{Algorithm, CublasLt, LibraryError, Raw, Status};

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

/// An object of the library. Dropping it destroys the object.
struct Owned {
    raw: Raw,
    destroy: unsafe extern "C" fn(Raw) -> Status,
    /// Keeps `destroy` valid.
    library: Arc<CublasLt>,
}

// SAFETY: plain data of the library that is not bound to a thread.
unsafe impl Send for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: created by the function that belongs to `destroy`, destroyed once.
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

/// The computation `d = epilogue(op(a) op(b) + c)`.
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
        // SAFETY: a live descriptor; the attribute is copied from `bytes`.
        let status = unsafe { (calls.desc_set)(self.0.raw, attribute as c_int, bytes.as_ptr().cast(), bytes.len()) };
        calls.check("cublasLtMatmulDescSetAttribute", status)
    }
}

/// The layouts of the four matrices.
pub(super) struct Layouts {
    pub(super) a: MatrixLayout,
    pub(super) b: MatrixLayout,
    /// The addend's layout, and the result's: their strides may differ.
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
/// `CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK`, and the only scheme that keeps the partial sums of
/// several blocks in fp32; the others round them to the type of the result.
const PREFERENCE_REDUCTION: c_int = 3;
const REDUCTION_COMPUTE_TYPE: u32 = 2;
/// `CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES`; those of b, c and d follow.
const PREFERENCE_ALIGNMENT: c_int = 5;

/// Number of algorithms requested, because the first may not be usable.
const CANDIDATES: usize = 8;

impl CublasLt {
    /// The library's first usable algorithm, if any, for matrices aligned to `alignments` bytes (a, b, c, d).
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
            // SAFETY: a live descriptor; the attribute is copied from `bytes`.
            let status =
                unsafe { (calls.preference_set)(preference.raw, attribute, bytes.as_ptr().cast(), bytes.len()) };
            calls.check("cublasLtMatmulPreferenceSetAttribute", status)
        };
        set(PREFERENCE_WORKSPACE, &workspace_bytes.to_le_bytes())?;
        set(PREFERENCE_REDUCTION, &REDUCTION_COMPUTE_TYPE.to_le_bytes())?;
        for (attribute, alignment) in (PREFERENCE_ALIGNMENT..).zip(alignments) {
            set(attribute, &alignment.to_le_bytes())?;
        }
        let (mut found, mut count) = ([Algorithm::default(); CANDIDATES], 0);
        let (a, b, c, d) = (layouts.a.0.raw, layouts.b.0.raw, layouts.c.0.raw, layouts.d.0.raw);
        let (raw, most) = (preference.raw, CANDIDATES as c_int);
        // SAFETY: live descriptors; writes at most `CANDIDATES` results and their count.
        let status = unsafe {
            (calls.heuristic)(self.handle, what.0.raw, a, b, c, d, raw, most, found.as_mut_ptr(), &raw mut count)
        };
        // An error means that there is no algorithm. The results are sorted by estimated time.
        let count = if status == 0 { usize::try_from(count).unwrap_or(0) } else { 0 };
        Ok(found.into_iter().take(count).find(|algorithm| algorithm.state == 0))
    }

    /// Enqueues the product on `stream`: `beta` times c is added.
    ///
    /// # Safety
    /// The addresses are of matrices with these layouts (and those in the description too), and of a workspace of as
    /// many bytes as the algorithm requires; all stay valid until the stream has run, which orders all conflicting
    /// accesses.
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
