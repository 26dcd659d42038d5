//! Parameter groups: ranges of elements with their own learning rate, weight decay and betas, or
//! frozen.
//!
//! Groups share one loss scale, one decision, one norm and one state. The *elements* are those of
//! all segments, end to end. Runs map ranges of them to groups; neighbours with equal rules become
//! one **piece**, and each piece is a launch or a part of one. Update rules are element-wise, so
//! the cuts do not change the results.
//!
//! Why not an optimizer for each group: those have several loss scales that must agree, votes on a
//! skipped step to merge, and state that no checkpoint takes as one. Here each distinct set of
//! learning rate and betas has its own scalars in one upload, and weight decay is an argument of
//! the launch. Frozen elements have no state; their gradients are set to zero before the
//! statistics, so that each unit still has one entry, which names it in an overflow on any rank.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use zero_alloc::device::DType;
use zero_kernels::step::StepRates;
use zero_kernels::{MatrixRule, StepPoint, UpdateRule};
use zero_shard::{BlockFormat, Layout, ParamId, ShardError};

use crate::format::{StateArrays, StateFormat};
use crate::segments::Segment;
use crate::{OptimError, OptimizerConfig};

/// The rules of a parameter group. The default rules are the optimizer's own.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct GroupRules {
    /// Factor of the schedule's learning rate.
    pub lr_scale: f64,
    /// Weight decay; `None`: that of the optimizer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// Decay rates of the update rule, at all positions of the schedule; `None`: those of the
    /// optimizer or its schedule.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub betas: Option<[f64; 2]>,
    /// If false, the elements are frozen: no state, no update, and their gradients are left out of
    /// the statistics.
    pub trainable: bool,
}

impl Default for GroupRules {
    fn default() -> Self {
        Self {
            lr_scale: 1.0,
            weight_decay: None,
            betas: None,
            trainable: true,
        }
    }
}

zero_alloc::setters!(GroupRules {
    lr_scale: f64,
    trainable: bool
});

impl GroupRules {
    /// Sets `weight_decay`.
    #[must_use]
    pub fn weight_decay(mut self, weight_decay: impl Into<Option<f64>>) -> Self {
        self.weight_decay = weight_decay.into();
        self
    }

    /// Sets `betas`.
    #[must_use]
    pub fn betas(mut self, betas: impl Into<Option<[f64; 2]>>) -> Self {
        self.betas = betas.into();
        self
    }

    /// The rules of frozen elements.
    pub const fn frozen() -> Self {
        Self {
            lr_scale: 1.0,
            weight_decay: None,
            betas: None,
            trainable: false,
        }
    }

    /// Checks every rule against its range.
    ///
    /// # Errors
    /// [`OptimError::Setting`] for the first rule out of range.
    pub fn check(&self) -> Result<(), OptimError> {
        OptimError::from_zero("lr_scale", self.lr_scale)?;
        OptimError::from_zero("weight_decay", self.weight_decay.unwrap_or(0.0))?;
        let mut betas = self.betas.into_iter().flatten();
        betas.try_for_each(|beta| OptimError::beta("betas", beta))
    }
}

/// A range of the elements and its group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupRun {
    /// The range of the elements of all segments.
    pub elems: Range<usize>,
    /// The position of its rules in [`ParamGroups::rules`].
    pub group: usize,
    /// Whether it is of small parameters, whose averages are in fp32 where others have 8 or 4 bits
    /// ([`BlockFormat::holds`]).
    pub is_small: bool,
}

/// Parameter groups. Without runs, all elements have the optimizer's own rules.
#[derive(Clone, Debug, Default)]
pub struct ParamGroups {
    /// The rules of each group.
    pub rules: Vec<GroupRules>,
    /// The groups of all elements: the runs follow one another without gaps, over all segments.
    pub runs: Vec<GroupRun>,
    /// The position in `rules` of each parameter, by name, which ranks compare; may be empty. Runs
    /// cannot be compared, since a rank has those of its elements only.
    pub assigned: Vec<(String, usize)>,
    /// The groups that have another update rule than the optimizer, by their position in `rules`.
    pub updates: Vec<(usize, Arc<dyn UpdateRule>)>,
    /// Whether [`ShardedOptimizer::set_group`](crate::ShardedOptimizer::set_group) may change rules:
    /// groups with equal rules then have separate launches.
    pub settable: bool,
}

/// A range of a unit's elements with equal rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The range, relative to the segment's start.
    pub elems: Range<usize>,
    /// Its range of the state storage; `None` if the elements are frozen.
    pub state: Option<Range<usize>>,
    /// The position of its rules in [`Resolved::launch_rules`].
    pub(crate) rules: usize,
}

/// A set of a step's scalars: an update rule with the learning rate and betas of some groups.
#[derive(Clone, Debug)]
pub(crate) struct RateSet {
    rule: Arc<dyn UpdateRule>,
    lr_scale: f64,
    betas: Option<[f64; 2]>,
}

impl PartialEq for RateSet {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.rule, &other.rule)
            && self.lr_scale == other.lr_scale
            && self.betas == other.betas
    }
}

impl RateSet {
    /// The optimizer's own.
    pub(crate) fn own(rule: &Arc<dyn UpdateRule>) -> Self {
        Self {
            rule: Arc::clone(rule),
            lr_scale: 1.0,
            betas: None,
        }
    }

    fn new(rules: &GroupRules, rule: &Arc<dyn UpdateRule>, config: &OptimizerConfig) -> Self {
        let is_own =
            |betas: &[f64; 2]| Some(*betas) == rule.betas() && config.schedule.betas(0).is_none();
        Self {
            rule: Arc::clone(rule),
            lr_scale: rules.lr_scale,
            betas: rules.betas.filter(|betas| !is_own(betas)),
        }
    }

    /// The rates where the optimizer's own are those of `own`.
    pub(crate) fn at(&self, own: &StepPoint) -> StepRates {
        let point = StepPoint {
            lr: own.lr * self.lr_scale,
            betas: self.betas.or(own.betas),
            ..*own
        };
        StepRates {
            lr: point.lr,
            of_rule: self.rule.scalars(&point),
        }
    }
}

/// The rules of a launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LaunchRules {
    /// The element of the step's scalars.
    pub(crate) scalars: usize,
    /// The position in [`Resolved::updates`].
    pub(crate) update: usize,
    /// The position in [`Resolved::arrays`].
    pub(crate) arrays: usize,
    pub(crate) weight_decay: f64,
}

/// The pieces of all units, and the distinct rules.
#[derive(Clone, Debug)]
pub(crate) struct Resolved {
    /// The rules of each group.
    pub(crate) rules: Vec<GroupRules>,
    /// The positions in `launch_rules` of each group, of its large and its small parameters; `None`
    /// if it is frozen.
    pub(crate) launch_of: Vec<Option<[usize; 2]>>,
    /// Whether no two groups share launch rules or rates.
    pub(crate) settable: bool,
    /// The group of each parameter by name, if it is known.
    pub(crate) assigned: Vec<(String, usize)>,
    /// The pieces of each unit.
    pub(crate) pieces: Vec<Vec<Piece>>,
    pub(crate) launch_rules: Vec<LaunchRules>,
    /// The update rules; the first is the optimizer's own.
    pub(crate) updates: Vec<Arc<dyn UpdateRule>>,
    /// The phases of each behind the exchange of whole matrices, if it has them.
    pub(crate) matrix_rules: Vec<Option<MatrixRule>>,
    /// The arrays of state that elements have.
    pub(crate) arrays: Vec<StateArrays>,
    /// One for each element of the step's scalars; the first is the optimizer's own.
    pub(crate) rates: Vec<RateSet>,
    /// Elements of the state storage: those that are not frozen.
    pub(crate) state_elems: usize,
}

impl ParamGroups {
    /// Groups with these rules. The runs are ranges of the elements with positions in `rules`, such
    /// as those of [`Layout::group_runs`]; all count as large, so [`Self::of_layout`] is for
    /// moments of 8 and 4 bits.
    pub fn new(
        rules: Vec<GroupRules>,
        runs: impl IntoIterator<Item = (Range<usize>, usize)>,
    ) -> Self {
        Self {
            rules,
            runs: runs
                .into_iter()
                .map(|(elems, group)| GroupRun {
                    elems,
                    group,
                    is_small: false,
                })
                .collect(),
            ..Self::default()
        }
    }

    /// Groups with these rules, where `group_of` is the position of a parameter's in them: of the
    /// shard storage of `rank`, or of the whole storage.
    ///
    /// # Errors
    /// There is no such rank.
    pub fn of_layout(
        rules: Vec<GroupRules>,
        layout: &Layout,
        rank: Option<u64>,
        mut group_of: impl FnMut(ParamId) -> usize,
    ) -> Result<Self, ShardError> {
        let coded = |id: ParamId| {
            let elems = layout.units()[id.unit].params[id.param].numel_elems;
            2 * group_of(id) + usize::from(!BlockFormat::holds(elems))
        };
        let runs = match rank {
            Some(rank) => layout.group_runs(rank, coded)?,
            None => layout.whole_group_runs(coded),
        };
        let runs = runs.into_iter().map(|(elems, coded)| GroupRun {
            elems,
            group: coded / 2,
            is_small: coded % 2 == 1,
        });
        Ok(Self {
            rules,
            runs: runs.collect(),
            ..Self::default()
        })
    }

    /// Updates the elements of `group` by `rule`.
    #[must_use]
    pub fn update(mut self, group: usize, rule: Arc<dyn UpdateRule>) -> Self {
        self.updates.push((group, rule));
        self
    }

    /// Sets `assigned`, so that [`ShardedOptimizer::agree`](crate::ShardedOptimizer::agree)
    /// compares the group of each parameter.
    #[must_use]
    pub fn assigned(mut self, groups: impl IntoIterator<Item = (String, usize)>) -> Self {
        self.assigned = groups.into_iter().collect();
        self
    }

    /// Sets `settable`.
    #[must_use]
    pub fn settable(mut self) -> Self {
        self.settable = true;
        self
    }

    /// The number of distinct sets of learning rate and betas, the optimizer's own included: the
    /// factor of [`DeviceStepConfig::bytes`](crate::DeviceStepConfig::bytes).
    pub fn rate_sets(&self, config: &OptimizerConfig) -> usize {
        let format = (DType::F32, StateFormat::default());
        self.distinct(&self.rules, &config.rule(), config, format)
            .rates
            .len()
    }

    /// Checks the rules of groups, whose runs have `groups` groups.
    fn check(&self, own: &Arc<dyn UpdateRule>, groups: usize) -> Result<(), OptimError> {
        self.rules.iter().try_for_each(GroupRules::check)?;
        own.check()?;
        for (group, rule) in &self.updates {
            let exists = *group < groups;
            let what = "group of an update rule";
            OptimError::check(exists, what, *group as f64, "the position of a group")?;
            rule.check()?;
        }
        Ok(())
    }

    /// The update rule of a group.
    pub(crate) fn update_of<'a>(
        &'a self,
        group: usize,
        own: &'a Arc<dyn UpdateRule>,
    ) -> &'a Arc<dyn UpdateRule> {
        let mut updates = self.updates.iter().rev();
        let other = updates.find(|(of, _)| *of == group);
        other.map_or(own, |(_, rule)| rule)
    }

    /// The distinct rules of the groups `rules`.
    fn distinct(
        &self,
        rules: &[GroupRules],
        own: &Arc<dyn UpdateRule>,
        config: &OptimizerConfig,
        (param_dtype, format): (DType, StateFormat),
    ) -> Distinct {
        fn place<T>(all: &mut Vec<T>, value: T, same: impl Fn(&T, &T) -> bool) -> usize {
            let at = all.iter().position(|other| same(other, &value));
            at.unwrap_or_else(|| {
                all.push(value);
                all.len() - 1
            })
        }

        let is_shared = !self.settable;
        let mut distinct = Distinct {
            launch_of: Vec::new(),
            launches: Vec::new(),
            updates: vec![Arc::clone(own)],
            arrays: vec![StateArrays::new(&**own, param_dtype, format)],
            rates: vec![RateSet::own(own)],
        };
        for (group, rules) in rules.iter().enumerate() {
            if !rules.trainable {
                distinct.launch_of.push(None);
                continue;
            }
            let rule = self.update_of(group, own);
            let rates = RateSet::new(rules, rule, config);
            let scalars = place(&mut distinct.rates, rates, |a, b| is_shared && a == b);
            let update = place(&mut distinct.updates, Arc::clone(rule), Arc::ptr_eq);
            let small = format.moments(format.moments.without_blocks());
            let launches = [format, small].map(|format| {
                let arrays = StateArrays::new(&**rule, param_dtype, format);
                let launch = LaunchRules {
                    scalars,
                    update,
                    arrays: place(&mut distinct.arrays, arrays, PartialEq::eq),
                    weight_decay: rules.weight_decay.unwrap_or(rule.weight_decay()),
                };
                place(&mut distinct.launches, launch, PartialEq::eq)
            });
            distinct.launch_of.push(Some(launches));
        }
        distinct
    }

    /// Cuts the `elems` elements of `segments`, which tile them, into pieces.
    pub(crate) fn resolve(
        &self,
        config: &OptimizerConfig,
        own_rule: &Arc<dyn UpdateRule>,
        (param_dtype, format): (DType, StateFormat),
        segments: &[Segment],
        elems: usize,
    ) -> Result<Resolved, OptimError> {
        let own = [GroupRun {
            elems: 0..elems,
            group: 0,
            is_small: false,
        }];

        let (rules, runs) = match self.runs[..] {
            [] if elems > 0 || self.rules.is_empty() => (&[GroupRules::default()][..], &own[..]),
            _ => (&self.rules[..], &self.runs[..]),
        };

        self.check(own_rule, rules.len())?;
        check_runs(runs, rules.len(), elems)?;
        for (group, rules) in rules.iter().enumerate() {
            let [beta, _] = rules.betas.unwrap_or_default();
            let rule = self.update_of(group, own_rule);
            let known = rules.betas.is_none() || rule.betas().is_some();
            OptimError::check(known, "betas", beta, "unset: the update rule has none")?;

            let cycles = rules.trainable && config.schedule.betas(0).is_some();
            OptimError::check(
                !cycles || rule.betas().is_some(),
                "cycle_momentum",
                1.0,
                "false: the update rule of a group has no betas for the schedule to cycle",
            )?;
        }
        let others = self.updates.iter().map(|(_, rule)| &**rule);
        let all = std::iter::once(&**own_rule).chain(others);
        StateArrays::check(all, format.moments.codecs())?;

        let distinct = self.distinct(rules, own_rule, config, (param_dtype, format));
        let mut cutter = Cutter {
            runs,
            distinct: &distinct,
            next_run: 0,
            state_elems: 0,
        };
        let pieces = segments
            .iter()
            .map(|segment| cutter.pieces_of(segment))
            .collect::<Result<_, _>>()?;
        let state_elems = cutter.state_elems;

        Ok(Resolved {
            rules: rules.to_vec(),
            launch_of: distinct.launch_of,
            settable: self.settable,
            assigned: self.assigned.clone(),
            pieces,
            launch_rules: distinct.launches,
            matrix_rules: distinct
                .updates
                .iter()
                .map(|update| update.matrix_rule())
                .collect(),
            updates: distinct.updates,
            arrays: distinct.arrays,
            rates: distinct.rates,
            state_elems,
        })
    }
}

/// Checks that the runs tile `elems` elements, and that their groups exist.
fn check_runs(runs: &[GroupRun], groups: usize, elems: usize) -> Result<(), OptimError> {
    let mut expected = 0;
    for run in runs {
        let Range { start, end } = run.elems;
        if start != expected || end < start || run.group >= groups {
            let group = run.group;
            return Err(OptimError::Runs {
                start,
                end,
                group,
                expected,
                elems,
            });
        }
        expected = end;
    }

    if expected != elems {
        return Err(OptimError::Runs {
            start: expected,
            end: expected,
            group: 0,
            expected: elems,
            elems,
        });
    }
    Ok(())
}

/// Cuts segments, in order, into pieces of equal rules.
struct Cutter<'a> {
    runs: &'a [GroupRun],
    distinct: &'a Distinct,
    /// The first run that goes on behind the segments so far.
    next_run: usize,
    /// Elements of the state storage so far.
    state_elems: usize,
}

impl Cutter<'_> {
    /// The pieces of the next segment. Its elements with the same arrays of state follow one
    /// another in the state storage.
    fn pieces_of(&mut self, segment: &Segment) -> Result<Vec<Piece>, OptimError> {
        let within = &segment.state;
        let mut pieces = Vec::new();
        while let Some(run) = self.runs.get(self.next_run)
            && run.elems.start < within.end
        {
            let start = run.elems.start.max(within.start);
            let end = run.elems.end.min(within.end);
            if start < end {
                let elems = start - within.start..end - within.start;
                self.append(&mut pieces, elems, run);
            }
            // The last run may go on in the next segment.
            if run.elems.end > within.end {
                break;
            }
            self.next_run += 1;
        }

        for (class, arrays) in self.distinct.arrays.iter().enumerate() {
            let is_of = |piece: &&mut Piece| {
                piece.state.is_some() && self.distinct.launches[piece.rules].arrays == class
            };
            let block_elems = arrays.block_elems();
            for piece in pieces.iter_mut().filter(is_of) {
                let Range { start, end } = piece.elems;
                if !start.is_multiple_of(block_elems) || !end.is_multiple_of(block_elems) {
                    return Err(OptimError::CutBlock {
                        unit: segment.name.clone(),
                        start,
                        end,
                        block_elems,
                    });
                }
                piece.state = Some(self.state_elems..self.state_elems + (end - start));
                self.state_elems += end - start;
            }
        }
        Ok(pieces)
    }

    /// Appends elements of a run to a unit's pieces; neighbours with equal rules are one piece.
    fn append(&self, pieces: &mut Vec<Piece>, elems: Range<usize>, run: &GroupRun) {
        let trained = self.distinct.launch_of[run.group];
        let rules = trained.map_or(0, |of_size| of_size[usize::from(run.is_small)]);
        // Its place follows.
        let state = trained.map(|_| 0..0);
        match pieces.last_mut() {
            Some(last) if last.rules == rules && last.state.is_some() == state.is_some() => {
                last.elems.end = elems.end;
            }
            _ => pieces.push(Piece {
                elems,
                state,
                rules,
            }),
        }
    }
}

impl Resolved {
    /// The ranges of the state storage with the same arrays, in order and cut where units end, each
    /// with the position in `arrays`.
    pub(crate) fn state_runs(&self) -> Vec<(Range<usize>, usize)> {
        let mut runs: Vec<(Range<usize>, usize)> = Vec::new();
        for unit in &self.pieces {
            let of_earlier = runs.len();
            let states = unit.iter().filter_map(|piece| {
                let state = piece.state.clone().filter(|state| !state.is_empty())?;
                Some((state, self.launch_rules[piece.rules].arrays))
            });
            let mut states: Vec<_> = states.collect();
            states.sort_by_key(|(state, _)| state.start);
            for (state, arrays) in states {
                match runs[of_earlier..].last_mut() {
                    Some((last, of)) if *of == arrays => last.end = state.end,
                    _ => runs.push((state, arrays)),
                }
            }
        }
        runs
    }

    /// The position in `updates` of the update rule of a group; `None` if it is frozen.
    pub(crate) fn update_of(&self, group: usize) -> Option<usize> {
        self.launch_of[group].map(|[launch, _]| self.launch_rules[launch].update)
    }

    /// The rule of the matrices of each group, if it has one.
    pub(crate) fn rules_of_matrices(&self) -> Vec<Option<MatrixRule>> {
        let rule = |group| self.matrix_rules[self.update_of(group)?].clone();
        (0..self.launch_of.len()).map(rule).collect()
    }

    /// The rule of whole matrices of these launch rules, if they have one.
    pub(crate) fn matrix_rule(&self, rules: usize) -> Option<&MatrixRule> {
        self.matrix_rules[self.launch_rules[rules].update].as_ref()
    }

    /// Sets the rules of a group that is not frozen.
    pub(crate) fn set(
        &mut self,
        group: usize,
        lr_scale: f64,
        weight_decay: Option<f64>,
    ) -> Result<(), OptimError> {
        let exists = self.settable && matches!(self.launch_of.get(group), Some(Some(_)));
        let expected = "a trained group of settable groups";
        OptimError::check(exists, "group", group as f64, expected)?;
        let rules = GroupRules {
            lr_scale,
            weight_decay,
            ..self.rules[group]
        };
        rules.check()?;

        self.rules[group] = rules;
        for launch in self.launch_of[group].into_iter().flatten() {
            let launch = &mut self.launch_rules[launch];
            let rule = &self.updates[launch.update];
            launch.weight_decay = weight_decay.unwrap_or(rule.weight_decay());
            self.rates[launch.scalars].lr_scale = lr_scale;
        }
        Ok(())
    }

    /// The trained parts of the elements `range` of a unit: elements, range of the state storage,
    /// and rules.
    pub(crate) fn trained(
        &self,
        unit: usize,
        range: Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, Range<usize>, usize)> + '_ {
        self.pieces[unit].iter().filter_map(move |piece| {
            let start = piece.elems.start.max(range.start);
            let end = piece.elems.end.min(range.end);
            let state = piece.state.as_ref().filter(|_| start < end)?.start;
            let at = |elem| state + elem - piece.elems.start;
            Some((start..end, at(start)..at(end), piece.rules))
        })
    }
}

/// The distinct rules of groups.
struct Distinct {
    /// The launch rules of each group, of its large and its small parameters; `None` if it is
    /// frozen.
    launch_of: Vec<Option<[usize; 2]>>,
    launches: Vec<LaunchRules>,
    /// The first is the optimizer's own.
    updates: Vec<Arc<dyn UpdateRule>>,
    /// The first are the optimizer's own.
    arrays: Vec<StateArrays>,
    /// The first is the optimizer's own.
    rates: Vec<RateSet>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(rules: &[GroupRules], runs: &[(Range<usize>, usize)]) -> ParamGroups {
        ParamGroups::new(rules.to_vec(), runs.iter().cloned())
    }

    fn resolve(
        groups: &ParamGroups,
        segments: &[Segment],
        elems: usize,
    ) -> Result<Resolved, OptimError> {
        let config = OptimizerConfig::default();
        let own = config.rule();
        let format = (DType::F32, StateFormat::default());
        groups.resolve(&config, &own, format, segments, elems)
    }

    #[test]
    fn equal_neighbours_are_one_piece() {
        let segments = [
            Segment::shard("a", 0..10),
            Segment::shard("b", 10..10),
            Segment::whole("c", 10..16, 1..3),
        ];
        let same = GroupRules {
            weight_decay: Some(0.0),
            betas: Some([0.9, 0.999]),
            ..GroupRules::default()
        };

        let slow = GroupRules {
            lr_scale: 0.5,
            ..same
        };

        let rules = [GroupRules::default(), same, slow, GroupRules::frozen()];
        // Groups 0 and 1 have the same rules; a run goes over the ends of units.
        let all = groups(
            &rules,
            &[
                (0..4, 0),
                (4..6, 1),
                (6..7, 3),
                (7..12, 2),
                (12..12, 0),
                (12..16, 1),
            ],
        );

        let resolved = resolve(&all, &segments, 16).unwrap();
        let piece = |elems, state: Option<Range<usize>>, rules| Piece {
            elems,
            state,
            rules,
        };

        let expected = [
            vec![
                piece(0..6, Some(0..6), 0),
                piece(6..7, None, 0),
                piece(7..10, Some(6..9), 1),
            ],
            vec![],
            vec![piece(0..2, Some(9..11), 1), piece(2..6, Some(11..15), 0)],
        ];

        assert_eq!(resolved.pieces, expected);
        assert_eq!(
            (
                resolved.state_elems,
                resolved.rates.len(),
                resolved.launch_rules.len()
            ),
            (15, 2, 2)
        );

        // Without groups each unit is one piece.
        let none = resolve(&ParamGroups::default(), &segments, 16).unwrap();
        assert_eq!(
            none.pieces,
            [
                vec![piece(0..10, Some(0..10), 0)],
                vec![],
                vec![piece(0..6, Some(10..16), 0)]
            ]
        );

        assert_eq!(none.rates.len(), 1);
    }

    #[test]
    fn runs_must_tile_the_elements() {
        let segments = [Segment::shard("a", 0..10)];
        let rules = [GroupRules::default(), GroupRules::frozen()];
        for runs in [
            &[(0..4, 0)][..],
            &[(0..4, 0), (5..10, 1)],
            &[(0..10, 2)],
            &[(0..12, 0)],
            &[(1..10, 0)],
        ] {
            let error = resolve(&groups(&rules, runs), &segments, 10).unwrap_err();
            assert!(matches!(error, OptimError::Runs { .. }), "{error}");
        }

        let bad = groups(&[GroupRules::default().lr_scale(-1.0)], &[(0..10, 0)]);
        let error = resolve(&bad, &segments, 10).unwrap_err();
        assert_eq!(
            error.to_string(),
            "lr_scale is -1; it must be a finite number, 0 or above"
        );
    }
}
