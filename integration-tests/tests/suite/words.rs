//! One name, one meaning: the glossary of ARCHITECTURE.md, and the public types of the six crates.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The crates whose public types are distinct. Files for tests are left out.
const CRATES: [&str; 6] = [
    "zero-shard",
    "zero-alloc",
    "zero-kernels",
    "zero-comm",
    "zero-optim",
    "zero-ckpt",
];

/// Crates that the glossary speaks of, too.
const COMPOSED: [&str; 2] = ["integration-tests/trainer", "integration-tests/models"];

/// Files below the `src` folder of `name`, by the types that they define: all of them, or those
/// that are public.
fn types(name: &str, public: bool) -> BTreeMap<String, Vec<PathBuf>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
    let mut types: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    let mut folders = vec![root.join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let file = path.file_name().unwrap().to_string_lossy();
            if file.contains("test") || file.contains("conformance") {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            for found in text.lines().filter_map(|line| defined(line, public)) {
                types.entry(found).or_default().push(path.clone());
            }
        }
    }

    types
}

/// The type that a line at the outermost level defines.
fn defined(line: &str, public: bool) -> Option<String> {
    let item = match line.strip_prefix("pub ") {
        Some(item) => item,
        None if public => return None,
        None => line.strip_prefix("pub(crate) ").unwrap_or(line),
    };
    let item = item.strip_prefix("unsafe ").unwrap_or(item);
    let item = ["struct ", "enum ", "trait ", "type "]
        .iter()
        .find_map(|keyword| item.strip_prefix(keyword))?;
    let name = item.split(|c: char| !c.is_alphanumeric()).next()?;
    Some(name.to_owned())
}

#[test]
fn public_types_have_distinct_names() {
    let mut all: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for name in CRATES {
        for (found, files) in types(name, true) {
            all.entry(found).or_default().extend(files);
        }
    }
    assert!(all.len() > 200, "have the sources moved?");

    all.retain(|_, files| files.len() > 1);
    assert!(all.is_empty(), "one name for several types: {all:#?}");
}

#[test]
fn words_of_the_glossary_are_types() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ARCHITECTURE.md");
    let text = fs::read_to_string(path).unwrap();
    let (_, glossary) = text.split_once("\n## Words\n").unwrap();
    let (glossary, _) = glossary.split_once("\n## ").unwrap();

    let crates = CRATES.into_iter().chain(COMPOSED);
    let all: Vec<_> = crates.map(|name| types(name, false)).collect();
    let mut words = 0;
    for row in glossary.lines().filter(|line| line.starts_with("| ")) {
        let named = row.rsplit('|').nth(1).unwrap();
        for word in named.split('`').skip(1).step_by(2) {
            words += 1;
            let files: Vec<_> = all.iter().filter_map(|types| types.get(word)).collect();
            assert!(
                !files.is_empty(),
                "the glossary has {word}, and no crate defines it"
            );
        }
    }
    assert!(words > 40, "{words} words: is the table still there?");
}
