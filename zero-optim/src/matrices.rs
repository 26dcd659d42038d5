//! Matrices for update rules that see them whole, such as Muon.
//!
//! Shards stay flat and equal, and the state of such a rule is sharded like any other. In an
//! update the rule's direction, which is element-wise, is computed from the shards; an all-to-all
//! brings each parameter's directions to one rank, its **updater** ([`Updaters`]); that
//! orthogonalises the matrices; and a second all-to-all takes the result back to the shards, to
//! which it is applied element by element. Padding is in no matrix.
//!
//! With tensor parallelism a rank has a shard of a part of the parameters, and the updater joins
//! the parts.

use std::ops::Range;

use zero_shard::{
    Layout, ParamId, ParamPlacement, ParamSpec, ParamUpdater, TensorCut, TensorPart, TensorRun,
    Updaters,
};

use crate::groups::Resolved;
use crate::{OptimError, Segment};

/// A matrix in a parameter: `rows` rows of `cols` elements, one every `row_stride` elements from
/// `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Its first element in the parameter.
    pub first: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Elements between the starts of two rows; at least `cols`.
    pub row_stride: usize,
    /// Whether the rows are the inputs of the layer, as in GPT-2's Conv1D, and not its outputs, as
    /// in PyTorch's Linear.
    pub inputs_first: bool,
}

impl Matrix {
    /// All of a parameter of PyTorch's Linear: `outputs` rows of `inputs` elements.
    pub const fn linear(outputs: usize, inputs: usize) -> Self {
        Self {
            first: 0,
            rows: outputs,
            cols: inputs,
            row_stride: inputs,
            inputs_first: false,
        }
    }

    /// All of a parameter of a Conv1D: `inputs` rows of `outputs` elements.
    pub const fn conv1d(inputs: usize, outputs: usize) -> Self {
        Self {
            inputs_first: true,
            ..Self::linear(inputs, outputs)
        }
    }

    /// The matrices of a layer whose outputs are those of several, `outputs` each, such as queries,
    /// keys and values.
    #[must_use]
    pub fn split(self, outputs: &[usize]) -> Vec<Self> {
        let starts = outputs.iter().scan(0, |end, outputs| {
            let start = *end;
            *end += outputs;
            Some((start, *outputs))
        });
        let part = |(start, outputs)| match self.inputs_first {
            true => Self {
                first: self.first + start,
                cols: outputs,
                ..self
            },
            false => Self {
                first: self.first + start * self.row_stride,
                rows: outputs,
                ..self
            },
        };
        starts.map(part).collect()
    }

    /// Outputs of the layer.
    pub const fn outputs(&self) -> usize {
        if self.inputs_first {
            self.cols
        } else {
            self.rows
        }
    }

    /// Inputs of the layer.
    pub const fn inputs(&self) -> usize {
        if self.inputs_first {
            self.rows
        } else {
            self.cols
        }
    }

    /// The cost of orthogonalising it, but for a factor: its products are of the shorter side.
    fn cost(&self) -> u64 {
        let [rows, cols] = [self.rows, self.cols].map(|n| n as u64);
        rows.saturating_mul(cols).saturating_mul(rows.min(cols))
    }

    /// The elements of the parameter from its first to its last.
    pub(crate) fn range(&self) -> Range<usize> {
        let elems = match (self.rows, self.cols) {
            (0, _) | (_, 0) => 0,
            (rows, cols) => (rows - 1) * self.row_stride + cols,
        };
        self.first..self.first + elems
    }
}

/// A parameter of matrices.
#[derive(Clone, Debug)]
pub struct MatrixParam {
    /// The position of its rules in [`ParamGroups::rules`](crate::ParamGroups::rules).
    pub group: usize,
    /// Its matrices: each element of the parameter, before it is cut, is in one.
    pub matrices: Vec<Matrix>,
    /// The parameter before it is cut, and its cut. `None` if every part has all of it.
    pub cut: Option<(ParamSpec, TensorCut)>,
}

impl MatrixParam {
    /// The number of its elements before it is cut; `placed` is that of a part.
    ///
    /// # Errors
    /// A part of it has another shape.
    fn numel_elems(&self, part: TensorPart, placed: &ParamPlacement) -> Result<u64, OptimError> {
        let Some((whole, cut)) = &self.cut else {
            return Ok(placed.numel_elems);
        };
        let expected = part.shape(whole, *cut)?;
        if expected != placed.shape {
            return Err(OptimError::MatrixPart {
                param: placed.name.clone(),
                expected,
                got: placed.shape.clone(),
            });
        }
        Ok(whole.numel_elems()?)
    }

    fn is_cut(&self) -> bool {
        matches!(self.cut, Some((_, TensorCut::Dim { .. })))
    }
}

/// The matrices of a model on one of its ranks.
#[derive(Clone, Debug)]
pub struct Matrices {
    /// This rank in the exchange.
    rank: u64,
    /// Whether each unit is updated alone.
    by_unit: bool,
    updaters: Updaters,
    /// In the order of [`Updaters::waves`].
    params: Vec<MatrixParam>,
    /// The first element of each unit's flat parameter that this rank has.
    firsts: Vec<u64>,
    /// The ranges of this rank's segment of each unit that belong to no parameter.
    padding: Vec<Vec<Range<usize>>>,
}

impl Matrices {
    /// The matrices of `layout` on a rank with shard `shard` of `part` ([`TensorPart::whole`]
    /// without tensor parallelism): those of each parameter for which `matrices_of` returns some.
    /// At stage 0 every rank has the state of all elements of its part: `replicated`. `by_unit` is
    /// for [`ShardedOptimizer::enqueue_unit_update`](crate::ShardedOptimizer::enqueue_unit_update);
    /// updates of all units at once do better without, since ranks then have matrices of several
    /// units to share.
    ///
    /// In the exchange ([`AllToAll`](crate::AllToAll)) shards are in order, and of one shard the
    /// parts.
    ///
    /// # Errors
    /// The matrices of a parameter do not have its elements, each once, or its parts have another
    /// shape than in the layout.
    pub fn new(
        layout: &Layout,
        (shard, part): (u64, TensorPart),
        replicated: bool,
        by_unit: bool,
        matrices_of: impl Fn(ParamId) -> Option<MatrixParam>,
    ) -> Result<Self, OptimError> {
        let mut params = Vec::new();
        let mut ids = std::collections::HashMap::new();
        for (id, placed) in layout.params() {
            let Some(param) = matrices_of(id).filter(|param| !param.matrices.is_empty()) else {
                continue;
            };
            let elems = param.numel_elems(part, placed)? as usize;
            if !are_all(&param.matrices, elems) {
                let whole = param.cut.map(|(whole, _)| whole.shape);
                return Err(OptimError::Matrices {
                    param: placed.name.clone(),
                    shape: whole.unwrap_or_else(|| placed.shape.clone()),
                    matrices: param.matrices,
                });
            }
            let cost = param.matrices.iter().map(Matrix::cost);
            ids.insert(id, (cost.fold(0, u64::saturating_add), param.is_cut()));
            params.push(param);
        }
        let parts = (part.ranks(), |id| {
            ids.get(&id).is_some_and(|(_, is_cut)| *is_cut)
        });
        let cost = |id| ids.get(&id).map(|(cost, _)| *cost);
        let updaters = Updaters::of_parts(layout, parts, replicated, by_unit, cost);
        let units = layout.units().iter();
        let held = units.map(|unit| match replicated {
            true => 0..unit.padded_elems,
            false => unit.shard(shard),
        });
        let held: Vec<Range<u64>> = held.collect();
        let padding = layout.units().iter().zip(&held).map(|(unit, held)| {
            let in_segment = |at: u64| (at.clamp(held.start, held.end) - held.start) as usize;
            let gaps = unit.padding();
            gaps.map(|gap| in_segment(gap.start)..in_segment(gap.end))
                .collect()
        });
        Ok(Self {
            rank: shard * part.ranks() + part.rank(),
            by_unit,
            updaters,
            params,
            padding: padding.collect(),
            firsts: held.iter().map(|held| held.start).collect(),
        })
    }

    /// Checks that the elements of matrices, and no others, have rules that see matrices.
    pub(crate) fn check(&self, segments: &[Segment], groups: &Resolved) -> Result<(), OptimError> {
        let seen = |unit, elems| {
            let trained = groups.trained(unit, elems);
            let seen = trained.filter(|(_, _, rules)| groups.matrix_rule(*rules).is_some());
            seen.map(|(elems, _, _)| elems.len()).sum::<usize>()
        };
        let padding = |(unit, gaps): (usize, &Vec<Range<usize>>)| {
            gaps.iter().map(|gap| seen(unit, gap.clone())).sum()
        };
        let mut allowed: Vec<usize> = self.padding.iter().enumerate().map(padding).collect();
        for wave in self.waves() {
            for part in wave.held().parts {
                let unit = part.param.id.unit;
                let elems = wave.in_segment(&part);
                if seen(unit, elems.clone()) < elems.len() {
                    return Err(OptimError::NoMatrixRule {
                        unit: segments[unit].name.clone(),
                        group: part.matrices.group,
                    });
                }
                allowed[unit] += elems.len();
            }
        }
        check_elements(segments, groups, |unit| allowed[unit])
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// The parameters' updaters.
    pub fn updaters(&self) -> &Updaters {
        &self.updaters
    }

    /// The most elements, in fp32, of buffers that `rank` of the exchange has at once in updates;
    /// `scratch_elems` is [`Kernels::orthogonalise_scratch_elems`] of rows and columns.
    ///
    /// [`Kernels::orthogonalise_scratch_elems`]: zero_kernels::Kernels::orthogonalise_scratch_elems
    pub fn buffer_elems(&self, rank: u64, scratch_elems: impl Fn(usize, usize) -> usize) -> u64 {
        let waves = self.waves().map(|wave| wave.buffers(rank, &scratch_elems));
        let waves: Vec<WaveBuffers> = waves.collect();
        let empty = WaveBuffers::default();
        let most = |waves: &[WaveBuffers]| {
            let in_order = [&[empty; 2], waves, &[empty]].concat();
            let at_once = in_order.windows(3).map(|of| {
                let [returning, sent, next] = [of[0], of[1], of[2]];
                let while_sent = sent.sent + next.sent;
                while_sent + returning.returning.max(sent.middle)
            });
            at_once.max().unwrap_or(0)
        };
        match self.by_unit {
            true => waves.chunks(1).map(most).max().unwrap_or(0),
            false => most(&waves),
        }
    }

    /// The most elements of directions, in fp32, that `rank` of the exchange has at once: those of
    /// an optimizer on the host whose matrices a device updates.
    pub fn held_elems(&self, rank: u64) -> u64 {
        let waves = self.waves().map(|wave| wave.buffers(rank, |_, _| 0).held);
        waves.max().unwrap_or(0)
    }

    /// The waves of updates.
    pub(crate) fn waves(&self) -> impl Iterator<Item = Wave<'_>> {
        let mut rest = &self.params[..];
        self.updaters.waves().map(move |whole| {
            let (params, later) = rest.split_at(whole.len());
            rest = later;
            Wave {
                matrices: self,
                params: whole.iter().zip(params).collect(),
            }
        })
    }
}

/// Whether each of `elems` elements is in one of the matrices, and once.
fn are_all(matrices: &[Matrix], elems: usize) -> bool {
    let mut rows = Vec::new();
    for matrix in matrices.iter().filter(|matrix| matrix.cols > 0) {
        for row in 0..matrix.rows {
            let start = row.checked_mul(matrix.row_stride);
            let start = start.and_then(|start| start.checked_add(matrix.first));
            match start.filter(|_| rows.len() < elems) {
                Some(start) => rows.push((start, matrix.cols)),
                None => return false,
            }
        }
    }
    rows.sort_unstable();
    let end = rows.into_iter().try_fold(0_usize, |end, (start, cols)| {
        end.checked_add(cols).filter(|_| start == end)
    });
    end == Some(elems)
}

/// Checks that of each unit's elements with rules that see matrices at most `allowed` exist.
pub(crate) fn check_elements(
    segments: &[Segment],
    groups: &Resolved,
    allowed: impl Fn(usize) -> usize,
) -> Result<(), OptimError> {
    for (unit, segment) in segments.iter().enumerate() {
        let trained = groups.trained(unit, 0..segment.len());
        let seen = trained.filter(|(_, _, rules)| groups.matrix_rule(*rules).is_some());
        let seen: Vec<_> = seen.collect();
        let elems: usize = seen.iter().map(|(elems, _, _)| elems.len()).sum();
        if let Some((_, _, rules)) = seen.first().filter(|_| elems > allowed(unit)) {
            return Err(OptimError::NoMatrix {
                unit: segment.name.clone(),
                rule: groups.updates[groups.launch_rules[*rules].update].name(),
                elems: elems - allowed(unit),
            });
        }
    }
    Ok(())
}

/// Elements of a wave's buffers; see `matrix_exchange.rs`.
#[derive(Clone, Copy, Default)]
struct WaveBuffers {
    held: u64,
    /// Held and received.
    sent: u64,
    /// While its matrices are computed, beside those.
    middle: u64,
    /// Held and returned.
    returning: u64,
}

/// Parameters whose updates are exchanged together.
pub(crate) struct Wave<'a> {
    matrices: &'a Matrices,
    pub(crate) params: Vec<(&'a ParamUpdater, &'a MatrixParam)>,
}

/// A part of a parameter in a buffer.
pub(crate) struct Part<'a> {
    pub(crate) param: &'a ParamUpdater,
    pub(crate) matrices: &'a MatrixParam,
    /// The rank for which it is in the buffer.
    rank: u64,
    /// Its elements of the parameter.
    pub(crate) elems: Range<usize>,
    /// Its first element in the buffer.
    pub(crate) at: usize,
}

impl Part<'_> {
    /// Its elements, which are of the part that the buffer's rank has, in the whole parameter.
    pub(crate) fn runs(&self) -> Result<Vec<TensorRun>, OptimError> {
        let elems = self.elems.start as u64..self.elems.end as u64;
        let Some((whole, cut)) = &self.matrices.cut else {
            return Ok(vec![TensorRun {
                in_part: elems.clone(),
                in_whole: Some(elems),
            }]);
        };
        let part = self.param.part_of(self.rank);
        Ok(part.runs(whole, *cut, elems)?.collect())
    }

    /// The place of some of its elements in the buffer.
    pub(crate) fn in_buffer(&self, elems: Range<u64>) -> Range<usize> {
        let at = |elem: u64| self.at + elem as usize - self.elems.start;
        at(elems.start)..at(elems.end)
    }
}

/// The parts in a buffer, one after another, and the elements for each rank.
pub(crate) struct Buffer<'a> {
    pub(crate) parts: Vec<Part<'a>>,
    pub(crate) counts: Vec<usize>,
}

impl Buffer<'_> {
    pub(crate) fn elems(&self) -> usize {
        self.counts.iter().sum()
    }
}

impl<'a> Wave<'a> {
    /// The parts of a buffer that is ordered by ranks, then by parameters; `part` returns the
    /// elements of a parameter that are there for a rank.
    fn buffer(&self, part: impl Fn(&ParamUpdater, u64) -> Range<u64>) -> Buffer<'a> {
        let mut at = 0;
        let mut parts = Vec::new();
        let mut counts = Vec::new();
        for rank in 0..self.matrices.updaters.world_size() {
            let begin = at;
            for &(param, matrices) in &self.params {
                let Range { start, end } = part(param, rank);
                let elems = start as usize..end as usize;
                if elems.is_empty() {
                    continue;
                }
                at += elems.len();
                parts.push(Part {
                    param,
                    matrices,
                    rank,
                    at: at - elems.len(),
                    elems,
                });
            }
            counts.push(at - begin);
        }
        Buffer { parts, counts }
    }

    /// The elements that this rank holds, by updaters.
    pub(crate) fn held(&self) -> Buffer<'a> {
        let own = self.matrices.rank;
        self.buffer(|param, rank| of_updater(param, rank, param.held(own)))
    }

    /// The elements that this rank gives to updaters: a range of [`Self::held`].
    pub(crate) fn given(&self) -> Buffer<'a> {
        let own = self.matrices.rank;
        self.buffer(|param, rank| of_updater(param, rank, param.given(own)))
    }

    /// The elements that ranks give to this one.
    pub(crate) fn received(&self) -> Buffer<'a> {
        let own = self.matrices.rank;
        self.buffer(|param, rank| of_updater(param, own, param.given(rank)))
    }

    /// The elements that this rank returns to others.
    pub(crate) fn returned(&self) -> Buffer<'a> {
        let own = self.matrices.rank;
        self.buffer(|param, rank| of_updater(param, own, param.held(rank)))
    }

    /// The parameters that this rank sees whole.
    pub(crate) fn own(&self) -> Buffer<'a> {
        let own = self.matrices.rank;
        self.buffer(|param, rank| match rank == own {
            true => of_updater(param, own, 0..param.joined_elems()),
            false => 0..0,
        })
    }

    fn buffers(&self, rank: u64, scratch_elems: impl Fn(usize, usize) -> usize) -> WaveBuffers {
        let len = |Range { start, end }: Range<u64>| end - start;
        let held = self.params.iter().map(|(param, _)| len(param.held(rank)));
        let held: u64 = held.sum();
        let [mut received, mut returned, mut whole, mut scratch] = [0; 4];
        let own = |(param, _): &&(&ParamUpdater, _)| param.updater == rank;
        for (param, matrices) in self.params.iter().filter(own) {
            for other in 0..self.matrices.updaters.world_size() {
                received += len(param.given(other));
                returned += len(param.held(other));
            }
            whole += param.joined_elems();
            for matrix in &matrices.matrices {
                scratch = scratch.max(scratch_elems(matrix.rows, matrix.cols) as u64);
            }
        }
        let of_copies = if returned == received { 0 } else { returned };
        WaveBuffers {
            held,
            sent: held + received,
            middle: whole + scratch + of_copies,
            returning: held + returned,
        }
    }

    /// The elements of a part in this rank's segment of the unit.
    pub(crate) fn in_segment(&self, part: &Part<'_>) -> Range<usize> {
        let first = self.matrices.firsts[part.param.id.unit];
        let flat = |elem: usize| (part.param.flat.start + elem as u64 - first) as usize;
        flat(part.elems.start)..flat(part.elems.end)
    }
}

/// `elems` if `rank` is the updater, else none.
fn of_updater(param: &ParamUpdater, rank: u64, elems: Range<u64>) -> Range<u64> {
    if param.updater == rank { elems } else { 0..0 }
}
