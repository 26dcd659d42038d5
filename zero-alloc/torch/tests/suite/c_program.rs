//! A C program that uses the library from many threads.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::open;

/// The folder of the library that cargo built with this test.
pub(crate) fn library_folder() -> PathBuf {
    let test = std::env::current_exe().expect("a path");
    test.parent().expect("a folder").to_owned()
}

/// Prints and returns the output of a command that succeeds.
fn run(command: &mut Command) -> String {
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

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_c_threads_keep_their_bytes() {
    let _alone = open();
    if Command::new("cc").arg("--version").output().is_err() {
        println!("SKIPPED: no cc here");
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let libraries = library_folder();
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("arena");
    run(Command::new("cc")
        .args([
            "-std=gnu11",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pthread",
            "-o",
        ])
        .arg(&program)
        .arg(root.join("tests/suite/arena.c"))
        .arg("-I")
        .arg(root.join("include"))
        .arg("-L")
        .arg(&libraries)
        .args(["-lzero_alloc_torch", "-ldl"])
        .arg(format!("-Wl,-rpath,{}", libraries.display())));
    let text = run(Command::new(&program).args(["8", "300"]));
    assert_eq!(
        text,
        "2400 allocated, 2400 freed, 0 live, 0 out of memory\n"
    );
}
