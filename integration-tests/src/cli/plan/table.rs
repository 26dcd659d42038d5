//! The report as text.

use std::fmt::Write;

use super::report::{Report, Stage};
use super::size::{show_bytes, with_commas};

const NOTES: [&str; 3] = [
    "Memory is for one GPU, 1 GB being 10^9 bytes; sent is what one GPU sends in a step, at most. Buckets are those",
    "of communication and the flat gradient of a unit. Activations are an estimate. Leave about 1 GB for the CUDA",
    "context and its libraries.",
];

/// The whole text, ending with a line break.
pub(super) fn text(report: &Report) -> String {
    let mut text = String::new();
    let mut line = |l: String| {
        text.push_str(l.trim_end());
        text.push('\n');
    };
    heading(report, &mut line);
    line(String::new());
    stages(report, &mut line);
    if !report.topologies.is_empty() {
        line(String::new());
        line("Stage 3 over several nodes:".to_owned());
        let head = ["", "states", "sent", "leaves a node"];
        let rows = report.topologies.iter().map(|t| {
            vec![
                t.name.to_owned(),
                show_bytes(t.states_bytes),
                show_bytes(t.sent_bytes),
                show_bytes(t.node_egress_bytes),
            ]
        });
        grid(&head, rows.collect(), &mut line);
    }
    line(String::new());
    for note in NOTES {
        line(note.to_owned());
    }
    if !report.advice.is_empty() {
        line(String::new());
        report.advice.iter().for_each(|sentence| line(sentence.clone()));
    }
    text
}

fn heading(report: &Report, line: &mut impl FnMut(String)) {
    let (model, plural) = (&report.model, |n: u64| if n == 1 { "" } else { "s" });
    let assumed = if model.assumed_shape { ", assumed" } else { "" };
    line(format!(
        "{}: {} parameters in {} units ({} layers of width {}{assumed})",
        model.name,
        with_commas(model.params),
        model.units,
        model.layers,
        model.hidden
    ));
    let mut run = format!(
        "{} GPU{} on {} node{}, {}, micro-batch {} x {} tokens",
        report.gpus,
        plural(report.gpus),
        report.nodes,
        plural(report.nodes),
        report.dtype,
        report.micro_batch,
        report.seq_len
    );
    if report.grad_accum > 1 {
        // Writing to a string does not fail.
        let _ = write!(run, ", {} micro-batches a step", report.grad_accum);
    }
    if report.activation_checkpointing {
        run.push_str(", activation checkpointing");
    }
    line(run);
}

fn stages(report: &Report, line: &mut impl FnMut(String)) {
    let any = |bytes: fn(&Stage) -> u64| report.stages.iter().any(|s| bytes(s) > 0);
    let (host, nvme) = (any(|s| s.host_bytes), any(|s| s.nvme_bytes));
    let mut head =
        vec!["stage", "params", "grads", "optimizer", "states", "gathered", "buckets", "activations", "total"];
    if host {
        head.push("host");
    }
    if nvme {
        head.push("nvme");
    }
    head.push("sent");
    if report.nodes > 1 {
        head.push("leaves a node");
    }
    let fits = report.gpu_memory_bytes.map(|memory| format!("fits {}", show_bytes(memory)));
    head.extend(fits.as_deref());
    let rows = report.stages.iter().map(|s| {
        let g = &s.gpu;
        let mark = if s.configured { " (config)" } else { "" };
        let mut row = vec![format!("{}{mark}", s.stage)];
        let buckets = g.buckets_bytes.saturating_add(g.scratch_bytes);
        let states = g.params_bytes + g.grads_bytes + g.optimizer_bytes;
        row.extend([g.params_bytes, g.grads_bytes, g.optimizer_bytes, states, g.gathered_bytes].map(show_bytes));
        row.extend([buckets, g.activations_bytes, g.total_bytes].map(show_bytes));
        if host {
            row.push(show_bytes(s.host_bytes));
        }
        if nvme {
            row.push(show_bytes(s.nvme_bytes));
        }
        row.push(show_bytes(s.sent.total_bytes));
        if report.nodes > 1 {
            row.push(show_bytes(s.sent.node_egress_bytes));
        }
        row.extend(s.fits.map(|fits| if fits { "yes" } else { "no" }.to_owned()));
        row
    });
    grid(&head, rows.collect(), line);
}

/// Columns as wide as their widest cell, the first to the left and the others to the right.
fn grid(head: &[&str], rows: Vec<Vec<String>>, line: &mut impl FnMut(String)) {
    let head: Vec<String> = head.iter().map(|h| (*h).to_owned()).collect();
    let cells = |i: usize| rows.iter().chain([&head]).filter_map(move |row| row.get(i));
    let widths: Vec<usize> = (0..head.len()).map(|i| cells(i).map(String::len).max().unwrap_or(0)).collect();
    for row in [&head].into_iter().chain(&rows) {
        let cells = row.iter().zip(&widths).enumerate();
        line(
            cells
                .map(|(i, (cell, &w))| if i == 0 { format!("{cell:w$}") } else { format!("  {cell:>w$}") })
                .collect(),
        );
    }
}
