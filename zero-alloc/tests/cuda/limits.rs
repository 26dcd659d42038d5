//! Out of memory, and partial failures.

use std::ptr::NonNull;

use zero_alloc::device::{AnySlice, DType, Device, DeviceError, Memory};
use zero_alloc::{AllocError, Pool, Purpose};

use crate::{LIMIT, assert_free, floats, open, read};

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_out_of_memory_has_the_size() {
    let (_, total) = open().memory_bytes().expect("a number");
    let device = open().with_backings();

    let error = device.allocate(2 * total).expect_err("more than there is");

    let DeviceError::OutOfMemory {
        requested_bytes,
        detail,
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(*requested_bytes, 2 * total);
    assert!(detail.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{detail}");
}

#[test]
#[ignore = "needs a CUDA device"]
fn failed_cuda_growth_frees_its_pages() {
    let device = open();
    let stream = device.create_stream("compute").expect("a stream");
    let (_, total) = device.memory_bytes().expect("a number");
    let pool = Pool::new(device.clone(), 2 * total);
    let x = floats(&pool, &stream, 1000, 3.0);
    let (before, _) = device.memory_bytes().expect("a number");
    let error = pool
        .allocate(total, DType::U8, Purpose::Activations, &stream)
        .expect_err("some of it is taken");

    let AllocError::OutOfMemory {
        requested_bytes,
        device: Some(words),
        ..
    } = &error
    else {
        panic!("{error}")
    };

    assert_eq!(*requested_bytes, total);
    assert!(words.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{words}");
    assert_free(&device, before);
    // Live blocks keep their contents, and the pool can still grow.
    assert_eq!(read(&device, &stream, &x), [3.0; 1000]);
    let y = floats(&pool, &stream, 1_000_000, 4.0);
    assert_eq!(read(&device, &stream, &y), vec![4.0; 1_000_000]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn failed_cuda_map_leaves_nothing_mapped() {
    let device = open();
    let stream = device.create_stream("compute").expect("a stream");
    let memory = device
        .virtual_memory()
        .expect("every device since sm_70 has that");
    let page = memory.page_bytes();
    let range = memory.reserve(4 * page).expect("addresses");
    let at =
        |nth: usize| NonNull::new(range.as_ptr().wrapping_add(nth * page)).expect("in the range");
    let pages: Vec<_> = (0..4).map(|_| memory.create().expect("room")).collect();
    // A page is already mapped at the third address.
    // SAFETY: reserved, and nothing is mapped there.
    unsafe { memory.map(at(2), &pages[2..3]) }.expect("mapped");
    // SAFETY: the third address has a mapping, which the driver refuses; nothing accesses the range
    // meanwhile.
    let refused = unsafe { memory.map(at(0), &pages) }.expect_err("the third is in the way");
    assert!(refused.to_string().contains("CUDA_ERROR_"), "{refused}");
    // The first two addresses have no mapping, and the third has its old one.
    // SAFETY: nothing is mapped there; otherwise the driver returns an error.
    unsafe { memory.map(at(0), &pages[..2]) }.expect("mapped");
    // SAFETY: three pages are mapped, and one stream does all.
    let three =
        unsafe { AnySlice::from_raw_parts(range.as_ptr(), 3 * page, DType::U8, device.id()) };
    let sent: Vec<u8> = (0..3 * page).map(|i| (i / 7) as u8).collect();
    device
        .upload(&stream, &sent, three, LIMIT)
        .expect("uploaded");
    let mut seen = vec![0; 3 * page];
    device
        .download(&stream, three, &mut seen, LIMIT)
        .expect("downloaded");
    assert!(seen == sent);
    // SAFETY: mapped above, and the stream has run.
    unsafe { memory.unmap(at(0), 3) };

    for page in pages {
        // SAFETY: created above, mapped nowhere.
        unsafe { memory.destroy(page) };
    }

    // SAFETY: reserved above, with nothing mapped.
    unsafe { memory.release(range, 4 * page) };
}
