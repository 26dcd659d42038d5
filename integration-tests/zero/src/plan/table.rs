//! The report as text.

use indicatif::{HumanBytes, HumanCount};

use super::report::Report;
use super::simulate::calibrated;
use super::stage::Stage;

const NOTES: &str = "\
Memory is for one GPU; sent is an upper bound for one GPU and step. Buckets include the flat gradient of a unit.
Activations of a GPT-2 are exact, others an estimate. Leave about 1 GiB for the CUDA context and its libraries.
";

/// The whole text, ending with a line break.
pub(crate) fn text(report: &Report) -> String {
    let mut text = heading(report) + "\n" + &stages(report);
    if !report.topologies.is_empty() {
        let mut rows = vec![
            ["", "states", "sent", "sent between nodes"]
                .map(str::to_owned)
                .to_vec(),
        ];
        rows.extend(report.topologies.iter().map(|t| {
            let bytes = [t.states_bytes, t.sent_bytes, t.node_egress_bytes].map(show);
            [vec![t.name.to_owned()], bytes.to_vec()].concat()
        }));
        text += "\nStage 3 over several nodes:\n";
        text += &grid(&rows);
    }

    text += &offload(report);
    text += &simulated(report);
    text += "\n";
    text += NOTES;
    if !report.advice.is_empty() {
        text += "\n";
        text.extend(report.advice.iter().map(|sentence| format!("{sentence}\n")));
    }

    text
}

/// The simulated steps; empty without any.
fn simulated(report: &Report) -> String {
    let Some(on) = &report.simulated_on else {
        return String::new();
    };
    let stages = report.stages.iter();
    let stages: Vec<_> = stages
        .filter_map(|stage| Some((stage.stage, stage.fits, stage.simulated.as_ref()?)))
        .collect();
    if stages.is_empty() {
        return match report.model.assumed_shape {
            true => "\nNo step is simulated, because the shape of the model is assumed: pass --model or --layers\n",
            false => "\nNo step is simulated\n",
        }
        .to_owned();
    }
    let head = [
        "",
        "step ms",
        "likely",
        "tokens/s",
        "TFLOP/s a GPU",
        "MFU",
        "exposed ms",
        "bound by",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for (stage, fits, step) in &stages {
        let [low, high] = step.step_ms_range;
        let note = if *fits == Some(false) {
            " (does not fit)"
        } else {
            ""
        };
        rows.push(vec![
            format!("stage {stage}{note}"),
            format!("{:.1}", step.step_ms),
            format!("{low:.1} to {high:.1}"),
            format!("{:.0}", step.tokens_per_s),
            format!("{:.1}", step.tflops_gpu),
            format!("{:.1}%", 100.0 * step.mfu),
            format!("{:.1}", step.exposed_ms),
            step.bound.to_owned(),
        ]);
    }
    let calibrated = calibrated(on.calibrated_on.as_deref(), on.machine.cores.is_some());
    let mut text = format!("\nSimulated steps on {}, {calibrated}:\n", on.machine.name);
    text += &grid(&rows);
    for (stage, _, step) in &stages {
        if let (Some(days), Some(hours)) = (step.days, step.gpu_hours) {
            text += &format!("stage {stage}: {days:.1} days, {hours:.0} GPU hours\n");
        }
    }
    let fitting = stages.iter().filter(|(_, fits, _)| *fits != Some(false));
    let fastest = fitting.min_by(|a, b| a.2.step_ms.total_cmp(&b.2.step_ms));
    if let Some((stage, _, step)) = fastest.filter(|(.., step)| !step.gains.is_empty()) {
        let gains = step.gains.iter();
        let gains = gains.map(|gain| format!("{} {:.0}%", gain.what, 100.0 * gain.part));
        let gains = gains.collect::<Vec<_>>().join(", ");
        text += &format!("Of a step of stage {stage}, twice the rate of one would save: {gains}\n");
    }
    if stages.iter().any(|(.., step)| step.extrapolated) {
        text += "Extrapolated: the formulas were compared with runs of up to 128 GPUs.\n";
    }
    text
}

fn heading(report: &Report) -> String {
    let (model, plural) = (&report.model, |n: u64| if n == 1 { "" } else { "s" });
    let assumed = if model.assumed_shape { ", assumed" } else { "" };
    let (params, units, layers, hidden) = (
        HumanCount(model.params),
        model.units,
        model.layers,
        model.hidden,
    );
    let (gpus, nodes) = (report.gpus, report.nodes);

    let mut text = format!(
        "{}: {params} parameters in {units} units ({layers} layers of width {hidden}{assumed})\n\
         {gpus} GPU{} on {nodes} node{}, {}, micro-batch {} x {} tokens",
        model.name,
        plural(gpus),
        plural(nodes),
        report.dtype,
        report.micro_batch,
        HumanCount(report.seq_len)
    );

    if report.grad_accum > 1 {
        text += &format!(", {} micro-batches per step", report.grad_accum);
    }

    if report.ulysses > 1 {
        text += &format!(", {} GPUs share each sequence", report.ulysses);
    }
    if report.tensor_parallel > 1 {
        let cut = report.tensor_parallel;
        text += &format!(", each parameter over {cut} GPUs (tensor parallelism)");
    }
    if report.partition_activations {
        text += ", partitioned activations";
    }
    if report.sequence_parallel {
        text += ", sequence parallelism";
    }
    if report.activation_checkpointing {
        text += ", activation checkpointing";
    }
    text += "\n";
    // A round number of decimal gigabytes, as in the name of a card.
    if let Some(memory) = report
        .gpu_memory_bytes
        .filter(|bytes| bytes.is_multiple_of(1_000_000_000))
    {
        let decimal = memory / 1_000_000_000;
        let binary = HumanBytes(memory);
        text += &format!(
            "{decimal}GB is read as {} bytes ({binary}); a card sold as {decimal}GB has about {decimal} GiB: \
             --gpu-memory {decimal}GiB\n",
            HumanCount(memory)
        );
    }

    text
}

fn stages(report: &Report) -> String {
    /// A column: its title, whether it is shown, and the bytes of a stage.
    type Column = (&'static str, bool, fn(&Stage) -> u64);
    let any = |bytes: fn(&Stage) -> u64| report.stages.iter().any(|s| bytes(s) > 0);
    let offloads = report.stages.iter().any(|s| !s.transfers.is_empty());
    let columns: [Column; 14] = [
        ("params", true, |s| s.gpu.params_bytes),
        ("grads", true, |s| s.gpu.grads_bytes),
        ("optimizer", true, |s| s.gpu.optimizer_bytes),
        ("states", true, |s| {
            s.gpu.params_bytes + s.gpu.grads_bytes + s.gpu.optimizer_bytes
        }),
        ("gathered", true, |s| s.gpu.gathered_bytes),
        ("buckets", true, |s| {
            s.gpu.buckets_bytes.saturating_add(s.gpu.scratch_bytes)
        }),
        ("activations", true, |s| s.gpu.activations_bytes),
        ("transfers", offloads, |s| s.gpu.staging_bytes),
        ("total", true, |s| s.gpu.total_bytes),
        ("host", any(|s| s.host_bytes), |s| s.host_bytes),
        ("nvme", any(|s| s.nvme_bytes), |s| s.nvme_bytes),
        ("on cores", offloads, |s| {
            s.process_bytes.unwrap_or(u64::MAX)
        }),
        ("sent", true, |s| s.sent.total_bytes),
        ("sent between nodes", report.nodes > 1, |s| {
            s.sent.node_egress_bytes
        }),
    ];

    let shown = || columns.iter().filter(|(_, is_shown, _)| *is_shown);
    let mut head = vec!["stage".to_owned()];
    head.extend(shown().map(|(title, ..)| (*title).to_owned()));
    head.extend(
        report
            .gpu_memory_bytes
            .map(|memory| format!("fits {}", show(memory))),
    );

    let rows = report.stages.iter().map(|s| {
        let mut row = vec![format!(
            "{}{}",
            s.stage,
            if s.configured { " (config)" } else { "" }
        )];
        row.extend(shown().map(|(.., bytes)| show(bytes(s))));
        let how = if s.recompute_gelu && s.fits == Some(true) {
            ", --recompute-gelu"
        } else {
            ""
        };
        row.extend(
            s.fits
                .map(|fits| format!("{}{how}", if fits { "yes" } else { "no" })),
        );
        row
    });

    grid(&[head].into_iter().chain(rows).collect::<Vec<_>>())
}

/// The transfers of offload; empty without it.
fn offload(report: &Report) -> String {
    let head = [
        "stage",
        "link",
        "read",
        "written",
        "bytes a parameter",
        "FLOP a byte",
        "50% at",
        "hidden at",
    ];
    let rows = report
        .stages
        .iter()
        .flat_map(|s| s.transfers.iter().map(|t| (s.stage, t)));
    let rows = rows.map(|(stage, t)| {
        let a_param = format!(
            "{:.1} + {:.1}",
            t.read_bytes_per_param, t.written_bytes_per_param
        );
        let rate = |bytes_per_s: f64| format!("{:.3} GB/s", bytes_per_s / 1e9);
        vec![
            stage.to_string(),
            t.tier.to_owned(),
            show(t.read_bytes),
            show(t.written_bytes),
            a_param,
            HumanCount(t.flops_per_byte as u64).to_string(),
            rate(t.half_efficiency_bytes_per_s),
            rate(t.hiding_bytes_per_s),
        ]
    });
    let rows: Vec<Vec<String>> = [head.map(str::to_owned).to_vec()]
        .into_iter()
        .chain(rows)
        .collect();
    if rows.len() == 1 {
        return String::new();
    }
    let mut text = format!(
        "\nTransfers of one GPU and step at {} TFLOP/s (assumed: --peak-tflops), link gpu: host memory and GPU:\n{}",
        report.peak_tflops,
        grid(&rows)
    );
    text += "\
Without overlap the efficiency is ait bw / (ait bw + peak), with ait in FLOP a byte (ZeRO-Infinity); it is 50% at the
first bandwidth. At the second, updates are hidden by one forward and all transfers by the step.
On cores: one process with all ranks on this machine's cores, saving checkpoints.
";
    let wear: Vec<_> = report
        .stages
        .iter()
        .filter_map(|s| Some((s.stage, s.wear?)))
        .collect();
    for same in wear.chunk_by(|a, b| a.1.written_bytes_per_day == b.1.written_bytes_per_day) {
        let ((first, wear), (last, _)) = (same[0], same[same.len() - 1]);
        let stages = if first == last {
            format!("Stage {first}")
        } else {
            format!("Each of stages {first} to {last}")
        };
        let by = if wear.waits_for_drive {
            "the drive"
        } else {
            "compute"
        };
        text += &format!(
            "{stages} writes at most {:.1} TB a day to the drive of a node: {:.1} days of a life of {} TB (assumed: \
             --drive-tbw).\nThat is with steps of {:.3} s, the time of {by}, and a drive of {} GB/s (assumed: \
             --drive-gb-per-s).\n",
            wear.written_bytes_per_day / 1e12,
            wear.rated_days,
            report.drive_tbw,
            wear.step_s,
            report.drive_gb_per_s
        );
    }
    text
}

fn show(bytes: u64) -> String {
    HumanBytes(bytes).to_string()
}

/// Aligns the first column to the left and the others to the right.
fn grid(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |i: usize| {
        rows.iter()
            .filter_map(|row| row.get(i))
            .map(String::len)
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut cells = row.iter().zip(&widths);
        let mut line = cells
            .next()
            .map_or(String::new(), |(cell, &w)| format!("{cell:w$}"));
        line.extend(cells.map(|(cell, &w)| format!("  {cell:>w$}")));
        text += line.trim_end();
        text += "\n";
    }
    text
}
