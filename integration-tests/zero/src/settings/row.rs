//! The names of one setting.

/// The names of a setting, and who compares its values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// The name in `run.json`, such as `communication.overlap`. It covers all names below it,
    /// unless a longer one is listed too.
    pub(crate) record: &'static str,
    /// The flag or the block of the configuration for an error; empty if the user sets neither.
    pub(crate) flag: &'static str,
    /// The key of a DeepSpeed configuration, without the prefix `stage3_`; may be empty.
    pub(crate) key: &'static str,
    /// Whether ranks compare it before a run.
    pub(crate) is_compared: bool,
    /// Whether a resumed run reports that it changed.
    pub(crate) is_reported: bool,
}

impl Row {
    pub(crate) const fn new(record: &'static str, flag: &'static str) -> Self {
        Self {
            record,
            flag,
            key: "",
            is_compared: true,
            is_reported: true,
        }
    }

    /// With a key of a DeepSpeed configuration.
    pub(crate) const fn key(self, key: &'static str) -> Self {
        Self { key, ..self }
    }

    /// May differ between ranks: it belongs to one machine, identifies the run, or follows from
    /// other settings.
    pub(crate) const fn not_compared(self) -> Self {
        Self {
            is_compared: false,
            ..self
        }
    }

    /// May change when a run resumes: it identifies the run, or is checked by itself.
    pub(crate) const fn not_reported(self) -> Self {
        Self {
            is_reported: false,
            ..self
        }
    }
}
