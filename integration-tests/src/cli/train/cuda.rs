//! Ranks on GPUs: one process each. This process starts them, or is one of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use zero_alloc::cuda::CudaDevice;
use zero_comm::nccl::{NcclCommunicator, Ranks};
use zero_comm::{CommError, CommOptions, Communicator, Solo};

use super::args::TrainArgs;
use super::observe::Observer;
use super::plan::Plan;
use super::{cancelled_by_signals, close, failure, summary};
use crate::cli::CliError;
use crate::cli::output::say;
use crate::launcher::{Job, JobError};
use crate::trainer::run_on_cuda;

/// How long the other ranks may take to see that one has failed.
const GRACE: Duration = Duration::from_secs(10);
/// What lets ranks share a GPU, and keeps each small enough for it.
const SHARING: [(&str, &str); 2] = [("NCCL_MULTI_RANK_GPU_ENABLE", "1"), ("NCCL_MAX_CTAS", "8")];
/// While steps are recorded NCCL would have ranks open one another's buffers, which pages of a pool do not allow.
const RECORDING: [(&str, &str); 1] = [("NCCL_GRAPH_REGISTER", "0")];

/// Trains on `gpus` GPUs of this machine, or as the rank of other machines' too that this process was `launched` as.
pub(super) fn run(args: &TrainArgs, gpus: usize, launched: Option<Ranks>) -> Result<(), CliError> {
    let ranks = args.ranks.unwrap_or(gpus);
    match launched {
        Some(launched) => run_rank(args, gpus, Some(&launched)),
        None if ranks == 1 => run_rank(args, gpus, None),
        None => launch(args, ranks),
    }
}

/// Starts the ranks, and ends with them.
fn launch(args: &TrainArgs, ranks: usize) -> Result<(), CliError> {
    static INTERRUPTS: AtomicUsize = AtomicUsize::new(0);
    let program = std::env::current_exe().map_err(|e| CliError::Failure(format!("this program's own file: {e}")))?;
    let unset = |(name, _): &(&str, &str)| std::env::var_os(name).is_none();
    let job = Job {
        ranks,
        program,
        args: std::env::args_os().skip(1).collect(),
        variables: variables(args).filter(unset).map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        grace: GRACE,
    };
    let count = || {
        INTERRUPTS.fetch_add(1, Ordering::Relaxed);
    };
    ctrlc::set_handler(count).map_err(|e| CliError::Failure(format!("no handler for signals: {e}")))?;
    let ended = job.run(&INTERRUPTS);
    if INTERRUPTS.load(Ordering::Relaxed) > 1 {
        // As without a launcher.
        std::process::exit(130);
    }
    ended.map_err(|error| match &error {
        JobError::Reported { report, .. } if report.code == 2 => CliError::usage(&error),
        _ => CliError::failure(error),
    })
}

/// What NCCL is told where the user does not say otherwise.
fn variables(args: &TrainArgs) -> impl Iterator<Item = (&'static str, &'static str)> {
    let sharing = SHARING.into_iter().filter(|_| args.share_gpus);
    sharing.chain(RECORDING.into_iter().filter(|_| args.cuda_graph))
}

/// Trains as one rank; rank 0 prints.
fn run_rank(args: &TrainArgs, gpus: usize, launched: Option<&Ranks>) -> Result<(), CliError> {
    let (rank, world_size, local_rank) = launched.map_or((0, 1, 0), |l| (l.rank, l.world_size, l.local_rank));
    let device = CudaDevice::open(local_rank % gpus).map_err(CliError::failure)?;
    let mut plan = Plan::new(args, world_size, Some(device.name().to_owned()))?;
    plan.options.cancel = cancelled_by_signals()?;
    // Rank 0, which prints, has a GPU that it may share: only the flag and the numbers tell it.
    if args.share_gpus && world_size > gpus {
        plan.notices.push("ranks share GPUs: speeds mean nothing".to_owned());
    }
    let limit = Duration::from_secs(args.time_limit);
    let comm: Arc<dyn Communicator<CudaDevice>> = match launched {
        Some(ranks) if world_size > 1 => {
            check_sharing(args, local_rank >= gpus)?;
            Arc::new(NcclCommunicator::join(&device, ranks, CommOptions { limit }).map_err(|e| ended_by(rank, e))?)
        }
        _ => Arc::new(Solo::new(device.clone())),
    };
    let mut observer = if rank == 0 {
        say(summary::opening(&plan))?;
        Some(Observer::new(&plan)?)
    } else {
        None
    };
    let (settings, workload, options) = (&plan.settings, &plan.workload, &plan.options);
    let summary =
        run_on_cuda(&device, Arc::clone(&comm), plan.is_recorded(), settings, workload, options, &mut |metrics| {
            observer.as_mut().map_or(Ok(()), |o| o.step(metrics))
        });
    if let Some(observer) = &observer {
        observer.finish();
    }
    let summary = summary.map_err(|error| match comm.failure().filter(|f| !is_own(rank, f)) {
        // Each rank's stream says the same: the cause says it shorter.
        Some(cause) => CliError::Echo(cause.to_string()),
        None => failure(error),
    })?;
    // Before the figures are printed: whatever the others wait for is done.
    drop(comm);
    observer.map_or(Ok(()), |observer| close(&plan, &observer, &[summary]))
}

/// Under another launcher the variables are the user's to set: it is too late for NCCL here.
fn check_sharing(args: &TrainArgs, shares: bool) -> Result<(), CliError> {
    let (name, value) = SHARING[0];
    if shares && args.share_gpus && std::env::var(name).as_deref() != Ok(value) {
        return Err(CliError::Usage(format!("--share-gpus: set {name}={value} for all ranks (NCCL 2.30 or later)")));
    }
    Ok(())
}

/// Whether the failure is rank `rank`'s own.
fn is_own(rank: usize, failure: &CommError) -> bool {
    match failure {
        CommError::Aborted { rank: by, .. }
        | CommError::Peer { rank: by, .. }
        | CommError::Skipped { rank: by, .. }
        | CommError::Panicked { rank: by, .. } => *by == rank,
        _ => false,
    }
}

fn ended_by(rank: usize, error: CommError) -> CliError {
    if is_own(rank, &error) {
        CliError::Failure(format!("rank {rank}: {error}"))
    } else {
        CliError::Echo(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccl_is_told_what_the_flags_need() {
        let told = |share_gpus, cuda_graph| {
            let args = TrainArgs { share_gpus, cuda_graph, ..TrainArgs::default() };
            variables(&args).map(|(name, _)| name).collect::<Vec<_>>()
        };
        assert!(told(false, false).is_empty());
        assert_eq!(told(false, true), ["NCCL_GRAPH_REGISTER"]);
        assert_eq!(told(true, true), ["NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS", "NCCL_GRAPH_REGISTER"]);
    }
}
