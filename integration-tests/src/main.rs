//! The binary `zero`: training with ZeRO, memory planning, and checkpoint tools.

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use integration_tests::cli::{CliError, ckpt, plan, train};

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
    Plan(plan::PlanArgs),
    /// Inspect, verify, export or import checkpoints
    Ckpt(ckpt::CkptArgs),
}

/// Parses the command line. A negative number is a value, which its flag then rejects, and not an unknown flag.
fn parse() -> Cli {
    let allow = |arg: clap::Arg| {
        let has_value = arg.get_action().takes_values();
        arg.allow_negative_numbers(has_value)
    };
    let mut command = Cli::command().mut_subcommands(|command| command.mut_args(allow));
    let matches = command.get_matches_mut();
    Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.format(&mut command).exit())
}

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_env("ZERO_LOG").unwrap_or_else(|_| "warn".into());
    let terminal = std::io::stderr().is_terminal();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    log.with_ansi(terminal).with_target(false).without_time().init();
    // The run reports a panic as the error of its rank, in one line.
    std::panic::set_hook(Box::new(|panic| tracing::debug!("{panic}")));
    let result = std::panic::catch_unwind(|| match parse().command {
        Command::Train(args) => train::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Ckpt(args) => ckpt::run(args),
    });
    let error = match result {
        Ok(Ok(())) => return ExitCode::SUCCESS,
        Ok(Err(error)) => error,
        Err(_) => {
            CliError::Failure("a bug: the program panicked; run with ZERO_LOG=debug for the location".to_owned())
        }
    };
    error.report();
    ExitCode::from(error.exit_code())
}
