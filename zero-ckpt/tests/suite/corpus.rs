//! The fuzz targets on their corpus and on damaged copies of it. To run the fuzzer itself:
//! `cargo +nightly fuzz run manifest_body` in this crate (see `fuzz/`).

#[path = "../../fuzz/targets.rs"]
#[allow(unreachable_pub)]
mod targets;

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use zero_ckpt::TensorEntry;
use zero_ckpt::testing::Header;

type Target = (&'static str, fn(&[u8]));
const TARGETS: [Target; 4] = [
    ("manifest", targets::manifest),
    ("manifest_body", targets::manifest_body),
    ("header", targets::header),
    ("shard_file", targets::shard_file),
];

fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/corpus")
        .join(target);
    let mut files: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    files.sort();
    files
        .into_iter()
        .map(|path| (path.clone(), std::fs::read(path).unwrap()))
        .collect()
}

#[test]
fn corpus_does_not_panic() {
    for (name, target) in TARGETS {
        let files = corpus(name);
        assert!(!files.is_empty(), "{name} has no corpus");
        for (path, bytes) in files {
            eprintln!("{}", path.display());
            target(&bytes);
        }
    }
}

/// Valid inputs; damaged copies of them pass more checks than random bytes do.
fn good(target: &str) -> Vec<u8> {
    let mut manifest = targets::sample_manifest();
    manifest.run = Some("a".into());
    let document = serde_json::json!({"name": "run.json", "bytes": 3, "crc64": "0000000000000007"});
    manifest.documents = vec![serde_json::from_value(document).unwrap()];
    match target {
        "manifest" => manifest.encode().unwrap(),
        "manifest_body" => serde_json::to_vec(&manifest).unwrap(),
        _ => shard(),
    }
}

fn shard() -> Vec<u8> {
    let tensor = |name: &str, dtype: &str, elems: u64, start: u64, end: u64| TensorEntry {
        name: name.into(),
        dtype: dtype.into(),
        shape: vec![elems],
        range: start..end,
    };

    let tensors = vec![
        tensor("zero.block_crc64", "U64", 1, 0, 8),
        tensor("master/a[0:15]", "F32", 15, 8, 68),
        tensor("master/b[0:2]", "F32", 2, 68, 76),
        tensor("second_moment/a[0:15]", "U8", 36, 76, 112),
        tensor("second_moment/b[0:2]", "U8", 8, 112, 120),
        tensor("first_moment/a[0:15]", "BF16", 15, 120, 150),
        tensor("first_moment/b[0:2]", "BF16", 2, 150, 154),
    ];

    let mut bytes = Header {
        tensors,
        ..Header::default()
    }
    .encode(4096, 8);
    let state: Vec<u8> = (0..146).collect();
    bytes.extend(targets::checksum(&state).to_le_bytes());
    bytes.extend(state);

    bytes
}

#[test]
fn valid_inputs_load() {
    let dir = tempfile::tempdir().unwrap();
    let mut manifest = targets::sample_manifest();
    let shard = shard();
    manifest.files[0].bytes = shard.len() as u64;
    manifest.files[0].front_crc64 = targets::checksum(&shard[..shard.len() - 146]);
    std::fs::write(dir.path().join("manifest.json"), manifest.encode().unwrap()).unwrap();
    std::fs::write(dir.path().join("shard.safetensors"), shard).unwrap();
    let reader = zero_ckpt::Reader::open(dir.path()).unwrap();
    assert!(reader.verify().problems.is_empty());
    let mut b = [0.0; 2];
    reader
        .read_param("first_moment", "b.w", 0..2, &mut b)
        .unwrap();
    assert_eq!(
        b,
        [142u16, 144].map(|n| half::bf16::from_bits(n | (n + 1) << 8).to_f32())
    );

    // Byte 72 has the codes of the first two elements.
    let mut a = [0.0; 2];
    reader
        .read_param("second_moment", "a.w", 0..2, &mut a)
        .unwrap();
    let scale = f32::from_le_bytes([68, 69, 70, 71]);
    let table = zero_shard::BlockFormat::Nf4.table();
    assert_eq!(a, [table[72 >> 4] * scale, table[72 & 15] * scale]);
}

proptest! {
    #![proptest_config(crate::common::cases(60))]

    #[test]
    fn damaged_inputs_do_not_panic(
        cuts in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4u8), 1..6)
    ) {
        for (name, target) in TARGETS {
            let mut bytes = good(name);
            for (index, byte, how) in &cuts {
                if bytes.is_empty() {
                    break;
                }
                let at = index.index(bytes.len());
                match how {
                    0 => bytes[at] = *byte,
                    1 => bytes.truncate(at),
                    2 => drop(bytes.remove(at)),
                    _ => bytes.insert(at, *byte),
                }
            }
            target(&bytes);
        }
    }

    #[test]
    fn noise_does_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        TARGETS.iter().for_each(|(_, target)| target(&bytes));
    }
}

/// Writes the valid inputs as seeds: `cargo test -p zero-ckpt --test suite -- --ignored seeds`.
#[test]
#[ignore = "writes into the source tree; run after a change of the format"]
fn seeds() {
    for (name, _) in TARGETS {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("fuzz/corpus")
            .join(name);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("good"), good(name)).unwrap();
    }
}
