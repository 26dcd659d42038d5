//! Compares the memory that a run needs with what this process may still use, before the run
//! starts. Beyond a limit the kernel kills the process without an error message, or refuses memory
//! in the middle of a step.

pub(crate) mod limits;

use std::path::Path;

use indicatif::HumanBytes;

use crate::error::CliError;
use crate::workload::ModelWorkload;
use limits::{Limit, LimitKind, cache_bytes, limits};
use zero_shard::{Layout, ParamSpec};
use zero_trainer::{Home, RankBytes, Settings};

/// Stack of a thread (Rust's default), its guard pages and its alternative stack for signals.
const THREAD_BYTES: u64 = (2 << 20) + (64 << 10);
/// Heap of a thread of a rank's operations: packed operands of matrix products.
const THREAD_HEAP_BYTES: u64 = 6 << 20;
/// Heap of a rank: weights while they are set, and a buffer of a checkpoint file.
const RANK_HEAP_BYTES: u64 = 8 << 20;
/// Threads of a rank besides those of its operations: the rank, its streams (two, and seven more
/// with offload), and those that write checkpoints.
const OTHER_THREADS: u64 = 16;
/// Addresses of the process for libraries that it loads later, and for heap that is freed in part.
const PROCESS_ADDRESS_BYTES: u64 = 64 << 20;

/// The memory of a rank besides [`RankBytes`].
#[derive(Clone, Copy, Debug)]
struct Overhead {
    /// Memory of each rank.
    rank_bytes: u64,
    /// Addresses of each rank beyond its memory.
    rank_address_bytes: u64,
}

impl Overhead {
    /// For `threads` threads of operations a rank.
    fn new(threads: u64, cache_bytes: u64) -> Self {
        // Two pools of threads, and one while the weights are set.
        let stacks = threads
            .saturating_mul(3)
            .saturating_add(OTHER_THREADS)
            .saturating_mul(THREAD_BYTES);
        // Each thread reserves two caches' sizes for packed operands (private-gemm-x86, of faer).
        let packed = threads.saturating_mul(cache_bytes.saturating_mul(2));
        Self {
            rank_bytes: threads
                .saturating_mul(THREAD_HEAP_BYTES)
                .saturating_add(RANK_HEAP_BYTES),
            rank_address_bytes: stacks.saturating_add(packed),
        }
    }
}

/// Memory of a rank on the host besides [`RankBytes`], with `threads` threads of operations.
pub(crate) fn rank_overhead_bytes(threads: u64) -> u64 {
    Overhead::new(threads, 0).rank_bytes
}

/// The parts of a run that decide the memory of a rank.
#[derive(Clone, Copy)]
pub(crate) struct RunMemory<'a> {
    pub(crate) settings: &'a Settings,
    pub(crate) layout: &'a Layout,
    pub(crate) workload: &'a ModelWorkload,
    /// Whether the run saves checkpoints.
    pub(crate) saves: bool,
}

impl RunMemory<'_> {
    /// The memory of a rank on the host with these settings.
    fn rank_bytes(&self, settings: &Settings) -> Option<RankBytes> {
        let workload = self.workload;
        let activations = workload.config.activations_bytes(&workload.options);
        let passes = workload.config.passes();
        let cut_of = |param: &ParamSpec| workload.config.tensor_cut(param);
        RankBytes::new(
            settings,
            self.layout,
            &passes,
            activations,
            self.saves,
            cut_of,
        )
    }
}

/// Rejects a run that does not fit, if `ranks` ranks are threads of this process. `limit_bytes` is
/// the value of `--memory-limit`.
pub(crate) fn check(
    run: &RunMemory<'_>,
    ranks: usize,
    limit_bytes: Option<u64>,
) -> Result<(), CliError> {
    let need = run.rank_bytes(run.settings);
    let limits: Vec<Limit> = limits(Path::new("/"))
        .into_iter()
        .chain(limit_bytes.map(of_flag))
        .collect();
    checked(run, ranks, need, &limits)
}

/// A note if parameters on NVMe need more memory of a rank on the host than they save: buffers of
/// the largest unit's shard take the place of all shards.
pub(crate) fn offload_notice(run: &RunMemory<'_>, on_gpu: bool) -> Option<String> {
    if on_gpu || !matches!(run.settings.offload.params, Home::Nvme(_)) {
        return None;
    }
    let need = |settings| run.rank_bytes(settings).map(|bytes| bytes.total());
    let mut without = run.settings.clone();
    without.offload.params = Home::Device;
    let with = need(run.settings)?;
    let without = need(&without)?;

    (with >= without).then(|| {
        format!(
            "--offload-params nvme saves no memory here: a rank needs {} with it and {} without, since its buffers are \
             larger than the parameters of a rank",
            HumanBytes(with),
            HumanBytes(without)
        )
    })
}

/// Rejects a run on GPUs whose host memory does not fit: that of `ranks` ranks on this machine, one
/// of which is this process. `limit_bytes` is the value of `--memory-limit`, for this process.
pub(crate) fn check_host_of_gpus(
    run: &RunMemory<'_>,
    ranks: usize,
    limit_bytes: Option<u64>,
) -> Result<(), CliError> {
    if !run.settings.offload.is_any() && limit_bytes.is_none() {
        return Ok(());
    }
    let workload = run.workload;
    let checkpoints = workload.config.gpu_bytes(&workload.options).host;
    let saves = run.saves;
    let cut_of = |param: &ParamSpec| workload.config.tensor_cut(param);
    let need = RankBytes::host_of_gpu(run.settings, run.layout, checkpoints, saves, cut_of);
    checked(run, 1, need, limit_bytes.map(of_flag).as_slice())?;
    checked(run, ranks, need, &limits(Path::new("/")))
}

/// The least memory that a limit leaves to this process; `None` if none could be read.
pub(crate) fn free_bytes() -> Option<u64> {
    let limits = limits(Path::new("/"));
    limits.iter().map(|limit| limit.free_bytes).min()
}

/// The memory of this machine; `None` if it could not be read.
pub(crate) fn total_bytes() -> Option<u64> {
    limits::machine_bytes(Path::new("/"))
}

fn of_flag(free_bytes: u64) -> Limit {
    Limit {
        name: "the limit of --memory-limit".to_owned(),
        free_bytes,
        kind: LimitKind::Memory,
    }
}

/// `need`: that of each rank; `None` if 64 bits cannot count it.
fn checked(
    run: &RunMemory<'_>,
    ranks: usize,
    need: Option<RankBytes>,
    limits: &[Limit],
) -> Result<(), CliError> {
    let stage = run.settings.stage.number();
    let need = need.ok_or_else(|| {
        usage!("{ranks} ranks at stage {stage} need more memory than 64 bits can count")
    })?;
    let threads = run.workload.threads as u64;
    fits(
        ranks as u64,
        stage,
        &need,
        Overhead::new(threads, cache_bytes(Path::new("/"))),
        limits,
    )
}

/// `need` and `overhead` are those of each rank.
fn fits(
    ranks: u64,
    stage: u8,
    need: &RankBytes,
    overhead: Overhead,
    limits: &[Limit],
) -> Result<(), CliError> {
    let rank = need.total().saturating_add(overhead.rank_bytes);
    // Blocks of other sizes are freed and allocated again, so a pool may reserve more than is live.
    let unused = need.gathered.saturating_add(need.total() / 32);
    let rank_addresses = rank
        .saturating_add(unused)
        .saturating_add(overhead.rank_address_bytes);
    let needed = |kind| match kind {
        LimitKind::Memory => rank.saturating_mul(ranks),
        LimitKind::Addresses => rank_addresses
            .saturating_mul(ranks)
            .saturating_add(PROCESS_ADDRESS_BYTES),
    };

    let exceeded = limits
        .iter()
        .filter(|limit| needed(limit.kind) > limit.free_bytes);
    let Some(limit) = exceeded.min_by_key(|limit| limit.free_bytes) else {
        return Ok(());
    };
    let all = |bytes: u64| bytes.saturating_mul(ranks);
    let rest = needed(limit.kind).saturating_sub(all(need.total()));

    let parts = [
        (all(need.state), "model state"),
        (all(need.activations), "activations"),
        (all(need.buckets), "buckets"),
        (all(need.gathered), "gathered units"),
        (all(need.workspace), "workspace"),
        (all(need.matrices), "updates of matrices"),
        (all(need.transfers), "transfers to and from NVMe"),
        (all(need.staging), "the copy for a checkpoint"),
        (rest, "threads and heap"),
    ];

    let parts = parts.into_iter().filter(|(bytes, _)| *bytes > 0);
    let parts: Vec<String> = parts
        .map(|(bytes, purpose)| format!("{} for {purpose}", HumanBytes(bytes)))
        .collect();
    let what = if limit.kind == LimitKind::Memory {
        "memory"
    } else {
        "address space"
    };

    let Limit {
        name, free_bytes, ..
    } = limit;
    let hint = if need.transfers == 0 {
        "--offload nvme:DIR, "
    } else {
        ""
    };

    Err(usage!(
        "{ranks} ranks at stage {stage} need {} of {what} ({}), but {name} has {} free; try {hint}a higher --stage, \
         fewer --ranks or --threads, or a smaller --model, --micro-batch or --bucket-elems",
        HumanBytes(needed(limit.kind)),
        parts.join(", "),
        HumanBytes(*free_bytes),
    ))
}

#[cfg(test)]
mod tests {
    use integration_tests::Printed;

    use super::*;

    const GIB: u64 = 1 << 30;
    const NEED: RankBytes = RankBytes {
        state: GIB,
        activations: GIB / 2,
        buckets: GIB / 4,
        gathered: 0,
        workspace: 0,
        matrices: 0,
        transfers: 0,
        staging: GIB / 4,
    };
    const OVERHEAD: Overhead = Overhead {
        rank_bytes: 0,
        rank_address_bytes: GIB / 8,
    };

    fn limit(kind: LimitKind, free_bytes: u64) -> Limit {
        Limit {
            name: "the limit of a test".to_owned(),
            free_bytes,
            kind,
        }
    }

    #[test]
    fn oversized_run_is_rejected_with_figures() {
        let check = |limits: &[Limit]| fits(4, 0, &NEED, OVERHEAD, limits);
        check(&[
            limit(LimitKind::Memory, 8 * GIB),
            limit(LimitKind::Addresses, 9 * GIB),
        ])
        .unwrap();
        check(&[]).unwrap();

        for kind in [LimitKind::Memory, LimitKind::Addresses] {
            let error =
                check(&[limit(LimitKind::Memory, 8 * GIB), limit(kind, 8 * GIB - 1)]).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            let sizes = [
                "4.00 GiB for model state",
                "2.00 GiB for activations",
                "1.00 GiB for buckets",
                "a checkpoint",
            ];
            let advice = [
                "the limit of a test has 8.00 GiB free",
                "--stage",
                "--ranks",
                "--micro-batch",
            ];
            for word in ["4 ranks", "stage 0"]
                .into_iter()
                .chain(sizes)
                .chain(advice)
            {
                assert!(
                    error.to_string().contains(word),
                    "{word:?} is not in: {error}"
                );
            }
        }

        // Of several exceeded limits the error names the lowest.
        let both = [
            limit(LimitKind::Memory, 7 * GIB),
            of_flag(6 * GIB),
            limit(LimitKind::Memory, 6 * GIB + 1),
        ];
        let error = check(&both).unwrap_err().to_string();
        error.shows(&["the limit of --memory-limit has 6.00 GiB free; try --offload nvme:DIR"]);
        let huge = RankBytes {
            state: u64::MAX,
            ..NEED
        };

        assert!(
            fits(
                1024,
                0,
                &huge,
                OVERHEAD,
                &[limit(LimitKind::Memory, u64::MAX - 1)]
            )
            .is_err()
        );
    }

    #[test]
    fn threads_need_addresses() {
        let [one, two] = [1, 2].map(|threads| Overhead::new(threads, 32 << 20).rank_address_bytes);
        assert_eq!(two - one, 3 * THREAD_BYTES + (64 << 20));
    }
}
