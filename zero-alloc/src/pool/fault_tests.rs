//! What a pool keeps true when its device fails: the order between streams, the numbers of its errors, the memory of
//! others.

use std::sync::Arc;
use std::time::Duration;

use super::stitched::KEPT;
use crate::device::{DType, Device, DeviceError, Event, Stream};
use crate::host::{HostDevice, HostPages, HostStream, Monitor};
use crate::testing::{Call, Faulty, FaultyStream, Simulated};
use crate::{AllocError, Block, MemoryKind, Movable, Pool, Purpose};

const LIMIT: Duration = Duration::from_secs(60);
const PAGE: usize = 1 << 16;

type Streams = FaultyStream<HostStream>;

fn take<D: Device>(pool: &Pool<D>, bytes: usize, stream: &D::Stream) -> Block<D> {
    pool.allocate(bytes, DType::U8, Purpose::Params, stream).expect("room")
}

fn take_movable<D: Device>(pool: &Pool<D>, bytes: usize, stream: &D::Stream) -> Movable<D> {
    pool.allocate_movable(bytes, DType::U8, Purpose::Params, stream).expect("room")
}

fn address(block: &Block<impl Device>) -> usize {
    // SAFETY: only the address is looked at.
    unsafe { block.slice() }.as_ptr().addr()
}

fn stream<D: Device>(device: &D, name: &str) -> D::Stream {
    device.create_stream(name).expect("a stream")
}

/// Enqueues an operation that runs only when the gate opens.
fn hold(stream: &Streams) -> Arc<Monitor<bool>> {
    let gate = Arc::new(Monitor::new(false));
    let held = Arc::clone(&gate);
    let op = move || held.wait_until(LIMIT, || "the test".into(), |open| open.then_some(()));
    stream.inner().enqueue("hold", op).expect("enqueued");
    gate
}

/// Whether what `stream` has so far has run.
fn has_run(stream: &Streams) -> bool {
    let event = stream.record().expect("recorded");
    // What waits for nothing is there at once, or soon.
    event.synchronize(Duration::from_millis(20)).is_ok()
}

fn open(gate: &Monitor<bool>) {
    gate.update(|open| *open = true);
}

/// Uses a block, for nothing.
fn touch(block: &Movable<Faulty<HostDevice>>, stream: &Streams) -> Result<(), DeviceError> {
    // SAFETY: nothing is enqueued.
    unsafe { block.with(stream, |_| ()) }
}

#[test]
fn a_device_that_has_no_more_is_out_of_memory_with_all_numbers() {
    for virtual_memory in [true, false] {
        let mut device = Simulated::new(16 * PAGE as u64, PAGE);
        if !virtual_memory {
            device = device.without_virtual_memory();
        }
        let stream = stream(&device, "a");
        let pool = Pool::new(device.clone(), usize::MAX);
        let held = pool.allocate(4 * PAGE, DType::U8, Purpose::Optimizer, &stream).expect("room");
        let freed = take(&pool, 2 * PAGE, &stream);
        drop(freed);
        let error = pool.allocate(15 * PAGE, DType::U8, Purpose::Buckets, &stream).expect_err("16 pages in all");
        let text = error.to_string();
        let AllocError::OutOfMemory { asked_bytes, live_bytes, largest_free_bytes, device: words, holders, .. } =
            error
        else {
            panic!("{error}")
        };
        assert_eq!((asked_bytes, live_bytes), (15 * PAGE, 4 * PAGE));
        assert!(largest_free_bytes >= 2 * PAGE);
        assert_eq!(holders, [(Purpose::Optimizer, 4 * PAGE)]);
        let words = words.expect("the device said no");
        assert!(words.contains("simulated bytes are lent"), "{text}");
        assert_eq!(words.contains("bytes were there"), virtual_memory, "{text}");
        assert!(text.contains("the device has not") && !text.contains(&usize::MAX.to_string()), "{text}");
        // A budget is another matter.
        let budgeted = Pool::new(Simulated::new(16 * PAGE as u64, PAGE), 8 * PAGE);
        let error = budgeted.allocate(9 * PAGE, DType::U8, Purpose::Buckets, &stream).expect_err("8 pages");
        assert!(matches!(error, AllocError::OutOfMemory { device: None, .. }), "{error}");
        drop(held);
        assert!(device.usage().mistakes.is_empty(), "{:?}", device.usage().mistakes);
    }
}

#[test]
fn lanes_give_back_what_they_do_not_use_when_the_device_has_no_more() {
    // Without a budget chunks have 64 MiB.
    let device = Simulated::new(128 << 20, 2 << 20);
    let stream = stream(&device, "a");
    let pool = Pool::new(device, usize::MAX);
    pool.lane().stay();
    drop(take(&pool, 256, &stream));
    assert_eq!(pool.central().state.lock().lent_bytes, 64 << 20);
    drop(take(&pool, 128 << 20, &stream));
    assert_eq!(pool.central().state.lock().lent_bytes, 0);
    pool.check_invariants().expect("sound");
}

#[test]
fn what_a_refused_wait_left_undone_is_still_waited_for() {
    for late in [0, 2] {
        let pages = Arc::new(HostPages::new(PAGE, 4 * PAGE).expect("memory files"));
        let device = Faulty::new(HostDevice::new().with_pages(pages));
        let [x, y, b, c] = ["x", "y", "b", "c"].map(|name| stream(&device, name));
        let pool = Pool::new(device.clone(), 4 * PAGE);
        let homes = if late == 0 { [&y, &b, &x, &b] } else { [&x, &b, &y, &b] };
        let mut blocks: Vec<_> = homes.iter().map(|home| Some(take(&pool, PAGE, home))).collect();
        let at = blocks[late].as_ref().map(address);
        let (gate_x, gate_y) = (hold(&x), hold(&y));
        (blocks[0], blocks[2]) = (None, None);
        // The pieces of a stitched block: one wait is enqueued, the other refused.
        device.fail(Call::Wait, 2);
        pool.allocate(2 * PAGE, DType::U8, Purpose::Buckets, &b).expect_err("refused");
        pool.check_invariants().expect("sound");
        open(&gate_x);
        x.synchronize(LIMIT).expect("ran");
        let other = take(&pool, PAGE, &b);
        let again = if Some(address(&other)) == at { other } else { take(&pool, PAGE, &c) };
        assert_eq!(Some(address(&again)), at);
        let user = if pool.report().free_bytes > 0 { &b } else { &c };
        assert!(!has_run(user), "the bytes are still in use on y");
        open(&gate_y);
        user.synchronize(LIMIT).expect("ran");
    }
}

#[test]
fn a_refused_move_leaves_its_target_in_order() {
    let device = Faulty::new(HostDevice::new());
    let [a, b, c, d] = ["a", "b", "c", "d"].map(|name| stream(&device, name));
    let pool = Pool::new(device.clone(), 1 << 20);
    let quarter = 1 << 18;
    let (first, second) = (take(&pool, quarter, &a), take_movable(&pool, quarter, &b));
    let (third, fourth) = (take(&pool, quarter, &a), take_movable(&pool, quarter, &b));
    let gate = hold(&a);
    drop((first, third));
    device.fail(Call::Copy, 1);
    pool.compact(2 * quarter, &b).expect_err("the copy is refused");
    pool.check_invariants().expect("sound");
    // Nothing has moved, and nothing is lost.
    touch(&second, &b).expect("as before");
    touch(&fourth, &b).expect("as before");
    let (low, high) = (take(&pool, quarter, &c), take(&pool, quarter, &d));
    assert!(!has_run(&c) && !has_run(&d), "the bytes are still in use on a");
    open(&gate);
    c.synchronize(LIMIT).and_then(|()| d.synchronize(LIMIT)).expect("ran");
    drop((low, high));
}

/// A hole of a page, left by another stream, then blocks of so many pages that may move, in a pool of 16.
fn hole_and(
    pages: &[usize],
    device: &Faulty<HostDevice>,
    on: &Streams,
) -> (Pool<Faulty<HostDevice>>, Vec<Movable<Faulty<HostDevice>>>) {
    let pool = Pool::new(device.clone(), 16 * PAGE);
    let hole = take(&pool, PAGE, &stream(device, "hole"));
    let blocks = pages.iter().map(|pages| take_movable(&pool, pages * PAGE, on)).collect();
    drop(hole);
    (pool, blocks)
}

#[test]
fn a_block_that_is_half_moved_is_lost_and_says_so() {
    let device = Faulty::new(HostDevice::new());
    let [b, c] = ["b", "c"].map(|name| stream(&device, name));
    let (pool, blocks) = hole_and(&[8], &device, &b);
    let gate = hold(&b);
    // It slides down by a page, a page at a time.
    device.fail(Call::Copy, 3);
    pool.compact(8 * PAGE, &b).expect_err("the copy is refused");
    pool.check_invariants().expect("sound");
    let error = touch(&blocks[0], &b).expect_err("lost").to_string();
    assert!(error.contains("are lost") && error.contains("Copy 3 fails"), "{error}");
    // Two copies are still to run; who gets their bytes waits for them.
    let low = take(&pool, PAGE, &c);
    assert!(!has_run(&c));
    drop(blocks);
    drop(low);
    let whole = take(&pool, 16 * PAGE, &c);
    assert!(!has_run(&c));
    open(&gate);
    c.synchronize(LIMIT).expect("ran");
    drop(whole);
}

#[test]
fn moves_before_a_refused_one_stand() {
    let device = Faulty::new(HostDevice::new());
    let [b, c] = ["b", "c"].map(|name| stream(&device, name));
    let (pool, blocks) = hole_and(&[2, 2, 2], &device, &b);
    for (value, block) in blocks.iter().enumerate() {
        // SAFETY: one stream does all.
        let filled = unsafe { block.with(&b, |slice| device.upload(&b, &vec![value as u8; 2 * PAGE], slice, LIMIT)) };
        filled.expect("the stream is there").expect("uploaded");
    }
    let gate = hold(&b);
    // Each slides down by a page, a page at a time.
    device.fail(Call::Copy, 3);
    pool.compact(10 * PAGE, &b).expect_err("the copy is refused");
    pool.check_invariants().expect("sound");
    assert_eq!(pool.report().moved_bytes, 2 * PAGE as u64);
    let vacated = take(&pool, PAGE, &c);
    assert!(!has_run(&c));
    open(&gate);
    drop(vacated);
    for (value, block) in blocks.iter().enumerate() {
        let mut seen = vec![9; 2 * PAGE];
        // SAFETY: one stream does all.
        let read = unsafe { block.with(&b, |slice| device.download(&b, slice, &mut seen, LIMIT)) };
        read.expect("not lost").expect("downloaded");
        assert!(seen.iter().all(|byte| *byte == value as u8), "block {value}");
    }
}

#[test]
fn moves_that_no_later_use_can_follow_are_losses() {
    let device = Faulty::new(HostDevice::new());
    let [b, c] = ["b", "c"].map(|name| stream(&device, name));
    let (pool, blocks) = hole_and(&[1], &device, &b);
    let gate = hold(&b);
    // The first is to wait for the hole.
    device.fail(Call::Record, 2);
    pool.compact(15 * PAGE, &b).expect_err("no event");
    pool.check_invariants().expect("sound");
    assert!(touch(&blocks[0], &c).expect_err("lost").to_string().contains("Record"));
    let vacated = take(&pool, PAGE, &c);
    assert!(!has_run(&c), "the copy out of there has not run");
    open(&gate);
    c.synchronize(LIMIT).expect("ran");
    drop(vacated);
}

#[test]
fn a_block_with_a_use_that_could_not_be_noted_never_moves() {
    let device = Faulty::new(HostDevice::new());
    let b = stream(&device, "b");
    let (pool, blocks) = hole_and(&[1], &device, &b);
    device.fail(Call::Record, 1);
    touch(&blocks[0], &b).expect("enqueued");
    touch(&blocks[0], &b).expect("enqueued");
    pool.compact(15 * PAGE, &b).expect("nothing can move");
    assert_eq!(pool.report().moved_bytes, 0);
}

#[test]
fn a_use_that_could_not_be_noted_is_waited_for_when_the_block_is_gone() {
    for refused_again in [false, true] {
        let device = Faulty::new(HostDevice::new());
        let [b, c, d] = ["b", "c", "d"].map(|name| stream(&device, name));
        let pool = Pool::new(device.clone(), 16 * PAGE);
        let block = take_movable(&pool, 16 * PAGE, &b);
        let gate = hold(&c);
        device.fail(Call::Record, 1);
        touch(&block, &c).expect("enqueued");
        if refused_again {
            device.fail(Call::Record, 1);
        }
        drop(block);
        let next = take(&pool, 16 * PAGE, &d);
        assert!(!has_run(&d), "the bytes are still in use on c");
        open(&gate);
        d.synchronize(LIMIT).expect("ran");
        drop(next);
    }
}

#[test]
fn only_views_beyond_those_kept_are_unmapped() {
    let views = KEPT + 1;
    let pages = 4 * views + 1;
    let device = Simulated::new((pages * PAGE) as u64, PAGE);
    let stream = stream(&device, "a");
    let pool = Pool::new(device.clone(), pages * PAGE);
    // Every second page is free.
    let mut fixed: Vec<_> = (0..pages).map(|_| Some(take(&pool, PAGE, &stream))).collect();
    fixed.iter_mut().skip(1).step_by(2).for_each(|block| *block = None);
    let held: Vec<_> = (0..views).map(|_| take(&pool, 2 * PAGE, &stream)).collect();
    let arena = pages as u64;
    assert_eq!(device.usage().mapped_pages, arena + 2 * views as u64);
    drop(held);
    stream.synchronize(LIMIT).expect("ran");
    let large = take(&pool, 3 * PAGE, &stream);
    assert_eq!(device.usage().mapped_pages, arena + 2 * KEPT as u64 + 3);
    drop(large);
    assert!(device.usage().mistakes.is_empty(), "{:?}", device.usage().mistakes);
}

#[test]
fn a_pool_says_why_it_has_no_pages() {
    let device = Faulty::new(Simulated::new(16 * PAGE as u64, PAGE));
    assert_eq!(*Pool::new(device.clone(), PAGE).memory_kind(), MemoryKind::Pages);
    device.fail(Call::Reserve, 1);
    let pool = Pool::new(device, 8 * PAGE);
    assert!(matches!(pool.memory_kind(), MemoryKind::BackingsForPages(_)), "{:?}", pool.memory_kind());
    let text = pool.report().to_string();
    assert!(text.ends_with("no addresses: injected: Reserve 2 fails"), "{text}");
    assert_eq!(*Pool::new(HostDevice::new(), PAGE).memory_kind(), MemoryKind::Backings);
}

#[test]
fn trim_gives_pages_as_far_down_as_they_are_done() {
    let device = Faulty::new(Simulated::new(16 * PAGE as u64, PAGE));
    let [a, b] = ["a", "b"].map(|name| stream(&device, name));
    let pool = Pool::new(device.clone(), 16 * PAGE);
    let lowest = take(&pool, PAGE / 2, &a);
    let (low, high) = (take(&pool, 4 * PAGE, &a), take(&pool, 3 * PAGE, &b));
    let reserved = pool.report().reserved_bytes;
    let gate = hold(&a);
    drop((low, high));
    assert_eq!(pool.trim(Duration::from_millis(20)), 3 * PAGE);
    pool.check_invariants().expect("sound");
    assert_eq!(pool.report().reserved_bytes, reserved - 3 * PAGE);
    assert_eq!(device.inner().usage().live_bytes as usize, reserved - 3 * PAGE);
    open(&gate);
    pool.trim(LIMIT);
    assert_eq!(pool.report().reserved_bytes, PAGE);
    drop(lowest);
    assert_eq!(pool.trim(LIMIT), PAGE);
    let usage = device.inner().usage();
    assert_eq!((usage.live_bytes, usage.mapped_pages, usage.mistakes), (0, 0, Vec::new()));
    drop(take(&pool, 16 * PAGE, &b));
}

#[test]
fn trim_unmaps_the_views_of_what_it_gives_back() {
    let device = Faulty::new(Simulated::new(16 * PAGE as u64, PAGE));
    let [a, b] = ["a", "b"].map(|name| stream(&device, name));
    let pool = Pool::new(device.clone(), 16 * PAGE);
    let mut fixed: Vec<_> = (0..16).map(|_| Some(take(&pool, PAGE, &a))).collect();
    fixed.iter_mut().skip(1).step_by(2).for_each(|block| *block = None);
    let mut view = take(&pool, 4 * PAGE, &b);
    let gate = hold(&a);
    view.record_use(&a).expect("recorded");
    drop((view, fixed));
    assert_eq!(pool.trim(Duration::from_millis(20)), 0);
    open(&gate);
    assert_eq!(pool.trim(LIMIT), 16 * PAGE);
    let usage = device.inner().usage();
    assert_eq!((usage.live_bytes, usage.mapped_pages, usage.mistakes), (0, 0, Vec::new()));
    pool.check_invariants().expect("sound");
}

#[test]
fn trim_takes_what_lanes_do_not_use_and_leaves_what_others_were_told_of() {
    let device = Simulated::new(128 << 20, PAGE);
    let stream = stream(&device, "a");
    let pool = Pool::new(device.clone(), usize::MAX);
    pool.lane().stay();
    drop(take(&pool, 256, &stream));
    assert_eq!(pool.trim(LIMIT), 64 << 20);
    assert_eq!(device.usage().live_bytes, 0);
    pool.check_invariants().expect("sound");
    for told in [false, true] {
        let pool = Pool::new(device.clone().without_virtual_memory(), 4 << 20);
        if told {
            pool.take_budget().expect("there");
        }
        drop(take(&pool, 3 << 20, &stream));
        assert_eq!(pool.trim(LIMIT), if told { 0 } else { 3 << 20 });
        assert_eq!(pool.report().reserved_bytes, if told { 4 << 20 } else { 0 });
        drop(take(&pool, 4 << 20, &stream));
        pool.check_invariants().expect("sound");
    }
    assert!(device.usage().mistakes.is_empty(), "{:?}", device.usage().mistakes);
}
