//! Opening the directory on all ranks, before training: all must see the same one.
//!
//! ```text
//! rank 0         opens, writes DIR/.staging/shared.<random>, broadcasts that name and its session
//! other ranks    open, look for that file
//! all ranks      gather: "opened", "failed", or "pending"
//! rank 0         broadcasts "gather again", or that a rank failed, which broadcasts its error
//! rank 0         removes incomplete saves, and broadcasts "pending" meanwhile; broadcasts the outcome
//! ```

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::agreement::{FAILED, OPENED, PENDING, rank_error, record, records, stall_error, word};
use super::job::{Job, Watch};
use crate::exchange::{Message, broadcast, shorten};
use crate::format::catalog::random;
use crate::{CkptError, Exchange, Store, StoreOptions};

/// Prefix of the file that rank 0 writes for the others to see.
pub(crate) const SHARED: &str = "shared.";

/// Attempts to see rank 0's file; a network file system may show it late.
const LOOKS: u32 = 5;
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Rank 0's open store.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Opened {
    /// The file that all ranks must see.
    file: String,
    session: u64,
    run: Option<String>,
    /// Rank 0's directory, for error messages.
    dir: String,
}

/// The error of a rank other than 0.
#[derive(Serialize, Deserialize)]
enum Refusal {
    NotShared(String),
    Failed(String),
}

impl Store {
    /// [`Store::create`] on all ranks together, and the check that all of them see one directory;
    /// all ranks call it. `check` is called with the open store, such as for [`Store::check_runs`]
    /// and [`Store::check_model`].
    ///
    /// The stores of all ranks then have one session and the run of rank 0, which
    /// [`assemble`](crate::assemble) needs to tell the files of a save. Every rank sends messages
    /// while it opens, so that the time limit of the communicator need not cover that;
    /// [`StoreOptions::stall_limit`] does.
    ///
    /// Then rank 0 removes the staged files of saves of this run, and of those that it resumed,
    /// that no checkpoint can be made of. [`Store::take_notices`] returns what else is staged:
    /// complete saves, and those of other runs.
    ///
    /// # Errors
    /// All ranks return the error of the first rank that failed, as [`CkptError::Rank`], or
    /// [`CkptError::NotShared`]; or a failed exchange.
    pub fn create_on_ranks(
        path: impl AsRef<Path>,
        rank: u64,
        options: StoreOptions,
        exchange: &mut impl Exchange,
        check: impl FnOnce(&Store) -> Result<(), CkptError> + Send,
    ) -> Result<Self, CkptError> {
        let path = path.as_ref();
        let limit = options.stall_limit;
        let open = move || {
            let store = Self::create(path, rank, options)?;
            check(&store).map(|()| store)
        };
        match rank {
            0 => lead(limit, open, exchange),
            rank => follow(rank, limit, open, exchange),
        }
    }
}

/// Rank 0's part.
fn lead(
    limit: Duration,
    open: impl FnOnce() -> Result<Store, CkptError> + Send,
    exchange: &mut impl Exchange,
) -> Result<Store, CkptError> {
    let opened = std::thread::scope(|scope| {
        let job = Job::start_scoped(scope, || announced(open()?));
        let mut watch = Watch::new(limit);
        while !job.wait(watch.period()) {
            if watch.tick().is_stalled(0, 0) {
                let error = not_opened(0, &watch);
                broadcast(&Message::<Opened>::error(&error), 0, exchange)?;
                return Err(error);
            }
            broadcast(&Message::<Opened>::Pending, 0, exchange)?;
        }
        let opened = job.take().and_then(|opened| opened);
        if let Err(error) = &opened {
            broadcast(&Message::<Opened>::error(error), 0, exchange)?;
        }
        opened
    });
    let (store, opened) = opened?;
    let agreed = broadcast(&Message::Done(opened.clone()), 0, exchange)
        .and_then(|_| lead_agreement(&mut Watch::new(limit), exchange));
    let _ = store.staging.remove_file(&opened.file);
    agreed?;
    clean(&store, opened, &mut Watch::new(limit), exchange)?;
    Ok(store)
}

/// Removes incomplete saves, and broadcasts "pending" while that makes progress and then the
/// outcome. The first save may need their space.
fn clean(
    store: &Store,
    opened: Opened,
    watch: &mut Watch,
    exchange: &mut impl Exchange,
) -> Result<(), CkptError> {
    std::thread::scope(|scope| {
        let find = Job::start_scoped(scope, || store.remove_incomplete_saves());
        while !find.wait(watch.period()) || !store.wait_for_removals(watch.period()) {
            if watch.tick().is_stalled(0, store.progress()) {
                break;
            }
            broadcast(&Message::<Opened>::Pending, 0, exchange)?;
        }
        broadcast(&Message::Done(opened), 0, exchange).map(drop)
    })
}

/// Writes the file that the others look for.
fn announced(store: Store) -> Result<(Store, Opened), CkptError> {
    let file = format!("{SHARED}{}", random());
    store.staging.write_new(&file, b"")?;
    let dir = absolute(store.path());
    let opened = Opened {
        file,
        session: store.session,
        run: store.options.run.clone(),
        dir,
    };
    Ok((store, opened))
}

/// Gathers until all ranks have opened the directory; broadcasts the error if one could not.
fn lead_agreement(watch: &mut Watch, exchange: &mut impl Exchange) -> Result<(), CkptError> {
    loop {
        let gathered = exchange
            .gather(&record(OPENED, 0, []))
            .map_err(exchange_error)?;
        let records = match records(&gathered, None) {
            Ok(records) => records,
            Err(error) => {
                broadcast(&Message::<Opened>::error(&error), 0, exchange)?;
                return Err(error);
            }
        };
        let pending: Vec<usize> = (0..records.len())
            .filter(|rank| word(&records[*rank], 0) == PENDING)
            .collect();
        let failed = records.iter().position(|record| word(record, 0) == FAILED);
        watch.tick();
        let stalled: Vec<usize> = pending
            .iter()
            .copied()
            .filter(|rank| watch.is_stalled(*rank, 0))
            .collect();
        if let Some(&rank) = stalled.first() {
            let error = not_opened(rank as u64, watch);
            broadcast(&Message::<Opened>::error(&error), 0, exchange)?;
            return Err(error);
        }
        match (pending.is_empty(), failed) {
            (false, _) => drop(broadcast(&Message::<Opened>::Gather, 0, exchange)?),
            (true, None) => return Ok(()),
            (true, Some(rank)) => {
                broadcast(&Message::<Opened>::Failed(rank as u64), 0, exchange)?;
                return Err(refusal_of(rank as u64, None, exchange)?);
            }
        }
    }
}

/// The part of another rank.
fn follow(
    rank: u64,
    limit: Duration,
    open: impl FnOnce() -> Result<Store, CkptError> + Send,
    exchange: &mut impl Exchange,
) -> Result<Store, CkptError> {
    let of_rank_0 = loop {
        match broadcast(&Message::<Opened>::Pending, 0, exchange)? {
            Message::Pending => {}
            Message::Done(opened) => break opened,
            Message::Error(message) => return Err(rank_error(message)),
            Message::Failed(_) | Message::Gather => return Err(unexpected()),
        }
    };
    std::thread::scope(|scope| {
        let job = Job::start_scoped(scope, || {
            let mut store = open()?;
            look_for(&store, rank, &of_rank_0)?;
            store.join(of_rank_0.session, of_rank_0.run.clone());
            Ok(store)
        });
        let period = Watch::new(limit).period();
        let mut result: Option<Result<Store, CkptError>> = None;
        loop {
            if result.is_none() && job.wait(period) {
                result = Some(job.take().and_then(|store| store));
            }
            let record = match &result {
                Some(Ok(_)) => record(OPENED, rank, []),
                Some(Err(_)) => record(FAILED, rank, []),
                None => record(PENDING, rank, []),
            };
            exchange.gather(&record).map_err(exchange_error)?;
            let answer = loop {
                match broadcast(&Message::<Opened>::Pending, 0, exchange)? {
                    Message::Pending => {}
                    answer => break answer,
                }
            };
            match answer {
                Message::Gather => {}
                Message::Error(message) => return Err(rank_error(message)),
                Message::Failed(failed) => {
                    let own = result.and_then(Result::err).filter(|_| failed == rank);
                    return Err(refusal_of(failed, own, exchange)?);
                }
                Message::Done(_) => return result.unwrap_or_else(|| Err(unexpected())),
                Message::Pending => return Err(unexpected()),
            }
        }
    })
}

/// Checks that this rank sees the file of rank 0.
fn look_for(store: &Store, rank: u64, of_rank_0: &Opened) -> Result<(), CkptError> {
    for _ in 0..LOOKS {
        if store.staging.has(&of_rank_0.file) {
            return Ok(());
        }
        std::thread::sleep(LOOK_EVERY);
    }
    let own = absolute(store.path());
    let message = format!(
        "its checkpoint folder {own} is not the folder {} of rank 0",
        of_rank_0.dir
    );
    Err(CkptError::NotShared { rank, message })
}

/// The error of `rank`, which broadcasts it; `own` is this rank's error if it is that rank.
fn refusal_of(
    rank: u64,
    own: Option<CkptError>,
    exchange: &mut impl Exchange,
) -> Result<CkptError, CkptError> {
    let own = match own {
        Some(CkptError::NotShared { message, .. }) => Refusal::NotShared(shorten(&message)),
        Some(other) => Refusal::Failed(shorten(&other.to_string())),
        None => Refusal::Failed("no error message".into()),
    };
    match broadcast(&Message::Done(own), rank, exchange)? {
        Message::Done(Refusal::NotShared(message)) => Ok(CkptError::NotShared { rank, message }),
        Message::Done(Refusal::Failed(message)) => Ok(CkptError::Rank { rank, message }),
        _ => Err(CkptError::BadFrame {
            rank,
            why: "it is no error".into(),
        }),
    }
}

fn not_opened(rank: u64, watch: &Watch) -> CkptError {
    stall_error(rank, "has waited for its checkpoint folder", watch, 0)
}

fn exchange_error(error: impl std::fmt::Display) -> CkptError {
    CkptError::Exchange {
        message: error.to_string(),
    }
}

fn unexpected() -> CkptError {
    CkptError::BadFrame {
        rank: 0,
        why: "it does not belong to the opening of a folder".into(),
    }
}

fn absolute(path: &Path) -> String {
    let absolute = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    shorten(&absolute.display().to_string())
}
