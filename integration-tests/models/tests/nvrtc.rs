//! Every kernel of the transformer compiles without register spills, and
//! exports its entries. Requires NVRTC but no GPU. Without NVRTC the tests print SKIPPED, or fail
//! if `ZERO_REQUIRE_NVRTC` is set (.ci/steps/80-cuda-compile sets it).

use std::io::Write;

use zero_alloc::device::DType;
use zero_kernels::cuda::{Arch, Nvrtc, Target};
use zero_models::cuda::{KernelFile, kernel_files};

const ARCHS: [Arch; 4] = [Arch(75), Arch(80), Arch(90), Arch(100)];

/// Returns NVRTC, or prints that the test is skipped.
fn nvrtc(test: &str) -> Option<Nvrtc> {
    match Nvrtc::find() {
        Ok(nvrtc) => Some(nvrtc),
        Err(error) if std::env::var_os("ZERO_REQUIRE_NVRTC").is_some() => panic!("{error}"),
        Err(error) => {
            // Written to the stream, because the test harness captures `eprintln!`.
            let _ = std::io::stderr().write_all(format!("SKIPPED {test}: {error}\n").as_bytes());
            None
        }
    }
}

#[test]
fn transformer_kernels_compile_without_spilling() {
    let Some(nvrtc) = nvrtc("transformer_kernels_compile_without_spilling") else {
        return;
    };
    let dtypes = [DType::F32, DType::Bf16, DType::F16];
    let files: Vec<_> = dtypes
        .iter()
        .flat_map(|&d| kernel_files(d).unwrap().iter().map(move |f| (d, f)))
        .collect();
    std::thread::scope(|scope| {
        for archs in [&ARCHS[..2], &ARCHS[2..]] {
            let nvrtc = &nvrtc;
            let files = &files;
            scope.spawn(move || {
                archs
                    .iter()
                    .for_each(|&a| files.iter().for_each(|(d, f)| check(nvrtc, a, *d, f)))
            });
        }
    });
}

/// Whether `file` is compiled for `arch`: attention, which branches on the architecture, for all;
/// other files for the oldest one and one of today. `ZERO_ALL_ARCHS=1` compiles all for all.
fn is_checked(file: &KernelFile, arch: Arch) -> bool {
    let oldest = ARCHS.iter().find(|arch| **arch >= file.oldest);
    let all =
        file.source.name.starts_with("attention") || std::env::var_os("ZERO_ALL_ARCHS").is_some();
    arch >= file.oldest && (all || Some(&arch) == oldest || arch == Arch(90))
}

fn check(nvrtc: &Nvrtc, arch: Arch, dtype: DType, file: &KernelFile) {
    if !is_checked(file, arch) {
        return;
    }
    let what = format!("{} {dtype} {arch}", file.source.name);
    let compiled = nvrtc
        .compile(&file.source, Target::Cubin(arch), true)
        .unwrap();
    assert_eq!(&compiled.image[..4], b"\x7fELF", "{what}");
    assert!(
        !compiled.log.contains("warning"),
        "{what}: {}",
        compiled.log
    );

    for entry in file.entries {
        // A whole string in the ELF file's string table.
        let needle = [b"\0", entry.as_bytes(), b"\0"].concat();
        assert!(
            compiled.image.windows(needle.len()).any(|w| w == needle),
            "{what}: no {entry}"
        );
    }

    let spills: Vec<&str> = compiled
        .log
        .lines()
        .filter(|l| l.contains("spill stores"))
        .collect();
    assert_eq!(
        spills.len(),
        file.entries.len(),
        "{what}: a report for each kernel: {}",
        compiled.log
    );

    for line in spills {
        let clean = line.contains(" 0 bytes spill stores") && line.contains(" 0 bytes spill loads");
        assert!(clean, "{what}: {line}\n{}", compiled.log);
    }
}

#[test]
fn storage_that_no_kernel_is_made_for_is_refused() {
    for dtype in [DType::U8, DType::F64] {
        let error = kernel_files(dtype).unwrap_err().to_string();
        assert!(error.contains(dtype.name()), "{error}");
    }
}
