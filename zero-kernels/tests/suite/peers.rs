//! Blocks and 20 steps of AdamW beside bitsandbytes 0.50.2 and torchao 0.18.0
//! (tests/data/peer_blocks.safetensors, by benches/peers/blocks.py).
//!
//! NF4 is equal bit for bit. Elsewhere the codes are equal, with these differences:
//!
//! - Signed dynamic maps have 1 and not -1. The peers' scale is the greatest magnitude; ours has
//!   its sign, so that the greatest value has no error, where theirs is clamped to -0.993 or
//!   -0.8875.
//! - torchao divides by the scale, and we multiply with its reciprocal: values within a rounding of
//!   a midpoint may have the other code.
//! - bitsandbytes finds codes of 8 bits on a CPU in a table of 2^16 ranges of values: values
//!   within 3.1e-5 of a midpoint may have the other code.
//! - A block of zeros has scale 1e-12 in torchao, and 0 here.

use std::sync::Arc;

use safetensors::SafeTensors;
use zero_alloc::device::{AnySlice, Device, DeviceId, DeviceSlice, Stream};
use zero_alloc::host::HostDevice;
use zero_kernels::host::HostKernels;
use zero_kernels::{
    AdamHyper, AdamScalars, AverageCodecs, Codec, CodedSlice, Kernels, Rounding, StepScalars,
    UpdateArgs, UpdateRule, Weights,
};
use zero_shard::BlockFormat;

const FILE: &[u8] = include_bytes!("../data/peer_blocks.safetensors");

fn bytes(name: &str) -> Vec<u8> {
    let file = SafeTensors::deserialize(FILE).unwrap();
    file.tensor(name).unwrap().data().to_vec()
}

fn floats(name: &str) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(&bytes(name))
}

/// Our codes, one a byte, and scales.
fn encode(format: BlockFormat, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let mut stored = vec![0; format.bytes(values.len())];
    let codec = Codec::Blocks(format);
    codec
        .encode(values, &mut stored, Rounding::Nearest)
        .unwrap();
    let mut codes = Vec::new();
    let mut scales = Vec::new();
    for block in stored.chunks(format.block_bytes()) {
        let (scale, of_block) = block.split_first_chunk().unwrap();
        scales.push(f32::from_le_bytes(*scale));
        match format.code_bits() {
            8 => codes.extend(of_block),
            _ => codes.extend(of_block.iter().flat_map(|byte| [byte >> 4, byte & 15])),
        }
    }
    (codes, scales)
}

#[test]
fn nf4_equals_bitsandbytes() {
    let values = floats("nf4.values");
    let (codes, scales) = encode(BlockFormat::Nf4, &values);
    let theirs = bytes("nf4.bnb.codes");
    let theirs: Vec<u8> = theirs
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .collect();
    assert_eq!(codes, theirs);
    assert_eq!(scales, floats("nf4.bnb.scales"));
}

/// Compares codes with a peer's that may differ within `near` of a midpoint.
fn check(format: BlockFormat, name: &str, peer: &str, near: f32) {
    let values = floats(&format!("{name}.values"));
    let (codes, scales) = encode(format, &values);
    let their_codes = bytes(&format!("{name}.{peer}.codes"));
    let their_scales = floats(&format!("{name}.{peer}.scales"));
    let table = format.table();
    let elems = format.elems();
    let mut compared = 0;
    let mut differing = 0;
    for (block, values) in values.chunks(elems).enumerate() {
        let scale = scales[block];
        let theirs = their_scales[block];
        if scale == 0.0 {
            assert!(theirs <= 1e-12, "{name}, {peer}");
            continue;
        }
        assert_eq!(scale.abs(), theirs, "{name}, {peer}: block {block}");
        let range = block * elems..(block + 1) * elems;
        if scale < 0.0 {
            let worst = |codes: &[u8], scale: f32| {
                let errors = codes
                    .iter()
                    .zip(values)
                    .map(|(code, value)| (table[usize::from(*code)] * scale - value).abs());
                errors.fold(0.0, f32::max)
            };
            let ours = worst(&codes[range.clone()], scale);
            assert!(ours <= worst(&their_codes[range], theirs), "{name}, {peer}");
            continue;
        }
        for i in range {
            let ours = codes[i];
            let theirs = their_codes[i];
            compared += 1;
            if ours == theirs {
                continue;
            }
            differing += 1;
            let value = values[i % elems] / scale;
            let error = |code: u8| (table[usize::from(code)] - value).abs();
            // Only 0 is encoded as 0 here, where values are not negative.
            let is_raised = !format.is_signed() && ours == 1 && theirs == 0 && value > 0.0;
            assert!(
                is_raised || error(ours) <= error(theirs) + f32::EPSILON,
                "{name}, {peer}: element {i}: {value:e}"
            );
            assert!(
                error(theirs) - error(ours) <= near,
                "{name}, {peer}: element {i}: {value:e}, codes {ours} and {theirs}"
            );
        }
    }
    println!("{name}: {differing} of {compared} codes differ from {peer}");
    assert!(compared > 5 * elems && differing * 4 < compared);
}

#[test]
fn codes_equal_torchao() {
    for (format, name) in [
        (BlockFormat::Dynamic8, "dynamic8"),
        (BlockFormat::PositiveDynamic8, "positive_dynamic8"),
        (BlockFormat::Dynamic4, "dynamic4"),
        (BlockFormat::PositiveLinear4, "positive_linear4"),
    ] {
        check(format, name, "torchao", 2.0 * f32::EPSILON);
    }
}

#[test]
fn codes_are_those_of_bitsandbytes_but_near_ties() {
    check(BlockFormat::Dynamic8, "dynamic8", "bnb", 3.1e-5);
    check(
        BlockFormat::PositiveDynamic8,
        "positive_dynamic8",
        "bnb",
        3.1e-5,
    );
}

const ELEMS: usize = 4096;

/// `gradient` of the script.
fn gradient(step: u64) -> Vec<f32> {
    let value = |i: u64| {
        let hashed = (i * 2_654_435_761 + step * 2_654_473) % (1 << 32);
        let uniform = (hashed >> 8) as f32 / (1 << 24) as f32 - 0.5;
        uniform * uniform * uniform
    };
    (0..ELEMS as u64).map(value).collect()
}

fn typed<T>(memory: &mut [T]) -> DeviceSlice<T> {
    // SAFETY: each caller keeps its memory until the stream is drained.
    unsafe { DeviceSlice::from_raw_parts(memory.as_mut_ptr(), memory.len(), DeviceId::HOST) }
}

/// The parameter after 20 steps of ours.
fn steps(averages: AverageCodecs) -> Vec<f32> {
    let kernels = HostKernels::new(1).unwrap();
    let stream = HostDevice::new().create_stream("steps").unwrap();
    let hyper = AdamHyper {
        weight_decay: 0.01,
        ..AdamHyper::default()
    };
    let rule: Arc<dyn UpdateRule> = Arc::new(hyper);
    let mut master: Vec<f32> = gradient(100).iter().map(|x| x * 8.0).collect();
    let slots = rule.slots(averages).into_iter();
    // Words, so that blocks are aligned.
    let mut slots: Vec<(Codec, Vec<u32>)> = slots
        .map(|slot| (slot.codec, vec![0; slot.codec.bytes(ELEMS) / 4]))
        .collect();
    for step in 0..20 {
        let mut grad = gradient(step);
        let scalars = AdamScalars::new(step + 1, 1e-2, &hyper, 1.0);
        let mut scalars = [StepScalars::from(scalars)];
        let coded = slots.iter_mut().map(|(codec, words)| {
            let at = words.as_mut_ptr().cast();
            let elems = codec.bytes(ELEMS) / codec.dtype().size_bytes();
            // SAFETY: the slots outlive the step, which is drained below.
            let memory =
                unsafe { AnySlice::from_raw_parts(at, elems, codec.dtype(), DeviceId::HOST) };
            CodedSlice::new(*codec, memory)
        });
        let args = UpdateArgs {
            weights: Weights::Fp32 {
                master: typed(&mut master),
                param_out: None,
            },
            slots: coded.collect(),
            grad: typed(&mut grad).erase(),
            scalars: typed(&mut scalars),
            weight_decay: hyper.weight_decay,
            rounding: Rounding::Nearest,
        };
        kernels.update(&stream, &rule, args).unwrap();
        stream
            .synchronize(std::time::Duration::from_secs(60))
            .unwrap();
    }
    master
}

/// The root of the mean of squares of differences.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let squares = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2));
    (squares.sum::<f64>() / a.len() as f64).sqrt()
}

#[test]
fn steps_deviate_no_more_than_the_peers() {
    let exact = steps(Codec::Fp32.into());
    let torch = floats("fp32.end");
    let start: Vec<f32> = gradient(100).iter().map(|x| x * 8.0).collect();
    let moved = distance(&exact, &start);
    assert!(distance(&exact, &torch) < 1e-6 * moved);
    for (averages, peers) in [
        (AverageCodecs::EIGHT_BITS, &["torchao8", "bnb8"][..]),
        (AverageCodecs::FOUR_BITS, &["torchao4"]),
    ] {
        let ours = steps(averages);
        let deviation = distance(&ours, &exact) / moved;
        for peer in peers {
            let end = floats(&format!("{peer}.end"));
            let theirs = distance(&end, &torch) / moved;
            let apart = distance(&ours, &end) / moved;
            println!("{peer}: from fp32 {theirs:.5}, ours {deviation:.5}, apart {apart:.5}");
            assert!(
                deviation < 1.1 * theirs,
                "{peer}: {theirs}, ours {deviation}"
            );
        }
    }
}
