//! The overlap of communication and compute in the streams' timeline.

use zero_alloc::host::OpSpan;

use super::support::Case;

fn spans(case: &Case) -> Vec<OpSpan> {
    case.run_tiny().summaries.swap_remove(0).last_spans
}

fn of<'a>(spans: &'a [OpSpan], label: &'a str) -> impl Iterator<Item = &'a OpSpan> {
    spans.iter().filter(move |s| s.label == label)
}

/// Reductions run during backward, and gathers before the pass that needs them. (In DeepSpeed #7804 a fix removed all
/// overlap unnoticed.)
#[test]
fn reductions_run_inside_backward_and_gathers_ahead() {
    let case = Case { micro_batch: 8, bucket_elems: 1 << 16, ..Case::default() };
    // On a busy machine a stream may be late in some runs.
    let seen = (0..100).any(|_| {
        let spans = spans(&case);
        let embedding = of(&spans, "backward embedding").next().expect("the last backward pass");
        let inside = of(&spans, "reduce_scatter").filter(|s| s.start < embedding.start).count();
        let first_block = of(&spans, "forward block").next().expect("the first block");
        let ahead = of(&spans, "all_gather").filter(|s| s.start < first_block.start).count();
        // The head's and each block's gradients are complete before the embedding's backward; the embedding and the
        // block are gathered before the block runs.
        inside >= 2 && ahead >= 2
    });
    assert!(seen, "no overlap in 100 runs");
}

/// At stages 1 and 2 the gather of updated parameters overlaps the next step's forward.
#[test]
fn gathers_of_an_update_run_inside_the_next_forward() {
    for stage in [1, 2] {
        let case = Case { stage, micro_batch: 8, ..Case::default() };
        let seen = (0..100).any(|_| {
            let spans = spans(&case);
            let head = of(&spans, "forward head").next().expect("the last forward pass");
            let embedding = of(&spans, "forward embedding").next().expect("the first");
            of(&spans, "all_gather").any(|s| s.end > embedding.start && s.start < head.start)
        });
        assert!(seen, "stage {stage}: no gather beside a forward in 100 runs");
    }
}

#[test]
fn without_overlap_no_collective_runs_beside_compute() {
    for stage in 0..4 {
        let case = Case { stage, overlap: false, grad_accum: 2, ..Case::default() };
        let spans = spans(&case);
        let work: Vec<_> = spans.iter().filter(|s| s.label != "wait").collect();
        let (comm, compute): (Vec<_>, Vec<_>) = work.into_iter().partition(|s| s.stream.ends_with("comm"));
        assert!(!comm.is_empty() && !compute.is_empty());
        for c in &comm {
            let beside = compute.iter().find(|s| s.start < c.end && c.start < s.end);
            assert!(beside.is_none(), "stage {stage}: {c:?} beside {beside:?}");
        }
    }
}
