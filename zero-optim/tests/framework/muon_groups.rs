//! Muon for a group of a framework's parameters.

use zero_kernels::Muon;
use zero_optim::Matrix;

use super::*;

/// A unit, and its parameters with their shapes.
type Layer = (&'static str, [(&'static str, &'static [u64]); 3]);

/// Two units of two matrices each, with a bias.
const LAYERS: [Layer; 2] = [
    ("x", [("up", &[4, 6]), ("bias", &[1]), ("qkv", &[3, 12])]),
    ("y", [("up", &[6, 4]), ("bias", &[1]), ("qkv", &[3, 12])]),
];
const STEPS: usize = 3;
/// Micro-batches of a step, over all ranks.
const BATCHES: usize = 4;

fn of_layers(comm: ThreadsComm, stage: ZeroStage, muon: fn(&str) -> bool) -> Builder<Host> {
    let rank = Rank::on_host(comm).unwrap().limit(LIMIT);
    let config = OptimizerConfig::default().lr(0.05);
    let mut builder = Zero::builder(rank).stage(stage).adamw(config);
    for (unit, params) in LAYERS {
        builder = builder.unit(unit, params);
    }
    builder
        .groups(vec![GroupRules::default(); 2], move |name| {
            muon(name).into()
        })
        .group_rule(1, Arc::new(Muon::default()))
        .matrices(|name, shape| match *shape {
            [_, _] if name.ends_with("qkv") => Matrix::conv1d(3, 12).split(&[4; 3]),
            [outputs, inputs] => vec![Matrix::linear(outputs as usize, inputs as usize)],
            _ => Vec::new(),
        })
}

fn is_matrix(name: &str) -> bool {
    !name.ends_with("bias")
}

/// Steps with gradients that are multiples of 1/4, so that their sums are exact in any order.
fn train(comm: ThreadsComm, stage: ZeroStage) -> Result<Vec<f32>, Error> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let micro_batches = BATCHES / ranks;
    let mut zero = of_layers(comm, stage, is_matrix)
        .micro_batches(micro_batches)
        .build(init)?;
    for step_nth in 0..STEPS {
        let mut step = zero.begin()?;
        for micro in 0..micro_batches {
            if micro > 0 {
                step.next_micro_batch(0.0)?;
            }
            let batch = step_nth * BATCHES + micro * ranks + rank;
            for (unit, _) in LAYERS {
                step.forward(unit, |_| Ok::<_, Error>(()))?;
            }
            for (unit, params) in LAYERS.iter().rev() {
                step.backward(unit, |_, grads| -> Result<(), Error> {
                    for (name, shape) in params {
                        let elems = shape.iter().product::<u64>() as usize;
                        let grad = (0..elems).map(|i| target(i, batch));
                        grads.set(name, grad.collect::<Vec<f32>>())?;
                    }
                    Ok(())
                })?;
            }
        }
        step.end(0.0)?;
    }
    Ok(weights(&mut zero)?)
}

/// All stages and numbers of ranks have the bits of one rank.
#[test]
fn matrices_have_the_same_bits_on_all_ranks() {
    let mut expected: Option<Vec<f32>> = None;
    for ranks in [1, 2, 4] {
        for stage in ZeroStage::ALL {
            for weights in on_ranks(ranks, |comm| train(comm, stage)) {
                let weights = weights.unwrap();
                let expected = expected.get_or_insert_with(|| weights.clone());
                assert_eq!(weights, *expected, "{ranks} ranks at stage {stage}");
            }
        }
    }
}

/// Each element with the rule must be in a matrix, also one beside padding.
#[test]
fn elements_without_a_matrix_are_refused() {
    let refused = |ranks, change: fn(Builder<Host>) -> Builder<Host>| {
        let errors = on_ranks(ranks, |comm| {
            let builder = of_layers(comm, ZeroStage::Three, |name| name != "y.bias");
            let built = change(builder).build(init);
            built.err().unwrap().to_string()
        });
        errors.concat()
    };
    for ranks in [1, 2, 4] {
        let error = refused(ranks, |builder| builder);
        let expected = "unit x: the update rule muon updates whole matrices, and 1 of its elements are in none";
        assert!(error.contains(expected), "{ranks} ranks: {error}");
    }

    let partly = refused(1, |builder| {
        builder
            .groups(vec![GroupRules::default(); 2], |name| {
                is_matrix(name).into()
            })
            .matrices(|_, shape| match *shape {
                [rows, cols] => Matrix::conv1d(rows as usize, cols as usize).split(&[2]),
                _ => Vec::new(),
            })
    });
    let expected = "x.up of shape [4, 6]: each of its elements must be in one matrix";
    assert!(partly.contains(expected), "{partly}");
}

/// A resume keeps the rule of each trained parameter; one that was frozen may get any.
#[test]
fn resume_keeps_the_update_rules() {
    let resumed = |save: fn(Builder<Host>) -> Builder<Host>, muon: fn(&str) -> bool| {
        let dir = tempfile::tempdir().unwrap();
        let run = |comm: ThreadsComm, resumes: bool| -> Result<(), Error> {
            let builder = of_layers(comm, ZeroStage::Two, if resumes { muon } else { is_matrix });
            let builder = if resumes { builder } else { save(builder) };
            let mut zero = builder.build(init)?;
            match resumes {
                false => zero.save(dir.path())?,
                true => zero.resume(dir.path())?,
            }
            Ok(())
        };
        for saved in on_ranks(2, |comm| run(comm, false)) {
            saved.unwrap();
        }
        let errors = on_ranks(2, |comm| run(comm, true)).into_iter();
        errors
            .map(|done| done.err().map(|error| error.to_string()))
            .collect::<Vec<_>>()
    };
    let same = |builder| builder;
    assert_eq!(resumed(same, is_matrix), [None, None]);

    let expected = "x.qkv was updated by muon, and is by adam in this run, for which the checkpoint has no state; give its \
                    group the rule muon";
    for error in resumed(same, |_| false) {
        let error = error.unwrap();
        assert!(error.contains(expected), "{error}");
    }
    let frozen = |builder: Builder<Host>| {
        let [rules, frozen] = [GroupRules::default(), GroupRules::frozen()];
        builder.groups(vec![rules, rules, frozen], |name| match name {
            "y.up" => 2,
            _ => is_matrix(name).into(),
        })
    };
    let all_but_it = |name: &str| is_matrix(name) && name != "y.up";
    assert_eq!(resumed(frozen, all_but_it), [None, None]);
}
