//! What a rank observes of its steps: time, bytes sent, memory. It reads what a step leaves behind
//! and enqueues nothing.

use std::time::Duration;

use zero_alloc::Pool;
use zero_alloc::device::{Device, Stream};
use zero_alloc::host::OpSpan;
use zero_comm::overlap::Overlap;
use zero_optim::StepOutcome;

use crate::mesh::Sent;
use crate::offload::host_optimizer::update_track;
use crate::options::RunOptions;
use crate::rank::Rank;
use crate::telemetry::breakdown::{Breakdown, Tracks};
use crate::telemetry::memory_trace::{MemoryRecord, MemoryTrace, live};
use crate::telemetry::metrics::{CommBytes, MemoryBytes, NvmeBytes, StepMetrics};
use crate::telemetry::phase::{Phase, host_track};

/// Observes the steps of one rank.
pub(crate) struct Observer<'a, D: Device> {
    rank: &'a Rank<D>,
    options: &'a RunOptions,
    completed: Completed,
    memory: MemoryRecord,
    /// The names of its tracks in the timeline.
    update: String,
    host: String,
}

/// The steps that are done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completed {
    pub(crate) steps: u64,
    /// Tokens of all ranks.
    pub(crate) tokens: u64,
    /// The end of the last step, in the timeline's time.
    end: Duration,
    /// Steps of this run.
    run_steps: u64,
    /// Seconds a step, with what is done between steps: an average that forgets old steps.
    step_s: f64,
}

impl Completed {
    /// The least weight of the newest step in the average.
    const NEWEST: f64 = 0.2;

    /// Adds a step that ended at `end`.
    fn add(&mut self, tokens: u64, end: Duration) {
        let step_s = end.saturating_sub(self.end).as_secs_f64();
        // The second step replaces the first, which also loads kernels.
        let newest = (1.0 / self.run_steps.max(1) as f64).max(Self::NEWEST);
        self.step_s += newest * (step_s - self.step_s);

        self.steps += 1;
        self.run_steps += 1;
        self.tokens += tokens;
        self.end = end;
    }
}

/// What the rank has sent to others and moved to and from files since it began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moved {
    pub(crate) sent: Sent,
    /// `None` without files.
    pub(crate) nvme: Option<NvmeBytes>,
}

/// The state of the rank when a step began.
pub(crate) struct Began {
    start: Duration,
    moved: Moved,
    /// The bytes held, by purpose.
    held: [usize; zero_alloc::Purpose::COUNT],
}

/// A step, observed.
pub(crate) struct Observed {
    pub(crate) metrics: StepMetrics,
    /// Operations of this rank.
    pub(crate) spans: Vec<OpSpan>,
}

impl<'a, D: Device> Observer<'a, D> {
    /// Continues after `steps` steps with `tokens` tokens.
    pub(crate) fn new(rank: &'a Rank<D>, options: &'a RunOptions, steps: u64, tokens: u64) -> Self {
        Self {
            rank,
            options,
            completed: Completed {
                steps,
                tokens,
                end: rank.timeline.now(),
                run_steps: 0,
                step_s: 0.0,
            },
            memory: MemoryRecord::default(),
            update: update_track(rank.comm.rank()),
            host: host_track(rank.comm.rank()).to_string(),
        }
    }

    /// The steps that are done.
    pub(crate) fn completed(&self) -> Completed {
        self.completed
    }

    /// Call it before a step.
    pub(crate) fn begin(&self, moved: Moved) -> Began {
        let start = self.rank.timeline.now();
        let pools = [&self.rank.host.plain, &self.rank.host.pinned];
        pools.iter().for_each(|pool| pool.reset_peaks());
        self.rank.pool.reset_peaks();
        if self.options.log_memory {
            self.rank.pool.record_changes();
        }
        Began {
            start,
            moved,
            held: live(&self.rank.pool.report()),
        }
    }

    /// Call it after a step, whose decision is `outcome`. `staging_bytes` of host memory hold a
    /// checkpoint.
    pub(crate) fn end(
        &mut self,
        began: Began,
        outcome: &StepOutcome,
        moved: Moved,
        staging_bytes: u64,
    ) -> Observed {
        let rank = self.rank;
        let spans = rank.timeline.take();
        let end = rank.timeline.now();
        let wall = self.completed.end..end;
        let (spans, overlap) = self.of_this_rank(spans);
        let breakdown = self
            .options
            .breakdown
            .then(|| Breakdown::of(&spans, &self.tracks(), wall));
        self.memory = MemoryRecord {
            step: began.start..end,
            base: began.held,
            changes: self.memory_changes(),
        };

        let micro_batches = rank.comm.world_size() * rank.settings.grad_accum_steps;
        let tokens = tokens_per_step(rank, self.options);
        let step_ms = end.saturating_sub(began.start).as_secs_f64() * 1e3;
        self.completed.add(tokens, end);
        let left = self.options.steps.saturating_sub(self.completed.steps);

        let metrics = StepMetrics {
            step: self.completed.steps,
            loss: outcome.loss() / micro_batches as f64,
            grad_norm: outcome.grad_norm(),
            lr: outcome.lr(),
            loss_scale: outcome.loss_scale(),
            skipped: outcome.is_skipped(),
            tokens,
            step_ms,
            tokens_per_s: tokens as f64 / step_ms * 1e3,
            comm_bytes: CommBytes::of(moved.sent.since(began.moved.sent)),
            memory: self.memory_bytes(staging_bytes),
            nvme: moved
                .nvme
                .zip(began.moved.nvme)
                .map(|(now, before)| now.since(before)),
            overlap: overlap.into(),
            tokens_seen: self.completed.tokens,
            eta_s: left as f64 * self.completed.step_s,
            breakdown,
            quant_error: None,
            quant_bound: None,
            validation: None,
            sample: None,
        };

        self.warn_if_skipped(outcome, &metrics);
        Observed { metrics, spans }
    }

    /// The memory over the last step, with the operations of that step.
    pub(crate) fn memory_trace(&self, spans: &[OpSpan]) -> MemoryTrace {
        self.memory.trace(spans, self.rank.compute.name())
    }

    fn tracks(&self) -> Tracks<'_> {
        Tracks {
            compute: self.rank.compute.name(),
            update: &self.update,
            comm: self.rank.collective_streams().map(Stream::name).collect(),
            host: &self.host,
        }
    }

    /// The operations of this rank: those of training, then those of checkpoints and evaluations,
    /// then the host's update and its transfers. And how far training's collectives overlap its
    /// compute.
    fn of_this_rank(&self, spans: Vec<OpSpan>) -> (Vec<OpSpan>, Overlap) {
        let tracks = self.tracks();
        let own = format!("rank {} ", self.rank.comm.rank());
        let mut training = Vec::new();
        let mut others = Vec::new();
        let mut of_offload = Vec::new();

        for span in spans {
            let between_steps = matches!(
                Phase::of(&span),
                Some(Phase::Checkpoint | Phase::Validation)
            );
            let track = &*span.stream;
            let is_named =
                [tracks.compute, tracks.host].contains(&track) || tracks.comm.contains(&track);
            if !is_named {
                if span.stream.starts_with(&own) {
                    of_offload.push(span);
                }
            } else if between_steps || *span.stream == *tracks.host {
                others.push(span);
            } else {
                training.push(span);
            }
        }

        let overlap = Overlap::of(&training, &tracks.comm);
        training.extend(others);
        training.extend(of_offload);
        (training, overlap)
    }

    fn memory_changes(&self) -> Vec<(Duration, zero_alloc::Purpose, i64)> {
        let changes = self.rank.pool.take_changes().into_iter();
        changes
            .map(|c| (self.rank.timeline.at(c.at), c.purpose, c.bytes as i64))
            .collect()
    }

    fn memory_bytes(&self, staging_bytes: u64) -> MemoryBytes {
        let Rank { pool, host, .. } = self.rank;
        let on_host = self.rank.is_host();
        MemoryBytes::from(&pool.report())
            .with_host(&[&host.plain, &host.pinned].map(Pool::report), on_host)
            .with_staging(staging_bytes, on_host)
    }

    fn warn_if_skipped(&self, outcome: &StepOutcome, metrics: &StepMetrics) {
        let StepOutcome::Skipped {
            overflow,
            next_loss_scale,
            ..
        } = outcome
        else {
            return;
        };
        if self.rank.comm.rank() == 0 {
            tracing::warn!(
                "step {} skipped: {} gradient elements are not finite (first on rank {}, unit {}); loss scale {} -> {}",
                metrics.step,
                overflow.nonfinite,
                overflow.rank,
                overflow.unit,
                metrics.loss_scale,
                next_loss_scale
            );
        }
    }
}

/// The tokens of all ranks in a step.
pub(crate) fn tokens_per_step<D: Device>(rank: &Rank<D>, options: &RunOptions) -> u64 {
    let [batches, _] = rank.batches();
    let micro_batches = batches * rank.settings.grad_accum_steps;
    (options.micro_batch * options.seq_len * micro_batches) as u64
}
