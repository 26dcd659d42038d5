//! Expressions of jinja2 as expressions of minijinja.
//!
//! The grammars are alike, the operators are not: minijinja prints the operands of `~` in its own
//! way, divides otherwise, compares what Python refuses to. So expressions are parsed by jinja2's
//! grammar, and operators become filters of [`super::operators`].

use std::cell::Cell;
use std::collections::HashMap;

use super::is_name;

/// Names of methods of Python's dictionaries: an attribute with such a name is the method.
pub(super) const DICT_METHODS: [&str; 11] = [
    "clear",
    "copy",
    "fromkeys",
    "get",
    "items",
    "keys",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "values",
];

/// Deepest nesting of an expression.
const MAX_DEPTH: usize = 60;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token<'a> {
    Name(&'a str),
    Number(String),
    Text(String),
    Sign(&'static str),
}

/// Operators and brackets, longer ones first.
const SIGNS: [&str; 27] = [
    "**", "//", "==", "!=", "<=", ">=", "+", "-", "*", "/", "%", "~", "<", ">", "=", ".", ",", ":",
    "|", "(", ")", "[", "]", "{", "}", ";", "!",
];

fn tokens(source: &str) -> Result<Vec<Token<'_>>, String> {
    let mut tokens = Vec::new();
    let mut rest = source.trim_start();
    while let Some(first) = rest.chars().next() {
        let len = if first == '"' || first == '\'' {
            let (text, len) = string(rest)?;
            tokens.push(Token::Text(text));
            len
        } else if first.is_ascii_digit() {
            let len = number_len(rest);
            tokens.push(Token::Number(rest[..len].replace('_', "")));
            len
        } else if is_name(first) {
            let len = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
            tokens.push(Token::Name(&rest[..len]));
            len
        } else {
            let sign = SIGNS.iter().find(|sign| rest.starts_with(**sign));
            let sign = sign.ok_or_else(|| format!("unexpected {first:?}"))?;
            tokens.push(Token::Sign(sign));
            sign.len()
        };
        rest = rest[len..].trim_start();
    }
    Ok(tokens)
}

/// The length of an integer or a float.
fn number_len(text: &str) -> usize {
    let digits = |from: usize| {
        let end = text[from..].find(|c: char| !c.is_ascii_digit() && c != '_');
        end.map_or(text.len(), |end| from + end)
    };
    let bytes = text.as_bytes();
    let is_digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
    let mut end = digits(0);
    if bytes.get(end) == Some(&b'.') && is_digit(end + 1) {
        end = digits(end + 1);
    }
    if matches!(bytes.get(end), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
        if is_digit(end + 1 + sign) {
            end = digits(end + 1 + sign);
        }
    }
    end
}

/// The text of a string with Python's escapes, and the length of its source.
fn string(source: &str) -> Result<(String, usize), String> {
    let mut characters = source.char_indices();
    let quote = characters.next().map(|(_, quote)| quote);
    let mut text = String::new();
    while let Some((at, character)) = characters.next() {
        if Some(character) == quote {
            return Ok((text, at + 1));
        }
        if character != '\\' {
            text.push(character);
            continue;
        }
        let Some((_, escaped)) = characters.next() else {
            break;
        };
        let mut code = |digits: usize| {
            let code: String = characters.by_ref().take(digits).map(|(_, c)| c).collect();
            let code = u32::from_str_radix(&code, 16).ok().and_then(char::from_u32);
            code.ok_or_else(|| "an escape of a string that is no character".to_owned())
        };
        match escaped {
            '\n' => {}
            '\\' | '\'' | '"' => text.push(escaped),
            'n' => text.push('\n'),
            't' => text.push('\t'),
            'r' => text.push('\r'),
            'a' => text.push('\u{7}'),
            'b' => text.push('\u{8}'),
            'f' => text.push('\u{c}'),
            'v' => text.push('\u{b}'),
            'x' => text.push(code(2)?),
            'u' => text.push(code(4)?),
            'U' => text.push(code(8)?),
            'N' | '0'..='7' => return Err(format!("the escape \\{escaped} is not supported")),
            _ => text.extend(['\\', escaped]),
        }
    }
    Err("a string that does not end".to_owned())
}

/// A string that minijinja reads as `text`.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            _ => out.push(character),
        }
    }
    out.push('"');
    out
}

/// The macros of a template: the place of the first parameter with a default.
pub(super) type Macros<'a> = HashMap<&'a str, usize>;

/// Parses expressions and writes them for minijinja.
pub(super) struct Parser<'a> {
    tokens: Vec<Token<'a>>,
    at: usize,
    depth: usize,
    macros: &'a Macros<'a>,
}

/// The text of an expression for minijinja, or the reason why it is refused.
type Parsed = Result<String, String>;

impl<'a> Parser<'a> {
    pub(super) fn new(source: &'a str, macros: &'a Macros<'a>) -> Result<Self, String> {
        Ok(Self {
            tokens: tokens(source)?,
            at: 0,
            depth: 0,
            macros,
        })
    }

    fn peek(&self) -> Option<&Token<'a>> {
        self.tokens.get(self.at)
    }

    pub(super) fn is_sign(&self, sign: &str) -> bool {
        matches!(self.peek(), Some(Token::Sign(one)) if *one == sign)
    }

    pub(super) fn is_word(&self, word: &str) -> bool {
        self.peek() == Some(&Token::Name(word))
    }

    pub(super) fn take_sign(&mut self, sign: &str) -> bool {
        let taken = self.is_sign(sign);
        self.at += usize::from(taken);
        taken
    }

    pub(super) fn take_word(&mut self, word: &str) -> bool {
        let taken = self.is_word(word);
        self.at += usize::from(taken);
        taken
    }

    pub(super) fn name(&mut self) -> Result<&'a str, String> {
        match self.peek() {
            Some(&Token::Name(name)) => {
                self.at += 1;
                Ok(name)
            }
            _ => Err(self.unexpected("a name")),
        }
    }

    pub(super) fn is_end(&self) -> bool {
        self.at == self.tokens.len()
    }

    fn unexpected(&self, expected: &str) -> String {
        match self.peek() {
            None => format!("expected {expected} at the end"),
            Some(Token::Name(name)) => format!("expected {expected} before {name}"),
            Some(Token::Sign(sign)) => format!("expected {expected} before {sign}"),
            Some(Token::Number(text) | Token::Text(text)) => {
                format!("expected {expected} before {text:?}")
            }
        }
    }

    pub(super) fn expect(&mut self, sign: &str) -> Result<(), String> {
        match self.take_sign(sign) {
            true => Ok(()),
            false => Err(self.unexpected(sign)),
        }
    }

    pub(super) fn end(&self) -> Result<(), String> {
        match self.is_end() {
            true => Ok(()),
            false => Err(self.unexpected("the end")),
        }
    }

    /// Expressions with commas are a tuple.
    pub(super) fn tuple(&mut self, with_condition: bool) -> Parsed {
        let one = |parser: &mut Self| match with_condition {
            true => parser.expression(),
            false => parser.or(),
        };
        let first = one(self)?;
        if !self.is_sign(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.take_sign(",") {
            if self.is_end() || self.is_sign(")") || self.is_sign("]") {
                break;
            }
            items.push(one(self)?);
        }
        Ok(format!("([{}]|__tuple)", items.join(", ")))
    }

    pub(super) fn expression(&mut self) -> Parsed {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(format!(
                "an expression is nested more than {MAX_DEPTH} times"
            ));
        }
        let mut value = self.or()?;
        while self.take_word("if") {
            let test = self.or()?;
            let other = match self.take_word("else") {
                true => format!(" else {}", self.expression()?),
                false => String::new(),
            };
            value = format!("({value} if {test}{other})");
        }
        self.depth -= 1;
        Ok(value)
    }

    pub(super) fn or(&mut self) -> Parsed {
        self.words("or", Self::and)
    }

    fn and(&mut self) -> Parsed {
        self.words("and", Self::not)
    }

    /// Operands with `and` or `or` between them.
    fn words(&mut self, word: &str, operand: fn(&mut Self) -> Parsed) -> Parsed {
        let mut last = operand(self)?;
        let mut before = String::new();
        while self.take_word(word) {
            before.push_str(&format!("{} {word} ", kept(last)));
            last = operand(self)?;
        }
        Ok(match before.is_empty() {
            true => last,
            false => format!("({before}{last})"),
        })
    }

    fn not(&mut self) -> Parsed {
        let mut nots = 0;
        while self.take_word("not") {
            nots += 1;
        }
        let value = self.comparison()?;
        Ok(match (nots, nots % 2) {
            (0, _) => value,
            (_, 0) => format!("(not (not {value}))"),
            _ => format!("(not {value})"),
        })
    }

    fn comparison(&mut self) -> Parsed {
        let left = self.sum()?;
        let mut pairs = Vec::new();
        loop {
            let signs = ["==", "!=", "<=", ">=", "<", ">"];
            let sign = signs.into_iter().find(|sign| self.take_sign(sign));
            let is_not_in =
                self.is_word("not") && self.tokens.get(self.at + 1) == Some(&Token::Name("in"));
            let operator = match sign {
                Some(sign) => sign,
                None if self.take_word("in") => "in",
                None if is_not_in => {
                    self.at += 2;
                    "not in"
                }
                None => break,
            };
            pairs.push((operator, self.sum()?));
        }
        // `a < b < c` is `a < b and b < c`.
        let mut left = left;
        let mut all = Vec::new();
        for (operator, right) in pairs {
            let filter = match operator {
                "==" => "__eq",
                "!=" => "__ne",
                "in" => "__in",
                "not in" => "__not_in",
                "<" => "__lt",
                "<=" => "__le",
                ">" => "__gt",
                _ => "__ge",
            };
            all.push(format!("({left}|{filter}({right}))"));
            left = right;
        }
        Ok(match all.len() {
            0 => left,
            1 => all.swap_remove(0),
            _ => format!("({})", all.join(" and ")),
        })
    }

    /// Operators of one precedence, from the left.
    fn chain(&mut self, operators: &[(&str, &str)], operand: fn(&mut Self) -> Parsed) -> Parsed {
        let first = operand(self)?;
        let mut rest = String::new();
        loop {
            let next = operators.iter().find(|(sign, _)| self.take_sign(sign));
            let Some((_, filter)) = next else { break };
            rest.push_str(&format!("|{filter}({})", operand(self)?));
        }
        Ok(match rest.is_empty() {
            true => first,
            false => format!("({first}{rest})"),
        })
    }

    fn sum(&mut self) -> Parsed {
        self.chain(&[("+", "__add"), ("-", "__sub")], Self::concatenation)
    }

    fn concatenation(&mut self) -> Parsed {
        let first = self.product()?;
        let mut rest = Vec::new();
        while self.take_sign("~") {
            rest.push(self.product()?);
        }
        Ok(match rest.is_empty() {
            true => first,
            false => format!("({first}|__concat({}))", rest.join(", ")),
        })
    }

    fn product(&mut self) -> Parsed {
        let operators = [
            ("*", "__mul"),
            ("//", "__floordiv"),
            ("/", "__div"),
            ("%", "__mod"),
        ];
        self.chain(&operators, Self::power)
    }

    fn power(&mut self) -> Parsed {
        self.chain(&[("**", "__pow")], |parser| parser.unary(true))
    }

    fn unary(&mut self, with_filter: bool) -> Parsed {
        let value = if self.take_sign("-") {
            format!("({}|__neg)", self.unary(false)?)
        } else if self.take_sign("+") {
            format!("({}|__pos)", self.unary(false)?)
        } else {
            self.primary()?
        };
        let value = self.postfix(value)?;
        match with_filter {
            true => self.filters(value),
            false => Ok(value),
        }
    }

    fn primary(&mut self) -> Parsed {
        let Some(token) = self.peek().cloned() else {
            return Err(self.unexpected("an expression"));
        };
        self.at += 1;
        match token {
            Token::Name("true" | "True") => Ok("true".to_owned()),
            Token::Name("false" | "False") => Ok("false".to_owned()),
            Token::Name("none" | "None") => Ok("none".to_owned()),
            Token::Name("and" | "else" | "if" | "in" | "is" | "not" | "or") => {
                self.at -= 1;
                Err(self.unexpected("an expression"))
            }
            Token::Name(name) => Ok(name.to_owned()),
            Token::Number(text) => Ok(text),
            Token::Text(mut text) => {
                while let Some(Token::Text(more)) = self.peek() {
                    text.push_str(more);
                    self.at += 1;
                }
                Ok(quoted(&text))
            }
            Token::Sign("(") => {
                if self.take_sign(")") {
                    return Ok("([]|__tuple)".to_owned());
                }
                let inner = self.tuple(true)?;
                self.expect(")")?;
                // A literal's method is not a part of the literal.
                Ok(format!("({inner})"))
            }
            Token::Sign("[") => {
                let items = self.items("]", Self::expression)?;
                Ok(format!("[{items}]"))
            }
            Token::Sign("{") => {
                let items = self.items("}", |parser| {
                    let key = parser.expression()?;
                    if key.starts_with(['[', '{']) {
                        return Err("a list or a dictionary as a key".to_owned());
                    }
                    parser.expect(":")?;
                    Ok(format!("({key}|__key): {}", parser.expression()?))
                })?;
                Ok(format!("{{{items}}}"))
            }
            Token::Sign(_) => {
                self.at -= 1;
                Err(self.unexpected("an expression"))
            }
        }
    }

    /// Items up to a bracket.
    fn items(&mut self, end: &str, item: impl Fn(&mut Self) -> Parsed) -> Parsed {
        let mut items = Vec::new();
        while !self.take_sign(end) {
            if !items.is_empty() {
                self.expect(",")?;
                if self.take_sign(end) {
                    break;
                }
            }
            items.push(item(self)?);
        }
        Ok(items.join(", "))
    }

    fn postfix(&mut self, mut value: String) -> Parsed {
        loop {
            if self.take_sign(".") {
                if let Some(Token::Number(index)) = self.peek() {
                    value = format!("{value}[{index}]");
                    self.at += 1;
                    continue;
                }
                let name = self.name()?;
                value = match DICT_METHODS.contains(&name) && !self.is_sign("(") {
                    true => format!("({value}|__attribute(\"{name}\"))"),
                    false => format!("{value}.{name}"),
                };
            } else if self.take_sign("[") {
                value = self.subscript(&value)?;
            } else if self.is_sign("(") {
                let first_default = self.macros.get(&*value).copied();
                value = format!("{value}{}", self.arguments(first_default)?);
            } else {
                return Ok(value);
            }
        }
    }

    fn subscript(&mut self, value: &str) -> Parsed {
        let mut parts = Vec::new();
        let mut colons = 0;
        let mut last = None;
        while !self.take_sign("]") {
            if self.take_sign(":") {
                parts.push(last.take());
                colons += 1;
            } else if last.is_none() {
                last = Some(self.expression()?);
            } else {
                return Err(self.unexpected("]"));
            }
        }
        parts.push(last);
        if colons > 2 {
            return Err("a slice with more than two colons".to_owned());
        }
        if colons == 0 {
            let index = parts.into_iter().next().flatten();
            let index = index.ok_or("an empty subscript")?;
            return Ok(match index.starts_with('"') {
                // A key of a dictionary that is no method.
                true if !DICT_METHODS.iter().any(|name| index == quoted(name)) => {
                    format!("{value}[{index}]")
                }
                _ => format!("({value}|__item({index}))"),
            });
        }
        let parts: Vec<String> = parts
            .into_iter()
            .map(|part| part.unwrap_or_else(|| "none".to_owned()))
            .collect();
        Ok(format!("({value}|__slice({}))", parts.join(", ")))
    }

    /// Arguments. minijinja takes an undefined one for one that is not given, so those for which a
    /// macro has a default must be defined.
    fn arguments(&mut self, first_default: Option<usize>) -> Parsed {
        self.expect("(")?;
        let number = Cell::new(0);
        let items = self.items(")", |parser| {
            let place = number.replace(number.get() + 1);
            if parser.is_sign("*") || parser.is_sign("**") {
                return Err("arguments from a list are not supported".to_owned());
            }
            let is_keyword = matches!(parser.peek(), Some(Token::Name(_)))
                && parser.tokens.get(parser.at + 1) == Some(&Token::Sign("="));
            let mut argument = String::new();
            if is_keyword {
                argument = format!("{}=", parser.name()?);
                parser.expect("=")?;
            }
            let value = parser.expression()?;
            match first_default.is_some_and(|first| is_keyword || place >= first) {
                true => argument.push_str(&format!("({value}|__given)")),
                false => argument.push_str(&value),
            }
            Ok(argument)
        })?;
        Ok(format!("({items})"))
    }

    /// Filters, tests and calls behind a value.
    pub(super) fn filters(&mut self, mut value: String) -> Parsed {
        loop {
            if self.take_sign("|") {
                let name = self.name()?;
                let arguments = match self.is_sign("(") {
                    true => self.arguments(None)?,
                    false => String::new(),
                };
                value = format!("{value}|{name}{arguments}");
            } else if self.take_word("is") {
                value = self.test(&value)?;
            } else if self.is_sign("(") {
                value = format!("{value}{}", self.arguments(None)?);
            } else {
                return Ok(value);
            }
        }
    }

    fn test(&mut self, value: &str) -> Parsed {
        let negated = self.take_word("not");
        let name = self.name()?;
        let begins = match self.peek() {
            Some(Token::Name("else" | "or" | "and")) | None => false,
            Some(Token::Name("is" | "if" | "in" | "not")) => {
                return Err(self.unexpected("an operator"));
            }
            Some(Token::Sign(sign)) => matches!(*sign, "[" | "{"),
            Some(_) => true,
        };
        let arguments = if self.is_sign("(") {
            self.arguments(None)?
        } else if begins {
            let argument = self.primary()?;
            format!("({})", self.postfix(argument)?)
        } else {
            String::new()
        };
        let test = format!("({value} is {name}{arguments})");
        Ok(match negated {
            true => format!("(not {test})"),
            false => test,
        })
    }
}

/// A value that minijinja does not take for a constant, of which it would make a bool.
fn kept(value: String) -> String {
    let is_constant = !value.contains("|__") && !value.starts_with(is_name_start);
    let is_word = matches!(&*value, "true" | "false" | "none");
    match is_constant || is_word {
        true => format!("({value}|__same)"),
        false => value,
    }
}

fn is_name_start(c: char) -> bool {
    is_name(c) && !c.is_ascii_digit()
}

/// The expression of `{{ }}`.
pub(super) fn printed<'a>(source: &'a str, macros: &'a Macros<'a>) -> Parsed {
    let mut parser = Parser::new(source, macros)?;
    let value = parser.tuple(true)?;
    parser.end()?;
    Ok(value)
}
