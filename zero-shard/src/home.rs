//! The place of a kind of state: a tier, with the folder of a scratch file.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::Tier;

/// The place of a kind of state. As text: `none`, `cpu` or `nvme:DIR`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(try_from = "String", into = "String")
)]
pub enum Home {
    /// Memory of the compute device.
    #[default]
    Device,
    /// Host memory, pinned where the device is a GPU. The same as the device if that is the host.
    Host,
    /// A scratch file in this folder.
    Nvme(PathBuf),
}

impl Home {
    /// Its tier.
    pub fn tier(&self) -> Tier {
        match self {
            Self::Device => Tier::Device,
            Self::Host => Tier::Host,
            Self::Nvme(_) => Tier::Nvme,
        }
    }
}

impl fmt::Display for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device => f.write_str("none"),
            Self::Host => f.write_str("cpu"),
            Self::Nvme(dir) => write!(f, "nvme:{}", dir.display()),
        }
    }
}

impl FromStr for Home {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("nvme:")) {
            ("none", _) => Ok(Self::Device),
            ("cpu", _) => Ok(Self::Host),
            (_, Some(dir)) if !dir.is_empty() => Ok(Self::Nvme(dir.into())),
            _ => Err("expected none, cpu or nvme:DIR".to_owned()),
        }
    }
}

impl TryFrom<String> for Home {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Home> for String {
    fn from(home: Home) -> Self {
        home.to_string()
    }
}
