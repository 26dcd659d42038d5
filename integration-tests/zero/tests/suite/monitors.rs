//! `--tensorboard` and `--csv`, and the monitors of a DeepSpeed configuration.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::{Files, Printed, Runs, lines, temp};

/// CRC-32C, bit by bit, masked as TensorFlow does.
fn masked_crc(data: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in data {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
        }
    }
    (!crc).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// A field of a protobuf message.
enum Field<'a> {
    Varint(u64),
    Fixed(u64),
    Bytes(&'a [u8]),
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let (byte, rest) = bytes.split_first().unwrap();
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            break;
        }
    }
    value
}

/// The fields of a message by number.
fn fields(mut message: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut fields = Vec::new();
    while !message.is_empty() {
        let key = varint(&mut message);
        let length = match key & 7 {
            0 => {
                fields.push((key >> 3, Field::Varint(varint(&mut message))));
                continue;
            }
            1 => 8,
            5 => 4,
            2 => varint(&mut message) as usize,
            other => panic!("wire type {other}"),
        };
        let (bytes, rest) = message.split_at(length);
        message = rest;
        let field = match key & 7 {
            2 => Field::Bytes(bytes),
            _ => Field::Fixed(bytes.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b))),
        };
        fields.push((key >> 3, field));
    }
    fields
}

/// An event: its step, its scalars by tag, and whether it starts a session.
#[derive(Debug, Default, PartialEq)]
struct Event {
    step: u64,
    scalars: BTreeMap<String, f32>,
    starts: bool,
}

fn event(message: &[u8]) -> Event {
    let mut event = Event::default();
    for (number, field) in fields(message) {
        match (number, field) {
            (2, Field::Varint(step)) => event.step = step,
            (5, Field::Bytes(summary)) => {
                let values = fields(summary).into_iter().map(|(_, value)| match value {
                    Field::Bytes(value) => scalar(value),
                    _ => panic!("no value"),
                });
                event.scalars = values.collect();
            }
            (7, Field::Bytes(log)) => event.starts = log == [8, 1],
            _ => {}
        }
    }
    event
}

fn scalar(value: &[u8]) -> (String, f32) {
    let (mut tag, mut scalar) = (String::new(), f32::NAN);
    for (number, field) in fields(value) {
        match (number, field) {
            (1, Field::Bytes(text)) => tag = String::from_utf8(text.to_vec()).unwrap(),
            (2, Field::Fixed(bits)) => scalar = f32::from_bits(bits as u32),
            _ => {}
        }
    }
    (tag, scalar)
}

/// The events of a file with a whole end.
fn events_of_file(path: &Path) -> Vec<Event> {
    let bytes = fs::read(path).unwrap();
    let mut rest = &bytes[..];
    let mut events = Vec::new();
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
    while !rest.is_empty() {
        let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        assert_eq!(number(&rest[8..12]), masked_crc(&rest[..8]));
        let message = &rest[12..12 + length];
        assert_eq!(number(&rest[12 + length..16 + length]), masked_crc(message));
        events.push(event(message));
        rest = &rest[16 + length..];
    }
    events
}

/// The files that TensorBoard reads.
pub(crate) fn event_files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap();
    let files = entries.map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = files
        .filter(|file| file.display().to_string().contains("tfevents"))
        .collect();
    files.sort();
    files
}

/// The scalars by step, as TensorBoard takes them: a session that starts drops later steps.
fn scalars(dir: &Path) -> BTreeMap<u64, BTreeMap<String, f32>> {
    let mut steps = BTreeMap::new();
    for event in event_files(dir)
        .iter()
        .flat_map(|file| events_of_file(file))
    {
        if event.starts {
            steps.retain(|step, _| *step < event.step);
        }
        if !event.scalars.is_empty() {
            let earlier = steps.insert(event.step, event.scalars);
            assert_eq!(earlier, None);
        }
    }
    steps
}

/// The scalars of TensorBoard and their places in a line of the metrics.
const TAGS: [(&str, &str); 16] = [
    ("train/loss", "/loss"),
    ("eval/loss", "/validation/loss"),
    ("eval/perplexity", "/validation/perplexity"),
    ("train/learning_rate", "/lr"),
    ("train/grad_norm", "/grad_norm"),
    ("train/loss_scale", "/loss_scale"),
    ("speed/step_ms", "/step_ms"),
    ("speed/tokens_per_s", "/tokens_per_s"),
    ("speed/mfu", "/breakdown/mfu"),
    ("memory/params_bytes", "/memory/params_bytes"),
    ("memory/grads_bytes", "/memory/grads_bytes"),
    ("memory/optimizer_bytes", "/memory/optimizer_bytes"),
    ("memory/buckets_bytes", "/memory/buckets_bytes"),
    ("memory/activations_bytes", "/memory/activations_bytes"),
    ("memory/workspace_bytes", "/memory/workspace_bytes"),
    ("memory/peak_bytes", "/memory/peak_bytes"),
];

/// Asserts that event files and table have the steps and the numbers of the metrics; returns the
/// steps.
pub(crate) fn agree_with_metrics(dir: &Path) -> Vec<u64> {
    let metrics = lines(&dir.join("m"));
    let scalars = scalars(&dir.join("t"));
    let steps: Vec<u64> = metrics
        .iter()
        .filter_map(|line| line["step"].as_u64())
        .collect();
    assert!(scalars.keys().eq(&steps), "{:?} {steps:?}", scalars.keys());
    for (line, scalars) in metrics.iter().zip(scalars.values()) {
        for (tag, place) in TAGS {
            // The metrics have the utilization in a breakdown only.
            if tag == "speed/mfu" && line["breakdown"].is_null() {
                continue;
            }
            let expected = line.pointer(place).and_then(Value::as_f64);
            let expected = expected.map(|value| value as f32);
            assert_eq!(scalars.get(tag).copied(), expected, "{tag}");
        }
    }

    let table = dir.text("t.csv");
    let mut rows = table.lines();
    let columns: Vec<&str> = rows.next().unwrap().split(',').collect();
    let rows: Vec<Vec<&str>> = rows.map(|row| row.split(',').collect()).collect();
    assert_eq!(rows.len(), metrics.len());
    for (line, row) in metrics.iter().zip(rows) {
        for (column, cell) in columns.iter().zip(row) {
            let place = match *column {
                "mfu" => "/breakdown/mfu".to_owned(),
                column => format!("/{}", column.replace('.', "/")),
            };
            if *column == "mfu" && line["breakdown"].is_null() {
                continue;
            }
            let same = match line.pointer(&place).unwrap_or(&Value::Null) {
                Value::Number(number) => cell.parse::<f64>().ok() == number.as_f64(),
                Value::Bool(flag) => cell == u8::from(*flag).to_string(),
                Value::String(text) => cell == text,
                other => other.is_null() && cell.is_empty(),
            };
            assert!(same, "{column} {cell} {line}");
        }
    }
    steps
}

/// Two evaluations, every figure, and a checkpoint after steps 2 and 4.
const OUTPUTS: &str = "--metrics m --tensorboard t --csv t.csv --checkpoint c --checkpoint-every 2 \
     --val-split 0.2 --eval-every 2 --eval-tokens 64 --breakdown";

fn train(dir: &Path) {
    dir.tiny(&format!("--steps 4 {OUTPUTS}"));
    agree_with_metrics(dir);
}

fn resume(dir: &Path, flags: &str) -> String {
    let out = dir.zero(&format!("train --breakdown --resume {flags}"));
    agree_with_metrics(dir);
    out
}

#[test]
fn resumed_run_goes_on_in_its_files() {
    let dir = &temp();
    train(dir);
    let files = event_files(&dir.join("t"));
    let before = fs::read(&files[0]).unwrap();
    resume(dir, "c --steps 6").shows(&["\ntensorboard: ", "\ncsv: "]);
    assert_eq!(event_files(&dir.join("t")), files);
    assert!(fs::read(&files[0]).unwrap().starts_with(&before));

    // From the middle: later steps move, and an open TensorBoard drops them.
    let out = resume(dir, "c/step-00000002 --steps 5");
    let name = files[0].file_name().unwrap().display().to_string();
    let aside = format!("{}.after-step-2", name.replace("out.tfevents.", ""));
    let note = format!("{name}: 4 events after step 2 to be moved to ");
    out.shows(&[&note, &aside]);
    let steps = |file: &Path| -> Vec<u64> {
        let events = events_of_file(file);
        events.iter().map(|event| event.step).collect()
    };
    assert_eq!(steps(&dir.join("t").join(aside)), [0, 3, 4, 5, 6]);
    let files = event_files(&dir.join("t"));
    let [old, new] = &files[..] else {
        panic!("{files:?}")
    };
    assert_eq!(steps(old), [0, 1, 2]);
    assert_eq!(steps(new), [0, 3, 3, 4, 5]);
    assert!(events_of_file(new)[1].starts);

    // A copy of the folder does not take the files of the original.
    fs::rename(dir.join("c"), dir.join("moved")).unwrap();
    dir.zero("train --resume moved --steps 6")
        .shows(&["note: no tensorboard: ", "note: no csv: "]);
    agree_with_metrics(dir);
}

#[test]
fn files_of_others_are_refused() {
    let dir = &temp();
    train(dir);
    let file = event_files(&dir.join("t")).remove(0);
    let before = fs::read(&file).unwrap();
    fs::create_dir(dir.join("torch")).unwrap();
    dir.write("torch/events.out.tfevents.1.host", &before[..9]);
    fs::create_dir(dir.join("locked")).unwrap();
    let locked = fs::File::open(dir.join("locked")).unwrap();
    locked.lock().unwrap();
    let cases: [(&str, &[&str]); 5] = [
        (
            "--tensorboard t",
            &["--tensorboard t", "of another run", "another folder"],
        ),
        (
            "--csv t.csv",
            &["--csv t.csv", "of another run", "another file"],
        ),
        (
            "--tensorboard torch",
            &[
                "is not an event file of `zero train`",
                "name another folder",
            ],
        ),
        (
            "--tensorboard m",
            &["--tensorboard m: failed to read the folder"],
        ),
        (
            "--tensorboard locked",
            &["another run is writing to the folder"],
        ),
    ];
    dir.refuses_all(&cases);
    assert_eq!(fs::read(&file).unwrap(), before);
}

#[test]
fn monitors_of_deepspeed_are_followed() {
    let dir = &temp();
    let write = |text: &str| dir.write("ds.json", text);
    write(
        r#"{"train_micro_batch_size_per_gpu": 1,
            "tensorboard": {"enabled": true, "output_path": "out/logs/", "job_name": "one"},
            "csv_monitor": {"enabled": true, "output_path": "out", "job_name": "two"}}"#,
    );
    dir.tiny("--config ds.json --checkpoint c");
    let table = || dir.text("out/two/steps.csv");
    assert!(scalars(&dir.join("out/logs/one")).keys().eq(&[1, 2, 3]));
    assert_eq!(table().lines().count(), 4);
    // A resumed run goes on without the configuration.
    dir.zero("train --resume c --steps 4");
    assert!(scalars(&dir.join("out/logs/one")).keys().eq(&[1, 2, 3, 4]));
    assert_eq!(table().lines().count(), 5);
    // A flag overrides it.
    dir.tiny("--config ds.json --tensorboard t --csv t.csv");
    assert!(scalars(&dir.join("t")).keys().eq(&[1, 2, 3]));
    assert_eq!(table().lines().count(), 5);

    write(r#"{"wandb": {"enabled": true, "project": "x"}}"#);
    dir.refuses(
        "--config ds.json",
        &["wandb.enabled", "set it to false", "--tensorboard"],
    );
    dir.zero("plan --config ds.json --model gpt2-124m --gpus 2");
}
