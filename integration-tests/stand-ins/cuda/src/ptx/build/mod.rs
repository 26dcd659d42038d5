//! Decodes a kernel: resolves names to slots and labels to positions.

use std::collections::HashMap;

use crate::exec::program::{self, Flow, PredSlot, Program, Slot, Special};
use crate::ops;
use crate::ptx::lexer::Mistake;
use crate::ptx::syntax::{Function, Instruction, Module, Operand, Statement, StatementKind};
use crate::ptx::types::{Space, Type};

mod mods;
mod names;
mod operands;

pub(crate) use mods::Mods;

/// The declaration that a name resolves to.
#[derive(Clone, Debug)]
enum Named {
    Register(Slot),
    Pred(PredSlot),
    /// A variable or a parameter, by its offset.
    Memory(u64),
    /// The first byte of dynamic shared memory.
    Dynamic,
}

/// A scope: a part of a function in braces.
#[derive(Default)]
struct Scope {
    number: usize,
    names: HashMap<String, Named>,
    families: Vec<(String, Type, u64)>,
}

/// A jump whose label is resolved after the function is decoded.
struct Fixup {
    at: usize,
    line: u32,
    label: String,
    scopes: Vec<usize>,
}

/// An address: a base register plus an offset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub(crate) base: Slot,
    pub(crate) offset: u64,
    pub(crate) space: Space,
}

pub(crate) struct Builder<'a> {
    module: &'a Module,
    code: Vec<program::Instruction>,
    /// Width of each slot in bits.
    widths: Vec<u32>,
    preds: usize,
    constants: HashMap<u64, Slot>,
    specials: HashMap<Special, Slot>,
    dynamic: Vec<(Slot, u64)>,
    scopes: Vec<Scope>,
    next_scope: usize,
    labels: HashMap<(usize, String), usize>,
    fixups: Vec<Fixup>,
    params: Vec<(usize, usize)>,
    shared_bytes: usize,
    shared_names: HashMap<String, u64>,
    dynamic_align: usize,
    registers: u64,
    line: u32,
    true_pred: PredSlot,
}

type Built<T> = Result<T, String>;

/// Decodes the kernel `function`.
pub(crate) fn build(module: &Module, function: &Function) -> Result<Program, Mistake> {
    let mut builder = Builder {
        module,
        code: Vec::new(),
        widths: Vec::new(),
        preds: 1,
        constants: HashMap::new(),
        specials: HashMap::new(),
        dynamic: Vec::new(),
        scopes: Vec::new(),
        next_scope: 0,
        labels: HashMap::new(),
        fixups: Vec::new(),
        params: Vec::new(),
        shared_bytes: 0,
        shared_names: HashMap::new(),
        dynamic_align: 16,
        registers: 0,
        line: function.line,
        true_pred: 0,
    };

    let built = builder.kernel(function);
    let line = builder.line;
    built.map_err(|what| Mistake { line, what })?;
    Ok(builder.finish(function))
}

fn aligned(offset: usize, align: usize) -> usize {
    offset.next_multiple_of(align.max(1))
}

impl Builder<'_> {
    fn kernel(&mut self, function: &Function) -> Built<()> {
        self.open();
        let mut offset = 0;
        for param in &function.params {
            offset = aligned(offset, param.align);
            self.params.push((offset, param.bytes));
            self.name(&param.name, Named::Memory(offset as u64));
            offset += param.bytes;
        }
        self.body(&function.body)?;
        self.emit(None, Flow::Exit);
        self.resolve_labels()
    }

    fn finish(mut self, function: &Function) -> Program {
        let start = aligned(self.shared_bytes, self.dynamic_align) as u64;
        let mut constants: Vec<(Slot, u64)> = self
            .constants
            .iter()
            .map(|(&value, &slot)| (slot, value))
            .collect();
        constants.extend(
            self.dynamic
                .iter()
                .map(|&(slot, offset)| (slot, start + offset)),
        );
        if !self.dynamic.is_empty() {
            self.shared_bytes = start as usize;
        }

        Program {
            name: function.name.clone(),
            code: self.code,
            slots: self.widths.len(),
            pred_slots: self.preds,
            constants,
            specials: self
                .specials
                .into_iter()
                .map(|(special, slot)| (slot, special))
                .collect(),
            true_pred: self.true_pred,
            shared_bytes: self.shared_bytes,
            params: self.params,
            max_threads: function.max_threads.unwrap_or(1024).min(1024),
            required_block: function.required_block,
            registers: self.registers.clamp(1, 255) as u32,
        }
    }

    fn open(&mut self) {
        self.scopes.push(Scope {
            number: self.next_scope,
            ..Scope::default()
        });
        self.next_scope += 1;
    }

    fn name(&mut self, name: &str, named: Named) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.names.insert(name.to_owned(), named);
        }
    }

    fn emit(&mut self, guard: Option<(PredSlot, bool)>, flow: Flow) {
        self.code.push(program::Instruction {
            guard,
            flow,
            line: self.line,
        });
    }

    fn body(&mut self, statements: &[Statement]) -> Built<()> {
        for Statement { line, kind } in statements {
            self.line = *line;
            match kind {
                StatementKind::Open => self.open(),
                StatementKind::Close => drop(self.scopes.pop()),
                StatementKind::Label(label) => {
                    let scope = self.scopes.last().map_or(0, |s| s.number);
                    self.labels.insert((scope, label.clone()), self.code.len());
                }
                StatementKind::Registers { kind, name, count } => self.declare(*kind, name, *count),
                StatementKind::Variable(variable) => self.variable(variable)?,
                StatementKind::Instruction(instruction) => {
                    self.instruction(instruction)
                        .map_err(|what| format!("`{}`: {what}", instruction.opcode))?;
                }
            }
        }

        Ok(())
    }

    fn instruction(&mut self, instruction: &Instruction) -> Built<()> {
        let guard = match &instruction.guard {
            None => None,
            Some((name, negated)) => match self.find(name) {
                Some(Named::Pred(slot)) => Some((slot, *negated)),
                _ => return Err(format!("{name} is no predicate")),
            },
        };

        let mut mods = Mods::of(&instruction.opcode);
        let operands = instruction.operands.as_slice();
        match mods.name {
            "bra" => {
                mods.ignore(&["uni"]);
                let [Operand::Name(label)] = operands else {
                    return Err("a label expected".into());
                };
                self.jump(guard, label.clone());
            }
            "exit" => self.emit(guard, Flow::Exit),
            "ret" => {
                mods.ignore(&["uni"]);
                self.emit(guard, Flow::Exit);
            }
            _ => {
                let flow = ops::decode(&mut mods, operands, self)?;
                self.emit(guard, flow);
            }
        }

        mods.finish()
    }

    fn jump(&mut self, guard: Option<(PredSlot, bool)>, label: String) {
        let scopes = self.scopes.iter().rev().map(|s| s.number).collect();
        self.fixups.push(Fixup {
            at: self.code.len(),
            line: self.line,
            label,
            scopes,
        });
        self.emit(guard, Flow::Jump(0));
    }

    fn resolve_labels(&mut self) -> Built<()> {
        for Fixup {
            at,
            line,
            label,
            scopes,
        } in std::mem::take(&mut self.fixups)
        {
            self.line = line;
            let place = scopes
                .iter()
                .find_map(|&scope| self.labels.get(&(scope, label.clone())));
            let to = *place.ok_or_else(|| format!("there is no label {label}"))?;
            self.code[at].flow = Flow::Jump(to);
        }
        Ok(())
    }
}
