//! The parser: tokens to a syntax tree.

use crate::ptx::lexer::{Mistake, Token, tokens};
use crate::ptx::syntax::{Function, Module, Variable};
use crate::ptx::types::Space;

mod body;
mod variables;

/// Parses a module.
pub(crate) fn parse(text: &str) -> Result<Module, Mistake> {
    let mut parser = Parser {
        tokens: tokens(text)?,
        at: 0,
    };
    let mut module = Module::default();
    while parser.peek().is_some() {
        parser.item(&mut module)?;
    }
    Ok(module)
}

struct Parser {
    tokens: Vec<(u32, Token)>,
    at: usize,
}

type Parsed<T> = Result<T, Mistake>;

impl Parser {
    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at).map(|(_, token)| token)
    }

    fn line(&self) -> u32 {
        self.tokens
            .get(self.at)
            .or(self.tokens.last())
            .map_or(1, |&(line, _)| line)
    }

    fn mistake<T>(&self, what: impl Into<String>) -> Parsed<T> {
        Err(Mistake {
            line: self.line(),
            what: what.into(),
        })
    }

    fn next(&mut self) -> Parsed<Token> {
        let Some((_, token)) = self.tokens.get(self.at).cloned() else {
            return self.mistake("the text ends here");
        };
        self.at += 1;
        Ok(token)
    }

    fn has(&mut self, mark: char) -> bool {
        let found = self.peek() == Some(&Token::Mark(mark));
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, mark: char) -> Parsed<()> {
        if self.has(mark) {
            Ok(())
        } else {
            self.mistake(format!("`{mark}` expected, {:?} found", self.peek()))
        }
    }

    fn word(&mut self) -> Parsed<String> {
        match self.next()? {
            Token::Word(word) => Ok(word),
            other => {
                self.at -= 1;
                self.mistake(format!("a name expected, {other:?} found"))
            }
        }
    }

    /// A directive, with its dot.
    fn directive(&mut self) -> Option<String> {
        match self.peek() {
            Some(Token::Word(word)) if word.starts_with('.') => {
                let word = word.clone();
                self.at += 1;
                Some(word)
            }
            _ => None,
        }
    }

    fn integer(&mut self) -> Parsed<u64> {
        let negative = self.has('-');
        match self.next()? {
            Token::Integer(n) => Ok(if negative { n.wrapping_neg() } else { n }),
            other => {
                self.at -= 1;
                self.mistake(format!("a number expected, {other:?} found"))
            }
        }
    }

    fn small(&mut self) -> Parsed<u32> {
        u32::try_from(self.integer()?).or_else(|_| self.mistake("a number that is too large"))
    }

    fn item(&mut self, module: &mut Module) -> Parsed<()> {
        loop {
            let Some(directive) = self.directive() else {
                return self.mistake(format!("a directive expected, {:?} found", self.peek()));
            };
            match directive.as_str() {
                ".version" => {
                    // The lexer splits `9.2` into `9` and `.2`.
                    while matches!(self.peek(), Some(Token::Integer(_))) || self.dotted_number() {
                        self.at += 1;
                    }
                    return Ok(());
                }
                ".target" => {
                    self.word()?;
                    while self.has(',') {
                        self.word()?;
                    }
                    return Ok(());
                }
                ".address_size" => {
                    return if self.integer()? == 64 {
                        Ok(())
                    } else {
                        self.mistake("addresses must have 64 bits")
                    };
                }
                ".file" => {
                    self.integer()?;
                    self.next()?;
                    while self.has(',') {
                        self.integer()?;
                    }
                    return Ok(());
                }
                ".section" => return self.skip_section(),
                ".visible" | ".weak" | ".extern" => {}
                ".entry" => {
                    let function = self.function()?;
                    module.functions.push(function);
                    return Ok(());
                }
                ".shared" => {
                    module.variables.extend(self.variables(Space::Shared)?);
                    return Ok(());
                }
                // A constant of a class. A kernel that uses one is refused: its name is not declared.
                ".global" | ".const" => {
                    while !self.has(';') {
                        self.next()?;
                    }
                    return Ok(());
                }
                other => return self.mistake(format!("unknown directive `{other}`")),
            }
        }
    }

    fn dotted_number(&self) -> bool {
        matches!(self.peek(), Some(Token::Word(w)) if w.len() > 1 && w[1..].bytes().all(|c| c.is_ascii_digit()))
    }

    /// Skips debug information in braces.
    fn skip_section(&mut self) -> Parsed<()> {
        self.word()?;
        self.expect('{')?;
        while !self.has('}') {
            self.next()?;
        }
        Ok(())
    }

    fn function(&mut self) -> Parsed<Function> {
        let line = self.line();
        let name = self.word()?;
        let params = if self.peek() == Some(&Token::Mark('(')) {
            self.params()?
        } else {
            Vec::new()
        };

        let mut max_threads = None;
        let mut required_block = None;
        while let Some(directive) = self.directive() {
            match directive.as_str() {
                ".maxntid" => max_threads = Some(self.dimensions()?.iter().product()),
                ".reqntid" => {
                    let block = self.dimensions()?;
                    (max_threads, required_block) = (Some(block.iter().product()), Some(block));
                }
                ".minnctapersm" | ".maxnreg" | ".maxnctapersm" => {
                    self.integer()?;
                }
                ".pragma" => {
                    self.next()?;
                    self.expect(';')?;
                }
                other => return self.mistake(format!("unknown directive `{other}` of a function")),
            }
        }

        Ok(Function {
            name,
            params,
            body: self.body()?,
            max_threads,
            required_block,
            line,
        })
    }

    fn dimensions(&mut self) -> Parsed<[u32; 3]> {
        let mut all = [1; 3];
        all[0] = self.small()?;
        for dimension in &mut all[1..] {
            if self.has(',') {
                *dimension = self.small()?;
            }
        }
        Ok(all)
    }

    fn params(&mut self) -> Parsed<Vec<Variable>> {
        self.expect('(')?;
        let mut all = Vec::new();
        while !self.has(')') {
            match self.directive().as_deref() {
                Some(".param") => all.push(self.variable(Space::Param)?),
                Some(".reg") => return self.mistake("a parameter in a register is not supported"),
                _ => return self.mistake("a parameter expected"),
            }
            self.has(',');
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx::syntax::{Operand, StatementKind};

    const HEAD: &str = ".version 9.2\n.target sm_90\n.address_size 64\n";

    #[test]
    fn a_kernel_is_read_with_parameters_scopes_and_labels() {
        let text = format!(
            "{HEAD}.extern .shared .align 16 .b8 dynamic[];\n.global .align 4 .u32 table[2] = {{1, -2}};\n\
             .visible .entry f(\n.param .u64 .ptr .align 1 f_0,\n.param .align 8 .b8 f_1[16])\n.maxntid 256\n\
             {{ .reg .b32 %r<4>; $L: {{ .reg .pred p; @!p ld.global.v2.b32 {{%r1, %r2}}, [%r3+-8]; }} \
             shfl.sync.bfly.b32 %r1|%p2, %r2, 1, 31, -1; bra.uni $L; }}"
        );
        let module = parse(&text).unwrap();
        let function = &module.functions[0];
        assert_eq!(
            (function.name.as_str(), function.max_threads),
            ("f", Some(256))
        );

        assert_eq!(
            function
                .params
                .iter()
                .map(|p| (p.bytes, p.align))
                .collect::<Vec<_>>(),
            [(8, 8), (16, 8)]
        );

        assert_eq!(module.variables[0].bytes, 0);
        let body = &function.body;
        let StatementKind::Instruction(load) = &body[4].kind else {
            panic!("{body:?}")
        };
        assert_eq!(
            (load.guard.clone(), load.opcode.as_str()),
            (Some(("p".into(), true)), "ld.global.v2.b32")
        );
        assert_eq!(
            load.operands[1],
            Operand::Address(Box::new(Operand::Name("%r3".into())), -8)
        );
    }

    #[test]
    fn what_is_not_known_is_named_with_its_line() {
        let error = parse(&format!("{HEAD}.surfref x;")).unwrap_err();
        assert_eq!((error.line, error.what.contains(".surfref")), (4, true));
        assert!(parse(&format!("{HEAD}.entry f() {{ mov.b32 %r1, ")).is_err());
    }
}
