//! The text files of a folder, in an order that does not depend on the machine.

use std::fs;
use std::path::{Path, PathBuf};

use ignore::{DirEntry, WalkBuilder};

use super::{DataError, outputs};

/// Larger files are skipped: they are rarely written by a person.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// A file with a 0 among its first bytes is considered binary.
const PROBE_BYTES: usize = 8192;

/// The text files of a folder.
#[derive(Default)]
pub(super) struct Documents {
    /// Paths and texts, by path.
    pub(super) texts: Vec<(PathBuf, String)>,
    /// Number of skipped files: binary, large, or not readable.
    pub(super) skipped_files: usize,
}

/// Reads every text file under `root`. With a `limit`, a folder of more files is an error.
///
/// Skips hidden files, files ignored by the folder's `.gitignore` files, build folders (`target`, or with a
/// `CACHEDIR.TAG`), symbolic links, files above 1 MiB, files that are not UTF-8 text, and what runs write.
pub(super) fn read(root: &Path, limit: Option<usize>) -> Result<Documents, DataError> {
    let (mut documents, mut files) = (Documents::default(), 0);
    let walk = WalkBuilder::new(root)
        .parents(false)
        .git_global(false)
        .git_exclude(false)
        .require_git(false)
        .follow_links(false)
        .sort_by_file_path(Path::cmp)
        .filter_entry(|entry| entry.depth() == 0 || !is_skipped_folder(entry))
        .build();
    for entry in walk {
        let Ok(entry) = entry else {
            documents.skipped_files += 1;
            continue;
        };
        if !entry.file_type().is_some_and(|t| t.is_file()) {
            continue;
        }
        files += 1;
        if let Some(limit) = limit.filter(|limit| files > *limit) {
            return Err(DataError::TooManyHere { path: root.to_owned(), limit });
        }
        match read_text(&entry) {
            Some(text) if text.trim().is_empty() || outputs::is_output_file(entry.path(), &text) => {}
            Some(text) => documents.texts.push((entry.into_path(), text)),
            None => documents.skipped_files += 1,
        }
    }
    if documents.texts.is_empty() {
        return Err(DataError::NoText { path: root.to_owned() });
    }
    Ok(documents)
}

/// Whether an entry is a folder of build files, a checkpoint or a model.
fn is_skipped_folder(entry: &DirEntry) -> bool {
    let is_build = || entry.file_name() == "target" || entry.path().join("CACHEDIR.TAG").exists();
    entry.file_type().is_some_and(|t| t.is_dir()) && (is_build() || outputs::is_output_folder(entry.path()))
}

/// The file's text; `None` if it is too large, not text or not readable.
fn read_text(entry: &DirEntry) -> Option<String> {
    match entry.metadata().ok()?.len() {
        // Also a file of /proc, whose read may wait.
        0 => return Some(String::new()),
        1..=MAX_FILE_BYTES => {}
        _ => return None,
    }
    let bytes = fs::read(entry.path()).ok()?;
    if bytes[..bytes.len().min(PROBE_BYTES)].contains(&0) {
        return None;
    }
    let mut text = String::from_utf8(bytes).ok()?;
    if !text.ends_with('\n') {
        text.push('\n');
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_files_are_sorted_and_others_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, bytes: &[u8]| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        };
        write("b.txt", b"second\n");
        write("a.md", b"first");
        write("sub/c.rs", b"third\n");
        write("blank.txt", b" \n\n");
        write(".hidden", b"no");
        write(".git/config", b"no");
        write("target/out.txt", b"no");
        write("sub/target/out.txt", b"no");
        write("cache/CACHEDIR.TAG", b"no");
        write("cache/x.txt", b"no");
        write(".gitignore", b"ignored.txt\n/deep/\n");
        write("ignored.txt", b"no");
        write("deep/x.txt", b"no");
        write("binary", b"no\0");
        write("latin1.txt", b"caf\xe9");
        write("large.txt", &vec![b'x'; MAX_FILE_BYTES as usize + 1]);
        write("limit.txt", &vec![b'y'; MAX_FILE_BYTES as usize]);
        std::os::unix::fs::symlink(dir.path().join("a.md"), dir.path().join("link.md")).unwrap();

        let documents = read(dir.path(), None).unwrap();
        let starts: Vec<&str> = documents.texts.iter().map(|(_, text)| &text[..6]).collect();
        assert_eq!(starts, ["first\n", "second", "yyyyyy", "third\n"]);
        assert_eq!(documents.skipped_files, 3, "binary, latin1.txt, large.txt");
    }

    #[test]
    fn outputs_of_runs_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("a.txt", "first\n");
        write("c/step-00000003/manifest.json", "{\"format\": \"zero-ckpt\", \"version\": 1}");
        write("c/step-00000003/run.json", "no");
        write("c/latest", "step-00000003 0123456789abcdef\n");
        write("model/config.json", "{}");
        write("model/model.safetensors", "no");
        write("metrics", "{\"step\":1,\"loss\":2.5,\"step_ms\":3.0,\"comm_bytes\":{}}\n");
        write("r/summary.json", "{\"unigram_loss\": 3.0, \"memory_by_rank\": [], \"steps\": []}");
        write("r/summary.txt", "no");
        write("r/loss.svg", "no");
        write("r/run.json", "no");
        write("out.log", "note: a\nnano: 858,880 parameters in fp32, ZeRO stage 3, 4 ranks x 1 thread\n");
        write("err.log", "step 1: loss 5.4419, 3,849 tokens/s, 512 tokens, 0s left\n");
        // Of the same names, but not of a run.
        write("other/manifest.json", "second");
        write("other/summary.txt", "third\n");
        write("steps.jsonl", "{\"step\": 4}\n");
        let documents = read(dir.path(), None).unwrap();
        let names: Vec<_> = documents.texts.iter().map(|(path, _)| path.strip_prefix(dir.path()).unwrap()).collect();
        assert_eq!(names, ["a.txt", "other/manifest.json", "other/summary.txt", "steps.jsonl"].map(Path::new));
        assert_eq!(documents.skipped_files, 0);
    }

    #[test]
    fn folder_named_target_can_be_the_data() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("target");
        fs::create_dir(&target).unwrap();
        fs::write(target.join("a.txt"), "text").unwrap();
        assert_eq!(read(&target, None).unwrap().texts, [(target.join("a.txt"), "text\n".to_owned())]);
    }

    #[test]
    fn more_files_than_the_limit_are_an_error() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c"] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        assert_eq!(read(dir.path(), Some(3)).unwrap().texts.len(), 3);
        let error = read(dir.path(), Some(2)).err().unwrap().to_string();
        assert!(error.contains("more than 2 files: pass --data"), "{error}");
    }

    #[test]
    fn folder_without_text_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("binary"), b"\0").unwrap();
        let error = read(dir.path(), None).err().unwrap().to_string();
        assert!(
            error.ends_with("no text file in this folder (hidden, git-ignored, binary and large files are skipped)")
        );
        assert!(error.starts_with(&dir.path().display().to_string()));
    }
}
