//! Specifications, plans and reports round-trip through JSON; deserializing a layout checks it.

use zero_shard::{
    Layout, LayoutOptions, MemoryModel, ParamSpec, Tie, UnitSpec, Widths, ZeroStage, reshard_rank,
};

fn layout(ranks: u64) -> Layout {
    let units = [
        UnitSpec::new(
            "embedding",
            [
                ParamSpec::new("wte", [10, 4]),
                ParamSpec::new("wpe", [3, 4]),
            ],
        ),
        UnitSpec::new("head", [ParamSpec::new("ln_f", [4])]),
    ];
    let ties = vec![Tie::new("head", "lm_head", "wte")];
    let options = LayoutOptions::default()
        .shard_align_elems(4)
        .param_align_elems(8)
        .ties(ties);
    Layout::with_options(&units, ranks, options).unwrap()
}

fn round_trip<T: serde::Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug>(
    value: &T,
) {
    let text = serde_json::to_string(value).unwrap();
    assert_eq!(&serde_json::from_str::<T>(&text).unwrap(), value, "{text}");
}

#[test]
fn values_come_back_as_they_were() {
    let two = layout(2);
    let three = layout(3);
    round_trip(&two);
    round_trip(&reshard_rank(&two, &three, 0).unwrap());
    let model = MemoryModel::state_only(ZeroStage::Two, Widths::MIXED_ADAM);
    round_trip(&model);
    round_trip(
        &model
            .footprint(
                &two.state_bytes(ZeroStage::Two, &Widths::MIXED_ADAM)
                    .unwrap(),
                two.updated_elems(ZeroStage::Two),
            )
            .unwrap(),
    );
    round_trip(
        &two.step_traffic(ZeroStage::Three, &Widths::FP32_ADAM, 3)
            .unwrap(),
    );
}

#[test]
fn a_layout_that_cannot_be_is_not_read() {
    let text = serde_json::to_string(&layout(2)).unwrap();
    let wrong = [
        ("\"world_size\":2", "\"world_size\":0"),
        ("[10,4]", "[18446744073709551615,4]"),
        ("\"wpe\"", "\"wte\""),
    ];
    for (good, bad) in wrong {
        assert!(text.contains(good), "{text}");
        assert!(
            serde_json::from_str::<Layout>(&text.replace(good, bad)).is_err(),
            "{bad}"
        );
    }
}
