//! Python's integers and floats in values.

use minijinja::Error;
use minijinja::value::{Value, ValueKind};

use super::refused;

/// An integer, of which bools are some.
pub(super) fn integer(value: &Value) -> Option<i128> {
    match value.kind() {
        ValueKind::Bool => Some(i128::from(value.is_true())),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok(),
        _ => None,
    }
}

pub(super) fn float(value: &Value) -> Result<f64, Error> {
    match value.kind() {
        ValueKind::Bool => Ok(f64::from(u8::from(value.is_true()))),
        _ => f64::try_from(value.clone()).or_else(|_| match integer(value) {
            // Rounded, as by Python.
            Some(integer) => Ok(integer as f64),
            None => Err(refused("a number is too large")),
        }),
    }
}

pub(super) fn from_integer(integer: i128) -> Value {
    match i64::try_from(integer) {
        Ok(integer) => Value::from(integer),
        Err(_) => Value::from(integer),
    }
}
