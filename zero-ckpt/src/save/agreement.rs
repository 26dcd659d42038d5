//! A save on all ranks: every rank's record goes to rank 0, which publishes; see
//! [`agree`](crate::agree).
//!
//! A record has a fixed length: rank 0 knows the pieces and states of every rank from the layout
//! and from its own file, and a record has their checksum.
//!
//! Why records and not descriptions: a save sends 64 bytes a rank to rank 0 and 4,096 bytes back.
//! Gathers of whole descriptions took 51 MB each at 4,096 ranks and 100 units.

use zero_shard::Layout;

use super::records::{Publication, PublishedCheckpoint, StagedFile};
use crate::agree::{
    Answer, FAILED, PENDING, READY, Record, fail, failed, failed_rank, follow, gather, number,
    pend, ready, record, stall_error,
};
use crate::format::file_layout::{checksum, shard_pieces};
use crate::format::staged_name::{EntryKind, SaveId};
use crate::job::{Job, Watch};
use crate::messages::{Exchange, Message, broadcast};
use crate::{CkptError, SaveMeta, StateSpec, Store, UnitRange};

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
            Some(Ok(file)) => staged_record(file),
            Some(Err(_)) => record(FAILED, store.rank(), []),
            None => record(PENDING, store.rank(), [store.progress()]),
        };

        let gathered = gather(&record, exchange)?;
        if store.rank() > 0 {
            self.phase = Phase::Following;
            return Ok(());
        }

        let what = format!("has written nothing for step {}", self.step);
        let world_size = Some(layout.world_size());
        self.phase = match ready(&gathered, world_size, &mut self.watch, &what) {
            Ok(Some(records)) => Phase::Publishing(publish(self.read(store, layout, records))),
            Ok(None) => Phase::Gathering,
            Err(error) => Phase::Publishing(Job::ended(Err(error))),
        };

        Ok(())
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
                    broadcast(&Message::<()>::Gather, 0, exchange)?;
                    self.gather(store, layout, exchange, publish)?;
                }
                Phase::Publishing(job) => {
                    let outcome = match pend(job, &mut self.watch, || store.progress(), exchange)? {
                        true => job.take().and_then(|outcome| outcome),
                        false => Err(self.publication_stalled(store)),
                    };
                    return self.announce(store, outcome, exchange);
                }
                Phase::Following => match follow(self.failure(), exchange)? {
                    Answer::Gather => self.gather(store, layout, exchange, publish)?,
                    Answer::Done(published) => return Ok(published),
                    Answer::Failed(error) => {
                        self.discard(store);
                        return Err(error);
                    }
                },
            }
        }
    }

    fn publication_stalled(&self, store: &Store) -> CkptError {
        let what = format!(
            "makes no progress in publishing step {}, which may still be published,",
            self.step
        );
        stall_error(0, &what, &self.watch, store.progress())
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
            Err(error) => {
                let is_unstaged = failed_rank(&error).is_some();
                let error = fail(error, self.failure(), exchange);
                if is_unstaged {
                    self.discard(store);
                }
                Err(error)
            }
        }
    }

    /// The staged file of this rank.
    fn file(&self) -> Option<&StagedFile> {
        self.staged.as_ref().and_then(|staged| staged.as_ref().ok())
    }

    /// The error that kept this rank from staging.
    fn failure(&self) -> Option<&CkptError> {
        self.staged
            .as_ref()
            .and_then(|staged| staged.as_ref().err())
    }

    /// Removes this rank's files, because a rank could not stage: the save can never be whole.
    fn discard(&self, store: &Store) {
        if let Some(file) = self.file() {
            store.discard(file);
        }
    }

    /// Adds to `error` where this rank's staged file is. Waits for threads of this rank while they
    /// make progress.
    fn keep(&mut self, store: &Store, error: CkptError) -> CkptError {
        self.wait_for_threads(store);
        match self.file().and_then(|file| store.kept(file)) {
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

    /// The staged files of all ranks, on rank 0. A rank that could not stage is [`failed`].
    fn read(&self, store: &Store, layout: &Layout, records: &[Record]) -> Vec<Staged> {
        let own = self.file();
        let read = |(rank, record): (usize, &Record)| match (rank as u64, own) {
            (0, Some(file)) => Ok(file.clone()),
            (0, None) => Err(failed(0)),
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

        records.iter().enumerate().map(read).collect()
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
}

/// Checksum of the states and pieces of a file.
fn content_checksum(states: &[StateSpec], pieces: &[UnitRange]) -> u64 {
    checksum(&serde_json::to_vec(&(states, pieces)).unwrap_or_default())
}

/// The record of a rank that has staged `file`.
fn staged_record(file: &StagedFile) -> Record {
    let content = content_checksum(&file.states, &file.pieces);
    let rest = [
        file.step,
        file.save.session,
        file.save.number.into(),
        file.bytes,
        file.front_crc64,
        content,
    ];
    record(READY, file.rank, rest)
}

/// Decodes the record of `rank`: its file, without states and pieces, and their checksum.
fn from_record(record: &Record, rank: u64, run: u32) -> Result<(StagedFile, u64), CkptError> {
    if number(record, 0) == FAILED {
        return Err(failed(rank));
    }
    let [step, session, number_of_save, bytes, front_crc64, content] =
        [2, 3, 4, 5, 6, 7].map(|index| number(record, index));
    let number = u32::try_from(number_of_save).map_err(|e| CkptError::BadFrame {
        rank,
        why: e.to_string(),
    })?;

    let save = SaveId {
        step,
        run,
        session,
        number,
    };

    let file = StagedFile {
        rank,
        step,
        file: save.name(EntryKind::File(rank)),
        bytes,
        front_crc64,
        states: Vec::new(),
        pieces: Vec::new(),
        save,
    };

    Ok((file, content))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateDtype;
    use crate::format::names::step_name;
    use crate::messages::shorten;

    #[test]
    fn record_round_trips() {
        let save = SaveId {
            step: u64::MAX,
            run: 9,
            session: 0xdead_beef,
            number: u32::MAX,
        };

        let staged = StagedFile {
            rank: 3,
            step: u64::MAX,
            file: save.name(EntryKind::File(3)),
            bytes: 1,
            front_crc64: 7,
            states: vec![StateSpec::new("master", StateDtype::F32)],
            pieces: vec![UnitRange(u64::MAX, u64::MAX - 1, u64::MAX); 3],
            save,
        };

        let read_back = staged_record(&staged);
        let (read, content) = from_record(&read_back, 3, 9).unwrap();
        assert_eq!(content, content_checksum(&staged.states, &staged.pieces));
        assert_eq!(
            read,
            StagedFile {
                states: vec![],
                pieces: vec![],
                ..staged
            }
        );

        let failure = from_record(&record(FAILED, 3, []), 3, 9).unwrap_err();
        assert_eq!(failed_rank(&failure), Some(3));
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
}
