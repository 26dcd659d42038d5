//! The argument checks of every launch, on any device: lengths, device, alignment, overlap. Dtypes
//! are checked when a kernel is selected.

use zero_alloc::device::{AnySlice, DType, DeviceError, DeviceId, DeviceSlice};
use zero_shard::BlockFormat;

use crate::codec::Codec;
use crate::error::{Argument, KernelError};
use crate::kernels::{
    AdvanceArgs, EncodeSums, Feedback, MatrixRows, OrthogonaliseArgs, Segments, elems_of_rows,
};
use crate::rule::{UpdateArgs, UpdateRule, Weights};
use crate::step::{GradStats, RankStats};

pub(crate) fn same_len(
    what: impl Into<Argument>,
    expected: usize,
    got: usize,
) -> Result<(), KernelError> {
    if expected == got {
        Ok(())
    } else {
        Err(KernelError::LengthMismatch {
            what: what.into(),
            expected,
            got,
        })
    }
}

/// Rejects dtypes that no kernel computes with.
pub(crate) fn float(what: &'static str, dtype: DType) -> Result<(), KernelError> {
    match dtype {
        DType::F32 | DType::Bf16 | DType::F16 => Ok(()),
        _ => Err(KernelError::Unsupported { what, dtype }),
    }
}

/// The address range of an argument.
#[derive(Clone, Copy)]
struct Extent {
    what: Argument,
    elems: usize,
    device: DeviceId,
    start: usize,
    end: usize,
    align_bytes: usize,
}

impl Extent {
    fn any(what: impl Into<Argument>, slice: AnySlice) -> Self {
        let start = slice.as_ptr() as usize;
        let align_bytes = slice.dtype().size_bytes();
        let end = start.saturating_add(slice.len_bytes());
        Self {
            what: what.into(),
            elems: slice.len(),
            device: slice.device(),
            start,
            end,
            align_bytes,
        }
    }

    fn typed<T>(what: impl Into<Argument>, slice: DeviceSlice<T>) -> Self {
        let start = slice.as_ptr() as usize;
        let elems = slice.len();
        let end = start.saturating_add(elems.saturating_mul(size_of::<T>()));
        Self {
            what: what.into(),
            elems,
            device: slice.device(),
            start,
            end,
            align_bytes: align_of::<T>(),
        }
    }

    fn has(&self, elems: usize) -> Result<(), KernelError> {
        same_len(self.what, elems, self.elems)
    }

    fn has_at_least(&self, elems: usize) -> Result<(), KernelError> {
        if self.elems >= elems {
            Ok(())
        } else {
            self.has(elems)
        }
    }
}

/// Rejects arguments in memory that `device` cannot access, misaligned ones, and written ones that
/// overlap another: the host makes `&mut` slices of them.
fn check_extents(device: DeviceId, written: &[Extent], read: &[Extent]) -> Result<(), KernelError> {
    for e in written.iter().chain(read) {
        if !device.accesses(e.device) && e.elems > 0 {
            return Err(DeviceError::AnotherDevice {
                what: e.what.without_slot(),
                expected: device,
                got: e.device,
            }
            .into());
        }
        if e.start < e.end && !e.start.is_multiple_of(e.align_bytes) {
            let Extent {
                what,
                start: address,
                align_bytes,
                ..
            } = *e;
            return Err(KernelError::Misaligned {
                what,
                address,
                align_bytes,
            });
        }
    }

    for (i, a) in written.iter().enumerate() {
        for b in written[i + 1..].iter().chain(read) {
            if a.start < b.end && b.start < a.end {
                return Err(KernelError::Overlap {
                    first: a.what,
                    second: b.what,
                });
            }
        }
    }

    Ok(())
}

pub(crate) fn update(
    device: DeviceId,
    rule: &dyn UpdateRule,
    args: &UpdateArgs,
) -> Result<(), KernelError> {
    let mut written = match args.weights {
        Weights::Fp32 { master, param_out } => {
            let param_out = param_out.map(|param| Extent::any("update: param_out", param));
            let master = Extent::typed("update: master", master);
            [Some(master), param_out].into_iter().flatten().collect()
        }
        Weights::Remainder { param, remainder } => vec![
            Extent::typed("update: param", param),
            Extent::typed("update: remainder", remainder),
        ],
    };

    let slots = rule.slots(Codec::Fp32.into());
    same_len("update: slots", slots.len(), args.slots.len())?;
    for (slot, coded) in slots.iter().zip(&args.slots) {
        let extent = Extent::any(Argument::Slot(slot.name), coded.memory);
        let elems = match coded.has_elems(args.elems()) {
            true => args.elems(),
            false => extent.elems,
        };
        let align_bytes = match coded.codec {
            Codec::Blocks(_) => align_of::<f32>(),
            _ => extent.align_bytes,
        };
        written.push(Extent {
            elems,
            align_bytes,
            ..extent
        });
    }

    let read = [
        Extent::any("update: grad", args.grad),
        Extent::typed("update: scalars", args.scalars),
    ];
    written
        .iter()
        .chain(&read[..1])
        .try_for_each(|e| e.has(args.elems()))?;
    read[1].has(1)?;
    float("update: grad", args.grad.dtype())?;
    if let Weights::Fp32 {
        param_out: Some(param),
        ..
    } = args.weights
    {
        float("update: param_out", param.dtype())?;
    }

    check_extents(device, &written, &read)
}

pub(crate) fn orthogonalise(
    device: DeviceId,
    args: &OrthogonaliseArgs,
    scratch_elems: usize,
) -> Result<(), KernelError> {
    let written = [
        Extent::typed("orthogonalise: values", args.values),
        Extent::typed("orthogonalise: scratch", args.scratch),
    ];
    if args.row_stride < args.cols {
        same_len("orthogonalise: row_stride", args.cols, args.row_stride)?;
    }
    let elems = elems_of_rows([args.rows, args.cols], args.row_stride);
    written[0].has(elems.unwrap_or(usize::MAX))?;
    written[1].has_at_least(scratch_elems)?;
    check_extents(device, &written, &[])
}

pub(crate) fn cast(device: DeviceId, src: AnySlice, dst: AnySlice) -> Result<(), KernelError> {
    same_len("cast: dst", src.len(), dst.len())?;
    check_extents(
        device,
        &[Extent::any("cast: dst", dst)],
        &[Extent::any("cast: src", src)],
    )
}

pub(crate) fn cast_rows(
    device: DeviceId,
    src: MatrixRows,
    dst: MatrixRows,
    shape: [usize; 2],
) -> Result<(), KernelError> {
    let extent = |what, stride, rows: MatrixRows| {
        if rows.stride < shape[1] {
            same_len(stride, shape[1], rows.stride)?;
        }
        let extent = Extent::any(what, rows.data);
        let elems = elems_of_rows(shape, rows.stride);
        extent.has(elems.unwrap_or(usize::MAX)).map(|()| extent)
    };
    let read = extent("cast_rows: src", "cast_rows: src: stride", src)?;
    let written = extent("cast_rows: dst", "cast_rows: dst: stride", dst)?;
    check_extents(device, &[written], &[read])
}

pub(crate) fn encode_blocks(
    device: DeviceId,
    format: BlockFormat,
    (src, blocks): (AnySlice, AnySlice),
    feedback: Option<Feedback>,
    sums: Option<DeviceSlice<EncodeSums>>,
) -> Result<(), KernelError> {
    float("encode_blocks: src", src.dtype())?;
    let blocks = block_extent("encode_blocks: blocks", blocks, format.bytes(src.len()))?;
    let error = feedback.map(|f| Extent::typed("encode_blocks: error", f.error));
    error.iter().try_for_each(|error| error.has(src.len()))?;
    let sums = sums.map(|sums| Extent::typed("encode_blocks: sums", sums));
    let count = EncodeSums::count(src.len());
    sums.iter().try_for_each(|sums| sums.has(count))?;
    let written: Vec<_> = [Some(blocks), error, sums].into_iter().flatten().collect();
    check_extents(device, &written, &[Extent::any("encode_blocks: src", src)])
}

pub(crate) fn decode_blocks(
    device: DeviceId,
    format: BlockFormat,
    (blocks, parts): (AnySlice, usize),
    dst: AnySlice,
) -> Result<(), KernelError> {
    float("decode_blocks: dst", dst.dtype())?;
    let bytes = format.bytes(dst.len()).saturating_mul(parts);
    let blocks = block_extent("decode_blocks: blocks", blocks, bytes)?;
    check_extents(device, &[Extent::any("decode_blocks: dst", dst)], &[blocks])
}

/// Blocks of `bytes` bytes, which start with a scale in fp32.
fn block_extent(what: &'static str, blocks: AnySlice, bytes: usize) -> Result<Extent, KernelError> {
    let extent = Extent::any(what, blocks);
    same_len(what, bytes, blocks.len_bytes())?;
    Ok(Extent {
        align_bytes: align_of::<f32>(),
        ..extent
    })
}

pub(crate) fn pack(
    device: DeviceId,
    parts: &[(AnySlice, usize)],
    segments: Segments,
    dst: AnySlice,
) -> Result<(), KernelError> {
    same_len(
        "pack: dst",
        segments.elems().unwrap_or(usize::MAX),
        dst.len(),
    )?;
    let mut free = 0;

    for (index, (part, at)) in parts.iter().enumerate() {
        if *at < free {
            return Err(KernelError::PartOrder { index });
        }
        free = at.saturating_add(part.len());
    }

    parts
        .iter()
        .try_for_each(|(part, _)| float("pack: part", part.dtype()))?;
    float("pack: dst", dst.dtype())?;
    let read: Vec<Extent> = parts
        .iter()
        .map(|(part, _)| Extent::any("pack: part", *part))
        .collect();

    check_extents(device, &[Extent::any("pack: dst", dst)], &read)
}

pub(crate) fn accumulate(
    device: DeviceId,
    grad: AnySlice,
    acc: DeviceSlice<f32>,
) -> Result<(), KernelError> {
    same_len("accumulate: acc", grad.len(), acc.len())?;
    check_extents(
        device,
        &[Extent::typed("accumulate: acc", acc)],
        &[Extent::any("accumulate: grad", grad)],
    )
}

pub(crate) fn grad_stats(
    device: DeviceId,
    grads: &[AnySlice],
    scratch: DeviceSlice<f64>,
    scratch_elems: usize,
    out: DeviceSlice<GradStats>,
) -> Result<(), KernelError> {
    let written = [
        Extent::typed("grad_stats: out", out),
        Extent::typed("grad_stats: scratch", scratch),
    ];
    grads
        .iter()
        .try_for_each(|grad| float("grad_stats: grad", grad.dtype()))?;
    written[0].has(grads.len())?;
    written[1].has_at_least(scratch_elems)?;
    let read: Vec<Extent> = grads
        .iter()
        .map(|grad| Extent::any("grad_stats: grad", *grad))
        .collect();
    check_extents(device, &written, &read)
}

pub(crate) fn rank_stats(
    device: DeviceId,
    units: DeviceSlice<GradStats>,
    loss: DeviceSlice<f64>,
    flags: DeviceSlice<u64>,
    out: DeviceSlice<RankStats>,
) -> Result<(), KernelError> {
    let written = [Extent::typed("rank_stats: out", out)];
    let read = [
        Extent::typed("rank_stats: loss", loss),
        Extent::typed("rank_stats: flags", flags),
        Extent::typed("rank_stats: units", units),
    ];
    read[..2]
        .iter()
        .chain(&written)
        .try_for_each(|e| e.has(1))?;
    check_extents(device, &written, &read)
}

pub(crate) fn advance_step(device: DeviceId, args: &AdvanceArgs) -> Result<(), KernelError> {
    let written = [
        Extent::typed("advance_step: state", args.state),
        Extent::typed("advance_step: scalars", args.scalars),
        Extent::typed("advance_step: records", args.records),
    ];
    let read = [
        Extent::typed("advance_step: ranks", args.ranks),
        Extent::typed("advance_step: config", args.config),
        Extent::typed("advance_step: rates", args.rates),
    ];
    read[0].has_at_least(1)?;
    read[1].has(1)?;
    written[0].has(1)?;
    written[1..].iter().try_for_each(|e| e.has_at_least(1))?;
    read[2].has(args.rates.len().next_multiple_of(args.scalars.len()))?;
    check_extents(device, &written, &read)
}
