//! The kind of training data that a file or a folder is, decided here by content and name for all
//! that reads data. Other files are errors that name them.
//!
//! | path | kind |
//! |---|---|
//! | first bytes of an archive, a model, an image, ... | an error ([`foreign`]) |
//! | parquet, by its first bytes or `.parquet` | examples |
//! | an array of numpy, or `.bin` | tokens ([`TokenFormat`]) |
//! | UTF-16, or a 0 among the first bytes | an error |
//! | `.jsonl`, `.ndjson`, `.json` | examples; other content is an error |
//! | another name | text; an error if its first row is an example |
//! | a folder of files of examples, and a README and the like | examples |
//! | another folder | its text files |

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::examples::{Form, Format, RowFile};
use super::start::Start;
use super::token_format::TokenFormat;
use super::{DataError, DataSource, FolderFiles, foreign, outputs};

/// The kind of data, and the reason.
#[derive(Debug)]
pub struct DataKind {
    pub(super) content: Content,
    /// Why, as the end of a sentence.
    pub why: String,
    /// Notes for the user, one line each.
    pub(super) notices: Vec<String>,
}

#[derive(Debug)]
pub(super) enum Content {
    /// Rows, each an example.
    Examples(Vec<RowFile>),
    Tokens(TokenFormat),
    Text,
    /// The text files of a folder.
    Texts,
}

impl DataKind {
    fn new(content: Content, why: impl Into<String>) -> Self {
        Self {
            content,
            why: why.into(),
            notices: Vec::new(),
        }
    }

    /// The kind of the data that a source names.
    ///
    /// # Errors
    /// There is no such data, it is not data, or it cannot be read.
    pub fn of(source: &DataSource) -> Result<Self, DataError> {
        let Some(path) = &source.path else {
            return Ok(Self::new(Content::Texts, "no data was passed"));
        };
        let metadata = fs::metadata(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => DataError::Missing { path: path.clone() },
            _ => DataError::Read {
                path: path.clone(),
                source,
            },
        })?;

        if metadata.is_file() {
            return of_file(path);
        }
        if !metadata.is_dir() {
            return Err(DataError::NoFile { path: path.clone() });
        }
        match source.files {
            FolderFiles::AsDefault => Ok(Self::new(Content::Texts, "it was the current folder")),
            FolderFiles::All => of_folder(path),
        }
    }

    /// The kind in a word or two.
    pub fn name(&self) -> &'static str {
        match &self.content {
            Content::Examples(_) => "examples",
            Content::Tokens(_) => "tokens",
            Content::Text => "text",
            Content::Texts => "the text files of a folder",
        }
    }
}

/// Whether a path is a file of tokens, by its first bytes or its name.
///
/// # Errors
/// It cannot be read.
pub fn has_tokens(path: &Path) -> Result<bool, DataError> {
    Ok(path.is_file() && is_of_tokens(path, &Start::read(path)?))
}

fn is_of_tokens(path: &Path, start: &Start) -> bool {
    foreign::is_numpy(start) || extension(path) == "bin"
}

fn refused(path: &Path, foreign: foreign::Foreign) -> DataError {
    DataError::Foreign {
        path: path.to_owned(),
        what: foreign.what.to_owned(),
        remedy: foreign.remedy.replace("FILE", &path.display().to_string()),
    }
}

/// The extension of a name, in lower case.
fn extension(path: &Path) -> String {
    let extension = path.extension().unwrap_or_default();
    extension.to_string_lossy().to_lowercase()
}

/// Whether a name is that of rows of JSON.
fn is_json_name(path: &Path) -> bool {
    ["jsonl", "ndjson", "json"].contains(&extension(path).as_str())
}

/// Whether a name is that of rows of JSON, one a line.
pub(super) fn is_lines_name(path: &Path) -> bool {
    ["jsonl", "ndjson"].contains(&extension(path).as_str())
}

/// The format of a file of rows, by its first bytes or by `name`; `None` for other files.
fn row_format(name: &Path, start: &Start) -> Option<Format> {
    if foreign::is_parquet(start) || extension(name) == "parquet" {
        return Some(Format::Parquet);
    }
    is_json_name(name).then_some(Format::Json)
}

/// The name of a file in lower case.
fn lower_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().to_lowercase()
}

fn of_file(path: &Path) -> Result<DataKind, DataError> {
    let start = Start::read(path)?;
    if start.file_bytes == 0 {
        return Err(DataError::Empty {
            path: path.to_owned(),
        });
    }
    if let Some(foreign) = foreign::of(&start) {
        return Err(refused(path, foreign));
    }

    if is_of_tokens(path, &start) {
        let format = TokenFormat::of(path, &start)?;
        let why = format.by;
        return Ok(DataKind::new(Content::Tokens(format), why));
    }
    if let Some(format) = row_format(path, &start) {
        let path = path.to_owned();
        return of_rows(RowFile { path, format }, &start);
    }
    if let Some(foreign) = foreign::not_text(&start) {
        return Err(refused(path, foreign));
    }

    if let Some(form) = Form::of_start(path, &start.bytes) {
        return Err(DataError::Foreign {
            path: path.to_owned(),
            what: format!(
                "rows of JSON with {}, in a file with the name of text",
                form.keys()
            ),
            remedy:
                "rename it to NAME.jsonl; to train on the JSON itself, pass a folder with the file"
                    .to_owned(),
        });
    }
    Ok(of_text(path))
}

fn of_rows(file: RowFile, start: &Start) -> Result<DataKind, DataError> {
    check_rows(&file, start)?;
    let (line, form) = file.first(&start.bytes)?;
    let why = match file.format {
        Format::Json => format!("line {line} has {}", form.keys()),
        Format::Parquet => format!("the first row of the parquet file has {}", form.keys()),
    };
    Ok(DataKind::new(Content::Examples(vec![file]), why))
}

fn of_text(path: &Path) -> DataKind {
    let mut kind = DataKind::new(
        Content::Text,
        "it is text, and its name is not that of rows (.jsonl, .json) or of tokens (.bin)",
    );
    if ["csv", "tsv"].contains(&extension(path).as_str()) {
        kind.notices.push(format!(
            "{}: a table is read as text: its header, separators and quotes are trained, too; for rows, write .jsonl",
            path.display()
        ));
    }
    kind
}

/// The entries of a folder of data, by what they are for.
#[derive(Default)]
struct Entries {
    rows: Vec<RowFile>,
    /// The beginning of the first of [`Self::rows`].
    start: Option<Start>,
    /// A README and the like.
    beside: Vec<PathBuf>,
    others: Vec<PathBuf>,
    folders: Vec<PathBuf>,
}

impl Entries {
    fn of(dir: &Path) -> Result<Self, DataError> {
        let mut entries = Self::default();
        for path in visible(dir)? {
            if path.is_dir() && !outputs::is_output_folder(&path) {
                entries.folders.push(path);
            } else if path.is_dir() || is_beside_data(&path) {
                entries.beside.push(path);
            } else if let Some((file, start)) = packed_or_plain(&path)? {
                entries.start.get_or_insert(start);
                entries.rows.push(file);
            } else {
                entries.others.push(path);
            }
        }
        Ok(entries)
    }
}

/// The entries of a folder that are not hidden, in order.
fn visible(dir: &Path) -> Result<Vec<PathBuf>, DataError> {
    let failed = |source| DataError::Unreadable {
        path: dir.to_owned(),
        source,
    };
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

/// A file of rows and its beginning. A packed one is an error once it is read, as it is alone.
fn packed_or_plain(path: &Path) -> Result<Option<(RowFile, Start)>, DataError> {
    let name = lower_name(path);
    let packed = [".gz", ".zst", ".bz2", ".xz"]
        .iter()
        .find_map(|end| name.strip_suffix(end));
    let plain = Path::new(packed.unwrap_or(&name));
    let may_have_rows = is_json_name(plain) || extension(plain) == "parquet";
    if !may_have_rows || !path.is_file() {
        return Ok(None);
    }

    let start = Start::read(path)?;
    let Some(format) = row_format(plain, &start) else {
        return Ok(None);
    };
    // Documents of text folders are often JSON; rows are arrays, or an object a line.
    let is_document = extension(path) == "json"
        && foreign::of(&start).is_none()
        && !RowFile::starts_with_row(path, &start.bytes);
    let path = path.to_owned();
    Ok((!is_document).then_some((RowFile { path, format }, start)))
}

/// Whether a file is one that stands beside data: a README, a license, the description of a data
/// set of Hugging Face.
pub(super) fn is_beside_data(path: &Path) -> bool {
    const STEMS: [&str; 8] = [
        "readme",
        "license",
        "licence",
        "copying",
        "notice",
        "citation",
        "changelog",
        "authors",
    ];
    const NAMES: [&str; 4] = [
        "dataset_info.json",
        "dataset_infos.json",
        "dataset_dict.json",
        "state.json",
    ];
    let name = lower_name(path);
    let stem = name.split('.').next().unwrap_or_default();
    STEMS.contains(&stem) || NAMES.contains(&name.as_str()) || extension(path) == "md"
}

fn of_folder(dir: &Path) -> Result<DataKind, DataError> {
    let texts = || {
        DataKind::new(
            Content::Texts,
            "it is a folder, and not of rows (.jsonl) alone",
        )
    };
    let entries = Entries::of(dir)?;
    let (Some(first), Some(start)) = (entries.rows.first(), &entries.start) else {
        return Ok(texts());
    };

    let form = check_rows(first, start).and_then(|()| first.first(&start.bytes));
    let other = match (entries.others.first(), entries.folders.first()) {
        (None, None) => return of_row_files(&entries, &name(&first.path), form?.1),
        // A program, or all files of a study.
        (Some(_), Some(_)) => return Ok(texts()),
        (Some(other), None) | (None, Some(other)) => other,
    };
    if form.is_err() && first.format == Format::Json {
        return Ok(texts());
    }
    Err(DataError::MixedFolder {
        path: dir.to_owned(),
        rows: name(&first.path),
        other: name(other),
    })
}

/// A folder of files of rows alone, of which `first` has the form `form`.
fn of_row_files(entries: &Entries, first: &str, form: Form) -> Result<DataKind, DataError> {
    for file in &entries.rows {
        check_rows(file, &Start::read(&file.path)?)?;
    }

    let keys = form.keys();
    let why = format!("all of its files are rows, and the first row of {first} has {keys}");
    let left_out = entries.beside.iter().map(|path| {
        let name = name(path);
        format!("left out of the data: {name} (beside files of rows)")
    });
    Ok(DataKind {
        notices: left_out.collect(),
        ..DataKind::new(Content::Examples(entries.rows.clone()), why)
    })
}

fn name(path: &Path) -> String {
    let name = path.file_name().unwrap_or(OsStr::new("."));
    name.to_string_lossy().into_owned()
}

/// Checks that a file of rows is not an archive or the like.
fn check_rows(file: &RowFile, start: &Start) -> Result<(), DataError> {
    let not_text = match file.format {
        Format::Json => foreign::not_text(start),
        Format::Parquet => None,
    };
    match foreign::of(start).or(not_text) {
        Some(foreign) => Err(refused(&file.path, foreign)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use integration_tests::{Files, Folder};

    use super::*;

    /// The kind of a path in a folder and the reason, or the error without the folder's path.
    fn kind(folder: &Folder, path: &Path) -> Result<(&'static str, String, Vec<String>), String> {
        let folder = folder.display().to_string();
        let kind = DataKind::of(&DataSource::at(path)).map_err(|e| {
            e.to_string()
                .replace(&format!("{folder}/"), "")
                .replace(&folder, "DIR")
        })?;
        Ok((kind.name(), kind.why, kind.notices))
    }

    /// The kind of a file of this name and content.
    fn of(
        folder: &Folder,
        name: &str,
        content: impl AsRef<[u8]>,
    ) -> Result<(&'static str, String), String> {
        let path = folder.write(name, content);
        let (kind, why, _) = kind(folder, &path)?;
        Ok((kind, why))
    }

    const ROW: &str = "{\"prompt\": \"a\", \"completion\": \"b\"}\n";

    #[test]
    fn files_go_by_content_and_name() {
        let folder = &Folder::on_disk();
        let rows = |line: u32| {
            (
                "examples",
                format!("line {line} has `prompt` and `completion`"),
            )
        };
        for (name, content, line) in [
            ("a.jsonl", ROW.to_owned(), 1),
            ("a.JSONL", ROW.to_owned(), 1),
            ("a.ndjson", format!("\r\n{ROW}"), 2),
            ("a.json", ROW.to_owned(), 1),
            ("a.json", format!("[\n{ROW}]"), 2),
            ("a.jsonl", format!("[{ROW}]"), 1),
            ("a.jsonl", format!("\u{feff}{ROW}"), 1),
        ] {
            assert_eq!(
                of(folder, name, &content),
                Ok(rows(line)),
                "{name}: {content}"
            );
        }

        let tokens = ("tokens", "u16 by its name".to_owned());
        assert_eq!(of(folder, "a.bin", [1, 2, 3, 4]), Ok(tokens));
        for (name, content) in [
            ("a.txt", "to be"),
            ("a.py", "{}\n"),
            ("a.log", "{\"step\": 1}\n{\"step\": 2}\n"),
            ("a.txt", "[1, 2]"),
            ("a.md", "# a title"),
            ("a.csv", "a,b\n"),
            ("latin1.txt", "caf\u{e9}"),
        ] {
            let (kind, why) = of(folder, name, content).unwrap();
            assert_eq!(kind, "text", "{name}");
            assert!(why.starts_with("it is text, and its name is not"), "{why}");
        }
        let (_, _, notices) = kind(folder, &folder.write("a.csv", "a,b\n")).unwrap();
        assert!(
            notices[0].contains("a.csv: a table is read as text"),
            "{notices:?}"
        );
    }

    #[test]
    fn other_content_is_an_error() {
        let folder = &Folder::on_disk();
        let forms = "and must have `prompt` and `completion`, `messages`, `conversations` of `from` and `value` \
                     (ShareGPT), `instruction` and `output` (Alpaca), or `text`; rename the keys of the data";
        let keys = format!("a.jsonl, line 1: it has the keys `question`, `answer`, {forms}");
        let cases: &[(&str, &[u8], &str)] = &[
            (
                "a.jsonl",
                b"{\"question\": \"a\", \"answer\": \"b\"}",
                &keys,
            ),
            (
                "a.jsonl",
                b"# a comment\n{}",
                "a.jsonl, line 1: a comment, which JSON does not have",
            ),
            ("a.json", b"\n// a comment\n{}", "a.json, line 2: a comment"),
            (
                "a.jsonl",
                b"to be",
                "a.jsonl, line 1: not a JSON object at column 2",
            ),
            ("a.jsonl", b" \n\n", "a.jsonl: the data file is empty"),
            ("a.json", b"[]", "a.json: the data file is empty"),
            (
                "a.json",
                b"[1, 2]",
                "a.json, line 1: not a JSON object at column 1",
            ),
            (
                "a.json",
                b"{\n \"version\": 1,\n \"rows\": [\n {\"text\": \"a\"}]}",
                "a.json, line 1: an object over several lines: each line must be one row, as `jq -c '.[\"rows\"][]' FILE > \
                 ROWS.jsonl` writes those under `rows`",
            ),
            (
                "a.json",
                b"{\n \"text\": \"a\"\n}\n",
                "a.json, line 1: an object over several lines",
            ),
            (
                "a.json",
                b"{\"data\": [{\"text\": \"a\"}]}",
                "a.json, line 1: it has the key `data`, and must have `prompt` and",
            ),
            (
                "a.jsonl",
                b"\xff\xfe{\0}\0",
                "a.jsonl: UTF-16 text, which is not read as data; convert it",
            ),
            (
                "a.txt",
                b"\xff\xfea\0b\0",
                "a.txt: UTF-16 text, which is not read as data",
            ),
            (
                "a.txt",
                b"ab\0",
                "a.txt: a binary file (with bytes that are 0)",
            ),
            (
                "a.jsonl.gz",
                b"\x1f\x8b\x08\0",
                "a.jsonl.gz: a gzip archive, which is not read as data; unpack it: gzip -dk a.jsonl.gz",
            ),
            (
                "a.jsonl",
                b"\x28\xb5\x2f\xfd\0",
                "a.jsonl: a zstd archive, which is not read as data",
            ),
            (
                "a.bin",
                b"PK\x03\x04\x14\0",
                "a.bin: a zip archive (also .npz, .docx, models of PyTorch)",
            ),
            (
                "a.parquet",
                b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
                "a.parquet: a pointer of Git LFS in place of the file, which is not read as data; download the file: git lfs",
            ),
            (
                "a.txt",
                ROW.as_bytes(),
                "a.txt: rows of JSON with `prompt` and `completion`, in a file with the name of text",
            ),
            (
                "a",
                b"[\n{\"text\": \"a\"}]",
                "a: rows of JSON with `text`, in a file with the name of text",
            ),
            ("a.bin", b"", "a.bin: the data file is empty"),
        ];
        for (name, content, expected) in cases {
            let error = of(folder, name, content).unwrap_err();
            assert!(error.starts_with(expected), "{name}: {error}");
        }
        let missing = kind(folder, &folder.join("b.txt")).unwrap_err();
        assert_eq!(missing, "b.txt: no such file or folder");
    }

    #[test]
    fn folder_of_rows_may_have_a_readme() {
        let folder = &Folder::on_disk();
        folder.write("b.jsonl", ROW);
        folder.write("a.json", format!("[{ROW}]"));
        folder.write("README.md", "rows");
        folder.write("LICENSE", "MIT");
        folder.write("dataset_info.json", "{}");
        folder.write(".gitattributes", "*");
        let (name, why, notices) = kind(folder, folder).unwrap();
        assert_eq!(name, "examples");
        assert_eq!(
            why,
            "all of its files are rows, and the first row of a.json has `prompt` and `completion`"
        );
        let left_out = |name| format!("left out of the data: {name} (beside files of rows)");
        assert_eq!(
            notices,
            ["LICENSE", "README.md", "dataset_info.json"].map(left_out)
        );

        folder.write("c.jsonl.gz", b"\x1f\x8b\x08\0");
        let error = kind(folder, folder).unwrap_err();
        assert!(error.starts_with("c.jsonl.gz: a gzip archive"), "{error}");
        fs::remove_file(folder.join("c.jsonl.gz")).unwrap();

        folder.write("notes.txt", "text");
        let error = kind(folder, folder).unwrap_err();
        assert!(
            error.starts_with(
                "DIR: the folder has files of examples (a.json) and other data (notes.txt)"
            ),
            "{error}"
        );
        // The folders of a program.
        folder.write("src/main.rs", "fn main() {}");
        assert_eq!(
            kind(folder, folder).unwrap().0,
            "the text files of a folder"
        );
        fs::remove_file(folder.join("notes.txt")).unwrap();
        let error = kind(folder, folder).unwrap_err();
        assert!(error.contains("and other data (src): pass"), "{error}");
        // Not the checkpoints of a run.
        fs::remove_dir_all(folder.join("src")).unwrap();
        folder.write("saves/manifest.json", "{\"format\": \"zero-ckpt\"}");
        let (name, _, notices) = kind(folder, folder).unwrap();
        assert_eq!(name, "examples");
        assert_eq!(notices[3], left_out("saves"));
    }

    #[test]
    fn documents_of_json_are_text_in_folders() {
        let folder = &Folder::on_disk();
        folder.write("a.json", "{\n \"text\": \"a\"\n}\n");
        assert_eq!(
            kind(folder, folder).unwrap().0,
            "the text files of a folder"
        );
        folder.write("b.jsonl", "{\"label\": 1}\n");
        assert_eq!(
            kind(folder, folder).unwrap().0,
            "the text files of a folder"
        );
        fs::remove_file(folder.join("a.json")).unwrap();
        let error = kind(folder, folder).unwrap_err();
        assert!(
            error.starts_with("b.jsonl, line 1: it has the key `label`"),
            "{error}"
        );
    }
}
