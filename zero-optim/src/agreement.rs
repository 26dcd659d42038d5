//! The agreement of ranks on their settings, before the first step.
//!
//! Ranks of different processes read their settings from different command lines and files. Collectives compare counts and
//! dtypes, not learning rates: ranks that differ train on, each updating its shard by its own rules. [`agree`] compares all
//! settings and names the first that differs.
//!
//! ```text
//! all ranks                 8 bytes of hash, or the failure of a rank that could not start
//! if the hashes differ      the settings of two ranks, or the message of the rank that failed
//! ```
//!
//! Most ranks are right: the *reference* is the lowest rank of the largest group with equal settings, and the error names the
//! lowest rank outside of it. Of two ranks, rank 0 is the reference.

use std::collections::BTreeMap;
use std::fmt::Display;

use thiserror::Error;
use zero_alloc::device::Device;

use crate::ShardedAdamW;

/// The settings of a rank, in the order in which they are compared: those that others are derived from come first.
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
        self.settings.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(other, _)| *other == name).map(|(_, value)| value)
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
        settings.into_iter().for_each(|(name, value)| own.push(name, value));
        own
    }
}

/// Why the ranks do not agree. All ranks return the same error, except for a failed exchange.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
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
        /// Its error.
        message: String,
    },
    /// A rank sent a message of another kind.
    #[error("rank {rank} did not send its settings: all ranks call `agree`, and run the same version of the program")]
    Unexpected {
        /// The rank.
        rank: usize,
    },
    /// The communicator failed.
    #[error("failed to compare the settings of the ranks: {message}")]
    Exchange {
        /// Its error.
        message: String,
    },
}

fn value(value: Option<&String>) -> &str {
    value.map_or("not set", String::as_str)
}

/// The first bytes of a message.
const AGREES: u8 = b'A';
const FAILED: u8 = b'F';
/// Characters of an error that the other ranks receive.
const MAX_MESSAGE_CHARS: usize = 2000;

/// Returns an error on all ranks if the settings of two ranks differ. All ranks call it. A rank that could not start passes
/// its error, which the others receive, so that none of them waits. `exchange` sends a message of any length to all ranks and
/// returns the messages of all ranks, in rank order, such as `Communicator::exchange` of zero-comm.
///
/// # Errors
/// See [`AgreementError`].
pub fn agree<E: Display>(
    settings: Result<&RankSettings, &dyn Display>,
    mut exchange: impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>,
) -> Result<(), AgreementError> {
    let mut exchange =
        |message: &[u8]| exchange(message).map_err(|error| AgreementError::Exchange { message: error.to_string() });
    let (state, own) = match settings {
        Ok(settings) => (AGREES, settings.encode()),
        Err(error) => (FAILED, error.to_string().chars().take(MAX_MESSAGE_CHARS).collect::<String>().into_bytes()),
    };
    let mut first = vec![state];
    first.extend(hash(&own).to_le_bytes());

    let hashes = exchange(&first)?;
    let unexpected = hashes.iter().position(|sent| sent.len() != first.len() || ![AGREES, FAILED].contains(&sent[0]));
    if let Some(rank) = unexpected {
        return Err(AgreementError::Unexpected { rank });
    }
    if hashes.iter().all(|sent| *sent == first) && state == AGREES {
        return Ok(());
    }

    let dispute = Dispute::of(&hashes);
    let speaks = dispute.speakers().any(|rank| hashes.get(rank) == Some(&first));
    let messages = exchange(if speaks { &own } else { &[] })?;
    Err(dispute.error(&messages))
}

/// The ranks of a disagreement.
enum Dispute {
    Failed { rank: usize },
    Differs { rank: usize, reference: usize },
}

impl Dispute {
    /// `hashes` are the first messages of all ranks, which are not all equal, or of a rank that failed.
    fn of(hashes: &[Vec<u8>]) -> Self {
        if let Some(rank) = hashes.iter().position(|sent| sent[0] == FAILED) {
            return Self::Failed { rank };
        }
        let mut sizes = BTreeMap::<&[u8], usize>::new();
        for sent in hashes {
            *sizes.entry(sent).or_default() += 1;
        }
        let largest = sizes.values().copied().max();
        let reference = hashes.iter().position(|sent| sizes.get(&**sent).copied() == largest).unwrap_or(0);
        let rank = hashes.iter().position(|sent| *sent != hashes[reference]).unwrap_or(reference);
        Self::Differs { rank, reference }
    }

    /// The ranks whose messages decide.
    fn speakers(&self) -> impl Iterator<Item = usize> {
        let (rank, reference) = match *self {
            Self::Failed { rank } => (rank, None),
            Self::Differs { rank, reference } => (rank, Some(reference)),
        };
        [rank].into_iter().chain(reference)
    }

    fn error(&self, messages: &[Vec<u8>]) -> AgreementError {
        let message = |rank: usize| messages.get(rank).map_or(&[][..], Vec::as_slice);
        let decoded = |rank| RankSettings::decode(message(rank)).ok_or(AgreementError::Unexpected { rank });
        match *self {
            Self::Failed { rank } => {
                AgreementError::Failed { rank, message: String::from_utf8_lossy(message(rank)).into_owned() }
            }
            Self::Differs { rank, reference } => match (decoded(rank), decoded(reference)) {
                (Ok(got), Ok(expected)) => first_difference(rank, &got, reference, &expected),
                (Err(error), _) | (_, Err(error)) => error,
            },
        }
    }
}

/// The first difference of two lists in the same order, of which each may lack settings of the other.
fn first_difference(rank: usize, got: &RankSettings, reference: usize, expected: &RankSettings) -> AgreementError {
    let same = got.iter().zip(expected.iter()).take_while(|(got, expected)| got == expected).count();
    let setting = match (got.iter().nth(same), expected.iter().nth(same)) {
        (Some((name, _)), _) if expected.get(name).is_none() => name,
        (_, Some((name, _))) | (Some((name, _)), None) => name,
        (None, None) => return AgreementError::Unexpected { rank },
    };
    AgreementError::Differs {
        rank,
        reference,
        setting: setting.to_owned(),
        got: got.get(setting).map(str::to_owned),
        expected: expected.get(setting).map(str::to_owned),
    }
}

/// FNV-1a of 64 bits.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

impl<D: Device> ShardedAdamW<D> {
    /// The settings that all ranks share: types, hyperparameters, learning rate and schedule, clipping, loss scale, the rules
    /// of groups, the names of the units, and the progress. A program adds its own: seed, data, micro-batches.
    pub fn settings(&self) -> RankSettings {
        let config = self.controller.config();
        let hyper = &config.hyper;
        let mut settings = RankSettings::new();

        settings.push("param_dtype", self.param_dtype);
        settings.push("masters_are_remainders", self.state.has_remainders());
        settings.push("beta1", hyper.beta1);
        settings.push("beta2", hyper.beta2);
        settings.push("eps", hyper.eps);
        settings.push("weight_decay", hyper.weight_decay);
        settings.push("decoupled", hyper.decoupled);
        settings.push("bias_correction", hyper.bias_correction);
        settings.push("lr", config.lr);
        settings.push("schedule", format!("{:?}", config.schedule));
        settings.push("max_grad_norm", config.max_grad_norm);
        settings.push("loss_scaling", format!("{:?}", config.loss_scaling));
        settings.push("rates of groups", format!("{:?}", self.groups.rates));
        settings.push("rules of groups", format!("{:?}", self.groups.launch_rules));
        settings.push("units", self.names.len());
        for (unit, name) in self.names.iter().enumerate() {
            settings.push(format!("name of unit {unit}"), name);
        }
        settings.push("progress", format!("{:?}", self.progress()));
        settings
    }

    /// Returns an error on all ranks if the [`settings`](Self::settings) of two ranks differ. All ranks call it, after they
    /// have loaded their state and before the first step. `exchange` is as in [`agree`].
    ///
    /// # Errors
    /// See [`AgreementError`].
    pub fn agree<E: Display>(
        &self,
        exchange: impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>,
    ) -> Result<(), AgreementError> {
        agree(Ok(&self.settings()), exchange)
    }
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
            agree(own.as_ref().map_err(|message| message as &dyn Display), |message: &[u8]| {
                sent.lock().unwrap()[rank] = message.to_vec();
                barrier.wait();
                let all = sent.lock().unwrap().clone();
                barrier.wait();
                Ok::<_, String>(all)
            })
        };

        let results: Vec<_> = std::thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = (0..ranks.len()).map(|rank| scope.spawn(move || run(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(results.iter().all(|result| *result == results[0]), "{results:?}");
        results[0].clone()
    }

    fn settings(values: &[u8]) -> RankSettings {
        values.iter().enumerate().map(|(index, value)| (format!("setting {index}"), value)).collect()
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
        assert!(none.to_string().contains("setting 0 is 7 on rank 1 and not set on rank 0"), "{none}");
    }

    #[test]
    fn failure_of_a_rank_reaches_all() {
        let failed = |message: &str| Err(message.to_owned());
        let error = agree_on_threads(&[Ok(settings(&[1])), failed("no data"), failed("no model")]).unwrap_err();
        assert_eq!(error, AgreementError::Failed { rank: 1, message: "no data".into() });
        let all = agree_on_threads(&[failed("no data"), failed("no data")]).unwrap_err();
        assert_eq!(all.to_string(), "rank 0: no data");
    }

    #[test]
    fn other_messages_and_failed_exchanges_are_errors() {
        let own = settings(&[1]);
        let other = agree(Ok(&own), |message: &[u8]| Ok::<_, String>(vec![message.to_vec(), b"else".to_vec()]));
        assert_eq!(other, Err(AgreementError::Unexpected { rank: 1 }));
        let lost = agree(Ok(&own), |_: &[u8]| Err::<Vec<Vec<u8>>, _>("unplugged"));
        assert_eq!(lost.unwrap_err().to_string(), "failed to compare the settings of the ranks: unplugged");
    }
}
