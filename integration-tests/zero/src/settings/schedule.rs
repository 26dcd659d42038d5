//! The learning-rate schedule of a run: that of `--schedule`, of the configuration file, or of the
//! resumed run, with the flags that change a part of it. A flag that a schedule has no place for is
//! an error.

use serde_json::{Value, json};
use zero_optim::{Decay, DecayCurve, LrSchedule};

use super::args::{ScheduleFlag, TrainArgs};
use super::sources::RunSources;
use crate::error::CliError;
use zero_config::DsConfig;

/// The schedule of a run at learning rate `lr`.
pub(crate) fn schedule(
    from: &RunSources<'_>,
    lr: f64,
    notices: &mut Vec<String>,
) -> Result<LrSchedule, CliError> {
    let args = from.args;
    let steps = from.steps();
    let base = from
        .recorded
        .map_or(&LrSchedule::Constant, |run| &run.optimizer.schedule);
    let of_file = from
        .file
        .and_then(|file| Some((file, file.schedule.as_ref()?)));

    let mut schedule = match (args.schedule, of_file) {
        (Some(flag), of_file) => {
            if of_file.is_some() {
                notices.push(format!(
                    "--schedule {} replaces the scheduler of the configuration",
                    flag.name()
                ));
            }
            from_flag(flag, args, base, steps)
        }
        (None, Some((file, of_file))) => fill_autos(of_file, file, base, lr, steps),
        (None, None) => base.clone(),
    };

    apply_flags(&mut schedule, args, lr)?;
    if let Some(end) = end(&schedule).filter(|end| *end != steps) {
        notices.push(format!(
            "the learning rate decays until step {end}, the run ends at step {steps}; --schedule sets another schedule"
        ));
    }

    if let Some(warmup) = warmup(&schedule).filter(|warmup| *warmup > steps && steps > 0) {
        notices.push(format!(
            "the warm-up has {warmup} steps, the run ends at step {steps}: it never trains at the full learning rate; \
             pass fewer --warmup-steps"
        ));
    }

    Ok(schedule)
}

/// The schedule of `--schedule`. Warm-up and minimum that no flag gives are those of the resumed
/// run.
fn from_flag(flag: ScheduleFlag, args: &TrainArgs, base: &LrSchedule, steps: u64) -> LrSchedule {
    let (warmup, min_lr) = match base {
        LrSchedule::LinearWarmup { warmup_steps } => (*warmup_steps, 0.0),
        LrSchedule::Decay(d) => (d.warmup_steps, d.min_lr),
        _ => (0, 0.0),
    };

    let (warmup_steps, total_steps) = (args.warmup_steps.unwrap_or(warmup), steps.max(1));
    let after_warmup = total_steps.saturating_sub(warmup_steps).max(1);
    let (curve, decay_steps) = match flag {
        ScheduleFlag::Constant => return LrSchedule::LinearWarmup { warmup_steps },
        ScheduleFlag::Linear => (DecayCurve::Linear, after_warmup),
        ScheduleFlag::Cosine => (DecayCurve::Cosine, after_warmup),
        ScheduleFlag::Wsd => (
            DecayCurve::Linear,
            args.decay_steps.unwrap_or((total_steps / 5).max(1)),
        ),
    };

    LrSchedule::Decay(Decay {
        curve,
        warmup_steps,
        decay_steps,
        total_steps,
        min_lr,
    })
}

/// Replaces `"auto"` as the Hugging Face Trainer does, or by the values of the resumed run's
/// schedule of this type.
fn fill_autos(
    schedule: &LrSchedule,
    file: &DsConfig,
    base: &LrSchedule,
    lr: f64,
    steps: u64,
) -> LrSchedule {
    let document = |schedule| serde_json::to_value(schedule).unwrap_or_default();
    let mut filled = document(schedule);
    let base = document(base);
    let of_base = |name: &str| match base["type"] == filled["type"] {
        true => base["params"][name].clone(),
        false => Value::Null,
    };
    let values = [
        // DeepSpeed raises a warm-up of 0 or 1 steps to 2.
        ("warmup_num_steps", json!(2)),
        ("warmup_max_lr", json!(lr)),
        ("warmup_min_lr", Value::Null),
        ("total_num_steps", json!(steps)),
    ];
    let values = values.map(|(name, default)| match of_base(name) {
        Value::Null => (name, default),
        recorded => (name, recorded),
    });

    for (name, value) in values {
        let is_auto = file.is_auto(&format!("scheduler.params.{name}"));
        if let Some(param) = filled["params"].get_mut(name)
            && is_auto
            && !value.is_null()
        {
            *param = value;
        }
    }
    // The values have the types of the parameters.
    serde_json::from_value(filled).unwrap_or_else(|_| schedule.clone())
}

/// Applies `--lr`, `--betas`, `--warmup-steps`, `--min-lr` and `--decay-steps` to the parts of the
/// schedule.
fn apply_flags(schedule: &mut LrSchedule, args: &TrainArgs, lr: f64) -> Result<(), CliError> {
    let name = name(schedule);
    if let Some(flag) = args.lr {
        apply_lr(schedule, &name, flag)?;
    }
    if let (Some([one, two]), LrSchedule::OneCycle(cycle)) = (args.betas, &*schedule)
        && cycle.cycle_momentum
    {
        return Err(usage!(
            "--betas {one},{two}: the schedule OneCycle sets the betas; set cycle_momentum to false in the configuration"
        ));
    }
    if let Some(steps) = args.warmup_steps {
        apply_warmup(schedule, &name, steps)?;
    }
    if let LrSchedule::LinearWarmup { warmup_steps: 0 } = schedule {
        *schedule = LrSchedule::Constant;
    }
    if let Some(min_lr) = args.min_lr {
        apply_min_lr(schedule, &name, min_lr, lr)?;
    }

    if let Some(steps) = args.decay_steps {
        let wsd = args.schedule.is_none_or(|s| s == ScheduleFlag::Wsd);
        match schedule {
            LrSchedule::Decay(d) if wsd && d.curve == DecayCurve::Linear => d.decay_steps = steps,
            _ => {
                return Err(usage!("--decay-steps {steps}: expected --schedule wsd"));
            }
        }
    }

    check_length(schedule)
}

fn apply_lr(schedule: &mut LrSchedule, name: &str, lr: f64) -> Result<(), CliError> {
    match schedule {
        LrSchedule::Warmup(w) => w.warmup_max_lr = Some(lr),
        LrSchedule::WarmupDecay(w) => w.warmup_max_lr = lr,
        LrSchedule::OneCycle(_) | LrSchedule::RangeTest(_) => {
            return Err(usage!(
                "--lr {lr}: the schedule {name} has its own rates; change them in the configuration, or pass \
                 --schedule"
            ));
        }
        _ => {}
    }
    Ok(())
}

fn apply_warmup(schedule: &mut LrSchedule, name: &str, steps: u64) -> Result<(), CliError> {
    match schedule {
        LrSchedule::Constant | LrSchedule::LinearWarmup { .. } => {
            *schedule = LrSchedule::LinearWarmup {
                warmup_steps: steps,
            };
        }
        LrSchedule::Decay(d) => {
            if d.warmup_steps.saturating_add(d.decay_steps) == d.total_steps {
                d.decay_steps = d.total_steps.saturating_sub(steps).max(1);
            }
            d.warmup_steps = steps;
        }
        LrSchedule::Warmup(_) | LrSchedule::WarmupDecay(_) | LrSchedule::WarmupCosine(_)
            if steps < 2 =>
        {
            return Err(usage!(
                "--warmup-steps {steps}: DeepSpeed's schedule {name} has at least 2 steps of warm-up; pass 2, or \
                 --schedule constant, linear or cosine"
            ));
        }
        LrSchedule::Warmup(w) => w.warmup_num_steps = steps,
        LrSchedule::WarmupDecay(w) => w.warmup_num_steps = steps,
        LrSchedule::WarmupCosine(w) => w.warmup_num_steps = steps,
        _ => {
            return Err(usage!(
                "--warmup-steps {steps}: the schedule {name} has no warm-up; pass --schedule"
            ));
        }
    }

    Ok(())
}

fn apply_min_lr(
    schedule: &mut LrSchedule,
    name: &str,
    min_lr: f64,
    lr: f64,
) -> Result<(), CliError> {
    if min_lr > lr {
        return Err(usage!(
            "--min-lr {min_lr}: expected at most the learning rate {lr}"
        ));
    }
    match schedule {
        LrSchedule::Decay(d) => d.min_lr = min_lr,
        LrSchedule::WarmupCosine(w) if lr > 0.0 => w.cos_min_ratio = min_lr / lr,
        _ => {
            return Err(usage!(
                "--min-lr {min_lr}: the schedule {name} does not decay to it; pass --schedule linear, cosine or wsd"
            ));
        }
    }
    Ok(())
}

/// Checks that warm-up and decay end with the schedule.
fn check_length(schedule: &LrSchedule) -> Result<(), CliError> {
    let LrSchedule::Decay(d) = schedule else {
        return Ok(());
    };
    let steps = d.warmup_steps.saturating_add(d.decay_steps);
    if steps <= d.total_steps.max(d.warmup_steps.saturating_add(1)) {
        return Ok(());
    }
    Err(usage!(
        "{} steps of warm-up and {} of decay are more than {} steps; pass fewer --warmup-steps or --decay-steps",
        d.warmup_steps,
        d.decay_steps,
        d.total_steps
    ))
}

/// The step at which a decay ends.
fn end(schedule: &LrSchedule) -> Option<u64> {
    match schedule {
        LrSchedule::Decay(d) => Some(d.total_steps),
        LrSchedule::WarmupDecay(w) => Some(w.total_num_steps),
        LrSchedule::WarmupCosine(w) => Some(w.total_num_steps),
        _ => None,
    }
}

/// The steps of warm-up that a flag sets.
fn warmup(schedule: &LrSchedule) -> Option<u64> {
    match schedule {
        LrSchedule::LinearWarmup { warmup_steps } => Some(*warmup_steps),
        LrSchedule::Decay(d) => Some(d.warmup_steps),
        LrSchedule::Warmup(w) => Some(w.warmup_num_steps),
        LrSchedule::WarmupDecay(w) => Some(w.warmup_num_steps),
        LrSchedule::WarmupCosine(w) => Some(w.warmup_num_steps),
        _ => None,
    }
}

/// The value of a parameter of the schedule, by its name in a DeepSpeed configuration.
pub(crate) fn parameter(schedule: &LrSchedule, name: &str, lr: f64) -> Value {
    let value = serde_json::to_value(schedule).unwrap_or_default();
    match (&value["params"][name], name) {
        (Value::Null, "warmup_max_lr") => json!(lr),
        (Value::Null, _) => json!("replaced by --schedule"),
        (value, _) => value.clone(),
    }
}

/// The name of the schedule, as in a configuration or in `--schedule`.
fn name(schedule: &LrSchedule) -> String {
    match schedule {
        LrSchedule::Constant | LrSchedule::LinearWarmup { .. } => "constant".to_owned(),
        LrSchedule::Decay(d) if d.curve == DecayCurve::Cosine => "cosine".to_owned(),
        LrSchedule::Decay(_) => "linear".to_owned(),
        other => serde_json::to_value(other).unwrap_or_default()["type"]
            .as_str()
            .unwrap_or_default()
            .to_owned(),
    }
}
