//! Every order that streams and events allow has the same result, and no access is unordered.

use zero_alloc::host::HostDevice;
use zero_optim::framework::Zero;
use zero_shard::ZeroStage;

use crate::common::{Batch, Form, Model, Run, bits, config, on_ranks, rank_on};

fn train(seed: u64, form: Form, stage: ZeroStage) -> Vec<u32> {
    let device = HostDevice::seeded(seed);
    let ranks = on_ranks(2, |comm, place| {
        let builder = Zero::builder(rank_on(comm, &device)?).stage(stage);
        let template = Model::new(1);
        let mut run = Run::new(form, template.clone(), builder.adamw(config()))?;
        for step in 0..2 {
            run.step(&Batch::of_rank(step, place))?;
        }
        Ok(bits(&run.model(template)?))
    });
    let violations = device.violations();
    assert!(violations.is_empty(), "seed {seed}: {violations:?}");
    ranks.into_iter().map(Result::unwrap).next().unwrap()
}

#[test]
fn seeds_change_no_bit() {
    let runs = [
        (Form::Model, ZeroStage::One),
        (Form::Chain, ZeroStage::Two),
        (Form::Chain, ZeroStage::Three),
    ];
    for (form, stage) in runs {
        let expected = train(0, form, stage);
        for seed in 1..20 {
            assert!(
                train(seed, form, stage) == expected,
                "{form:?}, {stage:?}, seed {seed}"
            );
        }
    }
}
