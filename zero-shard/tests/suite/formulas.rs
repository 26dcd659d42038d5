//! Memory and traffic compared with the paper's formulas, which are implemented here independently.

use crate::support::{cases, huge_layout};
use proptest::prelude::*;
use zero_shard::{
    ActivationBytes, ActivationOptions, Layout, MemoryModel, ParamSpec, Placement, ShardError,
    StateBytes, StepTraffic, Tier, TransformerShape, UnitSpec, Widths, WireFormat, ZeroStage,
    largest,
};

fn state_bytes(stage: ZeroStage, elems: u64, ranks: u64) -> u64 {
    StateBytes::of_elems(stage, &Widths::MIXED_ADAM, elems, ranks)
        .unwrap()
        .total_bytes()
}

/// arXiv 1910.02054, table 1: GB per device for stages 1, 2 and 3. It has three digits: truncated
/// if there are three before the point, rounded otherwise.
#[test]
fn table_1_of_the_paper() {
    let table: [(u64, [[&str; 6]; 3]); 3] = [
        (
            7_500_000_000,
            [
                ["120", "52.5", "35.6", "31.4", "30.4", "30.1"],
                ["120", "41.3", "21.6", "16.6", "15.4", "15.1"],
                ["120", "30", "7.5", "1.88", "0.47", "0.12"],
            ],
        ),
        (
            128_000_000_000,
            [
                ["2048", "896", "608", "536", "518", "513"],
                ["2048", "704", "368", "284", "263", "257"],
                ["2048", "512", "128", "32", "8", "2"],
            ],
        ),
        (
            1_000_000_000_000,
            [
                ["16000", "7000", "4750", "4187", "4046", "4011"],
                ["16000", "5500", "2875", "2218", "2054", "2013"],
                ["16000", "4000", "1000", "250", "62.5", "15.6"],
            ],
        ),
    ];

    for (elems, stages) in table {
        for (stage, row) in [ZeroStage::One, ZeroStage::Two, ZeroStage::Three]
            .into_iter()
            .zip(stages)
        {
            for (ranks, printed) in [1, 4, 16, 64, 256, 1024].into_iter().zip(row) {
                let bytes = state_bytes(stage, elems, ranks);
                let decimals = printed
                    .split_once('.')
                    .map_or(0, |(_, digits)| digits.len());
                let digit = 1_000_000_000 / 10u64.pow(decimals as u32);
                let shown = if bytes >= 100_000_000_000 {
                    bytes / digit
                } else {
                    (bytes + digit / 2) / digit
                };
                let wanted: u64 = printed.replace('.', "").parse().unwrap();
                assert_eq!(
                    shown, wanted,
                    "{elems} at stage {stage} on {ranks}: {bytes}, printed as {printed}"
                );
            }
        }
    }

    assert_eq!(
        state_bytes(ZeroStage::Zero, 7_500_000_000, 1024),
        120_000_000_000
    );
}

#[test]
fn widths_of_adam() {
    assert_eq!(Widths::new(4, 8, 1), Widths::FP32_ADAM);
    assert_eq!(Widths::new(4, 8, 8), Widths::FP32_ADAM);
    assert_eq!(Widths::new(2, 12, 1), Widths::MIXED_ADAM);
    assert_eq!(Widths::new(2, 12, 2), Widths::MIXED_ADAM_ACCUMULATING);
    let total = |w: Widths| w.param_bytes + w.grad_bytes + w.optimizer.block_bytes;
    let all = [
        Widths::FP32_ADAM,
        Widths::MIXED_ADAM,
        Widths::MIXED_ADAM_ACCUMULATING,
    ];
    assert_eq!(all.map(total), [16, 16, 18]);
}

#[test]
fn stages_have_numbers() {
    let numbers: Vec<_> = (0..5).map(ZeroStage::from_number).collect();
    assert_eq!(numbers[..4], ZeroStage::ALL.map(Some));
    assert_eq!(numbers[4], None);
    assert_eq!(ZeroStage::ALL.map(|s| s.to_string()), ["0", "1", "2", "3"]);
}

#[test]
fn formulas_that_overflow_are_errors() {
    let too_large = |e: ShardError| assert!(matches!(e, ShardError::TooLarge { .. }), "{e}");
    for stage in ZeroStage::ALL {
        too_large(StateBytes::of_elems(stage, &Widths::MIXED_ADAM, u64::MAX, 1).unwrap_err());
        too_large(StateBytes::of_elems(stage, &Widths::MIXED_ADAM, u64::MAX / 13, 1).unwrap_err());
        too_large(StepTraffic::of(stage, &Widths::MIXED_ADAM, u64::MAX / 2, 3, 1).unwrap_err());
        too_large(StepTraffic::of(stage, &Widths::MIXED_ADAM, 1, 3, u64::MAX / 2).unwrap_err());
        let none = StateBytes::of_elems(stage, &Widths::MIXED_ADAM, 10, 0).unwrap_err();
        assert_eq!(none, ShardError::NoRanks);
        assert_eq!(
            StepTraffic::of(stage, &Widths::MIXED_ADAM, 1, 0, 1).unwrap_err(),
            ShardError::NoRanks
        );
    }
    too_large(
        StepTraffic::of(ZeroStage::One, &Widths::MIXED_ADAM, u64::MAX / 5, 2, 2).unwrap_err(),
    );
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn memory_and_traffic_of_a_layout_are_the_formulas(layout in huge_layout(), a in 1u64..9) {
        let w = Widths::new(2, 12, a);
        let psi = layout.padded_elems();
        let shard = layout.shard_elems();
        let n = layout.world_size();
        prop_assert_eq!(psi, shard * n);
        let kept = ZeroStage::ALL.map(|s| layout.state_bytes(s, &w).unwrap());
        let g = if a == 1 { 2 } else { 4 };
        let formula = [
            (2 * psi, g * psi, 12 * psi), (2 * psi, g * psi, 12 * shard),
            (2 * psi, g * shard, 12 * shard), (2 * shard, g * shard, 12 * shard),
        ];

        for (got, (p, g, k)) in kept.iter().zip(formula) {
            prop_assert_eq!((got.params_bytes, got.grads_bytes, got.optimizer_bytes), (p, g, k));
            prop_assert_eq!(got.total_bytes(), p + g + k);
        }

        // Elements sent, times (N-1)/N.
        let wire = |elems: u64| elems / n * (n - 1) * 2;
        let sent = ZeroStage::ALL.map(|s| layout.step_traffic(s, &w, a).unwrap());
        prop_assert_eq!(sent[0].all_reduce_bytes, 2 * a * wire(psi));
        prop_assert_eq!(sent[0].total_bytes(), 2 * a * wire(psi));
        prop_assert_eq!((sent[1].reduce_scatter_bytes, sent[1].all_gather_bytes), (a * wire(psi), wire(psi)));
        prop_assert_eq!(sent[2], sent[1]);
        prop_assert_eq!((sent[3].reduce_scatter_bytes, sent[3].all_gather_bytes), (a * wire(psi), 2 * a * wire(psi)));
    }

    /// The memory of a rank does not grow with the number of ranks or with the stage.
    #[test]
    fn memory_falls_with_ranks_and_stage(elems in 0u64..10_000_000_000_000, n in 1u64..65_536, more in 1u64..1000) {
        let bytes = |s, n| StateBytes::of_elems(s, &Widths::MIXED_ADAM, elems, n).unwrap().total_bytes();
        for stage in ZeroStage::ALL {
            prop_assert!(bytes(stage, n + more) <= bytes(stage, n));
        }
        prop_assert!(ZeroStage::ALL.windows(2).all(|s| bytes(s[1], n) <= bytes(s[0], n)));
    }
}

/// arXiv 2205.05198, equations 1 and 2 (one layer, tensor parallelism of 1): sbh (34 + 5 a s / h)
/// bytes.
#[test]
fn activations_are_those_of_the_paper() {
    let shape = TransformerShape {
        layers: 96,
        hidden: 12_288,
        heads: 96,
        inner: 4 * 12_288,
        vocab: 51_200,
    };

    let run = ActivationOptions::new(1, 2048, 2)
        .flash_attention(false)
        .dropout(true);
    let s = 2048;
    let h = 12_288;
    let a = 96;
    let layer = 34 * s * h + 5 * a * s * s;
    let estimate = |run: ActivationOptions| ActivationBytes::estimate(&shape, &run).unwrap();
    assert_eq!(estimate(run).blocks_bytes, 96 * layer);
    assert_eq!(estimate(run).head_bytes, 2 * 2 * s * h + 4 * s * 51_200);
    assert_eq!(estimate(run).statistics_bytes, (2 * 96 + 1) * 8 * s);
    assert_eq!(estimate(run).backward_bytes, 6 * 2 * s * h);
    let mut three = run;
    three.micro_batch = 3;
    assert_eq!(
        estimate(three).total_bytes(),
        3 * estimate(run).total_bytes()
    );
    let checkpointing = run.checkpointing(true);
    let kept = estimate(checkpointing);
    assert_eq!(
        (kept.blocks_bytes, kept.recomputed_bytes),
        (96 * 2 * s * h, layer - 2 * s * h)
    );
    assert_eq!(kept.statistics_bytes, 3 * 8 * s);
    let shared = estimate(checkpointing.checkpoint_shards(8));
    assert_eq!(
        (shared.blocks_bytes, shared.recomputed_bytes),
        (96 * 2 * s * h / 8, layer)
    );
    let flash = run.flash_attention(true).dropout(false);
    assert_eq!(estimate(flash).blocks_bytes, 96 * 32 * s * h);
    assert_eq!(
        estimate(flash).statistics_bytes,
        96 * (16 * s + 4 * a * s) + 8 * s
    );
    let plain = ActivationOptions::new(1, 2048, 4).flash_attention(false);
    assert_eq!(
        estimate(plain).blocks_bytes,
        96 * (64 * s * h + 4 * a * s * s)
    );

    // Another feed-forward width: with a narrow one, query, key and value are larger in backward.
    for (inner, widest) in [(h, 3 * h), (8 * h, 8 * h)] {
        let shape = TransformerShape { inner, ..shape };
        let other = ActivationBytes::estimate(&shape, &flash).unwrap();
        assert_eq!(other.blocks_bytes, 96 * 2 * s * (8 * h + 2 * inner));
        assert_eq!(other.backward_bytes, 2 * s * (2 * h + widest));
        assert_eq!(
            shape.numel_elems(),
            Ok(96 * h * (4 * h + 2 * inner) + 51_200 * h)
        );
    }

    let too_long = ActivationOptions::new(1, u64::MAX, 2);
    assert!(matches!(
        ActivationBytes::estimate(&shape, &too_long),
        Err(ShardError::TooLarge { .. })
    ));
}

#[test]
fn a_shape_is_found_for_a_size() {
    // GPT-3: 96 layers of width 12288 are 174 x 10^9 parameters.
    let gpt3 = TransformerShape::with_about(174_000_000_000);
    assert_eq!((gpt3.layers, gpt3.hidden, gpt3.heads), (96, 12_288, 96));
    assert_eq!(
        gpt3.numel_elems(),
        Ok(12 * 96 * 12_288 * 12_288 + 50_257 * 12_288)
    );
    assert_eq!(TransformerShape::with_about(0).layers, 1);
    assert!(TransformerShape::with_about(u64::MAX).numel_elems().is_ok());
    let wide = TransformerShape {
        layers: 1,
        hidden: u64::MAX,
        heads: 1,
        inner: 1,
        vocab: 1,
    };
    assert!(matches!(
        wide.numel_elems(),
        Err(ShardError::TooLarge { .. })
    ));
}

#[test]
fn tiers_hold_what_is_placed_on_them() {
    let state = StateBytes {
        params_bytes: 20,
        grads_bytes: 20,
        optimizer_bytes: 120,
    };

    let model = MemoryModel::state_only(ZeroStage::Three, Widths::MIXED_ADAM)
        .placement(Placement {
            params: Tier::Nvme,
            grads: Tier::Host,
            optimizer: Tier::Nvme,
        })
        .gathered_elems(7)
        .bucket_elems(5)
        .buckets(2)
        .scratch_bytes(9)
        .sub_group_elems(3)
        .sub_group_buffers(4)
        .unit_shard_elems(6)
        .param_buffers(5)
        .activations_bytes(11)
        .host_activations_bytes(13);

    let all = model.footprint(&state, 10).unwrap();
    let device = [
        all.device.gathered_bytes,
        all.device.buckets_bytes,
        all.device.scratch_bytes,
    ];
    assert_eq!((device, all.device.activations_bytes), ([14, 20, 9], 11));
    // Two transfer buffers of six parameters.
    assert_eq!(
        (all.device.staging_bytes, all.device.total_bytes()),
        (24, Ok(54 + 24))
    );
    // Twelve bytes of optimizer state an element pass through the host in sub-groups, two of
    // parameters by unit.
    assert_eq!(all.host.staging_bytes, 3 * 4 * 12 + 6 * 5 * 2);
    assert_eq!(
        (all.host.copies_bytes, all.host.total_bytes()),
        (0, Ok(3 * 4 * 12 + 6 * 5 * 2 + 20 + 13))
    );
    assert_eq!(all.nvme.total_bytes(), Ok(140));
    let grads = model.placement(Placement {
        grads: Tier::Nvme,
        ..Placement::DEVICE
    });

    assert_eq!(
        grads.footprint(&state, 10).unwrap().host.total_bytes(),
        Ok(2 * 6 * (2 + 2) + 13)
    );
    let away =
        |stage, placement| MemoryModel::state_only(stage, Widths::MIXED_ADAM).placement(placement);
    let at = |stage, tier| away(stage, Placement::offload_optimizer(tier)).unit_shard_elems(4);

    for stage in ZeroStage::ALL {
        let all = at(stage, Tier::Host).footprint(&state, 10).unwrap();
        assert_eq!(
            all.device.total_bytes(),
            Ok(20 + 16),
            "stage {stage}: parameters and two transfer buffers"
        );
        assert_eq!(
            (all.host.copies_bytes, all.host.total_bytes()),
            (20, Ok(20 + 20 + 120))
        );
        // A rank keeps the gradients that it updates with, here of ten elements.
        let whole = StateBytes {
            params_bytes: 40,
            grads_bytes: 40,
            ..state
        };
        assert_eq!(
            at(stage, Tier::Host)
                .footprint(&whole, 10)
                .unwrap()
                .host
                .state
                .grads_bytes,
            20
        );
        let all = at(stage, Tier::Device).footprint(&state, 10).unwrap();
        assert_eq!(
            (all.device.total_bytes(), all.host.total_bytes()),
            (Ok(160), Ok(0))
        );
    }

    // A rule without state, such as SGD on fp32 parameters, has the same gradients and copies.
    let stateless = Widths {
        optimizer: WireFormat::plain(0),
        ..Widths::MIXED_ADAM
    };
    let placement = Placement::offload_optimizer(Tier::Host);
    let of_one = MemoryModel::state_only(ZeroStage::One, stateless).placement(placement);
    let unit = UnitSpec::new("unit", [ParamSpec::new("weight", [40])]);
    let layout = Layout::new(&[unit], 4, 1).unwrap();
    let kept = layout.state_bytes(ZeroStage::One, &stateless).unwrap();
    let updated = layout.updated_elems(ZeroStage::One);
    let host = of_one.footprint(&kept, updated).unwrap().host;
    assert_eq!((host.state.grads_bytes, host.copies_bytes), (20, 20));
    assert_eq!(layout.updated_elems(ZeroStage::Zero), 40);

    let params = Placement {
        params: Tier::Host,
        ..Placement::DEVICE
    };

    assert_eq!(
        away(ZeroStage::Two, params).footprint(&state, 10),
        Err(ShardError::NotSharded {
            what: "parameters",
            needs_stage: 3,
            stage: 2
        })
    );

    let huge = model.bucket_elems(u64::MAX);
    assert!(matches!(
        huge.footprint(&state, 10),
        Err(ShardError::TooLarge { .. })
    ));
}

/// The most parameters for which each of `ranks` ranks fits into `memory` bytes of its device.
fn largest_model(model: &MemoryModel, ranks: u64, memory: u64) -> u64 {
    largest(|elems| {
        let state = StateBytes::of_elems(model.stage, &model.widths, elems, ranks);
        let total = state.and_then(|state| {
            model
                .footprint(&state, elems.div_ceil(ranks))?
                .device
                .total_bytes()
        });
        total.is_ok_and(|bytes| bytes <= memory)
    })
}

proptest! {
    #![proptest_config(cases(300))]

    /// The largest model fits and one more parameter does not.
    #[test]
    fn the_largest_model_is_the_largest(n in 1u64..5000, gib in 1u64..200, buckets in 0u64..3) {
        let memory = gib << 30;
        for stage in ZeroStage::ALL {
            let model = MemoryModel::state_only(stage, Widths::MIXED_ADAM);
            let model = model.bucket_elems(500_000_000).buckets(buckets);
            let total = |elems| {
                let state = StateBytes::of_elems(stage, &Widths::MIXED_ADAM, elems, n).unwrap();
                model.footprint(&state, elems.div_ceil(n)).unwrap().device.total_bytes().unwrap()
            };
            let most = largest_model(&model, n, memory);
            prop_assert!(most == 0 || total(most) <= memory);
            prop_assert!(total(most + 1) > memory);
        }
    }
}

#[test]
fn the_largest_model_of_the_paper() {
    // arXiv 1910.02054, section 5.4: 32 GB and 1024 ranks hold 2 x 10^12 parameters of stage 3's
    // states.
    let most = |stage| {
        let model = MemoryModel::state_only(stage, Widths::MIXED_ADAM);
        largest_model(&model, 1024, 32_000_000_000)
    };
    assert_eq!(most(ZeroStage::Three), 2_048_000_000_000);
    assert_eq!(most(ZeroStage::Zero), 2_000_000_000);
    assert_eq!(
        StateBytes::of_elems(ZeroStage::One, &Widths::MIXED_ADAM, 1, 0),
        Err(ShardError::NoRanks)
    );
    assert_eq!(
        (largest(|_| true), largest(|_| false), largest(|n| n <= 77)),
        (u64::MAX, 0, 77)
    );
}
