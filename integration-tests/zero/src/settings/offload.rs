//! The flags and settings of offload, for `zero train` and `zero plan`.
//!
//! A flag that the run cannot follow is an error. What the configuration file or a resumed run
//! offloads, and this run cannot, is dropped and named, so that one configuration serves several
//! stages.

use zero_alloc::device::DType;
use zero_shard::ZeroStage;

use super::args::OffloadArgs;
use super::row::Row;
use crate::error::CliError;
use zero_config::DsConfig;
use zero_optim::{Masters, Moments};
use zero_trainer::{Home, OffloadSettings};

/// Default elements of a sub-group of optimizer state that is offloaded.
pub(crate) const SUB_GROUP_ELEMS: usize = 1 << 20;

/// The least elements of one launch of the optimizer: 256 KiB of fp32. Smaller ones cost more than
/// they update.
pub(crate) const MIN_SUB_GROUP_ELEMS: u64 = 1 << 16;

pub(crate) const ROWS: &[Row] = &[
    Row::new("offload.optimizer", "--offload"),
    Row::new("offload.params", "--offload-params"),
    Row::new("offload.activations", "--offload-activations"),
    Row::new("offload.format.remainder", "--masters"),
    Row::new("offload.format.bf16_moments", "--moments"),
    Row::new("offload", ""),
];

/// The settings of a run that decide which state can be offloaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offloaded {
    pub(crate) stage: ZeroStage,
    pub(crate) dtype: DType,
    /// Whether activations are recomputed from checkpoints.
    pub(crate) checkpointing: bool,
    /// Whether ranks have parts of parameters.
    pub(crate) tensor_parallel: bool,
}

/// The settings of offload: flags override `file`, which overrides `base`. What the file or the
/// base offloads and `run` does not have is dropped.
///
/// # Errors
/// A flag that `run` cannot follow.
pub(crate) fn settings(
    args: &OffloadArgs,
    file: Option<&DsConfig>,
    base: &OffloadSettings,
    run: Offloaded,
    notices: &mut Vec<String>,
) -> Result<OffloadSettings, CliError> {
    let mut now = base.clone();
    if let Some(file) = file {
        take_file(&mut now, file);
    }
    take_flags(&mut now, args);
    place_params(&mut now, args, run, notices)?;
    if now.activations && !run.checkpointing {
        if args.offload_activations.is_some() {
            return Err(refusal(
                "--offload-activations",
                "only checkpoints are offloaded; add --activation-checkpointing",
            ));
        }
        now.activations = false;
    }
    choose_formats(&mut now, args, run)?;
    Ok(now)
}

fn refusal(flag: &str, why: &str) -> CliError {
    usage!("{flag}: {why}")
}

fn take_file(now: &mut OffloadSettings, file: &DsConfig) {
    let zero = &file.zero;
    let aio = &file.aio;
    let default = OffloadSettings::default();
    let or_default = |n: Option<u64>, default| n.map_or(default, |n| n as usize);

    now.optimizer = zero.offload_optimizer.clone();
    now.params = zero.offload_param.clone();
    now.buffers = or_default(zero.offload_optimizer_buffers, default.buffers);
    now.queue_depth = or_default(aio.queue_depth, default.queue_depth);
    now.request_bytes = or_default(aio.block_bytes, default.request_bytes);
    now.activations = file
        .activation_checkpointing
        .is_some_and(|block| block.cpu_checkpointing);
    if let Some(moments) = file.optimizer.and_then(|optimizer| optimizer.moments) {
        now.format.moments = moments;
    }
}

fn take_flags(now: &mut OffloadSettings, args: &OffloadArgs) {
    if let Some(home) = &args.offload {
        now.optimizer = home.clone();
    }
    if let Some(home) = &args.offload_params {
        now.params = home.clone();
    }
    if let Some(offloads) = args.offload_activations {
        now.activations = offloads;
    }
    if let Some(masters) = args.masters {
        now.format.masters = masters;
    }
    if let Some(moments) = args.moments {
        now.format.moments = moments;
    }
}

/// Parameters off the device need stage 3, and the optimizer off the device.
fn place_params(
    now: &mut OffloadSettings,
    args: &OffloadArgs,
    run: Offloaded,
    notices: &mut Vec<String>,
) -> Result<(), CliError> {
    if now.params == Home::Device {
        return Ok(());
    }
    if !run.stage.shards_params() {
        if let Some(home) = &args.offload_params {
            let why = format!(
                "only stage 3 shards parameters, and this run is at stage {}; use --stage 3",
                run.stage
            );
            return Err(refusal(&format!("--offload-params {home}"), &why));
        }
        now.params = Home::Device;
        return Ok(());
    }

    if now.optimizer != Home::Device {
        return Ok(());
    }
    let params = &now.params;

    if args.offload.is_some() {
        let why = format!(
            "the host updates parameters that are off the device ({params}); use cpu or nvme:DIR"
        );
        return Err(refusal("--offload none", &why));
    }

    notices.push(format!(
        "the optimizer state is in host memory (--offload cpu): parameters are off the device ({params})"
    ));
    now.optimizer = Home::Host;
    Ok(())
}

/// Remainders need bf16 parameters, moments in bf16 an optimizer off the device, and moments in
/// blocks whole parameters.
fn choose_formats(
    now: &mut OffloadSettings,
    args: &OffloadArgs,
    run: Offloaded,
) -> Result<(), CliError> {
    let masters = now.format.masters;
    if masters != Masters::Fp32 && run.dtype != DType::Bf16 {
        if args.masters.is_some() {
            let why = format!("it needs --dtype bf16, and this run is in {}", run.dtype);
            return Err(refusal(&format!("--masters {masters}"), &why));
        }
        now.format.masters = Masters::Fp32;
    }
    let moments = now.format.moments;
    let is_in_blocks = matches!(moments, Moments::EightBit | Moments::FourBit);
    if is_in_blocks && run.tensor_parallel {
        return Err(refusal(
            &format!("--moments {moments}"),
            "its blocks are ranges of whole parameters, and --tensor-parallel cuts them; use --moments fp32",
        ));
    }
    if moments == Moments::Bf16 && now.optimizer == Home::Device {
        if args.moments.is_some() {
            return Err(refusal(
                &format!("--moments {moments}"),
                "the optimizer is not offloaded; add --offload cpu or nvme:DIR",
            ));
        }
        now.format.moments = Moments::Fp32;
    }
    Ok(())
}

/// The elements of a sub-group: `set`, or if it is `usize::MAX` and the optimizer is offloaded,
/// [`SUB_GROUP_ELEMS`].
pub(crate) fn sub_group_elems(set: usize, offload: &OffloadSettings) -> usize {
    if set == usize::MAX && offload.updates_on_host() {
        SUB_GROUP_ELEMS
    } else {
        set
    }
}

/// Checks that the folders of scratch files exist, and makes their paths absolute.
///
/// # Errors
/// A path that is no folder.
pub(crate) fn resolve_folders(offload: &mut OffloadSettings) -> Result<(), CliError> {
    for (flag, home) in [
        ("--offload", &mut offload.optimizer),
        ("--offload-params", &mut offload.params),
    ] {
        let Home::Nvme(dir) = home else { continue };
        match dir.canonicalize() {
            Ok(absolute) if absolute.is_dir() => *dir = absolute,
            Ok(_) => {
                return Err(usage!("{flag} nvme:{}: not a folder", dir.display()));
            }
            Err(e) => {
                let hint = "create the folder on the disk for the scratch files, or choose another";
                return Err(usage!("{flag} nvme:{}: {e}; {hint}", dir.display()));
            }
        }
    }

    Ok(())
}

#[cfg(test)]
mod tests {
    use integration_tests::Printed;

    use super::*;
    use crate::settings::args::parsed;

    const RUN: Offloaded = Offloaded {
        stage: ZeroStage::Three,
        dtype: DType::Bf16,
        checkpointing: true,
        tensor_parallel: false,
    };
    const FP32: Offloaded = Offloaded {
        dtype: DType::F32,
        ..RUN
    };

    fn nvme(dir: &str) -> Home {
        Home::Nvme(dir.into())
    }

    fn resolve(
        flags: &str,
        file: Option<&str>,
        base: &OffloadSettings,
        run: Offloaded,
    ) -> Result<OffloadSettings, String> {
        let args = parsed(flags).offload;
        let file = file.map(|text| DsConfig::parse(text).unwrap());
        settings(&args, file.as_ref(), base, run, &mut Vec::new()).map_err(|error| {
            assert_eq!(error.exit_code(), 2);
            error.to_string()
        })
    }

    /// Flags override the file, which overrides the resumed run.
    #[test]
    fn flags_file_and_base_in_this_order() {
        let default = OffloadSettings::default();
        let file = r#"{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer":
            {"device": "nvme", "nvme_path": "/f", "buffer_count": 5}}, "aio": {"queue_depth": 8, "block_size": 8192},
            "activation_checkpointing": {"cpu_checkpointing": true}}"#;
        let of_file = OffloadSettings {
            optimizer: nvme("/f"),
            params: Home::Host,
            activations: true,
            buffers: 5,
            queue_depth: 8,
            request_bytes: 8192,
            ..default.clone()
        };
        for (file, base, expected) in [
            (Some(file), &default, &of_file),
            // A resumed run keeps all of it.
            (None, &of_file, &of_file),
            (Some("{}"), &of_file, &default),
        ] {
            assert_eq!(resolve("", file, base, RUN).as_ref(), Ok(expected));
        }

        let flags = "--offload cpu --offload-params none --offload-activations=false --masters remainder --moments bf16";
        let now = resolve(flags, Some(file), &default, RUN).unwrap();
        assert_eq!((&now.optimizer, &now.params), (&Home::Host, &Home::Device));
        assert!(!now.activations);
        let formats = (now.format.masters, now.format.moments);
        assert_eq!(formats, (Masters::Remainder, Moments::Bf16));
        // Back on the device, which has fp32 moments only.
        let now = resolve("--offload none", None, &now, RUN).unwrap();
        let formats = (now.format.masters, now.format.moments);
        assert_eq!(formats, (Masters::Remainder, Moments::Fp32));
        assert!(!now.is_any(), "{now:?}");
        let format = resolve("", None, &now, FP32).unwrap().format;
        assert_eq!(format, default.format);
    }

    #[test]
    fn flags_that_cannot_work_are_refused() {
        let default = OffloadSettings::default();
        let two = Offloaded {
            stage: ZeroStage::Two,
            ..RUN
        };
        let plain = Offloaded {
            checkpointing: false,
            ..RUN
        };
        let cases: [(&str, Offloaded, &[&str]); 5] = [
            (
                "--offload-params nvme:/p",
                two,
                &[
                    "--offload-params nvme:/p: only stage 3 shards parameters, and this run is at stage 2; use --stage 3",
                ],
            ),
            (
                "--offload none --offload-params cpu",
                RUN,
                &["--offload none: the host updates"],
            ),
            (
                "--offload-activations",
                plain,
                &["--offload-activations: ", "--activation-checkpointing"],
            ),
            ("--masters remainder", FP32, &["needs --dtype bf16"]),
            ("--moments bf16", RUN, &["the optimizer is not offloaded"]),
        ];
        for (flags, run, parts) in cases {
            resolve(flags, None, &default, run)
                .unwrap_err()
                .shows(parts);
        }
        let needs_no_offload = resolve("--masters remainder", None, &default, RUN).unwrap();
        assert_eq!(needs_no_offload.format.masters, Masters::Remainder);

        // Settings of another stage, the file or the resumed run are dropped.
        let of_run = OffloadSettings {
            params: Home::Host,
            activations: true,
            ..default.clone()
        };
        let run = Offloaded {
            checkpointing: false,
            ..two
        };
        assert_eq!(resolve("", None, &of_run, run), Ok(default));
    }

    #[test]
    fn offloaded_params_offload_the_optimizer() {
        let args = parsed("--offload-params nvme:/p").offload;
        let mut notices = Vec::new();
        let now = settings(&args, None, &OffloadSettings::default(), RUN, &mut notices).unwrap();
        assert_eq!(now.optimizer, Home::Host);
        notices[0].shows(&["the optimizer state is in host memory (--offload cpu)"]);
    }

    #[test]
    fn sub_groups_have_a_default() {
        let [none, cpu] = [Home::Device, Home::Host].map(|optimizer| OffloadSettings {
            optimizer,
            ..OffloadSettings::default()
        });
        let of = |set| [&none, &cpu].map(|offload| sub_group_elems(set, offload));
        assert_eq!(of(usize::MAX), [usize::MAX, 1 << 20]);
        assert_eq!(of(1 << 30), [1 << 30; 2], "a larger one is honoured");
    }

    #[test]
    fn folders_are_checked() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let check = |dir: &std::path::Path| {
            let mut offload = OffloadSettings {
                params: Home::Nvme(dir.into()),
                ..OffloadSettings::default()
            };
            resolve_folders(&mut offload)
                .map(|()| offload.params)
                .map_err(|error| error.to_string())
        };

        let found = Home::Nvme(folder.path().canonicalize().unwrap());
        assert_eq!(check(&folder.path().join(".")), Ok(found));
        check(&file).unwrap_err().shows(&["not a folder"]);
        let missing = check(&folder.path().join("none")).unwrap_err();
        missing.shows(&["--offload-params nvme:/", "create the folder"]);
    }
}
