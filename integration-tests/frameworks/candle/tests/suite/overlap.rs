//! Most of the communication of gradients lies inside backward, in modelled time: the order of
//! gradients and reductions is that of a real backward, the durations follow from counts of
//! operations and bytes.

use std::collections::HashMap;
use std::time::Duration;

use zero_alloc::host::OpSpan;
use zero_comm::overlap::Overlap;
use zero_comm::slow::Link;
use zero_shard::ZeroStage;

use crate::common::{Kind, RANKS, ROWS, SEQ, config, on_ranks};

/// Operations per second of the modelled processor.
const SPEED: f64 = 1e12;

fn span(stream: &str, start: Duration, end: Duration) -> OpSpan {
    OpSpan::new("work", stream, start, end)
}

#[test]
fn seven_tenths_are_inside_backward() {
    let ranks = on_ranks(
        Kind::ModernBert { layers: 6 },
        &config(ZeroStage::Two),
        |_| true,
        |mut rank| {
            let loss = rank.loss(0)?;
            rank.zero.backward_step(&loss)?;
            let sizes: HashMap<_, _> = rank
                .vars
                .trained()
                .into_iter()
                .map(|(name, t)| (name, t.elem_count()))
                .collect();
            Ok((rank.zero.backward_report().clone(), sizes))
        },
    );

    let (report, sizes) = ranks.into_iter().map(Result::unwrap).next().unwrap();
    // Two products of matrices per weight, with each token; the other operations are left out.
    let tokens = (ROWS / RANKS * SEQ) as f64;
    let compute = |name: &str| Duration::from_secs_f64(4.0 * tokens * sizes[name] as f64 / SPEED);
    let tied = "model.embeddings.tok_embeddings.weight";
    let bytes = |elems: u64| elems * 4 * (RANKS as u64 - 1) / RANKS as u64;

    // Backward starts with the head, which is tied: its gradient is complete at the end, with that
    // of the embedding.
    let mut now = compute(tied);
    let (mut spans, mut ends) = (vec![span("compute", Duration::ZERO, now)], vec![now]);
    for name in &report.arrivals {
        let start = now;
        now += if name == tied {
            Duration::ZERO
        } else {
            compute(name)
        };
        spans.push(span("compute", start, now));
        ends.push(now);
    }

    // A link on which all reductions take as long as backward.
    let total: u64 = report
        .launches
        .iter()
        .map(|launch| bytes(launch.elems))
        .sum();
    let link = Link {
        latency: Duration::ZERO,
        bytes_per_second: total as f64 / now.as_secs_f64(),
    };

    let mut free = Duration::ZERO;
    for launch in &report.launches {
        let start = free.max(ends[launch.after_params]);
        free = start + link.time(bytes(launch.elems));
        spans.push(span("comm", start, free));
    }

    let overlap = Overlap::of(&spans, &["comm"]);
    let inside = 1.0 - overlap.exposed.as_secs_f64() / overlap.comm.as_secs_f64();
    let at: Vec<_> = report
        .launches
        .iter()
        .map(|l| (&*l.unit, 100 * l.after_params / report.arrivals.len()))
        .collect();
    println!(
        "{:.1}% of communication inside backward; units at percents of the gradients: {at:?}",
        100.0 * inside
    );
    assert!(inside >= 0.7, "{inside}: {overlap:?}, {at:?}");
    // Not one reduction at the end: a unit a block, each before the next block's gradients.
    assert_eq!(report.arrivals.len(), sizes.len());
    assert!(
        report.launches.len() >= 8 && report.launches[0].after_params * 4 <= report.arrivals.len(),
        "{at:?}"
    );
}
