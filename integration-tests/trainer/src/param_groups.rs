//! Parameter groups of a run: rules for tensors, by name, shape and kind.
//!
//! A tensor belongs to the first group whose conditions it meets, otherwise it has the optimizer's
//! own rules. Freezing all tensors of a unit (embedding, block, head) saves its gradient, its
//! optimizer state and their communication; at stage 3 its parameters are still gathered. Backward
//! stops behind the first unit that trains. A frozen tensor in a unit that trains has no optimizer
//! state, but its gradient is still computed, stored and reduced. Neither kind counts in the
//! gradient norm.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use zero_kernels::UpdateRule;
pub use zero_optim::{GroupRule, KindOf, ParamGroup, ParamKind};
use zero_optim::{GroupRules, GroupRun, OptimizerConfig, ParamGroups};
use zero_shard::{
    GridLayout, Layout, ParamId, ParamPlacement, ShardError, StateBytes, Widths, WireFormat,
    ZeroStage,
};

use crate::error::TrainError;
use crate::muon_settings::MuonSettings;

/// The name of a tensor of the unit in the middle.
fn an_example(layout: &Layout) -> &str {
    let units = layout.units();
    let params = units.get(units.len() / 2).map(|unit| &unit.params);
    params
        .and_then(|params| params.get(params.len() / 2))
        .map_or("none", |param| &param.name)
}

/// The groups of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GroupSettings {
    /// The groups, in the order in which tensors are compared with them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParamGroup>,
    /// No weight decay for tensors of fewer than two dimensions, unless their group has one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub no_decay_1d: bool,
}

impl GroupSettings {
    /// Whether all tensors have the optimizer's own rules.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// The rules of each tensor of the model. `muon`: for which tensors, with the factor of the
    /// learning rate.
    ///
    /// # Errors
    /// A rule is out of range, no tensor is in a group, no tensor is trained, or a group with Muon
    /// has tensors that are no matrices.
    pub fn resolve(
        &self,
        layout: &Layout,
        kind_of: KindOf,
        muon: Option<(&MuonSettings, f64)>,
    ) -> Result<ModelGroups, TrainError> {
        let mut rules: Vec<(GroupRules, bool)> = Vec::new();
        let mut matched = vec![false; self.groups.len()];
        let mut place_of = |param: &ParamPlacement| {
            let group = self
                .groups
                .iter()
                .position(|group| group.matches(&param.name, param.shape.len(), kind_of));
            let mut own = group.map_or_else(GroupRules::default, |group| {
                matched[group] = true;
                self.groups[group].rules()
            });
            if self.no_decay_1d && param.shape.len() < 2 {
                own.weight_decay.get_or_insert(0.0);
            }
            let named = group.and_then(|group| self.groups[group].optimizer);
            let has_muon = match muon {
                Some((muon, lr_scale)) if own.trainable && muon.updates(param, named)? => {
                    own.lr_scale *= lr_scale;
                    true
                }
                _ => false,
            };
            let own = (own, has_muon);
            let place = rules.iter().position(|other| *other == own);
            Ok(place.unwrap_or_else(|| {
                rules.push(own);
                rules.len() - 1
            }))
        };

        let units = layout.units().iter();
        let units: Result<_, TrainError> = units
            .map(|unit| unit.params.iter().map(&mut place_of).collect())
            .collect();
        let units = units?;

        if let Some(group) = matched.iter().position(|matched| !matched) {
            return Err(TrainError::Usage(format!(
                "param_groups[{group}] ({}): no tensor of the model meets its conditions, or all are in earlier groups; \
                 names are those of the model's weights, such as {}",
                self.groups[group],
                an_example(layout)
            )));
        }

        let (rules, with_muon): (Vec<_>, Vec<_>) = rules.into_iter().unzip();
        for rules in &rules {
            rules
                .check()
                .map_err(|error| TrainError::Usage(format!("param_groups: {error}")))?;
        }

        let groups = ModelGroups {
            muon: muon.map(|(muon, _)| Arc::new(muon.rule) as _),
            with_muon,
            rules,
            units,
            state: None,
            in_blocks: Vec::new(),
        };
        match (0..groups.units.len()).all(|unit| groups.is_frozen(unit)) {
            true => Err(TrainError::Usage(
                "param_groups freeze every tensor of the model: nothing is left to train".into(),
            )),
            false => Ok(groups),
        }
    }
}

impl fmt::Display for GroupSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut all: Vec<String> = self.groups.iter().map(ToString::to_string).collect();
        if self.no_decay_1d {
            all.push("dims <= 1: weight decay 0".to_owned());
        }
        f.write_str(&if all.is_empty() {
            "none".to_owned()
        } else {
            all.join("; ")
        })
    }
}

/// The rules of all tensors of a model.
#[derive(Clone, Debug)]
pub struct ModelGroups {
    rules: Vec<GroupRules>,
    /// The update rule of those in `with_muon`.
    muon: Option<Arc<dyn UpdateRule>>,
    /// Whether Muon updates tensors with these rules.
    with_muon: Vec<bool>,
    /// The optimizer state of AdamW's and of Muon's tensors, large and small ones, if they are not
    /// all alike.
    pub(crate) state: Option<[[WireFormat; 2]; 2]>,
    /// For each unit that is frozen and in blocks, their format and the elements that are not.
    pub(crate) in_blocks: Vec<Option<(WireFormat, u64)>>,
    /// For each unit the positions of its tensors' rules.
    units: Vec<Vec<usize>>,
}

impl ModelGroups {
    /// Freezes the units from `first` on.
    pub(crate) fn freeze_from(&mut self, first: usize) {
        if first < self.units.len() {
            let mut rules = GroupRules::default();
            rules.trainable = false;
            self.rules.push(rules);
            self.with_muon.push(false);
        }
        let frozen = self.rules.len() - 1;
        for unit in self.units.iter_mut().skip(first) {
            unit.fill(frozen);
        }
    }

    /// Whether all tensors of the unit are frozen.
    pub fn is_frozen(&self, unit: usize) -> bool {
        self.units[unit]
            .iter()
            .all(|rules| !self.rules[*rules].trainable)
    }

    /// The most elements, with padding, of a unit that is not frozen.
    pub fn largest_trained(&self, layout: &Layout) -> u64 {
        let units = layout.units().iter().enumerate();
        let trained = units.filter(|(unit, _)| !self.is_frozen(*unit));
        trained
            .map(|(_, unit)| unit.padded_elems)
            .max()
            .unwrap_or(0)
    }

    /// Whether Muon updates some tensors.
    pub fn has_matrices(&self) -> bool {
        let mut used = self.units.iter().flatten();
        used.any(|group| self.with_muon[*group])
    }

    /// The position of a tensor's rules, if Muon updates it.
    pub(crate) fn group_with_matrices(&self, id: ParamId) -> Option<usize> {
        let group = self.units[id.unit][id.param];
        self.with_muon[group].then_some(group)
    }

    /// The trained tensors that AdamW and that Muon updates, each with its numbers as `*`.
    pub fn tensors_by_rule(&self, layout: &Layout) -> [Vec<String>; 2] {
        let mut names = [Vec::new(), Vec::new()];
        for (id, param) in layout.params() {
            let group = self.units[id.unit][id.param];
            let parts = param.name.split('.').map(|part| match part.parse::<u64>() {
                Ok(_) => "*",
                Err(_) => part,
            });
            let name = parts.collect::<Vec<_>>().join(".");
            let names = &mut names[usize::from(self.with_muon[group])];
            if self.rules[group].trainable && !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    /// The number of distinct sets of learning rate and betas, the optimizer's own included.
    pub fn rate_sets(&self, config: &OptimizerConfig) -> usize {
        self.with_updates(ParamGroups::new(self.rules.clone(), []))
            .rate_sets(config)
    }

    /// The groups with their update rules.
    fn with_updates(&self, groups: ParamGroups) -> ParamGroups {
        let Some(muon) = &self.muon else {
            return groups;
        };
        let all = self.with_muon.iter().enumerate();
        let of_muon = all.filter(|(_, has_muon)| **has_muon);
        of_muon.fold(groups, |groups, (group, _)| {
            groups.update(group, Arc::clone(muon))
        })
    }

    /// The groups of the shard storage of `rank`, or of the whole storage.
    ///
    /// # Errors
    /// There is no such rank.
    pub fn of(&self, layout: &Layout, rank: Option<u64>) -> Result<ParamGroups, ShardError> {
        let group_of = |id: ParamId| self.units[id.unit][id.param];
        let groups = ParamGroups::of_layout(self.rules.clone(), layout, rank, group_of)?;
        Ok(self.with_updates(groups))
    }

    /// As [`Self::state_bytes`], of ranks in groups.
    pub fn grid_bytes(
        &self,
        layouts: &GridLayout,
        stage: ZeroStage,
        widths: &Widths,
    ) -> Option<StateBytes> {
        let of = |(layout, _): (&Layout, u64)| self.state_bytes(layout, stage, widths);
        Some(StateBytes {
            params_bytes: of(layouts.params(0))?.params_bytes,
            grads_bytes: of(layouts.grads(0))?.grads_bytes,
            optimizer_bytes: of(layouts.optimizer(0))?.optimizer_bytes,
        })
    }

    /// The state of the rank that holds the most: [`Layout::state_bytes`] without gradients of
    /// frozen units and optimizer state of frozen tensors. `None` if a sum does not fit 64 bits.
    pub fn state_bytes(
        &self,
        layout: &Layout,
        stage: ZeroStage,
        widths: &Widths,
    ) -> Option<StateBytes> {
        let all = layout.state_bytes(stage, widths).ok()?;
        if self.rules.iter().all(|rules| rules.trainable) && self.state.is_none() {
            return Some(all);
        }
        let mut params_bytes = all.params_bytes;
        for (unit, in_blocks) in layout.units().iter().zip(&self.in_blocks) {
            if let Some((format, plain)) = in_blocks {
                let held = match stage.shards_params() {
                    true => unit.shard_elems,
                    false => unit.padded_elems,
                };
                params_bytes -= held.checked_mul(widths.param_bytes)?;
                params_bytes += format.bytes(held)? + plain * widths.param_bytes;
            }
        }
        let units = || {
            layout
                .units()
                .iter()
                .enumerate()
                .filter(|(i, _)| !self.is_frozen(*i))
        };

        let grads = units().map(|(_, u)| {
            if stage.shards_grads() {
                u.shard_elems
            } else {
                u.padded_elems
            }
        });

        let optimizer_bytes = self.most_of_ranks(layout, stage, |run| {
            let of_rule = |state: [[WireFormat; 2]; 2]| {
                let of_rule = state[usize::from(self.with_muon[run.group])];
                of_rule[usize::from(run.is_small)]
            };
            let format = self.state.map_or(widths.optimizer, of_rule);
            format.bytes(run.elems.len() as u64)
        });
        Some(StateBytes {
            grads_bytes: grads.sum::<u64>().checked_mul(widths.grad_bytes)?,
            optimizer_bytes: optimizer_bytes?,
            params_bytes,
        })
    }

    /// The elements that the rank updates that updates the most: [`Layout::updated_elems`] without
    /// frozen tensors. `None` if a rule of tensors has no match.
    pub fn updated_elems(&self, layout: &Layout, stage: ZeroStage) -> Option<u64> {
        if self.rules.iter().all(|rules| rules.trainable) {
            return Some(layout.updated_elems(stage));
        }
        self.most_of_ranks(layout, stage, |run| Some(run.elems.len() as u64))
    }

    /// The greatest sum, over ranks, of `of` a run of trained elements.
    fn most_of_ranks(
        &self,
        layout: &Layout,
        stage: ZeroStage,
        of: impl Fn(&GroupRun) -> Option<u64>,
    ) -> Option<u64> {
        // Of units that are trained whole, or not at all, all ranks have as many elements; ranks may be
        // thousands.
        let trains = |rules: &usize| self.rules[*rules].trainable;
        let is_whole = |unit: &Vec<usize>| unit.iter().all(trains) || !unit.iter().any(trains);
        if self.state.is_none() && self.units.iter().all(is_whole) {
            let units = layout.units().iter().enumerate();
            let trained = units.filter(|(unit, _)| !self.is_frozen(*unit));
            let elems = trained.map(|(_, unit)| match stage.shards_optimizer() {
                true => unit.shard_elems,
                false => unit.padded_elems,
            });
            let all = GroupRun {
                elems: 0..elems.sum::<u64>() as usize,
                group: 0,
                is_small: false,
            };
            return of(&all);
        }

        let held = |rank: Option<u64>| -> Option<u64> {
            let ParamGroups { rules, runs, .. } = self.of(layout, rank).ok()?;
            let mut trained = runs.iter().filter(|run| rules[run.group].trainable);
            trained.try_fold(0_u64, |sum, run| sum.checked_add(of(run)?))
        };

        match stage.shards_optimizer() {
            true => {
                let of_ranks = (0..layout.world_size()).map(|rank| held(Some(rank)));
                Some(of_ranks.max().flatten().unwrap_or(0))
            }
            false => held(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{kind_of, units};

    fn layout(ranks: u64) -> Layout {
        Layout::new(&units(), ranks, 4).unwrap()
    }

    #[test]
    fn first_group_decides() {
        let json = r#"[{"names": ["transformer.h.0.*"], "trainable": false},
            {"kinds": ["norm", "bias"], "weight_decay": 0.5}, {"max_dims": 1, "lr_scale": 2.0}]"#;
        let groups: Vec<ParamGroup> = serde_json::from_str(json).unwrap();
        let none_left = GroupSettings {
            groups: groups.clone(),
            no_decay_1d: false,
        }
        .resolve(&layout(2), kind_of, None)
        .unwrap_err();
        assert!(
            none_left
                .to_string()
                .contains("param_groups[2] (dims <= 1: learning rate x 2)"),
            "{none_left}"
        );
        let settings = GroupSettings {
            groups: groups[..2].to_vec(),
            no_decay_1d: true,
        };

        assert_eq!(
            settings.to_string(),
            "transformer.h.0.*: frozen; norm bias: weight decay 0.5; dims <= 1: weight decay 0"
        );
        let resolved = settings.resolve(&layout(2), kind_of, None).unwrap();
        assert!(resolved.is_frozen(1) && !resolved.is_frozen(0) && !resolved.is_frozen(2));
        // The group's decay remains; only tensors outside of it have none.
        assert!(
            resolved
                .rules
                .iter()
                .all(|rules| rules.weight_decay != Some(0.0) || !rules.trainable)
        );
        let all = ParamGroup {
            trainable: Some(false),
            ..ParamGroup::default()
        };

        let error = GroupSettings {
            groups: vec![all],
            no_decay_1d: false,
        }
        .resolve(&layout(2), kind_of, None)
        .unwrap_err();
        assert!(
            error.to_string().contains("nothing is left to train"),
            "{error}"
        );
    }

    #[test]
    fn runs_cover_what_a_rank_holds() {
        let settings = GroupSettings {
            groups: Vec::new(),
            no_decay_1d: true,
        };
        let layout = layout(3);
        let groups = settings.resolve(&layout, kind_of, None).unwrap();
        for rank in 0..3 {
            let runs = groups.of(&layout, Some(rank)).unwrap().runs;
            assert_eq!(runs.last().unwrap().elems.end as u64, layout.shard_elems());
            assert!(
                runs.windows(2)
                    .all(|two| two[0].elems.end == two[1].elems.start)
            );
        }
    }

    #[test]
    fn frozen_units_have_no_state() {
        let block = ParamGroup {
            names: vec!["transformer.h.0.*".into()],
            trainable: Some(false),
            ..Default::default()
        };

        let groups = GroupSettings {
            groups: vec![block],
            no_decay_1d: false,
        };

        let layout = layout(2);
        let widths = Widths::MIXED_ADAM;
        let groups = groups.resolve(&layout, kind_of, None).unwrap();
        let block = &layout.units()[1];

        for stage in [
            ZeroStage::Zero,
            ZeroStage::One,
            ZeroStage::Two,
            ZeroStage::Three,
        ] {
            let all = layout.state_bytes(stage, &widths).unwrap();
            let ours = groups.state_bytes(&layout, stage, &widths).unwrap();
            let elems = |sharded| {
                if sharded {
                    block.shard_elems
                } else {
                    block.padded_elems
                }
            };
            assert_eq!(all.params_bytes, ours.params_bytes);
            assert_eq!(
                all.grads_bytes - ours.grads_bytes,
                elems(stage.shards_grads()) * widths.grad_bytes
            );
            let updated = groups.updated_elems(&layout, stage).unwrap();
            let block_elems = elems(stage.shards_optimizer());
            assert_eq!(updated, layout.updated_elems(stage) - block_elems);
            let state = block_elems * widths.optimizer.block_bytes;
            assert_eq!(all.optimizer_bytes - ours.optimizer_bytes, state);
        }
    }
}
