//! Misuse of the facade: an error on all ranks, or the right numbers.

use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::*;

use super::*;

cases! {
    /// A deviation of one rank, in one step.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Misuse {
        /// Errors that leave the step as it was.
        UnknownUnit,
        UnknownParam,
        LongGradient,
        SecondGradient,
        TooManyMicroBatches,
        EarlyMicroBatch,
        /// Ends the run.
        NoGradient,
        DroppedStep,
        ForgottenStep,
        PanicInForward,
        PanicInBackward,
        NoUpdate,
        OtherOrder,
        OtherOrderOfGradients,
        MissingUnit,
        KeptView,
        EarlyEnd,
        DroppedRun,
    }
}

use Misuse::*;

impl Misuse {
    /// Whether the run goes on with the right numbers.
    fn is_harmless(self, stage: ZeroStage, micro_batches: usize) -> bool {
        match self {
            UnknownUnit | UnknownParam | LongGradient | SecondGradient => true,
            TooManyMicroBatches | EarlyMicroBatch => true,
            // Parameters are whole, and nothing is gathered.
            OtherOrder | MissingUnit | KeptView => stage < ZeroStage::Three,
            EarlyEnd => micro_batches == 1,
            _ => false,
        }
    }
}

/// A step in which this rank misuses the facade in unit `unit` of its last micro-batch.
fn misused(
    zero: &mut Zero<Host>,
    (rank, ranks): (usize, usize),
    micro_batches: usize,
    (misuse, unit): (Misuse, usize),
) -> Result<(), Error> {
    let first = zero.steps() as usize * ranks * micro_batches;
    let mut step = zero.begin()?;
    for micro in 0..micro_batches {
        let is_last = micro + 1 == micro_batches;
        let batch = first + micro * ranks + rank;
        if !is_last {
            let loss = micro_batch(&mut step, batch)?;
            if misuse == EarlyEnd {
                step.end(loss)?;
                return Ok(());
            }
            step.next_micro_batch(loss)?;
            continue;
        }

        let mut order: Vec<usize> = (0..UNITS.len()).collect();
        if misuse == OtherOrder {
            // Units of equal lengths too.
            order.swap(unit, (unit + 2) % UNITS.len());
        }
        if misuse == MissingUnit {
            order.remove(unit);
        }
        let mut kept = None;
        for index in order {
            let is_here = index == unit;
            step.forward(UNITS[index].0, |params| {
                assert!(misuse != PanicInForward || !is_here, "on purpose");
                if misuse == KeptView && is_here {
                    kept = params.view("w").or(params.view("e")).ok();
                }
                Ok::<_, Error>(())
            })?;
        }
        drop(kept);

        let mut order: Vec<usize> = (0..UNITS.len()).rev().collect();
        if misuse == OtherOrderOfGradients {
            order.swap(unit, (unit + 2) % UNITS.len());
        }
        let mut loss = 0.0;
        for index in order {
            let is_here = index == unit;
            let (unit, params) = UNITS[index];
            match misuse {
                DroppedStep if is_here => return Ok(()),
                ForgottenStep if is_here => {
                    std::mem::forget(step);
                    drop(zero.begin()?);
                    return Ok(());
                }
                UnknownUnit if is_here => {
                    let error = step.forward("x", |_| Ok::<_, Error>(())).unwrap_err();
                    assert!(error.to_string().contains(r#"unit "x""#), "{error}");
                }
                EarlyMicroBatch if is_here => {
                    let error = step.next_micro_batch(0.0).unwrap_err();
                    assert!(error.to_string().contains("no gradient"), "{error}");
                }
                _ => {}
            }
            step.backward(unit, |values, grads| -> Result<(), Error> {
                for (name, len) in params {
                    assert!(misuse != PanicInBackward || !is_here, "on purpose");
                    let (grad, of_param) = grad(values.get(name)?, batch);
                    loss += of_param;
                    match misuse {
                        NoGradient if is_here => continue,
                        UnknownParam if is_here => {
                            let error = grads.set("x", [1.0_f32]).unwrap_err();
                            assert!(error.to_string().contains(r#"parameter "x""#), "{error}");
                        }
                        LongGradient if is_here => {
                            let long = vec![1.0_f32; *len as usize + 1];
                            let error = grads.set(name, long).unwrap_err();
                            assert!(error.to_string().contains("elements, expected"), "{error}");
                        }
                        SecondGradient if is_here => {
                            grads.set(name, grad.clone())?;
                            let error = grads.set(name, grad).unwrap_err();
                            let named = format!("{unit}.{name} has a gradient already");
                            assert!(error.to_string().contains(&named), "{error}");
                            continue;
                        }
                        _ => {}
                    }
                    grads.set(name, grad)?;
                }
                Ok(())
            })?;
        }
        match misuse {
            NoUpdate => step.end_without_update()?,
            TooManyMicroBatches => {
                let error = step.next_micro_batch(0.0).unwrap_err();
                assert!(error.to_string().contains("micro-batches"), "{error}");
                step.end(loss)?;
            }
            _ => drop(step.end(loss)?),
        }
        return Ok(());
    }
    Ok(())
}

/// One rank misuses the facade: either all ranks train on with the right numbers, or all of them
/// end with an error, long before a time limit.
fn check_misuse(
    stage: ZeroStage,
    (ranks, rank): (usize, usize),
    micro_batches: usize,
    (misuse, unit): (Misuse, usize),
) {
    let run = |comm: ThreadsComm| -> Result<_, Error> {
        let place = (comm.rank(), comm.world_size());
        let zero = builder(comm, stage).micro_batches(micro_batches);
        let mut zero = zero.build(init)?;
        step(&mut zero, place, micro_batches)?;
        if place.0 == rank && misuse == DroppedRun {
            return Err("dropped".into());
        }
        match place.0 == rank {
            true => misused(&mut zero, place, micro_batches, (misuse, unit))?,
            false => drop(step(&mut zero, place, micro_batches)?),
        }
        step(&mut zero, place, micro_batches)?;
        Ok(weights(&mut zero)?)
    };
    let caught = |comm| {
        let result = catch_unwind(AssertUnwindSafe(|| run(comm)));
        result.unwrap_or_else(|_| Err("panicked".into()))
    };
    let results = on_ranks(ranks, caught);
    // An abort ends every wait, not the limit.
    let is_late = |result: &Result<Vec<f32>, Error>| {
        let error = result.as_ref().err().map(ToString::to_string);
        error.is_some_and(|error| error.contains("within 1") || error.contains("longer than"))
    };
    assert!(!results.iter().any(is_late), "{misuse:?}: {results:?}");

    if misuse.is_harmless(stage, micro_batches) {
        let (_, expected) = reference(3, ranks * micro_batches);
        for weights in results {
            for (got, expected) in weights.unwrap().iter().zip(&expected) {
                assert!(
                    (f64::from(*got) - expected).abs() < 2e-6,
                    "{got} {expected}"
                );
            }
        }
        return;
    }
    for result in results {
        result.expect_err("no error");
    }
}

/// A parameter without a gradient on all ranks is named; on one of them, the collectives of the
/// ranks may differ first.
#[test]
fn missing_gradients_are_named() {
    for stage in ZeroStage::ALL {
        let run = |comm: ThreadsComm| {
            let mut zero = builder(comm, stage).build(init).unwrap();
            let mut step = zero.begin().unwrap();
            step.grad("a.w", [1.0_f32; 5]).unwrap();
            step.grad("d.e", [1.0_f32]).unwrap();
            step.grad("f.w", [1.0_f32; 8]).unwrap();
            let ended = step.end(0.0).unwrap_err().to_string();
            (ended, zero.begin().unwrap_err().to_string())
        };
        for (ended, next) in on_ranks(2, run) {
            let missing = "end of the step: 3 of 6 parameters have no gradient: a.b, c.w, d.none; call Step::unused";
            assert!(ended.starts_with(missing), "{ended}");
            assert!(
                next.contains("did not end: end of the step: 3 of 6"),
                "{next}"
            );
        }
    }
}

/// A step that an adapter fails has no update at any stage, and all ranks have the reason.
#[test]
fn failed_step_has_no_update() {
    for stage in ZeroStage::ALL {
        let run = |comm: ThreadsComm| {
            let rank = comm.rank();
            let mut zero = builder(comm, stage).build(init).unwrap();
            let mut step = zero.begin().unwrap();
            let computed = micro_batch(&mut step, rank);
            if rank == 1 {
                step.fail("a tensor is kept");
                let refused = step.forward("a", |_| Ok::<_, Error>(())).unwrap_err();
                assert!(
                    refused.to_string().contains("a tensor is kept"),
                    "{refused}"
                );
            }
            let ended = computed.and_then(|loss| Ok(step.end(loss)?));
            let errors = [
                ended.map(drop).unwrap_err().to_string(),
                zero.begin().map(drop).unwrap_err().to_string(),
                zero.save("never").unwrap_err().to_string(),
            ];
            (errors, zero.steps())
        };
        for (errors, steps) in on_ranks(2, run) {
            assert_eq!(steps, 0, "{stage:?}");
            for error in errors {
                assert!(error.contains("a tensor is kept"), "{stage:?}: {error}");
            }
        }
    }
}

/// Each misuse at each stage.
#[test]
#[cfg_attr(miri, ignore = "minutes; `misuses_are_errors` has some of them")]
fn each_misuse_at_each_stage() {
    for stage in ZeroStage::ALL {
        for &misuse in Misuse::ALL {
            check_misuse(stage, (2, 1), 2, (misuse, 1));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn misuses_are_errors(
        stage in 0..4_usize, ranks in 2..4_usize, rank in 0..3_usize, micro_batches in 1..3_usize,
        misuse in 0..Misuse::ALL.len(), unit in 0..UNITS.len(),
    ) {
        let stage = ZeroStage::ALL[stage];
        check_misuse(stage, (ranks, rank % ranks), micro_batches, (Misuse::ALL[misuse], unit));
    }
}
