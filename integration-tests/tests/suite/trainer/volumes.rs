//! Bytes held and sent equal the formulas exactly, padding included.

use zero::workload::ModelWorkload;
use zero_alloc::device::DType;
use zero_shard::{Layout, ZeroStage};
use zero_trainer::{CommBytes, RankBytes, RankSummary};

use super::support::{Case, Outcome};
use super::toy::Toy;

/// Compares the bytes that the ranks of `case` hold and send with zero-shard's formulas.
pub(super) fn held_and_sent_are_the_formulas(case: &Case, outcome: &Outcome) {
    let settings = &outcome.settings;
    let layouts = settings.mesh.layouts(&outcome.layout).unwrap();
    let held = layouts
        .state_bytes(settings.stage, &settings.widths())
        .unwrap();
    let sent = settings.axis_traffic(&layouts).unwrap().rank().unwrap();
    assert_eq!(outcome.summaries.len(), case.ranks);

    for summary in &outcome.summaries {
        let last = summary.last.as_ref().unwrap();
        let CommBytes {
            reduce_scatter,
            all_gather,
            all_reduce,
            ..
        } = last.comm_bytes;
        let memory = last.memory;
        for (what, got, expected) in [
            ("parameters", memory.params_bytes, held.params_bytes),
            ("gradients", memory.grads_bytes, held.grads_bytes),
            (
                "optimizer state",
                memory.optimizer_bytes,
                held.optimizer_bytes,
            ),
            ("reduce-scatter", reduce_scatter, sent.reduce_scatter_bytes),
            ("all-reduce", all_reduce, sent.all_reduce_bytes),
        ] {
            assert_eq!(got, expected, "{case:?}: {what}");
        }
        if settings.stage == ZeroStage::Three {
            assert!(
                all_gather <= sent.all_gather_bytes,
                "{case:?}: all-gather {all_gather} is too much"
            );
        } else {
            assert_eq!(all_gather, sent.all_gather_bytes, "{case:?}: all-gather");
        }
        memory_stays(summary, &format!("{case:?}"));
    }
}

/// Asserts that the pool took no memory after the second step.
pub(super) fn memory_stays(summary: &RankSummary, what: &str) {
    let [after_two, in_all] = summary.backing_allocations;
    assert_eq!(
        after_two, in_all,
        "{what}: the pool took memory after the second step"
    );
}

/// The bytes of a rank that are known before the run.
pub(super) fn planned(workload: &ModelWorkload, outcome: &Outcome) -> RankBytes {
    planned_on(workload, outcome, &outcome.layout)
}

/// As [`planned`], over the data ranks of `layout`.
pub(super) fn planned_on(
    workload: &ModelWorkload,
    outcome: &Outcome,
    layout: &Layout,
) -> RankBytes {
    let activations = workload.config.activations_bytes(&workload.options);
    let passes = workload.config.passes();
    RankBytes::new(
        &outcome.settings,
        layout,
        &passes,
        activations,
        true,
        |param| workload.config.tensor_cut(param),
    )
    .unwrap()
}

/// The peak of rank 0 over all steps.
pub(super) fn peak_bytes(outcome: &Outcome) -> u64 {
    let steps = outcome.steps.iter();
    steps.map(|step| step.memory.peak_bytes).max().unwrap()
}

#[test]
fn at_every_stage_and_world_size() {
    // Every dtype and accumulation at two and three ranks, other numbers of ranks with one of them.
    let formats = [
        (DType::Bf16, 2, false),
        (DType::F32, 1, false),
        (DType::Bf16, 1, false),
        (DType::Bf16, 2, true),
    ];
    for ranks in [1, 2, 3, 4, 8, 16] {
        let formats = match ranks {
            2 | 3 => &formats[..],
            _ => &formats[..1],
        };
        for stage in 0..4 {
            for &(dtype, grad_accum, each) in formats {
                let case = Case {
                    ranks,
                    stage,
                    dtype,
                    grad_accum,
                    reduce_every_micro_batch: each,
                    steps: 3,
                    ..Case::default()
                };
                held_and_sent_are_the_formulas(&case, &case.run_tiny());
            }
        }
    }
}

/// 2Ψ elements a step at stages 0 and 1, however many micro-batches it has.
#[test]
fn local_sums_are_reduced_once() {
    for stage in [0, 1] {
        for (grad_accum, each, times) in [(1, false, 1), (4, false, 1), (4, true, 4)] {
            let case = Case {
                stage,
                grad_accum,
                reduce_every_micro_batch: each,
                steps: 1,
                ..Case::default()
            };
            let outcome = case.run_tiny();
            let CommBytes {
                reduce_scatter,
                all_gather,
                all_reduce,
                ..
            } = outcome.steps[0].comm_bytes;
            // Two ranks: each sends half of what it reduces, and half of what it gathers.
            let half = outcome.layout.padded_elems() * 4 / 2;
            let expected = if stage == 0 {
                (0, 0, 2 * times * half)
            } else {
                (times * half, half, 0)
            };
            assert_eq!(
                (reduce_scatter, all_gather, all_reduce),
                expected,
                "{case:?}"
            );
        }
    }
}

#[test]
fn peak_is_known_before_the_run() {
    for stage in 0..4 {
        for (dtype, grad_accum, overlap) in [
            (DType::F32, 1, true),
            (DType::Bf16, 2, true),
            (DType::F32, 1, false),
        ] {
            let case = Case {
                stage,
                dtype,
                grad_accum,
                overlap,
                steps: 2,
                ..Case::default()
            };
            let workload = case.tiny();
            let outcome = case.run(&workload);
            let planned = planned(&workload, &outcome);
            let peak = peak_bytes(&outcome);
            // Losses, flags and statistics are a few KiB, as is the padding that is not saved.
            assert!(
                planned.total().abs_diff(peak) < 8 << 10,
                "{case:?}: {peak} bytes, planned {planned:?}"
            );
        }
    }
}

#[test]
fn padding_is_below_an_alignment_unit_a_shard() {
    for ranks in [1, 3, 16] {
        let case = Case {
            ranks,
            steps: 1,
            ..Case::default()
        };
        let layout = case.run_tiny().layout;
        let most = layout.units().len() as u64 * (layout.align_elems() * ranks as u64);
        assert!(layout.padded_elems() - layout.numel_elems() < most);
    }
}

#[test]
fn stage_three_gathers_the_head_once_and_the_rest_twice() {
    let case = Case::default().with(|case| case.ranks = 4);
    let outcome = case.run_tiny();
    let units = outcome.layout.units();
    // The embedding is gathered twice, too: for its forward and for the tied head. Its backward
    // reads no parameters.
    let head = units.last().unwrap().shard_elems;
    let elems: u64 = units.iter().map(|u| 2 * u.shard_elems).sum::<u64>() - head;
    assert_eq!(outcome.steps[0].comm_bytes.all_gather, elems * 4 * 3);
}

#[test]
fn buckets_are_constant_as_the_model_grows() {
    for stage in 0..3 {
        let bytes = |units: &[Vec<u64>]| {
            let outcome = Case::default()
                .with(|case| case.stage = stage)
                .run(&Toy::new(units, false));
            outcome.steps.last().unwrap().memory.buckets_bytes
        };
        let small = bytes(&[vec![100], vec![50]]);
        assert_eq!(small, 2 * 4 * (1 << 12), "two buckets");
        assert_eq!(small, bytes(&[vec![30_000], vec![20_000], vec![10_000]]));
    }
}

#[test]
fn stage_three_holds_two_units_beside_its_buckets() {
    let units = vec![vec![8192u64]; 6];
    let outcome = Case::default()
        .with(|case| case.bucket_elems = 64)
        .run(&Toy::new(&units, false));
    let most = outcome.steps.last().unwrap().memory.buckets_bytes;
    assert_eq!(
        most,
        2 * 4 * 64 + 2 * 4 * 8192,
        "two buckets, the unit in use and the next"
    );
}
