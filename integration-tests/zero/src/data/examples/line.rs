//! One row of JSON as an example.

use minijinja::Value;
use minijinja::value::ValueKind;
use serde::Deserialize;

use super::json::{has_nan, keys, without_nans};
use super::{alpaca, sharegpt};
use crate::data::DataError;

/// The rows of a file, each an example, with the lines where they begin.
pub(super) type Rows = Box<dyn Iterator<Item = Result<(u32, String), DataError>>>;

/// The form of the examples of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// `text`: all tokens are trained.
    Text,
    /// `prompt` and `completion`: the completion is trained.
    Completion,
    /// `messages`: those of the assistant are trained.
    Messages,
    /// `conversations`, as ShareGPT: those of the assistant are trained.
    ShareGpt,
    /// `instruction`, `input` and `output`, as Alpaca: the output is trained.
    Alpaca,
}

impl Form {
    /// The keys of a row, for messages.
    pub(crate) fn keys(self) -> &'static str {
        match self {
            Self::Text => "`text`",
            Self::Completion => "`prompt` and `completion`",
            Self::Messages => "`messages`",
            Self::ShareGpt => "`conversations`",
            Self::Alpaca => "`instruction` and `output`",
        }
    }

    /// Whether a chat template renders the rows.
    pub(super) fn has_messages(self) -> bool {
        matches!(self, Self::Messages | Self::ShareGpt)
    }
}

/// The forms, for messages.
pub(in crate::data) const FORMS: &str = "`prompt` and `completion`, `messages`, `conversations` of `from` and `value` (ShareGPT), \
     `instruction` and `output` (Alpaca), or `text`";

/// The keys of [`Keys`].
pub(super) const KEYS: [&str; 11] = [
    "text",
    "prompt",
    "completion",
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "system",
    "history",
    "tools",
];

/// The known keys of a row. Others are ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Keys {
    text: Option<Value>,
    prompt: Option<Value>,
    completion: Option<Value>,
    messages: Option<Value>,
    conversations: Option<Value>,
    instruction: Option<Value>,
    input: Option<Value>,
    output: Option<Value>,
    system: Option<Value>,
    history: Option<Value>,
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
    /// A conversation. The first `given` messages are a prompt, whose assistant's messages are not
    /// trained.
    Messages {
        messages: Vec<Value>,
        given: usize,
        tools: Option<Value>,
    },
}

impl Line {
    /// Parses a row. The error says what is wrong with it, and what to do.
    pub(super) fn parse(row: &str) -> Result<(Form, Self), String> {
        let keys = Keys::parse(row)?;
        let form = keys.form(row)?;
        let tools = tools_list(keys.tools)?;

        let line = match form {
            Form::Text => Self::Text(string(keys.text.as_ref(), "text")?),
            Form::Completion => Self::completion(
                &keys.prompt.unwrap_or_default(),
                &keys.completion.unwrap_or_default(),
                tools,
            )?,
            Form::Messages => Self::Messages {
                messages: conversation(&keys.messages.unwrap_or_default(), "messages")?,
                given: 0,
                tools,
            },
            Form::ShareGpt => Self::Messages {
                messages: sharegpt::messages(
                    &keys.conversations.unwrap_or_default(),
                    keys.system.as_ref(),
                )?,
                given: 0,
                tools,
            },
            Form::Alpaca => {
                alpaca::check_unused("system", keys.system.as_ref())?;
                alpaca::check_unused("history", keys.history.as_ref())?;
                let instruction = string(keys.instruction.as_ref(), "instruction")?;
                let input = keys
                    .input
                    .as_ref()
                    .map(|input| string(Some(input), "input"));
                Self::Completion {
                    prompt: alpaca::prompt(&instruction, &input.transpose()?.unwrap_or_default()),
                    completion: string(keys.output.as_ref(), "output")?,
                }
            }
        };
        Ok((form, line))
    }

    fn completion(
        prompt: &Value,
        completion: &Value,
        tools: Option<Value>,
    ) -> Result<Self, String> {
        if prompt.kind() != ValueKind::Seq && completion.kind() != ValueKind::Seq {
            return Ok(Self::Completion {
                prompt: string(Some(prompt), "prompt")?,
                completion: string(Some(completion), "completion")?,
            });
        }
        let mut messages = conversation(prompt, "prompt")?;
        let given = messages.len();
        messages.extend(conversation(completion, "completion")?);
        Ok(Self::Messages {
            messages,
            given,
            tools,
        })
    }
}

impl Keys {
    fn parse(row: &str) -> Result<Self, String> {
        let error = match serde_json::from_str(row) {
            Ok(keys) => return Ok(keys),
            Err(error) => error,
        };
        let Some(text) = without_nans(row) else {
            return Err(not_an_object(row, &error));
        };
        let keys: Self = serde_json::from_str(&text).map_err(|error| not_an_object(row, &error))?;
        if let Some((key, _)) = keys.all().into_iter().find(|(_, value)| is_nan(value)) {
            return Err(format!(
                "`{key}` has NaN or Infinity, which JSON does not: remove the row, or replace the value"
            ));
        }
        Ok(keys)
    }

    fn all(&self) -> [(&'static str, Option<&Value>); 11] {
        [
            ("text", self.text.as_ref()),
            ("prompt", self.prompt.as_ref()),
            ("completion", self.completion.as_ref()),
            ("messages", self.messages.as_ref()),
            ("conversations", self.conversations.as_ref()),
            ("instruction", self.instruction.as_ref()),
            ("input", self.input.as_ref()),
            ("output", self.output.as_ref()),
            ("system", self.system.as_ref()),
            ("history", self.history.as_ref()),
            ("tools", self.tools.as_ref()),
        ]
    }

    /// The form that the keys of a row have.
    fn form(&self, row: &str) -> Result<Form, String> {
        let is_alpaca = self.instruction.is_some() && self.output.is_some();
        let forms = [
            (Form::Messages, "messages", self.messages.is_some()),
            (
                Form::ShareGpt,
                "conversations",
                self.conversations.is_some(),
            ),
            (Form::Alpaca, "instruction", is_alpaca),
            (Form::Text, "text", self.text.is_some()),
            (Form::Completion, "completion", self.completion.is_some()),
        ];
        let mut found = forms.into_iter().filter(|(_, _, is_present)| *is_present);

        match (found.next(), found.next()) {
            (Some((_, one, _)), Some((_, other, _))) => Err(format!(
                "it has both `{one}` and `{other}`: remove one of them"
            )),
            (Some((Form::Completion, ..)), None) if self.prompt.is_none() => Err(
                "it has `completion` without `prompt`: add \"prompt\": \"\" if there is none"
                    .to_owned(),
            ),
            (Some((form, ..)), None) => Ok(form),
            (None, _) => {
                let remedy = match rows_key(row).filter(|name| OF_ROWS.contains(&name.as_str())) {
                    Some(name) => format!("write its rows as lines{}", as_lines_of(&name)),
                    None => "rename the keys of the data".to_owned(),
                };
                Err(format!(
                    "it has {}, and must have {FORMS}; {remedy}",
                    named(row)
                ))
            }
        }
    }
}

/// The keys of a row as text.
fn named(row: &str) -> String {
    /// More are not named.
    const MOST: usize = 12;

    let keys = keys(row);
    let named: Vec<String> = keys
        .iter()
        .take(MOST)
        .map(|key| format!("`{}`", key.name))
        .collect();
    match (&named[..], keys.len() - named.len()) {
        ([], _) => "no keys".to_owned(),
        ([key], _) => format!("the key {key}"),
        (_, 0) => format!("the keys {}", named.join(", ")),
        (_, more) => format!("the keys {} and {more} more", named.join(", ")),
    }
}

/// Why a row is no object, and what to do.
fn not_an_object(row: &str, error: &serde_json::Error) -> String {
    let row = row.trim_start();
    if row.starts_with('#') || row.starts_with("//") || row.starts_with("/*") {
        return "a comment, which JSON does not have: remove it".to_owned();
    }
    if row.starts_with('{') && error.is_eof() {
        return format!(
            "an object that does not end on its line: each line must be one object{}",
            as_lines(row)
        );
    }
    let text = error.to_string();
    let text = match text.split(" at line ").next() {
        // A value of another type.
        _ if !row.starts_with('{') && error.is_data() => "it has another type",
        text => text.unwrap_or_default(),
    };
    format!(
        "not a JSON object at column {}: {text}; each line must be one object",
        error.column()
    )
}

/// Names under which files have their rows.
const OF_ROWS: [&str; 5] = ["data", "rows", "train", "examples", "items"];

/// The key of an object under which its rows are, if there is one.
fn rows_key(object: &str) -> Option<String> {
    let mut keys = keys(object).into_iter();
    let found = keys.find(|key| key.has_objects && !KEYS.contains(&key.name.as_str()));
    found.map(|key| key.name)
}

/// How to write the rows below one of the keys of an object, or objects over several lines, as
/// lines.
pub(super) fn as_lines(object: &str) -> String {
    match rows_key(object) {
        Some(name) => as_lines_of(&name),
        None => ", as `jq -c . FILE > ROWS.jsonl` writes them".to_owned(),
    }
}

fn as_lines_of(key: &str) -> String {
    format!(", as `jq -c '.[\"{key}\"][]' FILE > ROWS.jsonl` writes those under `{key}`")
}

fn is_nan(value: &Option<&Value>) -> bool {
    value.is_some_and(|value| serde_json::to_string(value).is_ok_and(|json| has_nan(&json)))
}

fn string(value: Option<&Value>, key: &str) -> Result<String, String> {
    let text = value.and_then(Value::as_str).map(str::to_owned);
    text.ok_or_else(|| {
        let kind = value.map_or(ValueKind::None, Value::kind);
        format!("`{key}` is {kind}, and must be a string")
    })
}

/// The messages of a list.
pub(super) fn conversation(value: &Value, key: &str) -> Result<Vec<Value>, String> {
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
    Ok(messages.into_iter().map(without_nulls).collect())
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

/// A message without its keys that are null, as transformers renders it.
fn without_nulls(message: Value) -> Value {
    let Ok(keys) = message.try_iter() else {
        return message;
    };
    let fields: Vec<(Value, Value)> = keys
        .filter_map(|key| {
            let value = message.get_item(&key).ok()?;
            Some((key, value))
        })
        .collect();
    match fields.iter().any(|(_, value)| value.is_none()) {
        false => message,
        true => fields
            .into_iter()
            .filter(|(_, value)| !value.is_none())
            .collect(),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_told_apart() {
        let form = |row: &str| Line::parse(row).map(|(form, _)| form);
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
        assert_eq!(
            form(&format!(r#"{{"conversations": {chat}}}"#)),
            Ok(Form::ShareGpt)
        );
        assert_eq!(
            form(r#"{"instruction": "a", "output": "b", "input": null}"#),
            Ok(Form::Alpaca)
        );
        let more = r#"{"instruction": "a", "prompt": "a", "completion": "b"}"#;
        assert_eq!(form(more), Ok(Form::Completion), "another key is ignored");
    }

    #[test]
    fn numbers_of_python_are_read() {
        let row = r#"{"score": NaN, "more": [-Infinity, Infinity], "text": "NaN"}"#;
        let (_, line) = Line::parse(row).unwrap();
        assert!(matches!(line, Line::Text(text) if text == "NaN"));
        for row in [
            r#"{"text": NaN}"#,
            r#"{"messages": [{"role": "user", "content": [NaN]}]}"#,
        ] {
            let error = Line::parse(row).unwrap_err();
            assert!(error.contains("has NaN or Infinity"), "{error}");
        }
    }

    #[test]
    fn malformed_rows_are_errors() {
        for (row, expected) in [
            ("", "not a JSON object at column 0"),
            ("[1", "not a JSON object"),
            ("{\"text\": \"a\"} x", "column 15: trailing characters"),
            ("# {}", "a comment, which JSON does not have"),
            ("// {}", "a comment, which JSON does not have"),
            (
                "{\"text\":",
                "does not end on its line: each line must be one object, as `jq -c . FILE",
            ),
            (
                "{\"data\": [{",
                "as `jq -c '.[\"data\"][]' FILE > ROWS.jsonl`",
            ),
            ("{\"a\": NaN", "does not end on its line"),
            (
                "{}",
                "it has no keys, and must have `prompt` and `completion`, `messages`, ",
            ),
            (r#"{"label": "a"}"#, "it has the key `label`, and must have"),
            (
                r#"{"question": "a", "answer": "b"}"#,
                "it has the keys `question`, `answer`, and must",
            ),
            (r#"{"text": 3}"#, "`text` is number"),
            (
                r#"{"prompt": "a", "chosen": "b"}"#,
                "it has the keys `prompt`, `chosen`, and",
            ),
            (
                r#"{"instruction": "a", "response": "b"}"#,
                "`instruction`, `response`, and",
            ),
            (r#"{"completion": "a"}"#, "without `prompt`"),
            (
                r#"{"text": "a", "messages": []}"#,
                "both `messages` and `text`",
            ),
            (
                r#"{"instruction": "a", "output": "b", "text": "c"}"#,
                "both `instruction` and `text`",
            ),
            (r#"{"messages": []}"#, "no message"),
            (r#"{"messages": "a"}"#, "must be a list"),
            (
                r#"{"prompt": ["a", "b"], "completion": ["c", "d"]}"#,
                "message 1 of `prompt` is string, and must be an object with `role`",
            ),
            (
                "3",
                "not a JSON object at column 1: it has another type; each",
            ),
            (
                r#"{"data": [{"text": "a"}]}"#,
                "or `text`; write its rows as lines, as `jq -c '.[\"data\"][]' FILE > ROWS.jsonl` writes those under",
            ),
            (
                r#"{"messages": [{"content": "a"}]}"#,
                "message 1 of `messages` has no `role`",
            ),
            (
                r#"{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}"#,
                "message 1 of `messages` has the `weight` 0",
            ),
        ] {
            let error = Line::parse(row).unwrap_err();
            assert!(error.contains(expected), "{row}: {error}");
        }
        let keys: Vec<String> = (0..14).map(|i| format!("\"k{i}\": 0")).collect();
        let error = Line::parse(&format!("{{{}}}", keys.join(","))).unwrap_err();
        assert!(error.contains("`k11` and 2 more, and must"), "{error}");
    }
}
