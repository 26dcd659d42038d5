//! The files of a model are kept once, with their bytes, and found beside a checkpoint or refused.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;
use zero_ckpt::{
    CkptError, ExportOptions, MODEL_FILES_JSON, ModelFiles, Reader, SaveMeta, StoreOptions,
    assemble,
};

use crate::common::{fails, meta, run, save_alone};

/// A folder with these files; `/` separates folders.
fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    dir
}

fn read(dir: &TempDir, names: &[&str]) -> Result<ModelFiles, CkptError> {
    let source = |name: &&str| ((*name).to_owned(), dir.path().join(name));
    ModelFiles::read(names.iter().map(source))
}

const NAMES: [&str; 2] = ["additional_chat_templates/tools.jinja", "tokenizer.json"];

/// Two files, one of them in a folder, and the folder in which they are.
fn tokenizer(content: &[u8]) -> (ModelFiles, TempDir) {
    let dir = folder(&[(NAMES[0], b"{{ tools }}"), (NAMES[1], content)]);
    (read(&dir, &NAMES).unwrap(), dir)
}

fn save(dir: &Path, step: u64, files: &ModelFiles) -> Result<(), CkptError> {
    let options = StoreOptions::default().model_files(files.clone());
    save_alone(dir, &meta(step), &options).map(drop)
}

/// The names in the folder of kept files.
fn kept(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir.join("model-files")).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn files_are_kept_once() {
    let dir = tempfile::tempdir().unwrap();
    let (files, _dir) = tokenizer(b"\xff\n one ");
    for step in 1..3 {
        save(dir.path(), step, &files).unwrap();
    }
    let [only] = &kept(dir.path())[..] else {
        panic!("{:?}", kept(dir.path()))
    };
    assert_eq!(*only, files.folder_in(dir.path()));

    // Of another model, and what a killed process has left.
    fs::create_dir(dir.path().join("model-files/.partial.0123")).unwrap();
    let (other, _dir) = tokenizer(b"two");
    save(dir.path(), 3, &other).unwrap();
    assert_eq!(kept(dir.path()).len(), 2);

    for (step, files, content) in [
        (1, &files, &b"\xff\n one "[..]),
        (2, &files, b"\xff\n one "),
        (3, &other, b"two"),
    ] {
        let reader = Reader::open(dir.path().join(format!("step-{step:08}"))).unwrap();
        let found = reader.model_files().unwrap().unwrap();
        let folder = files.folder_in(dir.path());
        let paths = NAMES.map(|name| folder.join(name));
        let expected = NAMES
            .iter()
            .zip(&paths)
            .map(|(name, path)| (*name, path.as_path()));
        assert!(found.files().eq(expected), "{found:?}");
        assert_eq!(fs::read(folder.join("tokenizer.json")).unwrap(), content);
        assert_eq!(found.bytes(), 11 + content.len() as u64);
    }

    // Without files nothing is listed.
    let plain = dir.path().join("plain");
    save(&plain, 1, &ModelFiles::read([]).unwrap()).unwrap();
    assert_eq!(Reader::open(&plain).unwrap().model_files().unwrap(), None);
    assert!(!plain.join("model-files").exists());
}

#[test]
fn damaged_files_are_named() {
    let (files, _dir) = tokenizer(b"tokens");
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 5] = [
        ("damaged", |path| fs::write(path, "tokenS").unwrap()),
        ("3 bytes", |path| fs::write(path, "tok").unwrap()),
        ("tokenizer.json", |path| fs::remove_file(path).unwrap()),
        ("symbolic link", |path| {
            let moved = path.with_file_name("moved");
            fs::rename(path, &moved).unwrap();
            symlink(moved, path).unwrap();
        }),
        ("tokenizer.json", |path| {
            fs::remove_file(path).unwrap();
            fs::create_dir(path).unwrap();
        }),
    ];
    for (expected, damage) in damages {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), 1, &files).unwrap();
        let reader = Reader::open(dir.path()).unwrap();
        damage(&files.folder_in(dir.path()).join("tokenizer.json"));
        let error = reader.model_files().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}: {expected}");
        // A later run does not save beside them either.
        let error = save(dir.path(), 2, &files).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}: {expected}");
    }

    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 1, &files).unwrap();
    let alone = dir.path().join("alone");
    fs::create_dir(&alone).unwrap();
    fs::rename(
        dir.path().join("step-00000001"),
        alone.join("step-00000001"),
    )
    .unwrap();
    let reader = Reader::open(alone.join("step-00000001")).unwrap();
    let error = reader.model_files().unwrap_err();
    assert!(matches!(error, CkptError::NoModelFiles { .. }), "{error}");
    assert!(error.to_string().contains("alone/model-files/"), "{error}");
}

/// A list comes with a checkpoint, whoever made that.
#[test]
fn hostile_list_is_refused() {
    let file =
        |name: &str, bytes: u64| json!({"name": name, "bytes": bytes, "crc64": "0123456789abcdef"});
    let many: Vec<Value> = (0..300).map(|i| file(&format!("f{i}"), 1)).collect();
    for (list, expected) in [
        (
            json!({"files": [file("../x", 1)]}),
            "\"../x\" is not a plain name",
        ),
        (
            json!({"files": [file("/etc/passwd", 1)]}),
            "is not a plain name",
        ),
        (
            json!({"files": [file("a/b/c/d", 1)]}),
            "is not a plain name",
        ),
        (
            json!({"files": [file(".hidden", 1)]}),
            "is not a plain name",
        ),
        (
            json!({"files": [file("a", 1), file("a", 1)]}),
            "\"a\" occurs twice",
        ),
        (
            json!({"files": [file("a", 1 << 40)]}),
            "1099511627776 bytes",
        ),
        (json!({"files": many}), "300 files"),
        (
            json!({"files": [file("b", 1), file("a", 1)]}),
            "not in order",
        ),
        (json!({"files": 7}), "invalid type"),
        (json!([]), "model-files.json"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let documents = [(MODEL_FILES_JSON.to_owned(), list)].into();
        let meta = SaveMeta::default().documents(documents);
        save_alone(dir.path(), &meta, &StoreOptions::default()).unwrap();
        let error = Reader::open(dir.path())
            .unwrap()
            .model_files()
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}: {expected}");
    }
}

/// Hugging Face's cache consists of links.
#[test]
fn only_short_regular_sources_are_read() {
    let dir = folder(&[
        ("blob", b"content"),
        ("pointer", b"version https://git-lfs.github.com/spec/v1\n"),
    ]);
    let at = |name: &str| dir.path().join(name);
    symlink("blob", at("link")).unwrap();
    symlink("/dev/zero", at("device")).unwrap();
    symlink("gone", at("dangling")).unwrap();
    fs::File::create(at("sparse"))
        .unwrap()
        .set_len((64 << 20) + 1)
        .unwrap();
    assert_eq!(read(&dir, &["blob", "link"]).unwrap().bytes(), 14);
    for (name, expected) in [
        ("device", "not a regular file"),
        ("dangling", "does not exist here"),
        ("sparse", "longer than 67108864 bytes"),
        ("pointer", "`git lfs pull`"),
        ("none", "cannot read"),
    ] {
        let error = read(&dir, &[name]).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}: {expected}");
    }
    let twice = [("a".to_owned(), at("blob")), ("a".to_owned(), at("blob"))];
    fails(ModelFiles::read(twice), &["occurs twice"]);
    fails(
        ModelFiles::read([("a b".to_owned(), at("blob"))]),
        &["not a plain name"],
    );

    let files = read(&dir, &["blob"]).unwrap();
    fs::write(at("blob"), "other").unwrap();
    let saves = at("saves");
    fails(save(&saves, 1, &files), &["has changed since it was read"]);
    assert!(kept(&saves).is_empty());
}

#[test]
fn assembled_checkpoint_has_the_files() {
    let dir = tempfile::tempdir().unwrap();
    let taken = dir.path().join("taken");
    let new = dir.path().join("new");
    save_alone(&taken, &meta(1), &run("a")).unwrap();
    let (files, _dir) = tokenizer(b"tokens");
    let options = run("b").model_files(files.clone());
    // Refused, because the checkpoint of step 1 is of another run.
    save_alone(&taken, &meta(1), &options).unwrap_err();

    assemble(&new, &[&taken]).unwrap();
    let found = Reader::open(&new).unwrap().model_files().unwrap().unwrap();
    assert_eq!(found.folder_in(&new), files.folder_in(&new));
    assert!(new.join("model-files").exists());

    // From staged files alone there is nothing to take them from.
    let alone = dir.path().join("alone");
    let staging = taken.join(".staging");
    assemble(&alone, &[&staging]).unwrap();
    let error = Reader::open(&alone).unwrap().model_files().unwrap_err();
    assert!(matches!(error, CkptError::NoModelFiles { .. }), "{error}");
}

#[test]
fn export_writes_the_files() {
    let dir = tempfile::tempdir().unwrap();
    let saves = dir.path().join("saves");
    let (files, _dir) = tokenizer(b"tokens");
    save(&saves, 1, &files).unwrap();
    let reader = Reader::open(&saves).unwrap();
    let files = reader.model_files().unwrap().unwrap();
    let name = |name: &str| (name != "tokenizer.json").then(|| format!("of-{name}"));
    let renamed = files.clone().renamed(name).unwrap();
    assert_eq!(renamed.files().count(), 1);
    assert!(files.clone().renamed(|_| Some("one".to_owned())).is_err());

    let out = dir.path().join("out");
    let options = ExportOptions::default()
        .model_files(files)
        .model_config(json!({"model_type": "other"}));
    reader.export(&out, &options).unwrap();
    assert_eq!(fs::read(out.join("tokenizer.json")).unwrap(), b"tokens");
    assert!(out.join("additional_chat_templates/tools.jinja").exists());
    let config: Value =
        serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["model_type"], "other");
}
