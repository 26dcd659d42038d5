//! Gathers with a codec: parameters of 32 bits that travel as bf16.

use std::collections::HashMap;

use half::bf16;
use zero_kernels::Codec;
use zero_shard::Sharding;
use zero_trainer::{CommBytes, MeshSettings, Settings};

use super::support::{Case, Outcome, groups_of};
use super::toy::Toy;

fn is_bf16(x: f32) -> bool {
    bf16::from_f32(x).to_f32().to_bits() == x.to_bits()
}

/// The vectors that forward passes read, each with the number of ranks that read it.
type Read = HashMap<(usize, Vec<u32>), usize>;

fn run(case: &Case, settings: &Settings) -> (Outcome, Read) {
    let toy = Toy::new(&[vec![70, 3], vec![41], vec![90]], true);
    let outcome = case.run_with(settings, &toy);
    let mut read = Read::new();
    for (pass, values) in toy.read.lock().drain(..) {
        let bits = values.into_iter().map(f32::to_bits).collect();
        *read.entry((pass, bits)).or_default() += 1;
    }
    (outcome, read)
}

#[test]
fn weights_are_rounded_alike_and_shards_stay_fp32() {
    let halves = groups_of(2, Sharding::Hybrid);
    for (ranks, mesh) in [
        (2, MeshSettings::default()),
        (4, MeshSettings::default()),
        (4, halves),
    ] {
        let mut curves = Vec::new();
        for stage in [1, 2, 3] {
            let case = Case {
                stage,
                ranks,
                mesh,
                ..Case::default()
            };
            let plain = run(&case, &case.settings()).0;
            let settings = Settings {
                gather_codec: Some(Codec::Bf16),
                ..case.settings()
            };
            let (coded, read) = run(&case, &settings);

            assert_eq!(read.len() as u64, case.steps * 3, "{case:?}");
            for ((pass, bits), count) in &read {
                assert_eq!(*count, ranks, "pass {pass}: {case:?}");
                let rounded = bits.iter().all(|&bits| is_bf16(f32::from_bits(bits)));
                assert!(rounded, "pass {pass}: {case:?}");
            }
            let state = coded.state();
            let mut masters = state
                .iter()
                .filter(|(name, _)| name.starts_with("master/"))
                .flat_map(|(_, bits)| bits);
            assert!(
                masters.any(|&bits| !is_bf16(f32::from_bits(bits))),
                "{case:?}"
            );
            curves.push((coded.curve(), state));

            check_bytes(&case, &plain, &coded);
        }
        assert!(curves.iter().all(|curve| *curve == curves[0]), "{mesh:?}");
    }
}

/// All gathers send half the bytes, as the formulas say; nothing else changes.
fn check_bytes(case: &Case, plain: &Outcome, coded: &Outcome) {
    let sent = |outcome: &Outcome| outcome.steps[1].comm_bytes;
    let traffic = |outcome: &Outcome| {
        let layouts = outcome.settings.mesh.layouts(&outcome.layout).unwrap();
        let axes = outcome.settings.axis_traffic(&layouts).unwrap();
        axes.rank().unwrap().all_gather_bytes
    };
    assert_eq!(traffic(coded), traffic(plain) / 2, "{case:?}");
    let expected = CommBytes {
        all_gather: sent(plain).all_gather / 2,
        ..sent(plain)
    };
    assert_eq!(sent(coded), expected, "{case:?}");
}

#[test]
fn codecs_are_not_recorded_into_graphs() {
    let case = Case {
        stage: 1,
        ..Case::default()
    };
    let settings = Settings {
        gather_codec: Some(Codec::Bf16),
        graphs: true,
        ..case.settings()
    };
    let toy = Toy::new(&[vec![70]], false);
    let error = case.try_run_with(&settings, &toy).err().unwrap();
    let text = error.to_string();
    assert!(text.contains("gathers with a codec"), "{text}");
}
