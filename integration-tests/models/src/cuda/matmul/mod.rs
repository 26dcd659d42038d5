//! Matrix products by cuBLASLt, with biases and GELU in the same pass over memory.
//!
//! The library proposes several algorithms for a shape, which differ in speed and in the order of
//! their sums. The first is used, or with [`Timing`] the fastest.
//!
//! All matrices here are row-major. The library is column-major, so it computes the transposed
//! product: `(x w)^T = w^T x^T`, where a row-major matrix is its own transpose in column-major
//! order.

mod kept;
mod library;
mod of_matrices;
mod product;
mod product_operands;
mod timing;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use zero_alloc::Purpose;
use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DType, DeviceError, Memory};

use super::error::{OpError, at_least, check_len};
use library::{Algorithm, CublasLt};
use product::{Addresses, Attribute, Description, Layouts, MatrixLayout, data_type};
use product_operands::{Key, alignment, check};

pub use super::error::LibraryError;
pub use of_matrices::{CublasLtProducts, PRODUCTS_WORKSPACE_BYTES};
pub use product_operands::{Epilogue, Matrix, Product};
pub use timing::{FOLDER_VARIABLE, TIMING_VARIABLE, Timing};

/// Checks that cuBLASLt can be loaded.
///
/// # Errors
/// The library was not found or lacks a function.
pub fn find_library() -> Result<(), LibraryError> {
    library::is_there()
}

/// The least workspace: NVIDIA's recommendation for its larger devices.
const LEAST_WORKSPACE_BYTES: u64 = 32 << 20;
/// The largest workspace.
const MOST_WORKSPACE_BYTES: u64 = 256 << 20;
/// Parts of the sums of a weight's gradient that fit the workspace. Each part is a matrix in fp32.
const PARTS: u64 = 16;

/// The workspace for products whose sums are worth splitting, the gradients of weights of at most
/// `weight_elems` elements: 32 to 256 MiB. Large devices are filled only if several blocks compute
/// parts of one sum, which they leave here.
pub fn workspace_bytes(weight_elems: u64) -> u64 {
    weight_elems
        .saturating_mul(4 * PARTS)
        .clamp(LEAST_WORKSPACE_BYTES, MOST_WORKSPACE_BYTES)
}

struct Plan {
    description: Description,
    layouts: Layouts,
    /// The library's proposals, best first.
    candidates: Vec<Algorithm>,
    /// The algorithm in use, once the product has run.
    chosen: Option<Algorithm>,
    /// The answer of [`Matmul::is_faster`], once it is known.
    is_faster: Option<bool>,
}

/// Matrix products on a device; algorithms are chosen once for each shape.
pub struct Matmul {
    device: CudaDevice,
    library: Arc<CublasLt>,
    /// Empty if each product comes with its own.
    workspace: AnySlice,
    workspace_bytes: usize,
    /// The card and the versions of driver and library, and the limit of the workspace: choices by
    /// time are for these.
    identity: String,
    timing: Option<Timing>,
    plans: Mutex<HashMap<Key, Plan>>,
}

impl std::fmt::Debug for Matmul {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Matmul({} shapes)", self.plans.lock().len())
    }
}

impl Matmul {
    /// Loads the library. `workspace` (see [`workspace_bytes`]) is aligned to 256 bytes; one stream
    /// at a time uses it.
    ///
    /// # Errors
    /// [`LibraryError::NotFound`], the library does not support this device, or the workspace is
    /// not aligned.
    pub fn new(device: &CudaDevice, workspace: AnySlice) -> Result<Self, OpError> {
        let matmul = Self::with_limit(device, workspace.bytes(), workspace.len_bytes())?;
        matmul.check_workspace(workspace)?;
        Ok(matmul)
    }

    /// With a workspace of at most `workspace_bytes`.
    fn with_limit(
        device: &CudaDevice,
        workspace: AnySlice,
        workspace_bytes: usize,
    ) -> Result<Self, OpError> {
        device.bind()?;
        let device = device.clone();
        let library = CublasLt::find()?;
        let ((major, minor), (driver, update)) = (device.arch(), CudaDevice::driver_version()?);
        let name = device.name();
        let version = library.version();
        let identity = format!(
            "{name}, sm_{major}{minor}, driver {driver}.{update}, cuBLASLt {version}, at most {workspace_bytes} bytes of workspace"
        );

        Ok(Self {
            device,
            library,
            workspace,
            workspace_bytes,
            identity,
            timing: None,
            plans: Mutex::default(),
        })
    }

    /// Chooses algorithms by time, or with `None` takes the library's first one, which is the
    /// default.
    #[must_use]
    pub fn with_timing(self, timing: Option<Timing>) -> Self {
        Self { timing, ..self }
    }

    /// Whether the library can compute `product` as it is.
    ///
    /// # Errors
    /// The matrices do not fit one another.
    pub fn supports(&self, product: &Product) -> Result<bool, OpError> {
        let key = check(product)?;
        let mut plans = self.plans.lock();
        Ok(!self.plan(&mut plans, key, product)?.candidates.is_empty())
    }

    /// Enqueues `product` on `stream`. With [`Timing`] the first product of a shape that is not
    /// kept on disk is measured before: the host waits for the stream, and what the product writes
    /// is written several times.
    ///
    /// # Errors
    /// The matrices do not fit one another, the library has no algorithm, or the stream failed or
    /// did not end within ten minutes when the host waited for it.
    pub fn run(&self, stream: &CudaStream, product: &Product) -> Result<(), OpError> {
        self.run_in(stream, product, self.workspace)
    }

    /// [`Self::run`] with a workspace of `workspace_bytes`.
    fn run_in(
        &self,
        stream: &CudaStream,
        product: &Product,
        workspace: AnySlice,
    ) -> Result<(), OpError> {
        self.check_workspace(workspace)?;
        let key = check(product)?;
        let mut plans = self.plans.lock();
        let plan = self.plan(&mut plans, key, product)?;
        plan.point_at(product, |slice| slice.as_ptr().addr() as u64)?;
        let Product {
            left,
            right,
            out,
            add,
            ..
        } = product;

        let id = self.device.id();
        stream.check_device(product.label(), id)?;
        let matrices = [left, right, out]
            .into_iter()
            .chain(add)
            .map(|matrix| matrix.data);
        for slice in matrices
            .chain(product.epilogue.bias())
            .chain(product.epilogue.gelu_input())
        {
            slice.check_device(product.label(), id)?;
        }
        let algorithm = match plan.chosen {
            Some(chosen) => chosen,
            None => self.choose(stream, key, product, plan)?,
        };

        // While a graph is recorded nothing is measured; later products of this shape may be.
        if !stream.is_recorded() {
            plan.chosen = Some(algorithm);
        }
        let enqueue = || {
            // SAFETY: `check` has compared sizes; the slices' makers promised that they are valid
            // and that accesses are ordered by the stream.
            unsafe { self.enqueue(stream, plan, product, [out.data, workspace], &algorithm) }
                .map_err(|e| DeviceError::Driver {
                    call: "cublasLtMatmul",
                    message: e.to_string(),
                })
        };

        Ok(stream.labelled(product.label(), enqueue)?)
    }

    /// Checks the place and the size of a workspace.
    fn check_workspace(&self, workspace: AnySlice) -> Result<(), OpError> {
        let what = "matmul: workspace's address modulo 256";
        check_len(what, workspace.as_ptr().addr() % 256, 0)?;
        workspace.check_device("matmul: workspace", self.device.id())?;
        let bytes = workspace.len_bytes();
        at_least("matmul: workspace", bytes, self.workspace_bytes)
    }

    /// Enqueues the product with its result in `out` and an algorithm that was chosen for the plan.
    ///
    /// # Safety
    /// The slices of `product`, to which the plan points, and `out` are valid for the layouts of
    /// the plan, and `workspace` has `workspace_bytes`, until the stream has run, which orders all
    /// conflicting accesses.
    unsafe fn enqueue(
        &self,
        stream: &CudaStream,
        plan: &Plan,
        product: &Product,
        [out, workspace]: [AnySlice; 2],
        algorithm: &Algorithm,
    ) -> Result<(), LibraryError> {
        // With beta = 0 the library does not read c.
        let (c, beta) = product
            .add
            .map_or((out, 0.0), |add| (add.data, product.add_scale));
        let at = Addresses {
            a: product.right.data.as_ptr().cast_const().cast(),
            b: product.left.data.as_ptr().cast_const().cast(),
            c: c.as_ptr().cast_const().cast(),
            d: out.as_ptr().cast(),
        };

        let workspace = workspace.as_ptr().cast();
        // SAFETY: the caller's promise; the workspace has the size limit given to the choice of the
        // algorithm.
        unsafe {
            self.library.matmul(
                stream,
                &plan.description,
                &plan.layouts,
                at,
                [product.scale, beta],
                algorithm,
                workspace,
            )
        }
    }

    /// The algorithm for a product's shape.
    fn choose(
        &self,
        stream: &CudaStream,
        key: Key,
        product: &Product,
        plan: &Plan,
    ) -> Result<Algorithm, OpError> {
        let Some(&first) = plan.candidates.first() else {
            return Err(LibraryError::NoAlgorithm {
                product: format!("{}, {key:?}", key.text()),
            }
            .into());
        };

        let Some(timing) = self.timing.as_ref().filter(|_| plan.candidates.len() > 1) else {
            return Ok(first);
        };
        let accept = |choice: &str| {
            let data = from_hex(choice)?;
            let proposed = plan
                .candidates
                .iter()
                .find(|candidate| candidate.data == data)
                .copied();
            proposed.or_else(|| {
                self.library
                    .accept(&plan.description, &plan.layouts, data, self.workspace_bytes)
            })
        };

        let measure = || {
            let Some(times) = self.measure(timing, stream, product, plan, key)? else {
                // Kept as well: what memory is free must not decide the bits of later runs.
                return Ok(Some((
                    "not measured: no memory for the result\n".to_owned(),
                    to_hex(first.data),
                )));
            };
            let names = plan
                .candidates
                .iter()
                .map(|algorithm| self.library.describe(algorithm));
            let table = timing::table(&times, names);
            Ok(timing::fastest(&times).map(|index| (table, to_hex(plan.candidates[index].data))))
        };

        let chosen = timing.choose(stream, &self.subject("", product, key), accept, measure)?;
        Ok(chosen.unwrap_or(first))
    }

    /// All that a choice by time depends on.
    fn subject(&self, question: &str, product: &Product, key: Key) -> String {
        format!(
            "{}\n{question}{}, {}; {key:?}",
            self.identity,
            product.label(),
            key.text()
        )
    }

    /// The least time of each candidate. `None`: there is no memory for the result.
    fn measure(
        &self,
        timing: &Timing,
        stream: &CudaStream,
        product: &Product,
        plan: &Plan,
        key: Key,
    ) -> Result<Option<Vec<Option<Duration>>>, OpError> {
        let out = product.out.data;
        // A result that is read would change with each repetition.
        let apart = if product.reads_its_result() {
            match timing
                .pool
                .allocate(out.len(), out.dtype(), Purpose::Workspace, stream)
            {
                Ok(block) => Some(block),
                Err(error) => {
                    tracing::warn!(
                        "no memory to measure the matrix product {}; cuBLASLt's first choice is kept for it in {}, \
                         until the file is deleted: {error}",
                        product.label(),
                        timing.path(&self.subject("", product, key)),
                    );
                    return Ok(None);
                }
            }
        } else {
            None
        };

        // SAFETY: used on the stream of the block only, which frees it in order.
        let out = apart.as_ref().map_or(out, |block| unsafe { block.slice() });
        out.check_device("matmul timing: the pool", self.device.id())?;
        let time = |index: usize| {
            let mut enqueued = Ok(());
            let enqueue = || {
                // SAFETY: as in `run`; a block of the pool is valid for the layout of the result,
                // since it has the length and type, and is aligned to 256 bytes.
                enqueued = unsafe {
                    self.enqueue(
                        stream,
                        plan,
                        product,
                        [out, self.workspace],
                        &plan.candidates[index],
                    )
                };
                Ok(())
            };
            let time = stream.time("matmul timing", timing::LIMIT, enqueue)?;
            Ok(enqueued.is_ok().then_some(time))
        };

        timing.measure(plan.candidates.len(), time).map(Some)
    }

    /// Whether `fused` takes less time than `apart`, which enqueues other operations with the same
    /// results but for rounding. Measured once and kept like the choice of an algorithm; both run
    /// several times on `stream`, so repeating them must not change their results. Without
    /// [`Timing`], and where the library does not support `fused`, the answer is no.
    ///
    /// # Errors
    /// As for [`Matmul::run`], and those of `apart`.
    pub fn is_faster(
        &self,
        stream: &CudaStream,
        fused: &Product,
        mut apart: impl FnMut(&CudaStream) -> Result<(), OpError>,
    ) -> Result<bool, OpError> {
        const ANSWERS: [&str; 2] = ["apart", "fused"];
        let key = check(fused)?;
        let Some(timing) = &self.timing else {
            return Ok(false);
        };

        let known = {
            let mut plans = self.plans.lock();
            let plan = self.plan(&mut plans, key, fused)?;
            if plan.candidates.is_empty() {
                Some(false)
            } else {
                plan.is_faster
            }
        };

        if let Some(known) = known {
            return Ok(known);
        }
        let accept = |choice: &str| {
            ANSWERS
                .iter()
                .position(|answer| *answer == choice)
                .map(|index| index == 1)
        };

        let measure = || {
            let times = timing.measure(2, |index| {
                let mut ran = Ok(());
                let enqueue = || {
                    ran = if index == 0 {
                        apart(stream)
                    } else {
                        self.run(stream, fused)
                    };
                    Ok(())
                };
                let time = stream.time("matmul timing", timing::LIMIT, enqueue)?;
                ran.map(|()| Some(time))
            })?;
            let table = timing::table(&times, ANSWERS.iter().map(|&answer| answer.to_owned()));
            Ok(timing::fastest(&times).map(|index| (table, ANSWERS[index].to_owned())))
        };

        let subject = self.subject("fused or apart: ", fused, key);
        let answer = timing
            .choose(stream, &subject, accept, measure)?
            .unwrap_or(false);
        if !stream.is_recorded() {
            self.plan(&mut self.plans.lock(), key, fused)?.is_faster = Some(answer);
        }

        Ok(answer)
    }

    fn plan<'a>(
        &self,
        plans: &'a mut HashMap<Key, Plan>,
        key: Key,
        product: &Product,
    ) -> Result<&'a mut Plan, OpError> {
        // The library uses the context that is current on the calling thread.
        self.device.bind()?;
        Ok(match plans.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(self.make_plan(&key, product)?),
        })
    }

    fn make_plan(&self, key: &Key, product: &Product) -> Result<Plan, OpError> {
        let library = &self.library;
        let Product {
            left,
            right,
            out,
            add,
            epilogue,
            ..
        } = product;

        let layout = |m: &Matrix, dtype: DType| {
            let code = data_type(dtype).ok_or(zero_kernels::KernelError::Unsupported {
                what: "matmul",
                dtype,
            })?;
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

        let plan = Plan {
            description,
            layouts,
            candidates: Vec::new(),
            chosen: None,
            is_faster: None,
        };

        // The choice depends only on the alignment of an address, so this address has exactly the
        // key's alignment.
        plan.point_at(product, |slice| alignment(slice).into())?;
        let candidates = library.candidates(
            &plan.description,
            &plan.layouts,
            key.alignments,
            self.workspace_bytes,
        )?;

        Ok(Plan { candidates, ..plan })
    }
}

impl Plan {
    /// Sets the addresses of this product's bias and GELU input in the description.
    fn point_at(
        &self,
        product: &Product,
        address: impl Fn(AnySlice) -> u64,
    ) -> Result<(), LibraryError> {
        if let Some(bias) = product.epilogue.bias() {
            self.description
                .set_wide(Attribute::BiasPointer, address(bias))?;
        }
        if let Some(input) = product.epilogue.gelu_input() {
            self.description
                .set_wide(Attribute::AuxPointer, address(input))?;
        }
        Ok(())
    }
}

/// An algorithm's description as text.
fn to_hex(data: [u64; 8]) -> String {
    data.iter().map(|word| format!("{word:016x}")).collect()
}

/// The inverse of [`to_hex`].
fn from_hex(text: &str) -> Option<[u64; 8]> {
    if text.len() != 128 {
        return None;
    }
    let mut data = [0; 8];
    for (i, word) in data.iter_mut().enumerate() {
        *word = u64::from_str_radix(text.get(i * 16..(i + 1) * 16)?, 16).ok()?;
    }
    Some(data)
}

#[cfg(test)]
mod tests {
    use zero_alloc::Pool;
    use zero_alloc::device::Device;

    use super::*;

    #[test]
    fn algorithm_is_kept_as_text() {
        let data = [0, 1, u64::MAX, 3, 4, 5, 6, 0x0123_4567_89ab_cdef];
        assert_eq!(from_hex(&to_hex(data)), Some(data));
        assert_eq!(from_hex(&to_hex(data)[1..]), None);
        assert_eq!(from_hex(&"x".repeat(128)), None);
    }

    #[test]
    fn workspace_follows_the_largest_weight() {
        assert_eq!(workspace_bytes(384 * 1536), 36 << 20);
        assert_eq!(
            [1, 768 * 3072, 1600 * 6400, u64::MAX].map(|n| workspace_bytes(n) >> 20),
            [32, 144, 256, 256]
        );
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn library_checks_kept_algorithms() {
        let device = CudaDevice::open(0).unwrap();
        let stream = device.create_stream("test").unwrap();
        let pool = Pool::new(device.clone(), usize::MAX);
        let block = |len, dtype| {
            pool.allocate(len, dtype, Purpose::Workspace, &stream)
                .unwrap()
        };

        let workspace = block(1 << 20, DType::U8);
        let x = block(64 * 64, DType::Bf16);
        // SAFETY: the block lives to the end of the test, and nothing runs.
        let x = Matrix::new(unsafe { x.slice() }, 64);
        // SAFETY: as above.
        let matmul = Matmul::new(&device, unsafe { workspace.slice() }).unwrap();

        let product = Product::new(x, x, x);

        let mut plans = matmul.plans.lock();
        let key = check(&product).unwrap();
        let plan = matmul.plan(&mut plans, key, &product).unwrap();
        let accept = |data, bytes| {
            matmul
                .library
                .accept(&plan.description, &plan.layouts, data, bytes)
        };

        assert!(!plan.candidates.is_empty());
        for candidate in &plan.candidates {
            let bytes = candidate.workspace_bytes;
            let accepted = accept(candidate.data, bytes).unwrap();
            assert_eq!(
                (accepted.data, accepted.workspace_bytes),
                (candidate.data, bytes)
            );
            assert!(bytes == 0 || accept(candidate.data, bytes - 1).is_none());
        }

        if device.name().contains("stand-in") {
            assert!(accept([0; 8], 1 << 20).is_none());
        }
    }
}
