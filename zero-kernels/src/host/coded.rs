//! Arrays in formats other than fp32 on the host: decoding and encoding, updates of slots in them,
//! sums of blocks.

use half::bf16;
use multiversion::multiversion;
use zero_alloc::device::DType;
use zero_shard::BlockFormat;

use super::update::{BlockSlot, FloatSlice, with_floats};
use super::{accumulate, block_codes, cast};
use crate::check::same_len;
use crate::kernels::EncodeSums;
use crate::step::StepScalars;
use crate::{Codec, Float, KernelError, Rounding, UpdateArgs, UpdateRule};

/// Elements that an update decodes at a time.
const UPDATE_ELEMS: usize = 2048;
/// Elements that are encoded or decoded at a time: their fp32 values stay in the level-1 cache.
const PART_ELEMS: usize = 2048;

impl Codec {
    /// Decodes an array on this thread.
    ///
    /// # Errors
    /// The length of `stored` is not that of `values` in this format, or the format is remainders.
    pub fn decode(self, stored: &[u8], values: &mut [f32]) -> Result<(), KernelError> {
        same_len("decode: bytes", self.bytes(values.len()), stored.len())?;
        match self {
            Self::Fp32 => bytemuck::cast_slice_mut(values).copy_from_slice(stored),
            Self::Bf16 => {
                for (value, stored) in values.iter_mut().zip(stored.as_chunks::<2>().0) {
                    *value = Float::to_f32(bf16::from_le_bytes(*stored));
                }
            }
            Self::Blocks(format) => block_codes::decode(format, stored, values),
            Self::Remainders => return Err(no_values("decode")),
        }
        Ok(())
    }

    /// Encodes `values` on this thread.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn encode(
        self,
        values: &[f32],
        stored: &mut [u8],
        rounding: Rounding,
    ) -> Result<(), KernelError> {
        same_len("encode: bytes", self.bytes(values.len()), stored.len())?;
        match (self, rounding) {
            (Self::Fp32, _) => stored.copy_from_slice(bytemuck::cast_slice(values)),
            (Self::Bf16, Rounding::Nearest) => {
                for (value, stored) in values.iter().zip(stored.as_chunks_mut::<2>().0) {
                    *stored = <bf16 as Float>::from_f32(*value).to_le_bytes();
                }
            }
            (Self::Bf16, Rounding::Stochastic { seed, first }) => {
                let stored = stored.as_chunks_mut::<2>().0;
                round_stochastically(values, stored, seed, first);
            }
            (Self::Blocks(format), _) => block_codes::encode(format, values, stored),
            (Self::Remainders, _) => return Err(no_values("encode")),
        }
        Ok(())
    }
}

fn no_values(what: &'static str) -> KernelError {
    let dtype = DType::F16;
    KernelError::Unsupported { what, dtype }
}

/// Rounds up or down with probabilities by the distance, so that the mean is exact. Infinities and
/// NaNs stay so. The random bits follow from `seed` and the element's position, which counts from
/// `first`.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2+lzcnt",
    "x86_64+avx2+fma+bmi1+bmi2+lzcnt"
))]
fn round_stochastically(values: &[f32], stored: &mut [[u8; 2]], seed: u64, first: u64) {
    for (i, (value, stored)) in values.iter().zip(stored).enumerate() {
        // The finalizer of SplitMix64 (Steele et al., 2014) of the element's position and the seed.
        let mut x = (first + i as u64).wrapping_add(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let bits = value.to_bits();
        let rounded = match value.is_finite() {
            true => {
                let rounded = (bits.wrapping_add((x >> 48) as u32) >> 16) as u16;
                let up = bf16::from_bits(rounded);
                if up.is_finite() {
                    up
                } else {
                    bf16::from_bits((bits >> 16) as u16)
                }
            }
            false => bf16::from_f32(*value),
        };
        *stored = rounded.to_le_bytes();
    }
}

/// Updates a range on this thread. Slots in other formats than fp32 are decoded and encoded a part
/// at a time.
///
/// # Safety
/// As for [`DeviceSlice::as_host_mut`](zero_alloc::device::DeviceSlice::as_host_mut) of each
/// argument: host memory, disjoint, and nothing else accesses it meanwhile.
pub(super) unsafe fn update(
    rule: &dyn UpdateRule,
    args: &UpdateArgs,
    scalars: StepScalars,
) -> Result<(), KernelError> {
    let elems = args.elems();
    if args.slots.iter().all(|slot| slot.codec == Codec::Fp32) {
        let slots = args.slots.iter().map(|slot| {
            // SAFETY: the caller's promise.
            Ok(unsafe { slot.memory.typed::<f32>()?.as_host_mut() })
        });
        let slots = slots.collect::<Result<_, KernelError>>()?;
        // SAFETY: the caller's promise.
        return rule.update(unsafe { args.as_host(0..elems, slots, scalars) }?);
    }

    // SAFETY: the caller's promise.
    let updated = unsafe { update_whole_blocks(rule, args, scalars) }?;
    let mut decoded = vec![0.0; args.slots.len() * UPDATE_ELEMS];
    for start in (updated..elems).step_by(UPDATE_ELEMS) {
        let range = start..elems.min(start + UPDATE_ELEMS);
        let mut slots = Vec::with_capacity(args.slots.len());
        for (slot, values) in args
            .slots
            .iter()
            .zip(decoded.chunks_exact_mut(UPDATE_ELEMS))
        {
            let values = &mut values[..range.len()];
            let stored = slot.slice(range.clone()).memory.bytes().typed()?;
            // SAFETY: the caller's promise; bytes may have any value.
            slot.codec.decode(unsafe { stored.as_host() }, values)?;
            slots.push(values);
        }
        // SAFETY: the caller's promise.
        rule.update(unsafe { args.as_host(range.clone(), slots, scalars) }?)?;

        for (nth, slot) in args.slots.iter().enumerate() {
            let rounding = args
                .rounding
                .starting_at(start)
                .of_slot(nth, args.slots.len());
            let values = &decoded[nth * UPDATE_ELEMS..][..range.len()];
            let stored = slot.slice(range.clone()).memory.bytes().typed()?;
            // SAFETY: as above, and `decode` is through with it.
            let stored = unsafe { stored.as_host_mut() };
            slot.codec.encode(values, stored, rounding)?;
        }
    }
    Ok(())
}

/// Updates the elements of whole blocks by the rule's own loop over them, if it has one, and
/// returns their number.
///
/// # Safety
/// As [`update`].
unsafe fn update_whole_blocks(
    rule: &dyn UpdateRule,
    args: &UpdateArgs,
    scalars: StepScalars,
) -> Result<usize, KernelError> {
    let formats = args.slots.iter().map(|slot| match slot.codec {
        Codec::Blocks(format) => Some(format),
        _ => None,
    });
    let Some(formats) = formats.collect::<Option<Vec<_>>>() else {
        return Ok(0);
    };
    let most_elems = formats.iter().map(|format| format.elems()).max();
    let elems = args.elems() - args.elems() % most_elems.unwrap_or(1);
    let slots = args.slots.iter().zip(formats).map(|(slot, format)| {
        let blocks = slot.slice(0..elems).memory.bytes().typed()?;
        Ok(BlockSlot {
            format,
            // SAFETY: the caller's promise; bytes may have any value.
            blocks: unsafe { blocks.as_host_mut() },
        })
    });
    let slots = slots.collect::<Result<_, KernelError>>()?;
    // SAFETY: the caller's promise.
    let slices = unsafe { args.as_host(0..elems, slots, scalars) }?;

    match rule.update_blocks(slices) {
        Some(result) => result.map(|()| elems),
        None => Ok(0),
    }
}

/// Encodes values of any dtype, a part at a time, and adds to the sums of each
/// [`EncodeSums::ELEMS`] elements.
///
/// # Errors
/// The lengths do not match.
pub fn encode_blocks(
    format: BlockFormat,
    src: FloatSlice<'_>,
    blocks: &mut [u8],
    mut feedback: Option<(&mut [f32], f32)>,
    mut sums: Option<&mut [EncodeSums]>,
) -> Result<(), KernelError> {
    let elems = with_floats!(FloatSlice, src, src => src.len());
    same_len("encode_blocks: bytes", format.bytes(elems), blocks.len())?;
    if let Some((error, _)) = &feedback {
        same_len("encode_blocks: error", elems, error.len())?;
    }
    if let Some(sums) = &sums {
        same_len("encode_blocks: sums", EncodeSums::count(elems), sums.len())?;
    }

    let mut threads = ThreadSums::default();
    let mut values = [0.0; PART_ELEMS];
    let mut decoded = [0.0; PART_ELEMS];
    for start in (0..elems).step_by(PART_ELEMS) {
        let end = elems.min(start + PART_ELEMS);
        let values = &mut values[..end - start];
        let decoded = &mut decoded[..end - start];
        let values = match (src, &feedback) {
            (FloatSlice::F32(src), None) => &src[start..end],
            _ => {
                with_floats!(FloatSlice, src, src => cast(&src[start..end], values, 1.0))?;
                if let Some((error, _)) = &feedback {
                    accumulate(&error[start..end], values)?;
                }
                &*values
            }
        };
        let blocks = &mut blocks[format.bytes(start)..][..format.bytes(end - start)];
        block_codes::encode(format, values, blocks);
        if feedback.is_none() && sums.is_none() {
            continue;
        }

        block_codes::decode(format, blocks, decoded);
        if let Some((error, keep)) = &mut feedback {
            let error = error[start..end].iter_mut();
            for ((error, value), decoded) in error.zip(values).zip(&*decoded) {
                let missing = value - decoded;
                // A step with infinities is skipped: they must not stay.
                let missing = if missing.is_finite() { missing } else { 0.0 };
                *error = keep.mul_add(*error, (1.0 - *keep) * missing);
            }
        }
        if let Some(sums) = &mut sums {
            threads.add(format, values, decoded, blocks);
            if end == elems || end.is_multiple_of(EncodeSums::ELEMS) {
                std::mem::take(&mut threads).add_to(&mut sums[start / EncodeSums::ELEMS]);
            }
        }
    }
    Ok(())
}

/// The sums of an entry in the order of its kernel's threads: of each of 8 warps of 32 lanes, the
/// pairwise sums of 8 elements of each of its tiles. A part has a tile for each warp.
struct ThreadSums([[f64; 3]; THREADS]);

const THREADS: usize = PART_ELEMS / GROUP;
const GROUP: usize = 8;

impl Default for ThreadSums {
    fn default() -> Self {
        Self([[0.0; 3]; THREADS])
    }
}

impl ThreadSums {
    /// Adds a part, the last block of which may have fewer values.
    fn add(&mut self, format: BlockFormat, values: &[f32], decoded: &[f32], blocks: &[u8]) {
        // Two neighbouring threads have 16 elements: a run of 4, the other's run, and again.
        let pairs = values.chunks(2 * GROUP).zip(decoded.chunks(2 * GROUP));
        let threads = self.0.as_chunks_mut::<2>().0;
        for (nth, ((values, decoded), threads)) in pairs.zip(threads).enumerate() {
            let block = nth * 2 * GROUP / format.elems() * format.block_bytes();
            let scale = blocks[block..]
                .first_chunk()
                .map_or(0.0, |scale| f32::from_le_bytes(*scale));
            if scale.is_nan() {
                continue;
            }
            let most = f64::from(format.error_bound()) * f64::from(scale.abs());
            let mut errors = [0.0; 2 * GROUP];
            let mut squares = [0.0; 2 * GROUP];
            for (i, (value, decoded)) in values.iter().zip(decoded).enumerate() {
                let value = f64::from(*value);
                let error = value - f64::from(*decoded);
                errors[i] = error * error;
                squares[i] = value * value;
            }
            for (thread, [error_sq, bound_sq, value_sq]) in threads.iter_mut().enumerate() {
                let first = thread * GROUP / 2;
                let own = [
                    first..first + GROUP / 2,
                    first + GROUP..first + GROUP + GROUP / 2,
                ];
                let count: usize = own
                    .iter()
                    .map(|run| values.len().clamp(run.start, run.end) - run.start)
                    .sum();
                *error_sq += pairwise(&errors, first);
                *bound_sq += most * most * count as f64;
                *value_sq += pairwise(&squares, first);
            }
        }
    }

    /// Adds the sum of all threads.
    fn add_to(mut self, sums: &mut EncodeSums) {
        let mut halve = |stride: usize, most: usize| {
            let mut half = most / 2;
            while half > 0 {
                for warp in (0..THREADS).step_by(most * stride) {
                    for i in 0..half {
                        for sum in 0..3 {
                            self.0[warp + i * stride][sum] +=
                                self.0[warp + (i + half) * stride][sum];
                        }
                    }
                }
                half /= 2;
            }
        };
        halve(1, 32);
        halve(32, THREADS / 32);
        let [error_sq, bound_sq, value_sq] = self.0[0];
        sums.error_sq += error_sq;
        sums.bound_sq += bound_sq;
        sums.value_sq += value_sq;
    }
}

/// The sum of a thread's 8 of 16 elements, from `first` on.
fn pairwise(x: &[f64; 2 * GROUP], first: usize) -> f64 {
    let four: [f64; 4] = std::array::from_fn(|i| x[first + i] + x[first + i + GROUP]);
    (four[0] + four[2]) + (four[1] + four[3])
}

/// Writes to `dst` the elements from `first` on of the sum of `parts` arrays of `elems` elements,
/// one after another in `blocks`, in their order.
///
/// # Errors
/// The lengths do not match.
pub fn decode_blocks<T: Float>(
    format: BlockFormat,
    (blocks, parts): (&[u8], usize),
    (elems, first): (usize, usize),
    dst: &mut [T],
) -> Result<(), KernelError> {
    let bytes = format.bytes(elems);
    same_len("decode_blocks: bytes", bytes * parts, blocks.len())?;
    let mut sum = [0.0; PART_ELEMS];
    let mut decoded = [0.0; PART_ELEMS];
    for (nth, dst) in dst.chunks_mut(PART_ELEMS).enumerate() {
        let start = format.bytes(first + nth * PART_ELEMS);
        let sum = &mut sum[..dst.len()];
        let decoded = &mut decoded[..dst.len()];
        for part in 0..parts {
            let blocks = &blocks[part * bytes + start..][..format.bytes(dst.len())];
            if part == 0 {
                block_codes::decode(format, blocks, sum);
                continue;
            }
            block_codes::decode(format, blocks, decoded);
            sum.iter_mut()
                .zip(&*decoded)
                .for_each(|(sum, value)| *sum += value);
        }
        for (dst, sum) in dst.iter_mut().zip(&*sum) {
            *dst = T::from_f32(*sum);
        }
    }
    Ok(())
}
