//! The fuzz targets of the control plane on their corpus and on damaged copies of valid inputs. To
//! run the fuzzer itself: `cargo +nightly fuzz run coordinator` in this crate (see `fuzz/`).

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use zero_comm::world::testing::fuzz::{TARGETS, valid};

fn folder(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/corpus")
        .join(target)
}

#[test]
fn corpus_does_not_panic() {
    for (name, target) in TARGETS {
        let mut files: Vec<_> = std::fs::read_dir(folder(name))
            .unwrap()
            .map(|e| e.unwrap().path())
            .collect();
        files.sort();
        assert!(!files.is_empty(), "{name} has no corpus");
        for path in files {
            eprintln!("{}", path.display());
            target(&std::fs::read(path).unwrap());
        }
    }
}

proptest! {
    #![proptest_config(crate::buckets::cases(60))]

    #[test]
    fn damaged_inputs_do_not_panic(
        cuts in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4u8), 1..6)
    ) {
        for (name, target) in TARGETS {
            for mut bytes in valid(name) {
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
    }

    #[test]
    fn noise_does_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        TARGETS.iter().for_each(|(_, target)| target(&bytes));
    }
}

/// Writes the valid inputs as seeds: `cargo test -p zero-comm --test suite -- --ignored seeds`.
#[test]
#[ignore = "writes into the source tree; run after a change of the protocol"]
fn seeds() {
    for (name, _) in TARGETS {
        std::fs::create_dir_all(folder(name)).unwrap();
        for (index, bytes) in valid(name).iter().enumerate() {
            std::fs::write(folder(name).join(format!("valid_{index:02}")), bytes).unwrap();
        }
    }
}
