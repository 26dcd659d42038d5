//! Whether the memory of this machine can hold what the ranks of a run keep. Asked before the run: the system ends a
//! process that takes too much, without a word.

use indicatif::HumanBytes;

use super::plan::Plan;
use crate::cli::CliError;

/// Refuses a run on threads of this process whose model state alone does not fit.
pub(super) fn check(plan: &Plan) -> Result<(), CliError> {
    let settings = &plan.settings;
    let (Ok(held), Some(free_bytes)) =
        (plan.layout.state_bytes(settings.stage, &settings.widths()), free_bytes(MEMORY_INFO))
    else {
        return Ok(());
    };
    fits(plan.ranks, settings.stage.number(), held.total_bytes(), free_bytes)
}

/// What Linux says of its memory; elsewhere nothing is checked.
const MEMORY_INFO: &str = "/proc/meminfo";

fn fits(ranks: usize, stage: u8, rank_bytes: u64, free_bytes: u64) -> Result<(), CliError> {
    let needed_bytes = rank_bytes.saturating_mul(ranks as u64);
    if needed_bytes <= free_bytes {
        return Ok(());
    }
    let (needed, free) = (HumanBytes(needed_bytes), HumanBytes(free_bytes));
    Err(CliError::Usage(format!(
        "{ranks} ranks at stage {stage} keep {needed} of model state, and this machine has {free} of memory free: \
         take a higher --stage, fewer --ranks or a smaller --model"
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
    fn what_does_not_fit_is_refused_with_both_figures() {
        fits(4, 3, 1 << 30, 4 << 30).unwrap();
        let error = fits(4, 0, 2 << 30, (8 << 30) - 1).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        for word in ["4 ranks", "stage 0", "8.00 GiB", "--stage", "--ranks"] {
            assert!(error.to_string().contains(word), "{word:?} is not in: {error}");
        }
        assert!(fits(1024, 0, u64::MAX, u64::MAX - 1).is_err());
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
