//! The chat template of a model's folder.
//!
//! A template is a Jinja program. minijinja runs it as jinja2 does ([`super::jinja`]) with what
//! transformers gives it: `raise_exception`, `strftime_now` and the special tokens.
//! [`super::turns`] finds the assistant's text.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, context};
use serde::{Deserialize, Serialize};
use zero_ckpt::files::{self, SMALL_FILE_BYTES};
use zero_models::hf::companions::read_json;

use super::jinja::{self, TRACE};
use super::trace::{Message, Text, Trace, Traced};
use super::worker;
use crate::DataError;

/// The special tokens of a folder, by name, such as `eos_token`.
pub(super) type SpecialTokens = BTreeMap<String, String>;

/// The chat template of a folder.
pub(super) struct ChatTemplate {
    path: PathBuf,
    environment: Environment<'static>,
    special_tokens: SpecialTokens,
    /// Whether the template marks the assistant's text.
    pub(super) marks: bool,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChatTemplate({})", self.path.display())
    }
}

/// A rendered conversation, and the bytes of it that are trained.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rendered {
    pub(super) text: String,
    pub(super) spans: Vec<Range<usize>>,
    /// Whether the template marks the spans.
    pub(super) marked: bool,
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
        let failed = |message: String| DataError::Template {
            path: path.clone(),
            message,
        };
        let jinja::RewrittenTemplate { text, marks } = jinja::rewrite(text).map_err(failed)?;
        let mut environment = jinja::environment();
        environment.add_function("strftime_now", move |format: &str| strftime(now, format));
        environment
            .add_template_owned("chat", text)
            .map_err(|error| failed(describe(&error)))?;
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
    ) -> Result<Traced, String> {
        let trace = Arc::new(Trace::default());
        let given = context! {
            messages => Message::all(messages),
            tools,
            documents => Value::from(()),
            add_generation_prompt,
        };
        let added = Value::from_iter([(TRACE, Value::from_dyn_object(Arc::clone(&trace)))]);
        let special_tokens = Value::from_serialize(&self.special_tokens);
        worker::start_of_rendering();

        let mut text = Text::new(&trace);
        let template = self.environment.get_template("chat");
        let context = context! { ..given, ..special_tokens, ..added };
        template
            .and_then(|chat| chat.render_captured_to(context, &mut text).map(drop))
            .map_err(|error| self.named(&describe(&error)))?;
        Ok(text.end())
    }

    /// An error with the name of the template.
    pub(super) fn named(&self, message: &str) -> String {
        format!("the chat template {}: {message}", self.path.display())
    }
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
