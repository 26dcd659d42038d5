//! Launches of attention.cu and attention_plain.cu.
//!
//! Shapes: qkv, dqkv `[batch, seq, 3, heads, d]`, out, dout `[batch, seq, heads, d]` in the
//! kernels' type; lse, delta `[batch, heads, seq]` in fp32. `lse` is log2 of the sum of the
//! exponentials of the scores: the forward pass writes it for the backward pass only.

use std::f32::consts::LOG2_E;

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{AnySlice, DeviceSlice};

use super::column_sums::{self, SumOut};
use super::error::{OpError, check_len};
use super::launch::{OpKernels, Shape as Launch, THREADS, size};

/// The sizes of attention's operands. Each head of queries has its own key and value, and sees all
/// keys before it.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Sequences.
    pub batch: usize,
    /// Tokens a sequence.
    pub seq: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a head.
    pub d: usize,
}

/// Rows and columns of a tile of attention_plain.cu.
const PLAIN_TILE: usize = 32;
/// Bytes of an element of attention.cu.
const ELEM_BYTES: usize = 2;
/// Rows of a block of the backward kernels of attention.cu.
const BACKWARD_ROWS: usize = 128;

/// Maximum elements of the workspace of [`Attention::backward`] for qkv `[batch, seq, width]`.
pub fn workspace_elems(batch: usize, seq: usize, width: usize) -> usize {
    (batch * seq.div_ceil(BACKWARD_ROWS) * width)
        .max(column_sums::workspace_elems(batch * seq, width))
}

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

/// Rows that a block owns, its warps, and the rows of a tile that it iterates over: the numbers at
/// the end of attention.cu.
struct Tiles {
    /// The start of the kernels' names.
    family: &'static str,
    d: usize,
    forward: [usize; 3],
    dq: [usize; 3],
    dkv: [usize; 3],
}

/// For a shape the first entry of its head dimension is used whose file `OpKernels` loads on the
/// device's architecture: kernels for newer devices come before those that they replace. A version
/// with `wgmma` would be another entry and file. It needs a target of one architecture only
/// (sm_90a), which `Arch`, a number that newer devices run too, cannot name.
const FLASH: [Tiles; 3] = [
    Tiles {
        family: "flash",
        d: 32,
        forward: [128, 4, 64],
        dq: [BACKWARD_ROWS, 4, 32],
        dkv: [BACKWARD_ROWS, 4, 32],
    },
    Tiles {
        family: "flash",
        d: 64,
        forward: [128, 4, 64],
        dq: [BACKWARD_ROWS, 4, 32],
        dkv: [BACKWARD_ROWS, 4, 32],
    },
    Tiles {
        family: "flash",
        d: 128,
        forward: [128, 8, 64],
        dq: [BACKWARD_ROWS, 8, 32],
        dkv: [BACKWARD_ROWS, 8, 16],
    },
];

impl Tiles {
    fn entry(&self, name: &str) -> String {
        format!("{}_{name}_{}", self.family, self.d)
    }
}

impl Attention {
    /// Chooses the kernels for `shape`: those on tensor cores if `ops` has them for this head
    /// dimension.
    ///
    /// # Errors
    /// No kernel supports the shape, or the device has too little shared memory.
    pub fn new(ops: &OpKernels, shape: Shape) -> Result<Self, OpError> {
        let loaded = |t: &Tiles| ops.function(&t.entry("forward")).is_ok();
        let flash = FLASH.iter().find(|t| t.d == shape.d && loaded(t));
        flash.map_or_else(
            || Self::plain(ops, shape),
            |tiles| Self::flash(ops, shape, tiles),
        )
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
            _ => {
                return Err(OpError::Size {
                    what: "attention: head dimension",
                    got: d,
                    takes: "1 to 256",
                });
            }
        };

        let kernel = |name: &str, tiles: usize| {
            let shared = tiles * PLAIN_TILE * (d + 1) * size_of::<f32>();
            Kernel::new(
                ops,
                shape,
                format!("plain_{name}_{columns}"),
                PLAIN_TILE,
                THREADS,
                shared,
            )
        };

        let forward = kernel("forward", 3)?;
        let dq = kernel("backward_dq", 4)?;
        let dkv = kernel("backward_dkv", 4)?;
        Ok(Self {
            shape,
            kind: Kind::Plain,
            forward,
            dq,
            dkv,
        })
    }

    fn flash(ops: &OpKernels, shape: Shape, tiles: &Tiles) -> Result<Self, OpError> {
        // Shared memory: the forward pass stores its rows once (queries), the backward passes
        // twice; the others are two tiles in two stages.
        let kernel = |name: &str, [rows, warps, others]: [usize; 3], own: usize| {
            let shared = (own * rows + 4 * others) * shape.d * ELEM_BYTES;
            Kernel::new(
                ops,
                shape,
                tiles.entry(name),
                rows,
                32 * warps as u32,
                shared,
            )
        };

        let forward = kernel("forward", tiles.forward, 1)?;
        let dq = kernel("backward_dq", tiles.dq, 2)?;
        let dkv = kernel("backward_dkv", tiles.dkv, 2)?;
        Ok(Self {
            shape,
            kind: Kind::Flash,
            forward,
            dq,
            dkv,
        })
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
        let lse = lse.into();
        let scale = (self.slope() * LOG2_E).into();
        let Kernel { entry, launch } = &self.forward;

        match self.kind {
            // SAFETY: the parameters of flash_forward, whose lengths were checked.
            Kind::Flash => unsafe {
                ops.launch(
                    stream,
                    "attention",
                    entry,
                    *launch,
                    [out, lse, qkv, seq.into(), heads.into(), scale],
                )
            },
            Kind::Plain => {
                let args = [out, lse, qkv, seq.into(), heads.into(), d.into(), scale];
                // SAFETY: the parameters of plain_forward, whose lengths were checked.
                unsafe { ops.launch(stream, "attention", entry, *launch, args) }
            }
        }
    }

    /// Writes the gradient of qkv to `dqkv`, and sums it over batch and sequence into `dbias`
    /// `[3, heads, d]`, the gradient of the bias that was added to qkv; `delta` is scratch. The
    /// order of every sum depends only on the sizes.
    ///
    /// # Errors
    /// Lengths or types do not fit, or the stream failed.
    #[allow(clippy::too_many_arguments)]
    pub fn backward(
        &self,
        ops: &OpKernels,
        stream: &CudaStream,
        dqkv: AnySlice,
        dbias: SumOut,
        dout: AnySlice,
        qkv: AnySlice,
        out: AnySlice,
        lse: DeviceSlice<f32>,
        delta: DeviceSlice<f32>,
        workspace: DeviceSlice<f32>,
    ) -> Result<(), OpError> {
        check_len("attention: lse", lse.len(), self.rows())?;
        check_len("attention: delta", delta.len(), self.rows())?;
        let width = 3 * self.shape.heads * self.shape.d;
        check_len("attention: dbias", dbias.len(), width)?;
        let (seq, heads, d) = self.sizes()?;
        let stored = dqkv;
        let dqkv = ops.stored("attention: dqkv", dqkv, 3 * self.elems())?;
        let dout = ops.stored("attention: dout", dout, self.elems())?;
        let qkv = ops.stored("attention: qkv", qkv, 3 * self.elems())?;
        let out = ops.stored("attention: out", out, self.elems())?;
        let lse = lse.into();
        let delta = delta.into();
        let seq = seq.into();
        let heads = heads.into();
        let d = d.into();
        let scale = (self.slope() * LOG2_E).into();
        let slope = self.slope().into();
        let dq = &self.dq;
        let dkv = &self.dkv;
        let dq_op = "attention backward dq";
        let dkv_op = "attention backward dkv";

        match self.kind {
            Kind::Flash => {
                let blocks = self.shape.batch * dq.launch.grid[0] as usize;
                let partials =
                    column_sums::part("attention: workspace", workspace, blocks * width)?;
                let args = [
                    dqkv,
                    partials.into(),
                    delta,
                    dout,
                    qkv,
                    out,
                    lse,
                    seq,
                    heads,
                    scale,
                    slope,
                ];
                // SAFETY: the parameters of flash_backward_dq, whose lengths were checked.
                unsafe { ops.launch(stream, dq_op, &dq.entry, dq.launch, args) }?;
                let args = [
                    dqkv,
                    partials.into(),
                    dout,
                    qkv,
                    lse,
                    delta,
                    seq,
                    heads,
                    scale,
                    slope,
                ];
                // SAFETY: the parameters of flash_backward_dkv, whose lengths were checked; as many
                // tiles as dq has.
                unsafe { ops.launch(stream, dkv_op, &dkv.entry, dkv.launch, args) }?;
                column_sums::sum_partials(ops, stream, &[dbias], partials, blocks)
            }
            Kind::Plain => {
                let args = [
                    dqkv, delta, dout, qkv, out, lse, seq, heads, d, scale, slope,
                ];
                // SAFETY: the parameters of plain_backward_dq, whose lengths were checked.
                unsafe { ops.launch(stream, dq_op, &dq.entry, dq.launch, args) }?;
                let args = [dqkv, dout, qkv, lse, delta, seq, heads, d, scale, slope];
                // SAFETY: the parameters of plain_backward_dkv, whose lengths were checked.
                unsafe { ops.launch(stream, dkv_op, &dkv.entry, dkv.launch, args) }?;
                column_sums::sum_rows(ops, stream, dbias, stored, workspace)
            }
        }
    }

    fn sizes(&self) -> Result<(u32, u32, u32), OpError> {
        let Shape { seq, heads, d, .. } = self.shape;
        Ok((
            size("attention: seq", seq)?,
            size("attention: heads", heads)?,
            size("attention: head dimension", d)?,
        ))
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
            return Err(OpError::Size {
                what: "attention: heads or batch",
                got,
                takes: "up to 65535",
            });
        }

        ops.function(&entry)?.allow_shared_bytes(shared_bytes)?;
        Ok(Self {
            entry,
            launch: Launch {
                grid,
                block,
                shared_bytes,
            },
        })
    }
}
