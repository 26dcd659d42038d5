//! Statistics and the map.

use std::ffi::CString;

use zero_alloc_torch::Statistics;
use zero_alloc_torch::c_api::*;

use crate::{BLOCK_BYTES, error_of, free, last_error, malloc, open};

/// The arena's numbers.
pub(crate) fn statistics() -> Statistics {
    let mut found = Statistics {
        size: size_of::<Statistics>() as u64,
        ..Statistics::default()
    };
    // SAFETY: the first field is the size.
    let code = unsafe { zero_torch_get_statistics(0, &raw mut found) };
    assert_eq!(code, 0);
    found
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_statistics_count() {
    let fixture = open();
    let stream = fixture.stream("a");
    free(malloc(1000, &stream));
    let before = statistics();
    let block = malloc(BLOCK_BYTES, &stream);
    let with = statistics();
    free(block);
    let after = statistics();

    assert_eq!(with.live_bytes, before.live_bytes + BLOCK_BYTES as u64);
    assert_eq!(with.blocks, before.blocks + 1);
    assert!(with.reserved_bytes >= with.live_bytes && with.peak_live_bytes >= with.live_bytes);
    assert!(with.peak_reserved_bytes >= with.reserved_bytes);
    assert_eq!(
        (after.live_bytes, after.blocks),
        (before.live_bytes, before.blocks)
    );
    assert_eq!(after.allocations, before.allocations + 1);
    assert_eq!(after.frees, before.frees + 1);
    assert!(after.free_bytes >= after.largest_free_bytes);
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_statistics_of_older_callers_are_shorter() {
    let fixture = open();
    free(malloc(1000, &fixture.stream("a")));
    let mut found = Statistics {
        size: 24,
        free_bytes: 77,
        ..Statistics::default()
    };
    // SAFETY: valid for more than the 24 bytes of the first field.
    assert_eq!(unsafe { zero_torch_get_statistics(0, &raw mut found) }, 0);
    assert_eq!((found.size, found.free_bytes), (24, 77));
    assert!(found.peak_live_bytes >= 1000, "the third field is written");

    for size in [0, 7] {
        found.size = size;
        // SAFETY: valid for more than that.
        let code = unsafe { zero_torch_get_statistics(0, &raw mut found) };
        assert_eq!(code, -1);
    }
    assert!(
        last_error().contains("get_statistics: "),
        "{}",
        last_error()
    );
    // SAFETY: null is refused.
    let null = unsafe { zero_torch_get_statistics(0, std::ptr::null_mut()) };
    assert_eq!(null, -1);
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_map_is_written() {
    let fixture = open();
    let stream = fixture.stream("a");
    let block = malloc(BLOCK_BYTES, &stream);
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str| {
        let path = folder.path().join(name).into_os_string().into_string();
        let path = CString::new(path.expect("UTF-8")).expect("no zero");
        // SAFETY: a C string.
        unsafe { zero_torch_write_svg(0, path.as_ptr()) }
    };
    assert_eq!(write("map.svg"), 0);
    let svg = std::fs::read_to_string(folder.path().join("map.svg")).expect("written");
    assert!(svg.contains("bytes live") && svg.contains("<rect"), "{svg}");
    let error = error_of(|| assert_eq!(write("missing/map.svg"), -1));
    assert!(error.contains("missing/map.svg"), "{error}");
    free(block);
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_torch_empty_cache_returns_memory() {
    let fixture = open();
    let stream = fixture.stream("a");
    free(malloc(4 * BLOCK_BYTES, &stream));
    let before = statistics();
    assert!(before.reserved_bytes >= 4 * BLOCK_BYTES as u64);
    zero_torch_empty_cache();
    let after = statistics();
    assert!(after.reserved_bytes < before.reserved_bytes, "{after:?}");
    assert!(
        after.peak_reserved_bytes >= before.reserved_bytes,
        "{after:?}"
    );
}
