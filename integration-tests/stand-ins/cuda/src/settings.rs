//! The environment variables, read once.

use std::sync::OnceLock;
use std::time::Duration;

/// Default memory of a device. Small in this crate's tests, which must not depend on the host's
/// memory.
pub(crate) const DEFAULT_MEMORY_BYTES: u64 = if cfg!(test) { 8 << 20 } else { 8 << 30 };

/// Memory of a device in the dry mode: that of an H200.
const DRY_MEMORY_BYTES: u64 = 140 << 30;

/// Settings from the environment.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) devices: u32,
    pub(crate) memory_bytes: u64,
    pub(crate) delay_seed: Option<u64>,
    pub(crate) launch_limit: Duration,
    pub(crate) find_races: bool,
    pub(crate) trace: bool,
    /// Whether allocations can be shared with other processes.
    pub(crate) sharing: bool,
    /// Whether one thread runs the host functions of all streams, as under WSL2.
    pub(crate) one_host_thread: bool,
    /// Whether streams can wait for values in memory.
    pub(crate) memory_waits: bool,
    /// Limit of registered host memory.
    pub(crate) pinned_bytes: Option<u64>,
    /// Large operations are only counted.
    pub(crate) dry: bool,
    pub(crate) multiprocessors: u32,
    /// The file for counts of the work.
    pub(crate) counts: Option<String>,
}

impl Settings {
    /// Whether the work of kernels is counted.
    pub(crate) fn counts_work(&self) -> bool {
        self.dry || self.counts.is_some()
    }

    fn read(variable: impl Fn(&str) -> Option<String>) -> Self {
        let number = |name: &str| {
            let text = variable(name)?;
            let value = text.trim().parse::<u64>().ok();
            if value.is_none() {
                crate::error::say!("{name}={text} is ignored: not a number");
            }
            value
        };
        // Every test of this crate uses its own device, because a failed context fails all users of
        // the device.
        let devices = if cfg!(test) { 256 } else { 1 };
        let dry = number("ZERO_STANDIN_DRY").is_some_and(|n| n > 0);
        let memory_bytes = if dry {
            DRY_MEMORY_BYTES
        } else {
            DEFAULT_MEMORY_BYTES
        };
        Self {
            dry,
            multiprocessors: if dry { 132 } else { 2 },
            counts: variable("ZERO_STANDIN_COUNTS"),
            devices: number("ZERO_STANDIN_DEVICES")
                .and_then(|n| u32::try_from(n).ok())
                .unwrap_or(devices)
                .max(1),
            memory_bytes: number("ZERO_STANDIN_MEMORY_BYTES").unwrap_or(memory_bytes),
            delay_seed: number("ZERO_STANDIN_DELAY_SEED"),
            launch_limit: Duration::from_secs(number("ZERO_STANDIN_LAUNCH_SECONDS").unwrap_or(300)),
            trace: number("ZERO_STANDIN_TRACE").is_some_and(|n| n > 0),
            sharing: number("ZERO_STANDIN_SHARING").is_none_or(|n| n > 0),
            one_host_thread: number("ZERO_STANDIN_ONE_HOST_THREAD").is_some_and(|n| n > 0),
            memory_waits: number("ZERO_STANDIN_MEMORY_WAITS").is_none_or(|n| n > 0),
            pinned_bytes: number("ZERO_STANDIN_PINNED_BYTES"),
            // Always on in tests of this crate.
            find_races: cfg!(test) || number("ZERO_STANDIN_RACES").is_some_and(|n| n > 0),
        }
    }
}

pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS
        .get_or_init(|| Settings::read(|name| std::env::var(name).ok().filter(|v| !v.is_empty())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_number_leaves_the_default() {
        let read = Settings::read(|name| match name {
            "ZERO_STANDIN_MEMORY_BYTES" => Some("4096".into()),
            "ZERO_STANDIN_DELAY_SEED" => Some("soon".into()),
            _ => None,
        });
        assert_eq!(
            (
                read.memory_bytes,
                read.delay_seed,
                read.launch_limit.as_secs()
            ),
            (4096, None, 300)
        );
    }
}
