//! Loss scale and schedules compared with recorded traces of DeepSpeed (tests/data).

use serde::Deserialize;
use zero_kernels::GradStats;
use zero_optim::{DynamicScaling, LossScaling, LrSchedule, OptimizerConfig, RankStats, StepController};

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
    let traces: Vec<ScalerTrace> = serde_json::from_str(include_str!("../data/deepspeed_loss_scaler.json")).unwrap();
    assert!(!traces.is_empty());
    for (i, t) in traces.iter().enumerate() {
        let settings = DynamicScaling {
            initial_scale_power: t.initial_scale_power,
            window: t.loss_scale_window,
            hysteresis: t.hysteresis,
            consecutive_hysteresis: t.consecutive_hysteresis,
            min_scale: t.min_loss_scale,
            // The recorded runs continue at the minimum scale.
            fail_at_min: false,
        };
        let loss_scaling = LossScaling::Dynamic(settings);
        let mut steps = StepController::new(OptimizerConfig { loss_scaling, ..OptimizerConfig::default() }).unwrap();
        for (step, (&overflow, &expected)) in t.overflow.iter().zip(&t.scale_after).enumerate() {
            let stats = RankStats::new(&[GradStats { sum_sq: 1.0, nonfinite: overflow.into() }], 0.0);
            steps.advance(&[stats], 1, &[]).unwrap();
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
        for (i, expected) in trace["lr_after_step"].as_array().unwrap().iter().enumerate() {
            let (ours, expected) = (schedule.lr(base, i as u64 + 1), expected.as_f64().unwrap());
            // `ln` and `cos` of this machine may differ in the last place from those of the recording machine.
            let close = (ours - expected).abs() <= 2.0 * f64::EPSILON * expected.abs();
            assert!(close, "{name}, after step {i}: {ours:e}, DeepSpeed {expected:e}");
        }
    }
}
