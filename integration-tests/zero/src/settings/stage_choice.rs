//! The value of `--stage`.

/// The value of `--stage`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StageChoice {
    /// The stage that a plan of the run recommends.
    Auto,
    /// A stage.
    Number(u64),
}

impl StageChoice {
    /// The stage; `None` for auto.
    pub(crate) fn number(self) -> Option<u64> {
        match self {
            Self::Auto => None,
            Self::Number(number) => Some(number),
        }
    }
}

/// Parses 0 to 3, whose range is checked later, or auto.
pub(super) fn parse_stage(text: &str) -> Result<StageChoice, String> {
    match text {
        "auto" => Ok(StageChoice::Auto),
        _ => text
            .parse()
            .map(StageChoice::Number)
            .map_err(|_| "expected 0, 1, 2, 3 or auto".to_owned()),
    }
}
