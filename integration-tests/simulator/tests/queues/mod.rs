//! A step as two queues, one of computation and one of collectives: the oracle of these tests.
//!
//! The gather of pass `j + 1` starts once pass `j - 1` is done, and the reduction of `j - 1` follows
//! it. While the link is busy, passes run at `1 - slowdown` of their speed.

use zero_simulator::{Costs, Efficiencies, Row, ring};

/// Seconds of a pass, of the gather before it and of the reduction behind it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    pub(crate) compute: f64,
    pub(crate) gather: f64,
    pub(crate) reduce: f64,
}

/// Seconds until both queues are empty.
pub(crate) fn queues(ops: &[Op], slowdown: f64) -> f64 {
    let mut time = 0.0_f64;
    let mut gathered = ops[0].gather;
    let mut link = gathered;
    let mut pending = 0.0;
    for (index, op) in ops.iter().enumerate() {
        let start = if op.gather > 0.0 {
            time.max(gathered)
        } else {
            time
        };
        if let Some(next) = ops.get(index + 1).filter(|next| next.gather > 0.0) {
            gathered = link.max(time) + next.gather;
            link = gathered;
        }
        if pending > 0.0 {
            link = link.max(time) + pending;
        }

        let busy = (link - start).max(0.0);
        time = if op.compute <= busy * (1.0 - slowdown) {
            start + op.compute / (1.0 - slowdown)
        } else {
            start + op.compute + slowdown * busy
        };
        pending = op.reduce;
    }
    if pending > 0.0 {
        link = link.max(time) + pending;
    }
    time.max(link)
}

/// Seconds of a step of a row.
pub(crate) fn step(row: &Row, efficiencies: &Efficiencies) -> f64 {
    let machine = row.machine().unwrap();
    let software = row.software();
    let costs = Costs {
        machine: &machine,
        shape: &row.shape,
        software: &software,
        efficiencies,
    };
    let passes = costs.passes(row.micro_batch, row.stage > 0);
    let layers = row.shape.layers as usize;
    let params = row.shape.params as f64;
    // Seconds of the forward gather, the backward gather and the reduction.
    let sent = |params: f64, is_block: bool| {
        let ring = |bytes: f64| ring(params * bytes, row.gpus, row.nodes, &machine, efficiencies);
        let reduced_bytes = if software.wide_reduce { 4.0 } else { 2.0 };
        match row.stage {
            0 => [0.0, 0.0, 2.0 * ring(2.0)],
            3 if is_block => [ring(2.0), ring(2.0), ring(reduced_bytes)],
            _ => [ring(2.0), 0.0, ring(reduced_bytes)],
        }
    };
    let root = sent(row.shape.embedding_params(), false);
    let block = sent(row.shape.block_params(), true);
    let op = |compute, gather, reduce| Op {
        compute,
        gather,
        reduce,
    };

    // The embedding stays gathered until its backward pass: the head has the same matrix.
    let mut ops = vec![op(passes.embedding[0], root[0], 0.0)];
    ops.extend(vec![op(passes.block[0], block[0], 0.0); layers]);
    ops.push(op(passes.head[0], 0.0, 0.0));
    ops.push(op(passes.head[1], 0.0, 0.0));
    ops.extend(vec![op(passes.block[1], block[1], block[2]); layers]);
    ops.push(op(passes.embedding[1], 0.0, root[2]));

    let micro_batches = row.micro_batches() as usize;
    let of = |count: usize| queues(&ops.repeat(count), efficiencies.slowdown);
    let rest = micro_batches.saturating_sub(3) as f64;
    match row.stage {
        0 => {
            let compute: f64 = ops.iter().map(|op| op.compute).sum();
            of(1) + (micro_batches - 1) as f64 * compute + costs.optimizer(params)
        }
        _ if micro_batches <= 3 => of(micro_batches) + costs.optimizer(params / row.gpus as f64),
        // Later micro-batches take the same time.
        _ => of(3) + rest * (of(3) - of(2)) + costs.optimizer(params / row.gpus as f64),
    }
}
