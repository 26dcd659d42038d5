//! Overlaps the reduction of gradients with backward: two ranks, a slow link. Prints a trace for
//! Perfetto: `cargo run -p zero-comm --example overlap > trace.json`

use std::{error::Error, sync::Arc, thread::sleep, time::Duration};
use zero_alloc::device::{DType, Device, Stream};
use zero_alloc::{Pool, Purpose, host::HostDevice, host::Timeline};
use zero_comm::overlap::{Overlap, chrome_trace};
use zero_comm::slow::{Link, behind};
use zero_comm::threads::{ThreadsComm, World};
use zero_comm::{BucketOptions, Buckets, CommOptions, ReduceOp};

fn train(comm: ThreadsComm) -> Result<Timeline, Box<dyn Error + Send + Sync>> {
    let link = Link {
        latency: Duration::from_micros(100),
        bytes_per_second: 1e9,
    };

    let comm = Arc::new(behind(Arc::new(comm), link));
    let timeline = Timeline::new();
    let device = HostDevice::new().with_timeline(timeline.clone());
    let compute = device.create_stream("compute")?;
    let comm_stream = device.create_stream("comm")?;
    let pool = Pool::new(device, 1 << 30);
    let grads = pool.allocate(1_000_000, DType::F32, Purpose::Grads, &comm_stream)?;
    let options = BucketOptions::new(2_000_000, DType::F32);
    let buckets = Buckets::new(&pool, comm, compute.clone(), comm_stream.clone(), options)?;

    for _layer in 0..8 {
        let filling = buckets.begin(2_000_000)?;
        compute.enqueue("backward", || {
            sleep(Duration::from_millis(10)); // a real backward writes its gradient to `filling.slice()`
            Ok(())
        })?;
        // SAFETY: `grads` outlives the streams' work, which is waited for below.
        let shard = unsafe { grads.slice() };
        let _done = filling
            .reduce_scatter_into(shard, ReduceOp::Sum)?
            .finish()?;
    }

    buckets.wait_all_on(&compute)?;
    compute.synchronize(Duration::from_secs(60))?;
    Ok(timeline)
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let ranks: Vec<_> = World::new(2, CommOptions::default())?
        .into_iter()
        .map(|c| std::thread::spawn(|| train(c)))
        .collect();
    for (rank, thread) in ranks.into_iter().enumerate() {
        let spans = thread.join().map_err(|_| "a rank panicked")??.take();
        let overlap = Overlap::of(&spans, "comm");
        eprintln!(
            "rank {rank}: {:.0}% of communication hidden, {overlap:?}",
            100.0 * overlap.fraction()
        );
        if rank == 0 {
            print!("{}", chrome_trace(&spans));
        }
    }
    Ok(())
}
