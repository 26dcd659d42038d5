//! Losses and weights equal those of candle's own training.

use candle_core::{Result, Tensor};
use candle_zero::ZeroConfig;
use zero_shard::ZeroStage;

use crate::common::{
    Kind, RANKS, Rank, STEPS, batch, bits, candle_alone, config, largest_error, on_ranks,
};

/// Trains all steps; the mean losses of the ranks.
fn train(mut rank: Rank) -> Result<(Vec<f64>, Rank)> {
    let losses = (0..STEPS).map(|step| {
        let loss = rank.loss(step)?;
        Ok(rank.zero.backward_step(&loss)?.loss())
    });
    Ok((losses.collect::<Result<_>>()?, rank))
}

fn distance(a: &Tensor, b: &Tensor) -> f32 {
    (a - b)
        .and_then(|d| d.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>())
        .unwrap()
}

fn same_training(kind: Kind, stage: ZeroStage, trains: fn(&str) -> bool) {
    let (expected, weights) = candle_alone(kind).unwrap();
    let ranks = on_ranks(kind, &config(stage), trains, |rank| {
        let (losses, rank) = train(rank)?;
        Ok((losses, bits(&rank.vars)?, rank.vars.trained()))
    });

    let ranks: Vec<_> = ranks.into_iter().map(Result::unwrap).collect();
    assert!(
        expected[STEPS - 1] < 0.95 * expected[0],
        "candle's own training learns nothing: {expected:?}"
    );
    println!(
        "stage {}: largest relative error {:e}",
        stage.number(),
        largest_error(&ranks[0].0, &expected)
    );

    for (losses, bits, _) in &ranks {
        let error = largest_error(losses, &expected);
        assert!(
            error <= 1e-6,
            "stage {}: relative error {error:e}",
            stage.number()
        );
        assert_eq!((losses.len(), losses), (STEPS, &ranks[0].0));
        assert!(*bits == ranks[0].1, "the ranks' parameters differ");
    }

    for (name, tensor) in &ranks[0].2 {
        let distance = distance(tensor, &weights[name]);
        assert!(distance <= 2e-5, "{name} differs by {distance:e}");
    }
}

#[test]
fn modern_bert_at_stage_0() {
    same_training(Kind::ModernBert { layers: 1 }, ZeroStage::Zero, |_| true);
}

#[test]
fn modern_bert_at_stage_1() {
    same_training(Kind::ModernBert { layers: 3 }, ZeroStage::One, |_| true);
}

#[test]
fn modern_bert_at_stage_2() {
    same_training(Kind::ModernBert { layers: 3 }, ZeroStage::Two, |_| true);
}

/// candle's backward ends at the last norm of llama2-c (huggingface/candle#2168), so candle itself
/// trains only the head.
#[test]
fn llama2_c_trains_what_candle_trains() {
    for stage in [ZeroStage::One, ZeroStage::Two] {
        same_training(Kind::Llama, stage, |name| name == "lm_head.weight");
    }
    let (_, weights) = candle_alone(Kind::Llama).unwrap();
    for (name, initial) in Kind::Llama.weights().unwrap() {
        assert_eq!(
            distance(&initial, &weights[&name]) > 0.0,
            name == "lm_head.weight",
            "{name}"
        );
    }
}

#[test]
fn micro_batches_equal_one_batch() {
    let kind = Kind::ModernBert { layers: 1 };
    let losses = |micro_batches: usize| {
        let config = ZeroConfig {
            micro_batches,
            ..config(ZeroStage::Two)
        };
        let ranks = on_ranks(
            kind,
            &config,
            |_| true,
            |mut rank| {
                let rows = rank.rows();
                let Rank { model, zero, .. } = &mut rank;
                let losses = (0..5).map(|step| {
                    let outcome = zero.step(|train| {
                        for part in 0..micro_batches {
                            let len = rows.len() / micro_batches;
                            let rows = rows.start + part * len..rows.start + (part + 1) * len;
                            train.backward(&model.loss(&batch(step, rows)?)?)?;
                        }
                        Ok(())
                    });
                    Ok(outcome?.loss())
                });
                losses.collect::<Result<Vec<f64>>>()
            },
        );
        ranks.into_iter().map(Result::unwrap).next().unwrap()
    };

    assert_eq!(RANKS, 4);
    let error = largest_error(&losses(2), &losses(1));
    assert!(error <= 1e-6, "{error:e}");
}
