//! Models that run in blocks, whose parameters stage 3 gathers for each of them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{AdamW, Optimizer, VarBuilder, VarMap};
use candle_zero::{ShardedVars, TrainStep, ZeroAdamW, ZeroConfig};
use zero_alloc::Purpose;
use zero_alloc::host::HostDevice;
use zero_comm::threads::World;
use zero_comm::{CommOptions, Communicator, Solo};
use zero_optim::StepOutcome;
use zero_shard::{Widths, ZeroStage};

use crate::common::{ADAMW, RANKS, ROWS, STEPS, batch, config, largest_error};
use crate::models::{Block, Lm, Parts, unit_of, weights};

pub(crate) fn config_in_blocks(stage: ZeroStage) -> ZeroConfig {
    ZeroConfig {
        unit_of,
        ..config(stage)
    }
}

/// Losses and final weights of candle's own training over the whole batch, without ZeRO.
fn candle_alone(
    parts: Parts,
    layers: usize,
    steps: usize,
) -> Result<(Vec<f64>, HashMap<String, Tensor>)> {
    let mut vars = VarMap::new();
    let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let model = Lm::load(parts, layers, &builder)?;
    vars.set(weights(parts, layers)?.iter())?;

    let mut optimizer = AdamW::new(vars.all_vars(), ADAMW)?;
    let mut losses = Vec::new();
    for step in 0..steps {
        let loss = model.loss(&batch(step, 0..ROWS)?)?;
        losses.push(f64::from(loss.to_scalar::<f32>()?));
        optimizer.backward_step(&loss)?;
    }

    let data = vars.data().lock().unwrap();
    let weights = data.iter();
    let weights = weights.map(|(name, var)| (name.clone(), var.as_tensor().clone()));
    Ok((losses, weights.collect()))
}

pub(crate) struct Rank {
    rows: std::ops::Range<usize>,
    model: Lm,
    zero: ZeroAdamW,
}

impl Rank {
    fn new(
        comm: Arc<dyn Communicator<HostDevice>>,
        (parts, layers): (Parts, usize),
        config: ZeroConfig,
    ) -> Result<Self> {
        let rows = ROWS / comm.world_size();
        let rows = comm.rank() * rows..(comm.rank() + 1) * rows;
        let vars = ShardedVars::new(weights(parts, layers)?, |_| true);
        let model = Lm::load(parts, layers, &vars.var_builder(&Device::Cpu))?;
        let zero = ZeroAdamW::new(comm, &vars, config)?;
        Ok(Self { rows, model, zero })
    }

    /// A step, with `micro_batches` of the rank's rows.
    fn step(&mut self, step: usize, micro_batches: usize) -> Result<StepOutcome> {
        let rows = self.rows.len() / micro_batches;
        let starts = self.rows.clone().step_by(rows);
        let batches = starts.map(|start| batch(step, start..start + rows));
        let batches = batches.collect::<Result<Vec<_>>>()?;

        self.zero.step(|step| {
            for (tokens, targets) in &batches {
                let mut x = tokens.clone();
                for (unit, block) in self.model.blocks(targets) {
                    x = step.block(&unit, &x, block)?;
                }
                step.backward(&x)?;
            }
            Ok(())
        })
    }

    /// The mean loss of all ranks' rows, without an update.
    fn evaluate(&mut self, step: usize) -> Result<f64> {
        let (tokens, targets) = batch(step, self.rows.clone())?;
        self.zero.evaluate(|step| {
            let mut x = tokens;
            for (unit, block) in self.model.blocks(&targets) {
                x = step.block(&unit, &x, block)?;
            }
            Ok(x)
        })
    }

    pub(crate) fn losses(&mut self, steps: std::ops::Range<usize>) -> Result<Vec<f64>> {
        steps.map(|step| Ok(self.step(step, 1)?.loss())).collect()
    }
}

/// Runs `run` on each of `ranks` ranks, and returns the results in rank order.
pub(crate) fn on_ranks<R: Send>(
    ranks: usize,
    model: (Parts, usize),
    config: &ZeroConfig,
    run: impl Fn(Rank) -> Result<R> + Sync,
) -> Vec<R> {
    let comms = World::new(ranks, CommOptions::default()).unwrap();
    let rank = |comm| run(Rank::new(comm, model, config.clone())?);
    thread::scope(|scope| {
        let ranks: Vec<_> = comms
            .into_iter()
            .map(|comm| scope.spawn(|| rank(Arc::new(comm))))
            .collect();
        let results = ranks.into_iter().map(|rank| rank.join().unwrap());
        results.map(Result::unwrap).collect()
    })
}

fn same_losses(parts: Parts, layers: usize, stage: ZeroStage, steps: usize) {
    let (expected, _) = candle_alone(parts, layers, steps).unwrap();
    assert!(
        expected[steps - 1] < 0.95 * expected[0],
        "candle's own training learns nothing: {expected:?}"
    );
    let run = |mut rank: Rank| rank.losses(0..steps);
    let ranks = on_ranks(RANKS, (parts, layers), &config_in_blocks(stage), run);
    let error = largest_error(&ranks[0], &expected);
    println!(
        "stage {}, {steps} steps: largest relative error {error:e}",
        stage.number()
    );
    assert!(error <= 1e-6, "stage {}: {error:e}", stage.number());
    for losses in &ranks {
        assert_eq!(losses, &ranks[0]);
    }
}

#[test]
fn llama_at_stage_3() {
    same_losses(Parts::Llama, 3, ZeroStage::Three, STEPS);
}

#[test]
fn llama_in_blocks_at_stage_2() {
    same_losses(Parts::Llama, 3, ZeroStage::Two, 15);
}

#[test]
fn mamba_blocks_of_candle_transformers_at_stage_3() {
    same_losses(Parts::Mamba, 1, ZeroStage::Three, 6);
}

/// Trains a few steps; the peak of gathered elements, and the limit: one unit ahead, one in use.
fn peak_and_limit(layers: usize) -> (usize, usize) {
    let config = config_in_blocks(ZeroStage::Three);
    let ranks = on_ranks(RANKS, (Parts::Llama, layers), &config, |mut rank| {
        let steps = 2;
        rank.losses(0..steps)?;
        let zero = rank.zero.zero();
        let layout = zero.layout();
        let report = zero.rank().pool().report();
        let formula = layout.state_bytes(ZeroStage::Three, &Widths::FP32_ADAM);
        let formula = formula.unwrap();
        let live = |purpose| report.of(purpose).live_bytes as u64;
        assert_eq!(live(Purpose::Params), formula.params_bytes);
        // They are freed behind the update, which may still run.
        let grads = report.of(Purpose::Grads).peak_bytes as u64;
        assert_eq!(grads, formula.grads_bytes);
        assert_eq!(live(Purpose::Optimizer), formula.optimizer_bytes);

        // Into candle's tensors: forward and backward.
        let copied = rank.zero.copied_param_elems();
        assert_eq!(copied, 2 * steps as u64 * layout.numel_elems());
        // Into buckets.
        let backward = rank.zero.backward_report();
        assert_eq!(backward.kept_by_candle, 0);

        // In the last step: each unit is gathered ahead, in forward and in backward, except that
        // the last is kept between both.
        let gathers = zero.gathers();
        let uses = 2 * layout.units().len();
        assert_eq!(
            (gathers.on_demand, gathers.kept, gathers.prefetched),
            (0, 1, uses - 1)
        );

        let units = layout.units().iter();
        Ok((
            gathers.peak_live_elems,
            2 * units.map(|unit| unit.padded_elems).max().unwrap() as usize,
        ))
    });
    println!("{layers} layers: peak and limit of gathered elements {ranks:?}");
    ranks[0]
}

#[test]
fn gathered_elements_do_not_grow_with_layers() {
    let (few, limit) = peak_and_limit(3);
    let (many, same_limit) = peak_and_limit(30);
    assert_eq!(limit, same_limit);
    assert_eq!(few, many);
    assert!(few <= limit, "{few} > {limit}");
}

/// The bits of all parameters, by name.
fn bits(file: &Path) -> Result<Vec<(String, Vec<u32>)>> {
    let tensors = candle_core::safetensors::load(file, &Device::Cpu)?;
    let bits = |(name, tensor): (String, Tensor)| {
        let values = tensor.flatten_all()?.to_vec1::<f32>()?;
        Ok((name, values.into_iter().map(f32::to_bits).collect()))
    };
    let mut all = tensors.into_iter().map(bits).collect::<Result<Vec<_>>>()?;
    all.sort();
    Ok(all)
}

#[test]
fn any_order_gives_the_same_bits_at_stage_3() {
    let folder = tempfile::tempdir().unwrap();
    let train = |seed: u64| {
        let device = HostDevice::seeded(seed);
        let config = ZeroConfig {
            device: device.clone(),
            micro_batches: 2,
            ..config_in_blocks(ZeroStage::Three)
        };
        let file = folder.path().join(seed.to_string());
        on_ranks(2, (Parts::Llama, 1), &config, |mut rank| {
            for step in 0..2 {
                rank.step(step, 2)?;
            }
            rank.zero.save_safetensors(&file)
        });
        assert!(
            device.violations().is_empty(),
            "seed {seed}: {:?}",
            device.violations()
        );
        bits(&file).unwrap()
    };
    let expected = train(0);
    for seed in 1..20 {
        assert!(train(seed) == expected, "seed {seed}");
    }
}

#[test]
fn two_ranks_resume_four() {
    const BEFORE: usize = 10;
    const AFTER: usize = 10;
    let model = (Parts::Llama, 2);
    let (expected, weights) = candle_alone(model.0, model.1, BEFORE + AFTER).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = folder.path().join("checkpoint");
    let file = folder.path().join("model.safetensors");

    let config = config_in_blocks(ZeroStage::Three);
    on_ranks(4, model, &config, |mut rank| {
        rank.losses(0..BEFORE)?;
        rank.zero.save(&checkpoint)
    });
    let losses = on_ranks(2, model, &config, |mut rank| {
        rank.zero.resume(&checkpoint)?;
        let evaluated = rank.evaluate(BEFORE)?;
        let losses = rank.losses(BEFORE..BEFORE + AFTER)?;
        rank.zero.save_safetensors(&file)?;
        Ok((losses, evaluated))
    });
    let (losses, evaluated) = &losses[0];
    let error = largest_error(losses, &expected[BEFORE..]);
    assert!(error <= 1e-6, "{error:e}");
    let error = largest_error(&[*evaluated], &losses[..1]);
    assert!(error <= 1e-6, "{error:e}");

    // candle loads the file: as tensors, and as the same model.
    let exported = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    assert_eq!(exported.len(), weights.len());
    for (name, tensor) in &exported {
        let distance = (tensor - &weights[name]).unwrap().abs().unwrap();
        let distance = distance.flatten_all().unwrap().max(0).unwrap();
        let distance: f32 = distance.to_scalar().unwrap();
        assert!(distance <= 2e-5, "{name} differs by {distance:e}");
    }
    let builder = VarBuilder::from_tensors(exported, DType::F32, &Device::Cpu);
    let model = Lm::load(model.0, model.1, &builder).unwrap();
    let loss = model.loss(&batch(0, 0..ROWS).unwrap()).unwrap();
    assert!(loss.to_scalar::<f32>().unwrap() < expected[0] as f32);
}

/// An optimizer of one rank.
fn alone(stage: ZeroStage) -> Rank {
    let comm = Arc::new(Solo::new(HostDevice::new()));
    Rank::new(comm, (Parts::Llama, 2), config_in_blocks(stage)).unwrap()
}

#[test]
fn parameters_outside_of_their_block_are_an_error() {
    let data = batch(0, 0..ROWS).unwrap();
    let whole = alone(ZeroStage::Three);
    let error = whole.model.loss(&data).unwrap_err().to_string();
    assert!(error.contains("F4"), "{error}");

    let mut rank = alone(ZeroStage::Three);
    let wrong_unit = rank.zero.step(|step| {
        let (_, tokens) = rank.model.blocks(&data.1).remove(0);
        step.block("layers.1", &data.0, tokens).map(drop)
    });
    let error = wrong_unit.unwrap_err().to_string();
    assert!(error.contains("used outside of the block"), "{error}");

    let mut rank = alone(ZeroStage::Three);
    let no_unit = rank
        .zero
        .step(|step| step.block("layers.9", &data.0, |x| Ok(x.clone())).map(drop));
    let error = no_unit.unwrap_err().to_string();
    assert!(
        error.contains("layers.9") && error.contains("layers.1"),
        "{error}"
    );
}

#[test]
fn block_that_the_loss_does_not_use_is_an_error() {
    let (tokens, targets) = batch(0, 0..ROWS).unwrap();
    let mut rank = alone(ZeroStage::Three);
    let outcome = rank.zero.step(|step| {
        let mut x = tokens.clone();
        for (unit, block) in rank.model.blocks(&targets) {
            let output = step.block(&unit, &x, block)?;
            if unit != "layers.1" {
                x = output;
            }
        }
        step.backward(&x)
    });
    let error = outcome.unwrap_err().to_string();
    let expected = "does not depend on the output of block layers.1";
    assert!(error.contains(expected), "{error}");
}

/// The error of a step of one rank in which `run` misuses the blocks. It names the misuse, at all
/// stages, and no type or method of others.
fn misuse(
    stage: ZeroStage,
    run: impl for<'s, 'm> Fn(&mut TrainStep<'s, 'm>, Vec<Part<'m>>, &Tensor) -> Result<()>,
) -> String {
    let (tokens, targets) = batch(0, 0..ROWS).unwrap();
    let Rank {
        model, mut zero, ..
    } = alone(stage);
    let outcome = zero.step(|step| run(step, model.blocks(&targets), &tokens));
    let error = outcome.unwrap_err().to_string();
    for of_others in ["F4", "next_micro_batch", "rms_norm", "dtype"] {
        assert!(!error.contains(of_others), "{stage}: {error}");
    }
    error
}

type Part<'m> = (String, Block<'m>);

fn forward<'m>(step: &mut TrainStep<'_, 'm>, parts: Vec<Part<'m>>, x: &Tensor) -> Result<Tensor> {
    let mut x = x.clone();
    for (unit, block) in parts {
        x = step.block(&unit, &x, block)?;
    }
    Ok(x)
}

#[test]
fn second_forward_before_backward_is_named() {
    for stage in ZeroStage::ALL {
        let (tokens, targets) = batch(0, 0..ROWS).unwrap();
        let Rank {
            model, mut zero, ..
        } = alone(stage);
        let outcome = zero.step(|step| {
            let first = forward(step, model.blocks(&targets), &tokens)?;
            let second = forward(step, model.blocks(&targets), &tokens)?;
            step.backward(&first)?;
            step.backward(&second)
        });
        let error = outcome.unwrap_err().to_string();
        let expected = "block tokens ran a second time before backward: call TrainStep::backward";
        assert!(error.contains(expected), "{stage}: {error}");
    }
}

#[test]
fn block_used_twice_is_named() {
    for stage in ZeroStage::ALL {
        let error = misuse(stage, |step, parts, tokens| {
            let mut x = tokens.clone();
            for (unit, block) in parts {
                let block = Rc::new(block);
                let again = Rc::clone(&block);
                x = step.block(&unit, &x, move |x| block(x))?;
                if unit == "layers.0" {
                    x = step.block(&unit, &x, move |x| again(x))?;
                }
            }
            step.backward(&x)
        });
        assert!(
            error.contains("block layers.0 ran a second time"),
            "{error}"
        );
    }
}

#[test]
fn intermediate_of_a_block_in_the_loss_is_named() {
    for stage in ZeroStage::ALL {
        let error = misuse(stage, |step, parts, tokens| {
            let kept = Rc::new(RefCell::new(None));
            let mut x = tokens.clone();
            for (unit, block) in parts {
                let keep = (unit == "layers.0").then(|| Rc::clone(&kept));
                x = step.block(&unit, &x, move |x| {
                    let output = block(x)?;
                    if let Some(keep) = &keep {
                        *keep.borrow_mut() = Some(output.clone());
                    }
                    Ok(output)
                })?;
            }
            let kept = kept.take().expect("the block ran");
            step.backward(&(x + kept.sqr()?.mean_all()?)?)
        });
        let expected = "pass on only what the function of TrainStep::block returns";
        assert!(error.contains(expected), "{stage}: {error}");
    }
}

/// The code is that of a model without frozen blocks, at all stages; a name that no parameter has
/// is still an error.
#[test]
fn frozen_block_runs_as_any_other() {
    let losses = ZeroStage::ALL.map(|stage| {
        let vars = ShardedVars::new(weights(Parts::Llama, 2).unwrap(), |name| {
            !name.starts_with("layers.1.") && !name.starts_with("tokens.")
        });
        let model = Lm::load(Parts::Llama, 2, &vars.var_builder(&Device::Cpu)).unwrap();
        let comm = Arc::new(Solo::new(HostDevice::new()));
        let mut zero = ZeroAdamW::new(comm, &vars, config_in_blocks(stage)).unwrap();
        let losses: Vec<f64> = (0..4)
            .map(|_| {
                let (tokens, targets) = batch(0, 0..ROWS).unwrap();
                let outcome = zero.step(|step| {
                    let loss = forward(step, model.blocks(&targets), &tokens)?;
                    step.backward(&loss)
                });
                outcome.unwrap().loss()
            })
            .collect();
        let unknown = zero.step(|step| {
            let x = Tensor::zeros(1, DType::F32, &Device::Cpu)?;
            step.block("layers.7", &x, |x| Ok(x.clone())).map(drop)
        });
        let error = unknown.unwrap_err().to_string();
        assert!(error.contains("layers.7"), "{error}");
        losses
    });
    assert!(losses[0][3] < losses[0][0], "{losses:?}");
    assert!(
        losses.iter().all(|of_stage| *of_stage == losses[0]),
        "{losses:?}"
    );
}

#[test]
fn panic_in_a_block_fails_the_step() {
    for stage in ZeroStage::ALL {
        let data = batch(0, 0..ROWS).unwrap();
        let mut rank = alone(stage);
        let outcome = rank.zero.step(|step| {
            let panics = || {
                step.block("tokens", &data.0, |_| panic!("on purpose"))
                    .map(drop)
            };
            catch_unwind(AssertUnwindSafe(panics)).expect_err("a panic");
            let next = forward(step, rank.model.blocks(&data.1), &data.0);
            let error = next.unwrap_err().to_string();
            assert!(error.contains("block tokens panicked"), "{stage}: {error}");
            Ok(())
        });
        outcome.expect_err("the step has failed");
        // The block's tensors are released.
        let is_released = rank.model.loss(&data).is_err();
        assert_eq!(is_released, stage == ZeroStage::Three);
    }
}

/// Its graph has the parameters of the step before.
#[test]
fn stale_loss_is_refused() {
    for stage in [ZeroStage::Zero, ZeroStage::One, ZeroStage::Two] {
        let mut rank = alone(stage);
        let loss = rank.model.loss(&batch(0, 0..ROWS).unwrap()).unwrap();
        rank.zero.backward_step(&loss).unwrap();
        let again = rank.zero.backward_step(&loss).unwrap_err().to_string();
        assert!(again.contains("compute the loss again"), "{stage}: {again}");
    }
}

#[test]
fn evaluation_repeats_blocks_and_has_no_backward() {
    for stage in ZeroStage::ALL {
        let (tokens, targets) = batch(0, 0..ROWS).unwrap();
        let Rank {
            model, mut zero, ..
        } = alone(stage);
        let twice = zero.evaluate(|step| {
            let first = forward(step, model.blocks(&targets), &tokens)?;
            let second = forward(step, model.blocks(&targets), &tokens)?;
            (first + second)? / 2.0
        });
        let once = zero.evaluate(|step| forward(step, model.blocks(&targets), &tokens));
        assert!((twice.unwrap() - once.unwrap()).abs() < 1e-6);

        let backward = zero.evaluate(|step| {
            let loss = forward(step, model.blocks(&targets), &tokens)?;
            step.backward(&loss)?;
            Ok(loss)
        });
        let error = backward.unwrap_err().to_string();
        assert!(error.contains("call ZeroAdamW::step"), "{stage}: {error}");
    }
}

#[test]
fn sharded_parameters_have_no_second_optimizer() {
    let vars = ShardedVars::new(weights(Parts::Llama, 1).unwrap(), |_| true);
    Lm::load(Parts::Llama, 1, &vars.var_builder(&Device::Cpu)).unwrap();
    let zero = || {
        let comm = Arc::new(Solo::new(HostDevice::new()));
        ZeroAdamW::new(comm, &vars, config_in_blocks(ZeroStage::Three))
    };
    drop(zero().unwrap());
    let error = zero().expect_err("parameters without elements").to_string();
    assert!(error.contains("load the model again"), "{error}");
}

/// Runs `run` on each of two ranks, and returns the errors in rank order.
fn errors_on_two_ranks(
    run: impl Fn(Arc<dyn Communicator<HostDevice>>) -> Result<()> + Sync,
) -> [String; 2] {
    let comms: [_; 2] = World::new(2, CommOptions::default())
        .unwrap()
        .try_into()
        .unwrap();
    thread::scope(|scope| {
        let ranks = comms.map(|comm| scope.spawn(|| run(Arc::new(comm))));
        ranks.map(|rank| rank.join().unwrap().unwrap_err().to_string())
    })
}

#[test]
fn different_models_are_an_error() {
    let errors = errors_on_two_ranks(|comm| {
        let layers = 1 + comm.rank();
        let config = config_in_blocks(ZeroStage::Three);
        Rank::new(comm, (Parts::Llama, layers), config).map(drop)
    });
    for error in errors {
        assert!(error.contains("layers.1"), "{error}");
    }
}

#[test]
fn error_within_a_step_reaches_the_other_ranks() {
    let errors = errors_on_two_ranks(|comm| {
        let is_failing = comm.rank() == 1;
        let config = config_in_blocks(ZeroStage::Three);
        let mut rank = Rank::new(comm, (Parts::Llama, 1), config)?;
        if is_failing {
            rank.zero.step(|_| candle_core::bail!("the data is gone"))?;
        }
        rank.step(0, 1).map(drop)
    });
    for error in errors {
        assert!(error.contains("the data is gone"), "{error}");
    }
}
