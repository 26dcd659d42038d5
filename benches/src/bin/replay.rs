//! `replay [--json] [--slack S] [--repeats N] [--synthetic] [--random N] TRACE...`: replays
//! allocation traces through zero-alloc's planner on a simulated device with pages of 2 MiB,
//! through the crate offset-allocator in the same run, and through a whole pool. `--synthetic` adds
//! synthetic training traces derived from models' shapes, `--random N` adds N with random shapes.
//! See benches/traces/README.md.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use benches::replay::planner::{OffsetAllocatorReplay, PlannerReplay, mean_ns, pairs_ns, quantile};
use benches::replay::pool;
use benches::replay::synth::{SHAPES, Shape};
use benches::replay::{Timing, Trace};
use serde_json::json;
use zero_alloc::planner::PlannerConfig;

const USAGE: &str = "usage: replay [--json] [--slack PART] [--repeats N] [--synthetic] [--random N] TRACE.csv.gz...";

struct Options {
    json: bool,
    slack: f64,
    repeats: usize,
    synthetic: bool,
    random: u64,
    traces: Vec<PathBuf>,
}

fn options() -> Result<Options, String> {
    let defaults = PlannerConfig::default();
    let mut options = Options {
        json: false,
        slack: defaults.slack,
        repeats: 15,
        synthetic: false,
        random: 0,
        traces: Vec::new(),
    };

    let mut args = std::env::args_os().skip(1);
    while let Some(arg) = args.next() {
        let mut number = |name: &str| {
            let value = args
                .next()
                .and_then(|v| v.to_str().and_then(|v| v.parse::<f64>().ok()));
            value
                .filter(|v| v.is_finite() && *v >= 0.0)
                .ok_or(format!("{name} requires a number\n{USAGE}"))
        };
        match arg.to_str() {
            Some("--json") => options.json = true,
            Some("--synthetic") => options.synthetic = true,
            Some("--random") => options.random = number("--random")? as u64,
            Some("--slack") => options.slack = number("--slack")?,
            Some("--repeats") => options.repeats = (number("--repeats")? as usize).max(1),
            Some("--help" | "-h") => return Err(USAGE.to_owned()),
            Some(flag) if flag.starts_with("--") => {
                return Err(format!("unknown flag {flag}\n{USAGE}"));
            }
            _ => options.traces.push(arg.into()),
        }
    }

    if options.traces.is_empty() && !options.synthetic && options.random == 0 {
        return Err(format!("no trace given\n{USAGE}"));
    }
    Ok(options)
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };

    let recorded = options.traces.iter().map(|path| match Trace::read(path) {
        Ok(trace) => replay(&trace, &options),
        Err(message) => Err(message),
    });

    let shapes = SHAPES
        .iter()
        .copied()
        .filter(|_| options.synthetic)
        .chain((0..options.random).map(Shape::random));

    for result in recorded.chain(shapes.map(|shape| replay(&shape.trace(), &options))) {
        if let Err(message) = result {
            eprintln!("{message}");
            return ExitCode::FAILURE;
        }
    }

    ExitCode::SUCCESS
}

fn replay(trace: &Trace, options: &Options) -> Result<(), String> {
    let config = PlannerConfig::default().slack(options.slack);
    // The fastest of alternating rounds: other work on the machine only adds time.
    let mut ours = Timing::MAX;
    let mut peer = Timing::MAX;
    let mut outcome = None;
    let mut peer_fits = true;

    for _ in 0..options.repeats {
        let mut replay = PlannerReplay::new(config, trace.slots);
        ours.ns_per_pair = ours.ns_per_pair.min(mean_ns(trace, &mut replay));
        outcome = Some(replay.outcome);
        let mut other = OffsetAllocatorReplay::new(trace.slots);
        peer.ns_per_pair = peer.ns_per_pair.min(mean_ns(trace, &mut other));
        peer_fits &= !other.refused;
        let pairs = pairs_ns(trace, &mut PlannerReplay::new(config, trace.slots));
        ours.p999_ns = ours.p999_ns.min(quantile(&pairs, 0.999));
        let pairs = pairs_ns(trace, &mut OffsetAllocatorReplay::new(trace.slots));
        peer.p999_ns = peer.p999_ns.min(quantile(&pairs, 0.999));
    }

    if !peer_fits {
        // Printed as null in JSON, else as NaN.
        peer = Timing {
            ns_per_pair: f64::NAN,
            p999_ns: f64::NAN,
        };
        eprintln!(
            "{}: exceeds the 1 TiB of offset-allocator, which is not timed",
            trace.name
        );
    }

    let outcome = outcome.unwrap_or_default();
    let pool = pool::replay(trace).map_err(|e| format!("{}: {e}", trace.name))?;
    let live_peak_bytes = trace.live_peak_bytes.max(1) as f64;
    let pool_ratio = pool.reserved_peak_bytes as f64 / live_peak_bytes;
    let ratio = outcome.reserved_peak_bytes as f64 / live_peak_bytes;

    let line = if options.json {
        json!({
            "trace": trace.name,
            "allocations": trace.allocations,
            "live_peak_bytes": trace.live_peak_bytes,
            "reserved_peak_bytes": outcome.reserved_peak_bytes,
            "ratio": ratio,
            "pages_mapped": outcome.pages_mapped,
            "stitches": outcome.stitches,
            "grows": outcome.grows,
            "pool_reserved_peak_bytes": pool.reserved_peak_bytes,
            "pool_ratio": pool_ratio,
            "pool_pages_mapped": pool.pages_mapped,
            "ns_per_pair": ours.ns_per_pair,
            "p999_ns": ours.p999_ns,
            "offset_allocator_ns_per_pair": peer.ns_per_pair,
            "offset_allocator_p999_ns": peer.p999_ns,
        })
        .to_string()
    } else {
        format!(
            "{:40} live peak {:>8.3} GB  reserved {:>8.3} GB  ratio {:.4}  {} blocks stitched  {} pages mapped  \
             {:.1} ns a pair, p99.9 {:.0} ns  (offset-allocator {:.1} ns, {:.0} ns)  \
             pool: ratio {:.4}, {} pages mapped",
            trace.name,
            trace.live_peak_bytes as f64 / 1e9,
            outcome.reserved_peak_bytes as f64 / 1e9,
            ratio,
            outcome.stitches,
            outcome.pages_mapped,
            ours.ns_per_pair,
            ours.p999_ns,
            peer.ns_per_pair,
            peer.p999_ns,
            pool_ratio,
            pool.pages_mapped,
        )
    };

    writeln!(std::io::stdout(), "{line}").map_err(|e| format!("standard output: {e}"))
}
