//! Low-rank adapters on a frozen model (LoRA, Hu et al., arXiv 2106.09685).
//!
//! For a module with the matrix W, training adds `scale B A dropout(x)` to `W x`, and changes A
//! `[r, inputs]` and B `[outputs, r]` alone. A block's adapters are a unit. These units are in front
//! of the base's, so that checkpoints, which hold adapters only, number them alike. Names, shapes,
//! scale and initial values are those of Hugging Face's PEFT.

use serde::{Deserialize, Serialize};
use zero_trainer::Pass;

use crate::config::init::Rule;
use crate::config::{ConfigError, check_dropout};

/// The prefix of the names of adapters: that of PEFT's wrapper.
pub const PREFIX: &str = "base_model.model.";

/// The rank and the alpha of adapters, unless others are chosen: those of PEFT.
pub const DEFAULT_R: usize = 8;
/// See [`DEFAULT_R`].
pub const DEFAULT_ALPHA: f64 = 8.0;

/// The target for all linear layers of blocks, as in PEFT.
pub const ALL_LINEAR: &str = "all-linear";

/// The key of a checkpoint's model configuration.
pub const KEY: &str = "zero_lora";

/// The adapters of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoraConfig {
    /// The rank of the adapters.
    pub r: usize,
    /// The numerator of the scale: PEFT's `lora_alpha`.
    pub alpha: f64,
    /// Probability with which training drops an element of an adapter's input.
    pub dropout: f32,
    /// Whether the scale is alpha / sqrt(r) in place of alpha / r (arXiv 2312.03732).
    pub rslora: bool,
    /// Modules that have adapters: names such as `q_proj`, or ends of paths such as
    /// `mlp.c_proj`; [`ALL_LINEAR`] alone for all.
    pub targets: Vec<String>,
}

impl LoraConfig {
    /// The factor of `B A x`.
    pub fn scale(&self) -> f32 {
        let r = self.r as f64;
        (self.alpha / if self.rslora { r.sqrt() } else { r }) as f32
    }

    /// Names the `modules` for which [`ALL_LINEAR`] is the target.
    pub(crate) fn name_all(&mut self, modules: &[&str]) {
        if self.targets == [ALL_LINEAR] {
            let names = modules.iter().filter_map(|path| path.rsplit('.').next());
            self.targets = names.map(str::to_owned).collect();
            self.targets.sort();
            self.targets.dedup();
        }
    }

    /// Whether a module has an adapter.
    pub(crate) fn adapts(&self, module: &str) -> bool {
        self.targets.iter().any(|target| is_end(target, module))
    }

    /// Checks the numbers, and that each target names some of the `modules` of blocks of this width.
    ///
    /// # Errors
    /// The first value that is out of range, or that names no module.
    pub(crate) fn check(&self, width: usize, modules: &[&str]) -> Result<(), ConfigError> {
        let refuse = |what: String| Err(ConfigError::Lora(what));
        let r = self.r;
        if !(1..=width).contains(&r) {
            return refuse(format!(
                "r is {r}; it must be at least 1 and at most the model's width, {width}"
            ));
        }
        if !(self.alpha.is_finite() && self.alpha > 0.0) {
            return refuse(format!("alpha is {}; it must be above 0", self.alpha));
        }
        check_dropout("LoRA dropout", self.dropout)?;
        let unknown = |target: &&String| !modules.iter().any(|module| is_end(target, module));
        match (self.targets.is_empty(), self.targets.iter().find(unknown)) {
            (true, _) => refuse("no targets; name at least one module".to_owned()),
            (false, None) => Ok(()),
            (false, Some(target)) => refuse(format!(
                "the target {target:?} is no linear layer of a block; those are {}",
                modules.join(", ")
            )),
        }
    }
}

/// Whether `target` is `module`, or its end behind a point.
fn is_end(target: &str, module: &str) -> bool {
    let before = module.strip_suffix(target);
    before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// The passes of a model with `adapters` units of adapters in front of those that `passes` read,
/// which are frozen.
pub(crate) fn passes(passes: Vec<Pass>, adapters: usize) -> Vec<Pass> {
    let of_pass = |(at, pass): (usize, Pass)| {
        let adapter = at.checked_sub(1).filter(|&layer| layer < adapters);
        let reads = |units: Vec<usize>| {
            let base = units.into_iter().map(|unit| unit + adapters);
            base.chain(adapter).collect()
        };
        Pass {
            forward_reads: reads(pass.forward_reads),
            backward_reads: reads(pass.backward_reads),
            grads: adapter.into_iter().collect(),
        }
    };
    passes.into_iter().enumerate().map(of_pass).collect()
}

/// The initial values of an adapter of this name and `inputs`: those of B are 0, those of A uniform
/// below 1 / sqrt(inputs), which is kaiming_uniform with a = sqrt(5).
pub(crate) fn rule(name: &str, inputs: u64) -> Rule {
    match name.ends_with(".lora_B.weight") {
        true => Rule::Constant(0.0),
        false => Rule::Uniform(1.0 / (inputs as f32).sqrt()),
    }
}
