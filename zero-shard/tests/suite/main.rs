//! Properties of layouts, their parts, resharding and formulas.

mod block_errors;
mod formulas;
mod layout;
mod parts;
mod reshard;
mod serde;
mod support;
mod tensor_cut;
mod updaters;
