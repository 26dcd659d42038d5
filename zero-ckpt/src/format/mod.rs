#![doc = include_str!("../../FORMAT.md")]

pub(crate) mod coverage;
pub(crate) mod dtype;
pub(crate) mod encoding;
pub(crate) mod file_layout;
pub(crate) mod header;
pub(crate) mod manifest;
pub(crate) mod model;
pub(crate) mod names;
pub(crate) mod runs;
pub(crate) mod staged_name;
pub(crate) mod tensor_folder;
pub(crate) mod tensor_parallel;
