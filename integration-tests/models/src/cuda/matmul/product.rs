//! Calls of cuBLASLt: descriptors of matrices and products, the choice of an algorithm, and the
//! product itself.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use zero_alloc::cuda::{CudaStream, interop};
use zero_alloc::device::DType;

use super::library::{Algorithm, CublasLt, Raw, Status};
use crate::cuda::error::LibraryError;

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
        let status = unsafe {
            (library.calls.layout_create)(
                &raw mut raw,
                dtype,
                rows as u64,
                cols as u64,
                stride as i64,
            )
        };
        library.calls.check("cublasLtMatrixLayoutCreate", status)?;
        Ok(Self(Owned {
            raw,
            destroy: library.calls.layout_destroy,
            library: Arc::clone(library),
        }))
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
        Ok(Self(Owned {
            raw,
            destroy: library.calls.desc_destroy,
            library: Arc::clone(library),
        }))
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
        let status = unsafe {
            (calls.desc_set)(
                self.0.raw,
                attribute as c_int,
                bytes.as_ptr().cast(),
                bytes.len(),
            )
        };
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

impl Layouts {
    fn raw(&self) -> [Raw; 4] {
        [&self.a, &self.b, &self.c, &self.d].map(|layout| layout.0.raw)
    }
}

/// The addresses of the four matrices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub(super) a: *const c_void,
    pub(super) b: *const c_void,
    pub(super) c: *const c_void,
    pub(super) d: *mut c_void,
}

const PREFERENCE_WORKSPACE: c_int = 1;
/// `CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK`, and the only scheme that keeps the partial sums of
/// several blocks in fp32; the others round them to the type of the result.
const PREFERENCE_REDUCTION: c_int = 3;
const REDUCTION_COMPUTE_TYPE: u32 = 2;
/// `CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES`; those of b, c and d follow.
const PREFERENCE_ALIGNMENT: c_int = 5;

/// Number of algorithms requested.
const CANDIDATES: usize = 32;

/// The attributes of an algorithm's configuration (`cublasLtMatmulAlgoConfigAttributes_t`) that
/// describe it, with their sizes in bytes.
const CONFIGURATION: [(&str, c_int, usize); 8] = [
    ("id", 0, 4),
    ("tile", 1, 4),
    ("stages", 6, 4),
    ("split-K", 2, 4),
    ("reduction", 3, 4),
    ("swizzle", 4, 4),
    ("inner", 7, 2),
    ("cluster", 8, 2),
];

impl CublasLt {
    /// The library's version, as a number.
    pub(super) fn version(&self) -> usize {
        // SAFETY: returns a number.
        unsafe { (self.calls.version)() }
    }

    /// The numbers of an algorithm's configuration that the library names, such as its tile and the
    /// split of its sums.
    pub(super) fn describe(&self, algorithm: &Algorithm) -> String {
        let mut text = String::new();
        for (name, number, bytes) in CONFIGURATION {
            let mut value = [0u8; 4];
            let mut written = 0;
            let data = (&raw const algorithm.data).cast();
            let to = value.as_mut_ptr().cast();
            // SAFETY: an algorithm of the library or one that it has checked; writes at most
            // `bytes` bytes and a size.
            let status = unsafe {
                (self.calls.algorithm_attribute)(data, number, to, bytes, &raw mut written)
            };
            if status == 0 {
                text += &format!("{name} {}, ", u32::from_le_bytes(value));
            }
        }
        text + &format!("workspace {}", algorithm.workspace_bytes)
    }

    /// The algorithm with this description, if the library accepts it for the product and it needs
    /// at most `workspace_bytes`.
    pub(super) fn accept(
        &self,
        what: &Description,
        layouts: &Layouts,
        data: [u64; 8],
        workspace_bytes: usize,
    ) -> Option<Algorithm> {
        let [a, b, c, d] = layouts.raw();
        let mut found = Algorithm::default();
        let at = (&raw const data).cast();
        // SAFETY: live descriptors; the library checks the 64 bytes of an algorithm and writes one
        // result.
        let status = unsafe {
            (self.calls.check_algorithm)(self.handle, what.0.raw, a, b, c, d, at, &raw mut found)
        };
        found.data = data;
        (status == 0 && found.state == 0 && found.workspace_bytes <= workspace_bytes)
            .then_some(found)
    }

    /// The library's usable algorithms for matrices aligned to `alignments` bytes (a, b, c, d),
    /// those first that it estimates to be faster. The library has no attribute for beta: its
    /// estimate is the same with and without an addend.
    pub(super) fn candidates(
        self: &Arc<Self>,
        what: &Description,
        layouts: &Layouts,
        alignments: [u32; 4],
        workspace_bytes: usize,
    ) -> Result<Vec<Algorithm>, LibraryError> {
        let calls = &self.calls;
        let mut raw: Raw = ptr::null_mut();
        // SAFETY: writes one descriptor.
        let status = unsafe { (calls.preference_create)(&raw mut raw) };
        calls.check("cublasLtMatmulPreferenceCreate", status)?;
        let preference = Owned {
            raw,
            destroy: calls.preference_destroy,
            library: Arc::clone(self),
        };

        let set = |attribute: c_int, bytes: &[u8]| {
            // SAFETY: a live descriptor; the attribute is copied from `bytes`.
            let status = unsafe {
                (calls.preference_set)(
                    preference.raw,
                    attribute,
                    bytes.as_ptr().cast(),
                    bytes.len(),
                )
            };
            calls.check("cublasLtMatmulPreferenceSetAttribute", status)
        };

        set(PREFERENCE_WORKSPACE, &workspace_bytes.to_le_bytes())?;
        set(PREFERENCE_REDUCTION, &REDUCTION_COMPUTE_TYPE.to_le_bytes())?;
        for (attribute, alignment) in (PREFERENCE_ALIGNMENT..).zip(alignments) {
            set(attribute, &alignment.to_le_bytes())?;
        }
        let mut found = [Algorithm::default(); CANDIDATES];
        let mut count = 0;
        let [a, b, c, d] = layouts.raw();
        let raw = preference.raw;
        let most = CANDIDATES as c_int;

        // SAFETY: live descriptors; writes at most `CANDIDATES` results and their count.
        let status = unsafe {
            (calls.heuristic)(
                self.handle,
                what.0.raw,
                a,
                b,
                c,
                d,
                raw,
                most,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };

        // An error means that there is no algorithm.
        let count = if status == 0 {
            usize::try_from(count).unwrap_or(0)
        } else {
            0
        };

        Ok(found
            .into_iter()
            .take(count)
            .filter(|algorithm| algorithm.state == 0)
            .collect())
    }

    /// Enqueues `alpha` times the product on `stream`, to which `beta` times c is added.
    ///
    /// # Safety
    /// The addresses are of matrices with these layouts (and those in the description too), and of
    /// a workspace of as many bytes as the algorithm requires; all stay valid until the stream has
    /// run, which orders all conflicting accesses.
    #[allow(clippy::too_many_arguments)]
    pub(super) unsafe fn matmul(
        &self,
        stream: &CudaStream,
        what: &Description,
        layouts: &Layouts,
        at: Addresses,
        [alpha, beta]: [f32; 2],
        algorithm: &Algorithm,
        workspace: *mut c_void,
    ) -> Result<(), LibraryError> {
        let [a, b, c, d] = layouts.raw();

        // SAFETY: live descriptors, host scalars that are read before the call returns, and the
        // caller's promise.
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
