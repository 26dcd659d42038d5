//! The environment variables, read once.

use std::sync::OnceLock;
use std::time::Duration;

/// What the environment asks for.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) devices: u32,
    pub(crate) memory_bytes: u64,
    pub(crate) delay_seed: Option<u64>,
    pub(crate) launch_limit: Duration,
    pub(crate) find_races: bool,
    pub(crate) trace: bool,
    /// Whether memory can be made that other processes may open.
    pub(crate) sharing: bool,
}

impl Settings {
    fn read(variable: impl Fn(&str) -> Option<String>) -> Self {
        let number = |name: &str| {
            let text = variable(name)?;
            let value = text.trim().parse::<u64>().ok();
            if value.is_none() {
                crate::error::say!("{name}={text} is no number and is not used");
            }
            value
        };
        // Tests of this crate take a device each, so that one's failed context is not another's.
        let devices = if cfg!(test) { 256 } else { 1 };
        Self {
            devices: number("ZERO_STANDIN_DEVICES").and_then(|n| u32::try_from(n).ok()).unwrap_or(devices).max(1),
            memory_bytes: number("ZERO_STANDIN_MEMORY_BYTES").unwrap_or(8 << 30),
            delay_seed: number("ZERO_STANDIN_DELAY_SEED"),
            launch_limit: Duration::from_secs(number("ZERO_STANDIN_LAUNCH_SECONDS").unwrap_or(300)),
            // Tests of this crate always look for them.
            trace: number("ZERO_STANDIN_TRACE").is_some_and(|n| n > 0),
            sharing: number("ZERO_STANDIN_SHARING").is_none_or(|n| n > 0),
            find_races: cfg!(test) || number("ZERO_STANDIN_RACES").is_some_and(|n| n > 0),
        }
    }
}

pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| Settings::read(|name| std::env::var(name).ok().filter(|v| !v.is_empty())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_is_no_number_leaves_the_default() {
        let read = Settings::read(|name| match name {
            "ZERO_STANDIN_MEMORY_BYTES" => Some("4096".into()),
            "ZERO_STANDIN_DELAY_SEED" => Some("soon".into()),
            _ => None,
        });
        assert_eq!((read.memory_bytes, read.delay_seed, read.launch_limit.as_secs()), (4096, None, 300));
    }
}
