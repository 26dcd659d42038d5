//! Loss scale and schedules compared with recorded traces of DeepSpeed and PyTorch (tests/data).

use serde::Deserialize;
use zero_kernels::GradStats;
use zero_optim::{
    Decay, Divisor, DynamicScaling, LossScaling, LrSchedule, OptimizerConfig, RankStats,
    StepController,
};

#[derive(Deserialize)]
struct ScalerTrace {
    initial_scale_power: u32,
    loss_scale_window: u64,
    hysteresis: u32,
    consecutive_hysteresis: bool,
    min_loss_scale: f64,
    overflow: Vec<u8>,
    scale_after: Vec<f64>,
}

#[test]
fn loss_scale_follows_every_trace() {
    let traces: Vec<ScalerTrace> =
        serde_json::from_str(include_str!("../data/deepspeed_loss_scaler.json")).unwrap();
    assert!(!traces.is_empty());
    for (i, t) in traces.iter().enumerate() {
        // The recorded runs continue at the minimum scale.
        let settings = DynamicScaling::default()
            .initial_scale_power(t.initial_scale_power)
            .window(t.loss_scale_window)
            .hysteresis(t.hysteresis)
            .consecutive_hysteresis(t.consecutive_hysteresis)
            .min_scale(t.min_loss_scale)
            .fail_at_min(false);
        let loss_scaling = LossScaling::Dynamic(settings);
        let mut steps =
            StepController::new(OptimizerConfig::default().loss_scaling(loss_scaling)).unwrap();
        for (step, (&overflow, &expected)) in t.overflow.iter().zip(&t.scale_after).enumerate() {
            let stats = RankStats::new(
                &[GradStats {
                    sum_sq: 1.0,
                    nonfinite: overflow.into(),
                }],
                0.0,
            );
            steps
                .advance(&[stats], Divisor::MicroBatches(1), &[])
                .unwrap();
            assert_eq!(steps.loss_scale(), expected, "trace {i}, step {step}");
        }
    }
}

#[test]
fn schedules_follow_every_trace() {
    let traces: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(include_str!("../data/deepspeed_lr_schedules.json")).unwrap();
    assert_eq!(traces.len(), 6);
    for (name, trace) in &traces {
        let kind = name.split('_').next().unwrap();
        let config = serde_json::json!({ "type": kind, "params": trace["params"] });
        let schedule: LrSchedule = serde_json::from_value(config).unwrap();
        schedule.check().unwrap();
        let base = trace["base_lr"].as_f64().unwrap();
        for (i, expected) in trace["lr_after_step"]
            .as_array()
            .unwrap()
            .iter()
            .enumerate()
        {
            let ours = schedule.lr(base, i as u64 + 1);
            let expected = expected.as_f64().unwrap();
            // `ln` and `cos` of this machine may differ in the last place from those of the
            // recording machine.
            let close = (ours - expected).abs() <= 2.0 * f64::EPSILON * expected.abs();
            assert!(
                close,
                "{name}, after step {i}: {ours:e}, DeepSpeed {expected:e}"
            );
        }
    }
}

#[derive(Deserialize)]
struct DecayTrace {
    base_lr: f64,
    params: Decay,
    lr: Vec<f64>,
}

/// PyTorch 2's `SequentialLR` of `LinearLR` (warm-up), `ConstantLR`, and `LinearLR` or
/// `CosineAnnealingLR` (decay).
#[test]
fn decays_follow_every_pytorch_trace() {
    let traces: Vec<DecayTrace> =
        serde_json::from_str(include_str!("../data/torch_decays.json")).unwrap();
    assert_eq!(traces.len(), 6);
    for DecayTrace {
        base_lr,
        params,
        lr,
    } in traces
    {
        let schedule = LrSchedule::Decay(params);
        schedule.check().unwrap();
        for (position, expected) in lr.into_iter().enumerate() {
            let ours = schedule.lr(base_lr, position as u64);
            // PyTorch's chained form multiplies the previous rate, which rounds differently.
            assert!(
                (ours - expected).abs() <= 1e-14 * base_lr.max(1e-2),
                "{schedule}: {position}: {ours} {expected}"
            );
        }
    }
}

/// The definitions of transformers (`optimization.py`) and nanoGPT (`train.py`), without warm-up
/// and after it.
#[test]
fn decays_are_those_of_transformers_and_nanogpt() {
    use std::f64::consts::PI;
    use zero_optim::DecayCurve::{Cosine, Linear};
    let base = 6e-4;
    let min_lr = 6e-5;
    let warm = 7;
    let total = 50;

    let full = |curve, min_lr| {
        LrSchedule::Decay(Decay {
            curve,
            warmup_steps: warm,
            decay_steps: total - warm,
            total_steps: total,
            min_lr,
        })
    };

    let linear = full(Linear, 0.0);
    let cosine = full(Cosine, 0.0);
    let nano = full(Cosine, min_lr);
    let wsd = LrSchedule::Decay(Decay {
        curve: Linear,
        warmup_steps: warm,
        decay_steps: 10,
        total_steps: total,
        min_lr,
    });

    let same = |schedule: &LrSchedule, k: u64, expected: f64| {
        let ours = schedule.lr(base, k);
        assert!(
            (ours - expected).abs() < 1e-15,
            "{schedule}: {k}: {ours} {expected}"
        );
    };

    for k in 0..warm {
        [&linear, &cosine, &nano, &wsd]
            .into_iter()
            .for_each(|s| same(s, k, base * (k + 1) as f64 / warm as f64));
    }

    for k in warm..=total + 3 {
        let progress = (k - warm) as f64 / (total - warm) as f64;
        // get_linear_schedule_with_warmup and get_cosine_schedule_with_warmup (num_cycles 0.5), up
        // to their end.
        if k <= total {
            same(&linear, k, base * (1.0 - progress).max(0.0));
            same(
                &cosine,
                k,
                base * (0.5 * (1.0 + (PI * progress).cos())).max(0.0),
            );
        }
        let coeff = 0.5 * (1.0 + (PI * progress).cos());
        same(
            &nano,
            k,
            if k > total {
                min_lr
            } else {
                min_lr + coeff * (base - min_lr)
            },
        );
        // get_wsd_schedule with decay_type "linear": (1 - min_ratio) * (1 - progress) + min_ratio.
        let ratio = min_lr / base;
        let value = if k < total - 10 {
            1.0
        } else {
            (1.0 - (k - (total - 10)) as f64 / 10.0).max(0.0)
        };
        same(&wsd, k, base * ((1.0 - ratio) * value + ratio));
    }

    assert_eq!(
        wsd.to_string(),
        "linear warm-up over 7 steps, then constant, then linear decay to 0.00006 over 10 steps, until step 50"
    );
}
