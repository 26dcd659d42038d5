//! `--sample-every`: what the model writes as it trains.

use std::path::Path;

use crate::support::{Runs, losses, temp};

const SAMPLES: &str = "--sample-prompt 'the ' --sample-every 2 --sample-tokens 8";

/// The lines with samples.
fn samples(out: &str) -> Vec<&str> {
    out.lines()
        .filter(|line| line.starts_with("sample after "))
        .collect()
}

fn train(dir: &Path, stage: &str, more: &str) -> String {
    let base = "--steps 5 --no-checkpoint";
    dir.tiny(&format!("{more} --stage {stage} --metrics {stage} {base}"))
}

/// All stages write the same, and train as without samples.
#[test]
fn samples_change_no_training() {
    let dir = &temp();
    let plain = dir.join("plain");
    std::fs::create_dir(&plain).unwrap();
    train(&plain, "2", "");
    let expected = losses(&plain.join("2"));
    let mut first: Option<Vec<String>> = None;
    for stage in ["0", "1", "2", "3"] {
        let out = train(dir, stage, SAMPLES);
        let texts: Vec<String> = samples(&out).into_iter().map(str::to_owned).collect();
        let starts = [2, 4, 5].map(|step| format!("sample after step {step}: the "));
        assert_eq!(texts.len(), 3, "{out}");
        for (text, start) in texts.iter().zip(starts) {
            assert!(text.starts_with(&start), "{text}");
        }
        assert_eq!(*first.get_or_insert_with(|| texts.clone()), texts);
        assert_eq!(losses(&dir.join(stage)), expected);
    }
}

/// The sample at the end is what `zero generate` writes with the checkpoint.
#[test]
fn sample_is_that_of_generate() {
    let dir = &temp();
    let out = dir.tiny(&format!("{SAMPLES} --checkpoint c"));
    let last = samples(&out).last().unwrap().to_string();
    let text = dir.zero("generate --checkpoint c --prompt 'the ' --tokens 8");
    let text: String = text.trim_end_matches('\n').chars().collect();
    let shown = last.strip_prefix("sample after step 3: the ").unwrap();
    let escaped: String = text
        .strip_prefix("the ")
        .unwrap_or(&text)
        .chars()
        .map(|c| match c.is_control() {
            true => c.escape_default().to_string(),
            false => c.to_string(),
        })
        .collect();
    assert_eq!(shown, escaped);

    // A resumed run goes on with its samples.
    let out = dir.zero("train --resume c --steps 4");
    assert_eq!(samples(&out).len(), 1, "{out}");
}

#[test]
fn samples_need_a_prompt() {
    let dir = &temp();
    dir.refuses("--sample-every 2", &["pass --sample-prompt TEXT"]);
    dir.refuses("--sample-prompt ''", &["--sample-prompt", "no tokens"]);
}
