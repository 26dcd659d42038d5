//! Which kernel of a source serves which dtypes: the names of its entries.

use zero_alloc::device::DType;

use crate::KernelError;

/// The place of a dtype in the tables below, which have fp32, bf16 and fp16 in this order.
fn place(what: &'static str, dtype: DType) -> Result<usize, KernelError> {
    match dtype {
        DType::F32 => Ok(0),
        DType::Bf16 => Ok(1),
        DType::F16 => Ok(2),
        _ => Err(KernelError::Unsupported { what, dtype }),
    }
}

/// The names of entries over one dtype.
macro_rules! names {
    ($prefix:literal) => {
        [concat!($prefix, "_f32"), concat!($prefix, "_bf16"), concat!($prefix, "_f16")]
    };
}

const ADAM: [&str; 3] = names!("adam");
const ADAM_PARAM: [[&str; 3]; 3] = [names!("adam_f32"), names!("adam_bf16"), names!("adam_f16")];
const ADAM_REMAINDER: [&str; 3] = names!("adam_remainder");
const CAST: [[&str; 3]; 3] = [names!("cast_f32"), names!("cast_bf16"), names!("cast_f16")];
const ACCUMULATE: [&str; 3] = names!("accumulate");
const STATS: [&str; 3] = names!("grad_stats_chunks");

/// The second stage of grad_stats.cu.
pub(crate) const STATS_COMBINE: &str = "grad_stats_combine";
/// The vote of step.cu.
pub(crate) const MAKE_VOTE: &str = "make_vote";
/// The decision of step.cu.
pub(crate) const DECIDE_STEP: &str = "decide_step";

/// The entries of a source file, all of them.
pub(crate) fn of_source(name: &str) -> Vec<&'static str> {
    match name {
        "adam.cu" => [ADAM, ADAM_PARAM[0], ADAM_PARAM[1], ADAM_PARAM[2]].concat(),
        "adam_remainder.cu" => ADAM_REMAINDER.to_vec(),
        "cast.cu" => CAST.concat(),
        "accumulate.cu" => ACCUMULATE.to_vec(),
        "grad_stats.cu" => [&STATS[..], &[STATS_COMBINE]].concat(),
        "step.cu" => vec![MAKE_VOTE, DECIDE_STEP],
        _ => Vec::new(),
    }
}

/// The entry of adam.cu for gradients of `grad`, writing parameters of `param` if any.
pub(crate) fn adam(grad: DType, param: Option<DType>) -> Result<&'static str, KernelError> {
    let grad = place("adam: grad", grad)?;
    Ok(match param {
        None => ADAM[grad],
        Some(param) => ADAM_PARAM[grad][place("adam: param_out", param)?],
    })
}

/// The entry of adam_remainder.cu for gradients of `grad`.
pub(crate) fn adam_remainder(grad: DType) -> Result<&'static str, KernelError> {
    Ok(ADAM_REMAINDER[place("adam_remainder: grad", grad)?])
}

/// The entry of cast.cu from `src` to `dst`.
pub(crate) fn cast(src: DType, dst: DType) -> Result<&'static str, KernelError> {
    Ok(CAST[place("cast: src", src)?][place("cast: dst", dst)?])
}

/// The entry of accumulate.cu for gradients of `grad`.
pub(crate) fn accumulate(grad: DType) -> Result<&'static str, KernelError> {
    Ok(ACCUMULATE[place("accumulate: grad", grad)?])
}

/// The entry of grad_stats.cu's first stage for gradients of `grad`.
pub(crate) fn stats(grad: DType) -> Result<&'static str, KernelError> {
    Ok(STATS[place("grad_stats: grad", grad)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_named_by_their_dtypes() {
        assert_eq!(adam(DType::Bf16, None), Ok("adam_bf16"));
        assert_eq!(adam(DType::Bf16, Some(DType::F16)), Ok("adam_bf16_f16"));
        assert_eq!(adam(DType::F32, Some(DType::F32)), Ok("adam_f32_f32"));
        assert_eq!(adam_remainder(DType::F16), Ok("adam_remainder_f16"));
        assert_eq!(cast(DType::F16, DType::Bf16), Ok("cast_f16_bf16"));
        assert_eq!(accumulate(DType::Bf16), Ok("accumulate_bf16"));
        assert_eq!(stats(DType::F16), Ok("grad_stats_chunks_f16"));
    }

    #[test]
    fn dtypes_without_a_kernel_are_refused() {
        let unsupported = |what, dtype| Err(KernelError::Unsupported { what, dtype });
        assert_eq!(adam(DType::F64, None), unsupported("adam: grad", DType::F64));
        assert_eq!(adam(DType::F32, Some(DType::U8)), unsupported("adam: param_out", DType::U8));
        assert_eq!(adam_remainder(DType::U8), unsupported("adam_remainder: grad", DType::U8));
        assert_eq!(cast(DType::U8, DType::F32), unsupported("cast: src", DType::U8));
        assert_eq!(cast(DType::F32, DType::U8), unsupported("cast: dst", DType::U8));
        assert_eq!(accumulate(DType::F64), unsupported("accumulate: grad", DType::F64));
        assert_eq!(stats(DType::F64), unsupported("grad_stats: grad", DType::F64));
    }

    #[test]
    fn the_sources_define_these_entries_and_no_others() {
        for source in crate::cuda::SOURCES {
            let listed = of_source(source.name);
            assert!(!listed.is_empty(), "{}", source.name);
            let text = source.text();
            // Entries are written out, or made by a macro whose name ends the line before its arguments.
            let written = text.matches("extern \"C\" __global__").count();
            assert!(written <= listed.len(), "{}", source.name);
        }
        assert!(of_source("none.cu").is_empty());
    }
}
