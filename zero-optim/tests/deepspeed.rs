//! DeepSpeed's loss scaler and schedules, trace by trace (tests/data).

#![cfg(not(miri))]

use serde::Deserialize;
use zero_optim::{DynamicScaling, LossScaler, LossScaling, LrSchedule};

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
fn the_loss_scale_follows_every_trace() {
    let traces: Vec<ScalerTrace> = serde_json::from_str(include_str!("data/deepspeed_loss_scaler.json")).unwrap();
    assert!(!traces.is_empty());
    for (i, t) in traces.iter().enumerate() {
        let settings = DynamicScaling {
            initial_scale_power: t.initial_scale_power,
            window: t.loss_scale_window,
            hysteresis: t.hysteresis,
            consecutive_hysteresis: t.consecutive_hysteresis,
            min_scale: t.min_loss_scale,
            // The traces go on at the minimum.
            fail_at_min: false,
        };
        let mut scaler = LossScaler::new(LossScaling::Dynamic(settings)).unwrap();
        for (step, (&overflow, &expected)) in t.overflow.iter().zip(&t.scale_after).enumerate() {
            scaler.update(overflow != 0).unwrap();
            assert_eq!(scaler.scale(), expected, "trace {i}, step {step}");
        }
    }
}

#[test]
fn the_schedules_follow_every_trace() {
    let traces: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(include_str!("data/deepspeed_lr_schedules.json")).unwrap();
    assert_eq!(traces.len(), 6);
    for (name, trace) in &traces {
        let kind = name.split('_').next().unwrap();
        let config = serde_json::json!({ "type": kind, "params": trace["params"] });
        let schedule: LrSchedule = serde_json::from_value(config).unwrap();
        schedule.check().unwrap();
        let base = trace["base_lr"].as_f64().unwrap();
        for (i, expected) in trace["lr_after_step"].as_array().unwrap().iter().enumerate() {
            let (ours, expected) = (schedule.lr(base, i as u64 + 1), expected.as_f64().unwrap());
            // Bit for bit where the machine's `ln` and `cos` are those of the trace; they may differ by a place.
            let close = (ours - expected).abs() <= 2.0 * f64::EPSILON * expected.abs();
            assert!(close, "{name}, after step {i}: {ours:e}, DeepSpeed {expected:e}");
        }
    }
}
