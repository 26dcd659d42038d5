//! `zero measure`: the figures of the machine at hand, in a file that `--hardware` reads.

mod disk;
mod gpu;
mod host;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use parking_lot::Mutex;
use zero_ckpt::files::{self, SMALL_FILE_BYTES};
use zero_simulator::Machine;

use crate::error::CliError;
use crate::output::{bytes, counted, print_note, print_text};
use crate::settings::args::DeviceChoice;

/// Measure this machine for zero plan --simulate and zero tune: products, memory, links, disk
#[derive(Args, Clone, Debug, Default)]
pub struct MeasureArgs {
    /// The file to write, .toml or .json; an earlier machine file is replaced
    #[arg(long, value_name = "FILE", default_value = "machine.toml")]
    pub out: PathBuf,
    /// The processors that train
    #[arg(long, value_enum, default_value_t)]
    pub device: DeviceChoice,
    /// The folder for the scratch file of the disk's measurement: that of --offload nvme:DIR
    /// [default: the folder for temporary files]
    #[arg(long, value_name = "DIR")]
    pub scratch: Option<PathBuf>,
    /// Gigabytes per second between machines, per GPU or per host and direction, which one machine
    /// cannot measure [default: as between its own GPUs or ranks]
    #[arg(long, value_name = "X", value_parser = crate::flags::parse_positive)]
    pub network_gb_per_s: Option<f64>,
}

/// The time of one measurement.
const TIME: Duration = Duration::from_secs(1);
/// Fewer runs have no median.
const LEAST_RUNS: usize = 5;

/// Runs `zero measure`.
///
/// # Errors
/// The file exists and is no machine file, or something cannot be measured.
pub fn run(args: &MeasureArgs) -> Result<(), CliError> {
    check_out(&args.out)?;
    let machine = measure(args)?;
    write(&args.out, &machine)?;
    print_text(text(&machine, &args.out))
}

fn measure(args: &MeasureArgs) -> Result<Machine, CliError> {
    let scratch = args.scratch.clone().unwrap_or_else(std::env::temp_dir);
    let mut machine = match gpu::is_used(args.device)? {
        true => gpu::measure()?,
        false => host::measure()?,
    };
    progress("disk");
    machine.disk_bytes_per_s = disk::read_bytes_per_s(&scratch)?;
    if let Some(network) = args.network_gb_per_s {
        machine.network_bytes_per_s = network * 1e9;
    }
    Ok(machine)
}

/// This machine, for `--hardware this:GPUSxNODES`. Measured once a process.
///
/// # Errors
/// Something cannot be measured.
pub(crate) fn this_machine() -> Result<Machine, CliError> {
    static MACHINE: Mutex<Option<Machine>> = Mutex::new(None);
    let mut kept = MACHINE.lock();
    match &*kept {
        Some(machine) => Ok(machine.clone()),
        None => Ok(kept.insert(measure(&MeasureArgs::default())?).clone()),
    }
}

/// The processors that train, and how many: those of the host, or its GPUs.
///
/// # Errors
/// The driver failed.
pub(crate) fn processors(on_host: bool) -> Result<String, CliError> {
    match on_host {
        true => Ok(format!(
            "{}, {}",
            host::name(),
            counted(host::cores() as u64, "core")
        )),
        false => gpu::names(),
    }
}

/// This machine's GPUs, or its host if `on_host`, as the file `path` has them. Without the file, or
/// if it is of the other kind, they are measured and the file is written.
///
/// # Errors
/// The file is no machine file, or something cannot be measured.
pub(crate) fn kept_in(path: &Path, on_host: bool) -> Result<Machine, CliError> {
    if let Some(machine) = check_out(path)?
        && machine.cores.is_some() == on_host
    {
        let here = processors(on_host)?;
        if !here.starts_with(&machine.name) {
            print_note(format_args!(
                "note: {} is of {}, and this machine has {here}: remove the file to measure this one",
                path.display(),
                machine.name
            ));
        }
        return Ok(machine);
    }
    let machine = measure(&MeasureArgs {
        device: match on_host {
            true => DeviceChoice::Cpu,
            false => DeviceChoice::Cuda,
        },
        ..MeasureArgs::default()
    })?;
    // A file that a crash cut short would be refused later.
    let partial = path.with_extension("partial.toml");
    write(&partial, &machine)?;
    std::fs::rename(&partial, path)
        .map_err(|error| failure!("failed to write {}: {error}", path.display()))?;
    Ok(machine)
}

/// Shows what is measured next.
fn progress(what: &str) {
    print_note(format_args!("measuring: {what}"));
}

/// The median of the seconds of `run`, after one run that does not count.
fn median_s<E>(mut run: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    run()?;
    let began = Instant::now();
    let mut seconds = Vec::new();
    while began.elapsed() < TIME || seconds.len() < LEAST_RUNS {
        let start = Instant::now();
        run()?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    Ok(median(seconds))
}

/// The median of some numbers.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Refuses a file that is no machine file.
fn check_out(path: &Path) -> Result<Option<Machine>, CliError> {
    let shown = path.display();
    let end = path.extension().and_then(|end| end.to_str());
    if !matches!(end, Some("toml" | "json")) {
        return Err(usage!(
            "--out {shown}: expected a name that ends in .toml or .json, by which --hardware knows a file"
        ));
    }
    match files::read_text_if_present(path, SMALL_FILE_BYTES) {
        Ok(None) => Ok(None),
        Ok(Some(text)) => Machine::parse(&text, &shown.to_string())
            .map(Some)
            .map_err(|error| {
                usage!("{shown} exists and is no machine file, which would be replaced: choose another name \
                     with --out ({error})")
            }),
        Err(error) => Err(usage!("--out {shown}: {error}")),
    }
}

fn write(path: &Path, machine: &Machine) -> Result<(), CliError> {
    let file = path.display().to_string();
    let text = machine.to_text(&file).map_err(CliError::failure)?;
    std::fs::write(path, text).map_err(|error| failure!("failed to write {file}: {error}"))
}

fn text(machine: &Machine, path: &Path) -> String {
    let gb_per_s = |value: f64| format!("{:.1} GB/s", value / 1e9);
    let [unit, of_unit] = match machine.cores {
        Some(cores) => [format!("{cores} cores"), "in 32 bits".to_owned()],
        None => [
            format!("{} GPUs", machine.node_gpus),
            "in 16 bits".to_owned(),
        ],
    };
    let rows = [
        (
            "products",
            format!("{:.2} TFLOP/s {of_unit}", machine.peak_flops / 1e12),
        ),
        ("memory", gb_per_s(machine.memory_bytes_per_s)),
        ("memory's size", bytes(machine.memory_bytes as u64)),
        ("between ranks", gb_per_s(machine.link_bytes_per_s)),
        (
            "network (not measured)",
            gb_per_s(machine.network_bytes_per_s),
        ),
        (
            "to and from the host",
            gb_per_s(machine.host_link_bytes_per_s),
        ),
        (
            "memory of the host",
            gb_per_s(machine.host_memory_bytes_per_s),
        ),
        ("disk", gb_per_s(machine.disk_bytes_per_s)),
    ];
    let mut text = format!("{}, {unit}\n", machine.name);
    let elementwise = machine.elementwise_bytes_per_s;
    let elementwise = elementwise.map(|rate| ("elementwise", gb_per_s(rate)));
    for (what, value) in elementwise.into_iter().chain(rows) {
        text += &format!("  {what:<24}{value}\n");
    }
    let path = path.display();
    text += &format!(
        "written to {path}: zero plan --model M --simulate --hardware {path}:{}x1\n",
        machine.cores.unwrap_or(machine.node_gpus)
    );
    text
}
