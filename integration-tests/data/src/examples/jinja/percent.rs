//! Python's `%` of a string.

use minijinja::Error;
use minijinja::value::{Value, ValueKind};

use super::numbers::{float, integer};
use super::python::{Listed, is_number, listed, text};
use super::refused;

/// Python's `template % values`.
pub(super) fn percent_format(template: &Value, values: &Value) -> Result<Value, Error> {
    let template = template.as_str().unwrap_or_default();
    let is_tuple = listed(values) == Some(Listed::Tuple);
    let mut values: Vec<Value> = match is_tuple {
        true => values.try_iter()?.collect(),
        false if values.kind() == ValueKind::Map && template.contains("%(") => {
            return Err(refused("% with names is not supported"));
        }
        false => vec![values.clone()],
    };
    let is_map = !is_tuple
        && values
            .first()
            .is_some_and(|one| matches!(one.kind(), ValueKind::Map | ValueKind::Seq));
    values.reverse();
    let mut out = String::new();
    let mut rest = template;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        let conversion = rest[at + 1..].chars().next();
        rest = &rest[(at + 2).min(rest.len())..];
        if conversion == Some('%') {
            out.push('%');
            continue;
        }
        let mut next = || values.pop().ok_or_else(|| refused("% has too few values"));
        match conversion {
            Some('s') => out.push_str(&text(&next()?)?),
            Some('d' | 'i') => {
                let value = next()?;
                let whole = match integer(&value) {
                    Some(whole) => whole,
                    None if value.is_number() && float(&value)?.abs() < 1e30 => {
                        float(&value)?.trunc() as i128
                    }
                    None => return Err(refused("%d of no number")),
                };
                out.push_str(&whole.to_string());
            }
            Some('f') => {
                let value = next()?;
                if !is_number(&value) {
                    return Err(refused("%f of no number"));
                }
                out.push_str(&format!("{:.6}", float(&value)?));
            }
            _ => return Err(refused("a conversion of % that is not s, d, i or f")),
        }
    }
    out.push_str(rest);
    match values.is_empty() || is_map {
        true => Ok(out.into()),
        false => Err(refused("% has too many values")),
    }
}
