//! The folder of `--tensorboard`: event files, whose first event has the id of the run.
//!
//! TensorBoard shows the files of a folder as one run, and each folder below it as another one, of
//! which this program knows nothing. So a folder with files of other runs is refused.
//!
//! Nothing is written before the first step. Then the events of that step and later ones, which a
//! run before the resume wrote, and an event that a crash cut short are cut off; the later ones are
//! copied first, to a file whose name TensorBoard passes over. Where nothing is cut, the run goes
//! on in the newest file. Otherwise it adds a file: a TensorBoard that is open has read the old one
//! past the cut, and the first events of the new one make it drop the steps that are gone.
//!
//! A kill at any moment leaves files that this module reads. So a file of events appears with its
//! first events in it, by a rename.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufReader, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::aside;
use super::figures::{FIGURES, StepFigures};
use super::tfrecord::{
    Event, FILE_VERSION, Frame, SESSION_START, SessionLog, SourceMetadata, Summary, Value, frame,
    read_frame,
};
use crate::error::CliError;
use crate::output::counted;
use crate::paths::{replace, replace_by};
use zero_trainer::RunOptions;

/// The flag that names the folder.
const FLAG: &str = "--tensorboard";
/// A part of the name of every event file, by which TensorBoard finds them.
const MARK: &str = "tfevents";
/// The start of the names of this program's files; the time in seconds and the run follow.
const NAME: &str = "events.out.tfevents.";
/// The start of a name that TensorBoard passes over, in place of [`NAME`].
const ASIDE_NAME: &str = "events.";
/// A file that is about to become an event file.
const NEW: &str = ".events.new";
/// The writer in the first event; the run follows.
const WRITER: &str = "zero train, run ";

/// The event files of a run, on the rank that writes them.
pub(crate) struct EventFiles {
    dir: PathBuf,
    /// The folder. Its lock excludes other runs.
    _lock: File,
    /// Open from the first step on.
    file: Option<File>,
}

/// An event file that a run has written.
struct Scanned {
    path: PathBuf,
    run: String,
    /// The steps of its events with values.
    steps: Vec<u64>,
    /// The length of the first event.
    header_bytes: u64,
    /// The length up to the first event of a later step than requested, or up to a torn event.
    kept_bytes: u64,
    /// The length up to a torn event.
    whole_bytes: u64,
    bytes: u64,
}

impl Scanned {
    /// The file to which the events after `step` go.
    fn aside(&self, step: u64) -> PathBuf {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let rest = name.strip_prefix(NAME).unwrap_or(&name);
        let name = format!("{ASIDE_NAME}{}", rest.replace(MARK, ""));
        aside::path(&self.path.with_file_name(name), step)
    }

    /// Copies the first event, which a file of events needs, and those after `step`.
    fn copy_aside(&self, step: u64) -> io::Result<()> {
        let bytes = fs::read(&self.path)?;
        let part = |from: u64, to: u64| &bytes[from as usize..to as usize];
        let header = part(0, self.header_bytes);
        let later = part(self.kept_bytes, self.whole_bytes);
        replace(&self.aside(step), &[header, later].concat())
    }

    fn has_later(&self) -> bool {
        self.kept_bytes < self.whole_bytes
    }

    fn is_cut(&self) -> bool {
        self.kept_bytes < self.bytes
    }
}

/// Checks that a run may write to `dir`: it has no event files, or a run resumed at `first_step`
/// continues them. Returns notes about the events that the run will move.
///
/// # Errors
/// Exit code 2; the folder stays as it is.
pub(crate) fn check(
    dir: &Path,
    options: &RunOptions,
    first_step: u64,
) -> Result<Vec<String>, CliError> {
    let files = check_run(dir, options, first_step)?;
    if first_step >= options.steps {
        return Ok(Vec::new());
    }
    let notes = files.iter().filter(|file| file.has_later()).map(|file| {
        let later = file.steps.iter().filter(|step| **step > first_step);
        format!(
            "{}: {} after step {first_step} to be moved to {}",
            file.path.display(),
            counted(later.count() as u64, "event"),
            file.aside(first_step).display()
        )
    });
    Ok(notes.collect())
}

/// Checks that a resumed run may continue the folder that its record names, and no flag: event
/// files of `runs` alone are there.
///
/// # Errors
/// The reason.
pub(crate) fn check_recorded(dir: &Path, runs: &[&str]) -> Result<(), String> {
    // A link may lead anywhere.
    let is_folder = dir
        .symlink_metadata()
        .is_ok_and(|metadata| metadata.is_dir());
    if !is_folder {
        return Err("no folder is there now".to_owned());
    }
    let files = scan(dir, u64::MAX)?;
    if files.is_empty() || !files.iter().all(|file| runs.contains(&&*file.run)) {
        return Err("the folder has event files of another run, or none".to_owned());
    }
    Ok(())
}

/// The event files in `dir`, if a run with these options may write there.
fn check_run(dir: &Path, options: &RunOptions, first_step: u64) -> Result<Vec<Scanned>, CliError> {
    let usage = |why: String| usage!("{FLAG} {}: {why}", dir.display());
    let files =
        scan(dir, first_step).map_err(|why| usage(format!("{why}; name another folder")))?;

    let resumed = options.runs();
    let other = match &options.resume {
        None => files.first(),
        Some(_) => files.iter().find(|file| !resumed.contains(&&*file.run)),
    };
    match other {
        None => Ok(files),
        Some(other) => Err(usage(format!(
            "the folder holds event files of another run ({}); continue that run with --resume, or name another \
             folder, such as one below it, which TensorBoard shows beside it",
            other.run
        ))),
    }
}

/// The event files in `dir`, oldest first; none if there is no folder. `step` is the last one to
/// keep.
///
/// # Errors
/// The reason why the folder cannot be used.
fn scan(dir: &Path, step: u64) -> Result<Vec<Scanned>, String> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(format!("failed to read the folder: {e}")),
        Ok(entries) => entries,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| format!("failed to read the folder: {e}"))?;
        let name = entry.file_name();
        if name.to_string_lossy().contains(MARK) {
            names.push(name);
        }
    }
    names.sort();
    let scanned = names.iter().map(|name| scan_file(&dir.join(name), step));
    scanned.collect()
}

fn scan_file(path: &Path, last: u64) -> Result<Scanned, String> {
    let name = path.file_name().unwrap_or_default().display();
    let metadata = path.symlink_metadata();
    if !metadata.is_ok_and(|metadata| metadata.is_file()) {
        return Err(format!("{name} is no file"));
    }
    let failed = |e: io::Error| format!("failed to read {name}: {e}");
    let file = File::open(path).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    let mut file = BufReader::new(file);

    let mut run = None;
    let mut steps = Vec::new();
    let mut header_bytes = 0;
    let mut read_bytes = 0;
    let mut kept_bytes = None;
    loop {
        let left = bytes - read_bytes;
        let (event, frame_bytes) = match read_frame(&mut file, left).map_err(failed)? {
            Frame::Whole { event, bytes } => (event, bytes),
            Frame::End | Frame::Torn => break,
        };
        if read_bytes == 0 {
            run = writer(&event);
            header_bytes = frame_bytes;
        }
        if event.summary.is_some() {
            let step = u64::try_from(event.step).unwrap_or_default();
            steps.push(step);
            if step > last {
                kept_bytes.get_or_insert(read_bytes);
            }
        }
        read_bytes += frame_bytes;
    }

    let Some(run) = run else {
        return Err(format!("{name} is not an event file of `zero train`"));
    };
    Ok(Scanned {
        path: path.to_owned(),
        run,
        steps,
        header_bytes,
        kept_bytes: kept_bytes.unwrap_or(read_bytes),
        whole_bytes: read_bytes,
        bytes,
    })
}

/// The run in the first event of a file of this program.
fn writer(event: &Event) -> Option<String> {
    let writer = &event.source_metadata.as_ref()?.writer;
    writer.strip_prefix(WRITER).map(str::to_owned)
}

impl EventFiles {
    /// Creates the folder if it does not exist, and excludes other runs from it.
    ///
    /// # Errors
    /// The folder cannot be used, or another run has written to it since [`check`] accepted it:
    /// exit code 2.
    pub(crate) fn new(dir: &Path, options: &RunOptions, first_step: u64) -> Result<Self, CliError> {
        let usage = |why: String| usage!("{FLAG} {}: {why}", dir.display());
        fs::create_dir_all(dir).map_err(|e| usage(format!("failed to create the folder: {e}")))?;
        let lock = File::open(dir).map_err(|e| usage(format!("failed to open the folder: {e}")))?;
        // A file system may have no locks.
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            return Err(usage(
                "another run is writing to the folder; name another folder".to_owned(),
            ));
        }
        check_run(dir, options, first_step)?;
        Ok(Self {
            dir: dir.to_owned(),
            _lock: lock,
            file: None,
        })
    }

    /// Writes the event of a step.
    ///
    /// # Errors
    /// A failed write.
    pub(crate) fn write(&mut self, figures: &StepFigures<'_>) -> Result<(), CliError> {
        let dir = self.dir.display().to_string();
        let error = |e: io::Error| failure!("failed to write an event file in {dir}: {e}");
        let step = figures.metrics.step;
        let file = match &mut self.file {
            Some(file) => file,
            closed => closed.insert(start(&self.dir, figures.run, step).map_err(error)?),
        };
        // One write, so that a crash cuts at most this event.
        let event = Event {
            summary: Some(summary(figures)),
            ..event_at(step)
        };
        file.write_all(&frame(&event)).map_err(error)
    }
}

/// The values of a step.
fn summary(figures: &StepFigures<'_>) -> Summary {
    let values = FIGURES.iter().filter_map(|figure| {
        let value = (figure.value)(figures)?;
        Some(Value {
            tag: figure.tag?.to_owned(),
            simple_value: Some(value.to_f32()),
        })
    });
    Summary {
        value: values.collect(),
    }
}

/// An event of now, without content.
fn event_at(step: u64) -> Event {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    Event {
        wall_time: now.unwrap_or_default().as_secs_f64(),
        step: i64::try_from(step).unwrap_or(i64::MAX),
        ..Event::default()
    }
}

/// Moves the events of `step` and later ones to files beside, and opens the file to which `run`
/// adds.
fn start(dir: &Path, run: &str, step: u64) -> io::Result<File> {
    let last = step.saturating_sub(1);
    let files = scan(dir, last).map_err(io::Error::other)?;
    let cut: Vec<&Scanned> = files.iter().filter(|file| file.is_cut()).collect();

    for file in cut.iter().filter(|file| file.has_later()) {
        file.copy_aside(last)?;
    }
    let path = match files.last() {
        Some(newest) if newest.run == run && cut.is_empty() => newest.path.clone(),
        newest => create(dir, run, step, newest.map(|file| &*file.path))?,
    };
    for file in cut {
        let old = OpenOptions::new().write(true).open(&file.path)?;
        old.set_len(file.kept_bytes)?;
        old.sync_all()?;
    }

    OpenOptions::new().append(true).open(path)
}

/// Creates the event file after `newest`, whose first step is `step`.
fn create(dir: &Path, run: &str, step: u64, newest: Option<&Path>) -> io::Result<PathBuf> {
    let first = event_at(0);
    let now = first.wall_time as u64;
    // TensorBoard reads files in the order of their names, and the clock may have been set back.
    let after = newest
        .and_then(name_seconds)
        .map_or(0, |seconds| seconds + 1);
    let path = dir.join(format!("{NAME}{:010}.{run}", now.max(after)));

    let header = Event {
        file_version: Some(FILE_VERSION.to_owned()),
        source_metadata: Some(SourceMetadata {
            writer: format!("{WRITER}{run}"),
        }),
        ..first
    };
    let mut frames = frame(&header);
    if newest.is_some() {
        let restart = Event {
            session_log: Some(SessionLog {
                status: SESSION_START,
            }),
            ..event_at(step)
        };
        frames.extend(frame(&restart));
    }
    replace_by(&dir.join(NEW), &path, &frames)?;

    Ok(path)
}

/// The seconds in the name of a file of this program.
fn name_seconds(path: &Path) -> Option<u64> {
    let name = path.file_name().and_then(OsStr::to_str)?;
    let (seconds, _) = name.strip_prefix(NAME)?.split_once('.')?;
    seconds.parse().ok()
}

#[cfg(test)]
mod tests {
    use integration_tests::{Files, Folder, Printed};

    use zero_trainer::StepMetrics;

    use super::*;

    fn write(dir: &Path, run: &str, steps: std::ops::RangeInclusive<u64>) {
        let mut file = start(dir, run, *steps.start()).unwrap();
        for step in steps {
            let metrics = StepMetrics {
                step,
                loss: step as f64,
                ..StepMetrics::default()
            };
            let figures = StepFigures {
                metrics: &metrics,
                mfu: None,
                run,
                settings: None,
            };
            let event = Event {
                summary: Some(summary(&figures)),
                ..event_at(step)
            };
            file.write_all(&frame(&event)).unwrap();
        }
    }

    /// The steps of each file.
    fn steps(dir: &Path) -> Vec<Vec<u64>> {
        let files = scan(dir, u64::MAX).unwrap();
        files.into_iter().map(|file| file.steps).collect()
    }

    /// The steps of each file of moved events, by name.
    fn moved(dir: &Path) -> Vec<(String, Vec<u64>)> {
        let entries = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let moved = entries.filter(|path| path.display().to_string().contains(".after-step-"));
        let mut moved: Vec<(String, Vec<u64>)> = moved
            .map(|path| {
                let (_, name) = path.to_str().unwrap().split_once(".after").unwrap();
                (name.to_owned(), scan_file(&path, u64::MAX).unwrap().steps)
            })
            .collect();
        moved.sort();
        moved
    }

    #[test]
    fn whole_file_goes_on() {
        let dir = &Folder::on_disk();
        write(dir, "aa", 1..=3);
        write(dir, "aa", 4..=5);
        assert_eq!(steps(dir), [[1, 2, 3, 4, 5]]);
        // Another run that resumed it.
        write(dir, "bb", 6..=6);
        assert_eq!(steps(dir), [vec![1, 2, 3, 4, 5], vec![6]]);
    }

    #[test]
    fn later_events_move() {
        let dir = &Folder::on_disk();
        write(dir, "aa", 1..=5);
        write(dir, "aa", 4..=6);
        assert_eq!(steps(dir), [[1, 2, 3], [4, 5, 6]]);
        assert_eq!(moved(dir), [("-step-3".to_owned(), vec![4, 5])]);
        // All of the second file is later: its first events stay.
        write(dir, "aa", 3..=3);
        assert_eq!(steps(dir), [vec![1, 2], vec![], vec![3]]);
        write(dir, "aa", 4..=4);
        assert_eq!(steps(dir), [vec![1, 2], vec![], vec![3, 4]]);
        let after_two = ("-step-2".to_owned(), vec![3]);
        let second = ("-step-2".to_owned(), vec![4, 5, 6]);
        assert_eq!(moved(dir)[..2], [after_two, second]);
        // The same step again, of the same file.
        write(dir, "aa", 3..=3);
        write(dir, "aa", 3..=3);
        assert_eq!(moved(dir).len(), 5);
    }

    #[test]
    fn torn_event_is_cut() {
        let dir = &Folder::on_disk();
        write(dir, "aa", 1..=2);
        let path = scan(dir, 9).unwrap().remove(0).path;
        let whole = fs::read(&path).unwrap();
        for cut in [1, 4, 12, 100] {
            fs::write(&path, &whole[..whole.len() - cut]).unwrap();
            assert_eq!(steps(dir), [[1]]);
        }
        check_recorded(dir, &["aa"]).unwrap();
        write(dir, "aa", 2..=2);
        assert_eq!(steps(dir), [[1], [2]]);
    }

    #[test]
    fn other_files_are_refused() {
        let dir = &Folder::on_disk();
        let check = |runs: &[&str]| check_recorded(dir, runs);
        check(&["aa"]).unwrap_err();
        write(dir, "aa", 1..=2);
        check(&["aa"]).unwrap();
        check(&["bb"]).unwrap_err();

        let other = dir.join("events.out.tfevents.1.host");
        for text in [&b""[..], b"notes", &frame(&event_at(0))] {
            fs::write(&other, text).unwrap();
            let error = check(&["aa"]).unwrap_err();
            error.shows(&["events.out.tfevents.1.host"]);
        }
        fs::remove_file(&other).unwrap();
        std::os::unix::fs::symlink("elsewhere", &other).unwrap();
        check(&["aa"]).unwrap_err();
        // Another run of TensorBoard.
        fs::remove_file(&other).unwrap();
        fs::create_dir(dir.join("eval")).unwrap();
        dir.write("eval/events.out.tfevents.1.host", "x");
        check(&["aa"]).unwrap();
    }
}
