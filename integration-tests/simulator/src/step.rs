//! A step: the trainer's own schedule, with the costs of the formulas.

mod operations;

use std::ops::RangeInclusive;
use std::sync::Arc;

use zero_alloc::device::DType;
use zero_alloc::host::OpSpan;
use zero_alloc::schedule::{Operation, Times, Work};
use zero_shard::{ParamSpec, TensorCut, UnitSpec, ZeroStage};
use zero_trainer::param_groups::ParamKind;
use zero_trainer::{
    Pass, RunOptions, Settings, StepSchedule, TrainError, record_on_device, record_on_host,
};

use crate::workload::{OUTPUT, PASS, ShapeWorkload};
use crate::{Costs, Efficiencies, Machine, PassSeconds, Row, Shape};
use operations::OperationCosts;

/// Micro-batches that are simulated; more follow from the difference of the last two.
const MICRO_BATCHES: usize = 3;
/// Steps that are recorded. The last one has a whole step before it, whose update it waits for.
const STEPS: u64 = 2;
/// More layers than any model has, and more GPUs than any run.
const MAX_LAYERS: u64 = 1 << 16;
const MAX_GPUS: u64 = 1 << 20;

/// A run whose step is simulated.
#[derive(Clone, Debug)]
pub struct Run {
    ranks: usize,
    node_ranks: usize,
    micro_batch: u64,
    /// Elements of a block's output for one sequence.
    output_elems: u64,
    /// Elements that ranks which share a sequence exchange before or behind attention, on average.
    exchange_elems: u64,
    workload: ShapeWorkload,
    settings: Settings,
    /// Threads of a rank on the host; `None`: on a GPU.
    threads: Option<usize>,
}

/// A model as the trainer sees it.
#[derive(Clone)]
pub struct Units {
    /// The units, before tensor parallelism cuts them.
    pub units: Vec<UnitSpec>,
    /// The passes over them: an embedding, blocks, a head.
    pub passes: Vec<Pass>,
    /// How tensor parallelism cuts a parameter.
    pub cut: Arc<dyn Fn(&ParamSpec) -> TensorCut + Send + Sync>,
}

/// The schedules of a run's steps, for any costs.
#[derive(Clone, Debug)]
pub struct StepSchedules {
    run: Run,
    /// By the number of micro-batches.
    recorded: [Option<StepSchedule>; MICRO_BATCHES + 1],
}

/// A row with the schedules of its step.
#[derive(Clone, Debug)]
pub struct SimulatedRow {
    /// The row.
    pub row: Row,
    /// Its machine.
    pub machine: Machine,
    schedules: StepSchedules,
}

impl SimulatedRow {
    /// Records the steps of `row`.
    ///
    /// # Errors
    /// A GPU that no preset has, or sizes that no model has.
    pub fn new(row: &Row) -> Result<Self, TrainError> {
        let line = |error: &dyn std::fmt::Display| {
            TrainError::Usage(format!("line {} ({}): {error}", row.line, row.model))
        };
        Ok(Self {
            machine: row.machine().map_err(|error| line(&error))?,
            schedules: Run::of_row(row)
                .and_then(|run| run.schedules())
                .map_err(|error| line(&error))?,
            row: row.clone(),
        })
    }

    /// Tokens per second and GPU.
    pub fn speed(&self, efficiencies: &Efficiencies) -> f64 {
        let step = self.schedules.step(&Costs {
            machine: &self.machine,
            shape: &self.row.shape,
            software: &self.row.software(),
            efficiencies,
        });
        self.row.tokens_per_s(step.seconds)
    }
}

/// A simulated step.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedStep {
    /// Seconds of a step.
    pub seconds: f64,
    /// Of them, those in which the compute stream of the GPU has no operation: it waits for
    /// collectives, copies or the host.
    pub idle_s: f64,
    /// Seconds of collectives between nodes, hidden or not.
    pub network_s: f64,
    /// Seconds of collectives within nodes.
    pub links_s: f64,
}

/// Seconds of one recorded step.
#[derive(Clone, Copy, Debug, Default)]
struct StepSeconds {
    seconds: f64,
    busy_s: f64,
    network_s: f64,
    links_s: f64,
}

impl StepSeconds {
    /// Parts of a step with `more` micro-batches than `self`, where `fewer` has one less.
    fn extrapolated(self, fewer: Self, more: f64) -> Self {
        let at = |own: f64, fewer: f64| own + more * (own - fewer);
        Self {
            seconds: at(self.seconds, fewer.seconds),
            busy_s: at(self.busy_s, fewer.busy_s),
            network_s: at(self.network_s, fewer.network_s),
            links_s: at(self.links_s, fewer.links_s),
        }
    }
}

impl Run {
    /// A run of `ranks` GPUs, `node_ranks` consecutive ones a node, with `settings` of our trainer
    /// and micro-batches of `micro_batch` sequences of `shape`. `recompute`: backward computes the
    /// forward of blocks again.
    pub fn new(
        [ranks, node_ranks]: [usize; 2],
        settings: Settings,
        units: Units,
        shape: &Shape,
        micro_batch: u64,
        recompute: bool,
    ) -> Self {
        Self {
            ranks,
            node_ranks: node_ranks.max(1),
            micro_batch,
            output_elems: shape.rank_tokens().saturating_mul(shape.width),
            exchange_elems: shape.exchange_elems(),
            workload: ShapeWorkload {
                units: units.units,
                passes: units.passes,
                cut: units.cut,
                recompute,
                writes_grads: true,
            },
            settings,
            threads: None,
        }
    }

    /// The same run on the host, whose ranks have `threads` threads each.
    #[must_use]
    pub fn on_host(self, threads: usize) -> Self {
        Self {
            threads: Some(threads.max(1)),
            workload: ShapeWorkload {
                writes_grads: false,
                ..self.workload
            },
            ..self
        }
    }

    /// The run of a row: one unit for the embedding, which is gathered once and kept, and one for
    /// each block, as PyTorch's FSDP wraps them.
    ///
    /// # Errors
    /// Sizes that no model has.
    pub fn of_row(row: &Row) -> Result<Self, TrainError> {
        let shape = &row.shape;
        let usage = |what: &str| TrainError::Usage(what.to_owned());
        if shape.layers > MAX_LAYERS || row.gpus > MAX_GPUS {
            return Err(usage(
                "more than 65,536 layers or 1,048,576 GPUs; check the columns",
            ));
        }
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
        Ok(Self {
            ranks: row.gpus as usize,
            node_ranks: (row.gpus / row.nodes.max(1)).max(1) as usize,
            micro_batch: row.micro_batch,
            output_elems: shape.rank_tokens().saturating_mul(shape.width),
            exchange_elems: shape.exchange_elems(),
            workload: ShapeWorkload {
                units,
                passes,
                cut: Arc::new(|_| TensorCut::Replicated),
                recompute: row.recompute,
                writes_grads: true,
            },
            settings: Settings {
                bucket_capacity_elems: (root.max(block) as usize).next_multiple_of(1 << 20)
                    + (1 << 20),
                grad_accum_steps: row.micro_batches() as usize,
                ..settings
            },
            threads: None,
        })
    }

    /// Records what rank 0 enqueues.
    ///
    /// # Errors
    /// Settings that the trainer refuses.
    pub fn schedules(&self) -> Result<StepSchedules, TrainError> {
        let mut schedules = StepSchedules {
            run: self.clone(),
            recorded: Default::default(),
        };
        schedules.record()?;
        Ok(schedules)
    }

    /// Records steps of `micro_batches` micro-batches.
    fn record(&self, micro_batches: usize) -> Result<StepSchedule, TrainError> {
        let settings = Settings {
            grad_accum_steps: micro_batches,
            ..self.settings.clone()
        };
        let options = RunOptions {
            steps: STEPS,
            micro_batch: 1,
            seq_len: 1,
            ..RunOptions::default()
        };
        match self.threads {
            None => record_on_device(0, self.ranks, &settings, &self.workload, &options),
            Some(_) => record_on_host(0, self.ranks, &settings, &self.workload, &options),
        }
    }

    fn tensor_ranks(&self) -> usize {
        self.settings.mesh.tensor_ranks.unwrap_or(1)
    }

    /// Ranks on one node.
    fn node_ranks(&self) -> usize {
        self.node_ranks.min(self.ranks)
    }

    /// The numbers of micro-batches whose steps are recorded: two and three, or as many as the run
    /// has.
    fn recorded_micro_batches(&self) -> RangeInclusive<usize> {
        match self.settings.grad_accum_steps {
            few @ ..=MICRO_BATCHES => few..=few,
            _ => MICRO_BATCHES - 1..=MICRO_BATCHES,
        }
    }
}

impl StepSchedules {
    /// Sets the micro-batches of a step, and their sequences. A schedule that was recorded before is
    /// not recorded again: it does not depend on the sequences.
    ///
    /// # Errors
    /// Settings that the trainer refuses.
    pub fn set_batch(&mut self, micro_batch: u64, micro_batches: usize) -> Result<(), TrainError> {
        self.run.micro_batch = micro_batch;
        self.run.settings.grad_accum_steps = micro_batches;
        self.record()
    }

    /// Records the steps that are not recorded yet.
    fn record(&mut self) -> Result<(), TrainError> {
        for micro_batches in self.run.recorded_micro_batches() {
            let recorded = &mut self.recorded[micro_batches];
            if recorded.is_none() {
                *recorded = Some(self.run.record(micro_batches)?);
            }
        }
        Ok(())
    }

    /// The recorded steps with the run's number of micro-batches, or with two and three.
    fn recorded(&self) -> impl DoubleEndedIterator<Item = &StepSchedule> {
        self.recorded[self.run.recorded_micro_batches()]
            .iter()
            .flatten()
    }

    /// The step at these costs.
    pub fn step(&self, costs: &Costs<'_>) -> SimulatedStep {
        let passes = self.passes(costs);
        let parts: Vec<_> = self
            .recorded()
            .map(|recorded| self.parts(recorded, &self.times(recorded, costs, &passes)))
            .collect();
        let of_step = match parts[..] {
            [two, three] => {
                let more = self.run.settings.grad_accum_steps - MICRO_BATCHES;
                three.extrapolated(two, more as f64)
            }
            _ => parts.first().copied().unwrap_or_default(),
        };
        SimulatedStep {
            seconds: of_step.seconds,
            idle_s: (of_step.seconds - of_step.busy_s).max(0.0),
            network_s: of_step.network_s,
            links_s: of_step.links_s,
        }
    }

    /// The operations of the recorded steps at these costs.
    pub fn spans(&self, costs: &Costs<'_>) -> Vec<OpSpan> {
        let passes = self.passes(costs);
        let spans = |recorded: &StepSchedule| {
            let times = self.times(recorded, costs, &passes);
            recorded.schedule.spans(&times)
        };
        self.recorded().next_back().map(spans).unwrap_or_default()
    }

    fn passes(&self, costs: &Costs<'_>) -> PassSeconds {
        let sharded = self.run.settings.stage != ZeroStage::Zero;
        costs.passes(self.run.micro_batch, sharded)
    }

    /// The parts of the last step: between the last two marks.
    fn parts(&self, recorded: &StepSchedule, times: &Times) -> StepSeconds {
        let [.., before, after] = times.marks[..] else {
            return StepSeconds::default();
        };
        let mut parts = StepSeconds {
            seconds: (after - before) * 1e-9,
            ..StepSeconds::default()
        };
        let operations = recorded.schedule.operations();
        for (operation, [start, end]) in operations.zip(&times.operations) {
            let seconds = (end.min(after) - start.max(before)).max(0.0) * 1e-9;
            match operation.label {
                "all_gather" | "reduce_scatter" | "all_reduce" | "all_to_all" => {
                    let class = operation.work.class as usize;
                    let ranks = recorded.communicators.get(class);
                    match ranks.map_or(1, |ranks| self.nodes(ranks)) {
                        1 => parts.links_s += seconds,
                        _ => parts.network_s += seconds,
                    }
                }
                _ if recorded.schedule.streams[operation.stream].ends_with(" compute") => {
                    parts.busy_s += seconds;
                }
                _ => {}
            }
        }
        parts
    }

    fn times(&self, recorded: &StepSchedule, costs: &Costs<'_>, passes: &PassSeconds) -> Times {
        let nodes = recorded.communicators.iter();
        let operations = OperationCosts {
            of: self,
            recorded,
            nodes: nodes.map(|ranks| self.nodes(ranks)).collect(),
            costs,
            passes,
        };
        let cores = costs.machine.cores.unwrap_or(1);
        let mut before = None;
        recorded.schedule.times(|operation| {
            let operation = self.of_micro_batch(before.replace(*operation), operation);
            match self.run.threads {
                None => operations.on_gpu(&operation),
                Some(threads) => operations.on_host(&operation, threads, cores),
            }
        })
    }

    /// The operation with its size for this micro-batch, where one was recorded `before` it: sums
    /// of tensor parallelism and attention's all-to-alls, which are behind a part of a pass. Those
    /// of quantised gradients and of matrices are as recorded.
    fn of_micro_batch(&self, before: Option<Operation>, operation: &Operation) -> Operation {
        let run = &self.run;
        let label = before.map(|before| before.label);
        let elems = match operation.label {
            "all_to_all" if matches!(label, Some(PASS | "all_reduce")) => run.exchange_elems,
            "all_reduce" if run.tensor_ranks() > 1 && label == Some(PASS) => run.output_elems,
            _ => return *operation,
        };
        // The host computes in 32 bits.
        let dtype = run.threads.map_or(OUTPUT, |_| DType::F32);
        let elems = elems.saturating_mul(run.micro_batch);
        let bytes = elems.saturating_mul(dtype.size_bytes() as u64);
        let mut operation = *operation;
        operation.work = Work::bytes(bytes).class(operation.work.class);
        operation
    }

    /// The nodes of a communicator's ranks.
    fn nodes(&self, ranks: &[usize]) -> u64 {
        let of_node = self.run.node_ranks();
        let mut nodes: Vec<_> = ranks.iter().map(|rank| rank / of_node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes.len() as u64
    }
}
