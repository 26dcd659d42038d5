//! The kernels' sources, embedded in the binary.

const PRELUDE: &str = include_str!("../../cuda/prelude.cuh");

/// One source file: one operation, in the dtypes that it supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelSource {
    /// The file's name.
    pub name: &'static str,
    body: &'static str,
}

/// Sources, each made of its lines of definitions and its files, the last of which has its name.
macro_rules! sources {
    ($($name:literal: $($definition:literal)? [$($folder:literal $file:literal),*]),* $(,)?) => {
        [$(KernelSource {
            name: $name,
            body: concat!(
                $($definition, "\n",)?
                $("#line 1 \"", $file, "\"\n", include_str!(concat!("../../", $folder, $file)), "\n"),*
            ),
        }),*]
    };
}

/// The sources of this crate.
pub(super) const SOURCES: [KernelSource; 15] = sources![
    "adam.cu": ["src/rules/adam/" "element.cuh", "src/rules/adam/" "adam.cu"],
    "adam8.cu": "#define CODE_BITS 8" [
        "cuda/" "blocks.cuh",
        "src/rules/adam/" "element.cuh",
        "src/rules/adam/" "adam_blocks.cu"
    ],
    "adam4.cu": "#define CODE_BITS 4" [
        "cuda/" "blocks.cuh",
        "src/rules/adam/" "element.cuh",
        "src/rules/adam/" "adam_blocks.cu"
    ],
    "muon.cu": ["src/rules/muon/" "lerp.cuh", "src/rules/muon/" "muon.cu"],
    "muon8.cu": "#define CODE_BITS 8" [
        "cuda/" "blocks.cuh",
        "src/rules/muon/" "lerp.cuh",
        "src/rules/muon/" "muon_blocks.cu"
    ],
    "muon4.cu": "#define CODE_BITS 4" [
        "cuda/" "blocks.cuh",
        "src/rules/muon/" "lerp.cuh",
        "src/rules/muon/" "muon_blocks.cu"
    ],
    "encode_blocks.cu": ["cuda/" "blocks.cuh", "cuda/" "encode_blocks.cu"],
    "decode_blocks.cu": ["cuda/" "blocks.cuh", "cuda/" "decode_blocks.cu"],
    "cast.cu": ["cuda/" "cast.cu"],
    "cast_rows.cu": ["cuda/" "cast_rows.cu"],
    "normalise.cu": ["cuda/" "normalise.cu"],
    "pack.cu": ["cuda/" "pack.cu"],
    "accumulate.cu": ["cuda/" "accumulate.cu"],
    "grad_stats.cu": ["cuda/" "grad_stats.cu"],
    "step.cu": ["cuda/" "step.cu"],
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
