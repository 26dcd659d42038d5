//! Checkpoints of the run, and burn's own records.

use burn::module::Module;
use burn::store::ModuleRecord;
use burn_zero::{ZeroBurn, unit_of_block};
use zero_shard::ZeroStage;

use crate::common::{Batch, Model, bits, builder, on_ranks, step_chain, unsharded};

const LAYERS: usize = 2;

#[test]
fn two_ranks_resume_four() {
    let folder = tempfile::tempdir().unwrap();
    let expected = unsharded(LAYERS, 6);

    let saved = on_ranks(4, |comm, place| {
        let chain = Model::new(LAYERS).into_blocks();
        let mut run = ZeroBurn::chain(chain, builder(comm, ZeroStage::Three)?)?;
        for step in 0..3 {
            step_chain(&mut run, &Batch::of_rank(step, place))?;
        }
        run.save(folder.path())
    });
    saved.into_iter().for_each(|rank| rank.unwrap());

    let resumed = on_ranks(2, |comm, place| {
        let chain = Model::new(LAYERS).into_blocks();
        let mut run = ZeroBurn::chain(chain, builder(comm, ZeroStage::Two)?)?;
        run.resume(folder.path())?;
        assert_eq!(run.zero().steps(), 3);
        for (step, expected) in expected.iter().enumerate().skip(3) {
            let loss = step_chain(&mut run, &Batch::of_rank(step, place))?.loss();
            let error = ((loss - expected) / expected).abs();
            assert!(error <= 1e-6, "step {step}: {error:e}");
        }
        Ok(Model::new(LAYERS).with_blocks(run.model()?))
    });
    let trained = resumed.into_iter().map(Result::unwrap).next().unwrap();

    // burn's own format, and back.
    let record = trained.clone().into_record().into_bytes().unwrap();
    let record = ModuleRecord::from_bytes(record).unwrap();
    let loaded = Model::new(LAYERS).load_record(record);
    let batch = Batch::whole(6);
    let [trained, again] = [&trained, &loaded].map(|model| model.loss(&batch).into_scalar::<f32>());
    assert_eq!(trained.to_bits(), again.to_bits());

    // A run that begins with the record.
    let begun = on_ranks(4, |comm, place| {
        let builder = builder(comm, ZeroStage::Two)?;
        let mut run = ZeroBurn::new(loaded.clone(), builder, unit_of_block)?;
        assert!(bits(&run.model()?) == bits(&loaded));
        let batch = Batch::of_rank(6, place);
        Ok(run.step(|model| model.loss(&batch))?.loss())
    });
    for loss in begun {
        let error = (loss.unwrap() - f64::from(again)).abs() / f64::from(again);
        assert!(error <= 1e-6, "{error:e}");
    }
}
