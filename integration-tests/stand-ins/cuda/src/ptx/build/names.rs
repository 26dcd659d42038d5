//! Name resolution: registers and register families, variables and their memory.

use super::{Builder, Built, Named, aligned};
use crate::ptx::syntax::Variable;
use crate::ptx::types::{Space, Type};

impl Builder<'_> {
    pub(super) fn declare(&mut self, kind: Type, name: &str, count: Option<u64>) {
        self.registers += count.unwrap_or(1)
            * u64::from(kind.bits().div_ceil(32))
            * u64::from(kind != Type::Pred);
        match count {
            Some(count) => {
                if let Some(scope) = self.scopes.last_mut() {
                    scope.families.push((name.to_owned(), kind, count));
                }
            }
            None => drop(self.register(self.scopes.len() - 1, name, kind)),
        }
    }

    pub(super) fn register(&mut self, scope: usize, name: &str, kind: Type) -> Named {
        let named = if kind == Type::Pred {
            Named::Pred(self.new_pred())
        } else {
            Named::Register(self.new_slot(kind.bits()))
        };
        self.scopes[scope]
            .names
            .insert(name.to_owned(), named.clone());
        named
    }

    pub(super) fn variable(&mut self, variable: &Variable) -> Built<()> {
        if variable.space != Space::Shared {
            let space = variable.space;
            return Err(format!(
                "{} in {space:?} memory is not supported",
                variable.name
            ));
        }
        let named = Named::Memory(self.shared(variable));
        self.name(&variable.name, named);
        Ok(())
    }

    pub(super) fn shared(&mut self, variable: &Variable) -> u64 {
        let offset = aligned(self.shared_bytes, variable.align);
        self.shared_bytes = offset + variable.bytes;
        offset as u64
    }

    /// Resolves a name to its innermost declaration, or to the module's.
    pub(super) fn find(&mut self, name: &str) -> Option<Named> {
        for scope in (0..self.scopes.len()).rev() {
            if let Some(named) = self.scopes[scope].names.get(name) {
                return Some(named.clone());
            }
            let digits = name.len() - name.bytes().rev().take_while(u8::is_ascii_digit).count();
            let number: Option<u64> = name[digits..].parse().ok();
            let family = self.scopes[scope]
                .families
                .iter()
                .find(|(n, _, count)| *n == name[..digits] && number < Some(*count));
            if let (Some(&(_, kind, _)), Some(_)) = (family, number) {
                return Some(self.register(scope, name, kind));
            }
        }

        if let Some(&offset) = self.shared_names.get(name) {
            return Some(Named::Memory(offset));
        }
        let variable = self.module.variables.iter().find(|v| v.name == name)?;

        if variable.bytes == 0 {
            self.dynamic_align = self.dynamic_align.max(variable.align);
            return Some(Named::Dynamic);
        }

        let offset = self.shared(variable);
        self.shared_names.insert(name.to_owned(), offset);
        Some(Named::Memory(offset))
    }
}
