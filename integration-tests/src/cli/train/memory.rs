//! Whether the memory of this machine can hold what the ranks of a run hold. Asked before the run: the system ends a
//! process that takes too much, without a word.

use indicatif::HumanBytes;

use super::plan::Plan;
use crate::cli::CliError;

/// Buckets of a rank.
const BUCKETS: u64 = 2;

/// Refuses a run on threads of this process whose model state, activations and buckets alone do not fit.
pub(super) fn check(plan: &Plan) -> Result<(), CliError> {
    let (settings, workload) = (&plan.settings, &plan.workload);
    let widths = settings.widths();
    let (Ok(state), Some(free_bytes)) = (plan.layout.state_bytes(settings.stage, &widths), free_bytes(MEMORY_INFO))
    else {
        return Ok(());
    };
    let held = Held {
        state_bytes: state.total_bytes(),
        activations_bytes: workload.options.activations_bytes(&workload.config),
        buckets_bytes: (settings.bucket_capacity_elems as u64).saturating_mul(BUCKETS * widths.comm_grad_bytes),
    };
    fits(plan.ranks, settings.stage.number(), &held, free_bytes)
}

/// What Linux says of its memory; elsewhere nothing is checked.
const MEMORY_INFO: &str = "/proc/meminfo";

/// What each rank holds.
struct Held {
    state_bytes: u64,
    activations_bytes: u64,
    buckets_bytes: u64,
}

fn fits(ranks: usize, stage: u8, held: &Held, free_bytes: u64) -> Result<(), CliError> {
    let all = |rank_bytes: u64| rank_bytes.saturating_mul(ranks as u64);
    let [state, activations, buckets] = [held.state_bytes, held.activations_bytes, held.buckets_bytes].map(all);
    if state.saturating_add(activations).saturating_add(buckets) <= free_bytes {
        return Ok(());
    }
    let [state, activations, buckets, free] = [state, activations, buckets, free_bytes].map(HumanBytes);
    Err(CliError::Usage(format!(
        "{ranks} ranks at stage {stage} hold {state} of model state, {activations} of activations and {buckets} of \
         buckets, and this machine has {free} of memory free: take a higher --stage, fewer --ranks, or a smaller \
         --model, --micro-batch or --bucket-elems"
    )))
}

/// Memory that can be had without taking any from another program, and free swap space.
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
    fn what_does_not_fit_is_refused_with_its_figures() {
        let held =
            |state_bytes, activations_bytes, buckets_bytes| Held { state_bytes, activations_bytes, buckets_bytes };
        fits(4, 3, &held(1 << 29, 1 << 28, 1 << 28), 4 << 30).unwrap();
        for held in [held(2 << 30, 0, 0), held(1, 2 << 30, 0), held(1, 1 << 30, 1 << 30)] {
            let error = fits(4, 0, &held, (8 << 30) - 1).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            for word in ["4 ranks", "stage 0", " GiB", "--stage", "--ranks", "--micro-batch", "--bucket-elems"] {
                assert!(error.to_string().contains(word), "{word:?} is not in: {error}");
            }
        }
        assert!(fits(1024, 0, &held(u64::MAX, u64::MAX, 1), u64::MAX - 1).is_err());
    }

    #[test]
    fn free_memory_is_read_where_the_system_says_it() {
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
