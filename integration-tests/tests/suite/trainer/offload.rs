//! Offload to host memory and to files changes no bit: losses, norms and the final state are those
//! of the run without.

use std::path::Path;

use integration_tests::LLAMA;
use proptest::prelude::*;
use zero_alloc::device::DType;
use zero_ckpt::Reader;
use zero_optim::{DynamicScaling, LossScaling, Masters, Moments, OptimizerConfig, StateFormat};
use zero_trainer::{Home, OffloadSettings, StepMetrics, run_on_threads};

use super::groups::{mixed, upper};
use super::identical::{all_same, all_same_with, cases, same};
use super::on_ranks;
use super::support::{Case, homes};
use super::toy::{Toy, toys};

/// A folder for scratch files, on a disk.
pub(super) fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Every kind of offload of a stage.
fn kinds(stage: u64, dir: &Path) -> Vec<OffloadSettings> {
    let nvme = || Home::Nvme(dir.to_owned());
    let pairs = [
        (Home::Host, Home::Device),
        (nvme(), Home::Device),
        (nvme(), nvme()),
        (Home::Host, nvme()),
        (Home::Device, nvme()),
        (nvme(), Home::Host),
    ];
    let sharded = pairs
        .into_iter()
        .filter(|(_, params)| stage == 3 || *params == Home::Device);
    sharded
        .map(|(optimizer, params)| homes(optimizer, params))
        .collect()
}

/// Compares all stages and kinds of offload with stage 0 without, which must reduce every
/// micro-batch, too.
fn agree(base: &Case) {
    let dir = folder();
    let base = &base.with(|case| case.reduce_every_micro_batch = true);

    let mut cases = vec![base.with(|case| case.stage = 0)];
    for stage in 0..4 {
        for offload in kinds(stage, dir.path()) {
            cases.extend([true, false].map(|overlap| Case {
                stage,
                overlap,
                offload: offload.clone(),
                ..base.clone()
            }));
        }
    }
    let reference = all_same(cases);
    assert!(
        reference.steps.iter().any(|s| !s.skipped),
        "nothing was trained"
    );

    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        0,
        "scratch files have no names"
    );
}

/// Pieces of 2048 elements: several a unit.
fn small_pieces() -> OptimizerConfig {
    OptimizerConfig::default()
        .max_grad_norm(0.5)
        .sub_group_elems(2048)
}

#[test]
fn fp32() {
    agree(&Case::default().with(|case| case.optimizer = small_pieces()));
}

#[test]
fn llama_in_bf16() {
    agree(&Case {
        oracle: LLAMA,
        dtype: DType::Bf16,
        steps: 3,
        optimizer: small_pieces(),
        ..Case::default()
    });
}

#[test]
fn bf16_accumulating() {
    agree(&Case {
        dtype: DType::Bf16,
        grad_accum: 3,
        ranks: 3,
        optimizer: small_pieces(),
        ..Case::default()
    });
}

#[test]
fn fp16_with_overflows() {
    let scaling = LossScaling::Dynamic(
        DynamicScaling::default()
            .initial_scale_power(24)
            .hysteresis(1),
    );
    let optimizer = small_pieces().loss_scaling(scaling);
    let base = Case {
        dtype: DType::F16,
        steps: 8,
        optimizer,
        ..Case::default()
    };

    let steps = base.with(|case| case.stage = 0).run_tiny().steps;
    assert!(
        steps.iter().any(|s| s.skipped) && steps.iter().any(|s| !s.skipped),
        "no overflow, or nothing else"
    );
    agree(&base);
}

#[test]
fn groups_and_frozen_tensors() {
    agree(&Case {
        dtype: DType::Bf16,
        ranks: 3,
        optimizer: small_pieces(),
        groups: mixed(),
        ..Case::default()
    });
    agree(&Case {
        grad_accum: 2,
        optimizer: small_pieces(),
        groups: upper(),
        ..Case::default()
    });
}

/// A resume may have other offload than the save, another stage and another number of ranks.
#[test]
fn resume_with_and_without() {
    let dir = folder();
    let base = Case {
        dtype: DType::Bf16,
        steps: 6,
        optimizer: small_pieces(),
        ..Case::default()
    };

    let whole = base.run_tiny();
    for (stage, ranks) in [(2, 2), (3, 2), (3, 3)] {
        for offload in kinds(stage, dir.path()) {
            let with = Case {
                stage,
                ranks,
                offload,
                ..base.clone()
            };
            let without = Case {
                stage,
                ranks,
                ..base.clone()
            };
            for (first, second) in [(&with, &without), (&without, &with)] {
                let saved = Case {
                    steps: 3,
                    ranks: 2,
                    ..first.clone()
                }
                .run_tiny();
                let resume = Some(saved.dir.path().join("step-00000003"));
                let resumed = second.with(|case| case.resume = resume.clone()).run_tiny();
                let what = format!("{first:?} then {second:?}");
                if ranks == 2 {
                    assert_eq!(whole.curve()[3..], resumed.curve(), "{what}");
                    assert!(whole.state() == resumed.state(), "{what}: final state");
                } else {
                    let plain = without.with(|case| case.resume = resume).run_tiny();
                    same(&plain, &resumed, &what);
                }
            }
        }
    }
}

/// Remainders have the bits of fp32 masters where no weight is halfway between two bf16 numbers;
/// bf16 moments follow the losses of fp32 ones.
#[test]
fn smaller_formats_follow_the_losses() {
    let dir = folder();
    let base = Case {
        stage: 2,
        dtype: DType::Bf16,
        steps: 100,
        ..Case::default()
    };

    let losses = |case: &Case| {
        case.run_tiny()
            .steps
            .iter()
            .map(|s| s.loss)
            .collect::<Vec<_>>()
    };

    let plain = losses(&base);
    // State in a file has the bits of state in host memory, so one run from a file is enough.
    let fp32 = StateFormat::default();
    let remainders = fp32.masters(Masters::Remainder);
    let formats = [
        (remainders.moments(Moments::Bf16), 0.03),
        (remainders, 0.01),
        (fp32.moments(Moments::Bf16), 0.03),
    ];
    for (home, formats) in [
        (Home::Host, &formats[..]),
        (Home::Nvme(dir.path().to_owned()), &formats[..1]),
    ] {
        for &(format, tolerance) in formats {
            let offload = OffloadSettings {
                optimizer: home.clone(),
                format,
                ..OffloadSettings::default()
            };
            let small = losses(&base.with(|case| case.offload = offload));
            let worst = plain
                .iter()
                .zip(&small)
                .map(|(a, b)| ((a - b) / a).abs())
                .fold(0.0, f64::max);
            println!("{home} {format:?}: {worst}");
            assert!(
                worst <= tolerance,
                "{home} {format:?}: losses differ by {worst}"
            );
        }
    }
}

/// Remainders on the device have the bits of those in host memory, at every stage, and their
/// checkpoints load into fp32 masters and back.
#[test]
fn remainders_need_no_offload() {
    let format = StateFormat::default().masters(Masters::Remainder);

    let on_device = OffloadSettings {
        format,
        ..OffloadSettings::default()
    };

    let on_host = OffloadSettings {
        optimizer: Home::Host,
        ..on_device.clone()
    };

    let base = Case {
        dtype: DType::Bf16,
        optimizer: small_pieces(),
        groups: mixed(),
        steps: 6,
        ..Case::default()
    };

    let [device, host] =
        [on_device, on_host].map(|offload| base.with(|case| case.offload = offload));

    let half = |case: &Case, resume| {
        Case {
            steps: 3,
            resume,
            ..case.clone()
        }
        .run_tiny()
    };

    for stage in 0..4 {
        let [plain, device, host] =
            [&base, &device, &host].map(|case| case.with(|case| case.stage = stage));
        let [saved, saved_device, saved_host] =
            [&plain, &device, &host].map(|case| half(case, None));
        same(&saved_host, &saved_device, &format!("stage {stage}"));
        same(
            &host.resumed(&saved_host),
            &device.resumed(&saved_device),
            &format!("stage {stage}, resumed"),
        );
        same(
            &host.resumed(&saved),
            &device.resumed(&saved),
            &format!("stage {stage}, from fp32 masters"),
        );
        same(
            &plain.resumed(&saved_host),
            &plain.resumed(&saved_device),
            &format!("stage {stage}, to fp32 masters"),
        );
    }
}

/// In any order that streams and events allow, no access is unordered: with gradients that are read
/// by the host, parameters that it writes, and slots and pieces that are read and written beside
/// it.
#[test]
fn no_wait_is_missing() {
    let dir = folder();
    let toy = Toy::new(&[vec![40, 3], vec![70], vec![9, 30], vec![5]], true);
    for seed in 0..3 {
        for stage in 0..4 {
            for offload in kinds(stage, dir.path()) {
                let case = Case {
                    ranks: 1,
                    stage,
                    dtype: DType::Bf16,
                    grad_accum: 2,
                    bucket_elems: 20,
                    offload,
                    ..Case::default()
                };
                on_ranks::no_wait_is_missing(&case, &toy, seed);
            }
        }
    }
}

/// A scratch file that loses its contents in the middle of a run ends all ranks with an error that
/// names the folder; the last checkpoint stays.
#[test]
fn truncated_file_is_an_error() {
    let dir = folder();
    let saves = folder();
    for params in [Home::Device, Home::Nvme(dir.path().to_owned())] {
        let offload = homes(Home::Nvme(dir.path().to_owned()), params);
        let case = Case {
            steps: 50,
            offload,
            ..Case::default()
        };
        let mut options = case.options(None);
        let saved = saves
            .path()
            .join(case.offload.params.to_string().replace('/', "_"));
        options.checkpoint = Some((saved.clone(), 1));
        let mut steps = 0;
        let mut truncate = |_: &StepMetrics| {
            steps += 1;
            if steps == 3 {
                truncate_files_in(dir.path());
            }
            Ok(())
        };
        let run = run_on_threads(
            2,
            1,
            &case.settings(),
            &case.tiny(),
            &options,
            &mut truncate,
        );
        let error = run.unwrap_err().to_string();
        assert!(error.contains(&dir.path().display().to_string()), "{error}");
        assert!(error.contains("swap file"), "{error}");
        // Step 2 or 3, by the moment at which a rank fails.
        assert!((2..=4).contains(&Reader::open(&saved).unwrap().manifest().step));
    }
}

/// Truncates all open files of this process that were in `dir`; they have no names.
fn truncate_files_in(dir: &Path) {
    let mut truncated = 0;
    for fd in std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .map(|entry| entry.unwrap().path())
    {
        if std::fs::read_link(&fd).is_ok_and(|file| file.starts_with(dir)) {
            std::fs::File::options()
                .write(true)
                .open(&fd)
                .unwrap()
                .set_len(0)
                .unwrap();
            truncated += 1;
        }
    }
    assert!(truncated > 0, "no open file in {}", dir.display());
}

proptest! {
    #![proptest_config(cases(3))]

    /// Units of any sizes: empty, smaller than the number of ranks, not divisible by it; parameters
    /// without elements.
    #[test]
    fn units_of_any_size(
        toy in toys(false),
        ranks in 1usize..5,
        grad_accum in 1usize..4,
        sixteen in any::<bool>(),
        bucket_elems in 1usize..200,
        overlap in any::<bool>(),
    ) {
        let dir = folder();
        let dtype = if sixteen { DType::Bf16 } else { DType::F32 };
        let reduce_every_micro_batch = true;
        let sizes = Case { ranks, grad_accum, reduce_every_micro_batch, dtype, bucket_elems, ..Case::default() };
        let base = Case { stage: 0, overlap, ..sizes };
        let mut cases = vec![base.clone()];
        for stage in 0..4 {
            let of = |offload| Case { stage, offload, ..base.clone() };
            cases.extend(kinds(stage, dir.path()).into_iter().map(of));
        }
        all_same_with(cases, |case| case.run(&toy));
    }
}
