//! One block of a configuration. Reading a key checks its type and removes it; the remaining keys
//! are unknown.

use serde_json::{Map, Value};

use super::ConfigFileError;

/// A JSON object in a configuration, with its path.
///
/// Keys with the value `"auto"` or null read as missing.
pub(super) struct Block {
    /// Such as `zero_optimization.offload_param`; empty for the file itself.
    path: String,
    keys: Map<String, Value>,
}

/// An unsupported key.
#[derive(Clone, Copy)]
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) usual: Usual,
    /// The behavior of this program, or a remedy.
    pub(super) why: &'static str,
}

/// A table of unsupported keys, such as `"dump_state" = Flag(false) => "the first lines show it"`.
macro_rules! keys {
    ($($name:literal = $usual:ident $(($value:literal))? => $why:expr),* $(,)?) => {
        &[$($crate::block::Key {
            name: $name,
            usual: $crate::block::Usual::$usual $(($value))?,
            why: $why,
        }),*]
    };
}
pub(super) use keys;

/// The value of an unsupported key that needs no warning, because this program always behaves so.
#[derive(Clone, Copy)]
pub(super) enum Usual {
    Flag(bool),
    Number(u64),
    /// All values need a warning.
    Nothing,
}

impl Block {
    pub(super) fn root(keys: Map<String, Value>) -> Self {
        Self {
            path: String::new(),
            keys,
        }
    }

    pub(super) fn named(path: &str, keys: Map<String, Value>) -> Self {
        Self {
            path: path.to_owned(),
            keys,
        }
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.keys.get(key).is_some_and(is_set)
    }

    /// The key with its path, such as `fp16.loss_scale`.
    pub(super) fn name(&self, key: &str) -> String {
        if self.path.is_empty() {
            key.to_owned()
        } else {
            format!("{}.{key}", self.path)
        }
    }

    pub(super) fn is_auto(&self, key: &str) -> bool {
        self.keys.get(key).is_some_and(|value| value == "auto")
    }

    pub(super) fn peek(&self, key: &str) -> Option<&Value> {
        self.keys.get(key)
    }

    pub(super) fn take(&mut self, key: &str) -> Option<Value> {
        self.keys.remove(key).filter(is_set)
    }

    /// Renames a key.
    pub(super) fn rename(&mut self, from: &str, to: &str) -> Result<(), ConfigFileError> {
        if let Some(value) = self.keys.remove(from) {
            if self.keys.contains_key(to) {
                return Err(ConfigFileError::Conflict {
                    one: self.name(from),
                    other: self.name(to),
                });
            }
            self.keys.insert(to.to_owned(), value);
        }
        Ok(())
    }

    /// Removes a key and converts its value.
    fn typed<T>(
        &mut self,
        key: &str,
        expected: &'static str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigFileError> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        let wrong = || ConfigFileError::WrongType {
            key: self.name(key),
            expected,
            got: shortened(&value),
        };
        read(&value).map(Some).ok_or_else(wrong)
    }

    pub(super) fn flag(&mut self, key: &str) -> Result<Option<bool>, ConfigFileError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(super) fn count(&mut self, key: &str) -> Result<Option<u64>, ConfigFileError> {
        self.typed(key, "a whole number, 0 or above", Value::as_u64)
    }

    pub(super) fn positive(&mut self, key: &str) -> Result<Option<u64>, ConfigFileError> {
        self.typed(key, "a whole number above 0", |v| {
            v.as_u64().filter(|n| *n > 0)
        })
    }

    /// A whole number that `is_valid`; `expected` describes such numbers.
    pub(super) fn count_in(
        &mut self,
        key: &str,
        expected: &'static str,
        is_valid: impl Fn(u64) -> bool,
    ) -> Result<Option<u64>, ConfigFileError> {
        self.typed(key, expected, |v| v.as_u64().filter(|n| is_valid(*n)))
    }

    pub(super) fn number(&mut self, key: &str) -> Result<Option<f64>, ConfigFileError> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// A number in `range`; `expected` describes the range.
    pub(super) fn number_in(
        &mut self,
        key: &str,
        range: std::ops::RangeInclusive<f64>,
        expected: &'static str,
    ) -> Result<Option<f64>, ConfigFileError> {
        self.typed(key, expected, |v| v.as_f64().filter(|x| range.contains(x)))
    }

    pub(super) fn text(&mut self, key: &str) -> Result<Option<String>, ConfigFileError> {
        self.typed(key, "a string", |v| v.as_str().map(str::to_owned))
    }

    pub(super) fn block(&mut self, key: &str) -> Result<Option<Self>, ConfigFileError> {
        let path = self.name(key);
        let keys = self.typed(key, "an object {..}", |v| v.as_object().cloned())?;
        Ok(keys.map(|keys| Self { path, keys }))
    }

    /// Removes unsupported keys; each adds a warning, except if it has its usual value.
    pub(super) fn ignore(
        &mut self,
        table: &[Key],
        warnings: &mut Vec<String>,
    ) -> Result<(), ConfigFileError> {
        for Key { name, usual, why } in table {
            let is_usual = match usual {
                Usual::Flag(usual) => self.flag(name)?.is_none_or(|v| v == *usual),
                Usual::Number(usual) => self.number(name)?.is_none_or(|v| v == *usual as f64),
                Usual::Nothing => self.take(name).is_none(),
            };
            if !is_usual {
                warnings.push(format!("{} is ignored: {why}", self.name(name)));
            }
        }
        Ok(())
    }

    /// Rejects unsupported keys that would change the results, except if they have their usual
    /// value.
    pub(super) fn refuse(&mut self, table: &[Key]) -> Result<(), ConfigFileError> {
        for Key { name, usual, why } in table {
            let Some(value) = self.take(name) else {
                continue;
            };
            let is_usual = match usual {
                Usual::Flag(usual) => value == *usual,
                Usual::Number(usual) => value.as_f64() == Some(*usual as f64),
                Usual::Nothing => false,
            };
            if !is_usual {
                return Err(ConfigFileError::Unsupported {
                    key: self.name(name),
                    got: shortened(&value),
                    why,
                });
            }
        }
        Ok(())
    }

    /// Rejects the remaining keys.
    pub(super) fn end_strict(self) -> Result<(), ConfigFileError> {
        match self.keys.keys().next() {
            Some(key) => Err(ConfigFileError::UnknownKey(self.name(key))),
            None => Ok(()),
        }
    }

    /// Adds a warning for each remaining key.
    pub(super) fn end_lenient(self, warnings: &mut Vec<String>) {
        for key in self.keys.keys() {
            warnings.push(format!("unknown key {} is ignored", self.name(key)));
        }
    }

    /// The remaining keys.
    pub(super) fn into_rest(mut self) -> Map<String, Value> {
        self.keys.retain(|_, value| is_set(value));
        self.keys
    }
}

fn is_set(value: &Value) -> bool {
    !value.is_null() && value != "auto"
}

/// A value for an error message, cut after 40 characters.
pub(super) fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(40) {
        Some((cut, _)) => format!("{}..", &text[..cut]),
        None => text,
    }
}
