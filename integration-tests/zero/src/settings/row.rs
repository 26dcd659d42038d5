//! One setting as one row, and the sources of its value.

use zero_alloc::device::DType;
use zero_shard::ZeroStage;

use super::args::TrainArgs;
use crate::config::{DsConfig, ZeroOptimization};

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

/// The properties of a run that decide which settings it can follow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conditions {
    pub(crate) ranks: usize,
    pub(crate) stage: ZeroStage,
    /// Whether the ranks are on GPUs.
    pub(crate) on_gpus: bool,
    /// Whether activations are recomputed from the inputs of blocks.
    pub(crate) checkpointing: bool,
    /// Whether any state is offloaded.
    pub(crate) offloads: bool,
    /// Whether ranks share micro-batches.
    pub(crate) shares_batches: bool,
}

/// A setting of type `T`, which `Part` of `run.json` records. A function that returns `None` leaves
/// the value to the next source. A setting whose default depends on the run is an `Option`.
pub(crate) struct Setting<T: 'static, Part: 'static> {
    pub(crate) row: Row,
    pub(crate) of_flags: fn(&TrainArgs) -> Option<T>,
    /// Not called if the value of the row's key is `"auto"`.
    pub(crate) of_file: fn(&DsConfig) -> Option<T>,
    /// From `zero_optimization`, with the values of `"auto"` for this model.
    pub(crate) of_zero: fn(&ZeroOptimization) -> Option<T>,
    /// From the run that is resumed.
    pub(crate) of_run: fn(&Part) -> Option<T>,
    pub(crate) default: fn() -> T,
    /// The error of a run that cannot follow the setting, without the flag.
    pub(crate) refused: fn(&Conditions) -> Option<String>,
    /// Why the setting has no effect in a run.
    pub(crate) idle: fn(&Conditions) -> Option<&'static str>,
}

impl<T, Part> Setting<T, Part> {
    /// A setting without sources but `default`; for `..Setting::new(row, default)`.
    pub(crate) const fn new(row: Row, default: fn() -> T) -> Self {
        Self {
            row,
            of_flags: |_| None,
            of_file: |_| None,
            of_zero: |_| None,
            of_run: |_| None,
            default,
            refused: |_| None,
            idle: |_| None,
        }
    }

    /// The error of a run that cannot follow the setting.
    pub(crate) fn refusal(&self, run: &Conditions) -> Option<String> {
        Some(format!("{}{}", self.row.flag, (self.refused)(run)?))
    }

    /// A note if the setting has no effect in this run.
    pub(crate) fn idle_notice(&self, run: &Conditions) -> Option<String> {
        Some(format!(
            "{} has no effect: {}",
            self.row.flag,
            (self.idle)(run)?
        ))
    }
}

/// The step, the stage and the type of parameters of a checkpoint, which older versions saved
/// without `run.json`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Saved {
    /// The completed steps.
    pub(crate) step: u64,
    pub(crate) stage: u64,
    pub(crate) dtype: Option<DType>,
}

/// The sources of a run's settings, in the order of precedence. `Part` is `run.json` or a part of
/// it.
pub(crate) struct Sources<'a, Part> {
    pub(crate) args: &'a TrainArgs,
    pub(crate) file: Option<&'a DsConfig>,
    /// `zero_optimization` of the file, if it counts: a resumed run keeps its sizes and places
    /// unless the block has a stage.
    pub(crate) zero: Option<&'a ZeroOptimization>,
    /// The run that is resumed.
    pub(crate) recorded: Option<&'a Part>,
}

impl<Part> Clone for Sources<'_, Part> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Part> Copy for Sources<'_, Part> {}

impl<'a, Part> Sources<'a, Part> {
    /// The same sources with a part of what is recorded.
    pub(crate) fn part<P>(&self, part: impl FnOnce(&'a Part) -> &'a P) -> Sources<'a, P> {
        Sources {
            args: self.args,
            file: self.file,
            zero: self.zero,
            recorded: self.recorded.map(part),
        }
    }

    /// The value of a flag or of the configuration file.
    pub(crate) fn given<T>(&self, setting: &Setting<T, Part>) -> Option<T> {
        let file = self.file.filter(|file| !file.is_auto(setting.row.key));
        (setting.of_flags)(self.args)
            .or_else(|| file.and_then(setting.of_file))
            .or_else(|| self.zero.and_then(setting.of_zero))
    }

    /// The value of the run that is resumed.
    pub(crate) fn recorded<T>(&self, setting: &Setting<T, Part>) -> Option<T> {
        self.recorded.and_then(setting.of_run)
    }

    /// The value, or the default.
    pub(crate) fn value<T>(&self, setting: &Setting<T, Part>) -> T {
        self.given(setting)
            .or_else(|| self.recorded(setting))
            .unwrap_or_else(setting.default)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIP: Setting<f64, f64> = Setting {
        of_flags: |args| args.clip,
        of_file: |file| file.gradient_clipping,
        of_run: |recorded| Some(*recorded),
        ..Setting::new(Row::new("clip", "--clip").key("gradient_clipping"), || 1.0)
    };

    #[test]
    fn sources_are_in_order() {
        let flag = TrainArgs {
            clip: Some(4.0),
            ..TrainArgs::default()
        };

        let no_flag = TrainArgs::default();
        let file = DsConfig::parse(r#"{"gradient_clipping": 3.0}"#).unwrap();
        let auto = DsConfig::parse(r#"{"gradient_clipping": "auto"}"#).unwrap();

        let value = |args, file, recorded| {
            let from = Sources {
                args,
                file,
                zero: None,
                recorded,
            };
            from.value(&CLIP)
        };

        assert_eq!(value(&flag, Some(&file), Some(&2.0)), 4.0);
        assert_eq!(value(&no_flag, Some(&file), Some(&2.0)), 3.0);
        assert_eq!(value(&no_flag, Some(&auto), Some(&2.0)), 2.0);
        assert_eq!(value(&no_flag, None, None), 1.0);
    }
}
