//! ShareGPT's conversations as messages, with the roles of axolotl and LLaMA-Factory.

use minijinja::Value;
use minijinja::value::ValueKind;
use serde_json::json;

use super::messages::{self, check_weight};

/// The messages of `conversations`, after a message of the row's `system`.
///
/// # Errors
/// The defect and the remedy.
pub(super) fn messages(
    conversations: &Value,
    system: Option<&Value>,
) -> Result<Vec<Value>, String> {
    let mut messages = if has_roles(conversations) {
        messages::messages(conversations, "conversations")?
    } else {
        turns(conversations)?
    };

    let Some(system) = system.filter(|system| system.is_true()) else {
        return Ok(messages);
    };
    let Some(system) = system.as_str() else {
        return Err(format!(
            "`system` is {}, and must be a string",
            system.kind()
        ));
    };
    let role = |message: &Value| message.get_attr("role").unwrap_or_default();
    if messages
        .iter()
        .any(|message| role(message).as_str() == Some("system"))
    {
        return Err("it has `system` and a system message: remove one of them".to_owned());
    }
    messages.insert(0, message("system", system));
    Ok(messages)
}

/// Whether the first message has a `role`, as those of `messages` have.
fn has_roles(conversations: &Value) -> bool {
    let first = conversations.get_item_by_index(0).unwrap_or_default();
    let role = first.get_attr("role").unwrap_or_default();
    role.as_str().is_some()
}

fn turns(conversations: &Value) -> Result<Vec<Value>, String> {
    if conversations.kind() != ValueKind::Seq {
        return Err(format!(
            "`conversations` is {}, and must be a list of objects with `from` and `value`",
            conversations.kind()
        ));
    }
    let turns: Vec<Value> = conversations
        .try_iter()
        .map_err(|e| e.to_string())?
        .collect();
    if turns.is_empty() {
        return Err("`conversations` has no message: remove the row".to_owned());
    }

    let turns = turns.iter().enumerate().map(|(index, turn)| {
        check_weight(turn, index, "conversations")?;
        of_turn(turn).map_err(|error| format!("message {} of `conversations` {error}", index + 1))
    });
    turns.collect()
}

/// A turn as a message.
fn of_turn(turn: &Value) -> Result<Value, String> {
    let text = |key: &str| {
        let value = turn.get_attr(key).unwrap_or_default();
        let text = value.as_str().map(str::to_owned);
        text.ok_or_else(|| format!("has no `{key}` that is a string"))
    };
    let from = text("from")?;
    let value = text("value")?;
    let role = match from.as_str() {
        "human" | "user" => "user",
        "gpt" | "assistant" | "chatgpt" | "bard" | "bing" => "assistant",
        "system" => "system",
        "tool" | "observation" | "function_response" => "tool",
        "function_call" => return calls(&value),
        _ => {
            return Err(format!(
                "is from {from:?}, and must be from human or user, gpt or assistant, system, function_call, or tool or \
                 observation"
            ));
        }
    };
    Ok(message(role, &value))
}

fn message(role: &str, content: &str) -> Value {
    Value::from_serialize(json!({"role": role, "content": content}))
}

/// The assistant's message with the calls of tools that are JSON in `text`, as LLaMA-Factory has
/// them: an object with `name` and `arguments`, or a list of them.
fn calls(text: &str) -> Result<Value, String> {
    let error = || {
        "is a function_call, and its value must be JSON with `name` and `arguments`, or a list of such".to_owned()
    };
    let parsed: serde_json::Value = serde_json::from_str(text).map_err(|_| error())?;
    let calls = match parsed {
        serde_json::Value::Array(calls) => calls,
        one => vec![one],
    };

    let is_call =
        |call: &serde_json::Value| call["name"].is_string() && !call["arguments"].is_null();
    if calls.is_empty() || !calls.iter().all(is_call) {
        return Err(error());
    }
    let calls: Vec<serde_json::Value> = calls
        .into_iter()
        .map(|call| {
            let function = json!({"name": call["name"], "arguments": call["arguments"]});
            json!({"type": "function", "function": function})
        })
        .collect();
    Ok(Value::from_serialize(
        json!({"role": "assistant", "content": "", "tool_calls": calls}),
    ))
}

#[cfg(test)]
mod tests {
    use crate::examples::conversation::Conversation;
    use crate::examples::line::{Form, Line};

    /// The messages as JSON.
    fn parse(row: &serde_json::Value) -> Result<serde_json::Value, String> {
        let row = row.to_string();
        let (form, line) = Line::parse(&row)?;
        assert!(matches!((form, line), (Form::ShareGpt, Line::Conversation)));
        let conversation = Conversation::parse(&row)?;
        assert_eq!(conversation.given, 0);
        Ok(serde_json::to_value(conversation.messages).unwrap())
    }

    use serde_json::json;

    /// The expected roles are those that axolotl's and LLaMA-Factory's converters give.
    #[test]
    fn roles_are_mapped() {
        let turn = |from: &str, value: &str| json!({"from": from, "value": value});
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let call = r#"{"name": "add", "arguments": {"a": 1}}"#;
        let row = json!({"id": 7, "system": "Be brief.", "conversations": [
            turn("human", "1+1?"), turn("function_call", call), turn("observation", "2"), turn("gpt", "It is 2."),
            turn("user", "Sure?"), turn("assistant", "Yes."), turn("tool", "3"), turn("chatgpt", "No."),
        ]});
        let function = json!({"name": "add", "arguments": {"a": 1}});
        let expected = json!([
            message("system", "Be brief."), message("user", "1+1?"),
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            message("tool", "2"), message("assistant", "It is 2."), message("user", "Sure?"),
            message("assistant", "Yes."), message("tool", "3"), message("assistant", "No."),
        ]);
        assert_eq!(parse(&row), Ok(expected));

        let messages = json!([message("user", "a"), message("assistant", "b")]);
        let row = json!({"conversations": messages, "system": ""});
        assert_eq!(parse(&row), Ok(messages));
    }

    #[test]
    fn malformed_conversations_are_errors() {
        let of = |conversations: serde_json::Value| json!({"conversations": conversations});
        let turn = |from: &str, value: &str| json!({"from": from, "value": value});
        for (row, expected) in [
            (
                of(json!("a")),
                "`conversations` is string, and must be a list",
            ),
            (of(json!([])), "no message"),
            (
                of(json!([{"from": "human"}])),
                "message 1 of `conversations` has no `value`",
            ),
            (
                of(json!([{"value": "a"}])),
                "message 1 of `conversations` has no `from`",
            ),
            (
                of(json!([turn("human", "a"), turn("moderator", "b")])),
                "message 2 of `conversations` is from \"moderator\", and must be from human",
            ),
            (
                of(json!([turn("function_call", "add(1)")])),
                "message 1 of `conversations` is a function_call, and its value must be JSON",
            ),
            (
                of(json!([{"from": "gpt", "value": "a", "weight": 0}])),
                "message 1 of `conversations` has the `weight` 0",
            ),
            (
                json!({"conversations": [turn("system", "a")], "system": "b"}),
                "it has `system` and a system message",
            ),
            (
                json!({"conversations": [turn("human", "a")], "system": 3}),
                "`system` is number",
            ),
        ] {
            let error = parse(&row).unwrap_err();
            assert!(error.contains(expected), "{row}: {error}");
        }
    }
}
