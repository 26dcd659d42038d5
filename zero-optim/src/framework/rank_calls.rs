//! The calls in which ranks exchange messages, and what ranks compare in them.
//!
//! Every message begins with its call, so ranks that are in different calls have an error that
//! names them, whatever else the messages are.

use std::fmt::Display;

use zero_kernels::RankStats;
use zero_shard::Layout;

use crate::GroupRules;
use crate::{AgreementError, RankSettings, agree};

use super::FrameworkError;

/// A call of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Build,
    End,
    EndValidation,
    Save,
    Resume,
}

impl Call {
    const ALL: [Self; 5] = [
        Self::Build,
        Self::End,
        Self::EndValidation,
        Self::Save,
        Self::Resume,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Build => "Builder::build",
            Self::End => "Step::end",
            Self::EndValidation => "Step::end_validation",
            Self::Save => "Zero::save",
            Self::Resume => "Zero::resume",
        }
    }

    /// Sends `message` to all ranks, which are in the same call, and returns those of all ranks.
    pub(super) fn exchange<E>(
        self,
        message: &[u8],
        exchange: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>, E>,
    ) -> Result<Vec<Vec<u8>>, FrameworkError>
    where
        FrameworkError: From<E>,
    {
        let mut tagged = vec![self as u8];
        tagged.extend(message);
        let mut messages = exchange(&tagged)?;

        let name_of = |message: &[u8]| {
            let tag = message.first();
            let call = Self::ALL.iter().find(|call| Some(&(**call as u8)) == tag);
            call.map_or("a call of another version", |call| call.name())
        };
        let calls: Vec<_> = messages.iter().map(|message| name_of(message)).collect();
        if let Some(rank) = calls.iter().position(|call| *call != calls[0]) {
            return Err(FrameworkError::OtherCall {
                rank,
                call: calls[rank],
                expected: calls[0],
            });
        }
        for message in &mut messages {
            message.drain(..1);
        }
        Ok(messages)
    }

    /// Returns an error on all ranks if the settings of two ranks differ.
    pub(super) fn compare<E: Display>(
        self,
        rank: usize,
        settings: &RankSettings,
        exchange: impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>,
    ) -> Result<(), FrameworkError> {
        agree(rank, Ok(settings), exchange).map_err(|error| match error {
            AgreementError::Differs {
                rank,
                reference,
                setting,
                got,
                expected,
            } => FrameworkError::Differs {
                call: self.name(),
                rank,
                reference,
                what: setting,
                got: shorten(got),
                expected: shorten(expected),
            },
            error => FrameworkError::Agreement(error),
        })
    }
}

/// The start of a value.
fn shorten(value: Option<String>) -> String {
    const MAX_CHARS: usize = 200;
    let value = value.unwrap_or_else(|| "missing".to_owned());
    match value.char_indices().nth(MAX_CHARS) {
        None => value,
        Some((end, _)) => format!("{}...", &value[..end]),
    }
}

/// The losses of a step's micro-batches so far.
#[derive(Clone, Copy, Debug)]
pub(super) enum Losses {
    /// Means, of which each micro-batch of each rank counts the same.
    Means(f64),
    /// Sums, which the sum of all weights divides.
    Sums { loss: f64, weight: f64 },
}

impl Losses {
    /// The losses with those of the next micro-batch.
    pub(super) fn and(self, next: Self) -> Result<Self, FrameworkError> {
        match (self, next) {
            (Self::Means(loss), Self::Means(next)) => Ok(Self::Means(loss + next)),
            (
                Self::Sums { loss, weight },
                Self::Sums {
                    loss: next,
                    weight: of_next,
                },
            ) => Ok(Self::Sums {
                loss: loss + next,
                weight: weight + of_next,
            }),
            _ => Err(FrameworkError::MixedLosses),
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Means(_) => "means (Step::end)",
            Self::Sums { .. } => "sums with weights (Step::end_of)",
        }
    }

    pub(super) const fn loss(self) -> f64 {
        match self {
            Self::Means(loss) | Self::Sums { loss, .. } => loss,
        }
    }
}

/// A rank's message at the end of a step.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct EndOfStep {
    /// The statistics of its gradients; the loss is not divided yet.
    pub(super) stats: RankStats,
    /// The weight of its losses; 0 for means.
    pub(super) weight: f64,
    /// Equal on all ranks, like the rest.
    is_weighted: u64,
    run: u64,
    order: u64,
    lr: u64,
    groups: u64,
    micro_batches: u64,
}

/// Adds a number to a hash.
const fn hashed(hash: u64, number: u64) -> u64 {
    const PRIME: u64 = 0x0100_0000_01b3; // of FNV-1a
    (hash ^ number).wrapping_mul(PRIME)
}

/// Settings of a step that are equal on all ranks, like the order of units.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepSettings<'a> {
    pub(super) lr: f64,
    pub(super) groups: &'a [GroupRules],
    pub(super) micro_batches: usize,
}

impl EndOfStep {
    pub(super) fn new(
        stats: RankStats,
        losses: Losses,
        step: StepSettings<'_>,
        uses: &Uses,
    ) -> Self {
        let (weight, is_weighted) = match losses {
            Losses::Means(_) => (0.0, 0),
            Losses::Sums { weight, .. } => (weight, 1),
        };
        Self {
            stats,
            weight,
            is_weighted,
            run: uses.run,
            order: uses.hash,
            lr: step.lr.to_bits(),
            groups: step.groups.iter().fold(0, |all, rules| {
                let decay = rules.weight_decay.map_or(u64::MAX, f64::to_bits);
                hashed(hashed(all, rules.lr_scale.to_bits()), decay)
            }),
            micro_batches: step.micro_batches as u64,
        }
    }

    /// The messages of all ranks.
    pub(super) fn decode(messages: &[Vec<u8>]) -> Result<Vec<Self>, FrameworkError> {
        let decode = |(rank, message): (usize, &Vec<u8>)| {
            let decoded = bytemuck::try_pod_read_unaligned(message);
            decoded.map_err(|_| FrameworkError::OtherCall {
                rank,
                call: "a call of another version",
                expected: Call::End.name(),
            })
        };
        messages.iter().enumerate().map(decode).collect()
    }

    /// Whether the ranks have in common what they must.
    pub(super) fn agree(all: &[Self]) -> bool {
        let Some(first) = all.first() else {
            return true;
        };
        // Without `..`: a new field is compared, or named here.
        all.iter().all(|other| {
            let Self {
                stats: _,
                weight: _,
                is_weighted,
                run,
                order,
                lr,
                groups,
                micro_batches,
            } = *other;
            is_weighted == first.is_weighted
                && run == first.run
                && order == first.order
                && lr == first.lr
                && groups == first.groups
                && micro_batches == first.micro_batches
        })
    }
}

/// A gather or a reduction of a unit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    pub(super) is_gather: bool,
    pub(super) unit: usize,
}

/// The gathers and reductions of units, in order: two ranks that use units of equal lengths in
/// different orders have no other sign of it.
#[derive(Debug, Default)]
pub(super) struct Uses {
    /// The fingerprint of the run's settings: ranks may have several runs on one communicator.
    run: u64,
    of_step: Vec<Use>,
    /// A hash of all, also those of earlier steps: some steps end without an exchange.
    hash: u64,
}

impl Uses {
    pub(super) fn new(run: &RankSettings) -> Self {
        Self {
            run: run.fingerprint(),
            ..Self::default()
        }
    }

    pub(super) fn begin_step(&mut self) {
        self.of_step.clear();
    }

    pub(super) fn push(&mut self, used: Use) {
        let number = 2 * used.unit as u64 + u64::from(used.is_gather) + 1;
        self.hash = hashed(self.hash, number);
        self.of_step.push(used);
    }

    /// Adds what all ranks have in common, also if some had steps without uses since.
    pub(super) fn push_to(&self, settings: &mut RankSettings) {
        settings.push("the hash of the run's settings", self.run);
        settings.push("the order of gathers and reductions so far", self.hash);
    }
}

/// The values that are equal on all ranks at the end of a step, in words.
pub(super) fn of_step(
    losses: Losses,
    step: StepSettings<'_>,
    uses: &Uses,
    layout: &Layout,
) -> RankSettings {
    let mut settings = RankSettings::new();
    settings.push("the kind of losses", losses.name());
    settings.push("the learning rate", step.lr);
    for (group, rules) in step.groups.iter().enumerate() {
        let rates = format!("{} and {:?}", rules.lr_scale, rules.weight_decay);
        settings.push(
            format!("learning rate's factor and weight decay of group {group}"),
            rates,
        );
    }
    settings.push("the number of micro-batches", step.micro_batches);
    for (at, used) in uses.of_step.iter().enumerate() {
        let unit = &layout.units()[used.unit].name;
        let what = match used.is_gather {
            true => "gather",
            false => "reduction",
        };
        let name = format!("use {} of units in the step", at + 1);
        settings.push(name, format_args!("the {what} of {unit}"));
    }
    uses.push_to(&mut settings);
    settings
}
