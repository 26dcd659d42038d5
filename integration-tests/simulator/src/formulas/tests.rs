use super::*;
use crate::{Row, Table};

/// Seconds at the priors, by the prototype in Python.
struct Golden {
    /// Line in `tests/data/steps.csv`.
    line: usize,
    passes: PassSeconds,
    optimizer: f64,
    /// A gather of the embedding and one of a block, of 2 bytes a parameter.
    gathers: [f64; 2],
}

#[rustfmt::skip]
const GOLDEN: [Golden; 7] = [
    // mpt-70b, 64 H100, micro-batch 8
    golden(8, [0.000457885639232, 0.0425704645373, 0.123198351077, 0.0245684455301,
        0.0444835719062], 0.0155586870038, [0.0029385664, 0.00525197806]),
    // mpt-13b, 64 H100, micro-batch 2, without recomputation
    golden(19, [7.15446311301e-05, 0.00449666614317, 0.0117103326234, 0.00433437306915,
        0.00751237006356], 0.00308330466525, [0.001947904, 0.002232571075]),
    // mpt-3b, 128 H100, stage 2
    golden(6, [0.00014308926226, 0.00512428891434, 0.0118142625361, 0.0111152493506,
        0.01748599134], 0.000318050865672, [0.001431304, 0.00108708736719]),
    // mpt-70b, 64 A100 40 GB, pure bf16
    golden(129, [0.000246610432706, 0.0330559237593, 0.0965799712906, 0.018234580943,
        0.0337919100605], 0.0335187147671, [0.0055803328, 0.01020715612]),
    // gpt-h2048-l16, 4 A100 40 GB, stage 0, plain attention
    golden(218, [3.08263040882e-05, 0.00176038252594, 0.00502826566255, 0.00569418606195,
        0.00667664022128], 0.0301712451263, [0.0013555344, 0.0006477456]),
    // gpt-h1024-l12, 2 A100 40 GB, stage 0, bound by the host
    golden(221, [7.70657602205e-06, 0.000560466754691, 0.00139998404676, 0.00236877986618,
        0.00245427978139], 0.00676252045935, [0.0004574448, 0.0001166576]),
    // llama3.1-8b, 8 H100, gated, fp8
    golden(214, [0.000114471409808, 0.00512628985386, 0.0129405124949, 0.0187894950906,
        0.0316879332901], f64::NAN, [0.00513963893333, 0.00109246728889]),
];

const fn golden(line: usize, passes: [f64; 5], optimizer: f64, gathers: [f64; 2]) -> Golden {
    let [
        embedding,
        block_forward,
        block_backward,
        head_forward,
        head_backward,
    ] = passes;
    let passes = PassSeconds {
        embedding: [embedding, embedding],
        block: [block_forward, block_backward],
        head: [head_forward, head_backward],
    };
    Golden {
        line,
        passes,
        optimizer,
        gathers,
    }
}

#[track_caller]
fn assert_close(found: f64, expected: f64, what: &str) {
    assert!(
        (found / expected - 1.0).abs() < 1e-9,
        "{what}: {found}, not {expected}"
    );
}

fn published(line: usize) -> Row {
    let text = include_str!("../../tests/data/steps.csv");
    let mut rows = Table::parse(text, "steps.csv").unwrap().rows;
    rows.swap_remove(line - 2)
}

#[test]
fn seconds_are_the_prototypes() {
    for golden in GOLDEN {
        let row = published(golden.line);
        let machine = row.machine().unwrap();
        let software = row.software();
        let costs = Costs {
            machine: &machine,
            shape: &row.shape,
            software: &software,
            efficiencies: &Efficiencies::PRIOR,
        };
        let passes = costs.passes(row.micro_batch, row.stage > 0);
        let pairs = [
            (passes.embedding, golden.passes.embedding, "embedding"),
            (passes.block, golden.passes.block, "block"),
            (passes.head, golden.passes.head, "head"),
        ];
        for (found, expected, what) in pairs {
            let what = format!("line {}, {what}", golden.line);
            assert_close(found[0], expected[0], &what);
            assert_close(found[1], expected[1], &what);
        }

        if !golden.optimizer.is_nan() {
            let shards = if row.stage == 0 { 1 } else { row.gpus };
            let elements = row.shape.params as f64 / shards as f64;
            assert_close(costs.optimizer(elements), golden.optimizer, "optimizer");
        }
        let gather = |params: f64| {
            let bytes = 2.0 * params;
            ring(bytes, row.gpus, row.nodes, &machine, &Efficiencies::PRIOR)
        };
        assert_close(
            gather(row.shape.embedding_params()),
            golden.gathers[0],
            "ring",
        );
        assert_close(gather(row.shape.block_params()), golden.gathers[1], "ring");
    }
}

#[test]
fn one_rank_sends_nothing() {
    let machine = Machine::h100_80g();
    assert_eq!(ring(1e9, 1, 1, &machine, &Efficiencies::PRIOR), 0.0);
    assert_eq!(ring(1e9, 0, 0, &machine, &Efficiencies::PRIOR), 0.0);
}

#[test]
fn nonsense_does_not_panic() {
    let machine = Machine::h100_80g();
    let software = published(8).software();
    for size in [0, u64::MAX] {
        let shape = Shape {
            layers: size,
            width: size,
            heads: size,
            kv_heads: size,
            ffn: size,
            gated: true,
            vocab: size,
            seq: size,
            sequence_ranks: 1,
            params: size,
            adapters: None,
        };
        for attention in [Attention::Flash, Attention::Plain] {
            let software = Software {
                attention,
                ..software
            };
            let costs = Costs {
                machine: &machine,
                shape: &shape,
                software: &software,
                efficiencies: &Efficiencies::PRIOR,
            };
            let _ = costs.passes(size, true);
        }
        let _ = ring(
            shape.block_params(),
            size,
            size,
            &machine,
            &Efficiencies::PRIOR,
        );
    }
}
