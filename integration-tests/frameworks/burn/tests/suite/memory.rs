//! At stage 3 a rank keeps its shards, and gathers as far as the window.

use burn_zero::ZeroBurn;
use zero_comm::PrefetchOptions;
use zero_shard::ZeroStage;

use crate::common::{Batch, Form, Model, RANKS, Run, builder, on_ranks};

/// Returns the peak of gathered elements, and the elements of the largest block.
fn peak(layers: usize, ahead: usize) -> (usize, usize) {
    let ranks = on_ranks(RANKS, |comm, place| {
        let builder = builder(comm, ZeroStage::Three)?;
        let builder = builder.prefetch(PrefetchOptions::default().ahead(ahead));
        let mut run = Run::new(Form::Chain, Model::new(layers), builder)?;
        let mut peak = 0;
        for step in 0..2 {
            run.step(&Batch::of_rank(step, place))?;
            peak = peak.max(run.zero().gathers().peak_live_elems);
        }
        let units = run.zero().layout().units().iter();
        let largest = units.map(|unit| unit.padded_elems as usize).max();
        Ok((peak, largest.unwrap()))
    });
    let ranks: Vec<_> = ranks.into_iter().map(Result::unwrap).collect();
    assert!(ranks.iter().all(|rank| *rank == ranks[0]));
    ranks[0]
}

#[test]
fn gathered_elements_are_the_window_and_a_block() {
    for ahead in [0, 1] {
        for layers in [3, 30] {
            let (peak, block) = peak(layers, ahead);
            println!("{layers} layers, {ahead} ahead: peak {peak} elements, block {block}");
            assert!(peak >= block, "nothing was gathered");
            assert!(
                peak <= (ahead + 1) * block,
                "{layers} layers: peak {peak}, block {block}"
            );
        }
    }
}

/// A graph that no loss depends on keeps no parameters.
#[test]
fn unused_output_is_freed() {
    for stage in [ZeroStage::Two, ZeroStage::Three] {
        let ranks = on_ranks(2, |comm, place| {
            let chain = Model::new(1).into_blocks();
            let mut run = ZeroBurn::chain(chain, builder(comm, stage)?)?;
            let batch = Batch::of_rank(0, place);
            let outcome = run.step_chain(
                |first| {
                    let _unused = first.forward(batch.input());
                    first.forward(batch.input())
                },
                |layer, hidden| layer.forward(hidden, None, None),
                |last, hidden| batch.mse(last.forward(hidden)),
            );
            outcome.map(drop)
        });
        for rank in ranks {
            rank.unwrap();
        }
    }
}
