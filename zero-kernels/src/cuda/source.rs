//! The kernels' sources, embedded in the binary.

const PRELUDE: &str = include_str!("../../cuda/prelude.cuh");

/// One source file: one operation, in the dtypes that it supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelSource {
    /// The file's name.
    pub name: &'static str,
    body: &'static str,
}

macro_rules! sources {
    ($($folder:literal $name:literal),*) => {
        [$(KernelSource { name: $name, body: include_str!(concat!("../../", $folder, $name)) }),*]
    };
}

/// The sources of this crate.
pub(super) const SOURCES: [KernelSource; 6] = sources![
    "src/rules/adam/" "adam.cu",
    "cuda/" "cast.cu",
    "cuda/" "pack.cu",
    "cuda/" "accumulate.cu",
    "cuda/" "grad_stats.cu",
    "cuda/" "step.cu"
];

impl KernelSource {
    /// A source of another crate. This crate's prelude is prepended.
    pub const fn new(name: &'static str, body: &'static str) -> Self {
        Self { name, body }
    }

    /// The text to compile: the prelude, then the file. `#line` makes compiler messages refer to
    /// the files' lines.
    pub fn text(&self) -> String {
        format!(
            "#line 1 \"prelude.cuh\"\n{PRELUDE}\n#line 1 \"{}\"\n{}",
            self.name, self.body
        )
    }

    /// The source of this crate with this file name.
    pub(super) fn named(name: &str) -> Option<&'static Self> {
        const ALL: &[KernelSource] = &SOURCES;
        ALL.iter().find(|s| s.name == name)
    }
}
