//! Block formats by SIMD: the bits of zero-shard's plain loops.

use proptest::prelude::*;
use zero_kernels::host::{BlockSlot, FloatSlice, UpdateSlices, WeightSlices};
use zero_kernels::{AdamHyper, AdamScalars, Codec, Rounding, StepScalars, UpdateRule};
use zero_shard::BlockFormat;

use crate::laws::config;

/// Values of one block or a few, of all magnitudes, zeros, subnormals and the limits; a few blocks
/// are not finite.
fn values() -> impl Strategy<Value = Vec<f32>> {
    let any_bits = any::<u32>().prop_map(f32::from_bits);
    let even = prop::sample::select(vec![0.0f32, -0.0, f32::MAX, f32::MIN, 1e-45, -1e-40, 1.0]);
    let value = prop_oneof![
        8 => -1.0f32..1.0,
        4 => (any::<i16>(), -40i32..0).prop_map(|(x, e)| f32::from(x) * 2f32.powi(e)),
        2 => even,
        1 => any_bits.prop_filter("finite", |x| x.is_finite()),
    ];
    (
        prop::collection::vec(value, 1..700),
        any::<u16>(),
        any::<u8>(),
    )
        .prop_map(|(mut values, at, kind)| {
            // Few blocks have one, so that the others are compared too.
            let at = usize::from(at) % values.len();
            match kind {
                0..6 => values[at] = f32::NAN,
                6..12 => values[at] = f32::INFINITY,
                12..18 => values[at] = f32::NEG_INFINITY,
                _ => {}
            }
            values
        })
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn blocks_have_the_bits_of_the_plain_loops(values in values()) {
        for format in BlockFormat::ALL {
            let codec = Codec::Blocks(format);
            let mut ours = vec![0xa5; format.bytes(values.len())];
            let mut plain = vec![0x5a; format.bytes(values.len())];
            codec.encode(&values, &mut ours, Rounding::Nearest).unwrap();
            format.encode(&values, &mut plain);
            prop_assert_eq!(&ours, &plain, "{:?}", format);

            let mut ours = vec![7.0; values.len()];
            let mut decoded = vec![8.0; values.len()];
            codec.decode(&plain, &mut ours).unwrap();
            format.decode(&plain, &mut decoded);
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&ours), bits(&decoded), "{:?}", format);
        }
    }

    /// Any bytes are blocks.
    #[test]
    fn any_bytes_decode_as_by_the_plain_loops(bytes in prop::collection::vec(any::<u8>(), 260 * 2)) {
        for format in BlockFormat::ALL {
            let count = bytes.len() / format.block_bytes();
            let bytes = &bytes[..count * format.block_bytes()];
            let mut ours = vec![7.0f32; count * format.elems()];
            let mut plain = vec![8.0f32; count * format.elems()];
            Codec::Blocks(format).decode(bytes, &mut ours).unwrap();
            format.decode(bytes, &mut plain);
            for (ours, plain) in ours.iter().zip(&plain) {
                let same = ours.to_bits() == plain.to_bits() || ours.is_nan() && plain.is_nan();
                prop_assert!(same, "{:?}: {:e}, plain {:e}", format, ours, plain);
            }
        }
    }
}

/// The loop over blocks takes whole blocks of the formats it has, and slices of equal length.
#[test]
fn updates_of_blocks_refuse_others() {
    let update = |formats: [BlockFormat; 2], n: usize, master: usize, bytes: usize| {
        let (mut master, grad) = (vec![1.0f32; master], vec![1.0f32; n]);
        let mut moments = formats.map(|format| vec![0; format.bytes(n)]);
        moments[1].truncate(bytes);
        let slots = moments.iter_mut().zip(formats);
        let slices = UpdateSlices {
            weights: WeightSlices::Fp32 {
                master: &mut master,
                param_out: None,
            },
            slots: slots
                .map(|(blocks, format)| BlockSlot { format, blocks })
                .collect(),
            grad: FloatSlice::F32(&grad),
            scalars: StepScalars::from(AdamScalars::new(1, 0.5, &AdamHyper::default(), 1.0)),
            weight_decay: 0.0,
        };
        let result = AdamHyper::default().update_blocks(slices);
        (result.map(|done| done.map_err(|e| e.to_string())), master)
    };
    let eight = [BlockFormat::Dynamic8, BlockFormat::PositiveDynamic8];

    let (result, master) = update(eight, 512, 512, usize::MAX);
    assert_eq!(result, Some(Ok(())));
    assert!(master.iter().all(|weight| *weight < 1.0));
    for (formats, n) in [
        (eight, 500),
        ([BlockFormat::Dynamic8, BlockFormat::PositiveLinear4], 512),
    ] {
        assert_eq!(update(formats, n, n, usize::MAX), (None, vec![1.0; n]));
    }
    for (master, bytes, what) in [
        (
            256,
            usize::MAX,
            "adam: weights: expected 512 elements, got 256",
        ),
        (
            512,
            260,
            "adam: bytes of a moment: expected 520 elements, got 260",
        ),
    ] {
        let (result, weights) = update(eight, 512, master, bytes);
        assert_eq!(result, Some(Err(what.to_owned())));
        assert_eq!(weights, vec![1.0; master]);
    }
}
