//! Block tags of jinja2 as tags of minijinja: their expressions are rewritten.

use super::expression::{Macros, Parser};

/// A block tag for minijinja, without its signs.
pub(super) fn rewritten<'a>(
    keyword: &str,
    rest: &'a str,
    macros: &'a Macros<'a>,
) -> Result<String, String> {
    let mut parser = Parser::new(rest, macros)?;
    let rewritten = match keyword {
        "if" | "elif" => format!("{keyword} {}", parser.expression()?),
        "for" => loop_head(&mut parser)?,
        "set" => assignment(&mut parser)?,
        "macro" => macro_head(&mut parser)?,
        "call" => call_head(&mut parser)?,
        "filter" => format!("filter {}", filter_head(&mut parser)?),
        "else" | "endif" | "endfor" | "endset" | "endmacro" | "endcall" | "endfilter" | "break"
        | "continue" => keyword.to_owned(),
        other => return Err(format!("the tag {other:?} is not supported")),
    };
    parser.end()?;
    Ok(rewritten)
}

/// Names with commas.
fn targets(parser: &mut Parser) -> Result<String, String> {
    let mut names = Vec::new();
    let bracketed = parser.take_sign("(");
    loop {
        let mut name = parser.name()?.to_owned();
        if parser.take_sign(".") {
            name = format!("{name}.{}", parser.name()?);
        }
        names.push(name);
        if !parser.take_sign(",") {
            break;
        }
    }
    if bracketed {
        parser.expect(")")?;
    }
    Ok(names.join(", "))
}

fn loop_head(parser: &mut Parser) -> Result<String, String> {
    let targets = targets(parser)?;
    if !parser.take_word("in") {
        return Err("expected `in` in a loop".to_owned());
    }
    let mut head = format!("for {targets} in ({}|__iter)", parser.tuple(false)?);
    if parser.take_word("if") {
        head.push_str(&format!(" if {}", parser.expression()?));
    }
    if parser.take_word("recursive") {
        head.push_str(" recursive");
    }
    Ok(head)
}

fn assignment(parser: &mut Parser) -> Result<String, String> {
    let targets = targets(parser)?;
    if parser.take_sign("=") {
        return Ok(format!("set {targets} = {}", parser.tuple(true)?));
    }
    // The value of a block, with filters.
    let filters = parser.filters(String::new())?;
    if !filters.is_empty() {
        return Err("a block that is set with filters is not supported".to_owned());
    }
    Ok(format!("set {targets}"))
}

/// The parameters of a macro.
fn parameters(parser: &mut Parser) -> Result<String, String> {
    let mut parameters = Vec::new();
    parser.expect("(")?;
    while !parser.take_sign(")") {
        if !parameters.is_empty() {
            parser.expect(",")?;
        }
        let name = parser.name()?;
        parameters.push(match parser.take_sign("=") {
            true => format!("{name}={}", parser.expression()?),
            false => name.to_owned(),
        });
    }
    Ok(format!("({})", parameters.join(", ")))
}

/// The name of a macro, and the place of its first parameter with a default.
pub(super) fn first_default(rest: &str) -> Option<(&str, usize)> {
    let (name, parameters) = rest.split_once('(')?;
    let before = &parameters[..parameters.find('=')?];
    Some((name.trim(), before.matches(',').count()))
}

fn macro_head(parser: &mut Parser) -> Result<String, String> {
    let name = parser.name()?;
    Ok(format!("macro {name}{}", parameters(parser)?))
}

fn call_head(parser: &mut Parser) -> Result<String, String> {
    let of_caller = match parser.is_sign("(") {
        true => parameters(parser)?,
        false => String::new(),
    };
    Ok(format!("call{of_caller} {}", parser.expression()?))
}

/// A filter with its arguments.
fn filter_head(parser: &mut Parser) -> Result<String, String> {
    let name = parser.name()?;
    if !parser.is_end() {
        return Err("a filter block with arguments is not supported".to_owned());
    }
    Ok(name.to_owned())
}
