//! The kernels' sources, carried in the binary.

const PRELUDE: &str = include_str!("../../cuda/prelude.cuh");

/// One source file: one operation, in the dtypes that it is defined for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The file's name in `cuda/`.
    pub name: &'static str,
    body: &'static str,
}

impl Source {
    /// A source of one's own, put behind the prelude: for tests and experiments.
    pub const fn new(name: &'static str, body: &'static str) -> Self {
        Self { name, body }
    }

    /// The whole text: the prelude and the file. Messages of the compiler name lines of the files.
    pub fn text(&self) -> String {
        format!("#line 1 \"prelude.cuh\"\n{PRELUDE}\n#line 1 \"{}\"\n{}", self.name, self.body)
    }
}

macro_rules! sources {
    ($($name:literal),*) => {
        [$(Source { name: $name, body: include_str!(concat!("../../cuda/", $name)) }),*]
    };
}

/// All of them.
pub const SOURCES: [Source; 6] =
    sources!["adam.cu", "adam_remainder.cu", "cast.cu", "accumulate.cu", "grad_stats.cu", "step.cu"];

impl Source {
    /// The kernels of a source of this crate; none of one's own.
    pub fn entries(&self) -> Vec<&'static str> {
        super::entry::of_source(self.name)
    }

    /// The source of this file name.
    pub fn named(name: &str) -> Option<&'static Self> {
        const ALL: &[Source] = &SOURCES;
        ALL.iter().find(|s| s.name == name)
    }
}
