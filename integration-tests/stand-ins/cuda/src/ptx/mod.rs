//! PTX: lexer, parser and decoder.

pub(crate) mod build;
pub(crate) mod lexer;
pub(crate) mod module;
pub(crate) mod parser;
pub(crate) mod syntax;
pub(crate) mod types;
