//! The fuzz targets: untrusted bytes decoded as a manifest, a header, a shard file. Each function
//! must return for any bytes; it panics if a property is violated. The fuzzer and
//! `tests/suite/corpus.rs` call them.

use std::path::Path;

use zero_ckpt::testing::Header;
use zero_ckpt::{CkptError, MANIFEST_NAME, Manifest, Reader, UnitRange};

/// The checksum of the format.
pub fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::crc64_nvme(bytes)
}

/// Decodes any bytes as `manifest.json`.
pub fn manifest(data: &[u8]) {
    if let Ok((manifest, layout)) = Manifest::decode(data, Path::new(MANIFEST_NAME)) {
        let again =
            Manifest::decode(&manifest.encode().unwrap(), Path::new(MANIFEST_NAME)).unwrap();
        assert_eq!((again.0, again.1), (manifest, layout));
    }
}

/// Decodes any bytes as the content of a manifest with the right checksum, which a fuzzer would not
/// find by chance.
pub fn manifest_body(data: &[u8]) {
    let Ok(body) = std::str::from_utf8(data) else {
        return;
    };
    let crc = checksum(body.trim().as_bytes());
    manifest(
        format!(r#"{{"format":"zero-ckpt","version":2,"crc64":"{crc:016x}","manifest":{body}}}"#)
            .as_bytes(),
    );
}

/// Parses any bytes as the header of a safetensors file.
pub fn header(data: &[u8]) {
    let Some((first, rest)) = data.split_first_chunk::<8>() else {
        return;
    };
    let file_bytes = data.len() as u64;
    if let Ok(n) = Header::json_bytes(*first, file_bytes)
        && let Ok(header) = Header::parse(&rest[..n as usize], file_bytes)
    {
        let tensors: u64 = header
            .tensors
            .iter()
            .map(|t| t.range.end - t.range.start)
            .sum();
        assert_eq!(header.data_start + tensors, file_bytes);
    }
    // Also without the length field, which a fuzzer rarely finds.
    let _ = Header::parse(rest, file_bytes);
}

/// The manifest for `shard_file`: one file of two pieces and three states. One parameter has a
/// block.
pub fn sample_manifest() -> Manifest {
    let json = serde_json::json!({
        "step": 1, "sequence": 1, "stage": 3, "dtype": "bf16", "trainer": null, "model_config": null,
        "model": {"units": [
            {"name": "a", "params": [{"name": "a.w", "shape": [3, 5]}]},
            {"name": "b", "params": [{"name": "b.w", "shape": [2]}]},
        ]},
        "layout": {"world_size": 1, "align_elems": 1},
        "states": [
            {"name": "master", "dtype": "F32"},
            {"name": "second_moment", "dtype": {"blocks": {"format": "nf4", "plain_below": 10, "multiple_of": 1}}},
            {"name": "first_moment", "dtype": "BF16"},
        ],
        "files": [{"name": "shard.safetensors", "bytes": 0, "front_crc64": "0000000000000000",
            "pieces": [UnitRange(0, 0, 15), UnitRange(1, 0, 2)]}],
    });
    serde_json::from_value(json).unwrap()
}

/// Reads any bytes as a shard file, with a manifest that has the right length and checksum of the
/// front.
pub fn shard_file(data: &[u8]) {
    let mut manifest = sample_manifest();
    let state_bytes = 17 * (4 + 2) + 36 + 2 * 4;
    let front = data.len().saturating_sub(state_bytes);
    manifest.files[0].bytes = data.len() as u64;
    manifest.files[0].front_crc64 = checksum(&data[..front]);
    let dir = tempfile::tempdir_in(if Path::new("/dev/shm").is_dir() {
        "/dev/shm"
    } else {
        "/tmp"
    })
    .unwrap();
    std::fs::write(dir.path().join(MANIFEST_NAME), manifest.encode().unwrap()).unwrap();
    std::fs::write(dir.path().join("shard.safetensors"), data).unwrap();
    let Ok(reader) = Reader::open(dir.path()) else {
        return;
    };
    let verified = reader.verify();

    for state in ["master", "first_moment", "second_moment"] {
        let read = reader.read_param(state, "a.w", 0..15, &mut [0.0; 15]);
        // One block holds all: a read succeeds exactly if the file verifies.
        assert_eq!(
            read.is_ok(),
            verified.problems.is_empty(),
            "{read:?} {:?}",
            verified.problems
        );
        if let Err(e) = read {
            let named = matches!(
                e,
                CkptError::Corrupt { .. } | CkptError::BadSafetensors { .. }
            );
            assert!(named && e.to_string().contains("shard.safetensors"), "{e}");
        }
    }
}
