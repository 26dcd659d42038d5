//! The blocks `optimizer` and `scheduler`.

use serde_json::{Value, json};
use zero_kernels::AdamHyper;
use zero_optim::{LrSchedule, Moments};

use super::ConfigFileError;
use super::block::{Block, Key, keys, shortened};
use zero_optim::ParamGroup;

/// `optimizer`: Adam or AdamW, with moments of 32 bits or, as `AdamW8bit`, of fewer; or Muon for the
/// matrices of blocks and AdamW for the rest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DsOptimizer {
    /// The base learning rate.
    pub lr: f64,
    /// Betas, epsilon, weight decay, and whether the decay is decoupled.
    pub hyper: AdamHyper,
    /// The format of the moments, of a type such as `AdamW8bit`; `None`: the type names none.
    pub moments: Option<Moments>,
    /// Muon's own settings.
    pub muon: Option<DsMuon>,
}

/// The settings of `"Muon"` beside AdamW's; `None`: the default.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DsMuon {
    /// Its learning rate, `muon_lr`.
    pub lr: Option<f64>,
    /// Its momentum.
    pub momentum: Option<f64>,
    /// Newton-Schulz steps.
    pub ns_steps: Option<u32>,
}

/// Parameters of the optimizer that would change results.
const REFUSED: &[Key] = keys! {
    "amsgrad" = Flag(false) => "AMSGrad is not supported",
    "maximize" = Flag(false) => "the loss is minimized",
    "fp32_optimizer_states" = Flag(true) => "the moments are fp32",
    "max_grad_norm" = Nothing => "use gradient_clipping at the top level",
};

const FUSED: &str = "the step is always fused";

/// Parameters of the optimizer that change speed only.
const IGNORED: &[Key] = keys! {
    "torch_adam" = Flag(false) => "the step is this program's own",
    "fused" = Flag(true) => FUSED,
    "foreach" = Flag(false) => FUSED,
    "capturable" = Flag(false) => FUSED,
    "set_grad_none" = Nothing => "gradient buffers are reused",
};

/// DeepSpeed's learning rates of Muon, and of Adam beside it.
const DEFAULT_MUON_LR: f64 = 0.02;
const DEFAULT_LR_BESIDE_MUON: f64 = 3e-4;

/// Those of Muon.
const REFUSED_OF_MUON: &[Key] = keys! {
    "per_head_muon" = Flag(false) => "a matrix of queries, keys or values is orthogonalised whole, unless `zero train` is called with --muon-heads",
};

/// Those of Muon: DeepSpeed's `"gram"` computes the same by other products.
const IGNORED_OF_MUON: &[Key] = keys! {
    "ns_method" = Nothing => "products are in fp32 on cores and in bf16 on GPUs",
};

/// Reads `optimizer`; `"Adam"` means AdamW unless `adam_w_mode` is false.
pub(super) fn read_optimizer(
    root: &mut Block,
    warnings: &mut Vec<String>,
) -> Result<Option<DsOptimizer>, ConfigFileError> {
    let Some(mut block) = root.block("optimizer")? else {
        return Ok(None);
    };
    let Some(name) = block.text("type")? else {
        return Err(ConfigFileError::Missing {
            key: "optimizer.type",
            why: "the file has an optimizer block",
        });
    };

    let lower = name.to_ascii_lowercase();
    // As bitsandbytes and torchao name them; DeepSpeed passes such names on.
    let moments = [Moments::EightBit, Moments::FourBit]
        .into_iter()
        .find(|moments| lower.ends_with(&moments.to_string()));
    let family = moments.map_or(&*lower, |bits| lower.trim_end_matches(&bits.to_string()));
    let always_decoupled = match family {
        "adam" | "muon" => false,
        "adamw" => true,
        _ => {
            let (key, got) = (block.name("type"), format!("{name:?}"));
            let why = "set it to \"Adam\" or \"AdamW\", with their params alone, to \"AdamW8bit\" or \"AdamW4bit\", or to \"Muon\"";
            return Err(ConfigFileError::Unsupported { key, got, why });
        }
    };

    block.ignore(keys! { "legacy_fusion" = Flag(false) => FUSED }, warnings)?;
    let mut params = params(&mut block)?;
    block.end_lenient(warnings);

    params.refuse(REFUSED)?;
    params.ignore(IGNORED, warnings)?;

    let adam_w_mode = params.flag("adam_w_mode")?.unwrap_or(true);
    let not_negative = "a number, 0 or above";
    // DeepSpeed's Adam has other defaults beside Muon.
    let (default_betas, default_eps) = match family {
        "muon" => ([0.9, 0.95], 1e-10),
        _ => ([0.9, 0.999], 1e-8),
    };
    let [beta1, beta2] = betas(&mut params)?.unwrap_or(default_betas);
    // Values that are read are no longer in the block.
    let lr_is_auto = params.is_auto("lr");
    let mut lr_of = |key| params.number_in(key, 0.0..=f64::MAX, not_negative);
    let lr = lr_of("lr")?;
    let (lr, muon) = match family {
        "muon" => {
            let [adam_lr, muon_lr] = [lr_of("adam_lr")?, lr_of("muon_lr")?];
            params.refuse(REFUSED_OF_MUON)?;
            params.ignore(IGNORED_OF_MUON, warnings)?;
            // `lr` is that of both, unless one has its own. `"auto"` sets neither.
            let muon_lr = match (muon_lr, lr, adam_lr) {
                (None, Some(_), None) => None,
                (None, None, None) if lr_is_auto => None,
                (own, lr, _) => own.or(lr).or(Some(DEFAULT_MUON_LR)),
            };
            let lr = adam_lr.or(lr).unwrap_or(DEFAULT_LR_BESIDE_MUON);
            (lr, Some(muon(&mut params, muon_lr)?))
        }
        _ => (lr.unwrap_or(1e-3), None),
    };
    let optimizer = DsOptimizer {
        lr,
        hyper: AdamHyper {
            beta1,
            beta2,
            eps: params
                .number_in("eps", 0.0..=f64::MAX, not_negative)?
                .unwrap_or(default_eps),
            weight_decay: params
                .number_in("weight_decay", 0.0..=f64::MAX, not_negative)?
                .unwrap_or(0.0),
            decoupled: always_decoupled || adam_w_mode,
            bias_correction: params.flag("bias_correction")?.unwrap_or(true),
        },
        moments,
        muon,
    };
    // DeepSpeed, too, rejects unknown arguments of an optimizer.
    params.end_strict()?;
    Ok(Some(optimizer))
}

/// The block `params`, which may be missing.
fn params(block: &mut Block) -> Result<Block, ConfigFileError> {
    Ok(block
        .block("params")?
        .unwrap_or_else(|| Block::named(&block.name("params"), serde_json::Map::new())))
}

fn muon(params: &mut Block, lr: Option<f64>) -> Result<DsMuon, ConfigFileError> {
    Ok(DsMuon {
        lr,
        momentum: params.number_in("momentum", 0.0..=1.0, "a number from 0 to 1")?,
        ns_steps: params
            .number_in("ns_steps", 1.0..=100.0, "a whole number from 1 to 100")?
            .map(|steps| steps as u32),
    })
}

fn betas(params: &mut Block) -> Result<Option<[f64; 2]>, ConfigFileError> {
    let Some(value) = params.take("betas") else {
        return Ok(None);
    };
    let beta = |v: &Value| v.as_f64().filter(|x| (0.0..1.0).contains(x));
    match value.as_array().map(Vec::as_slice) {
        Some([one, two]) if beta(one).is_some() && beta(two).is_some() => {
            Ok(beta(one).zip(beta(two)).map(<[f64; 2]>::from))
        }
        _ => {
            let (key, expected) = (
                params.name("betas"),
                "two numbers, each at least 0 and below 1",
            );
            Err(ConfigFileError::WrongType {
                key,
                expected,
                got: shortened(&value),
            })
        }
    }
}

/// Reads `param_groups`, a list of groups. DeepSpeed has no such key: there, the program that calls
/// it creates the groups.
pub(super) fn read_param_groups(
    root: &mut Block,
) -> Result<Option<Vec<ParamGroup>>, ConfigFileError> {
    let Some(groups) = root.take("param_groups") else {
        return Ok(None);
    };
    serde_json::from_value(groups)
        .map(Some)
        .map_err(|e| ConfigFileError::ParamGroups(e.to_string()))
}

/// `total_num_steps` of a schedule that has `"auto"`, which the run replaces by its last step.
const AUTO_STEPS: u64 = u64::MAX;

/// Reads `scheduler`.
pub(super) fn read_scheduler(
    root: &mut Block,
    warnings: &mut Vec<String>,
) -> Result<Option<LrSchedule>, ConfigFileError> {
    let Some(mut block) = root.block("scheduler")? else {
        return Ok(None);
    };
    let Some(name) = block.text("type")? else {
        return Err(ConfigFileError::Missing {
            key: "scheduler.type",
            why: "the file has a scheduler block",
        });
    };

    const KNOWN: [&str; 5] = [
        "WarmupLR",
        "WarmupDecayLR",
        "WarmupCosineLR",
        "OneCycle",
        "LRRangeTest",
    ];

    if !KNOWN.contains(&name.as_str()) {
        let (key, got) = (block.name("type"), format!("{name:?}"));
        let why = "supported schedules: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle and LRRangeTest";
        return Err(ConfigFileError::Unsupported { key, got, why });
    }

    let mut params = params(&mut block)?;
    block.end_lenient(warnings);
    if let Some(value) = params.take("last_batch_iteration").filter(|v| *v != -1) {
        let (key, got) = (params.name("last_batch_iteration"), shortened(&value));
        let why = "a schedule starts with the run and resumes from its checkpoint";
        return Err(ConfigFileError::Unsupported { key, got, why });
    }

    let has_auto_end = params.is_auto("total_num_steps");
    let mut rest = params.into_rest();
    if has_auto_end {
        rest.insert("total_num_steps".to_owned(), json!(AUTO_STEPS));
    }

    // One value per parameter group; there is one group.
    for value in rest.values_mut() {
        if let Value::Array(items) = value
            && items.len() == 1
        {
            *value = items.swap_remove(0);
        }
    }

    // DeepSpeed, too, replaces an unknown curve by the default.
    if let Some(Value::String(curve)) = rest.get("warmup_type")
        && curve != "log"
        && curve != "linear"
    {
        warnings.push(format!(
            "scheduler.params.warmup_type {curve:?} is unknown; using \"log\""
        ));
        rest.remove("warmup_type");
    }
    let schedule: LrSchedule = serde_json::from_value(json!({ "type": name, "params": rest }))
        .map_err(|e| ConfigFileError::Schedule(e.to_string()))?;
    schedule.check()?;

    Ok(Some(schedule))
}
