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

/// A conversation to render. The first `given` messages are a prompt, whose assistant's messages
/// are not trained.
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
        keys.check_integers(row)?;
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

impl Keys {
    /// # Errors
    /// A value has an integer that became a float when the row was parsed, and would be printed
    /// otherwise.
    fn check_integers(&self, row: &str) -> Result<(), String> {
        let read = [
            &self.prompt,
            &self.completion,
            &self.messages,
            &self.conversations,
            &self.tools,
        ];
        let is_read = |number: &&str| {
            let float = number.parse().unwrap_or(f64::NAN);
            read.into_iter()
                .flatten()
                .any(|value| has_float(value, float))
        };
        match lost_integers(row).into_iter().find(is_read) {
            Some(number) => Err(format!(
                "the number {number} is not supported: write it as a string, or with a point"
            )),
            None => Ok(()),
        }
    }
}

fn has_float(value: &Value, float: f64) -> bool {
    if value.is_number() {
        return !value.is_integer() && f64::try_from(value.clone()).is_ok_and(|own| own == float);
    }
    if value.as_str().is_some() {
        return false;
    }
    let mut inner = value.try_iter().into_iter().flatten();
    inner.any(|one| {
        let of_key = value.get_item(&one);
        has_float(&one, float) || of_key.is_ok_and(|of_key| has_float(&of_key, float))
    })
}

/// The integers of a row of JSON that become floats when it is parsed.
fn lost_integers(row: &str) -> Vec<&str> {
    // Of a row, the parts outside of strings.
    let mut lost = Vec::new();
    let mut is_string = false;
    let mut rest = row;
    while let Some(at) = rest.find(if is_string { ['"', '\\'] } else { ['"', '"'] }) {
        if !is_string {
            lost.extend(lost_integers_in(&rest[..at]));
        }
        let is_escape = rest[at..].starts_with('\\');
        is_string ^= !is_escape;
        rest = rest
            .get(at + 1 + usize::from(is_escape)..)
            .unwrap_or_default();
    }
    if !is_string {
        lost.extend(lost_integers_in(rest));
    }
    lost
}

fn lost_integers_in(text: &str) -> impl Iterator<Item = &str> {
    let numbers = text.split(|c: char| !c.is_ascii_digit() && !"+-.eE".contains(c));
    numbers.filter(|number| {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A message with a value, and a row with another one under a key that is ignored.
    fn parse(value: &str, ignored: &str) -> Result<Conversation, String> {
        let message = format!(r#"{{"role": "user", "content": "a 1e999 \" -0", "x": [{value}]}}"#);
        Conversation::parse(&format!(r#"{{"id": {ignored}, "messages": [{message}]}}"#))
    }

    #[test]
    fn integers_that_become_floats_are_refused_where_they_are_read() {
        let large = "36893488147419103232";
        for value in [large, "-0", "-9223372036854775809"] {
            let error = parse(value, "1").unwrap_err();
            assert!(error.contains(&format!("the number {value} is")), "{error}");
            parse("1", value).unwrap();
        }
        for value in [
            "0",
            "18446744073709551615",
            "-9223372036854775808",
            "-0.0",
            "1e30",
        ] {
            parse(value, large).unwrap();
        }
    }
}
