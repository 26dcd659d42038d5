//! The overlap of communication and compute in the streams' timeline.

use zero_alloc::host::OpSpan;

use super::support::Case;

fn spans(case: &Case) -> Vec<OpSpan> {
    case.run_tiny().summaries.swap_remove(0).last_spans
}

#[test]
fn without_overlap_no_collective_runs_beside_compute() {
    for stage in 0..4 {
        let case = Case {
            stage,
            overlap: false,
            grad_accum: 2,
            ..Case::default()
        };
        let spans = spans(&case);
        let work: Vec<_> = spans
            .iter()
            .filter(|s| s.label != "wait" && !s.stream.ends_with("host"))
            .collect();
        let (comm, compute): (Vec<_>, Vec<_>) =
            work.into_iter().partition(|s| s.stream.ends_with("comm"));
        assert!(!comm.is_empty() && !compute.is_empty());
        for c in &comm {
            let beside = compute.iter().find(|s| s.start < c.end && c.start < s.end);
            assert!(beside.is_none(), "stage {stage}: {c:?} beside {beside:?}");
        }
    }
}
