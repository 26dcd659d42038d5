//! Bytes by zero-shard's formula, and at most one copy of each gradient and of each parameter.

use zero_alloc::Purpose;
use zero_shard::{Widths, ZeroStage};

use crate::common::{Kind, Rank, config, on_ranks};

const KIND: Kind = Kind::ModernBert { layers: 2 };

fn check(stage: ZeroStage) {
    let ranks = on_ranks(
        KIND,
        &config(stage),
        |_| true,
        |mut rank| {
            let loss = rank.loss(0)?;
            rank.zero.backward_step(&loss)?;
            let Rank { zero, vars, .. } = &rank;
            let layout = zero.zero().layout();
            let report = zero.zero().rank().pool().report();
            let formula = layout.state_bytes(stage, &Widths::FP32_ADAM).unwrap();
            assert_eq!(
                report.of(Purpose::Grads).peak_bytes as u64,
                formula.grads_bytes
            );
            assert_eq!(
                report.of(Purpose::Optimizer).live_bytes as u64,
                formula.optimizer_bytes
            );
            // Parameters of the run, which are shards from stage 2 on; and candle's tensors, which
            // are whole and have no padding.
            let of_run = match stage {
                ZeroStage::Two => layout.state_bytes(ZeroStage::Three, &Widths::FP32_ADAM),
                stage => layout.state_bytes(stage, &Widths::FP32_ADAM),
            };
            let of_run = of_run.unwrap().params_bytes;
            let elems: u64 = vars
                .trained()
                .iter()
                .map(|(_, tensor)| tensor.elem_count() as u64)
                .sum();
            assert_eq!(
                (report.of(Purpose::Params).live_bytes as u64, elems),
                (of_run, layout.numel_elems())
            );
            assert_eq!(
                4 * elems,
                formula.params_bytes - 4 * (layout.padded_elems() - layout.numel_elems())
            );
            assert!(
                layout.padded_elems() > layout.numel_elems(),
                "no unit has padding"
            );
            let backward = zero.backward_report();
            assert_eq!((backward.copied_elems, backward.kept_by_candle), (elems, 0));
            assert_eq!(zero.copied_param_elems(), elems);
            Ok(())
        },
    );

    ranks.into_iter().for_each(|rank| rank.unwrap());
}

#[test]
fn bytes_and_copies_at_stage_1() {
    check(ZeroStage::One);
}

#[test]
fn bytes_and_copies_at_stage_2() {
    check(ZeroStage::Two);
}

#[test]
fn bytes_and_copies_at_stage_0() {
    check(ZeroStage::Zero);
}
