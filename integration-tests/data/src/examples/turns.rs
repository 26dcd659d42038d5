//! The assistant's text in a rendered conversation.
//!
//! | template | the assistant's text |
//! |---|---|
//! | has `{% generation %}` blocks | what they enclose |
//! | loops over the messages | what it writes at the assistant's messages, behind their headers |
//! | other | what a message adds to the text of the messages before it |
//!
//! The header of a message is what the generation prompt and the message's text have in common: a
//! model finds it in its prompt. A thought is the message's own, also where the generation prompt
//! opens it.
//!
//! The conversation is rendered once; another rendering, of its beginning, shows the generation
//! prompt. A message whose text is not found is an error.

use std::ops::Range;

use minijinja::Value;

use super::conversation::Conversation;
use super::jinja::MARKS;
use super::messages::{content, is_assistant, is_user};
use super::template::{ChatTemplate, Rendered};
use super::trace::Traced;

/// The tag that opens a thought. Some templates write it into the generation prompt, others not.
const THOUGHT: &str = "<think>";

impl ChatTemplate {
    /// Renders a conversation. Trained are the assistant's messages after those that are given.
    ///
    /// # Errors
    /// The template's own error, or a message whose text is not found.
    pub(super) fn render(&self, conversation: &Conversation) -> Result<Rendered, String> {
        let Conversation {
            messages,
            given,
            tools,
        } = conversation;
        let tools = tools.as_ref();
        if self.marks && messages.iter().chain(tools).any(has_mark) {
            return Err(self.named(
                "it has generation blocks, which U+FDD0 and U+FDD1 mark, and a message has these characters: remove them",
            ));
        }
        let mut whole = self.text(messages, tools, false)?;
        if self.marks {
            let (text, spans) = self.unmarked(&whole.text)?;
            if *given == 0 {
                return Ok(Rendered {
                    text,
                    spans,
                    marked: true,
                });
            }
            // The places of parts count the marks.
            whole = Traced::untraced(text);
        }

        let turns = Turns {
            template: self,
            messages,
            tools,
            whole,
        };
        let spans = match *given {
            0 => turns.assistant()?,
            given => {
                let start = turns.completion(given)?;
                let end = turns.whole.text.len();
                std::iter::once(start..end).collect()
            }
        };
        Ok(Rendered {
            text: turns.whole.text,
            spans,
            marked: false,
        })
    }

    /// The text without marks, and the spans between them.
    fn unmarked(&self, text: &str) -> Result<(String, Vec<Range<usize>>), String> {
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
        match open {
            None => Ok((out, spans)),
            Some(_) => Err(self.named("it opens a generation block and does not close it")),
        }
    }
}

/// A conversation and its text.
struct Turns<'a> {
    template: &'a ChatTemplate,
    messages: &'a [Value],
    tools: Option<&'a Value>,
    whole: Traced,
}

impl Turns<'_> {
    /// The spans of the assistant's messages.
    fn assistant(&self) -> Result<Vec<Range<usize>>, String> {
        let mut spans = Vec::new();
        let mut prompt = None;
        for (index, message) in self.messages.iter().enumerate() {
            if !is_assistant(message) {
                continue;
            }
            let Some(mut own) = self.own(index) else {
                spans.push(self.added(index)?);
                continue;
            };
            // With text behind all messages, such as a token that ends the text.
            if index + 1 == self.messages.len()
                && let Some(last) = own.last_mut()
                && Some(last.end) == self.whole.tail()
            {
                last.end = self.whole.text.len();
            }
            if let Some(first) = own.first_mut() {
                let text = &self.whole.text[first.clone()];
                first.start += self.header(index, text, &mut prompt)?;
            }
            spans.extend(own.into_iter().filter(|part| !part.is_empty()));
        }
        Ok(spans)
    }

    /// The text of a message. `None` if the template does not loop over the messages, or seems to
    /// write one at another one.
    fn own(&self, index: usize) -> Option<Vec<Range<usize>>> {
        let whole = &self.whole;
        let is_elsewhere = |at: usize| {
            let content = content(&self.messages[at]).unwrap_or_default();
            let content = content.trim();
            let mut own = whole.of(at).map(|part| &whole.text[part]);
            !content.is_empty()
                && whole.text.contains(content)
                && !own.any(|part| part.contains(content))
        };
        // A template may drop what others than the user and the assistant say.
        let mut before = (0..index)
            .rev()
            .take_while(|&at| !is_assistant(&self.messages[at]));
        let question =
            before.find(|&at| is_user(&self.messages[at]) && whole.of(at).next().is_none());
        let is_lost = is_elsewhere(index) || question.is_some_and(is_elsewhere);
        (whole.was_at(index) && !is_lost).then(|| whole.of(index).collect())
    }

    /// The length of the header with which the text of a message begins. `prompt` is the generation
    /// prompt of an earlier message.
    fn header(
        &self,
        index: usize,
        text: &str,
        prompt: &mut Option<String>,
    ) -> Result<usize, String> {
        let of_earlier = match prompt {
            Some(prompt) if !prompt.is_empty() && text.starts_with(&**prompt) => {
                return Ok(header_len(prompt, text));
            }
            Some(prompt) => header_len(prompt, text),
            None => 0,
        };
        let own = self.generation_prompt(index)?;
        // The first message may have text before its header.
        let before = match index {
            0 => text.find(&own).unwrap_or_default(),
            _ => 0,
        };
        let of_own = before + header_len(&own, &text[before..]);
        prompt.get_or_insert(own);
        Ok(of_own.max(of_earlier))
    }

    /// The generation prompt before a message, without a thought.
    fn generation_prompt(&self, index: usize) -> Result<String, String> {
        let text = |to: usize, prompted| {
            let messages = &self.messages[..to];
            self.template.text(messages, self.tools, prompted)
        };
        // No template renders no messages, and one may refuse those before this one.
        let alone = (index > 0).then(|| text(index, true));
        let (to, prompted) = match alone {
            Some(Ok(prompted)) => (index, prompted),
            _ => (self.messages.len(), text(self.messages.len(), true)?),
        };
        let tail = prompted.tail().map(|tail| &prompted.text[tail..]);
        let mut prompt = tail.unwrap_or_default().to_owned();
        if prompt.is_empty() {
            // The template writes it at the last message, or has no generation prompt.
            let plain = text(to, false)?;
            let added = prompted.text.strip_prefix(&plain.text);
            prompt = added.ok_or_else(|| self.untold(index))?.to_owned();
        }
        let len = prompt.find(THOUGHT).unwrap_or(prompt.len());
        prompt.truncate(len);
        Ok(prompt)
    }

    /// The text that a message adds to that of the messages before it.
    fn added(&self, index: usize) -> Result<Range<usize>, String> {
        let start = self.beginning(index, true)?;
        let end = self.beginning(index + 1, false)?;
        let [start, end] = [start, end].map(|place| place.ok_or_else(|| self.untold(index)));
        Ok(start?..end?)
    }

    /// The length of the text of the first messages, if it begins the whole text.
    fn beginning(&self, len: usize, prompted: bool) -> Result<Option<usize>, String> {
        let first = &self.messages[..len];
        let text = self.template.text(first, self.tools, prompted)?.text;
        let text = text.replace(MARKS, "");
        Ok(self.whole.text.starts_with(&text).then_some(text.len()))
    }

    /// The start of the completion behind the first `given` messages.
    fn completion(&self, given: usize) -> Result<usize, String> {
        if let Some(start) = self.beginning(given, true)? {
            return Ok(start);
        }
        let own = self.own(given).and_then(|own| own.into_iter().next());
        let own = own.ok_or_else(|| self.untold(given))?;
        let text = &self.whole.text[own.clone()];
        let header = match is_assistant(&self.messages[given]) {
            true => self.header(given, text, &mut None)?,
            false => 0,
        };
        Ok(own.start + header)
    }

    fn untold(&self, index: usize) -> String {
        self.template.named(&format!(
            "the text of message {} is not found: the template writes it at another message, or renders the \
             beginning of a conversation otherwise when more follows; mark the assistant's part in the template by \
             {{% generation %}} and {{% endgeneration %}}, or pass `prompt` and `completion`",
            index + 1
        ))
    }
}

/// Whether a string in a value has a mark.
fn has_mark(value: &Value) -> bool {
    if let Some(text) = value.as_str() {
        return text.contains(MARKS);
    }
    let mut inner = value.try_iter().into_iter().flatten();
    inner.any(|one| has_mark(&one) || value.get_item(&one).is_ok_and(|of_key| has_mark(&of_key)))
}

/// The length of the header in a text that begins as a generation prompt does, wholly or as far as
/// a token or a line ends.
///
/// A prompt that ends within a header, such as `<|start|>assistant`, is not one: a model writes the
/// rest, and is trained on the whole turn.
fn header_len(prompt: &str, text: &str) -> usize {
    let is_end = |c: char| matches!(c, '>' | ']' | ':' | '\n');
    let same = prompt.chars().zip(text.chars());
    let same = same.take_while(|(one, other)| one == other);
    let len: usize = same.map(|(one, _)| one.len_utf8()).sum();
    match len == prompt.len() {
        true if prompt.trim_end_matches(' ').ends_with(is_end) => len,
        true => 0,
        false => prompt[..len].rfind(is_end).map_or(0, |at| at + 1),
    }
}
