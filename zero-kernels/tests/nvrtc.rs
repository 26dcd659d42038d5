//! Every kernel compiles without register spills, and has the name and the
//! parameters that the host uses. Needs NVRTC and no GPU; without NVRTC the tests print that they
//! are skipped, or fail if `ZERO_REQUIRE_NVRTC` is set (.ci/steps/80-cuda-compile does so).

#![cfg(all(feature = "cuda", not(miri)))]

use std::io::Write;

use zero_kernels::cuda::{
    Arch, Compile, CudaError, KernelSource, Nvrtc, Target, kernel_signatures,
};

/// No kernel here branches on the architecture, so the oldest one and one of today are enough;
/// `ZERO_ALL_ARCHS=1` adds the others.
const ARCHS: [Arch; 2] = [Arch(75), Arch(90)];
const OTHER_ARCHS: [Arch; 2] = [Arch(80), Arch(100)];

/// NVRTC, or `None` with a message that the test is skipped.
fn nvrtc(test: &str) -> Option<Nvrtc> {
    match Nvrtc::find() {
        Ok(nvrtc) => Some(nvrtc),
        Err(error) if std::env::var_os("ZERO_REQUIRE_NVRTC").is_some() => panic!("{error}"),
        Err(error) => {
            // Written to stderr directly, since the test harness captures `eprintln!`.
            let _ = std::io::stderr().write_all(format!("SKIPPED {test}: {error}\n").as_bytes());
            None
        }
    }
}

/// A kernel's name, and the sizes of the parameters that the host passes.
type Kernel = (&'static str, Vec<usize>);

/// Every source with its kernels.
fn sources() -> Vec<(KernelSource, Vec<Kernel>)> {
    let mut sources: Vec<(KernelSource, Vec<Kernel>)> = Vec::new();
    for (source, entry, sizes) in kernel_signatures().unwrap() {
        match sources.iter_mut().find(|(known, _)| *known == source) {
            Some((_, kernels)) => kernels.push((entry, sizes)),
            None => sources.push((source, vec![(entry, sizes)])),
        }
    }
    sources
}

#[test]
fn every_kernel_compiles_without_spills() {
    let Some(nvrtc) = nvrtc("every_kernel_compiles_without_spills") else {
        return;
    };
    let sources = sources();
    let mut archs = ARCHS.to_vec();
    if std::env::var_os("ZERO_ALL_ARCHS").is_some() {
        archs.extend(OTHER_ARCHS);
    }

    // NVRTC compiles for each architecture independently.
    std::thread::scope(|scope| {
        for arch in archs {
            let nvrtc = &nvrtc;
            let sources = &sources;
            scope.spawn(move || check_arch(nvrtc, arch, sources));
        }
    });
}

fn check_arch(nvrtc: &Nvrtc, arch: Arch, sources: &[(KernelSource, Vec<Kernel>)]) {
    for (source, kernels) in sources {
        let name = source.name;
        let compiled = nvrtc.compile(source, Target::Cubin(arch), true).unwrap();
        assert_eq!(&compiled.image[..4], b"\x7fELF", "{name} {arch}");
        assert!(
            !compiled.log.contains("warning"),
            "{name} {arch}: {}",
            compiled.log
        );
        for (entry, _) in kernels {
            // The name is in the ELF file's string table.
            let needle = [b"\0", entry.as_bytes(), b"\0"].concat();
            assert!(
                compiled.image.windows(needle.len()).any(|w| w == needle),
                "{name} {arch}: no {entry}"
            );
        }
        // For every kernel ptxas reports "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill
        // loads".
        let spills: Vec<&str> = compiled
            .log
            .lines()
            .filter(|l| l.contains("spill stores"))
            .collect();
        assert!(
            spills.len() >= kernels.len(),
            "{name} {arch}: no report of registers: {}",
            compiled.log
        );
        for line in spills {
            let clean =
                line.contains(" 0 bytes spill stores") && line.contains(" 0 bytes spill loads");
            assert!(clean, "{name} {arch}: {line}\n{}", compiled.log);
        }
    }
}

#[test]
fn compile_error_names_file_and_line() {
    let Some(nvrtc) = nvrtc("compile_error_names_file_and_line") else {
        return;
    };
    let wrong = KernelSource::new(
        "wrong.cu",
        "\n\nextern \"C\" __global__ void f() { undeclared(); }\n",
    );
    let error = nvrtc
        .compile(&wrong, Target::Cubin(ARCHS[0]), false)
        .unwrap_err();
    let CudaError::Compilation {
        source_name, log, ..
    } = &error
    else {
        panic!("{error}")
    };

    assert_eq!(source_name, "wrong.cu");
    assert!(
        log.contains("wrong.cu(3)") && log.contains("undeclared"),
        "{log}"
    );
}

#[test]
fn unsupported_architecture_is_named() {
    let Some(nvrtc) = nvrtc("unsupported_architecture_is_named") else {
        return;
    };
    let error = nvrtc
        .compile(&sources()[0].0, Target::Cubin(Arch(12)), false)
        .unwrap_err();
    assert!(
        matches!(error, CudaError::UnsupportedArch { arch: Arch(12), .. }),
        "{error}"
    );
    assert!(error.to_string().contains("sm_12"), "{error}");
}

/// The driver of a newer device translates PTX of the newest supported architecture.
#[test]
fn newer_devices_get_ptx() {
    let Some(nvrtc) = nvrtc("newer_devices_get_ptx") else {
        return;
    };
    let newest = Arch(*nvrtc.supported_archs().iter().max().unwrap());
    let target = nvrtc.target(Arch(990)).unwrap();
    assert_eq!(target, Target::Ptx(newest));

    for (source, kernels) in sources() {
        let name = source.name;
        let image = nvrtc.compile(&source, target, false).unwrap().image;
        let text = std::ffi::CStr::from_bytes_with_nul(&image)
            .expect("one zero byte, at the end")
            .to_str()
            .unwrap();
        assert!(text.contains(&format!(".target sm_{}", newest.0)), "{name}");
        for (entry, _) in kernels {
            assert!(
                text.contains(&format!(".entry {entry}(")),
                "{name}: no {entry}"
            );
        }
    }
}

/// The sizes of an entry's parameters, from its PTX.
fn parameter_sizes(ptx: &str, entry: &str) -> Vec<usize> {
    let start = ptx.find(&format!(".entry {entry}(")).expect(entry);
    let list = &ptx[start..][..ptx[start..].find(')').unwrap()];
    let declared = list.split(".param ").skip(1);
    declared
        .map(|text| {
            let word = |prefix: &str| {
                text.split_whitespace()
                    .find_map(|w| w.strip_prefix(prefix))
                    .map(str::to_owned)
            };
            match text.find('[') {
                Some(open) => text[open + 1..text.find(']').unwrap()].parse().unwrap(),
                None => {
                    [".u", ".s", ".f", ".b"]
                        .iter()
                        .find_map(|p| word(p))
                        .unwrap()
                        .parse::<usize>()
                        .unwrap()
                        / 8
                }
            }
        })
        .collect()
}

#[test]
fn launches_pass_the_kernels_parameters() {
    let Some(nvrtc) = nvrtc("launches_pass_the_kernels_parameters") else {
        return;
    };
    let target = nvrtc.target(Arch(990)).unwrap();
    for (source, kernels) in sources() {
        let image = nvrtc.compile(&source, target, false).unwrap().image;
        let ptx = std::str::from_utf8(&image).unwrap();
        assert_eq!(
            ptx.matches(".visible .entry ").count(),
            kernels.len(),
            "{}: all kernels are launched",
            source.name
        );
        for (entry, passed) in kernels {
            assert_eq!(passed, parameter_sizes(ptx, entry), "{entry}");
        }
    }
}
