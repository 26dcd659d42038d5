//! Streams of another device, such as those of a recorder among threads, are refused: nothing is
//! enqueued, and no memory is given that an operation may still use.

use std::sync::Arc;

use zero_alloc::device::{AnySlice, DType, Device, DeviceError, Reduced, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::schedule::Recorder;
use zero_alloc::{AllocError, Pool, Purpose};
use zero_comm::threads::World;
use zero_comm::{
    BucketError, BucketOptions, Buckets, CommError, CommOptions, Communicator, OwnShard,
    PrefetchError, PrefetchOptions, Prefetcher, Reduce, ShardSource, Solo,
};

use crate::common::{LIMIT, view};

fn is_refused(error: &DeviceError) -> bool {
    matches!(error, DeviceError::AnotherExecution { .. })
}

/// Streams that the device of threads does not have.
fn others() -> Vec<HostStream> {
    let devices = [
        Recorder::new().host(),
        HostDevice::seeded(3),
        HostDevice::modelled(|_, _| LIMIT),
    ];
    let stream = |device: &HostDevice| device.create_stream("other").unwrap();
    devices.iter().map(stream).collect()
}

fn solo() -> Arc<dyn Communicator<HostDevice>> {
    Arc::new(Solo::new(HostDevice::new()))
}

#[test]
fn buckets_refuse_streams_of_another_device() {
    let device = HostDevice::new();
    let own = device.create_stream("own").unwrap();
    let pool = Pool::new(device, 1 << 20);
    for other in others() {
        // Without buckets nothing is allocated on a stream.
        for count in [0, 2] {
            let options = BucketOptions::new(8, DType::F32).count(count);
            let make = |compute: &HostStream, comm_stream: &HostStream| {
                Buckets::new(
                    &pool,
                    Reduce::all(solo()),
                    compute.clone(),
                    comm_stream.clone(),
                    options,
                )
            };
            for refused in [make(&other, &own), make(&own, &other), make(&other, &other)] {
                match refused {
                    Err(BucketError::Device(error)) => assert!(is_refused(&error), "{error}"),
                    made => panic!("{made:?}"),
                }
            }
        }

        let options = BucketOptions::new(8, DType::F32);
        let buckets = Buckets::new(
            &pool,
            Reduce::all(solo()),
            own.clone(),
            own.clone(),
            options,
        )
        .unwrap();
        let mut filling = buckets.begin(8).unwrap();
        assert!(is_refused(&filling.add_producer(&other).unwrap_err()));
        let done = filling.reduce().unwrap().finish().unwrap();
        assert!(is_refused(&other.wait(&done).unwrap_err()));
        assert!(is_refused(&buckets.wait_all_on(&other).unwrap_err()));
        own.synchronize(LIMIT).unwrap();
    }
    assert_eq!(pool.report().total.live_bytes, 0);
}

#[test]
fn prefetcher_refuses_streams_of_another_device() {
    let device = HostDevice::new();
    let own = device.create_stream("own").unwrap();
    let pool = Pool::new(device, 1 << 20);
    let mut shard = vec![1.0_f32; 4];
    let shards = vec![view(&mut shard)];
    for other in others() {
        for (compute, comm_stream) in [(&other, &own), (&own, &other), (&other, &other)] {
            let mut prefetcher = Prefetcher::new(
                pool.clone(),
                solo(),
                compute.clone(),
                comm_stream.clone(),
                shards.clone(),
                PrefetchOptions::default(),
            );
            let refused = prefetcher
                .step()
                .and_then(|mut step| step.unshard(0).map(drop));
            match refused {
                Err(PrefetchError::Device(error)) => assert!(is_refused(&error), "{error}"),
                Err(PrefetchError::Alloc(AllocError::Device(error))) => {
                    assert!(is_refused(&error), "{error}");
                }
                made => panic!("{made:?}"),
            }
        }
    }
    assert_eq!(pool.report().total.live_bytes, 0);
}

/// Other ranks would wait for a collective that is only recorded.
#[test]
fn collectives_refuse_streams_that_record() {
    let recorded = Recorder::new().host().create_stream("recorded").unwrap();
    let comms = World::new(2, CommOptions::default().limit(LIMIT)).unwrap();
    match comms[0].barrier(&recorded) {
        Err(CommError::Device(error)) => assert!(is_refused(&error), "{error}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(comms[0].traffic().total_bytes(), 0);
    // It counts as no collective.
    let device = HostDevice::new();
    let streams = ["a", "b"].map(|name| device.create_stream(name).unwrap());
    for (comm, stream) in comms.iter().zip(&streams) {
        comm.barrier(stream).unwrap();
    }
    streams[1].synchronize(LIMIT).unwrap();
    streams[0].synchronize(LIMIT).unwrap();
}

#[test]
fn reduced_gradient_is_not_read_by_another_device() {
    let device = HostDevice::new();
    let own = device.create_stream("own").unwrap();
    let pool = Pool::new(device, 1 << 20);
    let block = pool.allocate(4, DType::F32, Purpose::Grads, &own).unwrap();
    // SAFETY: used by no operation.
    let slice = unsafe { block.slice() };
    // SAFETY: nothing writes to it.
    let sum: Reduced<HostDevice> = unsafe { Reduced::new(slice, own.record().unwrap()) };
    for other in others() {
        assert!(is_refused(&sum.wait_on(&other).unwrap_err()));
        // SAFETY: the slice is not used.
        let slice: Result<AnySlice, _> = unsafe { sum.slice_on(&other) };
        assert!(is_refused(&slice.unwrap_err()));
        assert!(is_refused(&sum.record_write(&other).unwrap_err()));
    }
}

/// A source of shards without `unsafe`: it has other memory, or leaves its place as it is.
struct Elsewhere(Option<AnySlice>);

impl ShardSource<HostDevice> for Elsewhere {
    fn dtype(&self, _unit: usize) -> DType {
        DType::F32
    }

    fn shard_elems(&self) -> Vec<usize> {
        vec![4]
    }

    fn fetch(
        &mut self,
        _comm_stream: &HostStream,
        _unit: usize,
        own: OwnShard<'_>,
    ) -> Result<Option<AnySlice>, PrefetchError> {
        assert_eq!((own.len(), own.dtype()), (4, DType::F32));
        Ok(self.0)
    }
}

#[test]
fn source_of_shards_needs_no_slice_of_the_unit() {
    let device = HostDevice::new();
    let compute = device.create_stream("compute").unwrap();
    let comm_stream = device.create_stream("comm").unwrap();
    let pool = Pool::new(device, 1 << 20);
    let mut shard = vec![2.0_f32; 4];
    for source in [Elsewhere(Some(view(&mut shard))), Elsewhere(None)] {
        let expected = source.0.is_some();
        let mut prefetcher = Prefetcher::with_source(
            pool.clone(),
            solo(),
            compute.clone(),
            comm_stream.clone(),
            source,
            PrefetchOptions::default(),
        );
        let mut step = prefetcher.step().unwrap();
        let unit = step.unshard(0).unwrap();
        let twos = unit.read(LIMIT, |values: &[f32]| values == [2.0; 4]);
        assert!(twos.unwrap() || !expected);
        step.reshard(unit);
    }
    compute.synchronize(LIMIT).unwrap();
    comm_stream.synchronize(LIMIT).unwrap();
}

/// A source that panics leaves no memory behind.
#[test]
fn panic_in_a_source_frees_the_unit() {
    struct Panics;
    impl ShardSource<HostDevice> for Panics {
        fn dtype(&self, _unit: usize) -> DType {
            DType::F32
        }
        fn shard_elems(&self) -> Vec<usize> {
            vec![4]
        }
        fn fetch(
            &mut self,
            _: &HostStream,
            _: usize,
            _: OwnShard<'_>,
        ) -> Result<Option<AnySlice>, PrefetchError> {
            panic!("on purpose")
        }
    }

    let device = HostDevice::new();
    let stream = device.create_stream("stream").unwrap();
    let pool = Pool::new(device, 1 << 20);
    let mut prefetcher = Prefetcher::with_source(
        pool.clone(),
        solo(),
        stream.clone(),
        stream.clone(),
        Panics,
        PrefetchOptions::default(),
    );
    let unshard = || drop(prefetcher.step().unwrap().unshard(0));
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(unshard)).expect_err("a panic");
    assert_eq!(prefetcher.live_elems(), 0);
    assert_eq!(pool.report().total.live_bytes, 0);
}
