//! The binary `zero`: training with ZeRO, memory planning, and checkpoint tools.

mod heap;

use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use zero::error::CliError;
use zero::{ckpt, plan, train};

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
    /// Train a GPT-2 on several ranks
    Train(Box<train::TrainArgs>),
    /// Show the memory and traffic of each stage, and which stages fit
    Plan(Box<plan::PlanArgs>),
    /// Inspect, verify, export or import checkpoints
    Ckpt(ckpt::CkptArgs),
}

/// The command line. A negative number is joined with its flag, which then rejects it; it would be
/// an unknown flag.
fn arguments() -> Vec<OsString> {
    let mut arguments: Vec<OsString> = Vec::new();
    for argument in std::env::args_os() {
        let is_negative = argument
            .to_str()
            .is_some_and(|text| text.starts_with('-') && text.parse::<f64>().is_ok());
        match arguments.last_mut() {
            Some(flag)
                if is_negative
                    && flag
                        .to_str()
                        .is_some_and(|f| f.starts_with("--") && !f.contains('=')) =>
            {
                flag.push("=");
                flag.push(argument);
            }
            _ => arguments.push(argument),
        }
    }
    arguments
}

fn main() -> ExitCode {
    heap::share();
    // SAFETY: this is the only thread.
    unsafe { zero_comm::nccl::set_environment() };
    let filter =
        tracing_subscriber::EnvFilter::try_from_env("ZERO_LOG").unwrap_or_else(|_| "warn".into());
    let terminal = std::io::stderr().is_terminal();
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    log.with_ansi(terminal)
        .with_target(false)
        .without_time()
        .init();
    // The run reports a panic as the error of its rank, in one line.
    std::panic::set_hook(Box::new(|panic| tracing::debug!("{panic}")));
    let result = std::panic::catch_unwind(|| match Cli::parse_from(arguments()).command {
        Command::Train(args) => train::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Ckpt(args) => ckpt::run(args),
    });
    let error = match result {
        Ok(Ok(())) => return ExitCode::SUCCESS,
        Ok(Err(error)) => error,
        Err(_) => CliError::Failure(
            "a bug: the program panicked; run with ZERO_LOG=debug for the location".to_owned(),
        ),
    };
    error.report();
    ExitCode::from(error.exit_code())
}
