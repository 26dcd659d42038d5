//! A launch of each kernel: to load and warm them, and to compare them with what was compiled.

use zero_alloc::device::{AnySlice, DType, DeviceId, DeviceSlice};
use zero_shard::BlockFormat;

use super::launch::{
    Launch, Param, accumulate, advance_step, cast, cast_rows, grad_stats, normalise, pack,
    rank_stats, update,
};
use super::launch_blocks::{decode_blocks, encode_blocks};
use crate::{
    AdvanceArgs, AverageCodecs, Codec, CodedSlice, KernelError, MatrixRows, Rounding, Segments,
    UpdateArgs, Weights, rules,
};

/// Slots of [`every_kernel`], each for a single value.
const SLOTS: usize = 9;
const SLOT_BYTES: usize = 128;
/// Bytes that the launches of [`every_kernel`] access.
pub(super) const EVERY_KERNEL_BYTES: usize = SLOTS * SLOT_BYTES;

/// Zeroed memory of which only addresses are used: [`EVERY_KERNEL_BYTES`] bytes.
#[derive(Clone, Copy)]
struct Slots {
    address: usize,
    device: DeviceId,
}

impl Slots {
    fn slot<T>(self, nth: usize, len: usize) -> DeviceSlice<T> {
        debug_assert!(nth < SLOTS && len * size_of::<T>() <= SLOT_BYTES);
        let at = std::ptr::without_provenance_mut(self.address + nth * SLOT_BYTES);
        // SAFETY: only the address and the length are used here; the launcher provides the memory.
        unsafe { DeviceSlice::from_raw_parts(at, len, self.device) }
    }

    /// An empty array in a format.
    fn coded(self, codec: Codec) -> CodedSlice {
        let memory = match codec.dtype() {
            DType::U8 => self.none::<u8>().erase(),
            _ => self.none::<f32>().erase(),
        };
        CodedSlice::new(codec, memory)
    }

    /// An empty range.
    fn none<T>(self) -> DeviceSlice<T> {
        self.slot(0, 0)
    }
}

/// A launch of each kernel, on empty ranges and on single values within [`EVERY_KERNEL_BYTES`]
/// zeroed bytes at `address`.
pub(super) fn every_kernel(address: usize, device: DeviceId) -> Result<Vec<Launch>, KernelError> {
    let slots = Slots { address, device };
    let floats = [
        slots.none::<f32>().erase(),
        slots.none::<half::bf16>().erase(),
        slots.none::<half::f16>().erase(),
    ];

    let mut launches = Vec::new();
    for grad in floats {
        launches.extend(kernels_of_grad(slots, grad, floats)?);
    }
    launches.extend(kernels_of_step(slots, floats[0])?);
    // Kernels over empty ranges return at once, except the first stage of grad_stats: it writes one
    // chunk's zeros to scratch.
    for launch in &mut launches {
        launch.blocks = launch.blocks.max(1);
    }
    Ok(launches)
}

/// A launch of each kernel of [`every_kernel`] that reads gradients like `grad`, an empty range.
fn kernels_of_grad(
    slots: Slots,
    grad: AnySlice,
    floats: [AnySlice; 3],
) -> Result<Vec<Launch>, KernelError> {
    let device = slots.device;
    let none = Segments {
        start: 0,
        len: 0,
        stride: 0,
        count: 0,
    };

    let mut launches = Vec::new();
    for rule in rules::with_kernels() {
        let masters = [None].into_iter().chain(floats.map(Some));
        let masters = masters.map(|param_out| Weights::Fp32 {
            master: slots.none(),
            param_out,
        });
        let remainder = Weights::Remainder {
            param: slots.none(),
            remainder: slots.none(),
        };
        let averages = [
            Codec::Fp32.into(),
            AverageCodecs::EIGHT_BITS,
            AverageCodecs::FOUR_BITS,
        ];
        let mut formats = averages.map(|averages| rule.slots(averages)).to_vec();
        // A rule without slots has one.
        formats.dedup();
        for weights in masters.chain([remainder]) {
            for format in &formats {
                let args = UpdateArgs {
                    weights,
                    slots: format.iter().map(|slot| slots.coded(slot.codec)).collect(),
                    grad,
                    scalars: slots.slot(1, 1),
                    weight_decay: 0.0,
                    rounding: Rounding::Nearest,
                };
                match update(device, &*rule, &args) {
                    // A phase of a rule need not have all forms.
                    Err(KernelError::NoKernel { .. }) => {}
                    launch => launches.push(launch?),
                }
            }
        }
    }
    launches.extend(kernels_of_blocks(slots, grad)?);

    for dst in floats {
        launches.push(cast(device, grad, dst, 1.0)?);
        let [src, dst_rows] = [grad, dst].map(|data| MatrixRows { data, stride: 0 });
        launches.push(cast_rows(device, src, dst_rows, [0, 0], 1.0)?);
        launches.extend(pack(device, &[(grad, 0)], none, dst)?);
    }

    launches.push(accumulate(device, grad, slots.none())?);
    let stats = grad_stats(device, &[grad], slots.slot(2, 2), slots.slot(3, 1))?;
    launches.extend(stats.into_iter().map(|[chunks, _]| chunks));
    Ok(launches)
}

/// A launch of each kernel of [`every_kernel`] that decides a step.
fn kernels_of_step(slots: Slots, grad: AnySlice) -> Result<Vec<Launch>, KernelError> {
    let device = slots.device;
    let ranks = slots.slot(5, 1);

    let stats = grad_stats(device, &[grad], slots.slot(2, 2), slots.slot(3, 1))?;
    let mut launches: Vec<Launch> = stats.into_iter().map(|[_, combine]| combine).collect();
    launches.push(rank_stats(
        device,
        slots.slot(3, 0),
        slots.slot(4, 1),
        slots.slot(4, 1),
        ranks,
    )?);

    // With no rates the step halts the run at once.
    let args = AdvanceArgs {
        ranks,
        config: slots.slot(6, 1),
        rates: slots.none(),
        state: slots.slot(7, 1),
        scalars: slots.slot(1, 1),
        records: slots.slot(8, 1),
    };

    launches.push(advance_step(device, &args)?);
    launches.push(normalise(slots.none(), slots.slot(3, 1), 1.0));
    Ok(launches)
}

/// A launch of each kernel of blocks for arrays of `float`'s dtype, an empty range.
fn kernels_of_blocks(slots: Slots, float: AnySlice) -> Result<Vec<Launch>, KernelError> {
    let device = slots.device;
    let blocks = slots.none::<u8>().erase();
    let mut launches = Vec::new();
    for format in [BlockFormat::Int8, BlockFormat::Int4, BlockFormat::Nf4] {
        launches.push(encode_blocks(device, format, (float, blocks), None, None)?);
        launches.push(decode_blocks(device, format, (blocks, 1), float)?);
    }
    Ok(launches)
}

/// The kernels of a source file.
pub(super) fn entries_of(source: &str) -> Result<Vec<&'static str>, KernelError> {
    let launches = every_kernel(0, DeviceId::HOST)?.into_iter();
    Ok(launches
        .filter(|launch| launch.source == source)
        .map(|launch| launch.entry)
        .collect())
}

/// A kernel's source, its name, and the sizes of the parameters that launches pass.
type Signature = (super::KernelSource, &'static str, Vec<usize>);

/// The signatures of all kernels of this crate, for tests.
#[doc(hidden)]
pub fn kernel_signatures() -> Result<Vec<Signature>, KernelError> {
    let mut signatures = Vec::new();
    for launch in every_kernel(0, DeviceId::HOST)? {
        let sizes = launch.params.iter().map(Param::size_bytes).collect();
        signatures.extend(
            super::KernelSource::named(launch.source).map(|source| (*source, launch.entry, sizes)),
        );
    }
    Ok(signatures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_stays_within_its_bytes() {
        let mut entries = Vec::new();
        for launch in every_kernel(0x1000, DeviceId::HOST).unwrap() {
            assert_eq!(launch.blocks, 1);
            for param in launch.params {
                let end = 0x1000 + EVERY_KERNEL_BYTES as u64;
                assert!(
                    !matches!(param, Param::Address(a) if a < 0x1000 || a + SLOT_BYTES as u64 > end)
                );
                assert!(!matches!(param, Param::Span(span) if span.len > 0));
            }
            entries.push(launch.entry);
        }

        entries.sort_unstable();
        entries.dedup();
        assert_eq!(
            entries.len(),
            3 * (12 + 3) + 3 * 3 + 5 + 9 + 9 + 9 + 9 + 9 + 1 + 3 + 4 + 2,
            "each kernel once"
        );

        for source in super::super::source::SOURCES {
            assert!(
                !entries_of(source.name).unwrap().is_empty(),
                "{}",
                source.name
            );
        }
    }
}
