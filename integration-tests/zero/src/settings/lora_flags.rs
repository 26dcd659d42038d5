//! `--lora`: adapters to train on a frozen model.

use std::path::PathBuf;
use std::str::FromStr;

use zero_models::ModelConfig;
use zero_models::hf::adapters::Adapters;
use zero_models::lora::{DEFAULT_ALPHA, DEFAULT_R, LoraConfig};

use crate::error::CliError;

/// The adapters of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum LoraChoice {
    /// New ones.
    New(NewAdapters),
    /// Those of a PEFT folder.
    Folder(PathBuf),
}

/// Adapters that are drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct NewAdapters {
    r: usize,
    alpha: f64,
    dropout: f32,
    rslora: bool,
    /// `None`: those of PEFT for the model.
    targets: Option<Vec<String>>,
}

impl FromStr for LoraChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let first = text.split([',', '=']).next().unwrap_or_default();
        match ["r", "alpha", "dropout", "targets", "rslora"].contains(&first) {
            true => new_adapters(text).map(Self::New),
            false => Ok(Self::Folder(text.into())),
        }
    }
}

fn new_adapters(text: &str) -> Result<NewAdapters, String> {
    fn parsed<T: FromStr>(key: &str, value: &str) -> Result<T, String> {
        let number = value.trim().parse();
        number.map_err(|_| format!("{key}={value}: expected a number"))
    }
    let mut new = NewAdapters {
        r: DEFAULT_R,
        alpha: DEFAULT_ALPHA,
        dropout: 0.0,
        rslora: false,
        targets: None,
    };
    // Names behind `targets=` are further targets.
    let mut names_targets = false;
    for item in text.split(',') {
        let (key, value) = item.split_once('=').unwrap_or((item, ""));
        match (key.trim(), value) {
            ("r", value) => new.r = parsed(key, value)?,
            ("alpha", value) => new.alpha = parsed(key, value)?,
            ("dropout", value) => new.dropout = parsed(key, value)?,
            ("rslora", "" | "true") => new.rslora = true,
            ("targets", name) => new.targets = Some(vec![name.trim().to_owned()]),
            (name, "") if names_targets && !name.is_empty() => {
                new.targets.get_or_insert_default().push(name.to_owned());
                continue;
            }
            _ => {
                return Err(format!(
                    "{item:?}: expected r=R,alpha=X,dropout=X,targets=NAME,NAME,rslora, or a folder of PEFT"
                ));
            }
        }
        names_targets = key.trim() == "targets";
    }
    Ok(new)
}

impl LoraChoice {
    /// The model with the adapters, and their folder.
    ///
    /// # Errors
    /// The model cannot have them, or the folder cannot be used.
    pub(crate) fn on(
        &self,
        base: &ModelConfig,
    ) -> Result<(ModelConfig, Option<Adapters>), CliError> {
        match self {
            Self::Folder(path) => {
                let adapters = Adapters::open(path, base)
                    .map_err(|error| usage!("--lora {}: {error}", path.display()))?;
                Ok((adapters.config().clone(), Some(adapters)))
            }
            Self::New(new) => {
                let targets = new.targets.clone();
                let lora = LoraConfig {
                    r: new.r,
                    alpha: new.alpha,
                    dropout: new.dropout,
                    rslora: new.rslora,
                    targets: targets.unwrap_or_else(|| base.default_lora_targets()),
                };
                let config = base.clone().with_lora(Some(lora));
                let config = config.map_err(|error| usage!("--lora: {error}"))?;
                Ok((config, None))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flag_is_parsed() {
        let all = "r=16,alpha=32,dropout=0.05,targets=q_proj,v_proj,rslora";
        let expected = NewAdapters {
            r: 16,
            alpha: 32.0,
            dropout: 0.05,
            rslora: true,
            targets: Some(vec!["q_proj".to_owned(), "v_proj".to_owned()]),
        };
        assert_eq!(all.parse(), Ok(LoraChoice::New(expected)));
        assert_eq!(
            "runs/a=1".parse(),
            Ok(LoraChoice::Folder("runs/a=1".into()))
        );
        for wrong in ["r=16,beta=2", "r=x", "r=4,q_proj", "r=4,rslora=3", "alpha"] {
            assert!(wrong.parse::<LoraChoice>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn model_and_targets_are_checked() {
        let base = ModelConfig::preset("smollm2-135m").unwrap();
        let on = |text: &str| text.parse::<LoraChoice>().unwrap().on(&base);
        let (config, folder) = on("r=16").unwrap();
        assert!(folder.is_none());
        assert_eq!(config.lora().unwrap().targets, ["q_proj", "v_proj"]);
        let (config, _) = on("targets=all-linear").unwrap();
        let all = "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj";
        assert_eq!(config.lora().unwrap().targets.join(" "), all);
        for (text, why) in [
            ("r=0", "r is 0"),
            ("r=600", "at most the model's width, 576"),
            (
                "targets=q_proj,wte",
                "\"wte\" is no linear layer of a block",
            ),
            ("alpha=-1", "alpha is -1"),
            ("dropout=1", "LoRA dropout is 1"),
            ("/no/such/folder", "adapter_config.json"),
        ] {
            let error = on(text).err().unwrap().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
