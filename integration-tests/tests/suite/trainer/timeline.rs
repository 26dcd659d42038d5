//! The overlap of communication and compute in the streams' timeline.

use zero_comm::overlap::is_collective;
use zero_shard::Sharding;
use zero_trainer::MeshSettings;

use super::support::{Case, groups_of};

#[test]
fn without_overlap_collectives_are_on_the_compute_stream() {
    let hybrid = groups_of(2, Sharding::Hybrid);
    let flat = MeshSettings::default();
    for (stage, ranks, mesh) in [
        (0, 2, flat),
        (1, 2, flat),
        (2, 2, flat),
        (3, 2, flat),
        (3, 4, hybrid),
    ] {
        let case = Case {
            stage,
            ranks,
            mesh,
            overlap: false,
            grad_accum: 2,
            ..Case::default()
        };
        let outcome = case.run_tiny();
        let spans = &outcome.summaries[0].last_spans;
        let collectives: Vec<_> = spans.iter().filter(|span| is_collective(span)).collect();
        assert!(!collectives.is_empty());
        for span in collectives {
            assert_eq!(&*span.stream, "rank 0 compute", "stage {stage}: {span:?}");
        }

        let metrics = outcome.steps[3].clone();
        let breakdown = metrics.breakdown.unwrap();
        let [exposed, comm] = [metrics.overlap.exposed_comm_ms, metrics.overlap.comm_ms];
        assert!(comm > 0.0 && exposed == comm, "stage {stage}: {metrics:?}");
        let parts = breakdown.parts;
        assert_eq!(parts.exposed_reduce_ms, breakdown.comm.reduce_ms);
        assert_eq!(parts.exposed_gather_ms, breakdown.comm.gather_ms);
        assert_eq!(parts.exposed_control_ms, breakdown.comm.control_ms);
        assert!(parts.exposed_reduce_ms > 0.0 && parts.exposed_control_ms > 0.0);
    }
}
