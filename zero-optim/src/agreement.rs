//! The agreement of ranks on their settings, before the first step.
//!
//! Ranks of different processes read their settings from different command lines and files.
//! Collectives compare counts and dtypes, not learning rates: ranks that differ train on, each
//! updating its shard by its own rules. [`agree`] compares all settings and names the first that
//! differs.
//!
//! ```text
//! all ranks                 whether they could start, and 8 bytes of hash
//! if the hashes differ      the settings of two ranks, or the error of the rank that failed;
//!                           nothing from the others
//! ```
//!
//! Most ranks are right: the *reference* is the lowest rank of the largest group with equal
//! settings, and the error names the lowest rank outside of it. Of two ranks, rank 0 is the
//! reference.

use std::collections::BTreeMap;
use std::fmt::Display;

use thiserror::Error;
use zero_alloc::device::Device;
use zero_kernels::UpdateRule;

use crate::groups::Resolved;
use crate::{OptimizerConfig, ShardedOptimizer};

/// The settings of a rank, in the order in which they are compared: those that others are derived
/// from come first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankSettings {
    settings: Vec<(String, String)>,
}

impl RankSettings {
    /// No settings.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a setting with the name `name`, as text.
    pub fn push(&mut self, name: impl Into<String>, value: impl Display) {
        self.settings.push((name.into(), value.to_string()));
    }

    /// Names and values.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.settings
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.iter()
            .find(|(other, _)| *other == name)
            .map(|(_, value)| value)
    }

    /// A hash of all names and values.
    #[cfg(feature = "framework")]
    pub(crate) fn fingerprint(&self) -> u64 {
        hash(&self.encode())
    }

    /// Each text as its length in 8 bytes and its bytes.
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for text in self.settings.iter().flat_map(|(name, value)| [name, value]) {
            bytes.extend((text.len() as u64).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
        bytes
    }

    /// `None` if `bytes` are not encoded settings.
    fn decode(mut bytes: &[u8]) -> Option<Self> {
        let mut settings = Vec::new();
        while !bytes.is_empty() {
            let name = take_text(&mut bytes)?;
            let value = take_text(&mut bytes)?;
            settings.push((name, value));
        }
        Some(Self { settings })
    }
}

/// Decodes the text at the start of `bytes`, and removes it from them.
fn take_text(bytes: &mut &[u8]) -> Option<String> {
    let (len, rest) = bytes.split_first_chunk::<8>()?;
    let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
    let (text, rest) = rest.split_at_checked(len)?;
    *bytes = rest;
    String::from_utf8(text.to_vec()).ok()
}

impl<N: Into<String>, V: Display> FromIterator<(N, V)> for RankSettings {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(settings: I) -> Self {
        let mut own = Self::new();
        settings
            .into_iter()
            .for_each(|(name, value)| own.push(name, value));
        own
    }
}

/// The first difference between ranks, or the failure of one. All ranks return the same, except for
/// a failed exchange.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum AgreementError {
    /// A setting differs between two ranks.
    #[error(
        "rank {rank} has other settings than rank {reference}: {setting} is {} on rank {rank} and {} on rank {reference}; \
         start all ranks with the same settings and files", value(.got.as_ref()), value(.expected.as_ref())
    )]
    Differs {
        /// The lowest rank outside of the largest group with equal settings.
        rank: usize,
        /// The lowest rank of that group.
        reference: usize,
        /// The first setting that differs.
        setting: String,
        /// Its value on `rank`; `None` if it is not set there.
        got: Option<String>,
        /// Its value on `reference`.
        expected: Option<String>,
    },
    /// A rank could not start.
    #[error("rank {rank}: {message}")]
    Failed {
        /// The lowest rank that failed.
        rank: usize,
        message: String,
    },
    /// A rank sent a message of another kind.
    #[error(
        "rank {rank} did not send its settings: all ranks call `agree`, and run the same version of the program"
    )]
    Unexpected { rank: usize },
    /// The communicator failed.
    #[error("failed to compare the settings of the ranks: {message}")]
    Exchange { message: String },
}

fn value(value: Option<&String>) -> &str {
    value.map_or("not set", String::as_str)
}

/// Characters of an error that the other ranks receive.
const MAX_MESSAGE_CHARS: usize = 2000;

/// The first message of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Summary {
    /// The hash of its settings.
    Settings(u64),
    /// It could not start; the hash of its error.
    Failed(u64),
}

impl Summary {
    const BYTES: usize = 1 + size_of::<u64>();

    fn encode(self) -> [u8; Self::BYTES] {
        let (kind, hash) = match self {
            Self::Settings(hash) => (b'S', hash),
            Self::Failed(hash) => (b'F', hash),
        };
        let mut bytes = [kind; Self::BYTES];
        bytes[1..].copy_from_slice(&hash.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, hash) = bytes.split_first()?;
        let hash = u64::from_le_bytes(hash.try_into().ok()?);
        match kind {
            b'S' => Some(Self::Settings(hash)),
            b'F' => Some(Self::Failed(hash)),
            _ => None,
        }
    }
}

/// Returns an error on all ranks if the settings of two ranks differ. All ranks call it, each with
/// its own `rank`. A rank that could not start passes its error, which the others receive, so that
/// none of them waits. `exchange` sends a message of any length to all ranks and returns the
/// messages of all ranks, in rank order, such as `Communicator::exchange` of zero-comm.
///
/// # Errors
/// See [`AgreementError`].
pub fn agree<E: Display>(
    rank: usize,
    settings: Result<&RankSettings, &dyn Display>,
    mut exchange: impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>,
) -> Result<(), AgreementError> {
    let mut exchange = |message: &[u8]| {
        exchange(message).map_err(|error| AgreementError::Exchange {
            message: error.to_string(),
        })
    };

    let (own, summary) = match settings {
        Ok(settings) => {
            let own = settings.encode();
            let summary = Summary::Settings(hash(&own));
            (own, summary)
        }
        Err(error) => {
            let own: Vec<u8> = error
                .to_string()
                .chars()
                .take(MAX_MESSAGE_CHARS)
                .collect::<String>()
                .into_bytes();
            let summary = Summary::Failed(hash(&own));
            (own, summary)
        }
    };

    let summaries = exchange(&summary.encode())?;
    let decode = |(rank, bytes): (usize, &Vec<u8>)| {
        Summary::decode(bytes).ok_or(AgreementError::Unexpected { rank })
    };
    let summaries = summaries
        .iter()
        .enumerate()
        .map(decode)
        .collect::<Result<Vec<_>, _>>()?;
    let Some(disagreement) = Disagreement::of(&summaries) else {
        return Ok(());
    };

    let messages = exchange(if disagreement.is_between(rank) {
        &own
    } else {
        &[]
    })?;

    Err(disagreement.error(&messages))
}

/// The ranks whose messages the error needs.
#[derive(Clone, Copy, Debug)]
enum Disagreement {
    Failed { rank: usize },
    Differs { rank: usize, reference: usize },
}

impl Disagreement {
    /// `None` if all ranks have the same settings.
    fn of(summaries: &[Summary]) -> Option<Self> {
        if let Some(rank) = summaries
            .iter()
            .position(|summary| matches!(summary, Summary::Failed(_)))
        {
            return Some(Self::Failed { rank });
        }
        let mut sizes = BTreeMap::new();
        for summary in summaries {
            *sizes.entry(summary).or_insert(0_usize) += 1;
        }
        let largest = sizes.values().max()?;
        let reference = summaries
            .iter()
            .position(|summary| sizes[summary] == *largest)?;
        let rank = summaries
            .iter()
            .position(|summary| *summary != summaries[reference])?;
        Some(Self::Differs { rank, reference })
    }

    /// Whether `own` is one of the ranks.
    fn is_between(self, own: usize) -> bool {
        match self {
            Self::Failed { rank } => rank == own,
            Self::Differs { rank, reference } => rank == own || reference == own,
        }
    }

    fn error(self, messages: &[Vec<u8>]) -> AgreementError {
        let message = |rank: usize| messages.get(rank).map_or(&[][..], Vec::as_slice);
        let decoded =
            |rank| RankSettings::decode(message(rank)).ok_or(AgreementError::Unexpected { rank });
        match self {
            Self::Failed { rank } => AgreementError::Failed {
                rank,
                message: String::from_utf8_lossy(message(rank)).into_owned(),
            },
            Self::Differs { rank, reference } => match (decoded(rank), decoded(reference)) {
                (Ok(got), Ok(expected)) => first_difference(rank, &got, reference, &expected),
                (Err(error), _) | (_, Err(error)) => error,
            },
        }
    }
}

/// The first difference of two lists in the same order, of which each may lack settings of the
/// other.
fn first_difference(
    rank: usize,
    got: &RankSettings,
    reference: usize,
    expected: &RankSettings,
) -> AgreementError {
    let same = got
        .iter()
        .zip(expected.iter())
        .take_while(|(got, expected)| got == expected)
        .count();

    let (setting, got, expected) = match (got.iter().nth(same), expected.iter().nth(same)) {
        (Some((name, got)), Some((other, expected))) if name == other => {
            (name, Some(got), Some(expected))
        }
        (Some((name, got)), _) if expected.get(name).is_none() => (name, Some(got), None),
        (_, Some((name, expected))) => (name, got.get(name), Some(expected)),
        (Some((name, got)), None) => (name, Some(got), expected.get(name)),
        (None, None) => return AgreementError::Unexpected { rank },
    };

    AgreementError::Differs {
        rank,
        reference,
        setting: setting.to_owned(),
        got: got.map(str::to_owned),
        expected: expected.map(str::to_owned),
    }
}

/// FNV-1a of 64 bits.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

impl<D: Device> ShardedOptimizer<D> {
    /// The settings that all ranks share: dtype, format and home of the state, hyperparameters,
    /// learning rate and schedule, clipping, loss scale, the rules of groups, the group of each
    /// parameter if [`ParamGroups::assigned`](crate::ParamGroups::assigned) names them, the names
    /// of the units, and the progress. Not the sizes of shards, which may differ between ranks. A
    /// program adds its own: seed, data, micro-batches.
    pub fn settings(&self) -> RankSettings {
        // Why without `..`: a new field does not compile until somebody decides whether ranks must
        // agree on it.
        let Self {
            controller,
            param_dtype,
            format,
            groups,
            names,
            state,
            // This rank's part, its memory, and what the step is in the middle of.
            segments: _,
            device: _,
            kernels: _,
            stats: _,
            stats_scratch: _,
            scalars: _,
            device_steps: _,
            stream: _,
            is_updating: _,
            // Made of the layout and the groups.
            exchange: _,
        } = self;
        let mut settings = RankSettings::new();

        settings.push("param_dtype", param_dtype);
        match state.masters() {
            None => settings.push("masters", "Params"),
            Some(codec) => settings.push("masters", format!("{codec:?}")),
        }
        settings.push("moments", format.moments);
        settings.push("home of the state", state.home());
        let Resolved {
            rules,
            assigned,
            updates,
            // Derived from the rules.
            launch_of: _,
            launch_rules: _,
            rates: _,
            // Of this rank's elements.
            pieces: _,
            state_elems: _,
            settable: _,
            arrays: _,
        } = groups;
        for (nth, update) in updates.iter().enumerate() {
            push_rule(&mut settings, nth, &**update);
        }
        push_config(&mut settings, controller.config());
        settings.push("rules of groups", format!("{rules:?}"));
        if updates.len() > 1 {
            for group in 0..rules.len() {
                let Some(nth) = groups.update_of(group) else {
                    continue;
                };
                let name = format!("update rule of group {group}");
                settings.push(name, format!("{} ({nth})", updates[nth].name()));
            }
        }
        for (name, group) in assigned {
            settings.push(format!("group of {name}"), group);
        }
        settings.push("units", names.len());
        for (unit, name) in names.iter().enumerate() {
            settings.push(format!("name of unit {unit}"), name);
        }
        settings.push("progress", format!("{:?}", self.progress()));

        settings
    }

    /// Returns an error on all ranks if the [`settings`](Self::settings) of two ranks differ. All
    /// ranks call it, each with its own `rank`, after they have loaded their state and before the
    /// first step. `exchange` is as in [`agree`].
    ///
    /// # Errors
    /// See [`AgreementError`].
    pub fn agree<E: Display>(
        &self,
        rank: usize,
        exchange: impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>,
    ) -> Result<(), AgreementError> {
        agree(rank, Ok(&self.settings()), exchange)
    }
}

/// Adds rule `nth` of the groups; the first is the optimizer's own.
fn push_rule(settings: &mut RankSettings, nth: usize, rule: &dyn UpdateRule) {
    let name = |setting: &str| match nth {
        0 => setting.to_owned(),
        _ => format!("{setting} of update rule {nth}"),
    };
    settings.push(name("update rule"), rule.name());
    for (setting, value) in rule.settings() {
        settings.push(name(setting), value);
    }
}

fn push_config(settings: &mut RankSettings, config: &OptimizerConfig) {
    let OptimizerConfig {
        // The rules of the groups have it.
        hyper: _,
        lr,
        schedule,
        max_grad_norm,
        loss_scaling,
        // It does not change the results.
        sub_group_elems: _,
    } = config;
    settings.push("lr", lr);
    settings.push("schedule", format!("{schedule:?}"));
    settings.push("max_grad_norm", max_grad_norm);
    settings.push("loss_scaling", format!("{loss_scaling:?}"));
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, Mutex};

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// Calls `agree` on a thread a rank; returns what each rank returns, which is the same.
    fn agree_on_threads(ranks: &[Result<RankSettings, String>]) -> Result<(), AgreementError> {
        let barrier = Barrier::new(ranks.len());
        let sent = Mutex::new(vec![Vec::new(); ranks.len()]);
        let run = |rank: usize| {
            let own = &ranks[rank];
            agree(
                rank,
                own.as_ref().map_err(|message| message as &dyn Display),
                |message: &[u8]| {
                    sent.lock().unwrap()[rank] = message.to_vec();
                    barrier.wait();
                    let all = sent.lock().unwrap().clone();
                    barrier.wait();
                    Ok::<_, String>(all)
                },
            )
        };

        let results: Vec<_> = std::thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = (0..ranks.len())
                .map(|rank| scope.spawn(move || run(rank)))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });

        assert!(
            results.iter().all(|result| *result == results[0]),
            "{results:?}"
        );
        results[0].clone()
    }

    fn settings(values: &[u8]) -> RankSettings {
        values
            .iter()
            .enumerate()
            .map(|(index, value)| (format!("setting {index}"), value))
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn one_changed_rank_and_its_first_setting_are_named(
            values in vec(0..9u8, 1..6), ranks in 2..6usize, rank in 0..6usize, changed in vec(0..6usize, 1..4),
        ) {
            let rank = rank % ranks;
            let mut other = values.clone();
            for index in &changed {
                other[index % values.len()] = 10;
            }
            let mut all = vec![Ok(settings(&values)); ranks];
            prop_assert_eq!(agree_on_threads(&all), Ok(()));
            all[rank] = Ok(settings(&other));

            let error = agree_on_threads(&all).unwrap_err();
            let first = (0..values.len()).find(|index| values[*index] != other[*index]).unwrap();
            let expected = AgreementError::Differs {
                // Of two ranks, rank 0 is the reference.
                rank: if ranks == 2 { 1 } else { rank },
                reference: usize::from(rank == 0 && ranks > 2),
                setting: format!("setting {first}"),
                got: Some(if ranks == 2 && rank == 0 { values[first] } else { 10 }.to_string()),
                expected: Some(if ranks == 2 && rank == 0 { 10 } else { values[first] }.to_string()),
            };
            prop_assert_eq!(error, expected);
        }

        #[test]
        fn any_bytes_decode_or_are_refused(bytes in vec(any::<u8>(), 0..40)) {
            if let Some(settings) = RankSettings::decode(&bytes) {
                prop_assert_eq!(settings.encode(), bytes);
            }
        }
    }

    #[test]
    fn missing_setting_is_not_set() {
        let error = agree_on_threads(&[Ok(settings(&[1])), Ok(settings(&[1, 2]))]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "rank 1 has other settings than rank 0: setting 1 is 2 on rank 1 and not set on rank 0; start all ranks with the \
             same settings and files"
        );
        let none = agree_on_threads(&[Ok(settings(&[])), Ok(settings(&[7]))]).unwrap_err();
        assert!(
            none.to_string()
                .contains("setting 0 is 7 on rank 1 and not set on rank 0"),
            "{none}"
        );
    }

    #[test]
    fn failure_of_a_rank_reaches_all() {
        let failed = |message: &str| Err(message.to_owned());
        let error = agree_on_threads(&[Ok(settings(&[1])), failed("no data"), failed("no model")])
            .unwrap_err();
        assert_eq!(
            error,
            AgreementError::Failed {
                rank: 1,
                message: "no data".into()
            }
        );
        let all = agree_on_threads(&[failed("no data"), failed("no data")]).unwrap_err();
        assert_eq!(all.to_string(), "rank 0: no data");
    }

    /// However many ranks there are: the settings of two of them, and no other message but the
    /// summaries.
    #[test]
    fn two_ranks_send_their_settings() {
        let own = settings(&[1; 100]);
        let mut sent = Vec::new();
        for rank in 0..5 {
            let mut calls = 0;
            let result = agree(rank, Ok(&own), |message: &[u8]| {
                sent.push((rank, message.len()));
                calls += 1;
                Ok::<_, String>(match calls {
                    1 => (0..5_u64)
                        .map(|r| Summary::Settings(u64::from(r == 3)).encode().to_vec())
                        .collect(),
                    _ => vec![own.encode(); 5],
                })
            });
            assert!(result.is_err());
        }

        let long: Vec<usize> = sent
            .iter()
            .filter(|(_, bytes)| *bytes > Summary::BYTES)
            .map(|(rank, _)| *rank)
            .collect();
        assert_eq!(long, [0, 3]);
    }

    #[test]
    fn other_messages_and_failed_exchanges_are_errors() {
        let own = settings(&[1]);
        let other = agree(0, Ok(&own), |message: &[u8]| {
            Ok::<_, String>(vec![message.to_vec(), b"else".to_vec()])
        });
        assert_eq!(other, Err(AgreementError::Unexpected { rank: 1 }));
        let lost = agree(0, Ok(&own), |_: &[u8]| Err::<Vec<Vec<u8>>, _>("unplugged"));
        assert_eq!(
            lost.unwrap_err().to_string(),
            "failed to compare the settings of the ranks: unplugged"
        );
    }
}
