//! The file of `--metrics`: one JSON object a step and nothing else.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::figures::StepFigures;
use super::line_file::{self, Line, Lines};
use crate::error::CliError;
use crate::settings::record::TimedRecord;
use zero_trainer::StepMetrics;

/// The start of every line.
const START: &str = "{\"step\":";

/// JSON objects.
pub(crate) struct MetricsLines;

/// A line that this run writes.
#[derive(Serialize)]
struct NewLine<'a> {
    #[serde(flatten)]
    metrics: &'a StepMetrics,
    run: &'a str,
    /// The settings of the run, once.
    #[serde(skip_serializing_if = "Option::is_none")]
    settings: Option<&'a TimedRecord>,
    /// The nested figures once more, under keys such as `memory.peak_bytes`, for tables.
    #[serde(flatten)]
    flat: BTreeMap<String, Value>,
}

impl<'a> NewLine<'a> {
    fn new(figures: &StepFigures<'a>) -> Self {
        let StepFigures {
            metrics,
            run,
            settings,
            ..
        } = *figures;
        let mut flat = BTreeMap::new();
        if let Ok(Value::Object(figures)) = serde_json::to_value(metrics) {
            figures
                .into_iter()
                .filter(|(_, value)| value.is_object())
                .for_each(|(key, value)| add_flat(key, value, &mut flat));
        }
        Self {
            metrics,
            run,
            settings,
            flat,
        }
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
struct JsonLine {
    step: u64,
    run: Option<String>,
    #[serde(rename = "loss")]
    _loss: IgnoredAny,
    #[serde(rename = "loss_scale")]
    _loss_scale: IgnoredAny,
    #[serde(rename = "comm_bytes")]
    _comm_bytes: IgnoredAny,
}

impl Lines for MetricsLines {
    const FLAG: &'static str = "--metrics";
    const KIND: &'static str = "metrics file";

    fn header() -> String {
        String::new()
    }

    fn parse(line: &str) -> Result<Line, String> {
        let JsonLine { step, run, .. } = serde_json::from_str(line).map_err(|e| e.to_string())?;
        Ok(Line { step, run })
    }

    fn is_start(text: &str) -> bool {
        text.starts_with(START) || START.starts_with(text)
    }

    fn of_step(figures: &StepFigures<'_>) -> io::Result<String> {
        let line = NewLine::new(figures);
        serde_json::to_string(&line).map_err(io::Error::from)
    }
}

/// A measured run: its settings and its seconds a step.
pub(crate) struct MeasuredSteps {
    pub(crate) settings: TimedRecord,
    pub(crate) step_s: Vec<f64>,
}

/// The steps of each run in the text of a metrics file that has its settings.
pub(crate) fn measured_steps(text: &str) -> Result<Vec<MeasuredSteps>, String> {
    #[derive(Deserialize)]
    struct StepLine {
        step_ms: f64,
        settings: Option<TimedRecord>,
    }
    let mut runs: Vec<MeasuredSteps> = Vec::new();
    // A run that was killed may leave a line without an end.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    for (index, line) in whole.lines().enumerate() {
        let StepLine { step_ms, settings } =
            serde_json::from_str(line).map_err(|error| format!("line {}: {error}", index + 1))?;
        if let Some(settings) = settings {
            let step_s = Vec::new();
            runs.push(MeasuredSteps { settings, step_s });
        }
        if let Some(run) = runs.last_mut() {
            run.step_s.push(step_ms / 1e3);
        }
    }
    Ok(runs)
}

/// The steps up to `last` of a metrics file, in order; none of what is no file, such as a pipe.
///
/// # Errors
/// The file cannot be read, or is no metrics file.
pub(crate) fn steps_until(path: &Path, last: u64) -> Result<Vec<StepMetrics>, CliError> {
    let failed = |why: String| usage!("--metrics {}: {why}", path.display());
    let text = match path.metadata() {
        Ok(metadata) if metadata.is_file() => fs::read(path),
        _ => Ok(Vec::new()),
    };
    let text = text.map_err(|e| failed(format!("failed to read the file: {e}")))?;
    let lines = line_file::parse::<MetricsLines>(&text).map_err(failed)?;
    let texts = lines
        .into_iter()
        .filter(|(line, _)| line.step <= last)
        .map(|(_, text)| text);
    let mut steps: Vec<StepMetrics> = texts.filter_map(parse_step).collect();
    steps.sort_by_key(|step| step.step);
    Ok(steps)
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

#[cfg(test)]
mod tests {
    use integration_tests::{Folder, Printed};

    use super::*;
    use crate::train::line_file::{check_lines, check_recorded, start};

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
        let dir = &Folder::on_disk();
        let path = dir.join("m");
        let with = |content: &str, resumed: Option<&[&str]>| {
            fs::write(&path, content).unwrap();
            let checked = check_lines::<MetricsLines>(&path, resumed).map_err(|e| {
                assert_eq!(e.exit_code(), 2);
                e.to_string()
            });
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
            checked
        };

        check_lines::<MetricsLines>(&dir.join("new"), None).unwrap();
        check_lines::<MetricsLines>(Path::new("/dev/null"), None).unwrap();
        assert!(check_lines::<MetricsLines>(dir, None).is_err());
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
            error.shows(&[reason]);
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
    fn later_lines_move_and_torn_lines_go() {
        let dir = &Folder::on_disk();
        let path = dir.join("m");
        let link = dir.join("link");
        std::os::unix::fs::symlink("m", &link).unwrap();
        let four = lines(1..=4, "aa");
        let moved = [".2", ".3", ".4", ".5"].map(|n| format!("m.after-step-3{n}"));
        let mut moved = std::iter::once("m.after-step-3".to_owned()).chain(moved);

        for torn in ["", "{\"st", &line(5, "aa")[..20], &line(5, "aa"), "\0\0"] {
            fs::write(&path, four.clone() + torn).unwrap();
            drop(start::<MetricsLines>(&link, 4).unwrap());
            assert_eq!(
                fs::read_to_string(&path).unwrap(),
                lines(1..=3, "aa"),
                "{torn:?}"
            );
            let moved = fs::read_to_string(dir.join(moved.next().unwrap())).unwrap();
            let is_whole = torn == line(5, "aa");
            let last = if is_whole { 5 } else { 4 };
            assert_eq!(moved, lines(4..=last, "aa"), "{torn:?}");
        }

        assert!(link.is_symlink());
        let modified = || path.metadata().unwrap().modified().unwrap();
        let before = modified();
        drop(start::<MetricsLines>(&path, 4).unwrap());
        assert_eq!(modified(), before);
        // A complete last line without its newline stays.
        fs::write(&path, line(1, "aa")).unwrap();
        drop(start::<MetricsLines>(&path, 2).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), lines(1..=1, "aa"));
        assert_eq!(fs::read_dir(dir).unwrap().count(), 2 + 5);
    }

    #[test]
    fn nested_figures_are_also_flat() {
        let metrics = StepMetrics {
            step: 7,
            loss: f64::NAN,
            ..StepMetrics::default()
        };
        let line = NewLine::new(&StepFigures {
            metrics: &metrics,
            mfu: None,
            run: "aa",
            settings: None,
        });
        let text = serde_json::to_string(&line).unwrap();
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
        let dir = &Folder::on_disk();
        let path = dir.join("m");
        let check = |runs: &[&str]| check_recorded::<MetricsLines>(&path, runs);
        assert_eq!(check(&["aa"]).unwrap_err(), "no file is there now");
        fs::write(&path, lines(1..=2, "aa") + &lines(3..=3, "bb")).unwrap();
        check(&["bb", "aa"]).unwrap();
        check(&["aa"]).unwrap_err();
        fs::write(&path, "").unwrap();
        check(&["aa"]).unwrap_err();
        fs::write(&path, "notes\n").unwrap();
        assert_eq!(
            check(&["aa"]).unwrap_err(),
            "the file is no metrics file now"
        );
        fs::write(&path, lines(1..=2, "aa")).unwrap();
        let link = dir.join("link");
        std::os::unix::fs::symlink("m", &link).unwrap();
        check_recorded::<MetricsLines>(&link, &["aa"]).unwrap_err();
    }
}
