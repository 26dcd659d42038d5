//! Every kernel compiles for every architecture without spilling registers, and has the entries that the host asks
//! for. Needs NVRTC and no GPU; without NVRTC the tests say that they are skipped, and fail where
//! `ZERO_REQUIRE_NVRTC` is set (.ci/steps/80-cuda-compile does so).

#![cfg(not(miri))]

use std::io::Write;

use zero_alloc::device::DType;
use zero_kernels::cuda::{
    Arch, Cached, Compile, CudaError, KernelCache, Nvrtc, Outcome, SOURCES, Source, Target, accumulate_entry,
    adam_entry, adam_remainder_entry, adam_stochastic_entry, cast_entry, stats_entry,
};

const ARCHS: [Arch; 4] = [Arch(75), Arch(80), Arch(90), Arch(100)];

/// NVRTC, or a visible word that the test is skipped.
fn nvrtc(test: &str) -> Option<Nvrtc> {
    match Nvrtc::find() {
        Ok(nvrtc) => Some(nvrtc),
        Err(error) if std::env::var_os("ZERO_REQUIRE_NVRTC").is_some() => panic!("{error}"),
        Err(error) => {
            // Straight to the stream: the test harness would swallow `eprintln!`.
            let _ = std::io::stderr().write_all(format!("SKIPPED {test}: {error}\n").as_bytes());
            None
        }
    }
}

fn entries() -> Vec<(&'static str, Vec<String>)> {
    let floats = [DType::F32, DType::Bf16, DType::F16];
    let pairs = || floats.iter().flat_map(|&a| floats.iter().map(move |&b| (a, b)));
    let mut adam: Vec<String> = floats.iter().map(|&g| adam_entry(g, None).unwrap()).collect();
    adam.extend(pairs().map(|(g, p)| adam_entry(g, Some(p)).unwrap()));
    let mut stats: Vec<String> = floats.iter().map(|&g| stats_entry(g).unwrap()).collect();
    stats.push("grad_stats_combine".into());
    vec![
        ("adam.cu", adam),
        ("adam_remainder.cu", floats.iter().map(|&g| adam_remainder_entry(g).unwrap()).collect()),
        ("adam_stochastic.cu", floats.iter().map(|&g| adam_stochastic_entry(g).unwrap()).collect()),
        ("cast.cu", pairs().map(|(s, d)| cast_entry(s, d).unwrap()).collect()),
        ("cast_stochastic.cu", vec!["cast_stochastic".into()]),
        ("accumulate.cu", floats.iter().map(|&g| accumulate_entry(g).unwrap()).collect()),
        ("grad_stats.cu", stats),
        ("step.cu", vec!["make_vote".into(), "decide_step".into()]),
    ]
}

#[test]
fn every_kernel_compiles_for_every_architecture_without_spilling() {
    let Some(nvrtc) = nvrtc("every_kernel_compiles_for_every_architecture_without_spilling") else { return };
    let entries = entries();
    assert_eq!(entries.iter().map(|(name, _)| *name).collect::<Vec<_>>(), SOURCES.map(|s| s.name));
    // NVRTC compiles for each architecture on its own: two threads halve the wait.
    std::thread::scope(|scope| {
        for archs in [&ARCHS[..2], &ARCHS[2..]] {
            let (nvrtc, entries) = (&nvrtc, &entries);
            scope.spawn(move || archs.iter().for_each(|&arch| check_arch(nvrtc, arch, entries)));
        }
    });
}

fn check_arch(nvrtc: &Nvrtc, arch: Arch, entries: &[(&str, Vec<String>)]) {
    for (name, entries) in entries {
        let source = Source::named(name).unwrap();
        let compiled = nvrtc.compile(source, Target::Cubin(arch), true).unwrap();
        assert_eq!(&compiled.image[..4], b"\x7fELF", "{name} {arch}");
        assert!(!compiled.log.contains("warning"), "{name} {arch}: {}", compiled.log);
        for entry in entries {
            // The name stands alone in the ELF file's string table.
            let needle = [b"\0", entry.as_bytes(), b"\0"].concat();
            assert!(compiled.image.windows(needle.len()).any(|w| w == needle), "{name} {arch}: no {entry}");
        }
        // ptxas says, for every kernel, "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads".
        let spills: Vec<&str> = compiled.log.lines().filter(|l| l.contains("spill stores")).collect();
        assert!(spills.len() >= entries.len(), "{name} {arch}: no report of registers: {}", compiled.log);
        for line in spills {
            let clean = line.contains(" 0 bytes spill stores") && line.contains(" 0 bytes spill loads");
            assert!(clean, "{name} {arch}: {line}\n{}", compiled.log);
        }
    }
}

#[test]
fn a_mistake_in_a_source_is_an_error_that_names_file_and_line() {
    let Some(nvrtc) = nvrtc("a_mistake_in_a_source_is_an_error_that_names_file_and_line") else { return };
    let wrong = Source::new("wrong.cu", "\n\nextern \"C\" __global__ void f() { undeclared(); }\n");
    let error = nvrtc.compile(&wrong, Target::Cubin(ARCHS[0]), false).unwrap_err();
    let CudaError::Compilation { source_name, log, .. } = &error else { panic!("{error}") };
    assert_eq!(source_name, "wrong.cu");
    assert!(log.contains("wrong.cu(3)") && log.contains("undeclared"), "{log}");
}

#[test]
fn an_architecture_that_the_compiler_does_not_know_is_named() {
    let Some(nvrtc) = nvrtc("an_architecture_that_the_compiler_does_not_know_is_named") else { return };
    let error = nvrtc.compile(&SOURCES[0], Target::Cubin(Arch(12)), false).unwrap_err();
    assert!(matches!(error, CudaError::UnsupportedArch { arch: Arch(12), .. }), "{error}");
    assert!(error.to_string().contains("sm_12"), "{error}");
}

/// A device of tomorrow: its driver translates PTX of the newest architecture that is known today.
#[test]
fn a_device_newer_than_the_compiler_gets_ptx_with_every_entry() {
    let Some(nvrtc) = nvrtc("a_device_newer_than_the_compiler_gets_ptx_with_every_entry") else { return };
    let newest = Arch(*nvrtc.supported_archs().iter().max().unwrap());
    let target = nvrtc.target(Arch(990)).unwrap();
    assert_eq!(target, Target::Ptx(newest));
    for (name, entries) in entries() {
        let image = nvrtc.compile(Source::named(name).unwrap(), target, false).unwrap().image;
        let text = std::ffi::CStr::from_bytes_with_nul(&image).expect("one zero byte, at the end").to_str().unwrap();
        assert!(text.contains(&format!(".target sm_{}", newest.0)), "{name}");
        for entry in entries {
            assert!(text.contains(&format!(".entry {entry}(")), "{name}: no {entry}");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let cache = KernelCache::at(folder.path());
    let first = cache.get(&nvrtc, &SOURCES[4], Arch(990)).unwrap();
    assert_eq!((first.target, &first.outcome), (target, &Outcome::Stored));
    assert_eq!(cache.get(&nvrtc, &SOURCES[4], Arch(991)).unwrap(), Cached { outcome: Outcome::Hit, ..first });
}

#[test]
fn a_compiled_kernel_comes_from_the_cache_the_second_time() {
    let Some(nvrtc) = nvrtc("a_compiled_kernel_comes_from_the_cache_the_second_time") else { return };
    let folder = tempfile::tempdir().unwrap();
    let (cache, source) = (KernelCache::at(folder.path()), Source::named("cast_stochastic.cu").unwrap());
    let first = cache.get(&nvrtc, source, ARCHS[2]).unwrap();
    assert_eq!(first.outcome, Outcome::Stored);
    let second = cache.get(&nvrtc, source, ARCHS[2]).unwrap();
    assert_eq!(second, Cached { outcome: Outcome::Hit, ..first });
}

#[test]
fn dtypes_without_a_kernel_are_refused() {
    assert!(adam_entry(DType::F64, None).is_err());
    assert!(adam_entry(DType::F32, Some(DType::U8)).is_err());
    assert!(cast_entry(DType::U8, DType::F32).is_err());
    assert!(accumulate_entry(DType::F64).is_err());
    assert!(stats_entry(DType::F64).is_err());
    assert!(adam_remainder_entry(DType::U8).is_err());
    assert!(adam_stochastic_entry(DType::U8).is_err());
}
