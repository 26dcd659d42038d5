//! A transformer's operations on CUDA: kernels, compiled at run time for the type of the
//! activations, and matrix products by cuBLASLt.
//!
//! | file of `cuda/` | operation | on the host |
//! |---|---|---|
//! | layer_norm.cu | layer normalisation | [`ops::norm`](crate::ops::norm) |
//! | rms_norm.cu | RMS norm | [`ops::norm`](crate::ops::norm) |
//! | rope.cu | rotary positions, norms of heads | [`ops::rope`](crate::ops::rope) |
//! | swiglu.cu | SwiGLU | [`ops::swiglu`](crate::ops::swiglu) |
//! | attention.cu | causal attention on tensor cores | [`ops::attention`](crate::ops::attention) |
//! | attention_plain.cu | the same in fp32, head dimensions up to 256 | [`ops::attention`](crate::ops::attention) |
//! | gelu.cu | GELU | [`ops::activation`](crate::ops::activation) |
//! | dropout.cu | dropout before a residual addition | [`ops::dropout`](crate::ops::dropout) |
//! | embedding.cu | tokens and positions | [`ops::embedding`](crate::ops::embedding) |
//! | cross_entropy.cu | loss and gradient of logits | [`ops::cross_entropy`](crate::ops::cross_entropy) |
//! | column_sums.cu | gradients of biases | [`ops::linear`](crate::ops::linear) |
//!
//! No kernel adds with atomics: the bits of a result depend only on the sizes, not on timing or on
//! the device.

pub mod attention;
pub mod column_sums;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
mod error;
pub mod gelu;
mod launch;
pub mod matmul;
pub mod norm;
pub mod rope;
pub mod sequence;
mod sources;
pub mod swiglu;

pub use column_sums::SumOut;
pub use error::OpError;
pub use launch::OpKernels;
pub use sources::{KernelFile, kernel_files};
