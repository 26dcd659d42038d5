//! The environment variables, read once.

use std::sync::OnceLock;
use std::time::Duration;

use stand_in_shared::Settings as Variables;

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

    fn read(variables: &Variables<impl Fn(&str) -> Option<String>>) -> Self {
        let is_dry = variables.switch("ZERO_STANDIN_DRY", false);
        let memory_bytes = if is_dry {
            DRY_MEMORY_BYTES
        } else {
            DEFAULT_MEMORY_BYTES
        };

        // Every test of this crate uses its own device, because a failed context fails all users of
        // the device.
        let devices = if cfg!(test) { 256 } else { 1 };
        let launch_seconds = variables.number("ZERO_STANDIN_LAUNCH_SECONDS");

        Self {
            dry: is_dry,
            multiprocessors: if is_dry { 132 } else { 2 },
            counts: variables.text("ZERO_STANDIN_COUNTS"),
            devices: variables
                .number("ZERO_STANDIN_DEVICES")
                .unwrap_or(devices)
                .max(1),
            memory_bytes: variables
                .number("ZERO_STANDIN_MEMORY_BYTES")
                .unwrap_or(memory_bytes),
            delay_seed: variables.number("ZERO_STANDIN_DELAY_SEED"),
            launch_limit: Duration::from_secs(launch_seconds.unwrap_or(300)),
            trace: variables.switch("ZERO_STANDIN_TRACE", false),
            sharing: variables.switch("ZERO_STANDIN_SHARING", true),
            one_host_thread: variables.switch("ZERO_STANDIN_ONE_HOST_THREAD", false),
            memory_waits: variables.switch("ZERO_STANDIN_MEMORY_WAITS", true),
            pinned_bytes: variables.number("ZERO_STANDIN_PINNED_BYTES"),
            // Always on in tests of this crate.
            find_races: cfg!(test) || variables.switch("ZERO_STANDIN_RACES", false),
        }
    }
}

pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| Settings::read(&Variables::of_process("cuda")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_number_leaves_the_default() {
        let variables = Variables::new("cuda", |name| match name {
            "ZERO_STANDIN_MEMORY_BYTES" => Some("4096".to_owned()),
            "ZERO_STANDIN_DELAY_SEED" => Some("soon".to_owned()),
            _ => None,
        });

        let read = Settings::read(&variables);

        assert_eq!(read.memory_bytes, 4096);
        assert_eq!(read.delay_seed, None);
        assert_eq!(read.launch_limit.as_secs(), 300);
    }
}
