//! The flags and settings of offload, for `zero train` and `zero plan`.

use clap::{Args, ValueEnum};
use zero_alloc::device::DType;
use zero_shard::ZeroStage;

use super::CliError;
use crate::config::DsConfig;
use crate::trainer::{Home, OffloadSettings};

/// Default elements of a sub-group of optimizer state that is offloaded.
pub(super) const SUB_GROUP_ELEMS: usize = 1 << 22;

/// The least elements of one launch of the optimizer: 256 KiB of fp32. Smaller ones cost more than they update.
pub(super) const MIN_SUB_GROUP_ELEMS: u64 = 1 << 16;

/// What is kept off the device.
#[derive(Args, Clone, Debug, Default)]
pub struct OffloadArgs {
    /// Where the optimizer state is kept: none (on the compute device), cpu (in host memory) or nvme:DIR (in a scratch
    /// file in DIR). Off the device, the host updates the parameters; the numbers are the same [default: none]
    #[arg(long, value_name = "none|cpu|nvme:DIR", value_parser = parse_home)]
    pub offload: Option<Home>,
    /// Where the parameters are kept at stage 3, between their uses: none, cpu or nvme:DIR [default: none]
    #[arg(long, value_name = "none|cpu|nvme:DIR", value_parser = parse_home)]
    pub offload_params: Option<Home>,
    /// Keep the checkpoints of activations in host memory; requires --activation-checkpointing [default: false]
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub offload_activations: Option<bool>,
    /// Master weights of an offloaded optimizer: fp32, or remainder, the 16 bits that a bf16 parameter lacks; a master
    /// midway between two parameters then rounds away from zero and not to even [default: fp32]
    #[arg(long, value_enum)]
    pub masters: Option<Masters>,
    /// Moments of an offloaded optimizer: fp32, or bf16 with stochastic rounding, which changes the numbers slightly
    /// [default: fp32]
    #[arg(long, value_enum)]
    pub moments: Option<Moments>,
}

/// Formats of master weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Masters {
    /// fp32.
    Fp32,
    /// The bf16 parameter and a 16-bit remainder.
    Remainder,
}

/// Formats of moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Moments {
    /// fp32.
    Fp32,
    /// bf16.
    Bf16,
}

/// The settings of a run that decide which state can be offloaded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offloaded {
    pub(super) stage: ZeroStage,
    pub(super) dtype: DType,
    /// Whether activations are recomputed from checkpoints.
    pub(super) checkpointing: bool,
}

fn parse_home(text: &str) -> Result<Home, String> {
    text.parse()
}

/// The settings of offload: flags override `file`, which overrides `base`. What the file or the base offloads and `run`
/// does not have is dropped.
///
/// # Errors
/// A flag that `run` cannot follow.
pub(super) fn settings(
    args: &OffloadArgs,
    file: Option<&DsConfig>,
    base: &OffloadSettings,
    run: Offloaded,
    notices: &mut Vec<String>,
) -> Result<OffloadSettings, CliError> {
    let refuse = |flag: &str, why: &str| Err(CliError::Usage(format!("{flag}: {why}")));
    let mut now = base.clone();
    if let Some(file) = file {
        let (zero, aio, default) = (&file.zero, &file.aio, OffloadSettings::default());
        (now.optimizer, now.params) = (zero.offload_optimizer.clone(), zero.offload_param.clone());
        now.buffers = zero.offload_optimizer_buffers.map_or(default.buffers, |n| n as usize);
        now.queue_depth = aio.queue_depth.map_or(default.queue_depth, |n| n as usize);
        now.request_bytes = aio.block_bytes.map_or(default.request_bytes, |n| n as usize);
        now.activations = file.activation_checkpointing.is_some_and(|block| block.cpu_checkpointing);
    }
    now.optimizer = args.offload.clone().unwrap_or(now.optimizer);
    now.params = args.offload_params.clone().unwrap_or(now.params);
    now.activations = args.offload_activations.unwrap_or(now.activations);
    now.format.remainder = args.masters.map_or(now.format.remainder, |masters| masters == Masters::Remainder);
    now.format.bf16_moments = args.moments.map_or(now.format.bf16_moments, |moments| moments == Moments::Bf16);

    if now.params != Home::Device && !run.stage.shards_params() {
        if let Some(home) = &args.offload_params {
            let why =
                format!("only stage 3 shards parameters, and this run is at stage {}; use --stage 3", run.stage);
            return refuse(&format!("--offload-params {home}"), &why);
        }
        now.params = Home::Device;
    }
    if now.params != Home::Device && now.optimizer == Home::Device {
        if args.offload.is_some() {
            let why =
                format!("the host updates parameters that are off the device ({}); use cpu or nvme:DIR", now.params);
            return refuse("--offload none", &why);
        }
        notices.push(format!(
            "the optimizer state is in host memory (--offload cpu): parameters are off the device ({})",
            now.params
        ));
        now.optimizer = Home::Host;
    }
    if now.activations && !run.checkpointing {
        if args.offload_activations.is_some() {
            return refuse("--offload-activations", "only checkpoints are offloaded; add --activation-checkpointing");
        }
        now.activations = false;
    }
    let on_device = now.optimizer == Home::Device;
    if now.format.remainder && (on_device || run.dtype != DType::Bf16) {
        match args.masters {
            Some(_) if on_device => {
                return refuse(
                    "--masters remainder",
                    "the optimizer is not offloaded; add --offload cpu or nvme:DIR",
                );
            }
            Some(_) => {
                let why = format!("it needs --dtype bf16, and this run is in {}", run.dtype);
                return refuse("--masters remainder", &why);
            }
            None => now.format.remainder = false,
        }
    }
    if now.format.bf16_moments && on_device {
        if args.moments.is_some() {
            return refuse("--moments bf16", "the optimizer is not offloaded; add --offload cpu or nvme:DIR");
        }
        now.format.bf16_moments = false;
    }
    Ok(now)
}

/// The elements of a sub-group: `set`, or if it is `usize::MAX` and the optimizer is offloaded, [`SUB_GROUP_ELEMS`].
pub(super) fn sub_group_elems(set: usize, offload: &OffloadSettings) -> usize {
    if set == usize::MAX && offload.updates_on_host() { SUB_GROUP_ELEMS } else { set }
}

/// Checks that the folders of scratch files exist, and makes their paths absolute.
///
/// # Errors
/// A path that is no folder.
pub(super) fn resolve_folders(offload: &mut OffloadSettings) -> Result<(), CliError> {
    for (flag, home) in [("--offload", &mut offload.optimizer), ("--offload-params", &mut offload.params)] {
        let Home::Nvme(dir) = home else { continue };
        match dir.canonicalize() {
            Ok(absolute) if absolute.is_dir() => *dir = absolute,
            Ok(_) => return Err(CliError::Usage(format!("{flag} nvme:{}: not a folder", dir.display()))),
            Err(e) => {
                let hint = "create the folder on the disk for the scratch files, or choose another";
                return Err(CliError::Usage(format!("{flag} nvme:{}: {e}; {hint}", dir.display())));
            }
        }
    }
    Ok(())
}
