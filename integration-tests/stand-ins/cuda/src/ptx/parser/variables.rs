//! Parsing of variable declarations.

use super::{Parsed, Parser};
use crate::ptx::lexer::Token;
use crate::ptx::syntax::Variable;
use crate::ptx::types::{Space, Type};

impl Parser {
    /// The variables of one declaration, up to its `;`.
    pub(super) fn variables(&mut self, space: Space) -> Parsed<Vec<Variable>> {
        let first = self.variable(space)?;
        let mut all = vec![first];
        while self.has(',') {
            let name = self.word()?;
            let like = all[0].clone();
            all.push(Variable { name, ..like });
        }
        self.expect(';')?;
        Ok(all)
    }

    /// `.align 8 .b8 name[16]`, after its space.
    pub(super) fn variable(&mut self, space: Space) -> Parsed<Variable> {
        let mut align = None;
        let mut element = None;
        let mut lanes = 1usize;
        let mut points = false;

        while let Some(directive) = self.directive() {
            match &directive[1..] {
                // After `.ptr` this is the alignment of the memory that the parameter points to.
                "align" if points => drop(self.small()?),
                "align" => align = Some(self.small()? as usize),
                "ptr" => points = true,
                "global" | "shared" => {}
                "v2" => lanes = 2,
                "v4" => lanes = 4,
                other => match Type::named(other) {
                    Some(found) => element = Some(found),
                    None => return self.mistake(format!("unknown type `{directive}`")),
                },
            }
        }

        let name = self.word()?;
        let Some(element) = element else {
            return self.mistake(format!("{name} has no type"));
        };
        let mut elements = Some(lanes);
        let mut is_open = false;

        while self.has('[') {
            if self.has(']') {
                is_open = true;
            } else {
                let count = self.integer()? as usize;
                elements = elements.and_then(|n| n.checked_mul(count));
                self.expect(']')?;
            }
        }

        if is_open {
            elements = Some(0);
        }
        let bytes = elements
            .and_then(|n| n.checked_mul(element.bytes()))
            .filter(|&n| n < 1 << 32);
        let Some(bytes) = bytes else {
            return self.mistake(format!("{name} is too large"));
        };
        let align = align.unwrap_or(element.bytes() * lanes);
        if !align.is_power_of_two() {
            return self.mistake(format!("{name}: an alignment of {align}"));
        }

        Ok(Variable {
            name,
            space,
            align,
            bytes,
        })
    }

    /// `+ 8`, `- 8`, `+ -8` or nothing.
    pub(super) fn offset(&mut self) -> Parsed<i64> {
        if self.has('+') || self.peek() == Some(&Token::Mark('-')) {
            Ok(self.integer()? as i64)
        } else {
            Ok(0)
        }
    }
}
