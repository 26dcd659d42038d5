//! Decodes a kernel: names to slots, labels to positions, calls to the called function's code in their place.

use std::collections::HashMap;

use super::lexer::Mistake;
use super::syntax::{Function, Instruction, Module, Operand, Statement, StatementKind, Variable};
use super::types::{Space, Type, mask_of};
use crate::exec::program::{self, Flow, PredSlot, Program, Slot, Special};
use crate::ops;

/// Functions that call one another deeper than this call themselves.
const DEEPEST: usize = 32;

/// What a name stands for.
#[derive(Clone, Debug)]
enum Named {
    Register(Slot),
    Pred(PredSlot),
    Memory(Space, u64),
    /// The first byte of dynamic shared memory.
    Dynamic,
    Targets(Vec<String>),
}

/// A part of a function between braces.
#[derive(Default)]
struct Scope {
    number: usize,
    names: HashMap<String, Named>,
    families: Vec<(String, Type, u64)>,
}

/// A place in the code whose jump goes to a label that may come later.
struct Fixup {
    at: usize,
    line: u32,
    labels: Vec<String>,
    scopes: Vec<usize>,
}

/// An address: a register with a number, and what is added.
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
    /// Jumps to the end of the function that is being put in place.
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
        let body = function.body.as_ref().ok_or_else(|| format!("{} has no body", function.name))?;
        self.body(body)?;
        self.emit(None, Flow::Exit);
        self.resolve_labels()
    }

    fn finish(mut self, function: &Function) -> Program {
        let start = aligned(self.shared_bytes, self.dynamic_align) as u64;
        let mut constants: Vec<(Slot, u64)> = self.constants.iter().map(|(&value, &slot)| (slot, value)).collect();
        constants.extend(self.dynamic.iter().map(|&(slot, offset)| (slot, start + offset)));
        if !self.dynamic.is_empty() {
            self.shared_bytes = start as usize;
        }
        Program {
            name: function.name.clone(),
            code: self.code,
            slots: self.widths.len(),
            pred_slots: self.preds,
            constants,
            specials: self.specials.into_iter().map(|(special, slot)| (slot, special)).collect(),
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
        self.scopes.push(Scope { number: self.next_scope, ..Scope::default() });
        self.next_scope += 1;
    }

    fn name(&mut self, name: &str, named: Named) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.names.insert(name.to_owned(), named);
        }
    }

    fn emit(&mut self, guard: Option<(PredSlot, bool)>, flow: Flow) {
        self.code.push(program::Instruction { guard, flow, line: self.line });
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
                StatementKind::Targets { name, labels } => self.name(name, Named::Targets(labels.clone())),
                StatementKind::Registers { kind, name, count } => self.declare(*kind, name, *count),
                StatementKind::Variable(variable) => self.variable(variable)?,
                StatementKind::Instruction(instruction) => {
                    self.instruction(instruction).map_err(|what| format!("`{}`: {what}", instruction.opcode))?;
                }
            }
        }
        Ok(())
    }

    fn declare(&mut self, kind: Type, name: &str, count: Option<u64>) {
        self.registers += count.unwrap_or(1) * u64::from(kind.bits().div_ceil(32)) * u64::from(kind != Type::Pred);
        match count {
            Some(count) => {
                if let Some(scope) = self.scopes.last_mut() {
                    scope.families.push((name.to_owned(), kind, count));
                }
            }
            None => drop(self.register(self.scopes.len() - 1, name, kind)),
        }
    }

    fn register(&mut self, scope: usize, name: &str, kind: Type) -> Named {
        let named = if kind == Type::Pred {
            Named::Pred(self.new_pred())
        } else {
            Named::Register(self.new_slot(kind.bits()))
        };
        self.scopes[scope].names.insert(name.to_owned(), named.clone());
        named
    }

    fn variable(&mut self, variable: &Variable) -> Built<()> {
        if !variable.values.is_empty() {
            return Err(format!("{} is within a function and has a value", variable.name));
        }
        let named = match variable.space {
            Space::Shared => Named::Memory(Space::Shared, self.shared(variable)),
            Space::Local | Space::Param => {
                self.local_bytes = aligned(self.local_bytes, variable.align);
                let offset = self.local_bytes as u64;
                self.local_bytes += variable.bytes;
                Named::Memory(Space::Local, offset)
            }
            space => return Err(format!("{} in {space:?} memory within a function", variable.name)),
        };
        self.name(&variable.name, named);
        Ok(())
    }

    fn shared(&mut self, variable: &Variable) -> u64 {
        let offset = aligned(self.shared_bytes, variable.align);
        self.shared_bytes = offset + variable.bytes;
        offset as u64
    }

    /// What a name means here: the innermost declaration, or the module's.
    fn find(&mut self, name: &str) -> Option<Named> {
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
        if let Some(&address) = self.addresses.get(name) {
            return Some(Named::Memory(Space::Global, address));
        }
        if let Some(&offset) = self.shared_names.get(name) {
            return Some(Named::Memory(Space::Shared, offset));
        }
        let variable = self.module.variables.iter().find(|v| v.name == name && v.space == Space::Shared)?;
        if variable.bytes == 0 {
            self.dynamic_align = self.dynamic_align.max(variable.align);
            return Some(Named::Dynamic);
        }
        let offset = self.shared(variable);
        self.shared_names.insert(name.to_owned(), offset);
        Some(Named::Memory(Space::Shared, offset))
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
                let [Operand::Name(label)] = operands else { return Err("a label expected".into()) };
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
                self.jump(guard, labels, Flow::JumpTable { index, targets: Vec::new() });
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
        self.fixups.push(Fixup { at: self.code.len(), line: self.line, labels, scopes });
        self.emit(guard, flow);
    }

    fn resolve_labels(&mut self) -> Built<()> {
        for fixup in std::mem::take(&mut self.fixups) {
            self.line = fixup.line;
            let mut found = Vec::new();
            for label in &fixup.labels {
                let place = fixup.scopes.iter().find_map(|&scope| self.labels.get(&(scope, label.clone())));
                found.push(*place.ok_or_else(|| format!("there is no label {label}"))?);
            }
            match &mut self.code[fixup.at].flow {
                Flow::JumpTable { targets, .. } => *targets = found,
                flow => *flow = Flow::Jump(found[0]),
            }
        }
        Ok(())
    }

    /// Puts the called function's code here. Its parameters are the caller's variables.
    fn call(&mut self, operands: &[Operand]) -> Built<()> {
        let (returns, name, args) = match operands {
            [Operand::List(returns), Operand::Name(name), Operand::List(args)] => (&returns[..], name, &args[..]),
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
        let function = module.functions.iter().find(|f| f.name == *name && f.body.is_some());
        let Some(function) = function else { return Err(format!("{name} is not defined in this module")) };
        if self.returns.len() >= DEEPEST {
            return Err(format!("{name} calls itself, which is not supported"));
        }
        let formal: Vec<&Variable> = function.returns.iter().chain(&function.params).collect();
        let actual: Vec<&Operand> = returns.iter().chain(args).collect();
        if formal.len() != actual.len() {
            return Err(format!("{name} has {} parameters, and {} are given", formal.len(), actual.len()));
        }
        let mut bound = Vec::new();
        for (formal, actual) in formal.into_iter().zip(actual) {
            let Operand::Name(actual) = actual else { return Err("an argument that is no variable".into()) };
            let found = self.find(actual).filter(|named| matches!(named, Named::Memory(..)));
            bound.push((formal.name.clone(), found.ok_or_else(|| format!("{actual} is no variable"))?));
        }
        let (line, outer) = (self.line, std::mem::take(&mut self.scopes));
        self.open();
        bound.into_iter().for_each(|(name, named)| self.name(&name, named));
        self.returns.push(Vec::new());
        self.body(function.body.as_deref().unwrap_or_default())?;
        let end = self.code.len();
        for at in self.returns.pop().unwrap_or_default() {
            self.code[at].flow = Flow::Jump(end);
        }
        (self.scopes, self.line) = (outer, line);
        Ok(())
    }

    pub(crate) fn new_slot(&mut self, bits: u32) -> Slot {
        self.widths.push(bits);
        self.widths.len() - 1
    }

    pub(crate) fn new_pred(&mut self) -> PredSlot {
        self.preds += 1;
        self.preds - 1
    }

    pub(crate) fn carry(&self) -> PredSlot {
        self.carry
    }

    pub(crate) fn true_pred(&self) -> PredSlot {
        self.true_pred
    }

    /// How many bits of a slot are kept.
    pub(crate) fn width_mask(&self, slot: Slot) -> u64 {
        mask_of(self.widths[slot])
    }

    /// A slot with this value in all lanes.
    pub(crate) fn constant(&mut self, value: u64) -> Slot {
        if let Some(&slot) = self.constants.get(&value) {
            return slot;
        }
        let slot = self.new_slot(64);
        self.constants.insert(value, slot);
        slot
    }

    fn special(&mut self, name: &str) -> Option<Slot> {
        let axis = |letter: &str| ["x", "y", "z"].iter().position(|&l| l == letter);
        let special = match name.split_once('.') {
            Some(("%tid", letter)) => Special::ThreadId(axis(letter)?),
            Some(("%ntid", letter)) => Special::BlockDim(axis(letter)?),
            Some(("%ctaid", letter)) => Special::BlockId(axis(letter)?),
            Some(("%nctaid", letter)) => Special::GridDim(axis(letter)?),
            Some(_) => return None,
            None => match name {
                "%laneid" => Special::Lane,
                "%warpid" => Special::Warp,
                "%nwarpid" => Special::Warps,
                "%smid" => Special::Multiprocessor,
                "%nsmid" => Special::Multiprocessors,
                "%gridid" => Special::Grid,
                "%lanemask_eq" => Special::LanesEqual,
                "%lanemask_lt" => Special::LanesLess,
                "%lanemask_le" => Special::LanesLessOrEqual,
                "%lanemask_gt" => Special::LanesGreater,
                "%lanemask_ge" => Special::LanesGreaterOrEqual,
                "%dynamic_smem_size" => Special::DynamicSharedBytes,
                "%total_smem_size" => Special::TotalSharedBytes,
                "WARP_SZ" => return Some(self.constant(32)),
                _ => return None,
            },
        };
        if let Some(&slot) = self.specials.get(&special) {
            return Some(slot);
        }
        let slot = self.new_slot(32);
        self.specials.insert(special, slot);
        Some(slot)
    }

    /// The slot of a value: a register, a constant, a special register or an address.
    pub(crate) fn source(&mut self, operand: &Operand) -> Built<Slot> {
        match operand {
            Operand::Integer(value) | Operand::F64(value) => Ok(self.constant(*value)),
            Operand::F32(bits) => Ok(self.constant(u64::from(*bits))),
            Operand::Name(name) => self.value_of(name, 0),
            Operand::Sum(name, offset) => self.value_of(name, *offset as u64),
            other => Err(format!("{other:?} is no value")),
        }
    }

    fn value_of(&mut self, name: &str, offset: u64) -> Built<Slot> {
        match self.find(name) {
            Some(Named::Register(slot)) if offset == 0 => Ok(slot),
            Some(Named::Memory(_, at)) => Ok(self.constant(at.wrapping_add(offset))),
            Some(Named::Dynamic) => {
                let slot = self.new_slot(64);
                self.dynamic.push((slot, offset));
                Ok(slot)
            }
            Some(_) => Err(format!("{name} is no value")),
            None => self.special(name).ok_or_else(|| format!("{name} is not declared")),
        }
    }

    /// The slot of a register that is written; `_` is a slot that nobody reads.
    pub(crate) fn target(&mut self, operand: &Operand) -> Built<Slot> {
        let Operand::Name(name) = operand else { return Err(format!("{operand:?} is no register")) };
        if name == "_" {
            return Ok(self.new_slot(64));
        }
        match self.find(name) {
            Some(Named::Register(slot)) => Ok(slot),
            _ => Err(format!("{name} is no register")),
        }
    }

    /// A predicate that is read, and whether it is negated.
    pub(crate) fn pred_source(&mut self, operand: &Operand) -> Built<(PredSlot, bool)> {
        let (name, negated) = match operand {
            Operand::Name(name) => (name, false),
            Operand::Not(name) => (name, true),
            Operand::Integer(value) => return Ok((self.true_pred, *value == 0)),
            other => return Err(format!("{other:?} is no predicate")),
        };
        match self.find(name) {
            Some(Named::Pred(slot)) => Ok((slot, negated)),
            _ => Err(format!("{name} is no predicate")),
        }
    }

    /// A predicate that is written.
    pub(crate) fn pred_target(&mut self, operand: &Operand) -> Built<PredSlot> {
        match operand {
            Operand::Name(name) if name == "_" => Ok(self.new_pred()),
            Operand::Name(name) => match self.find(name) {
                Some(Named::Pred(slot)) => Ok(slot),
                _ => Err(format!("{name} is no predicate")),
            },
            other => Err(format!("{other:?} is no predicate")),
        }
    }

    pub(crate) fn is_pred(&mut self, operand: &Operand) -> bool {
        matches!(operand, Operand::Name(name) if matches!(self.find(name), Some(Named::Pred(_))))
    }

    /// The registers of a vector, or the one register of a scalar.
    pub(crate) fn targets(&mut self, operand: &Operand) -> Built<Vec<Slot>> {
        match operand {
            Operand::Vector(all) => all.iter().map(|o| self.target(o)).collect(),
            one => Ok(vec![self.target(one)?]),
        }
    }

    pub(crate) fn sources(&mut self, operand: &Operand) -> Built<Vec<Slot>> {
        match operand {
            Operand::Vector(all) => all.iter().map(|o| self.source(o)).collect(),
            one => Ok(vec![self.source(one)?]),
        }
    }

    /// An address in `space`. A variable within a function, and a called function's parameter, lie in local memory.
    pub(crate) fn address(&mut self, operand: &Operand, space: Space) -> Built<Address> {
        let Operand::Address(base, offset) = operand else { return Err(format!("{operand:?} is no address")) };
        let space = match &**base {
            Operand::Name(name) => match self.find(name) {
                Some(Named::Memory(Space::Local, _)) => Space::Local,
                Some(Named::Memory(Space::Param, _)) => Space::Param,
                _ => space,
            },
            _ => space,
        };
        Ok(Address { base: self.source(base)?, offset: *offset as u64, space })
    }
}

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
