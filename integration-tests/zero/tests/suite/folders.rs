//! Model folders as a stranger could send them: each command ends with an error that names the
//! file, in bounded time and memory.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};

use crate::support::{Files, Runs, fails, succeeds, temp, wait_until, words};
use crate::{place, support};

/// Addresses that a run may use, in KiB: one that reads without bound fails soon.
const ADDRESSES_KIB: &str = "8388608";

const CHAT: &str = r#"{"messages": [{"role": "user", "content": "w2 w3"}, {"role": "assistant", "content": "w4"}]}"#;

/// A command that uses a folder.
#[derive(Clone, Copy)]
enum Use {
    Train,
    Inspect,
    Generate,
}

/// A folder, and what its error must have.
struct Case {
    name: String,
    used: Use,
    /// The file that the error names.
    file: &'static str,
    expected: &'static str,
    change: Box<dyn Fn(&Path) + Sync>,
}

/// A tokenizer of the words `w2` to `w95`, which is good.
fn tokenizer() -> Value {
    let special = |id: usize, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false, "special": true})
    };
    let mut vocab = json!({"<unk>": 0, "<eos>": 1});
    for id in 2..96 {
        vocab[format!("w{id}")] = json!(id);
    }
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "added_tokens": [special(0, "<unk>"), special(1, "<eos>")],
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    })
}

/// Writes a good folder.
pub(crate) fn write(dir: &Path) {
    let model = support::data("model");
    fs::create_dir(dir).unwrap();
    for name in ["config.json", "model.safetensors"] {
        symlink(Path::new(&model).join(name), dir.join(name)).unwrap();
    }
    dir.write("tokenizer.json", tokenizer().to_string());
    let special = json!({"eos_token": "<eos>", "unk_token": "<unk>"});
    dir.write("tokenizer_config.json", special.to_string());
    let template = "{% for m in messages %}{{ m.content }} <eos>{% endfor %}";
    dir.write("chat_template.jinja", template);
}

/// Runs a command on the folder in `dir`.
fn run(dir: &Path, used: Use) -> Output {
    let args = match used {
        Use::Train => {
            "train --model model --data text.txt --seq-len 16 --micro-batch 1 --ranks 1 --steps 1 \
             --device cpu --no-token-cache"
        }
        Use::Inspect => "data inspect --model model --data chat.jsonl",
        Use::Generate => "generate --model model --prompt w2 --tokens 2",
    };
    dir.write("text.txt", "w2 w3 w4 w5 ".repeat(50));
    dir.write("chat.jsonl", format!("{CHAT}\n"));

    let limited = format!("ulimit -v {ADDRESSES_KIB}; exec \"$0\" \"$@\"");
    let mut child = Command::new("sh")
        .arg("-c")
        .arg(limited)
        .arg(place::zero().get_program())
        .args(words(args))
        .current_dir(dir)
        .stdout(File::create(dir.join("out")).unwrap())
        .stderr(File::create(dir.join("err")).unwrap())
        .spawn()
        .unwrap();
    let mut status = None;
    wait_until("a run on a folder ends", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    Output {
        status: status.unwrap(),
        stdout: dir.bytes("out"),
        stderr: dir.bytes("err"),
    }
}

/// Each file as something that cannot be read.
fn file_cases() -> Vec<Case> {
    let files: [(&'static str, Use); 8] = [
        ("config.json", Use::Generate),
        ("generation_config.json", Use::Generate),
        ("tokenizer.json", Use::Train),
        ("tokenizer_config.json", Use::Inspect),
        ("special_tokens_map.json", Use::Inspect),
        ("chat_template.jinja", Use::Inspect),
        ("model.safetensors", Use::Generate),
        ("model.safetensors.index.json", Use::Train),
    ];
    let mut cases = Vec::new();
    for (file, used) in files {
        for (kind, expected) in [
            ("pipe", "not a regular file"),
            ("device", "not a regular file"),
            ("socket", "not a regular file"),
            ("folder", "a folder, where a file is expected"),
            (
                "dangling",
                "a symbolic link to a file that does not exist here",
            ),
            ("huge", ""),
        ] {
            // All kinds of two files, which are read in two ways, and two kinds of the others.
            let is_whole = file == "config.json" || file == "tokenizer.json";
            if !is_whole && kind != "pipe" && kind != "dangling" {
                continue;
            }
            let change = move |dir: &Path| {
                let path = dir.join(file);
                let _absent = fs::remove_file(&path);
                match kind {
                    "pipe" => mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap(),
                    "device" => symlink("/dev/zero", &path).unwrap(),
                    "socket" => drop(UnixListener::bind(&path).unwrap()),
                    "folder" => fs::create_dir(&path).unwrap(),
                    "dangling" => symlink("../../blobs/0123abcd", &path).unwrap(),
                    _ => File::create(&path).unwrap().set_len(1 << 32).unwrap(),
                }
            };
            let expected = if kind == "huge" {
                "longer than"
            } else {
                expected
            };
            cases.push(Case {
                name: format!("{file} {kind}"),
                used,
                file,
                expected,
                change: Box::new(change),
            });
        }
    }
    cases
}

/// Templates that do not end, or take memory without bound.
fn template_cases() -> Vec<Case> {
    let doubled = |init: &str, step: &str| {
        format!(
            "{{% set ns = namespace(x={init}) %}}{{% for a in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}{{{{ ns.x }}}}"
        )
    };
    let big = "{% set a = 'a' * 10**8 %}";
    let time = "more than 1 s of processor time";
    // Which limit a rendering meets first depends on the machine.
    let memory = "a rendering ";
    let stack = "a rendering ";
    let templates = [
        (
            "loops",
            "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}".to_owned(),
            time,
        ),
        ("long list", "{% if 'x' in (range(99999) | list) * 10**9 %}{% endif %}".to_owned(), "a list is repeated too often"),
        ("doubling", doubled("'aaaaaaaa'", "ns.x ~ ns.x"), memory),
        ("adding", doubled("'aaaaaaaa'", "ns.x + ns.x"), memory),
        ("replace", doubled("'aaaaaaaa'", "ns.x | replace('a', 'aa')"), ""),
        ("method", doubled("'aaaaaaaa'", "ns.x.replace('a', 'aa')"), ""),
        ("join", format!("{big}{{{{ [1, 2, 3, 4, 5, 6, 7, 8] | join(a) }}}}"), memory),
        ("list", "{{ ((range(99999) | list) * 99999) | list }}".to_owned(), ""),
        ("format", "{{ '%999999999d' | format(1) }}".to_owned(), ""),
        ("capture", "{% set x %}{% for a in range(99999) %}{% for b in range(99) %}0123456789012345678901234567890123456789{% endfor %}{% endfor %}{% endset %}".to_owned(), ""),
        ("output", "{% for a in range(99999) %}0123456789012345678901234567890123456789{% endfor %}".to_owned(), "at most"),
        ("indent", "{{ messages | tojson(indent=99999999999999) }}".to_owned(), ""),
        ("nesting", "{% set ns = namespace(x=[]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}".to_owned(), stack),
        ("macro", "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}".to_owned(), ""),
        ("include", "{% include 'chat' %}".to_owned(), ""),
        ("operators", format!("{{{{ 1{} }}}}", "+1".repeat(300_000)), ""),
    ];
    let case = |(name, text, expected): (&str, String, &'static str)| Case {
        name: format!("template {name}"),
        used: Use::Inspect,
        file: "chat_template.jinja",
        expected,
        change: Box::new(move |dir| drop(dir.write("chat_template.jinja", &text))),
    };
    templates.into_iter().map(case).collect()
}

/// Tokenizers that blow up, never end or panic.
fn tokenizer_cases() -> Vec<Case> {
    let with = |key: &str, value: Value| {
        let mut all = tokenizer();
        all[key] = value;
        all
    };
    let template = |single: Value, special: Value| {
        with(
            "post_processor",
            json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}),
        )
    };
    let text_of = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let token_of = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
    let replace = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
    let unigram = |vocab: Value| {
        with(
            "model",
            json!({"type": "Unigram", "unk_id": 0, "vocab": vocab}),
        )
    };
    let nested: Vec<Value> = (1..400).map(|n| json!(["w".repeat(n), -1.0])).collect();
    let bpe = |merges: Value| {
        let vocab = json!({"<unk>": 0, "<eos>": 1, "w": 2, "ww": 3});
        with(
            "model",
            json!({"type": "BPE", "vocab": vocab, "merges": merges}),
        )
    };

    let cases = [
        (
            "token missing",
            template(json!([token_of("X"), text_of("A")]), json!({})),
            "the token \"X\"",
        ),
        (
            "text missing",
            template(json!([]), json!({})),
            "must have that text",
        ),
        (
            "second text",
            template(json!([text_of("B")]), json!({})),
            "must have that text",
        ),
        (
            "text twice",
            template(json!([text_of("A"), text_of("A")]), json!({})),
            "must have that text",
        ),
        (
            "many tokens",
            template(
                json!([token_of("X"), text_of("A")]),
                json!({"X": {"id": "X", "ids": vec![1; 1000], "tokens": vec!["<eos>"; 1000]}}),
            ),
            "1000 tokens around each text",
        ),
        (
            "charsmap 1",
            with(
                "normalizer",
                json!({"type": "Precompiled", "precompiled_charsmap": "/////wAAAAAAAAAA"}),
            ),
            "precompiled_charsmap",
        ),
        (
            "charsmap 2",
            with(
                "normalizer",
                json!({"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}),
            ),
            "leads outside its table",
        ),
        (
            "fixed length",
            with("pre_tokenizer", json!({"type": "FixedLength", "length": 0})),
            "the length 0",
        ),
        (
            "growth",
            with(
                "normalizer",
                json!({"type": "Sequence", "normalizers": vec![replace(json!({"String": "w"}), &"w".repeat(20)); 3]}),
            ),
            "it may make 400 bytes of one",
        ),
        (
            "growth of nothing",
            with(
                "normalizer",
                replace(json!({"Regex": "x*"}), &"w".repeat(64)),
            ),
            "it may make 65",
        ),
        (
            "empty pattern",
            with("normalizer", replace(json!({"String": ""}), "w")),
            "an empty pattern",
        ),
        (
            "prepend",
            with(
                "normalizer",
                json!({"type": "Prepend", "prepend": "x".repeat(1_000_000)}),
            ),
            "1000000 bytes before each text",
        ),
        (
            "empty split",
            with(
                "pre_tokenizer",
                json!({"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": false}),
            ),
            "an empty pattern",
        ),
        (
            "backtracking",
            with(
                "pre_tokenizer",
                json!({"type": "Split", "pattern": {"Regex": "(?=w)(w+)+(?<!w)\\1z"}, "behavior": "Isolated", "invert": false}),
            ),
            "may never end",
        ),
        (
            "many steps",
            with(
                "normalizer",
                json!({"type": "Sequence", "normalizers": vec![json!({"type": "Lowercase"}); 100_000]}),
            ),
            "more than 64",
        ),
        (
            "decoder",
            with(
                "decoder",
                replace(json!({"String": "w"}), &"w".repeat(1000)),
            ),
            "its decoder",
        ),
        (
            "long words",
            with(
                "model",
                json!({"type": "WordPiece", "unk_token": "[U]", "continuing_subword_prefix": "",
                       "max_input_chars_per_word": 10_u64.pow(18), "vocab": {"a": 0, "[U]": 1}}),
            ),
            "max_input_chars_per_word",
        ),
        (
            "long tokens",
            unigram(json!([vec![json!(["<unk>", 0.0])], nested].concat())),
            "its longest token",
        ),
        (
            "unknown id",
            with(
                "model",
                json!({"type": "Unigram", "unk_id": 7, "vocab": [["<unk>", 0.0]]}),
            ),
            "",
        ),
        ("merge of no tokens", bpe(json!(["w x"])), ""),
        ("merge into no token", bpe(json!(["w ww"])), ""),
        (
            "huge id",
            with(
                "model",
                json!({"type": "WordLevel", "vocab": {"<unk>": 0, "w2": 4_294_967_295_u32}, "unk_token": "<unk>"}),
            ),
            "the id 4294967295",
        ),
        (
            "negative length",
            with(
                "truncation",
                json!({"direction": "Right", "max_length": -1, "strategy": "LongestFirst", "stride": 0}),
            ),
            "",
        ),
        ("no JSON", json!("text"), ""),
    ];
    let case = |(name, all, expected): (&str, Value, &'static str)| Case {
        name: format!("tokenizer {name}"),
        used: Use::Train,
        file: "tokenizer.json",
        expected,
        change: Box::new(move |dir| drop(dir.write("tokenizer.json", all.to_string()))),
    };
    cases.into_iter().map(case).collect()
}

#[test]
fn folder_of_a_stranger_is_used_or_named() {
    let dir = &temp();
    write(&dir.join("model"));
    for used in [Use::Train, Use::Inspect, Use::Generate] {
        succeeds(&run(dir, used));
    }
}

/// As many at a time as there are cores.
#[test]
fn folder_of_a_stranger_ends_with_its_error() {
    let mut cases = file_cases();
    cases.extend(template_cases());
    cases.extend(tokenizer_cases());
    let next = AtomicUsize::new(0);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let dir = &temp();
                    let model = dir.join("model");
                    write(&model);
                    (case.change)(&model);
                    let output = run(dir, case.used);
                    eprintln!("{}: {}", case.name, String::from_utf8_lossy(&output.stderr));
                    fails(&output, 2, &[case.file, case.expected]);
                    let text = String::from_utf8_lossy(&output.stderr);
                    assert!(!text.contains("a bug"), "{}: {text}", case.name);
                }
            });
        }
    });
}

#[test]
fn contradicting_launchers_are_errors() {
    let dir = &temp();
    for variables in [
        &[("RANK", "2"), ("WORLD_SIZE", "2")][..],
        &[("RANK", "0")],
        &[("WORLD_SIZE", "2")],
        &[("RANK", "0"), ("WORLD_SIZE", "2")],
        &[("RANK", "x"), ("WORLD_SIZE", "2")],
        &[("SLURM_STEP_NUM_TASKS", "2")],
        &[("SLURM_PROCID", "1")],
        &[("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "0")],
        &[("OMPI_COMM_WORLD_SIZE", "2")],
        &[("OMPI_COMM_WORLD_RANK", "0")],
        &[("OMPI_COMM_WORLD_RANK", "2"), ("OMPI_COMM_WORLD_SIZE", "2")],
        &[("PMI_SIZE", "two"), ("PMI_RANK", "0")],
        &[("PMI_RANK", "1")],
    ] {
        let mut run = dir.tiny_command("--device cpu --steps 1");
        let output = run.envs(variables.iter().copied()).output().unwrap();
        fails(&output, 2, &[variables[0].0]);
    }
}
