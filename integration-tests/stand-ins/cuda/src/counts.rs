//! Counts of the work that streams have run, by kind and name, written as CSV when the process ends
//! (`ZERO_STANDIN_COUNTS`). Graphs count at each launch.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Mutex, OnceLock};

use crate::error::say;
use crate::settings::settings;
use stand_in_shared::lock;

/// The work of one operation or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Work {
    /// Bytes loaded from memory; for kernels the distinct sectors of each block.
    pub(crate) loaded: u64,
    /// Bytes stored to memory.
    pub(crate) stored: u64,
    /// Floating-point operations of products; instructions of warps for kernels.
    pub(crate) operations: u64,
}

impl Work {
    pub(crate) fn plus(self, other: Self) -> Self {
        let loaded = self.loaded + other.loaded;
        let stored = self.stored + other.stored;
        Self {
            loaded,
            stored,
            operations: self.operations + other.operations,
        }
    }

    pub(crate) fn times(self, count: u64) -> Self {
        Self {
            loaded: self.loaded * count,
            stored: self.stored * count,
            operations: self.operations * count,
        }
    }

    pub(crate) fn halved(self) -> Self {
        Self {
            loaded: self.loaded / 2,
            stored: self.stored / 2,
            operations: self.operations / 2,
        }
    }
}

type Counts = BTreeMap<(String, String), (u64, Work)>;

static COUNTS: Mutex<Counts> = Mutex::new(BTreeMap::new());

/// Adds one operation, if operations are counted.
pub(crate) fn add(kind: &str, name: &str, work: Work) {
    if settings().counts.is_none() {
        return;
    }
    static AT_EXIT: OnceLock<()> = OnceLock::new();
    AT_EXIT.get_or_init(|| {
        // SAFETY: `write` may run at any time and does not unwind.
        unsafe { libc::atexit(write) };
    });
    let mut counts = lock(&COUNTS);
    let (calls, sum) = counts
        .entry((kind.to_owned(), name.to_owned()))
        .or_default();
    *calls += 1;
    *sum = sum.plus(work);
}

fn text(counts: &Counts) -> String {
    let mut text = String::from("kind,name,calls,loaded_bytes,stored_bytes,operations\n");
    for (
        (kind, name),
        (
            calls,
            Work {
                loaded,
                stored,
                operations,
            },
        ),
    ) in counts
    {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{kind},{name},{calls},{loaded},{stored},{operations}");
    }
    text
}

/// Writes the counts to the file of the setting; rank r > 0 of a launcher (`RANK`) to FILE.r.
extern "C" fn write() {
    let Some(path) = &settings().counts else {
        return;
    };
    let rank = std::env::var("RANK").ok().filter(|rank| rank != "0");
    let path = rank.map_or_else(|| path.clone(), |rank| format!("{path}.{rank}"));
    if let Err(error) = std::fs::write(&path, text(&lock(&COUNTS))) {
        say!("failed to write the counts to {path}: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_lines_of_csv() {
        let work = Work {
            loaded: 64,
            stored: 32,
            operations: 7,
        };
        let counts = Counts::from([(
            ("kernel".into(), "add".into()),
            (2, work.times(2).halved().plus(work)),
        )]);
        let expected =
            "kind,name,calls,loaded_bytes,stored_bytes,operations\nkernel,add,2,128,64,14\n";
        assert_eq!(text(&counts), expected);
    }
}
