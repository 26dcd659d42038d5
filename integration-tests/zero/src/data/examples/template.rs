//! The chat template of a model's folder.
//!
//! A template is a Jinja program. minijinja runs it with the functions that transformers gives it:
//! `raise_exception`, `strftime_now`, Python's methods of strings and dictionaries, and the special
//! tokens; values are printed as [`python`] does.
//!
//! Some templates mark the assistant's text by `{% generation %}` blocks. These become marks in the
//! rendered text, which are then removed.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, context};
use serde::{Deserialize, Serialize};
use zero_ckpt::files::{self, SMALL_FILE_BYTES};
use zero_models::hf::companions::read_json;

use super::line::is_assistant;
use super::{python, worker};
use crate::data::DataError;

/// Marks of the begin and the end of a generation block: characters that no text has.
const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// The special tokens of a folder, by name, such as `eos_token`.
pub(super) type SpecialTokens = BTreeMap<String, String>;

/// The chat template of a folder.
pub(super) struct ChatTemplate {
    path: PathBuf,
    environment: Environment<'static>,
    special_tokens: SpecialTokens,
    /// Whether the template marks the assistant's text.
    marks: bool,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChatTemplate({})", self.path.display())
    }
}

/// A rendered conversation, and the bytes of it that are trained.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Rendered {
    pub(super) text: String,
    pub(super) spans: Vec<Range<usize>>,
}

/// A template, and all that its rendering depends on besides the messages.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TemplateSource {
    /// The file, for messages.
    pub(super) path: PathBuf,
    text: String,
    special_tokens: SpecialTokens,
    /// The time of `strftime_now`, in seconds.
    now: i64,
}

impl TemplateSource {
    /// Reads the template of a folder, if it has one.
    ///
    /// # Errors
    /// A file that may hold it is there and cannot be used.
    pub(super) fn read(dir: &Path, now: i64) -> Result<Option<Self>, DataError> {
        let Some((path, text)) = template_text(dir)? else {
            return Ok(None);
        };
        Ok(Some(Self {
            path,
            text,
            special_tokens: special_tokens(dir)?,
            now,
        }))
    }

    /// Compiles the template.
    ///
    /// # Errors
    /// The template is not valid.
    pub(super) fn compile(self) -> Result<ChatTemplate, DataError> {
        ChatTemplate::new(self.path, &self.text, self.special_tokens, self.now)
    }
}

/// The special tokens in `tokenizer_config.json`, or in `special_tokens_map.json`.
///
/// # Errors
/// One of them is there and cannot be used.
pub(super) fn special_tokens(dir: &Path) -> Result<SpecialTokens, DataError> {
    let mut found = SpecialTokens::new();
    for name in ["special_tokens_map.json", "tokenizer_config.json"] {
        let config = read_json(&dir.join(name)).map_err(DataError::Folder)?;
        let Some(serde_json::Value::Object(fields)) = config else {
            continue;
        };
        for (key, value) in fields {
            let text = value.as_str().or(value["content"].as_str());
            if let Some(text) = text.filter(|_| key.ends_with("_token")) {
                found.insert(key, text.to_owned());
            }
        }
    }
    Ok(found)
}

/// The text of a folder's template, and its file.
fn template_text(dir: &Path) -> Result<Option<(PathBuf, String)>, DataError> {
    let path = dir.join("chat_template.jinja");
    let text = files::read_text_if_present(&path, SMALL_FILE_BYTES);
    let text = text.map_err(|source| DataError::Read {
        path: path.clone(),
        source,
    })?;
    if let Some(text) = text {
        return Ok(Some((path, text)));
    }
    for name in ["tokenizer_config.json", "chat_template.json"] {
        let path = dir.join(name);
        let Some(config) = read_json(&path).map_err(DataError::Folder)? else {
            continue;
        };
        let text = match &config["chat_template"] {
            serde_json::Value::String(text) => Some(text.clone()),
            // Several by name.
            serde_json::Value::Array(list) => list
                .iter()
                .find(|one| one["name"] == "default")
                .and_then(|one| Some(one["template"].as_str()?.to_owned())),
            _ => None,
        };
        if let Some(text) = text {
            return Ok(Some((path, text)));
        }
    }
    Ok(None)
}

impl ChatTemplate {
    /// The template `text` of the file `path`.
    pub(super) fn new(
        path: PathBuf,
        text: &str,
        special_tokens: SpecialTokens,
        now: i64,
    ) -> Result<Self, DataError> {
        let (text, marks) = with_marks(text);
        let mut environment = environment(now);
        environment
            .add_template_owned("chat", text)
            .map_err(|error| DataError::Template {
                path: path.clone(),
                message: describe(&error),
            })?;
        Ok(Self {
            path,
            environment,
            special_tokens,
            marks,
        })
    }

    /// Renders messages. The error is the template's own, or minijinja's.
    ///
    /// A template is a program, which may never end and take any memory; see [`super::worker`].
    pub(super) fn text(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<String, String> {
        let documents = Value::from(());
        let given = context! { messages, tools, documents, add_generation_prompt };
        let special_tokens = Value::from_serialize(&self.special_tokens);
        worker::start_of_rendering();
        let template = self.environment.get_template("chat");
        let text = template.and_then(|chat| chat.render(context! { ..given, ..special_tokens }));
        text.map_err(|error| {
            format!(
                "the chat template {}: {}",
                self.path.display(),
                describe(&error)
            )
        })
    }

    /// Renders a conversation. Trained are the assistant's messages after the first `given`
    /// messages.
    ///
    /// # Errors
    /// What the template raises, or a text from which the assistant's part cannot be told.
    pub(super) fn render(
        &self,
        messages: &[Value],
        given: usize,
        tools: Option<&Value>,
    ) -> Result<Rendered, String> {
        let text = self.text(messages, tools, false)?;
        if self.marks && given == 0 {
            return self.marked(&text);
        }
        let text = unmarked(&text);
        if given > 0 {
            let start = self.prefix(&text, &messages[..given], tools, true)?;
            let end = text.len();
            return Ok(Rendered {
                text,
                spans: std::iter::once(start..end).collect(),
            });
        }

        let mut spans = Vec::new();
        for (index, message) in messages.iter().enumerate() {
            if is_assistant(message) {
                let start = self.prefix(&text, &messages[..index], tools, true)?;
                let end = self.prefix(&text, &messages[..=index], tools, false)?;
                spans.push(start..end);
            }
        }
        Ok(Rendered { text, spans })
    }

    /// The length of the text of the first messages, which must be a prefix of `whole`.
    fn prefix(
        &self,
        whole: &str,
        first: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<usize, String> {
        let prefix = unmarked(&self.text(first, tools, add_generation_prompt)?);
        if whole.starts_with(&prefix) {
            return Ok(prefix.len());
        }
        let same = whole.bytes().zip(prefix.bytes());
        let same = same.take_while(|(one, other)| one == other).count();
        Err(format!(
            "the chat template {} renders the first {} messages otherwise when others follow (from byte {same} on), so \
             the assistant's part cannot be told; mark it in the template by {{% generation %}} and \
             {{% endgeneration %}}, or pass `prompt` and `completion`",
            self.path.display(),
            first.len()
        ))
    }

    /// The text without marks, and the spans between them.
    fn marked(&self, text: &str) -> Result<Rendered, String> {
        let mut out = String::with_capacity(text.len());
        let mut spans = Vec::new();
        let mut open = None;
        for character in text.chars() {
            if character == MARKS[0] {
                open.get_or_insert(out.len());
            } else if character == MARKS[1] {
                spans.extend(open.take().map(|start| start..out.len()));
            } else {
                out.push(character);
            }
        }
        if open.is_some() {
            return Err(format!(
                "the chat template {} opens a generation block and does not close it",
                self.path.display()
            ));
        }
        Ok(Rendered { text: out, spans })
    }
}

/// The text without marks.
fn unmarked(text: &str) -> String {
    text.replace(MARKS, "")
}

/// The template with marks in place of generation blocks, and whether it has any.
fn with_marks(text: &str) -> (String, bool) {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let mut marks = false;
    while let Some(at) = rest.find("{%") {
        let Some(len) = rest[at..].find("%}") else {
            break;
        };
        let (before, tag) = (&rest[..at], &rest[at + 2..at + len]);
        out.push_str(before);
        rest = &rest[at + len + 2..];
        let name = tag.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        let mark = match name {
            "generation" => MARKS[0],
            "endgeneration" => MARKS[1],
            _ => {
                out.push_str(&format!("{{%{tag}%}}"));
                continue;
            }
        };
        marks = true;
        // The outer tags keep what the tag does to the white space around it.
        let sign = |c: Option<char>| c.filter(|c| matches!(c, '-' | '+')).map(String::from);
        let left = sign(tag.chars().next()).unwrap_or_default();
        let right = sign(tag.chars().last()).unwrap_or_default();
        out.push_str(&format!(
            "{{%{left} if true %}}{{{{ \"{mark}\" }}}}{{% endif {right}%}}"
        ));
    }
    out.push_str(rest);
    (out, marks)
}

/// An environment as that of transformers.
fn environment(now: i64) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.add_function(
        "raise_exception",
        |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        },
    );
    environment.add_function("strftime_now", move |format: &str| strftime(now, format));
    python::add_to(&mut environment);
    environment
}

/// The time as text, in UTC.
fn strftime(now: i64, format: &str) -> Result<String, Error> {
    let failed = |error: jiff::Error| Error::new(ErrorKind::InvalidOperation, error.to_string());
    let time = jiff::Timestamp::from_second(now).map_err(failed)?;
    let time = time.to_zoned(jiff::tz::TimeZone::UTC);
    jiff::fmt::strtime::format(format, &time).map_err(failed)
}

/// An error of a template in one line.
fn describe(error: &Error) -> String {
    let line = error.line().map(|line| format!(" (line {line})"));
    let text = match error.detail() {
        Some(detail) => detail.to_owned(),
        None => error.to_string(),
    };
    format!("{text}{}", line.unwrap_or_default())
}
