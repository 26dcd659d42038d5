//! Which kernel of a source serves which dtypes: the names of its entries.

use zero_alloc::device::DType;

use crate::KernelError;

/// The name of a dtype in the sources.
fn name(what: &'static str, dtype: DType) -> Result<&'static str, KernelError> {
    match dtype {
        DType::F32 => Ok("f32"),
        DType::Bf16 => Ok("bf16"),
        DType::F16 => Ok("f16"),
        _ => Err(KernelError::Unsupported { what, dtype }),
    }
}

/// The entry of adam.cu for gradients of `grad`, writing parameters of `param` if any.
///
/// # Errors
/// A dtype that Adam is not defined for.
pub fn adam_entry(grad: DType, param: Option<DType>) -> Result<String, KernelError> {
    let grad = name("adam: grad", grad)?;
    match param {
        None => Ok(format!("adam_{grad}")),
        Some(param) => Ok(format!("adam_{grad}_{}", name("adam: param_out", param)?)),
    }
}

/// The entry of adam_remainder.cu for gradients of `grad`.
///
/// # Errors
/// A dtype that Adam is not defined for.
pub fn adam_remainder_entry(grad: DType) -> Result<String, KernelError> {
    Ok(format!("adam_remainder_{}", name("adam_remainder: grad", grad)?))
}

/// The entry of adam_stochastic.cu for gradients of `grad`.
///
/// # Errors
/// A dtype that Adam is not defined for.
pub fn adam_stochastic_entry(grad: DType) -> Result<String, KernelError> {
    Ok(format!("adam_stochastic_{}", name("adam_stochastic: grad", grad)?))
}

/// The entry of cast.cu from `src` to `dst`.
///
/// # Errors
/// A dtype that cast is not defined for.
pub fn cast_entry(src: DType, dst: DType) -> Result<String, KernelError> {
    Ok(format!("cast_{}_{}", name("cast: src", src)?, name("cast: dst", dst)?))
}

/// The entry of accumulate.cu for gradients of `grad`.
///
/// # Errors
/// A dtype that accumulate is not defined for.
pub fn accumulate_entry(grad: DType) -> Result<String, KernelError> {
    Ok(format!("accumulate_{}", name("accumulate: grad", grad)?))
}

/// The entry of grad_stats.cu's first stage for gradients of `grad`; the second is `grad_stats_combine`.
///
/// # Errors
/// A dtype that grad_stats is not defined for.
pub fn stats_entry(grad: DType) -> Result<String, KernelError> {
    Ok(format!("grad_stats_chunks_{}", name("grad_stats: grad", grad)?))
}
