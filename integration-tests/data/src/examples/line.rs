//! One row of JSON as an example.

use std::fmt;

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::alpaca;
use super::json::{has_nan, keys, without_nans};

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
pub(crate) const FORMS: &str = "`prompt` and `completion`, `messages`, `conversations` of `from` and `value` (ShareGPT), \
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

/// The value of a key, without the elements of lists and objects.
#[derive(Debug)]
enum Shallow {
    Text(String),
    List {
        is_empty: bool,
    },
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
        let mut is_empty = true;
        while list.next_element::<IgnoredAny>()?.is_some() {
            is_empty = false;
        }
        Ok(Shallow::List { is_empty })
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

/// The known keys of a row. Others are ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Keys {
    text: Option<Shallow>,
    prompt: Option<Shallow>,
    completion: Option<Shallow>,
    messages: Option<Shallow>,
    conversations: Option<Shallow>,
    instruction: Option<Shallow>,
    input: Option<Shallow>,
    output: Option<Shallow>,
    system: Option<Shallow>,
    history: Option<Shallow>,
    tools: Option<Shallow>,
}

/// One example.
#[derive(Clone, Debug)]
pub(super) enum Line {
    Text(String),
    Completion {
        prompt: String,
        completion: String,
    },
    /// A row that [`Conversation::parse`] reads.
    ///
    /// [`Conversation::parse`]: super::conversation::Conversation::parse
    Conversation,
}

impl Line {
    /// Parses a row. The error says what is wrong with it, and what to do.
    pub(super) fn parse(row: &str) -> Result<(Form, Self), String> {
        let keys = Keys::parse(row)?;
        let form = keys.form(row)?;
        let line = match form {
            Form::Text => Self::Text(text(keys.text, "text")?),
            Form::Messages | Form::ShareGpt => Self::Conversation,
            Form::Completion => match [&keys.prompt, &keys.completion] {
                [Some(Shallow::List { .. }), _] | [_, Some(Shallow::List { .. })] => {
                    Self::Conversation
                }
                _ => Self::Completion {
                    prompt: text(keys.prompt, "prompt")?,
                    completion: text(keys.completion, "completion")?,
                },
            },
            Form::Alpaca => {
                let unused = [("system", &keys.system), ("history", &keys.history)];
                for (key, value) in unused {
                    alpaca::check_unused(key, value.as_ref().is_none_or(Shallow::is_empty))?;
                }
                let input = keys.input.map(|input| text(Some(input), "input"));
                let instruction = text(keys.instruction, "instruction")?;
                Self::Completion {
                    prompt: alpaca::prompt(&instruction, &input.transpose()?.unwrap_or_default()),
                    completion: text(keys.output, "output")?,
                }
            }
        };
        Ok((form, line))
    }
}

impl Shallow {
    /// Whether it is as good as absent.
    fn is_empty(&self) -> bool {
        match self {
            Self::Text(text) => text.is_empty(),
            Self::List { is_empty } => *is_empty,
            Self::Other(_) => false,
        }
    }
}

/// The text under a key.
fn text(value: Option<Shallow>, key: &str) -> Result<String, String> {
    let kind = match value {
        Some(Shallow::Text(text)) => return Ok(text),
        Some(Shallow::List { .. }) => "sequence",
        Some(Shallow::Other(kind)) => kind,
        None => "none",
    };
    Err(format!("`{key}` is {kind}, and must be a string"))
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
        // NaN under keys that are ignored does no harm.
        let values: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(&text).map_err(|error| not_an_object(row, &error))?;
        let is_nan = |key: &&str| values.get(*key).is_some_and(|v| has_nan(&v.to_string()));
        if let Some(key) = KEYS.iter().find(|key| is_nan(key)) {
            return Err(format!(
                "`{key}` has NaN or Infinity, which JSON does not: remove the row, or replace the value"
            ));
        }
        serde_json::from_str(&text).map_err(|error| not_an_object(row, &error))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::examples::conversation::Conversation;

    /// The error of a row, or of its conversation.
    fn error(row: &str) -> String {
        let parsed = Line::parse(row).and_then(|_| Conversation::parse(row));
        parsed.unwrap_err()
    }

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
            let error = error(row);
            assert!(error.contains(expected), "{row}: {error}");
        }
        let keys: Vec<String> = (0..14).map(|i| format!("\"k{i}\": 0")).collect();
        let error = Line::parse(&format!("{{{}}}", keys.join(","))).unwrap_err();
        assert!(error.contains("`k11` and 2 more, and must"), "{error}");
    }
}
