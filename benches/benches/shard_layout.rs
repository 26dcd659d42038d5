//! zero-shard with 100,000 parameters over 4,096 ranks. Goals: a layout in under 50 ms, and lookups
//! in time logarithmic in the number of parameters. `cargo bench -p benches --bench shard_layout`.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use zero_shard::{Layout, ParamSpec, UnitSpec, reshard_rank};

/// Units of 100 parameters, with names as long as a framework's.
fn units(params: usize) -> Vec<UnitSpec> {
    let unit = |u: usize| {
        let params = (0..100u64).map(|p| {
            ParamSpec::new(
                format!("model.decoder.layers.{u}.experts.{p}.linear.weight"),
                [p * 7 % 13 * 64, 1024],
            )
        });
        UnitSpec::new(format!("layer.{u}"), params.collect::<Vec<_>>())
    };
    (0..params / 100).map(unit).collect()
}

fn layout(c: &mut Criterion) {
    let units_100k = units(100_000);
    c.bench_function(
        "layout of 100,000 parameters for 4,096 ranks (limit 50 ms)",
        |b| {
            b.iter_with_large_drop(|| Layout::new(black_box(&units_100k), 4096, 128).unwrap());
        },
    );
    // A lower bound: a layout stores every name and shape.
    c.bench_function("copying the 100,000 names and shapes", |b| {
        b.iter_with_large_drop(|| black_box(&units_100k).clone());
    });
    let mut group = c.benchmark_group("owner of an element, by parameters");

    for params in [1_000, 10_000, 100_000] {
        let layout = Layout::new(&units(params), 4096, 128).unwrap();
        let mut elem = 1u64;
        group.bench_with_input(BenchmarkId::from_parameter(params), &layout, |b, layout| {
            b.iter(|| {
                elem = elem.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                layout.owner(black_box(elem % layout.numel_elems()))
            });
        });
    }

    group.finish();
}

fn plans(c: &mut Criterion) {
    let units = units(100_000);
    let from = Layout::new(&units, 4096, 128).unwrap();
    let to = Layout::new(&units, 1024, 64).unwrap();
    c.bench_function(
        "one rank's reshard plan, 4,096 to 1,024 ranks, 100,000 parameters",
        |b| {
            b.iter(|| reshard_rank(black_box(&from), &to, 517).unwrap());
        },
    );
}

criterion_group!(benches, layout, plans);
criterion_main!(benches);
