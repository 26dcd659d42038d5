//! Tokens to a program.

use super::lexer::{Mistake, Token, tokens};
use super::syntax::{Function, Instruction, Module, Operand, Statement, StatementKind, Value, Variable};
use super::types::{Space, Type};

/// Reads a module.
pub(crate) fn parse(text: &str) -> Result<Module, Mistake> {
    let mut parser = Parser { tokens: tokens(text)?, at: 0 };
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
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |&(line, _)| line)
    }

    fn mistake<T>(&self, what: impl Into<String>) -> Parsed<T> {
        Err(Mistake { line: self.line(), what: what.into() })
    }

    fn next(&mut self) -> Parsed<Token> {
        let Some((_, token)) = self.tokens.get(self.at).cloned() else { return self.mistake("the text ends here") };
        self.at += 1;
        Ok(token)
    }

    fn has(&mut self, mark: char) -> bool {
        let found = self.peek() == Some(&Token::Mark(mark));
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, mark: char) -> Parsed<()> {
        if self.has(mark) { Ok(()) } else { self.mistake(format!("`{mark}` expected, {:?} found", self.peek())) }
    }

    fn has_word(&mut self, word: &str) -> bool {
        let found = matches!(self.peek(), Some(Token::Word(w)) if w == word);
        self.at += usize::from(found);
        found
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
        let mut external = false;
        loop {
            let Some(directive) = self.directive() else {
                return self.mistake(format!("a directive expected, {:?} found", self.peek()));
            };
            match directive.as_str() {
                ".version" => {
                    // `9.2` is a number, a dot and a number.
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
                    return if self.integer()? == 64 { Ok(()) } else { self.mistake("addresses must have 64 bits") };
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
                ".visible" | ".weak" | ".common" => {}
                ".extern" => external = true,
                ".entry" | ".func" => {
                    let function = self.function(directive == ".entry")?;
                    module.functions.push(function);
                    return Ok(());
                }
                other => {
                    let Some(space) = Space::named(&other[1..]) else {
                        return self.mistake(format!("unknown directive `{other}`"));
                    };
                    for variable in self.variables(space, external)? {
                        module.variables.push(variable);
                    }
                    return Ok(());
                }
            }
        }
    }

    fn dotted_number(&self) -> bool {
        matches!(self.peek(), Some(Token::Word(w)) if w.len() > 1 && w[1..].bytes().all(|c| c.is_ascii_digit()))
    }

    /// Debug information between braces says nothing that is needed.
    fn skip_section(&mut self) -> Parsed<()> {
        self.word()?;
        self.expect('{')?;
        while !self.has('}') {
            self.next()?;
        }
        Ok(())
    }

    fn function(&mut self, entry: bool) -> Parsed<Function> {
        let line = self.line();
        let returns = if !entry && self.peek() == Some(&Token::Mark('(')) { self.params()? } else { Vec::new() };
        let name = self.word()?;
        let params = if self.peek() == Some(&Token::Mark('(')) { self.params()? } else { Vec::new() };
        let (mut max_threads, mut required_block) = (None, None);
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
                ".noreturn" => {}
                ".pragma" => {
                    self.next()?;
                    self.expect(';')?;
                }
                other => return self.mistake(format!("unknown directive `{other}` of a function")),
            }
        }
        let body = if self.has(';') { None } else { Some(self.body()?) };
        Ok(Function { name, entry, returns, params, body, max_threads, required_block, line })
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
                Some(".param") => all.push(self.variable(Space::Param, false)?),
                // A register as a parameter is a parameter of the register's size.
                Some(".reg") => return self.mistake("a parameter in a register is not supported"),
                _ => return self.mistake("a parameter expected"),
            }
            self.has(',');
        }
        Ok(all)
    }

    /// Variables of one declaration, up to its `;`.
    fn variables(&mut self, space: Space, external: bool) -> Parsed<Vec<Variable>> {
        let first = self.variable(space, external)?;
        let mut all = vec![first];
        while self.has(',') {
            let (name, line) = (self.word()?, self.line());
            let like = all[0].clone();
            all.push(Variable { name, line, values: Vec::new(), ..like });
        }
        self.expect(';')?;
        Ok(all)
    }

    /// `.align 8 .b8 name[16] = {...}`, behind its space.
    fn variable(&mut self, space: Space, external: bool) -> Parsed<Variable> {
        let (mut align, mut element, mut lanes, mut points) = (None, None, 1usize, false);
        while let Some(directive) = self.directive() {
            match &directive[1..] {
                // Behind `.ptr` it is the alignment of what the parameter points to.
                "align" if points => drop(self.small()?),
                "align" => align = Some(self.small()? as usize),
                "ptr" => points = true,
                "global" | "const" | "shared" | "local" | "managed" => {}
                "v2" => lanes = 2,
                "v4" => lanes = 4,
                other => match Type::named(other) {
                    Some(found) => element = Some(found),
                    None => return self.mistake(format!("unknown type `{directive}`")),
                },
            }
        }
        let (name, line) = (self.word()?, self.line());
        let Some(element) = element else { return self.mistake(format!("{name} has no type")) };
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
        let mut values = Vec::new();
        if self.has('=') {
            self.values(&mut values)?;
        }
        if is_open {
            elements = Some(values.len());
        }
        let bytes = elements.and_then(|n| n.checked_mul(element.bytes())).filter(|&n| n < 1 << 32);
        let Some(bytes) = bytes else { return self.mistake(format!("{name} is too large")) };
        let align = align.unwrap_or(element.bytes() * lanes);
        if !align.is_power_of_two() {
            return self.mistake(format!("{name}: an alignment of {align}"));
        }
        Ok(Variable { name, space, align, element, bytes, external, values, line })
    }

    fn values(&mut self, all: &mut Vec<Value>) -> Parsed<()> {
        if self.has('{') {
            while !self.has('}') {
                self.values(all)?;
                self.has(',');
            }
            return Ok(());
        }
        if self.peek() == Some(&Token::Mark('-')) {
            all.push(Value::Bits(self.integer()?));
            return Ok(());
        }
        let value = match self.next()? {
            Token::Integer(n) => Value::Bits(n),
            Token::F32(bits) => Value::Bits(u64::from(bits)),
            Token::F64(bits) => Value::Bits(bits),
            Token::Word(word) if word == "generic" => {
                self.expect('(')?;
                let name = self.word()?;
                self.expect(')')?;
                Value::Address(name, self.offset()?)
            }
            Token::Word(name) => Value::Address(name, self.offset()?),
            other => return self.mistake(format!("no initial value: {other:?}")),
        };
        all.push(value);
        Ok(())
    }

    /// `+ 8`, `- 8`, `+ -8` or nothing.
    fn offset(&mut self) -> Parsed<i64> {
        if self.has('+') || self.peek() == Some(&Token::Mark('-')) { Ok(self.integer()? as i64) } else { Ok(0) }
    }

    fn body(&mut self) -> Parsed<Vec<Statement>> {
        self.expect('{')?;
        let (mut depth, mut all) = (1, Vec::new());
        while depth > 0 {
            let line = self.line();
            if self.has('{') {
                depth += 1;
                all.push(Statement { line, kind: StatementKind::Open });
            } else if self.has('}') {
                depth -= 1;
                all.push(Statement { line, kind: StatementKind::Close });
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
                    self.variables(space, false)?.into_iter().for_each(|v| push(StatementKind::Variable(v)));
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
            if self.has_word(".branchtargets") {
                let mut labels = vec![self.word()?];
                while self.has(',') {
                    labels.push(self.word()?);
                }
                self.expect(';')?;
                push(StatementKind::Targets { name: opcode, labels });
            } else {
                push(StatementKind::Label(opcode));
            }
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
        push(StatementKind::Instruction(Instruction { guard, opcode, operands }));
        Ok(())
    }

    /// `.loc` has no end but that of its line, or of the lines that its commas continue.
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
        if self.has('(') {
            return Ok(Operand::List(self.list(')')?));
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
                Ok(if offset == 0 { Operand::Name(name) } else { Operand::Sum(name, offset) })
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

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!((function.name.as_str(), function.entry, function.max_threads), ("f", true, Some(256)));
        assert_eq!(function.params.iter().map(|p| (p.bytes, p.align)).collect::<Vec<_>>(), [(8, 8), (16, 8)]);
        assert_eq!(module.variables[0].bytes, 0);
        assert!(matches!(module.variables[1].values[1], Value::Bits(n) if n as i64 == -2));
        let body = function.body.as_ref().unwrap();
        let StatementKind::Instruction(load) = &body[4].kind else { panic!("{body:?}") };
        assert_eq!((load.guard.clone(), load.opcode.as_str()), (Some(("p".into(), true)), "ld.global.v2.b32"));
        assert_eq!(load.operands[1], Operand::Address(Box::new(Operand::Name("%r3".into())), -8));
    }

    #[test]
    fn what_is_not_known_is_named_with_its_line() {
        let error = parse(&format!("{HEAD}.surfref x;")).unwrap_err();
        assert_eq!((error.line, error.what.contains(".surfref")), (4, true));
        assert!(parse(&format!("{HEAD}.entry f() {{ mov.b32 %r1, ")).is_err());
    }
}
