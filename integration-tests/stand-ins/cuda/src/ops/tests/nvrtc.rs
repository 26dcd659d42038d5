//! PTX compiled by NVRTC: all kernels of the workspace decode. Without NVRTC this test is
//! skipped with a message, or fails if `ZERO_REQUIRE_NVRTC` is set.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

use libloading::Library;

use crate::ptx::module::load;

/// The newest virtual architecture of NVRTC 13.
const ARCH: &CStr = c"--gpu-architecture=compute_121";

fn nvrtc(test: &str) -> Option<Library> {
    let names = std::env::var("ZERO_NVRTC").map_or(
        vec!["libnvrtc.so.13".into(), "libnvrtc.so".into()],
        |path| vec![path],
    );
    // SAFETY: loading NVRTC runs its initialisers only.
    let found = names
        .iter()
        .find_map(|name: &String| unsafe { Library::new(name) }.ok());
    if found.is_none() {
        assert!(
            std::env::var_os("ZERO_REQUIRE_NVRTC").is_none(),
            "no NVRTC at {names:?}"
        );
        crate::error::say!("SKIPPED {test}: no NVRTC at {names:?}");
    }
    found
}

/// A symbol of NVRTC as a function of this type.
macro_rules! symbol {
    ($library:expr, $name:literal as $type:ty) => {{
        // SAFETY: the signature of NVRTC's header.
        *unsafe { $library.get::<$type>($name) }.unwrap()
    }};
}

/// Compiles to PTX.
fn compile(library: &Library, source: &str, options: &[&CStr]) -> String {
    type Program = *mut c_void;
    type Names = *const *const c_char;
    let create = symbol!(
        library,
        b"nvrtcCreateProgram"
            as unsafe extern "C" fn(
                *mut Program,
                *const c_char,
                *const c_char,
                c_int,
                Names,
                Names,
            ) -> c_int
    );

    let compile = symbol!(
        library,
        b"nvrtcCompileProgram" as unsafe extern "C" fn(Program, c_int, Names) -> c_int
    );
    let size = symbol!(
        library,
        b"nvrtcGetPTXSize" as unsafe extern "C" fn(Program, *mut usize) -> c_int
    );
    let get = symbol!(
        library,
        b"nvrtcGetPTX" as unsafe extern "C" fn(Program, *mut c_char) -> c_int
    );
    let log_size = symbol!(
        library,
        b"nvrtcGetProgramLogSize" as unsafe extern "C" fn(Program, *mut usize) -> c_int
    );
    let log = symbol!(
        library,
        b"nvrtcGetProgramLog" as unsafe extern "C" fn(Program, *mut c_char) -> c_int
    );
    let destroy = symbol!(
        library,
        b"nvrtcDestroyProgram" as unsafe extern "C" fn(*mut Program) -> c_int
    );
    let text = CString::new(source).unwrap();
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let mut program = std::ptr::null_mut();
    let none = std::ptr::null();

    // SAFETY: zero-terminated text and name, and no headers.
    let result = unsafe {
        create(
            &raw mut program,
            text.as_ptr(),
            c"test.cu".as_ptr(),
            0,
            none,
            none,
        )
    };

    assert_eq!(result, 0);
    // SAFETY: a live program, and the options with their count.
    let code = unsafe { compile(program, options.len() as c_int, options.as_ptr()) };
    let text = |size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
                get: unsafe extern "C" fn(Program, *mut c_char) -> c_int| {
        let mut bytes = 0;
        // SAFETY: a live program and a place for a number.
        assert_eq!(unsafe { size(program, &raw mut bytes) }, 0);
        let mut held = vec![0u8; bytes];
        // SAFETY: a live program and a buffer of the size that it returned.
        assert_eq!(unsafe { get(program, held.as_mut_ptr().cast()) }, 0);
        String::from_utf8(held)
            .unwrap()
            .trim_end_matches('\0')
            .to_owned()
    };

    assert_eq!(code, 0, "{}", text(log_size, log));
    let ptx = text(size, get);
    // SAFETY: a live program, destroyed once.
    unsafe { destroy(&raw mut program) };
    ptx
}

const EXACT: [&CStr; 3] = [ARCH, c"--std=c++17", c"--fmad=false"];

#[test]
fn all_kernels_of_the_workspace_decode() {
    let Some(library) = nvrtc("all_kernels_of_the_workspace_decode") else {
        return;
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    let prelude = read(&root.join("zero-kernels/cuda/prelude.cuh"));

    for folder in [
        "zero-kernels/cuda",
        "integration-tests/models/src/cuda/kernels",
    ] {
        let mut files: Vec<_> = std::fs::read_dir(root.join(folder))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        let headers = |except: &str| -> String {
            let other = |p: &&std::path::PathBuf| {
                p.extension().is_some_and(|e| e == "cuh") && !p.ends_with(except)
            };
            files.iter().filter(other).rev().map(|p| read(p)).collect()
        };
        for path in files
            .iter()
            .filter(|p| p.extension().is_some_and(|e| e == "cu"))
        {
            // The transformer's kernels are compiled once for each type of storage.
            let storage = if folder == "zero-kernels/cuda" {
                ""
            } else {
                "#define STORAGE bf16\n"
            };
            let source = format!(
                "{prelude}\n{storage}{}\n{}",
                headers("prelude.cuh"),
                read(path)
            );
            let ptx = compile(&library, &source, &EXACT);
            let loaded = load(&ptx).unwrap_or_else(|error| panic!("{path:?}: {error:?}"));
            let entries = ptx.matches(".entry").count();
            assert!(entries > 0 && loaded.len() == entries, "{path:?}");
        }
    }
}
