//! Properties of any model, any two layouts and any dtypes: the loaded state equals the saved
//! state.

use proptest::prelude::*;
use zero_ckpt::{Reader, SaveMeta, ShardData, StateDtype, Store, StoreOptions};
use zero_shard::{Layout, LayoutOptions, ParamSpec, UnitSpec};

#[derive(Clone, Debug)]
struct Cut {
    ranks: u64,
    shard_align: u64,
    param_align: u64,
}

fn cut() -> impl Strategy<Value = Cut> {
    (1u64..6, 1u64..20, 1u64..9).prop_map(|(ranks, shard_align, param_align)| Cut {
        ranks,
        shard_align,
        param_align,
    })
}

/// The sizes of the parameters of each unit. Some parameters are empty; some units have no
/// parameters.
fn model() -> impl Strategy<Value = Vec<Vec<u64>>> {
    let size = prop_oneof![Just(0u64), 1u64..9, 1u64..300, Just(70_000u64)];
    prop::collection::vec(prop::collection::vec(size, 0..4), 1..4)
}

fn layout(sizes: &[Vec<u64>], cut: &Cut) -> Layout {
    let unit = |(u, sizes): (usize, &Vec<u64>)| {
        let params: Vec<_> = sizes
            .iter()
            .enumerate()
            .map(|(p, n)| ParamSpec::new(format!("{u}.{p}"), [*n]))
            .collect();
        UnitSpec::new(format!("u{u}"), params)
    };
    let units: Vec<_> = sizes.iter().enumerate().map(unit).collect();
    let options = LayoutOptions::default()
        .shard_align_elems(cut.shard_align)
        .param_align_elems(cut.param_align);
    Layout::with_options(&units, cut.ranks, options).unwrap()
}

/// A value that 16-bit types hold exactly.
fn exact(values: &[f32]) -> Vec<f32> {
    values
        .iter()
        .map(|v| half::bf16::from_bits((v.to_bits() >> 16) as u16 & 0x3fff).to_f32())
        .collect()
}

proptest! {
    #![proptest_config(crate::common::cases(40))]

    #[test]
    fn any_layout_loads_any_other(
        sizes in model(), from in cut(), to in cut(), half_moment in any::<bool>(), seed in any::<u64>(),
    ) {
        let from = layout(&sizes, &from);
        let to = layout(&sizes, &to);
        let dir = tempfile::tempdir().unwrap();
        let mut receipts = Vec::new();

        for rank in 0..from.world_size() {
            let store = Store::create(dir.path(), rank, StoreOptions::default()).unwrap();
            // Added with the narrower state first; files hold the wider first.
            let moment = exact(&crate::common::storage(&from, rank, "first_moment", seed));
            let narrow: Vec<u8> = match half_moment {
                true => moment.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
                false => moment.iter().flat_map(|v| v.to_le_bytes()).collect(),
            };
            let master = crate::common::storage(&from, rank, "master", seed);
            let mut shard = ShardData::new(&from, rank).unwrap();
            let dtype = if half_moment { StateDtype::BF16 } else { StateDtype::F32 };
            shard.storage("first_moment", dtype, &narrow).unwrap();
            shard.storage_f32("master", &master).unwrap();
            receipts.push(store.stage(1, &shard));
        }

        let store = Store::create(dir.path(), 0, StoreOptions::default()).unwrap();
        store.publish(&SaveMeta::default().step(1), &from, receipts).unwrap();

        let reader = Reader::open(dir.path()).unwrap();
        prop_assert!(reader.verify().problems.is_empty());
        let view = reader.view(&to).unwrap();
        for rank in 0..to.world_size() {
            for (state, as_saved) in [("master", false), ("first_moment", true)] {
                let mut got = vec![f32::NAN; to.shard_elems() as usize];
                view.read_storage(state, rank, &mut got).unwrap();
                let expected = crate::common::loaded(StateDtype::F32.into(), &to, rank, state, seed);
                let expected = expected.into_iter().map(f32::from_bits).collect::<Vec<_>>();
                let expected = if as_saved { exact(&expected) } else { expected };
                prop_assert_eq!(crate::common::bits(&got), crate::common::bits(&expected));
            }
        }
    }
}

/// Requires serde_json's `float_roundtrip`: its default parser may be off by one unit in the last
/// place.
#[test]
fn numbers_of_the_trainer_are_bit_identical() {
    let numbers: Vec<f64> = (0..200).map(|i| 65_536.0 * 1.1f64.powi(i - 100)).collect();
    let dir = tempfile::tempdir().unwrap();
    let meta = SaveMeta::default().trainer(serde_json::json!(numbers));
    crate::common::save_alone(dir.path(), &meta, &StoreOptions::default()).unwrap();
    let reader = Reader::open(dir.path()).unwrap();
    let read = reader
        .manifest()
        .trainer
        .as_array()
        .unwrap()
        .iter()
        .map(|n| n.as_f64().unwrap().to_bits());
    assert!(read.eq(numbers.iter().map(|n| n.to_bits())));
}
