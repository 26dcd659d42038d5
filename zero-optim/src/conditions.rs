//! Groups of parameters by their names, kinds and dimensions, as settings have them: conditions, which
//! any model can meet or not.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::GroupRules;

/// A kind of tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParamKind {
    /// The tables of tokens and positions.
    Embedding,
    /// Gains and biases of layer norms.
    Norm,
    /// Biases of linear layers.
    Bias,
    /// Matrices of linear layers, the untied head's included.
    Linear,
}

/// The update rule of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum GroupRule {
    /// AdamW, or Adam if that is the optimizer's.
    #[serde(rename = "adamw", alias = "adam")]
    Adam,
    /// Muon, for matrices.
    Muon,
}

/// Returns the kind of a tensor from its name.
pub type KindOf = fn(&str) -> ParamKind;

/// Conditions on tensors, and the rules of the tensors that meet all of them. A rule that is `None`
/// is the optimizer's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ParamGroup {
    /// The name matches one of these patterns, in which `*` matches any text; empty: any name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// The tensor is of one of these kinds; empty: any kind.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kinds: Vec<ParamKind>,
    /// The tensor has at least this number of dimensions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_dims: Option<usize>,
    /// The tensor has at most this number of dimensions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_dims: Option<usize>,
    /// Factor of the learning rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr_scale: Option<f64>,
    /// Weight decay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// Adam's betas.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub betas: Option<[f64; 2]>,
    /// The update rule.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<GroupRule>,
    /// Whether the tensors are trained; false freezes them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trainable: Option<bool>,
}

impl ParamGroup {
    /// Whether a tensor of this name and number of dimensions meets all conditions.
    pub fn matches(&self, name: &str, dims: usize, kind_of: KindOf) -> bool {
        (self.names.is_empty()
            || self
                .names
                .iter()
                .any(|pattern| matches_pattern(pattern, name)))
            && (self.kinds.is_empty() || self.kinds.contains(&kind_of(name)))
            && self.min_dims.is_none_or(|least| dims >= least)
            && self.max_dims.is_none_or(|most| dims <= most)
    }

    /// Its rules; the optimizer's own in place of those that are `None`.
    pub fn rules(&self) -> GroupRules {
        let own = GroupRules::default();
        GroupRules::default()
            .lr_scale(self.lr_scale.unwrap_or(own.lr_scale))
            .weight_decay(self.weight_decay)
            .betas(self.betas)
            .trainable(self.trainable.unwrap_or(own.trainable))
    }
}

impl fmt::Display for ParamGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut conditions = self.names.clone();
        conditions.extend(
            self.kinds
                .iter()
                .map(|kind| format!("{kind:?}").to_lowercase()),
        );
        conditions.extend(self.min_dims.map(|n| format!("dims >= {n}")));
        conditions.extend(self.max_dims.map(|n| format!("dims <= {n}")));
        if conditions.is_empty() {
            conditions.push("all".to_owned());
        }
        let mut rules: Vec<String> = Vec::new();
        if self.trainable == Some(false) {
            rules.push("frozen".to_owned());
        }
        rules.extend(self.optimizer.map(|rule| match rule {
            GroupRule::Adam => "AdamW".to_owned(),
            GroupRule::Muon => "Muon".to_owned(),
        }));
        rules.extend(self.lr_scale.map(|x| format!("learning rate x {x}")));
        rules.extend(self.weight_decay.map(|x| format!("weight decay {x}")));
        rules.extend(
            self.betas
                .map(|[one, two]| format!("betas {one} and {two}")),
        );
        if rules.is_empty() {
            rules.push("the optimizer's rules".to_owned());
        }

        write!(f, "{}: {}", conditions.join(" "), rules.join(", "))
    }
}

/// Whether `name` matches `pattern`, in which `*` matches any text.
fn matches_pattern(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else {
        return false;
    };
    let Some(last) = parts.next_back() else {
        return rest.is_empty();
    };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_names() {
        for (pattern, name, matches) in [
            ("a.b", "a.b", true),
            ("a.b", "a.b.c", false),
            ("a.*", "a.b.c", true),
            ("*.bias", "a.bias", true),
            ("*.bias", "a.bias.c", false),
            ("a.*.c*d", "a.x.cyd", true),
            ("a.*.c*d", "a.x.d", false),
            ("*", "", true),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches_pattern(pattern, name), matches, "{pattern} {name}");
        }
    }
}
