//! Parsing of function bodies.

use super::{Parsed, Parser};
use crate::ptx::lexer::Token;
use crate::ptx::syntax::{Instruction, Operand, Statement, StatementKind};
use crate::ptx::types::{Space, Type};

impl Parser {
    pub(super) fn body(&mut self) -> Parsed<Vec<Statement>> {
        self.expect('{')?;
        let mut depth = 1;
        let mut all = Vec::new();
        while depth > 0 {
            let line = self.line();
            if self.has('{') {
                depth += 1;
                all.push(Statement {
                    line,
                    kind: StatementKind::Open,
                });
            } else if self.has('}') {
                depth -= 1;
                all.push(Statement {
                    line,
                    kind: StatementKind::Close,
                });
            } else if self.has(';') {
            } else {
                self.statement(line, &mut all)?;
            }
        }

        all.pop();
        Ok(all)
    }

    fn statement(&mut self, line: u32, all: &mut Vec<Statement>) -> Parsed<()> {
        let mut push = |kind| all.push(Statement { line, kind });
        if let Some(directive) = self.directive() {
            match directive.as_str() {
                ".reg" => {
                    let Some(kind) = self.directive().and_then(|d| Type::named(&d[1..])) else {
                        return self.mistake("registers of an unknown type");
                    };
                    loop {
                        let name = self.word()?;
                        let count = if self.has('<') {
                            let count = self.integer()?;
                            self.expect('>')?;
                            Some(count)
                        } else {
                            None
                        };
                        push(StatementKind::Registers { kind, name, count });
                        if !self.has(',') {
                            break;
                        }
                    }
                    self.expect(';')?;
                }
                ".loc" => self.skip_location(line),
                ".pragma" => {
                    self.next()?;
                    self.expect(';')?;
                }
                other => {
                    let Some(space) = Space::named(&other[1..]) else {
                        return self.mistake(format!("unknown directive `{other}`"));
                    };
                    self.variables(space)?
                        .into_iter()
                        .for_each(|v| push(StatementKind::Variable(v)));
                }
            }
            return Ok(());
        }

        let guard = if self.has('@') {
            let negated = self.has('!');
            Some((self.word()?, negated))
        } else {
            None
        };

        let opcode = self.word()?;
        if guard.is_none() && self.has(':') {
            push(StatementKind::Label(opcode));
            return Ok(());
        }

        let mut operands = Vec::new();
        while !self.has(';') {
            operands.push(self.operand()?);
            if !self.has(',') {
                self.expect(';')?;
                break;
            }
        }

        push(StatementKind::Instruction(Instruction {
            guard,
            opcode,
            operands,
        }));
        Ok(())
    }

    /// Skips a `.loc`, which ends with its line.
    fn skip_location(&mut self, line: u32) {
        while self.tokens.get(self.at).is_some_and(|&(at, _)| at == line) {
            self.at += 1;
        }
    }

    fn operand(&mut self) -> Parsed<Operand> {
        let first = self.simple_operand()?;
        if self.has('|') {
            let second = self.simple_operand()?;
            return Ok(Operand::Pair(Box::new(first), Box::new(second)));
        }
        Ok(first)
    }

    fn list(&mut self, end: char) -> Parsed<Vec<Operand>> {
        let mut all = Vec::new();
        while !self.has(end) {
            all.push(self.operand()?);
            self.has(',');
        }
        Ok(all)
    }

    fn simple_operand(&mut self) -> Parsed<Operand> {
        if self.has('{') {
            return Ok(Operand::Vector(self.list('}')?));
        }
        if self.has('[') {
            let base = match self.next()? {
                Token::Word(name) => Operand::Name(name),
                Token::Integer(n) => Operand::Integer(n),
                other => return self.mistake(format!("no address: {other:?}")),
            };
            let offset = self.offset()?;
            self.expect(']')?;
            return Ok(Operand::Address(Box::new(base), offset));
        }

        if self.has('!') {
            return Ok(Operand::Not(self.word()?));
        }
        if self.has('-') {
            return match self.next()? {
                Token::Integer(n) => Ok(Operand::Integer(n.wrapping_neg())),
                other => self.mistake(format!("no negative number: {other:?}")),
            };
        }

        match self.next()? {
            Token::Word(name) => {
                let offset = self.offset()?;
                Ok(if offset == 0 {
                    Operand::Name(name)
                } else {
                    Operand::Sum(name, offset)
                })
            }
            Token::Integer(n) => Ok(Operand::Integer(n)),
            Token::F32(bits) => Ok(Operand::F32(bits)),
            Token::F64(bits) => Ok(Operand::F64(bits)),
            other => {
                self.at -= 1;
                self.mistake(format!("no operand: {other:?}"))
            }
        }
    }
}
