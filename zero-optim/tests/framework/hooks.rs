//! The facade as a framework with hooks uses it: units are held between two calls, steps have no
//! guard, gradients come one by one, come again, or not at all.

use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;
use zero_alloc::device::{AnySlice, DeviceId, DeviceSlice};
use zero_comm::{CallerMemory, Communicator, PrefetchError};

use super::*;

/// Gathered units, or sums, in vectors, of which it counts those that live and all.
#[derive(Clone, Default)]
struct Vectors {
    live: Arc<AtomicUsize>,
    all: Arc<AtomicUsize>,
}

/// A vector, which nothing uses when it is dropped.
struct Vector(Vec<f32>, Arc<AtomicUsize>);

impl Drop for Vector {
    fn drop(&mut self) {
        // A later use reads these values.
        self.0.fill(f32::NAN);
        self.1.fetch_sub(1, Ordering::Relaxed);
    }
}

// SAFETY: the slice is that of a vector, which its owner has and nothing else uses.
unsafe impl CallerMemory for Vectors {
    fn allocate(
        &mut self,
        _unit: usize,
        elems: usize,
        dtype: DType,
    ) -> Result<(AnySlice, Box<dyn Any + Send + Sync>), PrefetchError> {
        assert_eq!(dtype, DType::F32);
        self.live.fetch_add(1, Ordering::Relaxed);
        self.all.fetch_add(1, Ordering::Relaxed);
        let mut vector = Vector(vec![f32::NAN; elems], Arc::clone(&self.live));
        let at = vector.0.as_mut_ptr();
        // SAFETY: as above.
        let slice = unsafe { DeviceSlice::from_raw_parts(at, elems, DeviceId::HOST) };
        Ok((slice.erase(), Box::new(vector)))
    }
}

/// The step that is open.
fn open(zero: &mut Zero<Host>) -> Step<'_, Host> {
    zero.open_step().expect("a step is open")
}

/// A micro-batch as [`micro_batch`], without closures, and without a guard between two calls.
fn hooked_micro_batch(zero: &mut Zero<Host>, batch: usize) -> Result<f64, Error> {
    for (unit, _) in UNITS {
        let mut step = open(zero);
        let held = step.unshard(unit)?;
        step.pause();
        let mut step = open(zero);
        step.params(&held)?;
        step.reshard(held)?;
        step.pause();
    }
    let mut loss = 0.0;
    for (unit, params) in UNITS.iter().rev() {
        let mut step = open(zero);
        let held = step.unshard(unit)?;
        let mut grads = Vec::new();
        for (name, _) in *params {
            let (grad, of_param) = grad(step.params(&held)?.get(name)?, batch);
            grads.push((format!("{unit}.{name}"), grad));
            loss += of_param;
        }
        step.reshard(held)?;
        step.pause();
        for (name, grad) in grads {
            let mut step = open(zero);
            step.grad(&name, grad)?;
            step.pause();
        }
    }
    Ok(loss)
}

/// As [`step`], by hooks.
fn hooked_step(
    zero: &mut Zero<Host>,
    (rank, ranks): (usize, usize),
    micro_batches: usize,
) -> Result<StepOutcome, Error> {
    let first = zero.steps() as usize * ranks * micro_batches;
    zero.begin()?.pause();
    for micro in 0..micro_batches {
        let loss = hooked_micro_batch(zero, first + micro * ranks + rank)?;
        let mut step = open(zero);
        if micro + 1 == micro_batches {
            return Ok(step.end(loss)?);
        }
        step.next_micro_batch(loss)?;
        step.pause();
    }
    unreachable!("there is a last micro-batch")
}

/// Runs `run` on ranks, none of which fails; returns the results by rank.
fn all_on_ranks<R: Send>(
    ranks: usize,
    run: impl Fn(ThreadsComm) -> Result<R, Error> + Sync,
) -> Vec<R> {
    let results = on_ranks(ranks, run).into_iter();
    results.map(|result| result.unwrap()).collect()
}

#[test]
fn hooks_train_as_closures() {
    let steps = if cfg!(miri) { 1 } else { 4 };
    for (ranks, micro_batches) in [(1, 1), (2, 2), (3, 1)] {
        for stage in ZeroStage::ALL {
            let run = |hooked: bool| {
                all_on_ranks(ranks, |comm| {
                    let place = (comm.rank(), comm.world_size());
                    let zero = builder(comm, stage).micro_batches(micro_batches);
                    let (units, sums) = (Vectors::default(), Vectors::default());
                    let mut zero = match hooked {
                        false => zero.build(init)?,
                        true => zero
                            .gather_memory(units.clone())
                            .gradient_memory(sums.clone())
                            .waiting_units(0)
                            .build_from_rank_0(|name, shape, values| {
                                assert_eq!(place.0, 0, "only rank 0 has initial values");
                                init(name, shape, values);
                            })?,
                    };
                    let step = if hooked { hooked_step } else { step };
                    let losses =
                        (0..steps).map(|_| Ok(step(&mut zero, place, micro_batches)?.loss()));
                    let losses = losses.collect::<Result<Vec<f64>, Error>>()?;
                    let trained = (losses, zero.gathers(), weights(&mut zero)?);
                    // The framework has it back between the steps.
                    assert_eq!(sums.live.load(Ordering::Relaxed), 0);
                    assert_eq!(sums.all.load(Ordering::Relaxed) > 0, hooked);
                    drop(zero);
                    assert_eq!(units.live.load(Ordering::Relaxed), 0);
                    let is_used = units.all.load(Ordering::Relaxed) > 0;
                    assert_eq!(is_used, hooked && stage == ZeroStage::Three);
                    Ok(trained)
                })
            };
            assert_eq!(run(true), run(false), "{stage}, {ranks} ranks");
        }
    }
}

/// How many gradients a parameter gets: by rank, micro-batch and parameter.
type Counts = Vec<Vec<Vec<usize>>>;

/// The names and lengths of all parameters.
fn params() -> Vec<(String, u64)> {
    let of_unit = |(unit, params): (&str, &[(&str, u64)])| {
        let full = |(name, len): &(&str, u64)| (format!("{unit}.{name}"), *len);
        params.iter().map(full).collect::<Vec<_>>()
    };
    UNITS.into_iter().flat_map(of_unit).collect()
}

/// Gradients whose sums are exact.
fn exact(seed: usize, len: u64) -> Vec<f32> {
    let value = |i| ((i * 5 + seed * 3) % 9) as f32 / 4.0 - 1.0;
    (0..len as usize).map(value).collect()
}

/// The weights after two steps with these gradients, each in a separate call, or those of a
/// parameter summed in one.
fn trained_with(stage: ZeroStage, counts: &Counts, is_summed: bool) -> Vec<f32> {
    let mut weights = all_on_ranks(counts.len(), |comm| {
        let rank = comm.rank();
        let zero = builder(comm, stage).micro_batches(counts[rank].len());
        let mut zero = zero.add_gradients().build(init)?;
        for at in 0..2 {
            let mut step = zero.begin()?;
            for (micro, counts) in counts[rank].iter().enumerate() {
                if micro > 0 {
                    step.next_micro_batch(1.0)?;
                }
                let grads_of = |(number, (_, len)): (usize, &(String, u64))| {
                    let seed = rank + 7 * micro + 11 * at + 17 * number;
                    let grads = (0..counts[number]).map(|nth| exact(seed + 13 * nth, *len));
                    grads.collect::<Vec<_>>()
                };
                let params = params();
                let grads: Vec<_> = params.iter().enumerate().map(grads_of).collect();
                if is_summed {
                    for ((name, len), grads) in params.iter().zip(grads) {
                        let sum = |i: usize| grads.iter().map(|grad| grad[i]).sum();
                        let sum: Vec<f32> = (0..*len as usize).map(sum).collect();
                        step.grad(name, sum)?;
                    }
                    continue;
                }
                for nth in 0..MOST {
                    for ((name, _), grads) in params.iter().zip(&grads) {
                        match grads.get(nth) {
                            Some(grad) => step.grad(name, grad.clone())?,
                            None if nth == 0 => step.unused(name)?,
                            None => {}
                        }
                    }
                }
            }
            step.end(1.0)?;
        }
        Ok(weights(&mut zero)?)
    });
    weights.swap_remove(0)
}

/// Most gradients of a parameter in a micro-batch.
const MOST: usize = 3;

/// Counts of 1 to 3 ranks and 1 to 3 micro-batches. The first parameter of each unit has as many
/// gradients on all ranks, and others on a rank no more: ranks reduce a unit equally often.
fn counts() -> impl Strategy<Value = Counts> {
    let numbers = params().len();
    let firsts = prop::collection::vec(prop::collection::vec(1..=MOST, UNITS.len()), 1..=3);
    let draws = prop::collection::vec(0..=MOST, 3 * 3 * numbers);
    (1..=3usize, firsts, draws).prop_map(move |(ranks, firsts, draws)| {
        let of = |rank: usize, micro: usize| {
            let mut counts = Vec::new();
            for (unit, (_, params)) in UNITS.iter().enumerate() {
                let first = firsts[micro][unit];
                counts.push(first);
                for _param in 1..params.len() {
                    counts.push(draws[(rank * 3 + micro) * numbers + counts.len()].min(first));
                }
            }
            counts
        };
        let of_rank = |rank| (0..firsts.len()).map(|micro| of(rank, micro)).collect();
        (0..ranks).map(of_rank).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Gradients of a parameter add up, and one that is left out is zero: the bits of one call with
    /// the sum.
    #[test]
    #[cfg_attr(miri, ignore = "hours under Miri")]
    fn gradients_add_up(counts in counts(), stage in 0..4usize) {
        let stage = ZeroStage::ALL[stage];
        prop_assert_eq!(trained_with(stage, &counts, false), trained_with(stage, &counts, true));
    }
}

/// Trains with other rules of groups in each step: set in one run, or each in a separate run that
/// resumes the last.
fn trained_with_rules(stage: ZeroStage, is_set: bool) -> Vec<f32> {
    let dir = tempfile::tempdir().unwrap();
    let steps = [
        [(1.0, None), (1.0, None)],
        [(0.5, Some(0.1)), (2.0, None)],
        [(0.0, None), (1.0, Some(0.0))],
    ];
    let rules = |step: usize| {
        steps[step]
            .map(|(lr_scale, decay)| GroupRules::default().lr_scale(lr_scale).weight_decay(decay))
    };
    let group_of = |name: &str| match name.ends_with(".w") {
        true => 0,
        false => 1 + usize::from(name == "d.e"),
    };
    let build = |comm, step| {
        let mut groups = rules(step).to_vec();
        groups.push(GroupRules::frozen());
        builder(comm, stage).groups(groups, group_of).build(init)
    };
    let mut weights_of = Vec::new();
    for first in 0..if is_set { 1 } else { steps.len() } {
        weights_of = all_on_ranks(2, |comm| {
            let place = (comm.rank(), comm.world_size());
            let mut zero = build(comm, first)?;
            if first > 0 {
                zero.resume(dir.path())?;
            }
            for at in first..if is_set { steps.len() } else { first + 1 } {
                for (group, rules) in rules(at).iter().enumerate() {
                    zero.set_group(group, rules.lr_scale, rules.weight_decay)?;
                }
                step(&mut zero, place, 1)?;
            }
            for (group, lr_scale) in [(0, -1.0), (2, 1.0), (3, 1.0)] {
                zero.set_group(group, lr_scale, None).unwrap_err();
            }
            zero.save(dir.path())?;
            Ok(weights(&mut zero)?)
        });
    }
    weights_of.swap_remove(0)
}

/// Groups of equal rules at the start are set apart.
#[test]
#[cfg_attr(miri, ignore = "files under Miri")]
fn rules_of_groups_vary() {
    for stage in ZeroStage::ALL {
        let set = trained_with_rules(stage, true);
        assert_eq!(set, trained_with_rules(stage, false), "{stage}");
    }
}

/// Steps of other numbers of micro-batches have the numbers of runs that have them from the start.
#[test]
fn micro_batches_vary() {
    for stage in ZeroStage::ALL {
        let varied = all_on_ranks(2, |comm| {
            let place = (comm.rank(), comm.world_size());
            let mut zero = builder(comm, stage).build(init)?;
            for micro_batches in [2, 1, 3] {
                zero.set_micro_batches(micro_batches)?;
                step(&mut zero, place, micro_batches)?;
            }
            let error = zero.set_micro_batches(0).unwrap_err();
            assert!(error.to_string().contains("at least 1"), "{error}");
            zero.begin()?.pause();
            let error = zero.set_micro_batches(2).unwrap_err();
            assert!(error.to_string().contains("open step"), "{error}");
            for error in [zero.save("nowhere"), zero.resume("nowhere")] {
                let error = error.unwrap_err().to_string();
                assert!(error.contains("within a step"), "{error}");
            }
            open(&mut zero).end_without_update()?;
            Ok(weights(&mut zero)?)
        });

        let dir = tempfile::tempdir().unwrap();
        let mut fixed = Vec::new();
        for (at, micro_batches) in [2, 1, 3].into_iter().enumerate() {
            fixed = all_on_ranks(2, |comm| {
                let place = (comm.rank(), comm.world_size());
                let zero = builder(comm, stage).micro_batches(micro_batches);
                let mut zero = zero.build(init)?;
                if at > 0 {
                    zero.resume(dir.path())?;
                }
                step(&mut zero, place, micro_batches)?;
                zero.save(dir.path())?;
                Ok(weights(&mut zero)?)
            });
        }
        assert_eq!(varied, fixed, "{stage}");
    }
}

#[test]
fn ranks_with_other_micro_batches_fail() {
    let errors = on_ranks(2, |comm| {
        let place = (comm.rank(), comm.world_size());
        let mut zero = builder(comm, ZeroStage::One).build(init).unwrap();
        zero.set_micro_batches(place.0 + 1).unwrap();
        step(&mut zero, place, place.0 + 1).unwrap_err().to_string()
    });
    for error in errors {
        assert!(
            error.contains("the number of micro-batches is 2 on rank 1 and 1 on rank 0"),
            "{error}"
        );
    }
}

/// Parameters of an earlier step, which may have changed, are refused.
#[test]
fn units_of_earlier_steps_are_old() {
    for stage in ZeroStage::ALL {
        all_on_ranks(2, |comm| {
            let mut zero = builder(comm, stage).build(init)?;
            let mut step = zero.begin()?;
            let held = step.unshard("a")?;
            step.end_without_update()?;
            let mut step = zero.begin()?;
            let error = step.params(&held).unwrap_err().to_string();
            assert!(
                error.contains("a was made whole in an earlier step"),
                "{error}"
            );
            step.reshard(held)?;
            step.end_without_update()?;
            Ok(())
        });
    }
}

/// A rank that drops its run in the middle of a step ends the others at once.
#[test]
fn a_dropped_run_ends_the_others() {
    for stage in ZeroStage::ALL {
        let errors = on_ranks(2, |comm| {
            let place = (comm.rank(), comm.world_size());
            let mut zero = builder(comm, stage).build(init).unwrap();
            match place.0 {
                0 => {
                    zero.begin().unwrap().pause();
                    None
                }
                _ => Some(step(&mut zero, place, 1).unwrap_err().to_string()),
            }
        });
        let error = errors[1].as_ref().unwrap();
        assert!(
            error.contains("rank 0 dropped its run within a step"),
            "{error}"
        );
    }
}
