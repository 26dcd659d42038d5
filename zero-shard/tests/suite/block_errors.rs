//! Block formats: tables, errors, and blocks that are encoded again.

use std::collections::HashMap;

use proptest::prelude::*;
use zero_shard::BlockFormat;

use crate::support::cases;

/// The bits of the tables of torchao 0.18.0 and bitsandbytes 0.50.2, which agree
/// (benches/peers/blocks.py wrote them).
const TABLES: &str = include_str!("../data/block_tables.json");

fn table(format: BlockFormat, at_code: impl Fn(f64) -> f64) -> Vec<f32> {
    (0..1 << format.code_bits())
        .map(|code| at_code(f64::from(code)) as f32)
        .collect()
}

#[test]
fn tables_equal_their_sources() {
    let bits: HashMap<String, Vec<u32>> = serde_json::from_str(TABLES).unwrap();
    for format in BlockFormat::ALL {
        let expected = match format {
            BlockFormat::Int8 => table(format, |code| (code - 128.0).max(-127.0) / 127.0),
            BlockFormat::Int4 => table(format, |code| (code - 8.0).max(-7.0) / 7.0),
            _ => {
                let name = serde_json::to_value(format).unwrap();
                let bits = &bits[name.as_str().unwrap()];
                bits.iter().copied().map(f32::from_bits).collect()
            }
        };
        assert_eq!(format.table(), expected, "{format:?}");
    }
}

#[test]
fn codes_are_those_of_the_nearest_values() {
    for format in BlockFormat::ALL {
        let table = format.table();
        assert_eq!(format.midpoints().len() + 1, table.len());
        // The two first values of even tables are one, and the first code is never written.
        let first = usize::from(table[0] == table[1]);
        assert_eq!(usize::from(format.code(-1e30)), first);
        for (i, midpoint) in format.midpoints().iter().enumerate().skip(first) {
            assert!(table[i] < *midpoint && *midpoint < table[i + 1]);
            assert_eq!(usize::from(format.code(*midpoint)), i + 1, "{format:?}");
            assert_eq!(usize::from(format.code(midpoint.next_down())), i);
        }
        for value in table {
            assert_eq!(table[usize::from(format.code(*value))], *value);
        }
        let least = if format.is_signed() { -1.0 } else { 0.0 };
        let reach = f64::from(format.error_bound());
        assert!(f64::from(table[0]) - least <= reach && table[table.len() - 1] == 1.0);
    }
    assert!((BlockFormat::Int8.error_bound() - 1.0 / 254.0).abs() < 1e-6);
    assert!((BlockFormat::Int4.error_bound() - 1.0 / 14.0).abs() < 1e-6);
}

/// Magnitudes that blocks are made of: of one size, of all sizes, at the limits, and exact
/// multiples of midpoints.
fn magnitude() -> impl Strategy<Value = f32> {
    let midpoints = || prop::sample::select(BlockFormat::ALL.to_vec());
    prop_oneof![
        4 => 0.0f32..1.0,
        2 => (0u32..0x7f80_0000).prop_map(f32::from_bits),
        1 => 0.0f32..1e-30,
        1 => (0u32..1 << 12).prop_map(f32::from_bits),
        1 => (0x7e00_0000u32..0x7f80_0000).prop_map(f32::from_bits),
        1 => (midpoints(), any::<u8>()).prop_map(|(format, i)| {
            let midpoints = format.midpoints();
            midpoints[usize::from(i) % midpoints.len()].abs().min(f32::MAX)
        }),
        1 => prop::sample::select(vec![0.0, f32::MIN_POSITIVE, f32::MAX, 1e-45, 1.0]),
    ]
}

/// Values of a few blocks, the last one perhaps short: of one magnitude's kind, with a few others.
fn values() -> impl Strategy<Value = Vec<f32>> {
    let sign = |(value, negative): (f32, bool)| if negative { -value } else { value };
    let some = (
        prop::collection::vec(magnitude(), 1..4),
        1usize..600,
        any::<u64>(),
    );
    let mixed = some.prop_map(|(kinds, len, seed)| {
        let mut state = seed;
        let next = || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            state >> 33
        };
        std::iter::repeat_with(next)
            .take(len)
            .map(|random| {
                let kind = kinds[random as usize % kinds.len()];
                let part = (random >> 8 & 0xffff) as f32 / 65_535.0;
                let value = kind * if random & 64 == 0 { part } else { 1.0 };
                if random & 128 == 0 { value } else { -value }
            })
            .collect()
    });
    let signed = (magnitude(), any::<bool>()).prop_map(sign);
    prop_oneof![2 => mixed, 1 => prop::collection::vec(signed, 1..600)]
}

fn coded(format: BlockFormat, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let mut blocks = vec![0xa5; format.bytes(values.len())];
    format.encode(values, &mut blocks);
    let mut decoded = vec![f32::INFINITY; values.len()];
    format.decode(&blocks, &mut decoded);
    (blocks, decoded)
}

fn scale(block: &[u8]) -> f32 {
    f32::from_le_bytes([block[0], block[1], block[2], block[3]])
}

proptest! {
    #![proptest_config(cases(500))]

    #[test]
    fn errors_stay_within_the_bound(values in values()) {
        for format in BlockFormat::ALL {
            let values: Vec<f32> = match format.is_signed() {
                true => values.clone(),
                false => values.iter().map(|value| value.abs()).collect(),
            };
            let (blocks, decoded) = coded(format, &values);
            let blocks = blocks.chunks(format.block_bytes());
            let parts = values.chunks(format.elems()).zip(decoded.chunks(format.elems()));
            for ((values, decoded), block) in parts.zip(blocks) {
                let most = f64::from(format.error_bound()) * f64::from(scale(block).abs());
                for (value, decoded) in values.iter().zip(decoded) {
                    let error = (f64::from(*value) - f64::from(*decoded)).abs();
                    prop_assert!(
                        error <= most,
                        "{:?}, scale {:e}: {:e} became {:e}", format, scale(block), value, decoded
                    );
                }
            }
        }
    }

    #[test]
    fn encoding_is_idempotent(values in values()) {
        for format in BlockFormat::ALL {
            let (blocks, decoded) = coded(format, &values);
            let (again, twice) = coded(format, &decoded);
            prop_assert_eq!(&decoded, &twice);
            let pairs = blocks.chunks(format.block_bytes()).zip(again.chunks(format.block_bytes()));
            for ((block, again), decoded) in pairs.zip(decoded.chunks(format.elems())) {
                let vanished = scale(block) == f32::MIN_POSITIVE && decoded.iter().all(|x| *x == 0.0);
                prop_assert!(block == again || vanished && scale(again) == 0.0, "{:?}", format);
            }
        }
    }

    /// A block does not depend on its neighbours.
    #[test]
    fn blocks_that_are_not_finite_decode_to_nan(
        values in values(),
        at in any::<prop::sample::Index>(),
        bad in prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY]),
    ) {
        for format in BlockFormat::ALL {
            let (whole, _) = coded(format, &values);
            let mut values = values.clone();
            let at = at.index(values.len());
            values[at] = bad;
            let (blocks, decoded) = coded(format, &values);
            let block = at / format.elems();
            for (i, decoded) in decoded.chunks(format.elems()).enumerate() {
                prop_assert!(decoded.iter().all(|value| value.is_nan() == (i == block)));
            }
            let others = whole.chunks(format.block_bytes()).zip(blocks.chunks(format.block_bytes()));
            for (i, (whole, now)) in others.enumerate() {
                let nan = f32::NAN.to_le_bytes();
                let as_expected = if i == block { now[..4] == nan } else { whole == now };
                prop_assert!(as_expected, "{:?}, block {}", format, i);
            }
        }
    }
}

#[test]
fn blocks_of_zeros_decode_to_zeros() {
    for format in BlockFormat::ALL {
        for zero in [0.0f32, -0.0] {
            let (blocks, decoded) = coded(format, &vec![zero; format.elems() + 3]);
            assert!(decoded.iter().all(|value| *value == 0.0));
            for block in blocks.chunks(format.block_bytes()) {
                assert_eq!(scale(block).to_bits(), 0);
            }
        }
    }
}

#[test]
fn positive_formats_have_no_negative_values() {
    for format in [BlockFormat::PositiveDynamic8, BlockFormat::PositiveLinear4] {
        let (blocks, decoded) = coded(format, &[-5.0, 1.0, -0.25]);
        assert_eq!(scale(&blocks), 1.0);
        let least = format.table()[0];
        assert_eq!(decoded, [least, 1.0, least]);
        let (_, decoded) = coded(format, &[-5.0, -3.0]);
        assert_eq!(decoded, [0.0, 0.0]);
    }
}

#[test]
fn greatest_magnitude_has_no_error() {
    for format in BlockFormat::ALL {
        for greatest in [-3.7f32, 3.7, 1.5e-38, -3e38] {
            let (blocks, decoded) = coded(format, &[0.5 * greatest, greatest]);
            if greatest > 0.0 || format.is_signed() {
                assert_eq!(decoded[1], greatest, "{format:?}");
                let sign = if format.has_signed_scale() {
                    greatest
                } else {
                    greatest.abs()
                };
                assert_eq!(scale(&blocks), sign);
            }
        }
    }
}
