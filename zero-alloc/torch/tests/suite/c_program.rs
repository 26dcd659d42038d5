//! Programs in C and C++ that use the library.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::open;

/// The folder of the library: that of `ZERO_ALLOC_TORCH`, or the one that cargo built with this test.
pub(crate) fn library_folder() -> PathBuf {
    let library = std::env::var_os("ZERO_ALLOC_TORCH").map(PathBuf::from);
    let beside = library.unwrap_or_else(|| std::env::current_exe().expect("a path"));
    beside.parent().expect("a folder").to_owned()
}

/// This crate's folder; `None`, with a message, on a machine that has only the built tests.
pub(crate) fn sources() -> Option<&'static Path> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    if !root.exists() {
        println!("SKIPPED: {} is not on this machine", root.display());
        return None;
    }
    Some(root)
}

/// Prints and returns the output of a command that succeeds.
pub(crate) fn run(command: &mut Command) -> String {
    let output = command.output().expect("started");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{command:?}: {}: {text}{errors}",
        output.status
    );
    print!("{text}");
    text
}

/// Compiles a program, runs it and returns its output; `None`, with a message, without a compiler.
fn compile_and_run(compiler: &str, source: &str, arguments: &[&str]) -> Option<String> {
    let root = sources()?;
    if Command::new(compiler).arg("--version").output().is_err() {
        println!("SKIPPED: no {compiler} here");
        return None;
    }
    let libraries = library_folder();
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("program");
    let flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"];
    run(Command::new(compiler)
        .args(flags)
        .arg(&program)
        .arg(root.join("tests/suite").join(source))
        .arg("-I")
        .arg(root.join("include"))
        .arg("-L")
        .arg(&libraries)
        .args(["-lzero_alloc_torch", "-ldl"])
        .arg(format!("-Wl,-rpath,{}", libraries.display())));
    Some(run(Command::new(&program).args(arguments)))
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_c_threads_keep_their_bytes() {
    let _alone = open();
    if let Some(text) = compile_and_run("cc", "arena.c", &["8", "300"]) {
        assert_eq!(
            text,
            "2400 allocated, 2400 freed, 0 live, 0 out of memory\n"
        );
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_graph_pools_have_the_types_of_torch() {
    let _alone = open();
    if let Some(text) = compile_and_run("c++", "graph_pools.cc", &[]) {
        assert_eq!(text, "ok\n");
    }
}
