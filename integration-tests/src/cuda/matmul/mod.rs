//! Matrix products by cuBLASLt, with biases and GELU in the same pass over memory.
//!
//! All matrices here are row-major. The library is column-major, so it computes the transposed product:
//! `(x w)^T = w^T x^T`, where a row-major matrix is its own transpose in column-major order.

mod library;
mod product;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use parking_lot::Mutex;
use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DType, DeviceError, Memory};

use super::error::{OpError, check_len};
use library::{Algorithm, CublasLt};
use product::{Addresses, Attribute, Description, Layouts, MatrixLayout, data_type};

pub use library::LibraryError;

/// Checks that cuBLASLt can be loaded.
///
/// # Errors
/// The library was not found or lacks a function.
pub fn find_library() -> Result<(), LibraryError> {
    library::is_there()
}

/// Workspace limit of algorithms: NVIDIA's recommendation for its larger devices.
pub const WORKSPACE_BYTES: usize = 32 << 20;

/// A row-major matrix: rows of `cols` elements, `stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    data: AnySlice,
    rows: usize,
    cols: usize,
    stride: usize,
    transposed: bool,
}

impl Matrix {
    /// All of `data` as rows of `cols` elements.
    pub fn new(data: AnySlice, cols: usize) -> Self {
        Self::with_stride(data, cols, cols)
    }

    /// Rows of `cols` elements, `stride` elements apart. Their number is `data.len() / stride`.
    pub fn with_stride(data: AnySlice, cols: usize, stride: usize) -> Self {
        Self { data, rows: data.len() / stride.max(1), cols, stride, transposed: false }
    }

    /// The transposed matrix, without a copy.
    #[must_use]
    pub fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, transposed: !self.transposed, ..self }
    }

    /// Rows and columns in memory.
    fn stored(&self) -> [usize; 2] {
        if self.transposed { [self.cols, self.rows] } else { [self.rows, self.cols] }
    }
}

/// The greatest power of two, at most 32, that divides the address. Tensor cores need 16 bytes. A unit's flat
/// parameter is aligned to 32 bytes at every stage, so a product has the same algorithm and bits at all stages.
fn alignment(slice: AnySlice) -> u32 {
    1 << slice.as_ptr().addr().trailing_zeros().min(5)
}

/// The operation on the sums before they are stored.
#[derive(Clone, Copy, Debug)]
pub enum Epilogue {
    /// Nothing.
    None,
    /// A bias for each column.
    Bias(AnySlice),
    /// A bias for each column, then GELU; its input is stored for the backward pass.
    BiasGelu {
        /// The bias.
        bias: AnySlice,
        /// Output for GELU's input, in the shape of the result.
        input: AnySlice,
    },
    /// Multiplies by GELU's derivative at its input.
    GeluBackward {
        /// GELU's input, in the shape of the result.
        input: AnySlice,
    },
}

impl Epilogue {
    /// `cublasLtEpilogue_t`.
    fn code(self) -> u32 {
        match self {
            Self::None => 1,
            Self::Bias(_) => 4,
            Self::BiasGelu { .. } => 32 | 128 | 4,
            Self::GeluBackward { .. } => 64 | 128,
        }
    }

    fn bias(self) -> Option<AnySlice> {
        match self {
            Self::Bias(bias) | Self::BiasGelu { bias, .. } => Some(bias),
            _ => None,
        }
    }

    fn gelu_input(self) -> Option<AnySlice> {
        match self {
            Self::BiasGelu { input, .. } | Self::GeluBackward { input } => Some(input),
            _ => None,
        }
    }
}

/// `out = epilogue(left right + add)`.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// `[m, k]`.
    pub left: Matrix,
    /// `[k, n]`.
    pub right: Matrix,
    /// `[m, n]`, not transposed; may be of another type than the factors.
    pub out: Matrix,
    /// `[m, n]` in the layout of `out`; `out` itself to add to it.
    pub add: Option<Matrix>,
    /// The operation on the sums.
    pub epilogue: Epilogue,
}

impl Product {
    /// The label in timelines: one for each kind of product.
    fn label(&self) -> &'static str {
        match (self.epilogue, self.add.is_some(), self.left.data.dtype() == self.out.data.dtype()) {
            (Epilogue::Bias(_), false, _) => "matmul + bias",
            (Epilogue::Bias(_), true, _) => "matmul + bias + residual",
            (Epilogue::BiasGelu { .. }, ..) => "matmul + bias, GELU",
            (Epilogue::GeluBackward { .. }, ..) => "matmul, GELU backward",
            (Epilogue::None, true, false) => "matmul onto fp32",
            (Epilogue::None, ..) => "matmul",
        }
    }
}

/// All that determines the choice of an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    sizes: [usize; 3],
    strides: [usize; 4],
    transposed: [bool; 2],
    dtypes: [DType; 2],
    /// Of the factors, the addend and the result in the library's order.
    alignments: [u32; 4],
    /// Alignments of the bias and of GELU's input, which the choice depends on too.
    operand_alignments: [Option<u32>; 2],
    adds: bool,
    epilogue: u32,
}

struct Plan {
    description: Description,
    layouts: Layouts,
    algorithm: Algorithm,
}

/// Matrix products on a device; algorithms are chosen once for each shape.
pub struct Matmul {
    device: CudaDevice,
    library: Arc<CublasLt>,
    workspace: AnySlice,
    plans: Mutex<HashMap<Key, Option<Plan>>>,
}

impl std::fmt::Debug for Matmul {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Matmul({} shapes)", self.plans.lock().len())
    }
}

impl Matmul {
    /// Loads the library. `workspace` (see [`WORKSPACE_BYTES`]) is aligned to 256 bytes; one stream at a time uses it.
    ///
    /// # Errors
    /// [`LibraryError::NotFound`], the library does not support this device, or the workspace is not aligned.
    pub fn new(device: &CudaDevice, workspace: AnySlice) -> Result<Self, OpError> {
        check_len("matmul: workspace's address modulo 256", workspace.as_ptr().addr() % 256, 0)?;
        workspace.check_device("matmul: workspace", device.id())?;
        device.bind()?;
        let (device, library) = (device.clone(), CublasLt::find()?);
        Ok(Self { device, library, workspace: workspace.bytes(), plans: Mutex::default() })
    }

    /// Whether the library can compute `product` as it is.
    ///
    /// # Errors
    /// The matrices do not fit one another.
    pub fn supports(&self, product: &Product) -> Result<bool, OpError> {
        let key = check(product)?;
        let mut plans = self.plans.lock();
        Ok(self.plan(&mut plans, key, product)?.is_some())
    }

    /// Enqueues `product` on `stream`.
    ///
    /// # Errors
    /// The matrices do not fit one another, the library has no algorithm, or the stream failed.
    pub fn run(&self, stream: &CudaStream, product: &Product) -> Result<(), OpError> {
        let key = check(product)?;
        let mut plans = self.plans.lock();
        let Some(plan) = self.plan(&mut plans, key, product)? else {
            let [m, n, k] = key.sizes;
            let product = format!("[{m}, {k}] x [{k}, {n}], {} to {}, {key:?}", key.dtypes[0], key.dtypes[1]);
            return Err(LibraryError::NoAlgorithm { product }.into());
        };
        plan.point_at(product, |slice| slice.as_ptr().addr() as u64)?;
        let Product { left, right, out, add, .. } = product;
        let id = self.device.id();
        stream.check_device(product.label(), id)?;
        let matrices = [left, right, out].into_iter().chain(add).map(|matrix| matrix.data);
        for slice in matrices.chain(product.epilogue.bias()).chain(product.epilogue.gelu_input()) {
            slice.check_device(product.label(), id)?;
        }
        // With beta = 0 the library does not read c.
        let (c, beta) = add.as_ref().map_or((out, 0.0), |add| (add, 1.0));
        let at = Addresses {
            a: right.data.as_ptr().cast_const().cast(),
            b: left.data.as_ptr().cast_const().cast(),
            c: c.data.as_ptr().cast_const().cast(),
            d: out.data.as_ptr().cast(),
        };
        let workspace = self.workspace.as_ptr().cast();
        let Plan { description, layouts, algorithm } = plan;
        let enqueue = || {
            // SAFETY: `check` has compared sizes; the slices' makers promised that they are valid and that accesses
            // are ordered by the stream; the workspace has the size limit given to the choice of the algorithm.
            unsafe { self.library.matmul(stream, description, layouts, at, beta, algorithm, workspace) }
                .map_err(|e| DeviceError::Driver { call: "cublasLtMatmul", message: e.to_string() })
        };
        Ok(stream.labelled(product.label(), enqueue)?)
    }

    fn plan<'a>(
        &self,
        plans: &'a mut HashMap<Key, Option<Plan>>,
        key: Key,
        product: &Product,
    ) -> Result<Option<&'a Plan>, OpError> {
        // The library uses the context that is current on the calling thread.
        self.device.bind()?;
        let plan = match plans.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(self.make_plan(&key, product)?),
        };
        Ok(plan.as_ref())
    }

    fn make_plan(&self, key: &Key, product: &Product) -> Result<Option<Plan>, OpError> {
        let library = &self.library;
        let Product { left, right, out, add, epilogue } = product;
        let layout = |m: &Matrix, dtype: DType| {
            let code = data_type(dtype).ok_or(zero_kernels::KernelError::Unsupported { what: "matmul", dtype })?;
            let [rows, cols] = m.stored();
            // The rows of a row-major matrix are the columns of a column-major one.
            Ok::<_, OpError>(MatrixLayout::new(library, code, cols, rows, m.stride)?)
        };
        let layouts = Layouts {
            a: layout(right, key.dtypes[0])?,
            b: layout(left, key.dtypes[0])?,
            c: layout(add.as_ref().unwrap_or(out), key.dtypes[1])?,
            d: layout(out, key.dtypes[1])?,
        };
        let description = Description::new(library)?;
        description.set_number(Attribute::TransposeA, u32::from(right.transposed))?;
        description.set_number(Attribute::TransposeB, u32::from(left.transposed))?;
        description.set_number(Attribute::Epilogue, epilogue.code())?;
        if epilogue.gelu_input().is_some() {
            description.set_wide(Attribute::AuxStride, out.cols as u64)?;
        }
        let plan = Plan { description, layouts, algorithm: Algorithm::default() };
        // The choice depends only on the alignment of an address, so this address has exactly the key's alignment.
        plan.point_at(product, |slice| alignment(slice).into())?;
        let found = library.choose(&plan.description, &plan.layouts, key.alignments, self.workspace.len())?;
        Ok(found.map(|algorithm| Plan { algorithm, ..plan }))
    }
}

impl Plan {
    /// Sets the addresses of this product's bias and GELU input in the description.
    fn point_at(&self, product: &Product, address: impl Fn(AnySlice) -> u64) -> Result<(), LibraryError> {
        if let Some(bias) = product.epilogue.bias() {
            self.description.set_wide(Attribute::BiasPointer, address(bias))?;
        }
        if let Some(input) = product.epilogue.gelu_input() {
            self.description.set_wide(Attribute::AuxPointer, address(input))?;
        }
        Ok(())
    }
}

/// Compares the sizes and types of a product's matrices.
fn check(product: &Product) -> Result<Key, OpError> {
    let Product { left, right, out, add, epilogue } = product;
    let (m, n, k) = (left.rows, right.cols, left.cols);
    check_len("matmul: rows of the right factor", right.rows, k)?;
    check_len("matmul: rows of the result", out.rows, m)?;
    check_len("matmul: columns of the result", out.cols, n)?;
    check_len("matmul: a transposed result", usize::from(out.transposed), 0)?;
    for (what, matrix) in [
        ("matmul: left", Some(left)),
        ("matmul: right", Some(right)),
        ("matmul: result", Some(out)),
        ("matmul: addend", add.as_ref()),
    ] {
        let Some(matrix) = matrix else { continue };
        let [rows, cols] = matrix.stored();
        let needs = rows.saturating_sub(1).saturating_mul(matrix.stride).saturating_add(cols);
        if matrix.stride < cols || matrix.data.len() < needs {
            return Err(OpError::Length { what, expected: needs, got: matrix.data.len() });
        }
    }
    let same = |what, expected: DType, got: DType| {
        if expected == got { Ok(()) } else { Err(OpError::DType { what, expected, got }) }
    };
    same("matmul: right", left.data.dtype(), right.data.dtype())?;
    if let Some(add) = add {
        check_len("matmul: rows of the addend", add.rows, m)?;
        check_len("matmul: columns of the addend", add.cols, n)?;
        check_len("matmul: a transposed addend", usize::from(add.transposed), 0)?;
        same("matmul: addend", out.data.dtype(), add.data.dtype())?;
    }
    if let Some(bias) = epilogue.bias() {
        check_len("matmul: bias", bias.len(), n)?;
        same("matmul: bias", out.data.dtype(), bias.dtype())?;
    }
    if let Some(input) = epilogue.gelu_input() {
        check_len("matmul: GELU's input", input.len(), m * n)?;
        same("matmul: GELU's input", out.data.dtype(), input.dtype())?;
    }
    let c = add.as_ref().unwrap_or(out);
    Ok(Key {
        sizes: [m, n, k],
        strides: [left.stride, right.stride, c.stride, out.stride],
        transposed: [left.transposed, right.transposed],
        dtypes: [left.data.dtype(), out.data.dtype()],
        alignments: [right, left, c, out].map(|m| alignment(m.data)),
        operand_alignments: [epilogue.bias(), epilogue.gelu_input()].map(|slice| slice.map(alignment)),
        adds: add.is_some(),
        epilogue: epilogue.code(),
    })
}
