//! Steps of runs on a host: what its ranks share.

use std::sync::Arc;

use zero_alloc::device::DType;
use zero_shard::{ParamSpec, TensorCut, UnitSpec, ZeroStage};
use zero_simulator::{Attention, Costs, Efficiencies, Machine, Run, Shape, Software, Units};
use zero_trainer::param_groups::ParamKind;
use zero_trainer::{Home, OffloadSettings, Pass, Settings};

const SHAPE: Shape = Shape {
    layers: 6,
    width: 256,
    heads: 8,
    kv_heads: 8,
    ffn: 1024,
    gated: false,
    vocab: 1024,
    seq: 128,
    sequence_ranks: 1,
    params: 5_200_000,
    adapters: None,
};

fn host(cores: usize) -> Machine {
    Machine {
        name: "host".to_owned(),
        peak_flops: 1e11 * cores as f64,
        memory_bytes_per_s: 1e10 * cores as f64,
        cores: Some(cores),
        measured: true,
        ..Machine::v100_32g()
    }
}

/// Seconds of a step of `ranks` ranks with `threads` threads each.
fn step_s(machine: &Machine, ranks: usize, threads: usize, change: impl Fn(&mut Settings)) -> f64 {
    let unit =
        |name: String, elems: u64| UnitSpec::new(name.clone(), [ParamSpec::new(name, [elems])]);
    let mut units = vec![unit("embedding".to_owned(), 300_000)];
    units.extend((0..SHAPE.layers).map(|i| unit(format!("block {i}"), 800_000)));
    units.push(unit("head".to_owned(), 512));
    let mut settings = Settings::new(ZeroStage::Two, DType::F32, |_| ParamKind::Linear);
    change(&mut settings);
    let upcasts = settings.dtype != DType::F32;
    let units = Units {
        passes: (0..units.len()).map(Pass::of_unit).collect(),
        units,
        cut: Arc::new(|_| TensorCut::Replicated),
    };
    let run = Run::new([ranks, ranks], settings, units, &SHAPE, 4, false).on_host(threads);
    let costs = Costs {
        machine,
        shape: &SHAPE,
        software: &Software {
            attention: Attention::Host { upcasts },
            wide_reduce: false,
            fp8: false,
            recompute: false,
        },
        efficiencies: &Efficiencies::HOST,
    };
    run.schedules().unwrap().step(&costs).seconds
}

/// Ranks share the cores: twice as many take about twice as long, and a rank that has all of them is
/// slower than its part only by what its threads lose.
#[test]
fn ranks_share_the_cores() {
    let machine = host(2);
    let [one, two, four] =
        [(1, 2), (2, 1), (4, 1)].map(|(ranks, threads)| step_s(&machine, ranks, threads, |_| ()));
    assert!(two / one > 1.7 && two / one < 2.4, "{one} {two}");
    assert!(four / two > 1.8 && four / two < 2.3, "{two} {four}");
    // With a core each, more ranks wait for nobody.
    let wide = step_s(&host(4), 4, 1, |_| ());
    assert!(wide / two > 0.9 && wide / two < 1.1, "{two} {wide}");
}

#[test]
fn each_part_of_a_step_costs_time() {
    let machine = host(2);
    let base = step_s(&machine, 2, 1, |_| ());
    type Change = fn(&mut Settings);
    let changes: [(&str, Change); 4] = [
        ("stage 0 updates all states", |s| s.stage = ZeroStage::Zero),
        ("stage 3 gathers", |s| s.stage = ZeroStage::Three),
        ("two micro-batches", |s| s.grad_accum_steps = 2),
        ("conversion from 16 bits", |s| s.dtype = DType::Bf16),
    ];
    for (what, change) in changes {
        let changed = step_s(&machine, 2, 1, change);
        // 16 bits also halve what is sent, so their step may be shorter.
        let differs = match what {
            "conversion from 16 bits" => (changed / base - 1.0).abs() > 1e-4,
            _ => changed > base,
        };
        assert!(differs, "{what}: {changed} after {base}");
    }
    let offloaded = step_s(&machine, 2, 1, |s| {
        s.offload = OffloadSettings {
            optimizer: Home::Host,
            ..OffloadSettings::default()
        };
    });
    assert!((offloaded / base - 1.0).abs() < 0.2, "{offloaded} {base}");
}
