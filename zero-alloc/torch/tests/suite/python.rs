//! The Python file.

use std::process::Command;

use crate::c_program::{library_folder, run, sources};
use crate::open;

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_python_file_works() {
    let _alone = open();
    // A Python with torch, if the default one has none.
    let python = std::env::var("ZERO_TORCH_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    if Command::new(&python).arg("--version").output().is_err() {
        println!("SKIPPED: no {python} here");
        return;
    }
    let Some(root) = sources() else { return };
    let library = library_folder().join("libzero_alloc_torch.so");
    let text = run(Command::new(python)
        .arg(root.join("tests/suite/check.py"))
        .env("PYTHONPATH", root.join("python"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("ZERO_ALLOC_TORCH", library));
    assert!(text.starts_with("ok: statistics, map"), "{text}");
}
