//! The files of examples: lines of JSON, and rows of parquet as such lines.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use super::line::{self, Lines};
use crate::data::DataError;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Jsonl,
    Parquet,
}

impl Format {
    fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "jsonl" => Some(Self::Jsonl),
            "parquet" => Some(Self::Parquet),
            _ => None,
        }
    }
}

/// The files of `path` if its lines are examples: those with `prompt`, `completion` or `messages`,
/// and those with `text` if `wants_text`. Parquet has examples only.
///
/// # Errors
/// A file cannot be read.
pub(in crate::data) fn files(
    path: &Path,
    wants_text: bool,
) -> Result<Option<Vec<PathBuf>>, DataError> {
    let files = if path.is_dir() {
        folder_files(path)?
    } else if Format::of(path).is_some() {
        vec![path.to_owned()]
    } else {
        Vec::new()
    };
    let Some(first) = files.first() else {
        return Ok(None);
    };
    if Format::of(first) == Some(Format::Parquet) {
        return Ok(Some(files));
    }

    for line in lines(first)? {
        let line = line?;
        if !line.trim().is_empty() {
            let is_example =
                line::has_example_keys(&line) || wants_text && line::has_text_key(&line);
            return Ok(is_example.then_some(files));
        }
    }
    Ok(None)
}

/// The files of a folder if all of them have examples, in order; empty otherwise.
fn folder_files(dir: &Path) -> Result<Vec<PathBuf>, DataError> {
    let failed = |source| DataError::Unreadable {
        path: dir.to_owned(),
        source,
    };
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let hidden = path
            .file_name()
            .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if hidden {
            continue;
        }
        if Format::of(&path).is_none() || !path.is_file() {
            return Ok(Vec::new());
        }
        files.push(path);
    }
    files.sort();
    Ok(files)
}

/// The lines of a file.
pub(super) fn lines(path: &Path) -> Result<Lines, DataError> {
    match Format::of(path) {
        #[cfg(feature = "parquet")]
        Some(Format::Parquet) => super::parquet::lines(path),
        #[cfg(not(feature = "parquet"))]
        Some(Format::Parquet) => Err(DataError::NoParquet {
            path: path.to_owned(),
        }),
        _ => json_lines(path),
    }
}

fn json_lines(path: &Path) -> Result<Lines, DataError> {
    let opened = zero_ckpt::files::open_content(path);
    let path = path.to_owned();
    let failed = move |source| DataError::Read {
        path: path.clone(),
        source,
    };
    let (file, _) = opened.map_err(&failed)?;
    let lines = BufReader::new(file).lines();
    Ok(Box::new(lines.map(move |line| line.map_err(&failed))))
}
