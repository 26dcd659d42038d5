//! The agreement of the ranks in a save: every rank's record goes to rank 0, which publishes and
//! broadcasts the outcome.
//!
//! ```text
//! all ranks    gather: "staged", "failed", or "staging, N bytes so far"
//! rank 0       broadcast, as long as a rank stages: "gather again"
//!              broadcast, as long as it publishes: "pending"
//!              broadcast the outcome; a failed rank broadcasts its error
//! ```
//!
//! So no rank waits for a message for longer than the interval of [`Watch::period`], however long
//! the disks take. Rank 0 ends the save if a rank makes no progress for
//! [`StoreOptions::stall_limit`](crate::StoreOptions); a process that is stopped or dead is found
//! by the communicator's own limit.
//!
//! A record has a fixed length: rank 0 knows the pieces and states of every rank from the layout
//! and from its own file, and a record has their checksum. The message of a failed rank is
//! broadcast by that rank itself.
//!
//! Why records and not descriptions: a save sends 64 bytes a rank to rank 0 and 4,096 bytes back.
//! Gathers of whole descriptions took 51 MB each at 4,096 ranks and 100 units.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use zero_shard::Layout;

use super::job::{Job, Watch};
use super::staged_name::{Kind, SaveId, StagedName};
use crate::exchange::{Exchange, MESSAGE_BYTES, Message, RECORD_BYTES, broadcast};
use crate::format::blocks::{checksum, shard_pieces};
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
    pub(crate) save: SaveId,
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
    /// Failures in removing old checkpoints after earlier saves, and other notices; see
    /// [`Store::take_notices`]. They affect no checkpoint.
    pub notices: Vec<String>,
}

impl PublishedCheckpoint {
    /// Removes notices until the record fits a message.
    fn fit(mut self) -> Self {
        while serde_json::to_vec(&self).is_ok_and(|json| json.len() + 16 > MESSAGE_BYTES)
            && !self.notices.is_empty()
        {
            self.notices.pop();
        }
        self
    }
}

/// A published checkpoint, and the saves that it supersedes on each rank.
pub(crate) struct Publication {
    pub(crate) checkpoint: PublishedCheckpoint,
    /// The name of the checkpoint of [`SaveMeta::superseded`].
    pub(crate) superseded: Option<String>,
    /// The number of this save in each session of a rank; one session if [`Store::create_on_ranks`]
    /// opened the stores.
    pub(crate) numbers: BTreeMap<u64, u32>,
}

type Staged = Result<StagedFile, CkptError>;

/// A rank's publication, on a thread.
pub(crate) type Publishing = Job<Result<Publication, CkptError>>;

/// A save in progress on this rank.
pub(crate) struct Save {
    step: u64,
    staging: Job<Staged>,
    /// The result of the staging, once that has ended.
    staged: Option<Staged>,
    phase: Phase,
    watch: Watch,
}

enum Phase {
    /// This rank has sent no record.
    Staging,
    /// Rank 0: another rank stages; all gather again.
    Gathering,
    /// Rank 0: a thread publishes.
    Publishing(Publishing),
    /// Other ranks: the next message is rank 0's.
    Following,
}

/// The records of a gather, on rank 0.
enum Gathered {
    /// No rank stages any longer.
    All(Vec<Staged>),
    /// The progress of each rank that still stages.
    Staging(Vec<(usize, u64)>),
}

impl Save {
    pub(crate) fn new(store: &Store, step: u64, staging: Job<Staged>) -> Self {
        Self {
            step,
            staging,
            staged: None,
            phase: Phase::Staging,
            watch: Watch::new(store.stall_limit()),
        }
    }

    /// Whether [`Save::advance`] would not wait for a thread of this rank.
    pub(crate) fn is_ready(&self) -> bool {
        match &self.phase {
            Phase::Staging | Phase::Gathering => self.staged.is_some() || self.staging.has_ended(),
            Phase::Publishing(job) => job.has_ended(),
            Phase::Following => true,
        }
    }

    /// The first call sends this rank's record and returns `None`; rank 0 then calls `publish`,
    /// which starts the publication, if all ranks have staged. The second ends with the outcome.
    pub(crate) fn advance(
        &mut self,
        store: &Store,
        layout: &Layout,
        exchange: &mut impl Exchange,
        publish: &mut dyn FnMut(Vec<Staged>) -> Publishing,
    ) -> Result<Option<PublishedCheckpoint>, CkptError> {
        let result = match self.phase {
            Phase::Staging => self.gather(store, layout, exchange, publish).map(|()| None),
            _ => self.agree(store, layout, exchange, publish).map(Some),
        };
        result.map_err(|error| self.keep(store, error))
    }

    /// Calls [`Save::advance`] until there is an outcome.
    pub(crate) fn complete(
        &mut self,
        store: &Store,
        layout: &Layout,
        exchange: &mut impl Exchange,
        publish: &mut dyn FnMut(Vec<Staged>) -> Publishing,
    ) -> Result<PublishedCheckpoint, CkptError> {
        loop {
            if let Some(published) = self.advance(store, layout, exchange, publish)? {
                return Ok(published);
            }
        }
    }

    /// Waits for the threads of this rank while they make progress.
    pub(crate) fn wait_for_threads(&mut self, store: &Store) {
        if self.staged.is_none()
            && self
                .staging
                .wait_while_progressing(store.stall_limit(), || store.progress())
        {
            self.staged = Some(self.staging.take().and_then(|staged| staged));
        }
        if let Phase::Publishing(job) = &self.phase {
            job.wait_while_progressing(store.stall_limit(), || store.progress());
        }
    }

    fn gather(
        &mut self,
        store: &Store,
        layout: &Layout,
        exchange: &mut impl Exchange,
        publish: &mut dyn FnMut(Vec<Staged>) -> Publishing,
    ) -> Result<(), CkptError> {
        if self.staged.is_none() && self.staging.wait(self.watch.period()) {
            self.staged = Some(self.staging.take().and_then(|staged| staged));
        }
        let record = match &self.staged {
            Some(staged) => staged_record(store.rank(), staged.as_ref().ok()),
            None => record(PENDING, store.rank(), [store.progress()]),
        };
        let gathered = exchange.gather(&record).map_err(|e| CkptError::Exchange {
            message: e.to_string(),
        })?;
        if store.rank() > 0 {
            self.phase = Phase::Following;
            return Ok(());
        }
        self.phase = match self.read(store, layout, &gathered) {
            Ok(Gathered::All(all)) => Phase::Publishing(publish(all)),
            Ok(Gathered::Staging(progress)) => match self.stalled(&progress) {
                Some(error) => Phase::Publishing(Job::ended(Err(error))),
                None => Phase::Gathering,
            },
            Err(error) => Phase::Publishing(Job::ended(Err(error))),
        };
        Ok(())
    }

    /// The error of the first rank without progress.
    fn stalled(&mut self, progress: &[(usize, u64)]) -> Option<CkptError> {
        self.watch.tick();
        let stalled = |(rank, bytes): &(usize, u64)| {
            self.watch
                .is_stalled(*rank, *bytes)
                .then_some((*rank, *bytes))
        };
        let stalled: Vec<_> = progress.iter().filter_map(stalled).collect();
        let (rank, bytes) = *stalled.first()?;
        Some(stall_error(
            rank as u64,
            &format!("has written nothing for step {}", self.step),
            &self.watch,
            bytes,
        ))
    }

    fn agree(
        &mut self,
        store: &Store,
        layout: &Layout,
        exchange: &mut impl Exchange,
        publish: &mut dyn FnMut(Vec<Staged>) -> Publishing,
    ) -> Result<PublishedCheckpoint, CkptError> {
        loop {
            match &self.phase {
                Phase::Staging => self.gather(store, layout, exchange, publish)?,
                Phase::Gathering => {
                    broadcast(&Message::<PublishedCheckpoint>::Gather, 0, exchange)?;
                    self.gather(store, layout, exchange, publish)?;
                }
                Phase::Publishing(job) if job.wait(self.watch.period()) => {
                    let outcome = job.take().and_then(|outcome| outcome);
                    return self.announce(store, outcome, exchange);
                }
                Phase::Publishing(_) if self.watch.tick().is_stalled(0, store.progress()) => {
                    let what = format!(
                        "makes no progress in publishing step {}, which may still be published,",
                        self.step
                    );
                    let error = stall_error(0, &what, &self.watch, store.progress());
                    return self.announce(store, Err(error), exchange);
                }
                Phase::Publishing(_) => drop(broadcast(
                    &Message::<PublishedCheckpoint>::Pending,
                    0,
                    exchange,
                )?),
                Phase::Following => match broadcast(&Message::Pending, 0, exchange)? {
                    Message::Pending => {}
                    Message::Gather => self.gather(store, layout, exchange, publish)?,
                    Message::Done(published) => return Ok(published),
                    Message::Error(message) => return Err(rank_error(message)),
                    Message::Failed(rank) => return Err(self.failure_of(rank, store, exchange)?),
                },
            }
        }
    }

    /// Rank 0: broadcasts the outcome, and then removes old checkpoints.
    fn announce(
        &self,
        store: &Store,
        outcome: Result<Publication, CkptError>,
        exchange: &mut impl Exchange,
    ) -> Result<PublishedCheckpoint, CkptError> {
        match outcome {
            Ok(publication) => {
                let checkpoint = publication.checkpoint.clone().fit();
                let sent = broadcast(&Message::Done(checkpoint.clone()), 0, exchange);
                sent.map_err(|error| CkptError::Exchange {
                    message: format!(
                        "{}; {} is published all the same",
                        error.into_exchange_message(),
                        checkpoint.name
                    ),
                })?;
                store.prune(&publication);
                Ok(checkpoint)
            }
            Err(CkptError::Rank { rank, message }) if message.is_empty() => {
                broadcast(&Message::<PublishedCheckpoint>::Failed(rank), 0, exchange)?;
                Err(self.failure_of(rank, store, exchange)?)
            }
            Err(error) => {
                broadcast(&Message::<PublishedCheckpoint>::error(&error), 0, exchange)?;
                Err(error)
            }
        }
    }

    /// The error of `rank`, which could not stage and broadcasts it. Removes this rank's files: the
    /// save can never be whole.
    fn failure_of(
        &self,
        rank: u64,
        store: &Store,
        exchange: &mut impl Exchange,
    ) -> Result<CkptError, CkptError> {
        let own = self
            .staged
            .as_ref()
            .and_then(|staged| staged.as_ref().err())
            .filter(|_| store.rank() == rank);
        let error = failure_of(rank, own, exchange);
        if let Some(Ok(file)) = &self.staged {
            store.discard(file);
        }
        error
    }

    /// Adds to `error` where this rank's staged file is. Waits for threads of this rank while they
    /// make progress.
    fn keep(&mut self, store: &Store, error: CkptError) -> CkptError {
        self.wait_for_threads(store);
        let staged = self.staged.as_ref().and_then(|staged| staged.as_ref().ok());
        match staged.and_then(|file| store.kept(file)) {
            Some(path) => {
                // Only a save that failed needs its names to outlast a power failure; if this
                // fails, they may.
                let _ = store.staging.sync();
                CkptError::Kept {
                    error: Box::new(error),
                    path,
                }
            }
            None => error,
        }
    }

    /// Reads the gathered records, on rank 0. A rank that failed is [`CkptError::Rank`] without a
    /// message.
    fn read(&self, store: &Store, layout: &Layout, gathered: &[u8]) -> Result<Gathered, CkptError> {
        let records = records(gathered, Some(layout.world_size()))?;
        let pending = records
            .iter()
            .enumerate()
            .filter(|(_, record)| word(record, 0) == PENDING);
        let pending: Vec<_> = pending
            .map(|(rank, record)| (rank, word(record, 2)))
            .collect();
        if !pending.is_empty() {
            return Ok(Gathered::Staging(pending));
        }
        let own = self.staged.as_ref().and_then(|staged| staged.as_ref().ok());
        let read = |(rank, record): (usize, &[u8; RECORD_BYTES])| match (rank as u64, own) {
            (0, Some(file)) => Ok(file.clone()),
            (0, None) => Err(CkptError::Rank {
                rank: 0,
                message: String::new(),
            }),
            (rank, own) => {
                let (file, crc64) = from_record(record, rank, store.run_checksum())?;
                let Some(own) = own else { return Ok(file) };
                let pieces = shard_pieces(layout, rank)?;
                if content_checksum(&own.states, &pieces) != crc64 {
                    let why =
                        format!("rank {rank} saved other states, or another layout, than rank 0");
                    return Err(CkptError::Mismatch { why });
                }
                Ok(StagedFile {
                    states: own.states.clone(),
                    pieces,
                    ..file
                })
            }
        };
        Ok(Gathered::All(
            records.iter().enumerate().map(read).collect(),
        ))
    }
}

impl Store {
    /// Saves as [`Store::save`], with the file that `stage` stages, on another thread: while it
    /// runs, this thread tells the other ranks of its progress. `stage` returns what
    /// [`Store::stage`] or [`Store::stage_streamed`] returns, or the error that kept it from
    /// staging, which all ranks receive.
    ///
    /// # Errors
    /// As [`Store::save`].
    pub fn save_with(
        &self,
        meta: &SaveMeta,
        layout: &Layout,
        stage: impl FnOnce() -> Result<StagedFile, CkptError> + Send,
        exchange: &mut impl Exchange,
    ) -> Result<PublishedCheckpoint, CkptError> {
        let published = std::thread::scope(|scope| {
            let stage = move || self.describe(meta, layout, stage());
            let mut save = Save::new(self, meta.step, Job::start_scoped(scope, stage));
            let publish =
                &mut |all| Job::start_scoped(scope, move || self.publish_files(meta, layout, all));
            save.complete(self, layout, exchange, publish)
        });
        self.end_numbered_save();
        published
    }

    /// The second half of [`Store::save`], for a rank that has staged its file. A rank that could
    /// not stage passes its error as `staged`, so that all ranks receive it and no rank waits.
    /// Prefer [`Store::save_with`]: the other ranks' waits for this call must stay within their
    /// communicator's limit.
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
        self.save_with(meta, layout, || staged, exchange)
    }
}

/// The error that `rank` broadcasts after [`Message::Failed`]; `own` is this rank's if it is that
/// rank.
pub(crate) fn failure_of(
    rank: u64,
    own: Option<&CkptError>,
    exchange: &mut impl Exchange,
) -> Result<CkptError, CkptError> {
    let own = own.map_or_else(
        || Message::<()>::Error("no error message".into()),
        Message::error,
    );
    match broadcast(&own, rank, exchange)? {
        Message::Error(message) => Ok(CkptError::Rank { rank, message }),
        _ => Err(CkptError::BadFrame {
            rank,
            why: "it is no error".into(),
        }),
    }
}

/// The error of a rank that makes no progress.
pub(crate) fn stall_error(rank: u64, what: &str, watch: &Watch, progress: u64) -> CkptError {
    let seconds = watch.limit().as_secs_f64();
    let message = format!(
        "{what} for {seconds} s ({progress} bytes and files in this run so far): its file system does not answer; \
         check the disk of that machine"
    );
    CkptError::Rank { rank, message }
}

/// The first word of a record.
const STAGED: u64 = u64::from_le_bytes(*b"zckpt ok");
pub(crate) const FAILED: u64 = u64::from_le_bytes(*b"zckpt no");
pub(crate) const PENDING: u64 = u64::from_le_bytes(*b"zckpt ..");
pub(crate) const OPENED: u64 = u64::from_le_bytes(*b"zckpt op");

/// Checksum of the states and pieces of a file.
fn content_checksum(states: &[StateSpec], pieces: &[Piece]) -> u64 {
    checksum(&serde_json::to_vec(&(states, pieces)).unwrap_or_default())
}

/// Encodes a record: its kind, its rank and up to six further little-endian numbers of 64 bits.
pub(crate) fn record<const N: usize>(kind: u64, rank: u64, rest: [u64; N]) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    let words = [kind, rank].into_iter().chain(rest);
    record
        .as_chunks_mut::<8>()
        .0
        .iter_mut()
        .zip(words)
        .for_each(|(to, word)| *to = word.to_le_bytes());
    record
}

/// Number `index` of a record.
pub(crate) fn word(record: &[u8; RECORD_BYTES], index: usize) -> u64 {
    record
        .as_chunks::<8>()
        .0
        .get(index)
        .map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Splits what rank 0 has gathered. `world_size` is the number of ranks, if it is known.
pub(crate) fn records(
    gathered: &[u8],
    world_size: Option<u64>,
) -> Result<&[[u8; RECORD_BYTES]], CkptError> {
    let (records, rest) = gathered.as_chunks::<RECORD_BYTES>();
    if world_size.is_some_and(|ranks| ranks != records.len() as u64) || !rest.is_empty() {
        let expected = world_size
            .unwrap_or_default()
            .saturating_mul(RECORD_BYTES as u64);
        return Err(CkptError::argument(
            "bytes of the gathered records",
            expected,
            gathered.len(),
        ));
    }
    for (rank, record) in records.iter().enumerate() {
        let bad = |why: String| CkptError::BadFrame {
            rank: rank as u64,
            why,
        };
        if ![STAGED, FAILED, PENDING, OPENED].contains(&word(record, 0)) {
            return Err(bad("it is no record of a save".into()));
        }
        if word(record, 1) != rank as u64 {
            return Err(bad(format!("it names rank {}", word(record, 1))));
        }
    }
    Ok(records)
}

/// The record of a rank whose staging has ended; `None` if it failed.
fn staged_record(rank: u64, staged: Option<&StagedFile>) -> [u8; RECORD_BYTES] {
    let Some(file) = staged else {
        return record(FAILED, rank, []);
    };
    let content = content_checksum(&file.states, &file.pieces);
    let SaveId {
        session, number, ..
    } = file.save;
    record(
        STAGED,
        rank,
        [
            file.step,
            session,
            number.into(),
            file.bytes,
            file.front_crc64,
            content,
        ],
    )
}

/// Decodes the record of `rank`: its file, without states and pieces, and their checksum.
fn from_record(
    record: &[u8; RECORD_BYTES],
    rank: u64,
    run: u32,
) -> Result<(StagedFile, u64), CkptError> {
    if word(record, 0) == FAILED {
        return Err(CkptError::Rank {
            rank,
            message: String::new(),
        });
    }
    let [step, session, number, bytes, front_crc64, content] =
        [2, 3, 4, 5, 6, 7].map(|index| word(record, index));
    let number = u32::try_from(number).map_err(|e| CkptError::BadFrame {
        rank,
        why: e.to_string(),
    })?;
    let save = SaveId {
        run,
        session,
        number,
    };
    let file = StagedName {
        step,
        kind: Kind::File(rank),
        save,
    }
    .to_string();
    let file = StagedFile {
        rank,
        step,
        file,
        bytes,
        front_crc64,
        states: Vec::new(),
        pieces: Vec::new(),
        save,
    };
    Ok((file, content))
}

/// Parses an error that rank 0 forwarded: "rank 2: no space" becomes an error of rank 2.
pub(crate) fn rank_error(message: String) -> CkptError {
    let rank = message
        .strip_prefix("rank ")
        .and_then(|m| m.split_once(": "));
    match rank.and_then(|(r, rest)| Some((r.parse().ok()?, rest))) {
        Some((rank, rest)) => CkptError::Rank {
            rank,
            message: rest.into(),
        },
        None => CkptError::Rank { rank: 0, message },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateDtype;
    use crate::exchange::shorten;
    use crate::format::catalog::step_name;

    #[test]
    fn record_round_trips() {
        let save = SaveId {
            run: 9,
            session: 0xdead_beef,
            number: u32::MAX,
        };
        let staged = StagedFile {
            rank: 3,
            step: u64::MAX,
            file: StagedName {
                step: u64::MAX,
                kind: Kind::File(3),
                save,
            }
            .to_string(),
            bytes: 1,
            front_crc64: 7,
            states: vec![StateSpec {
                name: "master".into(),
                dtype: StateDtype::F32,
            }],
            pieces: vec![Piece(u64::MAX, u64::MAX - 1, u64::MAX); 3],
            save,
        };
        let record = staged_record(3, Some(&staged));
        let (read, content) = from_record(&record, 3, 9).unwrap();
        assert_eq!(content, content_checksum(&staged.states, &staged.pieces));
        assert_eq!(
            read,
            StagedFile {
                states: vec![],
                pieces: vec![],
                ..staged
            }
        );
        assert!(matches!(
            records(&record, None),
            Err(CkptError::BadFrame { rank: 0, .. })
        ));
        assert!(matches!(
            records(&[0; RECORD_BYTES], None),
            Err(CkptError::BadFrame { .. })
        ));
        assert!(matches!(
            records(&record[1..], None),
            Err(CkptError::BadArgument { .. })
        ));
        let failed = from_record(&staged_record(3, None), 3, 9);
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
        assert_eq!(
            rank_error("rank 2: no space: a: b".into()).to_string(),
            "rank 2: no space: a: b"
        );
        assert_eq!(
            rank_error("cannot sync /x".into()).to_string(),
            "rank 0: cannot sync /x"
        );
        assert_eq!(
            rank_error("rank two: odd".into()).to_string(),
            "rank 0: rank two: odd"
        );
    }
}
