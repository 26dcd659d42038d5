//! The kernels' sources, embedded in the binary once for each type of storage.

use zero_alloc::device::DType;
use zero_kernels::KernelError;
use zero_kernels::cuda::{Arch, KernelSource};

/// A source file for one type of storage.
#[derive(Clone, Copy, Debug)]
pub struct KernelFile {
    /// The text, with the name of the file in `cuda/`.
    pub source: KernelSource,
    /// The kernels in it.
    pub entries: &'static [&'static str],
    /// The oldest architecture that it compiles for.
    pub oldest: Arch,
    /// Whether only models with dropout need it.
    pub dropout: bool,
}

macro_rules! file {
    ($storage:literal, $name:literal, $oldest:literal, [$($header:literal),*], $entries:expr) => {
        file!($storage, $name, $oldest, [$($header),*], $entries, $name, "", false)
    };
    (
        $storage:literal, $name:literal, $oldest:literal, [$($header:literal),*], $entries:expr,
        $called:literal, $defined:literal, $dropout:literal
    ) => {
        KernelFile {
            source: KernelSource::new(
                $called,
                concat!(
                    "#define STORAGE ", $storage, "\n", $defined,
                    $("#line 1 \"", $header, "\"\n", include_str!(concat!("kernels/", $header)),)*
                    "#line 1 \"", $name, "\"\n", include_str!(concat!("kernels/", $name))
                ),
            ),
            entries: &$entries,
            oldest: Arch($oldest),
            dropout: $dropout,
        }
    };
}

macro_rules! files {
    ($storage:literal) => {
        [
            file!(
                $storage,
                "layer_norm.cu",
                0,
                ["warp.cuh", "rows.cuh"],
                [
                    "layer_norm_forward_8_3",
                    "layer_norm_backward_8_3",
                    "layer_norm_forward_8_4",
                    "layer_norm_backward_8_4",
                    "layer_norm_forward_8_5",
                    "layer_norm_backward_8_5",
                    "layer_norm_forward_8_7",
                    "layer_norm_backward_8_7",
                    "layer_norm_forward_8_16",
                    "layer_norm_backward_8_16",
                    "layer_norm_forward_1_32",
                    "layer_norm_backward_1_32"
                ]
            ),
            file!(
                $storage,
                "column_sums.cu",
                0,
                ["warp.cuh", "dropout.cuh"],
                [
                    "column_sums_8",
                    "column_sums_1",
                    "dropout_sums_8",
                    "dropout_sums_1",
                    "sum_partials"
                ]
            ),
            file!(
                $storage,
                "gelu.cu",
                0,
                ["warp.cuh"],
                ["gelu_forward", "gelu_backward"]
            ),
            file!(
                $storage,
                "embedding.cu",
                0,
                ["warp.cuh", "dropout.cuh"],
                [
                    "embedding_forward_8",
                    "embedding_forward_1",
                    "embedding_positions_8",
                    "embedding_positions_1",
                    "embedding_tokens_8",
                    "embedding_tokens_1"
                ]
            ),
            file!(
                $storage,
                "cross_entropy.cu",
                0,
                ["warp.cuh"],
                [
                    "cross_entropy",
                    "part_statistics",
                    "part_gradient",
                    "add_losses"
                ]
            ),
            file!(
                $storage,
                "attention_plain.cu",
                0,
                ["warp.cuh", "dropout.cuh"],
                [
                    "plain_forward_8",
                    "plain_backward_dq_8",
                    "plain_backward_dkv_8",
                    "plain_forward_32",
                    "plain_backward_dq_32",
                    "plain_backward_dkv_32"
                ]
            ),
            file!(
                $storage,
                "rms_norm.cu",
                0,
                ["warp.cuh", "rows.cuh"],
                [
                    "rms_norm_forward_8_4",
                    "rms_norm_backward_8_4",
                    "rms_norm_forward_8_8",
                    "rms_norm_backward_8_8",
                    "rms_norm_forward_8_16",
                    "rms_norm_backward_8_16",
                    "rms_norm_forward_8_32",
                    "rms_norm_backward_8_32",
                    "rms_norm_forward_1_32",
                    "rms_norm_backward_1_32"
                ]
            ),
            file!(
                $storage,
                "rope.cu",
                0,
                ["warp.cuh"],
                [
                    "rope_8",
                    "rope_1",
                    "head_norm_forward",
                    "head_norm_backward"
                ]
            ),
            file!(
                $storage,
                "swiglu.cu",
                0,
                ["warp.cuh"],
                [
                    "swiglu_forward_8",
                    "swiglu_backward_8",
                    "swiglu_forward_1",
                    "swiglu_backward_1"
                ]
            ),
            file!(
                $storage,
                "sequence.cu",
                0,
                ["warp.cuh"],
                [
                    "pack_tokens_8",
                    "unpack_heads_8",
                    "pack_heads_8",
                    "unpack_tokens_8",
                    "pack_tokens_1",
                    "unpack_heads_1",
                    "pack_heads_1",
                    "unpack_tokens_1"
                ]
            ),
            file!(
                $storage,
                "dropout.cu",
                0,
                ["warp.cuh", "dropout.cuh"],
                ["dropout_add_8", "dropout_add_1"]
            ),
            file!(
                $storage,
                "attention.cu",
                80,
                ["warp.cuh", "dropout.cuh", "tile.cuh"],
                [
                    "flash_forward_32_dropout",
                    "flash_backward_dq_32_dropout",
                    "flash_backward_dkv_32_dropout",
                    "flash_forward_64_dropout",
                    "flash_backward_dq_64_dropout",
                    "flash_backward_dkv_64_dropout",
                    "flash_forward_128_dropout",
                    "flash_backward_dq_128_dropout",
                    "flash_backward_dkv_128_dropout"
                ],
                "attention_dropout.cu",
                "#define DROPOUT\n",
                true
            ),
            file!(
                $storage,
                "attention.cu",
                80,
                ["warp.cuh", "dropout.cuh", "tile.cuh"],
                [
                    "flash_forward_32",
                    "flash_backward_dq_32",
                    "flash_backward_dkv_32",
                    "flash_forward_64",
                    "flash_backward_dq_64",
                    "flash_backward_dkv_64",
                    "flash_forward_128",
                    "flash_backward_dq_128",
                    "flash_backward_dkv_128"
                ]
            ),
        ]
    };
}

static BF16: [KernelFile; 13] = files!("bf16");
static F16: [KernelFile; 13] = files!("f16");
// Tensor cores round fp32 to 19 bits, so fp32 uses attention_plain.cu.
static F32: [KernelFile; 11] = {
    let [a, b, c, d, e, f, g, h, i, j, k, _, _] = files!("f32");
    [a, b, c, d, e, f, g, h, i, j, k]
};

/// The sources for activations of `dtype`.
///
/// # Errors
/// `dtype` is not fp32, bf16 or fp16.
pub fn kernel_files(dtype: DType) -> Result<&'static [KernelFile], KernelError> {
    match dtype {
        DType::F32 => Ok(&F32),
        DType::Bf16 => Ok(&BF16),
        DType::F16 => Ok(&F16),
        _ => Err(KernelError::Unsupported {
            what: "transformer: activations",
            dtype,
        }),
    }
}
