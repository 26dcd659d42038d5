//! Launches of attention.cu and attention_plain.cu.
//!
//! Shapes: qkv, dqkv `[batch, seq, 3, heads, d]`, out, dout `[batch, seq, heads, d]` in the kernels' type; lse, delta
//! `[batch, heads, seq]` in fp32. `lse` is log2 of the sum of the exponentials of the scores: the forward pass writes
//! it for the backward pass only.

use std::f32::consts::LOG2_E;

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{AnySlice, DeviceSlice};

use super::error::{OpError, check_len};
use super::launch::{OpKernels, Shape as Launch, THREADS, size};
pub use crate::ops::attention::Shape;

/// Rows and columns of a tile of attention_plain.cu.
const PLAIN_TILE: usize = 32;
/// Bytes of an element of attention.cu.
const ELEM_BYTES: usize = 2;

/// The kernels for a shape, with their grids.
#[derive(Clone, Debug)]
pub struct Attention {
    shape: Shape,
    kind: Kind,
    forward: Kernel,
    dq: Kernel,
    dkv: Kernel,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Tensor cores.
    Flash,
    /// CUDA cores.
    Plain,
}

#[derive(Clone, Debug)]
struct Kernel {
    entry: String,
    launch: Launch,
}

/// Rows that a block owns, its warps, and the rows of a tile that it iterates over: the numbers at the end of
/// attention.cu.
struct Tiles {
    d: usize,
    forward: [usize; 3],
    dq: [usize; 3],
    dkv: [usize; 3],
}

const FLASH: [Tiles; 3] = [
    Tiles { d: 32, forward: [128, 4, 64], dq: [128, 4, 32], dkv: [128, 4, 32] },
    Tiles { d: 64, forward: [128, 4, 64], dq: [128, 4, 32], dkv: [128, 4, 32] },
    Tiles { d: 128, forward: [128, 8, 64], dq: [128, 8, 32], dkv: [128, 8, 16] },
];

impl Attention {
    /// Chooses the kernels for `shape`: those on tensor cores if `ops` has them for this head dimension.
    ///
    /// # Errors
    /// No kernel supports the shape, or the device has too little shared memory.
    pub fn new(ops: &OpKernels, shape: Shape) -> Result<Self, OpError> {
        let flash = FLASH.iter().find(|t| t.d == shape.d && ops.function(&format!("flash_forward_{}", t.d)).is_ok());
        flash.map_or_else(|| Self::plain(ops, shape), |tiles| Self::flash(ops, shape, tiles))
    }

    /// The kernels without tensor cores.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn plain(ops: &OpKernels, shape: Shape) -> Result<Self, OpError> {
        let d = shape.d;
        let columns = match d {
            1..=64 => 8,
            65..=256 => 32,
            _ => return Err(OpError::Size { what: "attention: head dimension", got: d, takes: "1 to 256" }),
        };
        let kernel = |name: &str, tiles: usize| {
            let shared = tiles * PLAIN_TILE * (d + 1) * size_of::<f32>();
            Kernel::new(ops, shape, format!("plain_{name}_{columns}"), PLAIN_TILE, THREADS, shared)
        };
        let (forward, dq, dkv) = (kernel("forward", 3)?, kernel("backward_dq", 4)?, kernel("backward_dkv", 4)?);
        Ok(Self { shape, kind: Kind::Plain, forward, dq, dkv })
    }

    fn flash(ops: &OpKernels, shape: Shape, tiles: &Tiles) -> Result<Self, OpError> {
        // Shared memory: the forward pass stores its rows once (queries), the backward passes twice; the others are
        // two tiles in two stages.
        let kernel = |name: &str, [rows, warps, others]: [usize; 3], own: usize| {
            let shared = (own * rows + 4 * others) * shape.d * ELEM_BYTES;
            Kernel::new(ops, shape, format!("flash_{name}_{}", shape.d), rows, 32 * warps as u32, shared)
        };
        let forward = kernel("forward", tiles.forward, 1)?;
        let (dq, dkv) = (kernel("backward_dq", tiles.dq, 2)?, kernel("backward_dkv", tiles.dkv, 2)?);
        Ok(Self { shape, kind: Kind::Flash, forward, dq, dkv })
    }

    /// Whether it runs on tensor cores.
    pub fn is_flash(&self) -> bool {
        self.kind == Kind::Flash
    }

    fn elems(&self) -> usize {
        self.shape.batch * self.shape.seq * self.shape.heads * self.shape.d
    }

    fn rows(&self) -> usize {
        self.shape.batch * self.shape.seq * self.shape.heads
    }

    /// `out = softmax(q k^T / sqrt(d), causal) v`; `lse` is written for the backward pass.
    ///
    /// # Errors
    /// Lengths or types do not fit, or the stream failed.
    pub fn forward(
        &self,
        ops: &OpKernels,
        stream: &CudaStream,
        out: AnySlice,
        lse: DeviceSlice<f32>,
        qkv: AnySlice,
    ) -> Result<(), OpError> {
        check_len("attention: lse", lse.len(), self.rows())?;
        let (seq, heads, d) = self.sizes()?;
        let out = ops.stored("attention: out", out, self.elems())?;
        let qkv = ops.stored("attention: qkv", qkv, 3 * self.elems())?;
        let (lse, scale) = (lse.into(), (self.slope() * LOG2_E).into());
        let Kernel { entry, launch } = &self.forward;
        match self.kind {
            // SAFETY: the parameters of flash_forward, whose lengths were checked.
            Kind::Flash => unsafe {
                ops.launch(stream, "attention", entry, *launch, [out, lse, qkv, seq.into(), heads.into(), scale])
            },
            Kind::Plain => {
                let args = [out, lse, qkv, seq.into(), heads.into(), d.into(), scale];
                // SAFETY: the parameters of plain_forward, whose lengths were checked.
                unsafe { ops.launch(stream, "attention", entry, *launch, args) }
            }
        }
    }

    /// Writes the gradient of qkv to `dqkv`; `delta` is scratch.
    ///
    /// # Errors
    /// Lengths or types do not fit, or the stream failed.
    #[allow(clippy::too_many_arguments)]
    pub fn backward(
        &self,
        ops: &OpKernels,
        stream: &CudaStream,
        dqkv: AnySlice,
        dout: AnySlice,
        qkv: AnySlice,
        out: AnySlice,
        lse: DeviceSlice<f32>,
        delta: DeviceSlice<f32>,
    ) -> Result<(), OpError> {
        check_len("attention: lse", lse.len(), self.rows())?;
        check_len("attention: delta", delta.len(), self.rows())?;
        let (seq, heads, d) = self.sizes()?;
        let dqkv = ops.stored("attention: dqkv", dqkv, 3 * self.elems())?;
        let dout = ops.stored("attention: dout", dout, self.elems())?;
        let qkv = ops.stored("attention: qkv", qkv, 3 * self.elems())?;
        let out = ops.stored("attention: out", out, self.elems())?;
        let (lse, delta) = (lse.into(), delta.into());
        let (seq, heads, d) = (seq.into(), heads.into(), d.into());
        let (scale, slope) = ((self.slope() * LOG2_E).into(), self.slope().into());
        let (op, dq, dkv) = ("attention backward", &self.dq, &self.dkv);
        match self.kind {
            Kind::Flash => {
                let args = [dqkv, delta, dout, qkv, out, lse, seq, heads, scale, slope];
                // SAFETY: the parameters of flash_backward_dq, whose lengths were checked.
                unsafe { ops.launch(stream, op, &dq.entry, dq.launch, args) }?;
                let args = [dqkv, dout, qkv, lse, delta, seq, heads, scale, slope];
                // SAFETY: the parameters of flash_backward_dkv, whose lengths were checked.
                unsafe { ops.launch(stream, op, &dkv.entry, dkv.launch, args) }
            }
            Kind::Plain => {
                let args = [dqkv, delta, dout, qkv, out, lse, seq, heads, d, scale, slope];
                // SAFETY: the parameters of plain_backward_dq, whose lengths were checked.
                unsafe { ops.launch(stream, op, &dq.entry, dq.launch, args) }?;
                let args = [dqkv, dout, qkv, lse, delta, seq, heads, d, scale, slope];
                // SAFETY: the parameters of plain_backward_dkv, whose lengths were checked.
                unsafe { ops.launch(stream, op, &dkv.entry, dkv.launch, args) }
            }
        }
    }

    fn sizes(&self) -> Result<(u32, u32, u32), OpError> {
        let Shape { seq, heads, d, .. } = self.shape;
        Ok((size("attention: seq", seq)?, size("attention: heads", heads)?, size("attention: head dimension", d)?))
    }

    /// 1 / sqrt(d).
    fn slope(&self) -> f32 {
        1.0 / (self.shape.d as f32).sqrt()
    }
}

impl Kernel {
    fn new(
        ops: &OpKernels,
        shape: Shape,
        entry: String,
        rows: usize,
        block: u32,
        shared: usize,
    ) -> Result<Self, OpError> {
        let shared_bytes = size("attention: shared memory", shared)?;
        let grid = [
            size("attention: seq", shape.seq.div_ceil(rows))?,
            size("attention: heads", shape.heads)?,
            size("attention: batch", shape.batch)?,
        ];
        if grid[1].max(grid[2]) > 65535 {
            let got = shape.heads.max(shape.batch);
            return Err(OpError::Size { what: "attention: heads or batch", got, takes: "up to 65535" });
        }
        ops.function(&entry)?.allow_shared_bytes(shared_bytes)?;
        Ok(Self { entry, launch: Launch { grid, block, shared_bytes } })
    }
}
