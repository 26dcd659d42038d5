//! The syntax tree.

use super::types::{Space, Type};

#[derive(Debug, Default)]
pub(crate) struct Module {
    pub(crate) functions: Vec<Function>,
    pub(crate) variables: Vec<Variable>,
}

#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) params: Vec<Variable>,
    pub(crate) body: Vec<Statement>,
    /// From `.maxntid` and `.reqntid`.
    pub(crate) max_threads: Option<u32>,
    pub(crate) required_block: Option<[u32; 3]>,
    pub(crate) line: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Variable {
    pub(crate) name: String,
    pub(crate) space: Space,
    pub(crate) align: usize,
    /// 0 for an array without a length: dynamic shared memory.
    pub(crate) bytes: usize,
}

#[derive(Debug)]
pub(crate) struct Statement {
    pub(crate) line: u32,
    pub(crate) kind: StatementKind,
}

#[derive(Debug)]
pub(crate) enum StatementKind {
    Open,
    Close,
    Label(String),
    /// `.reg .b32 %r<10>` has a count, `.reg .b32 x` does not.
    Registers {
        kind: Type,
        name: String,
        count: Option<u64>,
    },
    Variable(Variable),
    Instruction(Instruction),
}

#[derive(Clone, Debug)]
pub(crate) struct Instruction {
    /// The predicate, and whether it is negated.
    pub(crate) guard: Option<(String, bool)>,
    pub(crate) opcode: String,
    pub(crate) operands: Vec<Operand>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand {
    /// A register, a variable or a label.
    Name(String),
    /// `!%p`
    Not(String),
    Integer(u64),
    F32(u32),
    F64(u64),
    /// `{a, b}`
    Vector(Vec<Operand>),
    /// `a|b`
    Pair(Box<Operand>, Box<Operand>),
    /// `[base + offset]`; `Sum` is `name + offset`, an address used as a value.
    Address(Box<Operand>, i64),
    Sum(String, i64),
}
