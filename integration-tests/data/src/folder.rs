//! The text files of a folder, in an order that does not depend on the machine.
//!
//! The entries of a folder are ordered by the bytes of their names, and what is not data is decided
//! by names and contents alone: equal folders give equal texts, whatever their paths, the locale or
//! the order in which files were written. A file that cannot be read is an error, since on one
//! machine of a cluster it would give other data.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use ignore::{DirEntry, WalkBuilder};
use indicatif::HumanCount;

use super::corpus::TextFile;
use super::kind::{is_beside_data, is_lines_name};
use super::text_file::{FileContent, Reason, Scope, read_file, scan_file};
use super::{DataError, outputs};

/// Maximum number of files that [`Documents::notices`] names.
const NAMED_FILES: usize = 10;

/// Names of version control, whose contents differ between clones of the same files.
const VERSION_CONTROL: [&str; 4] = [".git", ".hg", ".svn", ".jj"];

/// A file or folder that is not data.
#[derive(Debug)]
struct LeftOut {
    path: PathBuf,
    reason: Reason,
    bytes: u64,
}

/// The text files of a folder.
pub(super) struct Documents<T> {
    /// Paths and texts, by path.
    pub(super) texts: Vec<(PathBuf, T)>,
    left_out: Vec<LeftOut>,
}

impl<T> Default for Documents<T> {
    fn default() -> Self {
        Self {
            texts: Vec::new(),
            left_out: Vec::new(),
        }
    }
}

impl<T> Documents<T> {
    /// Number of files and folders that are not data.
    pub(super) fn left_out(&self) -> usize {
        self.left_out.len()
    }

    /// The numbers of texts and of what is left out, and the notices.
    pub(super) fn counted(&mut self, root: &Path) -> (usize, usize, Vec<String>) {
        (self.texts.len(), self.left_out(), self.notices(root))
    }

    /// The largest files and folders below `root` that are not data, and the sum of the others, one
    /// line each.
    pub(super) fn notices(&mut self, root: &Path) -> Vec<String> {
        self.left_out
            .sort_by(|a, b| (Reverse(a.bytes), &a.path).cmp(&(Reverse(b.bytes), &b.path)));
        let (named, others) = self.left_out.split_at(self.left_out.len().min(NAMED_FILES));

        let mut lines: Vec<String> = named.iter().map(|left| left.describe(root)).collect();
        if !others.is_empty() {
            let bytes = others.iter().map(|left| left.bytes).sum();
            let mut reasons = BTreeMap::<&str, u64>::new();
            others
                .iter()
                .for_each(|left| *reasons.entry(left.reason.kind()).or_default() += 1);
            let reasons: Vec<String> = reasons
                .into_iter()
                .map(|(kind, count)| format!("{} {kind}", HumanCount(count)))
                .collect();
            let count = HumanCount(others.len() as u64);
            let bytes = HumanCount(bytes);
            lines.push(format!(
                "left out of the data: {count} more, {bytes} bytes ({})",
                reasons.join(", ")
            ));
        }

        lines
    }
}

impl LeftOut {
    fn describe(&self, root: &Path) -> String {
        let path = self.path.strip_prefix(root).unwrap_or(&self.path);
        format!(
            "left out of the data: {}, {} bytes ({})",
            path.display(),
            HumanCount(self.bytes),
            self.reason
        )
    }
}

impl<T> Documents<T> {
    /// Checks that the texts of the folder `root` are data, and not what stands beside data of
    /// another kind. Returns a notice if rows of JSON are among them.
    ///
    /// # Errors
    /// They are not.
    pub(super) fn check(&mut self, root: &Path) -> Result<Option<String>, DataError> {
        let below = |path: &Path| path.strip_prefix(root).unwrap_or(path).to_owned();
        let paths = || self.texts.iter().map(|(path, _)| path.as_path());
        let mut data = paths().filter(|path| !is_beside_data(path)).peekable();
        let first_rows = paths().find(|path| is_lines_name(path)).map(below);

        let has_data = data.peek().is_some();
        if let (true, true, Some(rows)) = (has_data, data.all(is_lines_name), first_rows.clone()) {
            return Err(DataError::NestedRows {
                path: root.to_owned(),
                rows,
            });
        }
        let only = paths().next().map(below);
        let is_binary = |left: &LeftOut| left.reason.kind() == "binary";
        if let (false, Some(only)) = (has_data, only)
            && self.left_out.iter().any(is_binary)
        {
            return Err(DataError::OnlyDescription {
                path: root.to_owned(),
                only: only.display().to_string(),
                left_out: self.notices(root).remove(0),
            });
        }

        Ok(first_rows.map(|rows| {
            format!(
                "{} is read as text, with its JSON, as all files of the folder are; to train on its rows, pass the file",
                rows.display()
            )
        }))
    }
}

/// Reads the text files under `root` that are data in `scope`.
///
/// In any scope, symbolic links to folders, binary files, files that are not UTF-8, version
/// control, and what runs write are left out; in the default folder symbolic links to files, too.
///
/// # Errors
/// A file or folder that cannot be read, a symbolic link to nothing, too many files, or no text.
pub(super) fn read(root: &Path, scope: Scope) -> Result<Documents<String>, DataError> {
    read_with(root, scope, |path| read_file(path, scope))
}

/// As [`read`], but only scans the files, in bounded memory.
///
/// # Errors
/// As [`read`].
pub(super) fn scan(root: &Path, scope: Scope) -> Result<Documents<TextFile>, DataError> {
    read_with(root, scope, |path| scan_file(path, scope))
}

fn read_with<T>(
    root: &Path,
    scope: Scope,
    mut content: impl FnMut(&Path) -> Result<FileContent<T>, DataError>,
) -> Result<Documents<T>, DataError> {
    let mut documents = Documents::default();
    let files = match scope {
        Scope::Default { most_files } => default_files(root, most_files)?,
        Scope::Whole => whole_files(root, &mut documents.left_out)?,
    };

    for path in files {
        match content(&path)? {
            FileContent::Text(text) => documents.texts.push((path, text)),
            FileContent::Blank => {}
            FileContent::Other { reason, bytes } => documents.left_out.push(LeftOut {
                path,
                reason,
                bytes,
            }),
        }
    }

    if scope != Scope::Whole {
        // A run's own outputs are left out of the default folder without mention: each run adds
        // some.
        documents
            .left_out
            .retain(|left| left.reason != Reason::Output);
    }

    if documents.texts.is_empty() {
        let notices = documents.notices(root);
        return Err(DataError::NoText {
            path: root.to_owned(),
            left_out: notices.into_iter().next(),
        });
    }

    Ok(documents)
}

/// The files of the default folder, in order.
fn default_files(root: &Path, most: usize) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
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
        let entry = entry.map_err(|error| unreadable(root, error))?;
        // A .gitignore that cannot be read; an invalid pattern in it is the same everywhere.
        if let Some(error) = entry.error().filter(|error| error.is_io()) {
            return Err(unreadable(root, error.clone()));
        }
        match entry.file_type() {
            Some(kind) if kind.is_symlink() => {
                check_link(entry.path())?;
            }
            Some(kind) if kind.is_file() => files.push(entry.into_path()),
            _ => {}
        }
        if files.len() > most {
            return Err(DataError::TooManyHere {
                path: root.to_owned(),
                limit: most,
            });
        }
    }

    Ok(files)
}

/// Whether an entry is a folder of build files, a checkpoint or a model.
fn is_skipped_folder(entry: &DirEntry) -> bool {
    let is_build = || entry.file_name() == "target" || entry.path().join("CACHEDIR.TAG").exists();
    entry.file_type().is_some_and(|t| t.is_dir())
        && (is_build() || outputs::is_output_folder(entry.path()))
}

fn unreadable(root: &Path, error: ignore::Error) -> DataError {
    let path = path_of(&error).unwrap_or(root).to_owned();
    let text = error.to_string();
    let source = error
        .into_io_error()
        .unwrap_or_else(|| io::Error::other(text));
    DataError::Unreadable { path, source }
}

/// The path that an error of the walk is about.
fn path_of(error: &ignore::Error) -> Option<&Path> {
    match error {
        ignore::Error::WithPath { path, .. } => Some(path),
        ignore::Error::WithLineNumber { err, .. } | ignore::Error::WithDepth { err, .. } => {
            path_of(err)
        }
        ignore::Error::Partial(errors) => errors.iter().find_map(path_of),
        _ => None,
    }
}

/// All files under `root`, in order. Adds what is no file of data to `left_out`.
fn whole_files(root: &Path, left_out: &mut Vec<LeftOut>) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let failed = |source| DataError::Unreadable {
            path: folder.clone(),
            source,
        };
        for entry in fs::read_dir(&folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let path = entry.path();
            let kind = entry.file_type().map_err(|source| DataError::Unreadable {
                path: path.clone(),
                source,
            })?;
            let target = if kind.is_symlink() {
                Some(check_link(&path)?)
            } else {
                None
            };
            let reason = if VERSION_CONTROL
                .iter()
                .any(|name| entry.file_name() == *name)
            {
                Reason::VersionControl
            } else if outputs::is_of_saves(&path) {
                Reason::Output
            } else if target.as_ref().is_some_and(fs::Metadata::is_dir) {
                Reason::FolderLink
            } else if target.as_ref().is_some_and(fs::Metadata::is_file) {
                files.push(path);
                continue;
            } else if kind.is_dir() && outputs::is_output_folder(&path) {
                Reason::OutputFolder
            } else if kind.is_dir() {
                folders.push(path);
                continue;
            } else if kind.is_file() {
                files.push(path);
                continue;
            } else {
                Reason::NoFile
            };
            let bytes = if kind.is_dir() {
                bytes_below(&path)
            } else {
                file_bytes(&path)
            };
            left_out.push(LeftOut {
                path,
                reason,
                bytes,
            });
        }
    }

    files.sort();
    Ok(files)
}

/// The target of a symbolic link. A link to nothing is a file that is missing here.
fn check_link(path: &Path) -> Result<fs::Metadata, DataError> {
    match fs::metadata(path) {
        Ok(target) => Ok(target),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(DataError::DanglingLink {
            path: path.to_owned(),
        }),
        Err(source) => Err(DataError::Unreadable {
            path: path.to_owned(),
            source,
        }),
    }
}

/// The bytes of a file, for information.
fn file_bytes(path: &Path) -> u64 {
    fs::symlink_metadata(path)
        .ok()
        .filter(fs::Metadata::is_file)
        .map_or(0, |metadata| metadata.len())
}

/// The bytes of all files below a folder, for information.
fn bytes_below(folder: &Path) -> u64 {
    let mut bytes = 0;
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                _ => bytes += file_bytes(&entry.path()),
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use integration_tests::{Files, Folder, Printed};

    use super::super::text_file::MAX_DEFAULT_FILE_BYTES;
    use super::*;

    const DEFAULT: Scope = Scope::Default { most_files: 1000 };

    /// The texts of a folder, by their paths below it, and the notices.
    fn read_below(root: &Path, scope: Scope) -> (Vec<(String, String)>, Vec<String>) {
        let mut documents = read(root, scope).unwrap();
        let below = |path: &Path| path.strip_prefix(root).unwrap().display().to_string();
        let texts = documents
            .texts
            .iter()
            .map(|(path, text)| (below(path), text.clone()))
            .collect();
        (texts, documents.notices(root))
    }

    #[test]
    fn default_folder_is_filtered() {
        let dir = &Folder::on_disk();
        dir.write("b.txt", b"second\n");
        dir.write("a.md", b"first");
        dir.write("sub/c.rs", b"third\n");
        dir.write("blank.txt", b" \n\n");
        dir.write(".hidden", b"no");
        dir.write(".git/config", b"no");
        dir.write("target/out.txt", b"no");
        dir.write("sub/target/out.txt", b"no");
        dir.write("cache/CACHEDIR.TAG", b"no");
        dir.write("cache/x.txt", b"no");
        dir.write(".gitignore", b"ignored.txt\n/deep/\n");
        dir.write("ignored.txt", b"no");
        dir.write("deep/x.txt", b"no");
        dir.write("binary", b"no\0");
        dir.write("latin1.txt", b"caf\xe9");
        dir.write("large.txt", vec![b'x'; MAX_DEFAULT_FILE_BYTES as usize + 1]);
        dir.write("limit.txt", vec![b'y'; MAX_DEFAULT_FILE_BYTES as usize]);
        std::os::unix::fs::symlink(dir.join("a.md"), dir.join("link.md")).unwrap();

        let documents = read(dir, DEFAULT).unwrap();
        let starts: Vec<&str> = documents.texts.iter().map(|(_, text)| &text[..6]).collect();
        assert_eq!(starts, ["first\n", "second", "yyyyyy", "third\n"]);
        assert_eq!(documents.left_out(), 3, "binary, latin1.txt, large.txt");
    }

    #[test]
    fn named_folder_is_whole() {
        let dir = &Folder::on_disk();
        let large = vec![b'x'; MAX_DEFAULT_FILE_BYTES as usize + 1];
        dir.write("large.txt", &large);
        dir.write(".gitignore", b"ignored.txt\n");
        dir.write("ignored.txt", b"ignored");
        dir.write(".hidden", b"hidden");
        dir.write("target/a.txt", b"built");
        dir.write("cache/CACHEDIR.TAG", b"tag");
        dir.write("blank.txt", b" \n");
        dir.write("binary", [7, 0, 7, 7]);
        dir.write("latin1.txt", b"caf\xe9");
        dir.write(".git/HEAD", b"ref: x");
        dir.write("checkpoint/manifest.json", b"{\"format\": \"zero-ckpt\"}");
        dir.write("latest", b"step-00000003 0123456789abcdef\n");
        dir.write("run/.lock", b"process 7\n");
        dir.write("run/.staging/step-00000003.save", b"{}");
        std::os::unix::fs::symlink("large.txt", dir.join("link")).unwrap();
        std::os::unix::fs::symlink("target", dir.join("folder link")).unwrap();

        let (texts, notices) = read_below(dir, Scope::Whole);
        let names: Vec<&str> = texts.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            names,
            [
                ".gitignore",
                ".hidden",
                "cache/CACHEDIR.TAG",
                "ignored.txt",
                "large.txt",
                "link",
                "target/a.txt"
            ]
        );

        assert_eq!(texts[4].1.len(), large.len() + 1);
        assert_eq!(
            notices,
            [
                "latest, 31 bytes (written by a run)",
                "checkpoint, 23 bytes (checkpoints or a model)",
                "run, 12 bytes (checkpoints or a model)",
                ".git, 6 bytes (version control)",
                "binary, 4 bytes (binary)",
                "latin1.txt, 4 bytes (not UTF-8 at byte 3: convert it, such as with iconv)",
                "folder link, 0 bytes (a symbolic link to a folder: pass the folder)",
            ]
            .map(|line| format!("left out of the data: {line}"))
        );
    }

    #[test]
    fn largest_left_out_files_are_named() {
        let dir = &Folder::on_disk();
        dir.write("a.txt", "text");
        for bytes in 1..=12 {
            dir.write(&format!("{bytes}"), vec![0; bytes]);
        }
        let (_, notices) = read_below(dir, Scope::Whole);
        assert_eq!(notices.len(), NAMED_FILES + 1);
        assert_eq!(notices[0], "left out of the data: 12, 12 bytes (binary)");
        assert_eq!(
            notices[NAMED_FILES],
            "left out of the data: 2 more, 3 bytes (2 binary)"
        );
    }

    /// The order of creation and the folder's path change neither texts nor notices.
    #[test]
    fn equal_folders_have_equal_texts() {
        let names = [
            "b.txt",
            "a/b",
            "a.txt",
            "\u{e9}.txt",
            "Z",
            "a b",
            "z",
            "binary",
        ];

        let folder = |names: &mut dyn Iterator<Item = &&str>| {
            let dir = Folder::on_disk();
            for name in names {
                let text = if *name == "binary" { "\0" } else { *name };
                dir.write(name, text);
            }
            dir
        };

        let one = folder(&mut names.iter());
        let other = folder(&mut names.iter().rev());
        for scope in [DEFAULT, Scope::Whole] {
            let read = read_below(&one, scope);
            assert_eq!(read, read_below(&other, scope));
            let order: Vec<&str> = read.0.iter().map(|(name, _)| name.as_str()).collect();
            assert_eq!(
                order,
                ["Z", "a/b", "a b", "a.txt", "b.txt", "z", "\u{e9}.txt"]
            );
        }
    }

    #[test]
    fn unreadable_entry_is_an_error() {
        let dir = &Folder::on_disk();
        dir.write("a.txt", "text");
        let link = dir.join("missing.txt");
        std::os::unix::fs::symlink("/nowhere/missing.txt", &link).unwrap();
        // A file that is gone after it was listed.
        let gone = &dir.join("gone");
        let is_gone = |error: DataError| match error {
            DataError::Unreadable { path, .. } => assert_eq!(&path, gone),
            error => panic!("{error}"),
        };

        for scope in [DEFAULT, Scope::Whole] {
            let error = read(dir, scope).err().unwrap();
            assert!(
                matches!(&error, DataError::DanglingLink { path } if *path == link),
                "{error}"
            );
            is_gone(read_file(gone, scope).err().unwrap());
        }

        is_gone(whole_files(gone, &mut Vec::new()).unwrap_err());
        is_gone(default_files(gone, 10).unwrap_err());
    }

    /// The folder of the checkpoints of a run can be that of the data.
    #[test]
    fn saves_beside_the_data_do_not_change_it() {
        let dir = &Folder::on_disk();
        dir.write("a.txt", "text");
        let before = read_below(dir, Scope::Whole).0;
        for (name, text) in [
            (".lock", "process 7\n"),
            (".staging/step-00000001.save", "{}"),
        ] {
            dir.write(name, text);
        }
        assert_eq!(read_below(dir, Scope::Whole).0, before);
    }

    /// A pipe has no writer, so opening one would wait.
    #[test]
    fn pipes_are_not_opened() {
        let dir = &Folder::on_disk();
        dir.write("a.txt", "text");
        dir.write("loss.svg", "text");
        let sub = dir.join("sub");
        fs::create_dir(&sub).unwrap();
        for pipe in [sub.join("manifest.json"), dir.join("summary.json")] {
            let status = std::process::Command::new("mkfifo")
                .arg(pipe)
                .status()
                .unwrap();
            assert!(status.success());
        }
        for scope in [DEFAULT, Scope::Whole] {
            assert_eq!(read(dir, scope).unwrap().texts.len(), 2);
        }
    }

    #[test]
    fn outputs_of_runs_are_left_out() {
        let dir = &Folder::on_disk();
        dir.write("a.txt", "first\n");
        dir.write(
            "c/step-00000003/manifest.json",
            "{\"format\": \"zero-ckpt\", \"version\": 1}",
        );
        dir.write("c/step-00000003/run.json", "no");
        dir.write("c/latest", "step-00000003 0123456789abcdef\n");
        dir.write("model/config.json", "{}");
        dir.write("model/model.safetensors", "no");
        dir.write(
            "metrics",
            "{\"step\":1,\"loss\":2.5,\"step_ms\":3.0,\"comm_bytes\":{}}\n",
        );
        dir.write(
            "r/summary.json",
            "{\"unigram_loss\": 3.0, \"memory_by_rank\": [], \"steps\": []}",
        );
        dir.write("r/summary.txt", "no");
        dir.write("r/loss.svg", "no");
        dir.write("r/run.json", "no");
        dir.write(
            "out.log",
            "note: a\nnano: 858,880 parameters in fp32, ZeRO stage 3, 4 ranks x 1 thread\n",
        );
        dir.write(
            "err.log",
            "step 1: loss 5.4419, 3,849 tokens/s, 512 tokens, 0s left\n",
        );
        // Of the same names, but not of a run.
        dir.write("other/manifest.json", "second");
        dir.write("other/summary.txt", "third\n");
        dir.write("steps.jsonl", "{\"step\": 4}\n");
        let documents = read(dir, DEFAULT).unwrap();
        let names: Vec<_> = documents
            .texts
            .iter()
            .map(|(path, _)| path.strip_prefix(dir).unwrap())
            .collect();

        assert_eq!(
            names,
            [
                "a.txt",
                "other/manifest.json",
                "other/summary.txt",
                "steps.jsonl"
            ]
            .map(Path::new)
        );

        assert_eq!(documents.left_out(), 0);
    }

    #[test]
    fn folder_named_target_can_be_the_data() {
        let dir = &Folder::on_disk();
        let target = dir.join("target");
        fs::create_dir(&target).unwrap();
        target.write("a.txt", "text");
        for scope in [DEFAULT, Scope::Whole] {
            assert_eq!(
                read(&target, scope).unwrap().texts,
                [(target.join("a.txt"), "text\n".to_owned())]
            );
        }
    }

    #[test]
    fn more_files_than_the_limit_are_an_error() {
        let dir = &Folder::on_disk();
        for name in ["a", "b", "c"] {
            dir.write(name, name);
        }
        assert_eq!(
            read(dir, Scope::Default { most_files: 3 })
                .unwrap()
                .texts
                .len(),
            3
        );
        let error = read(dir, Scope::Default { most_files: 2 })
            .err()
            .unwrap()
            .to_string();
        error.shows(&["more than 2 files: pass --data"]);
    }

    #[test]
    fn folder_without_text_is_an_error() {
        let dir = &Folder::on_disk();
        dir.write("binary", b"\0");
        let error = read(dir, Scope::Whole).err().unwrap().to_string();
        let expected =
            "no text file in this folder; left out of the data: binary, 1 bytes (binary)";
        assert_eq!(error, format!("{}: {expected}", dir.display()));
        let empty = &Folder::on_disk();
        let error = read(empty, Scope::Whole).err().unwrap().to_string();
        assert!(error.ends_with(": no text file in this folder"), "{error}");
    }
}
