//! What the tests of several crates share: the PyTorch results in tests/data, norms to compare
//! with them, and temporary folders.

use std::ops::Deref;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use tempfile::TempDir;

/// A model that PyTorch trained (see tests/data/README.md): its folder in tests/data and its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Oracle {
    /// The folder.
    pub folder: &'static str,
    /// Rows of a micro-batch.
    pub batch: usize,
    /// Tokens of a row.
    pub seq: usize,
    /// Micro-batches of a step.
    pub grad_accum: usize,
}

/// GPT-2, tied.
pub const GPT2: Oracle = Oracle {
    folder: "gpt2-tiny",
    batch: 4,
    seq: 32,
    grad_accum: 2,
};

/// Llama, untied, with eight heads over two of keys.
pub const LLAMA: Oracle = Oracle {
    folder: "llama-gqa",
    ..GPT2
};

/// Qwen2, tied.
pub const QWEN2: Oracle = Oracle {
    folder: "qwen2-tied",
    batch: 6,
    seq: 24,
    grad_accum: 1,
};

impl Oracle {
    /// A file of the folder: that of the build or, on a machine without the sources, below the
    /// current folder.
    pub fn data(&self, name: &str) -> PathBuf {
        let built = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = if built.exists() {
            built
        } else {
            Path::new("integration-tests")
        };
        let file = root.join("tests/data").join(self.folder).join(name);
        std::path::absolute(file).unwrap()
    }

    /// All fp32 tensors of a safetensors file.
    pub fn tensors(&self, name: &str) -> Vec<(String, Vec<f32>)> {
        let bytes = std::fs::read(self.data(name)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let floats = |data: &[u8]| {
            data.chunks_exact(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                .collect()
        };
        file.iter()
            .map(|(name, view)| (name.to_owned(), floats(view.data())))
            .collect()
    }

    /// The tokens of the training data.
    pub fn tokens(&self) -> Vec<u32> {
        let bytes = std::fs::read(self.data("tokens.u16.bin")).unwrap();
        bytes
            .chunks_exact(2)
            .map(|b| u32::from(u16::from_le_bytes(b.try_into().unwrap())))
            .collect()
    }
}

/// A file of [`GPT2`].
pub fn data(name: &str) -> PathBuf {
    GPT2.data(name)
}

/// The tensors of a file of [`GPT2`].
pub fn tensors(name: &str) -> Vec<(String, Vec<f32>)> {
    GPT2.tensors(name)
}

/// The tokens of [`GPT2`].
pub fn tokens() -> Vec<u32> {
    GPT2.tokens()
}

/// Bytes that a file system in memory must have free for the tests: a container's often has 64 MiB.
const MEMORY_BYTES: u64 = 4 << 30;

/// A folder in memory if there is room, otherwise on a disk: runs sync what they write, which is slow
/// on a disk.
pub fn temporary_folder() -> TempDir {
    let memory = "/dev/shm";
    let free_bytes = rustix::fs::statvfs(memory)
        .map_or(0, |system| system.f_bavail.saturating_mul(system.f_frsize));
    let in_memory = (free_bytes >= MEMORY_BYTES).then(|| tempfile::tempdir_in(memory).ok());
    in_memory
        .flatten()
        .unwrap_or_else(|| tempfile::tempdir().unwrap())
}

/// A temporary folder.
pub struct Folder(TempDir);

impl Folder {
    /// On a disk.
    pub fn on_disk() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// As [`temporary_folder`].
    pub fn in_memory() -> Self {
        Self(temporary_folder())
    }
}

impl Deref for Folder {
    type Target = Path;

    fn deref(&self) -> &Path {
        self.0.path()
    }
}

impl AsRef<Path> for Folder {
    fn as_ref(&self) -> &Path {
        self
    }
}

/// The files of a folder, by their names.
pub trait Files {
    /// Writes a file and the folders above it; returns its path.
    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf;

    /// The bytes of a file.
    fn bytes(&self, name: &str) -> Vec<u8>;

    /// The text of a file.
    fn text(&self, name: &str) -> String {
        String::from_utf8(self.bytes(name)).unwrap()
    }
}

impl Files for Path {
    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.join(name)).unwrap()
    }
}

/// The output of a program.
pub trait Printed {
    /// Asserts that it has all `parts`.
    fn shows(&self, parts: &[&str]);

    /// Asserts that it has none of `parts`.
    fn omits(&self, parts: &[&str]);
}

impl Printed for str {
    #[track_caller]
    fn shows(&self, parts: &[&str]) {
        for part in parts {
            assert!(self.contains(part), "{part:?} is not in: {self}");
        }
    }

    #[track_caller]
    fn omits(&self, parts: &[&str]) {
        for part in parts {
            assert!(!self.contains(part), "{part:?} is in: {self}");
        }
    }
}

/// ‖a - b‖ / ‖b‖ in fp64.
pub fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let norm = |it: &mut dyn Iterator<Item = f64>| it.map(|x| x * x).sum::<f64>().sqrt();
    let diff = norm(
        &mut got
            .iter()
            .zip(want)
            .map(|(a, b)| f64::from(*a) - f64::from(*b)),
    );
    diff / norm(&mut want.iter().map(|x| f64::from(*x))).max(1e-30)
}

/// Bytes of all files below a folder.
pub fn bytes_below(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).unwrap();
    let bytes = entries.map(|entry| {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => bytes_below(&path),
            false => path.metadata().unwrap().len(),
        }
    });
    bytes.sum()
}
