//! Export to and import from Hugging Face's layout, checked with the safetensors packages for Rust
//! and Python.

use std::path::Path;
use std::process::Command;

use crate::common::{fails, flip, layout, save, value};
use safetensors::SafeTensors;
use zero_ckpt::{CkptError, ExportOptions, Reader, StateDtype, Store, StoreOptions, import};

fn saved(dir: &Path, seed: u64) -> Reader {
    save(dir, &layout(3, 4), 1, seed, &StoreOptions::default());
    Reader::open(dir).unwrap()
}

fn place(name: &str) -> Option<(String, String)> {
    (name != "wpe").then(|| ("all".to_string(), name.to_string()))
}

#[test]
fn single_file_export_is_bit_identical() {
    let dir = tempfile::tempdir().unwrap();
    let reader = saved(dir.path(), 3);
    let out = dir.path().join("hf");
    let exported = reader.export(&out, &ExportOptions::default()).unwrap();
    assert_eq!(exported.files, [out.join("model.safetensors")]);
    let bytes = std::fs::read(out.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.len(), reader.params().count());

    for param in reader.params() {
        let tensor = file.tensor(&param.name).unwrap();
        assert_eq!(
            tensor.shape().iter().map(|d| *d as u64).collect::<Vec<_>>(),
            param.shape
        );
        let expected =
            (0..param.numel_elems).flat_map(|e| value(3, "master", &param.name, e).to_le_bytes());
        assert!(tensor.data().iter().copied().eq(expected), "{}", param.name);
    }

    let config = std::fs::read_to_string(out.join("config.json")).unwrap();
    assert_eq!(
        serde_json::from_str::<serde_json::Value>(&config).unwrap()["model_type"],
        "gpt2"
    );
    assert_eq!(partial(dir.path()), 0);
}

/// Number of unfinished exports in `dir`.
fn partial(dir: &Path) -> usize {
    let names = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.contains(".partial.")).count()
}

#[test]
fn export_resolves_paths_and_overwrites_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let reader = saved(dir.path(), 3);
    let path = |name: &str| dir.path().join(name);
    std::fs::create_dir(path("real")).unwrap();
    std::os::unix::fs::symlink("real", path("link")).unwrap();
    std::fs::create_dir(path("new.partial")).unwrap();
    std::fs::write(path("new.partial/model.safetensors"), "another's").unwrap();

    for (out, there) in [
        ("new/", "new"),
        ("link", "real"),
        ("deep/er", "deep/er"),
        ("deep/../dots/.", "dots"),
    ] {
        let exported = reader.export(path(out), &ExportOptions::default()).unwrap();
        assert!(
            exported.files.iter().all(|file| file.is_file()),
            "{out}: {exported:?}"
        );
        let mut names: Vec<_> = std::fs::read_dir(path(there))
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["config.json", "model.safetensors"], "{out}");
    }

    assert!(path("link").is_symlink());
    assert_eq!(
        std::fs::read_to_string(path("new.partial/model.safetensors")).unwrap(),
        "another's"
    );
    assert_eq!(partial(dir.path()), 0);
}

#[test]
fn large_export_is_split_and_imports_again() {
    let dir = tempfile::tempdir().unwrap();
    let reader = saved(dir.path(), 3);
    let out = dir.path().join("hf");
    std::fs::create_dir(&out).unwrap();
    let options = ExportOptions::default()
        .max_file_bytes(400)
        .dtype(StateDtype::BF16);
    let exported = reader.export(&out, &options).unwrap();
    assert!(exported.files.len() > 2);
    let index: serde_json::Value =
        serde_json::from_slice(&std::fs::read(out.join("model.safetensors.index.json")).unwrap())
            .unwrap();
    assert_eq!(index["metadata"]["total_size"], exported.tensor_bytes);

    for param in reader.params() {
        let bytes =
            std::fs::read(out.join(index["weight_map"][&param.name].as_str().unwrap())).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensor = file.tensor(&param.name).unwrap();
        let expected = (0..param.numel_elems)
            .flat_map(|e| half::bf16::from_f32(value(3, "master", &param.name, e)).to_le_bytes());
        assert!(tensor.data().iter().copied().eq(expected), "{}", param.name);
    }

    // The import of the export holds the weights only.
    let store_dir = dir.path().join("imported");
    let store = Store::create(&store_dir, 0, StoreOptions::default()).unwrap();
    import(&out, &store, place).unwrap();
    let imported = Reader::open(&store_dir).unwrap();
    assert!(imported.verify().problems.is_empty());
    assert_eq!(imported.params().count(), reader.params().count() - 1);
    assert_eq!(imported.manifest().model_config["model_type"], "gpt2");

    for param in imported.params() {
        let mut got = vec![0.0; param.numel_elems as usize];
        imported
            .read_param("master", &param.name, 0..param.numel_elems, &mut got)
            .unwrap();
        let expected = (0..param.numel_elems)
            .map(|e| half::bf16::from_f32(value(3, "master", &param.name, e)).to_f32())
            .collect::<Vec<_>>();
        assert_eq!(
            crate::common::bits(&got),
            crate::common::bits(&expected),
            "{}",
            param.name
        );
    }

    let moment = imported.read_param("first_moment", "ln", 0..2, &mut [0.0; 2]);
    assert!(matches!(moment, Err(CkptError::MissingState { .. })));
}

#[test]
fn export_rejects_a_used_directory() {
    let dir = tempfile::tempdir().unwrap();
    let reader = saved(dir.path(), 3);
    let out = dir.path().join("hf");
    std::fs::create_dir(&out).unwrap();
    std::fs::write(out.join("precious"), "x").unwrap();
    fails(
        reader.export(&out, &ExportOptions::default()),
        &["new or empty"],
    );
    let missing = ExportOptions::default().state("weights".into());
    assert!(matches!(
        reader.export(dir.path().join("o"), &missing),
        Err(CkptError::MissingState { .. })
    ));
    assert!(!dir.path().join("o").exists());
}

#[test]
fn damaged_checkpoint_is_not_exported() {
    let dir = tempfile::tempdir().unwrap();
    let reader = saved(dir.path(), 3);
    let file = reader.path().join("shard-00001-of-00003.safetensors");
    flip(&file, 4096 + 100);
    let out = dir.path().join("hf");
    assert!(matches!(
        reader.export(&out, &ExportOptions::default()),
        Err(CkptError::Corrupt { .. })
    ));
    assert!(!out.exists());
    assert_eq!(partial(dir.path()), 0);
}

#[test]
fn invalid_imports_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path().join("store"), 0, StoreOptions::default()).unwrap();
    let hf = dir.path().join("hf");
    std::fs::create_dir(&hf).unwrap();
    let text = || import(&hf, &store, place).unwrap_err().to_string();
    assert!(text().contains("model.safetensors"), "{}", text());
    std::fs::write(hf.join("model.safetensors"), "short").unwrap();
    assert!(text().contains("5 bytes"), "{}", text());
    let header = br#"{"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend([0; 8]);
    std::fs::write(hf.join("model.safetensors"), &bytes).unwrap();
    assert!(text().contains("dtype I64"), "{}", text());
    let index = |file: &str, tensor: &str| {
        let json = serde_json::json!({"metadata": {}, "weight_map": {tensor: file}});
        std::fs::write(hf.join("model.safetensors.index.json"), json.to_string()).unwrap();
    };

    std::fs::rename(hf.join("model.safetensors"), hf.join("part.safetensors")).unwrap();
    index("../../etc/passwd", "a");
    assert!(text().contains("not a plain file name"), "{}", text());
    index("part.safetensors", "b");
    assert!(
        text().contains("\"b\" is not in part.safetensors"),
        "{}",
        text()
    );
    std::fs::write(hf.join("model.safetensors.index.json"), "[").unwrap();
    assert!(text().contains("index.json"), "{}", text());
    assert!(matches!(
        Reader::open(dir.path().join("store")),
        Err(CkptError::NoCheckpoint { .. })
    ));
}

/// Runs Python with the safetensors package; prints and returns `None` if it is not installed.
fn python(script: &str, args: &[&Path]) -> Option<String> {
    let has = Command::new("python3")
        .args(["-c", "import safetensors, numpy"])
        .output();
    if !has.is_ok_and(|o| o.status.success()) {
        eprintln!("SKIPPED: no python3 with safetensors and numpy on this machine");
        return None;
    }
    let out = Command::new("python3")
        .arg("-c")
        .arg(script)
        .args(args)
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    Some(String::from_utf8(out.stdout).unwrap())
}

#[test]
fn python_opens_every_shard_file() {
    let dir = tempfile::tempdir().unwrap();
    let reader = saved(dir.path(), 3);
    let script = "import sys, glob
from safetensors.numpy import load_file
total = 0
for path in sorted(glob.glob(sys.argv[1] + '/*.safetensors')):
    tensors = load_file(path)
    assert 'zero.block_crc64' in tensors
    total += sum(t.size for name, t in tensors.items() if '/' in name)
print(total)";
    let Some(out) = python(script, &[reader.path()]) else {
        return;
    };
    let elems: u64 = reader.params().map(|p| p.numel_elems).sum();
    assert_eq!(out.trim(), (3 * elems).to_string());
}
