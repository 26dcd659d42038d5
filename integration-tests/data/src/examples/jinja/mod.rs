//! Templates of jinja2, run by minijinja.
//!
//! minijinja has jinja2's grammar and its own values. What differs is closed here by kind, not by
//! case: all operators are filters of [`operators`], all filters, tests and methods are those of
//! [`filters`] and [`methods`], all values are printed by [`python`]. What is not among them is
//! refused by its name, so that a template has the text that transformers gives it, or none.
//! `scripts/jinja_cases.py` compares random templates with jinja2.

mod expression;
mod filters;
mod methods;
mod numbers;
mod operators;
mod percent;
mod python;
mod statement;
mod syntax;
#[cfg(test)]
mod tests;

pub(super) use syntax::{MARKS, RewrittenTemplate, TRACE, rewrite};

use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind};

/// An environment with the settings of transformers, without its functions of time.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::empty();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_formatter(python::print);
    environment
        .set_unknown_method_callback(|_, value, name, args| methods::call(value, name, args));
    environment.add_function(
        "raise_exception",
        |message: String| -> Result<Value, Error> { Err(refused(message)) },
    );
    operators::add_to(&mut environment);
    filters::add_to(&mut environment);
    environment
}

/// An error of a template.
fn refused(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, why.into())
}

/// Whether a character is a part of a name.
fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}
