//! The launches of [`encode_blocks`](crate::Kernels::encode_blocks) and
//! [`decode_blocks`](crate::Kernels::decode_blocks).

use zero_alloc::device::{AnySlice, DeviceId, DeviceSlice};
use zero_shard::BlockFormat;

use super::launch::{Launch, Param, index};
use super::span::{Span, THREADS, grid};
use crate::rule::entries;
use crate::{EncodeSums, Feedback, KernelError, check};

/// The address of an array that is not there.
const NULL: Param = Param::U64(0);

/// Names by dtype of the kernels for a format.
fn of_format<T>(format: BlockFormat, [eight, four, short_four]: [T; 3]) -> T {
    match (format.code_bits(), format.elems()) {
        (8, _) => eight,
        (_, 64) => short_four,
        _ => four,
    }
}

/// `BlockValues` of cuda/blocks.cuh.
fn values(format: BlockFormat) -> Param {
    let bits = format.table().iter().map(|value| value.to_bits());
    Param::Words(bits.collect())
}

pub(super) fn encode_blocks(
    device: DeviceId,
    format: BlockFormat,
    (src, blocks): (AnySlice, AnySlice),
    feedback: Option<Feedback>,
    sums: Option<DeviceSlice<EncodeSums>>,
) -> Result<Launch, KernelError> {
    check::encode_blocks(device, format, (src, blocks), feedback, sums)?;
    let names = [
        entries!("encode_blocks_256_8"),
        entries!("encode_blocks_128_4"),
        entries!("encode_blocks_64_4"),
    ];
    let entry = of_format(format, names)[index("encode_blocks: src", src.dtype())?];
    let error = feedback.map(|feedback| feedback.error.erase());
    let span = Span::from_start(&[Some(src), error].into_iter().flatten().collect::<Vec<_>>());
    // `EncodeFlags` of the kernel.
    let flags = vec![
        format.is_signed().into(),
        format.has_signed_scale().into(),
        u32::from(format == BlockFormat::Nf4),
        feedback.map_or(0.0, |feedback| feedback.keep).to_bits(),
        format.error_bound().to_bits(),
    ];
    Ok(Launch {
        source: "encode_blocks.cu",
        entry,
        blocks: grid(EncodeSums::count(src.len()) as u64),
        threads: THREADS,
        params: vec![
            src.into(),
            blocks.into(),
            error.map_or(NULL, Param::from),
            sums.map_or(NULL, Param::from),
            Param::Words(flags),
            values(format),
            Param::Span(span),
        ],
    })
}

pub(super) fn decode_blocks(
    device: DeviceId,
    format: BlockFormat,
    (blocks, parts): (AnySlice, usize),
    dst: AnySlice,
) -> Result<Launch, KernelError> {
    check::decode_blocks(device, format, (blocks, parts), dst)?;
    let names = [
        entries!("decode_blocks_256_8"),
        entries!("decode_blocks_128_4"),
        entries!("decode_blocks_64_4"),
    ];
    let entry = of_format(format, names)[index("decode_blocks: dst", dst.dtype())?];
    Ok(Launch::flat(
        "decode_blocks.cu",
        entry,
        Span::from_start(&[dst]),
        vec![
            blocks.into(),
            Param::U64(parts as u64),
            dst.into(),
            values(format),
        ],
    ))
}
