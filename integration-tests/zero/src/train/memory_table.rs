//! The table of memory after a run: what the ranks held, beside the formulas of ZeRO.

use zero_shard::{StateBytes, ZeroStage};
use zero_trainer::{Home, MemoryBytes, MemoryPoint, MemoryTrace, NvmeBytes, RankSummary};

use super::setup::RunSetup;
use crate::memory::limits::resident_peak_bytes;
use crate::output::{bytes, counted};

/// Selects one figure of a rank's memory.
type Field = fn(&MemoryBytes) -> u64;

/// A row: its name, its figure, and the formula's, if there is one.
type Row = (&'static str, Field, Option<u64>);

/// The least width of a column.
const WIDTH: usize = 12;

/// Writes the table; nothing if 64 bits cannot count the formula.
pub(crate) fn write(out: &mut String, setup: &RunSetup, ranks: &[RankSummary]) {
    let stage = setup.settings.stage;
    let Some(whole) = formula(setup, stage) else {
        return;
    };
    let stage0 = formula(setup, ZeroStage::Zero);
    let formula = in_memory(setup, whole);
    let mut held = Vec::new();
    for rank in ranks {
        held.extend(rank.last.as_ref().map(|last| last.memory));
    }
    // The trace has no offloaded state.
    let trace = ranks
        .first()
        .and_then(|rank| rank.memory.as_ref())
        .filter(|_| !setup.settings.offload.updates_on_host());

    let rows = rows(&formula);
    let width = write_rows(out, setup, &rows, &held, trace.and_then(MemoryTrace::peak));
    if let Some(moment) = trace.and_then(MemoryTrace::peak_moment) {
        *out += &format!("  (the peak is rank 0's in its last step, {moment})\n");
    }
    let files = ranks
        .first()
        .and_then(|rank| rank.last.as_ref())
        .and_then(|last| last.nvme);
    write_elsewhere(out, setup, &held, files, width);

    if let (Some(stage0), true) = (stage0, stage.shards_optimizer()) {
        let files = files.map_or(0, |files| files.file_bytes);
        let ours = (formula.total_bytes() + files).max(1);
        let stage0 = stage0.total_bytes();
        *out += &format!(
            "  (stage 0 would hold {}: {:.2} x)\n",
            bytes(stage0),
            stage0 as f64 / ours as f64
        );
    }
}

/// The model state of a rank at `stage`.
fn formula(setup: &RunSetup, stage: ZeroStage) -> Option<StateBytes> {
    let settings = &setup.settings;
    let groups = settings.resolve_groups(&setup.layout).ok()?;
    let layouts = settings.mesh.layouts(&setup.layout).ok()?;
    groups.grid_bytes(&layouts, stage, &settings.widths())
}

/// The part of the state that is in memory.
fn in_memory(setup: &RunSetup, state: StateBytes) -> StateBytes {
    let offload = &setup.settings.offload;
    let kept = |home: &Home, bytes: u64| match home {
        Home::Nvme(_) => 0,
        _ => bytes,
    };
    StateBytes {
        params_bytes: kept(&offload.params, state.params_bytes),
        grads_bytes: kept(&offload.params, state.grads_bytes),
        optimizer_bytes: kept(&offload.optimizer, state.optimizer_bytes),
    }
}

fn rows(formula: &StateBytes) -> [Row; 10] {
    [
        ("parameters", |m| m.params_bytes, Some(formula.params_bytes)),
        ("gradients", |m| m.grads_bytes, Some(formula.grads_bytes)),
        (
            "optimizer state",
            |m| m.optimizer_bytes,
            Some(formula.optimizer_bytes),
        ),
        ("model state", state_bytes, Some(formula.total_bytes())),
        ("buckets, gathered units", |m| m.buckets_bytes, None),
        ("activations", |m| m.activations_bytes, None),
        ("workspace", |m| m.workspace_bytes, None),
        ("copy for a checkpoint", |m| m.staging_bytes, None),
        ("total", all_bytes, None),
        ("peak at one moment", |m| m.peak_bytes, None),
    ]
}

fn state_bytes(m: &MemoryBytes) -> u64 {
    m.params_bytes + m.grads_bytes + m.optimizer_bytes
}

fn all_bytes(m: &MemoryBytes) -> u64 {
    let others = m.buckets_bytes + m.activations_bytes + m.workspace_bytes + m.staging_bytes;
    state_bytes(m) + others
}

/// Writes heading and rows; returns the width of the first column.
fn write_rows(
    out: &mut String,
    setup: &RunSetup,
    rows: &[Row],
    held: &[MemoryBytes],
    peak: Option<&MemoryPoint>,
) -> usize {
    let at_peak = peak.map(|peak| memory_at(setup, peak, held));
    let who = if held.len() == setup.ranks {
        format!("each of {}", counted(setup.ranks as u64, "rank"))
    } else {
        "rank 0".to_owned()
    };

    let held_by = format!("held by {who}");
    let heading = match at_peak {
        Some(_) => format!(" {:>WIDTH$}", "at the peak"),
        None => String::new(),
    };

    // The ranks may differ; then the columns are wider.
    let mut width = WIDTH;
    for (_, field, _) in rows {
        width = width.max(range(held, *field).len());
    }
    *out += &format!(
        "\n{held_by:<26} {:>width$} {:>WIDTH$}{heading} (padding included)\n",
        "measured", "formula"
    );

    for (name, field, formula) in rows {
        let at_peak = match &at_peak {
            Some(peak) => format!(" {:>WIDTH$}", bytes(field(peak))),
            None => String::new(),
        };
        let formula = formula.map_or("-".to_owned(), bytes);
        let range = range(held, *field);
        *out += &format!("  {name:<24} {range:>width$} {formula:>WIDTH$}{at_peak}\n");
    }

    width
}

/// A figure of all ranks: `1 MiB`, or `1 MiB to 2 MiB`.
fn range(held: &[MemoryBytes], field: Field) -> String {
    let least = bytes(held.iter().map(field).min().unwrap_or(0));
    let most = bytes(held.iter().map(field).max().unwrap_or(0));
    if least == most {
        most
    } else {
        format!("{least} to {most}")
    }
}

/// The memory of rank 0 at the peak.
fn memory_at(setup: &RunSetup, peak: &MemoryPoint, held: &[MemoryBytes]) -> MemoryBytes {
    let [
        params_bytes,
        grads_bytes,
        optimizer_bytes,
        buckets_bytes,
        activations_bytes,
        workspace_bytes,
    ] = peak.bytes;

    let staging_bytes = held.first().map_or(0, |m| m.staging_bytes);
    let in_peak = if setup.device.is_none() {
        staging_bytes
    } else {
        0
    };

    MemoryBytes {
        params_bytes,
        grads_bytes,
        optimizer_bytes,
        buckets_bytes,
        activations_bytes,
        workspace_bytes,
        staging_bytes,
        peak_bytes: peak.total_bytes() + in_peak,
        reserved_bytes: 0,
        host_bytes: 0,
    }
}

/// Writes what is not in the memory of the device.
fn write_elsewhere(
    out: &mut String,
    setup: &RunSetup,
    held: &[MemoryBytes],
    files: Option<NvmeBytes>,
    width: usize,
) {
    let on_gpu = setup.device.is_some();
    if let (Some(process), false) = (resident_peak_bytes(), on_gpu) {
        *out += &format!("  (this process held at most {})\n", bytes(process));
    }
    let host_bytes = held.first().map_or(0, |m| m.host_bytes);
    if on_gpu && host_bytes > 0 {
        let host = bytes(host_bytes);
        *out += &format!("  in host memory, at most  {host:>width$}\n");
    }
    if let Some(files) = files {
        *out += &format!(
            "  on NVMe                  {:>width$}   (the last step read {} and wrote {})\n",
            bytes(files.file_bytes),
            bytes(files.read_bytes),
            bytes(files.written_bytes)
        );
    }
}
