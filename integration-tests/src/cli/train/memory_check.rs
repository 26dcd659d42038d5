//! Compares the memory of a run with the free memory of this machine before it starts. Linux would kill a process
//! that exceeds it, without an error message.

use indicatif::HumanBytes;

use super::run_setup::RunSetup;
use crate::cli::CliError;

/// Gradient buckets per rank.
const BUCKETS: u64 = 2;

/// Rejects a run on threads of this process whose model state, activations and buckets do not fit.
pub(super) fn check(setup: &RunSetup) -> Result<(), CliError> {
    let (settings, workload) = (&setup.settings, &setup.workload);
    let widths = settings.widths();
    let (Ok(state), Some(free_bytes)) = (setup.layout.state_bytes(settings.stage, &widths), free_bytes(MEMORY_INFO))
    else {
        return Ok(());
    };
    let activations_bytes = workload.options.activations_bytes(&workload.config);
    let buckets_bytes = (settings.bucket_capacity_elems as u64).saturating_mul(BUCKETS * widths.comm_grad_bytes);
    let rank_bytes = [state.total_bytes(), activations_bytes, buckets_bytes];
    fits(setup.ranks, settings.stage.number(), rank_bytes, free_bytes)
}

/// Linux only; other systems are not checked.
const MEMORY_INFO: &str = "/proc/meminfo";

/// `rank_bytes` are model state, activations and buckets of each rank.
fn fits(ranks: usize, stage: u8, rank_bytes: [u64; 3], free_bytes: u64) -> Result<(), CliError> {
    let [state, activations, buckets] = rank_bytes.map(|bytes| bytes.saturating_mul(ranks as u64));
    if state.saturating_add(activations).saturating_add(buckets) <= free_bytes {
        return Ok(());
    }
    let [state, activations, buckets, free] = [state, activations, buckets, free_bytes].map(HumanBytes);
    Err(CliError::Usage(format!(
        "{ranks} ranks at stage {stage} need {state} for model state, {activations} for activations and {buckets} for \
         buckets: this machine has {free} of memory free; try a higher --stage, fewer --ranks, or a smaller --model, \
         --micro-batch or --bucket-elems"
    )))
}

/// Available memory and free swap space.
fn free_bytes(file: &str) -> Option<u64> {
    parse(&std::fs::read_to_string(file).ok()?)
}

fn parse(text: &str) -> Option<u64> {
    let kib = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    kib("MemAvailable")?.checked_add(kib("SwapFree").unwrap_or(0))?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oversized_run_is_rejected_with_figures() {
        fits(4, 3, [1 << 29, 1 << 28, 1 << 28], 4 << 30).unwrap();
        for rank_bytes in [[2 << 30, 0, 0], [1, 2 << 30, 0], [1, 1 << 30, 1 << 30]] {
            let error = fits(4, 0, rank_bytes, (8 << 30) - 1).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            for word in ["4 ranks", "stage 0", " GiB", "--stage", "--ranks", "--micro-batch", "--bucket-elems"] {
                assert!(error.to_string().contains(word), "{word:?} is not in: {error}");
            }
        }
        assert!(fits(1024, 0, [u64::MAX, u64::MAX, 1], u64::MAX - 1).is_err());
    }

    #[test]
    fn free_memory_is_parsed() {
        let text = "MemTotal:       24689052 kB\nMemAvailable:   18874368 kB\nSwapFree:        1024 kB\n";
        assert_eq!(parse(text), Some((18_874_368 + 1024) * 1024));
        assert_eq!(parse("MemAvailable:   8 kB\n"), Some(8192));
        for none in ["", "MemTotal: 8 kB\n", "MemAvailable: many kB\n", "MemAvailable: 18446744073709551615 kB\n"] {
            assert_eq!(parse(none), None, "{none}");
        }
        assert_eq!(free_bytes("/nowhere"), None);
        #[cfg(target_os = "linux")]
        assert!(free_bytes(MEMORY_INFO).is_some_and(|bytes| bytes > 0));
    }
}
