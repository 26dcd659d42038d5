//! Data sets from files: content, order and errors.

use std::fs;
use std::path::{Path, PathBuf};

use indicatif::HumanCount;
use integration_tests::{Files, Folder, Printed};
use tokenizers::Tokenizer;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use zero_trainer::{Batch, BatchAt};

use super::{DataError, DataSource, Dataset};

const AT: BatchAt = BatchAt {
    step: 0,
    micro_batch_index: 0,
    grad_accum: 2,
    rank: 0,
    world_size: 1,
    micro_batch: 2,
    seq_len: 4,
    seed: 1,
};

/// Data in a folder.
trait Data: Files {
    fn tokens(&self, tokens: &[u16]) -> PathBuf;

    /// A byte-level tokenizer as GPT-2's, with a few merges.
    fn tokenizer(&self) -> PathBuf;
}

impl Data for Path {
    fn tokens(&self, tokens: &[u16]) -> PathBuf {
        let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        self.write("tokens.bin", bytes)
    }

    fn tokenizer(&self) -> PathBuf {
        let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
        alphabet.sort_unstable();
        let mut words: Vec<String> = alphabet.iter().map(char::to_string).collect();
        let merges = [
            ("t", "h"),
            ("th", "e"),
            ("Ġ", "the"),
            ("i", "n"),
            ("Ċ", "Ċ"),
        ];
        let merges = merges.map(|(a, b)| (a.to_owned(), b.to_owned()));

        words.extend(merges.iter().map(|(a, b)| format!("{a}{b}")));
        let vocab: Vocab = words.into_iter().zip(0..).collect();
        let model = BPE::builder().vocab_and_merges(vocab, merges.to_vec());
        let model = model.build().unwrap();

        let mut tokenizer = Tokenizer::new(model);
        tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
        tokenizer.with_decoder(Some(ByteLevel::default()));
        let path = self.join("tokenizer.json");
        tokenizer.save(&path, false).unwrap();
        path
    }
}

fn open(path: &Path) -> Dataset {
    Dataset::open(&DataSource::at(path)).unwrap()
}

fn open_error(source: &DataSource) -> String {
    let error = Dataset::open(source)
        .expect_err("the data opened")
        .to_string();
    assert!(!error.contains('\n'), "more than one line: {error}");
    error
}

fn batch(data: &Dataset, at: BatchAt) -> (Vec<u32>, Vec<u32>) {
    let n = at.micro_batch * at.seq_len;
    let mut batch = Batch::plain(vec![u32::MAX; n], vec![u32::MAX; n]);
    data.batch(at, &mut batch).unwrap();
    assert_eq!(batch.divisor, n as f64);
    (batch.inputs, batch.targets)
}

#[test]
fn token_file_is_read_in_order() {
    let files = &Folder::on_disk();
    let data = open(&files.tokens(&(1000..1040).collect::<Vec<_>>()));
    data.validate(1040, 4).unwrap();
    assert_eq!(data.len_tokens(), 40);
    let (inputs, targets) = batch(&data, AT);
    assert_eq!(inputs, (1000..1008).collect::<Vec<_>>());
    assert_eq!(targets, (1001..1009).collect::<Vec<_>>());

    let (inputs, targets) = batch(
        &data,
        BatchAt {
            step: 1,
            micro_batch_index: 1,
            ..AT
        },
    );

    assert_eq!(inputs, (1024..1032).collect::<Vec<_>>());
    assert_eq!(targets, (1025..1033).collect::<Vec<_>>());
    // 9 windows fit, so the tenth row is the first window.
    let (inputs, targets) = batch(&data, BatchAt { step: 2, ..AT });
    assert_eq!(inputs, [1032, 1033, 1034, 1035, 1000, 1001, 1002, 1003]);
    assert_eq!(targets, [1033, 1034, 1035, 1036, 1001, 1002, 1003, 1004]);
}

#[test]
fn text_is_read_in_random_windows() {
    let files = &Folder::on_disk();
    let text: Vec<u8> = (32..=255).cycle().take(2000).collect();
    let data = open(&files.write("text.txt", &text));
    data.validate(256, 4).unwrap();
    let (inputs, targets) = batch(&data, AT);
    for (row, targets) in inputs.chunks(4).zip(targets.chunks(4)) {
        let all: Vec<u8> = row.iter().chain(&targets[3..]).map(|t| *t as u8).collect();
        assert!(
            text.windows(5).any(|w| w == all),
            "{all:?} is a window of the text"
        );
        assert_eq!(row[1..], targets[..3]);
    }
    assert_eq!(batch(&data, AT), batch(&data, AT));
    assert_ne!(batch(&data, AT), batch(&data, BatchAt { seed: 2, ..AT }));
    assert_ne!(batch(&data, AT), batch(&data, BatchAt { step: 1, ..AT }));
}

#[test]
fn rows_do_not_depend_on_world_size() {
    let files = &Folder::on_disk();
    for path in [
        files.tokens(&(0..500).collect::<Vec<_>>()),
        files.write("a.txt", [7; 333]),
    ] {
        let data = open(&path);
        let (whole, _) = batch(
            &data,
            BatchAt {
                micro_batch: 4,
                step: 3,
                ..AT
            },
        );
        let parts = [0, 1].map(|rank| {
            batch(
                &data,
                BatchAt {
                    rank,
                    world_size: 2,
                    step: 3,
                    ..AT
                },
            )
            .0
        });
        assert_eq!(whole, parts.concat());
    }
}

#[test]
fn folder_concatenates_its_text_files() {
    let files = &Folder::on_disk();
    files.write("b.txt", b"world\n");
    files.write("a.txt", b"hello");
    files.write("c.bin", b"\0\0");
    let data = open(files);
    assert_eq!(data.len_tokens(), 12);
    let (inputs, _) = batch(
        &data,
        BatchAt {
            micro_batch: 1,
            seq_len: 11,
            ..AT
        },
    );
    assert_eq!(inputs, b"hello\nworld".map(u32::from));
    let expected = format!(
        "{}: 2 text files (1 left out), 12 bytes, read as bytes",
        files.display()
    );
    assert_eq!(data.describe(), expected);
}

/// A README beside data that is not read is not the data.
#[test]
fn folder_of_other_data_is_an_error() {
    let files = &Folder::on_disk();
    let dir = files.display().to_string();
    let source = DataSource::at(files.to_path_buf());
    let error = |source: &DataSource| open_error(source).replace(&dir, "DIR");
    fs::create_dir(files.join("data")).unwrap();
    files.write("README.md", b"the data of a study");
    files.write("data/train.parquet", b"PAR1\0\0");
    assert_eq!(
        error(&source),
        "DIR: no data but README.md is text in this folder; left out of the data: data/train.parquet, 6 bytes (parquet); \
         pass the file or the folder of the data, or README.md itself"
    );

    files.write("data/a.jsonl", b"{\"text\": \"a\"}");
    assert_eq!(
        error(&source),
        "DIR: the only data here are files of examples (data/a.jsonl): pass one of them, or a folder of them alone, with --data"
    );

    files.write("notes.txt", b"notes");
    files.write("weights.gz", b"\x1f\x8b\x08\0");
    let data = open(files);
    assert!(
        data.describe().contains("3 text files (2 left out)"),
        "{}",
        data.describe()
    );
    assert_eq!(
        data.notices(),
        [
            "left out of the data: data/train.parquet, 6 bytes (parquet)",
            "left out of the data: weights.gz, 4 bytes (a gzip archive)",
            "data/a.jsonl is read as text, with its JSON, as all files of the folder are; to train on its rows, pass the file",
        ]
    );
    let tokenizer = &Folder::on_disk();
    let by_tokenizer = source.with_tokenizer(tokenizer.tokenizer());
    assert_eq!(
        Dataset::open(&by_tokenizer).unwrap().notices(),
        data.notices()
    );
}

/// The tokens behind the header, and not the header.
#[test]
fn header_of_a_token_file_is_not_trained() {
    let files = &Folder::on_disk();
    let tokens: Vec<u8> = (1000_u16..1040).flat_map(u16::to_le_bytes).collect();
    let mut llmc = vec![0_u8; 1024];
    for (word, value) in [(0, 20240520_u32), (1, 1), (2, 40)] {
        llmc[word * 4..word * 4 + 4].copy_from_slice(&value.to_le_bytes());
    }
    let text = "{'descr': '<u2', 'fortran_order': False, 'shape': (40,), }";
    let numpy = [
        b"\x93NUMPY\x01\0\x76\0",
        format!("{text:<117}\n").as_bytes(),
    ]
    .concat();

    let plain = open(&files.write("plain.bin", &tokens));
    for (name, header, by) in [
        ("llmc.bin", llmc, "u16 by the header of llm.c"),
        ("numpy.bin", numpy, "u16 by the header of numpy"),
    ] {
        let path = files.write(name, [&header[..], &tokens].concat());
        let data = open(&path);
        assert_eq!(data.len_tokens(), 40, "{name}");
        assert_eq!(data.fingerprint(), plain.fingerprint(), "{name}");
        assert_eq!(batch(&data, AT), batch(&plain, AT), "{name}");
        let expected = format!("{}: 40 tokens, in order, {by}", path.display());
        assert_eq!(data.describe(), expected);
        assert!(matches!(
            data.validate(1039, 4),
            Err(DataError::OutsideVocabulary {
                token: 1039,
                position: 39,
                ..
            })
        ));
    }
}

#[test]
fn tokens_equal_those_of_the_whole_text() {
    let files = &Folder::on_disk();
    let tokenizer = files.tokenizer();
    let line = "in the beginning\n\n\nthe th\n\néâtre\nthe thin\n    then: the\n";
    let text = line.repeat(8000);
    let path = files.write("text.txt", text.as_bytes());
    let data = Dataset::open(&DataSource::at(&path).with_tokenizer(&tokenizer)).unwrap();
    let whole = Tokenizer::from_file(&tokenizer)
        .unwrap()
        .encode(text, false)
        .unwrap();
    let n = whole.get_ids().len();
    assert_eq!(data.len_tokens(), n as u64);

    // A single window of n - 1 inputs and targets is the whole text.
    let (inputs, targets) = batch(
        &data,
        BatchAt {
            micro_batch: 1,
            seq_len: n - 1,
            ..AT
        },
    );

    assert!(inputs == whole.get_ids()[..n - 1] && targets == whole.get_ids()[1..]);
    assert!(
        data.describe()
            .ends_with(&format!("{} tokens", HumanCount(n as u64))),
        "{}",
        data.describe()
    );
    data.validate(261, 64).unwrap();
    assert!(matches!(
        data.validate(260, 64),
        Err(DataError::OutsideVocabulary { token: 260, .. })
    ));
}

#[test]
fn folder_is_tokenized_file_by_file() {
    let files = &Folder::on_disk();
    let tokenizer = files.tokenizer();
    let texts = files.join("texts");
    fs::create_dir(&texts).unwrap();
    texts.write("1", "the");
    texts.write("2", "in\n");
    let data = Dataset::open(&DataSource::at(&texts).with_tokenizer(&tokenizer)).unwrap();
    assert_eq!(data.len_tokens(), 4, "the, line break, in, line break");
}

#[test]
fn missing_empty_or_malformed_data_is_named() {
    let files = &Folder::on_disk();
    let dir = files.display().to_string();
    let tokenizer = files.tokenizer();
    let broken = files.write("broken.json", b"{}");
    let latin1 = files.write("latin1.txt", b"caf\xe9 au lait");

    let cases = [
        (
            DataSource::at(files.join("none.txt")),
            "DIR/none.txt: no such file or folder",
        ),
        (
            DataSource::at("/dev/zero"),
            "/dev/zero: neither a file nor a folder; copy its content to a file",
        ),
        (
            DataSource::at(files.write("empty.bin", b"")),
            "DIR/empty.bin: the data file is empty",
        ),
        (
            DataSource::at(files.write("empty.txt", b"")),
            "DIR/empty.txt: the data file is empty",
        ),
        (
            DataSource::at(files.write("odd.bin", b"abc")),
            "DIR/odd.bin: 3 bytes are not a whole number of 2-byte tokens",
        ),
        (
            DataSource::at(&latin1).with_tokenizer(&tokenizer),
            "DIR/latin1.txt: not UTF-8 text at byte 3; a tokenizer needs UTF-8",
        ),
        (
            DataSource::at(&latin1).with_tokenizer(files.join("no.json")),
            "DIR/no.json: no such file or folder",
        ),
    ];

    for (source, expected) in cases {
        assert_eq!(open_error(&source).replace(&dir, "DIR"), expected);
    }
    let error = open_error(&DataSource::at(&latin1).with_tokenizer(&broken)).replace(&dir, "DIR");
    assert!(error.starts_with("DIR/broken.json: "), "{error}");
}

#[test]
fn unfit_data_is_an_error_with_the_position() {
    let files = &Folder::on_disk();
    let mut tokens = vec![5; 3_000_000];
    tokens[2_345_678] = 256;
    tokens[2_345_679] = 999;
    let path = files.tokens(&tokens);
    let data = open(&path);
    data.validate(1000, 64).unwrap();
    let expected = "token 256 at position 2345678 is outside the model's vocabulary of 256: the model and the tokens \
                    must be of the same tokenizer: pass the model's with --tokenizer, or tokens made by it";
    assert_eq!(
        data.validate(256, 64).unwrap_err().to_string(),
        format!("{}: {expected}", path.display())
    );
    let text = open(&files.write("text.txt", b"abcabc"));
    let error = text.validate(99, 3).unwrap_err().to_string();
    error.shows(&["token 99 at position 2 is outside the model's vocabulary of 99"]);
    let error = text.validate(256, 6).unwrap_err().to_string();
    assert!(
        error.ends_with("text.txt: 6 tokens are too few for --seq-len 6: 7 are needed"),
        "{error}"
    );
    text.validate(256, 5).unwrap();
}

#[test]
fn invalid_batch_is_an_error() {
    let files = &Folder::on_disk();
    let data = open(&files.tokens(&[1; 20]));
    let call =
        |at, inputs, targets| data.batch(at, &mut Batch::plain(vec![0; inputs], vec![0; targets]));
    call(AT, 8, 8).unwrap();
    call(
        BatchAt {
            micro_batch: 0,
            ..AT
        },
        0,
        0,
    )
    .unwrap();

    let cases = [
        (
            AT,
            7,
            8,
            "invalid batch: 2 x 4 tokens do not fit 7 inputs and 8 targets",
        ),
        (
            AT,
            8,
            9,
            "invalid batch: 2 x 4 tokens do not fit 8 inputs and 9 targets",
        ),
        (
            BatchAt { seq_len: 0, ..AT },
            0,
            0,
            "invalid batch: 2 x 0 tokens do not fit 0 inputs and 0 targets",
        ),
        (
            BatchAt {
                micro_batch: usize::MAX,
                ..AT
            },
            8,
            8,
            "invalid batch: 18446744073709551615 x 4 tokens",
        ),
        (
            BatchAt { seq_len: 20, ..AT },
            40,
            40,
            "invalid batch: BatchAt",
        ),
        (BatchAt { rank: 1, ..AT }, 8, 8, "invalid batch: BatchAt"),
    ];

    for (at, inputs, targets, expected) in cases {
        let error = call(at, inputs, targets).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn token_file_truncated_while_open_is_an_error() {
    let files = &Folder::on_disk();
    let path = files.tokens(&[1; 100]);
    let data = open(&path);
    fs::write(&path, b"ab").unwrap();
    let error = data.batch(AT, &mut Batch::zeros(8)).unwrap_err();
    assert!(
        matches!(&error, DataError::Read { path: p, .. } if *p == path),
        "{error}"
    );
}

#[test]
fn unigram_loss_is_the_entropy() {
    let files = &Folder::on_disk();
    let loss = |tokens: &[u16]| open(&files.tokens(tokens)).unigram_loss();
    assert_eq!(loss(&[3; 10]), 0.0);
    assert!((loss(&[0, 1, 2, 3]) - 4f64.ln()).abs() < 1e-12);
    let quarter = 0.25 * 4f64.ln() + 0.75 * (4.0 / 3.0f64).ln();
    assert!((loss(&[9, 9, 7, 9]) - quarter).abs() < 1e-12);
    let text = open(&files.write("text.txt", b"aab")).unigram_loss();
    assert!((text - (2.0 / 3.0 * 1.5f64.ln() + 3f64.ln() / 3.0)).abs() < 1e-12);
}

#[test]
fn fingerprint_changes_with_any_token() {
    let files = &Folder::on_disk();
    let of = |bytes: &[u8]| open(&files.write("text.txt", bytes)).fingerprint();
    assert_eq!(of(b"some text"), of(b"some text"));
    assert_ne!(of(b"some text"), of(b"some tent"));
    assert_ne!(of(b"some text"), of(b"some text "));
}

#[test]
fn fingerprint_does_not_depend_on_the_path() {
    let fingerprint = |names: [&str; 3]| {
        let files = &Folder::on_disk();
        names
            .into_iter()
            .for_each(|name| drop(files.write(name, name.as_bytes())));
        open(files).fingerprint()
    };
    assert_eq!(fingerprint(["a", "B", "c"]), fingerprint(["c", "a", "B"]));
    assert_ne!(fingerprint(["a", "B", "c"]), fingerprint(["a", "B", "d"]));
}

#[test]
fn current_folder_is_the_default() {
    // Tests run in the crate's folder, which has text.
    let data = Dataset::open(&DataSource::default()).unwrap();
    assert!(data.describe().starts_with(".: "), "{}", data.describe());
    let error = DataError::TooLittleHere {
        path: "/home/a".into(),
        bytes: 12,
        needed: 65536,
        left_out: None,
    }
    .to_string();
    let expected = "the current folder /home/a has only 12 bytes of text (65,536 needed): \
                    pass --data with a text file, a folder or tokens.bin";
    assert_eq!(error, expected);
}

#[test]
fn wide_token_file_is_read_in_order() {
    let files = &Folder::on_disk();
    let bytes = |tokens: &[u32]| {
        tokens
            .iter()
            .flat_map(|t| t.to_le_bytes())
            .collect::<Vec<_>>()
    };
    let tokens: Vec<u32> = (128_000..128_020).collect();
    let data = open(&files.write("tokens.u32.bin", bytes(&tokens)));
    assert_eq!(data.len_tokens(), 20);
    data.validate(128_020, 4).unwrap();
    let (inputs, targets) = batch(&data, AT);
    assert_eq!(inputs, tokens[..8]);
    assert_eq!(targets, tokens[1..9]);

    let error = data.validate(128_019, 4).unwrap_err().to_string();
    error.shows(&["token 128019 at position 19 is outside"]);
    // No token of any vocabulary.
    let data = open(&files.write(
        "large.u32.bin",
        [[0xff; 4], [5, 0, 0, 0], [6, 0, 0, 0]].concat().repeat(4),
    ));
    let error = data.validate(256, 4).unwrap_err().to_string();
    error.shows(&["token 4294967295 at position 0 is outside"]);
    let error = open_error(&DataSource::at(files.write("odd.u32.bin", [0; 6])));
    assert!(
        error.ends_with("6 bytes are not a whole number of 4-byte tokens"),
        "{error}"
    );
}

#[test]
fn narrow_tokens_fit_a_large_vocabulary() {
    let files = &Folder::on_disk();
    open(&files.tokens(&[65_535; 20]))
        .validate(128_256, 4)
        .unwrap();
}

/// All tokens of a data set.
fn all_tokens(data: &Dataset) -> Vec<u32> {
    let n = data.len_tokens() as usize;
    let at = BatchAt {
        micro_batch: 1,
        seq_len: n - 1,
        ..AT
    };
    let (inputs, targets) = batch(data, at);
    [&inputs[..], &targets[n - 2..]].concat()
}

#[test]
fn end_token_follows_each_file_of_a_folder() {
    let files = &Folder::on_disk();
    let tokenizer = files.tokenizer();
    let texts = files.join("texts");
    fs::create_dir(&texts).unwrap();
    texts.write("1", "the");
    texts.write("2", "the\n");
    let tokens =
        || all_tokens(&Dataset::open(&DataSource::at(&texts).with_tokenizer(&tokenizer)).unwrap());
    let plain = tokens();
    let [the, line] = [plain[0], plain[1]];
    assert_eq!(plain, [the, line, the, line]);

    // Of the tokenizer's own settings first, and only if it is one of its tokens.
    files.write("config.json", br#"{"eos_token_id": 9999}"#);
    assert_eq!(tokens(), plain);
    files.write("config.json", br#"{"eos_token_id": 5}"#);
    assert_eq!(tokens(), [the, line, 5, the, line, 5]);
    files.write(
        "tokenizer_config.json",
        br#"{"eos_token": {"content": "the"}}"#,
    );
    assert_eq!(tokens(), [the, line, the, the, line, the]);
    // A file alone is no part of a series.
    let file = DataSource::at(texts.join("2")).with_tokenizer(&tokenizer);
    assert_eq!(all_tokens(&Dataset::open(&file).unwrap()), [the, line]);
}

#[test]
fn start_token_is_that_of_the_post_processor() {
    let files = &Folder::on_disk();
    let path = files.tokenizer();
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    json["post_processor"] = serde_json::json!({
        "type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "in", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"in": {"id": "in", "ids": [7], "tokens": ["in"]}},
    });
    fs::write(&path, json.to_string()).unwrap();
    let text = files.write("text.txt", b"the the");
    let data = Dataset::open(&DataSource::at(&text).with_tokenizer(&path)).unwrap();
    let tokens = all_tokens(&data);
    assert_eq!((tokens.len(), tokens[0]), (3, 7));
}

/// Text of more than the cache's least size, and its source with a cache.
fn cached(files: &Folder) -> DataSource {
    let text = files.write(
        "text.txt",
        "in the beginning\nthe thin\n".repeat(50_000).as_bytes(),
    );
    DataSource {
        token_cache: Some(files.join("cache")),
        ..DataSource::at(text).with_tokenizer(files.tokenizer())
    }
}

/// The kept files with an extension.
fn kept(files: &Folder, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(files.join("cache")).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.to_string_lossy().ends_with(extension))
        .collect()
}

#[test]
fn tokens_are_kept_and_read_again() {
    let files = &Folder::on_disk();
    let source = cached(files);
    let without = DataSource {
        token_cache: None,
        ..source.clone()
    };
    let expected = Dataset::open(&without).unwrap();
    assert!(expected.notices().is_empty());

    let first = Dataset::open(&source).unwrap();
    assert!(
        first.notices()[0].contains("--no-token-cache"),
        "{:?}",
        first.notices()
    );
    let second = Dataset::open(&source).unwrap();
    assert!(
        second.notices()[0].starts_with("tokens read from "),
        "{:?}",
        second.notices()
    );
    for data in [&first, &second] {
        assert_eq!(data.fingerprint(), expected.fingerprint());
        assert_eq!(data.describe(), expected.describe());
        assert_eq!(batch(data, AT), batch(&expected, AT));
    }
    assert!(kept(files, ".part").is_empty());

    // Other contents, or another tokenizer, are other tokens.
    let path = source.path.as_ref().unwrap();
    let mut text = fs::read(path).unwrap();
    text[0] = b'a';
    fs::write(path, text).unwrap();
    assert_ne!(
        Dataset::open(&source).unwrap().fingerprint(),
        expected.fingerprint()
    );
    files.write("config.json", br#"{"eos_token_id": 5}"#);
    Dataset::open(&source).unwrap();
    assert_eq!(
        kept(files, ".u32.bin").len(),
        2,
        "a file alone has no end token"
    );
}

#[test]
fn damaged_kept_tokens_are_made_again() {
    let files = &Folder::on_disk();
    let source = cached(files);
    let expected = Dataset::open(&source).unwrap().fingerprint();
    let tokens = kept(files, ".u32.bin").remove(0);
    let description = kept(files, ".json").remove(0);
    let whole = fs::read(&tokens).unwrap();

    let mut flipped = whole.clone();
    flipped[1000] ^= 1;
    for damaged in [&flipped[..], &whole[..400], &[]] {
        fs::write(&tokens, damaged).unwrap();
        assert_eq!(Dataset::open(&source).unwrap().fingerprint(), expected);
        assert_eq!(fs::read(&tokens).unwrap(), whole);
    }
    fs::write(&description, b"{").unwrap();
    assert_eq!(Dataset::open(&source).unwrap().fingerprint(), expected);
}

#[test]
fn tokens_stay_in_memory_without_a_cache_folder() {
    let files = &Folder::on_disk();
    let source = DataSource {
        token_cache: Some(files.write("no-folder", b"mine")),
        ..cached(files)
    };
    let data = Dataset::open(&source).unwrap();
    let notice = &data.notices()[0];
    notice.shows(&["kept in memory", "ZERO_TOKEN_CACHE"]);
    assert_eq!(files.bytes("no-folder"), b"mine");
}
