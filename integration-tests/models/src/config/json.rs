//! The keys of a `config.json`.

use serde_json::{Map, Value};

use super::ConfigError;

/// The text of a `config.json` with these keys and special tokens.
pub(crate) fn text(mut keys: Value, special_tokens: &[(&'static str, Value)]) -> String {
    for (key, value) in special_tokens {
        keys[key] = value.clone();
    }
    // Serializing numbers, flags and strings does not fail.
    serde_json::to_string_pretty(&keys).unwrap_or_default() + "\n"
}

/// The number whose shortest decimal is that of `value`.
pub(crate) fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

const SPECIAL_TOKENS: [&str; 3] = ["bos_token_id", "eos_token_id", "pad_token_id"];

/// The file's keys; null counts as missing.
#[derive(Clone, Default)]
pub(crate) struct Keys(Map<String, Value>);

impl Keys {
    /// The keys of an object.
    pub(crate) fn of(object: Map<String, Value>) -> Self {
        Self(object)
    }

    /// The keys of an object in JSON.
    pub(crate) fn parse(text: &str) -> Result<Self, ConfigError> {
        let value: Value =
            serde_json::from_str(text).map_err(|e| ConfigError::Json(e.to_string()))?;
        match value {
            Value::Object(object) => Ok(Self(object)),
            other => Err(ConfigError::Json(format!(
                "the text is {}",
                name_of(&other)
            ))),
        }
    }

    /// The value of a key.
    pub(crate) fn get(&self, key: &'static str) -> Option<&Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    /// The keys of special tokens that are there. They do not change the model, and its
    /// `config.json` keeps them.
    pub(crate) fn special_tokens(&self) -> Vec<(&'static str, Value)> {
        let present = |key| Some((key, self.get(key)?.clone()));
        SPECIAL_TOKENS.into_iter().filter_map(present).collect()
    }

    /// Whether a key is there, and null.
    pub(crate) fn is_null(&self, key: &'static str) -> bool {
        self.0.get(key).is_some_and(Value::is_null)
    }

    /// Checks that a key, if present, has a supported value.
    pub(crate) fn expect(
        &self,
        key: &'static str,
        ok: impl Fn(&Value) -> bool,
        supported: &'static str,
    ) -> Result<(), ConfigError> {
        match self.get(key) {
            Some(v) if !ok(v) => Err(ConfigError::Unsupported {
                key,
                got: v.to_string(),
                supported,
            }),
            _ => Ok(()),
        }
    }

    /// A required whole number.
    pub(crate) fn size(&self, key: &'static str) -> Result<usize, ConfigError> {
        let value = self.get(key).ok_or(ConfigError::MissingKey(key))?;
        let wrong = || ConfigError::WrongType {
            key,
            expected: "a whole number",
            got: value.to_string(),
        };
        value
            .as_u64()
            .and_then(|n| usize::try_from(n).ok())
            .ok_or_else(wrong)
    }

    /// A whole number, or `default` if it is not there.
    pub(crate) fn size_or(&self, key: &'static str, default: usize) -> Result<usize, ConfigError> {
        match self.get(key) {
            None => Ok(default),
            Some(_) => self.size(key),
        }
    }

    /// A number in fp32, or `default` if it is not there.
    pub(crate) fn number_or(&self, key: &'static str, default: f64) -> Result<f32, ConfigError> {
        Ok(self.number(key)?.unwrap_or(default) as f32)
    }

    /// True or false, or `default` if it is not there.
    pub(crate) fn flag_or(&self, key: &'static str, default: bool) -> Result<bool, ConfigError> {
        Ok(self.flag(key)?.unwrap_or(default))
    }

    /// A number, if it is there.
    pub(crate) fn number(&self, key: &'static str) -> Result<Option<f64>, ConfigError> {
        let wrong = |v: &Value| ConfigError::WrongType {
            key,
            expected: "a number",
            got: v.to_string(),
        };
        self.get(key)
            .map(|v| v.as_f64().ok_or_else(|| wrong(v)))
            .transpose()
    }

    /// True or false, if it is there.
    pub(crate) fn flag(&self, key: &'static str) -> Result<Option<bool>, ConfigError> {
        let wrong = |v: &Value| ConfigError::WrongType {
            key,
            expected: "true or false",
            got: v.to_string(),
        };
        self.get(key)
            .map(|v| v.as_bool().ok_or_else(|| wrong(v)))
            .transpose()
    }
}

fn name_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
