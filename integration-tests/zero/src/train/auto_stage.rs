//! `--stage auto`: the stage that a plan of the run recommends.
//!
//! Ranks that are processes choose for themselves, so the choice depends only on what they have in
//! common: their settings, and the total memory of a GPU or of the machine. Where cards differ so
//! much that the choice does, the agreement of the ranks names the stages.

use zero_shard::ZeroStage;
use zero_trainer::RankBytes;

use super::choices::ChosenModel;
use super::launched::{host_threads, launched_ranks, node_ranks};
use super::parts::{Gpu, Sizes, model_options, run_settings};
use crate::error::CliError;
use crate::memory::{self, rank_overhead_bytes};
use crate::output::{bytes, counted};
use crate::plan::{self, CONTEXT_BYTES, Stage};
use crate::settings::args::TrainArgs;
use crate::settings::mesh::Shares;
use crate::settings::sources::RunSources;
use crate::settings::stage_choice::StageChoice;

/// The chosen stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AutoStage {
    pub(super) stage: StageChoice,
    /// For the user.
    pub(super) why: String,
}

/// The memory of a rank.
struct RankMemory {
    bytes: u64,
    name: String,
}

impl RankMemory {
    fn of(args: &TrainArgs, ranks: usize, device: Option<&Gpu>) -> Result<Self, CliError> {
        if let Some(gpu) = device {
            return Ok(Self {
                bytes: gpu.memory_bytes.saturating_sub(CONTEXT_BYTES),
                name: format!(
                    "{} of the GPU less {} for the CUDA context",
                    bytes(gpu.memory_bytes),
                    bytes(CONTEXT_BYTES)
                ),
            });
        }

        let over = |all: u64, what: &str, sharers: usize| Self {
            bytes: all / sharers as u64,
            name: format!(
                "{} of {what} over {}",
                bytes(all),
                counted(sharers as u64, "rank")
            ),
        };
        let is_launched = launched_ranks(args)? > 1;
        let machine = match is_launched {
            // The free memory differs from process to process.
            true => {
                let sharers = node_ranks(args, ranks, None)?.unwrap_or(ranks);
                over(memory::total_bytes().unwrap_or(u64::MAX), "memory", sharers)
            }
            false => over(
                memory::free_bytes().unwrap_or(u64::MAX),
                "free memory",
                ranks,
            ),
        };
        let own_ranks = if is_launched { 1 } else { ranks };
        let limit = args.memory_limit;
        let limit = limit.map(|limit| over(limit, "--memory-limit", own_ranks));
        Ok(match limit {
            Some(limit) if limit.bytes < machine.bytes => limit,
            _ => machine,
        })
    }
}

/// The stage of a run that chooses it; `None` of another run.
///
/// # Errors
/// No stage fits, or flags that no stage can follow.
pub(super) fn choose(
    from: &RunSources<'_>,
    ranks: usize,
    device: Option<&Gpu>,
) -> Result<Option<AutoStage>, CliError> {
    if !from.has_auto_stage() {
        return Ok(None);
    }
    let memory = RankMemory::of(from.args, ranks, device)?;
    let shares = Shares::new(&from.sources(), ranks)?;
    // Its notes are those of the run, which follow.
    let model = ChosenModel::find(from.args, None, ranks, shares.tensor, &mut Vec::new())?;
    let sizes = Sizes::new(from, &model, ranks / shares.ranks_of_batch())?;

    let mut stages = Vec::new();
    let mut refusal = None;
    for stage in ZeroStage::ALL {
        let planned = Planned {
            from,
            model: &model,
            sizes: &sizes,
            ranks,
            device,
            memory: &memory,
        };
        match planned.at(stage) {
            Ok(figures) => stages.push(figures),
            // The other flags need another stage.
            Err(error) => refusal = Some(error),
        }
    }

    let name = match from.args.stage {
        Some(_) => "--stage auto",
        None => "zero_optimization.stage \"auto\"",
    };
    match (plan::recommended(&stages), stages.last(), refusal) {
        (Some(number), _, _) => Ok(Some(AutoStage {
            stage: StageChoice::Number(number.into()),
            why: why(name, number, &stages, &memory),
        })),
        (None, Some(last), _) => Err(usage!(
            "{name}: no stage fits {} ({}): stage {} needs {}; try --offload cpu, more --ranks, or a smaller --micro-batch, \
             --seq-len or --model; zero plan shows what the memory goes to",
            bytes(memory.bytes),
            memory.name,
            last.stage,
            bytes(last.gpu.total_bytes)
        )),
        (None, None, Some(refusal)) => Err(refusal),
        (None, None, None) => Err(usage!("{name}: no stage can be planned")),
    }
}

/// The chosen stage and the reason, for the user.
fn why(name: &str, number: u8, stages: &[Stage], memory: &RankMemory) -> String {
    let listed = |fits: bool| {
        let stages = stages.iter().filter(|stage| stage.fits == Some(fits));
        let numbers = stages.map(|stage| stage.stage.to_string());
        numbers.collect::<Vec<_>>().join(", ")
    };
    let fitting = listed(true);
    let reason = match fitting.contains(',') {
        true => format!("of the stages that fit ({fitting}) it sends the least"),
        false => "no other stage fits".to_owned(),
    };
    let mut text = format!("{name} is stage {number}: {reason}");
    if let Some(chosen) = stages.iter().find(|stage| stage.stage == number) {
        text += &format!(
            "; a rank sends {} in a step and needs {} of {} ({})",
            bytes(chosen.sent.total_bytes),
            bytes(chosen.gpu.total_bytes),
            bytes(memory.bytes),
            memory.name
        );
    }
    let others = listed(false);
    if !others.is_empty() {
        text += &format!("; too large: {others}");
    }
    text
}

/// A run whose stages are planned.
struct Planned<'a> {
    from: &'a RunSources<'a>,
    model: &'a ChosenModel,
    sizes: &'a Sizes,
    ranks: usize,
    device: Option<&'a Gpu>,
    memory: &'a RankMemory,
}

impl Planned<'_> {
    /// The plan of the run at `stage`, with all its settings.
    fn at(&self, stage: ZeroStage) -> Result<Stage, CliError> {
        let args = TrainArgs {
            stage: Some(StageChoice::Number(stage.number().into())),
            ..self.from.args.clone()
        };
        let from = RunSources {
            args: &args,
            ..*self.from
        };
        let on_gpus = self.device.is_some();
        let run = from.conditions(self.ranks, stage, on_gpus);
        let (model, ranks) = (self.model, self.ranks);
        let mut settings = run_settings(&from, None, model, &run, &mut Vec::new())?;
        settings.grad_accum_steps = self.sizes.grad_accum();
        let options = model_options(&from, model, self.sizes, &settings, on_gpus)?;
        let request =
            plan::PlanRequest::of_run(&model.config, &options, &settings, ranks, self.memory.bytes);
        let mut figures = plan::evaluate(&request, stage).map_err(CliError::usage)?;
        if on_gpus {
            return Ok(figures);
        }

        // On the host as before its start; see `memory::check`.
        let saves = !args.no_checkpoint;
        let activations = model.config.activations_bytes(&options);
        let passes = model.config.passes();
        let need = RankBytes::new(
            &settings,
            &model.layout,
            &passes,
            activations,
            saves,
            |param| model.config.tensor_cut(param),
        );
        let need = need.map_or(u64::MAX, |need| need.total());
        let threads = host_threads(&args, ranks);
        let need = need.saturating_add(rank_overhead_bytes(threads as u64));
        figures.gpu.total_bytes = need;
        figures.fits = Some(need <= self.memory.bytes);
        Ok(figures)
    }
}
