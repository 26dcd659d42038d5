//! The parts of an opcode.

use super::Built;
use crate::ptx::types::Type;

/// An opcode's parts; every one must be used, or the instruction is not known.
pub(crate) struct Mods<'a> {
    pub(crate) name: &'a str,
    rest: Vec<&'a str>,
}

impl<'a> Mods<'a> {
    pub(crate) fn of(opcode: &'a str) -> Self {
        let mut parts = opcode.split('.');
        Self { name: parts.next().unwrap_or(""), rest: parts.collect() }
    }

    /// Uses a part, if it is there.
    pub(crate) fn take(&mut self, part: &str) -> bool {
        self.take_of(&[part]).is_some()
    }

    /// Uses the first part that is one of these.
    pub(crate) fn take_of(&mut self, parts: &[&str]) -> Option<&'a str> {
        let at = self.rest.iter().position(|part| parts.contains(part))?;
        Some(self.rest.remove(at))
    }

    /// Uses the first part that `read` makes something of.
    pub(crate) fn take_as<T>(&mut self, read: impl Fn(&str) -> Option<T>) -> Option<T> {
        let (at, found) = self.rest.iter().enumerate().find_map(|(at, part)| Some((at, read(part)?)))?;
        self.rest.remove(at);
        Some(found)
    }

    /// Uses the first part that is a type.
    pub(crate) fn take_type(&mut self) -> Built<Type> {
        self.take_as(Type::named).ok_or_else(|| "no type".into())
    }

    /// Uses all parts that make no difference here.
    pub(crate) fn ignore(&mut self, parts: &[&str]) {
        self.rest.retain(|part| !parts.contains(part));
    }

    /// An error where a part was not used.
    pub(crate) fn finish(&self) -> Built<()> {
        match self.rest.first() {
            None => Ok(()),
            Some(part) => Err(format!("`.{part}` is not supported")),
        }
    }
}
