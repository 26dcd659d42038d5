//! An on-disk cache of compiled kernels: compiling takes seconds.
//!
//! A file's name contains a hash of everything that its content depends on: the source with its
//! prelude, the target (machine code and PTX are separate files), and the compiler with its version
//! and options. Files are written under a temporary name and renamed, so that processes that start
//! together never read a partial file. A damaged file is treated as missing.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Arch, CudaError, KernelSource, Target};

/// A compiler of kernels, such as [`Nvrtc`](super::Nvrtc).
///
/// # Safety
/// What `compile` returns is the complete image of `source` for the driver: safe operations launch
/// its kernels.
pub unsafe trait Compile {
    /// The compiler's name, version and options: a part of the cache key.
    fn identity(&self) -> String;

    /// The target for devices of `arch`.
    ///
    /// # Errors
    /// The compiler supports no architecture that such a device can run.
    fn target(&self, arch: Arch) -> Result<Target, CudaError>;

    /// Compiles `source` for `target`.
    ///
    /// # Errors
    /// The source does not compile.
    fn compile(&self, source: &KernelSource, target: Target) -> Result<Vec<u8>, CudaError>;
}

/// A folder of compiled kernels, whose files are code: keep it as safe from others as the program
/// itself.
#[derive(Clone, Debug)]
pub struct KernelCache {
    /// `None`: no caching.
    folder: Option<PathBuf>,
}

const MAGIC: &[u8; 8] = b"ZEROKRN1";
/// Magic, key, checksum.
const HEADER_BYTES: usize = 8 + 16 + 16;

impl KernelCache {
    /// A cache in `folder`, which is created when the first kernel is stored.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: Some(folder.into()),
        }
    }

    /// The user's folder: `ZERO_KERNEL_CACHE`, or `zero-kernels` in `XDG_CACHE_HOME` or in
    /// `HOME/.cache`. If none of these is set, kernels are not cached.
    pub fn of_user() -> Self {
        Self {
            folder: user_folder("ZERO_KERNEL_CACHE", "zero-kernels"),
        }
    }

    /// Returns the image of `source` for devices of `arch`, from disk or from `compiler`. A failure
    /// to write the file is ignored: the image is compiled again next time.
    pub(super) fn get(
        &self,
        compiler: &dyn Compile,
        source: &KernelSource,
        arch: Arch,
    ) -> Result<Vec<u8>, CudaError> {
        let target = compiler.target(arch)?;
        let key = hash(&[
            source.text().as_bytes(),
            target.to_string().as_bytes(),
            compiler.identity().as_bytes(),
        ]);
        let Some(folder) = &self.folder else {
            return compiler.compile(source, target);
        };
        let name = source.name.trim_end_matches(".cu");
        let extension = target.extension();
        let path = folder.join(format!("{name}-{target}-{key:032x}.{extension}"));
        if let Some(image) = std::fs::read(&path)
            .ok()
            .and_then(|file| unwrap(&file, key))
        {
            return Ok(image);
        }
        let image = compiler.compile(source, target)?;
        let _not_kept = store(folder, &path, &wrap(&image, key));

        Ok(image)
    }
}

/// The user's folder for cached data: the value of the environment variable `own`, or `name` in
/// `XDG_CACHE_HOME` or in `HOME/.cache`. `None` if none of these variables is set.
pub fn user_folder(own: &str, name: &str) -> Option<PathBuf> {
    user_folder_with(own, name, |variable| {
        std::env::var(variable).ok().filter(|v| !v.is_empty())
    })
}

fn user_folder_with(
    own: &str,
    name: &str,
    variable: impl Fn(&str) -> Option<String>,
) -> Option<PathBuf> {
    variable(own).map(PathBuf::from).or_else(|| {
        let cache = variable("XDG_CACHE_HOME").map(PathBuf::from);
        Some(
            cache
                .or_else(|| Some(Path::new(&variable("HOME")?).join(".cache")))?
                .join(name),
        )
    })
}

fn store(folder: &Path, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    std::fs::create_dir_all(folder)?;
    let unique = format!(
        "tmp-{}-{}",
        std::process::id(),
        COUNT.fetch_add(1, Ordering::Relaxed)
    );
    let temporary = path.with_extension(unique);
    let stored = std::fs::write(&temporary, bytes).and_then(|()| std::fs::rename(&temporary, path));
    if stored.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    stored
}

fn header(image: &[u8], key: u128) -> Vec<u8> {
    [
        MAGIC,
        &key.to_le_bytes()[..],
        &hash(&[image]).to_le_bytes()[..],
    ]
    .concat()
}

fn wrap(image: &[u8], key: u128) -> Vec<u8> {
    [&header(image, key), image].concat()
}

/// The image in a file, if the file is complete and has this key.
fn unwrap(file: &[u8], key: u128) -> Option<Vec<u8>> {
    let (start, image) = file.split_at_checked(HEADER_BYTES)?;
    (start == header(image, key)).then(|| image.to_vec())
}

/// 128-bit FNV-1a of the parts, each preceded by its length.
fn hash(parts: &[&[u8]]) -> u128 {
    let bytes = parts.iter().flat_map(|p| {
        (p.len() as u64)
            .to_le_bytes()
            .into_iter()
            .chain(p.iter().copied())
    });
    bytes.fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash, byte| {
        (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// A compiler that returns the source's name as its output, and counts compilations.
    struct Fake {
        version: &'static str,
        compiled: Cell<u32>,
    }

    impl Fake {
        fn new(version: &'static str) -> Self {
            Self {
                version,
                compiled: Cell::new(0),
            }
        }
    }

    // SAFETY: its output is not loaded.
    unsafe impl Compile for Fake {
        fn identity(&self) -> String {
            self.version.into()
        }

        fn target(&self, arch: Arch) -> Result<Target, CudaError> {
            Target::choose(arch, &[80, 90], self.version)
        }

        fn compile(&self, source: &KernelSource, target: Target) -> Result<Vec<u8>, CudaError> {
            self.compiled.set(self.compiled.get() + 1);
            Ok(format!("{} {target} {}", source.name, self.version).into_bytes())
        }
    }

    const A: KernelSource = KernelSource::new("a.cu", "one");
    const B: KernelSource = KernelSource::new("a.cu", "two");

    /// Gets the image, and returns whether it was compiled.
    fn compiles(cache: &KernelCache, fake: &Fake, source: &KernelSource, arch: u32) -> bool {
        let before = fake.compiled.get();
        let image = cache.get(fake, source, Arch(arch)).unwrap();
        let target = fake.target(Arch(arch)).unwrap();
        assert_eq!(
            image,
            format!("a.cu {target} {}", fake.version).into_bytes()
        );
        fake.compiled.get() > before
    }

    #[test]
    #[cfg_attr(miri, ignore = "files")]
    fn key_has_source_arch_and_compiler() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::at(folder.path().join("made/when/needed"));
        let old = Fake::new("13.1");
        let new = Fake::new("13.2");
        assert!(compiles(&cache, &old, &A, 90));
        assert!(!compiles(&cache, &old, &A, 90));
        assert!(compiles(&cache, &old, &A, 80), "another architecture");
        assert!(compiles(&cache, &old, &B, 90), "another text");
        assert!(compiles(&cache, &new, &A, 90), "another compiler");
        assert!(!compiles(&cache.clone(), &old, &A, 90));
        // The PTX for a newer device is not the machine code of the older architecture.
        assert!(compiles(&cache, &old, &A, 120));
        assert!(
            !compiles(&cache, &old, &A, 990),
            "the same PTX serves any newer device"
        );
        assert!(matches!(
            cache.get(&old, &A, Arch(70)),
            Err(CudaError::UnsupportedArch { .. })
        ));
    }

    #[test]
    #[cfg_attr(miri, ignore = "files")]
    fn damaged_file_is_compiled_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::at(folder.path());
        let fake = Fake::new("1");
        compiles(&cache, &fake, &A, 90);
        let path = std::fs::read_dir(folder.path())
            .unwrap()
            .next()
            .unwrap()
            .unwrap()
            .path();
        let good = std::fs::read(&path).unwrap();
        let mut damaged: Vec<Vec<u8>> =
            vec![Vec::new(), good[..10].into(), good[..good.len() - 1].into()];

        for at in [0, 8, 30, good.len() - 1] {
            let mut flipped = good.clone();
            flipped[at] ^= 1;
            damaged.push(flipped);
        }

        for bytes in damaged {
            std::fs::write(&path, bytes).unwrap();
            assert!(compiles(&cache, &fake, &A, 90));
            assert_eq!(std::fs::read(&path).unwrap(), good);
        }

        assert_eq!(
            std::fs::read_dir(folder.path()).unwrap().count(),
            1,
            "no temporary file is left"
        );
    }

    #[test]
    #[cfg_attr(miri, ignore = "files")]
    fn unwritable_cache_still_compiles() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "not a folder").unwrap();
        let fake = Fake::new("1");
        for cache in [KernelCache::at(&file), KernelCache { folder: None }] {
            assert!(compiles(&cache, &fake, &A, 90));
            assert!(compiles(&cache, &fake, &A, 90));
        }
    }

    #[test]
    fn user_folder_follows_the_environment() {
        let folder = |set: &[(&str, &str)]| {
            let variable = |name: &str| {
                set.iter()
                    .find(|(n, _)| *n == name)
                    .map(|(_, v)| (*v).to_owned())
            };
            user_folder_with("ZERO_KERNEL_CACHE", "zero-kernels", variable)
        };
        let all = [
            ("ZERO_KERNEL_CACHE", "/k"),
            ("XDG_CACHE_HOME", "/x"),
            ("HOME", "/h"),
        ];
        assert_eq!(folder(&all), Some("/k".into()));
        assert_eq!(folder(&all[1..]), Some("/x/zero-kernels".into()));
        assert_eq!(folder(&all[2..]), Some("/h/.cache/zero-kernels".into()));
        assert_eq!(folder(&[]), None);
    }

    #[test]
    fn hash_separates_its_parts() {
        // FNV-1a of no bytes is the offset basis.
        assert_eq!(hash(&[]), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_ne!(hash(&[b"ab", b"c"]), hash(&[b"a", b"bc"]));
    }
}
