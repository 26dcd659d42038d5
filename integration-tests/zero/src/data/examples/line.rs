//! One line of JSON as an example.

use std::fmt;
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::ValueKind;
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::data::DataError;

/// The lines of a file, each an example.
pub(super) type Lines = Box<dyn Iterator<Item = Result<String, DataError>>>;

/// The form of the examples of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// `text`: all tokens are trained.
    Text,
    /// `prompt` and `completion`: the completion is trained.
    Completion,
    /// `messages`: those of the assistant are trained.
    Messages,
}

impl Form {
    /// The keys of a line, for messages.
    pub(crate) fn keys(self) -> &'static str {
        match self {
            Self::Text => "`text`",
            Self::Completion => "`prompt` and `completion`",
            Self::Messages => "`messages`",
        }
    }
}

/// The keys of [`Keys`].
#[cfg(feature = "parquet")]
pub(super) const KEYS: [&str; 5] = ["text", "prompt", "completion", "messages", "tools"];

/// The value of a key, without the elements of lists and objects.
#[derive(Debug)]
enum Shallow {
    Text(String),
    List,
    /// Its kind, for messages.
    Other(&'static str),
}

impl<'de> Deserialize<'de> for Shallow {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ShallowVisitor)
    }
}

struct ShallowVisitor;

impl<'de> Visitor<'de> for ShallowVisitor {
    type Value = Shallow;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_str<E>(self, text: &str) -> Result<Shallow, E> {
        Ok(Shallow::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Shallow, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Shallow::List)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Shallow, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Shallow::Other("map"))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Shallow, E> {
        Ok(Shallow::Other("bool"))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Shallow, E> {
        Ok(Shallow::Other("number"))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Shallow, E> {
        Ok(Shallow::Other("number"))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Shallow, E> {
        Ok(Shallow::Other("number"))
    }
}

/// The known keys of a line. Others are ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Keys {
    text: Option<Shallow>,
    prompt: Option<Shallow>,
    completion: Option<Shallow>,
    messages: Option<Shallow>,
}

/// The keys of a conversation.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ConversationKeys {
    prompt: Option<Value>,
    completion: Option<Value>,
    messages: Option<Value>,
    tools: Option<Value>,
}

/// One example.
#[derive(Clone, Debug)]
pub(super) enum Line {
    Text(String),
    Completion {
        prompt: String,
        completion: String,
    },
    /// A line that [`Conversation::parse`] reads.
    Conversation(Form),
}

/// A conversation to render. The first `given` messages are a prompt, whose assistant's messages are
/// not trained.
#[derive(Clone, Debug)]
pub(super) struct Conversation {
    pub(super) messages: Vec<Value>,
    pub(super) given: usize,
    pub(super) tools: Option<Value>,
}

/// The keys that make a line an example, whatever the flags.
pub(super) fn has_example_keys(line: &str) -> bool {
    serde_json::from_str::<Keys>(line).is_ok_and(|keys| {
        keys.messages.is_some() || keys.prompt.is_some() || keys.completion.is_some()
    })
}

/// Whether a line is an object with `text`.
pub(super) fn has_text_key(line: &str) -> bool {
    serde_json::from_str::<Keys>(line).is_ok_and(|keys| keys.text.is_some())
}

impl Line {
    /// Parses a line. The error says what is wrong with it, and what to do.
    pub(super) fn parse(line: &str) -> Result<Self, String> {
        let keys: Keys = serde_json::from_str(line).map_err(|error| {
            let text = error.to_string();
            let text = text.split(" at line ").next().unwrap_or_default();
            format!(
                "not a JSON object at column {}: {text}; each line must be one object",
                error.column()
            )
        })?;
        match keys {
            Keys {
                messages: Some(_),
                text: Some(_),
                ..
            } => Err("it has both `messages` and `text`: remove one of them".to_owned()),
            Keys {
                text: Some(_),
                completion: Some(_),
                ..
            } => Err("it has both `text` and `completion`: remove one of them".to_owned()),
            Keys {
                messages: Some(_),
                completion: Some(_),
                ..
            } => Err("it has both `messages` and `completion`: remove one of them".to_owned()),
            Keys {
                messages: Some(_), ..
            } => Ok(Self::Conversation(Form::Messages)),
            Keys {
                prompt: Some(Shallow::List),
                completion: Some(_),
                ..
            }
            | Keys {
                prompt: Some(_),
                completion: Some(Shallow::List),
                ..
            } => Ok(Self::Conversation(Form::Completion)),
            Keys {
                prompt: Some(prompt),
                completion: Some(completion),
                ..
            } => Ok(Self::Completion {
                prompt: prompt.text("prompt")?,
                completion: completion.text("completion")?,
            }),
            Keys {
                completion: Some(_),
                ..
            } => Err(
                "it has `completion` without `prompt`: add \"prompt\": \"\" if there is none"
                    .to_owned(),
            ),
            Keys {
                text: Some(text), ..
            } => Ok(Self::Text(text.text("text")?)),
            Keys {
                prompt: Some(_), ..
            } => Err(
                "it has `prompt` without `completion`: add the text to be trained, or name the key `text`"
                    .to_owned(),
            ),
            Keys { .. } => Err(
                "it has none of the keys `text`, `prompt` with `completion`, or `messages`; rename the keys of the data"
                    .to_owned(),
            ),
        }
    }

    pub(super) fn form(&self) -> Form {
        match self {
            Self::Text(_) => Form::Text,
            Self::Completion { .. } => Form::Completion,
            Self::Conversation(form) => *form,
        }
    }
}

impl Shallow {
    fn text(self, key: &str) -> Result<String, String> {
        let kind = match self {
            Self::Text(text) => return Ok(text),
            Self::List => "sequence",
            Self::Other(kind) => kind,
        };
        Err(format!("`{key}` is {kind}, and must be a string"))
    }
}

impl Conversation {
    /// Parses a line that is [`Line::Conversation`]. The error says what is wrong with it.
    pub(super) fn parse(line: &str) -> Result<Self, String> {
        let keys: ConversationKeys = serde_json::from_str(line).map_err(|e| e.to_string())?;
        if let Some(number) = lost_integer(line) {
            return Err(format!(
                "the number {number} is not supported: write it as a string, or with a point"
            ));
        }
        let tools = tools_list(keys.tools)?;
        if let Some(messages) = keys.messages {
            return Ok(Self {
                messages: conversation(&messages, "messages")?,
                given: 0,
                tools,
            });
        }
        let mut messages = conversation(&keys.prompt.unwrap_or_default(), "prompt")?;
        let given = messages.len();
        messages.extend(conversation(
            &keys.completion.unwrap_or_default(),
            "completion",
        )?);
        Ok(Self {
            messages,
            given,
            tools,
        })
    }
}

/// The first integer of a line of JSON that becomes a float when it is parsed, and so is printed
/// otherwise.
fn lost_integer(line: &str) -> Option<&str> {
    // Of a line, the parts outside of strings.
    let mut is_string = false;
    let mut rest = line;
    while let Some(at) = rest.find(if is_string { ['"', '\\'] } else { ['"', '"'] }) {
        let outside = &rest[..at];
        let lost = (!is_string).then(|| lost_integer_in(outside)).flatten();
        if lost.is_some() {
            return lost;
        }
        let is_escape = rest[at..].starts_with('\\');
        is_string ^= !is_escape;
        rest = rest
            .get(at + 1 + usize::from(is_escape)..)
            .unwrap_or_default();
    }
    lost_integer_in(rest).filter(|_| !is_string)
}

fn lost_integer_in(text: &str) -> Option<&str> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit() && !"+-.eE".contains(c));
    numbers.find(|number| {
        let is_integer = number
            .trim_start_matches('-')
            .bytes()
            .all(|b| b.is_ascii_digit());
        let is_kept = match number.strip_prefix('-') {
            Some(digits) => number.parse::<i64>().is_ok() && digits != "0",
            None => number.parse::<u64>().is_ok(),
        };
        is_integer && !number.is_empty() && !is_kept
    })
}

/// The messages of a list.
fn conversation(value: &Value, key: &str) -> Result<Vec<Value>, String> {
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
        if role(message).is_none() {
            return Err(format!(
                "message {} of `{key}` has no `role` that is a string, such as user or assistant",
                index + 1
            ));
        }
    }
    Ok(messages.into_iter().map(as_rendered).collect())
}

/// The list of tools: JSON as text is parsed, as TRL does.
fn tools_list(tools: Option<Value>) -> Result<Option<Value>, String> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_told_apart() {
        let form = |line: &str| Line::parse(line).map(|line| line.form());
        assert_eq!(form(r#"{"text": "a"}"#), Ok(Form::Text));
        assert_eq!(
            form(r#"{"prompt": "a", "completion": "b", "id": 3}"#),
            Ok(Form::Completion)
        );
        let chat = r#"[{"role": "user", "content": "a"}]"#;
        assert_eq!(
            form(&format!(r#"{{"messages": {chat}, "prompt": "a"}}"#)),
            Ok(Form::Messages)
        );
        assert_eq!(
            form(&format!(r#"{{"prompt": {chat}, "completion": {chat}}}"#)),
            Ok(Form::Completion)
        );
    }

    /// As by transformers 5.
    #[test]
    fn messages_are_as_transformers_renders_them() {
        for (message, expected) in [
            (
                r#"{"role": "a", "content": "b"}"#,
                r#"{"role":"a","content":"b"}"#,
            ),
            (
                r#"{"content": null, "role": "a", "tool_calls": null}"#,
                r#"{"role":"a"}"#,
            ),
            (
                r#"{"role": "a", "reasoning": "b"}"#,
                r#"{"thinking":"b","role":"a","reasoning":"b","reasoning_content":"b"}"#,
            ),
            (
                r#"{"role": "a", "thinking": "c", "reasoning_content": "b"}"#,
                r#"{"thinking":"c","role":"a","reasoning_content":"b"}"#,
            ),
            (
                r#"{"reasoning_content": null, "thinking": "", "role": "a"}"#,
                r#"{"thinking":"","role":"a","reasoning_content":""}"#,
            ),
        ] {
            let line = format!(r#"{{"messages": [{message}]}}"#);
            let messages = Conversation::parse(&line).unwrap().messages;
            assert_eq!(serde_json::to_string(&messages[0]).unwrap(), expected);
        }
    }

    #[test]
    fn malformed_lines_are_errors() {
        for (line, expected) in [
            ("", "not a JSON object at column 0"),
            ("[1", "not a JSON object"),
            ("{\"text\": \"a\"} x", "column 15: trailing characters"),
            ("{}", "none of the keys"),
            (r#"{"text": 3}"#, "`text` is number"),
            (r#"{"prompt": "a"}"#, "without `completion`"),
            (r#"{"completion": "a"}"#, "without `prompt`"),
            (
                r#"{"text": "a", "messages": []}"#,
                "both `messages` and `text`",
            ),
            (
                r#"{"prompt": "a", "completion": {}}"#,
                "`completion` is map, and must be a string",
            ),
        ] {
            let error = Line::parse(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
        for (line, expected) in [
            (r#"{"messages": []}"#, "no message"),
            (r#"{"messages": "a"}"#, "must be a list"),
            (
                r#"{"messages": [{"content": "a"}]}"#,
                "message 1 of `messages` has no `role`",
            ),
            (
                r#"{"prompt": [{"role": "user"}], "completion": "a"}"#,
                "`completion` is string, and must be a list",
            ),
            (
                r#"{"messages": [{"role": "a"}], "tools": "["}"#,
                "`tools` is a string, which is not JSON",
            ),
            (
                r#"{"messages": [{"role": "a", "n\\\"": -123456789012345678901.0, "m": 18446744073709551616}]}"#,
                "the number 18446744073709551616 is not supported",
            ),
            (
                r#"{"messages": [{"role": "18446744073709551616", "n": -0}]}"#,
                "the number -0 is not supported",
            ),
            (
                r#"{"messages": [{"role": "a"}], "tools": {}}"#,
                "`tools` is map, and must be a list",
            ),
        ] {
            assert!(matches!(Line::parse(line), Ok(Line::Conversation(_))));
            let error = Conversation::parse(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
