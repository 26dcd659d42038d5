//! The agreement of all ranks on one outcome, which rank 0 decides: of a save, of the opening of a
//! directory, of the choice of a checkpoint.
//!
//! ```text
//! all ranks    gather: "ready", "failed", or "pending" with the progress so far
//! rank 0       broadcast, as long as a rank is pending: "gather again"
//!              broadcast, as long as rank 0 works: "pending"
//!              broadcast the outcome; or "rank r failed", and rank r broadcasts its error
//! ```
//!
//! So no rank waits for a message for longer than the interval of [`Watch::period`], however long
//! the disks take. Rank 0 ends the agreement if a rank makes no progress for the limit of its
//! [`Watch`]; a process that is stopped or dead is found by the communicator's own limit.

use serde::{Deserialize, Serialize};

use crate::job::{Job, Watch};
use crate::messages::{Message, RECORD_BYTES, broadcast, shorten};
use crate::{CkptError, Exchange};

/// The first number of a record.
pub(crate) const READY: u64 = u64::from_le_bytes(*b"zckpt ok");
pub(crate) const FAILED: u64 = u64::from_le_bytes(*b"zckpt no");
pub(crate) const PENDING: u64 = u64::from_le_bytes(*b"zckpt ..");

/// A rank's record: its kind, its rank and up to six further numbers. That of a pending rank has its
/// progress.
pub(crate) type Record = [u8; RECORD_BYTES];

/// The decision of rank 0.
pub(crate) enum Answer<T> {
    Done(T),
    /// A rank is pending: all ranks gather again.
    Gather,
    /// A rank failed, with this error, or with that of the exchange if its own did not arrive.
    Failed(CkptError),
}

/// Encodes a record of little-endian numbers of 64 bits.
pub(crate) fn record<const N: usize>(kind: u64, rank: u64, rest: [u64; N]) -> Record {
    let mut record = [0; RECORD_BYTES];
    let numbers = [kind, rank].into_iter().chain(rest);
    for (to, number) in record.as_chunks_mut::<8>().0.iter_mut().zip(numbers) {
        *to = number.to_le_bytes();
    }
    record
}

/// Number `index` of a record.
pub(crate) fn number(record: &Record, index: usize) -> u64 {
    record
        .as_chunks::<8>()
        .0
        .get(index)
        .map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Splits what rank 0 has gathered. `world_size` is the number of ranks, if it is known.
pub(crate) fn records(gathered: &[u8], world_size: Option<u64>) -> Result<&[Record], CkptError> {
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
        if ![READY, FAILED, PENDING].contains(&number(record, 0)) {
            return Err(bad("it is no record of a rank".into()));
        }
        if number(record, 1) != rank as u64 {
            return Err(bad(format!("it names rank {}", number(record, 1))));
        }
    }

    Ok(records)
}

/// Gathers the records of all ranks to rank 0.
pub(crate) fn gather(record: &Record, exchange: &mut impl Exchange) -> Result<Vec<u8>, CkptError> {
    exchange.gather(record).map_err(|e| CkptError::Exchange {
        message: e.to_string(),
    })
}

/// Rank 0: the records of all ranks; `None` as long as one is pending.
///
/// # Errors
/// A malformed record, or a rank that makes no progress for the limit of `watch`; `what` is what it
/// does, for the message.
pub(crate) fn ready<'a>(
    gathered: &'a [u8],
    world_size: Option<u64>,
    watch: &mut Watch,
    what: &str,
) -> Result<Option<&'a [Record]>, CkptError> {
    let records = records(gathered, world_size)?;
    let mut is_pending = false;
    let mut stalled = None;
    watch.tick();
    for (rank, record) in records.iter().enumerate() {
        if number(record, 0) != PENDING {
            continue;
        }
        is_pending = true;
        let progress = number(record, 2);
        if watch.is_stalled(rank, progress) {
            stalled = stalled.or(Some((rank, progress)));
        }
    }
    match stalled {
        Some((rank, progress)) => Err(stall_error(rank as u64, what, watch, progress)),
        None => Ok((!is_pending).then_some(records)),
    }
}

/// Rank 0: broadcasts "pending" until `job` ends. Returns false if it makes no progress for the
/// limit of `watch`.
pub(crate) fn pend<T: Send>(
    job: &Job<T>,
    watch: &mut Watch,
    progress: impl Fn() -> u64,
    exchange: &mut impl Exchange,
) -> Result<bool, CkptError> {
    while !job.wait(watch.period()) {
        if watch.tick().is_stalled(0, progress()) {
            return Ok(false);
        }
        broadcast(&Message::<()>::Pending, 0, exchange)?;
    }
    Ok(true)
}

/// Rank 0: broadcasts `error` and returns it, or the error of the exchange. For that of [`failed`],
/// the failed rank broadcasts its own error, which is `own` if it is rank 0.
pub(crate) fn fail(
    error: CkptError,
    own: Option<&CkptError>,
    exchange: &mut impl Exchange,
) -> CkptError {
    let failed = failed_rank(&error);
    let message = match failed {
        Some(rank) => Message::<()>::Failed(rank),
        None => Message::error(&error),
    };
    match (broadcast(&message, 0, exchange), failed) {
        (Err(exchange_error), _) => exchange_error,
        (Ok(_), Some(rank)) => failure_of(rank, own, exchange),
        (Ok(_), None) => error,
    }
}

/// Other ranks: receives what rank 0 has decided. `own` is the error of this rank, if it failed.
pub(crate) fn follow<T: Serialize + for<'de> Deserialize<'de>>(
    own: Option<&CkptError>,
    exchange: &mut impl Exchange,
) -> Result<Answer<T>, CkptError> {
    loop {
        match broadcast(&Message::<T>::Pending, 0, exchange)? {
            Message::Pending => {}
            Message::Done(outcome) => return Ok(Answer::Done(outcome)),
            Message::Gather => return Ok(Answer::Gather),
            Message::Failed(rank) => return Ok(Answer::Failed(failure_of(rank, own, exchange))),
            Message::Error(message) => return Err(rank_error(message)),
            Message::NotShared(_) => return Err(unexpected()),
        }
    }
}

/// The error of a rank whose own error is not known yet.
pub(crate) fn failed(rank: u64) -> CkptError {
    CkptError::Rank {
        rank,
        message: String::new(),
    }
}

/// The rank of [`failed`].
pub(crate) fn failed_rank(error: &CkptError) -> Option<u64> {
    match error {
        CkptError::Rank { rank, message } if message.is_empty() => Some(*rank),
        _ => None,
    }
}

/// The error that `rank` broadcasts after [`Message::Failed`], or that of the exchange; `own` is
/// this rank's.
fn failure_of(rank: u64, own: Option<&CkptError>, exchange: &mut impl Exchange) -> CkptError {
    let own = match own {
        Some(CkptError::NotShared { message, .. }) => Message::NotShared(shorten(message)),
        Some(error) => Message::<()>::error(error),
        None => Message::Error("no error message".into()),
    };
    let sent = broadcast(&own, rank, exchange);
    if sent.is_ok() {
        // A rank that has the error ends, which may abort the exchange: no rank ends before this
        // second message, and so before all have the first.
        let _ended = broadcast(&Message::<()>::Pending, rank, exchange);
    }
    match sent {
        Ok(Message::Error(message)) => CkptError::Rank { rank, message },
        Ok(Message::NotShared(message)) => CkptError::NotShared { rank, message },
        Ok(_) => CkptError::BadFrame {
            rank,
            why: "it is not an error".into(),
        },
        Err(error) => error,
    }
}

/// The error of a message that the agreement does not have at this point.
pub(crate) fn unexpected() -> CkptError {
    CkptError::BadFrame {
        rank: 0,
        why: "it is not the next message of the agreement".into(),
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

/// Parses an error that rank 0 forwarded: "rank 2: no space" becomes an error of rank 2.
fn rank_error(message: String) -> CkptError {
    let named = message
        .strip_prefix("rank ")
        .and_then(|rest| rest.split_once(": "))
        .and_then(|(rank, rest)| Some((rank.parse().ok()?, rest.to_owned())));
    let (rank, message) = named.unwrap_or((0, message));
    CkptError::Rank { rank, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_records_are_named() {
        let third = record(READY, 3, [7]);
        assert_eq!(number(&third, 2), 7);
        let bad_frame = |gathered: &[u8]| match records(gathered, None) {
            Err(CkptError::BadFrame { rank, .. }) => rank,
            other => panic!("{other:?}"),
        };
        assert_eq!(bad_frame(&third), 0);
        assert_eq!(bad_frame(&[0; RECORD_BYTES]), 0);
        for (gathered, ranks) in [(&third[1..], None), (&record(READY, 0, []), Some(2))] {
            let error = records(gathered, ranks).unwrap_err();
            assert!(matches!(error, CkptError::BadArgument { .. }), "{error}");
        }
    }

    /// Counts the messages, and fails from number `fails_at` on.
    struct Counted {
        sent: usize,
        fails_at: usize,
    }

    impl Exchange for Counted {
        type Error = String;

        fn gather(&mut self, record: &[u8]) -> Result<Vec<u8>, String> {
            Ok(record.to_vec())
        }

        fn broadcast(&mut self, _: &mut [u8], _: u64) -> Result<(), String> {
            self.sent += 1;
            match self.sent < self.fails_at {
                true => Ok(()),
                false => Err("the network is gone".to_owned()),
            }
        }
    }

    fn counted(fails_at: usize) -> Counted {
        Counted { sent: 0, fails_at }
    }

    #[test]
    fn work_without_progress_is_announced_until_the_limit() {
        let mut exchange = counted(usize::MAX);
        let mut watch = Watch::new(std::time::Duration::from_millis(40));
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let job = Job::start(move || wait.recv().is_ok());

        assert!(!pend(&job, &mut watch, || 7, &mut exchange).unwrap());

        // A quarter of the limit is the interval; the first one begins the count.
        assert!((2..=5).contains(&exchange.sent), "{}", exchange.sent);
        drop(end);
        while !job.has_ended() {
            std::thread::yield_now();
        }
        assert!(pend(&job, &mut watch, || 7, &mut exchange).unwrap());
    }

    /// An error is one message; that of a failed rank is two, and one behind which all have it.
    #[test]
    fn failure_is_broadcast() {
        let mut exchange = counted(usize::MAX);
        let own = CkptError::Panicked;

        let error = fail(CkptError::NothingInFlight, None, &mut exchange);
        assert!(matches!(error, CkptError::NothingInFlight), "{error}");
        assert_eq!(exchange.sent, 1);

        let error = fail(failed(0), Some(&own), &mut exchange);
        assert_eq!(error.to_string(), format!("rank 0: {own}"));
        assert_eq!(exchange.sent, 4);
        // Ranks that have ended do not hide the error.
        let error = fail(failed(0), Some(&own), &mut counted(3));
        assert_eq!(error.to_string(), format!("rank 0: {own}"));
    }

    #[test]
    fn failure_without_an_exchange_is_that_of_the_exchange() {
        for fails_at in [1, 2] {
            let error = fail(failed(0), None, &mut counted(fails_at));
            assert!(error.to_string().contains("the network is gone"), "{error}");
        }
        let error = fail(CkptError::Panicked, None, &mut counted(1));
        assert!(error.to_string().contains("the network is gone"), "{error}");
    }

    #[test]
    fn forwarded_error_keeps_its_rank() {
        for (message, expected) in [
            ("rank 2: no space: a: b", "rank 2: no space: a: b"),
            ("cannot sync /x", "rank 0: cannot sync /x"),
            ("rank two: odd", "rank 0: rank two: odd"),
        ] {
            assert_eq!(rank_error(message.into()).to_string(), expected);
        }
    }
}
