//! The model of a checkpoint: names and shapes of its parameters, which identify it.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use zero_shard::{Layout, ParamSpec, UnitSpec};

/// Names and shapes of a model's parameters, by unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// The units, in forward order.
    pub units: Vec<UnitSpec>,
}

impl From<&Layout> for ModelSpec {
    fn from(layout: &Layout) -> Self {
        let unit = |u: &zero_shard::UnitLayout| {
            let params = u
                .params
                .iter()
                .map(|p| ParamSpec::new(p.name.as_str(), p.shape.as_slice()));
            UnitSpec::new(u.name.as_str(), params.collect::<Vec<_>>())
        };
        Self {
            units: layout.units().iter().map(unit).collect(),
        }
    }
}

impl ModelSpec {
    /// Returns the first difference between the parameters of this stored model and of `wanted`;
    /// `None` if they have the same names and shapes. Order and grouping into units may differ.
    pub fn difference(&self, wanted: &ModelSpec) -> Option<String> {
        let all = |m: &ModelSpec| {
            m.units
                .iter()
                .flat_map(|u| u.params.clone())
                .collect::<Vec<_>>()
        };

        let stored = all(self);
        let wanted = all(wanted);
        let mut shapes: HashMap<_, _> =
            stored.iter().map(|p| (p.name.as_str(), &p.shape)).collect();

        for param in &wanted {
            match shapes.remove(param.name.as_str()) {
                None => {
                    return Some(format!(
                        "parameter {:?} is missing in the checkpoint",
                        param.name
                    ));
                }
                Some(shape) if *shape != param.shape => {
                    return Some(format!(
                        "parameter {:?} has shape {shape:?} in the checkpoint and {:?} in the model",
                        param.name, param.shape
                    ));
                }
                Some(_) => {}
            }
        }

        let extra = stored.iter().find(|p| shapes.contains_key(p.name.as_str()));
        extra.map(|p| {
            format!(
                "parameter {:?} of the checkpoint is not in the model",
                p.name
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(params: &[(&str, &[u64])]) -> ModelSpec {
        let params: Vec<_> = params.iter().map(|(n, s)| ParamSpec::new(*n, *s)).collect();
        ModelSpec {
            units: vec![UnitSpec::new("u", params)],
        }
    }

    #[test]
    fn first_difference_is_named() {
        let ours = model(&[("a", &[2]), ("b", &[3])]);
        let difference = |other: &ModelSpec| ours.difference(other).unwrap();
        assert_eq!(ours.difference(&model(&[("b", &[3]), ("a", &[2])])), None);
        assert!(
            difference(&model(&[("a", &[2])]))
                .contains("\"b\" of the checkpoint is not in the model")
        );
        assert!(
            difference(&model(&[("a", &[2]), ("c", &[3])]))
                .contains("\"c\" is missing in the checkpoint")
        );
        assert!(
            difference(&model(&[("a", &[4]), ("b", &[3])]))
                .contains("[2] in the checkpoint and [4] in the model")
        );
    }
}
