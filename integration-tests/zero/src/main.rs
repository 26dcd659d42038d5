//! The binary `zero`: training with ZeRO, memory planning, and checkpoint tools.

mod heap;

use std::ffi::{OsStr, OsString};
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use zero::launcher::Report;
use zero::{CliError, ckpt, generate, inspect, measure, plan, train, tune};

#[global_allocator]
static HEAP: heap::Heap = heap::Heap;

/// Sharded data-parallel training with ZeRO
#[derive(Parser)]
#[command(name = "zero", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model on several ranks
    Train(Box<train::TrainArgs>),
    /// Show the memory and traffic of each stage, and which stages fit
    Plan(Box<plan::PlanArgs>),
    /// Find the fastest configurations of a training run that fit
    Tune(Box<tune::TuneArgs>),
    /// Measure this machine for zero plan --simulate and zero tune
    Measure(measure::MeasureArgs),
    /// Inspect, verify, export or import checkpoints
    Ckpt(ckpt::CkptArgs),
    /// Show training data as a run reads it
    Data(Box<inspect::DataArgs>),
    /// Continue a text with a model
    Generate(Box<generate::GenerateArgs>),
    /// Render chat templates for the process that started this one
    #[command(hide = true)]
    RenderTemplates,
}

/// The command line. A negative number is joined with its flag, which then rejects it; it would be
/// an unknown flag.
fn arguments() -> Vec<OsString> {
    let mut arguments: Vec<OsString> = Vec::new();
    for argument in std::env::args_os() {
        match arguments.last_mut() {
            Some(flag) if is_negative(&argument) && is_flag_without_value(flag) => {
                flag.push("=");
                flag.push(argument);
            }
            _ => arguments.push(argument),
        }
    }
    arguments
}

fn is_negative(argument: &OsStr) -> bool {
    argument
        .to_str()
        .is_some_and(|text| text.starts_with('-') && text.parse::<f64>().is_ok())
}

fn is_flag_without_value(argument: &OsStr) -> bool {
    argument
        .to_str()
        .is_some_and(|text| text.starts_with("--") && !text.contains('='))
}

/// Logs to standard error, as the variable `ZERO_LOG` has it.
fn start_log() {
    let filter =
        tracing_subscriber::EnvFilter::try_from_env("ZERO_LOG").unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .without_time()
        .init();
}

/// Reports the error to the launcher that started this process as a rank, or prints it to standard
/// error. Prints nothing for an interruption.
fn report(error: &CliError) {
    // Another rank may have requested the end because of its own failure.
    let interrupted = matches!(error, CliError::Interrupted { .. });
    let report = Report {
        code: error.exit_code(),
        echo: interrupted || matches!(error, CliError::Echo(_)),
        message: error.to_string(),
    };
    if !report.deliver() && !interrupted {
        // One write, so that the lines of several processes do not mix.
        let _ = std::io::stderr().write_all(format!("error: {error}\n").as_bytes());
    }
}

fn main() -> ExitCode {
    heap::share();
    // SAFETY: this is the only thread.
    unsafe { zero_comm::nccl::set_environment() };
    start_log();
    // The run reports a panic as the error of its rank, in one line.
    std::panic::set_hook(Box::new(|panic| tracing::debug!("{panic}")));

    zero_data::render_apart();
    ckpt::name_commands();

    let result = std::panic::catch_unwind(|| match Cli::parse_from(arguments()).command {
        Command::Train(args) => train::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Tune(args) => tune::run(&args),
        Command::Measure(args) => measure::run(&args),
        Command::Ckpt(args) => ckpt::run(args),
        Command::Data(args) => inspect::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::RenderTemplates => zero_data::serve_templates().map_err(CliError::failure),
    });

    let error = match result {
        Ok(Ok(())) => return ExitCode::SUCCESS,
        Ok(Err(error)) => error,
        Err(_) => CliError::Failure(
            "a bug: the program panicked; run with ZERO_LOG=debug for the location".to_owned(),
        ),
    };

    report(&error);
    ExitCode::from(error.exit_code())
}
