//! Which text of a rendering belongs to which message.
//!
//! A template reorders, strips and drops what messages have, so a message is not found by its
//! contents. But it goes through the messages in a loop: what it writes while it is at a message is
//! that message's text. Loops call [`Trace`] ([`super::jinja`]), which notes how much text there
//! is; [`Message`] tells which message a loop is at.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use minijinja::value::{Enumerator, Object, ObjectRepr, Value};
use minijinja::{Error, ErrorKind, State};
use parking_lot::Mutex;

/// A message, which knows its place in the conversation.
#[derive(Debug)]
pub(super) struct Message {
    index: usize,
    fields: Value,
}

impl Message {
    /// The messages of a conversation.
    pub(super) fn all(messages: &[Value]) -> Vec<Value> {
        let numbered = messages.iter().cloned().enumerate();
        numbered
            .map(|(index, fields)| Value::from_object(Self { index, fields }))
            .collect()
    }
}

impl Object for Message {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.fields.as_object()?.get_value(key)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let keys = self.fields.try_iter();
        Enumerator::Values(keys.map(Iterator::collect).unwrap_or_default())
    }
}

/// Notes of a rendering.
#[derive(Default)]
struct Notes {
    /// Bytes that are written.
    bytes: usize,
    /// The loops that run, outermost first, and the message that each is at.
    loops: Vec<(i64, Option<usize>)>,
    parts: Vec<MessageText>,
    /// The loops in which messages were, with the message.
    visits: Vec<(i64, usize)>,
}

/// Text of one message in one loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MessageText {
    pub(super) bytes: Range<usize>,
    pub(super) message: usize,
    in_loop: i64,
}

impl Notes {
    /// Ends the part that is being written, and begins that of the innermost message.
    fn turn(&mut self) {
        self.end_part();
        let owner = self.loops.iter().rev();
        let owner = owner.filter_map(|&(in_loop, message)| Some((in_loop, message?)));
        self.parts
            .extend(owner.take(1).map(|(in_loop, message)| MessageText {
                bytes: self.bytes..usize::MAX,
                message,
                in_loop,
            }));
    }

    /// Ends the part that is being written.
    fn end_part(&mut self) {
        if let Some(last) = self.parts.pop_if(|last| last.bytes.end == usize::MAX) {
            let bytes = last.bytes.start..self.bytes;
            match self.parts.last_mut() {
                _ if bytes.is_empty() => {}
                Some(before)
                    if before.bytes.end == bytes.start
                        && (before.message, before.in_loop) == (last.message, last.in_loop) =>
                {
                    before.bytes.end = bytes.end;
                }
                _ => self.parts.push(MessageText { bytes, ..last }),
            }
        }
    }
}

/// The notes of one rendering: the variable that loops of a template call.
#[derive(Default)]
pub(super) struct Trace(Mutex<Notes>);

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Trace")
    }
}

impl Object for Trace {
    /// `at(loop, value)` begins a turn of a loop; `end(loop)` is behind its end.
    fn call_method(
        self: &Arc<Self>,
        _: &State<'_, '_>,
        method: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        let mut notes = self.0.lock();
        let [in_loop, value @ ..] = args else {
            return Err(Error::from(ErrorKind::MissingArgument));
        };
        let in_loop = i64::try_from(in_loop.clone())?;
        // Loops that ended by `break` of an outer one, or from before a recursion.
        let place = notes.loops.iter().rposition(|&(id, _)| id == in_loop);
        if let Some(place) = place {
            notes.loops.truncate(place);
        }
        if method == "at" {
            let message = value
                .first()
                .and_then(|value| value.downcast_object_ref::<Message>())
                .map(|message| message.index);
            notes.visits.extend(message.map(|index| (in_loop, index)));
            notes.loops.push((in_loop, message));
        }
        notes.turn();
        Ok(Value::UNDEFINED)
    }
}

/// The text of a rendering, whose length a [`Trace`] knows.
pub(super) struct Text<'a> {
    bytes: Vec<u8>,
    trace: &'a Trace,
}

impl<'a> Text<'a> {
    pub(super) fn new(trace: &'a Trace) -> Self {
        Self {
            bytes: Vec::new(),
            trace,
        }
    }

    /// The text, and the messages of its parts.
    pub(super) fn end(self) -> Traced {
        let mut notes = std::mem::take(&mut *self.trace.0.lock());
        notes.end_part();
        Traced {
            // minijinja writes strings.
            text: String::from_utf8_lossy(&self.bytes).into_owned(),
            parts: notes.parts,
            visits: notes.visits,
        }
    }
}

impl io::Write for Text<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        self.trace.0.lock().bytes = self.bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A rendered text, and the messages of its parts.
#[derive(Debug)]
pub(super) struct Traced {
    pub(super) text: String,
    /// In the order of the text.
    pub(super) parts: Vec<MessageText>,
    visits: Vec<(i64, usize)>,
}

impl Traced {
    /// A text of which nothing is known.
    pub(super) fn untraced(text: String) -> Self {
        Self {
            text,
            parts: Vec::new(),
            visits: Vec::new(),
        }
    }

    /// The text of a message.
    pub(super) fn of(&self, message: usize) -> impl Iterator<Item = Range<usize>> {
        let parts = self.parts.iter();
        let own = parts.filter(move |part| part.message == message);
        own.map(|part| part.bytes.clone())
    }

    /// Whether a loop that writes messages was at this one.
    pub(super) fn was_at(&self, message: usize) -> bool {
        let mut visits = self.visits.iter();
        visits.any(|&(id, index)| {
            index == message && self.parts.iter().any(|part| part.in_loop == id)
        })
    }

    /// The start of the text behind all messages, if they are found.
    pub(super) fn tail(&self) -> Option<usize> {
        self.parts.last().map(|part| part.bytes.end)
    }
}
