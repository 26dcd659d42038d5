//! A file to which a run adds one line a step: `--metrics` and `--csv`. A resumed run appends to it.
//!
//! Nothing is written before the first step. Then the lines of that step and later ones, which a
//! run before the resume wrote, move to a file beside, and a line that a crash cut short is
//! removed: the lines to keep are written to a new file, which replaces the old one by a rename.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufWriter, Write};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use super::aside;
use super::figures::StepFigures;
use crate::error::CliError;
use crate::output::counted;
use crate::paths::replace;
use zero_trainer::RunOptions;

/// The lines of a kind of file.
pub(crate) trait Lines {
    /// The flag that names the file.
    const FLAG: &'static str;
    /// The kind of file, for errors.
    const KIND: &'static str;

    /// The first line, with its newline; empty if there is none.
    fn header() -> String;

    /// Parses a line of any version of this program.
    ///
    /// # Errors
    /// It is no line of this kind of file.
    fn parse(line: &str) -> Result<Line, String>;

    /// Whether `text`, which does not end with a newline, may be the start of a line that a crash
    /// cut short.
    fn is_start(text: &str) -> bool;

    /// The line of a step, without its newline.
    ///
    /// # Errors
    /// It cannot be written as text.
    fn of_step(figures: &StepFigures<'_>) -> io::Result<String>;
}

/// A line of a file.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) step: u64,
    /// The run that wrote it; older versions did not write it.
    pub(crate) run: Option<String>,
}

/// The file of a run, on the rank that writes it.
pub(crate) struct LineFile<L> {
    path: PathBuf,
    /// The file that [`LineFile::new`] opened; its lock excludes other runs. The first step may
    /// replace it.
    _lock: File,
    /// Open from the first step on.
    file: Option<BufWriter<File>>,
    lines: PhantomData<L>,
}

/// Checks that a run may write to `path`: the file is new or empty, or a run resumed at
/// `first_step` continues it. Returns notes about the lines that the run will move, and about steps
/// between its lines and those in the file.
///
/// # Errors
/// As [`check_lines`].
pub(crate) fn check<L: Lines>(
    path: &Path,
    options: &RunOptions,
    first_step: u64,
) -> Result<Vec<String>, CliError> {
    let steps = check_run::<L>(path, options)?;
    if first_step >= options.steps {
        return Ok(Vec::new());
    }
    let (mut notes, name) = (Vec::new(), path.display());
    let later = steps.iter().filter(|step| **step > first_step).count();

    if later > 0 {
        notes.push(format!(
            "{name}: {} after step {first_step} to be moved to {}",
            counted(later as u64, "line"),
            aside::path(path, first_step).display()
        ));
    }

    if let Some(last) = steps
        .iter()
        .filter(|step| **step <= first_step)
        .max()
        .filter(|last| **last < first_step)
    {
        notes.push(format!(
            "{name}: it has no lines of steps {} to {first_step}",
            last + 1
        ));
    }

    Ok(notes)
}

/// Checks that a resumed run may continue the file that its record names, and no flag: at least one
/// line is there, and every line is of one of `runs`.
///
/// # Errors
/// The reason.
pub(crate) fn check_recorded<L: Lines>(path: &Path, runs: &[&str]) -> Result<(), String> {
    // A link may lead anywhere.
    if !path
        .symlink_metadata()
        .is_ok_and(|metadata| metadata.is_file())
    {
        return Err("no file is there now".to_owned());
    }
    let text = fs::read(path).map_err(|e| format!("the file cannot be read: {e}"))?;
    let lines = parse::<L>(&text).map_err(|_| format!("the file is no {} now", L::KIND))?;
    let is_own = |line: &Line| line.run.as_deref().is_some_and(|run| runs.contains(&run));
    if lines.is_empty() || !lines.iter().all(|(line, _)| is_own(line)) {
        return Err("the file has lines of another run, or no lines".to_owned());
    }
    Ok(())
}

/// As [`check_lines`], for a run with these options.
fn check_run<L: Lines>(path: &Path, options: &RunOptions) -> Result<Vec<u64>, CliError> {
    check_lines::<L>(path, options.resume.is_some().then_some(&*options.runs()))
}

/// Checks that the file is new or empty, or that `resumed` has the runs of all lines. Lines of
/// older versions have no run. Returns the steps of the lines.
///
/// # Errors
/// Exit code 2; the file stays as it is.
pub(super) fn check_lines<L: Lines>(
    path: &Path,
    resumed: Option<&[&str]>,
) -> Result<Vec<u64>, CliError> {
    let usage = |why: String| Err(usage!("{} {}: {why}", L::FLAG, path.display()));

    let text = match path.metadata() {
        // Such as a pipe or /dev/null.
        Ok(meta) if !meta.is_file() && !meta.is_dir() => return Ok(Vec::new()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        _ => match fs::read(path) {
            Ok(text) => text,
            Err(e) => return usage(format!("failed to read the file: {e}")),
        },
    };

    let lines = match parse::<L>(&text) {
        Ok(lines) => lines,
        Err(why) => {
            return usage(format!(
                "not a {} of `zero train` ({why}); name another file",
                L::KIND
            ));
        }
    };

    let runs: BTreeSet<&str> = lines
        .iter()
        .filter_map(|(line, _)| line.run.as_deref())
        .collect();
    let names = runs.iter().copied().collect::<Vec<_>>().join(", ");

    match resumed {
        None if !text.is_empty() => usage(format!(
            "the file holds {} steps of another run{}; continue that run with --resume, or name another file",
            lines.len(),
            if names.is_empty() {
                String::new()
            } else {
                format!(" ({names})")
            }
        )),
        Some(resumed) if !runs.iter().all(|run| resumed.contains(run)) => usage(format!(
            "the file holds steps of another run than the resumed one ({names}); name another file"
        )),
        _ => Ok(lines.iter().map(|(line, _)| line.step).collect()),
    }
}

/// The complete lines of a file, parsed and as they are. A last line that a crash cut short
/// is left out.
pub(super) fn parse<L: Lines>(bytes: &[u8]) -> Result<Vec<(Line, &str)>, String> {
    let text = std::str::from_utf8(bytes).map_err(|e| e.to_string())?;
    // A file system may fill the end of a file with zeros after a power failure.
    let text = text.trim_end_matches('\0');
    let header = L::header();
    let Some(body) = text.strip_prefix(&*header) else {
        let is_cut_short = header.starts_with(text);
        return if is_cut_short {
            Ok(Vec::new())
        } else {
            Err(format!("line 1 is not {}", header.trim_end()))
        };
    };

    let before = header.lines().count();
    let mut lines = Vec::new();
    for (index, text) in body.split_inclusive('\n').enumerate() {
        match L::parse(text.trim_end()) {
            Ok(line) => lines.push((line, text.trim_end())),
            Err(_) if !text.ends_with('\n') && L::is_start(text) => {}
            Err(e) => return Err(format!("line {}: {e}", before + index + 1)),
        }
    }
    Ok(lines)
}

impl<L: Lines> LineFile<L> {
    /// Creates the file if it does not exist, and excludes other runs from it.
    ///
    /// # Errors
    /// The file cannot be written, or another run has written to it since [`check`] accepted it:
    /// exit code 2.
    pub(crate) fn new(path: &Path, options: &RunOptions) -> Result<Self, CliError> {
        let usage = |why: String| usage!("{} {}: {why}", L::FLAG, path.display());
        let opened = OpenOptions::new().append(true).create(true).open(path);
        let lock = opened.map_err(|e| usage(format!("failed to open the file: {e}")))?;
        // Not for a pipe or /dev/null; a file system may have no locks.
        if path.is_file()
            && let Err(TryLockError::WouldBlock) = lock.try_lock()
        {
            return Err(usage(
                "another run is writing to the file; name another file".to_owned(),
            ));
        }
        check_run::<L>(path, options)?;
        Ok(Self {
            path: path.to_owned(),
            _lock: lock,
            file: None,
            lines: PhantomData,
        })
    }

    /// Writes the line of a step.
    ///
    /// # Errors
    /// A failed write.
    pub(crate) fn write(&mut self, figures: &StepFigures<'_>) -> Result<(), CliError> {
        let path = self.path.display().to_string();
        let error = |e: io::Error| failure!("failed to write {path}: {e}");
        let file = match &mut self.file {
            Some(file) => file,
            closed => closed.insert(start::<L>(&self.path, figures.metrics.step).map_err(error)?),
        };
        let line = L::of_step(figures).map_err(error)?;
        // A reader that follows the file sees only complete lines.
        file.write_all(line.as_bytes())
            .and_then(|()| file.write_all(b"\n"))
            .and_then(|()| file.flush())
            .map_err(error)
    }
}

/// Moves the lines of `step` and later ones to a file beside, and opens the file at its end.
pub(super) fn start<L: Lines>(path: &Path, step: u64) -> io::Result<BufWriter<File>> {
    let is_file = path.metadata()?.is_file();
    if is_file {
        // The renames are of files and not of a link to them.
        keep_before::<L>(&path.canonicalize()?, step)?;
    }

    let mut file = OpenOptions::new().append(true).open(path)?;
    // If it is another file now. If not, this process has locked it.
    let _locked = file.try_lock();
    if !is_file {
        file.write_all(L::header().as_bytes())?;
    }
    Ok(BufWriter::new(file))
}

/// Leaves only the lines before `step` in the file `path`. A kill in between leaves later lines in
/// both files.
fn keep_before<L: Lines>(path: &Path, step: u64) -> io::Result<()> {
    let text = fs::read(path)?;
    let lines = parse::<L>(&text).map_err(io::Error::other)?;
    let (kept, later): (Vec<_>, Vec<_>) = lines.iter().partition(|(line, _)| line.step < step);
    let header = L::header();
    let whole = |lines: &[&(Line, &str)]| {
        let lines = lines.iter().flat_map(|(_, text)| [*text, "\n"]);
        std::iter::once(&*header).chain(lines).collect::<String>()
    };

    if !later.is_empty() {
        let aside = aside::path(path, step.saturating_sub(1));
        replace(&aside, whole(&later).as_bytes())?;
    }
    let kept = whole(&kept);
    if kept.as_bytes() != text {
        replace(path, kept.as_bytes())?;
    }

    Ok(())
}
