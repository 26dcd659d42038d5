//! What differs between the recorded settings of two runs.

use std::collections::BTreeSet;

use serde_json::Value;

use super::record::RunRecord;
use super::{optimizer, table};

/// The settings of `was` that differ in `now`, each as `name old -> new`.
pub(crate) fn between(was: &RunRecord, now: &RunRecord) -> Vec<String> {
    let skips = |path: &str| table::named(path).is_some_and(|row| !row.is_reported);
    let mut old = was.document();
    let mut new = now.document();

    // One line each, in the words of the block of settings.
    let texts = optimizer_texts(was).into_iter().zip(optimizer_texts(now));
    for ((key, was), (_, now)) in texts {
        if was != now {
            old["optimizer"][key] = Value::String(was);
            new["optimizer"][key] = Value::String(now);
        }
    }

    if was.param_groups != now.param_groups {
        old["param_groups"] = Value::String(was.param_groups.to_string());
        new["param_groups"] = Value::String(now.param_groups.to_string());
    }

    // The default is not written.
    old["offload"] = serde_json::to_value(&was.offload).unwrap_or_default();
    new["offload"] = serde_json::to_value(&now.offload).unwrap_or_default();

    let mut out = Vec::new();
    compare("", &old, &new, &skips, &mut out);
    out
}

fn optimizer_texts(record: &RunRecord) -> [(&'static str, String); 2] {
    let rules = &record.optimizer;
    let scaling = optimizer::describe_loss_scaling(&rules.loss_scaling);
    [
        ("schedule", rules.schedule.to_string()),
        ("loss_scaling", scaling),
    ]
}

/// Appends the differing numbers, strings and flags below `path`, except those that `skips`, as
/// `name old -> new`.
pub(crate) fn compare(
    path: &str,
    was: &Value,
    now: &Value,
    skips: &dyn Fn(&str) -> bool,
    out: &mut Vec<String>,
) {
    if skips(path) || was == now {
        return;
    }
    if !was.is_object() && !now.is_object() {
        out.push(format!("{path} {} -> {}", text(was), text(now)));
        return;
    }
    for key in keys(was, now) {
        let below = if path.is_empty() {
            key.clone()
        } else {
            format!("{path}.{key}")
        };
        compare(&below, &was[&key], &now[&key], skips, out);
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The keys of either object.
fn keys(a: &Value, b: &Value) -> BTreeSet<String> {
    let objects = [a, b].into_iter().filter_map(Value::as_object);
    objects.flat_map(|object| object.keys().cloned()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn differences(was: Value, now: Value) -> Vec<String> {
        let mut out = Vec::new();
        compare("", &was, &now, &|path| path == "e", &mut out);
        out
    }

    #[test]
    fn differences_name_each_setting() {
        let same = differences(json!({"a": {"b": 1e-3}}), json!({"a": {"b": 0.001}}));
        assert!(same.is_empty());

        let was = json!({"a": {"b": 1}, "c": "d", "e": {"f": 1}});
        let now = json!({"a": {"b": 2}, "c": "e"});
        assert_eq!(differences(was, now), ["a.b 1 -> 2", "c d -> e"]);

        let constant = json!({"type": "Constant"});
        let warmup = json!({"type": "LinearWarmup", "params": {"warmup_steps": 10}});
        let expected = [
            "params.warmup_steps none -> 10",
            "type Constant -> LinearWarmup",
        ];
        assert_eq!(differences(constant, warmup), expected);
    }
}
