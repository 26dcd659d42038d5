//! Compiled kernels on disk: compiling takes seconds, reading takes none.
//!
//! A file's name is a hash of all that its content depends on: the source with its prelude, what it was compiled for
//! (machine code and PTX are kept apart), and the compiler with its version and options. Files are written under
//! another name and renamed, so that processes that start together never read half of one. A file that is damaged in
//! any way is as one that is missing.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Arch, CudaError, Source, Target};

/// Something that compiles kernels. [`Nvrtc`](super::Nvrtc) does.
pub trait Compile {
    /// Everything of the compiler that its output depends on: name, version, options.
    fn identity(&self) -> String;

    /// What it makes for devices of `arch`.
    ///
    /// # Errors
    /// Nothing that such a device could run.
    fn target(&self, arch: Arch) -> Result<Target, CudaError>;

    /// `source` as `target`.
    ///
    /// # Errors
    /// It does not compile.
    fn compile(&self, source: &Source, target: Target) -> Result<Vec<u8>, CudaError>;
}

/// Where a kernel came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// From disk.
    Hit,
    /// Compiled, and kept.
    Stored,
    /// Compiled, and not kept: why not. The next start compiles again.
    NotStored(String),
}

/// A compiled source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cached {
    /// What a driver loads: machine code, or PTX that ends in a zero byte.
    pub image: Vec<u8>,
    /// Which of the two, and for what.
    pub target: Target,
    /// Where it came from.
    pub outcome: Outcome,
}

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct KernelCache {
    folder: Option<PathBuf>,
}

const MAGIC: &[u8; 8] = b"ZEROKRN1";
/// Magic, key, checksum.
const HEADER_BYTES: usize = 8 + 16 + 16;

impl KernelCache {
    /// Kernels in `folder`, which is made when the first is stored.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: Some(folder.into()) }
    }

    /// The user's folder: `ZERO_KERNEL_CACHE`, or `zero-kernels` in `XDG_CACHE_HOME` or in `HOME/.cache`; nothing is
    /// kept where none of these is set.
    pub fn of_user() -> Self {
        Self { folder: user_folder(|name| std::env::var(name).ok().filter(|v| !v.is_empty())) }
    }

    /// Where the kernels are kept.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// `source` for devices of `arch`: from disk, or compiled and kept.
    ///
    /// # Errors
    /// It does not compile for them. A cache that cannot be written is not an error: see [`Outcome::NotStored`].
    pub fn get(&self, compiler: &dyn Compile, source: &Source, arch: Arch) -> Result<Cached, CudaError> {
        let target = compiler.target(arch)?;
        let key = hash(&[source.text().as_bytes(), target.to_string().as_bytes(), compiler.identity().as_bytes()]);
        let Some(folder) = &self.folder else {
            let outcome = Outcome::NotStored("no folder for compiled kernels; set ZERO_KERNEL_CACHE".into());
            return Ok(Cached { image: compiler.compile(source, target)?, target, outcome });
        };
        let (name, extension) = (source.name.trim_end_matches(".cu"), target.extension());
        let path = folder.join(format!("{name}-{target}-{key:032x}.{extension}"));
        if let Some(image) = std::fs::read(&path).ok().and_then(|file| unwrap(&file, key)) {
            return Ok(Cached { image, target, outcome: Outcome::Hit });
        }
        let image = compiler.compile(source, target)?;
        let outcome = match store(folder, &path, &wrap(&image, key)) {
            Ok(()) => Outcome::Stored,
            Err(e) => Outcome::NotStored(format!("{}: {e}", path.display())),
        };
        Ok(Cached { image, target, outcome })
    }
}

fn user_folder(variable: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    variable("ZERO_KERNEL_CACHE").map(PathBuf::from).or_else(|| {
        let cache = variable("XDG_CACHE_HOME").map(PathBuf::from);
        Some(cache.or_else(|| Some(Path::new(&variable("HOME")?).join(".cache")))?.join("zero-kernels"))
    })
}

fn store(folder: &Path, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    std::fs::create_dir_all(folder)?;
    let unique = format!("tmp-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let temporary = path.with_extension(unique);
    let stored = std::fs::write(&temporary, bytes).and_then(|()| std::fs::rename(&temporary, path));
    if stored.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    stored
}

fn header(image: &[u8], key: u128) -> Vec<u8> {
    [MAGIC, &key.to_le_bytes()[..], &hash(&[image]).to_le_bytes()[..]].concat()
}

fn wrap(image: &[u8], key: u128) -> Vec<u8> {
    [&header(image, key), image].concat()
}

/// What a file holds, if it is whole and has this key.
fn unwrap(file: &[u8], key: u128) -> Option<Vec<u8>> {
    let (start, image) = file.split_at_checked(HEADER_BYTES)?;
    (start == header(image, key)).then(|| image.to_vec())
}

/// FNV-1a, 128 bits, of the parts with their lengths.
fn hash(parts: &[&[u8]]) -> u128 {
    let bytes = parts.iter().flat_map(|p| (p.len() as u64).to_le_bytes().into_iter().chain(p.iter().copied()));
    bytes.fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash, byte| {
        (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Compiles to its own name, and counts.
    struct Fake {
        version: &'static str,
        compiled: Cell<u32>,
    }

    impl Fake {
        fn new(version: &'static str) -> Self {
            Self { version, compiled: Cell::new(0) }
        }
    }

    impl Compile for Fake {
        fn identity(&self) -> String {
            self.version.into()
        }

        fn target(&self, arch: Arch) -> Result<Target, CudaError> {
            Target::choose(arch, &[80, 90], self.version)
        }

        fn compile(&self, source: &Source, target: Target) -> Result<Vec<u8>, CudaError> {
            self.compiled.set(self.compiled.get() + 1);
            Ok(format!("{} {target} {}", source.name, self.version).into_bytes())
        }
    }

    const A: Source = Source::new("a.cu", "one");
    const B: Source = Source::new("a.cu", "two");

    fn get(cache: &KernelCache, fake: &Fake, source: &Source, arch: u32) -> Outcome {
        let cached = cache.get(fake, source, Arch(arch)).unwrap();
        let target = fake.target(Arch(arch)).unwrap();
        assert_eq!(cached.target, target);
        assert_eq!(cached.image, format!("a.cu {target} {}", fake.version).into_bytes());
        cached.outcome
    }

    #[test]
    #[cfg_attr(miri, ignore = "files")]
    fn a_kernel_is_compiled_once_for_each_source_arch_and_compiler() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::at(folder.path().join("made/when/needed"));
        let (old, new) = (Fake::new("13.1"), Fake::new("13.2"));
        assert_eq!(get(&cache, &old, &A, 90), Outcome::Stored);
        assert_eq!(get(&cache, &old, &A, 90), Outcome::Hit);
        assert_eq!(get(&cache, &old, &A, 80), Outcome::Stored, "another architecture");
        assert_eq!(get(&cache, &old, &B, 90), Outcome::Stored, "another text");
        assert_eq!(get(&cache, &new, &A, 90), Outcome::Stored, "another compiler");
        assert_eq!(get(&cache.clone(), &old, &A, 90), Outcome::Hit);
        assert_eq!((old.compiled.get(), new.compiled.get()), (3, 1));
        // A device that the compiler does not know gets PTX of an older one, which is not that one's machine code.
        assert_eq!(get(&cache, &old, &A, 120), Outcome::Stored);
        assert_eq!(get(&cache, &old, &A, 990), Outcome::Hit, "the same PTX serves any newer device");
        assert!(matches!(cache.get(&old, &A, Arch(70)), Err(CudaError::UnsupportedArch { .. })));
    }

    #[test]
    #[cfg_attr(miri, ignore = "files")]
    fn a_damaged_file_is_compiled_again() {
        let folder = tempfile::tempdir().unwrap();
        let (cache, fake) = (KernelCache::at(folder.path()), Fake::new("1"));
        get(&cache, &fake, &A, 90);
        let path = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        let good = std::fs::read(&path).unwrap();
        let mut damaged: Vec<Vec<u8>> = vec![Vec::new(), good[..10].into(), good[..good.len() - 1].into()];
        for at in [0, 8, 30, good.len() - 1] {
            let mut flipped = good.clone();
            flipped[at] ^= 1;
            damaged.push(flipped);
        }
        for bytes in damaged {
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(get(&cache, &fake, &A, 90), Outcome::Stored);
            assert_eq!(std::fs::read(&path).unwrap(), good);
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    #[cfg_attr(miri, ignore = "files")]
    fn a_cache_that_cannot_be_written_says_so_and_compiles() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "not a folder").unwrap();
        let (cache, fake) = (KernelCache::at(&file), Fake::new("1"));
        let Outcome::NotStored(why) = get(&cache, &fake, &A, 90) else { panic!("stored") };
        assert!(why.contains("file"), "{why}");
        let nowhere = KernelCache { folder: None };
        assert!(matches!(get(&nowhere, &fake, &A, 90), Outcome::NotStored(_)));
    }

    #[test]
    fn the_users_folder() {
        let folder = |set: &[(&str, &str)]| {
            user_folder(|name| set.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()))
        };
        let all = [("ZERO_KERNEL_CACHE", "/k"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")];
        assert_eq!(folder(&all), Some("/k".into()));
        assert_eq!(folder(&all[1..]), Some("/x/zero-kernels".into()));
        assert_eq!(folder(&all[2..]), Some("/h/.cache/zero-kernels".into()));
        assert_eq!(folder(&[]), None);
    }

    #[test]
    fn the_hash_is_fnv_1a_over_parts_with_lengths() {
        // Of no bytes it is the offset basis; parts do not run into one another.
        assert_eq!(hash(&[]), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_ne!(hash(&[b"ab", b"c"]), hash(&[b"a", b"bc"]));
    }
}
