//! In a chain a block is reduced while backward goes on to the blocks before it.

use std::cell::RefCell;
use std::time::Duration;

use burn_zero::ZeroBurn;
use zero_alloc::host::{HostDevice, Timeline};
use zero_optim::framework::Zero;
use zero_shard::ZeroStage;

use crate::common::{Batch, Model, RANKS, Result, config, on_ranks, rank_on};

const LAYERS: usize = 6;

/// The times of a step.
struct Times {
    /// The calls of the layers.
    layers: Vec<Duration>,
    /// Begin and end of backward.
    backward: [Duration; 2],
    /// When the host enqueued each reduction.
    reductions: Vec<Duration>,
}

fn times(stage: ZeroStage) -> Vec<Times> {
    let ranks = on_ranks(RANKS, |comm, place| -> Result<Times> {
        let timeline = Timeline::default();
        let device = HostDevice::new().with_timeline(timeline.clone());
        let builder = Zero::builder(rank_on(comm, &device)?).stage(stage);
        let chain = Model::new(LAYERS).into_blocks();
        let mut run = ZeroBurn::chain(chain, builder.adamw(config()))?;

        let batch = Batch::of_rank(0, place);
        let layers = RefCell::new(Vec::new());
        let last = RefCell::new(Vec::new());
        let mut step = run.begin()?;
        step.backward_chain(
            |input| input.forward(batch.input()),
            |layer, hidden| {
                layers.borrow_mut().push(timeline.now());
                layer.forward(hidden, None, None)
            },
            |head, hidden| {
                last.borrow_mut().push(timeline.now());
                batch.mse(head.forward(hidden))
            },
        )?;
        let backward = [last.borrow()[0], timeline.now()];
        step.end()?;

        let spans = timeline.spans().into_iter();
        let reductions = spans.filter(|span| span.label == "reduce_scatter");
        Ok(Times {
            layers: layers.into_inner(),
            backward,
            reductions: reductions.map(|span| span.enqueued).collect(),
        })
    });
    ranks.into_iter().map(Result::unwrap).collect()
}

#[test]
fn blocks_are_reduced_during_backward() {
    for times in times(ZeroStage::Two) {
        let [begin, end] = times.backward;
        let part = |at: &Duration| (*at - begin).as_secs_f64() / (end - begin).as_secs_f64();
        let parts: Vec<f64> = times.reductions.iter().map(part).collect();
        println!("stage 2: reductions begin at these parts of backward: {parts:.2?}");
        assert_eq!(parts.len(), LAYERS + 2, "a reduction for each block");
        assert!(times.reductions.iter().all(|at| *at < end));
    }
}

/// At stage 3 the calls of backward show the order.
#[test]
fn block_is_reduced_before_the_next_runs() {
    for times in times(ZeroStage::Three) {
        let again = &times.layers[LAYERS..];
        assert_eq!((again.len(), times.reductions.len()), (LAYERS, LAYERS + 2));
        for (reduction, call) in times.reductions.iter().zip(again) {
            assert!(reduction < call, "{reduction:?}, {call:?}");
        }
    }
}
