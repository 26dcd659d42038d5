//! Decodes a kernel: resolves names to slots and labels to positions, and inlines calls.

use std::collections::HashMap;

use crate::exec::program::{self, Flow, PredSlot, Program, Slot, Special};
use crate::ops;
use crate::ptx::lexer::Mistake;
use crate::ptx::syntax::{
    Function, Instruction, Module, Operand, Statement, StatementKind, Variable,
};
use crate::ptx::types::{Space, Type};

mod mods;
mod names;
mod operands;

pub(crate) use mods::Mods;

/// Maximum call depth; deeper calls are treated as recursion.
const DEEPEST: usize = 32;

/// The declaration that a name resolves to.
#[derive(Clone, Debug)]
enum Named {
    Register(Slot),
    Pred(PredSlot),
    Memory(Space, u64),
    /// The first byte of dynamic shared memory.
    Dynamic,
    Targets(Vec<String>),
}

/// A scope: a part of a function in braces.
#[derive(Default)]
struct Scope {
    number: usize,
    names: HashMap<String, Named>,
    families: Vec<(String, Type, u64)>,
}

/// A jump whose labels are resolved after the function is decoded.
struct Fixup {
    at: usize,
    line: u32,
    labels: Vec<String>,
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
    /// Addresses of the module's variables in global and constant memory.
    addresses: &'a HashMap<String, u64>,
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
    /// Per function being inlined, the jumps to its end.
    returns: Vec<Vec<usize>>,
    params: Vec<(usize, usize)>,
    shared_bytes: usize,
    shared_names: HashMap<String, u64>,
    dynamic_align: usize,
    local_bytes: usize,
    registers: u64,
    line: u32,
    true_pred: PredSlot,
    /// The predicate that `add.cc` sets and `addc` reads.
    carry: PredSlot,
}

type Built<T> = Result<T, String>;

/// Decodes the kernel `function`.
pub(crate) fn build(
    module: &Module,
    function: &Function,
    addresses: &HashMap<String, u64>,
) -> Result<Program, Mistake> {
    let mut builder = Builder {
        module,
        addresses,
        code: Vec::new(),
        widths: Vec::new(),
        preds: 2,
        constants: HashMap::new(),
        specials: HashMap::new(),
        dynamic: Vec::new(),
        scopes: Vec::new(),
        next_scope: 0,
        labels: HashMap::new(),
        fixups: Vec::new(),
        returns: Vec::new(),
        params: Vec::new(),
        shared_bytes: 0,
        shared_names: HashMap::new(),
        dynamic_align: 16,
        local_bytes: 0,
        registers: 0,
        line: function.line,
        true_pred: 0,
        carry: 1,
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
            self.name(&param.name, Named::Memory(Space::Param, offset as u64));
            offset += param.bytes;
        }
        let body = function
            .body
            .as_ref()
            .ok_or_else(|| format!("{} has no body", function.name))?;
        self.body(body)?;
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
            local_bytes: self.local_bytes,
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
                StatementKind::Targets { name, labels } => {
                    self.name(name, Named::Targets(labels.clone()))
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
                self.jump(guard, vec![label.clone()], Flow::Jump(0));
            }
            "brx" => {
                mods.ignore(&["idx", "uni"]);
                let [index, Operand::Name(targets)] = operands else {
                    return Err("an index and targets expected".into());
                };
                let index = self.source(index)?;
                let Some(Named::Targets(labels)) = self.find(targets) else {
                    return Err(format!("{targets} are no targets"));
                };
                self.jump(
                    guard,
                    labels,
                    Flow::JumpTable {
                        index,
                        targets: Vec::new(),
                    },
                );
            }
            "exit" => self.emit(guard, Flow::Exit),
            "ret" => {
                mods.ignore(&["uni"]);
                if let Some(returns) = self.returns.last_mut() {
                    returns.push(self.code.len());
                    self.emit(guard, Flow::Jump(0));
                } else {
                    self.emit(guard, Flow::Exit);
                }
            }
            "call" => {
                mods.ignore(&["uni"]);
                if guard.is_some() {
                    return Err("a call with a predicate is not supported".into());
                }
                self.call(operands)?;
            }
            _ => {
                let flow = ops::decode(&mut mods, operands, self)?;
                self.emit(guard, flow);
            }
        }

        mods.finish()
    }

    fn jump(&mut self, guard: Option<(PredSlot, bool)>, labels: Vec<String>, flow: Flow) {
        let scopes = self.scopes.iter().rev().map(|s| s.number).collect();
        self.fixups.push(Fixup {
            at: self.code.len(),
            line: self.line,
            labels,
            scopes,
        });
        self.emit(guard, flow);
    }

    fn resolve_labels(&mut self) -> Built<()> {
        for fixup in std::mem::take(&mut self.fixups) {
            self.line = fixup.line;
            let mut found = Vec::new();
            for label in &fixup.labels {
                let place = fixup
                    .scopes
                    .iter()
                    .find_map(|&scope| self.labels.get(&(scope, label.clone())));
                found.push(*place.ok_or_else(|| format!("there is no label {label}"))?);
            }
            match &mut self.code[fixup.at].flow {
                Flow::JumpTable { targets, .. } => *targets = found,
                flow => *flow = Flow::Jump(found[0]),
            }
        }
        Ok(())
    }

    /// Inlines the called function. Its parameters are the caller's variables.
    fn call(&mut self, operands: &[Operand]) -> Built<()> {
        let (returns, name, args) = match operands {
            [
                Operand::List(returns),
                Operand::Name(name),
                Operand::List(args),
            ] => (&returns[..], name, &args[..]),
            [Operand::Name(name), Operand::List(args)] => (&[][..], name, &args[..]),
            [Operand::List(returns), Operand::Name(name)] => (&returns[..], name, &[][..]),
            [Operand::Name(name)] => (&[][..], name, &[][..]),
            _ => return Err("a call through a register is not supported".into()),
        };

        if name == "__assertfail" {
            let action = Box::new(|_: &mut _, _: &mut _, _| {
                program::fault(crate::error::Failure::Assert, "an assertion failed")
            });
            self.emit(None, Flow::Do(action));
            return Ok(());
        }

        let module = self.module;
        let function = module
            .functions
            .iter()
            .find(|f| f.name == *name && f.body.is_some());
        let Some(function) = function else {
            return Err(format!("{name} is not defined in this module"));
        };
        if self.returns.len() >= DEEPEST {
            return Err(format!("{name} calls itself, which is not supported"));
        }
        let formal: Vec<&Variable> = function.returns.iter().chain(&function.params).collect();
        let actual: Vec<&Operand> = returns.iter().chain(args).collect();

        if formal.len() != actual.len() {
            return Err(format!(
                "{name} has {} parameters, and {} are given",
                formal.len(),
                actual.len()
            ));
        }

        let mut bound = Vec::new();
        for (formal, actual) in formal.into_iter().zip(actual) {
            let Operand::Name(actual) = actual else {
                return Err("an argument that is no variable".into());
            };
            let found = self
                .find(actual)
                .filter(|named| matches!(named, Named::Memory(..)));
            bound.push((
                formal.name.clone(),
                found.ok_or_else(|| format!("{actual} is no variable"))?,
            ));
        }

        let line = self.line;
        let outer = std::mem::take(&mut self.scopes);
        self.open();
        bound
            .into_iter()
            .for_each(|(name, named)| self.name(&name, named));
        self.returns.push(Vec::new());
        self.body(function.body.as_deref().unwrap_or_default())?;
        let end = self.code.len();
        for at in self.returns.pop().unwrap_or_default() {
            self.code[at].flow = Flow::Jump(end);
        }
        (self.scopes, self.line) = (outer, line);

        Ok(())
    }
}
