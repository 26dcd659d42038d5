//! The messages of a conversation as transformers renders them.

use std::sync::Arc;

use minijinja::Value;
use minijinja::value::ValueKind;

/// The messages of a list.
pub(super) fn messages(value: &Value, key: &str) -> Result<Vec<Value>, String> {
    if value.kind() != ValueKind::Seq {
        return Err(format!(
            "`{key}` is {}, and must be a list of objects with `role` and `content`",
            value.kind()
        ));
    }
    let messages: Vec<Value> = value.try_iter().map_err(|e| e.to_string())?.collect();
    if messages.is_empty() {
        return Err(format!("`{key}` has no message: remove the line"));
    }
    for (index, message) in messages.iter().enumerate() {
        if message.kind() != ValueKind::Map {
            return Err(format!(
                "message {} of `{key}` is {}, and must be an object with `role` and `content`",
                index + 1,
                message.kind()
            ));
        }
        if role(message).is_none() {
            return Err(format!(
                "message {} of `{key}` has no `role` that is a string, such as user or assistant",
                index + 1
            ));
        }
        check_weight(message, index, key)?;
    }
    Ok(messages.into_iter().map(as_rendered).collect())
}

/// A message with the weight 0 is one that other trainers do not train.
pub(super) fn check_weight(message: &Value, index: usize, key: &str) -> Result<(), String> {
    let weight = message.get_attr("weight").unwrap_or_default();
    if weight.is_none() || weight.is_undefined() || weight.is_true() {
        return Ok(());
    }
    Err(format!(
        "message {} of `{key}` has the `weight` 0, which is not read: pass what is given as `prompt` and what is trained \
         as `completion`",
        index + 1
    ))
}

/// The list of tools: JSON as text is parsed, as TRL does.
pub(super) fn tools_list(tools: Option<Value>) -> Result<Option<Value>, String> {
    let parsed = match tools.as_ref().and_then(Value::as_str) {
        None => tools,
        Some(text) => serde_json::from_str(text)
            .map_err(|error| format!("`tools` is a string, which is not JSON: {error}"))?,
    };
    match parsed.as_ref().map(Value::kind) {
        None | Some(ValueKind::Seq) => Ok(parsed),
        Some(ValueKind::None) => Ok(None),
        Some(kind) => Err(format!("`tools` is {kind}, and must be a list of tools")),
    }
}

/// The names that a message may give its reasoning.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A message as transformers renders it: keys that are null are absent, and reasoning has the names
/// `thinking` and `reasoning_content`, whatever its name.
fn as_rendered(message: Value) -> Value {
    let keys = message.try_iter().into_iter().flatten();
    let mut fields: Vec<(Value, Value)> = keys
        .filter_map(|key| {
            let value = message.get_item(&key).ok()?;
            Some((key, value))
        })
        .collect();
    let before = fields.len();
    fields.retain(|(_, value)| !value.is_none());

    let place = |fields: &[(Value, Value)], name| {
        let mut keys = fields.iter();
        keys.position(|(key, _)| key.as_str() == Some(name))
    };
    let of = REASONING.iter().find_map(|name| place(&fields, name));
    let Some(reasoning) = of.map(|at| fields[at].1.clone()) else {
        return match fields.len() == before {
            true => message,
            false => fields.into_iter().collect(),
        };
    };
    let thinking = match place(&fields, "thinking") {
        Some(at) => fields.remove(at).1,
        None => reasoning.clone(),
    };
    fields.insert(0, ("thinking".into(), thinking));
    match place(&fields, "reasoning_content") {
        Some(at) => fields[at].1 = reasoning,
        None => fields.push(("reasoning_content".into(), reasoning)),
    }
    fields.into_iter().collect()
}

/// The role of a message.
fn role(message: &Value) -> Option<String> {
    let role = message.get_attr("role").ok()?;
    role.as_str().map(str::to_owned)
}

/// Whether a message is the assistant's.
pub(super) fn is_assistant(message: &Value) -> bool {
    role(message).as_deref() == Some("assistant")
}

/// Whether a message is the user's.
pub(super) fn is_user(message: &Value) -> bool {
    role(message).as_deref() == Some("user")
}

/// The content of a message, if it is text.
pub(super) fn content(message: &Value) -> Option<Arc<str>> {
    message.get_attr("content").ok()?.to_str()
}
