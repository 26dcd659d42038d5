//! PTX: text to programs.

pub(crate) mod build;
pub(crate) mod lexer;
pub(crate) mod module;
pub(crate) mod parser;
pub(crate) mod syntax;
pub(crate) mod types;
