//! The modifiers of an opcode.

use super::Built;
use crate::ptx::types::Type;

/// An opcode's name and modifiers. The decoder must use every modifier, else the instruction is not
/// supported.
pub(crate) struct Mods<'a> {
    pub(crate) name: &'a str,
    rest: Vec<&'a str>,
}

impl<'a> Mods<'a> {
    pub(crate) fn of(opcode: &'a str) -> Self {
        let mut parts = opcode.split('.');
        Self {
            name: parts.next().unwrap_or(""),
            rest: parts.collect(),
        }
    }

    /// Uses a modifier. Returns whether it was present.
    pub(crate) fn take(&mut self, part: &str) -> bool {
        self.take_of(&[part]).is_some()
    }

    /// Uses the first modifier that is one of `parts`.
    pub(crate) fn take_of(&mut self, parts: &[&str]) -> Option<&'a str> {
        let at = self.rest.iter().position(|part| parts.contains(part))?;
        Some(self.rest.remove(at))
    }

    /// Uses the first modifier that `read` accepts.
    pub(crate) fn take_as<T>(&mut self, read: impl Fn(&str) -> Option<T>) -> Option<T> {
        let (at, found) = self
            .rest
            .iter()
            .enumerate()
            .find_map(|(at, part)| Some((at, read(part)?)))?;
        self.rest.remove(at);
        Some(found)
    }

    /// Uses the first modifier that is a type.
    pub(crate) fn take_type(&mut self) -> Built<Type> {
        self.take_as(Type::named).ok_or_else(|| "no type".into())
    }

    /// Uses all of these modifiers, which have no effect here.
    pub(crate) fn ignore(&mut self, parts: &[&str]) {
        self.rest.retain(|part| !parts.contains(part));
    }

    /// Returns an error if a modifier was not used.
    pub(crate) fn finish(&self) -> Built<()> {
        match self.rest.first() {
            None => Ok(()),
            Some(part) => Err(format!("`.{part}` is not supported")),
        }
    }
}
