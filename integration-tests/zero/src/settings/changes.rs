//! What differs between the recorded settings of two runs.

use std::collections::{BTreeMap, BTreeSet};

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

    differences(&old, &new, &skips)
}

fn optimizer_texts(record: &RunRecord) -> [(&'static str, String); 2] {
    let rules = &record.optimizer;
    let scaling = optimizer::describe_loss_scaling(&rules.loss_scaling);
    [
        ("schedule", rules.schedule.to_string()),
        ("loss_scaling", scaling),
    ]
}

/// The differing numbers, strings, flags and lists of two documents, as `name old -> new`, without
/// those below a name that `skips`.
pub(crate) fn differences(was: &Value, now: &Value, skips: &dyn Fn(&str) -> bool) -> Vec<String> {
    let was = leaves(was, skips);
    let now = leaves(now, skips);
    let names: BTreeSet<&String> = was.keys().chain(now.keys()).collect();
    let differs = names
        .into_iter()
        .filter(|name| was.get(*name) != now.get(*name));
    let text = |value: Option<&String>| value.map_or("none", String::as_str).to_owned();
    differs
        .map(|name| format!("{name} {} -> {}", text(was.get(name)), text(now.get(name))))
        .collect()
}

/// The numbers, strings, flags and lists of a document as text, by their names, without those below
/// a name that `skips`. Null is no value.
pub(crate) fn leaves(document: &Value, skips: &dyn Fn(&str) -> bool) -> BTreeMap<String, String> {
    let mut leaves = BTreeMap::new();
    add_leaves(String::new(), document, skips, &mut leaves);
    leaves
}

fn add_leaves(
    path: String,
    value: &Value,
    skips: &dyn Fn(&str) -> bool,
    leaves: &mut BTreeMap<String, String>,
) {
    if skips(&path) {
        return;
    }
    let text = match value {
        Value::Null => return,
        Value::Object(fields) => {
            for (key, value) in fields {
                let below = match path.is_empty() {
                    true => key.clone(),
                    false => format!("{path}.{key}"),
                };
                add_leaves(below, value, skips, leaves);
            }
            return;
        }
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    leaves.insert(path, text);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn differences(was: Value, now: Value) -> Vec<String> {
        super::differences(&was, &now, &|path| path == "e")
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
