//! The file of `--metrics`: one JSON object a step and nothing else. A resumed run appends to it.
//!
//! Nothing is written before the first step. Then the lines of that step and later ones, which a
//! run before the resume wrote, and a line that a crash cut short are removed: the lines to keep
//! are written to a new file, which replaces the old one by a rename.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::CliError;
use crate::output::counted;
use zero_trainer::{RunOptions, StepMetrics};

/// The start of every line.
const START: &str = "{\"step\":";

/// The metrics file of a run, on the rank that writes it.
pub(crate) struct MetricsFile {
    path: PathBuf,
    run: String,
    /// The file that [`MetricsFile::new`] opened; its lock excludes other runs. The first step may
    /// replace it.
    _lock: File,
    /// Open from the first step on.
    file: Option<BufWriter<File>>,
}

/// A line that this run writes.
#[derive(Serialize)]
struct NewLine<'a> {
    #[serde(flatten)]
    metrics: &'a StepMetrics,
    run: &'a str,
    /// The nested figures once more, under keys such as `memory.peak_bytes`, for tables.
    #[serde(flatten)]
    flat: BTreeMap<String, Value>,
}

impl<'a> NewLine<'a> {
    fn new(metrics: &'a StepMetrics, run: &'a str) -> Self {
        let mut flat = BTreeMap::new();
        if let Ok(Value::Object(figures)) = serde_json::to_value(metrics) {
            figures
                .into_iter()
                .filter(|(_, value)| value.is_object())
                .for_each(|(key, value)| add_flat(key, value, &mut flat));
        }
        Self { metrics, run, flat }
    }
}

/// Adds the figures in `value`, with the keys on the way to them.
fn add_flat(key: String, value: Value, flat: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(figures) => {
            figures
                .into_iter()
                .for_each(|(inner, value)| add_flat(format!("{key}.{inner}"), value, flat));
        }
        figure => {
            flat.insert(key, figure);
        }
    }
}

/// A line in an existing file. The keys identify the lines of this program, of any version.
#[derive(Deserialize)]
struct Line {
    step: u64,
    run: Option<String>,
    #[serde(rename = "loss")]
    _loss: IgnoredAny,
    #[serde(rename = "loss_scale")]
    _loss_scale: IgnoredAny,
    #[serde(rename = "comm_bytes")]
    _comm_bytes: IgnoredAny,
}

/// Checks that a run may write to `path`: the file is new or empty, or a run resumed at
/// `first_step` continues it. Returns notes about the lines that the run will replace, and about
/// steps between its lines and those in the file.
///
/// # Errors
/// As [`check_lines`].
pub(crate) fn check(
    path: &Path,
    options: &RunOptions,
    first_step: u64,
) -> Result<Vec<String>, CliError> {
    let steps = check_run(path, options)?;
    if first_step >= options.steps {
        return Ok(Vec::new());
    }
    let (mut notes, name) = (Vec::new(), path.display());
    let later = steps.iter().filter(|step| **step > first_step).count();

    if later > 0 {
        notes.push(format!(
            "{name}: {later} lines of steps after {first_step} are replaced"
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

/// Checks that a run resumed at `step` may continue the metrics file that its record names, and no
/// flag: at least one line is there, every line is of one of `runs`, and none is of a later step,
/// since continuing would remove it.
///
/// # Errors
/// The reason.
pub(crate) fn check_recorded(path: &Path, runs: &[&str], step: u64) -> Result<(), String> {
    // A link may lead anywhere.
    if !path
        .symlink_metadata()
        .is_ok_and(|metadata| metadata.is_file())
    {
        return Err("no file is there now".to_owned());
    }
    let text = fs::read(path).map_err(|e| format!("the file cannot be read: {e}"))?;
    let lines = parse(&text).map_err(|_| "the file is no metrics file now".to_owned())?;
    let is_own = |line: &Line| line.run.as_deref().is_some_and(|run| runs.contains(&run));
    if lines.is_empty() || !lines.iter().all(|(line, _)| is_own(line)) {
        return Err("the file has lines of another run, or no lines".to_owned());
    }
    match lines.iter().filter(|(line, _)| line.step > step).count() {
        0 => Ok(()),
        later => Err(format!(
            "the file has {} after step {step}, which would be removed",
            counted(later as u64, "line")
        )),
    }
}

/// The steps up to `last` of a metrics file, in order; none if it cannot be read.
pub(crate) fn steps_until(path: &Path, last: u64) -> Vec<StepMetrics> {
    let is_file = path.metadata().is_ok_and(|metadata| metadata.is_file());
    let text = if is_file {
        fs::read(path).unwrap_or_default()
    } else {
        Vec::new()
    };
    let lines = parse(&text).unwrap_or_default();
    let texts = lines
        .into_iter()
        .filter(|(line, _)| line.step <= last)
        .map(|(_, text)| text);
    let mut steps: Vec<StepMetrics> = texts.filter_map(parse_step).collect();
    steps.sort_by_key(|step| step.step);
    steps
}

/// The metrics of a line, in which a loss that is not finite is null.
pub(crate) fn parse_step(text: &str) -> Option<StepMetrics> {
    let mut line: Value = serde_json::from_str(text).ok()?;
    let is_finite = line["loss"].is_number();
    if !is_finite {
        line["loss"] = 0.0.into();
    }
    let step: StepMetrics = serde_json::from_value(line).ok()?;
    Some(if is_finite {
        step
    } else {
        StepMetrics {
            loss: f64::NAN,
            ..step
        }
    })
}

/// As [`check_lines`], for a run with these options.
fn check_run(path: &Path, options: &RunOptions) -> Result<Vec<u64>, CliError> {
    check_lines(path, options.resume.is_some().then_some(&*options.runs()))
}

/// Checks that the file is new or empty, or that `resumed` has the runs of all lines. Lines of
/// older versions have no run. Returns the steps of the lines.
///
/// # Errors
/// Exit code 2; the file stays as it is.
fn check_lines(path: &Path, resumed: Option<&[&str]>) -> Result<Vec<u64>, CliError> {
    let usage = |why: String| {
        Err(CliError::Usage(format!(
            "--metrics {}: {why}",
            path.display()
        )))
    };

    let text = match path.metadata() {
        // Such as a pipe or /dev/null.
        Ok(meta) if !meta.is_file() && !meta.is_dir() => return Ok(Vec::new()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        _ => match fs::read(path) {
            Ok(text) => text,
            Err(e) => return usage(format!("failed to read the file: {e}")),
        },
    };

    let lines = match parse(&text) {
        Ok(lines) => lines,
        Err(why) => {
            return usage(format!(
                "not a metrics file of `zero train` ({why}); name another file"
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

/// The complete lines of a metrics file, parsed and as they are. A last line that a crash cut short
/// is left out.
fn parse(bytes: &[u8]) -> Result<Vec<(Line, &str)>, String> {
    let text = std::str::from_utf8(bytes).map_err(|e| e.to_string())?;
    // A file system may fill the end of a file with zeros after a power failure.
    let text = text.trim_end_matches('\0');
    let mut lines = Vec::new();
    for (index, text) in text.split_inclusive('\n').enumerate() {
        match serde_json::from_str(text) {
            Ok(line) => lines.push((line, text.trim_end())),
            Err(_)
                if !text.ends_with('\n')
                    && (text.starts_with(START) || START.starts_with(text)) => {}
            Err(e) => return Err(format!("line {}: {e}", index + 1)),
        }
    }
    Ok(lines)
}

impl MetricsFile {
    /// Creates the file if it does not exist, and excludes other runs from it.
    ///
    /// # Errors
    /// The file cannot be written, or another run has written to it since [`check`] accepted it:
    /// exit code 2.
    pub(crate) fn new(path: &Path, options: &RunOptions) -> Result<Self, CliError> {
        let usage = |why: String| CliError::Usage(format!("--metrics {}: {why}", path.display()));
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
        check_run(path, options)?;
        Ok(Self {
            path: path.to_owned(),
            run: options.run_id.clone(),
            _lock: lock,
            file: None,
        })
    }

    /// Writes the line of a step.
    ///
    /// # Errors
    /// A failed write.
    pub(crate) fn write(&mut self, metrics: &StepMetrics) -> Result<(), CliError> {
        let path = self.path.display().to_string();
        let error = |e: io::Error| CliError::Failure(format!("failed to write {path}: {e}"));
        let file = match &mut self.file {
            Some(file) => file,
            closed => closed.insert(start(&self.path, metrics.step).map_err(error)?),
        };
        serde_json::to_writer(&mut *file, &NewLine::new(metrics, &self.run))
            .map_err(|e| error(e.into()))?;
        // A reader that follows the file sees only complete lines.
        file.write_all(b"\n")
            .and_then(|()| file.flush())
            .map_err(error)
    }
}

/// Removes the lines of `step` and later ones, and opens the file at its end.
fn start(path: &Path, step: u64) -> io::Result<BufWriter<File>> {
    if path.metadata()?.is_file() {
        let text = fs::read(path)?;
        let lines = parse(&text).map_err(io::Error::other)?;
        let kept = lines
            .iter()
            .filter(|(line, _)| line.step < step)
            .flat_map(|(_, text)| [*text, "\n"]);
        let kept = kept.collect::<String>();
        if kept.as_bytes() != text {
            // The rename replaces the file and not a link to it.
            replace(&path.canonicalize()?, kept.as_bytes())?;
        }
    }
    let file = OpenOptions::new().append(true).open(path)?;
    // If it is another file now. If not, this process has locked it.
    let _locked = file.try_lock();
    Ok(BufWriter::new(file))
}

/// Replaces the content of a file atomically.
fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut new = tempfile::NamedTempFile::new_in(path.parent().unwrap_or(Path::new(".")))?;
    new.write_all(content)?;
    new.as_file()
        .set_permissions(path.metadata()?.permissions())?;
    new.as_file().sync_all()?;
    new.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(step: u64, run: &str) -> String {
        let run = if run.is_empty() {
            String::new()
        } else {
            format!(r#","run":"{run}""#)
        };
        format!(r#"{{"step":{step},"loss":null,"loss_scale":1.0,"comm_bytes":{{}}{run}}}"#)
    }

    fn lines(steps: std::ops::RangeInclusive<u64>, run: &str) -> String {
        steps.map(|step| line(step, run) + "\n").collect()
    }

    #[test]
    fn only_the_resumed_runs_file_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        let with = |content: &str, resumed: Option<&[&str]>| {
            fs::write(&path, content).unwrap();
            let checked = check_lines(&path, resumed).map_err(|e| {
                assert_eq!(e.exit_code(), 2);
                e.to_string()
            });
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
            checked
        };

        check_lines(&dir.path().join("new"), None).unwrap();
        check_lines(Path::new("/dev/null"), None).unwrap();
        assert!(check_lines(dir.path(), None).is_err());
        with("", None).unwrap();

        for (content, reason) in [
            (
                lines(1..=3, "aa"),
                "holds 3 steps of another run (aa); continue that run with --resume",
            ),
            (lines(1..=2, ""), "holds 2 steps of another run; continue"),
            (
                "notes\n".to_owned(),
                "not a metrics file of `zero train` (line 1",
            ),
            (
                "{\"step\": 1, \"loss\": 2.0}\n".to_owned(),
                "not a metrics file",
            ),
            ("not even a line".to_owned(), "not a metrics file"),
        ] {
            let error = with(&content, None).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }

        let both = lines(1..=2, "aa") + &lines(3..=4, "bb");
        with(&both, Some(&["bb", "aa"])).unwrap();
        with(&lines(1..=2, ""), Some(&["bb"])).unwrap();
        assert!(
            with(&both, Some(&["bb"]))
                .unwrap_err()
                .contains("another run than the resumed one (aa, bb)")
        );
        assert!(
            with(&(both.clone() + "notes\n"), Some(&["aa", "bb"]))
                .unwrap_err()
                .contains("line 5")
        );
        // Cut short by a crash.
        for torn in ["{", "{\"step\":", &line(5, "bb")[..30], "\0\0\0"] {
            with(&(both.clone() + torn), Some(&["aa", "bb"])).unwrap();
        }
        assert!(
            with(&both.replacen('\n', "", 1), Some(&["aa", "bb"]))
                .unwrap_err()
                .contains("line 1")
        );
    }

    #[test]
    fn later_and_torn_lines_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("m"), dir.path().join("link"));
        std::os::unix::fs::symlink("m", &link).unwrap();
        let four = lines(1..=4, "aa");

        for torn in ["", "{\"st", &line(5, "aa")[..20], &line(5, "aa"), "\0\0"] {
            fs::write(&path, four.clone() + torn).unwrap();
            drop(start(&link, 4).unwrap());
            assert_eq!(
                fs::read_to_string(&path).unwrap(),
                lines(1..=3, "aa"),
                "{torn:?}"
            );
        }

        assert!(link.is_symlink());
        let modified = || path.metadata().unwrap().modified().unwrap();
        let before = modified();
        drop(start(&path, 4).unwrap());
        assert_eq!(modified(), before);
        // A complete last line without its newline stays.
        fs::write(&path, line(1, "aa")).unwrap();
        drop(start(&path, 2).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), lines(1..=1, "aa"));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn nested_figures_are_also_flat() {
        let metrics = StepMetrics {
            step: 7,
            loss: f64::NAN,
            ..StepMetrics::default()
        };
        let text = serde_json::to_string(&NewLine::new(&metrics, "aa")).unwrap();
        assert!(text.starts_with(START), "{text}");
        let line: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(line["memory.peak_bytes"], line["memory"]["peak_bytes"]);
        assert_eq!(
            line["comm_bytes.all_gather"],
            line["comm_bytes"]["all_gather"]
        );
        assert!(line["overlap.compute_ms"].is_number() && line["run"] == "aa");
        // Read again, for a picture of the whole run.
        let step = parse_step(&text).unwrap();
        assert!(step.step == 7 && step.loss.is_nan());
    }

    #[test]
    fn recorded_file_is_the_runs_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        let check = |runs: &[&str], step| check_recorded(&path, runs, step);
        assert_eq!(check(&["aa"], 3).unwrap_err(), "no file is there now");
        fs::write(&path, lines(1..=2, "aa") + &lines(3..=3, "bb")).unwrap();
        check(&["bb", "aa"], 3).unwrap();
        assert_eq!(
            check(&["bb", "aa"], 2).unwrap_err(),
            "the file has 1 line after step 2, which would be removed"
        );
        check(&["aa"], 3).unwrap_err();
        fs::write(&path, "").unwrap();
        check(&["aa"], 3).unwrap_err();
        fs::write(&path, "notes\n").unwrap();
        assert_eq!(
            check(&["aa"], 3).unwrap_err(),
            "the file is no metrics file now"
        );
        fs::write(&path, lines(1..=2, "aa")).unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("m", &link).unwrap();
        check_recorded(&link, &["aa"], 3).unwrap_err();
    }
}
