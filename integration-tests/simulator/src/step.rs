//! A step: the trainer's own schedule, with the costs of the formulas.

use zero_alloc::device::DType;
use zero_alloc::schedule::{Cost, Operation, Times};
use zero_shard::{ParamSpec, TensorCut, UnitSpec, ZeroStage};
use zero_trainer::param_groups::ParamKind;
use zero_trainer::{
    MeshSettings, Pass, RunOptions, Settings, StepSchedule, TrainError, record_on_device,
};

use crate::workload::{Kind, PASS, ShapeWorkload, pass_class};
use crate::{Costs, PassSeconds, Row, ring};

/// Micro-batches that are simulated; more follow from the difference of the last two.
const MICRO_BATCHES: usize = 3;
/// Steps that are recorded. The last one has a whole step before it.
const STEPS: u64 = 3;
/// The network, and the links within a node, which collectives share that run at the same time.
const NETWORK: u8 = 0;
const LINKS: u8 = 1;

/// A run whose step is simulated.
#[derive(Clone, Debug)]
pub struct Run {
    /// GPUs of the run, one rank each.
    pub ranks: usize,
    /// Consecutive ranks of a node.
    pub node_ranks: usize,
    /// Sequences of a micro-batch of a rank.
    pub micro_batch: u64,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    workload: ShapeWorkload,
    settings: Settings,
}

/// The schedules of a run's steps, for any costs.
#[derive(Clone, Debug)]
pub struct StepSchedules {
    /// With two and three micro-batches, or with as many as the run has.
    by_micro_batches: Vec<StepSchedule>,
    micro_batches: usize,
    node_ranks: usize,
    micro_batch: u64,
    sharded: bool,
    tensor_ranks: f64,
}

/// A simulated step.
#[derive(Clone, Debug)]
pub struct Step {
    /// Seconds of a step.
    pub seconds: f64,
    /// The times of the recorded steps.
    pub times: Times,
}

impl Run {
    /// The run of a row: one unit for the embedding, which is gathered once and kept, and one for
    /// each block, as PyTorch's FSDP wraps them.
    ///
    /// # Errors
    /// Sizes that no model has.
    pub fn of_row(row: &Row) -> Result<Self, TrainError> {
        let shape = &row.shape;
        let usage = |what: &str| TrainError::Usage(format!("line {}: {what}", row.line));
        let stage = ZeroStage::from_number(row.stage.into())
            .ok_or_else(|| usage("no such stage; expected 0 to 3"))?;
        let root = shape.embedding_params();
        let block = shape.block_params();
        if !(root >= 1.0 && block >= 1.0) {
            return Err(usage(
                "fewer parameters than the embedding alone; check params, vocab and width",
            ));
        }
        let unit = |name: String, elems: f64| {
            UnitSpec::new(name.clone(), [ParamSpec::new(name, [elems as u64])])
        };
        let blocks = shape.layers as usize;
        let mut units = vec![unit("embedding".to_owned(), root)];
        units.extend((0..blocks).map(|i| unit(format!("block {i}"), block)));
        let mut passes = vec![Pass {
            backward_reads: Vec::new(),
            ..Pass::of_unit(0)
        }];
        passes.extend((1..=blocks).map(Pass::of_unit));
        passes.push(Pass::default());

        let settings = Settings::new(stage, DType::Bf16, |_| ParamKind::Linear);
        let micro_batches = row.micro_batches() as usize;
        Ok(Self {
            ranks: row.gpus as usize,
            node_ranks: (row.gpus / row.nodes.max(1)).max(1) as usize,
            micro_batch: row.micro_batch,
            micro_batches,
            workload: ShapeWorkload {
                units,
                passes,
                cut: |_| TensorCut::Replicated,
                output_elems: (row.micro_batch * shape.seq * shape.width) as usize,
                recompute: row.recompute,
            },
            settings: Settings {
                bucket_capacity_elems: (root.max(block) as usize).next_multiple_of(1 << 20)
                    + (1 << 20),
                mesh: MeshSettings::default(),
                ..settings
            },
        })
    }

    /// Records what rank 0 enqueues.
    ///
    /// # Errors
    /// Settings that the trainer refuses.
    pub fn schedules(&self) -> Result<StepSchedules, TrainError> {
        let counts = match self.micro_batches {
            few @ ..=MICRO_BATCHES => few..=few,
            _ => MICRO_BATCHES - 1..=MICRO_BATCHES,
        };
        let record = |grad_accum_steps| {
            let settings = Settings {
                grad_accum_steps,
                ..self.settings.clone()
            };
            let options = RunOptions {
                steps: STEPS,
                micro_batch: 1,
                seq_len: 1,
                ..RunOptions::default()
            };
            record_on_device(0, self.ranks, &settings, &self.workload, &options)
        };
        Ok(StepSchedules {
            by_micro_batches: counts.map(record).collect::<Result<_, _>>()?,
            micro_batches: self.micro_batches,
            node_ranks: self.node_ranks,
            micro_batch: self.micro_batch,
            sharded: self.settings.stage != ZeroStage::Zero,
            tensor_ranks: self.settings.mesh.tensor_ranks.unwrap_or(1) as f64,
        })
    }
}

impl StepSchedules {
    /// The step at these costs.
    pub fn step(&self, costs: &Costs<'_>) -> Step {
        let passes = costs.passes(self.micro_batch, self.sharded);
        let mut times: Vec<_> = self
            .by_micro_batches
            .iter()
            .map(|recorded| self.times(recorded, costs, &passes))
            .collect();
        let seconds: Vec<_> = times.iter().map(last_step_s).collect();
        let seconds = match seconds[..] {
            [two, three] => three + (self.micro_batches - MICRO_BATCHES) as f64 * (three - two),
            _ => seconds.first().copied().unwrap_or(f64::NAN),
        };
        Step {
            seconds,
            times: times.pop().unwrap_or_default(),
        }
    }

    fn times(&self, recorded: &StepSchedule, costs: &Costs<'_>, passes: &PassSeconds) -> Times {
        let nodes: Vec<_> = recorded
            .communicators
            .iter()
            .map(|ranks| self.nodes(ranks))
            .collect();
        recorded
            .schedule
            .times(|operation| self.cost(operation, recorded, &nodes, costs, passes))
    }

    /// The nodes of a communicator's ranks.
    fn nodes(&self, ranks: &[usize]) -> u64 {
        let mut nodes: Vec<_> = ranks.iter().map(|rank| rank / self.node_ranks).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes.len() as u64
    }

    fn cost(
        &self,
        operation: &Operation,
        recorded: &StepSchedule,
        nodes: &[u64],
        costs: &Costs<'_>,
        passes: &PassSeconds,
    ) -> Cost {
        let slowdown = costs.efficiencies.slowdown;
        let work = operation.work;
        let computes = |seconds: f64| Cost {
            slowdown,
            ..Cost::ns(seconds * 1e9)
        };
        let class = work.class as usize;
        match operation.label {
            PASS => computes(pass_s(passes, work.class) / work.bytes as f64 / self.tensor_ranks),
            "all_gather" | "reduce_scatter" | "all_reduce" => {
                let ranks = recorded
                    .communicators
                    .get(class)
                    .map_or(1, |ranks| ranks.len());
                let nodes = nodes.get(class).copied().unwrap_or(1);
                let bytes = match operation.label {
                    "reduce_scatter" if costs.software.wide_reduce => 2 * work.bytes,
                    _ => work.bytes,
                };
                let once = ring(
                    bytes as f64,
                    ranks as u64,
                    nodes,
                    costs.machine,
                    costs.efficiencies,
                );
                let times = if operation.label == "all_reduce" {
                    2.0
                } else {
                    1.0
                };
                Cost {
                    slows: ranks > 1,
                    shares: Some(if nodes > 1 { NETWORK } else { LINKS }),
                    ..Cost::ns(times * once * 1e9)
                }
            }
            "flags" | "upload" | "download" | "rank_stats" | "advance_step" => Cost::default(),
            "copy to or from the host" => {
                Cost::ns(work.bytes as f64 / costs.machine.host_link_bytes_per_s * 1e9)
            }
            _ => computes(work.bytes as f64 / costs.memory()),
        }
    }
}

/// Seconds of a pass.
fn pass_s(passes: &PassSeconds, class: u32) -> f64 {
    let kinds = [
        (Kind::Embedding, passes.embedding),
        (Kind::Block, passes.block),
        (Kind::Head, passes.head),
    ];
    let of_kind = |(kind, [forward, backward]): (Kind, [f64; 2])| {
        [
            (pass_class(kind, false), forward),
            (pass_class(kind, true), backward),
        ]
    };
    let mut all = kinds.into_iter().flat_map(of_kind);
    all.find(|(of, _)| *of == class)
        .map_or(0.0, |(_, seconds)| seconds)
}

/// Seconds of the last step: between the last two marks.
fn last_step_s(times: &Times) -> f64 {
    match times.marks[..] {
        [.., before, after] => (after - before) * 1e-9,
        _ => f64::NAN,
    }
}
