//! The binary `zero`.
fn main() {}
