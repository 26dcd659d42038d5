//! The agreement of the ranks in a save: every rank's record goes to rank 0, which publishes and broadcasts the outcome.
//!
//! A record has a fixed length: rank 0 knows the pieces and states of every rank from the layout and from its own file,
//! and a record has their checksum. The message of a failed rank is broadcast by that rank itself.

use serde::{Deserialize, Serialize};
use zero_shard::Layout;

use crate::exchange::{Exchange, MESSAGE_BYTES, Message, RECORD_BYTES, broadcast, shorten};
use crate::format::blocks::{checksum, shard_pieces};
use crate::format::catalog::step_name;
use crate::{CkptError, Piece, SaveMeta, StateSpec, Store};

/// A rank's staged file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StagedFile {
    /// The rank that staged it.
    pub rank: u64,
    /// Step of the save.
    pub step: u64,
    /// Name of the file in the staging directory.
    pub file: String,
    /// Its length.
    pub bytes: u64,
    /// Checksum of its header and table.
    pub front_crc64: u64,
    /// The states in it.
    pub states: Vec<StateSpec>,
    /// The elements in it, of each state.
    pub pieces: Vec<Piece>,
}

/// The record of a published checkpoint, equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct PublishedCheckpoint {
    /// Its name in the directory: `step-00000030`.
    pub name: String,
    /// Its step.
    pub step: u64,
    /// The number of the save in this directory.
    pub sequence: u64,
    /// Bytes of all shard files.
    pub bytes: u64,
    /// The name of the checkpoint that `best` names.
    pub best: Option<String>,
    /// Failures that do not affect the checkpoint, such as in removing an old one.
    pub notices: Vec<String>,
}

impl PublishedCheckpoint {
    /// Removes notices until the record fits a message.
    fn fit(mut self) -> Self {
        while serde_json::to_vec(&self).is_ok_and(|json| json.len() + 16 > MESSAGE_BYTES) && !self.notices.is_empty()
        {
            self.notices.pop();
        }
        self
    }
}

/// A rank's part in the second exchange of a save.
pub(crate) enum Outcome {
    /// Rank 0: the result of the publication.
    Published(Result<PublishedCheckpoint, CkptError>),
    /// Another rank: the error of its staging, if that failed.
    Staged(Option<CkptError>),
}

impl Store {
    /// The second half of [`Store::save`]: sends the records of the staged files to rank 0, which publishes, and
    /// distributes the outcome. A rank that could not stage its file passes its error as `staged`, so that all ranks
    /// receive it and no rank waits.
    ///
    /// # Errors
    /// As [`Store::save`].
    pub fn finish(
        &self,
        meta: &SaveMeta,
        layout: &Layout,
        staged: Result<StagedFile, CkptError>,
        exchange: &mut impl Exchange,
    ) -> Result<PublishedCheckpoint, CkptError> {
        let all = self.share_staged(layout, &staged, exchange)?;
        let outcome = match all {
            Some(all) => Outcome::Published(self.publish(meta, layout, all)),
            None => Outcome::Staged(staged.err()),
        };
        self.share_outcome(outcome, exchange)
    }

    /// The first exchange: returns the staged files of all ranks, in rank order, on rank 0. A rank that failed is
    /// [`CkptError::Rank`] without a message there.
    pub(crate) fn share_staged(
        &self,
        layout: &Layout,
        staged: &Result<StagedFile, CkptError>,
        exchange: &mut impl Exchange,
    ) -> Result<Option<Vec<Result<StagedFile, CkptError>>>, CkptError> {
        let discard = |_: &CkptError| staged.iter().for_each(|file| self.discard(file));
        let gathered = exchange.gather(&to_record(self.rank(), staged.as_ref().ok()));
        let gathered = gathered.map_err(|e| CkptError::Exchange { message: e.to_string() }).inspect_err(discard)?;
        if self.rank() > 0 {
            return Ok(None);
        }
        let (records, rest) = gathered.as_chunks::<RECORD_BYTES>();
        if records.len() as u64 != layout.world_size() || !rest.is_empty() {
            let expected = layout.world_size().saturating_mul(RECORD_BYTES as u64);
            return Err(CkptError::argument("bytes of the gathered records", expected, gathered.len()))
                .inspect_err(discard);
        }
        let own = staged.as_ref().ok().map(|file| file.states.as_slice());
        let read = |(rank, record): (usize, &[u8; RECORD_BYTES])| match rank {
            0 => match staged {
                Ok(file) => Ok(file.clone()),
                Err(error) => Err(CkptError::Rank { rank: 0, message: shorten(&error.to_string()) }),
            },
            rank => {
                let (file, crc64) = from_record(record, rank as u64)?;
                let Some(states) = own else { return Ok(file) };
                let pieces = shard_pieces(layout, rank as u64)?;
                if content_checksum(states, &pieces) != crc64 {
                    self.discard(&file);
                    let why = format!("rank {rank} saved other states, or another layout, than rank 0");
                    return Err(CkptError::Mismatch { why });
                }
                Ok(StagedFile { states: states.to_vec(), pieces, ..file })
            }
        };
        Ok(Some(records.iter().enumerate().map(read).collect()))
    }

    /// The second exchange: returns rank 0's outcome on every rank.
    pub(crate) fn share_outcome(
        &self,
        outcome: Outcome,
        exchange: &mut impl Exchange,
    ) -> Result<PublishedCheckpoint, CkptError> {
        let (message, failure) = match outcome {
            Outcome::Published(Ok(published)) => (Message::Done(published.fit()), None),
            Outcome::Published(Err(CkptError::Rank { rank, message })) if message.is_empty() => {
                (Message::Failed(rank), None)
            }
            Outcome::Published(Err(error)) => (Message::error(&error), Some(error)),
            Outcome::Staged(failure) => (Message::Pending, failure),
        };
        match broadcast(&message, 0, exchange)? {
            Message::Done(published) => Ok(published),
            // On rank 0 it is the error itself; in the message of another rank's failure its rank is named already.
            Message::Error(message) => {
                Err(failure.filter(|_| self.rank() == 0).unwrap_or_else(|| rank_error(message)))
            }
            Message::Failed(rank) => {
                let own = failure.filter(|_| self.rank() == rank).as_ref().map(Message::error);
                let own = own.unwrap_or_else(|| Message::<()>::Error("no error message".into()));
                match broadcast(&own, rank, exchange)? {
                    Message::Error(message) => Err(CkptError::Rank { rank, message }),
                    _ => Err(CkptError::BadFrame { rank, why: "it is no error".into() }),
                }
            }
            Message::Pending => Err(CkptError::BadFrame { rank: 0, why: "it has no outcome".into() }),
        }
    }
}

/// The first word of a record.
const STAGED: u64 = u64::from_le_bytes(*b"zckpt ok");
const FAILED: u64 = u64::from_le_bytes(*b"zckpt no");

/// The name of a staged file.
pub(crate) fn staged_name(step: u64, rank: u64, random: u64) -> String {
    format!("{}.rank-{rank:05}.{random:016x}", step_name(step))
}

/// Checksum of the states and pieces of a file.
fn content_checksum(states: &[StateSpec], pieces: &[Piece]) -> u64 {
    checksum(&serde_json::to_vec(&(states, pieces)).unwrap_or_default())
}

/// Encodes the record of a rank: eight little-endian numbers of 64 bits. `None` if the rank failed.
fn to_record(rank: u64, staged: Option<&StagedFile>) -> [u8; RECORD_BYTES] {
    let random = |file: &StagedFile| {
        let digits = file.file.rsplit('.').next().unwrap_or_default();
        u64::from_str_radix(digits, 16).unwrap_or_default()
    };
    let words = match staged {
        Some(file) => {
            let content = content_checksum(&file.states, &file.pieces);
            [STAGED, rank, file.step, random(file), file.bytes, file.front_crc64, content, 0]
        }
        None => [FAILED, rank, 0, 0, 0, 0, 0, 0],
    };
    let mut record = [0; RECORD_BYTES];
    record.as_chunks_mut::<8>().0.iter_mut().zip(words).for_each(|(to, word)| *to = word.to_le_bytes());
    record
}

/// Decodes the record of `rank`: its file, without states and pieces, and their checksum.
fn from_record(record: &[u8; RECORD_BYTES], rank: u64) -> Result<(StagedFile, u64), CkptError> {
    let bad = |why: String| CkptError::BadFrame { rank, why };
    let mut words = record.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
    let mut next = || words.next().unwrap_or_default();
    let (kind, named) = (next(), next());
    if ![STAGED, FAILED].contains(&kind) {
        return Err(bad("it is no record of a staged file".into()));
    }
    if named != rank {
        return Err(bad(format!("it names rank {named}")));
    }
    if kind == FAILED {
        return Err(CkptError::Rank { rank, message: String::new() });
    }
    let (step, random) = (next(), next());
    let file = StagedFile {
        rank,
        step,
        file: staged_name(step, rank, random),
        bytes: next(),
        front_crc64: next(),
        states: Vec::new(),
        pieces: Vec::new(),
    };
    Ok((file, next()))
}

/// Parses an error that rank 0 forwarded: "rank 2: no space" becomes an error of rank 2.
fn rank_error(message: String) -> CkptError {
    let rank = message.strip_prefix("rank ").and_then(|m| m.split_once(": "));
    match rank.and_then(|(r, rest)| Some((r.parse().ok()?, rest))) {
        Some((rank, rest)) => CkptError::Rank { rank, message: rest.into() },
        None => CkptError::Rank { rank: 0, message },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateDtype;

    #[test]
    fn record_round_trips() {
        let staged = StagedFile {
            rank: 3,
            step: u64::MAX,
            file: staged_name(u64::MAX, 3, 0xdead_beef),
            bytes: 1,
            front_crc64: 7,
            states: vec![StateSpec { name: "master".into(), dtype: StateDtype::F32 }],
            pieces: vec![Piece(u64::MAX, u64::MAX - 1, u64::MAX); 3],
        };
        let record = to_record(3, Some(&staged));
        let (read, content) = from_record(&record, 3).unwrap();
        assert_eq!(content, content_checksum(&staged.states, &staged.pieces));
        assert_eq!(read, StagedFile { states: vec![], pieces: vec![], ..staged });
        assert!(matches!(from_record(&record, 2), Err(CkptError::BadFrame { rank: 2, .. })));
        assert!(matches!(from_record(&[0; RECORD_BYTES], 3), Err(CkptError::BadFrame { .. })));
        let failed = from_record(&to_record(3, None), 3);
        assert!(matches!(failed, Err(CkptError::Rank { rank: 3, message }) if message.is_empty()));
    }

    #[test]
    fn record_of_any_save_fits_a_message() {
        let notice = shorten(&"\u{1}".repeat(5000));
        let published = PublishedCheckpoint {
            name: step_name(u64::MAX),
            step: u64::MAX,
            sequence: u64::MAX,
            bytes: u64::MAX,
            best: Some(step_name(u64::MAX)),
            notices: vec![notice; 3],
        };
        let shared = broadcast(&Message::Done(published.fit()), 0, &mut crate::SingleRank);
        assert!(matches!(shared, Ok(Message::Done(shared)) if shared.step == u64::MAX));
    }

    #[test]
    fn forwarded_error_keeps_its_rank() {
        assert_eq!(rank_error("rank 2: no space: a: b".into()).to_string(), "rank 2: no space: a: b");
        assert_eq!(rank_error("cannot sync /x".into()).to_string(), "rank 0: cannot sync /x");
        assert_eq!(rank_error("rank two: odd".into()).to_string(), "rank 0: rank two: odd");
    }
}
