//! Every kernel compiles for every architecture without spilling registers, and has the entries that the host asks
//! for. Needs NVRTC and no GPU; without NVRTC the tests say that they are skipped, and fail where
//! `ZERO_REQUIRE_NVRTC` is set (.ci/steps/80-cuda-compile does so).

#![cfg(not(miri))]

use std::io::Write;

use zero_alloc::device::{AnySlice, DType, DeviceSlice};
use zero_kernels::cuda::plan::{self, Launch};
use zero_kernels::cuda::{Arch, Cached, Compile, CudaError, KernelCache, Nvrtc, Outcome, SOURCES, Source, Target};
use zero_kernels::{AdamArgs, AdamHyper, DecideArgs, RemainderArgs};

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

fn entries() -> Vec<(&'static str, Vec<&'static str>)> {
    SOURCES.iter().map(|source| (source.name, source.entries())).collect()
}

#[test]
fn every_kernel_compiles_for_every_architecture_without_spilling() {
    let Some(nvrtc) = nvrtc("every_kernel_compiles_for_every_architecture_without_spilling") else { return };
    let entries = entries();
    assert_eq!(entries.iter().map(|(_, entries)| entries.len()).sum::<usize>(), 12 + 3 + 9 + 3 + 4 + 2);
    // NVRTC compiles for each architecture on its own: two threads halve the wait.
    std::thread::scope(|scope| {
        for archs in [&ARCHS[..2], &ARCHS[2..]] {
            let (nvrtc, entries) = (&nvrtc, &entries);
            scope.spawn(move || archs.iter().for_each(|&arch| check_arch(nvrtc, arch, entries)));
        }
    });
}

fn check_arch(nvrtc: &Nvrtc, arch: Arch, entries: &[(&str, Vec<&str>)]) {
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
    let first = cache.get(&nvrtc, &SOURCES[2], Arch(990)).unwrap();
    assert_eq!((first.target, &first.outcome), (target, &Outcome::Stored));
    assert_eq!(cache.get(&nvrtc, &SOURCES[2], Arch(991)).unwrap(), Cached { outcome: Outcome::Hit, ..first });
}

#[test]
fn a_compiled_kernel_comes_from_the_cache_the_second_time() {
    let Some(nvrtc) = nvrtc("a_compiled_kernel_comes_from_the_cache_the_second_time") else { return };
    let folder = tempfile::tempdir().unwrap();
    let (cache, source) = (KernelCache::at(folder.path()), Source::named("accumulate.cu").unwrap());
    let first = cache.get(&nvrtc, source, ARCHS[2]).unwrap();
    assert_eq!(first.outcome, Outcome::Stored);
    let second = cache.get(&nvrtc, source, ARCHS[2]).unwrap();
    assert_eq!(second, Cached { outcome: Outcome::Hit, ..first });
}

/// Places in memory that nobody touches.
fn at<T>(place: usize, len: usize) -> DeviceSlice<T> {
    // SAFETY: planning computes with addresses and never follows them.
    unsafe { DeviceSlice::from_raw_parts(std::ptr::without_provenance_mut(place), len) }
}

fn any(place: usize, len: usize, dtype: DType) -> AnySlice {
    // SAFETY: as above.
    unsafe { AnySlice::from_raw_parts(std::ptr::without_provenance_mut(place), len, dtype) }
}

/// One launch of every kernel there is.
fn every_launch() -> Vec<Launch> {
    const N: usize = 1000;
    let floats = [DType::F32, DType::Bf16, DType::F16];
    let hyper = AdamHyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, decoupled: true };
    let (first_moment, second_moment, scalars) = (at(0x2000, N), at(0x4000, N), at(0x1000, 1));
    let mut launches = Vec::new();
    for grad in floats {
        let grad = any(0x6000, N, grad);
        for param in [None, Some(floats[0]), Some(floats[1]), Some(floats[2])] {
            let param_out = param.map(|dtype| any(0xa000, N, dtype));
            let master = at(0x8000, N);
            let args = AdamArgs { master, first_moment, second_moment, grad, param_out, scalars, hyper };
            launches.extend(plan::adam(&args).unwrap());
        }
        for dst in floats {
            launches.extend(plan::cast(grad, any(0x8000, N, dst), 2.0).unwrap());
        }
        let (param, remainder) = (at(0x8000, N), at(0xa000, N));
        let args = RemainderArgs { param, remainder, first_moment, second_moment, grad, scalars, hyper };
        launches.extend(plan::adam_remainder(&args).unwrap());
        launches.extend(plan::accumulate(grad, at(0x8000, N)).unwrap());
        let (chunks, combine) = plan::grad_stats(grad, at(0x8000, 100), at(0xa000, 1)).unwrap();
        launches.extend(chunks.into_iter().chain([combine]));
    }
    launches.push(plan::make_vote(at(0x1000, 3), at(0x2000, 1), at(0x2008, 1), at(0x3000, 1)).unwrap());
    let (votes, settings, rates) = (at(0x1000, 2), at(0x2000, 1), at(0x3000, 9));
    let args =
        DecideArgs { votes, settings, rates, state: at(0x4000, 1), scalars: at(0x5000, 1), reports: at(0x6000, 4) };
    launches.push(plan::decide_step(&args).unwrap());
    launches
}

/// The sizes of an entry's parameters, from its PTX.
fn parameter_sizes(ptx: &str, entry: &str) -> Vec<usize> {
    let start = ptx.find(&format!(".entry {entry}(")).expect(entry);
    let list = &ptx[start..][..ptx[start..].find(')').unwrap()];
    let declared = list.split(".param ").skip(1);
    declared
        .map(|text| {
            let word = |prefix: &str| text.split_whitespace().find_map(|w| w.strip_prefix(prefix)).map(str::to_owned);
            match text.find('[') {
                Some(open) => text[open + 1..text.find(']').unwrap()].parse().unwrap(),
                None => [".u", ".s", ".f", ".b"].iter().find_map(|p| word(p)).unwrap().parse::<usize>().unwrap() / 8,
            }
        })
        .collect()
}

#[test]
fn what_a_launch_passes_is_what_the_compiled_kernel_takes() {
    let Some(nvrtc) = nvrtc("what_a_launch_passes_is_what_the_compiled_kernel_takes") else { return };
    let launches = every_launch();
    let mut entries: Vec<_> = launches.iter().map(|l| l.entry).collect();
    entries.sort_unstable();
    entries.dedup();
    let mut all: Vec<_> = SOURCES.iter().flat_map(Source::entries).collect();
    all.sort_unstable();
    assert_eq!(entries, all, "every kernel is launched by some operation");
    for source in SOURCES {
        let target = nvrtc.target(Arch(990)).unwrap();
        let image = nvrtc.compile(&source, target, false).unwrap().image;
        let ptx = std::str::from_utf8(&image).unwrap();
        for launch in launches.iter().chain(&plan::idle(0)).filter(|l| l.source == source.name) {
            let passed: Vec<usize> = launch.params.iter().map(plan::Param::size_bytes).collect();
            assert_eq!(passed, parameter_sizes(ptx, launch.entry), "{}", launch.entry);
        }
    }
}
