//! Reading and writing the elements of candle's tensors.
//!
//! candle grants access to a tensor's storage for writing inside of an in-place operation only.

use std::cell::Cell;
use std::mem;

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor, bail};

/// An in-place operation that runs a function once.
struct Access<F>(Cell<Option<F>>);

impl<F> InplaceOp1 for Access<F>
where
    F: FnOnce(&mut CpuStorage, &Layout) -> Result<()>,
{
    fn name(&self) -> &'static str {
        "zero-access"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        match self.0.take() {
            Some(access) => access(storage, layout),
            None => bail!("the storage of a tensor is accessed once"),
        }
    }
}

fn access(
    tensor: &Tensor,
    with: impl FnOnce(&mut CpuStorage, &Layout) -> Result<()>,
) -> Result<()> {
    tensor.inplace_op1(&Access(Cell::new(Some(with))))
}

/// The storage type of a tensor without elements, in candle's errors.
pub(crate) const RELEASED: &str = "F4";

/// The storage of a tensor without elements. Why not an empty one of F32: candle's kernels read as
/// many elements as the tensor's shape has. For this type each of them returns an error.
fn no_elements() -> CpuStorage {
    CpuStorage::F4(Vec::new())
}

/// Copies `values` into a tensor.
pub(crate) fn write(tensor: &Tensor, values: &[f32]) -> Result<()> {
    access(tensor, |storage, _| match storage {
        CpuStorage::F32(elems) if elems.len() == values.len() => {
            elems.copy_from_slice(values);
            Ok(())
        }
        other => bail!(
            "a parameter has {} elements of {:?}, expected {} of F32",
            other.as_slice::<f32>().map_or(0, <[f32]>::len),
            tensor.dtype(),
            values.len()
        ),
    })
}

/// Stores `values` in a tensor that was [released](release).
pub(crate) fn fill(tensor: &Tensor, values: Vec<f32>) -> Result<()> {
    if values.len() != tensor.elem_count() {
        bail!(
            "{} elements for a tensor of {}",
            values.len(),
            tensor.elem_count()
        );
    }
    access(tensor, |storage, _| {
        *storage = CpuStorage::F32(values);
        Ok(())
    })
}

/// Frees the elements of a tensor. Until it is filled, each use of it, or of a view of it, is an
/// error.
pub(crate) fn release(tensor: &Tensor) -> Result<()> {
    access(tensor, |storage, _| {
        *storage = no_elements();
        Ok(())
    })
}

/// Moves the elements out of a tensor that nobody else reads, or copies them if they are not
/// contiguous. Returns whether they were copied.
pub(crate) fn take(tensor: &Tensor) -> Result<(Vec<f32>, bool)> {
    let mut taken = None;
    access(tensor, |storage, layout| {
        let whole = Some((0, layout.shape().elem_count()));
        if let CpuStorage::F32(elems) = storage
            && layout.contiguous_offsets() == whole
            && elems.len() == layout.shape().elem_count()
        {
            taken = Some(mem::take(elems));
            *storage = no_elements();
        }
        Ok(())
    })?;

    match taken {
        Some(elems) => Ok((elems, false)),
        None => Ok((tensor.flatten_all()?.to_vec1()?, true)),
    }
}
