//! A row of JSON as a conversation.

use minijinja::Value;
use serde::Deserialize;

use super::json::without_nans;
use super::messages::{messages, tools_list};
use super::sharegpt;

/// The keys of a conversation.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Keys {
    prompt: Option<Value>,
    completion: Option<Value>,
    messages: Option<Value>,
    conversations: Option<Value>,
    system: Option<Value>,
    tools: Option<Value>,
}

/// A conversation to render. The first `given` messages are a prompt, whose assistant's messages are
/// not trained.
#[derive(Clone, Debug)]
pub(super) struct Conversation {
    pub(super) messages: Vec<Value>,
    pub(super) given: usize,
    pub(super) tools: Option<Value>,
}

impl Conversation {
    /// Parses a row that is [`Line::Conversation`]. The error says what is wrong with it.
    ///
    /// [`Line::Conversation`]: super::line::Line::Conversation
    pub(super) fn parse(row: &str) -> Result<Self, String> {
        let keys: Keys = match serde_json::from_str(row) {
            Ok(keys) => keys,
            // NaN under keys that are ignored.
            Err(error) => {
                let text = without_nans(row).ok_or_else(|| error.to_string())?;
                serde_json::from_str(&text).map_err(|e| e.to_string())?
            }
        };
        if let Some(number) = lost_integer(row) {
            return Err(format!(
                "the number {number} is not supported: write it as a string, or with a point"
            ));
        }
        let tools = tools_list(keys.tools)?;
        let of_chat = match (keys.messages, keys.conversations) {
            (Some(list), _) => Some(messages(&list, "messages")?),
            (None, Some(turns)) => Some(sharegpt::messages(&turns, keys.system.as_ref())?),
            (None, None) => None,
        };
        if let Some(messages) = of_chat {
            return Ok(Self {
                messages,
                given: 0,
                tools,
            });
        }

        let mut all = messages(&keys.prompt.unwrap_or_default(), "prompt")?;
        let given = all.len();
        all.extend(messages(
            &keys.completion.unwrap_or_default(),
            "completion",
        )?);
        Ok(Self {
            messages: all,
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
