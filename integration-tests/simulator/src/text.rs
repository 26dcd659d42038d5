//! Files of machines and of efficiencies: JSON if the name ends in `.json`, TOML otherwise.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Reads the text of `file`.
///
/// # Errors
/// The parser's message.
pub fn from_text<T: DeserializeOwned>(text: &str, file: &str) -> Result<T, String> {
    match file.ends_with(".json") {
        true => serde_json::from_str(text).map_err(|error| error.to_string()),
        false => toml::from_str(text).map_err(|error| error.message().to_owned()),
    }
}

/// The text of `value` for `file`.
///
/// # Errors
/// The writer's message.
pub fn to_text<T: Serialize>(value: &T, file: &str) -> Result<String, String> {
    match file.ends_with(".json") {
        true => serde_json::to_string_pretty(value).map_err(|error| error.to_string()),
        false => toml::to_string(value).map_err(|error| error.to_string()),
    }
}
