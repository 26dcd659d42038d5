//! What the configurations of all architectures share: errors, limits, keys of `config.json`,
//! initial values.

pub(crate) mod init;
pub(crate) mod json;
pub mod rope;

use thiserror::Error;

/// An invalid model configuration, or a request that does not fit it.
#[derive(Clone, Debug, Error, PartialEq)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum ConfigError {
    /// No preset has this name.
    #[error("no model preset {name:?}{meant}; the presets are {presets}")]
    UnknownPreset {
        name: String,
        /// A question about the preset that may be meant; empty if none is near.
        meant: String,
        presets: String,
    },
    /// The named size is 0.
    #[error("the model's {0} is 0; it must be at least 1")]
    Zero(&'static str),
    /// A size is not divisible by another.
    #[error("the model's {what} {size} is not divisible by its {by} {divisor}")]
    DoesNotDivide {
        what: &'static str,
        size: usize,
        by: &'static str,
        divisor: usize,
    },
    /// The parameter count overflows.
    #[error("the model is too large: its parameter count has more than 59 bits")]
    TooLarge,
    /// More blocks than the limit, which bounds the memory for parameter names.
    #[error("the model's {field} is {layers}; it must be {MAX_LAYERS} at most")]
    TooManyLayers { field: &'static str, layers: usize },
    /// A number outside its range.
    #[error("the model's {field} is {value}; it must be {expected}")]
    OutOfRange {
        /// The name of the number.
        field: &'static str,
        value: f32,
        /// The allowed range.
        expected: &'static str,
    },
    /// The text is not a JSON object; the parser's message.
    #[error("not a JSON object: {0}")]
    Json(String),
    /// A required key is missing.
    #[error("the key {0:?} is missing")]
    MissingKey(&'static str),
    /// A key has a value of another type.
    #[error("the key {key:?} is {got}; expected {expected}")]
    WrongType {
        key: &'static str,
        /// The expected type.
        expected: &'static str,
        got: String,
    },
    /// A variant of the architecture that this trainer does not support.
    #[error(
        "the key {key:?} is {got}, which this trainer does not support; it supports {supported}"
    )]
    Unsupported {
        key: &'static str,
        got: String,
        /// The supported values.
        supported: &'static str,
    },
    /// Adapters that the model cannot have.
    #[error("LoRA: {0}")]
    Lora(String),
    /// The model has no parameter of this name.
    #[error("the model has no parameter {0:?}")]
    UnknownParameter(String),
    /// A range of elements that is outside the parameter or does not have the buffer's length.
    #[error("elements {start}..{end} of {name:?} ({numel} elements) do not fit a buffer of {len}")]
    BadRange {
        name: String,
        start: u64,
        /// The end of the range.
        end: u64,
        numel: u64,
        len: usize,
    },
}

/// Maximum number of blocks. It bounds the memory for the list of parameter names.
pub(crate) const MAX_LAYERS: usize = 1 << 16;

/// Checks the sizes of a model, blocks under `layers` and elements under `count`.
pub(crate) fn check_sizes(
    sizes: &[(&'static str, usize)],
    layers: (&'static str, usize),
    count: impl FnOnce() -> u128,
) -> Result<(), ConfigError> {
    let zero = sizes.iter().chain([&layers]).find(|(_, n)| *n == 0);
    if let Some(&(field, _)) = zero {
        return Err(ConfigError::Zero(field));
    }
    if layers.1 > MAX_LAYERS {
        let (field, layers) = layers;
        return Err(ConfigError::TooManyLayers { field, layers });
    }
    // Sizes of 2^31 or more are rejected before `count` multiplies them, so u128 does not overflow.
    if sizes.iter().any(|(_, n)| *n > i32::MAX as usize) || count() > 1 << 59 {
        return Err(ConfigError::TooLarge);
    }
    Ok(())
}

/// Checks that a size is divisible by another.
pub(crate) fn check_divides(
    (what, size): (&'static str, usize),
    (by, divisor): (&'static str, usize),
) -> Result<(), ConfigError> {
    if size.is_multiple_of(divisor) {
        return Ok(());
    }
    Err(ConfigError::DoesNotDivide {
        what,
        size,
        by,
        divisor,
    })
}

/// Checks that a number is finite and above 0.
pub(crate) fn check_positive(field: &'static str, value: f32) -> Result<(), ConfigError> {
    let is_valid = value > 0.0 && value.is_finite();
    check_range(field, value, is_valid, "finite and above 0")
}

/// Checks a probability of dropout.
pub(crate) fn check_dropout(field: &'static str, value: f32) -> Result<(), ConfigError> {
    let is_valid = (0.0..1.0).contains(&value);
    check_range(field, value, is_valid, "at least 0 and below 1")
}

/// Checks that a standard deviation is finite and not negative.
pub(crate) fn check_deviation(field: &'static str, value: f32) -> Result<(), ConfigError> {
    let is_valid = value >= 0.0 && value.is_finite();
    check_range(field, value, is_valid, "finite and not negative")
}

fn check_range(
    field: &'static str,
    value: f32,
    is_valid: bool,
    expected: &'static str,
) -> Result<(), ConfigError> {
    match is_valid {
        true => Ok(()),
        false => Err(ConfigError::OutOfRange {
            field,
            value,
            expected,
        }),
    }
}
