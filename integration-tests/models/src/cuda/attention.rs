//! Launches of attention.cu and attention_plain.cu.
//!
//! Shapes: qkv, dqkv `[batch, seq, heads + 2 kv_heads, d]`, out, dout `[batch, seq, heads, d]` in
//! the kernels' type; lse, delta `[batch, heads, seq]` in fp32. `lse` is log2 of the sum of the
//! exponentials of the scores: the forward pass writes it for the backward pass only.

use std::f32::consts::LOG2_E;

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{AnySlice, DeviceSlice};

use super::column_sums::{self, SumOut};
use super::dropout::Dropout;
use super::error::{OpError, check_len};
use super::launch::{Arg, OpKernels, Shape as Launch, THREADS, size};
use super::rope::{self, Angles, starts_arg};
use crate::ops::Heads;

/// The sizes of attention's operands. A query sees itself and the keys before it.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Sequences.
    pub batch: usize,
    /// Tokens a sequence.
    pub seq: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys, and of values; divides `heads`. Neighbouring heads of queries share one.
    pub kv_heads: usize,
    /// Elements of a head.
    pub d: usize,
    /// Keys that a query sees: the last ones. `seq` or more are all.
    pub window: usize,
}

impl Shape {
    /// Elements of a row of qkv.
    pub fn width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.d
    }
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
    kind: AttentionKernel,
    forward: Kernel,
    dq: Kernel,
    dkv: Kernel,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AttentionKernel {
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
        let dkv = kernel("backward_dkv", 4)?.with_heads(shape.kv_heads)?;
        Ok(Self {
            shape,
            kind: AttentionKernel::Plain,
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
        let dkv = kernel("backward_dkv", tiles.dkv, 2)?.with_heads(shape.kv_heads)?;
        Ok(Self {
            shape,
            kind: AttentionKernel::Flash,
            forward,
            dq,
            dkv,
        })
    }

    /// Whether it runs on tensor cores.
    pub fn is_flash(&self) -> bool {
        self.kind == AttentionKernel::Flash
    }

    /// Elements of qkv.
    fn elems(&self) -> usize {
        self.shape.batch * self.shape.seq * self.shape.width()
    }

    fn rows(&self) -> usize {
        self.shape.batch * self.shape.seq * self.shape.heads
    }

    /// `out = dropout(softmax(q k^T / sqrt(d), causal)) v`; `lse` is written for the backward pass.
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
        masks: Masks,
    ) -> Result<(), OpError> {
        check_len("attention: lse", lse.len(), self.rows())?;
        let out = ops.stored("attention: out", out, self.rows() * self.shape.d)?;
        let qkv = ops.stored("attention: qkv", qkv, self.elems())?;
        let [starts, keys, drops] = self.masks(masks)?;
        let lse = lse.into();
        let scale = (self.slope() * LOG2_E).into();
        let [seq, heads, kv_heads, d, window] = self.sizes()?;
        let Kernel { entry, launch } = &self.forward;

        match self.kind {
            AttentionKernel::Flash => {
                let args = [
                    out, lse, qkv, starts, keys, drops, seq, heads, kv_heads, window, scale,
                ];
                let entry = masks.entry(entry);
                // SAFETY: the parameters of flash_forward, whose lengths were checked.
                unsafe { ops.launch(stream, "attention", &entry, *launch, args) }
            }
            AttentionKernel::Plain => {
                let args = [
                    out, lse, qkv, starts, keys, drops, seq, heads, kv_heads, d, window, scale,
                ];
                // SAFETY: the parameters of plain_forward, whose lengths were checked.
                unsafe { ops.launch(stream, "attention", entry, *launch, args) }
            }
        }
    }

    /// Writes the gradient of qkv to `dqkv`, for queries and keys that were rotated by
    /// `grads.angles` that before the rotation. `delta` is scratch. The order of every sum depends
    /// only on the sizes.
    ///
    /// # Errors
    /// Lengths or types do not fit, or the stream failed.
    #[allow(clippy::too_many_arguments)]
    pub fn backward(
        &self,
        ops: &OpKernels,
        stream: &CudaStream,
        grads: Gradients,
        dout: AnySlice,
        qkv: AnySlice,
        out: AnySlice,
        lse: DeviceSlice<f32>,
        delta: DeviceSlice<f32>,
        workspace: DeviceSlice<f32>,
    ) -> Result<(), OpError> {
        check_len("attention: lse", lse.len(), self.rows())?;
        check_len("attention: delta", delta.len(), self.rows())?;
        let width = self.shape.width();
        if let Some(dbias) = grads.dbias {
            check_len("attention: dbias", dbias.len(), width)?;
        }
        if let Some(angles) = grads.angles {
            let elems = self.shape.seq * self.shape.d;
            check_len("attention: angles", angles.table.len(), elems)?;
        }
        let elems = self.rows() * self.shape.d;
        let args = Operands {
            dqkv: ops.stored("attention: dqkv", grads.dqkv, self.elems())?,
            dout: ops.stored("attention: dout", dout, elems)?,
            qkv: ops.stored("attention: qkv", qkv, self.elems())?,
            out: ops.stored("attention: out", out, elems)?,
            lse: lse.into(),
            delta: delta.into(),
            masks: self.masks(grads.masks)?,
        };

        match self.kind {
            AttentionKernel::Flash => self.flash_backward(ops, stream, grads, args, workspace),
            AttentionKernel::Plain => {
                self.plain_backward(ops, stream, args)?;
                if let Some(angles) = grads.angles {
                    let heads = Heads {
                        queries: self.shape.heads,
                        keys: self.shape.kv_heads,
                        d: self.shape.d,
                    };
                    rope::backward(ops, stream, grads.dqkv, angles, heads)?;
                }
                grads.dbias.map_or(Ok(()), |dbias| {
                    column_sums::sum_rows(ops, stream, dbias, grads.dqkv, workspace)
                })
            }
        }
    }

    fn flash_backward(
        &self,
        ops: &OpKernels,
        stream: &CudaStream,
        grads: Gradients,
        args: Operands,
        workspace: DeviceSlice<f32>,
    ) -> Result<(), OpError> {
        let Self { dq, dkv, .. } = self;
        let [seq, heads, kv_heads, _, window] = self.sizes()?;
        let slope = self.slope().into();
        let scale = (self.slope() * LOG2_E).into();
        let Operands {
            dqkv,
            dout,
            qkv,
            out,
            lse,
            delta,
            masks: [starts, keys, drops],
        } = args;

        // Null addresses: queries and keys are not rotated, and sums are not stored.
        let table = grads
            .angles
            .map_or(0u64.into(), |angles| Arg::from(angles.table));
        let blocks = self.shape.batch * dq.launch.grid[0] as usize;
        let partials = match grads.dbias {
            Some(_) => Some(column_sums::part(
                "attention: workspace",
                workspace,
                blocks * self.shape.width(),
            )?),
            None => None,
        };
        let sums = partials.map_or(0u64.into(), Arg::from);

        let args = [
            dqkv, sums, delta, dout, qkv, out, lse, table, starts, keys, drops, seq, heads,
            kv_heads, window, scale, slope,
        ];
        let op = "attention backward dq";
        let entry = grads.masks.entry(&dq.entry);
        // SAFETY: the parameters of flash_backward_dq, whose lengths were checked.
        unsafe { ops.launch(stream, op, &entry, dq.launch, args) }?;
        let args = [
            dqkv, sums, dout, qkv, lse, delta, table, starts, keys, drops, seq, heads, kv_heads,
            window, scale, slope,
        ];
        let op = "attention backward dkv";
        let entry = grads.masks.entry(&dkv.entry);
        // SAFETY: the parameters of flash_backward_dkv, whose lengths were checked; as many tiles
        // as dq has.
        unsafe { ops.launch(stream, op, &entry, dkv.launch, args) }?;

        match (grads.dbias, partials) {
            (Some(dbias), Some(partials)) => {
                column_sums::sum_partials(ops, stream, &[dbias], partials, blocks)
            }
            _ => Ok(()),
        }
    }

    fn plain_backward(
        &self,
        ops: &OpKernels,
        stream: &CudaStream,
        args: Operands,
    ) -> Result<(), OpError> {
        let Self { dq, dkv, .. } = self;
        let [seq, heads, kv_heads, d, window] = self.sizes()?;
        let slope = self.slope().into();
        let scale = (self.slope() * LOG2_E).into();
        let Operands {
            dqkv,
            dout,
            qkv,
            out,
            lse,
            delta,
            masks: [starts, keys, drops],
        } = args;

        let args = [
            dqkv, delta, dout, qkv, out, lse, starts, keys, drops, seq, heads, kv_heads, d, window,
            scale, slope,
        ];
        let op = "attention backward dq";
        // SAFETY: the parameters of plain_backward_dq, whose lengths were checked.
        unsafe { ops.launch(stream, op, &dq.entry, dq.launch, args) }?;
        let args = [
            dqkv, dout, qkv, lse, delta, starts, keys, drops, seq, heads, kv_heads, d, window,
            scale, slope,
        ];
        let op = "attention backward dkv";
        // SAFETY: the parameters of plain_backward_dkv, whose lengths were checked.
        unsafe { ops.launch(stream, op, &dkv.entry, dkv.launch, args) }
    }

    /// The parameters `starts`, `draw_keys` and `dropout` of kernels.
    fn masks(&self, masks: Masks) -> Result<[Arg; 3], OpError> {
        let Shape { batch, seq, .. } = self.shape;
        if let Some(starts) = masks.starts {
            check_len("attention: starts", starts.len(), batch * seq)?;
        }
        let [keys, dropout] = Dropout::args(masks.dropout, batch)?;
        Ok([starts_arg(masks.starts), keys, dropout])
    }

    /// Sequence length, heads of queries and of keys, their dimension, and the window.
    fn sizes(&self) -> Result<[Arg; 5], OpError> {
        let Shape {
            seq,
            heads,
            kv_heads,
            d,
            window,
            ..
        } = self.shape;
        Ok([
            size("attention: seq", seq)?.into(),
            size("attention: heads", heads)?.into(),
            size("attention: heads of keys", kv_heads)?.into(),
            size("attention: head dimension", d)?.into(),
            size("attention: window", window.min(seq))?.into(),
        ])
    }

    /// 1 / sqrt(d).
    fn slope(&self) -> f32 {
        1.0 / (self.shape.d as f32).sqrt()
    }
}

/// What a batch changes of attention.
#[derive(Clone, Copy, Debug, Default)]
pub struct Masks {
    /// The first key that each query sees `[batch, seq]`, which does not fall within a sequence.
    pub starts: Option<DeviceSlice<u32>>,
    /// Dropout of the probabilities.
    pub dropout: Option<Dropout>,
}

impl Masks {
    /// The kernel on tensor cores for them.
    fn entry(&self, entry: &str) -> String {
        match self.dropout {
            Some(_) => format!("{entry}_dropout"),
            None => entry.to_owned(),
        }
    }
}

/// What [`Attention::backward`] writes, and what it depends on beside the operands.
#[derive(Clone, Copy, Debug)]
pub struct Gradients {
    /// The gradient of qkv.
    pub dqkv: AnySlice,
    /// The sum of `dqkv` over batch and sequence `[heads + 2 kv_heads, d]`: the gradient of the bias
    /// that was added to qkv.
    pub dbias: Option<SumOut>,
    /// The angles by which queries and keys were rotated.
    pub angles: Option<Angles>,
    /// The masks that the forward pass had.
    pub masks: Masks,
}

/// Addresses of the backward kernels.
struct Operands {
    dqkv: Arg,
    dout: Arg,
    qkv: Arg,
    out: Arg,
    lse: Arg,
    delta: Arg,
    /// Those of [`Attention::masks`].
    masks: [Arg; 3],
}

impl Kernel {
    /// The same kernel with a grid over `heads` heads.
    fn with_heads(mut self, heads: usize) -> Result<Self, OpError> {
        self.launch.grid[1] = size("attention: heads of keys", heads)?;
        Ok(self)
    }

    fn new(
        ops: &OpKernels,
        shape: Shape,
        entry: String,
        rows: usize,
        block: u32,
        shared: usize,
    ) -> Result<Self, OpError> {
        check_len(
            "attention: heads without a head of keys",
            shape.heads % shape.kv_heads.max(1),
            0,
        )?;
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
        if let Ok(function) = ops.function(&format!("{entry}_dropout")) {
            function.allow_shared_bytes(shared_bytes)?;
        }
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
