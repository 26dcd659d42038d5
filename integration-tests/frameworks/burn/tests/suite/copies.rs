//! No parameter and no gradient is copied between burn and the run.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_zero::{Chain, ZeroBurn, unit_of_block};
use zero_shard::ZeroStage;

use crate::common::{RANKS, builder, on_ranks};

const WIDTH: usize = 256;

/// Counts the allocations of each thread that could hold a matrix.
struct Counting;

thread_local! {
    static LARGE: Cell<usize> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: `System` does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= WIDTH * WIDTH * size_of::<f32>() {
            let _ = LARGE.try_with(|large| large.set(large.get() + 1));
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Large allocations of this thread in `work`.
fn large(work: impl FnOnce()) -> usize {
    let before = LARGE.get();
    work();
    LARGE.get() - before
}

/// Wide layers: their matrices are much larger than the rest.
fn wide() -> Vec<Linear> {
    let device = Device::flex().autodiff();
    let linear = LinearConfig::new(WIDTH, WIDTH);
    let initializer = burn::nn::Initializer::Constant { value: 1e-3 };
    let linear = linear.with_initializer(initializer);
    (0..3).map(|_| linear.init(&device)).collect()
}

fn input() -> Tensor<2> {
    Tensor::ones([1, WIDTH], &Device::flex())
}

fn loss(layers: &[Linear]) -> Tensor<1> {
    let forward = |hidden, layer: &Linear| layer.forward(hidden);
    layers.iter().fold(input(), forward).mean()
}

#[test]
fn step_allocates_as_burn_alone() {
    let layers = wide().train();
    let alone = large(|| drop(loss(&layers).backward()));
    assert!(alone >= 3, "the gradients of {alone} layers");

    for stage in ZeroStage::ALL {
        let ranks = on_ranks(RANKS, |comm, _place| {
            if stage < ZeroStage::Three {
                let mut run = ZeroBurn::new(wide(), builder(comm, stage)?, unit_of_block)?;
                run.step(|layers| loss(layers))?;
                return Ok(large(|| drop(run.step(|layers| loss(layers)).unwrap())));
            }

            let mut layers = wide().into_iter();
            let mut next = || layers.next().unwrap();
            let chain = Chain {
                first: next(),
                layers: vec![next()],
                last: next(),
            };
            let mut run = ZeroBurn::chain(chain, builder(comm, stage)?)?;
            let mut step = || {
                let outcome = run.step_chain(
                    |first| first.forward(input()),
                    |layer, hidden| layer.forward(hidden),
                    |last, hidden| last.forward(hidden).mean(),
                );
                drop(outcome.unwrap());
            };
            step();
            Ok(large(step))
        });
        for allocated in ranks {
            assert_eq!(allocated.unwrap(), alone, "{stage:?}");
        }
    }
}
